"""Work on files: procedural tasks in three levels, each with the files it begins with and those it should end with.

The right files are worked out here, in Python; the reference command does the same with the usual Unix programs, so
that each checks the other when the tests play the tasks.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from toolgym.envs.catalog.sources import content_id
from toolgym.envs.tasks import Task

LEVELS = (1, 2, 3)
_NAMES = (
    "ann",
    "bob",
    "cat",
    "dan",
    "eve",
    "fay",
    "gus",
    "hal",
    "ivy",
    "joe",
    "kim",
    "leo",
    "mia",
    "ned",
    "oda",
    "pia",
)
_WORDS = ("apple", "brick", "cloud", "drum", "ember", "flint", "grove", "house", "iron", "jolt", "knot", "lamp", "moss")
_LEVELS = ("DEBUG", "INFO", "WARN", "ERROR")
_SERVICES = ("auth", "mail", "shop", "search", "stock", "users")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked, the files at the start, those at the end (None: must be gone), and a command that does it."""

    prompt: str
    files: Mapping[str, str]
    expect: Mapping[str, str | None]
    command: str


Kind: TypeAlias = Callable[[np.random.Generator], Problem]


def draw(rng: np.random.Generator, levels: Sequence[int]) -> Task:
    """One task of a level drawn from ``levels``. Its id is a digest of what is asked and of all files."""
    level = int(rng.choice(np.asarray(levels)))
    kind = KINDS[level][int(rng.integers(len(KINDS[level])))]
    problem = kind(rng)
    if all(problem.files.get(path) == text for path, text in problem.expect.items()):
        return draw(rng, levels)  # nothing to do
    data = {
        "level": level,
        "kind": kind.__name__,
        "files": dict(problem.files),
        "expect": dict(problem.expect),
        "command": problem.command,
    }
    return Task(content_id(f"shell:{kind.__name__}", problem.prompt, data["files"]), problem.prompt, data)


def _one(rng: np.random.Generator, options: Sequence[Any]) -> Any:
    return options[int(rng.integers(len(options)))]


def _some(rng: np.random.Generator, options: Sequence[Any], count: int) -> list[Any]:
    """Different ones, in a drawn order."""
    return [options[int(k)] for k in rng.permutation(len(options))[:count]]


def _number(rng: np.random.Generator, low: int, high: int) -> int:
    return int(rng.integers(low, high + 1))


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _sentence(rng: np.random.Generator, count: int = 4) -> str:
    return " ".join(_one(rng, _WORDS) for _ in range(count))


def _tree(rng: np.random.Generator, top: str, count: int) -> list[str]:
    """Paths below a folder, without endings, some of them with spaces."""
    paths: set[str] = set()
    while len(paths) < count:
        folder = "/".join([top, *_some(rng, _NAMES[:5], _number(rng, 0, 2))])
        paths.add(f"{folder}/{_one(rng, _WORDS)}{_one(rng, ('', ' ', '-'))}{_one(rng, _WORDS)}")
    return sorted(paths)


# Level 1


def count_level(rng: np.random.Generator) -> Problem:
    """Lines of a log with a level, where messages name levels too."""
    wanted = _one(rng, _LEVELS)
    levels = [_one(rng, _LEVELS) for _ in range(_number(rng, 30, 80))]
    lines = []
    for level in levels:
        message = f"{_sentence(rng, 2)} {_one(rng, (*_LEVELS, '', ''))}"
        lines.append(f"{_number(rng, 10, 23)}:{_number(rng, 10, 59)} {level} {message}".strip())
    return Problem(
        f"Each line of app.log has a time, a level and a message. How many lines have the level {wanted}? Write the "
        "number to answer.txt.",
        {"app.log": _text(lines)},
        {"answer.txt": f"{levels.count(wanted)}\n"},
        f"awk '$2 == \"{wanted}\"' app.log | wc -l > answer.txt",
    )


def find_marker(rng: np.random.Generator) -> Problem:
    """The one file that holds a word."""
    marker = f"{_one(rng, _WORDS)}{_number(rng, 100, 999)}"
    paths = [f"{path}.txt" for path in _tree(rng, "data", _number(rng, 8, 14))]
    found = _one(rng, paths)
    near = (f"{marker}7", f"x{marker}", marker.upper(), marker[:-1])
    files = {
        path: _text([_sentence(rng), f"{_sentence(rng, 2)} {marker if path == found else _one(rng, near)} end"])
        for path in paths
    }
    return Problem(
        f"Exactly one file below data contains {marker} as a word of its own, in lower case. Write its path, from here "
        "(data/...), to answer.txt.",
        files,
        {"answer.txt": f"{found}\n"},
        f"grep -rlw {marker} data > answer.txt",
    )


def sort_lines(rng: np.random.Generator) -> Problem:
    """Lines sorted, each once."""
    if rng.random() < 0.5:
        numbers = [_number(rng, -200, 1_500) for _ in range(_number(rng, 30, 60))]
        numbers += _some(rng, numbers, 10)
        return Problem(
            "Sort the numbers in values.txt from the largest to the smallest, each of them once, into sorted.txt, "
            "one a line.",
            {"values.txt": _text([str(n) for n in numbers])},
            {"sorted.txt": _text([str(n) for n in sorted(set(numbers), reverse=True)])},
            "sort -nru values.txt > sorted.txt",
        )
    words = [f"{_one(rng, _NAMES)}-{_one(rng, _WORDS)}" for _ in range(_number(rng, 30, 60))]
    backwards = bool(rng.random() < 0.5)
    return Problem(
        f"Sort the lines of names.txt {'from z to a' if backwards else 'from a to z'}, each different line once, into "
        "sorted.txt.",
        {"names.txt": _text(words)},
        {"sorted.txt": _text(sorted(set(words), reverse=backwards))},
        f"LC_ALL=C sort -u{'r' if backwards else ''} names.txt > sorted.txt",
    )


def rename_endings(rng: np.random.Generator) -> Problem:
    """Files renamed by their endings, also those with spaces in their names."""
    old, new = _some(rng, ("txt", "md", "rst", "log", "text"), 2)
    files = {
        f"{path}.{_one(rng, (old, old, 'cfg', f'{old}x'))}": _text([_sentence(rng)]) for path in _tree(rng, "docs", 9)
    }
    files["docs/first." + old] = _text([_sentence(rng)])
    expect: dict[str, str | None] = {}
    for path, text in files.items():
        if path.endswith(f".{old}"):
            expect |= {path: None, f"{path.removesuffix(old)}{new}": text}
    return Problem(
        f"Rename every file below docs whose name ends in .{old} so that it ends in .{new} instead.",
        files,
        expect,
        f'find docs -type f -name \'*.{old}\' | while IFS= read -r f; do mv "$f" "${{f%.{old}}}.{new}"; done',
    )


def set_option(rng: np.random.Generator) -> Problem:
    """One option of one section."""
    sections, options = _some(rng, _SERVICES, 4), _some(rng, ("port", "host", "retries", "timeout", "cache"), 4)
    section, option, value = _one(rng, sections), _one(rng, options), _number(rng, 100, 9_999)

    def lines(changed: bool) -> list[str]:
        found = ["# settings"]
        for name in sections:
            found.append(f"[{name}]")
            for key in options:
                hit = changed and (name, key) == (section, option)
                found.append(f"{key} = {value if hit else values[name, key]}")
        return found

    values = {(name, key): _number(rng, 10_000, 60_000) for name in sections for key in options}
    return Problem(
        f"In service.ini, set the option {option} of the section [{section}] to {value}. Leave everything else in the "
        "file as it is.",
        {"service.ini": _text(lines(False))},
        {"service.ini": _text(lines(True))},
        f"sed -i '/^\\[{section}\\]/,/^\\[/ s/^{option} = .*/{option} = {value}/' service.ini",
    )


# Level 2


def filter_rows(rng: np.random.Generator) -> Problem:
    """Rows and columns of a table."""
    rows = [(_one(rng, _NAMES), _one(rng, _WORDS), _number(rng, 1, 99), _number(rng, 1, 99)) for _ in range(40)]
    least, word = _number(rng, 20, 70), _one(rng, _WORDS)
    kept = [row for row in rows if row[2] >= least and row[1] != word]
    return Problem(
        f"From table.csv, take the rows whose amount is {least} or more and whose item is not {word}. Write their "
        "columns name and price, in this order, to kept.csv: first the header name,price, then the rows, as ordered.",
        {"table.csv": _text(["name,item,amount,price", *(",".join(map(str, row)) for row in rows)])},
        {"kept.csv": _text(["name,price", *(f"{row[0]},{row[3]}" for row in kept)])},
        "{ echo name,price; awk -F, 'NR > 1 && $3 >= "
        + f'{least} && $2 != "{word}"'
        + ' {print $1 "," $4}\' table.csv; }'
        " > kept.csv",
    )


def top_addresses(rng: np.random.Generator) -> Problem:
    """The most frequent addresses of an access log."""
    addresses = [f"10.{_number(rng, 0, 9)}.{_number(rng, 0, 99)}.{_number(rng, 1, 254)}" for _ in range(9)]
    weights = rng.dirichlet(np.ones(9))
    lines, counts, status = [], Counter[str](), _one(rng, (200, 404, 500))
    for _ in range(_number(rng, 60, 120)):
        address, code = addresses[int(rng.choice(9, p=weights))], _one(rng, (200, 200, 404, 500))
        lines.append(f'{address} "GET /{_one(rng, _WORDS)}?id={_one(rng, (200, 404, 500))}" {code}')
        counts[address] += code == status
    count = _number(rng, 2, 4)
    top = sorted(((n, address) for address, n in counts.items() if n), key=lambda pair: (-pair[0], pair[1]))[:count]
    return Problem(
        f"The last field of a line of access.log is the status, the first is the address. Write to top.txt the {count} "
        f"addresses with the most lines of status {status}, as `<lines> <address>` with one space, the most frequent "
        "first, and of equally frequent ones the one first that is first in the order of characters.",
        {"access.log": _text(lines)},
        {"top.txt": _text([f"{n} {address}" for n, address in top])},
        f"awk '$NF == {status} {{n[$1]++}} END {{for (a in n) print n[a], a}}' access.log "
        f"| LC_ALL=C sort -k1,1nr -k2,2 | head -n {count} > top.txt",
    )


def clean_up(rng: np.random.Generator) -> Problem:
    """Some files deleted, all others kept."""
    ending = _one(rng, ("tmp", "bak", "swp"))
    files = {
        f"{path}.{_one(rng, (ending, 'txt', 'txt', f'{ending}.txt'))}": _text([_sentence(rng)] * _number(rng, 0, 2))
        for path in _tree(rng, "work", 12)
    }
    files |= {f"work/old.{ending}": _text([_sentence(rng)]), "work/empty.txt": "", f"keep.{ending}": "keep\n"}
    gone = [
        path for path, text in files.items() if path.startswith("work/") and (path.endswith(f".{ending}") or not text)
    ]
    return Problem(
        f"Below the folder work, delete every file whose name ends in .{ending}, and every file that is empty.",
        files,
        dict.fromkeys(gone),
        f"find work -type f \\( -name '*.{ending}' -o -empty \\) -delete",
    )


def join_parts(rng: np.random.Generator) -> Problem:
    """Parts put together by their numbers."""
    numbers = sorted(_some(rng, range(1, 130), _number(rng, 8, 14)))
    parts = {f"parts/part-{n}.txt": _text([_sentence(rng) for _ in range(_number(rng, 1, 3))]) for n in numbers}
    backwards = bool(rng.random() < 0.5)
    order = sorted(numbers, reverse=backwards)
    return Problem(
        f"Join the files parts/part-<number>.txt, from the {'largest' if backwards else 'smallest'} number to the "
        f"{'smallest' if backwards else 'largest'}, into whole.txt. Before each part, put a line `== <number>`.",
        parts,
        {"whole.txt": "".join(f"== {n}\n{parts[f'parts/part-{n}.txt']}" for n in order)},
        f"ls parts | sed 's/part-//; s/.txt//' | sort -n{'r' if backwards else ''} "
        '| while read -r n; do echo "== $n"; cat "parts/part-$n.txt"; done > whole.txt',
    )


def totals(rng: np.random.Generator) -> Problem:
    """Sums by category."""
    names, chosen = _some(rng, _WORDS, 6), _one(rng, ("in", "out"))
    rows = [(_one(rng, names), _one(rng, ("in", "out")), _number(rng, 1, 500)) for _ in range(_number(rng, 30, 60))]
    sums = Counter[str]()
    for name, direction, amount in rows:
        sums[name] += amount if direction == chosen else 0
    listed = sorted(((name, total) for name, total in sums.items() if total), key=lambda pair: (-pair[1], pair[0]))
    return Problem(
        f"Each line of moves.txt holds an item, in or out, and an amount, separated by semicolons. Write to totals.txt "
        f"for each item that has any line with {chosen}: `<item> <sum of its amounts with {chosen}>`, the largest sum "
        "first, items with equal sums by the alphabet.",
        {"moves.txt": _text([f"{name};{direction};{amount}" for name, direction, amount in rows])},
        {"totals.txt": _text([f"{name} {total}" for name, total in listed])},
        f"awk -F';' '$2 == \"{chosen}\" {{s[$1] += $3}} END {{for (k in s) print k, s[k]}}' moves.txt "
        "| LC_ALL=C sort -k2,2nr -k1,1 > totals.txt",
    )


# Level 3


def join_tables(rng: np.random.Generator) -> Problem:
    """Two tables joined, and summed."""
    ids = _some(rng, range(100, 999), 8)
    names = dict(zip(ids, _some(rng, _NAMES, 8), strict=True))
    orders = [(_number(rng, 1_000, 9_999), _one(rng, ids[:6]), _number(rng, 1, 90)) for _ in range(30)]
    least = _number(rng, 60, 160)
    sums = Counter[str]()
    for _, customer, amount in orders:
        sums[names[customer]] += amount
    listed = [f"{name},{sums[name]}" for name in sorted(sums) if sums[name] >= least]
    return Problem(
        "customers.csv has the columns id,name and orders.csv the columns order,customer,amount, where customer is the "
        f"id of a customer. Write to report.csv, without a header, `name,<sum of amounts>` for every customer whose "
        f"orders sum up to {least} or more, by name from a to z.",
        {
            "customers.csv": _text(["id,name", *(f"{n},{name}" for n, name in names.items())]),
            "orders.csv": _text(["order,customer,amount", *(",".join(map(str, row)) for row in orders)]),
        },
        {"report.csv": _text(listed)},
        "awk -F, 'FNR == 1 {next} NR == FNR {n[$1] = $2; next} {s[n[$2]] += $3} END {for (k in s) if (s[k] >= "
        f'{least}) print k "," s[k]}}\' customers.csv orders.csv | LC_ALL=C sort > report.csv',
    )


def json_to_csv(rng: np.random.Generator) -> Problem:
    """Records of JSON to a table."""
    city = _one(rng, _WORDS)
    records: list[dict[str, Any]] = []
    for _ in range(_number(rng, 15, 30)):
        tags = _some(rng, _WORDS[:6], _number(rng, 0, 3))
        address = {"city": _one(rng, (city, city, *_WORDS)), "zip": str(_number(rng, 1_000, 9_999))}
        records.append({"name": _one(rng, _NAMES), "age": _number(rng, 18, 80), "address": address, "tags": tags})
    kept = [r for r in records if r["address"]["city"] == city]
    kept.sort(key=lambda r: (r["age"], r["name"], r["address"]["zip"], ";".join(r["tags"])))
    program = (
        "import json\n"
        "rows = [json.loads(line) for line in open('people.jsonl')]\n"
        f"rows = [(r['age'], r['name'], r['address']['zip'], ';'.join(r['tags'])) for r in rows "
        f"if r['address']['city'] == '{city}']\n"
        "for age, name, code, tags in sorted(rows):\n    print(name, age, code, tags, sep=',')\n"
    )
    return Problem(
        f"people.jsonl holds one JSON object a line. Write those whose address has the city {city} to people.csv, "
        "without a header, as `name,age,zip,tags` with the tags joined by semicolons (empty if there are none). Sort "
        "by age from young to old, then by name, zip and tags.",
        {"people.jsonl": _text([json.dumps(r) for r in records])},
        {"people.csv": _text([f"{r['name']},{r['age']},{r['address']['zip']},{';'.join(r['tags'])}" for r in kept])},
        f"cat > /tmp/p.py <<'END'\n{program}END\npython3 /tmp/p.py > people.csv",
    )


def log_report(rng: np.random.Generator) -> Problem:
    """A report from the logs of several services."""
    level = _one(rng, _LEVELS[1:])
    files, counts = {}, defaultdict[tuple[str, str], int](int)
    for service in _some(rng, _SERVICES, _number(rng, 3, 5)):
        lines = []
        for _ in range(_number(rng, 15, 30)):
            day, found = f"2024-0{_number(rng, 1, 3)}-1{_number(rng, 0, 3)}", _one(rng, _LEVELS)
            lines.append(f"{day}T0{_number(rng, 0, 9)}:{_number(rng, 10, 59)} [{found}] {_sentence(rng, 3)}")
            counts[day, service] += found == level
        files[f"logs/{service}.log"] = _text(lines)
    listed = [f"{day} {service} {n}" for (day, service), n in sorted(counts.items()) if n]
    return Problem(
        f"The folder logs has one log a service. Write to report.txt, for each day and service with any line of level "
        f"{level}, a line `<day> <service> <number of such lines>` (day as in the logs, the service without .log), by "
        "day, and within a day by service.",
        files,
        {"report.txt": _text(listed)},
        f'for f in logs/*.log; do s=$(basename "$f" .log); grep -F \'[{level}]\' "$f" | cut -dT -f1 | sort | uniq -c '
        "| awk -v s=\"$s\" '{print $2, s, $1}'; done | LC_ALL=C sort > report.txt",
    )


def rename_identifier(rng: np.random.Generator) -> Problem:
    """A name changed in a tree of sources, but not within longer names."""
    old = f"{_one(rng, ('get', 'load', 'make'))}_{_one(rng, _WORDS)}"
    new = f"{_one(rng, ('fetch', 'read', 'build'))}_{_one(rng, _WORDS)}"
    forms = (old, old, f"{old}s", f"re{old}", f"{old}_all", old.upper())
    files: dict[str, str] = {}
    expect: dict[str, str | None] = {}
    for path in _tree(rng, "src", 8):
        ending = _one(rng, ("py", "py", "txt"))
        lines = [[_one(rng, forms) for _ in range(2)] for _ in range(4)]
        files[f"{path}.{ending}"] = _text([f"x = {a}({b})" for a, b in lines])
        if ending == "py":
            renamed = ([new if name == old else name for name in line] for line in lines)
            expect[f"{path}.py"] = _text([f"x = {a}({b})" for a, b in renamed])
    return Problem(
        f"In all .py files below src, rename the identifier {old} to {new}. Longer identifiers that contain it, and "
        "other files, stay as they are.",
        files,
        expect,
        f"find src -name '*.py' -exec sed -i 's/\\b{old}\\b/{new}/g' {{}} +",
    )


def split_table(rng: np.random.Generator) -> Problem:
    """A table cut into one file for each key."""
    keys, column = _some(rng, _WORDS, 5), _number(rng, 1, 3)
    rows = []
    for _ in range(_number(rng, 20, 40)):
        row = [_one(rng, _NAMES), str(_number(rng, 1, 99))]
        row.insert(column - 1, _one(rng, keys))
        rows.append(row)
    header = ["name", "amount"]
    header.insert(column - 1, "item")
    found: dict[str, list[str]] = defaultdict(lambda: [",".join(header)])
    for row in rows:
        found[f"items/{row[column - 1]}.csv"].append(",".join(row))
    return Problem(
        "Cut all.csv into one file for each item: items/<item>.csv has the header of all.csv, then the rows with that "
        "item, unchanged and in their order.",
        {"all.csv": _text([",".join(header), *(",".join(row) for row in rows)])},
        {path: _text(lines) for path, lines in found.items()},
        'mkdir -p items; awk -F, \'NR == 1 {h = $0; next} {f = "items/" $' + str(column) + ' ".csv"; '
        "if (!(f in seen)) {print h > f; seen[f] = 1} print > f}' all.csv",
    )


KINDS: dict[int, tuple[Kind, ...]] = {
    1: (count_level, find_marker, sort_lines, rename_endings, set_option),
    2: (filter_rows, top_addresses, clean_up, join_parts, totals),
    3: (join_tables, json_to_csv, log_report, rename_identifier, split_table),
}
