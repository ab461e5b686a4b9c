"""The errors that Toolgym raises, and the record of a failure that was ours.

Three kinds of trouble are kept apart: what the *user* of the library got wrong (`ConfigurationError`), what the
*model* got wrong (`ToolError`: it becomes a tool message), and what *we* got wrong (`EnvironmentFailure` and its
relatives: they end an episode without a reward).
"""

from dataclasses import dataclass


class ToolgymError(Exception):
    """Base of every error that Toolgym raises."""


class ConfigurationError(ToolgymError, ValueError):
    """An argument of the library's user is wrong; the message names the value and the remedy."""


class ResetNeededError(ToolgymError, RuntimeError):
    """`step` was called before `reset`, or after the episode had ended."""


class ToolError(ToolgymError):
    """Raised inside a tool to tell the model what to mend; its text becomes the tool message."""


class EnvironmentFailure(ToolgymError):
    """The environment itself failed (never the model): the episode ends without a reward.

    Args:
        message: what happened.
        kind: a short stable name of the kind of failure, e.g. ``"reset_raised"``.
    """

    def __init__(self, message: str, *, kind: str = "environment_failure") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Failure:
    """What failed on our side. Its trajectory has no reward: absent, not zero.

    Attributes:
        kind: short stable name, e.g. ``"policy_failure"``, to count by.
        where: the step that failed, e.g. ``"reset"``, ``"sample"``, ``"step"``.
        message: what happened, for a person to read.
    """

    kind: str
    where: str
    message: str
