"""Formats in which one turn is several messages, each with a header that says for whom it is: Harmony and ATEM."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from toolgym.agents.calls.syntax import Mark
from toolgym.agents.calls.tagged_calls import AtemCalls
from toolgym.agents.calls.values import Call, Tools, Unreadable, invalid, load_json, make_call
from toolgym.agents.codec import unmarked
from toolgym.envs.messages import AssistantMessage, CallFault, InvalidToolCall, ToolCall


@dataclass
class _Turn:
    """What has been read of a turn so far."""

    thoughts: list[str] = field(default_factory=list)
    spoken: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class _Part:
    """One message of a turn: its header, its body, and whether it was finished. Both are unmarked."""

    header: str
    body: str
    finished: bool


class ChannelGrammar(ABC):
    """Splits a turn into its messages. The prompt ends with the start of the first one's header."""

    name: ClassVar[str]
    ends: ClassVar[tuple[str, ...]]

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self._start, self._message = mark("<|start|>"), mark("<|message|>")
        self._end = re.compile("|".join(re.escape(mark(end)) for end in self.ends))

    @property
    def markers(self) -> tuple[str, ...]:
        """See `Grammar.markers`."""
        return ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>")

    @abstractmethod
    def _read(self, part: _Part, tools: Tools, turn: _Turn) -> None:
        """Add one message to a turn."""

    def parse(self, text: str, opening: str, tools: Tools, *, ended: bool) -> AssistantMessage:
        """See `Grammar.parse`."""
        turn = _Turn()
        for part in self._parts(text, ended=ended):
            self._read(part, tools, turn)
        thoughts, spoken = ("\n".join(filter(None, map(str.strip, parts))) for parts in (turn.thoughts, turn.spoken))
        return AssistantMessage(spoken, tuple(turn.calls), thoughts or None)

    def closing(self, text: str, opening: str) -> str:
        """See `Grammar.closing`."""
        last = text.rpartition(self._start)[2]
        return "" if self._message in last else "<|message|>"

    def write(self, calls: Sequence[ToolCall]) -> str | None:
        """See `Grammar.write`."""
        return None

    def _parts(self, text: str, *, ended: bool) -> list[_Part]:
        parts: list[_Part] = []
        pieces = text.split(self._start)
        for number, piece in enumerate(pieces):
            header, _, rest = piece.partition(self._message)
            if self._message not in piece:
                header, rest = ("", piece) if number == 0 and not self._is_header(piece) else (piece, "")
            found = self._end.search(rest)
            body, after = (rest, "") if found is None else (rest[: found.start()], rest[found.end() :])
            finished = self._message in piece and (found is not None or number < len(pieces) - 1 or ended)
            if piece.strip() or number == 0:
                parts.append(_Part(unmarked(header).strip(), unmarked(body), finished))
            if after.strip():
                parts.append(_Part("", unmarked(after), True))
        return parts

    @abstractmethod
    def _is_header(self, text: str) -> bool:
        """Whether a text without ``<|message|>`` is a header that was cut, rather than something said without one."""


class HarmonyGrammar(ChannelGrammar):
    """gpt-oss: ``<|channel|>analysis<|message|>...<|end|><|start|>assistant to=functions.f<|channel|>commentary ...``.

    The format is described in OpenAI's "Harmony response format".
    """

    name = "harmony"
    ends = ("<|end|>", "<|call|>", "<|return|>")
    _recipient = re.compile(r"to=([^\s<]+)")
    _channel = re.compile(r"<\|channel\|>\s*(\w+)")

    def _is_header(self, text: str) -> bool:
        return self.mark("<|channel|>") in text or text.lstrip().startswith("to=")

    def _read(self, part: _Part, tools: Tools, turn: _Turn) -> None:
        recipient, channel = self._recipient.search(part.header), self._channel.search(part.header)
        if recipient is not None and recipient[1] not in ("user", "assistant"):
            turn.calls.append(self._call(recipient[1].removeprefix("functions."), part))
        elif channel is not None and channel[1] == "analysis":
            turn.thoughts.append(part.body)
        else:
            turn.spoken.append(part.body)

    def _call(self, name: str, part: _Part) -> Call:
        raw = f"{part.header}<|message|>{part.body}"
        if not part.finished:
            return InvalidToolCall(raw, "The call was cut off.", name, fault=CallFault.CUT_OFF)
        if not name.strip("."):
            return InvalidToolCall(raw, "The call has no name after to=functions.", fault=CallFault.NO_NAME)
        try:
            return make_call(raw, name, load_json(part.body.strip() or "{}"))
        except Unreadable as problem:
            return invalid(raw, problem, name)


class AtemGrammar(ChannelGrammar):
    """``to=self<|message|>...<|eom|><|start|>assistant to=f<|message|><atem:function_calls>...``."""

    name = "atem"
    ends = ("<|eom|>", "<|eot|>")
    _recipient = re.compile(r"to=(\S+)")

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        self._syntax = AtemCalls(mark)

    def _is_header(self, text: str) -> bool:
        return text.lstrip().startswith("to=") and "\n" not in text.strip()

    def closing(self, text: str, opening: str) -> str:
        """See `Grammar.closing`."""
        return super().closing(text, opening) or self._syntax.closing(text.rpartition(self._message)[2])

    def _read(self, part: _Part, tools: Tools, turn: _Turn) -> None:
        found = self._recipient.search(part.header)
        recipient = "user" if found is None else found[1]
        if recipient == "self":
            turn.thoughts.append(part.body)
            return
        content, calls = self._syntax.find(part.body, tools, ended=part.finished)
        if recipient != "user" and not calls:
            # Addressed to a tool, but not in the form of a call.
            fault = CallFault.MALFORMED if part.finished else CallFault.CUT_OFF
            reason = "The call has no <atem:function_calls> block." if part.finished else "The call was cut off."
            turn.calls.append(InvalidToolCall(f"{part.header}<|message|>{part.body}", reason, recipient, fault=fault))
            return
        turn.spoken.append(content)
        turn.calls += calls
