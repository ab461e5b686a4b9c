"""What a workload takes at least, and what the schedules take where everything but engine and tools is free."""

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from toolgym.envs import Task


@dataclass(frozen=True)
class Machine:
    """What a workload runs on.

    Attributes:
        slots: episodes at once.
        batch: sequences that the engine samples at once.
        rate: tokens a second of each sequence.
    """

    slots: int
    batch: int
    rate: float


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of the makespan, in seconds of the workload's clock. Whatever the schedule, it takes each of them.

    Attributes:
        engine: the engine gives at most ``batch`` sequence-seconds a second, so all sequences need
            their sum / ``batch``.
        longest: the turns and tools of one trajectory follow each other, so it takes their sum, even alone.
        slots: a trajectory holds a slot for its own time at least, and ``slots`` slots give as many slot-seconds a
            second: the sum of all trajectories' own times / ``slots``.
    """

    engine: float
    longest: float
    slots: float

    @property
    def largest(self) -> float:
        """The one that counts."""
        return max(self.engine, self.longest, self.slots)


def bounds(tasks: Sequence[Task], machine: Machine) -> Bounds:
    """The three bounds of a workload."""
    sampled = [sum(task.data["tokens"]) / machine.rate for task in tasks]
    own = [seconds + sum(task.data["waits"]) for seconds, task in zip(sampled, tasks, strict=True)]
    return Bounds(sum(sampled) / machine.batch, max(own), sum(own) / machine.slots)


def overlap(tasks: Sequence[Task], machine: Machine, *, clairvoyant: bool = False) -> float:
    """The makespan of overlap, by discrete events.

    Args:
        tasks: begun in this order.
        machine: what they run on.
        clairvoyant: begin, and serve in the engine's queue, whatever has most time of its own left. Nobody can, since
            nobody knows: it shows how near to the bounds any schedule could come.
    """
    left = [_left(task, machine.rate) for task in tasks]
    order = range(len(tasks))
    waiting = deque(sorted(order, key=lambda k: -left[k][0]) if clairvoyant else order)
    number = itertools.count()
    events: list[tuple[float, int, int, int]] = []  # when, number, trajectory, stage: 2 * turn, plus 1 after its tool
    queue: list[tuple[float, int, int, int]] = []
    free, now = machine.batch, 0.0

    def ask(trajectory: int, turn: int) -> None:
        rank = -left[trajectory][turn] if clairvoyant else 0.0
        heapq.heappush(queue, (rank, next(number), trajectory, turn))

    for _ in range(min(machine.slots, len(waiting))):
        ask(waiting.popleft(), 0)
    while queue or events:
        while free and queue:
            *_, trajectory, turn = heapq.heappop(queue)
            free -= 1
            seconds = tasks[trajectory].data["tokens"][turn] / machine.rate
            heapq.heappush(events, (now + seconds, next(number), trajectory, 2 * turn))
        now, _, trajectory, stage = heapq.heappop(events)
        turn, after_tool = divmod(stage, 2)
        free += 1 - after_tool
        if after_tool:
            ask(trajectory, turn + 1)
        elif turn < len(tasks[trajectory].data["waits"]):
            wait = tasks[trajectory].data["waits"][turn]
            heapq.heappush(events, (now + wait, next(number), trajectory, stage + 1))
        elif waiting:
            ask(waiting.popleft(), 0)
    return now


def lockstep(tasks: Sequence[Task], machine: Machine) -> float:
    """The makespan of lockstep: each round takes its sampling, then its longest tool."""
    now = 0.0
    for first in range(0, len(tasks), machine.slots):
        active, turn = list(tasks[first : first + machine.slots]), 0
        while active:
            ends = [0.0] * machine.batch
            for task in active:
                heapq.heapreplace(ends, ends[0] + task.data["tokens"][turn] / machine.rate)
            active = [task for task in active if len(task.data["tokens"]) > turn + 1]
            now += max(ends) + max((task.data["waits"][turn] for task in active), default=0.0)
            turn += 1
    return now


def _left(task: Task, rate: float) -> list[float]:
    """A trajectory's own time from each of its turns on."""
    parts = [count / rate for count in task.data["tokens"]]
    for turn, wait in enumerate(task.data["waits"]):
        parts[turn] += wait
    return list(itertools.accumulate(reversed(parts)))[::-1]
