"""DeepSeek's calls."""

import re

from toolgym.agents.calls.syntax import CallSyntax, Mark
from toolgym.agents.calls.values import Call, Tools, Unreadable, invalid, load_json, make_call
from toolgym.agents.codec import unmarked
from toolgym.envs.messages import CallFault, InvalidToolCall


class DeepSeekCalls(CallSyntax):
    """V3's ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`` with fenced JSON, and V3.1's without a fence."""

    name = "deepseek"
    _literals = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    )
    _fence = re.compile(r"(?P<name>[^\n]*)\n```(?:json)?\n(?P<arguments>.*)\n```\Z", re.DOTALL)

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark)
        self._begins, self._ends, self._begin, self._end, self._sep = (mark(text) for text in self._literals)

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax.markers`."""
        return self._literals

    def find(self, text: str, tools: Tools, *, ended: bool) -> tuple[str, list[Call]]:
        """See `CallSyntax.find`."""
        for frame in (self._begins, self._ends):
            text = text.replace(frame, "")
        content, *blocks = text.split(self._begin)
        said = [content]
        calls: list[Call] = []
        for block in blocks:
            body, closed, after = block.partition(self._end)
            raw = unmarked(body).strip()
            if not closed:
                reason = "The call has no closing <｜tool▁call▁end｜>."
                calls.append(InvalidToolCall(raw, reason, fault=CallFault.CUT_OFF))
                continue
            said.append(after)
            calls.append(self._call(body, raw))
        return unmarked("".join(said)).strip(), calls

    def closing(self, text: str) -> str:
        """See `CallSyntax.closing`."""
        opened = text.rfind(self._begin)
        one = self._literals[3] if opened >= 0 and text.find(self._end, opened) < 0 else ""
        return one + (self._literals[1] if self._begins in text and self._ends not in text else "")

    def _call(self, body: str, raw: str) -> Call:
        head, separated, rest = body.partition(self._sep)
        if not separated:
            return InvalidToolCall(raw, "The call has no <｜tool▁sep｜>.", fault=CallFault.NO_NAME)
        fenced = self._fence.match(unmarked(rest).strip())
        name, arguments = (fenced["name"], fenced["arguments"]) if fenced else (unmarked(head), unmarked(rest))
        name = name.strip()
        try:
            return make_call(raw, name, load_json(arguments.strip()))
        except Unreadable as problem:
            return invalid(raw, problem, name)
