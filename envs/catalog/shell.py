"""Shell: work on files with bash, judged by the files it leaves."""

import ast
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from toolgym.envs.catalog.shell_tasks import LEVELS, draw
from toolgym.envs.catalog.sources import GivenTasks, Row, RowError, content_id, read_once, task_source, text_of
from toolgym.envs.errors import ToolError
from toolgym.envs.messages import AssistantMessage, Message, ToolCall, ToolMessage
from toolgym.envs.rewards import Episode
from toolgym.envs.sandbox.sandbox import Sandbox
from toolgym.envs.sandbox.sandbox_env import SandboxEnv
from toolgym.envs.tasks import Split, Task
from toolgym.envs.tool_env import Closer
from toolgym.envs.tools import tool
from toolgym.envs.vector import ToolVectorEnv

__all__ = ["LEVELS", "ShellEnv", "draw", "make_vec", "solve"]

_MAX_FILES = 1_000
_MAX_BYTES = 16 * 1024 * 1024
# Nothing of the workspace may be imported by the check itself, or by a Python that it starts.
_CHECK = """
import os, sys
sys.path[:] = [path for path in sys.path if path not in ("", ".", os.getcwd())]
os.environ.update(HOME="/tmp", PYTHONNOUSERSITE="1")
exec(compile({check!r}, "check.py", "exec"), {{"__name__": "__main__"}})
"""


class ShellEnv(SandboxEnv):
    """Do what is asked with the files in a workspace, by bash commands.

    The score is 1 if the files are as they should be when the model has finished, else 0. Files are fetched out of the
    box and compared on our side, as bytes: no program of the box has a say in it. White space at the end of a file is
    not compared; what the task does not ask to change must be as it was; further files do not matter. Links and other
    special files count as missing.

    Tasks are drawn from 15 kinds in three levels, or read from a JSONL file with the fields ``prompt``, ``files`` (an
    object of path and text) and one or both of

    - ``expect``: an object of path and text, or null for a file that must be gone;
    - ``check``: a Python script that ends with exit code 0 if all is well, e.g. a list of asserts. For it, all plain
      files (but no links, empty folders, or rights) are fetched, the box is reset - every process of the model is dead,
      nothing else it wrote is left - and the files are put back. The check runs in the workspace with the model's final
      message as its stdin. It imports nothing from the workspace; what it *executes* of the model's, it must
      not believe. Over 1,000 files or 16 MiB count as a failed check.

    Args:
        levels: the levels to draw tasks from.
        split: ``"train"`` or ``"test"``; no problem is in both.
        task_seed: seeds the task source.
        tasks: a JSONL file, which is taken whole: levels, split and task_seed do not apply to it. Or a task source.
        **options: see `SandboxEnv`.

    Raises:
        ConfigurationError: a wrong option, or a line of the file that is no task.
    """

    system_prompt = (
        "Do what is asked with the files in the working folder, using bash. Change nothing else. Say when you are done."
    )

    def __init__(
        self,
        *,
        levels: Sequence[int] = LEVELS,
        split: Split = "train",
        task_seed: int = 0,
        tasks: GivenTasks = None,
        **options: Any,
    ) -> None:
        source = task_source(tasks, task_of, draw, LEVELS, levels=levels, split=split, seed=task_seed)
        super().__init__(source, **options)

    @classmethod
    def shared(cls, num_envs: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Closer]]:
        """One pool, and one list of tasks; see `ToolEnv.shared`."""
        return super().shared(num_envs, read_once(options, task_of))

    async def setup(self, task: Task) -> None:
        """Put the files into the workspace."""
        await self.sandbox.put(task.data["files"])

    @tool
    async def bash(self, command: str) -> str:
        """Run a bash command in the working folder."""
        return (await self.sandbox.shell(command)).text

    async def score(self, episode: Episode) -> float:
        """1 if the files are as they should be."""
        data = episode.task.data
        try:
            found = {entry.path: entry.size for entry in await self.sandbox.list() if not entry.is_dir}
            right = await _as_expected(self.sandbox, found, data["files"], data.get("expect"))
            if right and data.get("check") is not None:
                right = await _checked(self.sandbox, found, data["check"], episode.answer or "")
        except ToolError:  # a workspace that cannot be listed, a file that cannot be got or put back: not as asked for
            return 0.0
        return float(right)


async def _as_expected(
    sandbox: Sandbox, found: Mapping[str, int], files: Mapping[str, str], expect: Mapping[str, str | None] | None
) -> bool:
    """Whether the workspace holds what is expected, and otherwise what it held; always, where nothing is expected."""
    if expect is None:
        return True
    for path, text in {**files, **expect}.items():
        if text is None:
            if path in found:
                return False
            continue
        wanted = text.encode()
        # Room for white space at the end; a larger file need not be fetched to be wrong.
        if path not in found or found[path] > len(wanted) + 1_024:
            return False
        if (await sandbox.get(path)).rstrip() != wanted.rstrip():
            return False
    return True


async def _checked(sandbox: Sandbox, found: Mapping[str, int], check: str, answer: str) -> bool:
    """Whether a check passes in a box that holds the files and nothing else of the episode."""
    if len(found) > _MAX_FILES or sum(found.values()) > _MAX_BYTES:
        return False
    kept = {}
    for path in found:
        try:
            kept[path] = await sandbox.get(path)
        except ToolError:
            continue  # a link or another special file
    await sandbox.reset()
    await sandbox.put(kept)
    return (await sandbox.run(_CHECK.format(check=check), stdin=answer.encode(errors="replace"))).ok


def task_of(row: Row) -> Task:
    """A task from a line of a file.

    Raises:
        RowError: a field is missing or wrong.
    """
    prompt = text_of(row, "prompt")
    files = _files(row, "files", gone=False)
    if not row.get("expect") and "check" not in row:
        raise RowError(f"expected a field 'expect' that is not empty, or 'check'; actual fields {sorted(row)}")
    data: dict[str, Any] = {"files": files}
    if "expect" in row:
        data["expect"] = _files(row, "expect", gone=True)
    if "check" in row:
        data["check"] = text_of(row, "check")
        try:
            ast.parse(data["check"])
        except (SyntaxError, ValueError) as error:
            raise RowError(f"field 'check' is no Python: {error}") from error
    return Task(content_id("shell", prompt, data), prompt, data)


def _files(row: Row, name: str, *, gone: bool) -> dict[str, Any]:
    entries = row.get(name, {})
    if not isinstance(entries, dict):
        raise RowError(f"expected field {name!r} as an object of path and text, actual {entries!r:.100}")
    for path, text in entries.items():
        if not isinstance(text, str) and not (gone and text is None):
            raise RowError(f"expected text as content of {path!r} in field {name!r}, actual {text!r:.100}")
        if "\0" in path or posixpath.normpath(path) != path or path.split("/")[0] in ("", ".", ".."):
            raise RowError(
                f"expected a plain path within the workspace in field {name!r}, like 'a/b.txt', actual {path!r}"
            )
        if folder := next((folder for folder in _above(path) if entries.get(folder) is not None), None):
            raise RowError(f"in field {name!r}, {folder!r} is a file and a folder")
    return dict(entries)


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def solve(task: Task, messages: Sequence[Message]) -> AssistantMessage:
    """The reference solution's next message: one command, then a word. Drawn tasks only.

    Args:
        task: a task of this environment.
        messages: the conversation so far.
    """
    if isinstance(messages[-1], ToolMessage):
        return AssistantMessage("Done.")
    return AssistantMessage("", (ToolCall("bash", {"command": task.data["command"]}),))


def make_vec(**options: Any) -> ToolVectorEnv:
    """What `gymnasium.make_vec` calls."""
    return ToolVectorEnv.of(ShellEnv, **options)
