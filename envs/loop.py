"""An asyncio event loop in a thread of its own, for synchronous faces of asynchronous things."""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from toolgym.envs.errors import ToolgymError

_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines on one event loop in one daemon thread, from any other thread or loop.

    Args:
        name: the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._closed = self._stopping = False
        self._process = os.getpid()
        self._thread.start()

    @property
    def closing(self) -> bool:
        """Whether it is closed, or about to be: what runs on it is cancelled."""
        return self._closed

    def call_soon(self, act: Callable[[], object]) -> None:
        """Call something on the loop, from any thread; nothing if the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act)

    def submit(self, work: Coroutine[Any, Any, _T]) -> "concurrent.futures.Future[_T]":
        """Start a coroutine on the loop. Cancelling the future cancels it.

        Raises:
            ToolgymError: the loop is closed.
        """
        if self._closed or self._process != os.getpid():
            work.close()
            why = "is closed" if self._closed else "does not run in a forked process: make a new one there"
            raise ToolgymError(f"{self._thread.name} {why}")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, _T], timeout: float | None = None) -> _T:
        """Run a coroutine on the loop and wait for it. An interrupt of the waiting thread cancels the coroutine.

        Args:
            work: the coroutine.
            timeout: seconds to wait, then TimeoutError is raised; None where the coroutine itself is bounded.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise ToolgymError(f"called from within {self._thread.name}: await the asynchronous form instead")
        future = self.submit(work)
        try:
            return future.result(timeout)
        except concurrent.futures.CancelledError as error:
            raise ToolgymError(f"{self._thread.name} was closed while this ran") from error
        except BaseException:  # mostly KeyboardInterrupt: the work must not go on behind the caller's back
            future.cancel()
            raise

    async def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the loop and await it from another loop (or from this one)."""
        if threading.current_thread() is self._thread:
            return await work
        return await asyncio.wrap_future(self.submit(work))

    def close(self, grace: float = 2.0) -> None:
        """Cancel what runs, give it ``grace`` seconds, stop the loop and join the thread. May be called again.

        A loop that is blocked by code that does not await cannot be stopped: a ResourceWarning says so.
        """
        if self._closed:
            return
        self._closed = True
        if self._process != os.getpid():
            return  # a fork has the object, but not the thread
        with contextlib.suppress(RuntimeError):  # the loop has stopped already
            asyncio.run_coroutine_threadsafe(self._drain(grace), self._loop)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(grace + 3.0)
        if self._thread.is_alive():
            text = f"{self._thread.name} is blocked by code that does not await; its thread is left behind"
            warnings.warn(text, ResourceWarning, 2)

    async def _drain(self, grace: float) -> None:
        await _cancel_all(grace)
        self._stopping = True
        self._loop.stop()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._stopping:
                # Tasks and callbacks that tools leave on the loop may try to end it for everybody.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self._loop.run_forever()
        finally:
            # Also when something stopped the loop behind our back: whoever waits for its futures must hear of it.
            self._closed = True
            with contextlib.suppress(RuntimeError, TimeoutError):
                self._loop.run_until_complete(_cancel_all(1.0))
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
                ending = asyncio.wait_for(self._loop.shutdown_default_executor(), timeout=1.0)
                self._loop.run_until_complete(ending)
            self._loop.close()


async def _cancel_all(grace: float) -> None:
    current = asyncio.current_task()
    others = {task for task in asyncio.all_tasks() if task is not current}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=grace)
