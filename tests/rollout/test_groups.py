"""What a trajectory is worth beside the others of its task: absent is not zero, and a task that comes twice is two."""

import math
import statistics
from typing import Any, get_args

import numpy as np
import pytest
from helpers import echo_twice
from hypothesis import given
from hypothesis import strategies as st
from records import collected, split

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Completion, FinishReason, PolicyFailure, SampleRequest
from toolgym.envs import AssistantMessage, ConfigurationError, Failure, Task
from toolgym.rollout.groups import EPSILON, Estimator, Group, advantages, group_trajectories, token_weights
from toolgym.rollout.losses import shift
from toolgym.rollout.trajectory import SegmentKind, StopReason, Trajectory

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
rewards = st.floats(-100, 100)
some_rewards = st.lists(rewards, min_size=1, max_size=9)
estimators = st.sampled_from(ESTIMATORS)


def member(index: int, number: int, reward: float | None, task_id: str | None = None) -> Trajectory:
    made = Trajectory("env", task_id or f"t{index}", index, number, 0, reward=reward)
    made.stop_reason = StopReason.ANSWERED if reward is not None else StopReason.CANCELLED
    return made


def group(values: list[float | None], index: int = 0, size: int | None = None) -> Group:
    members = tuple(member(index, number, value) for number, value in enumerate(values))
    return Group(index, f"t{index}", size or len(values), members)


def scored(values: list[float | None] | list[float], estimator: Estimator) -> list[float]:
    return [value for value in advantages(group(list(values)), estimator) if value is not None]


@given(some_rewards, estimators)
def test_advantages_of_a_group_cancel_out(values: list[float], estimator: Estimator) -> None:
    assert math.isclose(sum(scored(values, estimator)), 0.0, abs_tol=1e-9)


@given(some_rewards)
def test_leaving_one_out_is_the_mean_form_stretched_by_k_over_k_less_one(values: list[float]) -> None:
    count = len(values)
    stretch = count / (count - 1) if count > 1 else 1.0
    expected = [stretch * value for value in scored(values, "grpo_mean")]
    assert np.allclose(scored(values, "rloo"), expected, atol=1e-9)


@given(some_rewards)
def test_each_estimator_is_its_formula(values: list[float]) -> None:
    mean, count = statistics.fmean(values), len(values)
    assert np.allclose(scored(values, "grpo_mean"), [value - mean for value in values], atol=1e-9)
    assert scored(values, "dr_grpo") == scored(values, "grpo_mean")
    if count > 1:
        spread = statistics.stdev(values) + EPSILON
        assert np.allclose(scored(values, "grpo"), [(value - mean) / spread for value in values], atol=1e-6)
        others = [statistics.fmean(values[:k] + values[k + 1 :]) for k in range(count)]
        assert np.allclose(scored(values, "rloo"), np.subtract(values, others), atol=1e-9)


def test_the_figures_of_a_known_group() -> None:
    assert scored([1.0, 0.0, 0.0, 0.0], "grpo_mean") == [0.75, -0.25, -0.25, -0.25]
    assert np.allclose(scored([1.0, 0.0, 0.0, 0.0], "grpo"), np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-4))
    assert np.allclose(scored([1.0, 0.0, 0.0, 0.0], "rloo"), [1.0, -1 / 3, -1 / 3, -1 / 3])


@given(some_rewards, estimators, st.floats(-100, 100))
def test_a_constant_added_to_all_rewards_changes_nothing(
    values: list[float], estimator: Estimator, more: float
) -> None:
    # Up to the rounding of the rewards themselves, which GRPO divides by EPSILON at worst.
    assert np.allclose(scored([value + more for value in values], estimator), scored(values, estimator), atol=1e-8)


@given(st.floats(-1e9, 1e9), st.integers(1, 20), estimators)
def test_equal_rewards_and_a_single_one_give_exactly_zero(value: float, count: int, estimator: Estimator) -> None:
    assert [str(advantage) for advantage in scored([value] * count, estimator)] == ["0.0"] * count


@given(st.integers(2, 16), st.floats(-10, 10))
def test_rewards_that_differ_by_rounding_alone_are_not_blown_up(count: int, value: float) -> None:
    values = [value, *[math.nextafter(value, math.inf)] * (count - 1)]
    assert max(map(abs, scored(values, "grpo"))) < 1e-9


@given(some_rewards, estimators, st.data())
def test_failures_change_no_advantage_of_others(values: list[float], estimator: Estimator, data: Any) -> None:
    mixed: list[float | None] = list(values)
    for _ in range(data.draw(st.integers(0, 4))):
        mixed.insert(data.draw(st.integers(0, len(mixed))), None)
    found = advantages(group(mixed), estimator)
    assert [value is None for value in found] == [value is None for value in mixed]
    assert [value for value in found if value is not None] == scored(values, estimator)


@given(
    st.lists(st.lists(st.none() | rewards, min_size=1, max_size=4), min_size=1, max_size=5), estimators, st.randoms()
)
def test_trajectories_in_any_order_are_compared_within_their_task_alone(
    tasks: list[list[float | None]], estimator: Estimator, random: Any
) -> None:
    groups = [group(values, index, size=4) for index, values in enumerate(tasks)]
    everything = [trajectory for one in groups for trajectory in one.trajectories]
    expected = {
        t.id: value for one in groups for t, value in zip(one.trajectories, advantages(one, estimator), strict=True)
    }
    random.shuffle(everything)
    assert advantages(everything, estimator) == [expected[trajectory.id] for trajectory in everything]
    found = group_trajectories(everything, 4)
    assert found == groups
    for one in found:
        assert one.rewards.tolist() == [trajectory.reward for trajectory in one.scored]
        assert one.rewards.dtype == np.float64
        assert one.complete is not one.partial
        assert one.complete is (len(one.rewards) == 4)


def test_the_order_of_arrival_does_not_show_even_in_the_last_bit() -> None:
    members = [member(0, number, value) for number, value in enumerate([1e16, 1.0, -1e16])]
    for estimator in ESTIMATORS:
        in_order, arrived = advantages(members, estimator), advantages([members[k] for k in (2, 0, 1)], estimator)
        assert arrived == [in_order[k] for k in (2, 0, 1)]


def test_no_trajectories_and_no_rewards_give_nothing() -> None:
    assert group_trajectories([], 4) == []
    for estimator in ESTIMATORS:
        assert advantages([], estimator) == []
        assert advantages(group([None, None]), estimator) == [None, None]


def better_later(request: SampleRequest, number: int) -> AssistantMessage:
    return echo_twice(request, number) if number else AssistantMessage("I give up")


def test_collected_groups_leave_failures_out_of_every_baseline(chat: ChatFormat) -> None:
    def trouble(request: SampleRequest) -> BaseException | None:
        assert request.task is not None
        unlucky = request.task.id == "t1" and request.member == 2 and request.turn == 1
        return PolicyFailure("engine dead") if unlucky else None

    trajectories = collected(chat, 3, 4, script=better_later, sampling_trouble=trouble, trouble={2: "setup raises"}.get)
    whole, partial, none = group_trajectories(reversed(trajectories), 4)
    assert (whole.complete, partial.partial, none.partial) == (True, True, True)
    assert [len(one.trajectories) for one in (whole, partial, none)] == [4, 4, 4]
    assert (whole.rewards.tolist(), partial.rewards.tolist()) == ([0.25, 1.0, 1.0, 1.0], [0.25, 1.0, 1.0])
    assert advantages(partial, "grpo_mean") == [-0.5, 0.25, None, 0.25]
    assert advantages(partial, "rloo") == [-0.75, 0.375, None, 0.375]
    assert (none.scored, none.rewards.shape, advantages(none, "grpo")) == ((), (0,), [None] * 4)
    assert advantages(trajectories, "grpo")[4:8] == advantages(partial, "grpo")


def test_a_task_that_comes_again_is_its_own_group(chat: ChatFormat) -> None:
    def first_time_only(request: SampleRequest, number: int) -> AssistantMessage:
        assert request.task is not None
        return AssistantMessage("done" if request.task.data["k"] == number else "no")

    tasks = [Task("same", "task", {"k": k, "trouble": None}) for k in (0, 1)]
    trajectories = collected(chat, tasks, 2, script=first_time_only)  # type: ignore[arg-type]
    one, other = group_trajectories(trajectories, 2)
    assert (one.task_id, other.task_id, one.task_index, other.task_index) == ("same", "same", 0, 1)
    assert (one.rewards.tolist(), other.rewards.tolist()) == ([1.0, 0.25], [0.25, 1.0])
    assert advantages(trajectories, "grpo_mean") == [0.375, -0.375, -0.375, 0.375]


def test_a_cancelled_member_makes_a_group_partial_and_a_rejected_one_is_not_in_it() -> None:
    assert group([1.0, None]).partial
    rejected = group_trajectories([member(0, 0, 1.0), member(0, 2, 0.0)], 3)[0]
    assert rejected.partial
    assert advantages(rejected, "rloo") == [1.0, -1.0]
    failed = member(0, 1, None)
    failed.failure = Failure("box_died", "step", "gone")
    assert group_trajectories([member(0, 0, 1.0), failed], 2)[0].partial


@pytest.mark.parametrize(
    ("trajectories", "size", "says"),
    [
        ([member(0, 0, 1.0), member(0, 0, 1.0)], 2, r"trajectory 0\.0 behind member 0"),
        ([member(0, 0, 1.0), member(0, 2, 1.0)], 2, r"below the group size of 2; actual trajectory 0\.2"),
        ([member(0, 0, 1.0, "a"), member(0, 1, 1.0, "b")], 2, r"trajectory 0\.1 of task 'b' is not of task 0, 'a'"),
        ([member(0, 0, 1.0)], 0, "group size as an int of 1 or more, actual 0"),
        ([member(0, 0, 1.0)], True, "actual True"),
        ([member(0, 0, 1.0)], "4", "actual '4'"),
    ],
)
def test_trajectories_of_several_runs_are_not_mixed_up(trajectories: list[Trajectory], size: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        group_trajectories(trajectories, size)


@pytest.mark.parametrize("name", ["GRPO", "ppo", "", None, ["grpo"]])
def test_an_unknown_estimator_is_refused_by_name(name: Any) -> None:
    for ask in (lambda: advantages([], name), lambda: token_weights(member(0, 0, 1.0), name)):
        with pytest.raises(ConfigurationError, match=r"among grpo, grpo_mean, dr_grpo, rloo, actual"):
            ask()


@pytest.mark.parametrize("values", [[math.nan, 1.0], [math.inf, 1.0], [math.inf] * 2, [math.nan], [1.7e308, 0.0]])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rewards_that_are_no_finite_numbers_are_refused(values: list[float], estimator: Estimator) -> None:
    with pytest.raises(ConfigurationError, match=r"finite rewards up to 1e\+100 in task 0, actual"):
        advantages(group(list(values)), estimator)


def test_grpo_gives_each_trajectory_the_same_weight_and_dr_grpo_each_token(chat: ChatFormat) -> None:
    short, long = collected(chat, 1, 2, script=better_later)
    assert 0 < short.loss_mask.sum() < long.loss_mask.sum()
    for trajectory in (short, long):
        for estimator in ESTIMATORS:
            weights = token_weights(trajectory, estimator, budget=400)
            assert (weights.dtype, weights.shape) == (np.float32, trajectory.input_ids.shape)
            assert (weights[~trajectory.loss_mask] == 0).all()
            assert len(set(weights[trajectory.loss_mask].tolist())) == 1
            assert np.array_equal(weights[1:] > 0, shift(trajectory).loss_mask), "no weight is lost by shifting"
        for estimator in ("grpo", "grpo_mean"):
            assert math.isclose(token_weights(trajectory, estimator).sum(), 1.0, rel_tol=1e-5)
        assert set(token_weights(trajectory, "dr_grpo", budget=400).tolist()) == {0.0, float(np.float32(1 / 400))}
        assert token_weights(trajectory, "rloo").sum() == trajectory.loss_mask.sum()


def test_the_samples_of_a_split_trajectory_share_its_weight(chat: ChatFormat) -> None:
    trajectory = split(chat)
    weights = token_weights(trajectory, "grpo")
    assert len(trajectory.samples) == 3
    assert math.isclose(weights.sum(), 1.0, rel_tol=1e-5)
    assert np.array_equal(weights > 0, trajectory.loss_mask)


def test_a_trajectory_without_sampled_tokens_has_no_weight() -> None:
    made = member(0, 0, None)
    assert token_weights(made, "grpo").shape == (0,)
    made.append(SegmentKind.PROMPT, [1, 2])
    assert token_weights(made, "grpo").tolist() == [0.0, 0.0]


@pytest.mark.parametrize("budget", [None, 0, -1, 2.5, True, "400"])
def test_dr_grpo_needs_its_constant(budget: Any) -> None:
    with pytest.raises(ConfigurationError, match="dr_grpo divides by the budget: expected an int of 1 or more, actual"):
        token_weights(member(0, 0, 1.0), "dr_grpo", budget=budget)
    assert token_weights(member(0, 0, 1.0), "grpo", budget=budget).shape == (0,)


@given(st.lists(st.tuples(st.integers(1, 30), rewards), min_size=2, max_size=5))
def test_the_gradient_of_a_token_does_not_depend_on_its_trajectorys_length_under_dr_grpo(
    members: list[tuple[int, float]],
) -> None:
    made = []
    for number, (length, reward) in enumerate(members):
        trajectory = member(0, number, reward)
        trajectory.append(SegmentKind.PROMPT, [1])
        columns = np.zeros(length, np.int32), np.zeros(length, np.float32), np.zeros(length, np.int32)
        trajectory.append(SegmentKind.ACTION, Completion(*columns, FinishReason.STOP))
        made.append(trajectory)
    for trajectory, (length, _) in zip(made, members, strict=True):
        assert math.isclose(token_weights(trajectory, "dr_grpo", budget=30)[1], 1 / 30, rel_tol=1e-6)
        assert math.isclose(token_weights(trajectory, "grpo")[1], 1 / length, rel_tol=1e-6)
