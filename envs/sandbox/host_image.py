"""An image out of this machine: its own Python, its shared libraries and its shell tools. No network, no registry."""

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.sandbox import box_users, bytecode
from toolgym.envs.sandbox.boot import IN_IMAGE
from toolgym.envs.sandbox.image_packages import Packages, files_below, files_of, install
from toolgym.envs.sandbox.image_tree import ImageTree, walk
from toolgym.envs.sandbox.results import SandboxFailure
from toolgym.envs.sandbox.shared_libraries import closure, is_elf

PATH = ("/usr/local/bin", "/usr/bin", "/bin")
_SEARCHED = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_MERGED = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
_EMPTY = ("/dev", "/etc", "/proc", "/run", "/sys")
# Of the standard library: tests, what draws windows, what installs packages, what only serves to build extensions.
_NOT_OF_STDLIB = """
    __pycache__ dist-packages ensurepip idlelib lib2to3 libpython site-packages test tests tkinter turtledemo turtle.py
    sitecustomize.py usercustomize.py EXTERNALLY-MANAGED
"""
_LEFT_OUT = frozenset(_NOT_OF_STDLIB.split())
_LEFT_OUT_EXTENSIONS = ("_ctypes_test", "_test", "_tkinter", "_xxtestfuzz", "nis", "ossaudiodev", "spwd", "xx")
# Time zones and the UTF-8 locale: programs read them by path.
_DATA = ("/usr/share/zoneinfo", "/usr/lib/locale/C.utf8", "/usr/lib/locale/C.UTF-8")
_LEFT_OUT_DATA = frozenset({"right", "posix", "localtime", "posixrules"})
_TIMEOUT = 30.0  # seconds
_ASK = """\
import json, site, sys, sysconfig
paths = sysconfig.get_paths()
print(json.dumps({
    "prefix": sys.base_prefix, "stdlib": paths["stdlib"], "platstdlib": paths["platstdlib"],
    "dynamic": sysconfig.get_config_var("DESTSHARED"), "packages": site.getsitepackages([sys.base_prefix]),
}))
"""


@dataclass(frozen=True, slots=True)
class HostPython:
    """The interpreter below this one: not its virtual environment's link, but what that points to.

    Attributes:
        executable: the program.
        prefix: the folder that it is installed in.
        stdlib: its standard library.
        extensions: that library's compiled part.
        packages: the folder of packages that it sees when it is isolated.
    """

    executable: Path
    prefix: Path
    stdlib: Path
    extensions: Path
    packages: Path

    @property
    def new_prefix(self) -> str:
        """Where it lies in the image. Paths within are kept, so that it finds its library."""
        return "/usr" if str(self.prefix) == "/usr" else "/usr/local"

    def moved(self, path: Path) -> str:
        """Where a file lies in the image."""
        with contextlib.suppress(ValueError):
            return f"{self.new_prefix}/{path.relative_to(self.prefix).as_posix()}"
        return str(path)


@cache
def host_python() -> HostPython:
    """Ask the interpreter. Blocks.

    Raises:
        SandboxFailure: (``image_failed``) it does not answer.
    """
    executable = Path(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))
    try:
        told = subprocess.run(
            [executable, "-I", "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            check=True,
        ).stdout
        answer = json.loads(told)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SandboxFailure(f"{executable} does not say where its library is: {error}", kind="image_failed") from error
    stdlib = Path(answer["stdlib"])
    extensions = Path(answer["dynamic"] or "", "")
    if not extensions.is_dir():
        extensions = Path(answer["platstdlib"], "lib-dynload")
    # Debian's Python has several folders of packages; the one in the standard library is its own alone.
    own = [path for path in map(Path, answer["packages"]) if path.parent == stdlib]
    packages = own[0] if own else Path(answer["packages"][-1])
    return HostPython(executable, Path(answer["prefix"]), stdlib, extensions, packages)


def fingerprint(tools: Sequence[str]) -> list[object]:
    """What of this machine decides what the image holds, as JSON takes it."""
    python = host_python()
    status = python.executable.stat()
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):  # not glibc
        library = None
    found = [path for tool in tools if (path := shutil.which(tool, path=_SEARCHED))]
    return [sys.version, str(python.executable), status.st_size, status.st_mtime_ns, library, platform.machine(), found]


def build(file: IO[bytes], packages: Packages, worker: Mapping[str, bytes], tools: Sequence[str]) -> None:
    """Write the root file system of the image as a tar archive. Blocks for some seconds.

    Args:
        file: to write to.
        packages: what it holds besides the standard library.
        worker: the worker's files by name.
        tools: the programs that it holds besides Python; those that this machine lacks are left out.

    Raises:
        ConfigurationError: packages that are not here and that pip cannot bring; no bash on this machine.
        SandboxFailure: (``image_failed``) this machine's Python or loader does not work as expected.
    """
    python = host_python()
    tree = ImageTree({path: os.readlink(path).lstrip("/") for path in _MERGED if os.path.islink(path)})
    modules: dict[str, Path] = {}
    programs: list[Path] = [python.executable]
    with tempfile.TemporaryDirectory(prefix="toolgym-") as brought, ThreadPoolExecutor(1) as thread:
        programs += _add_tools(tree, tools)
        programs += _add_python(tree, python, modules)
        for relative, source in _package_files(packages, Path(brought)):
            path = f"{python.moved(python.packages)}/{relative}"
            tree.add_file(path, source)
            if path.endswith(".py"):
                modules[path] = source
            elif ".so" in source.name and is_elf(source):
                programs.append(source)
        libraries = thread.submit(closure, programs)
        for path, data in bytecode.compiled(str(python.executable), modules).items():
            tree.add_data(bytecode.cache_path(path), data)
        for name, data in worker.items():
            tree.add_data(f"{IN_IMAGE}/{name}", data)
            tree.add_data(bytecode.cache_path(f"{IN_IMAGE}/{name}"), bytecode.of(data, f"{IN_IMAGE}/{name}"))
        _add_libraries(tree, python, libraries.result())
        _add_system(tree)
        tree.write(file)


def _package_files(packages: Packages, folder: Path) -> Iterator[tuple[str, Path]]:
    if packages.missing:
        install(packages.wanted, folder)
        yield from files_below(folder)
    for distribution in packages.installed:
        yield from files_of(distribution)


def _add_python(tree: ImageTree, python: HostPython, modules: dict[str, Path]) -> list[Path]:
    """The interpreter and its standard library; its compiled modules."""
    name = f"{python.new_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    tree.add_file(name, python.executable)
    for folder in ("/usr/local/bin", "/usr/bin"):
        for link in ("python", "python3"):
            if f"{folder}/{link}" != name:
                tree.add_link(f"{folder}/{link}", name)
    for source in walk(python.stdlib, _LEFT_OUT):
        path = python.moved(source)
        if source.parent == python.extensions or source.parent.name.startswith("config-"):
            continue
        if source.name.startswith("_sysconfigdata"):
            # It names the folders that Python was built and installed in.
            text = source.read_text().replace(str(python.prefix), python.new_prefix).encode()
            tree.add_data(path, text)
            tree.add_data(bytecode.cache_path(path), bytecode.of(text, path))
            continue
        tree.add_file(path, source)
        if path.endswith(".py"):
            modules[path] = source
    extensions = [
        path for path in sorted(python.extensions.glob("*.so")) if not path.name.startswith(_LEFT_OUT_EXTENSIONS)
    ]
    for source in extensions:
        tree.add_file(python.moved(source), source)
    return extensions


def _add_tools(tree: ImageTree, tools: Iterable[str]) -> list[Path]:
    """Shell tools under the names of this machine; those of them that are programs, not scripts."""
    programs = []
    for tool in tools:
        found = shutil.which(tool, path=_SEARCHED)
        if found is None:
            continue
        real = Path(os.path.realpath(found))
        name = f"/usr/bin/{tool}"
        # One program may have many names (busybox), and is then there once.
        if real.name == tool:
            tree.add_file(name, real)
        else:
            tree.add_file(f"/usr/bin/{real.name}", real)
            tree.add_link(name, real.name)
        if is_elf(real):
            programs.append(real)
    if "/usr/bin/bash" not in tree:
        raise ConfigurationError("the sandbox's image needs bash, which this machine lacks: install it")
    for link in ("/usr/bin/sh", "/bin/sh", "/bin/bash"):
        tree.add_link(link, "bash" if link.startswith("/usr") else f"/usr/bin/{Path(link).name}")
    return programs


def _add_libraries(tree: ImageTree, python: HostPython, libraries: Sequence[Path]) -> None:
    standard = next((str(path.parent) for path in libraries if path.name.startswith("libc.so")), "/usr/lib")
    places = []
    for library in libraries:
        if "site-packages" in library.parts or "dist-packages" in library.parts:
            continue  # it came with its package
        places.append(python.moved(Path(os.path.realpath(library.parent), library.name)))
        tree.add_file(places[-1], library)
    for place in places:
        # The image has no index of libraries, and a path that is compiled into a program may be gone: what cannot be
        # found there is found in the loader's own folder.
        tree.add_link(f"{standard}/{Path(place).name}", place)


def _add_system(tree: ImageTree) -> None:
    for path, data in box_users.account_files().items():
        tree.add_data(path, data)
    for path in _EMPTY:
        tree.add_folder(path)
    # What is mounted there takes the mode of the folder below it: runc sees to that.
    tree.add_folder(box_users.WORKSPACE, 0o777)
    tree.add_folder("/tmp", 0o1777)
    tree.add_link("/var/tmp", "/tmp")
    for folder in map(Path, _DATA):
        for source in walk(folder, _LEFT_OUT_DATA):
            if source.is_file():
                tree.add_file(str(source), source)
