"""In which order a run's episodes advance. With a deterministic policy all schedules give the same trajectories."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol, TypeVar

from toolgym.envs.tool_env import ToolEnv
from toolgym.rollout.episode import EpisodePlan, EpisodeRun
from toolgym.rollout.trajectory import Trajectory

ScheduleName = Literal["overlap", "lockstep"]
Begin = Callable[[ToolEnv, EpisodePlan], EpisodeRun]
Emit = Callable[[Trajectory], None]
_T = TypeVar("_T")


class Schedule(Protocol):
    """Runs all plans on the slots, and emits each trajectory once, when it has ended."""

    async def __call__(self, slots: Sequence[ToolEnv], plans: Iterable[EpisodePlan], begin: Begin, emit: Emit) -> None:
        """Returns when all plans have been run."""
        ...


async def overlap(slots: Sequence[ToolEnv], plans: Iterable[EpisodePlan], begin: Begin, emit: Emit) -> None:
    """One coroutine a slot; a slot that finishes takes the next plan at once."""
    waiting = deque(plans)

    async def work(env: ToolEnv) -> None:
        while waiting:
            emit(await _run(begin(env, waiting.popleft())))

    async with asyncio.TaskGroup() as group:
        for env in slots[: len(waiting)]:
            group.create_task(work(env))


async def lockstep(slots: Sequence[ToolEnv], plans: Iterable[EpisodePlan], begin: Begin, emit: Emit) -> None:
    """Round by round: all sampling of a round together, then all tool calls of the round together."""
    waiting = deque(plans)
    while waiting:
        runs = [begin(env, waiting.popleft()) for env in slots[: len(waiting)]]
        await asyncio.gather(*(run.open() for run in runs))
        active = _emit_ended(runs, emit)
        while active:
            completions = await asyncio.gather(*(run.sample() for run in active))
            await asyncio.gather(
                *(run.act(said) for run, said in zip(active, completions, strict=True) if said is not None)
            )
            active = _emit_ended(active, emit)


async def _run(run: EpisodeRun) -> Trajectory:
    await run.open()
    while not run.ended:
        completion = await run.sample()
        if completion is not None:
            await run.act(completion)
    return run.trajectory


def _emit_ended(runs: Sequence[EpisodeRun], emit: Emit) -> list[EpisodeRun]:
    """Emit what has ended; return what has not."""
    for run in runs:
        if run.ended:
            emit(run.trajectory)
    return [run for run in runs if not run.ended]


SCHEDULES: dict[ScheduleName, Schedule] = {"overlap": overlap, "lockstep": lockstep}
