"""`Collection`: one collection while it runs, on the event loop of the environments."""

import asyncio
import inspect
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Policy
from toolgym.envs.errors import Failure, ToolgymError
from toolgym.envs.vector import ToolVectorEnv
from toolgym.envs.waiting import Overdue, described, take_outcome, within
from toolgym.rollout.admission import Admission, Staleness
from toolgym.rollout.episode import EpisodePlan, EpisodeRun, EpisodeSettings
from toolgym.rollout.gate import Gate
from toolgym.rollout.groups import Group
from toolgym.rollout.openings import GroupOpening
from toolgym.rollout.schedules import Schedule
from toolgym.rollout.trajectory import StopReason, Trajectory
from toolgym.rollout.watchdog import Heartbeat, Waiting, Watch, Watchdog

_JUDGING = 60.0  # seconds for a filter
_STOPPING, _TENDING = 5.0, 0.05  # seconds

AcceptTrajectory: TypeAlias = Callable[[Trajectory], bool | Awaitable[bool]]
AcceptGroup: TypeAlias = Callable[[Group], bool | Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Ended:
    """A trajectory that has come to its end.

    Attributes:
        trajectory: it.
        rejected: whether a filter left it out.
    """

    trajectory: Trajectory
    rejected: bool = False


@dataclass(frozen=True, slots=True)
class Filters:
    """What is kept out of the results.

    Attributes:
        accept: whether a trajectory is kept; called once, when it has ended. Failed ones are not asked about.
        accept_group: whether a group is kept, called once, when all its members have ended.
    """

    accept: AcceptTrajectory | None = None
    accept_group: AcceptGroup | None = None


class CollectionFailed(ToolgymError):
    """A collection was ended: by the first failure, as `Recovery` says, or by a filter that raised.

    Attributes:
        failure: of the trajectory that ended it; None where it was none.
    """

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


@dataclass
class _Members:
    """What has come of one group so far."""

    ended: int = 0
    kept: list[Trajectory] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """All that a collection is made of.

    Attributes:
        slots: the environments.
        policy: who answers.
        chat: the chat format.
        schedule: in which order episodes advance.
        settings: what the episodes have in common.
        episodes: the episodes, the members of a group one after the other.
        first_index: index of the first task.
        group_size: members of a group.
        filters: what is kept out of the results.
        admission: how many episodes may be under way.
        staleness: how old weights may be; None: as old as they get.
        watch: when a slot counts as stuck.
    """

    slots: ToolVectorEnv
    policy: Policy
    chat: ChatFormat
    schedule: Schedule
    settings: EpisodeSettings
    episodes: Sequence[EpisodePlan]
    first_index: int
    group_size: int
    filters: Filters
    admission: Admission
    staleness: Staleness | None
    watch: Watch


class Collection:
    """Runs episodes to their ends and hands each over once, whatever happens. See `Episodes` for what schedules use.

    Args:
        plan: what it is made of.
        emit: takes each trajectory that has ended.
    """

    def __init__(self, plan: CollectionPlan, emit: Callable[[Ended], None]) -> None:
        self._slots, self._policy, self._chat, self._schedule = plan.slots, plan.policy, plan.chat, plan.schedule
        self._settings, self._group_size, self._filters = plan.settings, plan.group_size, plan.filters
        self._watch, self._emit, self._asked = plan.watch, emit, len(plan.episodes)
        self.gate = Gate(plan.episodes, plan.admission, plan.staleness, plan.policy)
        self._left = {(episode.task_index, episode.member): episode for episode in plan.episodes}
        self._running: dict[int, EpisodeRun] = {}
        self._openings: dict[int, GroupOpening] = {}
        self._requests: set[asyncio.Task[Any]] = set()
        self._earlier: defaultdict[tuple[int, int], list[Failure]] = defaultdict(list)
        self._groups: defaultdict[int, _Members] = defaultdict(_Members)
        self._emitted = 0
        self._stopping = self._finished = False
        self._fatal: CollectionFailed | None = None
        self._task: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        """Run everything.

        Raises:
            CollectionFailed: see there. All trajectories have been emitted, those that ran or had not begun as
                cancelled.
            ToolgymError: somebody else uses the slots.
        """
        self._task = asyncio.current_task()
        with self._slots.held("a collection"):
            heart = Heartbeat(threading.get_ident())
            watchdog = Watchdog(self._watch, self.waiting, heart)
            tending = asyncio.create_task(self._tend(heart))
            try:
                await self._drive()
            except asyncio.CancelledError:
                if self._fatal is None:
                    raise
            finally:
                self._finished = True
                self._sweep()
                watchdog.close()
                await self._end([tending, *self._requests])
        if self._fatal is not None:
            raise self._fatal
        if self._emitted != self._asked:
            raise ToolgymError(f"{self._emitted} of {self._asked} trajectories came back: a bug of the collector's")

    async def stop(self) -> None:
        """Cancel what runs, emit it, and wait until the slots are let go of, for a bounded time."""
        self.abandon()
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task}, timeout=_STOPPING)

    def abandon(self) -> None:
        """Cancel what runs, without waiting for it."""
        self._stopping = True
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def waiting(self) -> list[Waiting]:
        """What each slot waits for now. May be called from any thread."""
        now = time.monotonic()
        found = [
            Waiting(slot, run.trajectory.id, len(run.trajectory.turns), run.waits.what, now - run.waits.since)
            for slot, run in list(self._running.items())
        ]
        if self.gate.reason:
            reason, since = self.gate.reason, self.gate.since
            found += [Waiting(slot, "", 0, f"admission: {reason}", now - since) for slot in list(self.gate.waiting)]
        return found

    # What schedules use.

    async def next(self, slot: int) -> EpisodePlan | None:
        """See `Episodes`."""
        return await self.gate.next(slot)

    def ready(self) -> EpisodePlan | None:
        """See `Episodes`."""
        return self.gate.ready()

    async def begin(self, slot: int, plan: EpisodePlan) -> EpisodeRun:
        """See `Episodes`."""
        opening = self._openings.get(plan.task_index)
        if opening is None:
            opening = GroupOpening(self._policy, self._group_size, self._requests)
            self._openings[plan.task_index] = opening
        env = await self._slots.fresh(slot)
        run = EpisodeRun(env, self._chat, self._settings, plan, opening.sample)
        self._running[slot] = run
        return run

    async def play(self, run: EpisodeRun, stage: Awaitable[Any]) -> Any:
        """See `Episodes`."""
        try:
            return await stage
        except asyncio.CancelledError:
            if self._is_stopped:
                raise
            self._go_on()
            run.fail("cancelled_by_other", "code that shares the event loop cancelled the episode's task")
            return None

    async def ended(self, slot: int, run: EpisodeRun) -> bool:
        """See `Episodes`."""
        trajectory, failure = run.trajectory, run.trajectory.failure
        earlier = self._earlier[trajectory.task_index, trajectory.member]
        if failure is not None and not run.hopeless and self._settings.recovery.begins_anew(len(earlier)):
            earlier.append(failure)
            if trajectory.stop_reason is StopReason.POLICY_FAILURE:
                pause = self._settings.recovery.delay(len(earlier) - 1)
                await run.waits.named("the policy to recover", asyncio.sleep(pause))
            await self._slots.renew(slot)
            del self._running[slot]
            return True
        await self._finish(slot, run)
        return False

    async def _finish(self, slot: int, run: EpisodeRun) -> None:
        trajectory = run.trajectory
        trajectory.earlier = tuple(self._earlier.pop((trajectory.task_index, trajectory.member), ()))
        kept = await run.waits.named("the filter", self._accepts(trajectory))
        del self._running[slot], self._left[trajectory.task_index, trajectory.member]
        group = self._groups[trajectory.task_index]
        group.ended += 1
        before, dropped = self._emitted, False
        if not kept:
            self._hand_over(trajectory, rejected=True)
        elif self._filters.accept_group is None:
            group.kept.append(trajectory)
            self._hand_over(trajectory)
        else:
            group.kept.append(trajectory)
        if group.ended == self._group_size:
            dropped = not await self._close_group(trajectory.task_index, group)
        self.gate.ended(self._emitted - before, dropped_group=dropped)
        if trajectory.failure is not None and self._settings.recovery.on_failure == "raise":
            failure = trajectory.failure
            text = f"trajectory {trajectory.id} failed in {failure.where} ({failure.kind}): {failure.message}"
            self._end_all(CollectionFailed(text, failure))

    async def _close_group(self, index: int, group: _Members) -> bool:
        """Decide about a group whose members have all ended. Returns whether anything is left of it."""
        accept = self._filters.accept_group
        if accept is None:
            del self._groups[index]
        elif group.kept:
            members = tuple(sorted(group.kept, key=lambda trajectory: trajectory.member))
            whole = Group(index, members[0].task_id, self._group_size, members)
            accepted = await self._judged(f"accept_group on group {index}", accept, whole)
            del self._groups[index]
            for trajectory in members:
                self._hand_over(trajectory, rejected=not accepted)
            return accepted
        self._groups.pop(index, None)
        self._openings.pop(index, None)
        return bool(group.kept)

    async def _accepts(self, trajectory: Trajectory) -> bool:
        if self._filters.accept is None or trajectory.failure is not None:
            return True
        return await self._judged(f"accept on trajectory {trajectory.id}", self._filters.accept, trajectory)

    async def _judged(self, name: str, judge: Callable[[Any], Any], what: Any) -> bool:
        """What a filter says. Its failure ends the collection; what it was asked about is kept."""
        try:
            if inspect.iscoroutinefunction(judge):
                return bool(await within(judge(what), _JUDGING))
            return bool(await within(asyncio.to_thread(judge, what), _JUDGING))
        except Overdue:
            self._end_all(CollectionFailed(f"{name} took over {_JUDGING:g} s"))
        except Exception as error:  # noqa: BLE001 - a user's function: the collection ends, with its results
            failed = CollectionFailed(f"{name} raised {described(error)}")
            failed.__cause__ = error
            self._end_all(failed)
        return True

    def _hand_over(self, trajectory: Trajectory, *, rejected: bool = False) -> None:
        self._emitted += 1
        self._emit(Ended(trajectory, rejected))

    def _end_all(self, why: CollectionFailed) -> None:
        if self._fatal is None:
            self._fatal, self._stopping = why, True
            assert self._task is not None  # it runs
            self._task.cancel()

    @property
    def _is_stopped(self) -> bool:
        """Whether a cancellation was asked for: by us, or by the environments' end."""
        return self._stopping or self._slots.loop.closing

    def _go_on(self) -> None:
        """Take back a cancellation that nobody of ours has asked for: a tool may cancel all tasks of its loop."""
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()

    async def _drive(self) -> None:
        while True:
            try:
                await self._schedule(self._slots.num_envs, self)
            except asyncio.CancelledError:
                if self._is_stopped:
                    raise
                self._go_on()
            for slot, run in list(self._running.items()):  # only where somebody cancelled our own tasks
                run.fail("cancelled_by_other", "code that shares the event loop cancelled the slot's task")
                await self._finish(slot, run)
            if not self._left:
                return
            self.gate.refill(list(self._left.values()))  # what a cancelled task had taken, and not begun

    async def _tend(self, heart: Heartbeat) -> None:
        """Show that the loop moves, and look after what changes without a word: load, versions, readers."""
        while True:
            try:
                heart.beat()
                self.gate.release()
                if self.gate.forsaken:
                    self._end_all(CollectionFailed(f"nobody updates the weights: waited for {self.gate.reason}"))
                await asyncio.sleep(_TENDING)
            except asyncio.CancelledError:
                if self._finished or self._is_stopped:
                    raise
                self._go_on()

    def _sweep(self) -> None:
        """Emit what has not been: what runs and what has not begun, as cancelled; groups that are not whole."""
        self.gate.close()
        for run in self._running.values():
            run.cancel()
            self._left.pop((run.trajectory.task_index, run.trajectory.member), None)
            self._hand_over(run.trajectory)
        self._running.clear()
        if self._filters.accept_group is not None:
            for trajectory in [trajectory for group in self._groups.values() for trajectory in group.kept]:
                self._hand_over(trajectory)
        self._groups.clear()
        settings = self._settings
        for plan in self._left.values():
            never = Trajectory(settings.env_id, plan.task.id, plan.task_index, plan.member, settings.seed)
            never.stop_reason, never.evaluation = StopReason.CANCELLED, settings.evaluation
            self._hand_over(never)
        self._left.clear()

    async def _end(self, tasks: Sequence["asyncio.Task[Any]"]) -> None:
        for task in tasks:
            task.cancel()
            task.add_done_callback(take_outcome)
        await asyncio.wait(tasks, timeout=1.0)
