"""Bytecode that is right for good: an image is never written to, so nothing has to be compared with its source.

On a read-only root, Python would compile every module without valid bytecode anew in every process.
"""

import importlib.util
import marshal
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from toolgym.envs.sandbox.results import SandboxFailure

_HEADER, _UNCHECKED = 16, 0b01
_SHORT_STRINGS = (b"\xfa", b"\xda", b"z", b"Z")  # marshal's short ASCII strings: shared or not, interned or not
_TIMEOUT = 600.0  # seconds
# Reads lines "number, tab, source, tab, path in the image"; what does not compile (templates, other Pythons) has none.
_COMPILER = """\
import py_compile, sys
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
for line in sys.stdin:
    number, source, shown = line.rstrip("\\n").split("\\t")
    try:
        py_compile.compile(source, f"{sys.argv[1]}/{number}", shown, doraise=True, invalidation_mode=mode)
    except (py_compile.PyCompileError, ValueError, RecursionError):
        pass
"""


def compiled(python: str, sources: Mapping[str, Path]) -> dict[str, bytes]:
    """The bytecode of modules. Blocks.

    What this machine has compiled already, and is still right, is taken over under the image's path.

    Args:
        python: the interpreter that is to run them.
        sources: where each module lies here, by its path in the image.

    Returns:
        The content of each ``.pyc`` by the module's path in the image.

    Raises:
        SandboxFailure: (``image_failed``) the interpreter does not work.
    """
    done: dict[str, bytes] = {}
    todo: dict[str, Path] = {}
    for path, source in sources.items():
        data = _reused(source, path)
        if data is None:
            todo[path] = source
        else:
            done[path] = data
    return done | _compile(python, todo)


def of(source: bytes, path: str) -> bytes:
    """The bytecode of a module of ours, whose source is at hand. Raises SyntaxError."""
    return _header(source) + marshal.dumps(compile(source, path, "exec", dont_inherit=True, optimize=0))


def cache_path(path: str) -> str:
    """Where Python looks for a module's bytecode in the image, wherever it keeps it on this machine."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/__pycache__/{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc"


def _reused(source: Path, path: str) -> bytes | None:
    try:
        cached = Path(importlib.util.cache_from_source(str(source), optimization="")).read_bytes()
        status = source.stat()
    except OSError:
        return None
    if cached[:4] != importlib.util.MAGIC_NUMBER or int.from_bytes(cached[4:8], "little") != 0:
        return None
    written = int(status.st_mtime) & 0xFFFF_FFFF, status.st_size & 0xFFFF_FFFF
    if (int.from_bytes(cached[8:12], "little"), int.from_bytes(cached[12:16], "little")) != written:
        return None
    code = _renamed(cached[_HEADER:], str(source), path)
    return None if code is None else _header(source.read_bytes()) + code


def _renamed(code: bytes, old: str, new: str) -> bytes | None:
    """Marshalled code under another file name, which marshal writes once and then refers to; None if it is not so."""
    if old == new:
        return code
    before, after = old.encode(), new.encode()
    if max(len(before), len(after)) > 255 or not (before + after).isascii():
        return None
    for kind in _SHORT_STRINGS:
        parts = code.split(kind + bytes([len(before)]) + before)
        if len(parts) == 2:
            renamed = parts[0] + kind + bytes([len(after)]) + after + parts[1]
            return renamed if before not in renamed or before in after else None
    return None


def _header(source: bytes) -> bytes:
    return importlib.util.MAGIC_NUMBER + _UNCHECKED.to_bytes(4, "little") + importlib.util.source_hash(source)


def _compile(python: str, sources: Mapping[str, Path]) -> dict[str, bytes]:
    if not sources:
        return {}
    with tempfile.TemporaryDirectory(prefix="toolgym-") as folder:
        lines = [f"{number}\t{source}\t{path}" for number, (path, source) in enumerate(sources.items())]
        count = min(len(os.sched_getaffinity(0)), 8, 1 + len(lines) // 50)
        _run_all(python, folder, [lines[start::count] for start in range(count)])
        done = {}
        for number, path in enumerate(sources):
            file = Path(folder, str(number))
            if file.is_file():
                done[path] = file.read_bytes()
        return done


def _run_all(python: str, folder: str, shares: list[list[str]]) -> None:
    running = []
    try:
        for number, share in enumerate(shares):
            given = Path(folder, f"list-{number}")
            given.write_text("".join(f"{line}\n" for line in share))
            with given.open("rb") as lines:
                running.append(
                    subprocess.Popen(
                        [python, "-I", "-S", "-c", _COMPILER, folder],
                        stdin=lines,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                )
        for process in running:
            if process.wait(_TIMEOUT):
                raise SandboxFailure(f"{python} cannot compile modules", kind="image_failed")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxFailure(f"{python} does not compile modules: {error}", kind="image_failed") from error
    finally:
        for process in running:
            process.kill()
            process.wait()
