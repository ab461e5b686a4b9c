"""Calls in tags: Qwen3-Coder's and Qwen3.5's (Nemotron 3 writes the same), GLM's, and ATEM invocations."""

import re
from typing import Any

from toolgym.agents.calls.syntax import BlockSyntax, Mark
from toolgym.agents.calls.values import Call, Tools, Unreadable, make_call, parameter, typed
from toolgym.agents.codec import unmarked
from toolgym.envs.messages import CallFault


class _PairsSyntax(BlockSyntax):
    """Arguments one after the other, each a key and a bare text whose type the tool's schema knows.

    A value ends where its closing tag is followed by what may follow it, so that it may contain that tag.
    """

    _pair: re.Pattern[str]

    def _arguments(self, text: str, name: str, tools: Tools) -> dict[str, Any]:
        found: dict[str, Any] = {}
        at = 0
        while (pair := self._pair.match(text, at)) is not None:
            key = unmarked(pair["key"]).strip()
            found[key] = typed(unmarked(_framed(pair["value"])), parameter(tools, name, key))
            at = pair.end()
        if rest := unmarked(text[at:]).strip():
            raise Unreadable(CallFault.MALFORMED, f"The call is malformed at {rest[:40]!r}.")
        return found


def _framed(value: str) -> str:
    """A value without the newline that sets it off from its tags on either side."""
    return value.removeprefix("\n").removesuffix("\n")


class XmlCalls(_PairsSyntax):
    r"""``<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>``."""

    name, opens, closes, last = "qwen-xml", "<tool_call>", "</tool_call>", "</function>"

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        # These tags are no tokens of their own in any model of this family.
        self._function = re.compile(r"\s*<function=(?P<name>[^>\n]*)>(?P<body>.*)</function>\s*\Z", re.DOTALL)
        follows = r"(?=\s*(?:<parameter=[^>\n]+>|\Z))"
        self._pair = re.compile(rf"\s*<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>{follows}", re.DOTALL)

    def read(self, body: str, tools: Tools) -> list[Call]:
        """See `BlockSyntax.read`."""
        found = self._function.match(body)
        if found is None:
            if "<function=" not in body:
                raise Unreadable(CallFault.NO_NAME, "The call has no <function=name>.")
            raise Unreadable(CallFault.MALFORMED, "The call has no closing </function>.")
        name = unmarked(found["name"]).strip()
        if not name:
            raise Unreadable(CallFault.NO_NAME, "The call has no name in <function=name>.")
        return [make_call(unmarked(body).strip(), name, self._arguments(found["body"], name, tools))]


class GlmCalls(_PairsSyntax):
    r"""``<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>``."""

    name, opens, closes, last = "glm", "<tool_call>", "</tool_call>", "</arg_value>"

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        key, key_end, value, value_end = (
            re.escape(mark(tag)) for tag in ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
        )
        self._key = mark("<arg_key>")
        self._pair = re.compile(
            rf"\s*{key}(?P<key>.*?){key_end}\s*{value}(?P<value>.*?){value_end}(?=\s*(?:{key}|\Z))", re.DOTALL
        )

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax.markers`."""
        return (self.opens, self.closes, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def read(self, body: str, tools: Tools) -> list[Call]:
        """See `BlockSyntax.read`."""
        start = body.find(self._key)
        head, pairs = (body, "") if start < 0 else (body[:start], body[start:])
        name = unmarked(head).strip()
        if not name:
            raise Unreadable(CallFault.NO_NAME, "The call has no name.")
        if re.search(r"[\s<>]", name):
            raise Unreadable(CallFault.MALFORMED, f"The call is malformed: {name[:40]!r} is no name.")
        return [make_call(unmarked(body).strip(), name, self._arguments(pairs, name, tools))]


class AtemCalls(_PairsSyntax):
    r"""``<atem:function_calls>\n<atem:invoke name="n">\n<atem:parameter name="k">value</atem:parameter>...``."""

    name, opens, closes = "atem", "<atem:function_calls>", "</atem:function_calls>"
    last = "</atem:invoke>"

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        self._invoke = re.compile(
            r'\s*<atem:invoke name="(?P<name>[^"\n]*)">(?P<body>.*?)</atem:invoke>(?=\s*(?:<atem:invoke |\Z))',
            re.DOTALL,
        )
        follows = r"(?=\s*(?:<atem:parameter |\Z))"
        self._pair = re.compile(
            rf'\s*<atem:parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</atem:parameter>{follows}', re.DOTALL
        )

    def _arguments(self, text: str, name: str, tools: Tools) -> dict[str, Any]:
        found: dict[str, Any] = {}
        at = 0
        while (pair := self._pair.match(text, at)) is not None:
            # "Spaces for string values are not stripped", says the template to the model.
            found[pair["key"]] = typed(unmarked(pair["value"]), parameter(tools, name, pair["key"]))
            at = pair.end()
        if rest := unmarked(text[at:]).strip():
            raise Unreadable(CallFault.MALFORMED, f"The call is malformed at {rest[:40]!r}.")
        return found

    def read(self, body: str, tools: Tools) -> list[Call]:
        """See `BlockSyntax.read`."""
        calls: list[Call] = []
        at = 0
        while (found := self._invoke.match(body, at)) is not None:
            name = found["name"].strip()
            if not name:
                raise Unreadable(CallFault.NO_NAME, "The call has no name.")
            raw = unmarked(found.group()).strip()
            calls.append(make_call(raw, name, self._arguments(found["body"], name, tools)))
            at = found.end()
        rest = unmarked(body[at:]).strip()
        if rest or not calls:
            raise Unreadable(CallFault.MALFORMED, f"The call is malformed at {rest[:40]!r}.")
        return calls
