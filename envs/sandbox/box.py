"""A box: one isolated machine in which code runs, one thing at a time, seen from the client."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from toolgym.envs.errors import ConfigurationError, ToolError
from toolgym.envs.sandbox.connection import Connection
from toolgym.envs.sandbox.inside.frames import Frame
from toolgym.envs.sandbox.limits import SandboxLimits
from toolgym.envs.sandbox.results import FileInfo, Output, RunResult, RunStatus, SandboxFailure

BEGIN = 30.0  # seconds until a worker must have begun what it is to run: a template may have to import first
GRACE = 8.0  # seconds beyond its time-out after which a worker that has not answered counts as hung
_LONGEST = 86_400  # seconds
_PIECE = 1 << 20
_QUICK = 10.0  # seconds for what runs no code
_MAX_FETCH = 16 * 1024 * 1024
_MAX_CODE = 1024 * 1024
_MAX_STDIN = 16 * 1024 * 1024
Listing: TypeAlias = list[FileInfo]
_WORN_BY = frozenset({RunStatus.OOM, RunStatus.OUTPUT_LIMIT})


class Box:
    """One box.

    All methods are awaited on the event loop of its connection. They are taken one after another.

    Args:
        name: for people.
        connection: the line to its worker.
        limits: of the box.
        destroy: removes it for good; must not raise.
        unprotected: what it does not protect from.

    Attributes:
        worn: whether it should not be used for another episode.
        episodes: how many times it was handed out.
    """

    def __init__(
        self,
        name: str,
        connection: Connection,
        limits: SandboxLimits,
        destroy: Callable[[], Awaitable[None]],
        unprotected: tuple[str, ...] = (),
    ) -> None:
        self.name, self.limits, self.unprotected = name, limits, unprotected
        self.worn, self.episodes = False, 0
        self._connection, self._destroy = connection, destroy
        self._turn = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether it can still be talked to."""
        return self._connection.alive

    async def run(
        self, code: str, *, stdin: bytes = b"", kind: str = "python", timeout: float | None = None
    ) -> RunResult:
        """Run a Python program, or a shell command (``kind="shell"``), in a process of its own.

        Whatever it leaves running is ended before this returns; files in the workspace stay.

        Raises:
            SandboxFailure: the box failed, not the code.
            ToolError: the code is too long.
        """
        limit = self._time(timeout)
        if len(stdin) > _MAX_STDIN:
            raise ToolError(f"stdin has {len(stdin)} bytes; at most {_MAX_STDIN} can be given")
        message = {"op": "run", "kind": kind, "timeout": limit}
        return _as_result(await self._ask(message, _encoded(code), stdin, limit=limit + GRACE, begin=BEGIN), self)

    async def execute(self, code: str, *, timeout: float | None = None) -> RunResult:
        """Run a cell in the box's Python session, which begins with its first cell. Raises as `run`."""
        limit = self._time(timeout)
        message = {"op": "exec", "timeout": limit}
        return _as_result(await self._ask(message, _encoded(code), limit=limit + GRACE, begin=BEGIN), self)

    async def close_session(self) -> None:
        """End the session, if there is one."""
        await self._ask({"op": "close_session"})

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write files into the workspace.

        Raises:
            ToolError: a path that leaves the workspace, or no room.
            SandboxFailure: the box failed.
        """
        for path, data in files.items():
            for offset in range(0, max(1, len(data)), _PIECE):
                await self._ask({"op": "put", "path": path, "first": offset == 0}, data[offset : offset + _PIECE])

    async def get(self, path: str, *, limit: int = _MAX_FETCH) -> bytes:
        """The content of a plain file in the workspace.

        Raises:
            ToolError: there is none, or it has more than ``limit`` bytes.
            SandboxFailure: the box failed.
        """
        data, size = b"", 1
        while len(data) < size:
            answer, parts = await self._ask({"op": "get", "path": path, "offset": len(data), "count": _PIECE})
            with _sound(self):
                size = int(answer["size"])
                part = parts[0]
            if size > limit:
                raise ToolError(f"{path!r} has {size} bytes; at most {limit} can be fetched")
            data += part
            if not part:
                break
        return data

    async def list(self, path: str = ".") -> Listing:
        """Everything below a folder of the workspace. Raises as `get`."""
        answer, _ = await self._ask({"op": "list", "path": path})
        with _sound(self):
            return [FileInfo(str(name), int(size), bool(is_dir)) for name, size, is_dir in answer["entries"]]

    async def reset(self) -> None:
        """End every process of the code, and remove every file that it has left: the box is as new.

        Raises:
            SandboxFailure: (kind ``sandbox_unclean``) something could not be removed: the box is not to be used.
        """
        answer, _ = await self._ask({"op": "reset"})
        if answer.get("clean") is not True:
            self.worn = True
            raise SandboxFailure("a process or a file of the code could not be removed", kind="unclean")

    async def ping(self, timeout: float = _QUICK) -> None:
        """Ask whether the worker answers. Raises SandboxFailure if not."""
        await self._ask({"op": "ping"}, limit=timeout)

    def touch(self) -> None:
        """Renew the box's lease: it ends itself when it hears nothing of its client for a minute."""
        self._connection.touch()

    async def close(self) -> None:
        """Hang up, which ends the box, and see that it is removed. May be called again; does not raise."""
        self._connection.close()
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._closing)

    def _time(self, timeout: float | None) -> float:
        if timeout is None:
            return self.limits.timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST:
            raise ConfigurationError(
                f"expected a sandbox timeout above 0 seconds and up to {_LONGEST:,}, actual {timeout!r}"
            )
        return float(timeout)

    async def _ask(
        self, message: dict[str, Any], *parts: bytes, limit: float = _QUICK, begin: float | None = None
    ) -> Frame:
        async with self._turn:
            try:
                answer, data = await self._connection.request(message, *parts, timeout=limit, begin=begin)
            except SandboxFailure:
                self.worn = True
                raise
        if "refused" in answer:
            raise ToolError(str(answer["refused"]))
        return answer, data


def _encoded(code: str) -> bytes:
    data = code.encode("utf-8", "surrogatepass")
    if len(data) > _MAX_CODE:
        raise ToolError(f"the code has {len(data)} bytes; at most {_MAX_CODE} can be run")
    return data


def _as_result(frame: Frame, box: Box) -> RunResult:
    """A result from a worker's answer. What the answer says is checked: code may have broken its box."""
    answer, data = frame
    with _sound(box):
        result = RunResult(
            status=RunStatus(answer["status"]),
            exit_code=_maybe_int(answer["exit_code"]),
            signal=_maybe_int(answer["signal"]),
            stdout=Output(data[0], data[1], int(answer["out_total"])),
            stderr=Output(data[2], data[3], int(answer["err_total"])),
            wall=float(answer["wall"]),
            cpu=float(answer.get("cpu", 0.0)),
            peak_memory=int(answer.get("peak_memory", 0)),
            session_lost=bool(answer["session_lost"]),
            unprotected=box.unprotected,
        )
    if result.status in _WORN_BY or not answer.get("clean"):
        box.worn = True
    return result


@contextlib.contextmanager
def _sound(box: Box) -> Iterator[None]:
    """An answer that is not as it should be is a failure of the box."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        box.worn = True
        raise SandboxFailure(f"the box sent an answer that is none: {error!r}", kind="protocol", began=True) from error


def _maybe_int(value: Any) -> int | None:
    return None if value is None else int(value)


async def with_files(
    box: Box, put: Mapping[str, bytes], fetch: Sequence[str], run: Callable[[], Awaitable[RunResult]]
) -> RunResult:
    """Put files, run something, and bring back those of the files that were asked for and exist."""
    if put:
        await box.put(put)
    result = await run()
    found = {}
    for path in fetch:
        try:
            found[path] = await box.get(path)
        except ToolError:
            continue  # it is not there: the result says so by its absence
        except SandboxFailure as failure:
            failure.began = True  # the code has run: it must not be run again
            raise
    return replace(result, files=found) if found else result
