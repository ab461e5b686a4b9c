"""Python's cyclic garbage collector, while thousands of episodes are in flight.

Its full passes go through everything that lives, and stop every thread while they do: with 10,000 episodes, more than
a second each, again and again while they grow. What a collection makes has next to no cycles, so full passes find
nothing. While one runs, they come once in five minutes instead, and what has survived one is not gone through again.
This is so for the whole process, and as it was before when the last such collection has ended. Where the garbage
collector is off already, it is left alone.
"""

import contextlib
import gc
import threading
import time
from collections.abc import Iterator

_MANY = 1_000  # slots, below which a full pass takes milliseconds
_PERIOD = 300.0  # seconds between two full passes
_NEVER = 2**30  # passes over what is young, before a full one
_LOCK = threading.Lock()
_before: list[tuple[int, int, int]] = []  # an entry for each collection that holds the collector off
_frozen: list[bool] = []  # whether somebody else had frozen what lives, when the first one began


@contextlib.contextmanager
def held_off(slots: int) -> Iterator[None]:
    """Hold full passes off within the block, if there are many slots. Left alone where the collector is off."""
    if slots < _MANY or not gc.isenabled():
        yield
        return
    with _LOCK:
        if not _before:
            _frozen[:] = [gc.get_freeze_count() > 0]
        _before.append(gc.get_threshold())
        if not _frozen[0]:
            gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], _NEVER)  # what is young is looked at as before
    try:
        yield
    finally:
        with _LOCK:
            first = _before[0]
            _before.pop()
            if not _before:
                gc.set_threshold(*first)
                if not _frozen[0]:
                    gc.unfreeze()


class Sweeper:
    """Makes the full passes that are due, where they are held off."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def sweep(self) -> None:
        """Make one if it is due."""
        if _before and time.monotonic() - self._last > _PERIOD:
            gc.collect()
            if not _frozen[0]:
                gc.freeze()
            self._last = time.monotonic()
