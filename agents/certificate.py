"""`Certificate`: what a chat format has proven about itself, on this very tokenizer and template, token by token.

Every probe plays a conversation through `ChatFormat.write` and `extend` and compares with the model's own template,
rendered whole. Where both give the same tokens, the format is *exact*. Where they differ in nothing but the model's
own turns (templates drop the reasoning of earlier turns, or replace the token that ended them), it is *exact by
keeping* what was sampled. Anything else is *refused*, with the reason, and never done.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from toolgym.agents.chat import TemplateRefused
from toolgym.envs.errors import ConfigurationError


class Verdict(StrEnum):
    """What a probe has shown, from best to worst."""

    EXACT = "exact"
    KEEPS = "exact by keeping"
    REFUSED = "refused"


class Concern(StrEnum):
    """What a conversation must have for a refusal to be about it."""

    RESULTS = "results"
    TURNS = "turns"
    BESIDE = "text beside calls"


@dataclass(frozen=True, slots=True)
class Shown:
    """What one step of a probe has shown.

    Attributes:
        verdict: of this step.
        note: what is kept, or why it is refused.
        concern: what came after the turn.
    """

    verdict: Verdict
    note: str = ""
    concern: Concern = Concern.TURNS


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one probe.

    Attributes:
        probe: its name, P1 to P8.
        about: what it plays.
        verdict: the worst of what it has shown.
        notes: what is kept, or why it is refused.
        concerns: of what was refused.
    """

    probe: str
    about: str
    verdict: Verdict
    notes: tuple[str, ...] = ()
    concerns: tuple[Concern, ...] = ()


@dataclass(frozen=True, slots=True)
class Certificate:
    """What holds of a chat format, and what is refused.

    Attributes:
        chat_format: its name.
        call_syntax: the syntax of its calls.
        fingerprint: of the template, its variables and the tokenizer; the same for the same ones.
        one_call: whether a turn has one call at most: several answers are refused then.
        findings: one for each probe.
    """

    chat_format: str
    call_syntax: str
    fingerprint: str
    one_call: bool
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


def finding(probe: str, about: str, shown: Iterable[Shown], *notes: str) -> Finding:
    """One finding out of all that a probe has shown: the worst verdict, with its notes."""
    seen: list[Shown] = []
    try:
        seen.extend(shown)
    except (TemplateRefused, ConfigurationError) as refused:
        return Finding(probe, about, Verdict.REFUSED, (str(refused),), tuple(Concern))
    order = list(Verdict)
    worst = max((one.verdict for one in seen), key=order.index, default=Verdict.EXACT)
    said = [one.note for one in seen if one.verdict is worst and one.note]
    concerns = dict.fromkeys(one.concern for one in seen if one.verdict is Verdict.REFUSED)
    return Finding(probe, about, worst, (*notes, *dict.fromkeys(said)), tuple(concerns))
