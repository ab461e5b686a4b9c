"""CodeMath: mathematics solved by running Python, the final answer in a box (the setting of ReTool)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from toolgym.envs.catalog.math_answers import boxed, same
from toolgym.envs.catalog.math_tasks import LEVELS, draw
from toolgym.envs.catalog.sources import GivenTasks, Row, RowError, content_id, read_once, task_source, text_of
from toolgym.envs.errors import ConfigurationError
from toolgym.envs.messages import AssistantMessage, Message, ToolCall, ToolMessage
from toolgym.envs.rewards import Episode
from toolgym.envs.sandbox.sandbox_env import SandboxEnv
from toolgym.envs.tasks import Split, Task
from toolgym.envs.tool_env import Closer
from toolgym.envs.tools import Tool, ToolOptions, Toolset
from toolgym.envs.vector import ToolVectorEnv

__all__ = ["LEVELS", "CodeMathEnv", "Mode", "draw", "make_vec", "solve"]

Mode = Literal["stateless", "session"]
_SHARED_BOXES = 32  # serve any number of slots whose calls are stateless


class CodeMathEnv(SandboxEnv):
    r"""Solve a mathematical problem with a Python interpreter, and give the final answer in ``\boxed{}``.

    The score is 1 if the last ``\boxed{}`` of the final message holds the right answer, else 0. Rational numbers are
    compared exactly, other answers by `math_verify`; see `math_answers`.

    Tasks are drawn from 28 kinds in five levels (number theory, combinatorics, linear algebra, recurrences, series,
    geometry with surds, probability, ...), or read from a JSONL file with the fields ``question`` (or ``problem``, or
    ``prompt``) and ``answer`` (LaTeX, a number, or a solution that ends in ``#### 42`` or holds a ``\boxed{}``).

    Args:
        mode: ``"stateless"``: every call is a program of its own in a clean box. ``"session"``: the calls of an episode
            are cells of one session, which keeps its variables.
        levels: the levels to draw tasks from.
        split: ``"train"`` or ``"test"``; no problem is in both.
        task_seed: seeds the task source.
        tasks: a JSONL file, which is taken whole: levels, split and task_seed do not apply to it. Or a task source.
        **options: see `SandboxEnv`.

    Raises:
        ConfigurationError: a wrong option, or a line of the file that is no task.
    """

    system_prompt = "Solve the problem by running Python. Then give the exact final answer in \\boxed{}."

    def __init__(
        self,
        *,
        mode: Mode = "stateless",
        levels: Sequence[int] = LEVELS,
        split: Split = "train",
        task_seed: int = 0,
        tasks: GivenTasks = None,
        **options: Any,
    ) -> None:
        if mode not in get_args(Mode):
            raise ConfigurationError(f"expected mode among {', '.join(get_args(Mode))}, actual {mode!r}")
        self.mode = mode
        self.lease = "call" if mode == "stateless" else "episode"
        source = task_source(tasks, task_of, draw, LEVELS, levels=levels, split=split, seed=task_seed)
        super().__init__(source, **options)

    @classmethod
    def shared(cls, num_envs: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Closer]]:
        """One pool, with a box a slot in ``"session"`` mode, and one list of tasks; see `ToolEnv.shared`."""
        stateless = options.get("mode", "stateless") == "stateless"
        return super().shared(min(num_envs, _SHARED_BOXES) if stateless else num_envs, read_once(options, task_of))

    def _make_tools(self) -> Toolset:
        # One name and one schema in both modes; only what the model is told about it differs.
        run = self._run_program if self.mode == "stateless" else self._run_cell
        return Toolset([Tool(run, ToolOptions(name="python")), *Toolset.of(self).values()])

    async def _run_program(self, code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept between calls."""
        return (await self.sandbox.run(code)).text

    async def _run_cell(self, code: str) -> str:
        """Run Python and return what it prints and its last value. Variables are kept between calls."""
        return (await self.sandbox.exec(code)).text

    async def score(self, episode: Episode) -> float:
        """1 for the right answer in the last box, 0 for another one or none."""
        answer = boxed(episode.answer or "")
        return float(answer is not None and await same(answer, episode.task.data["answer"]))


def task_of(row: Row) -> Task:
    """A task from a line of a file.

    Raises:
        RowError: a field is missing or wrong.
    """
    question = text_of(row, "question", "problem", "prompt")
    given = row.get("answer")
    if isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given):
        answer = str(given)
    else:
        answer = _final(text_of(row, "answer", "solution"), bare="answer" in row)
    return Task(content_id("code_math", question), question, {"answer": answer})


def _final(text: str, *, bare: bool) -> str:
    """The answer at the end of a solution, or the text itself where it is one."""
    _, marked, last = text.rpartition("####")
    inside = boxed(text)
    found = last if marked else inside if inside is not None else text if bare else ""
    if not found.strip():
        raise RowError(
            f"expected an answer, or a solution that ends in '#### 42' or has a \\boxed{{}}, actual {text!r:.100}"
        )
    return found.strip()


def solve(task: Task, messages: Sequence[Message]) -> AssistantMessage:
    """The reference solution's next message: one program, then what it printed. Drawn tasks only.

    Args:
        task: a task of this environment.
        messages: the conversation so far.
    """
    last = messages[-1]
    if isinstance(last, ToolMessage):
        return AssistantMessage(f"The answer is \\boxed{{{last.content.strip()}}}.")
    return AssistantMessage("", (ToolCall("python", {"code": task.data["program"]}),))


def make_vec(**options: Any) -> ToolVectorEnv:
    """What `gymnasium.make_vec` calls."""
    return ToolVectorEnv.of(CodeMathEnv, **options)
