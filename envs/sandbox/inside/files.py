"""Files of the workspace, as the code's own user: putting, getting, listing, and wiping everything.

No path is followed through a symbolic link, and whatever code has left there - pipes, devices, folders without rights
or a thousand deep, names that are no text - is met.
"""

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator

MAX_ENTRIES = 10_000
_MAX_PATHS = 1 << 20  # bytes of all paths of a listing
_MAX_DEPTH = 64
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FileError(Exception):
    """A file cannot be put, got or listed, for a reason that its user can mend."""


@contextlib.contextmanager
def acting_as(uid: int | None, gid: int | None) -> Iterator[None]:
    """Touch files as the code's own user, so that nothing can be reached for which it has no right itself."""
    if uid is None or gid is None:
        yield
        return
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def put(root: str, path: str, data: bytes, *, first: bool) -> None:
    """Write a file, or add to it if this is not its ``first`` piece. Folders are made; a link there is replaced.

    Raises:
        FileError: the path leaves the workspace, a folder is in the way, or there is no room.
    """
    *folders, name = _parts(path)
    try:
        with _inside(root, folders, make=True) as folder:
            if first:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            file = os.open(name, flags, 0o666, dir_fd=folder)
            try:
                while data:
                    data = data[os.write(file, data) :]
            finally:
                os.close(file)
    except OSError as error:
        raise FileError(f"{path!r} cannot be written: {error.strerror}") from error


def get(root: str, path: str, offset: int, count: int) -> tuple[int, bytes]:
    """The size of a plain file and ``count`` bytes of it from ``offset``.

    Raises:
        FileError: there is none, or it is no plain file.
    """
    *folders, name = _parts(path)
    try:
        with _inside(root, folders, make=False) as folder:
            # A pipe would block the worker.
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise FileError(f"{path!r} is not a plain file")
                return status.st_size, os.pread(file, count, offset)
            finally:
                os.close(file)
    except OSError as error:
        raise FileError(f"{path!r} cannot be read: {error.strerror}") from error


def listing(root: str, path: str) -> list[tuple[str, int, bool]]:
    """Path, size and whether it is a folder, of everything below a folder, sorted; at most MAX_ENTRIES.

    Raises:
        FileError: there is no such folder, or it holds too much.
    """
    found: list[tuple[str, int, bool]] = []
    start = "/".join(_parts(path, may_be_root=True))
    waiting, length = [start], 0
    while waiting:
        relative = waiting.pop()
        if relative.count("/") > _MAX_DEPTH:
            raise FileError(f"{path!r} has folders in more than {_MAX_DEPTH} levels")
        try:
            with _inside(root, relative.split("/") if relative else [], make=False) as folder:
                for name in os.listdir(folder):
                    child = f"{relative}/{name}" if relative else name
                    length += len(child)
                    if len(found) >= MAX_ENTRIES or length > _MAX_PATHS:
                        raise FileError(f"{path!r} holds too much to be listed")
                    with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        is_dir = stat.S_ISDIR(status.st_mode)
                        found.append((child, 0 if is_dir else status.st_size, is_dir))
                        if is_dir:
                            waiting.append(child)
        except OSError as error:
            if relative == start:
                raise FileError(f"{path!r} cannot be listed: {error.strerror}") from error
    return sorted(found)


def wipe(folders: Iterable[str], kept: Collection[str] = ()) -> int:
    """Remove everything in some folders that this user may remove, and open its folders for the next who tries.

    Args:
        folders: the folders.
        kept: paths in them, right below, that are left alone.

    Returns:
        How many entries are left.
    """
    return sum(_wipe(folder, kept) for folder in folders if os.path.isdir(folder))


def _wipe(root: str, kept: Collection[str]) -> int:
    """Depth first without recursion and by descriptors, so that neither depth nor the length of paths matters."""
    left = 0
    try:
        top = os.open(root, _FOLDER)
    except OSError:
        return 1
    with contextlib.suppress(OSError):
        for name in os.listxattr(top):
            os.removexattr(top, name)
    stack = [(top, [name for name in os.listdir(top) if f"{root}/{name}" not in kept])]
    while stack:
        folder, names = stack[-1]
        if not names:
            os.close(folder)
            stack.pop()
            if stack:
                left += not _remove(os.rmdir, stack[-1][1].pop(), stack[-1][0])
            continue
        below = _open_folder(names[-1], folder)
        if below is None:
            left += not _remove(os.unlink, names.pop(), folder)
        elif len(stack) > 200:
            # Too many descriptors: a deeper folder is lifted to the top and met there.
            os.close(below)
            left += not _lift(names.pop(), folder, top, stack)
        else:
            stack.append((below, os.listdir(below)))
    return left


def _open_folder(name: str, parent: int) -> int | None:
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            return None
        with contextlib.suppress(OSError):  # somebody else's: only its owner opens it
            os.chmod(name, 0o777, dir_fd=parent)
        return os.open(name, _FOLDER, dir_fd=parent)
    except OSError:
        return None


def _lift(name: str, folder: int, top: int, stack: list[tuple[int, list[str]]]) -> bool:
    lifted = f".lifted-{len(stack[0][1])}-{os.urandom(4).hex()}"
    try:
        os.rename(name, lifted, src_dir_fd=folder, dst_dir_fd=top)
    except OSError:
        return False
    stack[0][1].insert(0, lifted)
    return True


def _remove(how: object, name: str, parent: int) -> bool:
    assert callable(how)
    try:
        how(name, dir_fd=parent)
    except OSError:
        return False
    return True


def _parts(path: str, *, may_be_root: bool = False) -> list[str]:
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise FileError(f"{path!r} is no path: it has characters that no encoding has") from error
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or "\0" in path or not (parts or may_be_root):
        raise FileError(f"{path!r} is no path inside the workspace: give a relative one without '..'")
    return parts


@contextlib.contextmanager
def _inside(root: str, folders: list[str], *, make: bool) -> Iterator[int]:
    current = os.open(root, _FOLDER)
    try:
        for name in folders:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o777, dir_fd=current)
            below = os.open(name, _FOLDER, dir_fd=current)
            os.close(current)
            current = below
        yield current
    finally:
        os.close(current)
