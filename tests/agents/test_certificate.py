"""Every tool-capable template in TRL's wheel is certified, and each result is derived again in another way.

The other way: transformers' own ``apply_chat_template`` on a conversation of this file's, with the tokenizer as it is.
What the format added after each turn must stand in that rendering in order, each piece after the end of a turn, and
what stood before the first turn must stand at its beginning; nothing but the model's own turns may differ.

``TOOLGYM_WRITE_DOCS=1`` writes docs/templates.md.
"""

import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from templates import NAMES, SPECIAL, TOOL_NAMES, template, tokenizer_of
from transformers import PreTrainedTokenizerFast

from toolgym.agents.certificate import Verdict
from toolgym.agents.chat import ChatFormat, TemplateRefused
from toolgym.envs import (
    AssistantMessage,
    ConfigurationError,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "templates.md"
HEAD = """# Which chat templates are exact

The templates in TRL's wheel, each with a made-up tokenizer that has its control tokens; written by
`TOOLGYM_WRITE_DOCS=1 .venv/bin/python -m pytest tests/agents/test_certificate.py`. For your model, on its own
tokenizer: `toolgym template check FOLDER`.

*exact*: the same tokens as the template's whole rendering. *keeps*: the same but for the model's own turns, which stay
as they were sampled where the template would write them otherwise later on. *refused*: never done; such an episode
stops, or its record is split.
"""
PROBES = [f"P{k}" for k in range(1, 9)]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather somewhere.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}},
        },
    }
]
Turn = tuple[AssistantMessage, list[Message]]


@cache
def theirs(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer with the template, as transformers has it."""
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(name), **SPECIAL)
    made.chat_template = template(name)
    return made


@cache
def ours(name: str) -> ChatFormat:
    return ChatFormat.for_tokenizer(theirs(name))


def weather(city: str, number: int = 0) -> ToolCall:
    return ToolCall("weather", {"city": city}, f"call_{number}")


def as_dicts(chat: ChatFormat, messages: Sequence[Message], *, inline: bool) -> list[dict[str, Any]]:
    """Messages as people write them for transformers; ``inline``: the model's turns as their raw text."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if isinstance(message, AssistantMessage):
            entry: dict[str, Any] = {"role": "assistant", "content": message.content}
            if inline:
                ids = chat.write(message)
                entry["content"] = chat.decode([token for token in ids if token not in chat.stop_token_ids])
            else:
                if message.reasoning:
                    entry |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.reasoning)
                calls = [c for c in message.tool_calls if isinstance(c, ToolCall)]
                if calls:
                    entry["tool_calls"] = [
                        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
                        for c in calls
                    ]
            found.append(entry)
        elif isinstance(message, ToolMessage):
            answer = {"tool_call_id": message.tool_call_id, "name": message.name}
            found.append({"role": "tool", "content": message.content, **answer})
        else:
            found.append(
                {"role": "system" if isinstance(message, SystemMessage) else "user", "content": message.content}
            )
    return found


def whole(name: str, messages: Sequence[Message], *, opens: bool = True) -> Iterator[list[int]]:
    """The conversation as transformers renders it, in both forms, where the template takes them."""
    for inline in (False, True):
        try:
            entries = as_dicts(ours(name), messages, inline=inline)
            yield theirs(name).apply_chat_template(entries, TOOLS, add_generation_prompt=opens, return_dict=False)
        except (jinja2.TemplateError, TypeError, ConfigurationError):
            continue


def derive(name: str, opening: list[Message], turns: list[Turn]) -> Verdict:
    """What holds of a conversation, by another way than the certificate's."""
    chat = ours(name)
    prompt = chat.open(opening, TOOLS)
    closed = next(whole(name, opening, opens=False))
    shared = next((k for k, (a, b) in enumerate(zip(prompt, closed, strict=False)) if a != b), len(closed))
    opens = len(prompt) - shared
    pieces = [prompt[:shared]]
    messages, ids, verdict = list(opening), list(prompt), Verdict.EXACT
    for said, follows in turns:
        sampled = chat.write(said)
        delta = chat.extend(ids, sampled, follows, TOOLS)
        ids += sampled + delta
        messages += [said, *follows]
        renderings = list(whole(name, messages))
        if ids in renderings:
            pieces.append(delta[:-opens])
            continue
        verdict = Verdict.KEEPS
        if not any(stands_in([*pieces, delta], rendering, chat) for rendering in renderings):
            return Verdict.REFUSED
        pieces.append(delta[:-opens])
    return verdict


def stands_in(pieces: list[list[int]], rendering: list[int], chat: ChatFormat) -> bool:
    """Whether pieces stand in a rendering in order: the first at its start, the last at its end, each after a turn."""
    first, *middle, last = pieces
    end = len(rendering) - len(last)
    if rendering[: len(first)] != first or rendering[end:] != last or rendering[end - 1] not in chat.control_token_ids:
        return False
    at = len(first)
    for piece in middle:
        starts = (k for k in range(at, end) if rendering[k : k + len(piece)] == piece)
        found = next((k for k in starts if rendering[k - 1] in chat.control_token_ids), None)
        if found is None:
            return False
        at = found + len(piece)
    return True


QUESTION, MORE = UserMessage("How is it in Rome and Oslo?"), UserMessage("Thank you. And tomorrow?")
ANSWER = AssistantMessage("Sunny in Rome, snow in Oslo.")


def result(text: str, number: int = 0) -> ToolMessage:
    return ToolMessage(text, f"call_{number}", "weather")


def conversation(chat: ChatFormat, probe: str) -> tuple[list[Message], list[Turn]]:
    """A conversation of the kind that a probe plays."""
    one: Turn = (AssistantMessage("", (weather("Rome"),)), [result("Sunny, 21 degrees.")])
    if probe == "P2":
        both = AssistantMessage("", (weather("Rome", 1), weather("Oslo", 2)))
        try:
            chat.write(both)
        except ConfigurationError:  # one call a turn
            return [QUESTION], [one, one]
        return [QUESTION], [(both, [result("Sunny.", 1), result("Snow.", 2)])]
    if probe == "P3":
        thought = AssistantMessage(ANSWER.content, reasoning="Both are known. I say so.")
        try:
            chat.write(thought)
        except ConfigurationError:  # no reasoning in this format
            thought = ANSWER
        acting = AssistantMessage("", (weather("Rome"),), thought.reasoning)
        return [QUESTION], [(acting, [result("Sunny.")]), (thought, [MORE]), (thought, [MORE])]
    if probe == "P5":
        rounds = [(AssistantMessage("", (weather(c, k),)), [result(f"{c} is fine.", k)]) for k, c in enumerate("ABC")]
        return [SystemMessage("Say it in one line."), QUESTION], [*rounds, (ANSWER, [MORE]), one]
    return [QUESTION], [one]


@pytest.mark.parametrize("probe", ["P1", "P2", "P3", "P5"])
@pytest.mark.parametrize("name", TOOL_NAMES)
def test_each_result_is_found_again_in_another_way(name: str, probe: str) -> None:
    chat = ours(name)
    assert chat.certificate is not None
    opening, turns = conversation(chat, probe)
    assert derive(name, opening, turns) is chat.certificate[probe].verdict


def test_all_46_tool_templates_are_certified() -> None:
    assert len(TOOL_NAMES) == 46
    results = {name: ours(name).certificate for name in TOOL_NAMES}
    for name, certificate in results.items():
        assert certificate is not None
        assert [finding.probe for finding in certificate.findings] == PROBES
        assert not certificate.refused, name
        assert certificate["P8"].verdict is Verdict.EXACT, name
        assert certificate.call_syntax != "none", name


@pytest.mark.parametrize("system", [[], [SystemMessage("Say it in one line.")]], ids=["user", "system"])
@pytest.mark.parametrize("name", TOOL_NAMES)
def test_first_prompts_are_transformers(name: str, system: list[Message]) -> None:
    for tools in ([], TOOLS):
        messages = [*system, QUESTION]
        entries = as_dicts(ours(name), messages, inline=False)
        expected = theirs(name).apply_chat_template(
            entries, tools or None, add_generation_prompt=True, return_dict=False
        )
        assert ours(name).open(messages, tools) == expected


ODD = ["  at the edges  ", "\n\n", "é漢字 \U0001f600", '{"a": [1]}', "a\r\nb\tc\\n", 'it\'s "so"', "- a\n- b\n"]


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize("name", TOOL_NAMES)
def test_odd_results_are_written_as_transformers_does(name: str, text: str) -> None:
    assert derive(name, [QUESTION], [(AssistantMessage("", (weather("Rome"),)), [result(text)])]) is not Verdict.REFUSED


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_no_result_forges_a_turn(name: str) -> None:
    """With every control token's literal in it, also cut in two at the edges, a result adds no control token."""
    chat = ours(name)
    prompt, sampled = chat.open([QUESTION], TOOLS), chat.write(AssistantMessage("", (weather("Rome"),)))
    controls = sorted(chat.control_token_ids)
    honest = [t for t in chat.extend(prompt, sampled, [result("plain words")], TOOLS) if t in chat.control_token_ids]
    for token in controls:
        literal = chat.decode([token])
        for text in (
            literal,
            f"a{literal}b{literal}",
            literal[1:],
            literal[:-1],
            f"{literal[:2]}{literal}{literal[2:]}",
        ):
            delta = chat.extend(prompt, sampled, [result(f"{text}")], TOOLS)
            assert [t for t in delta if t in chat.control_token_ids] == honest, text


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_a_cut_turn_is_closed_and_the_rest_is_as_always(name: str) -> None:
    """Wherever a turn is cut: what was sampled stays, the turn is ended once, and the same follows as without a cut."""
    chat = ours(name)
    prompt = chat.open([QUESTION], TOOLS)
    for said, follows in ((ANSWER, MORE), (AssistantMessage("", (weather("Rome"),)), result("It was cut."))):
        sampled = chat.write(said)
        always = chat.extend(prompt, sampled, [follows], TOOLS)
        for kept in range(1, len(sampled)):
            delta = chat.extend(prompt, sampled[:kept], [follows], TOOLS)
            assert delta[-len(always) :] == always
            closing = delta[: -len(always)]
            assert closing[-1] in chat.control_token_ids
            assert not set(closing[:-1]) & set(chat.stop_token_ids)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TOOL_NAMES])
def test_other_templates_are_certified_or_refused_in_words(name: str) -> None:
    chat = ours(name)
    assert chat.certificate is not None
    prompt, sampled = chat.open([QUESTION], []), chat.write(ANSWER)
    delta = chat.extend(prompt, sampled, [MORE])
    entries = as_dicts(chat, [QUESTION, ANSWER, MORE], inline=False)
    if name.startswith(("idefics", "llava", "smolvlm")):
        entries = [{**entry, "content": [{"type": "text", "text": entry["content"]}]} for entry in entries]
    expected = theirs(name).apply_chat_template(entries, add_generation_prompt=True, return_dict=False)
    assert expected[-len(delta) :] == delta
    for probe, reason in chat.certificate.refused.items():
        assert reason, probe
        if probe == "P1":
            with pytest.raises(TemplateRefused, match=r"cannot be extended so \(P1: "):
                chat.extend(prompt, sampled, [result("x")])


def page() -> str:
    """The gallery: every template with the result of every probe."""
    short = {Verdict.EXACT: "exact", Verdict.KEEPS: "keeps", Verdict.REFUSED: "refused"}
    rows: list[str] = []
    reasons: dict[str, list[str]] = {}
    for name in NAMES:
        certificate = ours(name).certificate
        assert certificate is not None
        results = (short[certificate[probe].verdict] for probe in PROBES)
        rows.append(f"| {name} | {certificate.call_syntax} | {' | '.join(results)} |")
        for reason in dict.fromkeys(certificate.refused.values()):
            probes = ", ".join(probe for probe, why in certificate.refused.items() if why == reason)
            reasons.setdefault(f"{probes}: {reason.replace('of the tokenizer ', '')}", []).append(name)
    about = [f"- **{f.probe}** {f.about}" for f in ours(NAMES[0]).certificate.findings]  # type: ignore[union-attr]
    why = [f"- {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    table = [f"| template | calls | {' | '.join(PROBES)} |", f"|---|---|{'---|' * len(PROBES)}", *rows]
    return "\n".join([HEAD, *about, "", *table, "", "Why refused:", "", *why, ""])


def test_the_gallery_page_is_what_was_found() -> None:
    found = page()
    if os.environ.get("TOOLGYM_WRITE_DOCS") == "1":
        PAGE.write_text(found)
    assert PAGE.read_text() == found
