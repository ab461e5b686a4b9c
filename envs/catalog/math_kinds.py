"""The simpler kinds of `math_tasks`, of the levels 1 to 3, and what all kinds share."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import numpy as np

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its exact answer as LaTeX, and a Python program that prints the answer."""

    question: str
    answer: str
    program: str


Kind: TypeAlias = Callable[[np.random.Generator], Problem]


def integer(rng: np.random.Generator, low: int, high: int) -> int:
    """A whole number, low <= n <= high."""
    return int(rng.integers(low, high + 1))


def integers(rng: np.random.Generator, low: int, high: int, count: int) -> list[int]:
    """Whole numbers, low <= n <= high."""
    return [int(n) for n in rng.integers(low, high + 1, size=count)]


def some(rng: np.random.Generator, pool: Sequence[int], count: int) -> list[int]:
    """Different ones, in their order."""
    return sorted(int(n) for n in rng.choice(np.asarray(pool), size=count, replace=False))


def latex(value: Fraction) -> str:
    """A rational number as LaTeX."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


# Level 1


def divisor_or_multiple(rng: np.random.Generator) -> Problem:
    """Greatest common divisor or least common multiple of three numbers."""
    factor = integer(rng, 2, 60)
    numbers = sorted(factor * n for n in integers(rng, 10, 900, 3))
    listed = f"{numbers[0]}, {numbers[1]} and {numbers[2]}"
    if rng.random() < 0.5:
        program = f"n = {numbers[0]}\nwhile any(k % n for k in {numbers}):\n    n -= 1\nprint(n)"
        return Problem(f"Find the greatest common divisor of {listed}.", str(math.gcd(*numbers)), program)
    program = f"import math\nprint(math.lcm(*{numbers}))"
    product = numbers[0] * numbers[1] // math.gcd(*numbers[:2])
    answer = product * numbers[2] // math.gcd(product, numbers[2])
    return Problem(f"Find the least common multiple of {listed}.", str(answer), program)


def power_remainder(rng: np.random.Generator) -> Problem:
    """The remainder of a power."""
    base, exponent, modulus = integer(rng, 2, 99), integer(rng, 50, 5_000), integer(rng, 100, 9_999)
    question = f"What is the remainder when ${base}^{{{exponent}}}$ is divided by {modulus}?"
    return Problem(question, str(pow(base, exponent, modulus)), f"print({base} ** {exponent} % {modulus})")


def digit_sum_of_power(rng: np.random.Generator) -> Problem:
    """The digits of a large power."""
    base, exponent = integer(rng, 2, 99), integer(rng, 20, 300)
    rest, total = base**exponent, 0
    while rest:
        rest, digit = divmod(rest, 10)
        total += digit
    question = f"Find the sum of the decimal digits of ${base}^{{{exponent}}}$."
    return Problem(question, str(total), f"print(sum(map(int, str({base} ** {exponent}))))")


def sum_of_powers(rng: np.random.Generator) -> Problem:
    """A sum of squares or cubes between two bounds."""
    low, power = integer(rng, 2, 200), integer(rng, 2, 3)
    high = low + integer(rng, 10, 500)

    def up_to(n: int) -> int:
        return n * (n + 1) * (2 * n + 1) // 6 if power == 2 else (n * (n + 1) // 2) ** 2

    question = f"Compute $\\sum_{{k={low}}}^{{{high}}} k^{power}$."
    program = f"print(sum(k ** {power} for k in range({low}, {high} + 1)))"
    return Problem(question, str(up_to(high) - up_to(low - 1)), program)


def sum_of_multiples(rng: np.random.Generator) -> Problem:
    """Multiples of one number or of another."""
    a, b = some(rng, range(3, 30), 2)
    n = integer(rng, 100, 20_000)

    def multiples(k: int) -> int:
        count = (n - 1) // k
        return k * count * (count + 1) // 2

    answer = multiples(a) + multiples(b) - multiples(math.lcm(a, b))
    question = f"Find the sum of all positive integers below {n} that are divisible by {a} or by {b}."
    return Problem(question, str(answer), f"print(sum(k for k in range({n}) if k % {a} == 0 or k % {b} == 0))")


def divisors(rng: np.random.Generator) -> Problem:
    """How many divisors a number has, or their sum."""
    powers = Counter(int(p) for p in rng.choice(np.asarray(_PRIMES[:8]), size=integer(rng, 3, 5)))
    n = math.prod(p**k for p, k in powers.items())
    if rng.random() < 0.5:
        answer, what, summand = math.prod(k + 1 for k in powers.values()), "How many positive divisors does", "1"
    else:
        answer = math.prod((p ** (k + 1) - 1) // (p - 1) for p, k in powers.items())
        what, summand = "What is the sum of the positive divisors that", "d"
    question = f"{what} {n} have?" if summand == "1" else f"{what} {n} has, 1 and {n} included?"
    return Problem(question, str(answer), f"print(sum({summand} for d in range(1, {n} + 1) if {n} % d == 0))")


# Level 2


def primes_between(rng: np.random.Generator) -> Problem:
    """Primes in an interval."""
    low = integer(rng, 10, 4_000)
    high = low + integer(rng, 100, 1_000)
    answer = sum(all(n % p or n == p for p in _PRIMES) for n in range(low, high + 1))  # 97 * 97 > 5000
    question = f"How many primes $p$ satisfy ${low} \\le p \\le {high}$?"
    program = f"print(sum(all(n % d for d in range(2, int(n ** 0.5) + 1)) for n in range({low}, {high} + 1)))"
    return Problem(question, str(answer), program)


def committees(rng: np.random.Generator) -> Problem:
    """Choices with a condition."""
    red, blue, size = integer(rng, 5, 20), integer(rng, 5, 20), integer(rng, 4, 9)
    least = integer(rng, 1, min(3, size - 1))
    answer = math.comb(red + blue, size) - sum(math.comb(red, k) * math.comb(blue, size - k) for k in range(least))
    question = (
        f"A box holds {red} different red and {blue} different blue balls. In how many ways can {size} balls be chosen "
        f"so that at least {least} of them {'is' if least == 1 else 'are'} red?"
    )
    program = (
        f"from math import comb\n"
        f"print(sum(comb({red}, k) * comb({blue}, {size} - k) for k in range({least}, {size} + 1)))"
    )
    return Problem(question, str(answer), program)


def two_equations(rng: np.random.Generator) -> Problem:
    """A linear system of two equations; its solution is a fraction."""
    while True:
        a, b, c, d = (n or 1 for n in integers(rng, -12, 12, 4))
        if a * d != b * c:
            break
    e, f = integers(rng, -40, 40, 2)
    answer = Fraction(e * d - b * f + a * f - e * c, a * d - b * c)
    question = f"If ${a}x {b:+}y = {e}$ and ${c}x {d:+}y = {f}$, what is $x + y$?"
    program = (
        "from fractions import Fraction as F\n"
        f"a, b, e = map(F, ({a}, {b}, {e}))\nc, d, f = map(F, ({c}, {d}, {f}))\n"
        "k = c / a\ny = (f - k * e) / (d - k * b)\nprint((e - b * y) / a + y)"
    )
    return Problem(question, latex(answer), program)


def recurrence(rng: np.random.Generator) -> Problem:
    """A far term of a linear recurrence, modulo a number."""
    p, q, first, second = integers(rng, 1, 9, 4)
    n, modulus = integer(rng, 1_000, 90_000), integer(rng, 101, 9_999)
    power, step, rest = ((1, 0), (0, 1)), ((p, q), (1, 0)), n - 2
    while rest:
        if rest & 1:
            power = _times(power, step, modulus)
        step, rest = _times(step, step, modulus), rest >> 1
    answer = (power[0][0] * second + power[0][1] * first) % modulus
    question = (
        f"Let $a_1 = {first}$, $a_2 = {second}$ and $a_n = {p} a_{{n-1}} + {q} a_{{n-2}}$ for $n > 2$. "
        f"What is the remainder when $a_{{{n}}}$ is divided by {modulus}?"
    )
    program = f"a, b = {first}, {second}\nfor _ in range({n} - 2):\n    a, b = b, ({p} * b + {q} * a) % {modulus}\n"
    return Problem(question, str(answer), program + f"print(b % {modulus})")


_Matrix: TypeAlias = tuple[tuple[int, int], tuple[int, int]]


def _times(a: _Matrix, b: _Matrix, modulus: int) -> _Matrix:
    (a0, a1), (a2, a3), (b0, b1), (b2, b3) = *a, *b
    return (
        ((a0 * b0 + a1 * b2) % modulus, (a0 * b1 + a1 * b3) % modulus),
        ((a2 * b0 + a3 * b2) % modulus, (a2 * b1 + a3 * b3) % modulus),
    )


def series(rng: np.random.Generator) -> Problem:
    """A sum of unit fractions that telescopes."""
    gap, low = integer(rng, 1, 6), integer(rng, 1, 20)
    high = low + integer(rng, 8, 60)
    # 1/(k(k+g)) = (1/k - 1/(k+g))/g: what is left are g terms at each end.
    ends = (Fraction(1, low + k) - Fraction(1, high + 1 + k) for k in range(gap))
    answer = sum(ends, Fraction()) / gap
    question = f"Write $\\sum_{{k={low}}}^{{{high}}} \\frac{{1}}{{k(k+{gap})}}$ as a fraction in lowest terms."
    program = (
        f"from fractions import Fraction as F\nprint(sum(F(1, k * (k + {gap})) for k in range({low}, {high} + 1)))"
    )
    return Problem(question, latex(answer), program)


# Level 3


def digit_sums(rng: np.random.Generator) -> Problem:
    """Numbers with a given sum of digits."""
    n, wanted = integer(rng, 5_000, 120_000), integer(rng, 5, 25)
    answer, before = 0, 0
    for place, digit in enumerate(text := str(n + 1)):  # numbers from 0 to n: those that first differ at this place
        ways = [1] + [0] * wanted
        for _ in range(len(text) - place - 1):
            ways = [sum(ways[max(0, s - 9) : s + 1]) for s in range(wanted + 1)]
        answer += sum(ways[wanted - before - d] for d in range(int(digit)) if wanted - before - d >= 0)
        before += int(digit)
    question = f"How many integers from 1 to {n} have the digit sum {wanted}?"
    program = f"print(sum(sum(map(int, str(k))) == {wanted} for k in range(1, {n} + 1)))"
    return Problem(question, str(answer), program)


def determinant(rng: np.random.Generator) -> Problem:
    """The determinant of a matrix of order four."""
    rows = [integers(rng, -9, 9, 4) for _ in range(4)]
    body = " \\\\ ".join(" & ".join(map(str, row)) for row in rows)
    question = f"Compute the determinant of $\\begin{{pmatrix}} {body} \\end{{pmatrix}}$."
    program = (
        f"m = {rows}\n"
        "def det(m):\n"
        "    if not m:\n        return 1\n"
        "    return sum((-1) ** j * m[0][j] * det([r[:j] + r[j + 1:] for r in m[1:]]) for j in range(len(m)))\n"
        "print(det(m))"
    )
    return Problem(question, latex(_determinant(rows)), program)


def _determinant(rows: Sequence[Sequence[int]]) -> Fraction:
    """By elimination."""
    left, value = [[Fraction(n) for n in row] for row in rows], Fraction(1)
    while left:
        pivot = next((row for row in left if row[0]), None)
        if pivot is None:
            return Fraction()
        value *= pivot[0] if left.index(pivot) % 2 == 0 else -pivot[0]
        others = [row for row in left if row is not pivot]
        left = [[n - row[0] / pivot[0] * p for n, p in zip(row[1:], pivot[1:], strict=True)] for row in others]
    return value


def three_equations(rng: np.random.Generator) -> Problem:
    """A linear system of three equations by Cramer's rule; its solution is a fraction."""
    while True:
        rows = [[n or 2 for n in integers(rng, -7, 7, 3)] for _ in range(3)]
        if whole := _determinant(rows):
            break
    right = integers(rng, -20, 20, 3)
    answer = Fraction()
    for column in range(3):
        swapped = [[*row[:column], r, *row[column + 1 :]] for row, r in zip(rows, right, strict=True)]
        answer += (column + 1) * _determinant(swapped) / whole
    given = ", ".join(f"${a}x {b:+}y {c:+}z = {r}$" for (a, b, c), r in zip(rows, right, strict=True))
    program = (
        "from fractions import Fraction as F\n"
        f"m = [[F(n) for n in r] for r in {[[*row, r] for row, r in zip(rows, right, strict=True)]}]\n"
        "for i in range(3):\n"
        "    k = next(k for k in range(i, 3) if m[k][i])\n"
        "    m[i], m[k] = m[k], m[i]\n"
        "    m[i] = [n / m[i][i] for n in m[i]]\n"
        "    for j in range(3):\n"
        "        if j != i:\n"
        "            m[j] = [a - m[j][i] * b for a, b in zip(m[j], m[i])]\n"
        "print(m[0][3] + 2 * m[1][3] + 3 * m[2][3])"
    )
    return Problem(f"Given {given}, what is $x + 2y + 3z$?", latex(answer), program)


def points_in_a_circle(rng: np.random.Generator) -> Problem:
    """Lattice points in a disc."""
    bound, shift = integer(rng, 100, 3_000), integer(rng, 0, 9)
    side = math.isqrt(bound)
    answer = sum(2 * math.isqrt(bound - x * x) + 1 for x in range(-side, side + 1))
    question = f"How many pairs of integers $(x, y)$ satisfy $(x-{shift})^2 + y^2 \\le {bound}$?"
    program = (
        f"print(sum((x - {shift}) ** 2 + y * y <= {bound} "
        f"for x in range(-{side}, {side + shift + 1}) for y in range(-{side}, {side + 1})))"
    )
    return Problem(question, str(answer), program)


def change(rng: np.random.Generator) -> Problem:
    """Ways to pay a sum with coins."""
    coins, total = some(rng, range(2, 25), 4), integer(rng, 60, 300)
    ways = [1] + [0] * total
    for coin in coins:
        for k in range(coin, total + 1):
            ways[k] += ways[k - coin]
    a, b, c, d = coins
    question = (
        f"In how many ways can {total} cents be paid with coins of {a}, {b}, {c} and {d} cents, if there are enough of "
        "each and their order does not matter?"
    )
    program = (
        f"n = 0\nfor d in range(0, {total} + 1, {d}):\n    for c in range(0, {total} + 1 - d, {c}):\n"
        f"        for b in range(0, {total} + 1 - d - c, {b}):\n            n += ({total} - d - c - b) % {a} == 0\n"
        "print(n)"
    )
    return Problem(question, str(ways[total]), program)
