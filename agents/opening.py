"""`OpeningWriter`: first prompts, at the cost of tokenising the user's text alone where the rest has been seen before.

The tools and the standing instructions of an environment are the same in all of its episodes, and most of the tokens.
A conversation is rendered as a whole until the same ones come again. Then it is rendered around `Traced` texts, as
`DeltaWriter` does, and from then on the user's text is put in where those stood.
"""

import marshal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolgym.agents.chat import TemplateRefused
from toolgym.agents.codec import fit
from toolgym.agents.delta import Field, Shape, Texts, answerable, fields_in, in_pieces, packed, refuse_controls
from toolgym.agents.dialect import Dialect, Entry, safe_texts, safe_values
from toolgym.agents.template import TIME
from toolgym.agents.traced import Slot, Trace, Traced
from toolgym.envs.messages import Message, SystemMessage, UserMessage

_SHAPES = 256  # kept at once
_USUAL, _OTHER = "x", "Another text, of several words: 17 of them."
_UNKNOWN = Shape(None, (), True)  # holds for nothing


class OpeningWriter:
    """Writes first prompts of one dialect. May be used from any number of threads.

    Args:
        dialect: the template and what is known about it.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._codec, self._template = dialect.codec, dialect.template
        self._shapes: dict[Any, Shape | None] = {}  # None: seen once

    def write(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation, the model's turn opened.

        Args:
            messages: the conversation.
            tools: function schemas.

        Raises:
            TemplateRefused: the template cannot write it, or would make a control token of a text.
            ConfigurationError: something is no message.
        """
        key = _key(messages, tools)
        if key is None:
            return self._rendered(messages, tools)
        shape, texts = self._shapes.get(key), _texts(messages)
        if shape is not None and shape.holds(texts):
            return shape.encode(texts, self._codec, first=True)
        ids = self._rendered(messages, tools)
        if shape is None:
            again = key in self._shapes
            if len(self._shapes) >= _SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._shape(messages, tools, texts, ids) if again else None
        return ids

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """The whole conversation, rendered and encoded."""

        def split(safe: Callable[[str], str]) -> list[int | str]:
            entries = [self._dialect.entry(message, safe) for message in messages]
            schemas = [(safe_values if safe is neutralized else safe_texts)(tool, safe) for tool in tools]
            return self._codec.split(self._template.render(entries, schemas, opens=True))

        neutralized = self._codec.neutralized
        pieces = split(neutralized)
        refuse_controls(self._template.name, self._codec, pieces, split(self._codec.harmless))
        return self._codec.encode_pieces(pieces)

    def _shape(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], texts: Texts, ids: list[int]
    ) -> Shape:
        """What is known of openings like this one, whose ids are known."""
        try:
            (pieces, trace), (others, _) = (self._traced(messages, tools, usual) for usual in (_USUAL, _OTHER))
        except TemplateRefused:  # of a text that is none of the user's
            return _UNKNOWN
        fields = fields_in(pieces)
        if trace.unforeseen or pieces != others or fields != set(texts) or TIME in fields:
            return _UNKNOWN
        if not answerable(trace, texts):
            return _UNKNOWN
        shape = Shape(packed(pieces, self._codec, first=True), tuple(trace.questions), True)
        return shape if not shape.holds(texts) or shape.encode(texts, self._codec, first=True) == ids else _UNKNOWN

    def _traced(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], usual: str
    ) -> tuple[list[Any], Trace]:
        """The pieces of the conversation, the texts of the user traced."""
        trace = Trace(usual)
        entries: list[Entry] = [self._dialect.entry(message) for message in messages]
        for field in _texts(messages):
            entries[field[0]]["content"] = Traced((Slot(field),), trace)
        safe = [safe_values(tool, self._codec.neutralized) for tool in tools]
        return in_pieces(self._template.trace(entries, safe, trace), self._codec), trace


def _key(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[Any, ...] | None:
    """All that an opening depends on but for the user's texts; None where there is more in it than such texts."""
    roles: list[str | None] = []
    for message in messages:
        if type(message) not in (SystemMessage, UserMessage) or type(message.content) is not str:
            return None
        roles.append(message.content if isinstance(message, SystemMessage) else None)
    try:
        # Of all ways to write a value down the fastest, and no two values are written alike. In this form, what else
        # refers to a part of it does not show.
        return (marshal.dumps(list(tools), 2), *roles)
    except ValueError:  # no plain JSON, or nested too deeply
        return None


def _texts(messages: Sequence[Message]) -> dict[Field, str]:
    """The texts of the user by field."""
    return {(n, "content"): fit(m.content) for n, m in enumerate(messages) if isinstance(m, UserMessage)}
