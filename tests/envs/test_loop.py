"""The thread with an event loop: it runs, it is interrupted, and it ends."""

import asyncio
import contextlib
import os
import sys
import threading

import pytest

from toolgym.envs import ToolgymError
from toolgym.envs.loop import LoopThread
from toolgym.envs.waiting import Overdue, within


async def name() -> str:
    return threading.current_thread().name


def test_it_runs_from_threads_and_from_other_loops() -> None:
    loop = LoopThread("here")
    assert loop.run(name()) == "here"

    async def elsewhere() -> str:
        return await loop.call(name())

    assert asyncio.run(elsewhere()) == "here"
    loop.close()


def test_it_refuses_to_wait_for_itself() -> None:
    loop = LoopThread("here")

    async def inside() -> None:
        loop.run(name())

    with pytest.raises(ToolgymError, match="called from within here"):
        loop.run(inside())
    loop.close()


def test_closing_cancels_what_runs_and_ends_the_thread() -> None:
    before = set(threading.enumerate())
    loop = LoopThread("here")
    running = loop.submit(asyncio.sleep(60))
    loop.close()
    loop.close()
    assert running.cancelled()
    assert set(threading.enumerate()) == before
    with pytest.raises(ToolgymError, match="here is closed"):
        loop.run(name())


def test_waiting_ends_even_if_the_work_swallows_its_cancellation() -> None:
    async def clings() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            raise ValueError("nobody hears this") from None

    async def main() -> None:
        with pytest.raises(Overdue):
            await within(clings(), 0.01)
        assert await within(asyncio.sleep(0, "in time"), 60) == "in time"

    asyncio.run(main())


async def stray() -> None:
    sys.exit(3)


async def leaves_strays() -> None:
    loop = asyncio.get_running_loop()
    loop.call_soon(sys.exit)
    loop.call_soon(loop.stop)
    await asyncio.sleep(0)
    await asyncio.gather(loop.create_task(stray()), return_exceptions=True)


def test_what_tools_leave_on_the_loop_cannot_end_it_for_others() -> None:
    loop = LoopThread("here")
    with contextlib.suppress(BaseException):
        loop.run(leaves_strays(), timeout=20)
    assert loop.run(name()) == "here"
    loop.close()


def test_a_forked_process_is_told_that_the_thread_is_not_there() -> None:
    loop = LoopThread("here")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            loop.run(name())
        except ToolgymError as error:
            os.write(write, str(error).encode())
        loop.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert b"does not run in a forked process" in os.read(read, 1_000)
    loop.close()
