"""Hidden tests, our side: what is expected never leaves this process, and what comes out of a box is not trusted.

A candidate has its whole process in its hands, and may print, write and send what it likes. It gains nothing by that:
results are data, parsed with bounds and never executed, and only the right value for a call counts. To send the right
values it has to know them, and they were never in the box.
"""

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolgym.envs.catalog import hidden_tests_box as box
from toolgym.envs.catalog.hidden_tests_box import CodecError, canonical, decode, encode
from toolgym.envs.errors import EnvironmentFailure
from toolgym.envs.sandbox.sandbox import Sandbox

MAX_SOURCE = 200_000  # characters
_MAX_RESULTS = 8 * 1024 * 1024  # bytes
_LONGEST = 45.0  # seconds for all calls together
_START = 5.0  # seconds beyond that
_RELATIVE = _ABSOLUTE = 1e-9


@dataclass(frozen=True, slots=True)
class HiddenTest:
    """One call and what it should give, all in the JSON forms of `hidden_tests_box`.

    Attributes:
        args: positional arguments.
        kwargs: arguments by name.
        expected: the value, or ``{"$raises": "ValueError"}``.
    """

    args: Sequence[Any]
    expected: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, args: Sequence[Any], expected: Any, kwargs: Mapping[str, Any] | None = None) -> "HiddenTest":
        """A test from JSON that a person may have written: checked, and brought into its one canonical form.

        Raises:
            CodecError: something in it stands for no value.
        """
        if not _raises(expected):
            expected = encode(decode(expected))
        named = {name: encode(decode(value)) for name, value in (kwargs or {}).items()}
        return cls([encode(decode(value)) for value in args], expected, named)


def _raises(expected: Any) -> bool:
    if not isinstance(expected, dict) or list(expected) != ["$raises"]:
        return False
    if not isinstance(expected["$raises"], str):
        raise CodecError(f"expected $raises with the name of an exception's type, actual {expected['$raises']!r:.100}")
    return True


async def run_hidden_tests(
    sandbox: Sandbox, source: str, function: str, tests: Sequence[HiddenTest], *, call_timeout: float
) -> list[bool]:
    """Which of the tests a candidate passes. The box is reset first: nothing of the episode is there any more.

    Args:
        sandbox: where the candidate runs.
        source: the candidate, a Python module.
        function: the function in it that is called.
        tests: the calls.
        call_timeout: seconds of wall time for each call, the candidate's own imports included.

    Raises:
        EnvironmentFailure: the sandbox failed, or (kind ``"hidden_tests"``) the program did that makes the calls.
    """
    if len(source) > MAX_SOURCE:
        return [False] * len(tests)
    total = min(_LONGEST, call_timeout * len(tests))
    job = {
        "source": source,
        "function": function,
        "calls": [[test.args, test.kwargs] for test in tests],
        "call_timeout": call_timeout,
        "timeout": total,
    }
    # The job goes in by stdin, whose bound no submission of an allowed length reaches.
    program = f"{inspect.getsource(box)}\n\nimport sys\nrun_calls(json.load(sys.stdin))\n"
    await sandbox.reset()
    result = await sandbox.run(program, stdin=json.dumps(job), fetch=(box.RESULTS,), timeout=total + _START)
    if not result.stdout.head.startswith(box.BEGUN):
        raise EnvironmentFailure(f"the hidden tests did not begin: {result.text[-500:]}", kind="hidden_tests")
    # How the run ended says nothing: what counts is which values came back.
    return judge(result.files.get(box.RESULTS, b""), tests)


def judge(results: bytes, tests: Sequence[HiddenTest]) -> list[bool]:
    """Which tests were passed, by the results that a box has sent: any bytes at all. Never raises."""
    lines = _json(results) if len(results) <= _MAX_RESULTS else None
    if not isinstance(lines, list) or len(lines) != len(tests):
        return [False] * len(tests)
    return [_passed(line, test.expected) for line, test in zip(lines, tests, strict=True)]


def _passed(line: Any, expected: Any) -> bool:
    answer = _json(line) if isinstance(line, str) else None
    if not isinstance(answer, dict) or list(answer) != ["value"]:
        return False
    try:
        return same_value(expected, answer["value"])
    except (RecursionError, ValueError, TypeError):  # forms that stand for no value
        return False


def _json(text: bytes | str) -> Any:
    """JSON of a stranger; None if it is none, or more than can be read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError, MemoryError):
        return None


def same_value(expected: Any, actual: Any) -> bool:
    """Whether two JSON forms stand for the same value of the same type.

    Floats may differ by 1e-9, relative or absolute, except within sets and as keys; nan is the same as nan. True is
    not 1, 1 is not 1.0, and a tuple is no list. The order of sets and dictionaries does not matter.
    """
    if type(expected) is not type(actual):
        return False
    if isinstance(expected, float):
        return math.isclose(expected, actual, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    if isinstance(expected, list):
        return len(expected) == len(actual) and all(map(same_value, expected, actual))
    return _same_objects(expected, actual) if isinstance(expected, dict) else bool(expected == actual)


def _same_objects(expected: dict[str, Any], actual: dict[str, Any]) -> bool:
    if set(expected) != set(actual):
        return False
    tag = next(iter(expected), None) if len(expected) == 1 else None
    if tag in ("$set", "$frozenset"):
        return sorted(map(canonical, expected[tag])) == sorted(map(canonical, actual[tag]))
    if tag == "$dict":
        return _same_pairs(expected[tag], actual[tag])
    return all(same_value(value, actual[key]) for key, value in expected.items())


def _same_pairs(expected: Any, actual: Any) -> bool:
    ours, theirs = ({canonical(key): value for key, value in pairs} for pairs in (expected, actual))
    return set(ours) == set(theirs) and all(same_value(value, theirs[key]) for key, value in ours.items())
