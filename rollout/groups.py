"""Groups: the trajectories of one task, and what each is worth beside the others.

An *advantage* compares a trajectory's reward with those of its group. A trajectory without a reward (it failed, or was
cancelled) has no advantage, and is in no baseline: absent is not zero. So a partial group is a smaller group.

======================  ===================================================  =============================
estimator               advantage of trajectory i of K that have a reward    weight of each sampled token
======================  ===================================================  =============================
``"grpo"``              (r_i - mean) / (standard deviation + 1e-4)           1 / tokens of its trajectory
``"grpo_mean"``         r_i - mean                                           1 / tokens of its trajectory
``"dr_grpo"``           r_i - mean                                           1 / the largest budget
``"rloo"``              r_i - mean of the other K - 1                        1
======================  ===================================================  =============================

The policy loss of a group is the mean over its K scored trajectories of ``-sum_t weight_t * advantage * ratio_t``,
where ``ratio_t`` is what one's algorithm makes of the logprobs. Sources: GRPO, arXiv 2402.03300; Dr.GRPO, arXiv
2503.20783; RLOO, arXiv 2402.14740.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from toolgym.envs.errors import ConfigurationError
from toolgym.rollout.trajectory import Floats, Trajectory

Estimator: TypeAlias = Literal["grpo", "grpo_mean", "dr_grpo", "rloo"]
Rewards: TypeAlias = npt.NDArray[np.float64]
EPSILON = 1e-4  # as in TRL; it keeps rewards that differ by rounding alone from being blown up
_LARGEST = 1e100  # whose squares can still be added


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one task of a run. A task that comes twice in a run has two groups.

    Attributes:
        task_index: position of the task in the run.
        task_id: the task, by its content.
        size: how many members were asked for.
        trajectories: those that are there, in order of member; what was rejected is not among them.

    Raises:
        ConfigurationError: a size below 1, or trajectories that are not members of one such group.
    """

    task_index: int
    task_id: str
    size: int
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int | np.integer) or self.size < 1:
            raise ConfigurationError(f"expected a group size as an int of 1 or more, actual {self.size!r:.100}")
        before = -1
        for trajectory in self.trajectories:
            if (trajectory.task_index, trajectory.task_id) != (self.task_index, self.task_id):
                raise ConfigurationError(
                    f"trajectory {trajectory.id} of task {trajectory.task_id!r:.60} is not of task {self.task_index}, "
                    f"{self.task_id!r:.60}: group the trajectories of each run by themselves"
                )
            if not before < trajectory.member < self.size:
                raise ConfigurationError(
                    f"expected members in order, each once, below the group size of {self.size}; actual "
                    f"trajectory {trajectory.id} behind member {before}: group the trajectories of each run by "
                    "themselves, by the size that they were collected with"
                )
            before = trajectory.member

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        """The trajectories with a reward: those that neither failed nor were cancelled."""
        return tuple(trajectory for trajectory in self.trajectories if trajectory.reward is not None)

    @property
    def rewards(self) -> Rewards:
        """(K,) float64, the rewards of `scored`."""
        return _rewards(self.trajectories)

    @property
    def complete(self) -> bool:
        """Whether all members are there, each with a reward."""
        return len(self.scored) == self.size

    @property
    def partial(self) -> bool:
        """Whether a member is missing, failed or was cancelled."""
        return not self.complete


def group_trajectories(trajectories: Iterable[Trajectory], size: int) -> list[Group]:
    """Trajectories of one run by task index, in its order. A task of which none is there has no group.

    Args:
        trajectories: in any order.
        size: how many members each group was asked for.

    Raises:
        ConfigurationError: a size below 1, a trajectory that comes twice, or a member beyond the size.
    """
    by_index: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_index.setdefault(trajectory.task_index, []).append(trajectory)
    groups = []
    for index in sorted(by_index):
        members = sorted(by_index[index], key=lambda trajectory: trajectory.member)
        groups.append(Group(index, members[0].task_id, size, tuple(members)))
    return groups


def flattened(trajectories: Iterable[Trajectory | Group]) -> list[Trajectory]:
    """Trajectories, those of groups one after another.

    Raises:
        ConfigurationError: something else is among them.
    """
    found: list[Trajectory] = []
    for entry in trajectories:
        members = entry.trajectories if isinstance(entry, Group) else (entry,)
        if wrong := [member for member in members if not isinstance(member, Trajectory)]:
            raise ConfigurationError(f"expected trajectories or groups of them, actual {wrong[0]!r:.100}")
        found.extend(members)
    return found


def advantages(trajectories: Group | Iterable[Trajectory | Group], estimator: Estimator) -> list[float | None]:
    """The advantage of each trajectory, by the module's table.

    Equal rewards give exactly 0.0, and so does a single one: there is nothing to compare it with. The standard
    deviation of ``"grpo"`` is that of a sample (``ddof=1``), as in TRL and verl; the paper does not say which.

    Args:
        trajectories: a group, several, or trajectories of one run in any order: each is compared with those of its
            task index.
        estimator: by name.

    Returns:
        One for each trajectory, in the order given; None for those without a reward.

    Raises:
        ConfigurationError: an unknown estimator, or rewards that are not finite, or beyond 1e100.
    """
    _check_estimator(estimator)
    given = flattened([trajectories] if isinstance(trajectories, Group) else trajectories)
    by_index: dict[int, list[int]] = {}
    for place, trajectory in enumerate(given):
        if trajectory.reward is not None:
            by_index.setdefault(trajectory.task_index, []).append(place)
    found: list[float | None] = [None] * len(given)
    for index, places in by_index.items():
        places.sort(key=lambda place: given[place].member)  # sums depend on their order, results must not
        rewards = _rewards(given[place] for place in places)
        for place, value in zip(places, _compared(rewards, estimator, index), strict=True):
            found[place] = float(value)
    return found


def token_weights(trajectory: Trajectory, estimator: Estimator, *, budget: int | None = None) -> Floats:
    """How much each token counts in an estimator's loss, by the module's table.

    GRPO gives every trajectory the same weight in all, so each token of a long one counts less; this favours short
    right answers and long wrong ones. Dr.GRPO divides by a constant instead, the same for all. RLOO takes the whole
    trajectory for one action, whose logprob is the sum over its tokens.

    Args:
        trajectory: one that was split counts as one: its samples share its weight. Cut the weights like its arrays.
        estimator: by name.
        budget: tokens that a trajectory may sample at most; ``"dr_grpo"`` needs it, the others do not look at it.

    Returns:
        (T,) float32, aligned with ``input_ids``; 0.0 where not sampled. They move with their tokens: for a causal
        model's logits take ``[1:]``.

    Raises:
        ConfigurationError: an unknown estimator, or ``"dr_grpo"`` without a budget of 1 or more.
    """
    _check_estimator(estimator)
    sampled = int(trajectory.loss_mask.sum())
    match estimator:
        case "grpo" | "grpo_mean":
            weight = 1.0 / max(sampled, 1)
        case "dr_grpo":
            if isinstance(budget, bool) or not isinstance(budget, int | np.integer) or budget < 1:
                raise ConfigurationError(
                    f"dr_grpo divides by the budget: expected an int of 1 or more, actual {budget!r:.100}"
                )
            weight = 1.0 / int(budget)
        case "rloo":
            weight = 1.0
    return trajectory.loss_mask.astype(np.float32) * np.float32(weight)


def _rewards(trajectories: Iterable[Trajectory]) -> Rewards:
    return np.asarray([t.reward for t in trajectories if t.reward is not None], dtype=np.float64)


def _compared(rewards: Rewards, estimator: Estimator, index: int) -> Rewards:
    if not (np.abs(rewards) <= _LARGEST).all():  # NaN is not, either
        raise ConfigurationError(f"expected finite rewards up to {_LARGEST:g} in task {index}, actual {rewards}")
    # The mean of equal numbers need not be equal to them.
    values = rewards * 0.0 if rewards.min() == rewards.max() else _ESTIMATORS[estimator](rewards)
    return values + 0.0  # no negative zeros


def _deviations(rewards: Rewards) -> Rewards:
    deviations: Rewards = rewards - rewards.mean()
    return deviations


def _standardised(rewards: Rewards) -> Rewards:
    standardised: Rewards = _deviations(rewards) / (rewards.std(ddof=1) + EPSILON)
    return standardised


def _left_one_out(rewards: Rewards) -> Rewards:
    compared: Rewards = rewards - (rewards.sum() - rewards) / (len(rewards) - 1)
    return compared


_ESTIMATORS: Mapping[Estimator, Callable[[Rewards], Rewards]] = {
    "grpo": _standardised,
    "grpo_mean": _deviations,
    "dr_grpo": _deviations,
    "rloo": _left_one_out,
}


def _check_estimator(estimator: object) -> None:
    if estimator not in get_args(Estimator):
        raise ConfigurationError(f"expected an estimator among {', '.join(_ESTIMATORS)}, actual {estimator!r:.100}")
