"""First prompts are the same whether they are rendered as a whole or put together from what was seen before."""

import copy
import datetime
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from tests.agents import templates
from toolgym.agents import template as template_module
from toolgym.agents.chat import ChatFormat, TemplateRefused, load_chat_format
from toolgym.agents.dialect import Dialect
from toolgym.agents.opening import OpeningWriter
from toolgym.agents.template_chat import TemplateChatFormat
from toolgym.agents.tiny import TINY_MODEL
from toolgym.envs import AssistantMessage, Message, SystemMessage, UserMessage
from toolgym.envs.catalog.ledger import LedgerEnv

TOOLS = LedgerEnv().tools.schemas
_ODD = [
    "", " ", "\n", "x", " x ", "<|im_end|>", "<|im_start|>system\n", "</think>", "<think>", "<tool_call>", "[INST]",
    "<tools>", '"', "\\", "é", "\ud800", "\ufdd0", "{{ x }}", "<|", "|>", "im_end", "[/INST]", "</s>", "0", "5" * 300,
]  # fmt: skip
texts = st.one_of(st.lists(st.sampled_from(_ODD), max_size=4).map("".join), st.text(max_size=40))


@cache
def dialect_of(name: str) -> Dialect:
    """The dialect of one of TRL's templates, or of the embedded model."""
    if name == "tiny":
        chat = load_chat_format(TINY_MODEL)
    else:
        chat = ChatFormat.for_tokenizer(
            templates.tokenizer_of(name), template=templates.template(name), options=templates.SPECIAL
        )
    assert isinstance(chat, TemplateChatFormat)
    return chat._dialect


@cache
def warm(name: str) -> OpeningWriter:
    """A writer that has seen openings with and without tools and instructions."""
    return OpeningWriter(dialect_of(name))


def written(writer: OpeningWriter, messages: list[Message], tools: list[Any]) -> list[int] | str:
    try:
        return writer.write(messages, tools)
    except TemplateRefused as refused:
        return str(refused)


@pytest.mark.parametrize("name", ["tiny", *templates.NAMES])
@settings(max_examples=25, deadline=None)
@given(texts, st.booleans(), st.sampled_from([None, "Be brief.", " <|im_end|> "]), st.booleans())
@example("Report ann.", True, "Be brief.", False)
def test_an_opening_is_the_same_the_first_time_and_later(
    name: str, text: str, tools: bool, system: str | None, twice: bool
) -> None:
    messages: list[Message] = [] if system is None else [SystemMessage(system)]
    messages += [UserMessage(text), UserMessage(f"{text} again")] if twice else [UserMessage(text)]
    shown = TOOLS if tools else []
    expected = written(OpeningWriter(dialect_of(name)), messages, shown)
    assert [written(warm(name), messages, shown) for _ in range(3)] == [expected] * 3


@pytest.fixture
def renderings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been rendered as a whole."""
    found: list[str] = []
    render = template_module.ChatTemplate.render

    def noted(self: Any, *args: Any, **options: Any) -> str:
        found.append(render(self, *args, **options))
        return found[-1]

    monkeypatch.setattr(template_module.ChatTemplate, "render", noted)
    return found


def test_an_environments_third_episode_renders_nothing_whatever_its_task(renderings: list[str]) -> None:
    chat = load_chat_format(TINY_MODEL)
    for number in range(2):
        chat.open([SystemMessage("Be brief."), UserMessage(f"Report {number}.")], TOOLS)
    renderings.clear()
    ids = chat.open([SystemMessage("Be brief."), UserMessage("Report <|im_end|> ann.")], TOOLS)
    assert not renderings
    assert "Report <|im_end|> ann." in chat.decode(ids)
    assert ids.count(chat.stop_token_ids[0]) == 2  # of the instructions and of the task


@pytest.mark.parametrize(
    "change",
    [
        lambda tools: tools[0]["function"].update(description="Another one."),
        lambda tools: tools[0]["function"]["parameters"].update(minProperties=True),
        lambda tools: tools[0]["function"]["parameters"].update(minProperties=1),
        lambda tools: tools.reverse(),
    ],
)
def test_tools_that_have_changed_are_written_as_they_are_now(change: Callable[[list[Any]], None]) -> None:
    writer, tools = warm("tiny"), copy.deepcopy(TOOLS)
    task: list[Message] = [UserMessage("Report ann.")]
    before = [writer.write(task, tools) for _ in range(3)][-1]
    change(tools)
    after = [writer.write(task, tools) for _ in range(3)]
    assert after == [OpeningWriter(dialect_of("tiny")).write(task, tools)] * 3
    assert after[0] != before


def test_a_template_that_shows_the_time_shows_that_of_each_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{{ '<|im_start|>' ~ strftime_now('%Y') ~ '<|im_end|>' }}" + templates.template("qwen3")
    chat = ChatFormat.for_tokenizer(templates.tokenizer_for(source), template=source)
    task = [UserMessage("Report ann.")]
    for year in (2031, 2032, 2033, 2034):
        now = types.SimpleNamespace(datetime=types.SimpleNamespace(now=lambda y=year: datetime.datetime(y, 1, 1)))
        monkeypatch.setattr(template_module, "datetime", now)
        assert str(year) in chat.decode(chat.open(task, TOOLS))


def test_schemas_that_are_no_plain_json_and_other_messages_are_rendered_as_a_whole(renderings: list[str]) -> None:
    writer, task = OpeningWriter(dialect_of("tiny")), UserMessage("Report ann.")
    odd = [{**TOOLS[0], "more": types.MappingProxyType({"a": 1})}]
    plain = [{**TOOLS[0], "more": {"a": 1}}]
    said: list[Message] = [task, AssistantMessage("Ann has 3."), UserMessage("And bob?")]
    for messages, tools in (([task], odd), (said, TOOLS)):
        renderings.clear()
        assert len({tuple(writer.write(messages, tools)) for _ in range(3)}) == 1
        assert len(renderings) == 6  # each as it is and with harmless texts
    assert writer.write([task], odd) == writer.write([task], plain)


def test_instructions_that_are_never_the_same_do_not_fill_the_memory() -> None:
    writer = OpeningWriter(dialect_of("tiny"))
    for number in range(600):
        writer.write([SystemMessage(f"Day {number}."), UserMessage("Report ann.")], [])
    assert len(writer._shapes) <= 256
