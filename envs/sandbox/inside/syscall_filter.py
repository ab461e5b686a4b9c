"""A filter of system calls for code that runs without a container: what a container's profile would refuse.

A classic BPF program as seccomp(2) takes it: a list of calls that are refused, and four whose arguments decide. Code
cannot take it off, and everything that it starts inherits it.
"""

import ctypes
import os
import struct

from toolgym.envs.sandbox.inside.system import prctl_pointer

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF opcodes
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_NAMESPACES = 0x7E020080  # every CLONE_NEW* flag
_X32 = 0x40000000
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6

# Numbers of system calls, of x86-64 and of aarch64, from the kernel's tables.
_REFUSED = {
    "tracing other processes": ((101, 310, 311, 438, 440), (117, 270, 271, 438, 440)),
    "namespaces and mounts": (
        (161, 165, 155, 166, 272, 308, 428, 429, 430, 431, 432, 433, 442),
        (51, 40, 41, 39, 97, 268, 428, 429, 430, 431, 432, 433, 442),
    ),
    "wide doors into the kernel": (
        (175, 176, 212, 246, 250, 248, 249, 298, 300, 303, 304, 313, 319, 320, 321, 323, 425, 426, 427),
        (105, 106, 18, 104, 219, 217, 218, 241, 262, 264, 265, 273, 279, 294, 280, 282, 425, 426, 427),
    ),
    "asynchronous I/O, of which a whole machine has a bounded number": (
        (206, 207, 208, 209, 210, 333),
        (0, 1, 2, 3, 4, 292),
    ),
    "extended attributes, also of folders that are never removed": ((188, 189, 190, 463), (5, 6, 7, 463)),
    "System V IPC, which nothing wipes": (
        (29, 30, 31, 64, 65, 66, 68, 69, 70, 71, 220),
        (194, 196, 195, 190, 193, 191, 186, 189, 188, 187, 192),
    ),
}
_MACHINES = {  # AUDIT_ARCH, index above, and the numbers of prlimit64, clone, clone3, socket
    "x86_64": (0xC000003E, 0, 302, 56, 435, 41),
    "aarch64": (0xC00000B7, 1, 261, 220, 435, 198),
}


def install() -> bool:
    """Filter the system calls of this process and its children from now on; no_new_privs is set already.

    Returns:
        Whether it holds: not on a machine whose system calls are not known here, or whose kernel refuses.
    """
    machine = os.uname().machine
    if machine not in _MACHINES:
        return False
    program = _program(machine)
    code = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    try:
        prctl_pointer(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head)
    except OSError:
        return False
    return True


def _program(machine: str) -> bytes:
    architecture, index, prlimit, clone, clone3, socket = _MACHINES[machine]
    refused = sorted({number for numbers in _REFUSED.values() for number in numbers[index]})
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _ERRNO | _EPERM),  # another ABI has other numbers
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    # glibc falls back to clone, whose flags can be looked at.
    lines += [(_EQUAL, 0, 1, clone3), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    lines += _by_argument(clone, [(_ANY_BIT, 0, 1, _NAMESPACES), (_RETURN, 0, 0, _ERRNO | _EPERM)])
    lines += _by_argument(prlimit, [(_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _ERRNO | _EPERM)])  # of others than oneself
    known = [(_EQUAL, len(_FAMILIES) - k, 0, family) for k, family in enumerate(_FAMILIES)]
    lines += _by_argument(socket, [*known, (_RETURN, 0, 0, _ERRNO | _EPERM)])
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _by_argument(number: int, judge: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """For one system call: load its first argument, let ``judge`` return or go on, and allow what it lets through."""
    return [(_EQUAL, 0, len(judge) + 2, number), (_LOAD, 0, 0, _ARGUMENT), *judge, (_RETURN, 0, 0, _ALLOW)]
