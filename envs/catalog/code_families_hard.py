"""Families of small functions to write or to mend: the harder ones, of levels 3 and 4. See `code_families`."""

import numpy as np

from toolgym.envs.catalog.code_families import Family, number, numbers, one, pick, text, words

_MERGE_SPANS = Family(
    3,
    """
def merge_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged = []
    for start, end in sorted(spans):
        if merged and start - merged[-1][1] <= $gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return [span for span in merged if span[1] - span[0] >= $least]
""",
    "The spans are pairs (start, end) with start <= end. Join spans as long as two of them overlap or the gap "
    "between the end of one and the start of the next is at most $gap. Then leave out those that are shorter than "
    "$least (end minus start), and return the others as a list of tuples, sorted by start.",
    (
        ("max(merged[-1][1], end)", "end"),
        ("in sorted(spans)", "in spans"),
        ("<= $gap", "< $gap"),
        ("span[1] - span[0] >= $least", "span[1] - span[0] > $least"),
    ),
    lambda rng: {"gap": number(rng, 0, 9), "least": number(rng, 1, 20)},
    lambda rng, p: [
        [(start, start + number(rng, 0, 12)) for start in numbers(rng, 0, 70, number(rng, 0, 9))]
        + [(80, 80 + p["least"])] * number(rng, 0, 1)
    ],
)

_BRACKETS = (
    ([")(", "]["], "( ) and [ ]"),
    ([")(", "}{"], "( ) and { }"),
    (["][", "}{"], "[ ] and { }"),
    ([")(", "><"], "( ) and < >"),
    (["][", "><"], "[ ] and < >"),
    ([")(", "][", "}{"], "( ) and [ ] and { }"),
)

_FIRST_ERROR = Family(
    3,
    """
def first_error(text: str) -> int:
    partner = dict($pairs)
    opened = []
    for i, c in enumerate(text):
        if c in partner.values():
            opened.append(c)
        elif c in partner:
            if not opened or opened.pop() != partner[c]:
                return i
    return $unclosed if opened else -1
""",
    "Check the brackets $brackets in the text; all other characters are passed over. Every closing bracket has to "
    "close the last bracket that is still open, and be of its kind. Return the index of the first closing bracket "
    "that does not; if there is none but brackets are still open at the end, return $unclosed; if all is well, "
    "return -1.",
    (
        ("not opened or opened.pop() != partner[c]", "not opened or not opened.pop()"),
        ("opened.append(c)", "opened.insert(0, c)"),
        ("return i\n", "return i + 1\n"),
    ),
    lambda rng: {
        **pick(rng, ("pairs", "brackets"), _BRACKETS),
        "unclosed": one(rng, "len(text)", str(-number(rng, 2, 99))),
    },
    lambda rng, p: [_brackets(rng, p["brackets"].replace(" ", "").replace("and", ""))],
)


def _brackets(rng: np.random.Generator, kinds: str) -> str:
    """Brackets that mostly match, with something between them."""
    opened, found = "", ""
    for _ in range(number(rng, 1, 16)):
        roll = rng.random()
        if roll < 0.4 or not opened:
            opened += one(rng, *kinds[::2])
            found += opened[-1]
        elif roll < 0.85:
            found += kinds[kinds.index(opened[-1]) + 1]
            opened = opened[:-1]
        else:
            found += text(rng, kinds + "ab(]>", 1)
    closing = "".join(kinds[kinds.index(c) + 1] for c in reversed(opened)) if rng.random() < 0.7 else ""
    return found + closing


_OPERATORS = (
    ("max(a, b)", "the larger of a and b"),
    ("min(a, b)", "the smaller of a and b"),
    ("abs(a - b)", "the distance of a and b"),
    ("2 * a - b", "twice a, minus b"),
    ("a * a + b", "the square of a, plus b"),
    ("10 * a + b", "ten times a, plus b"),
    ("a - 3 * b", "a minus three times b"),
)

_RPN = Family(
    3,
    """
def rpn(tokens: list[str]) -> int:
    stack = []
    for token in tokens:
        if token in ("+", "-", "*", "$symbol"):
            if len(stack) < 2:
                raise ValueError(token)
            b, a = stack.pop(), stack.pop()
            stack.append({"+": a + b, "-": a - b, "*": a * b, "$symbol": $formula}[token])
        else:
            stack.append(int(token))
    if len(stack) != 1:
        raise ValueError(len(stack))
    return stack[0]
""",
    "Work out an expression in reverse Polish notation (an operator comes after its two operands). Tokens are whole "
    "numbers like -12, the operators + - *, and $symbol: `a b $symbol` is $meaning. Raise a ValueError if an "
    "operator finds fewer than two operands, if a token is something else, or if not exactly one value is left at "
    "the end.",
    (
        ("b, a = stack.pop(), stack.pop()", "a, b = stack.pop(), stack.pop()"),
        ('"-": a - b', '"-": a + b'),
        ('"$symbol": $formula', '"$symbol": a'),
    ),
    lambda rng: {
        "symbol": one(rng, *"@&|^%"),
        **pick(rng, ("formula", "meaning"), _OPERATORS),
    },
    lambda rng, p: [_polish(rng, p["symbol"])],
)


def _polish(rng: np.random.Generator, symbol: str) -> list[str]:
    """Mostly an expression, sometimes with a token too many or too few."""
    tokens, depth = [], 0
    for _ in range(number(rng, 3, 11)):
        if depth >= 2 and rng.random() < 0.55:
            tokens.append(one(rng, "+", "-", "*", symbol, symbol))
            depth -= 1
        else:
            tokens.append(str(number(rng, -9, 20)))
            depth += 1
    tokens += [one(rng, "-", symbol) for _ in range(depth - 1)]
    if rng.random() < 0.25:
        del tokens[number(rng, 0, len(tokens) - 1)]
    return tokens


_VALUES = (
    ("w[-1] - w[0]", "the largest minus the smallest number"),
    ("(w[0] + w[-1]) / 2", "the middle between the smallest and the largest number"),
    ("w[1]", "the second smallest number, where equal ones count each"),
    ("sum(w[:-1]) / (len(w) - 1)", "the mean of its numbers without one that is the largest"),
    ("(w[(len(w) - 1) // 2] + w[len(w) // 2]) / 2", "the median"),
)

_WINDOWS = Family(
    3,
    """
def windows(numbers: list[int]) -> list[float]:
    result = []
    for i in range(0, len(numbers) - $size + 1, $step):
        w = sorted(numbers[i : i + $size])
        result.append(float($value))
    return result
""",
    "Look at the windows of $size consecutive numbers: the first begins at index 0, each other one $step further than "
    "the one before it, and only complete ones count. Return for each of them, as a float, $meaning.",
    (
        ("len(numbers) - $size + 1", "len(numbers) - $size"),
        ("w = sorted(numbers[i : i + $size])", "w = numbers[i : i + $size]; w = w[1:] + w[:1]"),
        ("len(numbers) - $size + 1, $step)", "len(numbers), $step)"),
        ("numbers[i : i + $size]", "numbers[i + 1 : i + 1 + $size]"),
    ),
    lambda rng: {
        "size": number(rng, 3, 6),
        "step": number(rng, 1, 4),
        **pick(rng, ("value", "meaning"), _VALUES),
    },
    lambda rng, p: [numbers(rng, -50, 50, number(rng, p["size"] - 1, p["size"] + 4 * p["step"]))],
)

_CORNERS = (
    (0, "upper left", "to the right along the first row"),
    (1, "upper right", "down along the last column"),
    (2, "lower right", "to the left along the last row"),
    (3, "lower left", "up along the first column"),
)

_SPIRAL = Family(
    3,
    """
def spiral(grid: list[list[int]]) -> list[int]:
    rows = [list(row) for row in grid]
    for _ in range($turns):
        rows = [list(row) for row in zip(*rows)][::-1]
    result = []
    while rows:
        result += rows.pop(0)
        rows = [list(row) for row in zip(*rows)][::-1]
    return result[::$step]
""",
    "Walk through all numbers of the rectangular grid in a spiral: begin at the $corner corner, walk $along, turn "
    "right where the grid ends or you have been, and so on to the inside. Return every number at an index divisible "
    "by $step of that walk (all, if that is 1), in its order.",
    (
        ("    for _ in range($turns):", "    for _ in range($turns + 1):"),
        ("result += rows.pop(0)\n        rows = [list(row) for row in zip(*rows)][::-1]", "result += rows.pop(0)"),
        ("result[::$step]", "result[$step::$step]"),
    ),
    lambda rng: {
        "step": number(rng, 1, 9),
        **pick(rng, ("turns", "corner", "along"), _CORNERS),
    },
    lambda rng, p: [rng.integers(0, 100, size=(number(rng, 2, 5), number(rng, 2, 6))).tolist()],
)

_MOVES = (
    ("((1, 0), (-1, 0), (0, 1), (0, -1))", "up, down, left or right by one cell"),
    ("((1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))", "left or right by one cell, or diagonally by one cell"),
    ("((1, 1), (-1, 1), (-1, 0), (1, 0), (0, 1), (0, -1), (1, -1), (-1, -1))", "to one of the eight cells around"),
    ("((1, 0), (-1, 0), (0, 2), (0, -2), (0, 1), (0, -1))", "up or down by one cell, or left or right by one or two"),
    ("((2, 1), (2, -1), (-2, 1), (1, 2), (1, -2), (-1, 2), (-1, -2), (-2, -1))", "as a knight moves in chess"),
)

_SHORTEST_PATH = Family(
    4,
    """
import heapq

def shortest_path(grid: list[str]) -> int | None:
    cells = {(r, c): cell for r, row in enumerate(grid) for c, cell in enumerate(row) if cell != "#"}
    start = next(place for place, cell in cells.items() if cell == "S")
    waiting, done = [(0, start)], set()
    while waiting:
        cost, place = heapq.heappop(waiting)
        if cells[place] == "E":
            return cost
        if place in done:
            continue
        done.add(place)
        for dr, dc in $moves:
            target = (place[0] + dr, place[1] + dc)
            if target in cells:
                heapq.heappush(waiting, (cost + ($slow if cells[target] == "~" else 1), target))
    return None
""",
    "The grid has one S and one E; # are walls, . are free and ~ are swamps. A step goes $where, never onto a wall "
    "or out of the grid. A step onto a swamp costs $slow, every other step costs 1. Return the lowest cost of a way "
    "from S to E, or None if there is no way.",
    (
        ('if cell != "#"', 'if cell != "~"'),
        ("(cost + ($slow if", "(cost + (1 if"),
        ("for dr, dc in $moves:", "for dr, dc in $moves[:-1]:"),
    ),
    lambda rng: {"slow": number(rng, 3, 9), **pick(rng, ("moves", "where"), _MOVES)},
    lambda rng, p: [_maze(rng)],
)


def _maze(rng: np.random.Generator) -> list[str]:
    height, width = number(rng, 4, 6), number(rng, 4, 7)
    cells = list(text(rng, ".....###~~", height * width))
    start, end = rng.choice(height * width, size=2, replace=False)
    cells[start], cells[end] = "S", "E"
    return ["".join(cells[r * width : (r + 1) * width]) for r in range(height)]


_RULES = tuple(
    (f"{best}(ready, key=lambda name: ({key}, name))", f"{rule}; among equals, the {place} by the alphabet")
    for low, high, rule in (
        ("len(name)", "-len(name)", "one with the shortest name"),
        ("-len(name)", "len(name)", "one with the longest name"),
        ("len(needs.get(name, []))", "-len(needs.get(name, []))", "one that needs the fewest tasks"),
        ("-len(needs.get(name, []))", "len(needs.get(name, []))", "one that needs the most tasks"),
        ("-ord(name[0])", "ord(name[0])", "one with the first letter that is last in the alphabet"),
    )
    for best, key, place in (("min", low, "first"), ("max", high, "last"))
)

_ORDER = Family(
    4,
    """
def order(needs: dict[str, list[str]]) -> list[str]:
    left = {name: set(before) for name, before in needs.items()}
    for before in needs.values():
        for name in before:
            left.setdefault(name, set())
    done = []
    while left:
        ready = [name for name, before in left.items() if before <= set(done)]
        if not ready:
            raise ValueError("cycle")
        chosen = $choose
        done.append(chosen)
        del left[chosen]
    return done[:$count]
""",
    "The dictionary names for each task the tasks that must be done before it; a task that is only named as such "
    "needs nothing itself. Bring all tasks into an order that respects this. At each place comes, of the tasks that "
    "may come next, $rule. Return the first $count tasks of the order (all, if there are fewer). Raise a "
    "ValueError if the tasks have no order.",
    (
        ("chosen = $choose", "chosen = ready[0]"),
        (
            "            left.setdefault(name, set())\n",
            "            left.setdefault(name, {name})\n",
        ),
        ("if before <= set(done)", "if not before or before & set(done)"),
    ),
    lambda rng: {"count": number(rng, 3, 7), **pick(rng, ("choose", "rule"), _RULES)},
    lambda rng, p: [_needs(rng)],
)


def _needs(rng: np.random.Generator) -> dict[str, list[str]]:
    names = list(dict.fromkeys(words(rng, 7, longest=3)))
    needs = {
        name: sorted({names[number(rng, 0, k - 1)] for _ in range(number(rng, 0, 2))}) if k else []
        for k, name in enumerate(names)
    }
    if rng.random() < 0.15:
        needs[names[0]] = [names[-1]]  # perhaps a cycle
    if rng.random() < 0.6:
        needs.pop(names[0])
    shuffled = list(needs)
    rng.shuffle(shuffled)
    return {name: needs[name] for name in shuffled}


_FEWEST_COINS = Family(
    4,
    """
def fewest_coins(amount: int, coins: list[int]) -> int | None:
    best = {0: 0}
    for coin in coins:
        extended = dict(best)
        for total, count in best.items():
            for k in range(1, $most + 1):
                reached = total + k * coin
                if reached <= amount and count + k < extended.get(reached, amount + 1):
                    extended[reached] = count + k
        best = extended
    found = best.get(amount)
    return None if found is None or found > $limit else found
""",
    "Return the smallest number of coins that pay the amount exactly, when each of the values in coins (they are "
    "all different) may be used at most $most times and at most $limit coins in all; None if it cannot be paid so. "
    "Nothing is paid with 0 coins.",
    (
        ("range(1, $most + 1)", "range(1, $most)"),
        ("extended[reached] = count + k", "extended[reached] = count + 1"),
        ("count + k < extended.get(reached, amount + 1)", "reached not in extended"),
    ),
    lambda rng: {"most": number(rng, 2, 5), "limit": number(rng, 4, 12)},
    lambda rng, p: [
        number(rng, 5, 60),
        sorted({one(rng, 1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 15, 20, 25) for _ in range(number(rng, 2, 5))}),
    ],
)

_WRAP = Family(
    4,
    """
def wrap(text: str) -> list[str]:
    lines = [""]
    for word in text.split():
        while len(word) > $width:
            if lines[-1]:
                lines.append("")
            lines[-1], word = word[:$width], word[$width:]
            lines.append("")
        if lines[-1] and len(lines[-1]) + 1 + len(word) <= $width:
            lines[-1] += " " + word
        elif lines[-1]:
            lines.append(word)
        else:
            lines[-1] = word
    return [line.$align($width, "$fill") for line in lines if line]
""",
    "Break the text into lines of at most $width characters. Words are what stands between spaces; they are put "
    "into the line with one space between them as long as they fit, else into a new line. A word longer than $width "
    "begins a new line, which takes its first $width characters; the rest goes into the next line in the same way, "
    "and other words may follow it there. Fill each line up to $width characters with $fill on the $side. No text "
    "gives no lines.",
    (
        ("len(lines[-1]) + 1 + len(word) <= $width", "len(lines[-1]) + len(word) <= $width"),
        ("len(lines[-1]) + 1 + len(word) <= $width", "len(lines[-1]) + 1 + len(word) < $width"),
        ("while len(word) > $width:", "if len(word) > $width:"),
        ('.$align($width, "$fill")', ""),
    ),
    lambda rng: {
        "width": number(rng, 5, 14),
        "fill": one(rng, *".-_*=+"),
        **pick(rng, ("align", "side"), (("ljust", "right"), ("rjust", "left"))),
    },
    lambda rng, p: [
        one(rng, " ", "  ").join(
            text(rng, "abcdefgh", one(rng, 1, 2, 3, 4, p["width"], number(rng, 1, 3 * p["width"])))
            for _ in range(number(rng, 0, 8))
        )
    ],
)

_ON_HIT = (
    ("pass", "nothing else changes"),
    ("held.remove(key); held.append(key)", "the key moves to the end of the list"),
    ("held.remove(key); held.insert(0, key)", "the key moves to the beginning of the list"),
    ("held.remove(key)", "the key is removed from the list"),
    ("held.reverse()", "the list is reversed"),
)

_VICTIMS = (
    ("0", "the first key of the list"),
    ("-1", "the last key of the list"),
    ("1", "the second key of the list"),
    ("len(held) // 2", "the key at index len // 2 of the list"),
    ("held.index(max(held))", "the key that is last by the alphabet"),
    ("held.index(min(held))", "the key that is first by the alphabet"),
)

_CACHE = Family(
    4,
    """
def cache(keys: list[str]) -> tuple[int, list[str]]:
    hits, held = 0, []
    for key in keys:
        if key in held:
            hits += 1
            $on_hit
        else:
            if len(held) == $capacity:
                held.pop($victim)
            held.append(key)
    return hits, held
""",
    "Play a cache that holds at most $capacity keys as a list, empty at first. For each key in turn: if it is held, "
    "that is a hit, and $hit_words; if not, it is added at the end of the list, after $victim_words was dropped if "
    "the cache was full. Return the number of hits and the list of the keys held at the end, as a tuple.",
    (
        ("held.pop($victim)", "held.clear()"),
        ("len(held) == $capacity", "len(held) > $capacity"),
        ("            $on_hit\n", "            held.sort()\n"),
        ("hits += 1", "hits = 1"),
    ),
    lambda rng: {
        "capacity": number(rng, 2, 6),
        **pick(rng, ("on_hit", "hit_words"), _ON_HIT),
        **pick(rng, ("victim", "victim_words"), _VICTIMS),
    },
    lambda rng, p: [list(text(rng, "abcdefghijk"[: p["capacity"] + 3], number(rng, 0, 18)))],
)

HARDER: tuple[Family, ...] = (
    _MERGE_SPANS,
    _FIRST_ERROR,
    _RPN,
    _WINDOWS,
    _SPIRAL,
    _SHORTEST_PATH,
    _ORDER,
    _FEWEST_COINS,
    _WRAP,
    _CACHE,
)
