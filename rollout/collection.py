"""`Collection`: one collection while it runs, on the event loop of the environments."""

import asyncio
import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Policy
from toolgym.envs.errors import Failure, ToolgymError
from toolgym.envs.vector import ToolVectorEnv
from toolgym.envs.waiting import described, take_outcome
from toolgym.rollout.admission import Admission, Staleness
from toolgym.rollout.episode import EpisodePlan, EpisodeRun, EpisodeSettings
from toolgym.rollout.filters import CollectionFailed, Filters, Jury
from toolgym.rollout.garbage import Sweeper, held_off
from toolgym.rollout.gate import Gate
from toolgym.rollout.groups import Group
from toolgym.rollout.openings import GroupOpening
from toolgym.rollout.schedules import Schedule
from toolgym.rollout.trajectory import StopReason, Trajectory
from toolgym.rollout.watchdog import Heartbeat, Waiting, Watch, Watchdog

_LOG = logging.getLogger("toolgym.rollout")
_T = TypeVar("_T")
_STOPPING, _CLEARING, _TENDING = 5.0, 1.0, 0.05  # seconds
_SLICE = 32  # tasks that begin in one iteration of the event loop: more would hold it up


@dataclass(frozen=True, slots=True)
class Ended:
    """A trajectory that has come to its end.

    Attributes:
        trajectory: it.
        rejected: whether a filter left it out.
    """

    trajectory: Trajectory
    rejected: bool = False


@dataclass
class _Members:
    """What has come of one group so far."""

    ended: int = 0
    kept: list[Trajectory] = field(default_factory=list)


@dataclass
class _Place:
    """An episode in a slot, from its admission on."""

    plan: EpisodePlan
    run: EpisodeRun | None = None  # once the environment is ready
    since: float = field(default_factory=time.monotonic)


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

    Its tasks share an event loop with the code of tools, which may cancel them. So whatever it awaits is either a stage
    of an episode, which fails by that, or is awaited once more; only what `abandon` cancels ends.

    Args:
        plan: what it is made of.
        emit: takes each trajectory that has ended.
        lost: is told, in another thread, when the event loop is blocked for good: then nothing more comes.

    Raises:
        PolicyFailure: the policy does not tell its version, where staleness is bounded.
    """

    def __init__(
        self, plan: CollectionPlan, emit: Callable[[Ended], None], lost: Callable[[CollectionFailed], None]
    ) -> None:
        self._slots, self._policy, self._chat, self._schedule = plan.slots, plan.policy, plan.chat, plan.schedule
        self._settings, self._group_size, self._jury = plan.settings, plan.group_size, Jury(plan.filters)
        self._watch, self._emit, self._lost, self._asked = plan.watch, emit, lost, len(plan.episodes)
        self.gate = Gate(plan.episodes, plan.admission, plan.staleness, plan.policy)
        self._left = {(episode.task_index, episode.member): episode for episode in plan.episodes}
        self._places: dict[int, _Place] = {}
        self._openings: dict[int, GroupOpening] = {}
        self._requests: set[asyncio.Task[Any]] = set()
        self._earlier: defaultdict[tuple[int, int], list[Failure]] = defaultdict(list)
        self._groups: defaultdict[int, _Members] = defaultdict(_Members)
        self._emitted = 0
        self._stopping = self._ending = self._finished = self._told = False
        self._fatal: CollectionFailed | None = None
        self._task: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        """Run everything, or until it is stopped.

        Raises:
            CollectionFailed: see there. All trajectories have been emitted, those that ran or had not begun as
                cancelled.
            ToolgymError: somebody else uses the slots.
        """
        self._task = asyncio.current_task()
        with self._slots.held("a collection"), held_off(self._slots.num_envs):
            heart = Heartbeat(threading.get_ident())
            watchdog = Watchdog(self._watch, self.waiting, heart, lambda text: self._lost(CollectionFailed(text)))
            tending = asyncio.create_task(self._tend(heart))
            try:
                if not self._stopping:
                    await self._schedule(self._slots.num_envs, self)
            except asyncio.CancelledError:
                if not self._stopping:
                    raise  # the environments are being closed
            except Exception as error:  # noqa: BLE001 - a bug, or a policy's: it ends with its results all the same
                self._break_down(error)
            finally:
                self._finished = True
                self._sweep()
                await self._clear(watchdog, [tending, *self._requests])
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
        """Cancel what runs, without waiting for it. What has not begun to run never will."""
        self._stopping = True
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def waiting(self) -> list[Waiting]:
        """What each slot waits for now. May be called from any thread."""
        now, found = time.monotonic(), []
        for slot, place in list(self._places.items()):
            run, plan = place.run, place.plan
            if run is None:
                name = f"{plan.task_index}.{plan.member}"
                found.append(Waiting(slot, name, 0, "a free environment", now - place.since))
            else:
                turns, waits = len(run.trajectory.turns), run.waits
                found.append(Waiting(slot, run.trajectory.id, turns, waits.what, now - waits.since))
        if self.gate.reason:
            reason, since = self.gate.reason, self.gate.since
            found += [Waiting(slot, "", 0, f"admission: {reason}", now - since) for slot in self.gate.waiting]
        return found

    # What schedules use.

    async def next(self, slot: int) -> EpisodePlan | None:
        """See `Episodes`."""
        return await self._steadily(lambda: self.gate.next(slot))

    def ready(self) -> EpisodePlan | None:
        """See `Episodes`."""
        return self.gate.ready(with_others=True)

    async def begin(self, slot: int, plan: EpisodePlan) -> EpisodeRun:
        """See `Episodes`."""
        place = self._places[slot] = _Place(plan)
        opening = self._openings.get(plan.task_index)
        if opening is None:
            retried = self._settings.recovery.request_retries > 0
            opening = GroupOpening(self._policy, self._group_size, self._requests, retried=retried)
            self._openings[plan.task_index] = opening
        env = await self._steadily(lambda: self._slots.fresh(slot))
        place.run = EpisodeRun(env, self._chat, self._settings, plan, opening.sample)
        return place.run

    async def play(self, run: EpisodeRun, stage: Callable[[], Awaitable[Any]]) -> Any:
        """See `Episodes`."""
        try:
            return await stage()
        except asyncio.CancelledError:
            self._take_back()
            run.fail("cancelled_by_other", "code that shares the event loop cancelled the episode's task")
            return None

    async def ended(self, slot: int, run: EpisodeRun) -> None:
        """See `Episodes`."""
        trajectory, recovery = run.trajectory, self._settings.recovery
        earlier = self._earlier[trajectory.task_index, trajectory.member]
        if trajectory.failure is None or run.hopeless or not recovery.begins_anew(len(earlier)):
            await self._finish(slot, run)
            return
        if trajectory.stop_reason is StopReason.POLICY_FAILURE:
            pause = recovery.delay(len(earlier))
            await run.waits.named("the policy to recover", self._steadily(lambda: asyncio.sleep(pause)))
        await run.waits.named("a new environment", self._steadily(lambda: self._slots.renew(slot)))
        earlier.append(trajectory.failure)
        self.gate.put_back(self._places.pop(slot).plan)
        self._admit(self.gate.release)

    async def together(self, works: Iterable[Callable[[], Awaitable[Any]]]) -> list[Any]:
        """See `Episodes`."""
        begun = list(works)
        tasks: list[asyncio.Task[Any]] = []
        try:
            for work in begun:
                tasks.append(_task(work))
                if len(tasks) % _SLICE == 0:
                    await self._steadily(lambda: asyncio.sleep(0))
            while any(not task.done() or task.cancelled() for task in tasks):
                # Cancelled before its first line, where nothing could take that back: once more.
                tasks[:] = [_task(work) if task.cancelled() else task for work, task in zip(begun, tasks, strict=True)]
                await self._steadily(lambda: asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION))
                for task in tasks:
                    if task.done() and not task.cancelled():
                        task.result()  # raises what it has raised
            return [task.result() for task in tasks]
        finally:
            await self._end(tasks)

    async def _finish(self, slot: int, run: EpisodeRun) -> None:
        trajectory = run.trajectory
        if run.hopeless and not self._told:
            self._told = True
            why = "" if trajectory.failure is None else trajectory.failure.message
            _LOG.error("the policy has failed for good, and with it all episodes to come: %s", why)
        trajectory.earlier = tuple(self._earlier.pop((trajectory.task_index, trajectory.member), ()))
        kept = await run.waits.named("the filter accept", self._judged(lambda: self._jury.accepts(trajectory)))
        del self._left[trajectory.task_index, trajectory.member]
        group = self._groups[trajectory.task_index]
        group.ended += 1
        dropped = False
        if kept:
            group.kept.append(trajectory)
        if not kept or not self._jury.judges_groups:
            self._hand_over(trajectory, rejected=not kept)
        if group.ended == self._group_size:
            closing = self._close_group(trajectory.task_index, group)
            dropped = not await run.waits.named("the filter accept_group", closing)
        del self._places[slot]
        self.gate.ended(dropped_group=dropped)
        if trajectory.failure is not None and self._settings.recovery.on_failure == "raise":
            failure = trajectory.failure
            text = f"trajectory {trajectory.id} failed in {failure.where} ({failure.kind}): {failure.message}"
            self._end_all(CollectionFailed(text, failure))
        self._admit(self.gate.release)

    async def _close_group(self, index: int, group: _Members) -> bool:
        """Decide about a group whose members have all ended. Returns whether anything is left of it."""
        accepted = bool(group.kept)
        if group.kept and self._jury.judges_groups:
            members = tuple(sorted(group.kept, key=lambda trajectory: trajectory.member))
            whole = Group(index, members[0].task_id, self._group_size, members)
            accepted = await self._judged(lambda: self._jury.accepts_group(whole))
            for trajectory in members:
                self._hand_over(trajectory, rejected=not accepted)
        del self._groups[index], self._openings[index]
        return accepted

    async def _judged(self, verdict: Callable[[], Awaitable[bool]]) -> bool:
        """What a filter says. Its failure ends the collection; what it was asked about is kept."""
        try:
            return await self._steadily(verdict)
        except CollectionFailed as failed:
            self._end_all(failed)
            return True

    def _hand_over(self, trajectory: Trajectory, *, rejected: bool = False) -> None:
        self._emitted += 1
        self.gate.emitted += 1
        self._emit(Ended(trajectory, rejected))

    def _admit(self, release: Callable[[], None]) -> None:
        """Let others in, now that something has changed."""
        try:
            release()
        except ToolgymError as error:  # the policy does not tell its version any more
            self._break_down(error)

    def _break_down(self, error: Exception) -> None:
        failed = CollectionFailed(f"the collection could not go on: {described(error)}")
        failed.__cause__ = error
        self._end_all(failed)

    def _end_all(self, why: CollectionFailed) -> None:
        if self._fatal is None:
            self._fatal = why
            self.abandon()

    def _take_back(self) -> None:
        """Take back a cancellation that nobody of ours has asked for: a tool may cancel all tasks of its loop.

        Called where one was caught; raises it again if it was asked for, by us or by the environments' end.
        """
        if self._stopping or self._ending or self._slots.loop.closing:
            raise asyncio.CancelledError
        if (task := asyncio.current_task()) is not None:
            while task.cancelling():
                task.uncancel()

    async def _steadily(self, act: Callable[[], Awaitable[_T]]) -> _T:
        """Await something of our own; if code that shares the event loop cancels it, once more."""
        while True:
            try:
                return await act()
            except asyncio.CancelledError:
                self._take_back()

    async def _tend(self, heart: Heartbeat) -> None:
        """Show that the loop moves, and look after what changes without a word: load, versions, readers."""
        sweeper = Sweeper()

        async def tend() -> None:
            while not self._finished:
                heart.beat()
                sweeper.sweep()
                self._admit(self.gate.look)
                if self.gate.forsaken:
                    self._end_all(CollectionFailed(f"nobody updates the weights: waited for {self.gate.reason}"))
                await asyncio.sleep(_TENDING)

        await self._steadily(tend)

    def _sweep(self) -> None:
        """Emit what has not been: what runs and what has not begun, as cancelled; groups that are not whole."""
        self.gate.close()
        for run in [place.run for place in self._places.values() if place.run is not None]:
            made = run.trajectory
            key = made.task_index, made.member
            if self._left.pop(key, None) is not None:
                run.cancel()
                made.earlier = made.earlier or tuple(self._earlier[key])
                self._hand_over(made)
        if self._jury.judges_groups:
            for trajectory in [trajectory for group in self._groups.values() for trajectory in group.kept]:
                self._hand_over(trajectory)
        settings = self._settings
        for key, plan in self._left.items():
            never = Trajectory(settings.env_id, plan.task.id, plan.task_index, plan.member, settings.seed)
            never.stop_reason, never.evaluation = StopReason.CANCELLED, settings.evaluation
            never.earlier = tuple(self._earlier[key])
            self._hand_over(never)
        for left in (self._left, self._places, self._groups, self._openings):
            left.clear()

    async def _end(self, tasks: Sequence["asyncio.Task[Any]"]) -> None:
        """Cancel tasks of our own and wait for their ends, however often we are cancelled ourselves meanwhile."""
        if not all(task.done() for task in tasks):
            self._ending = True  # else they would take their cancellation back
        for task in tasks:
            task.cancel()
        end = time.monotonic() + _CLEARING
        while (pending := [task for task in tasks if not task.done()]) and time.monotonic() < end:
            try:
                await asyncio.wait(pending, timeout=end - time.monotonic())
            except asyncio.CancelledError:
                continue

    async def _clear(self, watchdog: Watchdog, tasks: Sequence["asyncio.Task[Any]"]) -> None:
        """Leave nothing behind: tasks, requests, filters, the watchdog's thread. For a bounded time."""
        watchdog.close()
        await self._end(tasks)
        for closing in (self._jury.close, watchdog.wait):
            with contextlib.suppress(asyncio.CancelledError):  # it is over already
                await closing()


def _task(work: Callable[[], Awaitable[Any]]) -> "asyncio.Task[Any]":
    async def run() -> Any:
        return await work()

    task = asyncio.create_task(run())
    task.add_done_callback(take_outcome)
    return task
