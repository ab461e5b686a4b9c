"""Collecting: a policy, a vector of environments, and exact trajectories out of them."""

from toolgym.rollout.admission import Admission
from toolgym.rollout.batches import BatchesFailed, BatchesInterrupted, TooStale
from toolgym.rollout.collector import Collector
from toolgym.rollout.filters import CollectionFailed, Filters
from toolgym.rollout.groups import Group, advantages, group_trajectories, token_weights
from toolgym.rollout.limits import Limits
from toolgym.rollout.recovery import Recovery
from toolgym.rollout.rollouts import Rollout, RolloutFailed, RolloutInterrupted, arollout, rollout
from toolgym.rollout.trajectory import StopReason, Trajectory
from toolgym.rollout.watchdog import Stall, Waiting, Watch

__all__ = [
    "Admission",
    "BatchesFailed",
    "BatchesInterrupted",
    "CollectionFailed",
    "Collector",
    "Filters",
    "Group",
    "Limits",
    "Recovery",
    "Rollout",
    "RolloutFailed",
    "RolloutInterrupted",
    "Stall",
    "StopReason",
    "TooStale",
    "Trajectory",
    "Waiting",
    "Watch",
    "advantages",
    "arollout",
    "group_trajectories",
    "rollout",
    "token_weights",
]
