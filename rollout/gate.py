"""`Gate`: lets a collection's episodes begin, in order, one by one, when admission allows."""

import asyncio
import bisect
import time
from collections import deque
from collections.abc import Sequence

from toolgym.agents.policy import EngineLoad, Policy
from toolgym.rollout.admission import Admission, Staleness, Underway
from toolgym.rollout.episode import EpisodePlan
from toolgym.rollout.telling import load_of, version_of

_LEAST = 8


class Gate:
    """Where slots wait for their next episode. All of it happens on the event loop of the environments.

    Args:
        plans: the episodes, in the order in which they may begin; the members of a group one after the other.
        admission: how many may be under way.
        staleness: how old weights may be; None: as old as they get.
        policy: asked for its load and, where staleness is bounded, for its version.

    Raises:
        PolicyFailure: (also by `next`, `ready` and `release`) the policy does not tell its version.
    """

    def __init__(
        self, plans: Sequence[EpisodePlan], admission: Admission, staleness: Staleness | None, policy: Policy
    ) -> None:
        self._plans = deque(plans)
        self._first_index = plans[0].task_index if plans else 0
        self._admission, self._staleness = admission, staleness
        self._policy = policy
        self._first_version = self._version() if staleness is not None else 0
        self._slots: deque[tuple[int, asyncio.Future[EpisodePlan | None]]] = deque()
        self._episodes = self._groups = self._dropped = 0
        self.emitted = 0
        """Trajectories that were handed to the reader; counted up by the collection."""
        self._load = load_of(policy)
        self._allowed = _LEAST  # episodes that may begin before the engine has told of its load again
        self._stale = False
        self.read = 0
        """Trajectories that were read; counted up by the reader, in whatever thread."""
        self.reason = ""
        self.since = self._last_end = time.monotonic()

    @property
    def waiting(self) -> list[int]:
        """The slots that wait here. May be asked from any thread."""
        return [slot for slot, _ in list(self._slots)]  # the copy is one act, which nobody comes between

    async def next(self, slot: int) -> EpisodePlan | None:
        """The next episode, when it may begin; None if there is none left."""
        if not self._plans:
            return None
        if not self._slots and (plan := self.ready()) is not None:
            return plan
        future: asyncio.Future[EpisodePlan | None] = asyncio.get_running_loop().create_future()
        self._slots.append((slot, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and (plan := future.result()) is not None:
                self.put_back(plan)
            self._slots = deque(entry for entry in self._slots if entry[1] is not future)
            raise

    def ready(self, *, with_others: bool = False) -> EpisodePlan | None:
        """The next episode, if one may begin right now.

        Args:
            with_others: whether it is one of a batch that begins as a whole, on one word of the engine's.
        """
        if not self._plans:
            return None
        reason = self._refusal(self._plans[0])
        if not reason and not with_others and self._load is not None and self._allowed <= 0:
            reason = "the engine to tell of its load"
        if reason != self.reason:
            self.reason, self.since = reason, time.monotonic()
        if reason:
            return None
        plan = self._plans.popleft()
        self._episodes += 1
        self._allowed -= 1
        self._groups = max(self._groups, plan.task_index + 1 - self._first_index)
        return plan

    def put_back(self, plan: EpisodePlan) -> None:
        """An episode that was let in begins later, in its place among those that have not begun."""
        self._plans.insert(bisect.bisect(self._plans, _place(plan), key=_place), plan)
        self._episodes -= 1
        self._last_end = time.monotonic()

    @property
    def forsaken(self) -> bool:
        """Whether nothing runs, and newer weights do not come for longer than is waited for."""
        # Not from the refusal on: while something ran, there was perhaps nothing to train on.
        idle = time.monotonic() - max(self.since, self._last_end)
        return self._stale and self._episodes == 0 and idle > self._admission.weights_timeout

    def ended(self, *, dropped_group: bool = False) -> None:
        """An episode has ended. `release` lets others in."""
        self._episodes -= 1
        self._allowed += 1  # another one in its place is no more than was there
        self._dropped += dropped_group
        self._last_end = time.monotonic()

    def close(self) -> None:
        """Let nobody in any more."""
        self._plans.clear()
        self.release()

    def look(self) -> None:
        """Look at the engine's load anew, and let slots in."""
        self._load = load_of(self._policy)
        self._allowed = max(_LEAST, self._episodes)
        self.release()

    def release(self) -> None:
        """Let slots in, as far as admission allows now."""
        while self._slots:
            if self._slots[0][1].done():  # cancelled
                self._slots.popleft()
                continue
            plan = self.ready()
            if plan is None and self._plans:
                return
            self._slots.popleft()[1].set_result(plan)

    def _refusal(self, plan: EpisodePlan) -> str:
        self._stale = False
        if self._staleness is not None and self._is_new(plan):
            version, held = self._version(), self._groups - self._dropped
            self._stale = not self._staleness.admits(held, version - self._first_version)
            if self._stale:
                return f"newer weights than version {version}, after {held} groups"
        load = self._load or EngineLoad(None, None, None)
        state = Underway(self._episodes, self.emitted - self.read, load.kv_usage, load.waiting)
        return self._admission.refusal(state) or ""

    def _is_new(self, plan: EpisodePlan) -> bool:
        return plan.task_index - self._first_index >= self._groups

    def _version(self) -> int:
        return version_of(self._policy) or 0


def _place(plan: EpisodePlan) -> tuple[int, int]:
    return plan.task_index, plan.member
