"""`ChatThreads`: rendering and tokenising off the event loop, in a few threads.

Thousands of episodes ask for little pieces of work, many of them at once. What has piled up is done in a row by a
thread that is awake, and results go back in batches: waking a thread or a loop costs as much as a piece of work.
"""

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from toolgym.envs.waiting import tame

_T = TypeVar("_T")
_MOST = 4  # tokenising releases the interpreter's lock, the rest does not: more threads would only wait for it
_BATCH = 32  # results that go back together, and coroutines that wake in one iteration of a loop: a few milliseconds
_HELD_BACK = 0.001  # seconds, for which a result may wait for others at most, beyond the work that is running


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
        self._waiting: deque[_Work] = deque()
        self._awake = 0  # threads that look for work
        self._lock = threading.Lock()
        self._returns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Returns] = weakref.WeakKeyDictionary()

    async def run(self, work: Callable[[], _T]) -> _T:
        """What ``work`` returns or raises, run in one of the threads. If this is cancelled before, it is not run.

        Raises:
            StrayExit: the work raised SystemExit or its like.
            RuntimeError: the threads have been closed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        with self._lock:
            if not self._finalizer.alive:
                raise RuntimeError("the threads of the chat format have been closed")
            returns = self._returns.get(loop)
            if returns is None:
                returns = self._returns[loop] = _Returns(loop)
            self._waiting.append(_Work(work, future, returns))
            if self._awake < self._count:
                self._pool.submit(self._work_off)
                self._awake += 1
        return await future

    def close(self) -> None:
        """End the threads when they are done. May be called again."""
        self._finalizer()

    def _work_off(self) -> None:
        """Do what waits, until nothing does."""
        done: list[_Done] = []
        since = time.monotonic()
        while True:
            try:
                work = self._waiting.popleft()
            except IndexError:
                _bring_back(done)
                done = []
                with self._lock:
                    if self._waiting:
                        continue  # it came meanwhile
                    self._awake -= 1
                    return
            if work.future.cancelled():
                continue
            if not done:
                since = time.monotonic()
            done.append(_outcome(work))
            if len(done) >= _BATCH or time.monotonic() - since > _HELD_BACK:
                _bring_back(done)
                done = []


class _Work(NamedTuple):
    """A piece of work, and where its result goes."""

    function: Callable[[], Any]
    future: "asyncio.Future[Any]"
    returns: "_Returns"


class _Done(NamedTuple):
    """A piece of work that has been done: it has returned a value, or raised."""

    future: "asyncio.Future[Any]"
    returns: "_Returns"
    value: Any
    error: Exception | None


class _Returns:
    """Gives results to the coroutines of one loop that wait for them, a bounded number in each of its iterations.

    Else a thread that is faster than the loop could wake thousands of coroutines at once, and whatever else the loop
    has to do would wait for all of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # which keeps this alive, by the table in which it is found
        self._done: deque[_Done] = deque()
        self._scheduled = False
        self._lock = threading.Lock()

    def add(self, done: "list[_Done]") -> None:
        """Give back results. Called in any thread."""
        loop = self._loop()
        if loop is None:
            return
        with self._lock:
            self._done.extend(done)
            if self._scheduled:
                return
            self._scheduled = True
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits for the results
            loop.call_soon_threadsafe(self._give, loop)

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(_BATCH):
            try:
                future, _, value, error = self._done.popleft()
            except IndexError:
                break
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


def _outcome(work: _Work) -> _Done:
    try:
        return _Done(work.future, work.returns, work.function(), None)
    except BaseException as raised:  # noqa: BLE001 - carried over to the waiting coroutine, judged there
        return _Done(work.future, work.returns, None, tame(raised))


def _bring_back(done: list[_Done]) -> None:
    """Give results to the loops from which their work came."""
    by_loop: dict[_Returns, list[_Done]] = {}
    for entry in done:
        by_loop.setdefault(entry.returns, []).append(entry)
    for returns, entries in by_loop.items():
        returns.add(entries)
