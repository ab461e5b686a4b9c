"""The gate before an engine: who closes it sees the last one leave, and nobody waits longer than was said."""

import asyncio

import pytest

from toolgym.agents.engine_gate import EngineGate
from toolgym.envs.waiting import Overdue


def test_what_comes_after_the_gate_has_closed_waits_until_it_opens() -> None:
    async def main() -> list[str]:
        gate, told = EngineGate(), list[str]()
        leave = asyncio.Event()

        async def pass_through(who: str) -> None:
            async with gate.passing(2, 60.0):
                told.append(f"{who} is in")
                await leave.wait()
            told.append(f"{who} is out")

        first = asyncio.create_task(pass_through("first"))
        await asyncio.sleep(0)
        gate.close()
        second = asyncio.create_task(pass_through("second"))
        await asyncio.sleep(0)
        assert (gate.inside, gate.waiting, len(gate.names), gate.empty.is_set()) == (2, 2, 1, False)
        leave.set()
        await first
        assert (gate.inside, gate.waiting, gate.names, gate.empty.is_set()) == (0, 2, (), True)
        told.append("open")
        gate.open()
        await second
        return told

    assert asyncio.run(main()) == ["first is in", "first is out", "open", "second is in", "second is out"]


def test_a_gate_that_opens_and_closes_at_once_lets_nobody_slip_in() -> None:
    async def main() -> None:
        gate = EngineGate()
        gate.close()

        async def pass_through() -> None:
            async with gate.passing(1, 60.0):
                pass

        waiting = asyncio.create_task(pass_through())
        for _ in range(5):
            await asyncio.sleep(0)
        gate.open()
        gate.close()
        for _ in range(10):
            await asyncio.sleep(0)
        assert (gate.inside, gate.waiting, waiting.done()) == (0, 1, False)
        gate.open()
        await waiting

    asyncio.run(main())


def test_waiting_ends_in_time_or_when_it_is_cancelled_and_counts_no_more() -> None:
    async def main() -> None:
        gate = EngineGate()
        gate.close()

        async def pass_through(seconds: float) -> None:
            async with gate.passing(3, seconds):
                pass

        with pytest.raises(Overdue):
            await pass_through(0.01)
        waiting = asyncio.create_task(pass_through(60.0))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (gate.inside, gate.waiting) == (0, 0)

    asyncio.run(main())


def test_who_fails_inside_leaves_all_the_same() -> None:
    async def main() -> None:
        gate = EngineGate()
        with pytest.raises(ZeroDivisionError):
            async with gate.passing(1, 1.0):
                raise ZeroDivisionError
        assert gate.empty.is_set()
        assert gate.inside == 0

    asyncio.run(main())
