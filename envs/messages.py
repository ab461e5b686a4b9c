"""Chat messages in OpenAI's form, as immutable values.

An *action* is one `AssistantMessage`; an *observation* is a tuple of the messages that are new since the last action.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeAlias

from toolgym.envs.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asked for, its arguments parsed from JSON but not yet checked against the tool's schema."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


class CallFault(StrEnum):
    """What is wrong with a call that could not be parsed."""

    BAD_JSON = "bad_json"
    BAD_ARGUMENTS = "bad_arguments"
    CUT_OFF = "cut_off"
    NO_NAME = "no_name"
    MALFORMED = "malformed"
    IN_REASONING = "in_reasoning"


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """A call that could not be parsed. It is answered like any other, with the reason, so that nothing vanishes.

    Attributes:
        raw: the text of the call as the model wrote it.
        error: why it could not be parsed, in words for the model.
        name: the tool's name, if that much could be read.
        id: see `ToolCall.id`.
        fault: the kind of error.
    """

    raw: str
    error: str
    name: str | None = None
    id: str = ""
    fault: CallFault = CallFault.MALFORMED


@dataclass(frozen=True, slots=True)
class SystemMessage:
    """Standing instructions."""

    content: str


@dataclass(frozen=True, slots=True)
class UserMessage:
    """A task, or a later word of the user."""

    content: str


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """What the model said: one action.

    Attributes:
        content: the visible text.
        tool_calls: every call of this message in the model's order, those that could not be parsed among them.
        reasoning: the thinking before the content, if the model's format keeps it apart.
    """

    content: str = ""
    tool_calls: tuple[ToolCall | InvalidToolCall, ...] = ()
    reasoning: str | None = None

    def with_call_ids(self, prefix: str) -> "AssistantMessage":
        """The same message in which every call without an id has one: ``prefix`` and its number from 0."""
        if all(call.id for call in self.tool_calls):
            return self
        calls = (c if c.id else replace(c, id=f"{prefix}{k}") for k, c in enumerate(self.tool_calls))
        return replace(self, tool_calls=tuple(calls))


@dataclass(frozen=True, slots=True)
class ToolMessage:
    """The answer to one tool call."""

    content: str
    tool_call_id: str = ""
    name: str | None = None


Message: TypeAlias = SystemMessage | UserMessage | AssistantMessage | ToolMessage
Observation: TypeAlias = tuple[Message, ...]


def to_dict(message: Message) -> dict[str, Any]:
    """The message as a JSON-ready dict in the form of OpenAI's chat completions.

    Two extensions: ``reasoning`` on assistant messages, and ``error`` and ``fault`` on a call that could not be
    parsed, whose raw text stands where its arguments would.
    """
    match message:
        case SystemMessage():
            return {"role": "system", "content": message.content}
        case UserMessage():
            return {"role": "user", "content": message.content}
        case ToolMessage():
            named = {} if message.name is None else {"name": message.name}
            return {"role": "tool", "content": message.content, "tool_call_id": message.tool_call_id, **named}
        case AssistantMessage():
            entry: dict[str, Any] = {"role": "assistant", "content": message.content}
            if message.reasoning is not None:
                entry["reasoning"] = message.reasoning
            if message.tool_calls:
                entry["tool_calls"] = [_call_to_dict(call) for call in message.tool_calls]
            return entry
    raise ConfigurationError(f"expected a message of toolgym.envs.messages, actual {type(message).__name__}")


def from_dict(entry: Mapping[str, Any]) -> Message:
    """The inverse of `to_dict`; also reads plain OpenAI messages whose content is text.

    Raises:
        ConfigurationError: an unknown role, or content that is not text.
    """
    role, content = entry.get("role"), entry.get("content")
    content = "" if content is None else content
    if not isinstance(content, str):
        raise ConfigurationError(f"expected message content as text, actual {type(content).__name__}: {content!r}")
    match role:
        case "system":
            return SystemMessage(content)
        case "user":
            return UserMessage(content)
        case "tool":
            return ToolMessage(content, entry.get("tool_call_id", ""), entry.get("name"))
        case "assistant":
            calls = tuple(_call_from_dict(call) for call in entry.get("tool_calls") or ())
            return AssistantMessage(content, calls, entry.get("reasoning"))
    raise ConfigurationError(f"expected role system, user, assistant or tool, actual {role!r}")


def _call_to_dict(call: ToolCall | InvalidToolCall) -> dict[str, Any]:
    if isinstance(call, InvalidToolCall):
        function = {"name": call.name, "arguments": call.raw}
        return {"id": call.id, "type": "function", "function": function, "error": call.error, "fault": call.fault.value}
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _call_from_dict(entry: Mapping[str, Any]) -> ToolCall | InvalidToolCall:
    function, call_id = entry["function"], entry.get("id", "")
    if "error" in entry:
        fault = CallFault(entry.get("fault", CallFault.MALFORMED))
        return InvalidToolCall(function["arguments"], entry["error"], function["name"], call_id, fault)
    arguments = function["arguments"]
    return ToolCall(function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments, call_id)
