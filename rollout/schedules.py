"""In which order a run's episodes advance. With a deterministic policy all schedules give the same trajectories."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal, Protocol

from toolgym.rollout.episode import EpisodePlan, EpisodeRun
from toolgym.rollout.trajectory import Trajectory

ScheduleName = Literal["overlap", "lockstep"]
Begin = Callable[[int, EpisodePlan], Awaitable[EpisodeRun]]
Emit = Callable[[Trajectory], None]


class Schedule(Protocol):
    """Runs all plans on the slots, and emits each trajectory once, when it has ended; also those that are cancelled."""

    async def __call__(self, slots: int, plans: Iterable[EpisodePlan], begin: Begin, emit: Emit) -> None:
        """Returns when all plans have been run."""
        ...


async def overlap(slots: int, plans: Iterable[EpisodePlan], begin: Begin, emit: Emit) -> None:
    """One coroutine a slot; a slot that finishes takes the next plan at once."""
    waiting = deque(plans)

    async def work(slot: int) -> None:
        while waiting:
            run = await begin(slot, waiting.popleft())
            try:
                await _play(run)
            finally:
                run.cancel()  # unless it has ended, which it has, but where this task is cancelled
                emit(run.trajectory)

    async with asyncio.TaskGroup() as group:
        for slot in range(min(slots, len(waiting))):
            group.create_task(work(slot))


async def lockstep(slots: int, plans: Iterable[EpisodePlan], begin: Begin, emit: Emit) -> None:
    """Round by round: all sampling of a round together, then all tool calls of the round together."""
    waiting = deque(plans)
    while waiting:
        runs = [await begin(slot, waiting.popleft()) for slot in range(min(slots, len(waiting)))]
        active = runs
        try:
            await asyncio.gather(*(run.open() for run in runs))
            while active := _emit_ended(active, emit):
                completions = await asyncio.gather(*(run.sample() for run in active))
                await asyncio.gather(
                    *(run.act(said) for run, said in zip(active, completions, strict=True) if said is not None)
                )
        finally:
            for run in active:
                run.cancel()
            _emit_ended(active, emit)


async def _play(run: EpisodeRun) -> None:
    await run.open()
    while not run.ended:
        completion = await run.sample()
        if completion is not None:
            await run.act(completion)


def _emit_ended(runs: Sequence[EpisodeRun], emit: Emit) -> list[EpisodeRun]:
    """Emit what has ended; return what has not."""
    for run in runs:
        if run.ended:
            emit(run.trajectory)
    return [run for run in runs if not run.ended]


SCHEDULES: dict[ScheduleName, Schedule] = {"overlap": overlap, "lockstep": lockstep}
