"""Nobody's text can spell a control token; everything else is encoded as the tokenizer would."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from toolgym.agents.codec import TokenCodec, fit, unmarked
from toolgym.agents.tiny import TINY_MODEL
from toolgym.envs import ConfigurationError


def raw() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(Path(TINY_MODEL) / "tokenizer.json"))


RAW = raw()
CODEC = TokenCodec(RAW, "tiny")
SPECIAL = list(CODEC.controls)
SPECIAL_IDS = set(CODEC.controls.values())
NONCHARACTERS = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4"
pieces = st.lists(st.sampled_from(SPECIAL) | st.text(max_size=8), max_size=6).map("".join)


@given(pieces)
@example("<|im_end|>")
@example("<|im_<|im_end|>end|>")
def test_what_templates_write_is_encoded_as_the_tokenizer_does(text: str) -> None:
    if any(mark in text for mark in NONCHARACTERS):
        return
    assert CODEC.encode(text) == RAW.encode(text, add_special_tokens=False).ids == CODEC.encode_whole(text)


@given(pieces, pieces, pieces)
@example("<", "|im_end|>", "")
@example("", "<|im_end", "|>")
@example("<|im_<|im_end|>", "end|>", "")
@example("", "\ufdd0<|im_end|>\ufdd1", "")
@example("<|im_", "XX", "end|>")
def test_a_text_becomes_no_control_token_by_itself_and_is_caught_if_others_complete_it(
    before: str, text: str, after: str
) -> None:
    def controls(ids: list[int]) -> list[int]:
        return [token for token in ids if token in SPECIAL_IDS]

    assert not controls(CODEC.encode(CODEC.neutralized(text)))
    around = CODEC.encode(f"<|im_start|>{CODEC.neutralized(text)}<|im_end|>")
    assert controls(around) == [RAW.token_to_id("<|im_start|>"), RAW.token_to_id("<|im_end|>")]
    # Texts side by side, or changed by a template, may spell one together: that is not let pass.
    for joined in ("".join, lambda parts: "".join(parts).replace("XX", "")):
        real, harmless = (
            CODEC.split(joined([safe(part) for part in (before, text, after)]))
            for safe in (CODEC.neutralized, CODEC.harmless)
        )
        assert not controls(CODEC.encode_pieces(harmless))
        if any(isinstance(piece, int) for piece in real):
            with pytest.raises(ValueError, match=r"<"):
                CODEC.check_controls(real, harmless)


@given(pieces)
@example("\ud800")
def test_a_neutralized_text_reads_as_it_did(text: str) -> None:
    shown = "".join("\ufffd" if "\ud800" <= c <= "\udfff" or "\ufdd0" <= c <= "\ufdef" else c for c in text)
    assert CODEC.decode(CODEC.encode(CODEC.neutralized(text))) == RAW.normalizer.normalize_str(shown)


@given(st.text(max_size=20))
def test_ordinary_text_is_encoded_as_if_nothing_was_done_to_it(text: str) -> None:
    if any(literal in text for literal in CODEC.controls) or fit(text) != text:
        return
    whole = RAW.encode(f"user\n{text}\n", add_special_tokens=False).ids
    assert CODEC.encode(f"user\n{CODEC.neutralized(text)}\n") == whole == CODEC.encode_text(f"user\n{text}\n")


@given(st.lists(st.integers(0, RAW.get_vocab_size() + 50), max_size=30))
def test_marks_tell_control_tokens_from_text_that_spells_them(ids: list[int]) -> None:
    marked = CODEC.marked(ids)
    for literal, token in CODEC.controls.items():
        assert marked.count(CODEC.mark(literal)) == ids.count(token)
    assert CODEC.mark("<|im_end|>") not in CODEC.marked(CODEC.encode_text("<|im_end|>"))
    assert unmarked(marked).replace("\ufffd", "") in CODEC.decode(ids) or "\ufffd" in marked


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    """A tokenizer in the manner of SentencePiece, which puts a space before text."""
    letters = {text: index for index, text in enumerate(["<unk>", "\u2581", *"abcdefgh<|>_im\n"])}
    made = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    made.add_special_tokens([AddedToken("<|im|>", normalized=False)])
    return made


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@given(text=st.lists(st.sampled_from(["a", "b ", " c", "<|im|>"]), max_size=6).map("".join))
def test_tokenizers_that_put_a_space_before_text_are_followed(scheme: str, text: str) -> None:
    made = metaspace(scheme)
    assert TokenCodec(made, scheme).encode(text) == made.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("strips", [{"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}])
@given(text=st.lists(st.sampled_from(["a", " ", "\n", "<|x|>", "<|im_end|>"]), max_size=8).map("".join))
def test_tokens_that_take_white_space_along_are_followed(strips: dict[str, bool], text: str) -> None:
    made = raw()
    made.add_tokens([AddedToken("<|x|>", normalized=False, **strips)])
    assert TokenCodec(made, "strips").encode(text) == made.encode(text, add_special_tokens=False).ids


def test_words_and_white_space_among_the_added_tokens_are_ordinary_vocabulary() -> None:
    made = raw()
    made.add_tokens([AddedToken("\n\n\n", normalized=False), AddedToken("toolgym", normalized=False)])
    codec = TokenCodec(made, "ordinary")
    text = "use toolgym\n\n\n<|im_end|> now"
    assert set(codec.encode_text(text)) >= {made.token_to_id("\n\n\n"), made.token_to_id("toolgym")}
    assert codec.decode(codec.encode_text(text)) == text


def test_tokenizers_whose_control_tokens_are_words_or_can_be_spelled_are_refused() -> None:
    single = raw()
    single.add_tokens([AddedToken("<x>", single_word=True)])
    with pytest.raises(ConfigurationError, match="'<x>' is a mere word"):
        TokenCodec(single, "single")
    spec = json.loads(raw().to_str())
    spelled = spec["model"]["vocab"]["he"]
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": spelled, "content": "he", "special": True})
    with pytest.raises(ConfigurationError, match="plain text can spell the special token 'he'"):
        TokenCodec(tokenizers.Tokenizer.from_str(json.dumps(spec)), "spelled")
