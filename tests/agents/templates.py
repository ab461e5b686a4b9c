"""The chat templates in TRL's wheel, each with a made-up tokenizer that has its control tokens."""

import json
import re
import string
from functools import cache
from importlib import resources
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

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
    return tokenizer_for(template(name), *unwritten(name))


def unwritten(name: str) -> tuple[str, ...]:
    """Control tokens of a family that its template does not write."""
    return next((tokens for family, tokens in _UNWRITTEN.items() if name.startswith(family)), ())


def spaced_tokenizer(source: str, scheme: str, *more: str) -> tokenizers.Tokenizer:
    """A tokenizer in the manner of SentencePiece: spaces are letters, what it does not know becomes bytes.

    Args:
        source: a template, for its control tokens.
        scheme: where a space is put before text: of Metaspace (``first``, ``always``, ``never``), or ``prepend``, as
            Llama 2 does.
        *more: control tokens that the template does not write.
    """
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    letters += [character for character in string.printable if not character.isspace()]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    if scheme == "prepend":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    literals = sorted({*_CONTROL.findall(source), *more, BOS, EOS})
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in literals])
    return made
