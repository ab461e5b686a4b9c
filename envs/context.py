"""What an episode is part of, and the numbers that it collects: `EpisodeContext`, `Stats`, `current_context`."""

import contextlib
import contextvars
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.finite import as_finite

Scope: TypeAlias = Literal["rollout", "eval-rollout"]


class Stats:
    """Numbers that one episode collects, by name. Tools may add to it from their threads."""

    def __init__(self) -> None:
        # One list, since to append to it and to copy it are each one act that no other thread can come between.
        self._added: list[tuple[str, float]] = []

    def add(self, name: str, value: object) -> None:
        """Add a number, of Python, numpy or torch, to those of a name.

        Raises:
            ConfigurationError: an empty name, or no finite number. In `setup`, tools, `score` and reward functions
                this ends the episode as a failure; the model is not told.
        """
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"expected the name of a statistic as a text, actual {name!r:.100}")
        number = as_finite(value)
        if number is None:
            raise ConfigurationError(f"expected statistic {name!r} as a finite number, actual {value!r:.200}")
        self._added.append((name, number))

    def as_dict(self) -> dict[str, tuple[float, ...]]:
        """All numbers so far, by name, in the order in which they were added."""
        found: dict[str, list[float]] = {}
        for name, number in tuple(self._added):
            found.setdefault(name, []).append(number)
        return {name: tuple(numbers) for name, numbers in found.items()}


@dataclass(slots=True)
class EpisodeContext:
    """What an episode is part of. One is made for each episode, and used for no other.

    Attributes:
        task_id: the id of its task.
        task_index: the place of the task among those that were asked for.
        member: the episode's number among those of the same task.
        evaluation: whether this is for an evaluation, not for training.
        policy_version: the version of the weights that sampled the last turn; None where there are no versions.
            Whoever drives the episode keeps it up to date.
        stats: the numbers that the episode collects.

    Raises:
        ConfigurationError: a value of a wrong kind.
    """

    task_id: str
    task_index: int = 0
    member: int = 0
    evaluation: bool = False
    policy_version: int | None = None
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self.policy_version = None if self.policy_version is None else _whole("policy_version", self.policy_version)
        self.task_index, self.member = _whole("task_index", self.task_index), _whole("member", self.member)
        for name, value, kind in (
            ("task_id", self.task_id, str),
            ("evaluation", self.evaluation, bool),
            ("stats", self.stats, Stats),
        ):
            if not isinstance(value, kind):
                raise ConfigurationError(f"expected {name} as {kind.__name__}, actual {value!r:.100}")

    @property
    def scope(self) -> Scope:
        """The scope of its statistics: ``"rollout"``, or ``"eval-rollout"`` in an evaluation."""
        return "eval-rollout" if self.evaluation else "rollout"


@dataclass(frozen=True, slots=True)
class StatSummary:
    """The numbers of one name over many episodes: their mean, least, greatest, and how many there are."""

    mean: float
    min: float
    max: float
    count: int


def aggregate_stats(episodes: Iterable[tuple[Scope, Mapping[str, Sequence[float]]]]) -> dict[str, StatSummary]:
    """Sum up the statistics of many episodes, training and evaluation apart.

    Args:
        episodes: of each its scope and its statistics, as ``(context.scope, context.stats.as_dict())``.

    Returns:
        By scope and name, as in ``"rollout/calls"``, in the order of these keys. Every number counts once, so that
        an episode with many of a name weighs more than one with few.
    """
    found: dict[str, list[float]] = {}
    for scope, stats in episodes:
        for name, numbers in stats.items():
            found.setdefault(f"{scope}/{name}", []).extend(numbers)
    return {key: _summary(found[key]) for key in sorted(found) if found[key]}


def current_context() -> EpisodeContext:
    """The context of the episode whose `setup`, tool, `score` or reward function calls this.

    Raises:
        ConfigurationError: called from elsewhere, or in a thread that such a function has started by itself without
            ``contextvars.copy_context()``.
    """
    context = _CURRENT.get()
    if context is None:
        raise ConfigurationError(
            "no episode here: call current_context() in setup, tools, score and reward functions, and in threads of "
            "your own only through contextvars.copy_context().run"
        )
    return context


@contextlib.contextmanager
def inside(context: EpisodeContext) -> Iterator[None]:
    """Make a context the current one, also for the tasks and threads of the `Executor` that are started meanwhile."""
    token = _CURRENT.set(context)
    try:
        yield
    finally:
        _CURRENT.reset(token)


_CURRENT: contextvars.ContextVar[EpisodeContext | None] = contextvars.ContextVar("toolgym_episode", default=None)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ConfigurationError(f"expected {name} as an int of 0 or more, actual {value!r:.100}")
    return int(value)


def _summary(values: list[float]) -> StatSummary:
    try:
        mean = math.fsum(values) / len(values)
    except OverflowError:
        mean = math.fsum(value / len(values) for value in values)
    return StatSummary(mean, min(values), max(values), len(values))
