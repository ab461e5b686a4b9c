"""The limits of an episode: one frozen object, checked when it is made."""

from dataclasses import dataclass, fields

from toolgym.envs.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Limits:
    """What one episode may use. Every value is above zero.

    Attributes:
        max_turns: messages of the model. Calls in the last allowed turn are not run: nobody would read the answers.
        max_tool_calls: tool calls in all, those that fail included.
        max_parse_retries: how many times in a row a message in which no call can be parsed is answered with the reason.
        max_trajectory_tokens: prompt, completions and observations together.
        max_completion_tokens: of one turn.
        max_observation_tokens: of one turn's new messages with their wrapper.
        reset_timeout: seconds to begin an episode.
        sample_timeout: seconds for one answer of the policy.
        step_timeout: seconds for all tool calls of one turn, scoring included.
        episode_timeout: seconds for the whole episode.

    Raises:
        ConfigurationError: a value of zero or below, or a completion that could never fit its trajectory.
    """

    max_turns: int = 8
    max_tool_calls: int = 32
    max_parse_retries: int = 3
    max_trajectory_tokens: int = 4_096
    max_completion_tokens: int = 512
    max_observation_tokens: int = 1_024
    reset_timeout: float = 120.0
    sample_timeout: float = 600.0
    step_timeout: float = 120.0
    episode_timeout: float = 1_800.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.type in (int, "int") and not isinstance(value, int):
                raise ConfigurationError(f"expected Limits.{entry.name} as an int, actual {value!r}")
            if not value > 0:
                raise ConfigurationError(f"expected Limits.{entry.name} above 0, actual {value}")
        for part in ("max_completion_tokens", "max_observation_tokens"):
            if getattr(self, part) > self.max_trajectory_tokens:
                raise ConfigurationError(
                    f"Limits.{part} ({getattr(self, part)}) is more than a whole trajectory may have "
                    f"(max_trajectory_tokens={self.max_trajectory_tokens}): lower the one or raise the other"
                )
