"""Rewards for steps are judged when the tools have answered, and sum to the whole."""

import asyncio
from contextlib import closing

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from judged import DONE, STOP, UP, BareEnv, CountEnv, SteppedEnv, answered, play, turns

from toolgym.envs import (
    Episode,
    RewardFunction,
    StepView,
    ToolVectorEnv,
)


def test_steps_are_judged_after_the_tools_have_answered_and_the_last_one_too() -> None:
    views: list[StepView] = []

    def look(step: StepView) -> float:
        views.append(step)
        return float(step.number)

    env = SteppedEnv(rewards=[RewardFunction(look, each_step=True)])
    first, second, last = play(env, UP, UP, DONE)
    assert [step[1] for step in (first, second, last)] == [1.25, 2.0, 3.25 + 1.0]
    assert [step[4]["step_score"] for step in (first, second, last)] == [
        {"reward": 0.25, "look": 1.0},
        {"look": 2.0},
        {"reward": 0.25, "look": 3.0},
    ]
    assert last[4]["score"] == {"counted": 1.0}
    assert [view.number for view in views] == [1, 2, 3]
    assert [view.observation for view in views] == [first[0], second[0], ()]
    assert [view.action.content for view in views] == ["", "", "done"]
    assert [len(view.messages) for view in views] == [3, 5, 6]
    assert views[0].action.tool_calls[0].id == "call_1_0"
    assert views[0].task.prompt == views[0].messages[0].content


def test_a_step_that_a_tool_or_a_bound_ends_is_judged_like_any_other() -> None:
    (only,) = play(SteppedEnv(), STOP)
    assert (only[1], only[2], only[4]["step_score"], only[4]["ended_by_tool"]) == (0.25, True, {"reward": 0.25}, "stop")
    (only,) = play(SteppedEnv(max_steps=1), UP)
    assert (only[1], only[3], only[4]["step_score"]) == (1.25, True, {"reward": 0.25})


def test_a_message_that_was_not_acted_on_is_no_step() -> None:
    async def main() -> None:
        env = SteppedEnv()
        await env.areset()
        total = (await env.astep(UP))[1]
        _, reward, _, truncated, info = await env.atruncate(UP)
        assert (total, reward, truncated) == (0.25, 1.0, True)
        assert "step_score" not in info
        await env.aclose()

    asyncio.run(main())


def test_a_step_earns_nothing_where_nobody_judges_steps() -> None:
    first, last = play(CountEnv(rewards=[turns]), UP, DONE)
    assert (first[1], first[4]) == (0.0, {"calls": ("ok",)})
    assert "step_score" not in last[4]


values = st.floats(-100, 100)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(values, values), min_size=1, max_size=5), values, values, st.floats(-2, 2))
def test_the_steps_sum_to_the_whole(steps: list[tuple[float, float]], own: float, final: float, weight: float) -> None:
    class Paying(BareEnv):
        async def score_step(self, step: StepView) -> float:
            return steps[step.number - 1][0]

        async def score(self, episode: Episode) -> float:
            return own

    async def each(step: StepView) -> float:
        return steps[step.number - 1][1]

    async def ending(episode: Episode) -> float:
        return final

    env = Paying(rewards=[RewardFunction(each, weight=weight, each_step=True), RewardFunction(ending, weight=weight)])
    seen = play(env, *[UP] * (len(steps) - 1), DONE)
    whole = own + weight * final + sum(one + weight * two for one, two in steps)
    assert sum(step[1] for step in seen) == pytest.approx(whole, abs=1e-9)


def test_the_steps_of_a_vector_sum_to_the_whole_slot_by_slot() -> None:
    functions = [RewardFunction(answered, each_step=True), turns]
    with closing(ToolVectorEnv.of(SteppedEnv, num_envs=3, rewards=functions)) as venv:
        venv.reset(seed=0)
        rewards = [
            venv.step([UP, UP, DONE]),
            venv.step([UP, DONE, None]),
            venv.step([DONE, None, None]),
        ]
        paid = np.stack([step[1] for step in rewards])
        assert paid.tolist() == [[1.25, 1.25, 0.25 + 2], [1.0, 0 + 1 + 4, 0], [0.25 + 1 + 6, 0, 0]]
        infos = rewards[0][4]
        assert infos["step_score"]["answered"].tolist() == [1.0, 1.0, 0.0]
        assert infos["score"]["turns"].tolist() == [0.0, 0.0, 2.0]
        assert infos["_step_score"].all()


@pytest.mark.filterwarnings("ignore:.*alternative render modes")
def test_gymnasiums_check_passes_with_rewards_for_steps() -> None:
    env = SteppedEnv(rewards=[turns, RewardFunction(answered, each_step=True)], render_mode="ansi")
    check_env(env)
    env.close()
