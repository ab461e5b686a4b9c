"""`TemplateChatFormat`: any chat template, extended exactly, without a line of code about its family."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tokenizers

from toolgym.agents.calls.registry import scaffold
from toolgym.agents.chat import ChatFormat, PromptIds, TemplateRefused, as_list
from toolgym.agents.codec import TokenCodec, fit, unmarked
from toolgym.agents.delta import DeltaWriter
from toolgym.agents.dialect import UNNAMED, USER, Dialect, Entry, TurnKind
from toolgym.agents.opening import OpeningWriter
from toolgym.agents.probes import certify
from toolgym.agents.template import ChatTemplate
from toolgym.envs.errors import ConfigurationError
from toolgym.envs.messages import AssistantMessage, InvalidToolCall, Message, ToolCall, ToolMessage, UserMessage

_PREFILL = 24  # how many tokens somebody may have added to the opening of a turn


class TemplateChatFormat(ChatFormat):
    """A chat format that is found out from a model's own template and tokenizer.

    What was sampled is kept as it is, also where the template would write it otherwise later on (most drop the
    reasoning of earlier turns): a prompt that is extended cannot forget.

    Args:
        tokenizer: the model's.
        template: its chat template, in Jinja.
        variables: what the template reads: its special tokens, options such as ``enable_thinking``.
        stops: ids of tokens that end a turn, beyond those which the template shows.
        syntax: name of the syntax of its calls; None finds it out.
        name: of the model, for error messages.

    Raises:
        ConfigurationError: the template is not valid, ends turns without a token, or the tokenizer cannot keep
            text and control tokens apart.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        template: str,
        *,
        variables: Mapping[str, Any] | None = None,
        stops: Sequence[int] = (),
        syntax: str | None = None,
        name: str = "the model",
    ) -> None:
        self.name = f"template of {name}"
        self._codec = TokenCodec(tokenizer, name, "\n".join((template, *scaffold())))
        self._template = ChatTemplate(template, variables or {}, name)
        self._dialect = Dialect(self._template, self._codec, stops, syntax)
        self._opener, self._delta = OpeningWriter(self._dialect), DeltaWriter(self._dialect)
        self._ends = {token for ending in self._dialect.endings.values() for token in (ending.stop, ending.history)}
        self._marked_opening = functools.lru_cache(256)(self._codec.marked)  # they are few, and come each turn
        self.stop_token_ids = self._dialect.stops
        self.call_syntax = self._dialect.grammar.name
        self.certificate = certify(self)

    def _open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        return self._opener.write(messages, tools)

    def _extend(
        self,
        prompt_ids: PromptIds,
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        answers = any(isinstance(message, ToolMessage) for message in new_messages)
        kind = TurnKind.CALLS if answers else TurnKind.TEXT
        if any(isinstance(message, ToolMessage) and not message.name for message in new_messages):
            new_messages = self._named(new_messages, self.parse(completion_ids, prompt_ids, tools).tool_calls)
        return self._closing(prompt_ids, completion_ids, kind) + self._delta.write(kind, new_messages, tools)

    def parse(
        self,
        completion_ids: Sequence[int],
        prompt_ids: PromptIds,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> AssistantMessage:
        """See `ChatFormat.parse`."""
        ended, ids = self._without_stop(completion_ids)
        return self._dialect.grammar.parse(self._codec.marked(ids), self._opening(prompt_ids), tools, ended=ended)

    @property
    def fingerprint(self) -> str:
        """See `ChatFormat.fingerprint`."""
        return self._codec.fingerprint(self._template.source, sorted(map(str, self._template.variables.items())))

    @property
    def control_token_ids(self) -> frozenset[int]:
        """See `ChatFormat.control_token_ids`."""
        return frozenset(self._codec.controls.values())

    def inline_reasoning(self, reasoning: str, content: str) -> str | None:
        """See `ChatFormat.inline_reasoning`."""
        tags = self._dialect.reasoning
        if tags is None:
            return f"<think>\n{reasoning}\n</think>\n\n{content}" if self._dialect.speaks_plainly else None
        opened = tags.opens in unmarked(self._opening(self.open([UserMessage("Hi.")], [])))
        return f"{'' if opened else tags.opens}\n{reasoning}{tags.closing}{content}"

    @property
    def turn_end_token_ids(self) -> frozenset[int]:
        """See `ChatFormat.turn_end_token_ids`."""
        return frozenset(ending.history for ending in self._dialect.endings.values())

    def writes_inline(self, message: AssistantMessage) -> bool:
        """See `ChatFormat.writes_inline`."""
        return self._dialect.writes_inline(message)

    def write(self, message: AssistantMessage | str) -> list[int]:
        """See `ChatFormat.write`."""
        if isinstance(message, str):
            return [*self._codec.encode(fit(message)), self._dialect.endings[TurnKind.TEXT].stop]
        self._check_writable(message)
        entry = self._dialect.entry(message)
        kind = TurnKind.CALLS if message.tool_calls else TurnKind.TEXT
        last = self._spoken(entry, kind, [])
        if message.reasoning is None:
            # Some templates open an empty reasoning in the last turn alone: nobody has to say that.
            later = self._spoken(entry, kind, self._follow_up(entry))
            return later if later and last[-len(later) :] == later else last
        return last

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `ChatFormat.decode`."""
        return self._codec.decode(token_ids)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, opens: bool) -> list[int]:
        """See `ChatFormat.render`."""
        entries = [self._dialect.entry(message, fit) for message in messages]
        return self._codec.encode_whole(self._template.render(entries, tools, opens=opens))

    def _named(self, messages: Sequence[Message], calls: Sequence[ToolCall | InvalidToolCall]) -> tuple[Message, ...]:
        """Answers without a name get that of the call which they answer, by its id or else by its place."""
        names = {call.id: call.name for call in calls if call.id}
        answers = [message for message in messages if isinstance(message, ToolMessage)]
        pairs = zip(answers, calls, strict=False)
        displaced = any(m.name and call.name and m.name != call.name for m, call in pairs)
        unknown = [m.tool_call_id for m in answers if m.tool_call_id not in names]
        in_order = unknown == sorted(unknown, key=lambda call_id: (len(call_id), call_id))  # call_9 before call_10
        if (displaced or not in_order) and len({call.name for call in calls}) > 1:
            raise TemplateRefused("answers without a name, in another order than the calls: name each")
        places = iter([*(call.name for call in calls), *[None] * len(messages)])
        named: list[Message] = []
        for message in messages:
            if isinstance(message, ToolMessage):
                placed = next(places)
                found = message.name or names.get(message.tool_call_id) or placed
                message = replace(message, name=found or UNNAMED)  # noqa: PLW2901
            named.append(message)
        return tuple(named)

    def _without_stop(self, completion_ids: Sequence[int]) -> tuple[bool, list[int]]:
        """Whether a turn was ended by its model, and its ids up to there."""
        ids = list(completion_ids)
        end = next((at for at, token in enumerate(ids) if token in self.stop_token_ids), None)
        return (False, ids) if end is None else (True, ids[:end])

    def _opening(self, prompt_ids: PromptIds) -> str:
        """The opening of the turn, marked: the prompt from its last end of a turn on, whatever the history before."""
        longest = self._dialect.opening_length + _PREFILL
        ids, ends = as_list(prompt_ids[max(0, len(prompt_ids) - longest) :]), self._ends
        start = next((at + 1 for at in range(len(ids) - 1, -1, -1) if ids[at] in ends), 0)
        return self._marked_opening(tuple(ids[start:]))

    def _closing(self, prompt_ids: PromptIds, completion_ids: Sequence[int], kind: TurnKind) -> list[int]:
        """What closes the turn where the model did not, or with another token than the one for what follows."""
        ending, last = self._dialect.endings[kind], completion_ids[-1] if len(completion_ids) else None
        if last in (ending.stop, ending.history):
            return []
        calls = self._dialect.endings[TurnKind.CALLS]
        if kind is TurnKind.TEXT and last == calls.stop:
            raise TemplateRefused(f"the {self.name} has the answers follow a turn that ends with {self.decode([last])}")
        _, ids = self._without_stop(completion_ids)
        open_parts = self._dialect.grammar.closing(self._codec.marked(ids), self._opening(prompt_ids))
        return [*self._codec.encode(open_parts), ending.history]

    def _check_writable(self, message: AssistantMessage) -> None:
        if any(isinstance(call, InvalidToolCall) for call in message.tool_calls):
            raise ConfigurationError("a call that could not be parsed has no canonical form: write its raw text")
        if "</think>" in message.content:
            raise ConfigurationError("content contains </think>: put reasoning into the message's own field")
        if message.reasoning is not None:
            opening = self.open([UserMessage("Hi.")], [])
            if self._dialect.forms.reasoning_field is None:
                raise ConfigurationError(f"the {self.name} has no place for reasoning")
            if self._closed_reasoning(self._opening(opening)):
                raise ConfigurationError("reasoning cannot be written: the template opens turns with an empty one")

    def _closed_reasoning(self, opening: str) -> bool:
        tags = self._dialect.reasoning
        return tags is not None and self._codec.mark(tags.closes) in opening

    @functools.cached_property
    def _opened(self) -> list[int]:
        """The prompt of the conversation in which `write` has the model speak."""
        return self._codec.encode(self._template.render([USER], opens=True))

    def _follow_up(self, entry: Entry) -> list[Entry]:
        calls = entry.get("tool_calls") or []
        if not calls:
            return [USER]
        return [{"role": "tool", "name": c["function"]["name"], "tool_call_id": c["id"], "content": "x"} for c in calls]

    def _spoken(self, entry: Entry, kind: TurnKind, later: Sequence[Entry]) -> list[int]:
        """What a model says so that its turn reads like the template's: from where its turn was opened to its end."""
        opened = self._opened
        try:
            whole = self._codec.encode(self._template.render([USER, entry, *later], opens=False))
        except TemplateRefused:
            if later:
                return []
            raise
        same = next((k for k, (a, b) in enumerate(zip(opened, whole, strict=False)) if a != b), len(opened))
        ending = self._dialect.endings[kind]
        ends = (ending.stop, ending.history) if later else (ending.stop,)
        end = next((k for k in range(same, len(whole)) if whole[k] in ends), len(whole))
        body = whole[same:end]
        tags = self._dialect.reasoning
        if tags is not None and same < len(opened):
            # The turn was opened inside of reasoning that the history does not show: it is closed first.
            prefill = self._codec.marked(opened[same:])
            if self._codec.mark(tags.opens) in prefill and self._codec.mark(tags.closes) not in prefill:
                body = [*self._codec.encode(tags.closing), *body]
        return [*body, ending.stop]
