"""In which order a run's episodes advance. With a deterministic policy all schedules give the same trajectories."""

import functools
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Literal, Protocol

from toolgym.rollout.episode import EpisodePlan, EpisodeRun

ScheduleName = Literal["overlap", "lockstep"]


class Episodes(Protocol):
    """Where a schedule gets its episodes from, and what it does with them. See `Collection`."""

    async def next(self, slot: int) -> EpisodePlan | None:
        """The next episode, when it may begin; None if there is none left."""
        ...

    def ready(self) -> EpisodePlan | None:
        """One more episode for a batch, if one may begin right now."""
        ...

    async def begin(self, slot: int, plan: EpisodePlan) -> EpisodeRun:
        """Put an episode into a slot."""
        ...

    async def play(self, run: EpisodeRun, stage: Callable[[], Awaitable[Any]]) -> Any:
        """Await a stage of an episode, which ends it if somebody cancels it unasked."""
        ...

    async def ended(self, slot: int, run: EpisodeRun) -> None:
        """Take an episode that has ended. One that is to be begun anew is among the next ones."""
        ...

    async def together(self, works: Iterable[Callable[[], Awaitable[Any]]]) -> list[Any]:
        """Run several at once; returns what they return, in their order."""
        ...


Schedule = Callable[[int, Episodes], Awaitable[None]]


async def overlap(slots: int, episodes: Episodes) -> None:
    """One coroutine a slot; a slot that finishes takes the next plan at once."""

    async def work(slot: int) -> None:
        while (plan := await episodes.next(slot)) is not None:
            run = await episodes.begin(slot, plan)
            await episodes.play(run, functools.partial(_whole, run))
            await episodes.ended(slot, run)

    await episodes.together(functools.partial(work, slot) for slot in range(slots))


async def lockstep(slots: int, episodes: Episodes) -> None:
    """Round by round: all sampling of a round together, then all tool calls of the round together.

    The batch is what may begin at once, and shrinks as its episodes end; the next one begins when all have.
    """
    while (plan := await episodes.next(0)) is not None:
        plans = [plan]
        while len(plans) < slots and (another := episodes.ready()) is not None:
            plans.append(another)
        begun = await episodes.together(functools.partial(episodes.begin, k, plan) for k, plan in enumerate(plans))
        runs: dict[int, EpisodeRun] = dict(enumerate(begun))
        await episodes.together(functools.partial(episodes.play, run, run.open) for run in runs.values())
        await _rounds(episodes, runs)


async def _rounds(episodes: Episodes, active: dict[int, EpisodeRun]) -> None:
    """Play a batch to its end."""
    while True:
        over = [slot for slot, run in active.items() if run.ended]
        await episodes.together([functools.partial(episodes.ended, slot, active.pop(slot)) for slot in over])
        if not active:
            return
        runs = list(active.values())
        said = await episodes.together(functools.partial(episodes.play, run, run.sample) for run in runs)
        acting = [
            functools.partial(episodes.play, run, functools.partial(run.act, completion))
            for run, completion in zip(runs, said, strict=True)
            if completion is not None
        ]
        await episodes.together(acting)


async def _whole(run: EpisodeRun) -> None:
    await run.open()
    while not run.ended:
        completion = await run.sample()
        if completion is not None:
            await run.act(completion)


SCHEDULES: dict[ScheduleName, Schedule] = {"overlap": overlap, "lockstep": lockstep}
