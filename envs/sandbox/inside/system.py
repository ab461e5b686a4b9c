"""The few calls of Linux that Python's standard library has no name for."""

import ctypes
import os

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Set a property of this process. Raises OSError."""
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        _raise("prctl")


def prctl_pointer(option: int, value: int, data: bytes) -> None:
    """Set a property of this process that is given by a structure. Raises OSError."""
    if _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_char_p(data), 0, 0):
        _raise("prctl")


def syscall(number: int, *arguments: object) -> int:
    """Make a system call that has no function. Raises OSError."""
    answer = int(_libc.syscall(number, *arguments))
    if answer < 0:
        _raise(f"system call {number}")
    return answer


def drop_capabilities() -> None:
    """Give up every capability for good: those of this process, and those that a program it starts could gain."""
    for capability in range(64):
        if _libc.prctl(24, ctypes.c_ulong(capability), 0, 0, 0):  # PR_CAPBSET_DROP; beyond the last one it is refused
            break
    head = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    none = (ctypes.c_uint32 * 6)()
    if _libc.capset(head, none):
        _raise("capset")


def unshare(flags: int) -> None:
    """Leave namespaces for new ones. Raises OSError."""
    if _libc.unshare(flags):
        _raise("unshare")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount a file system. Raises OSError."""
    if _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()):
        _raise(f"mount {target}")


def make_read_only(path: str, *, below: bool = True) -> None:
    """Make a mount, and all mounts ``below`` it, read-only. Raises OSError (before Linux 5.12: ENOSYS)."""
    attributes = (ctypes.c_uint64 * 4)(1, 0, 0, 0)  # struct mount_attr: attr_set = MOUNT_ATTR_RDONLY
    at_fdcwd, at_recursive, number = -100, 0x8000, 442
    if _libc.syscall(
        number, at_fdcwd, path.encode(), at_recursive if below else 0, attributes, ctypes.sizeof(attributes)
    ):
        _raise(f"mount_setattr {path}")


def _raise(what: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")
