"""Environments and rewards know what an episode is part of, and collect numbers in it, each episode its own."""

import asyncio
import contextvars
import copy
import math
import pickle
import threading
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgym.envs import (
    AssistantMessage,
    ConfigurationError,
    EnvironmentFailure,
    Episode,
    EpisodeContext,
    ResetNeededError,
    RewardFunction,
    Stats,
    StepView,
    Task,
    ToolCall,
    ToolEnv,
    ToolVectorEnv,
    aggregate_stats,
    current_context,
    tool,
)

DONE = AssistantMessage("done")


def say(*names: str, **arguments: Any) -> AssistantMessage:
    return AssistantMessage("", tuple(ToolCall(name, arguments) for name in names))


class SeenEnv(ToolEnv):
    """Everything in it notes the context that it is called in."""

    def __init__(self, **options: Any) -> None:
        self.seen: dict[str, EpisodeContext] = {}
        super().__init__(["one", "two"], **options)

    def see(self, where: str) -> None:
        assert current_context() is self.context
        self.seen[where] = current_context()
        current_context().stats.add("seen", 1)

    def setup(self, task: Task) -> None:
        self.see("setup")

    @tool
    def plain(self) -> None:
        """A tool in a thread."""
        self.see("plain tool")

    @tool
    async def on_the_loop(self) -> None:
        """A tool on the loop, with a thread of its own."""
        await asyncio.to_thread(self.see, "async tool")

    async def score_step(self, step: StepView) -> float:
        assert step.context is self.context
        self.see("score_step")
        return 0.0

    def score(self, episode: Episode) -> float:
        assert episode.context is self.context
        self.see("score")
        return 1.0


def test_setup_tools_score_and_reward_functions_know_their_episode() -> None:
    places: dict[str, EpisodeContext] = {}

    def plain(episode: Episode) -> float:
        places["plain reward"] = current_context()
        return 0.0

    async def each(step: StepView) -> float:
        places["step reward"] = current_context()
        return 0.0

    env = SeenEnv(rewards=[plain, RewardFunction(each, each_step=True)])
    context = EpisodeContext("mine", task_index=3, member=2, evaluation=True, policy_version=7)
    env.reset(options={"task": Task("t", "go"), "context": context})
    env.step(say("plain", "on_the_loop"))
    env.step(DONE)
    assert set(env.seen) == {"setup", "plain tool", "async tool", "score_step", "score"}
    assert all(seen is context for seen in (*env.seen.values(), *places.values()))
    assert set(places) == {"plain reward", "step reward"}
    assert context.stats.as_dict() == {"seen": (1.0,) * 6}
    assert (context.task_id, context.scope) == ("mine", "eval-rollout")
    env.close()


def test_an_episode_that_a_budget_ends_is_scored_in_its_context() -> None:
    async def main() -> None:
        env = SeenEnv()
        await env.areset()
        await env.atruncate(say("plain"))
        assert set(env.seen) == {"setup", "score"}
        await env.aclose()

    asyncio.run(main())


def test_every_episode_has_a_context_of_its_own_with_the_tasks_id() -> None:
    env = SeenEnv()
    env.reset(options={"task": Task("a", "go")})
    first = env.context
    env.reset(options={"task": Task("b", "go")})
    assert (first.task_id, env.context.task_id, first.scope) == ("a", "b", "rollout")
    assert first.stats is not env.context.stats
    assert first.stats.as_dict() == env.context.stats.as_dict() == {"seen": (1.0,)}
    env.close()


def test_slots_of_a_vector_have_contexts_of_their_own() -> None:
    with closing(ToolVectorEnv.of(SeenEnv, num_envs=8)) as venv:
        venv.reset(seed=0)
        venv.step([say("plain", "on_the_loop")] * 8)
        venv.step([DONE] * 8)
        assert [env.context.stats.as_dict() for env in venv.envs] == [{"seen": (1.0,) * 6}] * 8


def test_a_tool_that_outlives_its_episode_still_adds_to_it_and_not_to_the_next() -> None:
    release, ended = threading.Event(), threading.Event()

    class Late(SeenEnv):
        @tool(timeout=0.02)
        def slow(self) -> None:
            """Too slow."""
            release.wait(20)
            current_context().stats.add("late", 1)
            ended.set()

    env = Late()
    env.reset()
    first = env.context
    assert env.step(say("slow"))[4]["calls"] == ("timeout",)
    release.set()
    assert ended.wait(20)
    env.reset()
    assert "late" in first.stats.as_dict()
    assert "late" not in env.context.stats.as_dict()
    env.close()


def test_outside_of_an_episode_there_is_no_context() -> None:
    env = SeenEnv()
    with pytest.raises(ResetNeededError, match="no episode has begun"):
        _ = env.context
    env.reset()
    env.step(DONE)
    with pytest.raises(ConfigurationError, match=r"no episode here: call current_context\(\) in setup, tools"):
        current_context()
    env.close()


def test_a_thread_of_a_tools_own_has_the_context_if_it_is_given_it() -> None:
    found: list[Any] = []

    def look() -> None:
        try:
            found.append(current_context().task_id)
        except ConfigurationError as error:
            found.append(type(error))

    def search() -> None:
        """Search in threads."""
        copied = contextvars.copy_context()
        for target in (look, lambda: copied.run(look)):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()

    env = ToolEnv.from_functions([search], ["one"], lambda episode: 1.0)
    env.reset()
    env.step(say("search"))
    assert found == [ConfigurationError, "one"]
    env.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context": "eval"}, r"expected options\['context'\] to be an EpisodeContext, actual str"),
        ({"context": {"task_id": "t"}}, "actual dict"),
    ],
)
def test_a_context_of_a_wrong_kind_is_refused(options: dict[str, Any], said: str) -> None:
    env = SeenEnv()
    with pytest.raises(ConfigurationError, match=said):
        env.reset(options=options)
    env.close()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"task_id": 3}, "expected task_id as str, actual 3"),
        ({"task_index": -1}, "expected task_index as an int of 0 or more, actual -1"),
        ({"member": True}, "expected member as an int of 0 or more, actual True"),
        ({"evaluation": "yes"}, "expected evaluation as bool, actual 'yes'"),
        ({"policy_version": 1.5}, "expected policy_version as an int of 0 or more, actual 1.5"),
        ({"stats": {}}, "expected stats as Stats, actual {}"),
    ],
)
def test_values_of_a_wrong_kind_are_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        EpisodeContext(**{"task_id": "t", **values})


def test_numbers_of_numpy_are_welcome_in_contexts_and_statistics() -> None:
    context = EpisodeContext("t", task_index=np.int64(3))  # type: ignore[arg-type]
    assert type(context.task_index) is int
    for value in (1, True, 0.5, np.float32(0.25), np.array(2), np.bool_(False)):
        context.stats.add("n", value)
    assert context.stats.as_dict() == {"n": (1.0, 1.0, 0.5, 0.25, 2.0, 0.0)}
    assert all(type(number) is float for number in context.stats.as_dict()["n"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "3", None, np.ones(3), 10**400, 1j, []])
def test_a_statistic_that_is_no_finite_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected statistic 'length' as a finite number, actual"):
        Stats().add("length", value)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_statistic_needs_a_name(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected the name of a statistic"):
        Stats().add(name, 1)


class SlippingEnv(ToolEnv):
    """Adds a statistic that is no number, where it is told to."""

    def __init__(self, where: str, **options: Any) -> None:
        self.where = where
        super().__init__(["one"], **options)

    def slip(self, where: str) -> None:
        self.context.stats.add("length", math.nan if where == self.where else 1)

    def setup(self, task: Task) -> None:
        self.slip("setup")

    @tool
    def act(self) -> None:
        """Act."""
        self.slip("tool")

    def score_step(self, step: StepView) -> float:
        self.slip("score_step")
        return 0.0

    def score(self, episode: Episode) -> float:
        self.slip("score")
        return 1.0


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("setup", "setup_raised"),
        ("tool", "tool_misconfigured"),
        ("score_step", "score_step_raised"),
        ("score", "score_raised"),
    ],
)
def test_a_bad_statistic_is_the_authors_slip_and_never_the_models(where: str, kind: str) -> None:
    env = SlippingEnv(where)
    with pytest.raises(EnvironmentFailure, match="statistic 'length'") as caught:  # noqa: PT012 - where it raises is the case
        env.reset()
        env.step(say("act"))
        env.step(DONE)
    assert caught.value.kind == kind
    with pytest.raises(ResetNeededError):
        env.step(DONE)
    env.close()


def test_threads_lose_no_numbers() -> None:
    context = EpisodeContext("t")
    gate = threading.Barrier(8)

    def add(k: int) -> None:
        gate.wait()
        for n in range(500):
            context.stats.add(f"of {k}", n)
            context.stats.add("all", 1)
            context.stats.as_dict()

    threads = [threading.Thread(target=add, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = context.stats.as_dict()
    assert found["all"] == (1.0,) * 4_000
    assert all(found[f"of {k}"] == tuple(range(500)) for k in range(8))


def test_a_context_can_be_sent_and_copied() -> None:
    context = EpisodeContext("t", policy_version=3)
    context.stats.add("n", 1)
    for other in (pickle.loads(pickle.dumps(context)), copy.deepcopy(context)):
        other.stats.add("n", 2)
        assert (other.policy_version, other.stats.as_dict()) == (3, {"n": (1.0, 2.0)})
    assert context.stats.as_dict() == {"n": (1.0,)}


def test_statistics_are_summed_up_by_scope() -> None:
    contexts = [EpisodeContext(str(k), evaluation=k == 3) for k in range(4)]
    for k, context in enumerate(contexts):
        context.stats.add("calls", k)
    contexts[0].stats.add("calls", 5)
    contexts[1].stats.add("cost/usd", 0.5)
    found = aggregate_stats((c.scope, c.stats.as_dict()) for c in contexts)
    assert list(found) == ["eval-rollout/calls", "rollout/calls", "rollout/cost/usd"]
    calls = found["rollout/calls"]
    assert (calls.mean, calls.min, calls.max, calls.count) == (2.0, 0.0, 5.0, 4)
    assert found["eval-rollout/calls"].mean == 3.0
    assert aggregate_stats([]) == {}


@given(st.lists(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=4), max_size=5))
def test_a_mean_lies_between_the_least_and_the_greatest_whatever_the_order(values: list[list[float]]) -> None:
    there = [("rollout", {"x": tuple(some)}) for some in values]
    found, back = aggregate_stats(there), aggregate_stats(there[::-1])  # type: ignore[arg-type]
    assert found == back
    every = [value for some in values for value in some]
    assert bool(found) is bool(every)
    for summary in found.values():
        assert summary.count == len(every)
        assert (summary.min, summary.max) == (min(every), max(every))
        slack = 1e-12 * max(abs(summary.min), abs(summary.max))
        assert summary.min - slack <= summary.mean <= summary.max + slack
