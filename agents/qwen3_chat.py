"""Qwen3's chat format, by the renderers library, with special-token literals in anybody's text kept harmless."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from renderers.base import ParsedToolCall, ToolCallParseStatus
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer

from toolgym.agents.chat import ChatFormat, TemplateRefused, read_json
from toolgym.agents.protected_tokenizer import ProtectedTokenizer
from toolgym.envs.errors import ConfigurationError
from toolgym.envs.messages import (
    AssistantMessage,
    InvalidToolCall,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    to_dict,
)

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
_MAX_DEPTH = 64  # of a call's arguments: far below what recursive code can take, far above what a tool asks for
_REASONS = {
    ToolCallParseStatus.INVALID_JSON: "The call is not valid JSON.",
    ToolCallParseStatus.UNCLOSED_BLOCK: "The call has no closing </tool_call>.",
    ToolCallParseStatus.MISSING_NAME: 'The call has no "name".',
}


class Qwen3ChatFormat(ChatFormat):
    """The format of Qwen3 models: ``<|im_start|>`` turns, calls as JSON in ``<tool_call>``.

    Reasoning that was sampled is always kept in the prompt, also across user turns, where Qwen3's own template would
    drop it: a prompt that is extended cannot forget.

    Args:
        tokenizer: with Qwen3's special tokens.
        name: of the model, for error messages.
        enable_thinking: False prefills an empty reasoning block in every turn, as Qwen3's template does.

    Raises:
        ConfigurationError: the tokenizer lacks one of Qwen3's special tokens.
    """

    model_types = ("qwen3", "qwen3_moe")

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, name: str = "qwen3", enable_thinking: bool = True) -> None:
        self.name = name
        missing = [token for token in SPECIAL_TOKENS if tokenizer.token_to_id(token) is None]
        if missing:
            raise ConfigurationError(f"tokenizer {name} is not Qwen3's: it has no {', '.join(missing)}")
        self._tokenizer = ProtectedTokenizer(tokenizer, name)
        config = Qwen3RendererConfig(enable_thinking=enable_thinking, thinking_retention="all")
        self._renderer = Qwen3Renderer(self._tokenizer, config)
        self._thinking = enable_thinking
        self._think, self._think_end = (tokenizer.token_to_id(token) for token in ("<think>", "</think>"))
        self._tool_call, self._tool_call_end = (tokenizer.token_to_id(t) for t in ("<tool_call>", "</tool_call>"))
        self._stop = int(self._renderer.get_stop_token_ids()[0])
        self.stop_token_ids = tuple(self._renderer.get_stop_token_ids())

    @classmethod
    def from_folder(cls, folder: Path, *, enable_thinking: bool = True) -> "Qwen3ChatFormat":
        """The format of a model folder. If the folder has a chat template, it must agree with the format.

        Raises:
            TemplateRefused: the folder's template renders a probe conversation to other tokens.
        """
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise ConfigurationError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
        chat = cls(tokenizer, name=folder.name, enable_thinking=enable_thinking)
        chat.check_template(folder)
        return chat

    def check_template(self, folder: Path) -> None:
        """Compare with the chat template that a model folder ships, if it does, on a few probe conversations.

        Raises:
            TemplateRefused: see `from_folder`.
            ConfigurationError: there is a template, but transformers, which renders it, is not installed.
        """
        if not _has_template(folder):
            return
        try:
            import jinja2  # noqa: PLC0415 - needed here alone
            from transformers import AutoTokenizer  # noqa: PLC0415 - heavy, and needed here alone
        except ImportError as error:
            raise ConfigurationError(f"{folder} has a chat template: pip install transformers to check it") from error
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        for messages, offered, ours in self._probes():
            try:
                theirs = tokenizer.apply_chat_template(
                    messages,
                    tools=offered or None,
                    add_generation_prompt=True,
                    enable_thinking=self._thinking,
                    return_dict=False,
                )
            except jinja2.TemplateError as error:
                raise TemplateRefused(f"the chat template in {folder} is not Qwen3's: {error}") from error
            if list(theirs) != ours:
                raise TemplateRefused(
                    f"the chat template in {folder} is not Qwen3's: it renders {tokenizer.decode(theirs)!r} where "
                    f"Qwen3's format has {self.decode(ours)!r}"
                )

    def _probes(self) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]], list[int]]]:
        """Conversations for a template, the tools offered, and the ids that this format has for them."""
        tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
        system, user = SystemMessage("be brief"), UserMessage("What is 1 + 1?")
        openings: tuple[tuple[Message, ...], ...] = ((user,), (system, user))
        for messages in openings:
            for offered in ([], tools):
                yield [to_dict(message) for message in messages], offered, self.open(messages, offered)
        if not self._thinking:
            return  # the template drops the empty reasoning of earlier turns, which a prompt that is extended keeps
        said, answer = AssistantMessage("", (ToolCall("f", {}), ToolCall("f", {"x": 1}))), ToolMessage("2")
        prompt, sampled = self.open((system, user), tools), self.write(said)
        conversation: tuple[Message, ...] = (system, user, said, answer, answer)
        entries = [to_dict(message) for message in conversation]
        for call, arguments in zip(entries[2]["tool_calls"], ({}, {"x": 1}), strict=True):
            call["function"]["arguments"] = arguments  # templates take them as objects
        yield entries, tools, prompt + sampled + self.extend(prompt, sampled, (answer, answer))

    def open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """See `ChatFormat.open`."""
        if self._tokenizer.has_literal(json.dumps(tools, ensure_ascii=False)):
            raise ConfigurationError("a tool's schema contains the literal of a special token: reword its description")
        entries = [self._entry(message) for message in messages]
        return list(self._renderer.render_ids(entries, tools=list(tools) or None, add_generation_prompt=True))

    def extend(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], new_messages: Sequence[Message]
    ) -> list[int]:
        """See `ChatFormat.extend`."""
        opening, sampled = self._opening(prompt_ids), list(completion_ids)
        known = [*opening, *sampled]
        entries = [self._entry(message) for message in new_messages]
        bridged = self._renderer.bridge_to_next_turn(opening, sampled, entries)
        if bridged is None:
            raise TemplateRefused("Qwen3's format cannot continue this turn: its reasoning was closed by a stop token")
        if bridged.token_ids[: len(known)] != known:
            raise TemplateRefused("Qwen3's format would drop tokens that were sampled after the end of the turn")
        return list(bridged.token_ids[len(known) :])

    def parse(self, completion_ids: Sequence[int], prompt_ids: Sequence[int]) -> AssistantMessage:
        """See `ChatFormat.parse`."""
        ids, opening = list(completion_ids), self._opening(prompt_ids)
        replaced: dict[str, InvalidToolCall] = {}
        try:
            parsed = self._renderer.parse_response(ids, prompt_ids=opening)
        except (RecursionError, ValueError):
            # One call's JSON is nested too deeply, or has a number of over 4,300 digits: the others must not suffer.
            ids, replaced = self._without_oversized_calls(ids)
            parsed = self._renderer.parse_response(ids, prompt_ids=opening)
        calls = tuple(replaced.get(call.raw) or _call(call) for call in parsed.tool_calls)
        content, reasoning = parsed.content, parsed.reasoning_content
        if reasoning is not None and self._think_end in ids:
            # The token ends the reasoning. The parser looks for its text, which reasoning may spell in other tokens.
            end = ids.index(self._think_end)
            ends = (self._tool_call, *self.stop_token_ids)
            start = next((k for k in range(end, len(ids)) if ids[k] in ends), len(ids))
            reasoning = self.decode([t for t in ids[:end] if t != self._think]).strip()
            content = self.decode(ids[end + 1 : start]).strip()
        return AssistantMessage(content, calls, reasoning)

    def _without_oversized_calls(self, ids: list[int]) -> tuple[list[int], dict[str, InvalidToolCall]]:
        """The ids with a short stand-in for each call that the JSON parser cannot take, and what it stands for."""
        kept: list[int] = []
        replaced: dict[str, InvalidToolCall] = {}
        at = 0
        while at < len(ids):
            kept.append(ids[at])
            at += 1
            if ids[at - 1] != self._tool_call:
                continue
            ends = (k for k in range(at, len(ids)) if ids[k] in (self._tool_call_end, *self.stop_token_ids))
            end = next(ends, len(ids))
            raw = self.decode(ids[at:end]).strip()
            if _oversized(raw):
                stand_in = f"{{{len(replaced)}"
                replaced[stand_in] = InvalidToolCall(raw, "The call is nested too deeply or has a huge number.")
                kept += self._tokenizer.encode(stand_in)
            else:
                kept += ids[at:end]
            at = end
        return kept, replaced

    def write(self, message: AssistantMessage | str) -> list[int]:
        """See `ChatFormat.write`."""
        if isinstance(message, str):
            return [*self._tokenizer.encode(message), self._stop]
        if message.reasoning is not None and not self._thinking:
            raise ConfigurationError("reasoning cannot be written with enable_thinking=False: it is prefilled as empty")
        # A turn that is not the last one is rendered bare; only reasoning is written in the last turn's form.
        after = [] if message.reasoning is not None else [{"role": "user", "content": ""}]
        turns = [{"role": "user", "content": ""}, self._entry(message), *after]
        rendered = self._renderer.render(turns)
        ids = [
            token
            for token, owner, sampled in zip(
                rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=True
            )
            if owner == 1 and sampled
        ]
        prefill = [] if self._thinking else self._tokenizer.encode("<think>\n\n</think>\n\n")
        return ids[len(prefill) :]

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `ChatFormat.decode`."""
        return self._tokenizer.decode(token_ids)

    def _opening(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt from its last stop token on: all that the format looks at, whatever the history before it."""
        stops = (k for k in range(len(prompt_ids) - 1, -1, -1) if prompt_ids[k] in self.stop_token_ids)
        return list(prompt_ids[next(stops, 0) :])

    def _entry(self, message: Message) -> dict[str, Any]:
        """A message in the renderer's form, its text protected."""
        protect = self._tokenizer.protect
        match message:
            case SystemMessage(content):
                return {"role": "system", "content": protect(content)}
            case UserMessage(content):
                return {"role": "user", "content": protect(content)}
            case ToolMessage(content):
                return {"role": "tool", "content": protect(content)}
            case AssistantMessage(content, calls, reasoning):
                if "</think>" in content:
                    raise ConfigurationError("content contains </think>: put reasoning into the message's own field")
                entry: dict[str, Any] = {"role": "assistant", "content": protect(content)}
                if reasoning is not None:
                    entry["reasoning_content"] = protect(reasoning)
                entry["tool_calls"] = [{"function": self._function(call)} for call in calls]
                return entry

    def _function(self, call: ToolCall | InvalidToolCall) -> dict[str, Any]:
        if isinstance(call, InvalidToolCall):
            raise ConfigurationError("a call that could not be parsed has no canonical form: write its raw text")
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        # JSON's own escapes say the same text without spelling a special token, or a mark of the tokenizer's.
        if self._tokenizer.has_literal(arguments):
            arguments = arguments.replace("<", "\\u003c")
        arguments = arguments.replace("\ufdd0", "\\ufdd0").replace("\ufdd1", "\\ufdd1")
        return {"name": self._tokenizer.protect(call.name), "arguments": arguments}


def _has_template(folder: Path) -> bool:
    """Whether a model folder ships a chat template, in any of the places where transformers looks for one."""
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    settings = folder / "tokenizer_config.json"
    return settings.exists() and bool(read_json(settings).get("chat_template"))


def _call(parsed: ParsedToolCall) -> ToolCall | InvalidToolCall:
    """A parsed call with what the parser lets pass checked: names are text, arguments are a JSON object."""
    raw, name = parsed.raw, parsed.name
    if parsed.status is not ToolCallParseStatus.OK:
        return InvalidToolCall(raw, _REASONS.get(parsed.status, f"The call is malformed ({parsed.status})."))
    if not isinstance(name, str):
        return InvalidToolCall(raw, f'"name" must be text, not {json.dumps(name)}.')
    if not isinstance(parsed.arguments, Mapping):
        return InvalidToolCall(raw, f'"arguments" must be a JSON object, not {type(parsed.arguments).__name__}.', name)
    if _depth(parsed.arguments) > _MAX_DEPTH:
        return InvalidToolCall(raw, f"The arguments are nested more than {_MAX_DEPTH} deep.", name)
    try:
        json.dumps([name, parsed.arguments], ensure_ascii=False, allow_nan=False).encode()
    except ValueError:  # NaN and infinity, lone surrogates
        return InvalidToolCall(raw, "The arguments hold something that JSON cannot: NaN, Infinity or half a character.")
    return ToolCall(name, dict(parsed.arguments))


def _depth(value: Any) -> int:
    """How deeply a JSON value is nested; without recursion, which deep nesting would exhaust."""
    depth, layer = 0, [value]
    while layer:
        depth += 1
        inner = (part.values() if isinstance(part, dict) else part for part in layer if isinstance(part, dict | list))
        layer = [part for parts in inner for part in parts]
    return depth


def _oversized(raw: str) -> bool:
    """Whether the JSON parser cannot even say that a text is no JSON."""
    try:
        json.loads(raw)
    except json.JSONDecodeError:
        return False
    except (RecursionError, ValueError):
        return True
    return False
