"""Knowing and ending the processes of the code, as the worker: by uid where it has several, else by descent."""

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Ended = tuple[int, Any]  # wait status, resource usage
_PATIENCE = 5.0  # seconds
_NOBODY = 1_999_999_999  # nobody's, also not the one of that name


@dataclass(frozen=True)
class Process:
    """A process as /proc tells of it; ``alive`` if anything of it still runs."""

    pid: int
    parent: int
    uid: int
    session: int
    alive: bool


class Reaper:
    """Takes the exits of all children, the orphans that fall to the worker among them."""

    def __init__(self) -> None:
        self.exits: dict[int, Ended] = {}
        self.watched: set[int] = set()

    def reap(self) -> None:
        """Take all exits that there are; those of watched processes are kept in `exits`."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                continue  # a child that has asked to be traced, and is stopped by a signal: it has not ended
            self.note(pid, status, usage)

    def note(self, pid: int, status: int, usage: Any) -> None:
        """Keep an exit, if somebody waits for it."""
        if pid in self.watched:
            self.watched.discard(pid)
            self.exits[pid] = (status, usage)


def kill_uid(uid: int, reaper: Reaper) -> bool:
    """End every process of a uid, also inside a fork bomb; whether none is left.

    kill(-1) walks all processes at once, so nothing can be forked past it; it spares those whom the caller may not
    signal, and with that effective uid the worker may signal no others. Who may signal the worker is decided by its
    real and saved uids, which are nobody's and root's meanwhile. A killer that had to fork would fail where a bomb
    has used all processes.
    """

    def strike() -> list[int]:
        os.setresuid(_NOBODY, uid, 0)
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.setresuid(0, 0, 0)
        return [process.pid for process in processes() if process.uid == uid and process.alive]

    return _until_none(strike, reaper)


def kill_descendants(spared: Iterable[int], reaper: Reaper) -> bool:
    """End every descendant that is code's, but for the spared ones and theirs; whether none is left.

    All are stopped first: stopped processes cannot fork, and still count against their limit. Templates and their
    forks that wait for an order are in the worker's session, which code has left, and to which there is no way back.
    """
    spare = frozenset(spared)

    def strike() -> list[int]:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in descendants(os.getpid(), spare):
                try:
                    os.kill(pid, number)
                except (ProcessLookupError, PermissionError):
                    continue
        return descendants(os.getpid(), spare)

    return _until_none(strike, reaper)


def descendants(root: int, spared: frozenset[int]) -> list[int]:
    """The living processes of other sessions below a process, without the spared ones and what is below them."""
    children: dict[int, list[Process]] = {}
    everything = processes()
    own = next((process.session for process in everything if process.pid == root), 0)
    for process in everything:
        children.setdefault(process.parent, []).append(process)
    found, waiting = [], [root]
    while waiting:
        for process in children.get(waiting.pop(), ()):
            if process.pid not in spared:
                waiting.append(process.pid)
                if process.alive and process.session != own:
                    found.append(process.pid)
    return found


def processes() -> list[Process]:
    """All processes that can be seen, those that have ended but not been waited for among them."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/status", "rb") as file:
                text = file.read(4096)
        except OSError:  # it has ended meanwhile
            continue
        # The name, which the process chooses, comes first; the kernel escapes newlines in it.
        ended = _field(text, b"\nState:\t")[:1] in (b"Z", b"X")
        # A process whose first thread has ended looks like that too, while others of its threads run.
        alive = not ended or int(_field(text, b"\nThreads:\t")) > 1
        parent, uid = int(_field(text, b"\nPPid:\t")), int(_field(text, b"\nUid:\t"))
        session = int(text[text.index(b"\nNSsid:\t") + 8 :].split(b"\n", 1)[0].split()[-1])
        found.append(Process(int(name), parent, uid, session, alive))
    return found


def _field(text: bytes, head: bytes) -> bytes:
    """The first word after a head."""
    return text[text.index(head) + len(head) :].split(None, 1)[0]


def peak_memory(pid: int) -> int:
    """Bytes of resident memory that a living process had at most; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = [line for line in file if line.startswith(b"VmHWM:")]
    except OSError:
        return 0
    return int(lines[0].split()[1]) * 1024 if lines else 0


def cpu_seconds(pid: int) -> float:
    """CPU time that a living process and its reaped children have used; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
    except OSError:
        return 0.0
    return sum(int(fields[k]) for k in (11, 12, 13, 14)) / os.sysconf("SC_CLK_TCK")


def _until_none(strike: Any, reaper: Reaper) -> bool:
    deadline = time.monotonic() + _PATIENCE
    while strike():
        reaper.reap()
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    reaper.reap()
    return True
