"""Waiting that always ends, and exceptions that an event loop survives."""

import asyncio
import inspect
import traceback
from collections.abc import Awaitable
from typing import Any, TypeVar

from toolgym.envs.errors import ToolgymError

_T = TypeVar("_T")


class Overdue(Exception):
    """The time was up. Not a `TimeoutError`, which the awaited code may raise by itself."""


class StrayExit(ToolgymError):
    """Code that was only to do its work raised what would end a process, a loop or a task."""


async def within(work: Awaitable[_T], seconds: float) -> _T:
    """Await ``work`` for at most ``seconds``, then cancel it.

    Unlike `asyncio.wait_for` it does not wait for the cancelled work to end: code that swallows its cancellation
    would hold up the caller for as long as it likes. And what the work raises can be caught as an `Exception`.

    Raises:
        Overdue: the time was up.
        StrayExit: the work raised something that is no Exception, or a CancelledError that nobody had asked for.
    """
    plain = work if inspect.iscoroutine(work) else None
    task: asyncio.Future[_T] = asyncio.ensure_future(work if plain is None else tamed(work))
    try:
        await asyncio.sleep(0)  # much of what is awaited never waits: then there is nothing to be timed
        if not task.done():
            await _ended(task, seconds)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(take_outcome)
            if plain is not None:
                task.add_done_callback(lambda _: plain.close())  # if it is cancelled before it has begun
        else:
            take_outcome(task)  # also if we are cancelled ourselves, just when it has ended
            if plain is not None:
                plain.close()
    if not task.done():
        raise Overdue
    if task.cancelled():
        raise StrayExit("cancelled, though nobody had asked for it")
    return task.result()


async def _ended(task: "asyncio.Future[Any]", seconds: float) -> None:
    """Wait for at most ``seconds`` until a task has ended. As `asyncio.wait` does for many tasks, but cheaper."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def end(_: object = None) -> None:
        if not ended.done():
            ended.set_result(None)

    task.add_done_callback(end)
    timer = loop.call_later(seconds, end)
    try:
        await ended
    finally:
        timer.cancel()
        task.remove_done_callback(end)


async def tamed(work: Awaitable[_T]) -> _T:
    """Await work, its SystemExit and its like tamed: they would leave the task and stop the whole event loop."""
    try:
        return await work
    except (asyncio.CancelledError, Exception):
        raise
    except BaseException as raised:
        raise tame(raised) from raised


def tame(raised: BaseException) -> Exception:
    """An exception as one that tasks and futures carry like any other."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    return StrayExit(described(raised))


def described(raised: BaseException) -> str:
    """An exception's type and text, even if its own text raises."""
    try:
        return f"{type(raised).__name__}: {raised}"
    except BaseException:  # noqa: BLE001 - code of somebody else's, whose type is enough
        return type(raised).__name__


def located(raised: BaseException) -> str:
    """An exception's type and text, and the line that raised it."""
    frames = traceback.extract_tb(raised.__traceback__)
    return f"{described(raised)} ({frames[-1].filename}:{frames[-1].lineno})" if frames else described(raised)


def take_outcome(task: "asyncio.Future[Any]") -> None:
    """Take the outcome of work that nobody waits for any more, so that asyncio does not report it as lost."""
    if not task.cancelled():
        task.exception()
