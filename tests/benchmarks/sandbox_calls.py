"""Calls of the Docker sandbox, beside what the engine's own ways cost for the same snippet."""

import asyncio

from figures import Figure

from toolgym.envs.sandbox import latency
from toolgym.envs.sandbox.docker_backend import DockerBackend
from toolgym.envs.sandbox.sandbox import SandboxPool

NOTES = """\
Sandbox: a question and its answer alone cost 0.3 ms on the pool's loop and 0.5 ms for a blocking caller (the engine
copies the stream twice, and there are two changes of thread); each call also sends a word that its code has begun, so
that a box that dies before is replaced without a failure, and reads memory and CPU from /proc. A stateless call is a
fork of a template that has seen no request (made ahead of time), which gives up its rights under Landlock: about 1.5 ms
of CPU. On 2 cores that CPU, with the engine's and the client's, bounds the rates; with each stateless call its box is
pinged before and reset after. Stateless rates fall to a quarter now and then, in some pools and not in others, in a
process that has imported the rest of Toolgym; in one that holds nothing else they do not: not explained yet."""


def figures() -> list[Figure]:
    """One call at a time, many boxes at once, and the start of a box."""
    rows = []
    calls = {}
    with SandboxPool("docker", size=1, limits=latency.LIMITS) as pool:
        for entry in latency.measure_calls(pool):
            calls[entry.what] = entry.p50
            goal = "" if entry.goal is None else f"{entry.goal * 1e3:g} ms"
            rows.append(Figure(f"sandbox: {entry.what}", _milliseconds(entry), goal))
        rows.append(Figure("sandbox: a flooded box replaced", f"{latency.measure_refill(pool) * 1e3:.0f} ms"))
    for boxes in (1, 8, 32):
        with SandboxPool("docker", size=boxes, limits=latency.LIMITS) as pool:  # a larger one would grow meanwhile
            for rate in asyncio.run(latency.measure_rate(pool, boxes)):
                goal = "" if rate.goal is None else f"{rate.goal:g} a second"
                what = f"sandbox: {rate.what} calls, {rate.boxes} boxes"
                rows.append(Figure(what, f"{rate.value:,.0f} a second", goal))
    for entry in latency.measure_start(DockerBackend(latency.LIMITS)):
        times = entry.p50 / calls["stateless call"]
        goal = "20x a stateless call" if "exec" in entry.what else ""
        rows.append(Figure(f"sandbox: {entry.what}", f"{_milliseconds(entry)}, {times:.0f}x a stateless call", goal))
    return rows


def _milliseconds(entry: latency.Latency) -> str:
    return f"p50 {entry.p50 * 1e3:.2f} ms, p99 {entry.p99 * 1e3:.2f} ms"
