"""Calls that look like code: LFM2's and Llama's lists of Python calls, and Gemma 4's."""

import re
from collections.abc import Sequence
from typing import Any

from toolgym.agents.calls.syntax import BlockSyntax, CallSyntax, Mark
from toolgym.agents.calls.values import Call, Literals, Tools, Unreadable, invalid, make_call
from toolgym.agents.codec import unmarked
from toolgym.envs.messages import CallFault, ToolCall


def python_calls(text: str) -> list[Call]:
    """The calls of ``[f(a=1), g()]``.

    Raises:
        Unreadable: it is no such list.
    """
    reader = Literals(text)
    if not reader.takes("["):
        raise reader.fail("'['")
    calls: list[Call] = []
    while not reader.takes("]"):
        start = reader.at
        name = reader.name()
        if not name:
            raise Unreadable(CallFault.NO_NAME, f"The call has no name before {text[reader.at : reader.at + 20]!r}.")
        if not reader.takes("("):
            raise reader.fail("'('")
        arguments: dict[str, Any] = {}
        while not reader.takes(")"):
            key = reader.name()
            if not key or not reader.takes("="):
                raise Unreadable(CallFault.BAD_ARGUMENTS, f"Arguments of {name} must be written as name=value.")
            arguments[key] = reader.value()
            if not reader.takes(",") and not text.startswith(")", reader.at):
                raise reader.fail("',' or ')'")
        calls.append(make_call(text[start : reader.at].strip(), name, arguments))
        if not reader.takes(",") and not text.startswith("]", reader.at):
            raise reader.fail("',' or ']'")
    if rest := text[reader.at :].strip():
        raise Unreadable(CallFault.MALFORMED, f"The calls are followed by {rest[:20]!r}.")
    if not calls:
        raise Unreadable(CallFault.NO_NAME, "The list of calls is empty.")
    return calls


def write_python(calls: Sequence[ToolCall]) -> str:
    """Calls as a list of Python calls."""
    written = (f"{c.name}({', '.join(f'{key}={value!r}' for key, value in c.arguments.items())})" for c in calls)
    return f"[{', '.join(written)}]"


class LfmCalls(BlockSyntax):
    """``<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>``."""

    name, opens, closes = "lfm", "<|tool_call_start|>", "<|tool_call_end|>"
    last = "]"

    def read(self, body: str, tools: Tools) -> list[Call]:
        """See `BlockSyntax.read`."""
        return python_calls(unmarked(body).strip())

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `CallSyntax.write`."""
        return f"{self.opens}{write_python(calls)}{self.closes}"


class PythonCalls(CallSyntax):
    """``[f(a=1), g()]`` as the whole message, as Llama 3.2 and 4 write it, perhaps after ``<|python_tag|>``."""

    name = "python"
    _looks = re.compile(r"\[\s*[^\W\d][\w.\-]*\s*\(")

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        self._tag = mark("<|python_tag|>")

    def find(self, text: str, tools: Tools, *, ended: bool) -> tuple[str, list[Call]]:
        """See `CallSyntax.find`."""
        plain = unmarked(text.replace(self._tag, "")).strip()
        if not self._looks.match(plain):
            return plain, []
        try:
            return "", python_calls(plain)
        except Unreadable:
            if not ended:
                problem = Unreadable(CallFault.CUT_OFF, "The call was cut off.")
            return "", [invalid(plain, problem)]

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `CallSyntax.write`."""
        return write_python(calls)


class GemmaCalls(BlockSyntax):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>``."""

    name, opens, closes, last = "gemma", "<|tool_call>", "<tool_call|>", "}"
    _quote = '<|"|>'

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        self._quotes = (mark(self._quote),)

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax.markers`."""
        return (self.opens, self.closes, self._quote)

    def read(self, body: str, tools: Tools) -> list[Call]:
        """See `BlockSyntax.read`."""
        reader = Literals(body, quotes=self._quotes, escapes=False)
        if not reader.takes("call:"):
            raise reader.fail("'call:'")
        name = reader.name()
        if not name:
            raise Unreadable(CallFault.NO_NAME, "The call has no name.")
        if not body.startswith("{", reader.at):
            raise reader.fail("'{'")
        arguments = _unmarked(reader.value())
        if rest := body[reader.at :].strip():
            raise Unreadable(CallFault.MALFORMED, f"The call is followed by {unmarked(rest)[:20]!r}.")
        return [make_call(unmarked(body).strip(), name, arguments)]


def _unmarked(value: Any) -> Any:
    if isinstance(value, str):
        return unmarked(value)
    if isinstance(value, list):
        return [_unmarked(part) for part in value]
    if isinstance(value, dict):
        return {unmarked(key): _unmarked(part) for key, part in value.items()}
    return value
