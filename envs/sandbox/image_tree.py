"""The files of an image as a tar archive: in a fixed order, owned by root, without any right too many."""

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

_MTIME = 946_684_800  # 2000-01-01: zip archives cannot hold times before 1980


@dataclass(slots=True)
class _Entry:
    kind: bytes
    mode: int
    source: Path | None = None
    data: bytes = b""
    target: str = ""


@dataclass(slots=True)
class ImageTree:
    """What is to be in an image, by absolute path.

    Args:
        links: folders that are links to others, as ``{"/bin": "usr/bin"}``; what is put into one goes to its target.
    """

    links: dict[str, str] = field(default_factory=dict)
    _entries: dict[str, _Entry] = field(default_factory=dict)

    def __contains__(self, path: str) -> bool:
        return self.resolve(path) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def resolve(self, path: str) -> str:
        """A path with no linked folder in it."""
        head, slash, rest = path[1:].partition("/")
        target = self.links.get(f"/{head}")
        return f"/{target}/{rest}" if slash and target is not None else path

    def add_file(self, path: str, source: Path) -> None:
        """A copy of a file of this machine; executable if that is. What is there already stays."""
        mode = source.stat().st_mode
        self._put(path, _Entry(tarfile.REGTYPE, 0o755 if mode & stat.S_IXUSR else 0o644, source=source))

    def add_data(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """A file with this content. What is there already stays."""
        self._put(path, _Entry(tarfile.REGTYPE, mode, data=data))

    def add_link(self, path: str, target: str) -> None:
        """A symbolic link. What is there already stays."""
        self._put(path, _Entry(tarfile.SYMTYPE, 0o777, target=target))

    def add_folder(self, path: str, mode: int = 0o755) -> None:
        """A folder; folders with files in them come by themselves."""
        self._put(path, _Entry(tarfile.DIRTYPE, mode))

    def write(self, file: IO[bytes]) -> None:
        """Write the archive."""
        for path, target in self.links.items():
            self._entries.setdefault(path, _Entry(tarfile.SYMTYPE, 0o777, target=target))
        for path in list(self._entries):
            for parent in list(PurePosixPath(path).parents)[:-1]:
                self._entries.setdefault(str(parent), _Entry(tarfile.DIRTYPE, 0o755))
        with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for path in sorted(self._entries):
                _write(archive, path, self._entries[path])

    def _put(self, path: str, entry: _Entry) -> None:
        self._entries.setdefault(self.resolve(path), entry)


def walk(folder: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """The files below a folder, without those whose name, or whose folder's name, is skipped. Links are followed."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skipped)
        yield from (Path(parent, name) for name in sorted(names) if name not in skipped)


def _write(archive: tarfile.TarFile, path: str, entry: _Entry) -> None:
    info = tarfile.TarInfo(path[1:])
    info.type, info.mode, info.mtime, info.linkname = entry.kind, entry.mode, _MTIME, entry.target
    info.uname = info.gname = "root"
    if entry.kind != tarfile.REGTYPE:
        archive.addfile(info)
        return
    data = entry.data if entry.source is None else entry.source.read_bytes()
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))
