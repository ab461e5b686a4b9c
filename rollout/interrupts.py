"""`first_interrupt`: a Ctrl-C that is heard, but does not break off what runs in this thread."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interrupt:
    """Whether there was one."""

    happened: bool = False


@contextlib.contextmanager
def first_interrupt(act: Callable[[], None]) -> Iterator[Interrupt]:
    """While this is entered, a first Ctrl-C calls ``act`` and a second one raises KeyboardInterrupt.

    Raised anywhere, the first one would tear a function that is writing a record. As `asyncio.Runner` does, it is
    caught in the main thread alone, and only where Python's own handler is in place; else nothing is changed.
    """
    interrupt = Interrupt()

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupt.happened:
            raise KeyboardInterrupt
        interrupt.happened = True
        act()

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        if signal.getsignal(signal.SIGINT) is handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)
