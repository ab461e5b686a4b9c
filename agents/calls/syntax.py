"""`CallSyntax`: how one family of models writes tool calls, and the scanner that most syntaxes share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from toolgym.agents.calls.values import Call, Tools, Unreadable, invalid
from toolgym.agents.codec import unmarked
from toolgym.envs.messages import CallFault, InvalidToolCall, ToolCall

Mark = Callable[[str], str]


class CallSyntax(ABC):
    """Finds calls in what a model said, its reasoning taken away. In that text, control tokens stand in marks.

    Nothing is lost: all text is either content or part of a call, and a call that cannot be read becomes an
    `InvalidToolCall` with its raw text and the reason. Never raises.

    Args:
        mark: shows scaffold as the text shows it, see `TokenCodec.mark`.
    """

    name: ClassVar[str]

    def __init__(self, mark: Mark) -> None:
        self.mark = mark

    @abstractmethod
    def find(self, text: str, tools: Tools, *, ended: bool) -> tuple[str, list[Call]]:
        """The content and the calls, in the model's order.

        Args:
            text: marked, without reasoning.
            tools: function schemas: they give the values of untyped syntaxes their types.
            ended: whether the model ended its turn; else it was cut.
        """

    def closing(self, text: str) -> str:
        """The scaffold that closes a call which the end of a text leaves open; empty if there is none."""
        return ""

    def write(self, calls: Sequence[ToolCall]) -> str | None:
        """Calls as a model writes them, for templates that write none; None where only templates know."""
        return None

    @property
    def markers(self) -> tuple[str, ...]:
        """The literals that this syntax is made of; none of them ends a turn."""
        return ()


class BlockSyntax(CallSyntax):
    """Calls in blocks of an opening and a closing marker.

    Attributes:
        opens: the opening marker.
        closes: the closing marker.
    """

    opens: ClassVar[str]
    closes: ClassVar[str]

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        self._opens, self._closes = mark(self.opens), mark(self.closes)

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax.markers`."""
        return (self.opens, self.closes)

    @abstractmethod
    def read(self, body: str, tools: Tools) -> list[Call]:
        """The calls in one block.

        Raises:
            Unreadable: it cannot be read.
        """

    @abstractmethod
    def whole(self, text: str, at: int) -> int | None:
        """Where a body ends that begins here and is well formed, whatever markers its texts hold; None if it is not."""

    def find(self, text: str, tools: Tools, *, ended: bool) -> tuple[str, list[Call]]:
        """See `CallSyntax.find`."""
        pieces = self.pieces(text, tools)
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        return unmarked(content).strip(), [piece for piece in pieces if not isinstance(piece, str)]

    def pieces(self, text: str, tools: Tools) -> list[str | Call]:
        """Calls and the marked texts between them, in order."""
        found: list[str | Call] = []
        at = 0
        while (start := text.find(self._opens, at)) >= 0:
            found.append(text[at:start])
            body_at = start + len(self._opens)
            end = self._end(text, body_at)
            if end is None:
                # Without a closing marker, a block goes on to the next one, or to the end.
                following = text.find(self._opens, body_at)
                at = len(text) if following < 0 else following
                found.append(_unclosed(text[body_at:at], self.closes))
                continue
            found += self._read(text[body_at:end], tools)
            at = end + len(self._closes)
        return [*found, text[at:]]

    def closing(self, text: str) -> str:
        """See `CallSyntax.closing`."""
        start = text.rfind(self._opens)
        return self.closes if start >= 0 and text.find(self._closes, start) < 0 else ""

    def _end(self, text: str, at: int) -> int | None:
        """Where the closing marker of a body stands; None if it is not closed before another block opens."""
        whole = self.whole(text, at)
        if whole is not None and text.startswith(self._closes, skip(text, whole)):
            return skip(text, whole)
        opened = text.find(self._opens, at)
        first = text.find(self._closes, at, len(text) if opened < 0 else opened)
        return None if first < 0 else first

    def _read(self, body: str, tools: Tools) -> list[Call]:
        raw = unmarked(body).strip()
        try:
            return self.read(body, tools)
        except Unreadable as problem:
            return [invalid(raw, problem)]


def skip(text: str, at: int) -> int:
    """Where the next visible character stands, or the end."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _unclosed(body: str, closes: str) -> InvalidToolCall:
    return InvalidToolCall(unmarked(body).strip(), f"The call has no closing {closes}.", fault=CallFault.CUT_OFF)
