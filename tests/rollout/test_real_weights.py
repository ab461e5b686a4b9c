"""Weights that change while a real engine is rolling out: every token bears the version that sampled it."""

import shutil
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Sampling
from toolgym.agents.tiny import TINY_MODEL
from toolgym.agents.vllm_policy import VLLMPolicy
from toolgym.rollout import Collector, Limits, Trajectory, rollout

pytestmark = pytest.mark.vllm
LIMITS = Limits(max_trajectory_tokens=2_048, max_completion_tokens=256)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another set of weights for the embedded model, which still solves its tasks now and then."""
    made = tmp_path_factory.mktemp("weights") / "other"
    shutil.copytree(TINY_MODEL, made, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    generator = torch.Generator().manual_seed(5)
    weights = load_file(TINY_MODEL / "model.safetensors")
    moved = {name: value * (1 + 0.2 * torch.randn(value.shape, generator=generator)) for name, value in weights.items()}
    save_file(moved, made / "model.safetensors", metadata={"format": "pt"})
    return made


def scored(model: Any, trajectory: Trajectory) -> np.ndarray[Any, Any]:
    """(T,) float32: what a forward pass of transformers gives every token but the first."""
    ids = torch.from_numpy(trajectory.input_ids.astype(np.int64))
    with torch.no_grad():
        found = torch.log_softmax(model(ids[None, :-1]).logits[0], -1)
    return np.concatenate([[0.0], found[torch.arange(len(ids) - 1), ids[1:]].numpy()]).astype(np.float32)


def test_500_rollouts_with_new_weights_after_every_50(engine: VLLMPolicy, chat: ChatFormat, other: Path) -> None:
    """In mid-generation: what runs is broken off and continued from its tokens, nothing is lost."""
    first, ended = engine.version, 0
    folders = {first: TINY_MODEL}

    def swap(trajectory: Trajectory) -> None:
        nonlocal ended
        ended += 1
        if ended % 50 == 0:
            folder = other if engine.version % 2 == first % 2 else TINY_MODEL
            folders[engine.update_weights(folder)] = folder

    envs = gymnasium.make_vec("toolgym/Calculator-v0", num_envs=64)
    collector = Collector(envs, engine, chat, LIMITS, Sampling(temperature=1.0), seed=2)
    try:
        found = rollout(collector, 125, 4, on_trajectory=swap).trajectories
    finally:
        envs.close()
        engine.update_weights(TINY_MODEL)
    assert [t.id for t in found] == [f"{k}.{m}" for k in range(125) for m in range(4)]
    assert [t.failure for t in found if t.failure] == []
    torch.set_num_threads(1)
    models = {f: AutoModelForCausalLM.from_pretrained(str(f), dtype=torch.float32) for f in (TINY_MODEL, other)}
    seen: set[int] = set()
    broken_off = told_apart = sampled = 0
    for trajectory in found:
        mask, versions = trajectory.loss_mask, trajectory.versions
        seen |= set(versions[mask].tolist())
        assert (np.diff(versions[mask]) >= 0).all()
        broken_off += any(len(set(versions[s.start : s.end])) > 1 for s in trajectory.segments if s.kind == "action")
        by_folder = {folder: scored(models[folder], trajectory) for folder in models}
        should = np.array([by_folder[folders.get(int(v), TINY_MODEL)][k] for k, v in enumerate(versions)])
        assert np.abs(should - trajectory.logprobs)[mask].max() < 1e-3
        told_apart += int((np.abs(by_folder[TINY_MODEL] - by_folder[other])[mask] > 1e-2).sum())
        sampled += int(mask.sum())
    assert seen == set(folders) - {max(folders)} or seen == set(folders)
    assert len(folders) == 11
    assert broken_off >= 20, "updates came in the middle of answers"
    assert told_apart > sampled / 50, "the two sets of weights differ in what they say"


def test_a_trainer_takes_batches_that_are_as_fresh_as_was_agreed_on(
    engine: VLLMPolicy, chat: ChatFormat, other: Path
) -> None:
    first, taken = engine.version, 0
    envs = gymnasium.make_vec("toolgym/Calculator-v0", num_envs=32)
    collector = Collector(envs, engine, chat, LIMITS, seed=3)
    ages = []
    try:
        for number, batch in enumerate(collector.batches(24, 4, groups=4, max_staleness=1)):
            assert engine.version == first + number
            assert [group.task_index for group in batch] == list(range(4 * number, 4 * number + 4))
            assert all(group.complete for group in batch)
            for group in batch:
                ages += [engine.version - int(t.versions[t.loss_mask][0]) for t in group.trajectories]
            taken += len(batch)
            engine.update_weights(
                other if number % 2 == 0 else TINY_MODEL, in_flight="finish" if number % 3 else "resume"
            )
    finally:
        envs.close()
        engine.update_weights(TINY_MODEL)
    assert taken == 24
    assert set(ages) == {0, 1}, "the next batch is collected while one is trained on, but no older than one version"
