"""Running the code of authors: the tool calls of one message, and the hooks of an environment.

Calls run together, each within its time, and are answered in their order. Whatever the model got wrong comes back to
it as a tool message; only an `EnvironmentFailure` passes through.
"""

import asyncio
import contextlib
import contextvars
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pydantic_core

from toolgym.envs.errors import ConfigurationError, EnvironmentFailure, ToolError
from toolgym.envs.messages import InvalidToolCall, ToolCall, ToolMessage
from toolgym.envs.tools import Tool, Toolset
from toolgym.envs.waiting import Overdue, StrayExit, described, tame, tamed, within


class CallStatus(StrEnum):
    """How one tool call ended."""

    OK = "ok"
    BAD_JSON = "bad_json"
    CUT_OFF = "cut_off"
    NO_NAME = "no_name"
    MALFORMED = "malformed"
    IN_REASONING = "in_reasoning"
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


class Executor:
    """Runs functions and coroutine functions within a time, and keeps account of what is still running."""

    def __init__(self) -> None:
        self._threads: dict[threading.Thread, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._drained: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()

    @property
    def busy(self) -> list[str]:
        """The names of what still runs, though nobody waits for it any more."""
        return [thread.name for thread in self._threads] + [t.get_name() for t in self._tasks if not t.done()]

    async def call(self, function: Callable[[], Any], name: str, timeout: float) -> Any:
        """Call ``function``: on the loop if it is a coroutine function, else in a thread of its own.

        Raises:
            Overdue: it took longer than ``timeout`` seconds. A thread cannot be stopped: it stays in `busy`.
            StrayExit: it raised SystemExit or its like.
            EnvironmentFailure: (kind ``"closed"``) it was drained while it ran; (kind ``"no_thread"``) no thread.
            Exception: whatever else it raised.
        """
        task = asyncio.create_task(self._run(function, name), name=name)
        self._tasks.add(task)
        try:
            return await within(task, timeout)
        except Overdue:
            await asyncio.sleep(0)  # what heeds its cancellation has ended then, and does not count as busy
            raise
        except StrayExit as stray:
            if task in self._drained:
                raise EnvironmentFailure(f"closed while {name} ran", kind="closed") from stray
            raise
        finally:
            if task.done():
                self._tasks.discard(task)
            else:
                task.add_done_callback(self._tasks.discard)

    async def drain(self, grace: float) -> None:
        """Cancel what still runs, and wait for it for at most ``grace`` seconds."""
        for task in self._tasks:
            self._drained.add(task)
            task.cancel()
        waiting = {*self._tasks, *self._threads.values()}
        if waiting:
            await asyncio.wait(waiting, timeout=grace)

    async def aclose(self, grace: float = 1.0) -> None:
        """`drain`, then name what could not be stopped."""
        await self.drain(grace)
        if stuck := self.busy:
            warnings.warn(f"still running at close, they ignore cancellation: {stuck}", ResourceWarning, 2)

    async def _run(self, function: Callable[[], Any], name: str) -> Any:
        # Made in here: of a task that is cancelled before it has begun, only the outermost coroutine is closed.
        return await tamed(self._outcome(function, name))

    async def _outcome(self, function: Callable[[], Any], name: str) -> Any:
        value = await (function() if inspect.iscoroutinefunction(function) else self._in_thread(function, name))
        # A wrapped coroutine function looks like a plain one, and returns what is to be awaited.
        return await value if inspect.isawaitable(value) else value

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
                error = tame(raised)
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits for the answer
                loop.call_soon_threadsafe(settle, value, error)

        thread = threading.Thread(target=target, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise EnvironmentFailure(f"no thread for {name}: {error}", kind="no_thread") from error
        self._threads[thread] = ended
        return await outcome


class ToolRunner:
    """Answers the tool calls of one environment.

    Args:
        tools: the tools.
        executor: runs them.
        timeout: seconds that a call may take where the tool itself does not say.
        max_output_chars: longer output is cut in the middle, with a marker that says how much is missing.
    """

    def __init__(self, tools: Toolset, executor: Executor, *, timeout: float, max_output_chars: int) -> None:
        self._tools, self._executor = tools, executor
        self._timeout, self._max_chars = timeout, max_output_chars

    async def run(
        self, calls: Sequence[ToolCall | InvalidToolCall], *, timeout: float | None = None
    ) -> list[CallResult]:
        """Answer all calls of one message, run together. Bounded by the longest time-out among them.

        Coroutine tools start in the order of their calls, so those that never await act in that order.

        Args:
            calls: the calls.
            timeout: seconds that no call may exceed, whatever its tool says; None leaves it to the tools.

        Raises:
            EnvironmentFailure: raised by a tool; the other calls of the message are not waited for.
        """
        if len(calls) == 1:  # as most messages have it: it needs no task of its own
            return [await self._answer(calls[0], timeout)]
        running = [asyncio.ensure_future(self._answer(call, timeout)) for call in calls]
        try:
            return list(await asyncio.gather(*running))
        finally:
            for task in running:
                task.cancel()

    async def _answer(self, call: ToolCall | InvalidToolCall, limit: float | None) -> CallResult:
        if isinstance(call, InvalidToolCall):
            return self._result(call, CallStatus(call.fault), f"{call.error}\nYour call was: {call.raw}")
        found = self._tools.get(call.name)
        if found is None:
            known = ", ".join(self._tools) or "none"
            return self._result(call, CallStatus.UNKNOWN_TOOL, f"No tool is named {call.name!r}. Tools: {known}.")
        try:
            arguments = found.validate(call.arguments)
        except ToolError as error:
            return self._result(call, CallStatus.BAD_ARGUMENTS, str(error))
        except Exception as error:  # noqa: BLE001 - an author's own validator may raise anything
            return self._result(
                call, CallStatus.BAD_ARGUMENTS, f"Invalid arguments for {call.name}: {described(error)}"
            )
        return await self._invoke(found, call, arguments, limit)

    async def _invoke(self, found: Tool, call: ToolCall, arguments: dict[str, Any], limit: float | None) -> CallResult:
        timeout = found.options.timeout or self._timeout
        timeout = timeout if limit is None else min(timeout, limit)
        try:
            text = await self._executor.call(_bound(found, arguments), f"tool {found.name}", timeout)
        except Overdue:
            return self._result(call, CallStatus.TIMEOUT, f"{found.name} timed out after {timeout:g} seconds.")
        except EnvironmentFailure:
            raise
        except ConfigurationError as error:  # the author's slip, which no model can mend
            raise EnvironmentFailure(f"tool {found.name}: {error}", kind="tool_misconfigured") from error
        except (ToolError, StrayExit) as error:
            return self._result(call, CallStatus.RAISED, f"Error: {error}")
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is told to the model, it never ends the run
            return self._result(call, CallStatus.RAISED, f"Error: {described(error)}")
        return self._result(call, CallStatus.OK, text, ends_episode=found.options.ends_episode)

    def _result(
        self, call: ToolCall | InvalidToolCall, status: CallStatus, text: str, *, ends_episode: bool = False
    ) -> CallResult:
        shown = cut_middle(as_text(text), self._max_chars)
        message = ToolMessage(shown, call.id, call.name)
        return CallResult(message, status, ends_episode, max(0, len(text) - self._max_chars))


def _bound(found: Tool, arguments: dict[str, Any]) -> Callable[[], Any]:
    """The call of a tool, of the same kind as its function: its result becomes text where the function runs."""

    async def on_the_loop() -> str:
        return as_text(await found.function(**arguments))

    def in_a_thread() -> Any:
        value = found.function(**arguments)
        return value if inspect.isawaitable(value) else as_text(value)

    return on_the_loop if found.is_async else in_a_thread


def as_text(value: Any) -> str:
    """What a tool returned, as text for the model: text as it is, everything else as JSON, failing that its str.

    Raises:
        ToolError: an iterator, which may have no end.
    """
    if isinstance(value, str):
        text = value
    elif isinstance(value, Iterator):
        raise ToolError(f"the tool returned a {type(value).__name__}, which may have no end, instead of a list")
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
