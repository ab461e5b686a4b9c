"""`Collector`: runs a policy through a vector of tool environments and brings back exact trajectories."""

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import gymnasium
import numpy as np

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Policy, Sampling
from toolgym.envs.errors import ConfigurationError, ToolgymError
from toolgym.envs.tasks import Task
from toolgym.envs.vector import ToolVectorEnv
from toolgym.rollout.episode import EpisodePlan, EpisodeRun, OnBreak
from toolgym.rollout.limits import Limits
from toolgym.rollout.openings import GroupOpening
from toolgym.rollout.schedules import SCHEDULES, ScheduleName
from toolgym.rollout.trajectory import Trajectory

_STOPPING = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        total: trajectories asked for.
        finished: trajectories that have ended, in whatever way.
        solved: of them, solved.
        failed: of them, ended by a failure of ours.
        turns: messages of the model in the finished ones.
        sampled_tokens: tokens that the model sampled in the finished ones.
    """

    total: int
    finished: int = 0
    solved: int = 0
    failed: int = 0
    turns: int = 0
    sampled_tokens: int = 0

    def plus(self, trajectory: Trajectory) -> "Progress":
        """The progress after one more trajectory."""
        return Progress(
            self.total,
            self.finished + 1,
            self.solved + trajectory.solved,
            self.failed + (trajectory.failure is not None),
            self.turns + len(trajectory.turns),
            self.sampled_tokens + int(trajectory.loss_mask.sum()),
        )


@dataclass(frozen=True)
class Collector:
    """Collects trajectories: every task, ``group_size`` times, each with a stop reason.

    The slots of ``envs`` are stepped on their own event loop, all of them together; what happens to one episode never
    touches another. The collector does not close ``envs`` or ``policy``.

    Args:
        envs: a `ToolVectorEnv`, as `gymnasium.make_vec` makes it. Nothing else may step it while a collection runs.
        policy: who answers.
        chat: the chat format of the policy's model.
        limits: what an episode may use.
        sampling: how to sample.
        schedule: ``"overlap"``: a slot that finishes takes the next task at once. ``"lockstep"``: round by round.
        seed: of the run; environment and sampling seeds are derived from it.
        env_id: name of the environment, for the record.
        on_break: what is done where a prompt cannot be extended exactly, see the chat format's certificate:
            ``"stop"`` ends that episode, ``"split"`` goes on from a new prompt, as another training sample.

    Raises:
        ConfigurationError: another kind of environment, an unknown schedule, a negative seed, or limits beyond what
            the policy's model can take.
    """

    envs: gymnasium.vector.VectorEnv[Any, Any, Any]
    policy: Policy
    chat: ChatFormat
    limits: Limits = field(default_factory=Limits)
    sampling: Sampling = field(default_factory=Sampling)
    schedule: ScheduleName = "overlap"
    seed: int = 0
    env_id: str | None = None
    on_break: OnBreak = "stop"

    def __post_init__(self) -> None:
        if not isinstance(self.envs, ToolVectorEnv):
            raise ConfigurationError(f"expected a ToolVectorEnv without wrappers, actual {self.envs}")
        for name, kind in (("policy", Policy), ("chat", ChatFormat), ("limits", Limits), ("sampling", Sampling)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigurationError(f"expected {name} as a {kind.__name__}, actual {getattr(self, name)!r:.100}")
        if self.schedule not in tuple(SCHEDULES):
            raise ConfigurationError(f"expected a schedule among {', '.join(SCHEDULES)}, actual {self.schedule!r}")
        if self.on_break not in get_args(OnBreak):
            raise ConfigurationError(f"expected on_break as 'stop' or 'split', actual {self.on_break!r}")
        _check_count("seed", self.seed, least=0)
        check_time(self.envs, self.limits)
        room = getattr(self.policy, "max_model_len", None)
        if room is not None and self.limits.max_trajectory_tokens > room:
            raise ConfigurationError(
                f"Limits.max_trajectory_tokens is {self.limits.max_trajectory_tokens}, but the policy's model takes "
                f"{room} tokens: lower the limit, or give the policy a larger max_model_len"
            )

    def collect(self, tasks: int | Sequence[Task], group_size: int = 1, *, first_index: int = 0) -> list[Trajectory]:
        """Collect everything, and return it in order of tasks and members.

        Args:
            tasks: the tasks, or how many to take from the environment's source.
            group_size: how many times each task is run, its first prompt sampled in one request.
            first_index: index of the first task: collections of one run number their tasks on.

        Returns:
            ``len(tasks) * group_size`` trajectories.

        Raises:
            ConfigurationError: a group size below 1, or more tasks than the source has.
        """
        return sorted(self.stream(tasks, group_size, first_index=first_index), key=_place)

    def stream(self, tasks: int | Sequence[Task], group_size: int = 1, *, first_index: int = 0) -> Iterator[Trajectory]:
        """Like `collect`, but yields each trajectory when it ends.

        Closing the iterator cancels what still runs, and waits until it has ended.

        Raises:
            ToolgymError: (while iterating) the environments were closed, or somebody else uses them.
        """
        plans = self._plans(tasks, group_size, first_index)
        return self._stream(plans, group_size)

    def _stream(self, plans: Sequence[EpisodePlan], group_size: int) -> Iterator[Trajectory]:
        arrived: queue.SimpleQueue[Trajectory | None] = queue.SimpleQueue()
        loop = self._slots.loop
        running = loop.run(_spawn(self._run(plans, group_size, arrived.put), lambda _: arrived.put(None)))
        try:
            while (trajectory := arrived.get()) is not None:
                yield trajectory
            _raise_outcome(running)
        finally:
            try:
                loop.run(_stop(running), timeout=2 * _STOPPING)
            except (ToolgymError, TimeoutError):
                # The loop is closed or blocked, or it is its own thread that collects this iterator as garbage.
                running.cancel()

    async def acollect(
        self, tasks: int | Sequence[Task], group_size: int = 1, *, first_index: int = 0
    ) -> list[Trajectory]:
        """`collect`, awaited from any event loop."""
        return sorted([t async for t in self.astream(tasks, group_size, first_index=first_index)], key=_place)

    def astream(
        self, tasks: int | Sequence[Task], group_size: int = 1, *, first_index: int = 0
    ) -> AsyncIterator[Trajectory]:
        """`stream`, iterated from any event loop."""
        plans = self._plans(tasks, group_size, first_index)
        return self._astream(plans, group_size)

    async def _astream(self, plans: Sequence[EpisodePlan], group_size: int) -> AsyncIterator[Trajectory]:
        arrived: asyncio.Queue[Trajectory | None] = asyncio.Queue()
        here, loop = asyncio.get_running_loop(), self._slots.loop

        def put(trajectory: Trajectory | None) -> None:
            here.call_soon_threadsafe(arrived.put_nowait, trajectory)

        running = await loop.call(_spawn(self._run(plans, group_size, put), lambda _: put(None)))
        try:
            while (trajectory := await arrived.get()) is not None:
                yield trajectory
            _raise_outcome(running)
        finally:
            with contextlib.suppress(ToolgymError):  # the loop is closed already
                await loop.call(_stop(running))

    def config(self) -> dict[str, Any]:
        """What a run was collected with, JSON-ready."""
        return {
            "env_id": self._env_id,
            "num_envs": self.envs.num_envs,
            "schedule": self.schedule,
            "seed": self.seed,
            "limits": asdict(self.limits),
            "sampling": asdict(self.sampling),
            "chat_format": self.chat.name,
            "certificate": None if self.chat.certificate is None else self.chat.certificate.as_dict(),
            "on_break": self.on_break,
            "policy": getattr(self.policy, "description", {"kind": type(self.policy).__name__}),
        }

    @property
    def _slots(self) -> ToolVectorEnv:
        assert isinstance(self.envs, ToolVectorEnv)  # checked when this was made
        return self.envs

    @property
    def _env_id(self) -> str:
        spec = self.envs.spec
        return self.env_id or (spec.id if spec is not None else type(self._slots.envs[0]).__name__)

    def _plans(self, tasks: int | Sequence[Task], group_size: int, first_index: int) -> list[EpisodePlan]:
        _check_count("group_size", group_size, least=1)
        _check_count("first_index", first_index, least=0)
        chosen = take_tasks(self._slots, tasks)
        return [
            EpisodePlan(self._env_id, task, index, member, self.seed, self.sampling, self.on_break)
            for index, task in enumerate(chosen, start=first_index)
            for member in range(group_size)
        ]

    async def _run(self, plans: Sequence[EpisodePlan], group_size: int, emit: Callable[[Trajectory], None]) -> None:
        openings: dict[int, GroupOpening] = {}
        requests: set[asyncio.Task[Any]] = set()
        ended = 0

        async def begin(slot: int, plan: EpisodePlan) -> EpisodeRun:
            # Members begin in order: after the last one nobody asks for the group again.
            known = openings.pop(plan.task_index, None)
            opening = known or GroupOpening(self.policy, group_size, requests)
            if plan.member < group_size - 1:
                openings[plan.task_index] = opening
            env = await self._slots.fresh(slot)
            return EpisodeRun(env, self.chat, self.limits, plan, opening.sample)

        def count(trajectory: Trajectory) -> None:
            nonlocal ended
            ended += 1
            emit(trajectory)

        with self._slots.held("a collection"):
            try:
                await SCHEDULES[self.schedule](self._slots.num_envs, plans, begin, count)
            finally:
                for request in requests:
                    request.cancel()
                if requests:
                    await asyncio.wait(requests, timeout=1.0)
        if ended != len(plans):
            raise ToolgymError(f"{ended} of {len(plans)} trajectories came back: this is a bug of the collector's")


def check_time(envs: ToolVectorEnv, limits: Limits) -> None:
    """Check that a step is given the time that the environment's tools may take.

    Raises:
        ConfigurationError: it is not: slow tools would count as failures of the environment.
    """
    longest = envs.envs[0].longest_call
    if limits.step_timeout <= longest:
        raise ConfigurationError(
            f"Limits.step_timeout is {limits.step_timeout:g} s, but one tool call of the environment may take "
            f"{longest:g} s: raise the one or lower the other, or slow tools count as failures of the environment"
        )


def take_tasks(envs: ToolVectorEnv, tasks: int | Sequence[Task]) -> Sequence[Task]:
    """The tasks of a collection: those given, or so many from the environment's source.

    Raises:
        ConfigurationError: no tasks, or more than the source has.
    """
    if isinstance(tasks, Sequence) and not isinstance(tasks, str):
        if wrong := [task for task in tasks if not isinstance(task, Task)]:
            raise ConfigurationError(f"expected tasks as Task, actual {wrong[0]!r:.100}")
        return tasks
    _check_count("tasks", tasks, least=0)
    size = envs.tasks.size
    if size is not None and int(tasks) > size:
        raise ConfigurationError(f"expected up to {size} tasks, all that there are; {tasks} were asked for")
    return envs.tasks.take(int(tasks))


def _check_count(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigurationError(f"expected {name} as an int of {least} or more, actual {value!r:.100}")


async def _spawn(
    work: Coroutine[Any, Any, None], when_done: Callable[["asyncio.Task[None]"], None]
) -> "asyncio.Task[None]":
    task = asyncio.create_task(work)
    task.add_done_callback(when_done)
    return task


async def _stop(task: "asyncio.Task[None]") -> None:
    """Cancel a collection and wait until it has let go of its slots, for a bounded time."""
    task.cancel()
    await asyncio.wait({task}, timeout=_STOPPING)


def _raise_outcome(task: "asyncio.Task[None]") -> None:
    if task.cancelled():
        raise ToolgymError("the environments were closed while a collection ran")
    task.result()


def _place(trajectory: Trajectory) -> tuple[int, int]:
    return trajectory.task_index, trajectory.member
