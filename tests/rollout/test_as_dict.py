"""Users of multi-turn rollouts find a trajectory's fields by the names that they know."""

import json

import numpy as np
import pytest
from helpers import call
from records import collected, split

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import PolicyFailure
from toolgym.envs import AssistantMessage, Failure
from toolgym.envs.messages import from_dict
from toolgym.rollout.limits import Limits
from toolgym.rollout.trajectory import AlignmentError, StopReason, Trajectory

ARRAYS = {
    "input_ids": np.int32,
    "labels": np.int32,
    "logprobs": np.float32,
    "loss_mask": np.bool_,
    "versions": np.int32,
}


def said(trajectory: Trajectory) -> list[AssistantMessage]:
    return [message for message in trajectory.messages if isinstance(message, AssistantMessage)]


def test_many_turns_are_one_sequence_labelled_where_the_model_spoke(chat: ChatFormat) -> None:
    (trajectory,) = collected(chat)
    entry = trajectory.as_dict()
    assert {name: entry[name].dtype for name in ARRAYS} == ARRAYS
    assert {entry[name].shape for name in ARRAYS} == {(len(trajectory),)}
    assert entry["input_ids"].tolist() == trajectory.input_ids.tolist()
    assert entry["labels"][entry["loss_mask"]].tolist() == entry["input_ids"][entry["loss_mask"]].tolist()
    assert set(entry["labels"][~entry["loss_mask"]]) == {-100}
    sampled = [token for message in said(trajectory) for token in chat.write(message)]
    assert entry["labels"][entry["labels"] != -100].tolist() == sampled
    assert set(entry["versions"][entry["loss_mask"]]) == {10, 11, 20, 21, 30, 31}
    assert set(entry["versions"][~entry["loss_mask"]]) == {-1}


def test_the_other_fields_tell_how_it_went(chat: ChatFormat) -> None:
    (trajectory,) = collected(chat)
    entry = trajectory.as_dict()
    told = {name: value for name, value in entry.items() if name not in ARRAYS and name != "messages"}
    assert told == {
        "turns": 3,
        "finish_reasons": ["stop"] * 3,
        "stop_reason": "answered",
        "truncated": False,
        "reward": 1.0,
        "score": {"reward": 1.0},
        "failure": None,
        "env_id": "EchoEnv",
        "task_id": "t0",
        "task_index": 0,
        "member": 0,
    }
    assert type(entry["stop_reason"]) is type(entry["finish_reasons"][0]) is str
    assert [m["role"] for m in entry["messages"]] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert tuple(from_dict(m) for m in entry["messages"]) == trajectory.messages
    json.dumps({name: value.tolist() if name in ARRAYS else value for name, value in entry.items()})


def test_what_is_done_to_the_dict_does_not_change_the_record(chat: ChatFormat) -> None:
    (trajectory,) = collected(chat)
    before = trajectory.as_dict()
    changed = trajectory.as_dict()
    for name in ARRAYS:
        changed[name][:] = 1
    changed["score"].clear()
    changed["messages"].clear()
    after = trajectory.as_dict()
    assert all(np.array_equal(before[name], after[name]) for name in ARRAYS)
    assert (after["score"], after["messages"]) == (before["score"], before["messages"])


def test_an_episode_that_a_budget_ends_is_truncated_and_has_its_reward(chat: ChatFormat) -> None:
    (trajectory,) = collected(chat, script=lambda request, member: call(), limits=Limits(max_turns=2))
    entry = trajectory.as_dict()
    assert (entry["stop_reason"], entry["truncated"], entry["reward"], entry["turns"]) == ("max_turns", True, 0.25, 2)
    limits = Limits(max_completion_tokens=50)
    (trajectory,) = collected(chat, script=lambda request, member: "7" * 200, limits=limits)
    entry = trajectory.as_dict()
    assert (entry["stop_reason"], entry["finish_reasons"]) == ("completion_cut", ["length"])
    assert entry["truncated"]
    (trajectory,) = collected(chat, script=lambda request, member: call("finish"))
    entry = trajectory.as_dict()
    assert (entry["stop_reason"], entry["truncated"]) == ("ended_by_tool", False)


TRUNCATED = {
    StopReason.ANSWERED: False,
    StopReason.ENDED_BY_TOOL: False,
    StopReason.ENDED_BY_ENVIRONMENT: True,
    StopReason.MAX_TURNS: True,
    StopReason.MAX_TOOL_CALLS: True,
    StopReason.COMPLETION_CUT: True,
    StopReason.TRAJECTORY_BUDGET: True,
    StopReason.OBSERVATION_TOO_LONG: True,
    StopReason.PROMPT_TOO_LONG: True,
    StopReason.UNPARSABLE: True,
    StopReason.TEMPLATE_REFUSED: True,
    StopReason.EPISODE_DEADLINE: True,
    StopReason.POLICY_FAILURE: False,
    StopReason.TOKEN_MISMATCH: False,
    StopReason.ENVIRONMENT_FAILURE: False,
    StopReason.CANCELLED: False,
}


@pytest.mark.parametrize("reason", StopReason)
def test_each_stop_reason_says_whether_the_episode_was_cut_short(reason: StopReason) -> None:
    trajectory = Trajectory("env", "task", 0, 0, 0, stop_reason=reason)
    assert trajectory.truncated is TRUNCATED[reason]
    trajectory.failure = Failure("score_raised", "score", "no")
    assert not trajectory.truncated, "a failure is never an end by budget"


def test_what_failed_before_its_first_token_has_empty_arrays(chat: ChatFormat) -> None:
    (trajectory,) = collected(chat, trouble=lambda k: "setup raises")
    entry = trajectory.as_dict()
    assert {name: entry[name].dtype for name in ARRAYS} == ARRAYS
    assert {entry[name].shape for name in ARRAYS} == {(0,)}
    assert (entry["failure"]["kind"], entry["failure"]["where"]) == ("setup_raised", "reset")
    assert "no disk" in entry["failure"]["message"]
    assert (entry["reward"], entry["turns"], entry["truncated"]) == (None, 0, False)
    assert [list(more) for more in trajectory.as_dicts()] == [list(entry)]


def test_a_failure_after_the_prompt_keeps_the_prompt_and_trains_on_nothing(chat: ChatFormat) -> None:
    (trajectory,) = collected(chat, sampling_trouble=lambda request: PolicyFailure("engine dead"))
    entry = trajectory.as_dict()
    assert len(entry["labels"]) == len(trajectory) > 0
    assert set(entry["labels"]) == {-100}
    assert entry["reward"] is None


def test_a_split_trajectory_is_several_sequences(chat: ChatFormat) -> None:
    trajectory = split(chat)
    with pytest.raises(AlignmentError, match=r"trajectory 0\.0 was split into 3 samples: use as_dicts\(\)"):
        trajectory.as_dict()
    entries = trajectory.as_dicts()
    assert [len(entry["input_ids"]) for entry in entries] == [len(sample) for sample in trajectory.samples]
    for entry, turn in zip(entries, (0, 1, 2), strict=True):
        assert entry["labels"][entry["labels"] != -100].tolist() == chat.write(said(trajectory)[turn])
        assert (entry["reward"], entry["turns"], len(entry["messages"])) == (1.0, 3, 6)
