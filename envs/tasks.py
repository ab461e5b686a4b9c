"""Tasks, and where they come from."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from toolgym.envs.errors import ConfigurationError

Split = Literal["train", "test"]
TEST_FRACTION = 0.2
_MAX_DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class Task:
    """One problem to solve.

    Attributes:
        id: names the problem by its content: two tasks with one id are the same problem, however they are worded.
        prompt: the words that the model sees.
        data: what the environment needs to set the problem up and score it (JSON-ready); never shown to the model.
    """

    id: str
    prompt: str
    data: Mapping[str, Any] = field(default_factory=dict)


class TaskSource(ABC):
    """An ordered source of tasks: the same index always gives the same task."""

    @property
    @abstractmethod
    def size(self) -> int | None:
        """How many tasks there are; None where the source is endless."""

    @abstractmethod
    def get(self, index: int) -> Task:
        """The task at ``index``, 0 <= index < size. Raises ConfigurationError outside of that."""

    def take(self, count: int) -> list[Task]:
        """The first ``count`` tasks."""
        return [self.get(index) for index in range(count)]


class TaskList(TaskSource):
    """A finite source around a list of tasks."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        if not tasks:
            raise ConfigurationError("expected at least one task, actual an empty list")
        self._tasks = tuple(tasks)

    @property
    def size(self) -> int:
        """How many tasks the list holds."""
        return len(self._tasks)

    def get(self, index: int) -> Task:
        """The task at ``index``."""
        if not 0 <= index < len(self._tasks):
            raise ConfigurationError(f"expected a task index in [0, {len(self._tasks)}), actual {index}")
        return self._tasks[index]


class ProceduralTasks(TaskSource):
    """An endless source that generates tasks from a seed, with disjoint train and test splits.

    Which split a problem belongs to is decided by a hash of its id alone (SHA-256, one fifth of all problems are
    test problems), so no problem can be in both, whatever the seeds.

    Args:
        generate: draws one task from a random generator; the id it gives must name the problem by its content.
        split: ``"train"`` or ``"test"``.
        seed: with the index, it decides the task.
    """

    def __init__(
        self, generate: Callable[[np.random.Generator], Task], *, split: Split = "train", seed: int = 0
    ) -> None:
        if split not in ("train", "test"):
            raise ConfigurationError(f"expected split 'train' or 'test', actual {split!r}")
        if not isinstance(seed, int | np.integer) or seed < 0:
            raise ConfigurationError(f"expected a task seed of 0 or more, actual {seed!r}")
        self._generate, self._split, self._seed = generate, split, seed

    @property
    def size(self) -> None:
        """Endless."""

    def get(self, index: int) -> Task:
        """The task at ``index``: drawn anew until one falls into this source's split."""
        if index < 0:
            raise ConfigurationError(f"expected a task index of 0 or more, actual {index}")
        rng = np.random.default_rng([self._seed, index])
        for _ in range(_MAX_DRAWS):
            task = self._generate(rng)
            if split_of(task.id) == self._split:
                return task
        raise ConfigurationError(
            f"no task of split {self._split!r} in {_MAX_DRAWS} draws: the generator makes too few different problems"
        )


def split_of(task_id: str) -> Split:
    """The split that a problem belongs to, by a hash of its id."""
    digest = hashlib.sha256(task_id.encode()).digest()
    return "test" if int.from_bytes(digest[:4]) / 2**32 < TEST_FRACTION else "train"


def as_source(tasks: "TaskSource | Sequence[Task | str]") -> TaskSource:
    """A task source from what an author has at hand: a source, tasks, or bare prompts (their ids are their texts)."""
    if isinstance(tasks, TaskSource):
        return tasks
    if isinstance(tasks, str) or not isinstance(tasks, Sequence):
        raise ConfigurationError(f"expected a list of tasks or prompts, or a task source, actual {tasks!r:.200}")
    if wrong := [entry for entry in tasks if not isinstance(entry, Task | str)]:
        raise ConfigurationError(f"expected tasks as Task or str, actual {wrong[0]!r:.200}")
    return TaskList([Task(id=entry, prompt=entry) if isinstance(entry, str) else entry for entry in tasks])
