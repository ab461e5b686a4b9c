"""Formats in which one turn is several messages, each with a header that says for whom it is: Harmony and ATEM."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from toolgym.agents.calls.syntax import Mark
from toolgym.agents.calls.tagged_calls import AtemCalls
from toolgym.agents.calls.values import Call, Tools, Unreadable, in_reasoning, invalid, load_json, make_call
from toolgym.agents.codec import MARK_OPEN, unmarked
from toolgym.envs.messages import AssistantMessage, CallFault, InvalidToolCall, ToolCall


@dataclass
class _Turn:
    """What has been read of a turn so far."""

    thoughts: list[str] = field(default_factory=list)
    spoken: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class _Part:
    """One message of a turn, marked.

    Attributes:
        header: empty if it has none.
        body: what it says.
        finished: whether it is all there: something follows it, or the turn ended.
        closed: whether it was closed itself.
        thinking: whether it stands within reasoning that was never closed.
    """

    header: str
    body: str
    finished: bool = True
    closed: bool = True
    thinking: bool = False


class ChannelGrammar(ABC):
    """Splits a turn into its messages. The prompt ends with the start of the first one's header."""

    name: ClassVar[str]
    ends: ClassVar[tuple[str, ...]]
    thinks: ClassVar[str]  # closes reasoning

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self._start, self._message = mark("<|start|>"), mark("<|message|>")
        self._end = re.compile("|".join(re.escape(mark(end)) for end in self.ends))
        self._known = self._header(rf"to=(?P<to>[^\s<{MARK_OPEN}]*)")

    @property
    def markers(self) -> tuple[str, ...]:
        """See `Grammar.markers`."""
        return ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>")

    @abstractmethod
    def _header(self, recipient: str) -> re.Pattern[str]:
        """What headers are made of; ``recipient`` is the pattern of the one."""

    @abstractmethod
    def _read(self, part: _Part, tools: Tools, turn: _Turn) -> None:
        """Add one message to a turn."""

    def parse(self, text: str, opening: str, tools: Tools, *, ended: bool) -> AssistantMessage:
        """See `Grammar.parse`."""
        turn = _Turn()
        for part in self._parts(text, ended=ended):
            self._read(part, tools, turn)
        thoughts, spoken = (
            "\n".join(filter(None, (unmarked(said).strip() for said in parts)))
            for parts in (turn.thoughts, turn.spoken)
        )
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
            written = piece.lstrip().removeprefix("assistant") if number else piece
            header, message, rest = written.partition(self._message)
            strange = self._known.sub("", header).strip()
            if strange and not message:
                header, rest = "", written  # said without a header
            elif strange:
                parts.append(_Part("", strange))
            found = self._end.search(rest)
            body, after = (rest, "") if found is None else (rest[: found.start()], rest[found.end() :])
            closed = found is not None or number < len(pieces) - 1
            if written.strip():
                parts.append(_Part(header, body, bool(message) and (closed or ended), closed))
            parts.append(_Part("", after))
        return parts

    def _recipient(self, part: _Part) -> str | None:
        return next((found["to"] for found in self._known.finditer(part.header) if found["to"] is not None), None)

    def _raw(self, part: _Part) -> str:
        return unmarked(f"{part.header}{self._message}{part.body}" if part.body else part.header).strip()


class HarmonyGrammar(ChannelGrammar):
    """gpt-oss: ``<|channel|>analysis<|message|>...<|end|><|start|>assistant to=functions.f<|channel|>commentary ...``.

    The format is described in OpenAI's "Harmony response format".
    """

    name = "harmony"
    ends = ("<|end|>", "<|call|>", "<|return|>")
    thinks = "<|end|>"

    def _header(self, recipient: str) -> re.Pattern[str]:
        channel, constrain = (re.escape(self.mark(token)) for token in ("<|channel|>", "<|constrain|>"))
        self._again = re.compile(
            rf"({channel}[^{MARK_OPEN}]*(?:{constrain}[^{MARK_OPEN}]*)?){re.escape(self._message)}"
        )
        return re.compile(rf"{recipient}|{channel}\s*(?P<channel>\w*)|{constrain}\s*\w*|\b(?:json|code)\b")

    def _read(self, part: _Part, tools: Tools, turn: _Turn) -> None:
        for message in self._messages(part):
            recipient = self._recipient(message)
            if recipient is not None and recipient not in ("user", "assistant"):
                call = self._call(recipient.removeprefix("functions."), message)
                turn.calls.append(in_reasoning(call, self.thinks) if message.thinking else call)
            else:
                (turn.thoughts if self._thinks(message) else turn.spoken).append(message.body)

    def _thinks(self, part: _Part) -> bool:
        return any(found["channel"] == "analysis" for found in self._known.finditer(part.header))

    def _messages(self, part: _Part) -> list[_Part]:
        """A message, and those that begin in it with a channel, the end and the start between them forgotten."""
        messages = [part]
        if self._recipient(part) is not None or self._message not in part.body:
            return messages
        body, *rest = self._again.split(part.body)
        messages = [_Part(part.header, body)]
        for at in range(0, len(rest), 2):
            messages.append(_Part(rest[at], rest[at + 1], part.finished, thinking=self._thinks(messages[-1])))
            if self._recipient(messages[-1]) is not None:
                last = messages.pop()
                body = last.body + "".join(
                    f"{text}{self._message}" if odd % 2 == 0 else text for odd, text in enumerate(rest[at + 2 :])
                )
                return [*messages, _Part(last.header, body, last.finished, thinking=last.thinking)]
        return messages

    def _call(self, name: str, part: _Part) -> Call:
        raw = self._raw(part)
        if not part.finished:
            return InvalidToolCall(raw, "The call was cut off.", name or None, fault=CallFault.CUT_OFF)
        if not name.strip("."):
            return InvalidToolCall(raw, "The call has no name after to=functions.", fault=CallFault.NO_NAME)
        try:
            return make_call(raw, name, load_json(unmarked(part.body).strip() or "{}"))
        except Unreadable as problem:
            return invalid(raw, problem, name)


class AtemGrammar(ChannelGrammar):
    """``to=self<|message|>...<|eom|><|start|>assistant to=f<|message|><atem:function_calls>...``."""

    name = "atem"
    ends = ("<|eom|>", "<|eot|>")
    thinks = "<|eom|>"

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        self._syntax = AtemCalls(mark)

    def _header(self, recipient: str) -> re.Pattern[str]:
        return re.compile(recipient)

    def closing(self, text: str, opening: str) -> str:
        """See `Grammar.closing`."""
        return super().closing(text, opening) or self._syntax.closing(text.rpartition(self._message)[2])

    def _read(self, part: _Part, tools: Tools, turn: _Turn) -> None:
        recipient = self._recipient(part)
        if recipient == "self":
            turn.thoughts.append(part.body)
            if not part.closed:
                drafts = self._syntax.find(part.body, tools, ended=part.finished)[1]
                turn.calls += (in_reasoning(call, self.thinks) for call in drafts)
            return
        content, calls = self._syntax.find(part.body, tools, ended=part.finished)
        if recipient not in (None, "user") and not calls:
            # Addressed to a tool, but not in the form of a call.
            fault = CallFault.MALFORMED if part.finished else CallFault.CUT_OFF
            reason = "The call has no <atem:function_calls> block." if part.finished else "The call was cut off."
            turn.calls.append(InvalidToolCall(self._raw(part), reason, recipient or None, fault=fault))
            return
        turn.spoken.append(content)
        turn.calls += calls if recipient in (None, "user") else (_named(call, recipient) for call in calls)


def _named(call: Call, recipient: str | None) -> Call:
    """A call that could not be read for its name either has the one of the tool that its message is addressed to."""
    return replace(call, name=recipient or None) if isinstance(call, InvalidToolCall) and not call.name else call
