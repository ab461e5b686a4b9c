"""In which order a run's episodes advance. With a deterministic policy all schedules give the same trajectories."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol

from toolgym.rollout.episode import EpisodePlan, EpisodeRun

ScheduleName = Literal["overlap", "lockstep"]
_SLICE = 32  # slots that begin in one iteration of the event loop: more would hold it up


class Episodes(Protocol):
    """Where a schedule gets its episodes from, and what it does with them. See `Collection`."""

    async def next(self, slot: int) -> EpisodePlan | None:
        """The next episode, when it may begin; None if there is none left."""
        ...

    def ready(self) -> EpisodePlan | None:
        """The next episode, if one may begin right now."""
        ...

    async def begin(self, slot: int, plan: EpisodePlan) -> EpisodeRun:
        """Put an episode into a slot."""
        ...

    async def play(self, run: EpisodeRun, stage: Awaitable[Any]) -> Any:
        """Await a stage of an episode, which ends it if somebody cancels it unasked."""
        ...

    async def ended(self, slot: int, run: EpisodeRun) -> bool:
        """Take an episode that has ended. Returns whether it is to be begun anew."""
        ...


Schedule = Callable[[int, Episodes], Awaitable[None]]


async def overlap(slots: int, episodes: Episodes) -> None:
    """One coroutine a slot; a slot that finishes takes the next plan at once."""

    async def work(slot: int) -> None:
        while (plan := await episodes.next(slot)) is not None:
            again = True
            while again:
                run = await episodes.begin(slot, plan)
                await episodes.play(run, _whole(run))
                again = await episodes.ended(slot, run)

    async with asyncio.TaskGroup() as group:
        for slot in range(slots):
            group.create_task(work(slot), name=f"toolgym slot {slot}")
            if slot % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)


async def lockstep(slots: int, episodes: Episodes) -> None:
    """Round by round: all sampling of a round together, then all tool calls of the round together.

    The batch is what may begin at once, and shrinks as its episodes end; the next one begins when all have.
    """
    again: list[EpisodePlan] = []
    while True:
        first = again.pop() if again else await episodes.next(0)
        if first is None:
            return
        plans = [first]
        while len(plans) < slots and (plan := again.pop() if again else episodes.ready()) is not None:
            plans.append(plan)
        runs = [await episodes.begin(slot, plan) for slot, plan in enumerate(plans)]
        await asyncio.gather(*(episodes.play(run, run.open()) for run in runs))
        again = await _rounds(episodes, dict(enumerate(runs)), dict(enumerate(plans)))


async def _rounds(
    episodes: Episodes, active: dict[int, EpisodeRun], plans: dict[int, EpisodePlan]
) -> list[EpisodePlan]:
    """Play a batch to its end; returns what is to be begun anew."""
    again = []
    while True:
        for slot in [slot for slot, run in active.items() if run.ended]:
            if await episodes.ended(slot, active.pop(slot)):
                again.append(plans[slot])
        if not active:
            return again
        runs = list(active.values())
        said = await asyncio.gather(*(episodes.play(run, run.sample()) for run in runs))
        acting = [(run, completion) for run, completion in zip(runs, said, strict=True) if completion is not None]
        await asyncio.gather(*(episodes.play(run, run.act(completion)) for run, completion in acting))


async def _whole(run: EpisodeRun) -> None:
    await run.open()
    while not run.ended:
        completion = await run.sample()
        if completion is not None:
            await run.act(completion)


SCHEDULES: dict[ScheduleName, Schedule] = {"overlap": overlap, "lockstep": lockstep}
