"""DeepSeek's calls."""

import re
from collections.abc import Iterator

from toolgym.agents.calls.syntax import BlockSyntax, Mark
from toolgym.agents.calls.values import Call, Tools, Unreadable, json_end, load_json, make_call
from toolgym.agents.codec import MARK_OPEN, unmarked
from toolgym.envs.messages import CallFault, InvalidToolCall


class DeepSeekCalls(BlockSyntax):
    """V3's ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`` with fenced JSON, and V3.1's without a fence."""

    name, opens, closes = "deepseek", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    _frame = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    _separates = "<｜tool▁sep｜>"
    _fence = re.compile(r"(?P<name>[^\n]*)\n```(?:json)?\n(?P<arguments>.*?)(?P<end>\n```)?\Z", re.DOTALL)

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        self._begins, self._ends = (mark(text) for text in self._frame)
        self._sep = mark(self._separates)
        self._frames = re.compile(f"({re.escape(self._begins)}|{re.escape(self._ends)})")
        self._head = re.compile(rf"[^{MARK_OPEN}]*{re.escape(self._sep)}(?:[^{MARK_OPEN}\n]*\n```(?:json)?\n)?")

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax.markers`."""
        return (*self._frame, self.opens, self.closes, self._separates)

    def find(self, text: str, tools: Tools, *, ended: bool) -> tuple[str, list[Call]]:
        """See `CallSyntax.find`."""
        said: list[str] = []
        calls: list[Call] = []
        waiting: list[str] | None = None  # the texts of a frame in which no call has been found yet
        for piece in self._framed(text, tools):
            if not isinstance(piece, str):
                calls.append(piece)
                said += waiting or ()
                waiting = None
            elif piece == self._begins:
                calls += _empty(waiting, CallFault.MALFORMED)
                waiting = []
            elif piece == self._ends and waiting is not None:
                calls += _empty(waiting, CallFault.MALFORMED)
                waiting = None
            elif piece != self._ends or not calls:
                (said if waiting is None else waiting).append(piece)
        calls += _empty(waiting, CallFault.MALFORMED if ended else CallFault.CUT_OFF)
        return unmarked("".join(said)).strip(), calls

    def closing(self, text: str) -> str:
        """See `CallSyntax.closing`."""
        frame = self._frame[1] if self._begins in text and self._ends not in text else ""
        return super().closing(text) + frame

    def whole(self, text: str, at: int) -> int | None:
        """See `BlockSyntax.whole`."""
        head = self._head.match(text, at)
        end = None if head is None else json_end(text, head.end())
        if head is None or end is None:
            return None
        return end + len("\n```") if text.startswith("\n```", end) and head.group().endswith("\n") else end

    def read(self, body: str, tools: Tools) -> list[Call]:
        """See `BlockSyntax.read`."""
        raw = unmarked(body).strip()
        head, separated, rest = body.partition(self._sep)
        if not separated:
            raise Unreadable(CallFault.NO_NAME, "The call has no <｜tool▁sep｜>.")
        fenced = self._fence.match(unmarked(rest).rstrip())
        name, arguments = (fenced["name"], fenced["arguments"]) if fenced else (unmarked(head), unmarked(rest))
        name = name.strip()
        if not name:
            raise Unreadable(CallFault.NO_NAME, "The call has no name.")
        try:
            value = load_json(arguments.strip())
        except Unreadable as problem:
            problem.name = name
            raise
        if fenced and not fenced["end"]:
            raise Unreadable(CallFault.BAD_JSON, "The JSON of the call has no closing fence.", name)
        return [make_call(raw, name, value)]

    def _framed(self, text: str, tools: Tools) -> Iterator[str | Call]:
        for piece in self.pieces(text, tools):
            if isinstance(piece, str):
                yield from filter(None, self._frames.split(piece))
            else:
                yield piece


def _empty(waiting: list[str] | None, fault: CallFault) -> list[Call]:
    if waiting is None:
        return []
    return [InvalidToolCall(unmarked("".join(waiting)).strip(), "The block of calls has no call.", fault=fault)]
