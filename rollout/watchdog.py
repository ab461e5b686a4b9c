"""`Watchdog`: says which slots are stuck and what each waits for, from a thread of its own."""

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.finite import checked_seconds

_LOG = logging.getLogger("toolgym.rollout")
_SHOWN = 8  # slots by name in a log line
_FRAMES = 16  # of a blocked loop's stack
_LONGEST = 14_400.0  # seconds, four times the longest between two looks
_CLOSING = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class Waiting:
    """What one slot waits for.

    Attributes:
        slot: its number.
        trajectory: id of the trajectory that it runs; empty between two.
        turn: messages of the model so far.
        what: what it waits for, in words: ``"the policy"``, ``"tools: python"``, ``"an answer from score"``, ...
        seconds: for how long.
    """

    slot: int
    trajectory: str
    turn: int
    what: str
    seconds: float

    def __str__(self) -> str:
        whose = f"slot {self.slot}" + (f" (trajectory {self.trajectory}, turn {self.turn})" if self.trajectory else "")
        return f"{whose} waits for {self.what} since {self.seconds:.0f} s"


@dataclass(frozen=True, slots=True)
class Stall:
    """A report of the watchdog's.

    Attributes:
        waiting: the slots that have waited for one thing for too long, the longest first.
        blocked: seconds for which the event loop of the environments has not moved; 0.0 if it does.
        where: the line at which it is blocked, and how it got there; empty if it is not.
    """

    waiting: tuple[Waiting, ...]
    blocked: float = 0.0
    where: str = ""

    def __str__(self) -> str:
        lines = [str(entry) for entry in self.waiting[:_SHOWN]]
        if len(self.waiting) > _SHOWN:
            lines.append(f"and {len(self.waiting) - _SHOWN} more slots")
        if self.blocked:
            lines.insert(0, f"the event loop is blocked since {self.blocked:.0f} s, by code that does not await:")
            lines.insert(1, self.where)
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Watch:
    """When a slot counts as stuck, and who is told.

    Every wait ends by itself, by the time-outs of `Limits`, as long as the event loop of the environments moves; this
    is for finding out why they are reached. Code that does not await can block the loop, and nothing can stop it.

    Attributes:
        after: seconds in one wait, after which a slot is reported; again after twice that time, and so on. None: never.
        give_up: seconds for which the loop may be blocked; then whoever reads the collection gets a `CollectionFailed`
            that names the line.
        on_stall: called with each `Stall`, in the watchdog's thread; None logs it as a warning of ``toolgym.rollout``.

    Raises:
        ConfigurationError: a time that is not above zero.
    """

    after: float | None = 60.0
    on_stall: Callable[[Stall], None] | None = None
    give_up: float = 600.0

    def __post_init__(self) -> None:
        for name in ("after", "give_up"):
            value = getattr(self, name)
            if name == "after" and value is None:
                continue
            object.__setattr__(self, name, checked_seconds(f"Watch.{name}", value))
        if self.on_stall is not None and not callable(self.on_stall):
            raise ConfigurationError(f"expected Watch.on_stall as a function, actual {self.on_stall!r}")


@dataclass
class Heartbeat:
    """When an event loop last moved, and in which thread it runs. Beaten on the loop, read by the watchdog."""

    thread: int
    last: float = field(default_factory=time.monotonic)

    def beat(self) -> None:
        """The loop moves."""
        self.last = time.monotonic()


class Watchdog:
    """Looks at the slots every now and then, until it is closed.

    It has a thread of its own, since it must speak also when the event loop cannot.

    Args:
        watch: when and to whom to report.
        slots: what each slot waits for now.
        heart: of the event loop.
        give_up: told once, in words, when the loop is blocked for too long.
    """

    def __init__(
        self,
        watch: Watch,
        slots: Callable[[], Sequence[Waiting]],
        heart: Heartbeat,
        give_up: Callable[[str], None],
    ) -> None:
        self._watch, self._slots, self._heart, self._give_up = watch, slots, heart, give_up
        self._after = math.inf if watch.after is None else watch.after
        self._given_up = False
        self._reported: dict[tuple[int, str, int, str], float] = {}
        self._blocked = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._main, name="toolgym watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let the thread end. May be called again."""
        self._closed.set()

    async def wait(self) -> None:
        """Wait for the end of the thread, for a bounded time: it may be in a function of somebody else's."""
        end = time.monotonic() + _CLOSING
        while self._thread.is_alive() and time.monotonic() < end:  # noqa: ASYNC110 - a thread ends without an event
            await asyncio.sleep(0.002)

    def look(self) -> Stall | None:
        """What is stuck and has not been reported yet, or has taken twice as long since; None if nothing is."""
        blocked = time.monotonic() - self._heart.last
        seen: dict[tuple[int, str, int, str], float] = {}
        due = []
        for entry in self._slots():
            key = (entry.slot, entry.trajectory, entry.turn, entry.what)
            seen[key] = self._reported.get(key, 0.0)
            if entry.seconds >= max(self._after, 2 * seen[key]):
                seen[key] = entry.seconds
                due.append(entry)
        self._reported = seen
        stuck = blocked >= max(self._after, 2 * self._blocked)
        self._blocked = (blocked if stuck else self._blocked) if blocked >= self._after else 0.0
        if not due and not stuck:
            return None
        due.sort(key=lambda entry: -entry.seconds)
        return Stall(tuple(due), blocked if stuck else 0.0, self._stack() if stuck else "")

    def _main(self) -> None:
        while not self._closed.wait(min(self._after, self._watch.give_up, _LONGEST) / 4):
            try:
                self._report(self.look())
                self._see_to_the_loop()
            except Exception:  # noqa: BLE001 - of ours or of somebody else's function: the watch goes on
                _LOG.exception("the watchdog could not report")

    def _report(self, stall: Stall | None) -> None:
        if stall is None:
            return
        if self._watch.on_stall is None:
            _LOG.warning("%s", stall)
            return
        try:
            self._watch.on_stall(stall)
        except Exception:  # noqa: BLE001 - somebody else's function: the watch goes on
            _LOG.exception("on_stall raised; the report was: %s", stall)

    def _see_to_the_loop(self) -> None:
        blocked = time.monotonic() - self._heart.last
        if not self._given_up and blocked > self._watch.give_up:
            self._given_up = True
            self._give_up(str(Stall((), blocked, self._stack())))

    def _stack(self) -> str:
        """How the loop's thread got to where it is, from the task on that it runs."""
        frame = sys._current_frames().get(self._heart.thread)
        if frame is None:
            return ""
        stack = list(traceback.extract_stack(frame))
        by_loop = [k for k, entry in enumerate(stack) if entry.filename == asyncio.events.__file__]
        of_task = stack[by_loop[-1] + 1 if by_loop else 0 :]
        # The first lines are the tool's, the last ones those of what it calls.
        left_out = len(of_task) - _FRAMES
        shown = traceback.format_list(of_task[: _FRAMES // 2] + of_task[-_FRAMES // 2 :] if left_out > 0 else of_task)
        if left_out > 0:
            shown.insert(_FRAMES // 2, f"  ... {left_out} calls ...\n")
        return "".join(shown).rstrip()
