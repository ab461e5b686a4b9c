"""How many episodes are under way, and how old their weights may be when they are trained on."""

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from control import BOTH, VersionedPolicy, answer, note_indices, nothing_left
from helpers import echo_twice, vector
from hypothesis import given, settings
from hypothesis import strategies as st

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Completion, EngineLoad, SampleRequest
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.envs import ConfigurationError, Task
from toolgym.rollout import Admission, Collector, Filters, Group, StopReason, rollout
from toolgym.rollout.admission import Staleness, Underway
from toolgym.rollout.batches import BatchesFailed
from toolgym.rollout.episode import EpisodePlan
from toolgym.rollout.gate import Gate


class Gauge(ScriptedPolicy):
    """Counts the tasks that are under way, and tells a load."""

    def __init__(self, chat: ChatFormat, script: Any, told: EngineLoad | None = None) -> None:
        super().__init__(chat, script)
        self.told, self.under_way, self.most = told, set(), 0  # type: ignore[var-annotated]

    async def sample(self, request: SampleRequest) -> list[Completion]:
        key = (request.task and request.task.id, request.member)
        self.under_way.add(key)
        self.most = max(self.most, len(self.under_way))
        await asyncio.sleep(0)
        said = await super().sample(request)
        if request.turn == 2:
            self.under_way.discard(key)
        return said

    def load(self) -> EngineLoad | None:
        return self.told


@BOTH
@pytest.mark.parametrize("most", [1, 3])
def test_no_more_are_in_flight_than_admitted(chat: ChatFormat, schedule: Any, most: int) -> None:
    envs = vector(4, count=12)
    policy = Gauge(chat, echo_twice)
    admission = Admission(max_in_flight=most)
    with nothing_left(envs):
        found = Collector(envs, policy, chat, schedule=schedule, admission=admission).collect(12)
        assert all(t.solved for t in found)
        assert policy.most == most


@BOTH
def test_groups_may_have_more_members_than_there_are_slots(chat: ChatFormat, schedule: Any) -> None:
    envs = vector(2)
    admission = Admission(max_in_flight=1, max_unread=1)
    with nothing_left(envs):
        collector = Collector(envs, ScriptedPolicy(chat, echo_twice), chat, schedule=schedule, admission=admission)
        found = collector.collect(2, 5)
        assert [(t.task_index, t.member) for t in found] == [(k // 5, k % 5) for k in range(10)]
        assert all(t.solved for t in found)


@BOTH
@pytest.mark.parametrize("told", [EngineLoad(1, 0, 0.99), EngineLoad(1, 9, 0.1)])
def test_a_full_engine_takes_one_episode_at_a_time(chat: ChatFormat, told: EngineLoad, schedule: Any) -> None:
    envs = vector(4, count=8)
    policy = Gauge(chat, echo_twice, told)
    admission = Admission(max_kv_usage=0.9, max_waiting=8)
    with nothing_left(envs):
        assert len(Collector(envs, policy, chat, schedule=schedule, admission=admission).collect(8)) == 8
        assert policy.most == 1


def test_when_the_engine_has_room_again_others_begin_without_anything_ending(chat: ChatFormat) -> None:
    """Nobody says so: it is looked after."""
    together = threading.Event()

    class Filling(Gauge):
        async def sample(self, request: SampleRequest) -> list[Completion]:
            self.under_way.add(request.task and request.task.id)
            self.told = EngineLoad(1, 0, 0.0)
            if len(self.under_way) == 2:
                together.set()
            while not together.is_set():  # noqa: ASYNC110 - set on whatever loop
                await asyncio.sleep(0.001)
            return await ScriptedPolicy.sample(self, request)

    envs = vector(2)
    policy = Filling(chat, answer, EngineLoad(1, 0, 1.0))
    with nothing_left(envs):
        assert all(t.solved for t in Collector(envs, policy, chat).collect(2))


def test_a_slow_reader_holds_up_what_has_not_begun(chat: ChatFormat) -> None:
    envs = vector(1, count=6)
    policy = VersionedPolicy(chat, answer)
    stream = Collector(envs, policy, chat, admission=Admission(max_unread=1)).start(6)
    reader = stream.read()

    def held_up() -> bool:
        """Whether the only slot waits for the reader."""
        assert stream._collection is not None
        return any("finished trajectories that nobody has read" in entry.what for entry in stream._collection.waiting())

    with nothing_left(envs):
        for number in range(6):
            next(reader)
            due = min(number + 2, 6)
            while policy.asked < due or not (held_up() or policy.asked == 6):
                envs.loop.run(asyncio.sleep(0))
            assert policy.asked == due, "one that was read before, one that nobody has read"
        assert list(reader) == []


def test_two_collections_at_once_share_a_policy(chat: ChatFormat) -> None:
    one, other = vector(2), vector(3)
    policy = ScriptedPolicy(chat, echo_twice)

    async def both() -> list[Any]:
        collectors = [Collector(one, policy, chat), Collector(other, policy, chat, schedule="lockstep")]
        return list(await asyncio.gather(*(collector.acollect(6, 2) for collector in collectors)))

    with nothing_left(one), nothing_left(other):
        first, second = asyncio.run(both())
        assert first == second
        assert len(first) == 12


def test_group_members_begin_with_one_request_whatever_is_admitted(chat: ChatFormat) -> None:
    sizes: list[int] = []

    class Counting(ScriptedPolicy):
        async def sample(self, request: SampleRequest) -> list[Completion]:
            if request.turn == 0:
                sizes.append(request.n)
            return await super().sample(request)

    envs = vector(2)
    Collector(envs, Counting(chat, echo_twice), chat, admission=Admission(max_in_flight=1)).collect(3, 4)
    assert sizes == [4, 4, 4]
    envs.close()


# The bound on staleness, on a pure model of a collection: no event loop, the gate itself.


class Versions:
    version = 0

    async def sample(self, request: SampleRequest) -> list[Completion]:
        raise AssertionError


class Model:
    """A gate, its slots and a trainer, moved by hand in any order."""

    def __init__(self, groups: int, size: int, staleness: Staleness, slots: int) -> None:
        plans = [EpisodePlan(Task(f"t{g}", ""), g, m) for g in range(groups) for m in range(size)]
        self.policy, self.staleness, self.size, self.slots = Versions(), staleness, size, slots
        self.gate = Gate(plans, Admission(), staleness, self.policy)
        self.running: list[EpisodePlan] = []
        self.begun: dict[int, int] = {}
        self.ended: dict[int, list[bool]] = {}
        self.rejected: set[int] = set()
        self.next_group = self.trained = 0
        self.groups = groups

    def begin(self) -> None:
        while len(self.running) < self.slots and (plan := self.gate.ready()) is not None:
            self.running.append(plan)
            self.begun.setdefault(plan.task_index, self.policy.version)

    def end(self, which: int, kept: bool, group_kept: bool, again: bool) -> None:
        plan = self.running.pop(which % len(self.running))
        if again:
            self.gate.put_back(plan)
            return
        members = self.ended.setdefault(plan.task_index, [])
        members.append(kept)
        dropped = len(members) == self.size and not (any(members) and group_kept)
        if dropped:
            self.rejected.add(plan.task_index)
        self.gate.ended(dropped_group=dropped)

    def batch(self) -> list[int] | None:
        """The next batch that the trainer would get."""
        found, at = [], self.next_group
        while len(found) < self.staleness.batch and at < self.groups and len(self.ended.get(at, ())) == self.size:
            found += [] if at in self.rejected else [at]
            at += 1
        if len(found) < self.staleness.batch:
            return None
        self.next_group = at
        return found


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 3),
    slots=st.integers(1, 6),
    staleness=st.builds(Staleness, st.integers(0, 3), st.integers(1, 3)),
    groups=st.integers(1, 14),
    order=st.randoms(use_true_random=False),
)
def test_whatever_is_rejected_retried_or_late_nothing_is_older_than_the_bound(
    size: int, slots: int, staleness: Staleness, groups: int, order: random.Random
) -> None:
    rng = random.Random(order.getrandbits(64))
    model = Model(groups, size, staleness, slots)
    ready: list[list[int]] = []
    for _ in range(2_000):
        model.begin()
        while batch := model.batch():
            ready.append(batch)
        if not model.running and not ready:
            break
        if ready and (not model.running or rng.random() < 0.5):
            for group in ready.pop(0):
                assert model.policy.version - model.begun[group] <= staleness.bound
            model.policy.version += 1
        else:
            kept, group_kept, again = rng.random() < 0.7, rng.random() < 0.7, rng.random() < 0.2
            model.end(rng.randrange(6), kept, group_kept, again)
    assert len(model.ended) == groups, "a trainer that trains what it gets is never kept waiting for ever"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 4), st.integers(1, 4))
def test_without_updates_as_many_begin_as_the_bound_allows(bound: int, batch: int) -> None:
    model = Model(40, 1, Staleness(bound, batch), slots=100)
    model.begin()
    assert len(model.running) == (bound + 1) * batch


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(5)))
def test_what_is_put_back_begins_in_its_old_order(order: list[int]) -> None:
    plans = [EpisodePlan(Task(f"t{k}", ""), k, 0) for k in range(8)]
    gate = Gate(plans, Admission(), None, Versions())
    taken = [gate.ready() for _ in range(5)]
    for k in order:
        gate.put_back(taken[k])  # type: ignore[arg-type]
    assert [gate.ready() for _ in range(8)] == plans
    assert gate.ready() is None


# And through a real collection.


def jittery(seed: int) -> Iterator[int]:
    rng = np.random.default_rng(seed)
    while True:
        yield int(rng.integers(0, 6))


class JitteryVersions(VersionedPolicy):
    """Answers after some turns of the loop; the shared first request of a group at once."""

    def __init__(self, chat: ChatFormat, seed: int) -> None:
        super().__init__(chat, echo_twice)
        self._turns = jittery(seed)

    async def sample(self, request: SampleRequest) -> list[Completion]:
        for _ in range(next(self._turns)):
            await asyncio.sleep(0)
        return await super().sample(request)


@pytest.mark.parametrize("seed", range(12))
@BOTH
def test_batches_are_as_young_as_was_agreed_on_and_nothing_is_lost(chat: ChatFormat, seed: int, schedule: Any) -> None:
    rng = np.random.default_rng(seed)
    bound, size, groups = int(rng.integers(0, 3)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    drop = {int(k) for k in rng.integers(0, 20, size=5)}
    envs = vector(int(rng.integers(1, 6)), count=20, trouble=lambda k: "tool breaks" if k % 7 == 3 else None)
    policy = JitteryVersions(chat, seed)
    filters = Filters(accept_group=lambda group: group.task_index not in drop)
    collector = Collector(envs, policy, chat, schedule=schedule, filters=filters)
    seen: list[int] = []
    with nothing_left(envs):
        for batch in collector.batches(20, size, groups=groups, max_staleness=bound):
            for group in batch:
                for trajectory in group.trajectories:
                    versions = trajectory.versions[trajectory.loss_mask]
                    assert policy.version - versions[0] <= bound
                    assert (np.diff(versions) >= 0).all()
            seen += [group.task_index for group in batch]
            policy.version += 1
        assert seen == [k for k in range(20) if k not in drop]


def test_a_trainer_that_never_updates_ends_with_all_that_is_finished(chat: ChatFormat) -> None:
    envs = vector(4, count=9)
    collector = Collector(envs, VersionedPolicy(chat, echo_twice), chat, admission=Admission(weights_timeout=0.2))
    got: list[int] = []
    with nothing_left(envs):
        with pytest.raises(BatchesFailed, match="nobody updates the weights: waited for newer weights than version 0"):
            note_indices(collector.batches(9, 2, groups=2, max_staleness=1), got)
        assert got == [0, 1, 2, 3], "whole batches only, and none that is made of what was cancelled"


def test_the_time_for_new_weights_counts_from_when_nothing_runs_any_more(chat: ChatFormat) -> None:
    gate = Gate(
        [EpisodePlan(Task(f"t{k}", ""), k, 0) for k in range(2)],
        Admission(weights_timeout=1e-9),
        Staleness(0, 1),
        Versions(),
    )
    assert gate.ready() is not None
    assert gate.ready() is None
    assert not gate.forsaken, "an episode runs: there is nothing to train on yet"
    gate = Gate([EpisodePlan(Task(f"t{k}", ""), k, 0) for k in range(2)], Admission(), Staleness(0, 1), Versions())
    gate.ready(), gate.ready()
    gate.since -= 10_000.0  # refused long ago, while an episode ran
    gate.ended()
    assert not gate.forsaken


def test_a_failing_first_collection_does_not_count_for_the_second(chat: ChatFormat) -> None:
    envs = vector(2)
    policy = VersionedPolicy(chat, answer, version=41)
    with nothing_left(envs):
        for _ in range(2):
            for batch in Collector(envs, policy, chat).batches(4, 1, groups=1, max_staleness=0):
                assert all(t.versions[t.loss_mask][0] == policy.version for g in batch for t in g.trajectories)
                policy.version += 1


@given(
    st.builds(
        Underway,
        st.integers(0, 5),
        st.integers(0, 5),
        st.none() | st.floats(0, 1),
        st.none() | st.integers(0, 5),
    )
)
def test_one_may_begin_where_none_runs_unless_nobody_reads(state: Underway) -> None:
    strict = Admission(max_in_flight=1, max_kv_usage=1e-6, max_waiting=1, max_unread=3)
    refused = strict.refusal(state)
    if state.unread >= 3:
        assert refused == f"{state.unread} finished trajectories that nobody has read"
    elif state.episodes == 0:
        assert refused is None
    else:
        assert refused == f"{state.episodes} episodes in flight"


@pytest.mark.parametrize(
    "options",
    [
        {"max_in_flight": 0},
        {"max_in_flight": 1.5},
        {"max_kv_usage": 0.0},
        {"max_kv_usage": 1.1},
        {"max_waiting": 0},
        {"max_unread": None},
        {"weights_timeout": 0},
        {"weights_timeout": float("inf")},
    ],
)
def test_wrong_numbers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"expected Admission.{next(iter(options))} .*actual"):
        Admission(**options)


@pytest.mark.parametrize(("bound", "batch", "name"), [(-1, 1, "max_staleness"), (0, 0, "groups"), (True, 1, "max_s")])
def test_wrong_staleness_is_refused(bound: Any, batch: Any, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"expected {name}"):
        Staleness(bound, batch)


def test_the_record_says_what_was_cancelled_before_it_began(chat: ChatFormat) -> None:
    envs = vector(1)
    with nothing_left(envs):
        collector = Collector(envs, ScriptedPolicy(chat, answer), chat, evaluation=True)
        stream = collector.start(2)
        stream.cancel()
        (first, second) = [ended.trajectory for ended in stream.read()]
        assert (first.task_id, first.member, first.evaluation, first.env_id) == ("t0", 0, True, "EchoEnv")
        assert (second.stop_reason, second.reward, len(second)) == (StopReason.CANCELLED, None, 0)
        assert rollout(collector, 2).progress.finished == 2


class Reacting(Gauge):
    """Tells that all it is asked beyond four waits for a place; answers when it has told so some times."""

    looks = 0

    async def sample(self, request: SampleRequest) -> list[Completion]:
        self.under_way.add((request.task and request.task.id, request.member))
        self.most = max(self.most, len(self.under_way))
        told = self.looks
        while self.looks < told + 3:  # noqa: ASYNC110 - counted by who looks
            await asyncio.sleep(0.005)
        said = await ScriptedPolicy.sample(self, request)
        if request.turn == 2:
            self.under_way.discard((request.task and request.task.id, request.member))
        return said

    def load(self) -> EngineLoad:
        self.looks += 1
        now = len(self.under_way)
        return EngineLoad(min(now, 4), max(0, now - 4), min(1.0, now / 8))


@pytest.mark.parametrize("admission", [Admission(max_waiting=2), Admission(max_kv_usage=0.5)])
def test_a_first_burst_is_no_more_than_the_engine_can_tell_of(chat: ChatFormat, admission: Admission) -> None:
    """All slots ask at once, when the engine still tells that it has nothing to do."""
    envs = vector(64, count=64)
    policy = Reacting(chat, echo_twice)
    with nothing_left(envs):
        found = Collector(envs, policy, chat, admission=admission).collect(64)
    assert all(t.solved for t in found)
    assert policy.most <= 24, "8 at first, and as many again until it has told"


def test_in_lockstep_a_batch_begins_as_a_whole(chat: ChatFormat) -> None:
    envs = vector(64, count=64)
    policy = Reacting(chat, echo_twice)
    with nothing_left(envs):
        assert len(Collector(envs, policy, chat, schedule="lockstep").collect(64)) == 64
    assert policy.most == 64


def test_a_bound_on_waiting_requests_wants_a_policy_that_tells_of_them(chat: ChatFormat) -> None:
    envs = vector(1)
    with pytest.raises(ConfigurationError, match=r"Admission.max_waiting is 3, but .* does not tell of its load"):
        Collector(envs, ScriptedPolicy(chat, answer), chat, admission=Admission(max_waiting=3))
    envs.close()


@BOTH
def test_what_filters_take_their_time_with_is_counted_once(chat: ChatFormat, schedule: Any) -> None:
    """Else the unread ones would seem to grow until nothing may begin any more."""

    async def accept(group: Group) -> bool:
        for _ in range(3):
            await asyncio.sleep(0)
        return True

    envs = vector(16, count=100)
    admission = Admission(max_unread=32)
    filters = Filters(accept_group=accept)
    with nothing_left(envs):
        collector = Collector(
            envs, ScriptedPolicy(chat, answer), chat, schedule=schedule, admission=admission, filters=filters
        )
        assert len(rollout(collector, 100).trajectories) == 100
