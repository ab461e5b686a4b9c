"""What an episode is worth: the views that a reward sees, and the score it gives."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

from toolgym.envs.context import EpisodeContext
from toolgym.envs.errors import ConfigurationError, EnvironmentFailure
from toolgym.envs.finite import as_finite
from toolgym.envs.messages import AssistantMessage, Message, Observation
from toolgym.envs.tasks import Task

_NUMBER = re.compile(
    r"(?<![\w./])(?<![eE][-+])"  # not the rest of a word, a fraction or an exponent
    r"[-\u2212]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
    r"(?!\d|\.\d|/\d|[eE][-+]?\d)"
)
_MAX_NUMBER_CHARS = 1_000


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode, as a reward sees it.

    Attributes:
        task: what was asked.
        messages: the whole conversation in order.
        truncated: whether a budget ended it, so that there is no final answer.
        context: what the episode is part of; where it is not given, a new one with the task's id.
    """

    task: Task
    messages: tuple[Message, ...]
    truncated: bool
    context: EpisodeContext = None  # type: ignore[assignment]  # never None once it is made

    def __post_init__(self) -> None:
        if self.context is None:
            object.__setattr__(self, "context", EpisodeContext(self.task.id))

    @property
    def answer(self) -> str | None:
        """The text of the last message if the model ended the episode with it; None if it never answered."""
        last = self.messages[-1] if self.messages else None
        if self.truncated or not isinstance(last, AssistantMessage) or last.tool_calls:
            return None
        return last.content


@dataclass(frozen=True, slots=True)
class StepView:
    """One step of an episode, as a reward for steps sees it: after the tools have answered.

    Attributes:
        task: what was asked.
        action: what the model said, its calls with their ids.
        observation: the answers to its calls, in their order; empty where there were none.
        number: which step of the episode it is, from 1.
        messages: the whole conversation in order, up to and with the observation.
        context: what the episode is part of.
    """

    task: Task
    action: AssistantMessage
    observation: Observation
    number: int
    messages: tuple[Message, ...]
    context: EpisodeContext


@dataclass(frozen=True, slots=True)
class Score:
    """A reward by its components.

    Attributes:
        components: named values, each finite.
        weights: the weight of each component in the total; 1.0 where it is not given.
        success: whether the task counts as solved; by default, whether the total reaches 1.

    Raises:
        ConfigurationError: a weight for a component that is not there.
    """

    components: Mapping[str, float]
    weights: Mapping[str, float] = field(default_factory=dict)
    success: bool | None = None

    def __post_init__(self) -> None:
        if unknown := set(self.weights) - set(self.components):
            raise ConfigurationError(f"weights for unknown components {unknown}; there are {set(self.components)}")

    @property
    def total(self) -> float:
        """The weighted sum of the components."""
        return sum((value * self.weights.get(name, 1.0) for name, value in self.components.items()), 0.0)

    @property
    def solved(self) -> bool:
        """Whether the task counts as solved."""
        return self.total >= 1.0 - 1e-9 if self.success is None else self.success


ScoreLike: TypeAlias = float | Mapping[str, float] | Score


def as_score(value: ScoreLike) -> Score:
    """A checked `Score` of plain floats, from what a reward returned: a number, named components, or a score.

    Numbers of numpy or torch count as numbers.

    Raises:
        EnvironmentFailure: (kind ``"bad_reward"``) not a number, or not finite. A reward that cannot be computed is
            a failure of the environment, never a reward of zero.
    """
    score = value if isinstance(value, Score) else Score(value if isinstance(value, Mapping) else {"reward": value})
    if not score.components or not all(isinstance(n, str) and n and n[0] != "_" for n in score.components):
        names = list(score.components)
        raise EnvironmentFailure(
            f"reward components need names not beginning with '_', actual {names}", kind="bad_reward"
        )
    components = {name: _number(f"component {name!r}", part) for name, part in score.components.items()}
    weights = {name: _number(f"weight of {name!r}", part) for name, part in score.weights.items()}
    checked = Score(components, weights, None if score.success is None else bool(score.success))
    _number("total", checked.total)
    return checked


def _number(what: str, value: object) -> float:
    number = as_finite(value)
    if number is None:
        raise EnvironmentFailure(f"the reward's {what} is {value!r:.200}, not a finite number", kind="bad_reward")
    return number


def last_number(text: str) -> Fraction | None:
    """The last plain number in a text, exactly; None if there is none, or if it has over a thousand digits.

    Thousands separators are read over: ``1,234.5`` is one number, ``1,23`` are two. Fractions and exponents
    (``5/12``, ``12e3``) are no plain numbers.
    """
    found = _NUMBER.findall(text)
    if not found or len(found[-1]) > _MAX_NUMBER_CHARS:
        return None
    return Fraction(found[-1].replace(",", "").replace("\u2212", "-"))
