"""The client's end of the line to a worker: requests out, answers in, each within its time."""

import asyncio
import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolgym.envs.sandbox.inside.frames import Frame, FrameError, FrameReader, encode
from toolgym.envs.sandbox.results import SandboxFailure

_FRAME_LIMIT = 16 * 1024 * 1024
_KEPT_TRACE = 4_096
_DOCKER_HEAD = struct.Struct(">BxxxI")


class DockerStream:
    """Takes Docker's stream of an attached container apart: 8 bytes of header, then a piece of stdout or stderr.

    The format is that of the Engine API's "Attach to a container". Works on pieces of any size, in linear time.
    """

    def __init__(self) -> None:
        self._head = b""
        self._stream, self._left = 0, 0
        self.trace = b""

    def feed(self, data: bytes) -> bytes:
        """What of this piece is stdout; of stderr the last bytes are kept in `trace`."""
        out, at = [], 0
        while at < len(data):
            if self._left == 0:
                missing = _DOCKER_HEAD.size - len(self._head)
                self._head += data[at : at + missing]
                at += missing
                if len(self._head) == _DOCKER_HEAD.size:
                    self._stream, self._left = _DOCKER_HEAD.unpack(self._head)
                    self._head = b""
                continue
            piece = data[at : at + self._left]
            at += len(piece)
            self._left -= len(piece)
            if self._stream == 1:
                out.append(piece)
            else:
                self.trace = (self.trace + piece)[-_KEPT_TRACE:]
        return b"".join(out)


@dataclass
class _Pending:
    """A request that is not answered yet."""

    answer: "asyncio.Future[Frame]"
    begun: "asyncio.Future[None]"

    @property
    def began(self) -> bool:
        """Whether the worker has begun to run what it was asked to."""
        return self.begun.done()


class Connection(asyncio.Protocol):
    """Requests to one worker and their answers.

    Args:
        docker: the stream that comes in has Docker's headers.
        lost: called once when the worker is gone.
    """

    def __init__(self, *, docker: bool, lost: Callable[[], None] = lambda: None) -> None:
        self._stream = DockerStream() if docker else None
        self._reader = FrameReader(_FRAME_LIMIT)
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._dead: SandboxFailure | None = None
        self.hello: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        """Whether the worker can still be talked to."""
        return self._dead is None

    @property
    def trace(self) -> str:
        """The last that the worker itself wrote to its stderr: why it died, if it did."""
        return "" if self._stream is None else self._stream.trace.decode("utf-8", "replace").strip()

    async def request(
        self, message: dict[str, Any], *parts: bytes, timeout: float, begin: float | None = None
    ) -> Frame:
        """Ask, and wait for the answer. A caller that is cancelled cancels the request.

        Args:
            message: the request.
            parts: its binary parts.
            timeout: seconds to wait for the answer.
            begin: for what runs code, seconds to wait until it begins; ``timeout`` counts from then.

        Raises:
            SandboxFailure: the worker is gone (``box_died``), does not answer in time (``box_hung``), answers in no
                known form (``protocol``), or failed in itself (``worker_failed``).
        """
        if self._dead is not None:
            raise SandboxFailure(str(self._dead), kind=self._dead.kind.removeprefix("sandbox_"))
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        pending = _Pending(loop.create_future(), loop.create_future())
        self._pending[number] = pending
        self._send({"id": number, **message}, *parts)
        try:
            if begin is not None:
                first: set[asyncio.Future[Any]] = {pending.answer, pending.begun}
                await asyncio.wait(first, timeout=begin, return_when="FIRST_COMPLETED")
            if begin is None or pending.began:
                await asyncio.wait({pending.answer}, timeout=timeout)
        except asyncio.CancelledError:
            self._send({"id": next(self._numbers), "op": "cancel", "target": number})
            pending.answer.add_done_callback(_take)
            raise
        if not pending.answer.done():
            waited = timeout if begin is None or pending.began else begin
            failure = SandboxFailure(f"no answer within {waited:g} s", kind="box_hung", began=pending.began)
            self.close(failure)
            raise failure
        answer, data = pending.answer.result()
        if "failed" in answer:
            raise SandboxFailure(str(answer["failed"]), kind="worker_failed", began=pending.began)
        return answer, data

    def touch(self) -> None:
        """Let the worker know that its client is alive; nobody waits for the answer."""
        if self._dead is None:
            self._send({"id": 0, "op": "ping"})

    def close(self, failure: SandboxFailure | None = None) -> None:
        """Hang up; what waits for an answer hears why."""
        self._die(failure or SandboxFailure("the box was closed", kind="closed"))
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The line is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Something came in."""
        try:
            frames = self._reader.feed(data if self._stream is None else self._stream.feed(data))
            for message, parts in frames:
                self._take(message, parts)
        except (FrameError, LookupError, TypeError, ValueError, AttributeError) as error:
            self.close(SandboxFailure(f"the box sent what is no answer: {error!r}", kind="protocol"))

    def connection_lost(self, error: Exception | None) -> None:
        """The worker is gone."""
        said = f": {self.trace}" if self.trace else ""
        self._die(SandboxFailure(f"the box died{said}", kind="box_died"))

    def _take(self, message: dict[str, Any], parts: list[bytes]) -> None:
        if "hello" in message:
            if not self.hello.done():
                self.hello.set_result(message)
            return
        number = message["id"]
        if message.get("began"):
            if number in self._pending:
                begun = self._pending[number].begun
                if not begun.done():
                    begun.set_result(None)
            return
        pending = self._pending.pop(number, None)
        if pending is not None and not pending.answer.done():
            pending.answer.set_result((message, parts))

    def _send(self, message: dict[str, Any], *parts: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message, *parts))

    def _die(self, failure: SandboxFailure) -> None:
        if self._dead is not None:
            return
        self._dead = failure
        kind = failure.kind.removeprefix("sandbox_")
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(SandboxFailure(str(failure), kind=kind, began=pending.began))
                pending.answer.exception()  # asked for already: a caller may have left
        self._pending.clear()
        if not self.hello.done():
            self.hello.set_exception(failure)
            self.hello.exception()
        self._lost()


def _take(answer: "asyncio.Future[Frame]") -> None:
    if not answer.cancelled():
        answer.exception()
