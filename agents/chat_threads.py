"""`ChatThreads`: rendering and tokenising off the event loop, in a few threads.

Thousands of episodes ask for little pieces of work, many of them at once. Waking a thread or a loop costs as much as a
piece of work, so a thread that is awake does all that has piled up, and so does a loop with the results.
"""

import asyncio
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from toolgym.envs.waiting import Overdue, tame

_T = TypeVar("_T")
_MOST = 4  # tokenising releases the interpreter's lock, the rest does not: more threads would only wait for it
_AT_ONCE = 32  # coroutines that wake in one iteration of a loop: a few milliseconds of what they do next


class ChatThreads:
    """A few threads for the work of a chat format, which has a tokenizer for each of them. They start when needed.

    Work begins in the order in which it came. Any number of event loops may share the threads.

    Args:
        threads: how many; None: one a core, at most four.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._count = threads or min(_MOST, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="toolgym chat")
        self._finalizer = weakref.finalize(self, self._pool.shutdown, wait=False)
        self._process = os.getpid()
        self._waiting: deque[_Work] = deque()
        self._awake = 0  # threads that look for work
        self._lock = threading.Lock()
        self._returns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Returns] = weakref.WeakKeyDictionary()

    async def run(self, work: Callable[[], _T], timeout: float | None = None) -> _T:
        """What ``work`` returns or raises, run in one of the threads. If this is cancelled before, it is not run.

        Args:
            work: what is to be done.
            timeout: seconds to wait; None: as long as it takes. Work that has begun cannot be stopped.

        Raises:
            Overdue: the time was up.
            StrayExit: the work raised SystemExit or its like.
            RuntimeError: the threads have been closed, or are those of the process of which this one is a fork.
        """
        if self._process != os.getpid():
            raise RuntimeError("the threads of a chat format do not live in a forked process: make a new one there")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        with self._lock:
            if not self._finalizer.alive:
                raise RuntimeError("the threads of the chat format have been closed")
            returns = self._returns.get(loop)
            if returns is None:
                returns = self._returns[loop] = _Returns(loop)
            if self._awake < self._count:
                self._pool.submit(self._work_off)
                self._awake += 1
            self._waiting.append(_Work(work, future, returns))
        if timeout is None:
            return await future
        timer = loop.call_later(timeout, _expire, future)
        try:
            return await future
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the threads when they are done. May be called again."""
        self._finalizer()

    def _work_off(self) -> None:
        """Do what waits, until nothing does."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._awake -= 1
                    return
                work = self._waiting.popleft()
            if not work.future.done():  # cancelled, or overdue
                work.returns.add(_outcome(work))
            del work  # or it would be kept until the next one comes


def _expire(future: "asyncio.Future[Any]") -> None:
    if not future.done():
        future.set_exception(Overdue())


class _Work(NamedTuple):
    """A piece of work, and where its result goes."""

    function: Callable[[], Any]
    future: "asyncio.Future[Any]"
    returns: "_Returns"


class _Outcome(NamedTuple):
    """What a piece of work has returned, or what it has raised."""

    future: "asyncio.Future[Any]"
    value: Any
    error: Exception | None


class _Returns:
    """Gives results to the coroutines of one loop that wait for them, a bounded number in each of its iterations.

    Else threads that are faster than the loop could wake thousands of coroutines at once, and whatever else the loop
    has to do would wait for all of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # the table in which this is found ends with the loop
        self._done: deque[_Outcome] = deque()
        self._scheduled = False
        self._lock = threading.Lock()

    def add(self, outcome: _Outcome) -> None:
        """Give back a result. Called in any thread."""
        with self._lock:
            self._done.append(outcome)
            if self._scheduled:
                return
            self._scheduled = True
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits for the results
                loop.call_soon_threadsafe(self._give, loop)

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(_AT_ONCE, len(self._done))):
            future, value, error = self._done.popleft()
            if future.done():  # cancelled
                continue
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
        with self._lock:
            self._scheduled = bool(self._done)
            if self._scheduled:
                loop.call_soon(self._give, loop)


def _outcome(work: _Work) -> _Outcome:
    try:
        return _Outcome(work.future, work.function(), None)
    except BaseException as raised:  # noqa: BLE001 - carried over to the waiting coroutine, judged there
        return _Outcome(work.future, None, tame(raised))
