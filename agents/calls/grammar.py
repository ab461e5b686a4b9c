"""`Grammar`: from what was sampled in one turn to the message that it says."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from toolgym.agents.calls.syntax import CallSyntax, Mark
from toolgym.agents.calls.values import Call, Tools, in_reasoning
from toolgym.agents.codec import unmarked
from toolgym.envs.messages import AssistantMessage, ToolCall


class Grammar(Protocol):
    """Reads a turn. In all texts control tokens stand in marks, see `TokenCodec.marked`."""

    @property
    def name(self) -> str:
        """Of the syntax of its calls."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """The literals that a turn is made of; none of them ends it."""
        ...

    def parse(self, text: str, opening: str, tools: Tools, *, ended: bool) -> AssistantMessage:
        """The message. Never raises, and loses nothing.

        Args:
            text: what was sampled, without the token that ended it.
            opening: the end of the prompt, which may have opened the reasoning.
            tools: function schemas.
            ended: whether the model ended its turn; else it was cut.
        """
        ...

    def closing(self, text: str, opening: str) -> str:
        """The scaffold that closes what a cut turn left open: its reasoning, its call; empty if nothing is."""
        ...

    def write(self, calls: Sequence[ToolCall]) -> str | None:
        """Calls as a model writes them; None where only the model's template knows."""
        ...


@dataclass(frozen=True)
class Reasoning:
    """How a format sets reasoning off.

    Attributes:
        opens: the scaffold before it.
        closes: the scaffold after it.
        closing: what a template writes from its end to where the content begins: ``closes`` and white space.
    """

    opens: str
    closes: str
    closing: str


class TaggedGrammar:
    """Reasoning between two tags, then content, with calls in it.

    Args:
        mark: shows scaffold as texts show it.
        syntax: of the calls; None if there are none.
        reasoning: None where the format does not set it off.
    """

    def __init__(self, mark: Mark, syntax: CallSyntax | None, reasoning: Reasoning | None) -> None:
        self._mark, self._syntax, self._reasoning = mark, syntax, reasoning
        if reasoning is not None:
            self._opens, self._closes = mark(reasoning.opens), mark(reasoning.closes)

    @property
    def name(self) -> str:
        """See `Grammar.name`."""
        return "none" if self._syntax is None else self._syntax.name

    @property
    def markers(self) -> tuple[str, ...]:
        """See `Grammar.markers`."""
        tags = () if self._reasoning is None else (self._reasoning.opens, self._reasoning.closes)
        return (*tags, *(() if self._syntax is None else self._syntax.markers))

    def parse(self, text: str, opening: str, tools: Tools, *, ended: bool) -> AssistantMessage:
        """See `Grammar.parse`. Calls in finished reasoning are drafts; in reasoning that was never closed, errors."""
        thoughts, spoken, inside = self._split(text, opening)
        content, calls = self._find(spoken, tools, ended=ended)
        if inside and self._reasoning is not None:
            drafts = self._find(thoughts[-1], tools, ended=ended)[1]
            calls = [*calls, *(in_reasoning(call, self._reasoning.closes) for call in drafts)]
        reasoning = "\n".join(part for part in (unmarked(thought).strip() for thought in thoughts) if part)
        return AssistantMessage(content, tuple(calls), reasoning or None)

    def closing(self, text: str, opening: str) -> str:
        """See `Grammar.closing`."""
        _, spoken, inside = self._split(text, opening)
        if inside and self._reasoning is not None:
            return self._reasoning.closing
        return "" if self._syntax is None else self._syntax.closing(spoken)

    def write(self, calls: Sequence[ToolCall]) -> str | None:
        """See `Grammar.write`."""
        return None if self._syntax is None else self._syntax.write(calls)

    def _find(self, text: str, tools: Tools, *, ended: bool) -> tuple[str, list[Call]]:
        if self._syntax is None:
            return unmarked(text).strip(), []
        return self._syntax.find(text, tools, ended=ended)

    def _split(self, text: str, opening: str) -> tuple[list[str], str, bool]:
        """Thoughts, all that was spoken, and whether the last thought is still open."""
        if self._reasoning is None:
            return [], text, False
        inside = opening.rfind(self._opens) > opening.rfind(self._closes)
        first = text.find(self._closes)
        if first >= 0 and text.find(self._opens, 0, first) < 0 and not inside:
            # Closed, but never opened: models whose prompt does not open it for them forget to, too.
            inside = not self._open_call(text[:first])
        thoughts: list[str] = []
        spoken: list[str] = []
        at = search = 0
        while True:
            tag = self._closes if inside else self._opens
            found = text.find(tag, search)
            if found < 0:
                (thoughts if inside else spoken).append(text[at:])
                return thoughts, "".join(spoken), inside
            closes = "" if inside else self._open_call(text[search:found])
            if closes:
                # A tag in an argument. The call goes on to its closing marker, if it has one.
                end = text.find(closes, found)
                search = len(text) if end < 0 else end
                continue
            (thoughts if inside else spoken).append(text[at:found])
            at = search = found + len(tag)
            inside = not inside

    def _open_call(self, text: str) -> str:
        """What would close the call that the end of a text leaves open, marked; empty if there is none."""
        closing = "" if self._syntax is None else self._syntax.closing(text)
        return closing and self._mark(closing)
