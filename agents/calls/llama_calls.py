"""Llama's calls, which are the message itself: bare JSON, or a bare list of Python calls."""

import json
import re
from collections.abc import Sequence

from toolgym.agents.calls.json_calls import call_of, entries_of
from toolgym.agents.calls.literal_calls import python_calls, write_python
from toolgym.agents.calls.syntax import CallSyntax, Mark
from toolgym.agents.calls.values import Call, Tools, Unreadable, invalid, json_stop, load_json
from toolgym.agents.codec import unmarked
from toolgym.envs.messages import CallFault, InvalidToolCall, ToolCall

_TAG = "<|python_tag|>"


def _not_a_call(text: str, *, ended: bool) -> InvalidToolCall:
    """What stands behind the tag that announces a call, and is none."""
    if not ended:
        return InvalidToolCall(text, "The call was cut off.", fault=CallFault.CUT_OFF)
    return InvalidToolCall(text, f"What follows {_TAG} is not a call.", fault=CallFault.MALFORMED)


class LlamaCalls(CallSyntax):
    """``{"name": ..., "parameters": {...}}`` as the whole message or in it, perhaps after ``<|python_tag|>``.

    Only objects with both names are calls, and only at the top, or all of a list: others may be an answer in JSON.
    """

    name = "llama-json"
    _object = re.compile(r'\{\s*"(?:name|type|function|parameters|arguments)"\s*:')

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        self._tag = mark(_TAG)
        self._starts = re.compile(rf"{re.escape(self._tag)}|[\[{{]")

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax.markers`."""
        return (_TAG,)

    def find(self, text: str, tools: Tools, *, ended: bool) -> tuple[str, list[Call]]:
        """See `CallSyntax.find`."""
        said: list[str] = []
        calls: list[Call] = []
        tagged = False
        at = search = 0
        last = max(text.rfind(f'"{key}"') for key in ("arguments", "parameters"))

        def say(upto: int) -> None:
            piece = unmarked(text[at:upto])
            if tagged and (piece.strip() or upto == len(text)):
                calls.append(_not_a_call(piece.strip(), ended=ended or upto < len(text)))
            elif not calls or piece.strip() != ";":
                said.append(piece)

        while (found := self._starts.search(text, search)) is not None:
            start = found.start()
            if found.group() == self._tag:
                say(start)
                tagged, at, search = True, found.end(), found.end()
                continue
            read, search = self._read(text, start, tagged=tagged, named=last > start, ended=ended)
            if read:
                tagged = tagged and bool(text[at:start].strip())
                say(start)
                calls += read
                tagged, at = False, search
        say(len(text))
        return "".join(said).strip(), calls

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `CallSyntax.write`."""
        return "; ".join(
            json.dumps({"name": c.name, "parameters": dict(c.arguments)}, ensure_ascii=False) for c in calls
        )

    def _read(self, text: str, start: int, *, tagged: bool, named: bool, ended: bool) -> tuple[list[Call], int]:
        """The calls in the JSON value that begins here, if it is one, and where to go on."""
        end, whole = json_stop(text, start)
        if whole:
            return self._calls(unmarked(text[start:end]), tagged=tagged), end
        if not self._object.match(text, start) or not (named or tagged or not ended):
            tag = text.find(self._tag, start, end)
            return [], max(end, start + 1) if tag < 0 else tag
        raw = unmarked(text[start:]).strip()
        problem = Unreadable(CallFault.CUT_OFF, "The call was cut off: its JSON has no end.")
        if ended:
            problem = _unreadable(raw)
        return [invalid(raw, problem)], len(text)

    def _calls(self, raw: str, *, tagged: bool) -> list[Call]:
        try:
            value = json.loads(raw)
        except RecursionError:
            return [invalid(raw, _unreadable(raw))]
        entries = value if isinstance(value, list) else [value]
        calling = [isinstance(e, dict) and "name" in e and bool({"parameters", "arguments"} & set(e)) for e in entries]
        if not (calling and all(calling)) and not (tagged and isinstance(value, dict)):
            return []
        try:
            return [call_of(entry, written) for entry, written in entries_of(raw)]
        except Unreadable as problem:
            return [invalid(raw, problem)]


def _unreadable(raw: str) -> Unreadable:
    try:
        load_json(raw)
    except Unreadable as problem:
        return problem
    return Unreadable(CallFault.BAD_JSON, "The call is not valid JSON.")


class PythonCalls(CallSyntax):
    """``[f(a=1), g()]`` as the whole message, as Llama 3.2 and 4 write it, perhaps after ``<|python_tag|>``."""

    name = "python"
    _looks = re.compile(r"\s*\[\s*(?P<name>[^\W\d][\w.\-]*)\s*\(")

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        self._tag = mark(_TAG)

    def find(self, text: str, tools: Tools, *, ended: bool) -> tuple[str, list[Call]]:
        """See `CallSyntax.find`."""
        content, tag, listed = ("", "", text) if self._looks.match(text) else text.partition(self._tag)
        raw, looks = unmarked(listed).strip(), self._looks.match(listed)
        content = unmarked(content).strip()
        if looks is None:
            return content, [_not_a_call(raw, ended=ended)] if tag else []
        try:
            return content, python_calls(raw)
        except Unreadable as error:
            problem = error if ended else Unreadable(CallFault.CUT_OFF, "The call was cut off.")
        if ended and not tag and tools and not _knows(tools, looks["name"]):
            return raw, []  # a list of formulas, a link
        return content, [invalid(raw, problem)]

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `CallSyntax.write`."""
        return write_python(calls)


def _knows(tools: Tools, name: str) -> bool:
    return any(tool.get("function", tool).get("name") == name for tool in tools)
