"""Prints what things cost beside their goals, and writes them to results.md. Run it on an idle machine: make bench.

By name it runs those parts alone, and writes nothing: ``python tests/benchmarks/run.py makespan overhead``.
"""

import platform
import sys
from pathlib import Path

import chat_turns
import engine_rate
import imports
import makespan
import overhead
import sandbox_calls
import vector_steps
from figures import table

RESULTS = Path(__file__).with_name("results.md")
PARTS = {
    "imports": imports,
    "vector": vector_steps,
    "chat": chat_turns,
    "overhead": overhead,
    "makespan": makespan,
    "sandbox": sandbox_calls,
    "engine": engine_rate,
}


def main(names: list[str]) -> None:
    """Measure and print; write it down where everything was measured."""
    if unknown := [name for name in names if name not in PARTS]:
        sys.exit(f"no part is named {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    rows = [figure for name in names or PARTS for figure in PARTS[name].figures()]
    print(table(rows))
    if names:
        return
    head = f"# Benchmark results\n\nBy `make bench`, Python {platform.python_version()}, 2 cores. Trust the ratios.\n\n"
    notes = [part.NOTES for part in PARTS.values() if hasattr(part, "NOTES")]
    what = "What limits a figure that misses its goal, and what was measured."
    RESULTS.write_text(f"{head}{table(rows)}\n\n" + "\n\n".join([what, *notes]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
