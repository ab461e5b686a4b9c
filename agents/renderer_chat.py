"""`RendererChatFormat`: a model family that the renderers library knows, by its code and its parsers."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from toolgym.agents.calls.values import Call, in_reasoning, make_call
from toolgym.agents.chat import ChatFormat, PromptIds, TemplateRefused, as_list
from toolgym.agents.codec import TokenCodec
from toolgym.agents.dialect import safe_values
from toolgym.agents.probes import certify
from toolgym.agents.template_chat import TemplateChatFormat
from toolgym.envs.errors import ConfigurationError
from toolgym.envs.messages import (
    AssistantMessage,
    CallFault,
    InvalidToolCall,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)

Entry = dict[str, Any]
_FAULTS = {
    "invalid_json": (CallFault.BAD_JSON, "The call is not valid JSON."),
    "unclosed_block": (CallFault.CUT_OFF, "The call has no closing tag."),
    "missing_name": (CallFault.NO_NAME, "The call has no name."),
    "malformed_structure": (CallFault.MALFORMED, "The call is malformed."),
}


class RendererChatFormat(ChatFormat):
    """A format of the renderers library (PyPI: renderers), with literals of control tokens in texts kept harmless.

    Reasoning that was sampled is always kept in the prompt, also across user turns.

    Args:
        tokenizer: the model's.
        family: as the library names it, e.g. ``"qwen3"``.
        stops: tokens that end a turn, beyond those of the family.
        reference: the model's own template, which the certificate compares with; None: the library's whole rendering.
        name: of the model, for error messages.
        options: of the family, e.g. ``enable_thinking``.

    Raises:
        ConfigurationError: an unknown family or option, or a tokenizer that is not the family's.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        family: str,
        *,
        stops: Sequence[int] = (),
        reference: TemplateChatFormat | None = None,
        name: str = "the model",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = f"renderers' {family}, for {name}"
        self._codec = TokenCodec(tokenizer, name)
        self._renderer = _make(family, _Tokenizer(self._codec), options or {})
        self._reference = reference
        self.call_syntax = f"renderers' {family}" if reference is None else reference.call_syntax
        own = (int(token) for token in self._renderer.get_stop_token_ids())
        self.stop_token_ids = tuple(dict.fromkeys([*own, *stops]))
        self.certificate = certify(self)

    def parse(
        self,
        completion_ids: Sequence[int],
        prompt_ids: PromptIds,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> AssistantMessage:
        """See `ChatFormat.parse`. By the library's parser where there is no template to find out the syntax from."""
        if self._reference is not None:
            return self._reference.parse(completion_ids, prompt_ids, tools)
        ids = list(completion_ids)
        try:
            parsed = self._renderer.parse_response(ids, prompt_ids=self._opening(prompt_ids), tools=list(tools) or None)
        except Exception:  # noqa: BLE001 - the library promises no kind of error for what models write
            reason = "The message cannot be parsed: perhaps a call is nested too deeply or has a huge number."
            return AssistantMessage("", (InvalidToolCall(self.decode(ids), reason),))
        calls = tuple(_call(call) for call in parsed.tool_calls)
        if self._thinks_on(prompt_ids, ids):
            # The library takes a call for the end of reasoning that was never closed, and would have it run.
            calls = tuple(in_reasoning(call, "</think>") for call in calls)
        return AssistantMessage(parsed.content or "", calls, parsed.reasoning_content or None)

    def _thinks_on(self, prompt_ids: PromptIds, ids: Sequence[int]) -> bool:
        """Whether a turn opened its reasoning and never closed it."""
        opened, said = self.decode(self._opening(prompt_ids)), self.decode(ids)
        began = opened.rfind("<think>") > opened.rfind("</think>") or said.lstrip().startswith("<think>")
        return began and "</think>" not in said

    def write(self, message: AssistantMessage | str) -> list[int]:
        """See `ChatFormat.write`."""
        if self._reference is not None:
            return self._reference.write(message)
        if isinstance(message, str):
            return [*self._codec.encode(message), self.stop_token_ids[0]]
        if "</think>" in message.content:
            raise ConfigurationError("content contains </think>: put reasoning into the message's own field")
        # A turn that is not the last one is rendered bare; only reasoning is written in the last turn's form.
        after = [] if message.reasoning is not None else [{"role": "user", "content": ""}]
        turns = [{"role": "user", "content": ""}, self._entry(message), *after]
        rendered = self._renderer.render(turns)
        columns = zip(rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=True)
        ids = [int(token) for token, owner, sampled in columns if owner == 1 and sampled]
        opened = list(self._renderer.render_ids(turns[:1], add_generation_prompt=True))
        bare = list(self._renderer.render_ids(turns[:1], add_generation_prompt=False))
        prefill = opened[len(bare) :]
        # What the prompt already holds of the turn is not said again.
        overlap = next((k for k in range(min(len(prefill), len(ids)), 0, -1) if prefill[-k:] == ids[:k]), 0)
        if message.reasoning is not None and overlap and self._closes_reasoning(prefill):
            raise ConfigurationError("reasoning cannot be written: turns are opened with an empty one")
        return ids[overlap:]

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `ChatFormat.decode`."""
        return self._codec.decode(token_ids)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, opens: bool) -> list[int]:
        """See `ChatFormat.render`."""
        if self._reference is not None:
            return self._reference.render(messages, tools, opens=opens)
        entries = [self._entry(message) for message in messages]
        return self._rendered(entries, tools, opens=opens)

    @property
    def fingerprint(self) -> str:
        """See `ChatFormat.fingerprint`."""
        return self._codec.fingerprint(self.name, self._reference.fingerprint if self._reference else "")

    @functools.cached_property
    def control_token_ids(self) -> frozenset[int]:
        """See `ChatFormat.control_token_ids`."""
        return frozenset(self._codec.controls.values())

    def writes_inline(self, message: AssistantMessage) -> bool:
        """See `ChatFormat.writes_inline`."""
        return self._reference is not None and self._reference.writes_inline(message)

    @property
    def turn_end_token_ids(self) -> frozenset[int]:
        """See `ChatFormat.turn_end_token_ids`."""
        reference = () if self._reference is None else self._reference.turn_end_token_ids
        return frozenset((*self.stop_token_ids, *reference))

    def inline_reasoning(self, reasoning: str, content: str) -> str | None:
        """See `ChatFormat.inline_reasoning`."""
        return None if self._reference is None else self._reference.inline_reasoning(reasoning, content)

    def _open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        return self._rendered([self._entry(message) for message in messages], tools, opens=True)

    def _extend(
        self,
        prompt_ids: PromptIds,
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        opening, sampled = self._opening(prompt_ids), list(completion_ids)
        known = [*opening, *sampled]
        if sampled and sampled[-1] in self.stop_token_ids and sampled[-1] not in self._ends:
            sampled.append(self.stop_token_ids[0])  # ended by another token than the template writes
        entries = [self._entry(message) for message in new_messages]
        bridged = self._renderer.bridge_to_next_turn(opening, sampled, entries, tools=list(tools) or None)
        if bridged is None:
            raise TemplateRefused(f"{self.name} cannot be continued after this turn")
        if list(bridged.token_ids[: len(known)]) != known:
            raise TemplateRefused(f"{self.name} would drop tokens that were sampled after the end of the turn")
        return [int(token) for token in bridged.token_ids[len(known) :]]

    @property
    def _ends(self) -> frozenset[int]:
        """The tokens that end turns in the template."""
        return frozenset(self.stop_token_ids[:1]) if self._reference is None else self._reference.turn_end_token_ids

    def _rendered(self, entries: list[Entry], tools: Sequence[Mapping[str, Any]], *, opens: bool) -> list[int]:
        safe = [safe_values(tool, self._codec.neutralized) for tool in tools]
        try:
            ids = self._renderer.render_ids(entries, tools=safe or None, add_generation_prompt=opens)
        except Exception as error:  # the library promises no kind of error for what it cannot write
            raise TemplateRefused(f"{self.name} cannot write this: {type(error).__name__}: {error}") from error
        return [int(token) for token in ids]

    def _opening(self, prompt_ids: PromptIds) -> list[int]:
        """The prompt from its last stop token on: all that the format looks at, whatever the history before it."""
        stops = (k for k in range(len(prompt_ids) - 1, -1, -1) if prompt_ids[k] in self.stop_token_ids)
        return as_list(prompt_ids[next(stops, 0) :])

    def _closes_reasoning(self, prefill: Sequence[int]) -> bool:
        return "</think>" in self._codec.decode(prefill)

    def _entry(self, message: Message) -> Entry:
        """A message in the library's form, its text neutralized."""
        safe = self._codec.neutralized
        match message:
            case SystemMessage(content):
                return {"role": "system", "content": safe(content)}
            case UserMessage(content):
                return {"role": "user", "content": safe(content)}
            case ToolMessage(content, call_id, name):
                named = {} if name is None else {"name": safe(name)}
                return {"role": "tool", "content": safe(content), "tool_call_id": safe(call_id), **named}
            case AssistantMessage(content, calls, reasoning):
                entry: Entry = {"role": "assistant", "content": safe(content)}
                if reasoning is not None:
                    entry["reasoning_content"] = safe(reasoning)
                if calls:
                    entry["tool_calls"] = [self._written(call) for call in calls]
                return entry

    def _written(self, call: ToolCall | InvalidToolCall) -> Entry:
        if isinstance(call, InvalidToolCall):
            raise ConfigurationError("a call that could not be parsed has no canonical form: write its raw text")
        safe = self._codec.neutralized
        function = {"name": safe(call.name), "arguments": safe_values(dict(call.arguments), safe)}
        return {"id": safe(call.id), "type": "function", "function": function}


class _Tokenizer:
    """A codec in the form that the library asks for."""

    def __init__(self, codec: TokenCodec) -> None:
        self._codec = codec
        self.name_or_path = codec.name
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = None

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return self._codec.encode(text)

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        return self._codec.decode(list(token_ids))

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        return self._codec.token_id(tokens)


def known_family(model: str) -> str | None:
    """The library's family of a model by its exact name on the hub; None if it knows none."""
    from renderers.base import MODEL_RENDERER_MAP  # noqa: PLC0415 - needed here alone

    found: str | None = MODEL_RENDERER_MAP.get(model)
    return found


def _make(family: str, tokenizer: _Tokenizer, options: Mapping[str, Any]) -> Any:
    from renderers.base import create_renderer  # noqa: PLC0415 - needed here alone
    from renderers.configs import config_from_name  # noqa: PLC0415 - needed here alone

    try:
        config_type = type(config_from_name(family))
    except ValueError as error:
        raise ConfigurationError(f"the renderers library has no family {family!r}: {error}") from error
    try:
        config = config_type(**options)
        if "thinking_retention" in config_type.model_fields:
            config = config_type(**{"thinking_retention": "all", **options})
        return create_renderer(tokenizer, config)
    except Exception as error:  # whatever it raises here: the tokenizer or an option is not the family's
        raise ConfigurationError(f"renderers' {family} cannot be made of this tokenizer: {error}") from error


def _call(parsed: Any) -> Call:
    """A parsed call with what the parser lets pass checked."""
    status = str(parsed.status.value)
    if status in _FAULTS:
        fault, reason = _FAULTS[status]
        return InvalidToolCall(parsed.raw, reason, parsed.name or None, fault=fault)
    return make_call(parsed.raw, parsed.name, parsed.arguments)
