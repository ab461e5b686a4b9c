"""What models write is read as somebody sensible would read it, and none of it ever vanishes."""

import json
import re
from typing import Any

import numpy as np
import pytest
from completions.case import TOOLS, Case, Family, Fault
from completions.reader import FAMILIES, reader_of

from toolgym.envs import AssistantMessage, InvalidToolCall, ToolCall

CASES = [pytest.param(family, case, id=f"{family.name}-{case.name}") for family in FAMILIES for case in family.cases]
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


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


WORDS_OF_VALUES = {"true", "false", "null", "True", "False", "None"}


def _kept(said: AssistantMessage) -> str:
    """All text that a message holds."""
    parts = [said.content, said.reasoning or ""]
    for found in said.tool_calls:
        if isinstance(found, InvalidToolCall):
            parts += [found.raw, found.name or ""]
        else:
            parts += [found.name, json.dumps(dict(found.arguments), ensure_ascii=False), *_texts(found.arguments)]
    return "\n".join(parts)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for part in value for text in _texts(part)]
    return [text for pair in value.items() for text in _texts(list(pair))] if isinstance(value, dict) else []


@pytest.mark.parametrize(("family", "case"), CASES)
def test_no_word_of_an_output_vanishes(family: Family, case: Case) -> None:
    kept = _kept(reader_of(family.name).read(case))
    text = re.sub(r"to=\S+?(?=<\|message\|>)", " ", case.text)  # a header
    for marker in sorted(family.markers, key=len, reverse=True):
        text = text if marker.isidentifier() else text.replace(marker, " ")
    words = set(re.findall(r"\b[^\W\d]\w*", re.sub(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x..|.)", " ", text)))
    assert not {word for word in words - WORDS_OF_VALUES - set(family.markers) if word not in kept}


OPENERS = {
    "hermes": ("<tool_call>",),
    "qwen-xml": ("<tool_call>",),
    "nemotron": ("<tool_call>",),
    "glm": ("<tool_call>",),
    "llama-json": ("<|python_tag|>",),
    "lfm": ("<|tool_call_start|>",),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>"),
    "gemma": ("<|tool_call>",),
}
FRAGMENTS = (
    '{"name": "',
    '", "arguments": {',
    '"}}',
    '{"name": "f", "parameters": {}}',
    '{"a": [',
    "]}",
    "}",
    "[",
    '"',
    "'",
    "\\",
    "\n",
    " ",
    "f",
    "look_up",
    "text",
    "<function=look_up>\n",
    "</function>\n",
    "<parameter=text>\n",
    "\n</parameter>\n",
    "[f(a=",
    "[look_up(text='",
    "')]",
    ", ",
    "call:look_up{text:",
    "call:",
    "```json\n",
    "\n```",
    " to=functions.look_up",
    " to=self",
    " to=user",
    "analysis",
    "final",
    "<atem:function_calls>",
    '<atem:invoke name="f">',
    "</atem:invoke>",
    '<atem:parameter name="a">',
    "</atem:parameter>",
    "</atem:function_calls>",
    "1e999",
    "NaN",
    "\\ud800",
    ";",
    "{}",
)


@EACH_FAMILY
def test_any_tokens_are_read_and_each_call_that_was_opened_is_there(family: Family) -> None:
    reader, rng = reader_of(family.name), np.random.default_rng(7)
    controls = [[token] for token in sorted(reader.chat.control_token_ids)]
    markers = [reader.ids(marker) for marker in family.markers]
    pieces = [reader.ids(text) for text in FRAGMENTS]
    random = [[int(token)] for token in rng.integers(0, reader.tokenizer.get_vocab_size(), 40)]
    pool = controls + markers * 4 + pieces + random
    openers = {reader.tokenizer.token_to_id(text) for text in OPENERS.get(family.name, ())}
    tags = {reader.tokenizer.token_to_id(text) for text in ("<think>", "</think>", "<|channel>", "<channel|>")}
    prompts = [reader.prompt + reader.ids("\n</think>\n\n"), reader.prompt + reader.ids("<think>\n")]
    for number in range(8_400):
        picks = rng.integers(0, len(pool), int(rng.integers(0, 30)))
        ids = [token for pick in picks for token in pool[pick]][:60]
        said = reader.chat.parse(ids, prompts[number % 8 == 0], TOOLS)
        assert isinstance(said, AssistantMessage)
        json.dumps([[c.name, dict(c.arguments)] for c in said.tool_calls if isinstance(c, ToolCall)], allow_nan=False)
        until = next((at for at, token in enumerate(ids) if token in reader.chat.stop_token_ids), len(ids))
        if openers & set(ids[:until]) and not tags & set(ids[:until]):
            text = reader.chat.decode(ids)
            # Within a text of an answer in JSON, the tag is text.
            assert said.tool_calls or (family.name == "llama-json" and '"' in text), text


HOSTILE = (
    "[",
    '{"a":',
    '"',
    "'",
    "\\",
    "\n",
    ";",
    "{",
    '{"name":',
    '{"name": "f", "parameters": ',
    "[f(a=",
    "[f(), ",
    "it's ",
    "<function=f>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
    '<atem:invoke name="a">',
    "f<arg_key>a</arg_key><arg_value>",
)


@EACH_FAMILY
def test_long_hostile_outputs_are_read_too(family: Family) -> None:
    reader = reader_of(family.name)
    markers = [marker for marker in family.markers if not marker.isidentifier()]
    texts = [
        *HOSTILE,
        *markers,
        "".join(markers),
        *(f"{marker}{text}" for marker in markers[:2] for text in HOSTILE[:3]),
    ]
    for text in texts:
        ids = (reader.ids(text) * 30_000)[:30_000]
        assert isinstance(reader.chat.parse(ids, reader.prompt, TOOLS), AssistantMessage)
