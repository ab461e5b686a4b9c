"""The whole slice with a real engine: what is recorded is what was sampled, and the embedded model really solves."""

import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Sampling
from toolgym.agents.tiny import TINY_MODEL
from toolgym.agents.vllm_policy import VLLMPolicy
from toolgym.rollout.collector import Collector
from toolgym.rollout.limits import Limits
from toolgym.rollout.losses import shift
from toolgym.rollout.report import summarize
from toolgym.rollout.store import RunFolder
from toolgym.rollout.trajectory import Trajectory

pytestmark = pytest.mark.vllm
LIMITS = Limits(max_trajectory_tokens=2_048, max_completion_tokens=256)
ENVIRONMENTS = ("toolgym/Calculator-v0", "toolgym/Ledger-v0")


def collect(
    engine: VLLMPolicy, chat: ChatFormat, env_id: str, tasks: int, group: int, temperature: float
) -> list[Trajectory]:
    envs = gymnasium.make_vec(env_id, num_envs=64, split="test")
    try:
        sampling = Sampling(temperature=temperature)
        return Collector(envs, engine, chat, LIMITS, sampling, seed=1).collect(tasks, group)
    finally:
        envs.close()


@pytest.fixture(scope="module")
def sampled(engine: VLLMPolicy, chat: ChatFormat) -> list[Trajectory]:
    """At least 500 turns at temperature 1, groups of 4."""
    return [t for env_id in ENVIRONMENTS for t in collect(engine, chat, env_id, 24, 4, 1.0)]


def test_recorded_and_engine_ids_agree_over_500_turns(sampled: list[Trajectory]) -> None:
    assert sum(len(trajectory.turns) for trajectory in sampled) >= 500
    assert sum(summary.mismatches for summary in summarize(sampled)) == 0
    assert [trajectory.failure for trajectory in sampled if trajectory.failure] == []
    assert all(trajectory.stop_reason is not None for trajectory in sampled)


def test_recorded_logprobs_are_those_of_a_forward_pass(sampled: list[Trajectory]) -> None:
    torch.set_num_threads(1)  # the engine has the cores
    model = AutoModelForCausalLM.from_pretrained(str(TINY_MODEL), dtype=torch.float32)
    checked, worst = 0, 0.0
    for trajectory in sampled:
        shifted = shift(trajectory)
        with torch.no_grad():
            logits = model(torch.from_numpy(shifted.input_ids.astype(np.int64))[None]).logits[0]
        scored = torch.log_softmax(logits, -1).numpy()[np.arange(len(shifted.targets)), shifted.targets]
        difference = np.abs(scored - shifted.logprobs)[shifted.loss_mask]
        worst, checked = max(worst, float(difference.max())), checked + len(difference)
    assert checked == sum(int(trajectory.loss_mask.sum()) for trajectory in sampled)
    assert worst < 1e-3


def test_groups_have_a_spread(sampled: list[Trajectory]) -> None:
    """At temperature 1 some members of a group solve the task and others do not, else there is nothing to learn."""
    for env_id in ENVIRONMENTS:
        groups: dict[int, set[bool]] = {}
        for trajectory in sampled:
            if trajectory.env_id == env_id:
                groups.setdefault(trajectory.task_index, set()).add(trajectory.solved)
        assert sum(len(outcomes) == 2 for outcomes in groups.values()) >= 2


@pytest.mark.parametrize(("env_id", "share"), [("toolgym/Calculator-v0", 0.8), ("toolgym/Ledger-v0", 0.5)])
def test_the_embedded_model_solves_held_out_tasks(
    engine: VLLMPolicy, chat: ChatFormat, env_id: str, share: float
) -> None:
    trajectories = collect(engine, chat, env_id, 100, 1, 0.0)
    assert sum(trajectory.solved for trajectory in trajectories) >= 100 * share
    calls = sum(len(turn.calls) for trajectory in trajectories for turn in trajectory.turns)
    assert calls >= 100, "it solves them by calling tools"


def test_the_command_line_runs_both_environments_with_a_real_engine(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("toolgym")), "run", *ENVIRONMENTS]
    options = ["--tasks", "4", "--group", "2", "--out", str(tmp_path / "run"), "--env-option", "split=test"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, check=True)
    assert "tokens/s" in done.stdout
    folder = RunFolder.open(tmp_path / "run")
    trajectories = list(folder.trajectories())
    assert sorted((t.task_index, t.member) for t in trajectories) == [(k, m) for k in range(8) for m in range(2)]
    assert {t.env_id for t in trajectories} == set(ENVIRONMENTS)
    assert not [t.failure for t in trajectories if t.failure]
    assert folder.info["collectors"][0]["policy"]["logprobs_mode"] == "processed_logprobs"
    shown = subprocess.run(
        [command[0], "show", str(folder.path), "0.0"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "<|im_start|>assistant" in shown.stdout
