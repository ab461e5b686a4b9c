"""Whatever fails - environments, policies, consumers - fails alone, by name, without a reward and without a trace."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import TroubledPolicy, call, echo_twice, vector

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Completion, PolicyFailure, SampleRequest
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.envs import AssistantMessage, Task, ToolgymError
from toolgym.rollout.collector import Collector
from toolgym.rollout.limits import Limits
from toolgym.rollout.trajectory import StopReason, Trajectory

TROUBLE = {
    "setup raises": ("setup_raised", "reset"),
    "setup hangs": ("reset_timeout", "reset"),
    "tool breaks": ("box_died", "step"),
    "score raises": ("score_raised", "step"),
    "score hangs": ("step_timeout", "step"),
}

QUICK = Limits(reset_timeout=0.6, step_timeout=0.6, sample_timeout=0.6)


@pytest.mark.parametrize("schedule", ["overlap", "lockstep"])
@pytest.mark.parametrize("trouble", TROUBLE)
def test_a_failing_environment_is_a_failure_with_a_kind_and_touches_no_other(
    chat: ChatFormat, trouble: str, schedule: Any
) -> None:
    def collected(bad: Callable[[int], str | None]) -> list[Trajectory]:
        envs = vector(trouble=bad, tool_timeout=0.1)
        found = Collector(envs, ScriptedPolicy(chat, echo_twice), chat, QUICK, schedule=schedule).collect(8, 2)
        envs.close()
        return found

    healthy, troubled = collected(lambda k: None), collected(lambda k: trouble if k % 3 == 1 else None)
    assert len(troubled) == 16
    for good, trajectory in zip(healthy, troubled, strict=True):
        if trajectory.task_index % 3 != 1:
            assert trajectory == good
            continue
        assert trajectory.stop_reason is StopReason.ENVIRONMENT_FAILURE
        assert trajectory.failure is not None
        assert (trajectory.failure.kind, trajectory.failure.where) == TROUBLE[trouble]
        assert trajectory.reward is None
        assert not trajectory.solved


@pytest.mark.parametrize("schedule", ["overlap", "lockstep"])
@pytest.mark.parametrize(
    ("trouble", "kind", "said"),
    [
        (PolicyFailure("engine dead"), "policy_failure", "engine dead"),
        (RuntimeError("oops"), "sample_raised", "RuntimeError: oops"),
        (SystemExit(3), "sample_raised", "SystemExit: 3"),
        (asyncio.CancelledError(), "sample_raised", "nobody had asked for it"),
        ("hang", "policy_failure", "no answer within 0.6 s"),
        ("too few", "policy_failure", "completions for"),
        ("misfed", "token_mismatch", "they part at"),
    ],
)
def test_a_failing_policy_is_a_failure_with_a_kind_and_touches_no_other(
    chat: ChatFormat, trouble: Any, kind: str, said: str, schedule: Any
) -> None:
    def bad(request: SampleRequest) -> Any:
        assert request.task is not None
        group = request.task.data["k"] == 1 and request.turn == 0
        alone = request.task.data["k"] == 2 and request.turn == 1 and request.member == 1
        return trouble if group or alone else None

    envs = vector(tool_timeout=0.1)
    policy = TroubledPolicy(chat, echo_twice, bad)
    trajectories = Collector(envs, policy, chat, QUICK, schedule=schedule).collect(4, 2)
    envs.close()
    failed = [t.id for t in trajectories if t.failure is not None]
    assert failed == ["1.0", "1.1", "2.1"]
    for trajectory in trajectories:
        if trajectory.failure is None:
            assert trajectory.solved
            continue
        assert trajectory.failure.kind == kind
        assert said in trajectory.failure.message
        assert trajectory.reward is None
        mismatch = kind == "token_mismatch"
        assert trajectory.stop_reason is (StopReason.TOKEN_MISMATCH if mismatch else StopReason.POLICY_FAILURE)


def test_a_tool_that_hangs_is_told_to_the_model(chat: ChatFormat) -> None:
    envs = vector(trouble=lambda k: "tool hangs", tool_timeout=0.05)
    (trajectory,) = Collector(envs, ScriptedPolicy(chat, echo_twice), chat).collect(1)
    envs.close()
    assert trajectory.solved
    assert [turn.calls for turn in trajectory.turns] == [("timeout",), ("timeout",), ()]


def test_one_bad_sample_of_a_group_fails_its_member_alone(chat: ChatFormat) -> None:
    def bad(request: SampleRequest) -> Exception | None:
        wrong = request.turn == 0 and (request.n > 1 or request.member == 2)
        return PolicyFailure("half a logprob") if wrong else None

    envs = vector()
    trajectories = Collector(envs, TroubledPolicy(chat, echo_twice, bad), chat).collect(1, 4)
    envs.close()
    assert [t.solved for t in trajectories] == [True, True, False, True]


def test_the_same_in_lockstep_whatever_the_neighbours_take(chat: ChatFormat) -> None:
    """Waiting for others in a round is not held against an episode's own time."""
    envs = vector(trouble=lambda k: "slow tool" if k == 0 else None)
    limits = Limits(episode_timeout=0.5)
    first, second = Collector(envs, ScriptedPolicy(chat, echo_twice), chat, limits, schedule="lockstep").collect(2)
    envs.close()
    assert first.stop_reason is StopReason.EPISODE_DEADLINE
    assert second.solved


def test_slots_have_one_user_at_a_time(chat: ChatFormat) -> None:
    envs = vector(2, trouble=lambda k: "tool hangs" if k > 0 else None)
    collector = Collector(envs, ScriptedPolicy(chat, echo_twice), chat)
    stream = collector.stream(4)
    next(stream)
    for use in (envs.reset, lambda: envs.step([None, None]), lambda: collector.collect(1)):
        with pytest.raises(ToolgymError, match="used by a collection"):
            use()  # type: ignore[operator]
    stream.close()  # type: ignore[attr-defined]
    envs.reset()
    envs.close()


def test_closing_the_environments_ends_a_collection_with_an_error(chat: ChatFormat) -> None:
    envs = vector(2, trouble=lambda k: "tool hangs" if k > 0 else None)
    stream = Collector(envs, ScriptedPolicy(chat, echo_twice), chat).stream(4)
    finished = [next(stream)]
    envs.close()
    with pytest.raises(ToolgymError, match="closed while a collection ran"):
        finished += list(stream)
    assert finished[0].solved


def test_no_request_is_left_on_the_loop(chat: ChatFormat) -> None:
    envs = vector(4)
    policy = TroubledPolicy(chat, echo_twice, lambda request: "hang" if request.turn == 0 else None)
    limits = Limits(sample_timeout=0.05)
    assert len(Collector(envs, policy, chat, limits).collect(3, 4)) == 12

    async def others() -> list[str]:
        return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert envs.loop.run(others()) == []
    envs.close()


def test_a_stream_that_is_dropped_is_stopped_even_by_the_loops_own_thread(chat: ChatFormat) -> None:
    envs = vector(2, count=200)
    dropped: list[Any] = []
    asked = 0

    def script(request: SampleRequest, member: int) -> AssistantMessage:
        nonlocal asked
        asked += 1
        if dropped:
            dropped.clear()
            gc.collect()
        return call()

    class Holder:
        pass

    holder = Holder()
    holder.me, holder.stream = holder, Collector(envs, ScriptedPolicy(chat, script), chat).stream(200)  # type: ignore[attr-defined]
    next(holder.stream)  # type: ignore[attr-defined]
    dropped.append(holder)
    del holder
    while dropped:
        envs.loop.run(asyncio.sleep(0))
    after = asked
    for _ in range(200):
        envs.loop.run(asyncio.sleep(0))
    assert asked < after + 20
    envs.reset()
    envs.close()


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (lambda c: {"finish_reason": "lenght"}, "finish reason 'lenght'"),
        (lambda c: {"token_ids": c.token_ids.tolist()}, "token_ids that are no flat array"),
        (lambda c: {"token_ids": -c.token_ids - 1}, "the token id -"),
        (lambda c: {"logprobs": c.logprobs[:, None]}, "logprobs that are no flat array"),
        (lambda c: {"versions": np.array([object()] * len(c.versions))}, "versions that are no flat array"),
        (lambda c: dict.fromkeys(("token_ids",), np.tile(c.token_ids, 99)), "tokens"),
    ],
)
def test_a_policy_that_returns_nonsense_is_a_policy_failure(
    chat: ChatFormat, tamper: Callable[[Completion], dict[str, Any]], said: str
) -> None:
    class Wrong(ScriptedPolicy):
        async def sample(self, request: SampleRequest) -> list[Completion]:
            (good,) = await super().sample(request)
            columns = {f: getattr(good, f) for f in ("token_ids", "logprobs", "versions", "finish_reason")}
            return [Completion(**{**columns, **tamper(good)})]

    envs = vector(1)
    (trajectory,) = Collector(envs, Wrong(chat, echo_twice), chat).collect(1)
    envs.close()
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.POLICY_FAILURE, None)
    assert trajectory.failure is not None
    assert said in trajectory.failure.message


def test_a_completion_longer_than_asked_for_is_a_policy_failure(chat: ChatFormat) -> None:
    class Long(ScriptedPolicy):
        async def sample(self, request: SampleRequest) -> list[Completion]:
            return await super().sample(replace(request, max_tokens=10_000))

    envs = vector(1)
    limits = Limits(max_completion_tokens=5)
    (trajectory,) = Collector(envs, Long(chat, echo_twice), chat, limits).collect(1)
    envs.close()
    assert trajectory.failure is not None
    assert "tokens where max_tokens is 5" in trajectory.failure.message


def test_closing_a_stream_cancels_what_runs_and_leaves_the_slots_usable(chat: ChatFormat) -> None:
    envs = vector(2, trouble=lambda k: "tool hangs" if k > 0 else None)
    collector = Collector(envs, ScriptedPolicy(chat, echo_twice), chat)
    stream: Iterator[Trajectory] = collector.stream(4)
    assert next(stream).task_index == 0
    stream.close()  # type: ignore[attr-defined]
    assert collector.collect([Task("again", "again", {"k": 9, "trouble": None})])[0].solved
    envs.close()


def test_no_thread_is_left(chat: ChatFormat) -> None:
    before = set(threading.enumerate())
    envs = vector()
    Collector(envs, ScriptedPolicy(chat, echo_twice), chat).collect(8, 2)
    envs.close()
    for thread in set(threading.enumerate()) - before:  # those of the collector end with it
        thread.join(10)
    assert set(threading.enumerate()) == before
