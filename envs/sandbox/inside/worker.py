"""The worker: PID 1 of a box. It takes requests from its stdin one at a time, and answers on its stdout.

Requests and answers are frames (see `frames`). Every request has an ``id`` and an ``op``; every answer has the id of
its request. ``cancel`` is taken also while a request runs. The worker ends, and with it the box, when its stdin ends,
when it is told to terminate, and when it has not heard of its client for as long as its lease.
"""

import contextlib
import gc
import importlib
import os
import signal
import sys
from collections import deque
from typing import Any

from toolgym.envs.sandbox.inside import child, files, frames, syscall_filter
from toolgym.envs.sandbox.inside.confine import confine
from toolgym.envs.sandbox.inside.jobs import wait_ready
from toolgym.envs.sandbox.inside.processes import Reaper
from toolgym.envs.sandbox.inside.runs import Runs
from toolgym.envs.sandbox.inside.settings import Settings

_FRAME_LIMIT = 64 * 1024 * 1024
_LEAN = (
    *("ast", "collections", "datetime", "decimal", "fractions", "functools", "itertools", "json", "linecache"),
    *("math", "random", "re", "statistics", "string", "traceback", "typing"),
)


class Gone(Exception):
    """The client is gone."""


class Channel:
    """The worker's end of the connection.

    Args:
        source, sink: descriptors.
    """

    def __init__(self, source: int, sink: int) -> None:
        self.source, self._sink = source, sink
        self._reader = frames.FrameReader(_FRAME_LIMIT)
        self.requests: deque[frames.Frame] = deque()
        self.cancelled: set[int] = set()

    def send(self, message: dict[str, Any], *parts: bytes) -> None:
        """Send one frame. Raises Gone."""
        data = memoryview(frames.encode(message, *parts))
        try:
            while data:
                data = data[os.write(self._sink, data) :]
        except OSError as error:
            raise Gone from error

    def receive(self) -> None:
        """Take what has arrived. Raises Gone at the end, or if what arrives are no frames."""
        try:
            data = os.read(self.source, 1 << 18)
            arrived = self._reader.feed(data)
        except (OSError, frames.FrameError) as error:
            raise Gone from error
        if not data:
            raise Gone
        for message, parts in arrived:
            if message.get("op") == "cancel":
                self.cancelled.add(message["target"])
            else:
                self.requests.append((message, parts))


class Worker:
    """Serves requests.

    Args:
        settings: see `Settings`.
        channel: the connection to the client.
    """

    def __init__(self, settings: Settings, channel: Channel) -> None:
        self._settings, self._channel = settings, channel
        self._reaper = Reaper()
        self._runs = Runs(settings, self._reaper, channel)

    def serve(self) -> None:
        """Serve until the client is gone, or has not been heard of for as long as the lease."""
        while True:
            while not self._channel.requests:
                ready = wait_ready([self._channel.source, *self._runs.idle_descriptors], self._settings.lease)
                if not ready:
                    return
                if self._channel.source in ready:
                    self._channel.receive()
                self._runs.look_after(ready)
            message, parts = self._channel.requests.popleft()
            if message["id"] in self._channel.cancelled:
                self._channel.cancelled.discard(message["id"])
                continue
            self._answer(message, parts)
            self._channel.cancelled.discard(message["id"])

    def end(self) -> None:
        """Leave nothing behind."""
        self._runs.end_everything()
        self._wipe()

    def _answer(self, message: dict[str, Any], parts: list[bytes]) -> None:
        handler = getattr(self, f"_do_{message['op']}")
        try:
            answer, *data = handler(message, parts)
        except files.FileError as error:
            answer, data = {"refused": str(error)}, []
        except Gone:
            raise
        except Exception as error:
            # Nothing of the code's is run in this process: this is a failure of ours, and the box is to be replaced.
            answer, data = {"failed": f"{type(error).__name__}: {error}"}, []
        self._channel.send({"id": message["id"], **answer}, *data)

    def _do_ping(self, message: dict[str, Any], parts: list[bytes]) -> tuple[Any, ...]:
        return ({},)

    def _do_run(self, message: dict[str, Any], parts: list[bytes]) -> tuple[Any, ...]:
        code, stdin = parts
        text = code.decode("utf-8", "surrogatepass")
        return self._runs.run(message["id"], message["kind"], text, stdin, message["timeout"])

    def _do_exec(self, message: dict[str, Any], parts: list[bytes]) -> tuple[Any, ...]:
        return self._runs.execute(message["id"], parts[0], message["timeout"])

    def _do_close_session(self, message: dict[str, Any], parts: list[bytes]) -> tuple[Any, ...]:
        self._runs.close_session()
        return ({},)

    def _do_put(self, message: dict[str, Any], parts: list[bytes]) -> tuple[Any, ...]:
        with files.acting_as(self._settings.run_uid, self._settings.gid):
            files.put(self._settings.workspace, message["path"], parts[0], first=message["first"])
        return ({},)

    def _do_get(self, message: dict[str, Any], parts: list[bytes]) -> tuple[Any, ...]:
        with files.acting_as(self._settings.run_uid, self._settings.gid):
            size, data = files.get(self._settings.workspace, message["path"], message["offset"], message["count"])
        return {"size": size}, data

    def _do_list(self, message: dict[str, Any], parts: list[bytes]) -> tuple[Any, ...]:
        with files.acting_as(self._settings.run_uid, self._settings.gid):
            return ({"entries": files.listing(self._settings.workspace, message["path"])},)

    def _do_reset(self, message: dict[str, Any], parts: list[bytes]) -> tuple[Any, ...]:
        ended = self._runs.end_everything()
        return ({"clean": self._wipe() == 0 and ended},)

    def _wipe(self) -> int:
        """Remove everything that code has left, as each of its users; how many entries are still there."""
        folders = (self._settings.workspace, *self._settings.folders)
        users = dict.fromkeys((self._settings.run_uid, self._settings.session_uid))
        left = 1
        for _ in range(4):  # one user's folder may hide another's
            for uid in users:
                with files.acting_as(uid, self._settings.gid):
                    left = files.wipe(folders, self._settings.kept)
            if left == 0:
                break
        return left


def main(settings_json: str) -> None:
    """Be the worker; never returns."""
    settings = Settings.from_json(settings_json)
    # Away from the descriptors that code and its libraries use, so that no stray print gets among the frames.
    channel = Channel(os.dup(0), os.dup(1))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    confined = confine(settings) if settings.confine else None
    settings = confined or settings
    for name in _LEAN:
        importlib.import_module(name)
    ruled = child.prepare(settings, network=confined is not None or not settings.confine)
    filtered = settings.confine and syscall_filter.install()
    gc.collect()
    gc.disable()
    gc.freeze()
    worker = Worker(settings, channel)
    with contextlib.suppress(Gone):
        channel.send({"hello": 1, "confined": confined is not None, "filtered": filtered, "ruled": ruled})
        worker.serve()
    worker.end()
    os._exit(0)
