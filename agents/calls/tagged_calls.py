"""Calls in tags: Qwen3-Coder's and Qwen3.5's (Nemotron 3 writes the same), GLM's, and ATEM invocations."""

import re
from abc import abstractmethod
from typing import Any, ClassVar

from toolgym.agents.calls.syntax import BlockSyntax, Mark
from toolgym.agents.calls.values import Call, Tools, Unreadable, make_call, parameter, typed
from toolgym.agents.codec import MARK_OPEN, unmarked
from toolgym.envs.messages import CallFault


class _PairsSyntax(BlockSyntax):
    """Arguments one after the other, each a key and a bare text whose type the tool's schema knows.

    A value ends where its closing tag is followed by what may follow it, so that it may contain that tag. Another
    block's opening marker is text within a value, unless a call begins there.
    """

    framed: ClassVar[bool] = False  # whether a newline sets values off from their tags on either side
    _head: re.Pattern[str]  # a call up to its first pair
    _pair: re.Pattern[str]
    _tail: re.Pattern[str]  # a call behind its last pair

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        self._make(re.escape(self._closes))
        self._next = re.compile(re.escape(self._opens) + self._head.pattern)

    @abstractmethod
    def _make(self, closes: str) -> None:
        """Make the patterns; ``closes`` is the one of the closing marker."""

    def whole(self, text: str, at: int) -> int | None:
        """See `BlockSyntax.whole`."""
        if self._head.match(text, at) is None:
            return None
        following = self._next.search(text, at)
        limit = len(text) if following is None else following.start()
        end = None
        while (head := self._head.match(text, at, limit)) is not None:
            at = head.end()
            while (pair := self._pair.match(text, at, limit)) is not None:
                at = pair.end()
            tail = self._tail.match(text, at, limit)
            if tail is None:
                return None
            at = end = tail.end()
        return end

    def _arguments(self, text: str, at: int, name: str, tools: Tools) -> tuple[dict[str, Any], int]:
        """The pairs from here on, and where they end."""
        found: dict[str, Any] = {}
        while (pair := self._pair.match(text, at)) is not None:
            key, value = unmarked(pair["key"]).strip(), unmarked(pair["value"])
            if key in found:
                raise Unreadable(CallFault.BAD_ARGUMENTS, f"The call has the argument {key!r} twice.", name)
            if self.framed:
                value = value.removeprefix("\n").removesuffix("\n")
            found[key] = typed(value, parameter(tools, name, key))
            at = pair.end()
        return found, at


def _malformed(rest: str, name: str | None) -> Unreadable:
    return Unreadable(CallFault.MALFORMED, f"The call is malformed at {unmarked(rest).strip()[:40]!r}.", name)


class XmlCalls(_PairsSyntax):
    r"""``<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>``."""

    name, opens, closes, framed = "qwen-xml", "<tool_call>", "</tool_call>", True

    def _make(self, closes: str) -> None:
        # These tags are no tokens of their own in any model of this family.
        self._head = re.compile(r"\s*<function=(?P<name>[^>\n]*)>")
        follows = rf"(?=\s*(?:<parameter=[^>\n]+>|</function>\s*(?:{closes}|\Z)))"
        self._pair = re.compile(rf"\s*<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>{follows}", re.DOTALL)
        self._tail = re.compile(r"\s*</function>")

    def read(self, body: str, tools: Tools) -> list[Call]:
        """See `BlockSyntax.read`."""
        head = self._head.search(body)
        if head is None:
            raise Unreadable(CallFault.NO_NAME, "The call has no <function=name>.")
        name = unmarked(head["name"]).strip()
        if not name:
            raise Unreadable(CallFault.NO_NAME, "The call has no name in <function=name>.")
        if head.start() > 0:
            raise _malformed(body, name)
        arguments, at = self._arguments(body, head.end(), name, tools)
        rest = body[at:].strip()
        if "</function>" not in rest:
            raise Unreadable(CallFault.MALFORMED, "The call has no closing </function>.", name)
        if rest != "</function>":
            raise _malformed(rest, name)
        return [make_call(unmarked(body).strip(), name, arguments)]


class GlmCalls(_PairsSyntax):
    r"""``<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>``."""

    name, opens, closes = "glm", "<tool_call>", "</tool_call>"
    _tags = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def _make(self, closes: str) -> None:
        key, key_end, value, value_end = (re.escape(self.mark(tag)) for tag in self._tags)
        self._head = re.compile(rf"\s*(?P<name>[^\s<>{MARK_OPEN}]+)\s*(?={key}|{closes}|\Z)")
        follows = rf"(?=\s*(?:{key}|{closes}|\Z))"
        self._pair = re.compile(
            rf"\s*{key}(?P<key>[^<{MARK_OPEN}]*){key_end}\s*{value}(?P<value>.*?){value_end}{follows}", re.DOTALL
        )
        self._tail = re.compile(r"\s*")

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax.markers`."""
        return (self.opens, self.closes, *self._tags)

    def read(self, body: str, tools: Tools) -> list[Call]:
        """See `BlockSyntax.read`."""
        head = self._head.match(body)
        if head is None:
            words = unmarked(body.partition(self.mark("<arg_key>"))[0]).strip()
            if not words:
                raise Unreadable(CallFault.NO_NAME, "The call has no name.")
            raise Unreadable(CallFault.MALFORMED, f"The call is malformed: {words[:40]!r} is no name.")
        arguments, at = self._arguments(body, head.end(), head["name"], tools)
        if body[at:].strip() or "" in arguments:
            raise _malformed(body[at:] or body, head["name"])
        return [make_call(unmarked(body).strip(), head["name"], arguments)]


class AtemCalls(_PairsSyntax):
    r"""``<atem:function_calls>\n<atem:invoke name="n">\n<atem:parameter name="k">value</atem:parameter>...``.

    "Spaces for string values are not stripped", its template says to the model.
    """

    name, opens, closes = "atem", "<atem:function_calls>", "</atem:function_calls>"

    def _make(self, closes: str) -> None:
        self._head = re.compile(r'\s*<atem:invoke name="(?P<name>[^"\n]*)">')
        follows = rf"(?=\s*(?:<atem:parameter |</atem:invoke>\s*(?:<atem:invoke |{closes}|\Z)))"
        self._pair = re.compile(
            rf'\s*<atem:parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</atem:parameter>{follows}', re.DOTALL
        )
        self._tail = re.compile(r"\s*</atem:invoke>")

    def read(self, body: str, tools: Tools) -> list[Call]:
        """See `BlockSyntax.read`."""
        calls: list[Call] = []
        at = 0
        while (head := self._head.match(body, at)) is not None:
            name = head["name"].strip()
            if not name:
                raise Unreadable(CallFault.NO_NAME, "The call has no name.")
            arguments, end = self._arguments(body, head.end(), name, tools)
            tail = self._tail.match(body, end)
            if tail is None:
                raise _malformed(body[end:], name)
            calls.append(make_call(unmarked(body[at : tail.end()]).strip(), name, arguments))
            at = tail.end()
        if body[at:].strip() or not calls:
            raise _malformed(body[at:], None)
        return calls
