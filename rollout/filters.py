"""What is kept out of the results: `Filters`, and `Jury`, which asks them."""

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from toolgym.envs.errors import ConfigurationError, Failure, ToolgymError
from toolgym.envs.execution import Executor
from toolgym.envs.finite import checked_seconds
from toolgym.envs.waiting import Overdue, StrayExit, described
from toolgym.rollout.groups import Group
from toolgym.rollout.trajectory import Trajectory

AcceptTrajectory: TypeAlias = Callable[[Trajectory], bool | Awaitable[bool]]
AcceptGroup: TypeAlias = Callable[[Group], bool | Awaitable[bool]]
_TRIES = 3
_CLOSING = 0.2  # seconds


class CollectionFailed(ToolgymError):
    """A collection was ended before its time.

    By the first failure, as `Recovery` says; by a filter that raised or took too long; by weights that nobody updates,
    or a policy that does not tell their version any more.

    Attributes:
        failure: of the trajectory that ended it; None where it was none.
    """

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Filters:
    """What is kept out of the results. A plain function is called in a thread of its own, and may block.

    Attributes:
        accept: whether a trajectory is kept; asked when it has ended. Failed ones are not asked about. Anything that
            is not true, None among it, rejects.
        accept_group: whether a group is kept, asked when all its members have ended, failed ones among them. A group
            of which nothing is left is not asked about.
        timeout: seconds for one answer.

    Raises:
        ConfigurationError: something else than functions, or no time.
    """

    accept: AcceptTrajectory | None = None
    accept_group: AcceptGroup | None = None
    timeout: float = 60.0

    def __post_init__(self) -> None:
        for name in ("accept", "accept_group"):
            if (value := getattr(self, name)) is not None and not callable(value):
                raise ConfigurationError(f"expected Filters.{name} as a function, actual {value!r:.100}")
        object.__setattr__(self, "timeout", checked_seconds("Filters.timeout", self.timeout))


class Jury:
    """Asks the filters of one collection.

    Args:
        filters: whom to ask.
    """

    def __init__(self, filters: Filters) -> None:
        self._filters, self._executor = filters, Executor()

    @property
    def judges_groups(self) -> bool:
        """Whether groups are kept back until they are whole."""
        return self._filters.accept_group is not None

    async def accepts(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory is kept.

        Raises:
            CollectionFailed: the filter raised, or took too long.
        """
        if self._filters.accept is None or trajectory.failure is not None:
            return True
        return await self._ask(f"accept on trajectory {trajectory.id}", self._filters.accept, trajectory)

    async def accepts_group(self, group: Group) -> bool:
        """Whether a group is kept. Raises as `accepts`."""
        if self._filters.accept_group is None:
            return True
        return await self._ask(f"accept_group on group {group.task_index}", self._filters.accept_group, group)

    async def close(self) -> None:
        """Cancel what is still asked. A thread cannot be stopped, but keeps no process alive."""
        await self._executor.drain(_CLOSING)

    async def _ask(self, name: str, judge: Callable[[Any], Any], what: Any) -> bool:
        stray: StrayExit | None = None
        for _ in range(_TRIES):
            try:
                return bool(await self._executor.call(functools.partial(judge, what), name, self._filters.timeout))
            except StrayExit as raised:  # perhaps a tool cancelled all that is on the event loop: ask again
                stray = raised
            except Overdue as overdue:
                raise CollectionFailed(f"{name} took over {self._filters.timeout:g} s") from overdue
            except Exception as error:  # a user's function may raise anything
                raise CollectionFailed(f"{name} raised {described(error)}") from error
        raise CollectionFailed(f"{name} raised {stray}") from stray
