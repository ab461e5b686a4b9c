"""Where the tasks of an environment come from: drawn by level, or read from a JSONL file of the user's."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.tasks import ProceduralTasks, Split, Task, TaskList, TaskSource

Row: TypeAlias = Mapping[str, Any]
Parse: TypeAlias = Callable[[Row], Task]
GivenTasks: TypeAlias = str | Path | TaskSource | None


class RowError(ValueError):
    """A line of a file is no task; the message names the value and the remedy."""


def task_source(
    tasks: GivenTasks,
    parse: Parse,
    draw: Callable[[np.random.Generator, Sequence[int]], Task],
    known: Sequence[int],
    *,
    levels: Sequence[int],
    split: Split,
    seed: int,
) -> TaskSource:
    """The source that an environment's options ask for: a file or a source if one is given, else drawn tasks.

    Args:
        tasks: a JSONL file, a source, or None for drawn tasks.
        parse: makes a task of a line.
        draw: draws a task.
        known: the levels that there are.
        levels: those to draw from.
        split: see `ProceduralTasks`.
        seed: see `ProceduralTasks`.

    Raises:
        ConfigurationError: unknown levels, a wrong split or seed, a file that is none.
    """
    if tasks is not None:
        return tasks if isinstance(tasks, TaskSource) else read_tasks(tasks, parse)
    chosen = tuple(levels) if isinstance(levels, Sequence) else ()
    if not chosen or not set(chosen) <= set(known):
        raise ConfigurationError(f"expected levels among {tuple(known)}, actual {levels!r}")
    return ProceduralTasks(lambda rng: draw(rng, chosen), split=split, seed=seed)


def read_once(options: Mapping[str, Any], parse: Parse) -> dict[str, Any]:
    """The options of a vector's slots with the file of tasks read, so that all of them hold the same list."""
    tasks = options.get("tasks")
    return {**options, "tasks": read_tasks(tasks, parse)} if isinstance(tasks, str | Path) else dict(options)


def read_tasks(path: str | Path, parse: Parse) -> TaskList:
    """All tasks of a JSONL file, in its order. Empty lines are passed over.

    Raises:
        ConfigurationError: the file cannot be read, is empty, or a line is no task; it names the line and the remedy.
    """
    if not isinstance(path, str | Path):
        raise ConfigurationError(f"expected tasks as the path of a JSONL file, actual {path!r:.200}")
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigurationError(f"tasks file {str(path)!r} cannot be read: {error}") from error
    tasks = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(parse(_row(line)))
            except RowError as error:
                raise ConfigurationError(f"{path}, line {number}: {error}") from error
    if not tasks:
        raise ConfigurationError(f"tasks file {str(path)!r} has no lines: expected one JSON object a line, one a task")
    return TaskList(tasks)


def _row(line: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RowError(f"this is no JSON ({error}): expected one object a line, e.g. from json.dumps") from error
    if not isinstance(row, dict):
        raise RowError(f"expected a JSON object, actual a {type(row).__name__}")
    return row


def text_of(row: Row, *names: str) -> str:
    """The text in the first of some fields that is there.

    Raises:
        RowError: none is there, or it is no text.
    """
    found = next((name for name in names if name in row), None)
    if found is None:
        raise RowError(f"expected a field {' or '.join(map(repr, names))}, actual fields {sorted(row)}")
    value = row[found]
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"expected text in field {found!r}, actual {value!r:.100}")
    return value


def content_id(kind: str, *parts: Any) -> str:
    """The id of a problem that is not short enough to be its own: a digest of all that defines it."""
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{kind}:{digest[:24]}"
