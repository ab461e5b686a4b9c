"""The limits of an episode: one frozen object, checked when it is made."""

from dataclasses import dataclass, fields
from typing import get_args

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.finite import as_finite, as_int
from toolgym.rollout.observations import Keep


@dataclass(frozen=True, slots=True)
class Limits:
    """What one episode may use. Every value is above zero.

    Tokens are kept free in advance for what must still come, so that nothing is begun that cannot be ended: a turn is
    asked for only where ``min_completion_tokens`` are left, and a turn that may call tools leaves
    ``reserved_observation_tokens`` for their answers, and behind them ``min_completion_tokens`` for the next turn.
    Where all that cannot be left free any more, one turn gets what there is, for an answer without calls. A call whose
    answers could not be shown to the model even when they are cut away (there may be many calls in one turn) is not
    made. What any of these limits ends is scored.

    Attributes:
        max_turns: messages of the model. Calls in the last allowed turn are not run: nobody would read the answers.
        max_tool_calls: tool calls in all, those that fail included.
        max_parse_retries: how many times in a row a message in which no call can be parsed is answered with the reason.
        max_trajectory_tokens: prompt, completions and observations together; of each sample, where a record is split.
        max_completion_tokens: of one turn.
        min_completion_tokens: what a turn needs at least: with less, nothing is asked for. At most
            ``max_completion_tokens`` counts.
        reserved_observation_tokens: left free by every turn whose calls would be run, for the wrapper of the tools'
            answers; at most ``max_observation_tokens`` counts. With less than the chat format's wrapper, the last
            calls of long trajectories are not made.
        max_observation_tokens: of one turn's new messages with their wrapper (without it, where a record is split).
            Longer tool output is cut until it fits this and what is left of the trajectory, with a marker that says so.
        observation_keep: which part of over-long tool output is kept: its ``"tail"`` (where tracebacks end), its
            ``"head"``, or both ``"ends"``.
        reset_timeout: seconds to begin an episode.
        sample_timeout: seconds for one answer of the policy.
        tool_timeout: seconds for one tool call, whatever the tool itself says, if that is longer; None: the tool's own.
        step_timeout: seconds for all tool calls of one turn, scoring included; and for the chat format's work of it.
        episode_timeout: seconds that an episode may spend waiting for its policy, its environment and its tools. It
            is scored as it is then; without a single answer of the policy it is the policy's failure.

    Raises:
        ConfigurationError: a value of zero or below, or a completion that could never fit its trajectory.
    """

    max_turns: int = 8
    max_tool_calls: int = 32
    max_parse_retries: int = 3
    max_trajectory_tokens: int = 4_096
    max_completion_tokens: int = 512
    min_completion_tokens: int = 16
    reserved_observation_tokens: int = 64
    max_observation_tokens: int = 1_024
    observation_keep: Keep = "tail"
    reset_timeout: float = 120.0
    sample_timeout: float = 600.0
    tool_timeout: float | None = None
    step_timeout: float = 120.0
    episode_timeout: float = 1_800.0

    def __post_init__(self) -> None:
        if self.observation_keep not in get_args(Keep):
            raise ConfigurationError(
                f"expected Limits.observation_keep among {', '.join(get_args(Keep))}, actual {self.observation_keep!r}"
            )
        for entry in fields(self):
            if entry.name == "observation_keep":
                continue
            value = getattr(self, entry.name)
            if entry.name == "tool_timeout" and value is None:
                continue
            count = as_int(value)
            if count is not None:
                object.__setattr__(self, entry.name, count)
            elif entry.type in (int, "int"):
                raise ConfigurationError(f"expected Limits.{entry.name} as an int, actual {value!r}")
            elif not isinstance(value, float):
                raise ConfigurationError(f"expected Limits.{entry.name} as a number, actual {value!r}")
            if (as_finite(value) or 0.0) <= 0:
                raise ConfigurationError(f"expected Limits.{entry.name} above 0 and finite, actual {value}")
        for part in ("max_completion_tokens", "max_observation_tokens"):
            if getattr(self, part) > self.max_trajectory_tokens:
                raise ConfigurationError(
                    f"Limits.{part} ({getattr(self, part)}) is more than a whole trajectory may have "
                    f"(max_trajectory_tokens={self.max_trajectory_tokens}): lower the one or raise the other"
                )
