"""What a chat format writes is read back exactly in every syntax, as far as its template keeps it.

What templates lose, and what is therefore not asked of them here:

- Literals of control tokens may be spelled in any text: the codec keeps them apart. But nothing escapes a closing tag
  of ordinary text, such as ``</parameter>``, within a bare value.
- LFM2.5 escapes neither quotes nor backslashes of texts.
- Gemma and the Python syntaxes write keys bare, so that they must be names.
- Llama 3.2's template, asked for Python calls, writes a single one in its own JSON: here there are always several.
- gpt-oss writes one call a message, and the content beside it as reasoning; ATEM and Llama write no content beside
  calls, and Llama's answers in JSON that look like calls are calls.
- Qwen, GLM and ATEM write values bare: a value is text where its schema says so, and only there.
"""

from collections.abc import Mapping
from typing import Any

import pytest
from completions.case import TOOLS, Family
from completions.reader import FAMILIES, reader_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolgym.envs import AssistantMessage, ToolCall

BARE = ("qwen-xml", "nemotron", "glm", "atem")
NAMED_KEYS = ("gemma", "llama-python", "lfm")
NO_CONTENT = ("harmony", "atem", "llama-json", "llama-python")
REASONS = ("hermes", "qwen-xml", "nemotron", "glm", "harmony", "atem", "lfm")
names = st.from_regex(r"[a-z][a-z0-9_]{0,6}(\.[a-z_]{1,4})?", fullmatch=True)
keys = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,6}", fullmatch=True).filter(lambda key: key not in ("true", "null"))
LETTERS = "abcz XYZ 019 .,;:!?/|_-+=#@ é ß 東京 🚀 \n\t"
SYNTAX = (
    "<",
    ">",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    '"',
    "'",
    "\\",
    "\\n",
    '"}',
    "]]",
    "null",
    "7",
    "<b>",
    "</tool>",
    "}}",
)
LITERALS = ("<tool_call>", "</tool_call>", "<|im_end|>", "<|tool_call>", "[TOOL_CALLS]", "<|call|>", "<|eot|>", '<|"|>')
plain = st.lists(st.sampled_from(LETTERS), max_size=12).map("".join)
rich = st.lists(st.sampled_from((*LETTERS, *SYNTAX, *LITERALS)), max_size=12).map("".join)
numbers = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
scalars = numbers | st.booleans() | st.none()


def values(texts: st.SearchStrategy[str], inner_keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        scalars | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(inner_keys, inner, max_size=3),
        max_leaves=6,
    )


def bare_arguments(texts: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Of the tool whose schema has all types."""
    return st.fixed_dictionaries(
        {},
        optional={
            "zip": texts,
            "text": texts,
            "code": texts,
            "count": st.integers(-(10**20), 10**20),
            "ratio": numbers,
            "flag": st.booleans(),
            "items": st.lists(values(texts, texts), max_size=3),
            "mapping": st.dictionaries(texts, values(texts, texts), max_size=3),
            "several": st.none() | st.integers(),
        },
    )


def calls_of(family: Family) -> st.SearchStrategy[ToolCall]:
    if family.name in BARE:
        return st.builds(ToolCall, st.just("set_up"), bare_arguments(rich))
    texts = plain if family.name == "lfm" else rich
    inner_keys = keys if family.name in NAMED_KEYS else texts
    found = st.dictionaries(keys if family.name in NAMED_KEYS else rich, values(texts, inner_keys), max_size=3)
    return st.builds(ToolCall, names, found)


def messages_of(family: Family) -> st.SearchStrategy[AssistantMessage]:
    texts = plain.map(str.strip)
    least, most = {"harmony": (1, 1), "llama-python": (2, 3)}.get(family.name, (1, 3))
    calls = st.lists(calls_of(family), min_size=least, max_size=most).map(tuple)
    content = st.just("") if family.name in NO_CONTENT else texts
    reasoning = st.none() | texts.filter(bool) if family.name in REASONS else st.none()
    return st.builds(AssistantMessage, content, calls, reasoning) | st.builds(
        AssistantMessage, texts, st.just(()), reasoning
    )


def normal(family: Family, value: Any) -> Any:
    """As the family's tokenizer writes texts."""
    if isinstance(value, str):
        normalizer = reader_of(family.name).tokenizer.normalizer
        return value if normalizer is None else normalizer.normalize_str(value)
    if isinstance(value, list | tuple):
        return [normal(family, part) for part in value]
    if isinstance(value, Mapping):
        return {normal(family, key): normal(family, part) for key, part in value.items()}
    return value


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_written_is_read_back(family: Family, data: st.DataObject) -> None:
    said = data.draw(messages_of(family))
    chat = reader_of(family.name).chat
    ids = chat.write(said)
    assert ids[-1] in chat.stop_token_ids
    read = chat.parse(ids, reader_of(family.name).prompt, TOOLS)
    assert read.content == normal(family, said.content)
    assert read.reasoning == normal(family, said.reasoning)
    assert [(c.name, getattr(c, "arguments", c)) for c in read.tool_calls] == [
        (c.name, normal(family, c.arguments)) for c in said.tool_calls if isinstance(c, ToolCall)
    ]
