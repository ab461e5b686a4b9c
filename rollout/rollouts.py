"""`rollout`: collect everything, tell of it on the way, and keep what is finished whatever happens."""

import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from toolgym.envs.context import StatSummary, aggregate_stats
from toolgym.envs.errors import ConfigurationError, ToolgymError
from toolgym.envs.tasks import Task
from toolgym.envs.waiting import described
from toolgym.rollout.collection import Ended
from toolgym.rollout.collector import Collector
from toolgym.rollout.groups import Group, group_trajectories
from toolgym.rollout.interrupts import first_interrupt
from toolgym.rollout.progress import Progress
from toolgym.rollout.streams import place
from toolgym.rollout.trajectory import Trajectory

OnTrajectory: TypeAlias = Callable[[Trajectory], Any]
OnProgress: TypeAlias = Callable[[Progress], Any]


@dataclass
class Rollout:
    """What came out of one call of `rollout`.

    Attributes:
        group_size: members of each group, as asked for.
        trajectories: in order of tasks and members; failed ones are among them, without a reward.
        rejected: those that a filter left out.
        progress: the counts.
        seconds: wall time.
    """

    group_size: int
    progress: Progress
    trajectories: list[Trajectory] = field(default_factory=list)
    rejected: list[Trajectory] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def groups(self) -> list[Group]:
        """The trajectories by task; a repeated task is its own group. Those that are not whole say so."""
        return group_trajectories(self.trajectories, self.group_size)

    @property
    def stats(self) -> dict[str, StatSummary]:
        """What environments, tools and rewards have noted, by ``rollout/name`` or ``eval-rollout/name``.

        In all of `trajectories`, failed and cancelled ones too; not in rejected ones.
        """
        return aggregate_stats((t.scope, t.stats) for t in self.trajectories)


class RolloutFailed(ToolgymError):
    """A rollout was ended before its time: by a failure, as `Recovery` says, or by a function of the caller's.

    Attributes:
        rollout: all that is finished, and the rest as cancelled.
    """

    def __init__(self, message: str, rollout: Rollout) -> None:
        super().__init__(message)
        self.rollout = rollout


class RolloutInterrupted(KeyboardInterrupt):
    """A rollout was interrupted (Ctrl-C). What ran was cancelled, and nothing is left behind.

    Attributes:
        rollout: all that is finished, and the rest as cancelled.
    """

    def __init__(self, rollout: Rollout) -> None:
        counts = rollout.progress
        done = counts.finished - counts.cancelled
        super().__init__(f"interrupted: {done} of {counts.total} trajectories are finished, see .rollout")
        self.rollout = rollout


def rollout(
    collector: Collector,
    tasks: int | Sequence[Task],
    group_size: int = 1,
    *,
    first_index: int = 0,
    on_trajectory: OnTrajectory | Sequence[OnTrajectory] | None = None,
    on_progress: OnProgress | None = None,
) -> Rollout:
    """Collect every task ``group_size`` times.

    Args:
        collector: environments, policy and settings.
        tasks: the tasks, or how many to take from the environment's source.
        group_size: how many times each task is run.
        first_index: index of the first task.
        on_trajectory: called in this thread with each trajectory when it has ended, but for those that a filter
            rejects or that are cancelled; e.g.
            ``[RunFolder(...).append, TraceFolder(...).write, DumpFolder(...).write]``.
        on_progress: called with the counts after each trajectory.

    Raises:
        ConfigurationError: wrong numbers, or a coroutine function to call: see `arollout`.
        RolloutFailed: see there; it holds what is finished.
        RolloutInterrupted: on Ctrl-C, when what runs has been cancelled and told; it holds what is finished. On a
            second Ctrl-C at once, with what was told until then.
    """
    _check_collector(collector)
    callbacks = _checked(on_trajectory, on_progress)
    if asynchronous := [c for c in [*callbacks, on_progress] if inspect.iscoroutinefunction(c)]:
        raise ConfigurationError(f"{asynchronous[0]} is a coroutine function: await arollout(...) instead")
    stream = collector.start(tasks, group_size, first_index=first_index)
    book = _Book(stream.total, group_size, callbacks, on_progress)
    reader = stream.read()
    # What an interrupt cancels is read to its end, and told like all the rest.
    with first_interrupt(stream.cancel) as interrupt, contextlib.closing(reader):
        while True:
            try:
                for ended in reader:
                    for call, argument in book.calls(ended):
                        book.outcome(call, _called(call, argument), stream.cancel)
                break
            except KeyboardInterrupt as raised:  # the second one, or that of somebody else's handler
                if interrupt.happened:
                    raise RolloutInterrupted(book.finished()) from raised
                interrupt.happened = True
                stream.cancel()
            except ToolgymError as error:
                if not interrupt.happened:
                    raise RolloutFailed(str(error), book.finished()) from error
                break
    if interrupt.happened:
        raise RolloutInterrupted(book.finished()) from book.raised
    return book.result()


async def arollout(
    collector: Collector,
    tasks: int | Sequence[Task],
    group_size: int = 1,
    *,
    first_index: int = 0,
    on_trajectory: OnTrajectory | Sequence[OnTrajectory] | None = None,
    on_progress: OnProgress | None = None,
) -> Rollout:
    """`rollout`, awaited from any event loop. What is called may be coroutine functions.

    If the awaiting task is cancelled, what runs is cancelled, too; what has been finished went to ``on_trajectory``.
    """
    _check_collector(collector)
    stream = collector.start(tasks, group_size, first_index=first_index)
    book = _Book(stream.total, group_size, _checked(on_trajectory, on_progress), on_progress)
    reader = stream.aread()
    try:
        async with contextlib.aclosing(reader):
            async for ended in reader:
                for call, argument in book.calls(ended):
                    book.outcome(call, await _acalled(call, argument), stream.cancel)
    except ToolgymError as error:
        raise RolloutFailed(str(error), book.finished()) from error
    return book.result()


class _Book:
    """Keeps what has ended, and whom to tell."""

    def __init__(
        self, total: int, group_size: int, callbacks: Sequence[OnTrajectory], on_progress: OnProgress | None
    ) -> None:
        self._began = time.monotonic()
        self._rollout = Rollout(group_size, Progress(total))
        self._callbacks, self._on_progress = list(callbacks), on_progress
        self._raised: tuple[Any, Exception] | None = None

    @property
    def raised(self) -> Exception | None:
        """What a function that was called has raised first."""
        return None if self._raised is None else self._raised[1]

    def calls(self, ended: Ended) -> list[tuple[Callable[[Any], Any], Any]]:
        """Note a trajectory. Returns whom to call with what."""
        made, trajectory = self._rollout, ended.trajectory
        made.progress = made.progress.plus(trajectory, rejected=ended.rejected)
        (made.rejected if ended.rejected else made.trajectories).append(trajectory)
        calls: list[tuple[Callable[[Any], Any], Any]] = []
        if not ended.rejected and not trajectory.cancelled:
            calls = [(call, trajectory) for call in self._callbacks]
        return [*calls, (self._on_progress, made.progress)] if self._on_progress is not None else calls

    def outcome(self, call: Callable[[Any], Any], raised: Exception | None, cancel: Callable[[], None]) -> None:
        """Note how a call went. One that raises is not called again, and the collection ends; others go on."""
        if raised is None:
            return
        self._callbacks = [other for other in self._callbacks if other is not call]
        self._on_progress = None if call is self._on_progress else self._on_progress
        self._raised = self._raised or (call, raised)
        cancel()

    def finished(self) -> Rollout:
        """What there is, in order."""
        self._rollout.trajectories.sort(key=place)
        self._rollout.rejected.sort(key=place)
        self._rollout.seconds = time.monotonic() - self._began
        return self._rollout

    def result(self) -> Rollout:
        """What there is, if nothing that was called has raised."""
        found = self.finished()
        if self._raised is not None:
            call, error = self._raised
            name = getattr(call, "__qualname__", repr(call))
            raise RolloutFailed(f"{name} raised {described(error)}", found) from error
        return found


def _check_collector(collector: object) -> None:
    if not isinstance(collector, Collector):
        raise ConfigurationError(f"expected a Collector(envs, policy, chat, ...), actual {collector!r:.100}")


def _checked(
    callbacks: OnTrajectory | Sequence[OnTrajectory] | None, on_progress: OnProgress | None
) -> Sequence[OnTrajectory]:
    found = callbacks if isinstance(callbacks, Sequence) else [] if callbacks is None else [callbacks]
    if wrong := [entry for entry in found if not callable(entry)]:
        raise ConfigurationError(f"expected on_trajectory as functions, actual {wrong[0]!r:.100}")
    if on_progress is not None and not callable(on_progress):
        raise ConfigurationError(f"expected on_progress as a function, actual {on_progress!r:.100}")
    return found


def _called(call: Callable[[Any], Any], argument: Any) -> Exception | None:
    try:
        value = call(argument)
    except Exception as error:  # noqa: BLE001 - a function of the caller's: raised again, with all results
        return error
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        return ConfigurationError("it returned something to be awaited: await arollout(...) instead")
    return None


async def _acalled(call: Callable[[Any], Any], argument: Any) -> Exception | None:
    try:
        value = call(argument)
        if isinstance(value, Awaitable):
            await value
    except Exception as error:  # noqa: BLE001 - as above
        return error
    return None
