"""A tokenizer that reads special tokens only where the chat format writes them, never inside somebody's text.

A tool result that contains the literal ``<|im_end|>`` must not close its turn. Fast tokenizers turn every such
literal into the special token; here, text between two marks is encoded as plain text, while merges across the marks
stay what they would be without them.
"""

import json
import re
from typing import Any

import tokenizers

from toolgym.envs.errors import ConfigurationError

# Noncharacters of Unicode, reserved for use within a program: they have no place in text that is interchanged.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKS = str.maketrans({_OPEN: "\ufffd", _CLOSE: "\ufffd"})


class ProtectedTokenizer:
    """Wraps a `tokenizers.Tokenizer`, in the form that the renderers library asks for.

    Args:
        tokenizer: a byte-level tokenizer.
        name: for error messages.

    Raises:
        ConfigurationError: special tokens that strip white space around them, or that plain text can spell.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, name: str) -> None:
        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = None
        self._full = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {token.content: index for index, token in added.items()}
        for token in added.values():
            if token.lstrip or token.rstrip or token.single_word:
                raise ConfigurationError(f"tokenizer {name}: added token {token.content!r} strips its surroundings")
        self._plain = _without_added_tokens(tokenizer)
        literals = "|".join(re.escape(text) for text in sorted(self._ids, key=len, reverse=True)) or r"(?!)"
        self._literal = re.compile(literals)
        self._parts = re.compile(f"{_OPEN}(?P<text>[^{_CLOSE}]*){_CLOSE}|(?P<token>{literals})")
        for text, index in self._ids.items():
            if index in self._plain.encode(text, add_special_tokens=False).ids:
                raise ConfigurationError(f"tokenizer {name}: plain text can spell the special token {text!r}")

    @staticmethod
    def protect(text: str) -> str:
        """Mark text so that special-token literals in it are encoded as plain text."""
        return f"{_OPEN}{text.translate(_MARKS)}{_CLOSE}" if text else ""

    def has_literal(self, text: str) -> bool:
        """Whether a text contains the literal of a special token."""
        return self._literal.search(text) is not None

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        """Token ids: special tokens where their literals stand outside marks, plain text everywhere else."""
        ids: list[int] = []
        plain: list[str] = []
        at = 0

        def flush() -> None:
            if plain:
                ids.extend(self._plain.encode("".join(plain), add_special_tokens=False).ids)
                plain.clear()

        for found in self._parts.finditer(text):
            plain.append(text[at : found.start()])
            at = found.end()
            token = found.group("token")
            if token is None:
                plain.append(found.group("text"))
            else:
                flush()
                ids.append(self._ids[token])
        plain.append(text[at:])
        flush()
        return ids

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        """The text of ids, special tokens included."""
        return str(self._full.decode(list(token_ids), skip_special_tokens=False))

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        """The id of one token by its text; None if there is none."""
        found = self._full.token_to_id(tokens)
        return None if found is None else int(found)


def _without_added_tokens(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"], spec["post_processor"] = [], None
    spec["truncation"], spec["padding"] = None, None
    return tokenizers.Tokenizer.from_str(json.dumps(spec))
