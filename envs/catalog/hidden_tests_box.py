"""Hidden tests, the part that runs in the box: it calls a candidate's function and sends back what came out.

Its source is sent into the box as text, so it needs nothing but the standard library. Nothing that it sends back is
trusted: in a box, code can do as it likes. Expected results are therefore never here, and need not be.

Every call has a process of its own, forked from one that never runs the candidate's code: no state is kept between
calls, arguments are fresh, and a call that hangs or kills its process is lost alone.

Values travel as JSON. None, booleans, text, lists, finite floats and small integers stand for themselves, as do
dictionaries with plain text keys. Everything else is an object with one key that says what it is: ``$tuple``,
``$set``, ``$frozenset`` (lists), ``$dict`` (pairs), ``$bytes`` (hexadecimal), ``$int`` (hexadecimal), ``$float``
(``nan``, ``inf``, ``-inf``), ``$raises`` (the name of an exception's type).
"""

import contextlib
import json
import linecache
import math
import os
import select
import signal
import sys
import time
import types
from typing import Any, NoReturn

RESULTS = "results.json"
BEGUN = b"begun\n"
MAX_DEPTH = 60
MAX_PARTS = 50_000
MAX_BYTES = 256 * 1024  # of one result
_SMALL = 2**53


class CodecError(ValueError):
    """A value that has no JSON form, or JSON that is no value."""


def encode(value: Any) -> Any:
    """A value as JSON. Types are taken exactly: an instance of a subclass has no form.

    Raises:
        CodecError: a value of another type, nested too deeply, or too large.
    """
    return _encode(value, MAX_DEPTH, [MAX_PARTS])


def _encode(value: Any, depth: int, room: list[int]) -> Any:
    room[0] -= 1
    if depth < 0 or room[0] < 0:
        raise CodecError("the value is nested too deeply, or too large")
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is int and -_SMALL <= value <= _SMALL):
        return value
    if kind is int or kind is bytes:
        return {f"${kind.__name__}": hex(value) if kind is int else value.hex()}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is dict:
        return _encode_pairs([[_encode(k, depth - 1, room), _encode(v, depth - 1, room)] for k, v in value.items()])
    if kind not in (list, tuple, set, frozenset):
        raise CodecError(f"a {kind.__name__} has no JSON form")
    parts = [_encode(part, depth - 1, room) for part in value]
    if kind is list:
        return parts
    return {f"${kind.__name__}": parts if kind is tuple else sorted(parts, key=canonical)}


def _encode_pairs(pairs: list[list[Any]]) -> Any:
    if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    return {"$dict": sorted(pairs, key=lambda pair: canonical(pair[0]))}


def decode(data: Any) -> Any:
    """The value of a JSON form; the inverse of `encode`.

    Raises:
        CodecError: it is none.
    """
    try:
        return _decode(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise CodecError(f"{data!r:.200} stands for no value: {error}") from error


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return [_decode(part) for part in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1 or not next(iter(data)).startswith("$"):
        return {key: _decode(value) for key, value in data.items()}
    [(tag, content)] = data.items()
    if tag == "$dict":
        return {_decode(key): _decode(value) for key, value in content}
    if tag in ("$bytes", "$int", "$float"):
        if not isinstance(content, str):
            raise CodecError(f"expected {tag} with text")
        return bytes.fromhex(content) if tag == "$bytes" else int(content, 16) if tag == "$int" else float(content)
    collection = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}.get(tag)
    if collection is None or not isinstance(content, list):
        raise CodecError(f"unknown or wrong {tag}")
    return collection(_decode(part) for part in content)


def canonical(data: Any) -> str:
    """JSON data as text, the same for the same data."""
    return json.dumps(data, sort_keys=True)


def run_calls(job: dict[str, Any]) -> None:
    """Make the calls of a job, and leave the results in a file: for each call a text, or null where it gave none.

    It tells on stdout when it has begun.

    Args:
        job: ``source``, ``function``, ``calls`` (pairs of encoded arguments), ``call_timeout``, ``timeout`` (s).
    """
    ends = time.monotonic() + job["timeout"]
    with open(RESULTS, "w"):
        os.write(1, BEGUN)  # before this, what goes wrong is not the candidate's fault
    results: list[str | None] = []
    for args, kwargs in job["calls"]:
        left = min(job["call_timeout"], ends - time.monotonic())
        results.append(_call_apart(job["source"], job["function"], args, kwargs, left) if left > 0 else None)
    with open(RESULTS, "w") as file:
        json.dump(results, file)


def _call_apart(source: str, function: str, args: Any, kwargs: Any, seconds: float) -> str | None:
    """One call in a process of its own: the line that it sends, or None if it sends none in time."""
    out, into = os.pipe()
    try:
        pid = os.fork()
    except OSError:  # processes of earlier calls have used them all up
        os.close(out)
        os.close(into)
        return None
    if pid == 0:
        try:
            os.close(out)
            _be_candidate(source, function, args, kwargs, into)
        finally:
            os._exit(1)
    os.close(into)
    try:
        return _first_line(out, time.monotonic() + seconds)
    finally:
        os.close(out)
        for end in (os.kill, os.killpg):
            with contextlib.suppress(OSError):
                end(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _first_line(source: int, ends: float) -> str | None:
    data = b""
    while b"\n" not in data:
        left = ends - time.monotonic()
        if left <= 0 or len(data) > MAX_BYTES or not select.select([source], [], [], left)[0]:
            return None
        piece = os.read(source, 65_536)
        if not piece:
            return None
        data += piece
    return data.partition(b"\n")[0].decode("ascii", "replace")


def _be_candidate(source: str, function: str, args: Any, kwargs: Any, into: int) -> NoReturn:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    linecache.cache["solution.py"] = (len(source), None, source.splitlines(keepends=True), "solution.py")
    # What is raised here is not raised by the call: it is no answer, and ends this process.
    exec(compile(source, "solution.py", "exec"), module.__dict__)
    called = getattr(module, function)
    try:
        value = called(*map(decode, args), **{name: decode(value) for name, value in kwargs.items()})
        answer = {"value": encode(value)}
    except BaseException as raised:  # noqa: BLE001 - it is the candidate's, and may be what is expected
        answer = {"value": {"$raises": type(raised).__name__}}
    line = json.dumps(answer).encode() + b"\n"
    while line:
        line = line[os.write(into, line) :]
    os._exit(0)
