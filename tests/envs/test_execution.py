"""Whatever a tool does, its call is answered in time, in order, and nothing is left running."""

import asyncio
import functools
import gc
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import pydantic
import pytest

from toolgym.envs import EnvironmentFailure, InvalidToolCall, ToolCall, ToolError, Toolset, tool
from toolgym.envs.execution import CallStatus, Executor, ToolRunner, as_text, cut_middle
from toolgym.envs.waiting import StrayExit

release = threading.Event()


def ok(x: int) -> int:
    return x


async def ok_async(x: int) -> str:
    await asyncio.sleep(0)
    return f"async {x}"


def raises() -> None:
    raise ValueError("seven")


def told() -> None:
    raise ToolError("mend this")


def exits() -> None:
    sys.exit(3)


async def exits_async() -> None:
    sys.exit(3)


def interrupts() -> None:
    raise KeyboardInterrupt


def stops() -> None:
    raise StopIteration


async def cancels() -> None:
    raise asyncio.CancelledError


def late() -> None:
    raise TimeoutError("of its own")


@tool(timeout=0.05)
def hangs() -> str:
    release.wait(20)
    return "too late"


@tool(timeout=0.05)
async def sleeps() -> None:
    await asyncio.sleep(60)


@tool(timeout=0.05)
async def clings() -> None:
    for _ in range(3):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


began = asyncio.Event()


async def forever() -> None:
    began.set()
    await asyncio.sleep(600)


def floods() -> str:
    return "x" * 50_000_000


def breaks() -> None:
    raise EnvironmentFailure("the box died", kind="box_died")


class Odd(BaseException):
    def __str__(self) -> str:
        raise Odd


async def odd() -> None:
    raise Odd


def picky(key: Annotated[str, pydantic.AfterValidator(lambda key: {"a": 1}[key])]) -> int:
    return 1


def changes(items: Any) -> int:
    items.append("ADDED")
    return len(items)


def endless() -> Any:
    return (k for k in iter(int, 1))


class Mute:
    def __str__(self) -> str:
        raise ValueError("no text")


def mute() -> Any:
    return Mute()


@functools.wraps(ok_async)
def wrapped(*args: Any, **kwargs: Any) -> Any:
    return ok_async(*args, **kwargs)


wrapped.__name__ = "wrapped"


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError


def speechless() -> None:
    raise Speechless


TOOLS: tuple[Callable[..., Any], ...] = (
    ok, ok_async, raises, told, exits, exits_async, interrupts, stops, cancels, late, hangs, sleeps, clings, floods,
    breaks, forever, odd, picky, changes, endless, mute, wrapped, speechless,
)  # fmt: skip


def run(
    *calls: ToolCall | InvalidToolCall, then: Callable[[ToolRunner], Coroutine[Any, Any, Any]] | None = None
) -> Any:
    async def main() -> Any:
        executor = Executor()
        runner = ToolRunner(Toolset(TOOLS), executor, timeout=10, max_output_chars=1_000)
        try:
            return await runner.run(calls)
        finally:
            release.set()
            await executor.aclose()
            release.clear()

    return asyncio.run(main())


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, id=f"id-{name}")


@pytest.mark.parametrize(
    ("made", "status", "text"),
    [
        (call("ok", x=7), CallStatus.OK, "7"),
        (call("ok_async", x=7), CallStatus.OK, "async 7"),
        (call("ok", x="seven"), CallStatus.BAD_ARGUMENTS, "x: Input should be a valid integer"),
        (call("okay"), CallStatus.UNKNOWN_TOOL, "No tool is named 'okay'. Tools: ok, ok_async"),
        (InvalidToolCall("{oops", "not JSON.", id="id"), CallStatus.MALFORMED, "not JSON.\nYour call was: {oops"),
        (call("raises"), CallStatus.RAISED, "Error: ValueError: seven"),
        (call("told"), CallStatus.RAISED, "Error: mend this"),
        (call("exits"), CallStatus.RAISED, "SystemExit: 3"),
        (call("exits_async"), CallStatus.RAISED, "SystemExit: 3"),
        (call("interrupts"), CallStatus.RAISED, "KeyboardInterrupt"),
        (call("stops"), CallStatus.RAISED, "StopIteration"),
        (call("cancels"), CallStatus.RAISED, "cancelled, though nobody had asked for it"),
        (call("endless"), CallStatus.RAISED, "the tool returned a generator, which may have no end"),
        (call("mute"), CallStatus.RAISED, "Error: ValueError: no text"),
        (call("wrapped", x=7), CallStatus.OK, "async 7"),
        (call("odd"), CallStatus.RAISED, "Error: Odd"),
        (call("picky", key="zz"), CallStatus.BAD_ARGUMENTS, "Invalid arguments for picky: KeyError: 'zz'"),
        (call("speechless"), CallStatus.RAISED, "Error: Speechless"),
        (call("late"), CallStatus.RAISED, "Error: TimeoutError: of its own"),
        (call("hangs"), CallStatus.TIMEOUT, "hangs timed out after 0.05 seconds"),
        (call("sleeps"), CallStatus.TIMEOUT, "sleeps timed out after 0.05 seconds"),
        (call("clings"), CallStatus.TIMEOUT, "clings timed out after 0.05 seconds"),
        (call("floods"), CallStatus.OK, "[... 49999000 characters cut ...]"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_call_is_answered_with_what_happened(
    made: ToolCall | InvalidToolCall, status: CallStatus, text: str
) -> None:
    (result,) = run(made)
    assert result.status is status
    assert text in result.message.content
    assert result.message.tool_call_id == made.id
    assert len(result.message.content) < 1_100


def test_calls_of_one_message_run_together_and_are_answered_in_their_order() -> None:
    gate = threading.Barrier(3, timeout=10)

    def meets(x: int) -> int:
        gate.wait()  # passes only if all three run at once
        return x

    async def main() -> list[str]:
        executor = Executor()
        runner = ToolRunner(Toolset([meets]), executor, timeout=10, max_output_chars=100)
        results = await runner.run([call("meets", x=x) for x in (3, 1, 2)])
        await executor.aclose()
        return [result.message.content for result in results]

    assert asyncio.run(main()) == ["3", "1", "2"]


def test_one_bad_call_does_not_touch_the_others() -> None:
    results = run(call("ok", x=1), call("exits"), call("ok_async", x=2), call("hangs"), call("ok", x=3))
    assert [result.status for result in results] == ["ok", "raised", "ok", "timeout", "ok"]


def test_a_tool_that_changes_its_arguments_does_not_change_the_record() -> None:
    made = call("changes", items=["a"])
    (result,) = run(made)
    assert result.message.content == "2"
    assert made.arguments == {"items": ["a"]}


def test_closing_while_a_tool_runs_is_a_failure_not_the_models_error() -> None:
    async def main() -> None:
        executor = Executor()
        runner = ToolRunner(Toolset(TOOLS), executor, timeout=30, max_output_chars=100)
        running = asyncio.create_task(runner.run([ToolCall("forever", {})]))
        await began.wait()
        await executor.aclose()
        with pytest.raises(EnvironmentFailure, match="closed while tool forever ran") as caught:
            await running
        assert caught.value.kind == "closed"

    asyncio.run(main())


def test_a_call_that_is_cancelled_before_it_has_begun_leaves_nothing_behind() -> None:
    async def main() -> None:
        calling = asyncio.create_task(Executor().call(forever, "tool forever", 30))
        await asyncio.sleep(0)  # it has been made by now, and not begun
        for task in asyncio.all_tasks() - {asyncio.current_task(), calling}:
            task.cancel()
        with pytest.raises(StrayExit, match="cancelled"):
            await calling

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert [str(warning.message) for warning in said] == []


def test_a_failure_of_the_environment_is_not_told_to_the_model() -> None:
    with pytest.raises(EnvironmentFailure, match="the box died") as caught:
        run(call("ok", x=1), call("breaks"))
    assert caught.value.kind == "box_died"


def test_nothing_is_left_running() -> None:
    before = set(threading.enumerate())
    run(call("ok", x=1), call("hangs"), call("sleeps"), call("clings"), call("raises"))
    assert set(threading.enumerate()) == before


def test_a_tool_that_never_returns_is_named_at_close() -> None:
    stop = threading.Event()

    @tool(timeout=0.01)
    def stubborn() -> None:
        stop.wait(30)

    async def main() -> None:
        executor = Executor()
        runner = ToolRunner(Toolset([stubborn]), executor, timeout=1, max_output_chars=100)
        await runner.run([call("stubborn")])
        assert executor.busy == ["tool stubborn"]
        await executor.aclose(grace=0.05)

    with pytest.warns(ResourceWarning, match="tool stubborn"):
        asyncio.run(main())
    stop.set()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        (None, "null"),
        (1.5, "1.5"),
        (object, "<class 'object'>"),
        ("half \ud800", "half ?"),
    ],
)
def test_what_a_tool_returns_becomes_text(value: Any, text: str) -> None:
    assert as_text(value) == text


@pytest.mark.parametrize("limit", [1, 2, 3, 9])
def test_over_long_text_keeps_head_and_tail_and_says_what_is_missing(limit: int) -> None:
    cut = cut_middle("0123456789", limit)
    head, marker, tail = cut.split("\n")
    assert head + tail == "0123456789"[: limit // 2] + "0123456789"[10 - (limit - limit // 2) :]
    assert marker == f"[... {10 - limit} characters cut ...]"
    assert cut_middle("0123456789", 10) == "0123456789"
