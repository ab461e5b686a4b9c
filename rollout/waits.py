"""The waits of one episode: each within its limit and within the episode's time, and each with a name to look up."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from toolgym.agents.policy import PolicyFailure
from toolgym.envs.errors import EnvironmentFailure
from toolgym.envs.waiting import Overdue, take_outcome, within

_T = TypeVar("_T")


class Deadline(Exception):
    """The episode's time is up; its text says what was waited for."""


class Waits:
    """Bounds what one episode waits for, and tells what that is.

    Args:
        episode_timeout: seconds that all waits together may take.
    """

    def __init__(self, episode_timeout: float) -> None:
        self._left = episode_timeout
        self.what, self.since = "its turn on the event loop", time.monotonic()

    async def named(self, what: str, work: Awaitable[_T]) -> _T:
        """Await what is bounded by itself."""
        self._wait_for(what)
        try:
            return await work
        finally:
            self._wait_for("its turn on the event loop")

    async def within(
        self, where: str, what: str, work: Awaitable[_T], limit: float, *, scoring: Callable[[], bool] | None = None
    ) -> _T:
        """Await within a limit, and within what is left of the episode's time.

        Args:
            where: the stage, for the kind of a failure: ``"reset"``, ``"sample"``, ``"step"``, ``"score"``.
            what: what is waited for, in words.
            work: what is awaited.
            limit: seconds.
            scoring: whether the model is done: then the episode's time does not count any more. Asked when it is up;
                None where it never is.

        Raises:
            Deadline: the episode's time was up first.
            PolicyFailure: no answer of the policy within the limit.
            EnvironmentFailure: (kind ``"<where>_timeout"``) the environment took longer than the limit.
        """
        left = max(self._left, 0.0)
        began = time.monotonic()
        self._wait_for(what)
        try:
            if scoring is None or left >= limit:
                return await within(work, min(left, limit))
            return await _before(work, left, limit, scoring, what)
        except Overdue as overdue:
            if scoring is None and left < limit:
                raise Deadline(what) from overdue
            if where == "sample":
                raise PolicyFailure(f"no answer within {limit:g} s") from overdue
            raise EnvironmentFailure(f"{where} took over {limit:g} s", kind=f"{where}_timeout") from overdue
        finally:
            # Its own waiting alone: what others take in a round of lockstep is not held against it.
            self._left -= time.monotonic() - began
            self._wait_for("its turn on the event loop")

    def _wait_for(self, what: str) -> None:
        self.what, self.since = what, time.monotonic()


async def _before(work: Awaitable[_T], left: float, limit: float, scoring: Callable[[], bool], what: str) -> _T:
    """Await within ``left`` seconds; or, if the model is done by then, within ``limit``."""
    task = asyncio.ensure_future(within(work, limit))
    try:
        await asyncio.wait({task}, timeout=left)
        if not task.done() and not scoring():
            raise Deadline(what)
        return await task
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(take_outcome)
            task.add_done_callback(lambda _: _close_unbegun(work))


def _close_unbegun(work: Awaitable[Any]) -> None:
    if inspect.iscoroutine(work) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
        work.close()
