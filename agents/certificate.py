"""`Certificate`: what a chat format has proven about itself, on this very tokenizer and template, token by token.

Every probe plays a conversation through `ChatFormat.write` and `extend` and compares with the model's own template,
rendered whole. Where both give the same tokens, the format is *exact*. Where they differ in nothing but the model's
own turns (templates drop the reasoning of earlier turns, or replace the token that ended them), it is *exact by
keeping* what was sampled. Anything else is *refused*, with the reason, and never done.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from toolgym.agents.chat import ChatFormat, TemplateRefused
from toolgym.envs.errors import ConfigurationError
from toolgym.envs.messages import AssistantMessage, Message, UserMessage


class Verdict(StrEnum):
    """What a probe has shown, from best to worst."""

    EXACT = "exact"
    KEEPS = "exact by keeping"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one probe.

    Attributes:
        probe: its name, P1 to P8.
        about: what it plays.
        verdict: what it has shown.
        notes: what is kept, or why it is refused.
    """

    probe: str
    about: str
    verdict: Verdict
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Certificate:
    """What holds of a chat format, and what is refused.

    Attributes:
        chat_format: its name.
        call_syntax: the syntax of its calls.
        findings: one for each probe.
    """

    chat_format: str
    call_syntax: str
    findings: tuple[Finding, ...]

    def __getitem__(self, probe: str) -> Finding:
        return next(finding for finding in self.findings if finding.probe == probe)

    @property
    def refused(self) -> dict[str, str]:
        """The probes that were refused, and why."""
        return {f.probe: "; ".join(f.notes) for f in self.findings if f.verdict is Verdict.REFUSED}

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, for the run folder."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the model in a probe, and what follows it.

    Attributes:
        said: what it says; a str is its raw output.
        follows: the new messages.
        cut: keeps this share of what it says, as if a limit had cut it; None keeps all of it.
        shown: how the template is told of a cut turn; None: as its text.
    """

    said: AssistantMessage | str
    follows: tuple[Message, ...]
    cut: Callable[[list[int]], int] | None = None
    shown: AssistantMessage | None = None


@dataclass
class Played:
    """A conversation as far as it was played.

    Attributes:
        ids: all tokens.
        turns: for each turn of the model, where it may differ: from the opening of the turn to its end.
        delta: of the last observation, what is not the end of the model's turn.
        ended: whether the model ended its turn itself; else ``delta`` begins with the token that does.
    """

    ids: list[int]
    turns: list[tuple[int, int]] = field(default_factory=list)
    delta: list[int] = field(default_factory=list)
    ended: bool = True


def play(
    chat: ChatFormat, opening: Sequence[Message], steps: Sequence[Step], tools: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Verdict, str]]:
    """Play a conversation, and judge it after each step.

    Yields:
        For each step what it has shown, and a note.
    """
    played = Played(chat.open(opening, tools))
    opened = len(played.ids) - _common(played.ids, chat.render(opening, tools, opens=False))
    fields, inline = list(opening), list(opening)
    for step in steps:
        prompt = played.ids
        sampled = chat.write(step.said)
        whole = chat.extend(prompt, sampled, step.follows, tools)
        if step.cut is not None:
            sampled = sampled[: step.cut(sampled)]
        delta = chat.extend(prompt, sampled, step.follows, tools)
        # What closes a turn that was cut belongs to it, but for the token that ends it.
        closing = max(0, len(delta) - len(whole) - 1)
        played.turns.append((len(prompt) - opened, len(prompt) + len(sampled) + closing))
        played.ids, played.delta = [*prompt, *sampled, *delta], delta[closing:]
        played.ended = step.cut is None
        text = chat.decode([token for token in sampled if token not in chat.stop_token_ids])
        said = step.shown or (step.said if isinstance(step.said, AssistantMessage) else AssistantMessage(text))
        fields += [said, *step.follows]
        inline += [AssistantMessage(text), *step.follows]
        yield judge(chat, played, [_render(chat, messages, tools) for messages in (fields, inline)])


def judge(chat: ChatFormat, played: Played, truths: Sequence[list[int] | str]) -> tuple[Verdict, str]:
    """Compare what was played with what the template writes, in whichever of its forms is nearest.

    Args:
        chat: decodes.
        played: our tokens.
        truths: the template's tokens, or why it gave none.
    """
    worst = ""
    for truth in truths:
        if isinstance(truth, str):
            worst = worst or truth
        elif truth == played.ids:
            return Verdict.EXACT, ""
    for truth in truths:
        if isinstance(truth, str):
            continue
        if truth[len(truth) - len(played.delta) :] != played.delta:
            worst = _parting(chat, played, truth)
            continue
        before, theirs = played.ids[: len(played.ids) - len(played.delta)], truth[: len(truth) - len(played.delta)]
        if played.ended and before[-1] != theirs[-1] and not {before[-1], theirs[-1]} <= chat.control_token_ids:
            worst = _parting(chat, played, theirs)  # something between the end of the turn and what we add is missing
            continue
        kept = _kept(chat, before, theirs, played.turns)
        if kept is not None:
            return Verdict.KEEPS, kept
        worst = "the template writes what came before the model's turns differently later on"
    return Verdict.REFUSED, worst


def _kept(chat: ChatFormat, ours: list[int], theirs: list[int], turns: Sequence[tuple[int, int]]) -> str | None:
    """What ours has in the model's turns that theirs has not; None if they differ anywhere else."""
    kept, missing = [""], [""]
    for kind, start, end, low, high in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        if not any(first <= start and end <= last for first, last in turns):
            return None
        kept.append(chat.decode(ours[start:end]))
        missing.append(chat.decode(theirs[low:high]))
    shown, instead = (max(texts, key=lambda text: (bool(text.strip()), len(text))) for texts in (kept, missing))
    if shown and instead:
        return f"{_short(shown)} where the template has {_short(instead)}"
    return f"{_short(shown)}, which the template drops" if shown else f"no {_short(instead)}, which was not sampled"


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:24]}...{text[-12:]}")


def _parting(chat: ChatFormat, played: Played, truth: list[int]) -> str:
    ours, theirs = chat.decode(played.delta), chat.decode(truth[-len(played.delta) :])
    return f"after the turn comes {_short(ours)}, but the template has {_short(theirs)}"


def _render(chat: ChatFormat, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int] | str:
    try:
        return chat.render(messages, tools, opens=True)
    except (TemplateRefused, ConfigurationError) as refused:
        return str(refused)


def finding(probe: str, about: str, shown: Iterable[tuple[Verdict, str]], *notes: str) -> Finding:
    """One finding out of all that a probe has shown: the worst verdict, with its notes."""
    try:
        seen = list(shown)
    except (TemplateRefused, ConfigurationError) as refused:
        return Finding(probe, about, Verdict.REFUSED, (str(refused),))
    order = list(Verdict)
    worst = max((verdict for verdict, _ in seen), key=order.index, default=Verdict.EXACT)
    said = [note for verdict, note in seen if verdict is worst and note]
    return Finding(probe, about, worst, (*notes, *dict.fromkeys(said)))


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def opening_of(*messages: Message) -> tuple[Message, ...]:
    """An opening conversation; without messages, a short question."""
    return messages or (UserMessage("What is 6 * 7?"),)
