"""`Dialect`: what a chat template wants and writes, found out by rendering small conversations around sentinels."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from toolgym.agents.calls.channels import AtemGrammar, HarmonyGrammar
from toolgym.agents.calls.grammar import Grammar, Reasoning, TaggedGrammar
from toolgym.agents.calls.registry import REASONING_TAGS, SYNTAXES
from toolgym.agents.chat import TemplateRefused
from toolgym.agents.codec import SLOT_CLOSE, SLOT_OPEN, TokenCodec
from toolgym.agents.template import ChatTemplate
from toolgym.envs.errors import ConfigurationError
from toolgym.envs.messages import (
    AssistantMessage,
    InvalidToolCall,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)

Entry = dict[str, Any]
UNNAMED = "unknown"  # the tool of a call whose name is not known
USER: Entry = {"role": "user", "content": "Hi."}
PROBE_CALL = ToolCall("look_up", {"text": "alpha beta", "count": 3})
PROBE_TOOL: Entry = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "What."},
                "count": {"type": "integer", "description": "How many."},
            },
            "required": ["text"],
        },
    },
}
# What formats call the field of reasoning, best known first.
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def sentinel(number: int) -> str:
    """A text that stands for another one; nine characters, which is what some templates ask of call ids."""
    return f"{SLOT_OPEN}slot{number:03d}{SLOT_CLOSE}"


class TurnKind(StrEnum):
    """What the assistant's turn was, as far as what follows it depends on that."""

    TEXT = "text"
    CALLS = "calls"


@dataclass(frozen=True)
class Ending:
    """How a turn of one kind ends.

    Attributes:
        stop: the token that a model samples to end it.
        history: the token that stands there in the conversation's history.
    """

    stop: int
    history: int


@dataclass(frozen=True)
class Forms:
    """How a template wants to be given messages.

    Attributes:
        arguments_as_text: arguments of calls as JSON text instead of an object.
        empty_content: the content beside calls where there is none.
        calls_in_content: the template writes no calls, so they are part of the content.
        one_call: it writes one call of a message only.
        reasoning_field: the field of reasoning that it writes; None if it writes none.
    """

    arguments_as_text: bool
    empty_content: str | None
    calls_in_content: bool
    one_call: bool
    reasoning_field: str | None


class Dialect:
    """A template with what has been found out about it.

    Args:
        template: of the model.
        codec: its tokenizer.
        stops: tokens that the model's files say end a turn.
        syntax: name of the syntax of its calls; None finds it out.

    Raises:
        ConfigurationError: turns do not end with a token, or an unknown syntax.
    """

    def __init__(
        self, template: ChatTemplate, codec: TokenCodec, stops: Sequence[int] = (), syntax: str | None = None
    ) -> None:
        self.template, self.codec = template, codec
        self._short_ids, self._refusal, self._named_syntax = False, "", syntax
        said = self._try([{"role": "user", "content": sentinel(1)}])
        template.takes_parts = said is None or sentinel(1) not in said
        self.forms = self._find_forms()
        self.reasoning = self._find_reasoning()
        self.grammar = self._find_grammar(syntax)
        if syntax is not None and not self._reads_back(self.grammar):
            # The template writes other calls than the model is said to make: those are part of the content.
            self.forms = replace(self.forms, calls_in_content=True)
        self._markers = {codec.controls[text] for text in self.grammar.markers if text in codec.controls}
        text = self._ending_of_text()
        self.endings: Mapping[TurnKind, Ending] = {
            TurnKind.TEXT: text,
            TurnKind.CALLS: self._ending_of_calls({*stops, text.stop}, text),
        }
        self.opening_length = self._opening_length()
        self.stops = tuple(dict.fromkeys([*(ending.stop for ending in self.endings.values()), *stops]))

    @property
    def speaks_plainly(self) -> bool:
        """Whether a turn is its content, rather than messages with headers of their own."""
        return isinstance(self.grammar, TaggedGrammar)

    # Messages for templates.

    def entry(self, message: Message, safe: Callable[[str], str] | None = None) -> Entry:
        """A message as the template wants it.

        Args:
            message: any.
            safe: what its texts are passed through; None neutralizes them.

        Raises:
            ConfigurationError: no message, one without text, or calls that the template cannot write.
        """
        safe = safe or self.codec.neutralized
        if not isinstance(getattr(message, "content", None), str):
            raise ConfigurationError(f"expected a message with text as its content, actual {message!r:.80}")
        match message:
            case SystemMessage(content):
                return {"role": "system", "content": safe(content)}
            case UserMessage(content):
                return {"role": "user", "content": safe(content)}
            case ToolMessage(content, call_id, name):
                named = {} if name is None else {"name": safe(name)}
                call_id = self._fitting_id(call_id)
                return {"role": "tool", "content": safe(content), "tool_call_id": safe(call_id), **named}
            case AssistantMessage():
                return self.assistant(message, safe)
        raise ConfigurationError(f"expected a message of toolgym.envs.messages, actual {type(message).__name__}")

    def assistant(self, message: AssistantMessage, safe: Callable[[str], str]) -> Entry:
        """A message of the model as the template wants it, its texts passed through a function.

        A call that could not be parsed has no form of its own: it is told of by its raw text.

        Raises:
            ConfigurationError: the template writes no calls, or one of a message only.
        """
        calls = [call for call in message.tool_calls if isinstance(call, ToolCall)]
        broken = [call.raw for call in message.tool_calls if isinstance(call, InvalidToolCall)]
        entry: Entry = {"role": "assistant", "content": safe("\n".join(filter(None, [message.content, *broken])))}
        if self.writes_inline(message):
            told = [ToolCall(safe(c.name), safe_values(dict(c.arguments), safe), c.id) for c in calls]
            written = self.grammar.write(told)
            if written is None:
                raise ConfigurationError(self._why_no_calls())
            entry["content"] += written
        elif calls:
            entry["tool_calls"] = [
                self.call(safe(c.name), safe_values(dict(c.arguments), safe), self._fitting_id(c.id)) for c in calls
            ]
            entry["content"] = entry["content"] or self.forms.empty_content
        if message.reasoning is not None and self.forms.reasoning_field is not None:
            entry[self.forms.reasoning_field] = safe(message.reasoning)
        return entry

    def _why_no_calls(self) -> str:
        if self.forms.one_call:
            return f"the chat template of {self.template.name} writes one call a message"
        if self._named_syntax is not None:
            return f"the chat template of {self.template.name} writes no {self._named_syntax} calls"
        return (
            f"the chat template of {self.template.name} writes no calls; if its model can call tools, name the syntax"
        )

    def call(self, name: str, arguments: Mapping[str, Any], call_id: str = "") -> Entry:
        """A tool call as the template wants it, its id as it is."""
        given: Any = json.dumps(arguments, ensure_ascii=False) if self.forms.arguments_as_text else dict(arguments)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}

    def writes_inline(self, message: AssistantMessage) -> bool:
        """Whether calls must be part of the content, because the template writes none, or one of a message only."""
        count = len(message.tool_calls)
        return count > 0 and (self.forms.calls_in_content or (self.forms.one_call and count > 1))

    def with_fitting_id(self, message: Message) -> Message:
        """A message whose call id the template takes."""
        if self._short_ids and isinstance(message, ToolMessage):
            return replace(message, tool_call_id=self._fitting_id(message.tool_call_id))
        return message

    def _fitting_id(self, call_id: str) -> str:
        """Nine letters and digits where the template asks for that (Mistral's do), the same ones for the same id."""
        if not self._short_ids or (len(call_id) == 9 and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]

    # Finding out.

    def _find_forms(self) -> Forms:
        field = self._find_reasoning_field({})
        for as_text in (False, True):
            for empty in ("", None):
                self.forms = Forms(as_text, empty, False, False, field)
                call = self.call(sentinel(1), {"key": sentinel(2)}, sentinel(3))
                said = self._try([USER, self._calling(call)])
                # Some write whatever they are given by its Python form, which no model was ever shown.
                if said and sentinel(1) in said and sentinel(2) in said and "{'key'" not in said:
                    other = self.call(sentinel(4), {"key": sentinel(5)}, sentinel(6))
                    both = self._try([USER, self._calling(call, other)])
                    one = not both or not all(sentinel(k) in both for k in (1, 2, 4, 5))
                    long = self.call(sentinel(1), {"key": sentinel(2)}, "call_0_0_0_0")
                    self._short_ids = self._try([USER, self._calling(long)]) is None
                    # Some write reasoning beside calls only.
                    field = field or self._find_reasoning_field(self._calling(call))
                    return Forms(as_text, empty, False, one, field)
        return Forms(False, "", True, False, field)

    def _calling(self, *calls: Entry) -> Entry:
        return {"role": "assistant", "content": self.forms.empty_content, "tool_calls": list(calls)}

    def _find_reasoning_field(self, beside: Entry) -> str | None:
        for name in _REASONING_FIELDS:
            said = self._try([USER, {"role": "assistant", "content": "Hello.", **beside, name: sentinel(7)}])
            if said and sentinel(7) in said:
                return name
        return None

    def _find_grammar(self, syntax: str | None) -> Grammar:
        mark = self.codec.mark
        grammars: dict[str, Grammar] = {"harmony": HarmonyGrammar(mark), "atem": AtemGrammar(mark)}
        for name, make in SYNTAXES.items():
            grammars[name] = TaggedGrammar(mark, make(mark), self.reasoning)
        if syntax is not None:
            if syntax not in grammars:
                raise ConfigurationError(f"expected a call syntax among {', '.join(grammars)}, actual {syntax!r}")
            return grammars[syntax]
        for grammar in grammars.values():
            if self._reads_back(grammar):
                return grammar
        return TaggedGrammar(mark, None, self.reasoning)

    def _reads_back(self, grammar: Grammar) -> bool:
        """Whether a grammar reads the probe call in what the template writes of it."""
        if self.forms.calls_in_content:
            # Nothing to read: only the markers tell, which must then be tokens of the model's.
            return bool(grammar.markers) and all(text in self.codec.controls for text in grammar.markers[-2:])
        call = self.call(PROBE_CALL.name, PROBE_CALL.arguments, "call00001")
        opened, said = self._try([USER], opens=True), self._try([USER, self._calling(call)])
        if said is None or opened is None:
            return False
        pieces = _rest(self.codec.split(opened), self.codec.split(said))
        inner = {self.codec.controls.get(text) for text in grammar.markers}
        while pieces and (pieces[-1] not in inner if isinstance(pieces[-1], int) else not pieces[-1].strip()):
            pieces.pop()  # what ends the turn
        text = "".join(piece if isinstance(piece, str) else self.codec.marked([piece]) for piece in pieces)
        read = grammar.parse(text, "", [PROBE_TOOL], ended=True)
        return [(c.name, dict(c.arguments)) for c in read.tool_calls if isinstance(c, ToolCall)] == [
            (PROBE_CALL.name, dict(PROBE_CALL.arguments))
        ] and len(read.tool_calls) == 1

    def _find_reasoning(self) -> Reasoning | None:
        source = self.template.source
        for opens, closes in REASONING_TAGS:
            if closes in source or (closes in self.codec.controls and opens.strip() in self.codec.controls):
                return Reasoning(opens.strip(), closes, self._reasoning_closing(closes))
        return None

    def _reasoning_closing(self, closes: str) -> str:
        """What the template writes between reasoning and content."""
        field = self.forms.reasoning_field
        if field is not None:
            said = self._try([USER, {"role": "assistant", "content": sentinel(2), field: sentinel(1)}])
            if said and sentinel(1) in said and sentinel(2) in said:
                between = said[said.index(sentinel(1)) + 9 : said.rindex(sentinel(2))]
                if closes in between:
                    return between
        return f"\n{closes}\n\n"

    def _ending_of_text(self) -> Ending:
        said = {"role": "assistant", "content": sentinel(1)}
        alone = self._tokens_after(sentinel(1), [USER, said])
        later = self._tokens_after(sentinel(1), [USER, said, {"role": "user", "content": sentinel(2)}], sentinel(2))
        if not later:
            why = f"the chat template of {self.template.name} ends turns without a token of their own: not supported"
            raise ConfigurationError(self._refusal or why)
        return Ending((alone or later)[0], later[0])

    def _ending_of_calls(self, stops: set[int], text: Ending) -> Ending:
        if self.forms.calls_in_content:
            return text
        said = self._calling(self.call("f", {"key": sentinel(1)}, sentinel(3)))
        answer = {"role": "tool", "name": "f", "tool_call_id": sentinel(3), "content": sentinel(2)}
        alone = self._tokens_after(sentinel(1), [USER, said])
        later = self._tokens_after(sentinel(1), [USER, said, answer], sentinel(2))
        candidates = [token for token in alone if token in stops] or alone or later
        if not candidates or not later:
            return text
        return Ending(candidates[0], candidates[0] if candidates[0] in later else later[0])

    def _opening_length(self) -> int:
        """How many tokens open a turn of the model, at most."""
        said = {"role": "assistant", "content": "x"}
        acting = self._calling(self.call("f", {"key": "x"}, "call00001"))
        answer = {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "x"}
        lengths = [0]
        for messages in ([USER], [USER, said, USER], [USER, acting, answer]):
            opened, closed = (self._try(messages, opens=opens) for opens in (True, False))
            if opened is not None and closed is not None:
                rest = _rest(self.codec.split(closed), self.codec.split(opened))
                lengths.append(sum(1 if isinstance(p, int) else len(self.codec.encode_text(p)) for p in rest))
        return max(lengths)

    def _tokens_after(self, mark: str, messages: list[Entry], until: str | None = None) -> list[int]:
        """The control tokens after a sentinel that are not part of the turn itself."""
        said = self._try(messages) or ""
        tail = said.rpartition(mark)[2] if mark in said else ""
        if until is not None and until in tail:
            tail = tail.partition(until)[0]
        return [p for p in self.codec.split(tail) if isinstance(p, int) and p not in self._markers]

    def _try(self, messages: list[Entry], *, opens: bool = False) -> str | None:
        try:
            return self.template.render(messages, opens=opens)
        except TemplateRefused as refused:
            self._refusal = str(refused)
            return None


def safe_texts(schema: Any, safe: Callable[[str], str]) -> Any:
    """A schema whose texts have been passed through a function, but for its keys and its types."""
    if isinstance(schema, Mapping):
        kept = ("type", "name", "required")
        return {key: part if key in kept else safe_texts(part, safe) for key, part in schema.items()}
    if isinstance(schema, list | tuple):
        return [safe_texts(part, safe) for part in schema]
    return safe(schema) if isinstance(schema, str) else schema


def safe_values(value: Any, safe: Callable[[str], str]) -> Any:
    """A JSON value whose texts have all been passed through a function."""
    if isinstance(value, str):
        return safe(value)
    if isinstance(value, Mapping):
        return {safe_values(key, safe): safe_values(part, safe) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [safe_values(part, safe) for part in value]
    return value


def _rest(before: list[int | str], whole: list[int | str]) -> list[int | str]:
    """What a sequence of tokens and texts has beyond the beginning that it shares with another."""
    same = 0
    while same < min(len(before), len(whole)) and before[same] == whole[same]:
        same += 1
    rest = whole[same:]
    if rest and same < len(before) and isinstance(rest[0], str) and isinstance(before[same], str):
        pairs = enumerate(zip(rest[0], str(before[same]), strict=False))
        parts = next((at for at, (a, b) in pairs if a != b), min(len(rest[0]), len(str(before[same]))))
        rest[0] = rest[0][parts:]
    return rest
