"""Functions to write or to mend: procedural tasks in four levels, with hidden tests.

What is expected is worked out here, by running the family's own source; that never gets near a model's code. The
hidden tests follow from the task's id, leave out what the prompt shows, and are chosen so that doing nothing gains
little: no result is that of more than a few tests, and a function to mend fails most of them.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from string import Template
from typing import Any

import numpy as np

from toolgym.envs.catalog.code_families import SIMPLER, Family, Params
from toolgym.envs.catalog.code_families_hard import HARDER
from toolgym.envs.catalog.hidden_tests import same_value
from toolgym.envs.catalog.hidden_tests_box import canonical, decode, encode
from toolgym.envs.tasks import Task

LEVELS = (1, 2, 3, 4)
FAMILIES = (*SIMPLER, *HARDER)
TESTS = 10
_SAME_RESULT = 3  # tests at most that expect one and the same
_PASSED_UNMENDED = 3  # tests at most that a function to mend passes as it is
_TRIES = 200


def draw(rng: np.random.Generator, levels: Sequence[int]) -> Task:
    """One task of a level drawn from ``levels``: a function to write, or one to mend.

    Its id names the function with all that was drawn into it, and the fault if it has one.
    """
    level = int(rng.choice(np.asarray(levels)))
    families = [family for family in FAMILIES if family.level == level]
    family = families[int(rng.integers(len(families)))]
    params = family.params(rng)
    bug = family.bugs[int(rng.integers(len(family.bugs)))] if rng.random() < 0.5 else None
    return _task(family, params, bug) or draw(rng, levels)


def _task(family: Family, params: Params, bug: tuple[str, str] | None) -> Task | None:
    """The task, or None if its tests would tell too little."""
    source = fill(family.source, params)
    broken = None if bug is None else fill(family.source.replace(*bug), params)
    named = ",".join(f"{name}={params[name]}" for name in sorted(params))
    kind = "write" if bug is None else f"mend:{family.bugs.index(bug)}"
    task_id = f"code_tests:{kind}:{family.function}:{named}"
    seed = int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:8])
    calls = _choose(np.random.default_rng(seed), family, params, source, broken)
    if calls is None:
        return None
    shown, hidden = calls[:-TESTS], calls[-TESTS:]
    words = fill(family.words, params)
    prompt = _to_write(family, params, words, shown) if broken is None else _to_mend(family, words, broken, shown[0])
    data = {
        "level": family.level,
        "kind": "write" if bug is None else "mend",
        "function": family.function,
        "tests": [{"args": args, "expected": expected} for args, expected in hidden],
        "solution": source,
        "broken": broken,
    }
    return Task(task_id, prompt, data)


def fill(template: str, params: Params) -> str:
    """A template of a family with its places filled."""
    return Template(template.strip("\n")).substitute(params)


def _choose(
    rng: np.random.Generator, family: Family, params: Params, source: str, broken: str | None
) -> list[tuple[Any, Any]] | None:
    """Arguments and results, encoded: those to show, then the hidden ones; None if none can be found."""
    right = runner(source, family.function)
    wrong = None if broken is None else runner(broken, family.function)
    shown: list[tuple[Any, Any]] = []
    hidden: list[tuple[Any, Any]] = []
    seen, results, unmended = set(), Counter[str](), 0
    for _ in range(_TRIES):
        args = encode(family.inputs(rng, params))
        if (key := canonical(args)) in seen:
            continue
        seen.add(key)
        expected = right(args)
        passes = wrong is not None and same_value(expected, wrong(args))
        result = canonical(expected)
        if len(shown) < (2 if wrong is None else 1):
            # Short enough to read, and telling: the fault shows, or the two results differ.
            if not passes and len(key) < 160 and result not in results:
                shown.append((args, expected))
                results[result] = 0 if wrong is not None else 1
            continue
        if results[result] >= _SAME_RESULT or (passes and unmended >= _PASSED_UNMENDED):
            continue
        hidden.append((args, expected))
        results[result] += 1
        unmended += passes
        if len(hidden) == TESTS:
            return shown + hidden
    return None


def runner(source: str, function: str) -> Callable[[Any], Any]:
    """Our own source as a function from encoded arguments to the encoded result. Never for a model's code."""
    namespace: dict[str, Any] = {}
    exec(compile(source, "family", "exec"), namespace)

    def run(args: Any) -> Any:
        try:
            return encode(namespace[function](*decode(args)))
        except Exception as error:  # noqa: BLE001 - what it raises is its result: a broken function may raise anything
            return {"$raises": type(error).__name__}

    return run


def _to_write(family: Family, params: Params, words: str, shown: Sequence[tuple[Any, Any]]) -> str:
    examples = "\n".join(f">>> {_call(family, args)}\n{_result(expected)}" for args, expected in shown)
    return f"Write the Python function `{fill(family.signature, params)}`.\n\n{words}\n\n{examples}"


def _to_mend(family: Family, words: str, broken: str, shown: tuple[Any, Any]) -> str:
    args, expected = shown
    actual = runner(broken, family.function)(args)
    return (
        f"This Python function has a fault; mend it.\n\n```python\n{broken}\n```\n\nWhat it should do: {words}\n\n"
        f">>> {_call(family, args)}\n{_result(actual)}\n\nThe right result is: {_result(expected)}"
    )


def _call(family: Family, args: Any) -> str:
    return f"{family.function}({', '.join(map(repr, decode(args)))})"


def _result(outcome: Any) -> str:
    """A result as a person reads it."""
    if isinstance(outcome, dict) and list(outcome) == ["$raises"]:
        return f"raises {outcome['$raises']}"
    return repr(decode(outcome))
