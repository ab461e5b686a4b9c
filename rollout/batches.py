"""Batches of whole groups for a trainer, in the order in which they were begun, none older than was agreed on."""

import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence

from toolgym.agents.policy import Policy
from toolgym.envs.errors import ToolgymError
from toolgym.rollout.admission import Staleness
from toolgym.rollout.collection import Ended
from toolgym.rollout.groups import Group
from toolgym.rollout.streams import Stream, place
from toolgym.rollout.telling import version_of
from toolgym.rollout.trajectory import NO_VERSION, Trajectory


class BatchesFailed(ToolgymError):
    """There are no further batches.

    Attributes:
        finished: what has ended and came in no batch, in order; the rest was cancelled.
    """

    def __init__(self, message: str, finished: Sequence[Trajectory] = ()) -> None:
        super().__init__(message)
        self.finished = list(finished)


class TooStale(BatchesFailed):
    """A trajectory was begun with weights that are older than was agreed on. Nothing is lost: see `finished`."""


class BatchesInterrupted(KeyboardInterrupt):
    """Batches were interrupted (Ctrl-C) while somebody waited for one.

    Attributes:
        finished: what has ended and came in no batch, in order; the rest was cancelled.
    """

    def __init__(self, finished: list[Trajectory]) -> None:
        super().__init__(f"interrupted: {len(finished)} finished trajectories came in no batch, see .finished")
        self.finished = finished


class Batcher:
    """Puts trajectories into groups and groups into batches.

    Args:
        group_size: members of a group.
        staleness: groups of a batch, and how old they may be.
        first_index: index of the first task.
        policy: asked for the version of its weights.
    """

    def __init__(self, group_size: int, staleness: Staleness, first_index: int, policy: Policy) -> None:
        self._size, self._staleness, self._next, self._policy = group_size, staleness, first_index, policy
        self._ended: defaultdict[int, list[Ended]] = defaultdict(list)
        self._batch: list[Group] = []
        self._over = False

    def put(self, ended: Ended) -> None:
        """One more trajectory. After one that was cancelled there are no further batches."""
        self._ended[ended.trajectory.task_index].append(ended)
        self._over |= ended.trajectory.cancelled

    def take(self, *, last: bool = False) -> list[Group]:
        """The next batch, if it is whole, or if there will be no other; else nothing.

        Raises:
            TooStale: it is older than was agreed on; it stays here.
            PolicyFailure: the policy does not tell its version.
        """
        size = self._staleness.batch
        while not self._over and len(self._batch) < size and len(self._ended.get(self._next, ())) == self._size:
            self._gather(self._next)
        if self._over or not self._batch or (len(self._batch) < size and not last):
            return []
        self._check_age()
        batch, self._batch = self._batch, []
        return batch

    def finished(self) -> list[Trajectory]:
        """All that has ended, was not cancelled or rejected, and is in no batch that was taken."""
        grouped = [trajectory for group in self._batch for trajectory in group.trajectories]
        others = [ended.trajectory for members in self._ended.values() for ended in members if not ended.rejected]
        return sorted((t for t in grouped + others if not t.cancelled), key=place)

    def _gather(self, index: int) -> None:
        members = [ended.trajectory for ended in self._ended.pop(index) if not ended.rejected]
        self._next += 1
        if members:
            ordered = tuple(sorted(members, key=place))
            self._batch.append(Group(index, ordered[0].task_id, self._size, ordered))

    def _check_age(self) -> None:
        version, bound = version_of(self._policy) or 0, self._staleness.bound
        for trajectory in (trajectory for group in self._batch for trajectory in group.trajectories):
            head, _ = trajectory.version_span
            age = 0 if head == NO_VERSION else version - head
            if age > bound:
                raise TooStale(
                    f"trajectory {trajectory.id} was begun {age} versions ago, max_staleness is {bound}: update the "
                    "weights once for each batch, by one version, or allow more"
                )


def in_batches(stream: Stream, policy: Policy) -> Iterator[list[Group]]:
    """See `Collector.batches`."""
    batcher, reader = _batcher(stream, policy), stream.read()
    with contextlib.closing(reader):
        try:
            for ended in reader:
                batcher.put(ended)
                while batch := batcher.take():
                    yield batch
            if batch := batcher.take(last=True):
                yield batch
        except KeyboardInterrupt as interrupt:
            raise BatchesInterrupted(batcher.finished()) from interrupt
        except ToolgymError as error:
            stream.cancel()
            with contextlib.suppress(ToolgymError):
                for ended in reader:
                    batcher.put(ended)
            raise _failed(error, batcher) from error


async def ain_batches(stream: Stream, policy: Policy) -> AsyncIterator[list[Group]]:
    """See `Collector.abatches`."""
    batcher, reader = _batcher(stream, policy), stream.aread()
    async with contextlib.aclosing(reader):
        try:
            async for ended in reader:
                batcher.put(ended)
                while batch := batcher.take():
                    yield batch
            if batch := batcher.take(last=True):
                yield batch
        except ToolgymError as error:
            stream.cancel()
            with contextlib.suppress(ToolgymError):
                async for ended in reader:
                    batcher.put(ended)
            raise _failed(error, batcher) from error


def _batcher(stream: Stream, policy: Policy) -> Batcher:
    plan = stream.plan
    assert plan.staleness is not None  # as Collector.batches makes it
    return Batcher(plan.group_size, plan.staleness, plan.first_index, policy)


def _failed(error: ToolgymError, batcher: Batcher) -> BatchesFailed:
    kind = TooStale if isinstance(error, TooStale) else BatchesFailed
    return kind(str(error), batcher.finished())
