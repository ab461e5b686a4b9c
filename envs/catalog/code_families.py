"""Families of small functions to write or to mend: the simpler ones, of levels 1 and 2, and what a family is.

A family is a template: a correct function with a few places ($divisor, $least, ...) that a draw fills in, the same in
words, and known ways to break it. Its inputs are drawn so that they touch the corners of what the words say.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Params: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """A family of functions.

    Attributes:
        level: 1 to 4.
        source: a correct function, with $places.
        words: what it does, with the same places.
        bugs: replacements in ``source``, each of which breaks it; the first text occurs in it exactly once.
        params: draws what the places hold.
        inputs: draws the arguments of one call.
    """

    level: int
    source: str
    words: str
    bugs: tuple[tuple[str, str], ...]
    params: Callable[[np.random.Generator], Params]
    inputs: Callable[[np.random.Generator, Params], list[Any]]

    @property
    def function(self) -> str:
        """The function's name."""
        return self.source.split("def ", 1)[1].split("(", 1)[0]

    @property
    def signature(self) -> str:
        """The function's first line, without ``def`` and colon."""
        return self.source.split("def ", 1)[1].split(":\n", 1)[0]


def one(rng: np.random.Generator, *options: Any) -> Any:
    """One of some things."""
    return options[int(rng.integers(len(options)))]


def number(rng: np.random.Generator, low: int, high: int) -> int:
    """A whole number, low <= n <= high."""
    return int(rng.integers(low, high + 1))


def numbers(rng: np.random.Generator, low: int, high: int, count: int) -> list[int]:
    """Whole numbers, low <= n <= high."""
    return [int(n) for n in rng.integers(low, high + 1, size=count)]


def pick(rng: np.random.Generator, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """One row of a table, as what the places of these names hold."""
    return dict(zip(names, one(rng, *rows), strict=True))


def text(rng: np.random.Generator, alphabet: str, count: int) -> str:
    """Characters of an alphabet."""
    return "".join(alphabet[k] for k in rng.integers(len(alphabet), size=count))


def words(rng: np.random.Generator, count: int, longest: int = 7) -> list[str]:
    """Made-up words."""
    return [text(rng, "abcdeilnorst", number(rng, 1, longest)) for _ in range(count)]


_SUM_WHERE = Family(
    1,
    """
def sum_where(numbers: list[int]) -> int:
    total = 0
    for n in numbers:
        if n % $divisor == 0 and n > $least:
            total += n
    return total
""",
    "Return the sum of those numbers that are divisible by $divisor and greater than $least; 0 if there are none.",
    (("n > $least", "n >= $least"), ("n % $divisor == 0 and", "n % $divisor == 0 or"), ("total += n", "total = n")),
    lambda rng: pick(rng, ("divisor", "least"), [(d, d * n) for d in range(2, 10) for n in range(-4, 7)]),
    lambda rng, p: [
        [
            one(rng, p["least"], p["least"] + 1, p["divisor"] * number(rng, -9, 12), number(rng, -40, 80))
            for _ in range(number(rng, 0, 10))
        ]
    ],
)

_COUNT_LETTERS = Family(
    1,
    """
def count_letters(text: str) -> int:
    count = 0
    for letter in text.lower():
        if letter in "$letters":
            count += 1
    return count
""",
    "Return how many letters of the text are among $letters. Upper and lower case count alike.",
    (("text.lower()", "text"), ("text.lower()", "set(text.lower())"), ("count += 1", "count = 1")),
    lambda rng: {"letters": "".join(sorted(set(text(rng, "abcdefghiklmnopqrstu", number(rng, 3, 6)))))},
    lambda rng, p: [text(rng, p["letters"] * 3 + p["letters"].upper() * 2 + "vwxyzVWXYZ .!", number(rng, 0, 24))],
)

_CLAMP_ALL = Family(
    1,
    """
def clamp_all(numbers: list[int]) -> list[int]:
    result = []
    for n in numbers:
        n = max($low, min($high, n))
        result.append(n * $factor)
    return result
""",
    "Return the numbers in their order, each of them first raised to $low if it is below and lowered to $high if it "
    "is above, and then multiplied by $factor.",
    (
        ("max($low, min($high, n))", "min($low, max($high, n))"),
        ("max($low, min($high, n))", "min($high, n)"),
        ("n * $factor", "max($low, min($high, n * $factor))"),
    ),
    lambda rng: {"low": number(rng, -20, 0), "high": number(rng, 5, 30), "factor": number(rng, 2, 9)},
    lambda rng, p: [numbers(rng, p["low"] - 15, p["high"] + 15, number(rng, 0, 8))],
)

_MASK_DIGITS = Family(
    1,
    """
def mask_digits(text: str) -> str:
    hidden = sum(c in "0123456789" for c in text) - $keep
    result = ""
    for c in text:
        if c in "0123456789" and hidden > 0:
            hidden -= 1
            c = "$symbol"
        result += c
    return result
""",
    "Replace every digit (0 to 9) of the text by $symbol, but for the last $keep digits. All else stays.",
    (
        ('sum(c in "0123456789" for c in text)', "len(text)"),
        ("hidden > 0", "hidden >= 0"),
        ('            c = "$symbol"\n', '            c = ""\n'),
    ),
    lambda rng: {"keep": number(rng, 1, 5), "symbol": one(rng, *"*#x?_+~")},
    lambda rng, p: [text(rng, "0123456789" * 2 + "ab -/", number(rng, 3, 20))],
)

_EVERY_NTH = Family(
    1,
    """
def every_nth(items: list[int]) -> list[int]:
    result = items[$start::$step]
    result.reverse()
    return result
""",
    "Return every item whose index is $start or $start plus a multiple of $step (the first index is 0), the one with "
    "the largest index first.",
    (("[$start::$step]", "[$start:$step]"), ("    result.reverse()\n", ""), ("[$start::$step]", "[$start + 1::$step]")),
    lambda rng: {"start": number(rng, 0, 7), "step": number(rng, 2, 9)},
    lambda rng, p: [numbers(rng, -99, 99, number(rng, 0, 30))],
)

_RUN_LENGTHS = Family(
    2,
    """
def run_lengths(text: str) -> list[tuple[str, int]]:
    runs = []
    start = 0
    for i in range(1, len(text) + 1):
        if i == len(text) or text[i] != text[start]:
            if i - start >= $least:
                runs.append((text[start], i - start))
            start = i
    return runs[:$most]
""",
    "Cut the text into its runs of equal characters, each as long as it can be. Of those runs that have at least "
    "$least characters, return the first $most (all, if there are fewer) in their order, as tuples (character, "
    "length).",
    (
        ("range(1, len(text) + 1)", "range(1, len(text))"),
        ("i - start >= $least", "i - start > $least"),
        ("(text[start], i - start)", "(text[start], i - start + 1)"),
    ),
    lambda rng: {"least": number(rng, 1, 4), "most": number(rng, 2, 9), "alphabet": one(rng, "ab", "abc", "01", "xyz")},
    lambda rng, p: ["".join(c * number(rng, 1, p["least"] + 2) for c in text(rng, p["alphabet"], number(rng, 0, 9)))],
)

_KEYS = (
    ("first letter", "word[0]", "str"),
    ("last letter", "word[-1]", "str"),
    ("length", "len(word)", "int"),
    ("second letter", "word[1]", "str"),
    ("first two letters", "word[:2]", "str"),
    ("number of different letters", "len(set(word))", "int"),
)

_GROUP_WORDS = Family(
    2,
    """
def group_words(words: list[str]) -> dict[$type, list[str]]:
    groups = {}
    for word in words:
        if len(word) >= $least:
            groups.setdefault($key, []).append(word)
    for group in groups.values():
        group.sort($order)
    return groups
""",
    "Group the words by their $name, leaving out those with fewer than $least letters. Return a dictionary from each "
    "$name that occurs to the list of its words, sorted by the alphabet$backwards; words that occur twice are listed "
    "twice.",
    (
        ("len(word) >= $least", "len(word) > $least"),
        ("groups.setdefault($key, []).append(word)", "groups[$key] = [word]"),
        ("        group.sort($order)\n", "        group.sort(key=len)\n"),
    ),
    lambda rng: {
        **pick(rng, ("name", "key", "type"), _KEYS),
        **pick(rng, ("order", "backwards"), (("", ""), ("reverse=True", ", from z to a"))),
        "least": number(rng, 2, 5),
    },
    lambda rng, p: [[w[: one(rng, p["least"], 9)] for w in words(rng, number(rng, 0, 12))]],
)

_PARSE_PAIRS = Family(
    2,
    """
import re

def parse_pairs(text: str) -> dict[str, int]:
    found = {}
    for part in text.split("$between"):
        name, sign, value = part.partition("$sign")
        name, value = name.strip(), value.strip()
        if sign and name and re.fullmatch("-?[0-9]+", value)$first:
            found[name] = int(value)
    return found
""",
    "The text holds parts like `name$sign value`, separated by `$between`. Return a dictionary from names to "
    "values. Spaces around a name or a value do not count. A part is passed over if it has no `$sign`, an empty "
    "name, or a value (all after its first `$sign`) that is not a whole number: digits with or without a minus. If "
    "a name occurs more than once, its $which value counts.",
    (
        ("name.strip(), value.strip()", "name, value"),
        ('"-?[0-9]+"', '"[0-9]+"'),
        ("if sign and name and", "if sign and"),
    ),
    lambda rng: {
        "between": one(rng, *";,|&"),
        "sign": one(rng, *":=~>@^"),
        **pick(rng, ("first", "which"), (("", "last"), (" and name not in found", "first"))),
    },
    lambda rng, p: [
        p["between"].join(
            one(rng, "", " ", "  ") * number(rng, 0, 1)
            + text(rng, "abc", number(rng, 0, 2))
            + one(rng, p["sign"], p["sign"], p["sign"], f" {p['sign']} ", "")
            + one(rng, "", "-", "", " ")
            + one(rng, str(number(rng, 0, 99)), str(number(rng, 0, 99)), "", "x7")
            for _ in range(number(rng, 0, 7))
        )
    ],
)

_SHIFT_LETTERS = Family(
    2,
    """
def shift_letters(text: str) -> str:
    result = ""
    for c in text:
        if "a" <= c <= "z":
            c = chr((ord(c) - ord("a") + $lower) % 26 + ord("a"))
        elif "A" <= c <= "Z":
            c = chr((ord(c) - ord("A") - $upper) % 26 + ord("A"))
        result += c
    return result
""",
    "Replace every letter from a to z by the one $lower places later in the alphabet, and every letter from A to Z "
    "by the one $upper places earlier; the alphabet goes round, so a comes after z. All else stays.",
    (
        ("- $upper", "+ $upper"),
        ('(ord(c) - ord("a") + $lower) % 26 + ord("a")', "ord(c) + $lower"),
        ('        elif "A" <= c <= "Z":\n', '        elif "A" < c < "Z":\n'),
    ),
    lambda rng: {"lower": number(rng, 1, 25), "upper": number(rng, 1, 12)},
    lambda rng, p: [text(rng, "abcxyzmnABCXYZAZ ,.1", number(rng, 0, 16))],
)

_KTH_DISTINCT = Family(
    2,
    """
def kth_distinct(numbers: list[int]) -> int | None:
    found = sorted({n for n in numbers if n % $modulus != $rest}, reverse=$largest)
    return found[$k - 1] if len(found) >= $k else None
""",
    "Leave out the numbers n with n % $modulus == $rest. Of the different numbers that are left, return the one at "
    "place $k when they are ordered from the $from; None if there are fewer than $k.",
    (
        ("{n for n in numbers if n % $modulus != $rest}", "[n for n in numbers if n % $modulus != $rest]"),
        ("found[$k - 1]", "found[$k - 2]"),
        ("reverse=$largest", "key=abs, reverse=$largest"),
    ),
    lambda rng: {
        "k": number(rng, 2, 5),
        **pick(rng, ("modulus", "rest"), [(m, r) for m in range(3, 8) for r in range(m)]),
        **pick(rng, ("largest", "from"), ((True, "largest"), (False, "smallest"))),
    },
    lambda rng, p: [numbers(rng, -12, 12, number(rng, 0, 14))],
)

SIMPLER = (
    _SUM_WHERE,
    _COUNT_LETTERS,
    _CLAMP_ALL,
    _MASK_DIGITS,
    _EVERY_NTH,
    _RUN_LENGTHS,
    _GROUP_WORDS,
    _PARSE_PAIRS,
    _SHIFT_LETTERS,
    _KTH_DISTINCT,
)
