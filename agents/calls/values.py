"""The values inside of calls: JSON, text that a schema gives a type, and the literals of Python-like syntaxes.

Nothing here recurses deeper than `MAX_DEPTH`, whatever a model wrote.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolgym.envs.messages import CallFault, InvalidToolCall, ToolCall

MAX_DEPTH = 64  # what JSON tools and pydantic can take, far above what a tool asks for
Tools = Sequence[Mapping[str, Any]]
Call = ToolCall | InvalidToolCall
_NUMBER = re.compile(r"-?\d{1,300}(\.\d+)?([eE][-+]?\d{1,3})?")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_VISIBLE = re.compile(r"\S")
_NAME = re.compile(r"[^\W\d][\w.\-]*")
_WORD = re.compile(r"[^\s,\]\})(\[{:]+")
_DECODER = json.JSONDecoder()
_FLAT = frozenset({str, int, float, bool, type(None)})
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "\n": ""}


class Unreadable(Exception):
    """A value or a call that cannot be read; says why, in words for the model."""

    def __init__(self, fault: CallFault, reason: str, name: str | None = None) -> None:
        super().__init__(reason)
        self.fault, self.reason, self.name = fault, reason, name


class _Twice(ValueError):
    """An object has a key twice, so that one of its values would vanish."""


def load_json(text: str) -> Any:
    """A JSON value.

    Raises:
        Unreadable: it is none, has a key twice or a number of thousands of digits, or is nested too deeply.
    """
    try:
        value = _STRICT.decode(text)
    except _Twice as error:
        raise Unreadable(CallFault.BAD_JSON, f"The call has the key {error} twice.") from error
    except json.JSONDecodeError as error:
        raise Unreadable(CallFault.BAD_JSON, f"The call is not valid JSON: {error.msg} at {error.pos}.") from error
    except (RecursionError, ValueError) as error:
        raise Unreadable(CallFault.BAD_JSON, "The call is nested too deeply or has a huge number.") from error
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(repr(next(key for at, key in enumerate(keys) if key in keys[:at])))
    return found


# Made once: that costs as much as what they do.
_STRICT = json.JSONDecoder(object_pairs_hook=_object)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def _no_json(word: str) -> Any:
    raise ValueError(word)


def json_end(text: str, start: int) -> int | None:
    """Where the JSON value that begins at ``start`` ends; None if there is no whole one."""
    end, whole = json_stop(text, start)
    return end if whole else None


def json_stop(text: str, start: int) -> tuple[int, bool]:
    """Where the JSON value that begins at ``start`` stops, and whether it is whole; else it is no JSON from there on.

    What is nested too deeply stops at the end of the text, since nobody can read it.
    """
    size = 4_096  # errors cost as much as the text is long, and there may be one for each of many calls
    while True:
        window = text[start : start + size]
        last = start + size >= len(text)
        try:
            end = _DECODER.raw_decode(window)[1]
            if last or end < len(window):
                return start + end, True
        except json.JSONDecodeError as error:
            if last or (error.pos + 16 < len(window) and not error.msg.startswith("Unterminated")):
                return start + error.pos, False
        except (RecursionError, ValueError):
            return len(text), False
        size *= 8


def make_call(raw: str, name: Any, arguments: Any) -> Call:
    """A call of what was read, if names are text and arguments are a plain JSON object.

    Args:
        raw: the call as the model wrote it.
        name: of the tool.
        arguments: by name.
    """
    if not isinstance(name, str) or not name.strip():
        reason = 'The call has no "name".' if name in (None, "") else f'"name" must be text, not {json.dumps(name)}.'
        return InvalidToolCall(raw, reason, fault=CallFault.NO_NAME)
    name = name.strip()
    if not isinstance(arguments, Mapping):
        reason = f'"arguments" must be a JSON object, not {type(arguments).__name__}.'
        return InvalidToolCall(raw, reason, name, fault=CallFault.BAD_ARGUMENTS)
    if depth(arguments) > MAX_DEPTH:
        reason = f"The arguments are nested more than {MAX_DEPTH} deep."
        return InvalidToolCall(raw, reason, name, fault=CallFault.BAD_ARGUMENTS)
    try:
        _ENCODER.encode([name, arguments]).encode()
    except (ValueError, TypeError):  # NaN and infinity, lone surrogates, keys that are no text
        reason = "The arguments hold something that JSON cannot: NaN, Infinity or half a character."
        return InvalidToolCall(raw, reason, name, fault=CallFault.BAD_ARGUMENTS)
    return ToolCall(name, dict(arguments))


def invalid(raw: str, problem: Unreadable, name: str | None = None) -> InvalidToolCall:
    """The record of a call that cannot be read."""
    return InvalidToolCall(raw, problem.reason, name or problem.name or None, fault=problem.fault)


def in_reasoning(call: Call, closes: str) -> InvalidToolCall:
    """The record of a call in reasoning that was never closed, by what would close it."""
    error = f"The call stands in reasoning that has no closing {closes}: close it, then call."
    raw = call.raw if isinstance(call, InvalidToolCall) else f"{call.name}({dict(call.arguments)})"
    return InvalidToolCall(raw, error, call.name, fault=CallFault.IN_REASONING)


def depth(value: Any) -> int:
    """How deeply a JSON value is nested; without recursion, which deep nesting would exhaust."""
    level, layer = 0, [value]
    while layer:
        level += 1
        nested = [part for part in layer if type(part) not in _FLAT]
        inner = (p.values() if isinstance(p, Mapping) else p for p in nested if isinstance(p, Mapping | list))
        layer = [part for parts in inner for part in parts]
    return level


def parameter(tools: Tools, name: str, key: str) -> Mapping[str, Any] | None:
    """The schema of one parameter of a tool; None if the tool or the parameter is not known."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            found = (function.get("parameters") or {}).get("properties", {}).get(key)
            return found if isinstance(found, Mapping) else None
    return None


def typed(raw: str, schema: Mapping[str, Any] | None) -> Any:
    """The value of an argument that is written as bare text, by the type that its schema declares.

    Text where the schema says text, whatever it looks like. Else JSON; what is no JSON stays text, and the tool's own
    check says what is wrong with it.
    """
    types = _types(schema)
    if types == {"string"}:
        return raw
    word = raw.strip()
    if word in _WORDS:
        value = _WORDS[word]
    else:
        try:
            value = json.loads(word, object_pairs_hook=_object, parse_constant=_no_json)
        except (RecursionError, ValueError):
            return raw
    return raw if isinstance(value, str) or (types and not _is_a(value, types)) else value


def _types(schema: Mapping[str, Any] | None) -> set[str]:
    if schema is None:
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared or ())
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types |= _types(choice)
    if not types and all(isinstance(value, str) for value in schema.get("enum", (0,))):
        types = {"string"}
    return types


def _is_a(value: Any, types: set[str]) -> bool:
    names = {bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object", list: "array"}
    name = names[type(value)]
    wanted = types - {"string"}
    # With no text allowed, a value of the wrong type is passed on all the same: the tool says what is wrong with it.
    return name in wanted or (name == "integer" and "number" in wanted) or "string" not in types


class Literals:
    """Reads literals one after the other: numbers, texts, lists and mappings, as Python or a like syntax writes them.

    Args:
        text: what is read.
        at: where to begin.
        quotes: what encloses texts.
        escapes: whether a backslash in them escapes.
        lenient: whether a quote ends a text only where something may follow it, as not every apostrophe is escaped.
    """

    def __init__(
        self,
        text: str,
        at: int = 0,
        *,
        quotes: Sequence[str] = ("'''", '"""', "'", '"'),
        escapes: bool = True,
        lenient: bool = False,
    ) -> None:
        self.text, self.at = text, at
        self._quotes, self._escapes, self._lenient = quotes, escapes, lenient

    def value(self, level: int = 0) -> Any:
        """The next value.

        Raises:
            Unreadable: there is none.
        """
        if level > MAX_DEPTH:
            raise Unreadable(CallFault.MALFORMED, "The call is nested too deeply or has a huge number.")
        for quote in self._quotes:
            if self.takes(quote):
                return self._quoted(quote)
        if self.takes("{"):
            return self._mapping(level)
        for opening, closing in (("[", "]"), ("(", ")")):
            if self.takes(opening):
                return self._items(closing, level)
        return self._word()

    def takes(self, literal: str) -> bool:
        """Whether the next thing is this literal; if so, it is read."""
        self._skip()
        found = self.text.startswith(literal, self.at)
        self.at += len(literal) if found else 0
        return found

    def name(self) -> str:
        """The next bare name, which may have dots and dashes; empty if there is none."""
        self._skip()
        found = _NAME.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found.group() if found else ""

    def comma(self, closing: str) -> None:
        """Read the comma behind a part, which only what closes the whole may follow instead.

        Raises:
            Unreadable: neither follows.
        """
        if not self.takes(",") and not self.text.startswith(closing, self.at):
            raise self.fail(f"',' or {closing!r}")

    def fail(self, expected: str) -> Unreadable:
        """That something else was expected here."""
        here = self.text[self.at : self.at + 20]
        if not here.strip():
            return Unreadable(CallFault.CUT_OFF, f"The call ends where {expected} was expected.")
        return Unreadable(CallFault.MALFORMED, f"The call is malformed: expected {expected} before {here!r}.")

    def _skip(self) -> None:
        found = _VISIBLE.search(self.text, self.at)
        self.at = found.start() if found else len(self.text)

    def _items(self, closing: str, level: int) -> list[Any]:
        items: list[Any] = []
        while not self.takes(closing):
            items.append(self.value(level + 1))
            self.comma(closing)
        return items

    def _mapping(self, level: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self.takes("}"):
            quote = next((quote for quote in self._quotes if self.takes(quote)), None)
            key = self.name() if quote is None else self._quoted(quote, ends=":")
            if not self.takes(":"):
                raise self.fail("a key and ':'")
            if key in found:
                raise Unreadable(CallFault.BAD_ARGUMENTS, f"The call has the key {key!r} twice.")
            found[key] = self.value(level + 1)
            self.comma("}")
        return found

    def _next(self) -> int:
        self._skip()
        return self.at

    def _quoted(self, quote: str, ends: str = ",)]}") -> str:
        start, at = self.at, self.at
        while True:
            at = self.text.find(quote, at)
            if at < 0:
                raise Unreadable(CallFault.CUT_OFF, "A text in the call has no closing quote.")
            before = at
            while self._escapes and before > start and self.text[before - 1] == "\\":
                before -= 1
            follows = _VISIBLE.search(self.text, at + len(quote))
            ended = not self._lenient or len(quote) > 1 or follows is None or follows.group() in ends
            if (at - before) % 2 == 0 and ended:
                self.at = at + len(quote)
                return _unescaped(self.text[start:at]) if self._escapes else self.text[start:at]
            at += len(quote)

    def _word(self) -> Any:
        found = _WORD.match(self.text, self._next())
        word = found.group() if found else ""
        if word not in _WORDS and not _NUMBER.fullmatch(word):
            raise self.fail("a value")
        self.at += len(word)
        if word in _WORDS:
            return _WORDS[word]
        return int(word) if word.lstrip("-").isdigit() else float(word)


def _unescaped(text: str) -> str:
    def one(found: re.Match[str]) -> str:
        code = found.group(1)
        if len(code) > 1:
            point = int(code[1:], 16)
            return chr(point) if point < 0x110000 else found.group()
        return _ESCAPES.get(code, code if code in "\\'\"/" else f"\\{code}")

    return re.sub(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", one, text, flags=re.DOTALL)
