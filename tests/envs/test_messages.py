"""Messages are values in OpenAI's form, and the spaces around them are honest."""

import json
from typing import Any

import gymnasium
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgym.envs import (
    AssistantMessage,
    AssistantMessageSpace,
    ConfigurationError,
    InvalidToolCall,
    Message,
    MessagesSpace,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from toolgym.envs.messages import from_dict, to_dict

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(ToolCall, st.text(), st.dictionaries(st.text(), json_values, max_size=3), st.text()) | st.builds(
    InvalidToolCall, st.text(), st.text(), st.none() | st.text(), st.text()
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(SystemMessage, st.text()),
    st.builds(UserMessage, st.text()),
    st.builds(ToolMessage, st.text(), st.text(), st.none() | st.text()),
    st.builds(AssistantMessage, st.text(), st.lists(calls, max_size=3).map(tuple), st.none() | st.text()),
)


@given(messages)
def test_messages_survive_json(message: Message) -> None:
    assert from_dict(json.loads(json.dumps(to_dict(message)))) == message


def test_plain_openai_messages_are_read() -> None:
    entry = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
    }
    assert from_dict(entry) == AssistantMessage("", (ToolCall("f", {"x": 1}, "a"),))


@pytest.mark.parametrize(
    "entry", [{"role": "robot"}, {"content": "x"}, {"role": "user", "content": [{"type": "image"}]}]
)
def test_what_is_no_message_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        from_dict(entry)


@given(st.integers(0, 2**31), st.lists(messages, max_size=4))
def test_spaces_contain_what_they_sample_and_what_is_said(seed: int, said: list[Message]) -> None:
    observations, actions = MessagesSpace(seed), AssistantMessageSpace(("f", "g"), seed=seed)
    assert observations.sample() in observations
    assert actions.sample() in actions
    assert tuple(said) in observations
    for message in said:
        assert (message in actions) == isinstance(message, AssistantMessage)


def test_spaces_sample_by_their_seed() -> None:
    for space in (MessagesSpace(), AssistantMessageSpace(("f",))):
        drawn = []
        for _ in range(2):
            space.seed(3)
            drawn.append([space.sample() for _ in range(10)])
        assert drawn[0] == drawn[1]
        assert len({repr(sample) for sample in drawn[0]}) > 3


@pytest.mark.parametrize("value", ["text", [], ("text",), None, 3, {"role": "user"}])
def test_spaces_refuse_other_things(value: Any) -> None:
    assert value not in MessagesSpace()
    assert value not in AssistantMessageSpace()
    assert (value in AssistantMessageSpace(optional=True)) == (value is None)


def test_spaces_compare_by_value_and_batch() -> None:
    assert MessagesSpace() == MessagesSpace()
    assert AssistantMessageSpace(("f",)) == AssistantMessageSpace(("f",)) != AssistantMessageSpace(("g",))
    batched = gymnasium.vector.utils.batch_space(AssistantMessageSpace(("f",)), 3)
    assert batched.sample() in batched
