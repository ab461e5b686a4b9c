"""CodeTests: a function to write or to mend, judged by hidden tests."""

from collections.abc import Mapping, Sequence
from typing import Any

from toolgym.envs.catalog.code_tasks import LEVELS, draw
from toolgym.envs.catalog.hidden_tests import MAX_SOURCE, HiddenTest, run_hidden_tests
from toolgym.envs.catalog.hidden_tests_box import CodecError
from toolgym.envs.catalog.sources import GivenTasks, Row, RowError, content_id, read_once, task_source, text_of
from toolgym.envs.errors import ConfigurationError, ToolError
from toolgym.envs.messages import AssistantMessage, Message, ToolCall
from toolgym.envs.rewards import Episode, Score
from toolgym.envs.sandbox.sandbox_env import SandboxEnv
from toolgym.envs.tasks import Split, Task
from toolgym.envs.tool_env import Closer
from toolgym.envs.tools import tool
from toolgym.envs.vector import ToolVectorEnv

__all__ = ["LEVELS", "CodeTestsEnv", "draw", "make_vec", "solve", "submission"]

_MAX_TESTS = 100


class CodeTestsEnv(SandboxEnv):
    """Write a function, or mend one, and submit it: by the tool, or as a fenced ``python`` block in the final message.

    The component ``tests`` is the part of the hidden calls that give the right value, of the right type; the task
    counts as solved if all do. The calls are made in a box that has been reset, each in a process of its own, and what
    they should give never enters it: see `hidden_tests`.

    Tasks are drawn from 20 families in four levels, or read from a JSONL file with the fields ``prompt``, ``function``
    and ``tests``: ``[{"args": [...], "kwargs": {...}, "expected": ...}]``. There JSON stands for itself, and
    ``{"$tuple": [...]}``, ``{"$set": [...]}``, ``{"$raises": "ValueError"}`` and their like for the rest; see
    `hidden_tests_box`.

    Args:
        levels: the levels to draw tasks from.
        split: ``"train"`` or ``"test"``; no problem is in both.
        task_seed: seeds the task source.
        tasks: a JSONL file, which is taken whole: levels, split and task_seed do not apply to it. Or a task source.
        call_timeout: seconds that a hidden call may take, the submission's imports included.
        **options: see `SandboxEnv`.

    Raises:
        ConfigurationError: a wrong option, or a line of the file that is no task.
    """

    system_prompt = (
        "Write the Python code that is asked for. Try it with the python tool, then submit all of it. "
        "It is tested by calls that you do not see."
    )

    def __init__(
        self,
        *,
        levels: Sequence[int] = LEVELS,
        split: Split = "train",
        task_seed: int = 0,
        tasks: GivenTasks = None,
        call_timeout: float = 4.0,
        **options: Any,
    ) -> None:
        if isinstance(call_timeout, bool) or not isinstance(call_timeout, int | float) or not call_timeout > 0:
            raise ConfigurationError(f"expected call_timeout as a number above 0, actual {call_timeout!r}")
        self._call_timeout = call_timeout
        self.submitted: str | None = None
        super().__init__(
            task_source(tasks, task_of, draw, LEVELS, levels=levels, split=split, seed=task_seed), **options
        )

    @classmethod
    def shared(cls, num_envs: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Closer]]:
        """One pool, and one list of tasks; see `ToolEnv.shared`."""
        return super().shared(num_envs, read_once(options, task_of))

    def setup(self, task: Task) -> None:
        """Nothing is submitted yet."""
        self.submitted = None

    @tool
    async def python(self, code: str) -> str:
        """Run a Python program and return what it prints."""
        return (await self.sandbox.run(code)).text

    @tool(ends_episode=True)
    async def submit(self, code: str) -> str:
        """Hand in the complete code. This ends the task."""
        assert self.task is not None  # tools run in an episode
        function = self.task.data["function"]
        if function not in code:
            raise ToolError(f"the code does not define {function}: submit all of it")
        if len(code) > MAX_SOURCE:
            raise ToolError(f"the code has {len(code)} characters; at most {MAX_SOURCE} can be submitted")
        self.submitted = code
        return "submitted"

    async def score(self, episode: Episode) -> Score:
        """The part of the hidden tests that was passed."""
        source = self.submitted if self.submitted is not None else submission(episode.answer or "")
        if source is None:
            return Score({"tests": 0.0}, success=False)
        data = episode.task.data
        tests = [HiddenTest(entry["args"], entry["expected"], entry.get("kwargs", {})) for entry in data["tests"]]
        passed = await run_hidden_tests(self.sandbox, source, data["function"], tests, call_timeout=self._call_timeout)
        return Score({"tests": sum(passed) / len(passed)}, success=all(passed))


def submission(answer: str) -> str | None:
    """The code in the last complete fenced ``python`` block of a message; None if there is none."""
    found: str | None = None
    language: str | None = None  # of the block that is open
    block: list[str] = []
    for line in answer.split("\n"):
        mark = line.strip()
        if language is None and mark.startswith("```"):
            language, block = mark.strip("`").strip().lower(), []
        elif language is not None and mark == "```":
            found = "\n".join([*block, ""]) if language in ("python", "py") else found
            language = None
        else:
            block.append(line)
    return found


def task_of(row: Row) -> Task:
    """A task from a line of a file.

    Raises:
        RowError: a field is missing or wrong.
    """
    prompt, function = text_of(row, "prompt"), text_of(row, "function")
    if not function.isidentifier():
        raise RowError(f"expected field 'function' as the name of a function, actual {function!r:.100}")
    entries = row.get("tests")
    if not isinstance(entries, list) or not 0 < len(entries) <= _MAX_TESTS:
        raise RowError(f"expected field 'tests' as a list of 1 to {_MAX_TESTS} calls, actual {entries!r:.100}")
    tests = [_test(number, entry) for number, entry in enumerate(entries, 1)]
    return Task(content_id("code_tests", prompt, function, tests), prompt, {"function": function, "tests": tests})


def _test(number: int, entry: Any) -> dict[str, Any]:
    where = f"test {number}"
    if not isinstance(entry, dict) or "expected" not in entry:
        raise RowError(f'{where}: expected {{"args": [...], "expected": ...}}, actual {entry!r:.100}')
    if unknown := set(entry) - {"args", "kwargs", "expected"}:
        raise RowError(f"{where}: unknown fields {sorted(unknown)}; there are args, kwargs and expected")
    args, kwargs = entry.get("args", []), entry.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise RowError(
            f"{where}: expected args as a list and kwargs as an object, actual {args!r:.50} and {kwargs!r:.50}"
        )
    try:
        made = HiddenTest.of(args, entry["expected"], kwargs)
    except CodecError as error:
        raise RowError(f"{where}: {error}") from error
    return {"args": list(made.args), "kwargs": dict(made.kwargs), "expected": made.expected}


def solve(task: Task, messages: Sequence[Message]) -> AssistantMessage:
    """The reference solution's next message: the solution, submitted. Drawn tasks only.

    Args:
        task: a task of this environment.
        messages: the conversation so far.
    """
    return AssistantMessage("", (ToolCall("submit", {"code": task.data["solution"]}),))


def make_vec(**options: Any) -> ToolVectorEnv:
    """What `gymnasium.make_vec` calls."""
    return ToolVectorEnv.of(CodeTestsEnv, **options)
