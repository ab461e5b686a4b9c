"""What models write is read as somebody sensible would read it, and none of it ever vanishes."""

import json
import re
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from completions.atem import ATEM
from completions.case import TOOLS, Case, Family, Fault, Plain
from completions.deepseek import DEEPSEEK
from completions.gemma import GEMMA
from completions.glm import GLM
from completions.harmony import HARMONY
from completions.hermes import HERMES
from completions.lfm import LFM
from completions.llama import LLAMA_JSON, LLAMA_PYTHON
from completions.mistral import MISTRAL
from completions.qwen_xml import NEMOTRON, QWEN_XML
from templates import template, tokenizer_for, tokenizer_of

from toolgym.agents.chat import ChatFormat
from toolgym.agents.codec import TokenCodec
from toolgym.envs import AssistantMessage, CallFault, InvalidToolCall, ToolCall, UserMessage

FAMILIES = (
    HERMES, QWEN_XML, NEMOTRON, GLM, LLAMA_JSON, LLAMA_PYTHON, LFM, MISTRAL, DEEPSEEK, HARMONY, GEMMA, ATEM,
)  # fmt: skip
CASES = [pytest.param(family, case, id=f"{family.name}-{case.name}") for family in FAMILIES for case in family.cases]
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
# Like Mistral's own: answers and later turns are not what is tested here.
MISTRAL_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}[INST]{{ message.content }}[/INST]
{%- elif message.role == 'tool' -%}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- elif message.tool_calls -%}{{ message.content }}
{%- for call in message.tool_calls -%}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor -%}</s>
{%- else -%}{{ message.content }}</s>
{%- endif -%}
{%- endfor -%}"""


class Reader:
    """A family's chat format with the tokenizer that it was made of."""

    def __init__(self, family: Family) -> None:
        if family.template is None:
            source = MISTRAL_TEMPLATE
            self.tokenizer = tokenizer_for(source, "[ARGS]", "[CALL_ID]", "</s>")
        else:
            source, self.tokenizer = template(family.template), tokenizer_of(family.template)
        self.chat = ChatFormat.for_tokenizer(self.tokenizer, template=source, syntax=family.syntax)
        self.codec = TokenCodec(self.tokenizer, family.name)
        self.prompt = self.chat.open([UserMessage("Hi.")], TOOLS)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def completion(self, case: Case) -> list[int]:
        ids: list[int] = []
        for part in case.parts:
            ids += self.codec.encode_text(part.text) if isinstance(part, Plain) else self.ids(part)
        if case.ended:
            ids.append(self.chat.stop_token_ids[0] if case.stop is None else self.tokenizer.token_to_id(case.stop))
        return ids

    def read(self, case: Case) -> AssistantMessage:
        return self.chat.parse(self.completion(case), self.prompt + self.ids(case.prompt), TOOLS)


@cache
def reader_of(name: str) -> Reader:
    return Reader(next(family for family in FAMILIES if family.name == name))


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    assert sum(len(family.cases) for family in FAMILIES) >= 400
    for family in FAMILIES:
        assert len(family.cases) >= 15
        names = [case.name for case in family.cases]
        assert not {name for name in names if names.count(name) > 1}


@pytest.mark.parametrize(("family", "case"), CASES)
def test_an_output_is_read_as_it_should_be(family: Family, case: Case) -> None:
    said = reader_of(family.name).read(case)
    assert said.content == case.content
    assert said.reasoning == case.reasoning
    assert [_gist(found) for found in said.tool_calls] == [_gist(expected) for expected in case.calls]
    for found, expected in zip(said.tool_calls, case.calls, strict=True):
        if isinstance(found, InvalidToolCall) and isinstance(expected, Fault):
            assert expected.name is None or found.name == expected.name
            assert found.error.endswith(".")


def _gist(call: ToolCall | InvalidToolCall | Fault) -> object:
    if isinstance(call, ToolCall):
        return call.name, dict(call.arguments)
    return call.fault if isinstance(call, InvalidToolCall) else call.kind
