"""What transformers gives the tokens that an engine has sampled."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from toolgym.agents.policy import (
    Completion,
)

PROMPT = np.random.default_rng(7).integers(0, 500, size=300).astype(np.int32)  # longer than a block of the cache


@functools.cache
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def expected(folder: Path, completion: Completion, prompt: Any = PROMPT) -> np.ndarray[Any, Any]:
    """What transformers gives each sampled token under the weights of a folder."""
    ids = torch.tensor(np.concatenate([prompt, completion.token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        found = torch.log_softmax(reference(folder)(ids).logits[0], -1)
    places = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return found[places, torch.tensor(completion.token_ids.astype(np.int64))].numpy()


def agrees(completion: Completion, folders: dict[int, Path], prompt: Any = PROMPT) -> bool:
    """Whether every token has the logprob that the weights of its version give it."""
    by_version = {version: expected(folders[version], completion, prompt) for version in set(completion.versions)}
    should = np.array([by_version[version][k] for k, version in enumerate(completion.versions)])
    return bool(np.abs(should - completion.logprobs).max() < 1e-3)
