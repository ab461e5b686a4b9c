"""One chat format serves many threads, and leaves the event loop alone."""

import asyncio
import contextlib
import gc
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from toolgym.agents.chat import ChatFormat, TemplateRefused, load_chat_format
from toolgym.agents.chat_threads import ChatThreads
from toolgym.agents.tiny import TINY_MODEL
from toolgym.envs import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage
from toolgym.envs.catalog.ledger import LedgerEnv
from toolgym.envs.waiting import Overdue, StrayExit

TOOLS = LedgerEnv().tools.schemas


def work(chat: ChatFormat, number: int) -> tuple[list[int], list[int], AssistantMessage, str]:
    """One turn of many shapes: opened, said, answered, read and decoded."""
    prompt = chat.open([SystemMessage(f"s{number % 5}"), UserMessage(f"u{number % 7} <|im_end|>")], TOOLS)
    said = AssistantMessage("", tuple(ToolCall("balance", {"account": f"a{k}"}) for k in range(1 + number % 3)))
    sampled = chat.write(said)
    sampled = sampled[: len(sampled) - number % 4]
    answers = [
        ToolMessage(f" {number % 11} \n é " * (1 + number % 2), f"c{k}", "balance") for k in range(1 + number % 3)
    ]
    delta = chat.extend(prompt, sampled, answers, TOOLS)
    return prompt, delta, chat.parse(sampled, prompt, TOOLS), chat.decode([*prompt, *sampled, *delta])


@pytest.mark.parametrize("family", [None, "qwen3"])
def test_eight_threads_get_the_same_results_in_10_000_calls(family: str | None) -> None:
    chat = load_chat_format(TINY_MODEL, family=family)
    fresh = load_chat_format(TINY_MODEL, family=family)
    expected = [work(fresh, number) for number in range(250)]
    with ThreadPoolExecutor(8) as pool:
        # Five calls of the format in each: 10,000 in all.
        found = list(pool.map(lambda number: work(chat, number % 250), range(2_000)))
    assert all(result == expected[number % 250] for number, result in enumerate(found))


def test_work_is_done_in_other_threads_and_raises_as_it_does() -> None:
    threads = ChatThreads(2)

    def refuse() -> None:
        raise TemplateRefused("no")

    async def use() -> set[str]:
        with pytest.raises(TemplateRefused, match="no"):
            await threads.run(refuse)
        names = await asyncio.gather(*(threads.run(lambda: threading.current_thread().name) for _ in range(20)))
        return set(names)

    names = asyncio.run(use())
    threads.close()
    threads.close()
    assert all(name.startswith("toolgym chat") for name in names)
    assert 1 <= len(names) <= 2


class Refused(Exception):
    """What a piece of work raises, with its number."""


@contextlib.contextmanager
def closing(threads: ChatThreads) -> Any:
    try:
        yield threads
    finally:
        threads.close()


async def behind_a_gate(threads: ChatThreads, count: int, then: Callable[[], Awaitable[Any]]) -> Any:
    """Keep ``count`` threads busy until something has been done."""
    gate = threading.Event()
    blocked = [asyncio.ensure_future(threads.run(gate.wait)) for _ in range(count)]
    await asyncio.sleep(0)  # they are handed over first
    try:
        return await then()
    finally:
        gate.set()
        await asyncio.gather(*blocked)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["returns", "raises", "cancelled"]), max_size=120), st.integers(1, 3))
def test_each_piece_of_work_has_its_own_end_whatever_becomes_of_the_others(fates: list[str], count: int) -> None:
    began: list[int] = []

    def do(number: int) -> int:
        began.append(number)
        if fates[number] == "raises":
            raise Refused(number)
        return number

    async def main(threads: ChatThreads) -> list[Any]:
        async def start() -> list[asyncio.Task[int]]:
            asked = [asyncio.ensure_future(threads.run(partial(do, n))) for n in range(len(fates))]
            await asyncio.sleep(0)  # all of them wait for a thread now
            for fate, one in zip(fates, asked, strict=True):
                if fate == "cancelled":
                    one.cancel()
            await asyncio.sleep(0)  # and those that were cancelled have heard of it
            return asked

        return await asyncio.gather(*await behind_a_gate(threads, count, start), return_exceptions=True)

    with closing(ChatThreads(count)) as threads:
        ends = asyncio.run(main(threads))
    for number, (fate, end) in enumerate(zip(fates, ends, strict=True)):
        if fate == "returns":
            assert end == number
        elif fate == "raises":
            assert isinstance(end, Refused)
            assert end.args == (number,)
        else:
            assert isinstance(end, asyncio.CancelledError)
    expected = [number for number, fate in enumerate(fates) if fate != "cancelled"]
    assert (began if count == 1 else sorted(began)) == expected  # what was cancelled before never began


def test_many_loops_share_the_threads_and_each_gets_its_own_results() -> None:
    with closing(ChatThreads(2)) as threads:

        def one_loop(number: int) -> list[tuple[int, int]]:
            async def main() -> list[tuple[int, int]]:
                async def episode(member: int) -> list[tuple[int, int]]:
                    return [await threads.run(lambda m=member: (number, m)) for _ in range(5)]

                return list(chain.from_iterable(await asyncio.gather(*map(episode, range(200)))))

            return asyncio.run(main())

        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(one_loop, range(6)))
    for number, results in enumerate(found):
        assert Counter(results) == {(number, member): 5 for member in range(200)}


def test_few_coroutines_wake_in_one_iteration_of_the_loop_however_many_results_there_are() -> None:
    async def main(threads: ChatThreads) -> Counter[int]:
        iteration, woken, over = 0, Counter[int](), False

        def tick() -> None:
            nonlocal iteration
            iteration += 1
            if not over:
                asyncio.get_running_loop().call_soon(tick)

        last = threading.Event()

        async def episode(number: int) -> None:
            await threads.run(last.set if number == 999 else lambda: None)
            woken[iteration] += 1

        running = [asyncio.ensure_future(episode(number)) for number in range(1_000)]
        await asyncio.sleep(0)
        last.wait(30)  # the loop stands still until all results are there
        tick()
        await asyncio.gather(*running)
        over = True
        return woken

    with closing(ChatThreads(1)) as threads:
        woken = asyncio.run(main(threads))
    assert woken.total() == 1_000
    assert max(woken.values()) <= 32


def test_a_result_does_not_wait_for_slow_work_behind_it() -> None:
    async def main(threads: ChatThreads) -> str:
        gate = threading.Event()
        quick = asyncio.ensure_future(threads.run(lambda: "here"))
        slow = asyncio.ensure_future(threads.run(lambda: gate.wait(30)))
        said = await quick
        assert not slow.done()
        gate.set()
        assert await slow
        return said

    with closing(ChatThreads(1)) as threads:
        assert asyncio.run(main(threads)) == "here"


def test_work_that_wants_to_exit_ends_neither_thread_nor_loop() -> None:
    async def main(threads: ChatThreads) -> int:
        with pytest.raises(StrayExit, match="SystemExit: 3"):
            await threads.run(lambda: sys.exit(3))
        return await threads.run(lambda: 7)

    with closing(ChatThreads(1)) as threads:
        assert asyncio.run(main(threads)) == 7


def test_a_loop_that_ends_with_work_under_way_does_not_touch_others() -> None:
    gate, began = threading.Event(), threading.Event()

    def slow() -> bool:
        began.set()
        return gate.wait(30)

    async def leaves(threads: ChatThreads) -> None:
        asyncio.ensure_future(threads.run(slow))  # noqa: RUF006 - nobody waits for it
        await asyncio.sleep(0)
        began.wait(30)

    async def stays(threads: ChatThreads) -> int:
        return await threads.run(lambda: 7)

    with closing(ChatThreads(1)) as threads:
        asyncio.run(leaves(threads))
        gate.set()
        assert asyncio.run(stays(threads)) == 7


def test_closed_threads_refuse_new_work_and_finish_what_they_have() -> None:
    async def main() -> list[bool]:
        threads, gate = ChatThreads(1), threading.Event()
        running = [asyncio.ensure_future(threads.run(partial(gate.wait, 30))) for _ in range(3)]
        await asyncio.sleep(0)
        threads.close()
        with pytest.raises(RuntimeError, match="have been closed"):
            await threads.run(lambda: 7)
        gate.set()
        return await asyncio.gather(*running)

    assert asyncio.run(main()) == [True] * 3


def test_threads_that_are_forgotten_end() -> None:
    before = set(threading.enumerate())
    threads = ChatThreads(2)
    asyncio.run(asyncio.wait_for(threads.run(lambda: 7), 30))
    (started,) = set(threading.enumerate()) - before
    forgotten = weakref.ref(threads)
    del threads
    gc.collect()
    assert forgotten() is None
    started.join(30)
    assert not started.is_alive()


def test_work_that_takes_too_long_is_not_waited_for() -> None:
    threads, free = ChatThreads(1), threading.Event()

    async def main() -> None:
        with pytest.raises(Overdue):
            await threads.run(free.wait, timeout=0.05)
        with pytest.raises(Overdue):
            await threads.run(lambda: None, timeout=0.05)  # behind it
        free.set()
        assert await threads.run(lambda: 7, timeout=30.0) == 7

    asyncio.run(main())
    threads.close()


def test_a_forked_process_is_told_that_it_has_no_such_threads() -> None:
    threads = ChatThreads(2)
    assert asyncio.run(threads.run(lambda: 7)) == 7
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(threads.run(lambda: 7))
        except RuntimeError as error:
            os._exit(0 if "forked process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    threads.close()
