"""What calls of a sandbox cost, beside ``docker exec`` and ``docker run`` on the same engine."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from toolgym.envs.sandbox.docker_backend import DockerBackend
from toolgym.envs.sandbox.limits import MIB, SandboxLimits
from toolgym.envs.sandbox.sandbox import Sandbox, SandboxPool

_SNIPPET = "print(6 * 7)"
# Small, so that 32 of them fit a small machine.
LIMITS = SandboxLimits(memory=256 * MIB, workspace=32 * MIB, tmp=32 * MIB, shm=8 * MIB, file_size=32 * MIB)


@dataclass(frozen=True, slots=True)
class Latency:
    """Figures of one kind of call.

    Attributes:
        what: the kind.
        p50, p99: seconds.
        goal: what p50 should be at most, or None.
    """

    what: str
    p50: float
    p99: float
    goal: float | None = None


@dataclass(frozen=True, slots=True)
class Rate:
    """Calls a second.

    Attributes:
        what: the kind of call.
        boxes: how many boxes serve it.
        value: calls a second.
        goal: what it should be at least, or None.
    """

    what: str
    boxes: int
    value: float
    goal: float | None = None


def measure_calls(pool: SandboxPool, rounds: int = 300) -> Iterator[Latency]:
    """One caller, one box: stateless calls, session calls, resets; and calls that use what the template preloads."""
    sandbox = pool.sandbox()
    sync = sandbox.sync
    yield _timed("stateless call", lambda: sync.run(_SNIPPET), rounds, goal=0.003)
    yield _timed("session call", lambda: sync.exec(_SNIPPET), rounds, goal=0.000_5)
    yield _timed("reset in place", sync.reset, rounds)
    yield _timed("stateless call, numpy", lambda: sync.run("import numpy\n" + _SNIPPET), rounds // 3)
    yield _timed("stateless call, sympy", lambda: sync.run("import sympy\n" + _SNIPPET), rounds // 3)
    yield _timed("shell call", lambda: sync.shell("echo 42"), rounds // 3)
    sync.release()


async def measure_rate(pool: SandboxPool, boxes: int, seconds: float = 3.0) -> Iterator[Rate]:
    """Calls a second with twice as many callers as boxes, stateless and in sessions."""
    lenders = [pool.sandbox(lease="call") for _ in range(2 * boxes)]
    holders = [pool.sandbox() for _ in range(boxes)]
    await asyncio.gather(*(holder.exec("1") for holder in holders))  # all boxes are up
    session = await _count(holders, lambda box: box.exec(_SNIPPET), seconds)
    await asyncio.gather(*(holder.release() for holder in holders))
    stateless = await _count(lenders, lambda box: box.run(_SNIPPET), seconds)
    return iter((Rate("stateless", boxes, stateless, 300.0 if boxes > 1 else None), Rate("session", boxes, session)))


def measure_start(backend: DockerBackend, rounds: int = 5) -> Iterator[Latency]:
    """A new box, from nothing to ready; and what the engine's own ways cost for the same snippet."""

    async def start() -> None:
        await (await backend.create()).close()

    with asyncio.Runner() as runner:
        yield _timed("box start and removal", lambda: runner.run(start()), rounds)
        tag = runner.run(backend.image())
        api = backend.engine.api
        made = api.create_container(tag, ["sleep", "600"], network_disabled=True, labels={"toolgym.bench": "1"})
        try:
            api.start(made)

            def execute() -> None:
                call = api.exec_create(made, ["python3", "-I", "-c", _SNIPPET])
                assert api.exec_start(call["Id"]).strip() == b"42"

            yield _timed("docker exec (python3 -c)", execute, 4 * rounds)
        finally:
            api.remove_container(made, force=True)

        def run() -> None:
            once = api.create_container(tag, ["python3", "-I", "-c", _SNIPPET], network_disabled=True)
            try:
                api.start(once)
                api.wait(once)
            finally:
                api.remove_container(once, force=True)

        yield _timed("docker run (python3 -c)", run, rounds)


def measure_refill(pool: SandboxPool) -> float:
    """Seconds from the loss of a box until its successor has run something."""
    sandbox = pool.sandbox()
    sandbox.sync.run(_SNIPPET)
    began = time.perf_counter()
    sandbox.sync.run("import os\nwhile True: os.write(1, bytes(1 << 16))")  # a flood: the box is replaced
    sandbox.sync.release()
    sandbox.sync.run(_SNIPPET)
    elapsed = time.perf_counter() - began
    sandbox.sync.release()
    return elapsed


def _timed(what: str, call: Callable[[], object], rounds: int, goal: float | None = None) -> Latency:
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    times.sort()
    return Latency(what, statistics.median(times), times[min(rounds - 1, int(rounds * 0.99))], goal)


async def _count(boxes: list[Sandbox], call: Callable[[Sandbox], Awaitable[object]], seconds: float) -> float:
    ended = time.perf_counter() + seconds
    count = 0

    async def work(box: Sandbox) -> None:
        nonlocal count
        while time.perf_counter() < ended:
            await call(box)
            count += 1

    began = time.perf_counter()
    await asyncio.gather(*map(work, boxes))
    return count / (time.perf_counter() - began)
