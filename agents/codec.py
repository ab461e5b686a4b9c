"""`TokenCodec`: text to ids and back, in which control tokens are written by chat formats alone.

Fast tokenizers turn the literal of a special token into that token wherever it stands. A tool result that contains
``<|im_end|>`` would so close its own turn. Here whoever encodes says what is scaffold and what is somebody's text;
text is never more than text.
"""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from toolgym.envs.errors import ConfigurationError

# Noncharacters of Unicode, reserved for use within a program: they have no place in text that is interchanged.
BREAK, MARK_OPEN, MARK_CLOSE, SLOT_OPEN, SLOT_CLOSE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
_UNFIT = re.compile("[\ud800-\udfff\ufdd0-\ufdef]")


def fit(text: str) -> str:
    """Text that any tokenizer takes: lone surrogates and noncharacters, which no encoding has, are replaced."""
    return text if text.isascii() else _UNFIT.sub("\ufffd", text)


@dataclass(frozen=True, slots=True)
class _Encoders:
    """The tokenizers of one thread, without control tokens: for the first and for later pieces of a sequence."""

    first: tokenizers.Tokenizer
    inner: tokenizers.Tokenizer


class TokenCodec:
    """A fast tokenizer whose control tokens are kept apart from text. May be used from any number of threads.

    *Control tokens* are the added tokens that structure a conversation: those that are marked as special, and those
    that the chat format writes. Other added tokens are ordinary vocabulary: words, white space, markup.

    Args:
        tokenizer: as its library makes it; it is copied, and each thread works on a copy of its own.
        name: for error messages.
        written: all that the chat format may write; None: whatever looks like markup is a control token.

    Raises:
        ConfigurationError: text can spell a control token, or one of them matches whole words only.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, name: str, written: str | None = None) -> None:
        self.name = name
        added = tokenizer.get_added_tokens_decoder()
        control = {index: token for index, token in added.items() if _is_control(token, written)}
        for token in control.values():
            if token.single_word or len(token.content) < 2:
                raise ConfigurationError(f"tokenizer {name}: the control token {token.content!r} is a mere word")
        self.controls: Mapping[str, int] = {token.content: index for index, token in control.items()}
        self._literals = {index: text for text, index in self.controls.items()}
        # Decoding changes nothing in a tokenizer, so one copy, which nobody else can change, serves all threads.
        whole, *self._spec = _specification(tokenizer, set(control))
        self._full = tokenizers.Tokenizer.from_str(whole)
        self._threads = threading.local()
        stripping = [token for token in control.values() if token.lstrip or token.rstrip]
        # Those that take white space along come first: what they match begins earlier, or is longer.
        self._pattern = re.compile("|".join([*map(_pattern, stripping), _any_of(self.controls)]))
        self._starts = re.compile(f"(?={_any_of(self.controls)})")
        self._all = "\n".join(self.controls)
        marks = {character for text in self.controls for character in text if not character.isalnum()}
        self._marks = str.maketrans(dict.fromkeys(marks - set(" \t\r\n"), "-"))
        for text, index in self.controls.items():
            if index in self.encode_text(text):
                raise ConfigurationError(f"tokenizer {name}: plain text can spell the special token {text!r}")

    @property
    def _encoders(self) -> _Encoders:
        found: _Encoders | None = getattr(self._threads, "encoders", None)
        if found is None:
            first, inner = self._spec
            made = tokenizers.Tokenizer.from_str(first)
            found = _Encoders(made, made if inner == first else tokenizers.Tokenizer.from_str(inner))
            self._threads.encoders = found
        return found

    def encode_text(self, text: str, *, first: bool = False) -> list[int]:
        """Ids of text in which no control token is recognised.

        Args:
            text: somebody's text.
            first: whether it begins the whole sequence, which some tokenizers treat apart.
        """
        encoders = self._encoders
        encoder = encoders.first if first else encoders.inner
        return list(encoder.encode(text, add_special_tokens=False).ids) if text else []

    def encode(self, rendered: str) -> list[int]:
        """Ids of what a template has written, in which control tokens are recognised, but for `neutralized` ones."""
        return self.encode_pieces(self.split(rendered))

    def encode_pieces(self, pieces: Iterable[int | str], *, first: bool = True) -> list[int]:
        """Ids of what `split` gives.

        Args:
            pieces: ids, and text between them.
            first: whether they begin the whole sequence, as in `encode_text`.
        """
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self.encode_text(piece, first=first and not ids)
        return ids

    def encode_whole(self, text: str) -> list[int]:
        """Ids as the tokenizer itself gives them, control tokens recognised wherever they stand."""
        return list(self._full.encode(text, add_special_tokens=False).ids)

    def split(self, rendered: str) -> list[int | str]:
        """The control tokens of a rendered text and the text between them, the marks of `neutralized` text removed."""
        pieces: list[int | str] = []
        at = 0
        for found in self._pattern.finditer(rendered):
            if found.start() > at:
                pieces.append(_unbroken(rendered[at : found.start()]))
            literal = found.group()
            pieces.append(self.controls[literal if literal in self.controls else literal.strip()])
            at = found.end()
        if at < len(rendered):
            pieces.append(_unbroken(rendered[at:]))
        return [piece for piece in pieces if piece != ""]

    def neutralized(self, text: str) -> str:
        """Text that a template may be given: no control token in it is recognised.

        Templates see it as it is, but for a noncharacter inside of each literal, which `split` removes. What templates
        join or change may still spell a control token: compare with what they make of `harmless` text.
        """
        text = fit(text)
        if self._starts.search(text):
            cuts = [found.start() + 1 for found in self._starts.finditer(text)]
            text = BREAK.join(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))
        return text

    def harmless(self, text: str) -> str:
        """A text like this one, of which nothing can make a control token: it has no marks of theirs."""
        if len(text) > 1 and text in self._all:
            return "x"
        return fit(text).translate(self._marks)

    def check_controls(self, pieces: Iterable[int | str], harmless: Iterable[int | str]) -> None:
        """Compare what `split` gives of a rendering with that of the same one of harmless texts.

        Raises:
            ValueError: it has more of a control token, which then came out of a text. Its literal is the argument.
        """
        usual = Counter(piece for piece in harmless if isinstance(piece, int))
        for token, count in Counter(piece for piece in pieces if isinstance(piece, int)).items():
            if count > usual[token]:
                raise ValueError(self._literals[token])

    def fingerprint(self, *more: object) -> str:
        """A hash of the tokenizer and of something more."""
        digest = hashlib.sha256(self._spec[0].encode())
        digest.update(repr((sorted(self.controls.items()), more)).encode())
        return digest.hexdigest()[:16]

    def token_id(self, token: str) -> int | None:
        """The id of one token by its text; None if there is none."""
        found = self._full.token_to_id(token)
        return None if found is None else int(found)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ids, control tokens included. Ids that the tokenizer does not know have no text."""
        known = [token for token in token_ids if 0 <= token < 2**32]
        return str(self._full.decode(known, skip_special_tokens=False))

    def marked(self, token_ids: Sequence[int]) -> str:
        """The text of ids, each control token in marks, so that text which merely spells one can be told from it."""
        parts: list[str] = []
        start = 0
        literals = self._literals
        for at, token in enumerate(token_ids):
            literal = literals.get(token)
            if literal is not None:
                if at > start:
                    parts.append(fit(self.decode(token_ids[start:at])))
                parts.append(f"{MARK_OPEN}{literal}{MARK_CLOSE}")
                start = at + 1
        if start < len(token_ids):
            parts.append(fit(self.decode(token_ids[start:])))
        return "".join(parts)

    def mark(self, literal: str) -> str:
        """How `marked` shows a piece of scaffold: its control tokens in marks, the rest as it is."""
        pieces = self.split(literal)
        return "".join(p if isinstance(p, str) else f"{MARK_OPEN}{self._literals[p]}{MARK_CLOSE}" for p in pieces)


def _unbroken(text: str) -> str:
    """Text without the breaks of `TokenCodec.neutralized`, also where a template has escaped them."""
    return text.replace(BREAK, "").replace(r"\ufdd0", "")


def unmarked(text: str) -> str:
    """The inverse of marking: as somebody reads it."""
    return text.replace(MARK_OPEN, "").replace(MARK_CLOSE, "")


def _is_control(token: Any, written: str | None) -> bool:
    text = token.content
    markup = bool(text.strip(" \t\r\n\u2581")) and not text.isalnum() and len(text) > 1
    return bool(token.special) or (markup and (written is None or text in written))


def _any_of(literals: Iterable[str]) -> str:
    """A pattern of the longest of many literals, as a tree: its cost does not grow with their number."""
    root: dict[str, Any] = {}
    for literal in literals:
        node = root
        for character in literal:
            node = node.setdefault(character, {})
        node[""] = {}

    def written(node: dict[str, Any]) -> str:
        branches = [re.escape(character) + written(child) for character, child in node.items() if character]
        if not branches:
            return ""
        return f"(?:{'|'.join(branches)}){'?' if '' in node else ''}"

    return written(root) or r"(?!)"


def _pattern(token: Any) -> str:
    """How a tokenizer matches an added token: some take the white space beside them along."""
    before, after = (r"\s*" if strips else "" for strips in (token.lstrip, token.rstrip))
    return f"{before}{re.escape(token.content)}{after}"


def _specification(tokenizer: tokenizers.Tokenizer, control: set[int]) -> tuple[str, str, str]:
    """The tokenizer in JSON: whole, and without control tokens for the beginning and for what follows a token."""
    spec = json.loads(tokenizer.to_str())
    spec["truncation"], spec["padding"] = None, None
    whole = json.dumps(spec)
    # Those that the model's own vocabulary lacks are numbered by their order: they stay, as what no text contains.
    vocabulary = spec["model"].get("vocab", {})
    known = set(vocabulary if isinstance(vocabulary, dict) else (entry[0] for entry in vocabulary))
    added = [t for t in spec["added_tokens"] if t["id"] not in control or t["content"] not in known]
    spec["added_tokens"] = [
        {**t, "content": f"{SLOT_OPEN}{t['id']}{SLOT_CLOSE}", "normalized": False} if t["id"] in control else t
        for t in added
    ]
    spec["post_processor"] = None
    first = json.dumps(spec)
    _never_prepend(spec.get("pre_tokenizer"))
    return whole, first, json.dumps(spec)


def _never_prepend(part: Any) -> None:
    """Metaspace tokenizers may put a space before the first piece of a sequence, and before no other."""
    if isinstance(part, dict):
        if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"
        for inner in part.get("pretokenizers", ()):
            _never_prepend(inner)
