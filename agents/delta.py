"""`DeltaWriter`: what a template writes after the assistant's turn, at the cost of tokenising the new text alone.

A short conversation is rendered that ends in the new messages; what stands behind the assistant's turn in it is the
delta. That is done once for each *shape* (roles, fields), around `Traced` texts. From then on new text is put in where
those stood. A text for which the template's questions have other answers than usual is rendered itself, each time.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from toolgym.agents.chat import TemplateRefused
from toolgym.agents.codec import TokenCodec, fit
from toolgym.agents.dialect import UNNAMED, USER, Dialect, Entry, TurnKind, safe_values, sentinel
from toolgym.agents.template import TIME
from toolgym.agents.traced import Parts, Question, Slot, Trace, Traced, fill
from toolgym.envs.messages import Message, SystemMessage, ToolMessage, UserMessage

_SHAPES = 4_096  # kept at once
_OTHER = "Another text, of several words: 17 of them."
_SAID = sentinel(0)  # stands at the end of what the assistant said
Field: TypeAlias = tuple[int, str]  # number of a message, name of its field
Texts: TypeAlias = Mapping[Field, str]
Packed: TypeAlias = tuple[tuple[int, ...] | Parts, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of what a template writes for messages with certain roles and fields.

    Attributes:
        pieces: ids that are always the same, and runs of text with slots in them; None if it cannot be foreseen what
            the template does to texts. A run reaches from one control token to the next, for text is encoded together
            with what stands beside it.
        questions: what the template asked about the texts; the pieces hold where the answers are the usual ones.
        shows_tools: whether the tools are written again.
    """

    pieces: Packed | None
    questions: tuple[Question, ...]
    shows_tools: bool

    def holds(self, texts: Texts) -> bool:
        """Whether the pieces hold for these texts."""
        if self.pieces is None or not all(text.strip() for text in texts.values()):
            return False
        return all(question.holds(texts) for question in self.questions)

    def encode(self, texts: Texts, codec: TokenCodec, *, first: bool = False) -> list[int]:
        """The ids with these texts in the slots.

        Args:
            texts: for which the shape holds.
            codec: the tokenizer.
            first: whether they begin the whole sequence, as in `TokenCodec.encode_text`.
        """
        ids: list[int] = []
        for piece in self.pieces or ():
            if isinstance(piece[0], int):
                ids += piece  # all of them, then
            else:
                ids += codec.encode_text(fill(piece, texts), first=first and not ids)
        return ids


class DeltaWriter:
    """Writes deltas of one dialect. May be used from any number of threads.

    Args:
        dialect: the template and what is known about it.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._codec, self._template = dialect.codec, dialect.template
        self._shapes: dict[Any, Shape] = {}

    def write(self, kind: TurnKind, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The tokens after the one that ended the assistant's turn: the new messages, and the opening of the next turn.

        Args:
            kind: what the turn was.
            messages: the new ones, none of them the assistant's.
            tools: function schemas, for templates that write them again.

        Raises:
            TemplateRefused: the template cannot write them, or not as a continuation.
        """
        messages = [self._dialect.with_fitting_id(message) for message in messages]
        texts = {field: fit(text) for field, text in _texts(messages).items()}
        shape = self._shape(kind, messages, tools)
        if shape.holds(texts):
            return shape.encode(texts, self._codec)
        shown = tools if shape.shows_tools else ()

        def split(safe: Callable[[str], str]) -> list[int | str]:
            return self._rendered(kind, [self._dialect.entry(message, safe) for message in messages], shown)

        pieces = split(self._codec.neutralized)
        if any(self._codec.harmless(text) != text for text in texts.values()):
            refuse_controls(self._template.name, self._codec, pieces, split(self._codec.harmless))
        return self._codec.encode_pieces(pieces, first=False)

    def _shape(self, kind: TurnKind, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Shape:
        key = (kind, *((type(message), *_present(message)) for message in messages), bool(tools))
        found = self._shapes.get(key)
        if found is not None and found.shows_tools:
            key = (*key, json.dumps(tools, default=str))
            found = self._shapes.get(key)
        if found is None:
            found = self._make(kind, messages, tools)
            if len(self._shapes) >= _SHAPES:
                self._shapes.clear()
            self._shapes[key] = found
        return found

    # The slow way: a short conversation, rendered.

    def _rendered(
        self, kind: TurnKind, entries: Sequence[Entry], tools: Sequence[Mapping[str, Any]]
    ) -> list[int | str]:
        """Control tokens and text behind the assistant's turn."""
        safe = [safe_values(tool, self._codec.neutralized) for tool in tools]
        rendered = self._template.render([USER, self._turn(kind, entries), *entries], safe, opens=True)
        _, said, text = rendered.rpartition(_SAID)
        if not said:
            raise TemplateRefused(f"{self._template.name}'s chat template drops the turn before {_roles(entries)}")
        return self._behind(kind, self._codec.split(text), entries)

    def _behind(self, kind: TurnKind, pieces: list[Any], entries: Sequence[Entry]) -> list[Any]:
        """What stands behind the first token that ends a turn of this kind."""
        ending = self._dialect.endings[kind]
        for at, piece in enumerate(pieces):
            if isinstance(piece, int) and piece in (ending.stop, ending.history):
                return pieces[at + 1 :]
        raise TemplateRefused(
            f"the chat template of {self._template.name} does not end the turn before {_roles(entries)}"
        )

    def _turn(self, kind: TurnKind, entries: Sequence[Entry]) -> Entry:
        """An assistant's turn with the calls that are answered."""
        forms = self._dialect.forms
        if kind is TurnKind.TEXT or forms.calls_in_content:
            return {"role": "assistant", "content": _SAID}
        answered = [entry for entry in entries if entry["role"] == "tool"] or [{}]
        if forms.one_call:
            answered = answered[:1]
        calls = [
            self._dialect.call(
                entry.get("name") or UNNAMED, {"key": _SAID}, entry.get("tool_call_id") or f"call{k:05d}"
            )
            for k, entry in enumerate(answered)
        ]
        return {"role": "assistant", "content": forms.empty_content, "tool_calls": calls}

    # The fast way: shapes.

    def _make(self, kind: TurnKind, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Shape:
        """What is known of a shape.

        Raises:
            TemplateRefused: the template cannot write it, or drops the text of a message.
        """
        pieces, trace = self._traced(kind, messages, ())
        shows_tools = False
        if tools:
            with_tools, trace_with = self._traced(kind, messages, tools)
            shows_tools = with_tools != pieces
            pieces, trace = (with_tools, trace_with) if shows_tools else (pieces, trace)
        # Whatever is lost sight of shows when the same is done with another usual text.
        others, _ = self._traced(kind, messages, tools if shows_tools else (), _OTHER)
        if others != pieces:
            trace.unforeseen.append("depends on the text")
        slots = fields_in(pieces)
        for number, message in enumerate(messages):
            if (number, "content") not in slots and not trace.unforeseen:
                dropped = type(message).__name__
                raise TemplateRefused(f"the chat template of {self._template.name} drops the text of a {dropped}")
        foreseen = not trace.unforeseen and TIME not in slots and answerable(trace, _texts(messages))
        return Shape(packed(pieces, self._codec) if foreseen else None, tuple(trace.questions), shows_tools)

    def _traced(
        self, kind: TurnKind, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], usual: str = "x"
    ) -> tuple[list[int | Parts], Trace]:
        """What stands behind the assistant's turn: control tokens, and runs of text and slots."""
        trace = Trace(usual)
        entries = _entries(messages, {field: Traced((Slot(field),), trace) for field in _texts(messages)})
        safe = [safe_values(tool, self._codec.neutralized) for tool in tools]
        parts = list(self._template.trace([USER, self._turn(kind, entries), *entries], safe, trace))
        at = max((k for k, part in enumerate(parts) if isinstance(part, str) and _SAID in part), default=None)
        if at is None:
            raise TemplateRefused(f"{self._template.name}'s chat template drops the turn before {_roles(entries)}")
        parts = [str(parts[at]).rpartition(_SAID)[2], *parts[at + 1 :]]
        return self._behind(kind, in_pieces(parts, self._codec), entries), trace


def refuse_controls(name: str, codec: TokenCodec, pieces: Sequence[int | str], harmless: Sequence[int | str]) -> None:
    """Refuse a rendering in which a text has become a control token, whatever the template did to it.

    Raises:
        TemplateRefused: it has.
    """
    try:
        codec.check_controls(pieces, harmless)
    except ValueError as found:
        raise TemplateRefused(f"the chat template of {name} would make {found} of a text") from found


def in_pieces(parts: Sequence[str | Slot], codec: TokenCodec) -> list[int | Parts]:
    """What a traced rendering has written: control tokens, and runs of text and slots between them."""
    pieces: list[int | Parts] = []
    for part in parts:
        for piece in [part] if isinstance(part, Slot) else codec.split(part):
            if isinstance(piece, int):
                pieces.append(piece)
            elif pieces and not isinstance(pieces[-1], int):
                pieces[-1] = (*pieces[-1], piece)
            else:
                pieces.append((piece,))
    return pieces


def fields_in(pieces: Sequence[int | Parts]) -> set[Any]:
    """The fields of all slots."""
    return {part.field for piece in pieces if not isinstance(piece, int) for part in piece if isinstance(part, Slot)}


def packed(pieces: Sequence[int | Parts], codec: TokenCodec, *, first: bool = False) -> Packed:
    """Pieces in which what is always the same has been encoded, once; ``first`` as in `TokenCodec.encode_text`."""
    made: list[tuple[int, ...] | Parts] = []
    same: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            same.append(piece)
        elif any(isinstance(part, Slot) for part in piece):
            made += [tuple(same)] if same else []
            made.append(piece)
            same = []
        else:
            same += codec.encode_text("".join(map(str, piece)), first=first and not made and not same)
    return (*made, *([tuple(same)] if same else []))


def answerable(trace: Trace, texts: Texts) -> bool:
    """Whether all questions are about these texts: some are about the time."""
    try:
        for question in trace.questions:
            question.holds(texts)
    except KeyError:
        return False
    return True


def _texts(messages: Sequence[Message]) -> dict[Field, str]:
    """The texts of messages by field."""
    found: dict[Field, str] = {}
    for number, message in enumerate(messages):
        if not isinstance(message, SystemMessage | UserMessage | ToolMessage):
            raise TemplateRefused(f"a {type(message).__name__} among new messages: only the model speaks for itself")
        if not isinstance(message.content, str):
            raise TemplateRefused(f"expected the content of a message as text, actual {message.content!r:.60}")
        found[number, "content"] = message.content
        if isinstance(message, ToolMessage):
            if message.tool_call_id:
                found[number, "tool_call_id"] = message.tool_call_id
            if message.name:
                found[number, "name"] = message.name
    return found


def _present(message: Message) -> tuple[bool, ...]:
    return (bool(message.tool_call_id), bool(message.name)) if isinstance(message, ToolMessage) else ()


def _entries(messages: Sequence[Message], texts: Texts) -> list[Entry]:
    """Messages as templates take them, with other texts."""
    roles = {SystemMessage: "system", UserMessage: "user", ToolMessage: "tool"}
    entries: list[Entry] = []
    for number, message in enumerate(messages):
        entry: Entry = {"role": roles[type(message)], "content": texts[number, "content"]}
        if isinstance(message, ToolMessage):
            entry["tool_call_id"] = texts.get((number, "tool_call_id"), "")
            if message.name:
                entry["name"] = texts[number, "name"]
        entries.append(entry)
    return entries


def _roles(entries: Sequence[Entry]) -> str:
    return ", ".join(entry["role"] for entry in entries) or "nothing"
