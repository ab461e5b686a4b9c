"""Figures of a run, by environment."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from toolgym.rollout.trajectory import StopReason, Trajectory


@dataclass
class Summary:
    """What came out of one environment. Failures have no reward, and count in no mean of rewards.

    Attributes:
        env_id: the environment.
        trajectories: how many there are.
        solved: how many were solved.
        rewards: of those that have one.
        turns: messages of the model in all.
        tool_calls: calls that were made in all.
        tokens: of all trajectories, prompts and observations included.
        sampled_tokens: of them, sampled.
        stop_reasons: how often each.
        failures: how often each kind.
        breaks: how often a prompt could not be extended exactly, and a new sample was begun.
        mismatches: trajectories whose recorded prompt was not what the engine says it was fed.
    """

    env_id: str
    trajectories: int = 0
    solved: int = 0
    rewards: list[float] = field(default_factory=list)
    turns: int = 0
    tool_calls: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    breaks: int = 0
    stop_reasons: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def mismatches(self) -> int:
        """Trajectories ended by a token mismatch."""
        return self.stop_reasons[StopReason.TOKEN_MISMATCH]

    @property
    def mean_reward(self) -> float | None:
        """The mean of the rewards; None if there is none."""
        return float(np.mean(self.rewards)) if self.rewards else None

    def add(self, trajectory: Trajectory) -> None:
        """Count one more."""
        self.trajectories += 1
        self.solved += trajectory.solved
        if trajectory.reward is not None:
            self.rewards.append(trajectory.reward)
        self.turns += len(trajectory.turns)
        self.tool_calls += sum(len(turn.calls) for turn in trajectory.turns)
        self.tokens += len(trajectory)
        self.sampled_tokens += int(trajectory.loss_mask.sum())
        self.breaks += trajectory.breaks
        self.stop_reasons[str(trajectory.stop_reason)] += 1
        if trajectory.failure is not None:
            self.failures[trajectory.failure.kind] += 1


def summarize(trajectories: Iterable[Trajectory]) -> list[Summary]:
    """One summary for each environment, in the order of their names."""
    by_env: dict[str, Summary] = {}
    for trajectory in trajectories:
        by_env.setdefault(trajectory.env_id, Summary(trajectory.env_id)).add(trajectory)
    return [by_env[env_id] for env_id in sorted(by_env)]
