"""The Python packages of an image: those of this environment and what they need, or else those that pip brings."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.sandbox.results import SandboxFailure

_PIP_TIMEOUT = 600.0  # seconds
_WANTED = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==([A-Za-z0-9.!+_-]+))?")
_NEEDED = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")
# Tests, and what only serves to compile or to check against a package: half of sympy's files.
_UNTESTED = frozenset({"numpy", "sympy", "mpmath", "scipy", "pandas", "networkx"})
_TESTS = frozenset({"tests", "benchmarks"})
_USELESS = frozenset({".a", ".pyi", ".pxd", ".pyc"})
# They hold paths of this machine.
_LOCAL = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"})


@dataclass(frozen=True, slots=True)
class Packages:
    """What was asked for, and where it comes from.

    Attributes:
        wanted: names with versions, where they are known, as pip takes them, sorted.
        installed: of this environment, with what they need; empty where pip has to bring any.
        missing: what this environment does not have (or not in that version).
    """

    wanted: tuple[str, ...]
    installed: tuple[metadata.Distribution, ...]
    missing: tuple[str, ...]

    @property
    def pinned(self) -> tuple[str, ...]:
        """All of them with versions, as pip takes them, as far as they are known."""
        known = tuple(f"{_normal(entry.metadata['Name'])}=={entry.version}" for entry in self.installed)
        return known or self.wanted


def split(package: str) -> tuple[str, str | None]:
    """The name, normalised, and the version that a ``name`` or ``name==version`` asks for.

    Raises:
        ConfigurationError: it is neither.
    """
    match = _WANTED.fullmatch(package.strip())
    if match is None:
        raise ConfigurationError(f'expected a package as "name" or "name==version", actual {package!r}')
    return _normal(match[1]), match[2]


def find(packages: Sequence[str]) -> Packages:
    """Look packages and what they need up in this environment.

    Raises:
        ConfigurationError: a package that is neither a name nor a name with a version.
    """
    found: dict[str, metadata.Distribution] = {}
    wanted, missing = [], []
    for package in packages:
        name, version = split(package)
        distribution = _installed(name)
        if distribution is None or version not in (None, distribution.version):
            missing.append(name if version is None else f"{name}=={version}")
            wanted.append(missing[-1])
        else:
            wanted.append(f"{name}=={distribution.version}")
            missing += _collect(name, distribution, found)
    installed = () if missing else tuple(found[name] for name in sorted(found))
    return Packages(tuple(sorted(wanted)), installed, tuple(missing))


def files_of(distribution: metadata.Distribution) -> Iterator[tuple[str, Path]]:
    """The files of an installed package that are of use: path in the folder of packages, and path here."""
    for file in distribution.files or ():
        if ".." not in file.parts and not file.is_absolute() and _useful(file.parts):
            source = Path(str(distribution.locate_file(file)))
            if source.is_file():
                yield "/".join(file.parts), source


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """As `files_of`, for a folder that pip has filled."""
    for source in sorted(folder.rglob("*")):
        relative = source.relative_to(folder)
        if relative.parts[0] != "bin" and _useful(relative.parts) and source.is_file():
            yield relative.as_posix(), source


def install(wanted: Sequence[str], folder: Path) -> None:
    """Let pip bring packages and what they need into a folder. Blocks.

    Raises:
        ConfigurationError: this environment has no pip, or pip cannot find or build one of them.
        SandboxFailure: (``image_failed``) pip does not end.
    """
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    line += ["--no-compile", "--target", str(folder), *wanted]
    try:
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PIP_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SandboxFailure(f"pip did not end within {_PIP_TIMEOUT:g} s", kind="image_failed") from error
    if done.returncode:
        last = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise ConfigurationError(
            f"the image is to hold {', '.join(wanted)}; not all are installed in this environment in these versions, "
            f"and pip cannot bring them: {last}. Install them here by pip, not in editable mode (then no network is "
            "needed), or mend the names in ImageSpec(packages=...)"
        )


def _installed(name: str) -> metadata.Distribution | None:
    """A package whose files this environment has, and a record of them: that of an editable one has no files."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    origin = distribution.read_text("direct_url.json")
    if origin and json.loads(origin).get("dir_info", {}).get("editable"):
        return None
    return distribution if distribution.read_text("RECORD") else None


def _collect(name: str, distribution: metadata.Distribution, found: dict[str, metadata.Distribution]) -> list[str]:
    """Put a package and all that it needs into `found`; what of it is missing here."""
    missing = []
    waiting: list[tuple[str, metadata.Distribution, frozenset[str]]] = [(name, distribution, frozenset())]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, distribution, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found[name] = distribution
        for line in distribution.requires or ():
            needed, _, marker = line.partition(";")
            asked = _EXTRA.search(marker)
            match = _NEEDED.match(needed)
            if match is None or (asked and _normal(asked[1]) not in extras):
                continue
            needed = _normal(match[1])
            other = _installed(needed)
            if other is not None:
                wants = frozenset(_normal(extra) for extra in (match[2] or "").split(",") if extra.strip())
                waiting.append((needed, other, wants))
            elif not marker:
                # With a marker, its absence says that the marker does not hold here: pip looked at it.
                missing.append(needed)
    return missing


def _useful(parts: tuple[str, ...]) -> bool:
    if "__pycache__" in parts or Path(parts[-1]).suffix in _USELESS:
        return False
    if parts[0] in _UNTESTED and not _TESTS.isdisjoint(parts[1:-1]):
        return False
    return not (parts[-1] in _LOCAL and parts[0].endswith(".dist-info"))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
