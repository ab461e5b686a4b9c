"""A gate before an engine: requests pass while it is open, and whoever closes it sees when the last one has left."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator

from toolgym.envs.waiting import within


class EngineGate:
    """Belongs to one event loop; its counts may be read from any thread.

    Attributes:
        inside: how many sequences have passed and not left.
        waiting: how many sequences wait before it.
        empty: is set while nobody is inside.
    """

    def __init__(self) -> None:
        self.inside = self.waiting = 0
        self.empty = asyncio.Event()
        self.empty.set()
        self._opened = asyncio.Event()
        self._opened.set()
        self._numbers = itertools.count()
        self._names: dict[str, int] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the requests inside."""
        return tuple(self._names)

    def close(self) -> None:
        """From now on requests wait."""
        self._opened.clear()

    def open(self) -> None:
        """Let in what waits, and what comes."""
        self._opened.set()

    @contextlib.asynccontextmanager
    async def passing(self, sequences: int, seconds: float) -> AsyncIterator[str]:
        """Wait until the gate is open, and be inside within the block.

        Args:
            sequences: how many the request asks for.
            seconds: how long to wait at most.

        Yields:
            A name that no other request has.

        Raises:
            Overdue: the gate stayed closed.
        """
        await self._wait(sequences, seconds)
        # No await between here and the caller's block: a gate that is closed next sees this request inside.
        name = f"toolgym-{next(self._numbers)}"
        self._names[name] = sequences
        self.inside += sequences
        self.empty.clear()
        try:
            yield name
        finally:
            self.inside -= self._names.pop(name)
            if not self._names:
                self.empty.set()

    async def _wait(self, sequences: int, seconds: float) -> None:
        if self._opened.is_set():
            return
        ends = time.monotonic() + seconds
        self.waiting += sequences
        try:
            while not self._opened.is_set():  # it may have been closed again since
                await within(self._opened.wait(), max(ends - time.monotonic(), 0.0))
        finally:
            self.waiting -= sequences
