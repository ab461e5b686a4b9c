"""The image that boxes run in: named by its content, and built when an engine does not have it."""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal, cast, get_args

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.sandbox import dockerfile, host_image
from toolgym.envs.sandbox.boot import INSIDE
from toolgym.envs.sandbox.box_users import account_files
from toolgym.envs.sandbox.image_packages import Packages, find, split
from toolgym.envs.sandbox.results import SandboxFailure

Route = Literal["host", "dockerfile"]
IMAGE_LABEL = "toolgym.sandbox.image"
_TOOLS = """
    bash sh
    [ arch b2sum base32 base64 basename basenc cat chmod chown cksum comm cp csplit cut date dd df dir dirname du echo
    env expand expr factor false fmt fold groups head hostid id install join link ln logname ls md5sum mkdir mkfifo
    mktemp mv nice nl nohup nproc numfmt od paste pathchk pr printenv printf ptx pwd readlink realpath rm rmdir seq
    sha1sum sha224sum sha256sum sha384sum sha512sum shred shuf sleep sort split stat stdbuf stty sum sync tac tail tee
    test timeout touch tr true truncate tsort tty uname unexpand uniq unlink users vdir wc who whoami yes
    grep egrep fgrep sed awk gawk mawk find xargs diff diff3 cmp sdiff patch
    tar gzip gunzip zcat bzip2 bunzip2 xz unxz zip unzip
    ps pgrep pkill kill top free uptime which hostname getopt column rev hexdump xxd tree less more bc dc jq
"""
SHELL_TOOLS: tuple[str, ...] = tuple(_TOOLS.split())
_FORMAT = 3  # raise it when the way of building changes what is built
_REPOSITORY = "toolgym-sandbox"
_TIMEOUT = 600.0  # seconds that a build may take, or wait for another one
_CONNECT = 10.0  # seconds
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """What an image holds.

    Attributes:
        packages: of Python, each as ``"name"`` or ``"name==version"``, besides the standard library; what they need
            comes along. Those that are installed here are taken in the version that is installed.
        tools: shell tools; those that this machine lacks are left out (route ``"host"``).
        base: the image that the route ``"dockerfile"`` builds on; None is ``python:X.Y-slim`` of this Python's version.

    Raises:
        ConfigurationError: a package that is written otherwise.
    """

    packages: tuple[str, ...] = ("numpy", "sympy")
    tools: tuple[str, ...] = SHELL_TOOLS
    base: str | None = None

    def __post_init__(self) -> None:
        for field, kind in (("packages", "numpy"), ("tools", "bash")):
            value: object = getattr(self, field)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ConfigurationError(f'expected ImageSpec.{field} as a tuple like ("{kind}",), actual {value!r}')
            object.__setattr__(self, field, tuple(value))
        for package in self.packages:
            split(package)
        for tool in self.tools:
            if "/" in tool:
                raise ConfigurationError(f"expected ImageSpec.tools as names of programs, actual {tool!r}")

    @property
    def modules(self) -> tuple[str, ...]:
        """The names under which the packages are imported, as far as their own names tell."""
        return tuple(split(package)[0].replace("-", "_") for package in self.packages)


def tag(spec: ImageSpec, route: Route = "host") -> str:
    """The name of the image: ``toolgym-sandbox:`` and twelve digits, others for whatever changes what it holds.

    Raises:
        ConfigurationError: packages that cannot be had.
        SandboxFailure: (``image_failed``) this machine's Python does not answer.
    """
    return _Builder(None, spec, find(spec.packages), _worker(), {}).tag(route)


def ensure_image(client: Any, spec: ImageSpec, route: str = "auto", *, labels: Mapping[str, str] | None = None) -> str:
    """Build the image if the engine does not have it. Blocks: for some seconds by the route ``"host"``.

    Threads and processes may do so at once; those of one machine wait for each other, then find it there.

    Args:
        client: docker-py's `APIClient`, or its `DockerClient`.
        spec: what it holds.
        route: ``"host"``: out of this machine's own Python, libraries and tools, without a network.
            ``"dockerfile"``: on top of ``spec.base``, its packages by pip. ``"auto"``: by Dockerfile if the engine has
            the base or can pull it, else from the host.
        labels: further labels of an image that is built.

    Returns:
        Its tag.

    Raises:
        ConfigurationError: an unknown route, packages that cannot be had, or no route that is open here.
        SandboxFailure: (``image_failed``) the engine cannot be reached, or does not build it.
    """
    if route not in ("auto", *get_args(Route)):
        raise ConfigurationError(f"expected route among auto, {', '.join(get_args(Route))}, actual {route!r}")
    api = getattr(client, "api", client)
    packages = find(spec.packages)
    builder = _Builder(api, spec, packages, _worker(), {IMAGE_LABEL: "1", **(labels or {})})
    routes = tuple(known for known in get_args(Route) if route in ("auto", known))
    with _told():
        for known in routes:
            name = builder.tag(known)
            if _exists(api, name):
                return name
    return builder.build(routes[0]) if len(routes) == 1 else _best(builder)


@dataclass(frozen=True, slots=True)
class _Builder:
    api: Any
    spec: ImageSpec
    packages: Packages
    worker: Mapping[str, bytes]
    labels: Mapping[str, str]

    def tag(self, route: Route) -> str:
        content: list[object] = [_FORMAT, route, self.packages.pinned]
        if route == "host":
            content += host_image.fingerprint(self.spec.tools)
        else:
            content.append(dockerfile.text(base_image(self.spec), self.packages.pinned))
        digest = hashlib.sha256(json.dumps(content).encode())
        for files in (account_files(), self.worker):
            for name, data in sorted(files.items()):
                digest.update(f"\0{name}\0{len(data)}\0".encode() + data)
        return f"{_REPOSITORY}:{digest.hexdigest()[:12]}"

    def build(self, route: Route) -> str:
        name = self.tag(route)
        with _told(), _alone(name):
            if not _exists(self.api, name):
                if route == "host":
                    self._from_host(name)
                else:
                    self._from_base(name)
        return name

    def _from_host(self, name: str) -> None:
        self.refuse_host()
        with tempfile.TemporaryFile(prefix="toolgym-") as file:
            host_image.build(cast("IO[bytes]", file), self.packages, self.worker, self.spec.tools)
            file.seek(0)
            changes = [f"ENV PATH={':'.join(host_image.PATH)}", "WORKDIR /"]
            changes += [f"LABEL {json.dumps(key)}={json.dumps(value)}" for key, value in self.labels.items()]
            repository, _, version = name.partition(":")
            # docker-py's import_image has no time-out of its own.
            answer = self.api.post(
                f"{self.api.base_url}/v{self.api.api_version}/images/create",
                params={"fromSrc": "-", "repo": repository, "tag": version, "changes": changes},
                headers={"Content-Type": "application/tar"},
                data=file,
                timeout=(_CONNECT, _TIMEOUT),
            )
        _check(answer.status_code, answer.text)

    def _from_base(self, name: str) -> None:
        base = base_image(self.spec)
        if not _exists(self.api, base):
            dockerfile.pull(self.api, base)
        dockerfile.build(self.api, name, base, self.packages.pinned, worker=self.worker, labels=self.labels)

    def refuse_host(self) -> None:
        """Raises ConfigurationError if the engine cannot run this machine's programs."""
        version = self.api.version()
        ours = _ARCHITECTURES.get(platform.machine(), platform.machine())
        theirs = version.get("Os"), version.get("Arch")
        if sys.platform != "linux" or theirs != ("linux", ours):
            raise ConfigurationError(
                f"the engine runs {theirs[0]}/{theirs[1]} and this machine is {sys.platform}/{ours}, so that the "
                "sandbox's image cannot be made out of this machine's Python: let the engine pull "
                f"{base_image(ImageSpec())}, or load it there by hand (docker save, docker load)"
            )


def base_image(spec: ImageSpec) -> str:
    """The image that a Dockerfile starts from."""
    return spec.base or f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"


def _best(builder: _Builder) -> str:
    try:
        return builder.build("dockerfile")
    except (SandboxFailure, ConfigurationError) as error:
        refused = error
    try:
        return builder.build("host")
    except (SandboxFailure, ConfigurationError) as error:
        message = f"{error} (by Dockerfile, the other route, it failed as well: {refused})"
        if isinstance(error, ConfigurationError):
            raise ConfigurationError(message) from error
        raise SandboxFailure(message, kind="image_failed") from error


def _worker() -> dict[str, bytes]:
    """The worker's files, read once: what a tag names is what is built, also while somebody edits them."""
    return {path.name: path.read_bytes() for path in INSIDE.glob("*.py")}


def _exists(api: Any, name: str) -> bool:
    from docker.errors import ImageNotFound, NotFound  # noqa: PLC0415 - heavy

    try:
        api.inspect_image(name)
    except (ImageNotFound, NotFound):
        return False
    return True


def _check(status: int, text: str) -> None:
    """Raise what the engine says of an import: also where it says so in the last line of an answer that is well."""
    last = text.strip().rpartition("\n")[2]
    with contextlib.suppress(ValueError):
        told = json.loads(last)
        text = told.get("error") or told.get("message") or ("" if status < 400 else text)
    if status >= 400 or text:
        raise SandboxFailure(f"the engine does not take the image: {text}", kind="image_failed")


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """One builder of an image at a time on this machine. Who waits too long, or cannot lock, builds all the same."""
    path = os.path.join(tempfile.gettempdir(), f"{name.replace(':', '-')}-{os.getuid()}.lock")
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + _TIMEOUT
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.05)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Failures of the engine, of the way to it and of this machine's disk, in our own words."""
    import requests  # noqa: PLC0415 - heavy
    from docker.errors import DockerException  # noqa: PLC0415

    try:
        yield
    except (requests.RequestException, DockerException) as error:
        raise SandboxFailure(f"the engine does not build the image: {error}", kind="image_failed") from error
    except OSError as error:
        raise SandboxFailure(f"the image cannot be put together: {error}", kind="image_failed") from error
