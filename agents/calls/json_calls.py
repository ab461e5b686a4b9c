"""Calls in JSON: Hermes' (Qwen2.5, Qwen3 and many more), Llama's, Mistral's."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from toolgym.agents.calls.syntax import BlockSyntax, CallSyntax, Mark, skip
from toolgym.agents.calls.values import Call, Tools, Unreadable, invalid, json_end, load_json, make_call
from toolgym.agents.codec import MARK_OPEN, unmarked
from toolgym.envs.messages import CallFault, InvalidToolCall, ToolCall

_ARGUMENTS = ("arguments", "parameters")  # Llama says parameters


def call_of(value: object, raw: str) -> Call:
    """A call of a JSON object with a name and arguments; an id and a type may stand beside them."""
    if not isinstance(value, dict):
        raise Unreadable(CallFault.NO_NAME, 'The call has no "name".')
    key = next((key for key in _ARGUMENTS if key in value), None)
    call = make_call(raw, value.get("name"), {} if key is None else value[key])
    others = [other for other in value if other not in ("name", key, "id", "type")]
    if others and isinstance(call, ToolCall):
        reason = f'The call has {others[0]!r} beside its name: all arguments stand in "{key or "arguments"}".'
        return InvalidToolCall(raw, reason, call.name, fault=CallFault.BAD_ARGUMENTS)
    return call


def entries_of(raw: str) -> list[tuple[object, str]]:
    """The values of a list in JSON, each with its text; of anything else, that one.

    Raises:
        Unreadable: it is not JSON.
    """
    value = load_json(raw)
    if not isinstance(value, list):
        return [(value, raw)]
    found: list[tuple[object, str]] = []
    at = skip(raw, 0) + 1
    for entry in value:
        at = skip(raw, at)
        end = json_end(raw, at) or len(raw)
        found.append((entry, raw[at:end]))
        at = skip(raw, end) + 1
    return found


class HermesCalls(BlockSyntax):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

    name, opens, closes = "hermes", "<tool_call>", "</tool_call>"

    def whole(self, text: str, at: int) -> int | None:
        """See `BlockSyntax.whole`."""
        return json_end(text, skip(text, at))

    def read(self, body: str, tools: Tools) -> list[Call]:
        """See `BlockSyntax.read`."""
        raw = unmarked(body).strip()
        return [call_of(load_json(raw), raw)]

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `CallSyntax.write`."""
        bodies = (json.dumps({"name": c.name, "arguments": dict(c.arguments)}, ensure_ascii=False) for c in calls)
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


class MistralCalls(CallSyntax):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, and newer: ``[TOOL_CALLS]name[ARGS]{...}``."""

    name = "mistral"
    _split = ("[CALL_ID]", "[ARGS]")

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        self._opens = mark("[TOOL_CALLS]")
        self._id, self._args = (mark(marker) for marker in self._split)
        ids = rf"(?:{re.escape(self._id)}[^{MARK_OPEN}]*)?"
        self._head = re.compile(rf"[^{MARK_OPEN}\[{{]*{ids}(?:{re.escape(self._args)})?\s*")

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax.markers`."""
        return ("[TOOL_CALLS]", *self._split)

    def find(self, text: str, tools: Tools, *, ended: bool) -> tuple[str, list[Call]]:
        """See `CallSyntax.find`."""
        content, *blocks = self._blocks(text)
        calls: list[Call] = []
        for block in blocks:
            raw = unmarked(block).strip()
            try:
                calls += self._listed(raw) if block.lstrip().startswith(("[", "{")) else [self._named(block)]
            except Unreadable as problem:
                cut = not ended and block is blocks[-1]
                problem = Unreadable(CallFault.CUT_OFF, "The call was cut off.", problem.name) if cut else problem
                calls.append(invalid(raw, problem))
        return unmarked(content).strip(), calls

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `CallSyntax.write`."""
        listed = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        return f"[TOOL_CALLS]{json.dumps(listed, ensure_ascii=False)}"

    def _blocks(self, text: str) -> list[str]:
        """What stands before the first opening marker, and behind each that is none within a text in JSON."""
        blocks: list[str] = []
        at = 0
        start = text.find(self._opens)
        while start >= 0:
            blocks.append(text[at:start])
            at = start + len(self._opens)
            head = self._head.match(text, at)
            value = at if head is None else head.end()
            start = text.find(self._opens, json_end(text, value) or value)
        return [*blocks, text[at:]]

    def _listed(self, raw: str) -> list[Call]:
        entries = entries_of(raw)
        if not entries:
            raise Unreadable(CallFault.NO_NAME, "The list of calls is empty.")
        calls: list[Call] = []
        for entry, written in entries:
            try:
                call_id = entry.get("id") if isinstance(entry, dict) else None
                calls.append(_with_id(call_of(entry, written), call_id))
            except Unreadable as problem:
                calls.append(invalid(written, problem))
        return calls

    def _named(self, block: str) -> Call:
        head, args, arguments = block.partition(self._args)
        if not args:
            start = block.find("{")
            head, arguments = (block, "") if start < 0 else (block[:start], block[start:])
        name, _, call_id = (unmarked(part).strip() for part in head.partition(self._id))
        if not name:
            raise Unreadable(CallFault.NO_NAME, "The call has no name.")
        try:
            call = make_call(unmarked(block).strip(), name, load_json(unmarked(arguments).strip()))
            return _with_id(call, call_id)
        except Unreadable as problem:
            problem.name = name
            raise


def _with_id(call: Call, call_id: object) -> Call:
    """A call with the id that the model gave it: its template names the call by that beside the answer."""
    return replace(call, id=call_id) if isinstance(call_id, str) and call_id else call
