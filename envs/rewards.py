"""What an episode is worth: the view that a reward sees, and the score it gives."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

from toolgym.envs.errors import EnvironmentFailure
from toolgym.envs.messages import AssistantMessage, Message
from toolgym.envs.tasks import Task

_NUMBER = re.compile(r"(?<![\w.])[-\u2212]?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode, as a reward sees it.

    Attributes:
        task: what was asked.
        messages: the whole conversation in order.
        truncated: whether a budget ended it, so that there is no final answer.
    """

    task: Task
    messages: tuple[Message, ...]
    truncated: bool

    @property
    def answer(self) -> str | None:
        """The text of the last message if the model ended the episode with it; None if it never answered."""
        last = self.messages[-1] if self.messages else None
        if self.truncated or not isinstance(last, AssistantMessage) or last.tool_calls:
            return None
        return last.content


@dataclass(frozen=True, slots=True)
class Score:
    """A reward by its components.

    Attributes:
        components: named values, each finite.
        weights: the weight of each component in the total; 1.0 where it is not given.
        success: whether the task counts as solved; by default, whether the total reaches 1.
    """

    components: Mapping[str, float]
    weights: Mapping[str, float] = field(default_factory=dict)
    success: bool | None = None

    @property
    def total(self) -> float:
        """The weighted sum of the components."""
        return math.fsum(value * self.weights.get(name, 1.0) for name, value in self.components.items())

    @property
    def solved(self) -> bool:
        """Whether the task counts as solved."""
        return self.total >= 1.0 - 1e-9 if self.success is None else self.success


ScoreLike: TypeAlias = float | Mapping[str, float] | Score


def as_score(value: ScoreLike) -> Score:
    """A checked `Score` from what a reward returned: a number, named components, or a score.

    Raises:
        EnvironmentFailure: (kind ``"bad_reward"``) not a number, or not finite. A reward that cannot be computed is
            a failure of the environment, never a reward of zero.
    """
    score = value if isinstance(value, Score) else Score(value if isinstance(value, Mapping) else {"reward": value})
    for name, component in score.components.items():
        if not isinstance(component, int | float) or not math.isfinite(component):
            raise EnvironmentFailure(f"reward component {name!r} is {component!r}, not finite", kind="bad_reward")
    return score


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly; None if there is none. Thousands separators are read over."""
    found = _NUMBER.findall(text)
    return Fraction(found[-1].replace(",", "").replace("\u2212", "-")) if found else None
