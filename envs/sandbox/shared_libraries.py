"""Which shared libraries programs of this machine need, as its own loader finds them."""

import os
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from toolgym.envs.sandbox.results import SandboxFailure

_TIMEOUT = 60.0  # seconds
# Opened by name, and so in nobody's list: by pthread_cancel, by old binaries, by the resolver.
_BY_NAME = """
    libpthread.so.0 libdl.so.2 librt.so.1 libutil.so.1 libm.so.6 libgcc_s.so.1 libstdc++.so.6 libresolv.so.2
    libnss_files.so.2 libnss_dns.so.2
"""


def is_elf(path: Path) -> bool:
    """Whether a file is a program or a library in the kernel's format."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def closure(files: Iterable[Path]) -> list[Path]:
    """The libraries that these programs and libraries need, and the loader, each under the name it is opened by.

    Raises:
        SandboxFailure: (``image_failed``) the machine has no ``ldd``, or it does not end.
    """
    found = {str(path): path for path in _needed_by(sorted({str(file) for file in files}))}
    folders = dict.fromkeys(path.parent for path in found.values() if path.name.startswith(("libc.so", "libm.so")))
    extra = [folder / name for folder in folders for name in _BY_NAME.split() if (folder / name).is_file()]
    new = [path for path in extra if str(path) not in found]
    found |= {str(path): path for path in (*new, *_needed_by([str(path) for path in new]))}
    return [found[name] for name in sorted(found)]


def _needed_by(files: list[str]) -> list[Path]:
    """Ask the loader: ``ldd`` is a script that starts it anew for each file, hence several at once."""
    count = max(1, min(len(os.sched_getaffinity(0)), 8, len(files) // 20))
    shares = [share for start in range(count) if (share := files[start::count])]
    with ThreadPoolExecutor(count) as threads:
        return [path for paths in threads.map(_listed, shares) for path in paths]


def _listed(files: list[str]) -> list[Path]:
    environment = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "LD_DEBUG")}
    try:
        told = subprocess.run(
            ["ldd", *files],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,  # one file that is no dynamic program makes it non-zero
            env=environment | {"LC_ALL": "C"},
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxFailure(f"ldd cannot list shared libraries: {error}", kind="image_failed") from error
    return [path for line in told.splitlines() if (path := _path_in(line))]


def _path_in(line: str) -> Path | None:
    """Of "name.so => /folder/name.so (0x...)", or of the loader alone, "/lib64/loader.so (0x...)", both indented."""
    words = line.split()
    if not line.startswith("\t") or not words:
        return None
    path = words[2] if len(words) > 2 and words[1] == "=>" else words[0]
    return Path(path) if path.startswith("/") else None
