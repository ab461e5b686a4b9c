"""Runs and trajectories for the terminal, by rich."""

import json
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from toolgym.agents.chat import ChatFormat
from toolgym.envs.errors import ConfigurationError
from toolgym.envs.messages import AssistantMessage, InvalidToolCall, Message, ToolMessage, to_dict
from toolgym.rollout.report import Summary
from toolgym.rollout.trajectory import SegmentKind, StopReason, Trajectory

_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_PICTURES |= dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD)
_STYLES = {SegmentKind.PROMPT: "dim", SegmentKind.ACTION: "bold green", SegmentKind.OBSERVATION: "cyan"}


def summary_table(summaries: Sequence[Summary], seconds: Mapping[str, float]) -> Table:
    """A run's figures, one column an environment. Means are over its trajectories, of rewards over those that have one.

    Args:
        summaries: by environment.
        seconds: wall time of each environment's collection, for its rate; may lack some.
    """
    table = Table("")
    for summary in summaries:
        table.add_column(plain(summary.env_id))
    columns = [_column(summary, seconds.get(summary.env_id, 0.0)) for summary in summaries]
    for name in columns[0] if columns else ():
        table.add_row(name, *(plain(column[name]) for column in columns))
    return table


def _column(summary: Summary, seconds: float) -> dict[str, str]:
    count, reward = summary.trajectories, summary.mean_reward
    return {
        "trajectories": f"{count}",
        "solved": f"{summary.solved} ({summary.solved / count:.0%})",
        "mean reward": "none" if reward is None else f"{reward:.2f}",
        "mean turns": f"{summary.turns / count:.1f}",
        "mean tool calls": f"{summary.tool_calls / count:.1f}",
        "mean tokens": f"{summary.tokens / count:.0f}, {summary.sampled_tokens / count:.0f} of them sampled",
        "tokens/s": f"{summary.sampled_tokens / seconds:,.0f} sampled" if seconds > 0 else "not recorded",
        "stop reasons": _counts(summary.stop_reasons),
        "failures": _counts(summary.failures) or "none",
        "template breaks": _breaks(summary),
        "token mismatches": f"{summary.mismatches} in {summary.turns:,} turns",
    }


def _breaks(summary: Summary) -> str:
    refused = summary.stop_reasons[StopReason.TEMPLATE_REFUSED]
    return f"{summary.breaks} split, {refused} stopped" if summary.breaks or refused else "none"


class TrajectoryView:
    """One trajectory turn by turn, then its tokens as text, coloured by who said them.

    Args:
        trajectory: what to show.
        chat: decodes the tokens; without it only the messages are shown.
    """

    def __init__(self, trajectory: Trajectory, chat: ChatFormat | None = None) -> None:
        self._trajectory, self._chat = trajectory, chat

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What rich prints."""
        yield Panel(self._heading(), title=f"trajectory {self._trajectory.id}", title_align="left")
        turns = deque(self._trajectory.turns)
        said = [message for message in self._trajectory.messages if isinstance(message, AssistantMessage)]
        given = len(said) - len(turns)  # what the opening prompt let the assistant say was not sampled
        for message in self._trajectory.messages:
            yield from _message(message)
            given -= isinstance(message, AssistantMessage)
            if isinstance(message, AssistantMessage) and given < 0:
                turn = turns.popleft()
                calls = f", calls {', '.join(turn.calls)}" if turn.calls else ""
                yield Text(f"           {turn.completion_tokens} tokens, {turn.finish_reason}{calls}", style="dim")
        if self._chat is not None:
            legend = Text.assemble("tokens: ", *_legend())
            yield Panel(self._tokens(self._chat), title=legend, title_align="left")

    def _heading(self) -> Group:
        t = self._trajectory
        sampled = int(t.loss_mask.sum())
        reward = "none" if t.reward is None else f"{t.reward:.2f}"
        parts = [f"{name}={value:.2f}" for name, value in t.score.items()]
        lines = [
            f"{t.env_id}   task {t.task_index}: {t.task_id}",
            f"reward {reward} ({', '.join(parts)})   solved {t.solved}   stopped by {t.stop_reason}",
            f"{len(t.turns)} turns   {len(t)} tokens, {sampled} sampled   mean logprob {_mean_logprob(t)}",
        ]
        if t.breaks:
            lines.append(
                f"split into {len(t.samples)} training samples, of {', '.join(str(len(s)) for s in t.samples)} tokens"
            )
        if t.detail:
            lines.append(f"because: {t.detail}")
        if t.failure is not None:
            lines.append(f"failure: {t.failure.kind} in {t.failure.where}: {t.failure.message}")
        return Group(*(plain(line) for line in lines))

    def _tokens(self, chat: ChatFormat) -> Text:
        ids = self._trajectory.input_ids
        text = Text()
        for number, segment in enumerate(self._trajectory.segments):
            if number and segment.kind is SegmentKind.PROMPT:
                text.append("\n-- another sample --\n", "bold")
            part = chat.decode(ids[segment.start : segment.end].tolist())
            text.append_text(plain(part, _STYLES[segment.kind]))
        return text


def _message(message: Message) -> Iterator[Text]:
    if isinstance(message, AssistantMessage):
        if message.reasoning:
            yield plain(f"assistant thinks: {message.reasoning}", "italic green")
        if message.content or not message.tool_calls:
            yield plain(f"assistant: {message.content}", _STYLES[SegmentKind.ACTION])
        for call in message.tool_calls:
            if isinstance(call, InvalidToolCall):
                yield plain(f"assistant: bad call {call.raw!r}: {call.error}", "bold red")
            else:
                said = f"assistant: {call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"
                yield plain(said, _STYLES[SegmentKind.ACTION])
    elif isinstance(message, ToolMessage):
        yield plain(f"     tool: {message.content}", _STYLES[SegmentKind.OBSERVATION])
    else:
        yield plain(f"{to_dict(message)['role']:>9}: {message.content}", _STYLES[SegmentKind.PROMPT])


def plain(text: str, style: str = "") -> Text:
    """Text as it is: no markup, and no control characters, which could paint over what the terminal shows."""
    return Text(text.translate(_PICTURES), style=style)


def draw(console: Console, path: Path, title: str) -> None:
    """Draw what a recording console has printed, as SVG.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    # The picture stands alone: rich's own format would load a font from the web.
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    try:
        path.write_text(console.export_svg(title=title, code_format=form))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error}") from error


def _legend() -> Iterator[tuple[str, str]]:
    for kind, style in _STYLES.items():
        yield (f" {kind} ", style)


def _mean_logprob(trajectory: Trajectory) -> str:
    sampled = trajectory.logprobs[trajectory.loss_mask]
    return f"{float(sampled.mean()):.3f}" if len(sampled) else "none"


def _counts(counter: Counter[str]) -> str:
    return "\n".join(f"{name} {count}" for name, count in counter.most_common())
