"""A warm pool of boxes: handed out alive, reset in place, replaced when worn, and never more than its size."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.sandbox.backend import Backend
from toolgym.envs.sandbox.box import Box
from toolgym.envs.sandbox.results import SandboxFailure

_STARTING = 4  # boxes that start at the same time: more would only slow each other and the engine down
_TOUCH = 15.0  # seconds between two words to every box, well below its lease
_PING = 3.0  # seconds within which a box that is handed out must answer
_BACKOFF = (0.1, 2.0)  # seconds between two tries to reach an engine that is gone, first and longest


@dataclass
class PoolState:
    """What a pool holds, for those who watch it.

    Attributes:
        idle: boxes ready to be handed out.
        leased: boxes in use.
        starting: boxes being made.
        resetting: boxes being reset or removed.
        made: boxes made in all.
        replaced: boxes given up because they were worn, dead or hung.
    """

    idle: int = 0
    leased: int = 0
    starting: int = 0
    resetting: int = 0
    made: int = 0
    replaced: int = 0


@dataclass
class _Waiter:
    """Somebody who waits for a box."""

    box: "asyncio.Future[Box]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class BoxPool:
    """Lends boxes. Everything is awaited on one event loop.

    Args:
        backend: makes the boxes.
        size: boxes at most, those that are starting or being reset among them.
        warm: boxes that are made before anybody asks.
        acquire_timeout: seconds to wait for a box.
        episodes: after so many leases a box is replaced.

    Raises:
        ConfigurationError: a size or a number of episodes below 1, or more warm boxes than the size.
    """

    def __init__(
        self, backend: Backend, *, size: int, warm: int = 0, acquire_timeout: float = 20.0, episodes: int = 500
    ) -> None:
        for name, value in (("size", size), ("episodes", episodes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"expected {name} of the pool as an int of 1 or more, actual {value!r:.100}")
        if not 0 <= warm <= size:
            raise ConfigurationError(f"expected warm in [0, size={size}], actual {warm}")
        if not acquire_timeout > 0:
            raise ConfigurationError(f"expected acquire_timeout above 0 seconds, actual {acquire_timeout}")
        self.backend, self.size, self.acquire_timeout = backend, size, acquire_timeout
        self._warm, self._episodes = warm, episodes
        self._idle: deque[Box] = deque()
        self._leased: set[Box] = set()
        self._waiting: deque[_Waiter] = deque()
        self._free = size  # boxes that may still be made
        self._jobs: set[asyncio.Task[None]] = set()
        self._removals: set[asyncio.Task[None]] = set()
        self._state = PoolState()
        self._gate = asyncio.Semaphore(_STARTING)
        self._last_failure: SandboxFailure | None = None
        self._closed = False

    @property
    def state(self) -> PoolState:
        """How many boxes there are, and in what state."""
        self._state.idle, self._state.leased = len(self._idle), len(self._leased)
        return self._state

    async def open(self) -> None:
        """Sweep what dead owners have left, build what must be built, begin to renew leases and to make warm boxes."""
        with contextlib.suppress(SandboxFailure):  # an engine that is gone is told of when a box is asked for
            await self.backend.sweep()
            await self.backend.prepare()
        self._spawn(self._renew())
        self._fill()

    async def acquire(self) -> Box:
        """A box that answers, clean; to be given back by `release`.

        Raises:
            SandboxFailure: ``pool_exhausted`` if no box came free in time, ``engine_gone`` if none could be made in
                that time, or why a box could not be made.
        """
        deadline = asyncio.get_running_loop().time() + self.acquire_timeout
        while True:
            box = await self._next(deadline)
            try:
                if box.alive:
                    await box.ping(_PING)
                    box.episodes += 1
                    return box
            except SandboxFailure:
                pass  # another one, then
            except BaseException:
                await self.release(box)
                raise
            self._leased.discard(box)
            self._give_up(box)

    async def release(self, box: Box) -> None:
        """Give a box back. It is reset, or replaced, behind the caller's back."""
        if box not in self._leased:
            return
        self._leased.discard(box)
        if self._closed:
            await box.close()
            return
        self._state.resetting += 1
        self._spawn(self._reset(box))

    async def close(self) -> None:
        """Close all boxes, those that are lent too; whoever waits for one hears of it. May be called again."""
        self._closed = True
        for waiter in self._waiting:
            if not waiter.box.done():
                waiter.box.set_exception(SandboxFailure("the pool was closed", kind="closed"))
        self._waiting.clear()
        for job in self._jobs:
            job.cancel()
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=30.0)
        boxes = [*self._idle, *self._leased]
        self._idle.clear()
        self._leased.clear()
        # Removals that have begun are waited for, never cancelled: what they were to remove would stay.
        await asyncio.gather(*(box.close() for box in boxes), *self._removals, return_exceptions=True)
        await self.backend.close()

    async def _next(self, deadline: float) -> Box:
        if self._closed:
            raise SandboxFailure("the pool is closed", kind="closed")
        if self._idle:
            box = self._idle.popleft()
            self._leased.add(box)
            return box
        waiter = _Waiter()
        self._waiting.append(waiter)
        self._fill()
        try:
            await asyncio.wait({waiter.box}, timeout=deadline - asyncio.get_running_loop().time())
            if waiter.box.done():
                return waiter.box.result()
        except asyncio.CancelledError:
            if waiter.box.done() and not waiter.box.exception():
                await self.release(waiter.box.result())
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
        if self._last_failure is not None and not self._leased:
            raise SandboxFailure(str(self._last_failure), kind=self._last_failure.kind.removeprefix("sandbox_"))
        text = (
            f"no box came free within {self.acquire_timeout:g} s; all {self.size} are in use: enlarge the pool, "
            "release() sandboxes that are done, or use lease='call'"
        )
        if self._state.starting:
            text = f"no box was ready within {self.acquire_timeout:g} s; {self._state.starting} are still starting"
        raise SandboxFailure(text, kind="pool_exhausted")

    def _fill(self) -> None:
        """Begin to make as many boxes as are wanted."""
        coming = self._state.starting + self._state.resetting  # what is being reset is back in a moment
        wanted = max(len(self._waiting), self._warm - len(self._idle)) - coming
        for _ in range(min(wanted, self._free)):
            self._free -= 1
            self._state.starting += 1
            self._spawn(self._make())

    async def _make(self) -> None:
        """Make one box and hand it out, or tell whoever waits why there is none."""
        try:
            box = await self._create()
        except BaseException as error:
            self._state.starting -= 1
            self._free += 1
            if isinstance(error, SandboxFailure):
                self._disappoint(error)
                self._fill()  # for those who wait behind the one who was disappointed
                return
            raise
        self._state.starting -= 1
        self._state.made += 1
        self._last_failure = None
        self._offer(box)

    async def _create(self) -> Box:
        """A new box; while its engine is gone, it is tried again for as long as somebody waits."""
        pause, longest = _BACKOFF
        while True:
            try:
                async with self._gate:
                    return await self.backend.create()
            except SandboxFailure as failure:
                self._last_failure = failure
                if failure.kind != "sandbox_engine_gone" or not self._waiting:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    def _disappoint(self, failure: SandboxFailure) -> None:
        self._last_failure = failure
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.box.done():
                waiter.box.set_exception(failure)
                return

    def _offer(self, box: Box) -> None:
        """Hand a clean box to the first who waits, else keep it."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.box.done():
                self._leased.add(box)
                waiter.box.set_result(box)
                return
        self._idle.append(box)

    async def _reset(self, box: Box) -> None:
        """Make a box that was given back as new, or replace it."""
        try:
            if box.alive and not box.worn and box.episodes < self._episodes:
                with contextlib.suppress(SandboxFailure):
                    await box.reset()
            kept = box.alive and not box.worn and box.episodes < self._episodes
        except BaseException:
            await box.close()
            raise
        finally:
            self._state.resetting -= 1
        if kept:
            self._offer(box)
        else:
            self._give_up(box)

    def _give_up(self, box: Box) -> None:
        """Remove a box, and make another one where somebody waits for it."""
        self._state.replaced += 1

        async def remove() -> None:
            try:
                await box.close()
            finally:
                self._free += 1
                if not self._closed:
                    self._fill()

        removal = asyncio.ensure_future(remove())
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _renew(self) -> None:
        """Let every box know that its client lives, and drop idle ones that have died."""
        while True:
            await asyncio.sleep(_TOUCH)
            for box in [box for box in self._idle if not box.alive]:
                self._idle.remove(box)
                self._give_up(box)
            for box in (*self._idle, *self._leased):
                box.touch()
            await self.backend.tidy()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        job = asyncio.ensure_future(work)
        self._jobs.add(job)
        job.add_done_callback(self._ended)

    def _ended(self, job: "asyncio.Task[None]") -> None:
        self._jobs.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            # Nothing of this may fail but by a bug of ours; whoever waits must not wait for ever.
            self._disappoint(SandboxFailure(f"the pool failed: {error!r}", kind="start_failed"))
