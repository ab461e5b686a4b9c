"""Judging a chat format by its template's whole renderings: what the probes of the certificate play, step by step.

Nothing here uses what made the delta. A delta is right if the whole rendering ends with it, right behind the one token
that ends the model's turn, and that token right behind the last words of the turn.
"""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from toolgym.agents.certificate import Concern, Shown, Verdict
from toolgym.agents.chat import ChatFormat, TemplateRefused
from toolgym.envs.errors import ConfigurationError
from toolgym.envs.messages import AssistantMessage, Message, ToolCall, ToolMessage


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the model in a probe, and what follows it.

    Attributes:
        said: what it says; a str is its raw output.
        last: the last words of it, which no other message has.
        follows: the new messages.
    """

    said: AssistantMessage | str
    last: str
    follows: tuple[Message, ...]


@dataclass
class Played:
    """A conversation as far as it was played.

    Attributes:
        ids: all tokens.
        messages: as the template is told of them.
        turns: for each turn of the model, where it may differ: from the opening of the turn to its end.
    """

    ids: list[int]
    messages: list[Message]
    turns: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as it was played.

    Attributes:
        step: of the probe.
        prompt: before it.
        sampled: as a model would, its stop token included.
        delta: what the format adds.
        truth: the whole rendering; or why there is none.
    """

    step: Step
    prompt: list[int]
    sampled: list[int]
    delta: list[int]
    truth: list[int] | str

    @property
    def concern(self) -> Concern:
        """What follows it."""
        answered = any(isinstance(message, ToolMessage) for message in self.step.follows)
        return Concern.RESULTS if answered else Concern.TURNS

    def refused(self, why: str) -> Shown:
        """That it is wrong."""
        return Shown(Verdict.REFUSED, why, self.concern)


def play(
    chat: ChatFormat, opening: Sequence[Message], steps: Sequence[Step], tools: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Turn, Shown]]:
    """Play a conversation.

    Yields:
        Each turn, and what it has shown.
    """
    played = Played(chat.open(opening, tools), list(opening))
    if played.ids != chat.render(opening, tools, opens=True):
        raise TemplateRefused("the first prompt is not the template's, or the template writes another one each time")
    opened = len(played.ids) - _common(played.ids, chat.render(opening, tools, opens=False))
    for step in steps:
        prompt, sampled = played.ids, chat.write(step.said)
        delta = chat.extend(prompt, sampled, step.follows, tools)
        played.messages += [_as_told(chat, step.said, sampled), *step.follows]
        played.turns.append((len(prompt) - opened, len(prompt) + len(sampled)))
        played.ids = [*prompt, *sampled, *delta]
        turn = Turn(step, prompt, sampled, delta, _render(chat, played.messages, tools))
        wrong = _misread(chat, turn, tools)
        yield turn, turn.refused(wrong) if wrong else judge(chat, turn, played.turns)


def _misread(chat: ChatFormat, turn: Turn, tools: Sequence[Mapping[str, Any]]) -> str:
    """Why what the template writes is not read as it was said; empty if it is. Some write text as reasoning."""
    said = turn.step.said
    if isinstance(said, str):
        return ""
    read = chat.parse(turn.sampled, turn.prompt, tools)
    told, found = ([(c.name, dict(c.arguments)) for c in m.tool_calls if isinstance(c, ToolCall)] for m in (said, read))
    texts = [text for text in (said.content, said.reasoning) if text and text in chat.decode(turn.sampled)]
    if (
        told == found
        and len(said.tool_calls) == len(read.tool_calls)
        and all(t in (read.content, read.reasoning) for t in texts)
    ):
        return ""
    return f"{_short(str(said))} is read as {_short(str(read))}"


def judge(chat: ChatFormat, turn: Turn, turns: Sequence[tuple[int, int]]) -> Shown:
    """Compare a turn, and all that went before it, with the template's whole rendering.

    Args:
        chat: the format.
        turn: the last one.
        turns: where each turn of the model may differ.
    """
    truth, delta = turn.truth, turn.delta
    if isinstance(truth, str):
        return turn.refused(truth)
    if why := _misplaced(chat, turn, truth):
        return turn.refused(why)
    if truth == [*turn.prompt, *turn.sampled, *delta]:
        return Shown(Verdict.EXACT, "", turn.concern)
    before, end = truth[: -len(delta) - 1], truth[-len(delta) - 1]
    kept = _kept(chat, [*turn.prompt, *turn.sampled], [*before, end], turns)
    if kept is None:
        return turn.refused("the template writes what came before the model's turns differently later on")
    return Shown(Verdict.KEEPS, kept, turn.concern)


def judge_cut(
    chat: ChatFormat, turn: Turn, kept: int, fits: Callable[[str], bool], tools: Sequence[Mapping[str, Any]]
) -> Shown:
    """Judge how a turn is closed that was cut: by what it left open, and by one token that ends it.

    Args:
        chat: the format.
        turn: the same one, whole, already judged.
        kept: how many tokens of it are left.
        fits: whether a text is what may close the part of the turn that was cut.
        tools: function schemas.
    """
    delta = chat.extend(turn.prompt, turn.sampled[:kept], turn.step.follows, tools)
    rest = len(delta) - len(turn.delta)
    if isinstance(turn.truth, str) or rest < 1 or delta[rest:] != turn.delta:
        return turn.refused(f"after a cut comes {_short(chat.decode(delta))}")
    closing, end = delta[: rest - 1], delta[rest - 1]
    closed = chat.decode(closing).strip()
    if end != turn.truth[-len(turn.delta) - 1] or not fits(closed):
        return turn.refused(f"a cut is closed by {_short(chat.decode([*closing, end]))}")
    return Shown(Verdict.KEEPS, "the turn as far as it was sampled", turn.concern)


def judge_other_stop(chat: ChatFormat, turn: Turn, stop: int, tools: Sequence[Mapping[str, Any]]) -> Shown:
    """Judge how a turn is closed that another stop token has ended: by the token that the template writes."""
    try:
        delta = chat.extend(turn.prompt, [*turn.sampled[:-1], stop], turn.step.follows, tools)
    except TemplateRefused:
        return Shown(Verdict.KEEPS, f"refused where {chat.decode([stop])!r} has ended the turn", turn.concern)
    end = [] if isinstance(turn.truth, str) else [turn.truth[-len(turn.delta) - 1]]
    if delta not in ([*end, *turn.delta], turn.delta if [stop] == end else None):
        return turn.refused(f"after {chat.decode([stop])} comes {_short(chat.decode(delta))}")
    return Shown(Verdict.KEEPS, f"{chat.decode([stop])!r}, where it ended the turn", turn.concern)


def _misplaced(chat: ChatFormat, turn: Turn, truth: list[int]) -> str:
    """Why a delta is not what stands behind the end of the turn; empty if it is."""
    delta = turn.delta
    if not delta or truth[-len(delta) :] != delta:
        return _parting(chat, delta, truth)
    if missing := _not_shown(chat, turn):
        return f"a message is not shown whole: {_short(missing)}"
    before, end, stop = truth[: -len(delta) - 1], truth[-len(delta) - 1], turn.sampled[-1]
    if end != stop and not (stop in chat.stop_token_ids and end in chat.turn_end_token_ids):
        return _parting(chat, delta, truth[:-1])
    ours, theirs = (_behind(chat, ids, turn.step.last) for ids in (turn.sampled[:-1], before))
    if ours is None or ours != theirs:
        return f"the turn ends with {_short(ours or '')}, the template's with {_short(theirs or '')}"
    return ""


def _as_told(chat: ChatFormat, said: AssistantMessage | str, sampled: list[int]) -> AssistantMessage:
    """A turn as the template is told of it: by its fields, or as raw text where that is the only way to write it."""
    if isinstance(said, AssistantMessage) and not chat.writes_inline(said):
        return said
    return AssistantMessage(chat.decode([token for token in sampled if token not in chat.stop_token_ids]))


def _behind(chat: ChatFormat, ids: Sequence[int], last: str) -> str | None:
    """The text behind the last words of a turn; None if they are not there."""
    text = chat.decode(ids)
    return text.rpartition(last)[2].strip() if last in text else None


def _not_shown(chat: ChatFormat, turn: Turn) -> str:
    """The first text of the new messages that the delta does not show; odd ones may be written in another way."""
    shown, at = chat.decode(turn.delta), 0
    for message in turn.step.follows:
        text = message.content.strip()
        if not text.isascii():
            continue
        places = [shown.find(form, at) for form in (text, json.dumps(text)[1:-1])]
        if max(places) < 0:
            return text
        at = min(place for place in places if place >= 0) + len(text)
    return ""


def _kept(chat: ChatFormat, ours: list[int], theirs: list[int], turns: Sequence[tuple[int, int]]) -> str | None:
    """What ours has in the model's turns that theirs has not; None if they differ anywhere else.

    All that stands between the turns of ours must stand in theirs in the same order, the first piece at its start. What
    theirs has in between are its versions of the turns, which must not hold more ends of turns than ours do.
    """
    ends = chat.turn_end_token_ids | set(chat.stop_token_ids)
    notes: list[str] = []
    at, outside = 0, [0, *(last for _, last in turns)]
    for number, (first, _) in enumerate(turns):
        piece = ours[outside[number] : first]
        found = _find(theirs, piece, at) if number else (0 if theirs[: len(piece)] == piece else -1)
        if found < 0:
            return None
        if number:
            notes += _difference(chat, ours[slice(*turns[number - 1])], theirs[at:found], ends)
        at = found + len(piece)
    notes += _difference(chat, ours[slice(*turns[-1])], theirs[at:], ends)
    return None if _TOO_MANY in notes else max(notes, key=len, default="the same text in other tokens")


_TOO_MANY = "more turns"


def _find(ids: list[int], piece: list[int], at: int) -> int:
    return next((k for k in range(at, len(ids) - len(piece) + 1) if ids[k : k + len(piece)] == piece), -1)


def _difference(chat: ChatFormat, ours: list[int], theirs: list[int], ends: AbstractSet[int]) -> list[str]:
    """How two versions of one turn differ, in words."""
    if sum(token in ends for token in theirs) > sum(token in ends for token in ours):
        return [_TOO_MANY]
    codes = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
    parts = [(chat.decode(ours[a:b]), chat.decode(theirs[c:d])) for kind, a, b, c, d in codes if kind != "equal"]
    if not parts:
        return []
    shown, instead = (max(texts, key=_weight) for texts in zip(*parts, strict=True))
    if shown and instead:
        return [f"{_short(shown)} where the template has {_short(instead)}"]
    return [f"{_short(shown)}, which the template drops" if shown else f"no {_short(instead)}, which was not sampled"]


def _weight(text: str) -> tuple[bool, int]:
    return bool(text.strip()), len(text)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:24]}...{text[-12:]}")


def _parting(chat: ChatFormat, delta: Sequence[int], truth: Sequence[int]) -> str:
    theirs = truth[-len(delta) :] if delta else truth[-8:]
    return f"after the turn comes {_short(chat.decode(delta))}, but the template has {_short(chat.decode(theirs))}"


def _render(chat: ChatFormat, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int] | str:
    try:
        return chat.render(messages, tools, opens=True)
    except (TemplateRefused, ConfigurationError) as refused:
        return str(refused)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
