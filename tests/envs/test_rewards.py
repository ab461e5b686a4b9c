"""Rewards come from several functions with names and weights, at the end or step by step, and never by accident."""

import asyncio
import functools
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from judged import DONE, UP, BareEnv, CountEnv, SteppedEnv, answered, play, politeness, turns

from toolgym.envs import (
    ConfigurationError,
    EnvironmentFailure,
    Episode,
    ResetNeededError,
    RewardFunction,
    SandboxEnv,
    Score,
    StepView,
    Task,
    ToolEnv,
    ToolVectorEnv,
    tool_env_ids,
)


def test_functions_sync_and_async_are_added_by_name_and_weight() -> None:
    rewards = [RewardFunction(turns, weight=0.5), RewardFunction(politeness, "polite", weight=-1)]
    *_, (_, reward, terminated, _, info) = play(CountEnv(rewards=rewards), UP, DONE)
    assert info["score"] == {"counted": 1.0, "turns": 4.0, "polite.please": 1.0, "polite.thanks": 3.0}
    assert next(iter(info["score"])) == "counted"
    assert reward == 1.0 + 0.5 * 4 - 1 - 3
    assert (terminated, "step_score" in info) == (True, False)


def test_the_weights_of_a_score_are_multiplied() -> None:
    def parts(episode: Episode) -> Score:
        return Score({"a": 1.0, "b": 1.0}, {"a": 0.5})

    *_, (_, reward, _, _, info) = play(BareEnv(rewards=[RewardFunction(parts, weight=4)]), DONE)
    assert (reward, info["score"]) == (6.0, {"parts.a": 1.0, "parts.b": 1.0})


def test_a_function_of_weight_zero_is_recorded_and_not_rewarded() -> None:
    *_, (_, reward, _, _, info) = play(CountEnv(rewards=[RewardFunction(turns, weight=0)]), UP, DONE)
    assert (reward, info["score"]["turns"]) == (1.0, 4.0)


def test_names_come_from_functions_partials_methods_and_callable_objects() -> None:
    class Length:
        def of(self, episode: Episode) -> float:
            return 1.0

        async def __call__(self, episode: Episode) -> float:
            return 2.0

    def scaled(episode: Episode, by: float) -> float:
        return by

    rewards = [Length(), Length().of, functools.partial(scaled, by=3.0)]
    *_, (*_, info) = play(BareEnv(rewards=rewards), DONE)
    assert info["score"] == {"Length": 2.0, "of": 1.0, "scaled": 3.0}


def test_functions_of_one_moment_run_together() -> None:
    gate = threading.Barrier(3, timeout=20)

    def meets(episode: Episode) -> float:
        gate.wait()  # passes only if all three run at once
        return 1.0

    class Meeting(BareEnv):
        def score(self, episode: Episode) -> float:
            return meets(episode)

    env = Meeting(rewards=[RewardFunction(meets, "one"), RewardFunction(meets, "two")])
    assert play(env, DONE)[-1][1] == 3.0


def test_everything_is_judged_exactly_once() -> None:
    calls: Counter[str] = Counter()

    def counted(name: str, view: Any) -> float:
        calls[name] += 1
        return 1.0

    class Counted(BareEnv):
        def score(self, episode: Episode) -> float:
            return counted("score", episode)

        def score_step(self, step: StepView) -> float:
            return counted("score_step", step)

    final = RewardFunction(functools.partial(counted, "final"), "final")
    each = RewardFunction(functools.partial(counted, "each"), "each", each_step=True)
    for step in play(Counted(rewards=[final, each]), UP, UP, DONE):
        for _ in range(3):
            _ = step[1], dict(step[4])
    assert calls == {"score": 1, "final": 1, "score_step": 3, "each": 3}


def test_an_environment_may_leave_its_worth_to_reward_functions() -> None:
    *_, (_, reward, _, _, info) = play(BareEnv(rewards=(turns,)), DONE)
    assert (reward, info) == (2.0, {"score": {"turns": 2.0}, "solved": True})


def test_plain_functions_take_a_list_of_reward_functions() -> None:
    def noop() -> None:
        """Do nothing."""

    async def right(episode: Episode) -> bool:
        return episode.answer == "done"

    env = ToolEnv.from_functions([noop], ["go"], [right, RewardFunction(turns, weight=0.5)])
    assert play(env, DONE)[-1][1] == 2.0
    env = ToolEnv.from_functions([noop], ["go"], RewardFunction(right, "r"), rewards=[turns])
    assert play(env, DONE)[-1][4]["score"] == {"r": 1.0, "turns": 2.0}
    env = ToolEnv.from_functions([noop], ["go"], right, rewards=[turns])
    assert play(env, DONE)[-1][4]["score"] == {"reward": 1.0, "turns": 2.0}


# Whether a task is solved.


@pytest.mark.parametrize(
    ("own", "other", "solved"),
    [
        (0.0, 5.0, False),
        (1.0, -5.0, True),
        (Score({"x": 0.0}, success=True), -5.0, True),
        (1.0, Score({"x": 0.0}, success=False), True),
        (None, 0.5, False),
        (None, 1.0, True),
        (None, Score({"x": 0.0}, success=True), True),
        (None, Score({"x": 5.0}, success=False), False),
    ],
)
def test_the_environments_own_score_alone_decides_what_is_solved_where_there_is_one(
    own: Any, other: Any, solved: bool
) -> None:
    class Own(BareEnv):
        def score(self, episode: Episode) -> Any:
            return own

    env = (BareEnv if own is None else Own)(rewards=[RewardFunction(lambda episode: other, "other")])
    assert play(env, DONE)[-1][4]["solved"] is solved


@pytest.mark.parametrize(("own", "weight", "solved"), [(0.5, 5.0, False), (1.0, -5.0, True)])
def test_where_there_is_a_score_steps_do_not_count_for_what_is_solved(own: float, weight: float, solved: bool) -> None:
    class Own(BareEnv):
        def score(self, episode: Episode) -> float:
            return own

    steps = play(Own(rewards=[RewardFunction(answered, weight=weight, each_step=True)]), UP, DONE)
    assert [step[1] for step in steps] == [weight, own]
    assert steps[-1][4]["solved"] is solved


def test_without_a_score_the_whole_reward_decides_with_that_of_the_steps() -> None:
    env = BareEnv(rewards=[RewardFunction(answered, weight=0.5, each_step=True)])
    steps = play(env, UP, UP, DONE)
    assert [step[1] for step in steps] == [0.5, 0.5, 0.0]
    assert (steps[-1][4]["solved"], steps[-1][4]["score"]) == (True, {})
    assert play(BareEnv(rewards=[RewardFunction(answered, weight=0.5, each_step=True)]), UP, DONE)[-1][4] == {
        "score": {},
        "solved": False,
        "step_score": {"answered": 0.0},
    }


# What goes wrong is a failure.


def raises(view: Any) -> float:
    raise ValueError("seven")


async def exits(view: Any) -> float:
    raise SystemExit(3)


async def hangs(view: Any) -> float:
    await asyncio.sleep(60)
    return 1.0


def broken(view: Any) -> float:
    raise EnvironmentFailure("the judge is gone", kind="judge_died")


def nothing(view: Any) -> None:
    return None


def not_finite(view: Any) -> dict[str, float]:
    return {"a": float("nan")}


@pytest.mark.parametrize("each_step", [False, True])
@pytest.mark.parametrize(
    ("function", "kind", "said"),
    [
        (raises, "reward_raised", "reward function 'raises': ValueError: seven"),
        (exits, "reward_raised", "reward function 'exits': .*SystemExit: 3"),
        (broken, "judge_died", "reward function 'broken': the judge is gone"),
        (nothing, "bad_reward", "reward function 'nothing': .* is None, not a finite number"),
        (not_finite, "bad_reward", "reward function 'not_finite': .*component 'a' is nan"),
    ],
)
def test_a_function_that_fails_is_a_failure_that_names_it(function: Any, kind: str, said: str, each_step: bool) -> None:
    env = CountEnv(rewards=[turns, RewardFunction(function, each_step=each_step)])
    env.reset()
    if not each_step:
        env.step(UP)
    with pytest.raises(EnvironmentFailure, match=said) as caught:
        env.step(UP if each_step else DONE)
    assert caught.value.kind == kind
    with pytest.raises(ResetNeededError):
        env.step(DONE)
    env.reset()
    env.close()


@pytest.mark.parametrize("each_step", [False, True])
def test_a_function_that_hangs_is_a_failure_that_names_it(each_step: bool) -> None:
    env = BareEnv(rewards=[RewardFunction(hangs, each_step=each_step)], hook_timeout=0.05)
    with pytest.raises(EnvironmentFailure, match=r"reward function 'hangs' took over 0\.05 s") as caught:
        play(env, DONE)
    assert caught.value.kind == "reward_timeout"


def test_a_reward_that_grows_beyond_all_numbers_is_a_failure() -> None:
    def vast(view: Any) -> float:
        return 1e308

    for each_step in (False, True):
        env = CountEnv(rewards=[RewardFunction(vast, weight=10, each_step=each_step)])
        with pytest.raises(EnvironmentFailure, match="not a finite number"):
            play(env, DONE)


def test_in_a_vector_it_is_the_failure_of_one_slot() -> None:
    def picky(episode: Episode) -> float:
        return float("nan") if episode.task.id == "bad" else 1.0

    with closing(ToolVectorEnv.of(CountEnv, num_envs=3, rewards=[picky])) as venv:
        venv.reset(options={"tasks": [Task("good", ""), Task("bad", ""), Task("fine", "")]})
        _, rewards, _, truncations, infos = venv.step([DONE] * 3)
        assert np.isnan(rewards).tolist() == truncations.tolist() == [False, True, False]
        assert infos["failure"][1].kind == "bad_reward"
        assert "'picky'" in infos["failure"][1].message


def test_components_of_one_name_are_a_failure() -> None:
    for rewards in (
        [RewardFunction(turns, "counted")],
        [RewardFunction(politeness, "a"), RewardFunction(turns, "a.please")],
    ):
        with pytest.raises(EnvironmentFailure, match="is there already: RewardFunction") as caught:
            play(CountEnv(rewards=rewards), DONE)
        assert caught.value.kind == "bad_reward"


def test_a_failing_function_is_not_held_up_by_a_slow_one() -> None:
    release = threading.Event()

    def slow(episode: Episode) -> float:
        return float(release.wait(60))

    env = CountEnv(rewards=[slow, raises])
    env.reset()
    with pytest.raises(EnvironmentFailure, match="'raises'"):
        env.step(DONE)
    assert set(env.busy) == {"reward function 'slow'"}
    release.set()
    env.close()


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        (turns, "expected rewards as a list of functions"),
        ("turns", "expected rewards as a list of functions, actual 'turns'"),
        ([5], "expected a reward function, actual 5"),
        ([dict], "expected a reward function, actual <class 'dict'>"),
        ([turns, turns], r"several reward functions are named 'turns': RewardFunction\(function, name=...\)"),
        ([turns, RewardFunction(answered, "turns", each_step=True)], "several reward functions are named 'turns'"),
        ([lambda: 1.0], "cannot be called with one argument: it gets the Episode and nothing else"),
        ([lambda a, b: 1.0], "cannot be called with one argument"),
        ([RewardFunction(turns, "reward")], r"named 'reward', as is what score\(\) of the environment returns"),
    ],
)
def test_what_makes_no_reward_functions_is_refused_when_the_environment_is_made(rewards: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        CountEnv(rewards=rewards)


def generator(episode: Episode) -> Any:
    yield 1.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": ""}, "expected the name of a reward function as a text"),
        ({"name": "_x"}, "not beginning with '_', actual '_x'"),
        ({"name": 3}, "actual 3"),
        ({"weight": float("nan")}, "expected the weight of 'turns' as a finite number, actual nan"),
        ({"weight": "1"}, "expected the weight of 'turns' as a finite number, actual '1'"),
        ({"weight": True}, "expected the weight of 'turns'"),
        ({"each_step": 1}, "expected each_step of 'turns' as a bool, actual 1"),
        ({"function": generator}, "reward function 'generator' is a generator"),
        ({"function": lambda: 1, "each_step": True}, "it gets the StepView"),
    ],
)
def test_options_of_a_reward_function_are_checked(arguments: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        RewardFunction(**{"function": turns, **arguments})


def test_a_reward_for_steps_may_not_have_the_name_of_the_environments_own() -> None:
    with pytest.raises(ConfigurationError, match=r"named 'reward', as is what score_step\(\) of the environment"):
        SteppedEnv(rewards=[RewardFunction(answered, "reward", each_step=True)])


@pytest.mark.parametrize("rewards", [None, []])
def test_an_environment_that_nobody_judges_is_refused(rewards: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"BareEnv needs a method score\(episode\), or reward functions"):
        BareEnv(rewards=rewards)
    with pytest.raises(ConfigurationError, match="what is an episode worth"):
        ToolEnv.from_functions([], ["go"], [])


def test_the_longest_step_has_room_for_judging_it() -> None:
    plain = CountEnv(hook_timeout=10, tool_timeout=5)
    assert CountEnv(hook_timeout=10, tool_timeout=5, rewards=[turns]).longest_step == plain.longest_step == 26
    each = [RewardFunction(answered, each_step=True)]
    assert CountEnv(hook_timeout=10, tool_timeout=5, rewards=each).longest_step == 36
    assert SteppedEnv(hook_timeout=10, tool_timeout=5, rewards=each).longest_step == 36


# The environments that ship.


@pytest.mark.parametrize("env_id", tool_env_ids())
@pytest.mark.filterwarnings("ignore::toolgym.envs.sandbox.choice.SandboxWarning")
def test_shipped_environments_take_reward_functions(env_id: str) -> None:
    rewards = [turns, RewardFunction(politeness, weight=0.1), RewardFunction(answered, each_step=True)]
    venv = gymnasium.make_vec(env_id, num_envs=2, rewards=rewards)
    assert isinstance(venv, ToolVectorEnv)
    venv.reset(seed=0)
    _, _, terminations, _, infos = venv.step([DONE, DONE])
    assert terminations.all()
    messages = [float(len(env.messages)) for env in venv.envs]
    assert infos["score"]["turns"].tolist() == messages
    assert infos["score"]["politeness.thanks"].tolist() == [3.0, 3.0]
    assert infos["step_score"]["answered"].tolist() == [0.0, 0.0]
    assert not infos["solved"].any()
    venv.close()


@pytest.mark.filterwarnings("ignore::toolgym.envs.sandbox.choice.SandboxWarning")
def test_an_environment_with_a_sandbox_needs_no_score_either() -> None:
    class Python(SandboxEnv):
        """Run Python."""

    *_, (_, reward, *_) = play(Python(["one"], sandbox="local", rewards=[turns]), DONE)
    assert reward == 2.0
