"""Calls that look like code: lists of Python calls, which LFM2 writes, and Gemma 4's."""

from collections.abc import Sequence
from typing import Any

from toolgym.agents.calls.syntax import BlockSyntax, Mark
from toolgym.agents.calls.values import Call, Literals, Tools, Unreadable, make_call
from toolgym.agents.codec import unmarked
from toolgym.envs.messages import CallFault, ToolCall


def python_calls(text: str) -> list[Call]:
    """The calls of ``[f(a=1), g()]``.

    Raises:
        Unreadable: it is no such list.
    """
    try:
        return _only_list(Literals(text))
    except Unreadable as problem:
        try:
            return _only_list(Literals(text, lenient=True))
        except Unreadable:
            raise problem from None


def _only_list(reader: Literals) -> list[Call]:
    calls, end = _list(reader)
    if rest := reader.text[end:].strip():
        raise Unreadable(CallFault.MALFORMED, f"The calls are followed by {rest[:20]!r}.")
    return calls


def _list(reader: Literals) -> tuple[list[Call], int]:
    """The calls of a list, and where it ends."""
    if not reader.takes("["):
        raise reader.fail("'['")
    calls: list[Call] = []
    while not reader.takes("]"):
        calls.append(_call(reader))
        reader.comma("]")
    if not calls:
        raise Unreadable(CallFault.NO_NAME, "The list of calls is empty.")
    return calls, reader.at


def _call(reader: Literals) -> Call:
    start = reader.at
    name = reader.name()
    if not name:
        here = reader.text[reader.at : reader.at + 20]
        if not here.strip():
            raise reader.fail("a call")
        raise Unreadable(CallFault.NO_NAME, f"The call has no name before {here!r}.")
    arguments: dict[str, Any] = {}
    try:
        if not reader.takes("("):
            raise reader.fail("'('")
        while not reader.takes(")"):
            key = reader.name()
            if not key or not reader.takes("="):
                raise Unreadable(CallFault.BAD_ARGUMENTS, f"Arguments of {name} must be written as name=value.")
            if key in arguments:
                raise Unreadable(CallFault.BAD_ARGUMENTS, f"The call of {name} has the argument {key!r} twice.")
            arguments[key] = reader.value()
            reader.comma(")")
    except Unreadable as problem:
        problem.name = name
        raise
    return make_call(reader.text[start : reader.at].strip(), name, _unmarked(arguments))


def write_python(calls: Sequence[ToolCall]) -> str:
    """Calls as a list of Python calls."""
    written = (f"{c.name}({', '.join(f'{key}={value!r}' for key, value in c.arguments.items())})" for c in calls)
    return f"[{', '.join(written)}]"


class LfmCalls(BlockSyntax):
    """``<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>``."""

    name, opens, closes = "lfm", "<|tool_call_start|>", "<|tool_call_end|>"

    def whole(self, text: str, at: int) -> int | None:
        """See `BlockSyntax.whole`."""
        try:
            return _list(Literals(text, at))[1]
        except Unreadable:
            return None

    def read(self, body: str, tools: Tools) -> list[Call]:
        """See `BlockSyntax.read`."""
        return python_calls(unmarked(body).strip())

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `CallSyntax.write`."""
        return f"{self.opens}{write_python(calls)}{self.closes}"


class GemmaCalls(BlockSyntax):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>``."""

    name, opens, closes = "gemma", "<|tool_call>", "<tool_call|>"
    _quote = '<|"|>'

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        self._quotes = (mark(self._quote),)

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax.markers`."""
        return (self.opens, self.closes, self._quote)

    def whole(self, text: str, at: int) -> int | None:
        """See `BlockSyntax.whole`."""
        try:
            return self._call(text, at)[2]
        except Unreadable:
            return None

    def read(self, body: str, tools: Tools) -> list[Call]:
        """See `BlockSyntax.read`."""
        name, arguments, end = self._call(body, 0)
        if rest := body[end:].strip():
            raise Unreadable(CallFault.MALFORMED, f"The call is followed by {unmarked(rest)[:20]!r}.", name)
        return [make_call(unmarked(body).strip(), name, _unmarked(arguments))]

    def _call(self, text: str, at: int) -> tuple[str, Any, int]:
        """The name, the arguments and the end of the call that begins here."""
        reader = Literals(text, at, quotes=self._quotes, escapes=False)
        if not reader.takes("call:"):
            raise reader.fail("'call:'")
        name = reader.name()
        if not name:
            raise Unreadable(CallFault.NO_NAME, "The call has no name.")
        try:
            if not text.startswith("{", reader.at):
                raise reader.fail("'{'")
            return name, reader.value(), reader.at
        except Unreadable as problem:
            problem.name = name
            raise


def _unmarked(value: Any) -> Any:
    if isinstance(value, str):
        return unmarked(value)
    if isinstance(value, list):
        return [_unmarked(part) for part in value]
    if isinstance(value, dict):
        return {unmarked(key): _unmarked(part) for key, part in value.items()}
    return value
