"""The image by a Dockerfile, on top of an image that has Python."""

import io
import json
import shlex
import tarfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from toolgym.envs.sandbox.boot import IN_IMAGE
from toolgym.envs.sandbox.box_users import WORKSPACE, account_files
from toolgym.envs.sandbox.results import SandboxFailure

_PULL = 300.0  # seconds
_BUILD = 480.0  # seconds

# Bytecode that need not be compared with its source: the root of a box is read-only. No file that gives its runner
# another user's rights.
_FINISH = f"""\
import compileall, os, py_compile, stat, sysconfig
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
stdlib, packages = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
for folder in ({IN_IMAGE!r}, stdlib) + (() if packages.startswith(stdlib) else (packages,)):
    compileall.compile_dir(folder, quiet=2, force=True, invalidation_mode=mode, workers=0)
for parent, folders, names in os.walk("/"):
    folders[:] = [name for name in folders if parent != "/" or name not in ("proc", "sys", "dev")]
    for name in names:
        path = os.path.join(parent, name)
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode) and status.st_mode & 0o6000:
            os.chmod(path, stat.S_IMODE(status.st_mode) & 0o1777)
os.makedirs({WORKSPACE!r}, exist_ok=True)
os.chmod({WORKSPACE!r}, 0o777)
"""
_TEMPLATE = f"""\
FROM {{base}}
USER 0:0
COPY etc/ /etc/
COPY worker/ {IN_IMAGE}/
{{install}}RUN {json.dumps(["python3", "-I", "-c", _FINISH])}
RUN rm -rf /var/tmp && ln -s /tmp /var/tmp
ENTRYPOINT []
WORKDIR /
"""
_PIP = "RUN python3 -I -m pip install --no-cache-dir --no-compile --disable-pip-version-check --root-user-action=ignore"


def text(base: str, packages: Sequence[str]) -> str:
    """The Dockerfile.

    Args:
        base: an image with ``python3`` and a shell.
        packages: as pip takes them.
    """
    install = f"{_PIP} {' '.join(map(shlex.quote, packages))}\n" if packages else ""
    return _TEMPLATE.format(base=base, install=install)


def pull(api: Any, image: str) -> None:
    """Let the engine pull an image. Blocks for no longer than some minutes.

    Raises:
        SandboxFailure: (``image_failed``) it cannot be pulled, or not in that time.
    """
    deadline = time.monotonic() + _PULL
    repository, _, tag = image.rpartition(":") if ":" in image.rpartition("/")[2] else (image, "", "latest")
    for told in api.pull(repository, tag=tag, stream=True, decode=True):
        if "error" in told:
            raise SandboxFailure(f"the engine does not pull {image}: {told['error']}", kind="image_failed")
        if time.monotonic() > deadline:
            raise SandboxFailure(f"{image} was not pulled within {_PULL:g} s", kind="image_failed")


def build(
    api: Any,
    name: str,
    base: str,
    packages: Sequence[str],
    *,
    worker: Mapping[str, bytes],
    labels: Mapping[str, str],
) -> None:
    """Let the engine build an image on top of one that it has. Blocks for no longer than some minutes.

    Args:
        api: docker-py's `APIClient`.
        name: of the new image.
        base: see `text`.
        packages: see `text`.
        worker: the worker's files by name.
        labels: of the new image.

    Raises:
        SandboxFailure: (``image_failed``) a step fails, or they take longer than that.
    """
    deadline = time.monotonic() + _BUILD
    steps = api.build(
        fileobj=_context(text(base, packages), worker),
        custom_context=True,
        tag=name,
        rm=True,
        forcerm=True,
        labels=dict(labels),
        decode=True,
        timeout=_BUILD,
        # Only pip needs one.
        network_mode=None if packages else "none",
    )
    said: list[str] = []
    for told in steps:
        if "error" in told:
            last = " / ".join("".join(said).strip().splitlines()[-5:])
            raise SandboxFailure(
                f"the engine does not build the image on {base}: {told['error']} (it said last: {last})",
                kind="image_failed",
            )
        said.append(told.get("stream", ""))
        if time.monotonic() > deadline:
            raise SandboxFailure(f"the image was not built within {_BUILD:g} s", kind="image_failed")


def _context(instructions: str, worker: Mapping[str, bytes]) -> io.BytesIO:
    files = {"Dockerfile": instructions.encode()}
    files |= {path[1:]: data for path, data in account_files().items()}
    files |= {f"worker/{name}": data for name, data in sorted(worker.items())}
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
    file.seek(0)
    return file
