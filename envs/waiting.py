"""Waiting that always ends."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

_T = TypeVar("_T")


class Overdue(Exception):
    """The time was up. Not a `TimeoutError`, which the awaited code may raise by itself."""


async def within(work: Awaitable[_T], seconds: float) -> _T:
    """Await ``work`` for at most ``seconds``, then cancel it.

    Unlike `asyncio.wait_for` it does not wait for the cancelled work to end: code that swallows its cancellation
    would hold up the caller for as long as it likes.

    Raises:
        Overdue: the time was up.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(take_outcome)
    if not task.done():
        raise Overdue
    return task.result()


def take_outcome(task: "asyncio.Future[Any]") -> None:
    """Take the outcome of work that nobody waits for any more, so that asyncio does not report it as lost."""
    if not task.cancelled():
        task.exception()
