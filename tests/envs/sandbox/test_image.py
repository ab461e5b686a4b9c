"""The image of the boxes, and the seccomp profile that they run under."""

import errno
import io
import json
import os
import platform
import py_compile
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import cache_from_source
from marshal import loads
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import pytest

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.sandbox import bytecode, dockerfile, host_image, image, image_packages, seccomp
from toolgym.envs.sandbox.boot import IN_IMAGE
from toolgym.envs.sandbox.image import ImageSpec, ensure_image, tag
from toolgym.envs.sandbox.results import SandboxFailure

PROBES = Path(__file__).with_name("probes")
OURS = {"toolgym.test": "image-helper"}
SMALL = ImageSpec(packages=(), tools=("bash", "sh", "ls", "find", "cat", "rm", "ln", "true"))
PYTHON = ("python3", "-I", "-c")
UID = 20_000


@pytest.fixture(scope="module")
def api(docker_engine: None) -> Iterator[docker.APIClient]:
    client = docker.APIClient(version="auto", timeout=120)
    yield client
    for entry in client.images(filters={"label": "toolgym.test=image-helper"}):
        client.remove_image(entry["Id"], force=True)
    client.close()


@pytest.fixture(scope="module")
def full(api: docker.APIClient) -> str:
    """The image with the default packages, out of this machine. It stays: other tests use it too."""
    return ensure_image(api, ImageSpec(), "host")


def run(api: docker.APIClient, name: str, command: list[str], uid: int = UID, profile: str | None = None) -> str:
    """What a command prints, in a container that is isolated as a box is. It has to end well."""
    chosen = json.dumps(seccomp.profile()) if profile is None else profile
    made = api.create_container(
        name,
        command,
        user=f"{uid}:{UID}",
        labels=OURS,
        environment={"LANG": "C.UTF-8", "HOME": "/workspace", "PATH": ":".join(host_image.PATH)},
        host_config=api.create_host_config(
            network_mode="none",
            read_only=True,
            tmpfs={"/workspace": "rw,exec,mode=0777,size=16m", "/tmp": "rw,exec,mode=1777,size=16m"},
            ipc_mode="private",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true", f"seccomp={chosen}"],
            pids_limit=128,
            mem_limit="1g",
        ),
    )["Id"]
    try:
        api.start(made)
        status = api.wait(made, timeout=120)["StatusCode"]
        out, err = (api.logs(made, stdout=not wrong, stderr=wrong).decode() for wrong in (False, True))
    finally:
        api.remove_container(made, force=True)
    assert status == 0, f"{command[:3]}: exit code {status}: {out}{err}"
    return out


def probe(api: docker.APIClient, name: str, script: str, **options: Any) -> str:
    start = list(PYTHON) if script.endswith(".py") else ["bash", "-c"]
    return run(api, name, [*start, (PROBES / script).read_text()], **options)


# --- what the image is named by ---


def test_the_tag_changes_with_everything_that_the_image_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tag(ImageSpec())
    assert tag(ImageSpec()) == first
    repository, _, digits = first.partition(":")
    assert repository == "toolgym-sandbox"
    assert len(digits) == 12
    assert set(digits) <= set("0123456789abcdef")
    others = [ImageSpec(packages=("numpy",)), ImageSpec(packages=("numpy", "sympy==1.0")), ImageSpec(tools=("bash",))]
    names = {first, tag(ImageSpec(), "dockerfile"), *(tag(spec) for spec in others)}
    for content in ("x = 1\n", "x = 2\n"):
        (tmp_path / "worker.py").write_text(content)
        monkeypatch.setattr(image, "INSIDE", tmp_path)
        names.add(tag(ImageSpec()))
    monkeypatch.undo()
    assert len(names) == 2 + len(others) + 2
    turned = ImageSpec(packages=("sympy==" + version("sympy"), "NumPy"))
    assert tag(turned) == first
    assert turned.modules == ("sympy", "numpy")


def test_a_base_image_only_matters_where_it_is_built_on() -> None:
    assert tag(ImageSpec(base="other:1"), "dockerfile") != tag(ImageSpec(), "dockerfile")
    assert tag(ImageSpec(base="other:1")) == tag(ImageSpec())


@pytest.mark.parametrize(
    "wrong",
    [{"packages": "numpy"}, {"packages": ("numpy>=1",)}, {"packages": ("--index-url=x",)}, {"tools": ("/bin/bash",)}],
)
def test_what_is_no_package_or_tool_is_refused_by_value(wrong: dict[str, Any]) -> None:
    value = next(iter(wrong.values()))
    with pytest.raises(ConfigurationError) as refused:
        ImageSpec(**wrong)
    assert repr(value if isinstance(value, str) else value[0]) in str(refused.value)


def test_an_unknown_route_is_refused_before_anything_is_done() -> None:
    with pytest.raises(ConfigurationError, match="auto, host, dockerfile, actual 'teleport'"):
        ensure_image(None, SMALL, "teleport")


# --- failures that are ours, or the user's ---


def test_an_engine_that_is_not_there_is_a_failure_of_ours() -> None:
    gone = docker.APIClient(base_url="unix:///nowhere/docker.sock", version="1.41")
    with pytest.raises(SandboxFailure) as failed:
        ensure_image(gone, SMALL, "host")
    assert failed.value.kind == "sandbox_image_failed"


class Engine:
    """Answers as an engine would that has no image: the fault is in the rest of what it says."""

    base_url, api_version = "http://engine", "1.41"

    def __init__(self, arch: str = "", answer: tuple[int, str] = (200, "")) -> None:
        self._arch, self._answer = arch, answer

    def inspect_image(self, name: str) -> None:
        raise docker.errors.ImageNotFound(name)

    def version(self) -> Mapping[str, str]:
        return {"Os": "linux", "Arch": self._arch or {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]}

    def pull(self, *args: Any, **options: Any) -> Iterator[Mapping[str, str]]:
        raise docker.errors.APIError("no such host")

    def post(self, url: str, data: io.BufferedIOBase, **options: Any) -> SimpleNamespace:
        data.read()
        return SimpleNamespace(status_code=self._answer[0], text=self._answer[1])


def test_an_engine_of_another_machine_is_told_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="let the engine pull python:3") as refused:
        ensure_image(Engine(arch="s390x"), SMALL)
    assert "no such host" in str(refused.value)


@pytest.mark.parametrize(
    "answer",
    [
        (500, '{"message": "no space left"}'),
        (200, '{"status": "..."}\n{"error": "no space left"}'),
        (502, "no space left"),
    ],
)
def test_an_import_that_fails_is_a_failure_of_ours_also_when_the_engine_says_200(answer: tuple[int, str]) -> None:
    with pytest.raises(SandboxFailure, match="no space left") as failed:
        ensure_image(Engine(answer=answer), SMALL, "host")
    assert failed.value.kind == "sandbox_image_failed"


def test_a_package_that_cannot_be_had_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ConfigurationError, match=r"toolgym-no-such-package.*Install them here"):
        ensure_image(Engine(), ImageSpec(packages=("toolgym-no-such-package",)), "host")


@pytest.mark.parametrize("fault", ["editable", "no record"])
def test_a_package_whose_files_are_not_known_is_not_taken_from_here(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path, "toolgym_test_one", "1.5")
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert image_packages.find(("toolgym-test-one",)).wanted == ("toolgym-test-one==1.5",)
    info = tmp_path / "toolgym_test_one-1.5.dist-info"
    if fault == "editable":
        (info / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable": true}}')
    else:
        (info / "RECORD").unlink()
    assert image_packages.find(("toolgym-test-one",)).missing == ("toolgym-test-one",)


# --- what the image holds ---


def archive(spec: ImageSpec = SMALL) -> bytes:
    file = io.BytesIO()
    host_image.build(file, image_packages.find(spec.packages), {"worker.py": b"import json\n"}, spec.tools)
    return file.getvalue()


def entries(data: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as file:
        return file.getmembers()


def test_the_archive_is_the_same_each_time_and_gives_no_rights_away() -> None:
    data = archive()
    assert archive() == data
    for entry in entries(data):
        assert (entry.uid, entry.gid, entry.uname) == (0, 0, "root")
        assert entry.type in (tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE)
        assert not entry.mode & 0o6000, entry.name
        assert entry.issym() or entry.name in ("tmp", "workspace") or not entry.mode & 0o022, entry.name


def test_nothing_of_the_environment_the_home_or_etc_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "toolgym-not-to-be-seen"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TOOLGYM_TEST_SECRET", secret)
    for name in (".netrc", ".config/pip/pip.conf", ".pypirc", ".docker/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(secret)
    data = archive(ImageSpec())
    assert secret.encode() not in data
    names = [entry.name for entry in entries(data)]
    assert {name for name in names if name.startswith("etc/")} == {"etc/passwd", "etc/group", "etc/nsswitch.conf"}
    assert not {"home", "root", "mnt", "srv", "work"} & {name.split("/")[0] for name in names}
    assert not [name for name in names if name.endswith((".pth", "direct_url.json", "RECORD"))]
    modules = [name for name in names if name.endswith((".py", ".pyc"))]
    sources = [name for name in modules if name.endswith(".py")]
    assert len(sources) > 1_000
    with tarfile.open(fileobj=io.BytesIO(data)) as files:
        code = b"".join(files.extractfile(name).read() for name in modules if "sysconfig" not in name)  # type: ignore[union-attr]
    for folder in (str(host_image.host_python().prefix), os.path.dirname(os.path.dirname(np_file()))):
        assert folder in ("/usr", "/usr/local") or folder.encode() not in code


def np_file() -> str:
    import numpy  # noqa: PLC0415 - only its place is asked for

    return str(numpy.__file__)


@pytest.mark.docker
def test_every_slot_has_two_users(api: docker.APIClient, full: str) -> None:
    lines = run(api, full, ["cat", "/etc/passwd", "/etc/group"]).splitlines()
    assert "run7:x:20014:20000::/workspace:/bin/bash" in lines
    assert "session511:x:21023:20000::/workspace:/bin/bash" in lines
    assert "box:x:20000:" in lines
    assert len({line.split(":")[2] for line in lines if "/workspace" in line}) == 1_024


def wheel(folder: Path, name: str, version: str, needs: tuple[str, ...] = ()) -> None:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}/__init__.py": f"VERSION = {version!r}\n",
        f"{name}/data.txt": "x",
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {need}\n" for need in needs),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            file.writestr(path, text)


def test_packages_that_are_not_here_come_by_pip_with_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path, "toolgym_test_two", "2.0")
    wheel(tmp_path, "toolgym_test_one", "1.5", needs=("toolgym_test_two>=1",))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    data = archive(ImageSpec(packages=("toolgym-test-one==1.5",), tools=SMALL.tools))
    names = [entry.name.rpartition("-packages/")[2] for entry in entries(data)]
    for name in ("toolgym_test_one/__init__.py", "toolgym_test_one/data.txt", "toolgym_test_two/__init__.py"):
        assert name in names
        assert not name.endswith(".py") or cache_from_source(name) in names


# --- bytecode ---


@pytest.mark.parametrize("state", ["fresh", "stale", "absent", "damaged", "unchecked"])
def test_bytecode_is_that_of_the_source_under_the_path_in_the_image(tmp_path: Path, state: str) -> None:
    source = tmp_path / "module.py"
    source.write_text("def f():\n    return 'old'\n")
    if state != "absent":
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH if state == "unchecked" else None
        py_compile.compile(str(source), doraise=True, invalidation_mode=mode)
    if state == "damaged":
        Path(cache_from_source(str(source))).write_bytes(b"\0" * 64)
    if state in ("stale", "unchecked"):
        source.write_text("def f():\n    return 'newer'\n")
    path = "/opt/elsewhere/module.py"
    python = str(host_image.host_python().executable)
    (tmp_path / "template.py").write_text("def {{ name }}\n")
    data = bytecode.compiled(python, {path: source, "/opt/template.py": tmp_path / "template.py"})
    assert list(data) == [path]
    assert data[path][4:8] == b"\1\0\0\0"  # by hash, which nobody checks
    code = loads(data[path][16:])
    inner = next(constant for constant in code.co_consts if hasattr(constant, "co_code"))
    assert {code.co_filename, inner.co_filename} == {path}
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    assert namespace["f"]() == ("newer" if state in ("stale", "unchecked") else "old")


# --- a box ---


@pytest.mark.docker
def test_python_with_its_packages_works_without_any_right(api: docker.APIClient, full: str) -> None:
    numpy_version, sympy_version, uid, isolated = probe(api, full, "science.py").split()
    assert (f"numpy=={numpy_version}", f"sympy=={sympy_version}") == image_packages.find(("numpy", "sympy")).wanted
    assert (uid, isolated) == (str(UID), "1")


@pytest.mark.docker
def test_ordinary_programs_work_under_the_profile(api: docker.APIClient, full: str) -> None:
    assert probe(api, full, "ordinary.py") == "well\n"


@pytest.mark.docker
def test_shell_tools_work(api: docker.APIClient, full: str) -> None:
    told = probe(api, full, "shell.sh").split()
    expected = "1 2 3 2 found 3 3 ./data 3a4 > d 4 data other b 1+2+3; from sh é other UTC python3 python"
    assert told == expected.split()


@pytest.mark.docker
def test_no_import_has_to_compile_anything(api: docker.APIClient, full: str) -> None:
    script = (
        "import subprocess, sys;"
        "code = 'import asyncio, numpy, sympy, sysconfig; sysconfig.get_config_vars()';"
        "line = [sys.executable, '-I', '-v', '-c', code];"
        "print(subprocess.run(line, stderr=subprocess.PIPE, text=True, check=True).stderr)"
    )
    told = run(api, full, [*PYTHON, script])
    assert "code object from '/usr" in told
    assert ".pyc'" in told
    assert "code object from /usr" not in told  # that is how Python words a compilation
    worker = run(api, full, ["ls", f"{IN_IMAGE}/__pycache__"]).split()
    assert f"worker.{PYC}" in worker


PYC = cache_from_source("x.py").rpartition("x.")[2]


@pytest.mark.docker
def test_no_file_lends_its_owners_rights_and_the_image_sets_nothing_but_a_path(
    api: docker.APIClient, full: str
) -> None:
    assert run(api, full, ["find", "/", "-xdev", "-perm", "/6000", "-type", "f"], uid=0) == ""
    config = api.inspect_image(full)["Config"]
    assert config["Env"] == [f"PATH={':'.join(host_image.PATH)}"]
    assert not config["Cmd"]
    assert not config["Entrypoint"]


# --- the profile ---


@pytest.fixture(scope="module")
def answers(api: docker.APIClient, full: str) -> Mapping[str, int]:
    return json.loads(probe(api, full, "refused.py"))  # type: ignore[no-any-return]


REFUSED = """
    acct add_key bpf clock_settime fanotify_init init_module io_uring_setup kexec_load keyctl mount msgget
    name_to_handle_at open_by_handle_at perf_event_open personality pidfd_getfd process_madvise process_vm_readv
    process_vm_writev ptrace quotactl reboot request_key semget setns settimeofday shmget swapon syslog umount2 unshare
    userfaultfd
    clone_newns clone_newcgroup clone_newuts clone_newipc clone_newuser clone_newpid clone_newnet
    af_key af_netlink af_packet af_can af_tipc af_bluetooth af_alg af_vsock af_xdp
    inet_raw inet_packet inet_sctp inet6_sctp
"""


@pytest.mark.docker
@pytest.mark.parametrize("name", REFUSED.split())
def test_the_kernel_refuses(name: str, answers: Mapping[str, int]) -> None:
    assert errno.errorcode[answers[name]] == "EPERM"


@pytest.mark.docker
def test_clone3_is_not_there_so_that_the_c_library_falls_back(answers: Mapping[str, int]) -> None:
    assert errno.errorcode[answers["clone3"]] == "ENOSYS"


@pytest.mark.docker
def test_all_that_was_refused_was_tried(answers: Mapping[str, int]) -> None:
    assert set(answers) == {*REFUSED.split(), "clone3"}


@pytest.mark.docker
def test_without_the_profile_the_same_calls_are_answered(api: docker.APIClient, full: str) -> None:
    unfiltered = json.loads(probe(api, full, "refused.py", profile="unconfined"))
    for name in ("clone3", "msgget", "name_to_handle_at", "process_vm_readv", "ptrace", "semget", "setns", "unshare"):
        assert unfiltered[name] not in (errno.EPERM, errno.ENOSYS), name


@pytest.mark.docker
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the machine code is x86's")
def test_a_32_bit_call_ends_its_process(api: docker.APIClient, full: str) -> None:
    assert probe(api, full, "thirty_two_bits.py") == "True\n"


def test_the_profile_is_made_anew_and_lists_each_call_once() -> None:
    first, second = seccomp.profile(), seccomp.profile()
    assert json.loads(json.dumps(first)) == second
    first["syscalls"].clear()
    assert seccomp.profile() == second
    unconditional = [rule["names"] for rule in second["syscalls"] if not rule["args"] and "errnoRet" not in rule]
    assert len(unconditional) == 1
    assert len(set(unconditional[0])) == len(unconditional[0])
    assert not {"socket", "clone", "personality", "clone3", "socketcall", "ipc"} & set(unconditional[0])


# --- building ---


BUILDER = f"""
import docker
from toolgym.envs.sandbox.image import ImageSpec, ensure_image
spec = ImageSpec(packages=(), tools=("bash", "true", "false"))
print(ensure_image(docker.APIClient(version="auto"), spec, "host", labels={OURS!r}))
"""


@pytest.mark.docker
def test_builders_at_once_all_get_the_image_and_leave_one(api: docker.APIClient) -> None:
    spec = ImageSpec(packages=(), tools=("bash", "true", "false"))
    assert not api.images(tag(spec))
    others = [subprocess.Popen([sys.executable, "-c", BUILDER], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    with ThreadPoolExecutor(3) as threads:
        names = {*threads.map(lambda _: ensure_image(api, spec, "host", labels=OURS), range(3))}
    names |= {other.communicate(timeout=120)[0].strip() for other in others}
    assert names == {tag(spec)}
    assert len([entry for entry in api.images(filters={"label": IMAGE}) if not entry["RepoTags"]]) == 0
    run(api, tag(spec), ["true"])


IMAGE = f"{image.IMAGE_LABEL}=1"


@pytest.mark.docker
def test_by_dockerfile_on_a_base_that_the_engine_has(api: docker.APIClient) -> None:
    base = ensure_image(docker.DockerClient(version="auto"), SMALL, "host", labels=OURS)
    spec = ImageSpec(packages=(), base=base)
    name = ensure_image(api, spec, labels=OURS)
    assert name == tag(spec, "dockerfile")
    assert probe(api, name, "ordinary.py") == "well\n"
    run(api, name, [*PYTHON, f"import sys; sys.path.insert(0, {IN_IMAGE!r}); import frames"])
    assert run(api, name, ["find", "/", "-xdev", "-perm", "/6000", "-type", "f"], uid=0) == ""
    assert api.inspect_image(name)["Config"]["Labels"] == {image.IMAGE_LABEL: "1", **OURS}
    assert ensure_image(api, spec, "dockerfile") == name


@pytest.mark.docker
def test_a_step_that_fails_is_told_with_what_it_said(api: docker.APIClient) -> None:
    base = ensure_image(api, SMALL, "host", labels=OURS)
    spec = ImageSpec(packages=("toolgym-no-such-package",), base=base)
    with pytest.raises(SandboxFailure, match="No module named pip") as failed:  # the base has none
        ensure_image(api, spec, "dockerfile", labels=OURS)
    assert failed.value.kind == "sandbox_image_failed"


def test_the_dockerfile_pins_what_is_installed_here() -> None:
    packages = image_packages.find(("sympy",))
    text = dockerfile.text("python:3.12-slim", packages.pinned)
    assert text.startswith("FROM python:3.12-slim\n")
    for entry in packages.installed:
        assert f" {entry.name}=={entry.version}" in text
    assert "mpmath==" in text
    assert "pip" not in dockerfile.text("python:3.12-slim", ())
