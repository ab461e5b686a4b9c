r"""Final answers in mathematics: finding the last ``\boxed{...}``, and comparing it with the right answer.

The right answer decides how. A rational number is compared exactly, a word letter by letter; both by a few lines of
our own. Anything else (surds, sets, polynomials, intervals, ...) is left to `math_verify` in a short-lived process
with bounded CPU time and memory: its own time-outs work in the main thread alone, and a model's LaTeX can ask it to
work for ever. This file is that process' program too, so its top imports nothing but the standard library.

An answer has to be worked out: ``\gcd(12, 18)`` equals 6, but it is the question again and no answer to it.
"""

import asyncio
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from fractions import Fraction
from typing import Any

MAX_CHARS = 2_000  # a longer answer is right only if it is the right one word for word
_MUCH_LONGER = 100, 4  # no form of an expression needs over 100 characters and four times those of the right one
CHECK_SECONDS = 2  # of CPU time, counted from when math_verify has been imported
_CHECK_BYTES = 1 << 30
_READY, _SAME = b"ready\n", b"same\n"
_PROGRAM = os.path.abspath(__file__)

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|bigl?|bigr?|quad|qquad)(?![A-Za-z])|\\[,;:!\s]|\\?\$|\\[()\[\]]|~")
_WRAPPER = r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*"
_UNIT = re.compile(rf"\s*(?:{_WRAPPER}\{{[^{{}}\d]*\}}(?:\^\{{?\d\}}?)?|(?<=[\d}}%)\s])[A-Za-z]{{2}}[A-Za-z ]*)\.?$")
_WRAPPED = re.compile(rf"{_WRAPPER}\{{([^{{}}]*)\}}")
_CHANGES_THE_NUMBER = re.compile(r"hundred|thousand|million|billion|trillion|dozen|squared|cubed|percent")
_NAME = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z0-9, ]*\))?\s*=\s*")
_DEGREES = re.compile(r"\^\{?\\circ\}?|\\degree|\u00b0")
_PERCENT = re.compile(r"\s*\\?%$")
_INTEGER = r"(?:\d{1,3}(?:(?:,|\{,\})\d{3})+|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)"
_FORMS = tuple(
    re.compile(form)
    for form in (
        rf"(?P<decimal>{_DECIMAL})",
        rf"(?P<above>{_INTEGER})\s*/\s*(?P<below>{_INTEGER})",
        r"(?P<whole>\d+)?\s*\\[dt]?frac\s*\{\s*(?P<above>[-+]?\d+)\s*\}\s*\{\s*(?P<below>[-+]?\d+)\s*\}",
        r"(?P<whole>\d+)?\s*\\[dt]?frac\s*(?P<above>\d)\s*(?P<below>\d)",
        rf"(?:(?P<decimal>{_DECIMAL})\s*(?:\\times|\\cdot|\*|\u00d7)\s*)?10\s*\^\s*\{{?\s*(?P<power>[-+]?\d{{1,3}})\s*\}}?",
        rf"(?P<decimal>{_DECIMAL})[eE](?P<power>[-+]?\d{{1,3}})",
    )
)
_WORKINGS = re.compile(
    r"\\(?:sum|prod|i*int|oint|lim|[dt]?binom|choose|det|gcd|lcm|max|min|[lr]floor|[lr]ceil|operatorname|[bp]?mod|arg|Re|Im)"
    r"(?![A-Za-z])|!"
)
_DIGITS = re.compile(r"\d+")
_gates: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = weakref.WeakKeyDictionary()


def boxed(text: str) -> str | None:
    r"""What stands in the last complete ``\boxed{...}`` of a text; None if there is none. Takes time linear in it."""
    opened: list[int | None] = []
    start, end = -1, -1
    for found in _BRACES.finditer(text):
        mark = found.group()
        if mark == "{":
            opened.append(None)
        elif mark == "}":
            begin = opened.pop() if opened else None
            if begin is not None and begin > start:
                start, end = begin, found.start()
        elif mark.endswith("{") and mark != "\\{":
            opened.append(found.end())
    return text[start:end].strip() if start >= 0 else None


def readings(text: str) -> frozenset[Fraction]:
    r"""The values that a text can mean which is one number: usually one; none if it is no plain number.

    Read are integers, decimals, fractions (``3/7``, ``\frac{3}{7}``, ``2\frac{1}{2}``) and powers of ten, with a name
    before them (``x = 5``) or a unit behind. ``50\%`` can mean 1/2 and 50.
    """
    if len(text) > MAX_CHARS:
        return frozenset()
    text = _LAYOUT.sub(" ", text.replace("\u2212", "-")).strip()
    text = _DEGREES.sub("", text[named.end() :] if (named := _NAME.match(text)) else text)
    text = " ".join(text.split())  # a search in long runs of spaces would take its time
    if (unit := _UNIT.search(text)) is not None and not _CHANGES_THE_NUMBER.search(unit.group()):
        text = text[: unit.start()]
    text = _WRAPPED.sub(r"\1", text).strip()
    text = text.removesuffix(".").rstrip()
    percent = _PERCENT.search(text)
    text = text[: percent.start()] if percent else text
    while text[:1] + text[-1:] in ("()", "{}"):
        text = text[1:-1].strip()
    sign = -1 if text.startswith("-") else 1
    value = _unsigned(text[1:].lstrip() if text[:1] in ("-", "+") else text)
    if value is None:
        return frozenset()
    return frozenset({sign * value, sign * value / 100} if percent else {sign * value})


def _unsigned(text: str) -> Fraction | None:
    found = next((match for form in _FORMS if (match := form.fullmatch(text))), None)
    if found is None:
        return None
    parts = {name: re.sub(r"[,{}]", "", part) for name, part in found.groupdict().items() if part is not None}
    if "below" in parts:
        above, below = int(parts["above"]), int(parts["below"])
        return None if below == 0 else int(parts.get("whole", "0")) + Fraction(above, below)
    return Fraction(parts.get("decimal", "1")) * Fraction(10) ** int(parts.get("power", "0"))


async def same(answer: str, gold: str) -> bool:
    """Whether an answer is the right one. Never raises for what stands in the answer.

    Args:
        answer: what the model has boxed.
        gold: the right answer, as LaTeX or plain text.

    Raises:
        EnvironmentFailure: (kind ``"math_checker"``) the process that compares could not do its work.
    """
    if _squeezed(answer) == _squeezed(gold):
        return True
    if values := readings(gold):
        return bool(values & readings(answer))
    words = _as_words(gold)
    if words is not None or max(len(answer), len(gold)) > MAX_CHARS:
        return words is not None and words == _as_words(answer)
    return not _restates(answer, gold) and await _verified(answer, gold)


def _squeezed(text: str) -> str:
    text = re.sub(r"\\[dt]frac", r"\\frac", _LAYOUT.sub(" ", text))
    return re.sub(r"\s+(?![0-9A-Za-z])|(?<![0-9A-Za-z])\s+", "", text)  # 1 2 is not 12


def _as_words(text: str) -> str | None:
    """A text of nothing but letters without its dress; to math_verify a word is a product: *yes* would equal *sey*."""
    bare = "".join(_WRAPPED.sub(r"\1", _LAYOUT.sub("", text)).split()).strip("().").casefold()
    return bare if bare.isalpha() else None


def _restates(answer: str, gold: str) -> bool:
    """Whether an answer has workings that the right one has not, or is far longer: the question instead of it."""
    room, factor = _MUCH_LONGER
    if len(answer) > room + factor * len(gold) or set(_WORKINGS.findall(answer)) - set(_WORKINGS.findall(gold)):
        return True
    return len(_DIGITS.findall(answer)) > 2 * len(_DIGITS.findall(gold)) + 1


async def _verified(answer: str, gold: str) -> bool:
    loop = asyncio.get_running_loop()
    # Each of these processes takes 60 MB: of a thousand environments that end together, few may check at once.
    gate = _gates.setdefault(loop, asyncio.Semaphore(2 * (os.cpu_count() or 1)))
    process = _Process(json.dumps([gold, answer]))
    async with gate:
        try:
            told = await loop.run_in_executor(None, process.run)
        except OSError as error:
            raise _failure(f"the process that compares answers cannot be started: {error}") from error
        finally:
            process.stop()
    if told.startswith(_READY):
        return told == _READY + _SAME  # else it said no, or the answer was too much for it
    raise _failure(f"the process that compares answers ended at its start: {told.decode(errors='replace')[-500:]}")


class _Process:
    """One comparing process. It is run from a thread: asyncio's own, cancelled while they start, outlive their loop."""

    def __init__(self, question: str) -> None:
        self._question, self._stopped = question, False
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def run(self) -> bytes:
        """What it writes; nothing if it was stopped before. Blocks."""
        with self._lock:
            if self._stopped:
                return b""
            # -P: this file's folder must not be where the process looks for modules.
            self._process = subprocess.Popen(
                [sys.executable, "-P", _PROGRAM, self._question],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        with self._process as process:
            assert process.stdout is not None
            return process.stdout.read()

    def stop(self) -> None:
        """End it, if it runs. May be called at any time."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()


def _failure(message: str) -> Exception:
    from toolgym.envs.errors import EnvironmentFailure  # noqa: PLC0415 - the comparing process must not load all that

    return EnvironmentFailure(message, kind="math_checker")


def _compare() -> None:
    """The comparing process: takes a pair as its argument, and writes whether they are equal."""
    import resource  # noqa: PLC0415 - the other side does not need it

    math_verify: Any = importlib.import_module("math_verify")
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + CHECK_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (_CHECK_BYTES, _CHECK_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.write(1, _READY)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(Exception):  # whatever the answer makes it raise: it is not seen to be the right one
        gold, answer = (
            math_verify.parse(
                f"${text}$", extraction_config=[math_verify.LatexExtractionConfig()], parsing_timeout=None
            )
            for text in json.loads(sys.argv[1])
        )
        if math_verify.verify(gold, answer, timeout_seconds=None):
            os.write(1, _SAME)
    os._exit(0)  # without a tear-down, which a swollen expression can draw out


if __name__ == "__main__":
    _compare()
