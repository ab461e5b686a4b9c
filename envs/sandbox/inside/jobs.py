"""A running snippet or session: its process, its pipes, and what it has written."""

import os
import select
import time
from typing import Any

from toolgym.envs.sandbox.inside.capture import Capture
from toolgym.envs.sandbox.inside.child import Pipes
from toolgym.envs.sandbox.inside.settings import Settings

_PIECE = 65_536


class Job:
    """A process with its captured output.

    Attributes:
        pid: the process that was forked; 0 until it is.
        answers: for a session, where it says how its cells have ended.
    """

    def __init__(self, settings: Settings, stdin: bytes, *, session: bool) -> None:
        self.pid = 0
        self._limit = settings.output
        self._theirs: list[int] = []
        self._feeder: int | None = None
        self._unfed = memoryview(b"")
        self._streams: dict[int, Capture] = {}
        self.answers: int | None = None
        self._cells: int | None = None
        self._nonce = self._said = b""
        self._open(stdin, session)
        self.begin()

    @property
    def pipes(self) -> Pipes:
        """The child's ends."""
        stdin, stdout, stderr, *control = self._theirs
        return Pipes(stdin, stdout, stderr, (control[0], control[1]) if control else None)

    @property
    def descriptors(self) -> list[int]:
        """What is to be polled: the streams that are still open, and the answers of a session."""
        return [*self._streams, *([] if self.answers is None else [self.answers])]

    @property
    def written(self) -> int:
        """Bytes written since `begin`, both streams together."""
        return self.out.total + self.err.total

    def begin(self) -> None:
        """Begin to capture anew."""
        self.out, self.err = Capture(self._limit), Capture(self._limit)
        for fd, capture in zip((self._out, self._err), (self.out, self.err), strict=True):
            if fd in self._streams:
                self._streams[fd] = capture

    def started(self, pid: int) -> None:
        """The child is forked: let go of its ends."""
        self.pid = pid
        for fd in self._theirs:
            os.close(fd)
        self._theirs = []

    def read(self, fd: int) -> bool:
        """Take one piece of a stream; whether there may be more at once."""
        try:
            data = os.read(fd, _PIECE)
        except BlockingIOError:
            return False
        if not data:
            del self._streams[fd]
            os.close(fd)
            return False
        self._streams[fd].feed(data)
        return True

    @property
    def hungry(self) -> int | None:
        """The descriptor that is to be polled for `feed`; None where all of stdin is written."""
        return self._feeder

    def feed(self) -> None:
        """Write as much of stdin as the code takes now."""
        if self._feeder is None:
            return
        try:
            self._unfed = self._unfed[os.write(self._feeder, self._unfed) :]
        except BlockingIOError:
            return
        except OSError:  # it has closed its end
            self._unfed = self._unfed[:0]
        if not self._unfed:
            os.close(self._feeder)
            self._feeder = None

    def drain(self, limit: int) -> None:
        """Take what is already written, up to ``limit`` bytes in all: nobody may write for ever."""
        for fd in list(self._streams):
            while self.written <= limit and self.read(fd):
                pass

    def signal(self, number: int) -> None:
        """Send a signal to the process itself, if it still is there."""
        try:
            os.kill(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return

    def close(self) -> None:
        """Let go of everything."""
        for fd in (*self._streams, *self._theirs, *([] if self._feeder is None else [self._feeder])):
            os.close(fd)
        self._feeder = None
        self._streams, self._theirs = {}, []
        for end in (self.answers, self._cells):
            if end is not None:
                os.close(end)
        self.answers = self._cells = None

    def send_cell(self, code: bytes) -> bool:
        """Hand a cell to the session; whether it took it within a second."""
        assert self._cells is not None
        # What the session says from now on without these bytes is no answer to this cell.
        self._nonce = os.urandom(8).hex().encode()
        self._said = b""
        data = memoryview(self._nonce + b"%08x" % len(code) + code)
        deadline = time.monotonic() + 1.0
        while data:
            try:
                data = data[os.write(self._cells, data) :]
            except BlockingIOError:
                if not wait_ready([], deadline - time.monotonic(), self._cells) and time.monotonic() > deadline:
                    return False
            except OSError:  # it has closed its end
                return False
        return True

    def take_answer(self) -> tuple[bool, int] | None:
        """Whether the cell went well, and its exit code; None while it has not said so.

        Raises:
            EOFError: it never will: the session has closed its end.
        """
        assert self.answers is not None
        try:
            data = os.read(self.answers, _PIECE)
        except BlockingIOError:
            return None
        if not data:
            raise EOFError
        self._said = (self._said + data)[-2 * _PIECE :]
        at = self._said.find(self._nonce)
        answer = self._said[at + 16 : at + 19] if at >= 0 else b""
        return (answer[:1] == b"O", int.from_bytes(answer[1:], "big")) if len(answer) == 3 else None

    def _open(self, stdin: bytes, session: bool) -> None:
        if stdin:
            source, self._feeder = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._feeder, False)
            self._unfed = memoryview(stdin)
        else:
            source = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._theirs.append(source)
        self._out, out = os.pipe2(os.O_CLOEXEC)
        self._err, err = os.pipe2(os.O_CLOEXEC)
        self._theirs += [out, err]
        for fd in self._theirs:
            if fd != source or stdin:
                os.fchmod(fd, 0o666)  # so that code, which has another uid, can open /dev/stdout
        for fd in (self._out, self._err):
            os.set_blocking(fd, False)
            self._streams[fd] = Capture(self._limit)
        if session:
            cells, self._cells = os.pipe2(os.O_CLOEXEC)
            self.answers, answers = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._cells, False)
            os.set_blocking(self.answers, False)
            self._theirs += [cells, answers]


def describe(status: int, usage: Any) -> dict[str, Any]:
    """An exit in the words of a result: exit code or signal, CPU seconds, peak memory in bytes."""
    code = os.waitstatus_to_exitcode(status)
    return {
        "exit_code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "cpu": usage.ru_utime + usage.ru_stime,
        "peak_memory": usage.ru_maxrss * 1024,
    }


def wait_ready(descriptors: list[int], seconds: float, writing: int | None = None) -> list[int]:
    """Those of some descriptors that can be read (one: written) or have hung up, waiting for at most so long."""
    poll = select.poll()
    for fd in descriptors:
        poll.register(fd, select.POLLIN)
    if writing is not None:
        poll.register(writing, select.POLLOUT)
    return [fd for fd, _ in poll.poll(max(0.0, seconds) * 1000)]
