"""Collecting: a policy, a vector of environments, and exact trajectories out of them."""

from toolgym.agents.policy import Sampling
from toolgym.rollout.admission import Admission
from toolgym.rollout.batches import BatchesFailed, BatchesInterrupted, TooStale
from toolgym.rollout.collector import Collector
from toolgym.rollout.dumps import DumpFolder
from toolgym.rollout.filters import CollectionFailed, Filters
from toolgym.rollout.groups import Group, advantages, group_trajectories, token_weights
from toolgym.rollout.limits import Limits
from toolgym.rollout.progress import Progress
from toolgym.rollout.recovery import Recovery
from toolgym.rollout.rollouts import Rollout, RolloutFailed, RolloutInterrupted, arollout, rollout
from toolgym.rollout.store import RunFolder
from toolgym.rollout.tensors import tensor_batch
from toolgym.rollout.traces import TraceFolder
from toolgym.rollout.trajectory import AlignmentError, StopReason, Trajectory, Turn
from toolgym.rollout.watchdog import Stall, Waiting, Watch

__all__ = [
    "Admission",
    "AlignmentError",
    "BatchesFailed",
    "BatchesInterrupted",
    "CollectionFailed",
    "Collector",
    "DumpFolder",
    "Filters",
    "Group",
    "Limits",
    "Progress",
    "Recovery",
    "Rollout",
    "RolloutFailed",
    "RolloutInterrupted",
    "RunFolder",
    "Sampling",
    "Stall",
    "StopReason",
    "TooStale",
    "TraceFolder",
    "Trajectory",
    "Turn",
    "Waiting",
    "Watch",
    "advantages",
    "arollout",
    "group_trajectories",
    "rollout",
    "tensor_batch",
    "token_weights",
]
