"""Running snippets, commands and sessions, as the worker: start, watch, end, and say how it went."""

import os
import signal
import time
from typing import Any, Protocol

from toolgym.envs.sandbox.inside.jobs import Job, describe, wait_ready
from toolgym.envs.sandbox.inside.processes import Reaper, cpu_seconds, kill_descendants, kill_uid, peak_memory
from toolgym.envs.sandbox.inside.settings import Settings
from toolgym.envs.sandbox.inside.template import Template, TemplateDied

_SOFT = 0.5  # seconds that a session has to answer an interrupt before it is killed
_OOM_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")  # cgroup v2, v1
Answer = tuple[Any, ...]


class Line(Protocol):
    """What is needed of the connection while something runs."""

    source: int
    cancelled: set[int]

    def receive(self) -> None:
        """Take what has arrived."""

    def send(self, message: dict[str, Any], *parts: bytes) -> None:
        """Send one frame."""


class Runs:
    """Runs one thing at a time, beside at most one session.

    Args:
        settings: of the worker.
        reaper: takes exits.
        line: the connection.
    """

    def __init__(self, settings: Settings, reaper: Reaper, line: Line) -> None:
        self._settings, self._reaper, self._line = settings, reaper, line
        # Before the first request: they are never to hold anything of one.
        self._lean, self._rich = Template(settings, ()), Template(settings, settings.preload)
        self._session: Job | None = None
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    @property
    def idle_descriptors(self) -> list[int]:
        """What is to be looked after also while nothing runs."""
        return [self._wake, self._lean.descriptor, self._rich.descriptor]

    def look_after(self, ready: list[int]) -> None:
        """Take exits that have been announced."""
        if self._wake in ready:
            os.read(self._wake, 4_096)
            self._reaper.reap()
        for template in (self._lean, self._rich):
            if template.descriptor in ready:
                template.take(self._reaper)

    def run(self, number: int, kind: str, code: str, stdin: bytes, timeout: float) -> Answer:
        """Run a program or a command in a process of its own, and end all that it leaves behind."""
        job = Job(self._settings, stdin, session=False)
        ooms, began = _oom_kills(), time.monotonic()
        try:
            self._start(job, kind, code, self._settings.run_uid, number)
            began = time.monotonic()  # a template that had to import first is not on the code's account
            why = self._watch(job, number, began + timeout)
            clean = self._end_user(self._settings.run_uid, job)
            self._await_exit(job)
            job.drain(self._settings.flood)
        finally:
            job.close()
        wall = time.monotonic() - began
        status, usage = self._reaper.exits.pop(job.pid, (9, None))
        facts = describe(status, usage) if usage is not None else {"exit_code": None, "signal": 9}
        oom = _oom_kills() > ooms
        return _answer(job, facts, why or _by_exit(facts, job, oom=oom), wall, clean=clean, session_lost=False)

    def execute(self, number: int, code: bytes, timeout: float) -> Answer:
        """Run a cell of the session, which is opened by its first cell. Its time is up: an interrupt, then a kill."""
        lost = self._session is not None and self._session.pid in self._reaper.exits
        if lost:
            self.close_session()  # it ended between two cells; a new one begins
        ooms = _oom_kills()
        job = self._session or self._open_session(code.decode("utf-8", "surrogatepass"), number)
        self._line.send({"id": number, "began": True})
        began, cpu = time.monotonic(), cpu_seconds(job.pid)
        job.begin()
        self._answer: tuple[bool, int] | None = None
        why: str | None = "killed"
        if job.send_cell(code + b"\n"):
            why = self._watch(job, number, began + timeout)
            if why in ("timeout", "killed") and job.pid not in self._reaper.exits:
                job.signal(signal.SIGINT)
                self._watch(job, -1, time.monotonic() + _SOFT)
        answer = None if why == "output_limit" else self._answer
        job.drain(self._settings.flood)
        wall = time.monotonic() - began
        facts: dict[str, Any] = {"exit_code": None, "signal": None, "cpu": max(0.0, cpu_seconds(job.pid) - cpu)}
        facts["peak_memory"] = peak_memory(job.pid)
        oom = _oom_kills() > ooms
        if answer is not None:
            ok, facts["exit_code"] = answer
            fallback = "oom" if oom or _says_memory(job) else "ok" if ok else "error"
            return _answer(job, facts, why or fallback, wall, clean=True, session_lost=lost)
        clean = self.close_session()
        status, usage = self._reaper.exits.pop(job.pid, (9, None))
        if usage is not None:
            facts |= describe(status, usage)
        return _answer(job, facts, why or _by_exit(facts, job, oom=oom), wall, clean=clean, session_lost=True)

    def close_session(self) -> bool:
        """End the session, if there is one; whether nothing of it is left."""
        job, self._session = self._session, None
        if job is None:
            return True
        clean = self._end_user(self._settings.session_uid, job)
        self._await_exit(job)
        job.drain(self._settings.flood)
        job.close()
        return clean

    def end_everything(self) -> bool:
        """End every process of the code; whether none is left."""
        ended = self.close_session()
        if self._settings.run_uid is None:
            return self._end_user(None, None) and ended
        return self._end_user(self._settings.run_uid, None) and ended

    def _open_session(self, code: str, number: int) -> Job:
        job = Job(self._settings, b"", session=True)
        try:
            self._start(job, "session", code, self._settings.session_uid, number)
        except BaseException:
            job.close()
            raise
        self._session = job
        return job

    def _start(self, job: Job, kind: str, code: str, uid: int | None, number: int) -> None:
        template = self._rich if kind != "shell" and self._rich.wanted(code) else self._lean
        # Nothing of a session's first cell is run yet, and there it may be as long as it likes.
        text = "" if kind == "session" else code
        for tries_left in (2, 1, 0):
            try:
                template.make_ready()
                self._line.send({"id": number, "began": True})
                job.started(template.spawn(uid, kind, job.pipes, text, self._reaper))
            except TemplateDied:
                if not tries_left:
                    raise
                continue
            return

    def _watch(self, job: Job, number: int, deadline: float) -> str | None:
        """Wait until the job is done; why it is to be ended before that: its time, a flood, or its caller's wish."""
        while job.pid not in self._reaper.exits:
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            ready = wait_ready([self._line.source, *self.idle_descriptors, *job.descriptors], left, job.hungry)
            if job.hungry is not None and job.hungry in ready:
                job.feed()
            self.look_after(ready)
            for fd in ready:
                if fd in job.descriptors and fd != job.answers:
                    job.read(fd)
            if job.written > self._settings.flood:
                return "output_limit"
            if self._line.source in ready:
                self._line.receive()
            if number in self._line.cancelled:
                return "killed"
            if job.answers is not None and job.answers in ready:
                try:
                    self._answer = job.take_answer()
                except EOFError:
                    return None
                if self._answer is not None:
                    return None
        return None

    def _end_user(self, uid: int | None, job: Job | None) -> bool:
        """End all processes of a user; where there is but one user, all but the template, and the session if it lives.

        The job itself is ended first: what it has written by then is kept.
        """
        if uid is not None:
            return kill_uid(uid, self._reaper)
        session = self._session.pid if self._session is not None and self._session is not job else None
        if job is not None and job.pid not in self._reaper.exits:
            job.signal(signal.SIGKILL)
        return kill_descendants([] if session is None else [session], self._reaper)

    def _await_exit(self, job: Job) -> None:
        """Its exit is there, or will be in a moment: it has been killed."""
        deadline = time.monotonic() + 1.0
        while job.pid not in self._reaper.exits and (left := deadline - time.monotonic()) > 0:
            self.look_after(wait_ready(self.idle_descriptors, min(left, 0.05)))
            self._reaper.reap()


def _answer(
    job: Job, facts: dict[str, Any], status: str, wall: float, *, clean: bool, session_lost: bool
) -> tuple[Any, ...]:
    message = {**facts, "status": status, "wall": wall, "clean": clean, "session_lost": session_lost}
    message["out_total"], message["err_total"] = job.out.total, job.err.total
    return message, *job.out.kept, *job.err.kept


def _by_exit(facts: dict[str, Any], job: Job, *, oom: bool) -> str:
    if facts["exit_code"] == 0:
        return "ok"
    if oom or _says_memory(job):
        return "oom"
    return "killed" if facts["exit_code"] is None else "error"


def _says_memory(job: Job) -> bool:
    """Whether the last line of the trace is Python's own MemoryError."""
    tail = b"".join(job.err.kept).rstrip().rsplit(b"\n", 1)[-1]
    return tail.startswith((b"MemoryError", b"numpy._core._exceptions._ArrayMemoryError"))


def _oom_kills() -> int:
    """How often the kernel has ended a process of this box for its memory."""
    for path in _OOM_FILES:
        try:
            with open(path, "rb") as file:
                counts = [line.split()[1] for line in file if line.startswith(b"oom_kill ")]
        except OSError:
            continue
        return int(counts[0]) if counts else 0
    return 0
