"""`DeltaWriter`: what a template writes after the assistant's turn, at the cost of tokenising the new text alone.

A short conversation is rendered that ends in the new messages; what stands behind the assistant's turn in it is the
delta. That is done once for each *shape* (roles, fields), around sentinels. From then on new text is put in where the
sentinels stood, after it has been proven on probe texts what the template does to it on the way: strips it, writes it
as JSON. Text that contains something the template may look for is rendered itself, each time.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from toolgym.agents.chat import TemplateRefused
from toolgym.agents.codec import TokenCodec, fit
from toolgym.agents.dialect import USER, Dialect, Entry, TurnKind, safe_values, sentinel
from toolgym.envs.messages import Message, SystemMessage, ToolMessage, UserMessage

_SHAPES = 4_096  # kept at once
_SAID, _TIME = sentinel(0), sentinel(999)  # stand at the end of what the assistant said, and for the time
Field: TypeAlias = tuple[int, str]  # number of a message, name of its field
Texts: TypeAlias = Mapping[Field, str]


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_TRANSFORMS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    lambda text: text.strip(),
    _json,
    lambda text: _json(text.strip()),
    lambda text: text.rstrip(),
    lambda text: text.lstrip(),
    lambda text: text.strip("\n"),
)
_PROBES = (
    "a", " a ", "\n a\tb \n", 'say "x" \\ \u00e9 \u6f22 \U0001f600 ?', '{"a": [1]}', "[1, 2]", "12", "true", "null",
    "<b>&amp;</b>", "a\r\nb", "it's", "- a\n- b", "x" * 3_000, "word " * 200 + "\n",
)  # fmt: skip
# A template that looks for one of these (to escape it, mostly) does not see more in it than in any other text.
_SMALL = 2


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a text goes, and what becomes of it."""

    field: Field
    transform: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The delta of one shape: ids that are always the same, and runs of text with slots in them.

    A run reaches from one control token to the next, for text is encoded together with what stands beside it.
    """

    pieces: tuple[tuple[int, ...] | tuple[str | Slot, ...], ...]

    def encode(self, texts: Texts, codec: TokenCodec) -> list[int]:
        """The ids of the delta with these texts in its slots."""
        ids: list[int] = []
        for piece in self.pieces:
            if isinstance(piece[0], int):
                ids += piece  # all of them, then
            else:
                ids += codec.encode_text(_filled(piece, texts))
        return ids


def _filled(run: Sequence[int | str | Slot], texts: Texts) -> str:
    return "".join(part.transform(texts[part.field]) if isinstance(part, Slot) else str(part) for part in run)


class DeltaWriter:
    """Writes deltas of one dialect. May be used from any number of threads.

    Args:
        dialect: the template and what is known about it.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._codec, self._template = dialect.codec, dialect.template
        self._shapes: dict[Any, Skeleton | None] = {}
        constants = dialect.template.constants
        self._constants = tuple(text for text in constants if len(text) > _SMALL)
        self._small = tuple(text for text in constants if len(text) <= _SMALL)

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
        shape = (kind, *((type(m), *_present(m)) for m in messages), self._tools_key(tools))
        if shape not in self._shapes:
            if len(self._shapes) >= _SHAPES:
                self._shapes.clear()
            self._shapes[shape] = self._make(kind, messages, tools)
        skeleton = self._shapes.get(shape)
        if skeleton is not None and all(self._ordinary(text) for text in texts.values()):
            return skeleton.encode(texts, self._codec)
        return self._encoded(self._rendered(kind, [self._dialect.entry(m) for m in messages], tools))

    def _encoded(self, pieces: Sequence[int | str]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._codec.encode_text(piece)
        return ids

    def _ordinary(self, text: str) -> bool:
        """Whether a template can see nothing in a text but text."""
        if not text.strip() or len(text) >= self._template.longest_plain:
            return False
        return not any(constant in text for constant in self._constants)

    def _tools_key(self, tools: Sequence[Mapping[str, Any]]) -> str:
        return json.dumps(tools) if tools and self._dialect.repeats_tools else ""

    # The slow way: a short conversation, rendered.

    def _rendered(
        self, kind: TurnKind, entries: Sequence[Entry], tools: Sequence[Mapping[str, Any]]
    ) -> list[int | str]:
        """Control tokens and text behind the assistant's turn."""
        answers = sum(entry["role"] == "tool" for entry in entries)
        if kind is TurnKind.CALLS and answers > 1 and self._names_calls:
            return self._one_by_one(entries, tools)
        return self._behind(kind, entries, tools, opens=True)

    def _one_by_one(self, entries: Sequence[Entry], tools: Sequence[Mapping[str, Any]]) -> list[int | str]:
        """Each answer behind its own call: these templates write the name of the last call beside each answer."""
        pieces: list[int | str] = []
        for number, entry in enumerate(entries):
            last = number == len(entries) - 1
            kind = TurnKind.CALLS if entry["role"] == "tool" else TurnKind.TEXT
            pieces += self._behind(kind, [entry], tools, opens=last)
        return pieces

    @functools.cached_property
    def _names_calls(self) -> bool:
        """Whether answers show the name of the message's only call rather than their own."""
        if not self._dialect.forms.one_call:
            return False
        answer = {"role": "tool", "name": sentinel(1), "tool_call_id": sentinel(2), "content": sentinel(3)}
        text = self._text(TurnKind.CALLS, [answer, {**answer, "name": sentinel(4)}], (), opens=False)
        single = self._text(TurnKind.CALLS, [answer], (), opens=False)
        return text.count(sentinel(1)) != single.count(sentinel(1))

    def _behind(
        self, kind: TurnKind, entries: Sequence[Entry], tools: Sequence[Mapping[str, Any]], *, opens: bool
    ) -> list[int | str]:
        pieces = self._codec.split(self._text(kind, entries, tools, opens=opens))
        ending = self._dialect.endings[kind]
        for at, piece in enumerate(pieces):
            if isinstance(piece, int) and piece in (ending.stop, ending.history):
                return pieces[at + 1 :]
        raise TemplateRefused(
            f"the chat template of {self._template.name} does not end the turn before {_roles(entries)}"
        )

    def _text(
        self,
        kind: TurnKind,
        entries: Sequence[Entry],
        tools: Sequence[Mapping[str, Any]],
        *,
        opens: bool = True,
        time: str | None = None,
    ) -> str:
        """What the template writes after the last thing that the assistant said."""
        said = self._turn(kind, entries)
        tools = [safe_values(tool, self._codec.neutralized) for tool in tools] if self._dialect.repeats_tools else ()
        rendered = self._template.render([USER, said, *entries], tools, opens=opens, time=time)
        if _SAID not in rendered:
            raise TemplateRefused(f"the chat template of {self._template.name} drops the turn before {_roles(entries)}")
        return rendered.rpartition(_SAID)[2]

    def _turn(self, kind: TurnKind, entries: Sequence[Entry]) -> Entry:
        """An assistant's turn with the calls that are answered."""
        forms = self._dialect.forms
        if kind is TurnKind.TEXT or forms.calls_in_content:
            return {"role": "assistant", "content": _SAID}
        answered = [entry for entry in entries if entry["role"] == "tool"] or [{}]
        if forms.one_call:
            answered = answered[:1]
        calls = [
            self._dialect.call(entry.get("name") or "f", {"key": _SAID}, entry.get("tool_call_id") or f"call{k:05d}")
            for k, entry in enumerate(answered)
        ]
        return {"role": "assistant", "content": forms.empty_content, "tool_calls": calls}

    # The fast way: skeletons.

    def _make(self, kind: TurnKind, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Skeleton | None:
        """The skeleton of a shape; None if no transform explains what the template does to some text.

        Raises:
            TemplateRefused: the template drops the text of a message.
        """
        fields = list(_texts(messages))
        names = {field: sentinel(number) for number, field in enumerate(fields, start=1)}

        def rendered(texts: Texts) -> list[int | str]:
            return self._rendered(kind, _entries(messages, texts), tools)

        try:
            bare = rendered(names)
        except TemplateRefused:
            return None  # it is rendered, and perhaps refused, with its own text
        written = "".join(piece for piece in bare if isinstance(piece, str))
        for field in fields:
            if field[1] == "content" and names[field] not in written:
                dropped = type(messages[field[0]]).__name__
                raise TemplateRefused(f"the chat template of {self._template.name} drops the text of a {dropped}")
        if self._template.tells_time and _TIME in self._text(kind, _entries(messages, names), tools, time=_TIME):
            return None
        transforms: dict[Field, Callable[[str], str]] = {}
        for field in fields:
            found = self._transform(field, names, bare, rendered)
            if found is None:
                return None
            transforms[field] = found
        return self._skeleton(bare, {names[field]: Slot(field, transforms[field]) for field in fields})

    def _skeleton(self, pieces: Sequence[int | str], slots: Mapping[str, Slot]) -> Skeleton:
        made: list[tuple[int, ...] | tuple[str | Slot, ...]] = []
        same: list[int] = []
        for piece in pieces:
            if isinstance(piece, str) and any(name in piece for name in slots):
                parts = re.split(f"({'|'.join(map(re.escape, slots))})", piece)
                made += [tuple(same)] if same else []
                made.append(tuple(slots.get(part, part) for part in parts if part != ""))
                same = []
            else:
                same += self._encoded([piece])
        made += [tuple(same)] if same else []
        return Skeleton(tuple(made))

    def _transform(
        self, field: Field, names: Texts, bare: Sequence[int | str], rendered: Callable[[Texts], list[int | str]]
    ) -> Callable[[str], str] | None:
        probes = self._probes() if field[1] == "content" else ("f", "get_x", "a.b", "call-1_2")
        seen: list[tuple[str, list[int | str]]] = []
        for probe in probes:
            try:
                seen.append((probe, rendered({**names, field: self._codec.neutralized(probe)})))
            except TemplateRefused:
                if field[1] == "content":
                    return None
        if not seen:
            return _TRANSFORMS[0]  # an id that must have a certain form
        for transform in _TRANSFORMS:
            filled = ((probe, _replaced(bare, names[field], transform(probe))) for probe, _ in seen)
            if all(ours == theirs for (_, ours), (_, theirs) in zip(filled, seen, strict=True)):
                return transform
        return None

    def _probes(self) -> tuple[str, ...]:
        small = [text for a in self._small for text in (a, f"x{a}y", f"{a}y", f"x{a}", a * 2)]
        pairs = [f"{a}x{b}" for a in self._small[:8] for b in self._small[:8]]
        return (*_PROBES, *(text for text in (*small, *pairs) if text.strip()))


def _texts(messages: Sequence[Message]) -> dict[Field, str]:
    """The texts of messages by field."""
    found: dict[Field, str] = {}
    for number, message in enumerate(messages):
        if not isinstance(message, SystemMessage | UserMessage | ToolMessage):
            raise TemplateRefused(f"a {type(message).__name__} among new messages: only the model speaks for itself")
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


def _replaced(pieces: Sequence[int | str], name: str, text: str) -> list[int | str]:
    return [piece if isinstance(piece, int) else piece.replace(name, text) for piece in pieces]


def _roles(entries: Sequence[Entry]) -> str:
    return ", ".join(entry["role"] for entry in entries) or "nothing"
