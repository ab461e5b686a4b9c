"""`Stream`: reading a collection, which runs on another thread's event loop, from anywhere."""

import asyncio
import contextlib
import queue
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator

from toolgym.envs.errors import ToolgymError
from toolgym.envs.waiting import take_outcome, tamed
from toolgym.rollout.collection import Collection, CollectionPlan, Ended
from toolgym.rollout.filters import CollectionFailed
from toolgym.rollout.trajectory import Trajectory

_STOPPING = 10.0  # seconds


class Stream:
    """A collection to be read once: by `read`, or by `aread` from an event loop.

    Args:
        plan: of the collection.
    """

    def __init__(self, plan: CollectionPlan) -> None:
        self.plan = plan
        self._loop = plan.slots.loop
        self._collection: Collection | None = None
        self._cancelled = False

    @property
    def total(self) -> int:
        """Trajectories that were asked for."""
        return len(self.plan.episodes)

    def read(self) -> Generator[Ended, None, None]:
        """Run it, and yield each trajectory when it has ended.

        When the iterator is closed, what runs is cancelled. An interrupt (Ctrl-C) or `cancel` cancels it too, but
        then the iterator goes on: it yields what has ended and, as cancelled, all the rest; an interrupt is raised
        behind that.
        """
        arrived: queue.SimpleQueue[Ended | CollectionFailed | None] = queue.SimpleQueue()
        collection = self._begin(arrived.put)
        interrupted: KeyboardInterrupt | None = None
        try:
            running = self._loop.run(_spawn(collection, lambda: arrived.put(None)))
            while True:
                try:
                    ended = arrived.get()
                except KeyboardInterrupt as interrupt:
                    if interrupted is not None:
                        raise  # twice: at once
                    interrupted = interrupt
                    self.cancel()
                    continue
                if ended is None:
                    break
                if isinstance(ended, CollectionFailed):
                    raise ended
                collection.gate.read += 1
                yield ended
            _raise_outcome(running, interrupted)
        finally:
            try:
                self._loop.run(collection.stop(), timeout=_STOPPING)
            except (ToolgymError, TimeoutError):
                # The loop is closed or blocked, or it is its own thread that collects this iterator as garbage.
                self._loop.call_soon(collection.abandon)

    async def aread(self) -> AsyncGenerator[Ended, None]:
        """`read` from any event loop; there an interrupt cancels the task that iterates."""
        arrived: asyncio.Queue[Ended | CollectionFailed | None] = asyncio.Queue()
        here = asyncio.get_running_loop()

        def put(ended: Ended | CollectionFailed | None) -> None:
            with contextlib.suppress(RuntimeError):  # the reader's loop was closed: nobody reads any more
                here.call_soon_threadsafe(arrived.put_nowait, ended)

        collection = self._begin(put)
        try:
            running = await self._loop.call(_spawn(collection, lambda: put(None)))
            while (ended := await arrived.get()) is not None:
                if isinstance(ended, CollectionFailed):
                    raise ended
                collection.gate.read += 1
                yield ended
            _raise_outcome(running, None)
        finally:
            try:
                await asyncio.wait_for(self._loop.call(collection.stop()), _STOPPING)
            except (ToolgymError, TimeoutError):  # the loop is closed or blocked
                self._loop.call_soon(collection.abandon)

    def cancel(self) -> None:
        """Cancel what runs, from any thread; whoever reads gets all of it, as cancelled. Returns at once.

        If it has not begun, it never will: all of it is cancelled.
        """
        self._cancelled = True
        if self._collection is not None:
            with contextlib.suppress(ToolgymError):  # the loop is closed: then all of it is over
                self._loop.submit(self._collection.stop())

    def _begin(self, put: Callable[[Ended | CollectionFailed], None]) -> Collection:
        if self._collection is not None:
            raise ToolgymError("a stream is read once: start another one")
        collection = self._collection = Collection(self.plan, put, put)
        if self._cancelled:
            collection.abandon()
        return collection


def kept(stream: Stream) -> Iterator[Trajectory]:
    """The trajectories that no filter rejects, when they end; after an interrupt, those that still have ended."""
    reader = stream.read()
    with contextlib.closing(reader):
        for ended in reader:
            if not ended.rejected and not ended.trajectory.cancelled:
                yield ended.trajectory


async def akept(stream: Stream) -> AsyncIterator[Trajectory]:
    """`kept`, from any event loop."""
    reader = stream.aread()
    async with contextlib.aclosing(reader):
        async for ended in reader:
            if not ended.rejected and not ended.trajectory.cancelled:
                yield ended.trajectory


def place(trajectory: Trajectory) -> tuple[int, int]:
    """Where a trajectory belongs in order."""
    return trajectory.task_index, trajectory.member


async def _spawn(collection: Collection, when_done: Callable[[], None]) -> "asyncio.Task[None]":
    task = asyncio.create_task(tamed(collection.run()), name="toolgym collection")
    task.add_done_callback(take_outcome)
    task.add_done_callback(lambda _: when_done())
    return task


def _raise_outcome(task: "asyncio.Task[None]", interrupted: KeyboardInterrupt | None) -> None:
    if interrupted is not None:
        raise interrupted
    if task.cancelled():
        raise ToolgymError("the environments were closed while a collection ran")
    task.result()
