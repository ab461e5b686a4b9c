"""Confining a worker that runs on the client's own machine: namespaces of its own, where the kernel lets it.

Done by the worker to itself, before it takes any request. Nothing here needs a program or a right beyond what the
user has: where user namespaces are allowed, everybody may do it; root may do it anyway.
"""

import contextlib
import dataclasses
import fcntl
import os
import signal
import socket
import struct
from typing import NoReturn

from toolgym.envs.sandbox.inside.settings import Settings
from toolgym.envs.sandbox.inside.system import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    make_read_only,
    mount,
    prctl,
    unshare,
)

_NEW = 0x00020000 | 0x08000000 | 0x20000000 | 0x40000000 | 0x04000000  # CLONE_NEWNS, IPC, PID, NET, UTS
_NEWUSER = 0x10000000
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 2, 4, 4_096, 16_384, 1 << 18
# Where secrets, and sockets of other programs, lie; what of them is to be seen is put back.
_HIDDEN = ("/home", "/root", "/run", "/mnt", "/media", "/srv", "/var/tmp", "/dev/pts")
_WORKSPACE = "/mnt/workspace"


def confine(settings: Settings) -> Settings | None:
    """Confine this process and all that it will fork: processes, network, IPC and files of its own.

    From inside, no process outside can be seen or reached; there is no network; the file system is read-only, with
    homes hidden and private, bounded folders where code may write. All of it, or nothing: what a kernel or a container
    refuses is found out by a trial.

    Returns:
        The settings as they are from now on; None where nothing could be confined. It returns in a forked process,
        which is to go on as the worker.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the code come to the worker, also without a namespace
    trial = os.fork()
    if trial == 0:
        _try(settings)
    if os.waitpid(trial, 0)[1] != 0:
        return None
    _enter()
    _stay_behind()
    return _private_files(settings)


def _try(settings: Settings) -> NoReturn:
    status = 1
    try:
        _enter()
        child = os.fork()
        if child == 0:
            _private_files(settings)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os._exit(1 if status else 0)


def _enter() -> None:
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        unshare(_NEW)
        return
    unshare(_NEW | _NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _stay_behind() -> None:
    """The first child is PID 1 of the new namespace and goes on; this process waits for it, and ends with it."""
    child = os.fork()
    if child == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whoever ends the process that is known outside, ends all
        return
    os.closerange(0, 1_024)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    os._exit(0)


def _private_files(settings: Settings) -> Settings:
    mount("none", "/", "", _REC | _PRIVATE)
    # Held by descriptors: their paths may be hidden in a moment.
    shown = {path: os.open(path, os.O_PATH) for path in settings.visible if os.path.isdir(path)}
    make_read_only("/")
    mount("proc", "/proc", "proc", _NOSUID | _NODEV)
    hidden = [path for path in _HIDDEN if os.path.isdir(path) and not os.path.islink(path)]
    for path in hidden:
        _mount_private(path, 1 << 20, "0755")
    _mount_private("/tmp", settings.folder_bytes["tmp"], "1777")
    _mount_private("/dev/shm", settings.folder_bytes["shm"], "1777")
    for path, held in shown.items():
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{held}", path, "", _BIND | _REC)
        os.close(held)
    kept = tuple(dict.fromkeys("/".join(path.split("/")[:3]) for path in shown if path.startswith("/tmp/")))
    for path in kept:  # an interpreter below /tmp: the way to it is no place for code
        mount(path, path, "", _BIND | _REC)
        make_read_only(path)
    for path in hidden:
        if path != "/mnt":
            make_read_only(path)
    os.makedirs(_WORKSPACE)
    _mount_private(_WORKSPACE, settings.folder_bytes["workspace"], "0777")
    folders = ["/tmp", "/dev/shm"]
    with contextlib.suppress(OSError):
        mount("mqueue", "/dev/mqueue", "mqueue", _NOSUID | _NODEV)
        folders.append("/dev/mqueue")
    make_read_only("/mnt", below=False)
    _raise_loopback()
    environment = settings.environment | {"HOME": _WORKSPACE, "TMPDIR": "/tmp"}
    return dataclasses.replace(
        settings, workspace=_WORKSPACE, folders=tuple(folders), environment=environment, kept=kept
    )


def _raise_loopback() -> None:
    """A new network has a loopback interface, which is down."""
    with socket.socket() as any_socket, contextlib.suppress(OSError):
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH22x", b"lo", 0x41))  # SIOCSIFFLAGS: up and running


def _mount_private(path: str, size: int, mode: str) -> None:
    mount("private", path, "tmpfs", _NOSUID | _NODEV, f"mode={mode},size={size},nr_inodes=20000")
