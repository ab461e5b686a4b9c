"""`ChatThreads`: rendering and tokenising off the event loop, in a few threads."""

import asyncio
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_MOST = 4  # tokenising releases the interpreter's lock, the rest does not: more threads would only wait for it


class ChatThreads:
    """A few threads for the work of a chat format, which has a tokenizer for each of them. They start when needed.

    Args:
        threads: how many; None: one a core, at most four.
    """

    def __init__(self, threads: int | None = None) -> None:
        count = threads or min(_MOST, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="toolgym chat")
        self._finalizer = weakref.finalize(self, self._pool.shutdown, wait=False)

    async def run(self, work: Callable[[], _T]) -> _T:
        """What ``work`` returns or raises, run in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """End the threads when they are done. May be called again."""
        self._finalizer()
