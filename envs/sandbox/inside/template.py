"""Templates: processes that have imported what is slow to import, and fork themselves for each snippet.

Every process of the code is a fork of a template, never of the worker: templates have seen no request, so that nothing
of an earlier program, file or answer can be found in the memory of a later one.
"""

import contextlib
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from toolgym.envs.sandbox.inside import child
from toolgym.envs.sandbox.inside.processes import Reaper
from toolgym.envs.sandbox.inside.settings import Settings

_MESSAGE = 4_096
_IMPORTING = 25.0  # seconds, below the client's patience
_ANSWER = 10.0  # seconds


class TemplateDied(Exception):
    """The template has ended; another one takes its place."""


class Template:
    """The worker's side of a template. It is forked at once, and imports when it is first used.

    Args:
        settings: of the worker.
        modules: what it imports.
    """

    def __init__(self, settings: Settings, modules: Sequence[str]) -> None:
        self._settings, self._modules = settings, modules
        self._ready = False
        self._named = re.compile(rf"\b(?:{'|'.join(map(re.escape, modules))})\b") if modules else None
        self._begin()

    @property
    def descriptor(self) -> int:
        """Readable when an exit of one of its forks is there to `take`."""
        return self._socket.fileno()

    def wanted(self, code: str) -> bool:
        """Whether code names one of the modules."""
        return self._named is not None and self._named.search(code) is not None

    def make_ready(self) -> None:
        """See that it has imported everything.

        Raises:
            TemplateDied: it has ended, e.g. by the kernel for its memory; there is another one now.
        """
        if not self._ready:
            self._socket.settimeout(_IMPORTING)
            try:
                self._socket.send(b"import")
                self._receive()
            except OSError as error:
                raise self._another() from error
            self._socket.settimeout(_ANSWER)
            self._ready = True

    def spawn(self, uid: int | None, kind: str, pipes: child.Pipes, code: str, reaper: Reaper) -> int:
        """Fork it for a program, a shell command or a session; the pid.

        Raises:
            TemplateDied: it has ended; there is another one now.
        """
        ours, theirs = socket.socketpair()
        control = pipes.control or ()
        try:
            files = [pipes.stdin, pipes.stdout, pipes.stderr, theirs.fileno(), *control]
            socket.send_fds(self._socket, [json.dumps({"uid": uid, "kind": kind}).encode()], files)
            while True:
                answer = self._receive()
                if "pid" in answer:
                    break
                self._note(answer, reaper)
        except OSError as error:
            raise self._another() from error
        else:
            reaper.exits.pop(answer["pid"], None)  # of an earlier process of that number
            reaper.watched.add(answer["pid"])
            theirs.close()
            ours.settimeout(_ANSWER)
            with contextlib.suppress(OSError):  # it has been killed already
                ours.sendall(code.encode("utf-8", "surrogatepass"))
            return int(answer["pid"])
        finally:
            ours.close()
            theirs.close()

    def take(self, reaper: Reaper) -> None:
        """Take one exit that it tells of."""
        try:
            self._note(self._receive(), reaper)
        except TemplateDied:
            return

    def _begin(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            _serve(self._settings, theirs, self._modules)
        theirs.close()
        self._ready = False

    def _another(self) -> TemplateDied:
        self._socket.close()
        self._begin()
        return TemplateDied("the template has ended")

    def _receive(self) -> dict[str, Any]:
        try:
            data = self._socket.recv(_MESSAGE)
        except OSError as error:
            raise self._another() from error
        if not data:
            raise self._another()
        answer: dict[str, Any] = json.loads(data)
        return answer

    @staticmethod
    def _note(answer: dict[str, Any], reaper: Reaper) -> None:
        usage = Usage(*answer["usage"])
        reaper.note(answer["ended"], answer["status"], usage)


class Usage:
    """The part of a process' resource usage that is told."""

    def __init__(self, ru_utime: float, ru_stime: float, ru_maxrss: int) -> None:
        self.ru_utime, self.ru_stime, self.ru_maxrss = ru_utime, ru_stime, ru_maxrss


def _serve(settings: Settings, channel: socket.socket, modules: Sequence[str]) -> NoReturn:
    """Be a template: import when told to, then fork on demand and tell of exits, until the worker is gone."""
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(channel.fileno(), 3)
        os.closerange(4, child.RULES)
        channel.detach()
        mine = socket.socket(fileno=3)
        if not mine.recv(_MESSAGE):
            os._exit(0)  # the worker is gone
        # numpy.random is imported by numpy when it is first looked at: once here, not in every fork.
        for name in (*modules, *(["numpy.random"] if "numpy" in modules else [])):
            try:
                importlib.import_module(name)
            except Exception:
                sys.stderr.write(f"toolgym worker: module {name} cannot be preloaded\n")
        gc.collect()
        gc.freeze()
        mine.send(b'{"ready": 1}')
        _fork_on_demand(settings, mine)
    finally:
        os._exit(0)


def _fork_on_demand(settings: Settings, channel: socket.socket) -> None:
    """Keep one fork ready, which takes the next order; fork another when it has; tell of exits.

    Forking takes as long as a small snippet: so it is done before anybody waits for it.
    """
    wake, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    taken, taking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    events = select.poll()
    events.register(3, 0)  # its end alone: orders are for the fork
    events.register(wake, select.POLLIN)
    events.register(taken, select.POLLIN)
    ready = 0
    while True:
        if ready == 0:
            with contextlib.suppress(BlockingIOError):  # no process can be had now
                ready = os.fork()
                if ready == 0:
                    _take_order(settings, channel, taking)
        descriptors = [fd for fd, _ in events.poll(None if ready else 20)]
        if 3 in descriptors:
            return
        # Before its exit is looked at: it may have taken an order, and have ended already.
        with contextlib.suppress(BlockingIOError):
            ready = 0 if os.read(taken, 1) else ready
        if wake in descriptors:
            os.read(wake, 4_096)
            if _tell_exits(channel, ready):
                ready = 0


def _tell_exits(channel: socket.socket, ready: int) -> bool:
    """Tell of forks that have ended; whether the one that is ready, of which nobody knows, was among them."""
    lost = False
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return lost
        if pid == 0:
            return lost
        if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
            continue  # it has asked to be traced: it has not ended
        if pid == ready:
            lost = True
            continue
        told = [usage.ru_utime, usage.ru_stime, usage.ru_maxrss]
        channel.send(json.dumps({"ended": pid, "status": status, "usage": told}).encode())


def _take_order(settings: Settings, channel: socket.socket, taking: int) -> NoReturn:
    data, files, _, _ = socket.recv_fds(channel, _MESSAGE, 8)
    if not data:
        os._exit(0)
    os.write(taking, b"1")
    channel.send(b'{"pid": %d}' % os.getpid())
    _be_child(settings, json.loads(data), files)


def _be_child(settings: Settings, order: dict[str, Any], files: Sequence[int]) -> NoReturn:
    try:
        with open(files[3], "rb", closefd=False) as source:
            code = source.read().decode("utf-8", "surrogatepass")
        control = (files[4], files[5]) if len(files) > 5 else None
        child.become(settings, order["uid"], child.Pipes(files[0], files[1], files[2], control))
        if order["kind"] == "session":
            child.serve_cells(3, 4)
        if order["kind"] == "shell":
            child.run_command(settings, code)
        child.run_python(code)
    finally:
        child.give_up()
