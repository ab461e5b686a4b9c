"""Batches of whole groups for a trainer, in the order in which they were begun, none older than was agreed on."""

import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator

from toolgym.agents.policy import Policy
from toolgym.envs.errors import ToolgymError
from toolgym.rollout.admission import Staleness
from toolgym.rollout.collection import Ended
from toolgym.rollout.groups import Group
from toolgym.rollout.streams import Stream
from toolgym.rollout.trajectory import Trajectory


class TooStale(ToolgymError):
    """A trajectory was begun with weights that are older than was agreed on.

    Attributes:
        groups: the batch that it is in; nothing of it is lost.
    """

    def __init__(self, message: str, groups: list[Group]) -> None:
        super().__init__(message)
        self.groups = groups


class Batcher:
    """Puts trajectories into groups and groups into batches.

    Args:
        group_size: members of a group.
        staleness: groups of a batch, and how old they may be.
        first_index: index of the first task.
    """

    def __init__(self, group_size: int, staleness: Staleness, first_index: int) -> None:
        self._size, self._staleness, self._next = group_size, staleness, first_index
        self._ended: defaultdict[int, list[Ended]] = defaultdict(list)
        self._batch: list[Group] = []

    def add(self, ended: Ended) -> Iterator[list[Group]]:
        """One more trajectory. Yields the batches that are whole by it."""
        self._ended[ended.trajectory.task_index].append(ended)
        while len(self._ended[self._next]) == self._size:
            self._take(self._next)
            if len(self._batch) == self._staleness.batch:
                yield self.rest()

    def rest(self) -> list[Group]:
        """What there is of the next batch."""
        batch, self._batch = self._batch, []
        return batch

    def _take(self, index: int) -> None:
        members = [ended.trajectory for ended in self._ended.pop(index) if not ended.rejected]
        self._next += 1
        if members:
            ordered = tuple(sorted(members, key=lambda trajectory: trajectory.member))
            self._batch.append(Group(index, ordered[0].task_id, self._size, ordered))


def in_batches(stream: Stream, policy: Policy) -> Iterator[list[Group]]:
    """See `Collector.batches`."""
    batcher, bound = _batcher(stream)
    reader = stream.read()
    with contextlib.closing(reader):  # type: ignore[type-var]  # a generator
        for ended in reader:
            for batch in batcher.add(ended):
                yield _checked(batch, bound, policy)
        if batch := batcher.rest():
            yield _checked(batch, bound, policy)


async def ain_batches(stream: Stream, policy: Policy) -> AsyncIterator[list[Group]]:
    """See `Collector.abatches`."""
    batcher, bound = _batcher(stream)
    reader = stream.aread()
    async with contextlib.aclosing(reader):  # type: ignore[type-var]  # a generator
        async for ended in reader:
            for batch in batcher.add(ended):
                yield _checked(batch, bound, policy)
        if batch := batcher.rest():
            yield _checked(batch, bound, policy)


def _batcher(stream: Stream) -> tuple[Batcher, int]:
    plan = stream.plan
    assert plan.staleness is not None  # as Collector.batches makes it
    return Batcher(plan.group_size, plan.staleness, plan.first_index), plan.staleness.bound


def _checked(batch: list[Group], bound: int, policy: Policy) -> list[Group]:
    """The batch, if it is as young as was agreed on."""
    version = int(getattr(policy, "version", 0))
    for trajectory in (trajectory for group in batch for trajectory in group.trajectories):
        age = version - _head_version(trajectory, version)
        if age > bound:
            text = (
                f"trajectory {trajectory.id} was begun {age} versions ago, max_staleness is {bound}: update the "
                "weights once for each batch, or allow more"
            )
            raise TooStale(text, batch)
    return batch


def _head_version(trajectory: Trajectory, version: int) -> int:
    sampled = trajectory.versions[trajectory.loss_mask]
    return int(sampled[0]) if len(sampled) else version
