"""`ToolEnv`: one episode of tool use as a `gymnasium.Env`, with an async face below the Gymnasium one."""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import gymnasium

from toolgym.envs.errors import ConfigurationError, EnvironmentFailure, ResetNeededError, ToolgymError
from toolgym.envs.execution import CallResult, Executor, ToolRunner
from toolgym.envs.messages import (
    AssistantMessage,
    Message,
    Observation,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from toolgym.envs.rewards import Episode, ScoreLike, as_score
from toolgym.envs.spaces import AssistantMessageSpace, MessagesSpace
from toolgym.envs.tasks import Task, TaskSource, as_source
from toolgym.envs.tools import Tool, Toolset
from toolgym.envs.waiting import Overdue, located

_T = TypeVar("_T")
Step: TypeAlias = tuple[Observation, float, bool, bool, dict[str, Any]]
Closer: TypeAlias = Callable[[], None]
_ENDLESS = 2**31


class ToolEnv(gymnasium.Env[Observation, AssistantMessage | None]):
    """An environment in which a language model solves a task by calling tools.

    Subclass it: mark methods with `@tool`, give a task source to ``super().__init__``, and write `score`. Per-episode
    state is made in `setup`. Or wrap plain functions with `from_functions`.

    An **action** is one `AssistantMessage`; an **observation** is the tuple of messages new since the last action.
    A message without a tool call ends the episode (``terminated``). What the model gets wrong comes back to it as a
    tool message; what goes wrong in `setup` or `score` is raised as `EnvironmentFailure` and ends the episode
    without a reward.

    A plain ``def`` - tool, `setup` or `score` - runs in a thread of its own and may block; an ``async def`` runs on
    the event loop and must not.

    Args:
        tasks: a task source, a list of tasks, or a list of prompts.
        tool_timeout: seconds one tool call may take, unless the tool says otherwise.
        max_output_chars: longer tool output is cut in the middle, with a marker.
        max_steps: after so many steps without an end the episode is scored as it is (``truncated``); None: no bound.
            (Gymnasium's own ``max_episode_steps`` of `gymnasium.make` truncates from outside, without a score.)
        hook_timeout: seconds that `setup` and `score` may each take.
        render_mode: ``"ansi"`` or None.

    Raises:
        ConfigurationError: a limit that is not above zero, an empty list of tasks, a tool that has no schema.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - as Gymnasium declares it
    system_prompt: str = ""

    def __init__(
        self,
        tasks: TaskSource | Sequence[Task | str],
        *,
        tool_timeout: float = 30.0,
        max_output_chars: int = 20_000,
        max_steps: int | None = None,
        hook_timeout: float = 60.0,
        render_mode: str | None = None,
    ) -> None:
        limits = {
            "tool_timeout": tool_timeout,
            "max_output_chars": max_output_chars,
            "max_steps": 1 if max_steps is None else max_steps,
            "hook_timeout": hook_timeout,
        }
        for name, value in limits.items():
            whole = name in ("max_output_chars", "max_steps")
            if not isinstance(value, int if whole else int | float) or isinstance(value, bool) or not value > 0:
                raise ConfigurationError(
                    f"expected {name} as {'an int' if whole else 'a number'} above 0, actual {value!r}"
                )
        if render_mode not in (None, "ansi"):
            raise ConfigurationError(f"expected render_mode 'ansi' or None, actual {render_mode!r}")
        if type(self).score is ToolEnv.score:
            raise ConfigurationError(f"{type(self).__name__} needs a method score(episode): what is an episode worth?")
        self.render_mode = render_mode
        self.tasks = as_source(tasks)
        self.tools = self._make_tools()
        self.observation_space = MessagesSpace()
        self.action_space = AssistantMessageSpace(tuple(self.tools))
        self.messages: tuple[Message, ...] = ()
        self.task: Task | None = None
        self._executor = Executor()
        self._runner = ToolRunner(self.tools, self._executor, timeout=tool_timeout, max_output_chars=max_output_chars)
        self.longest_call = max((t.options.timeout or tool_timeout for t in self.tools.values()), default=0.0)
        self.longest_step = self.longest_call + 2 * hook_timeout + 1.0  # scoring, and an autoreset
        self._max_steps, self._hook_timeout = max_steps, hook_timeout
        self._steps = 0
        self._running = False
        self._own_loop: asyncio.Runner | None = None

    # What an author writes.

    def setup(self, task: Task) -> Awaitable[None] | None:
        """Make the state of a new episode; ``self.np_random`` is seeded. A plain or an ``async def``."""

    def score(self, episode: Episode) -> ScoreLike | Awaitable[ScoreLike]:
        """What a finished episode is worth. A plain or an ``async def``."""
        raise NotImplementedError

    @staticmethod
    def from_functions(
        tools: Sequence[Callable[..., Any]],
        tasks: TaskSource | Sequence[Task | str],
        reward: Callable[[Episode], ScoreLike | Awaitable[ScoreLike]],
        *,
        system_prompt: str = "",
        **options: Any,
    ) -> "ToolEnv":
        """An environment around plain functions.

        Args:
            tools: functions with type hints; `@tool` on them is not needed.
            tasks: see the class.
            reward: what a finished episode is worth; a function or coroutine function.
            system_prompt: the standing instructions.
            **options: further arguments of the class.
        """
        return _FunctionsEnv(tools, tasks, reward, system_prompt, **options)

    @classmethod
    def shared(cls, num_envs: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Closer]]:
        """What all slots of one vector are to use together. Called once, before the slots are made.

        Args:
            num_envs: how many slots there will be.
            options: the arguments that each slot would be made with.

        Returns:
            The arguments that they are made with, and what is to be called when the vector has been closed.
        """
        return dict(options), []

    # The async face.

    @property
    def running(self) -> bool:
        """Whether an episode is running: reset, and not yet ended."""
        return self._running

    @property
    def busy(self) -> list[str]:
        """The names of tools and hooks that still run, though their time was up."""
        return self._executor.busy

    async def adrain(self, grace: float = 1.0) -> None:
        """Wait for at most ``grace`` seconds until nothing of earlier episodes is running; see `busy`."""
        await self._executor.drain(grace)

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: seeds ``np_random``, and so the choice of the task and everything that `setup` draws.
            options: ``{"task": Task}`` sets the task; by default one is drawn from the source.

        Returns:
            The opening messages (the system prompt, if there is one, and the task) and ``{"task_id": ...}``.

        Raises:
            EnvironmentFailure: `setup` raised, or took too long; or (kind ``"still_busy"``) a tool of an earlier
                episode cannot be stopped: it would act in this one. Make a new environment then.
        """
        await self.adrain()
        if busy := self.busy:
            self._running = False
            raise EnvironmentFailure(f"still running from an earlier episode: {busy}", kind="still_busy")
        super().reset(seed=seed)
        self._running = False
        task = (options or {}).get("task")
        if task is None:
            task = self.tasks.get(int(self.np_random.integers(self.tasks.size or _ENDLESS)))
        if not isinstance(task, Task):
            raise ConfigurationError(f"expected options['task'] to be a Task, actual {type(task).__name__}")
        self.task, self._steps = task, 0
        if type(self).setup is not ToolEnv.setup:  # which does nothing, and would cost a thread for it
            await self._hook("setup", self.setup, task)
        system = (SystemMessage(self.system_prompt),) if self.system_prompt else ()
        self.messages = (*system, UserMessage(task.prompt))
        self._running = True
        return self.messages, {"task_id": task.id}

    async def astep(self, action: AssistantMessage | None) -> Step:
        """Take one action: run its tool calls, or end the episode if it has none.

        Returns:
            observation: the answers to the calls, in their order; empty at the end without calls.
            reward: 0.0 until the episode ends, then the score's total.
            terminated, truncated: as in Gymnasium; truncated after ``max_steps``.
            info: ``calls`` (status of each call, in order); at the end ``score`` (components) and ``solved``.

        Raises:
            ResetNeededError: there is no episode running.
            EnvironmentFailure: the environment itself failed; the episode is over and has no reward.
        """
        if not self._running:
            raise ResetNeededError("the episode has ended or never began: call reset() first")
        if not isinstance(action, AssistantMessage):
            raise ConfigurationError(f"expected an AssistantMessage as action, actual {type(action).__name__}")
        self._steps += 1
        action = action.with_call_ids(f"call_{self._steps}_")
        self.messages = (*self.messages, action)
        if not action.tool_calls:
            return (), *await self._end(truncated=False)
        try:
            results = await self._runner.run(action.tool_calls)
        except Exception:
            self._running = False
            raise
        answers = tuple(result.message for result in results)
        self.messages = (*self.messages, *answers)
        calls = {"calls": tuple(result.status.value for result in results)}
        if any(result.ends_episode for result in results):
            reward, terminated, truncated, info = await self._end(truncated=False)
            return answers, reward, terminated, truncated, {**info, **calls, "ended_by_tool": _ending(results)}
        if self._max_steps is not None and self._steps >= self._max_steps:
            reward, terminated, truncated, info = await self._end(truncated=True)
            return answers, reward, terminated, truncated, {**info, **calls}
        return answers, 0.0, False, False, calls

    async def atruncate(self, last: AssistantMessage | None = None) -> Step:
        """End the running episode because a budget says so, and score what there is.

        Args:
            last: a message of the model that was sampled but will not be acted on, kept for the record.

        Returns:
            As `astep`, with ``truncated`` True.
        """
        if not self._running:
            raise ResetNeededError("the episode has ended or never began: there is nothing to truncate")
        if last is not None:
            self.messages = (*self.messages, last)
        return (), *await self._end(truncated=True)

    async def aclose(self) -> None:
        """Stop what still runs, for at most about a second. May be called again."""
        self._running = False
        await self._executor.aclose()

    # The Gymnasium face.

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """`areset` for callers without an event loop."""
        return self._sync(self.areset(seed=seed, options=options))

    def step(self, action: AssistantMessage | None) -> Step:
        """`astep` for callers without an event loop."""
        return self._sync(self.astep(action))

    def render(self) -> str | None:
        """The conversation so far as text, in ``"ansi"`` mode."""
        if self.render_mode is None:
            return None
        return "\n".join(_line(message) for message in self.messages)

    def close(self) -> None:
        """`aclose` for callers without an event loop. May be called again."""
        if self._own_loop is not None:
            self._own_loop.run(self.aclose())
            self._own_loop.close()
            self._own_loop = None

    def _sync(self, work: Coroutine[Any, Any, _T]) -> _T:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            work.close()
            raise ToolgymError("an event loop is running here: await areset() and astep() instead")
        if self._own_loop is None:
            self._own_loop = asyncio.Runner()
        try:
            return self._own_loop.run(work)
        except KeyboardInterrupt:
            self._running = False  # the action is half done
            raise

    def _make_tools(self) -> Toolset:
        return Toolset.of(self)

    async def _end(self, *, truncated: bool) -> tuple[float, bool, bool, dict[str, Any]]:
        self._running = False
        assert self.task is not None  # a running episode has one
        episode = Episode(self.task, self.messages, truncated)
        score = as_score(await self._hook("score", self.score, episode))
        info = {"score": dict(score.components), "solved": score.solved}
        return float(score.total), not truncated, truncated, info

    async def _hook(self, name: str, hook: Callable[[Any], Any], argument: Any) -> Any:
        """Run an author's hook; whatever it raises is a failure of the environment."""
        try:
            return await self._executor.call(functools.partial(hook, argument), name, self._hook_timeout)
        except EnvironmentFailure:
            raise
        except Overdue as error:
            raise EnvironmentFailure(f"{name} took over {self._hook_timeout:g} s", kind=f"{name}_timeout") from error
        except Exception as error:  # an author's hook may raise anything: a failure, never a reward
            raise EnvironmentFailure(located(error), kind=f"{name}_raised") from error


class _FunctionsEnv(ToolEnv):
    """Behind `ToolEnv.from_functions`."""

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        tasks: TaskSource | Sequence[Task | str],
        reward: Callable[[Episode], ScoreLike | Awaitable[ScoreLike]],
        system_prompt: str,
        **options: Any,
    ) -> None:
        self._functions, self._reward, self.system_prompt = tools, reward, system_prompt
        super().__init__(tasks, **options)

    def _make_tools(self) -> Toolset:
        return Toolset(Tool(function) for function in self._functions)

    def score(self, episode: Episode) -> ScoreLike | Awaitable[ScoreLike]:
        return self._reward(episode)


def _ending(results: Sequence[CallResult]) -> str | None:
    """The name of the first tool that ended the episode."""
    return next((result.message.name for result in results if result.ends_episode), None)


def _line(message: Message) -> str:
    match message:
        case AssistantMessage():
            calls = "".join(f" -> {call.name}" for call in message.tool_calls)
            return f"[assistant] {message.content}{calls}"
        case ToolMessage():
            return f"[tool {message.name}] {message.content}"
        case SystemMessage():
            return f"[system] {message.content}"
        case UserMessage():
            return f"[user] {message.content}"
