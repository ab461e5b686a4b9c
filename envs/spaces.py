"""Gymnasium spaces of chat messages.

Gymnasium's own spaces do not fit chat: ``Text`` has a fixed alphabet and length, and checking a conversation against
``Sequence`` costs milliseconds. These check types only, and sample small honest examples.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from toolgym.envs.messages import (
    AssistantMessage,
    InvalidToolCall,
    Message,
    Observation,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)

_WORDS = ("yes", "no", "forty-two", "the answer is 7", "let me think", "done", "I do not know", "")


class MessagesSpace(gymnasium.Space[Observation]):
    """Tuples of messages: what an environment says between two actions. No shape and no dtype.

    Args:
        seed: for `sample`.
    """

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Messages do not flatten into arrays."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> Observation:
        """One to three random system, user or tool messages."""
        kinds = (SystemMessage, UserMessage, ToolMessage)
        count = int(self.np_random.integers(1, 4))
        return tuple(kinds[int(self.np_random.integers(3))](_word(self.np_random)) for _ in range(count))

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a tuple of messages."""
        return isinstance(x, tuple) and all(isinstance(entry, Message) for entry in x)

    def __repr__(self) -> str:
        return "MessagesSpace()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessagesSpace)

    __hash__ = None  # type: ignore[assignment]  # as all Gymnasium spaces: compared by value, never hashed


class AssistantMessageSpace(gymnasium.Space[AssistantMessage | None]):
    """Assistant messages: the actions of a tool environment. No shape and no dtype.

    Args:
        tools: names of tools, so that samples call them (with empty arguments) half of the time.
        optional: whether ``None`` belongs to the space: in a vector of environments, no action for that slot.
        seed: for `sample`.
    """

    def __init__(
        self, tools: Sequence[str] = (), *, optional: bool = False, seed: int | np.random.Generator | None = None
    ) -> None:
        super().__init__(None, None, seed)
        self.tools, self.optional = tuple(tools), optional

    @property
    def is_np_flattenable(self) -> bool:
        """Messages do not flatten into arrays."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> AssistantMessage:
        """A random message, with a call of one of the tools half of the time."""
        content = _word(self.np_random)
        if not self.tools or self.np_random.random() < 0.5:
            return AssistantMessage(content)
        name = self.tools[int(self.np_random.integers(len(self.tools)))]
        return AssistantMessage(content, (ToolCall(name, {}),))

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is an assistant message with calls of the right types (or None, where that is allowed)."""
        if x is None:
            return self.optional
        return (
            isinstance(x, AssistantMessage)
            and isinstance(x.content, str)
            and isinstance(x.reasoning, str | None)
            and isinstance(x.tool_calls, tuple)
            and all(isinstance(call, ToolCall | InvalidToolCall) for call in x.tool_calls)
        )

    def __repr__(self) -> str:
        return f"AssistantMessageSpace(tools={self.tools!r}, optional={self.optional})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, AssistantMessageSpace) and self.tools == other.tools and self.optional == other.optional
        )

    __hash__ = None  # type: ignore[assignment]  # as all Gymnasium spaces: compared by value, never hashed


def _word(rng: np.random.Generator) -> str:
    return _WORDS[int(rng.integers(len(_WORDS)))]
