"""`Progress`: how far a run is."""

from dataclasses import dataclass

from toolgym.rollout.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        total: trajectories asked for.
        finished: trajectories that have ended, in whatever way.
        solved: of them, solved.
        failed: of them, ended by a failure of ours.
        rejected: of them, left out by a filter.
        cancelled: of them, cancelled.
        retried: how often an episode was begun anew after a failure.
        turns: messages of the model in the finished ones.
        sampled_tokens: tokens that the model sampled in the finished ones.
    """

    total: int
    finished: int = 0
    solved: int = 0
    failed: int = 0
    rejected: int = 0
    cancelled: int = 0
    retried: int = 0
    turns: int = 0
    sampled_tokens: int = 0

    def plus(self, trajectory: Trajectory, *, rejected: bool = False) -> "Progress":
        """The progress after one more trajectory."""
        return Progress(
            self.total,
            self.finished + 1,
            self.solved + trajectory.solved,
            self.failed + (trajectory.failure is not None),
            self.rejected + rejected,
            self.cancelled + trajectory.cancelled,
            self.retried + len(trajectory.earlier),
            self.turns + len(trajectory.turns),
            self.sampled_tokens + int(trajectory.loss_mask.sum()),
        )
