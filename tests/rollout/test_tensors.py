"""A batch of tensors holds every token of every trajectory with a reward, and says which were sampled."""

from typing import Any

import pytest
import torch
from helpers import echo_twice, vector
from records import split

from toolgym.agents.chat import ChatFormat
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.envs import ConfigurationError
from toolgym.rollout import Collector, advantages, group_trajectories
from toolgym.rollout.tensors import tensor_batch

DTYPES = {
    "input_ids": torch.int32,
    "attention_mask": torch.bool,
    "loss_mask": torch.int32,
    "logprobs": torch.float32,
    "versions": torch.int32,
    "rewards": torch.float32,
    "trajectory": torch.int64,
}


def test_a_batch_has_areals_names_shapes_and_types_and_leaves_failures_out(chat: ChatFormat) -> None:
    envs = vector(trouble=lambda k: "setup raises" if k == 1 else None)
    found = Collector(envs, ScriptedPolicy(chat, echo_twice, version=7), chat).collect(3, 2)
    envs.close()
    batch = tensor_batch(found, pad_token_id=5)
    assert batch is not None
    assert {name: tensor.dtype for name, tensor in batch.items()} == DTYPES
    good = [trajectory for trajectory in found if trajectory.reward is not None]
    longest = max(len(trajectory) for trajectory in good)
    assert len(good) == 4
    assert {tuple(batch[name].shape) for name in DTYPES if name not in ("rewards", "trajectory")} == {(4, longest)}
    assert [found[k] for k in batch["trajectory"].tolist()] == good
    for row, trajectory in enumerate(good):
        end = len(trajectory)
        assert batch["attention_mask"][row].tolist() == [True] * end + [False] * (longest - end)
        assert batch["input_ids"][row, :end].tolist() == trajectory.input_ids.tolist()
        assert batch["input_ids"][row, end:].tolist() == [5] * (longest - end)
        assert batch["loss_mask"][row].tolist() == [*map(int, trajectory.loss_mask), *[0] * (longest - end)]
        assert set(batch["versions"][row][batch["loss_mask"][row] == 1].tolist()) == {7}
        assert set(batch["versions"][row][batch["loss_mask"][row] == 0].tolist()) == {-1}
    assert batch["rewards"].tolist() == [trajectory.reward for trajectory in good]
    assert tensor_batch([trajectory for trajectory in found if trajectory.reward is None]) is None
    grouped = tensor_batch(group_trajectories(found, 2), estimator="rloo")
    assert grouped is not None
    expected = [a for a in advantages(group_trajectories(found, 2), "rloo") if a is not None]
    assert grouped["advantages"].tolist() == expected
    with pytest.raises(ConfigurationError, match="expected trajectories or groups of them, actual 7"):
        tensor_batch([7])  # type: ignore[list-item]


def test_a_split_trajectory_has_a_row_for_each_sample(chat: ChatFormat) -> None:
    trajectory = split(chat)
    batch = tensor_batch([trajectory])
    assert batch is not None
    assert len(batch["rewards"]) == len(trajectory.samples) > 1
    assert batch["attention_mask"].sum(1).tolist() == [len(sample) for sample in trajectory.samples]


@pytest.mark.parametrize("padding", [-1, 0.5, True, None])
def test_a_padding_that_is_no_token_is_refused(padding: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected pad_token_id as an int of 0 or more"):
        tensor_batch([], pad_token_id=padding)
