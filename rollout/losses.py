"""Alignment for causal language models: which logit scores which token.

A causal model's logits at position i score the token at position i + 1. For T ids there are T - 1 scored tokens, and
everything that belongs to a token moves with it: the mask is ``mask[1:]``. (Taking ``mask[:-1]`` drops the first
sampled token and trains one position off.)
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from toolgym.rollout.trajectory import AlignmentError, Sample, Trajectory


@dataclass(frozen=True, slots=True)
class Shifted:
    """A trajectory's arrays aligned with the logits ``model(input_ids[:-1])``; all of length T - 1.

    Attributes:
        input_ids: (T-1,) int32, what the model is fed.
        targets: (T-1,) int32, the token that the logits at the same position score.
        loss_mask: (T-1,) bool, whether that token was sampled.
        logprobs: (T-1,) float32, the logprob it was sampled with; 0.0 where it was not.
        versions: (T-1,) int32, the weights it was sampled by; -1 where it was not.
    """

    input_ids: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]


def shift(trajectory: Trajectory | Sample) -> Shifted:
    """Align a trajectory, or one of its samples, with the logits of a causal model.

    Raises:
        AlignmentError: a trajectory that was split: its samples are sequences of their own.
    """
    if isinstance(trajectory, Trajectory) and trajectory.breaks:
        raise AlignmentError(f"trajectory {trajectory.id} was split: shift each of its {trajectory.breaks + 1} samples")
    return Shifted(
        input_ids=trajectory.input_ids[:-1],
        targets=trajectory.input_ids[1:],
        loss_mask=trajectory.loss_mask[1:],
        logprobs=trajectory.logprobs[1:],
        versions=trajectory.versions[1:],
    )
