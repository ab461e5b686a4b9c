"""The chat templates in TRL's wheel, each with a made-up tokenizer that has its control tokens."""

import json
import re
from functools import cache
from importlib import resources
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from toolgym.agents.tiny import TINY_MODEL

_FOLDER = resources.files("trl").joinpath("chat_templates")
NAMES = sorted(Path(entry.name).stem for entry in _FOLDER.iterdir() if entry.name.endswith(".jinja"))
TOOL_NAMES = [name for name in NAMES if "tools" in _FOLDER.joinpath(f"{name}.jinja").read_text()]
_CONTROL = re.compile(
    r"<\|[^|<>\s\"']*\|>|<\|[^|<>\s\"']+>|<[^|<>\s/\"']+\|>|<\|\"\|>"
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value|start_of_turn|end_of_turn)>"
    r"|<\uff5c[^<>]*?\uff5c>|\[gMASK\]|\[/?INST\]|\[/?TOOL_(?:CALLS|RESULTS)\]|<sop>|<eos>|</s>|<end_of_utterance>"
)
# What the models' own tokenizers have, though their templates do not write it.
_UNWRITTEN = {"lfm": ("<|tool_call_start|>", "<|tool_call_end|>"), "llama3": ("<|python_tag|>", "<|eom_id|>")}
BOS, EOS = "<s>", "<|endoftext|>"
SPECIAL = {"bos_token": BOS, "eos_token": EOS}


@cache
def template(name: str) -> str:
    """A template's source."""
    return _FOLDER.joinpath(f"{name}.jinja").read_text()


def tokenizer_for(source: str, *more: str) -> tokenizers.Tokenizer:
    """A byte-level tokenizer with the control tokens that a template writes, special or not as the models have them."""
    spec = json.loads(tokenizers.Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json")).to_str())
    spec["added_tokens"] = []
    made = tokenizers.Tokenizer.from_str(json.dumps(spec))
    literals = sorted({*_CONTROL.findall(source), *more, BOS, EOS})
    plain = [text for text in literals if re.match(r"</?(think|tool|arg)", text)]
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in literals if t not in plain])
    made.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    return made


def tokenizer_of(name: str) -> tokenizers.Tokenizer:
    """The made-up tokenizer of one of TRL's templates."""
    more = next((tokens for family, tokens in _UNWRITTEN.items() if name.startswith(family)), ())
    return tokenizer_for(template(name), *more)
