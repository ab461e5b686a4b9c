"""Running the tool calls of one message: together, each within its time, answered in their order.

Whatever the model got wrong comes back to it as a tool message; only an `EnvironmentFailure` passes through.
"""

import asyncio
import contextlib
import contextvars
import threading
import warnings
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pydantic_core

from toolgym.envs.errors import EnvironmentFailure, ToolError
from toolgym.envs.messages import InvalidToolCall, ToolCall, ToolMessage
from toolgym.envs.tools import Tool, Toolset
from toolgym.envs.waiting import Overdue, within


class CallStatus(StrEnum):
    """How one tool call ended."""

    OK = "ok"
    INVALID_CALL = "invalid_call"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    RAISED = "raised"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class CallResult:
    """The answer to one call.

    Attributes:
        message: what the model is told.
        status: how the call ended.
        ends_episode: whether the tool, having succeeded, ends the episode.
        cut_chars: how many characters of over-long output were dropped.
    """

    message: ToolMessage
    status: CallStatus
    ends_episode: bool = False
    cut_chars: int = 0


class ToolRunner:
    """Runs the tools of one environment and keeps account of what is still running.

    Args:
        tools: the tools.
        timeout: seconds that a call may take where the tool itself does not say.
        max_output_chars: longer output is cut in the middle, with a marker that says how much is missing.
    """

    def __init__(self, tools: Toolset, *, timeout: float, max_output_chars: int) -> None:
        self._tools, self._timeout, self._max_chars = tools, timeout, max_output_chars
        self._threads: dict[threading.Thread, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, calls: Sequence[ToolCall | InvalidToolCall]) -> list[CallResult]:
        """Answer all calls of one message, run together. Bounded by the longest time-out among them.

        Coroutine tools start in the order of their calls, so those that never await act in that order.

        Raises:
            EnvironmentFailure: raised by a tool; the other calls of the message are not waited for.
        """
        running = [asyncio.ensure_future(self._answer(call)) for call in calls]
        try:
            return list(await asyncio.gather(*running))
        finally:
            for task in running:
                task.cancel()

    async def aclose(self, grace: float = 1.0) -> None:
        """Cancel what still runs and wait at most ``grace`` seconds for it, then name what could not be stopped."""
        for task in self._tasks:
            task.cancel()
        waiting = {*self._tasks, *self._threads.values()}
        if waiting:
            await asyncio.wait(waiting, timeout=grace)
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        stuck += [task.get_name() for task in self._tasks if not task.done()]
        if stuck:
            warnings.warn(f"tools still running at close, they ignore cancellation: {stuck}", ResourceWarning, 2)

    async def _answer(self, call: ToolCall | InvalidToolCall) -> CallResult:
        if isinstance(call, InvalidToolCall):
            return self._error(call, CallStatus.INVALID_CALL, f"{call.error}\nYour call was: {call.raw}")
        found = self._tools.get(call.name)
        if found is None:
            known = ", ".join(self._tools) or "none"
            return self._error(call, CallStatus.UNKNOWN_TOOL, f"No tool is named {call.name!r}. Tools: {known}.")
        try:
            arguments = found.validate(call.arguments)
        except ToolError as error:
            return self._error(call, CallStatus.BAD_ARGUMENTS, str(error))
        return await self._invoke(found, call, arguments)

    async def _invoke(self, found: Tool, call: ToolCall, arguments: dict[str, Any]) -> CallResult:
        timeout = found.options.timeout or self._timeout
        work: Coroutine[Any, Any, Any]
        if found.is_async:
            work = _guarded(found.function(**arguments))
        else:
            work = self._in_thread(lambda: found.function(**arguments), found.name)
        task = asyncio.create_task(work, name=f"tool {found.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            value = await within(task, timeout)
        except Overdue:
            return self._error(call, CallStatus.TIMEOUT, f"{found.name} timed out after {timeout:g} seconds.")
        except EnvironmentFailure:
            raise
        except asyncio.CancelledError:
            if not task.cancelled():  # it is this episode that is cancelled, not the tool by itself
                raise
            return self._error(call, CallStatus.RAISED, f"{found.name} was cancelled.")
        except ToolError as error:
            return self._error(call, CallStatus.RAISED, f"Error: {error}")
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is told to the model, it never ends the run
            return self._error(call, CallStatus.RAISED, f"Error: {type(error).__name__}: {error}")
        return self._result(call, CallStatus.OK, as_text(value), ends_episode=found.options.ends_episode)

    def _error(self, call: ToolCall | InvalidToolCall, status: CallStatus, text: str) -> CallResult:
        return self._result(call, status, text, ends_episode=False)

    def _result(
        self, call: ToolCall | InvalidToolCall, status: CallStatus, text: str, *, ends_episode: bool
    ) -> CallResult:
        shown = cut_middle(text, self._max_chars)
        message = ToolMessage(shown, call.id, call.name)
        return CallResult(message, status, ends_episode, max(0, len(text) - self._max_chars))

    async def _in_thread(self, function: Callable[[], Any], name: str) -> Any:
        # A thread for each call, not a pool: tools that hang would use a pool up and starve the calls behind them.
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()
        ended: asyncio.Future[None] = loop.create_future()
        context = contextvars.copy_context()

        def settle(value: Any, error: Exception | None) -> None:
            thread.join()  # it has nothing left to do but to return
            self._threads.pop(thread, None)
            ended.set_result(None)
            if outcome.done():
                return
            if error is None:
                outcome.set_result(value)
            else:
                outcome.set_exception(error)

        def target() -> None:
            value, error = None, None
            try:
                value = context.run(function)
            except BaseException as raised:  # noqa: BLE001 - carried over to the waiting coroutine, judged there
                error = _tame(raised)
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits for the answer
                loop.call_soon_threadsafe(settle, value, error)

        thread = threading.Thread(target=target, name=f"tool {name}", daemon=True)
        self._threads[thread] = ended
        thread.start()
        return await outcome


async def _guarded(work: Coroutine[Any, Any, Any]) -> Any:
    """Await a tool's coroutine; SystemExit would otherwise leave the task and stop the whole event loop."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as raised:
        raise _tame(raised) from raised


def _tame(raised: BaseException) -> Exception:
    """An exception of a tool as one that asyncio carries: SystemExit and its like would stop the loop instead."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    return ToolError(f"{type(raised).__name__}: {raised}")


def as_text(value: Any) -> str:
    """What a tool returned, as text for the model: text as it is, everything else as JSON, failing that its str."""
    if isinstance(value, str):
        text = value
    else:
        try:
            text = pydantic_core.to_json(value).decode()
        except pydantic_core.PydanticSerializationError:
            text = str(value)
    # Lone surrogates (as in undecodable file names) exist in str but in no encoding, so no tokenizer takes them.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def cut_middle(text: str, limit: int) -> str:
    """At most ``limit`` characters of the text, head and tail kept, plus a marker that says how much is missing."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit} characters cut ...]\n{text[len(text) - tail :]}"
