"""Calls in JSON: Hermes' (Qwen2.5, Qwen3 and many more), Llama's, Mistral's."""

import json
import re
from collections.abc import Sequence

from toolgym.agents.calls.syntax import BlockSyntax, CallSyntax, Mark
from toolgym.agents.calls.values import Call, Tools, Unreadable, invalid, json_end, load_json, make_call
from toolgym.agents.codec import unmarked
from toolgym.envs.messages import CallFault, InvalidToolCall, ToolCall


def call_of(value: object, raw: str) -> Call:
    """A call of a JSON object with a name and arguments, which Llama calls parameters."""
    if not isinstance(value, dict):
        raise Unreadable(CallFault.NO_NAME, 'The call has no "name".')
    arguments = value.get("arguments", value.get("parameters", {}))
    return make_call(raw, value.get("name"), arguments)


class HermesCalls(BlockSyntax):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

    name, opens, closes, json = "hermes", "<tool_call>", "</tool_call>", True

    def read(self, body: str, tools: Tools) -> list[Call]:
        """See `BlockSyntax.read`."""
        raw = unmarked(body).strip()
        return [call_of(load_json(raw), raw)]

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `CallSyntax.write`."""
        bodies = (json.dumps({"name": c.name, "arguments": dict(c.arguments)}, ensure_ascii=False) for c in calls)
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


class LlamaCalls(CallSyntax):
    """``{"name": ..., "parameters": {...}}`` as the whole message or in it, perhaps after ``<|python_tag|>``.

    Only objects with both names are calls: others may be an answer in JSON.
    """

    name = "llama-json"
    _object = re.compile(r'\{\s*"(?:name|type|function)"\s*:')

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        self._tag = mark("<|python_tag|>")

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax.markers`."""
        return ("<|python_tag|>",)

    def find(self, text: str, tools: Tools, *, ended: bool) -> tuple[str, list[Call]]:
        """See `CallSyntax.find`."""
        tagged = self._tag in text
        plain = unmarked(text.replace(self._tag, ""))
        content: list[str] = []
        calls: list[Call] = []
        at = 0
        while (found := self._object.search(plain, at)) is not None:
            start = found.start()
            end = json_end(plain, start)
            stop = len(plain) if end is None else end
            raw = plain[start:stop].strip()
            call = self._call(raw, whole=end is not None, tagged=tagged, ended=ended)
            before = plain[at:start]
            content.append(before.replace(";", "") if calls else before)
            if call is None:
                stop = max(found.end(), start + 1) if end is None else stop
                content.append(plain[start:stop])
            else:
                calls.append(call)
            at = stop
        rest = plain[at:]
        if tagged and not calls and "".join((*content, rest)).strip():
            said = "".join((*content, rest)).strip()
            return "", [InvalidToolCall(said, "The call is not a JSON object with a name and parameters.")]
        content.append(rest.replace(";", "") if calls else rest)
        return "".join(content).strip(), calls

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `CallSyntax.write`."""
        return "; ".join(
            json.dumps({"name": c.name, "parameters": dict(c.arguments)}, ensure_ascii=False) for c in calls
        )

    def _call(self, raw: str, *, whole: bool, tagged: bool, ended: bool) -> Call | None:
        named = re.search(r'"(?:parameters|arguments)"\s*:', raw) is not None
        if not whole:
            if not named and not tagged and ended:
                return None
            problem = Unreadable(CallFault.BAD_JSON, "The call is not valid JSON.")
            try:
                load_json(raw)
            except Unreadable as found:
                problem = found
            if not ended:
                problem = Unreadable(CallFault.CUT_OFF, "The call was cut off: its JSON has no end.")
            return invalid(raw, problem)
        try:
            value = load_json(raw)
            if not isinstance(value, dict) or not (tagged or {"parameters", "arguments"} & set(value)):
                return None
            return call_of(value, raw)
        except Unreadable as problem:
            return invalid(raw, problem)


class MistralCalls(CallSyntax):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, and newer: ``[TOOL_CALLS]name[ARGS]{...}``."""

    name = "mistral"
    _split = ("[CALL_ID]", "[ARGS]")

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        self._opens = mark("[TOOL_CALLS]")
        self._id, self._args = (mark(marker) for marker in self._split)

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax.markers`."""
        return ("[TOOL_CALLS]", *self._split)

    def find(self, text: str, tools: Tools, *, ended: bool) -> tuple[str, list[Call]]:
        """See `CallSyntax.find`."""
        content, *blocks = text.split(self._opens)
        calls: list[Call] = []
        for block in blocks:
            raw = unmarked(block).strip()
            try:
                calls += self._listed(raw) if raw.startswith(("[", "{")) else [self._named(block)]
            except Unreadable as problem:
                cut = not ended and block is blocks[-1]
                problem = Unreadable(CallFault.CUT_OFF, "The call was cut off.") if cut else problem
                calls.append(invalid(raw, problem))
        return unmarked(content).strip(), calls

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `CallSyntax.write`."""
        listed = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        return f"[TOOL_CALLS]{json.dumps(listed, ensure_ascii=False)}"

    def _listed(self, raw: str) -> list[Call]:
        value = load_json(raw)
        entries = value if isinstance(value, list) else [value]
        if not entries:
            raise Unreadable(CallFault.NO_NAME, "The list of calls is empty.")
        calls: list[Call] = []
        for entry in entries:
            one = json.dumps(entry, ensure_ascii=False)
            try:
                calls.append(call_of(entry, one))
            except Unreadable as problem:
                calls.append(invalid(one, problem))
        return calls

    def _named(self, block: str) -> Call:
        raw = unmarked(block).strip()
        head, args, arguments = block.partition(self._args)
        if not args:
            start = block.find("{")
            head, arguments = (block, "") if start < 0 else (block[:start], block[start:])
        name = unmarked(head.split(self._id)[0]).strip()
        try:
            return make_call(raw, name, load_json(unmarked(arguments).strip()))
        except Unreadable as problem:
            return invalid(raw, problem, name)
