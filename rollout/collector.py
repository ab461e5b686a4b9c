"""`Collector`: runs a policy through a vector of tool environments and brings back exact trajectories."""

import functools
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import gymnasium

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import LoadReporting, Policy, Sampling
from toolgym.envs.errors import ConfigurationError
from toolgym.envs.finite import checked_int
from toolgym.envs.tasks import Task
from toolgym.envs.vector import ToolVectorEnv
from toolgym.rollout.admission import Admission, Staleness
from toolgym.rollout.batches import ain_batches, in_batches
from toolgym.rollout.collection import CollectionPlan
from toolgym.rollout.episode import EpisodePlan, EpisodeSettings
from toolgym.rollout.filters import Filters
from toolgym.rollout.groups import Group
from toolgym.rollout.limits import Limits
from toolgym.rollout.prompting import OnBreak
from toolgym.rollout.recovery import Recovery
from toolgym.rollout.schedules import SCHEDULES, ScheduleName
from toolgym.rollout.streams import Stream, akept, kept, place
from toolgym.rollout.telling import version_of
from toolgym.rollout.trajectory import Trajectory
from toolgym.rollout.watchdog import Watch


@dataclass(frozen=True)
class Collector:
    """Collects trajectories: every task, ``group_size`` times, each with a stop reason.

    The slots of ``envs`` are stepped on their own event loop, all of them together; what happens to one episode never
    touches another. The collector does not close ``envs`` or ``policy``. See also `rollout`, which gathers all that
    comes out of it.

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
        recovery: what is done about failures.
        admission: how many episodes may be under way. (With 1,000 slots or more, full passes of Python's garbage
            collector are held off while they collect, see `toolgym.rollout.garbage`; `gc.disable()` before leaves it
            alone.)
        filters: which trajectories and groups are kept out of the results.
        evaluation: whether this is for evaluation rather than for training; environments and rewards are told so.
        watch: when a slot counts as stuck, and who hears of it.

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
    recovery: Recovery = field(default_factory=Recovery)
    admission: Admission = field(default_factory=Admission)
    filters: Filters = field(default_factory=Filters)
    evaluation: bool = False
    watch: Watch = field(default_factory=Watch)

    def __post_init__(self) -> None:
        if not isinstance(self.envs, ToolVectorEnv):
            raise ConfigurationError(f"expected a ToolVectorEnv without wrappers, actual {self.envs}")
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise ConfigurationError(f"expected {name} as a {kind.__name__}, actual {getattr(self, name)!r:.100}")
        if self.schedule not in tuple(SCHEDULES):
            raise ConfigurationError(f"expected a schedule among {', '.join(SCHEDULES)}, actual {self.schedule!r}")
        if self.on_break not in get_args(OnBreak):
            raise ConfigurationError(f"expected on_break as 'stop' or 'split', actual {self.on_break!r}")
        seed = checked_int("seed", self.seed, least=0)
        if self.admission.max_waiting is not None and not isinstance(self.policy, LoadReporting):
            raise ConfigurationError(
                f"Admission.max_waiting is {self.admission.max_waiting}, but the policy does not tell of its load: it "
                "needs a method load() -> EngineLoad"
            )
        object.__setattr__(self, "seed", seed)
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
            first_index: index of the first task: collections of one run number their tasks on. It is also the first
                one that is taken from the source, whose first task comes behind its last one. The same indices and seed
                give the same episodes again.

        Returns:
            ``len(tasks) * group_size`` trajectories, less those that the filters reject.

        Raises:
            ConfigurationError: a group size below 1, or more tasks than the source has.
            CollectionFailed: a failure, where `Recovery` says so. `rollout` keeps what was finished; this does not.
        """
        return sorted(self.stream(tasks, group_size, first_index=first_index), key=place)

    def stream(self, tasks: int | Sequence[Task], group_size: int = 1, *, first_index: int = 0) -> Iterator[Trajectory]:
        """Like `collect`, but yields each trajectory when it ends.

        Closing the iterator cancels what still runs, and waits until it has ended.

        Raises:
            ToolgymError: (while iterating) the environments were closed, or somebody else uses them.
        """
        return kept(self.start(tasks, group_size, first_index=first_index))

    async def acollect(
        self, tasks: int | Sequence[Task], group_size: int = 1, *, first_index: int = 0
    ) -> list[Trajectory]:
        """`collect`, awaited from any event loop."""
        return sorted([t async for t in self.astream(tasks, group_size, first_index=first_index)], key=place)

    def astream(
        self, tasks: int | Sequence[Task], group_size: int = 1, *, first_index: int = 0
    ) -> AsyncIterator[Trajectory]:
        """`stream`, iterated from any event loop."""
        return akept(self.start(tasks, group_size, first_index=first_index))

    def batches(
        self, tasks: int | Sequence[Task], group_size: int, *, groups: int, max_staleness: int = 1, first_index: int = 0
    ) -> Iterator[list[Group]]:
        """Batches of whole groups for a trainer, whose weights change between them: ``policy.update_weights(...)``.

        Groups come in the order in which they were begun, and while one batch is trained on, the next ones are
        collected already, ``max_staleness`` versions ahead at most. See `Staleness`. The last batch may be smaller.

        Args:
            tasks: the tasks, or how many to take from the environment's source.
            group_size: members of a group.
            groups: of a batch; the weights go up by one version for each batch.
            max_staleness: how many versions older than those that are trained the weights may be with which a
                trajectory was begun.
            first_index: index of the first task.

        Raises:
            ConfigurationError: numbers out of their ranges, or a policy whose weights have no versions.
            BatchesFailed: (while iterating) the collection failed; `TooStale`: a trajectory is older than that, as
                weights were updated more often than once a batch. What was finished is in it.
            BatchesInterrupted: (while iterating) on Ctrl-C; likewise.
        """
        staleness = self._staleness(max_staleness, groups)
        return in_batches(self.start(tasks, group_size, first_index=first_index, staleness=staleness), self.policy)

    def abatches(
        self, tasks: int | Sequence[Task], group_size: int, *, groups: int, max_staleness: int = 1, first_index: int = 0
    ) -> AsyncIterator[list[Group]]:
        """`batches`, iterated from any event loop."""
        staleness = self._staleness(max_staleness, groups)
        return ain_batches(self.start(tasks, group_size, first_index=first_index, staleness=staleness), self.policy)

    def start(
        self,
        tasks: int | Sequence[Task],
        group_size: int = 1,
        *,
        first_index: int = 0,
        staleness: Staleness | None = None,
    ) -> "Stream":
        """What `stream` and its like read from: a collection that begins when it is first read."""
        group_size = checked_int("group_size", group_size, least=1)
        first_index = checked_int("first_index", first_index, least=0)
        episodes = [
            EpisodePlan(task, index, member)
            for index, task in enumerate(take_tasks(self._slots, tasks, first_index), start=first_index)
            for member in range(group_size)
        ]
        settings = EpisodeSettings(
            env_id=self._env_id,
            seed=self.seed,
            limits=self.limits,
            sampling=self.sampling,
            on_break=self.on_break,
            recovery=self.recovery,
            evaluation=self.evaluation,
            version=functools.partial(version_of, self.policy),
        )
        plan = CollectionPlan(
            slots=self._slots,
            policy=self.policy,
            chat=self.chat,
            schedule=SCHEDULES[self.schedule],
            settings=settings,
            episodes=episodes,
            first_index=first_index,
            group_size=group_size,
            filters=self.filters,
            admission=self.admission,
            staleness=staleness,
            watch=self.watch,
        )
        return Stream(plan)

    def config(self) -> dict[str, Any]:
        """What a run was collected with, JSON-ready."""
        return {
            "env_id": self._env_id,
            "num_envs": self.envs.num_envs,
            "schedule": self.schedule,
            "seed": self.seed,
            "limits": asdict(self.limits),
            "sampling": asdict(self.sampling),
            "recovery": asdict(self.recovery),
            "admission": asdict(self.admission),
            "evaluation": self.evaluation,
            "filters": [name for name in ("accept", "accept_group") if getattr(self.filters, name) is not None],
            "chat_format": self.chat.name,
            "certificate": None if self.chat.certificate is None else self.chat.certificate.as_dict(),
            "on_break": self.on_break,
            "policy": getattr(self.policy, "description", {"kind": type(self.policy).__name__}),
        }

    def _staleness(self, bound: int, batch: int) -> Staleness:
        if version_of(self.policy) is None:
            raise ConfigurationError(
                f"batches need a policy that tells the version of its weights, {self.policy!r:.100} has none: use "
                "stream() or rollout()"
            )
        return Staleness(bound, batch)

    @property
    def _slots(self) -> ToolVectorEnv:
        assert isinstance(self.envs, ToolVectorEnv)  # checked when this was made
        return self.envs

    @property
    def _env_id(self) -> str:
        spec = self.envs.spec
        return self.env_id or (spec.id if spec is not None else type(self._slots.envs[0]).__name__)


_KINDS: dict[str, type] = {
    "policy": Policy,
    "chat": ChatFormat,
    "limits": Limits,
    "sampling": Sampling,
    "recovery": Recovery,
    "admission": Admission,
    "filters": Filters,
    "evaluation": bool,
    "watch": Watch,
}


def check_time(envs: ToolVectorEnv, limits: Limits) -> None:
    """Check that steps and tools are given the time that they may take.

    Raises:
        ConfigurationError: they are not: slow tools would count as failures of the environment, or what is the
            environment's fault as a slow tool.
    """
    env = envs.envs[0]
    longest = min(env.longest_call, limits.tool_timeout or math.inf)
    if limits.step_timeout <= longest:
        raise ConfigurationError(
            f"Limits.step_timeout is {limits.step_timeout:g} s, but one tool call of the environment may take "
            f"{longest:g} s: raise the one or lower the other, or slow tools count as failures of the environment"
        )
    if limits.tool_timeout is not None and limits.tool_timeout < env.least_call:
        raise ConfigurationError(
            f"Limits.tool_timeout is {limits.tool_timeout:g} s, but one run in the sandbox may take "
            f"{env.least_call:g} s with waiting for a box, which the model cannot help: lower the sandbox's time-outs"
        )


def take_tasks(envs: ToolVectorEnv, tasks: int | Sequence[Task], first: int = 0) -> Sequence[Task]:
    """The tasks of a collection: those given, or so many from the environment's source, from number ``first`` on.

    Where a source has an end, its first task comes behind its last one.

    Raises:
        ConfigurationError: no tasks, or more than the source has.
    """
    if isinstance(tasks, Sequence) and not isinstance(tasks, str):
        if wrong := [task for task in tasks if not isinstance(task, Task)]:
            raise ConfigurationError(f"expected tasks as Task(id, prompt), actual {wrong[0]!r:.100}")
        return tasks
    count = checked_int("tasks", tasks, least=0)
    size = envs.tasks.size
    if size is not None and count > size:
        raise ConfigurationError(f"expected up to {size} tasks, all that there are; {count} were asked for")
    numbers = range(first, first + count)
    return [envs.tasks.get(number if size is None else number % size) for number in numbers]
