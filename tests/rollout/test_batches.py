"""Batches of whole groups for a trainer, in order, none older than agreed on, and nothing lost."""

import asyncio
import functools
import os
import signal
import threading
from typing import Any

import pytest
from control import BOTH, ActionEnv, VersionedPolicy, answer, note_indices, nothing_left, tool_then_answer
from helpers import TroubledPolicy, echo_twice, vector

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import SampleRequest
from toolgym.envs import AssistantMessage, ConfigurationError, ToolVectorEnv
from toolgym.rollout import Admission, Collector, Recovery
from toolgym.rollout.batches import BatchesFailed, BatchesInterrupted, TooStale


@BOTH
@pytest.mark.parametrize(("groups", "sizes"), [(1, [1] * 7), (3, [3, 3, 1]), (9, [7])])
def test_groups_come_whole_and_in_order(chat: ChatFormat, groups: int, sizes: list[int], schedule: Any) -> None:
    envs = vector(3)
    policy = VersionedPolicy(chat, echo_twice)
    found = []
    with nothing_left(envs):
        for batch in Collector(envs, policy, chat, schedule=schedule).batches(7, 2, groups=groups, first_index=5):
            found.append(batch)
            policy.version += 1
        assert [len(batch) for batch in found] == sizes
        assert [group.task_index for batch in found for group in batch] == list(range(5, 12))
        assert all(group.complete for batch in found for group in batch)


def test_failed_members_are_in_their_groups(chat: ChatFormat) -> None:
    envs = vector(trouble=lambda k: "tool breaks" if k == 1 else None)
    with nothing_left(envs):
        (batch,) = Collector(envs, VersionedPolicy(chat, echo_twice), chat).batches(3, 2, groups=3)
        assert [len(group.scored) for group in batch] == [2, 0, 2]
        assert [len(group.trajectories) for group in batch] == [2, 2, 2]


def test_they_may_be_awaited(chat: ChatFormat) -> None:
    envs = vector()
    policy = VersionedPolicy(chat, echo_twice)

    async def main() -> list[int]:
        seen = []
        async for batch in Collector(envs, policy, chat).abatches(6, 2, groups=2, max_staleness=0):
            seen += [group.task_index for group in batch]
            policy.version += 1
        return seen

    with nothing_left(envs):
        assert asyncio.run(main()) == list(range(6))


@pytest.mark.parametrize("awaited", [False, True])
def test_updating_too_often_is_an_error_with_all_that_was_finished(chat: ChatFormat, awaited: bool) -> None:
    envs = vector(4)
    policy = VersionedPolicy(chat, answer)
    collector = Collector(envs, policy, chat)
    taken: list[str] = []

    def train(batch: Any) -> None:
        taken.extend(t.id for group in batch for t in group.trajectories)
        while policy.asked < 4:  # those that were admitted at version 0 are sampled at version 0
            envs.loop.run(asyncio.sleep(0))
        policy.version += 3
        while envs._holder is not None:  # and all the rest ends, unread
            envs.loop.run(asyncio.sleep(0))

    async def main() -> None:
        async for batch in collector.abatches(8, 1, groups=2, max_staleness=1):
            await asyncio.to_thread(train, batch)

    def train_all() -> None:
        if awaited:
            asyncio.run(main())
            return
        for batch in collector.batches(8, 1, groups=2, max_staleness=1):
            train(batch)

    with nothing_left(envs):
        with pytest.raises(TooStale, match=r"trajectory 2.0 was begun 3 versions ago, max_staleness is 1") as caught:
            train_all()
        assert taken == ["0.0", "1.0"]
        assert [t.id for t in caught.value.finished] == [f"{k}.0" for k in range(2, 8)]
        assert all(t.solved for t in caught.value.finished)


@BOTH
def test_a_failure_that_is_raised_brings_what_came_in_no_batch(chat: ChatFormat, schedule: Any) -> None:
    envs = vector(1, trouble=lambda k: "tool breaks" if k == 4 else None)
    collector = Collector(envs, VersionedPolicy(chat, echo_twice), chat, schedule=schedule, recovery=Recovery("raise"))
    seen: list[int] = []
    with nothing_left(envs):
        with pytest.raises(BatchesFailed, match=r"trajectory 4.0 failed in step") as caught:
            note_indices(collector.batches(8, 1, groups=3, max_staleness=5), seen)
        assert seen == [0, 1, 2]
        assert [t.task_index for t in caught.value.finished] == [3, 4]


def test_an_interrupt_brings_what_came_in_no_batch(chat: ChatFormat) -> None:
    """The thread that waits for a batch is interrupted, with a tool in flight."""
    in_flight = threading.Event()

    async def hang(env: Any) -> str:
        in_flight.set()
        await asyncio.Event().wait()
        return ""

    def script(request: SampleRequest, member: int) -> AssistantMessage:
        assert request.task is not None
        return tool_then_answer("act")(request, member) if request.task.data["k"] == 3 else AssistantMessage("done")

    envs = ToolVectorEnv.of(ActionEnv, num_envs=1, action=hang, count=8)
    collector = Collector(envs, VersionedPolicy(chat, script), chat)
    seen: list[int] = []
    with nothing_left(envs):
        interrupt = functools.partial(os.kill, os.getpid(), signal.SIGINT)
        interrupting = threading.Thread(target=lambda: (in_flight.wait(), interrupt()))
        interrupting.start()
        with pytest.raises(BatchesInterrupted, match="1 finished trajectories came in no batch") as caught:
            note_indices(collector.batches(8, 1, groups=2, max_staleness=5), seen)
        interrupting.join()
        assert seen == [0, 1]
        assert [t.task_index for t in caught.value.finished] == [2]


def test_a_trainer_that_stops_reading_leaves_nothing(chat: ChatFormat) -> None:
    envs = vector(2)
    batches = Collector(envs, VersionedPolicy(chat, echo_twice), chat, admission=Admission(max_unread=1)).batches(
        8, 2, groups=1
    )
    with nothing_left(envs):
        next(batches)
        batches.close()  # type: ignore[attr-defined]
        envs.reset()


def test_weights_without_versions_are_refused(chat: ChatFormat) -> None:
    envs = vector(1)
    collector = Collector(envs, TroubledPolicy(chat, answer, lambda request: None), chat)
    with pytest.raises(ConfigurationError, match="batches need a policy that tells the version of its weights"):
        collector.batches(2, 1, groups=1)
    with pytest.raises(ConfigurationError, match="expected max_staleness as an int of 0 or more, actual -1"):
        Collector(envs, VersionedPolicy(chat, answer), chat).batches(2, 1, groups=1, max_staleness=-1)
    envs.close()
