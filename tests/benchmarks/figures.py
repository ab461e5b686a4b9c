"""A measurement, and how measurements are taken and shown."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One measurement."""

    what: str
    value: str
    goal: str = ""


def best(work: Callable[[], object], rounds: int = 5) -> float:
    """The least wall time of several rounds, in seconds."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def table(figures: Sequence[Figure]) -> str:
    """The figures as a table in Markdown."""
    rows = [f"| {f.what} | {f.value} | {f.goal} |" for f in figures]
    return "\n".join(["| what | measured | goal |", "|---|---|---|", *rows])
