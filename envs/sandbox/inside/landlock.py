"""Landlock: where code may write, on top of what its user may; asked of the kernel by the process itself (Linux 5.13).

Reading is left alone. Writing is allowed below some folders only: not in /proc, where a process could make the worker
the kernel's first choice when memory runs out, and where no user's rights help. From Linux 6.12 on, signals to
processes outside are refused as well; from 6.7 on TCP can be.
"""

import ctypes
import os
import struct
from collections.abc import Sequence

from toolgym.envs.sandbox.inside.system import syscall

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # numbers of the system calls, the same on every machine
_WRITE_FILE = 1 << 1
_CHANGES = sum(1 << bit for bit in range(4, 13))  # removing and making of everything
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_TCP = 0b11  # binding and connecting
_SIGNALS = 1 << 1
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")


def make_rules(writable: Sequence[str], *, network: bool) -> int | None:
    """Rules that let code write below some folders, and use TCP or not.

    Returns:
        A descriptor for `restrict`; None where the kernel has no Landlock.
    """
    try:
        version = syscall(_CREATE, None, 0, 1)
    except OSError:
        return None
    access = _WRITE_FILE | _CHANGES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled = [access, 0 if network else _TCP, _SIGNALS][: 1 if version < 4 else 2 if version < 6 else 3]
    data = struct.pack(f"={len(handled)}Q", *handled)
    rules = syscall(_CREATE, ctypes.c_char_p(data), len(data), 0)
    for path in (*writable, *_DEVICES):
        if os.path.exists(path):
            held = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = access if os.path.isdir(path) else access & (_WRITE_FILE | _TRUNCATE)
            syscall(_ADD, rules, 1, ctypes.c_char_p(struct.pack("=Qi", allowed, held)), 0)
            os.close(held)
    return rules


def restrict(rules: int) -> None:
    """Put this process and all that it starts under rules, for good. Raises OSError."""
    syscall(_RESTRICT, rules, 0)
