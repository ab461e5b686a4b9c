"""Mathematics that asks for a program: procedural tasks in five levels, each with its exact answer.

The answer is worked out here in one way (a closed form, inclusion and exclusion, dynamic programming) and by the
reference program in another (mostly brute force), so that each checks the other when the tests play the tasks.
"""

import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from toolgym.envs.catalog import math_kinds as kinds
from toolgym.envs.catalog.math_kinds import Kind, Problem, integer, integers, latex, some
from toolgym.envs.tasks import Task

LEVELS = (1, 2, 3, 4, 5)


def draw(rng: np.random.Generator, levels: Sequence[int]) -> Task:
    """One task of a level drawn from ``levels``. Its id is the question, which names everything that is given."""
    level = int(rng.choice(np.asarray(levels)))
    kind = KINDS[level][int(rng.integers(len(KINDS[level])))]
    problem = kind(rng)
    data = {"level": level, "kind": kind.__name__, "answer": problem.answer, "program": problem.program}
    return Task(f"code_math:{problem.question}", problem.question, data)


def _surd(factor: Fraction, radicand: int) -> str:
    """``factor * sqrt(radicand)`` as LaTeX with the smallest radicand."""
    outside, inside = 1, radicand
    for p in range(2, math.isqrt(radicand) + 1):
        while inside % (p * p) == 0:
            outside, inside = outside * p, inside // (p * p)
    factor *= outside
    if inside == 1:
        return latex(factor)
    above = ("" if factor.numerator == 1 else str(factor.numerator)) + f"\\sqrt{{{inside}}}"
    return above if factor.denominator == 1 else f"\\frac{{{above}}}{{{factor.denominator}}}"


# Prints factor * sqrt(n), as the programs of three kinds need it.
_PRINT_SURD = """
out = 1
d = 2
while d * d <= n:
    while n % (d * d) == 0:
        n //= d * d
        out *= d
    d += 1
f *= out
top = str(f.numerator) if n == 1 else ("" if f.numerator == 1 else str(f.numerator)) + "\\\\sqrt{%d}" % n
print(top if f.denominator == 1 else "\\\\frac{%s}{%d}" % (top, f.denominator))
"""


# Level 4


def coefficient(rng: np.random.Generator) -> Problem:
    """A coefficient of a power of a trinomial."""
    (a, b, c), n = (k or 1 for k in integers(rng, -5, 5, 3)), integer(rng, 6, 14)
    k = integer(rng, 3, 2 * n - 3)
    answer = sum(
        math.comb(n, j) * math.comb(n - j, k - 2 * j) * c**j * b ** (k - 2 * j) * a ** (n - k + j)
        for j in range(max(0, k - n), k // 2 + 1)
    )
    question = f"What is the coefficient of $x^{{{k}}}$ in the expansion of $({a} {b:+}x {c:+}x^2)^{{{n}}}$?"
    program = (
        f"p = [1]\nfor _ in range({n}):\n    q = [0] * (len(p) + 2)\n    for i, v in enumerate(p):\n"
        f"        for j, w in enumerate(({a}, {b}, {c})):\n            q[i + j] += v * w\n    p = q\nprint(p[{k}])"
    )
    return Problem(question, str(answer), program)


def points_in_a_triangle(rng: np.random.Generator) -> Problem:
    """Lattice points inside of a triangle, by Pick's theorem."""
    while True:
        corners = [(x, y) for x, y in zip(integers(rng, 0, 40, 3), integers(rng, 0, 40, 3), strict=True)]
        (ax, ay), (bx, by), (cx, cy) = corners
        if twice := abs((bx - ax) * (cy - ay) - (cx - ax) * (by - ay)):
            break
    border = math.gcd(bx - ax, by - ay) + math.gcd(cx - bx, cy - by) + math.gcd(ax - cx, ay - cy)
    question = (
        "How many points with integer coordinates lie strictly inside the triangle with the corners "
        f"$({ax}, {ay})$, $({bx}, {by})$ and $({cx}, {cy})$?"
    )
    program = (
        f"c = {corners}\n"
        "def side(i, x, y):\n"
        "    (ax, ay), (bx, by) = c[i], c[(i + 1) % 3]\n"
        "    return (bx - ax) * (y - ay) - (x - ax) * (by - ay)\n"
        "n = 0\nfor x in range(41):\n    for y in range(41):\n        s = [side(i, x, y) for i in range(3)]\n"
        "        n += min(s) > 0 or max(s) < 0\nprint(n)"
    )
    return Problem(question, str((twice - border + 2) // 2), program)


def larger_root(rng: np.random.Generator) -> Problem:
    """The larger root of a quadratic equation, as a surd."""
    while True:
        a, b, c = integer(rng, 1, 6), 2 * (integer(rng, -9, 9) or 1), integer(rng, -30, 20) or 1
        if (inside := (b // 2) ** 2 - a * c) > 0:
            break
    # (-b/2 + sqrt(inside)) / a
    rational, surd = Fraction(-b // 2, a), _surd(Fraction(1, a), inside)
    plain = math.isqrt(inside) ** 2 == inside
    answer = latex(rational + Fraction(math.isqrt(inside), a)) if plain else _sum(rational, surd)
    question = f"Find the exact value of the larger root of ${a}x^2 {b:+}x {c:+} = 0$."
    program = (
        "from fractions import Fraction\nimport math\n"
        f"a, b, c = {a}, {b}, {c}\nn, f = b * b - 4 * a * c, Fraction(1, 2 * a)\nr = Fraction(-b, 2 * a)\n"
        "if math.isqrt(n) ** 2 == n:\n    print(r + f * math.isqrt(n))\nelse:\n    if r:\n"
        '        print(r if r.denominator == 1 else "%s\\\\frac{%d}{%d}" % ("-" * (r < 0), abs(r.numerator), '
        'r.denominator), end="+")\n' + "\n".join(f"    {line}" for line in _PRINT_SURD.strip().splitlines())
    )
    return Problem(question, answer, program)


def _sum(rational: Fraction, surd: str) -> str:
    return f"{latex(rational)}+{surd}" if rational else surd


def distance(rng: np.random.Generator) -> Problem:
    """The distance of a point from a line, as a surd."""
    while True:
        a, b, c, x, y = integers(rng, -9, 9, 5)
        if a and b and (over := abs(a * x + b * y + c)):
            break
    under = a * a + b * b
    question = f"Find the exact distance of the point $({x}, {y})$ from the line ${a}x {b:+}y {c:+} = 0$."
    program = (
        f"from fractions import Fraction\na, b, c, x, y = {a}, {b}, {c}, {x}, {y}\n"
        "n = a * a + b * b\nf = Fraction(abs(a * x + b * y + c), n)" + _PRINT_SURD
    )
    return Problem(question, _surd(Fraction(over, under), under), program)


def triangle_area(rng: np.random.Generator) -> Problem:
    """The area of a triangle by Heron's formula, as a surd."""
    while True:
        a, b, c = sorted(integers(rng, 3, 40, 3))
        if c < a + b:
            break
    sixteen_squares = (a + b + c) * (-a + b + c) * (a - b + c) * (a + b - c)
    question = f"Find the exact area of the triangle with the sides {a}, {b} and {c}."
    program = (
        f"from fractions import Fraction\na, b, c = {a}, {b}, {c}\n"
        "n, f = 2 * (a * a * b * b + b * b * c * c + c * c * a * a) - a**4 - b**4 - c**4, Fraction(1, 4)" + _PRINT_SURD
    )
    return Problem(question, _surd(Fraction(1, 4), sixteen_squares), program)


def dice(rng: np.random.Generator) -> Problem:
    """The probability of a sum of dice."""
    count, sides = integer(rng, 3, 5), integer(rng, 4, 9)
    wanted = integer(rng, count + 2, count * sides - 2)
    ways = {0: 1}
    for _ in range(count):
        nxt: dict[int, int] = {}
        for total, number in ways.items():
            for face in range(1, sides + 1):
                nxt[total + face] = nxt.get(total + face, 0) + number
        ways = nxt
    at_least = bool(rng.random() < 0.5)
    good = sum(number for total, number in ways.items() if total == wanted or (at_least and total > wanted))
    question = (
        f"{count} fair dice with {sides} sides (1 to {sides}) are thrown. What is the probability, as a fraction in "
        f"lowest terms, that their sum is {'at least' if at_least else 'exactly'} {wanted}?"
    )
    program = (
        "from fractions import Fraction\nfrom itertools import product\n"
        f"s = [sum(d) for d in product(range(1, {sides} + 1), repeat={count})]\n"
        f"print(Fraction(sum(t {'>=' if at_least else '=='} {wanted} for t in s), len(s)))"
    )
    return Problem(question, latex(Fraction(good, sides**count)), program)


def arrangements(rng: np.random.Generator) -> Problem:
    """Arrangements of letters without equal neighbours."""
    word = "".join(sorted("ABCDE"[k] for k in integers(rng, 0, 4, integer(rng, 6, 8))))

    @functools.cache
    def ways(left: tuple[int, ...], last: int) -> int:
        if not sum(left):
            return 1
        return sum(ways((*left[:k], left[k] - 1, *left[k + 1 :]), k) for k in range(len(left)) if left[k] and k != last)

    answer = ways(tuple(word.count(letter) for letter in "ABCDE"), -1)
    question = (
        f"How many different arrangements of the letters {', '.join(word)} have no two equal letters side by side?"
    )
    program = (
        "from itertools import permutations\n"
        f'print(sum(all(a != b for a, b in zip(p, p[1:])) for p in set(permutations("{word}"))))'
    )
    return Problem(question, str(answer), program)


# Level 5


def remainders(rng: np.random.Generator) -> Problem:
    """A number given by its remainders, beyond a bound."""
    moduli = some(rng, (7, 9, 11, 13, 16, 17, 19, 23, 25), 3)
    rests = [integer(rng, 0, m - 1) for m in moduli]
    whole, bound = math.prod(moduli), integer(rng, 1_000, 300_000)
    residue = sum(r * (whole // m) * pow(whole // m, -1, m) for r, m in zip(rests, moduli, strict=True)) % whole
    answer = bound + 1 + (residue - bound - 1) % whole
    given = ", ".join(f"{r} when divided by {m}" for r, m in zip(rests, moduli, strict=True))
    question = f"Find the smallest integer greater than {bound} that leaves the remainders {given}."
    program = f"n = {bound} + 1\nwhile [n % m for m in {moduli}] != {rests}:\n    n += 1\nprint(n)"
    return Problem(question, str(answer), program)


def best_mix(rng: np.random.Generator) -> Problem:
    """An integer program with three unknowns and two bounds."""
    gains, first, second = integers(rng, 5, 30, 3), integers(rng, 2, 9, 3), integers(rng, 2, 9, 3)
    one, two = integers(rng, 40, 110, 2)
    best = [[0] * (two + 1) for _ in range(one + 1)]  # the best gain within (one, two): an unbounded knapsack
    for gain, f, s in zip(gains, first, second, strict=True):
        for i in range(f, one + 1):
            row, source = best[i], best[i - f]
            for j in range(s, two + 1):
                row[j] = max(row[j], source[j - s] + gain)
    (p, q, r), (a, b, c), (d, e, f) = gains, first, second
    question = (
        f"Over all integers $x, y, z \\ge 0$ with ${a}x + {b}y + {c}z \\le {one}$ and ${d}x + {e}y + {f}z \\le {two}$, "
        f"what is the largest value of ${p}x + {q}y + {r}z$?"
    )
    program = (
        f"best = 0\nfor x in range({one} // {a} + 1):\n    for y in range({one} // {b} + 1):\n"
        f"        z = min(({one} - {a} * x - {b} * y) // {c}, ({two} - {d} * x - {e} * y) // {f})\n"
        f"        if z >= 0:\n            best = max(best, {p} * x + {q} * y + {r} * z)\nprint(best)"
    )
    return Problem(question, str(best[one][two]), program)


def pairs_by_divisor(rng: np.random.Generator) -> Problem:
    """Pairs with a given greatest common divisor, by inclusion and exclusion."""
    left, right, divisor = integer(rng, 50, 400), integer(rng, 50, 400), integer(rng, 1, 6)
    a, b = left // divisor, right // divisor
    exactly = [0] * (min(a, b) + 1)
    for k in range(min(a, b), 0, -1):
        exactly[k] = (a // k) * (b // k) - sum(exactly[2 * k :: k])
    question = (
        f"How many pairs of integers $(a, b)$ with $1 \\le a \\le {left}$ and $1 \\le b \\le {right}$ have the "
        f"greatest common divisor {divisor}?"
    )
    program = (
        "from math import gcd\n"
        f"print(sum(gcd(a, b) == {divisor} for a in range(1, {left} + 1) for b in range(1, {right} + 1)))"
    )
    return Problem(question, str(exactly[1]), program)


def strings_without(rng: np.random.Generator) -> Problem:
    """Strings in which a pattern does not occur, by its automaton."""
    size = integer(rng, 2, 3)
    letters = "ABC"[:size]
    pattern = "".join(letters[k] for k in integers(rng, 0, size - 1, integer(rng, 3, 5)))
    length = integer(rng, 8, 15) if size == 2 else integer(rng, 6, 10)

    def after(state: int, letter: str) -> int:
        """How much of the pattern stands at the end."""
        seen = pattern[:state] + letter
        return next(k for k in range(min(len(seen), len(pattern)), -1, -1) if seen.endswith(pattern[:k]))

    steps = [[after(state, letter) for letter in letters] for state in range(len(pattern))]
    counts = [1] + [0] * len(pattern)
    for _ in range(length):
        nxt = [0] * (len(pattern) + 1)
        for state, targets in enumerate(steps):
            for target in targets:
                nxt[target] += counts[state]
        counts = [*nxt[:-1], 0]
    question = (
        f"How many strings of {length} letters, each of them one of {', '.join(letters)}, do not contain {pattern} as "
        "a block of consecutive letters?"
    )
    program = (
        "from itertools import product\n"
        f'print(sum("{pattern}" not in "".join(s) for s in product("{letters}", repeat={length})))'
    )
    return Problem(question, str(sum(counts)), program)


def waiting_time(rng: np.random.Generator) -> Problem:
    """How long a pattern of an unfair coin takes, by its borders (Conway's leading numbers)."""
    under = integer(rng, 3, 9)
    heads = Fraction(integer(rng, 1, under - 1), under)
    pattern = "".join("HT"[k] for k in integers(rng, 0, 1, integer(rng, 3, 5)))
    answer = Fraction()
    for k in range(1, len(pattern) + 1):
        if pattern[:k] == pattern[-k:]:
            answer += 1 / math.prod((heads if side == "H" else 1 - heads for side in pattern[:k]), start=Fraction(1))
    question = (
        f"A coin shows heads (H) with probability ${latex(heads)}$, else tails (T). It is flipped until the last flips "
        f"read {pattern}. What is the expected number of flips, as a fraction in lowest terms?"
    )
    program = (
        "from fractions import Fraction as F\n"
        f'p, w = F({heads.numerator}, {heads.denominator}), "{pattern}"\n'
        "def after(k, c):\n"
        "    s = w[:k] + c\n"
        "    return max(j for j in range(len(s) + 1) if s.endswith(w[:j]))\n"
        "n = len(w)\n"
        "m = [[F(i == j) for j in range(n)] + [F(1)] for i in range(n)]\n"
        "for i in range(n):\n"
        '    for c, q in (("H", p), ("T", 1 - p)):\n'
        "        if after(i, c) < n:\n            m[i][after(i, c)] -= q\n"
        "for i in range(n):\n"
        "    k = next(k for k in range(i, n) if m[k][i])\n"
        "    m[i], m[k] = m[k], m[i]\n"
        "    m[i] = [v / m[i][i] for v in m[i]]\n"
        "    for j in range(n):\n"
        "        if j != i:\n            m[j] = [a - m[j][i] * b for a, b in zip(m[j], m[i])]\n"
        "print(m[0][n])"
    )
    return Problem(question, latex(answer), program)


KINDS: dict[int, tuple[Kind, ...]] = {
    1: (
        kinds.divisor_or_multiple,
        kinds.power_remainder,
        kinds.digit_sum_of_power,
        kinds.sum_of_powers,
        kinds.sum_of_multiples,
        kinds.divisors,
    ),
    2: (kinds.primes_between, kinds.committees, kinds.two_equations, kinds.recurrence, kinds.series),
    3: (kinds.digit_sums, kinds.determinant, kinds.three_equations, kinds.points_in_a_circle, kinds.change),
    4: (coefficient, points_in_a_triangle, larger_root, distance, triangle_area, dice, arrangements),
    5: (remainders, best_mix, pairs_by_divisor, strings_without, waiting_time),
}
