"""`ToolEnv`: one episode of tool use as a `gymnasium.Env`, with an async face below the Gymnasium one."""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import gymnasium

from toolgym.envs.context import EpisodeContext, inside
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
from toolgym.envs.reward_functions import Judge, RewardFunction, as_reward_functions, run_hook
from toolgym.envs.rewards import Episode, Score, ScoreLike, StepView, as_score
from toolgym.envs.spaces import AssistantMessageSpace, MessagesSpace
from toolgym.envs.tasks import Task, TaskSource, as_source
from toolgym.envs.tools import Tool, Toolset

_T = TypeVar("_T")
Step: TypeAlias = tuple[Observation, float, bool, bool, dict[str, Any]]
Closer: TypeAlias = Callable[[], None]
Reward: TypeAlias = Callable[[Episode], ScoreLike | Awaitable[ScoreLike]]
_ENDLESS = 2**31


class ToolEnv(gymnasium.Env[Observation, AssistantMessage | None]):
    """An environment in which a language model solves a task by calling tools.

    Subclass it: mark methods with `@tool`, give a task source to ``super().__init__``, and write `score`. Per-episode
    state is made in `setup`; what single steps are worth, if anything, is said by `score_step`. Or wrap plain
    functions with `from_functions`.

    An **action** is one `AssistantMessage`; an **observation** is the tuple of messages new since the last action.
    A message without a tool call ends the episode (``terminated``). What the model gets wrong comes back to it as a
    tool message; what goes wrong in hooks (`setup`, `score`, `score_step`) or reward functions is raised as
    `EnvironmentFailure` and ends the episode without a reward.

    A plain ``def`` - tool, hook or reward function - runs in a thread of its own and may block; an ``async def`` runs
    on the event loop and must not.

    Args:
        tasks: a task source, a list of tasks, or a list of prompts.
        tool_timeout: seconds one tool call may take, unless the tool says otherwise.
        max_output_chars: longer tool output is cut in the middle, with a marker.
        max_steps: after so many steps without an end the episode is scored as it is (``truncated``); None: no bound.
            (Gymnasium's own ``max_episode_steps`` of `gymnasium.make` truncates from outside, without a score.)
        hook_timeout: seconds that each hook and each reward function may take.
        rewards: functions of the `Episode`, plain or async, and `RewardFunction` objects, which have weights and may
            judge steps. What they say is added to what `score` and `score_step` say, by component; all that judge one
            moment are called together, once.
        render_mode: ``"ansi"`` or None.

    Raises:
        ConfigurationError: a limit that is not above zero, an empty list of tasks, a tool that has no schema, reward
            functions of one name, or nothing that says what an episode is worth.

    Attributes:
        longest_call: seconds that one tool call may take.
        least_call: seconds that a tool call must be given, lest what is not the model's fault be told to it as one.
        longest_step: seconds that one step may take, with all that judges it, and an autoreset.
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
        rewards: Sequence[Reward | RewardFunction] | None = None,
        render_mode: str | None = None,
    ) -> None:
        limits = {
            "tool_timeout": tool_timeout,
            "max_output_chars": max_output_chars,
            "max_steps": 1 if max_steps is None else max_steps,
            "hook_timeout": hook_timeout,
        }
        for name, value in limits.items():
            _check_above_zero(name, value, whole=name in ("max_output_chars", "max_steps"))
        if render_mode not in (None, "ansi"):
            raise ConfigurationError(f"expected render_mode 'ansi' or None, actual {render_mode!r}")
        self.render_mode = render_mode
        self.tasks = as_source(tasks)
        self.tools = self._make_tools()
        self.observation_space = MessagesSpace()
        self.action_space = AssistantMessageSpace(tuple(self.tools))
        self.messages: tuple[Message, ...] = ()
        self.task: Task | None = None
        self._context: EpisodeContext | None = None
        self._executor = Executor()
        self._runner = ToolRunner(self.tools, self._executor, timeout=tool_timeout, max_output_chars=max_output_chars)
        self.longest_call = max((t.options.timeout or tool_timeout for t in self.tools.values()), default=0.0)
        self.least_call = 0.0
        self._max_steps, self._hook_timeout = max_steps, hook_timeout
        self._step_judge, self._end_judge = self._make_judges(as_reward_functions(rewards))
        # Judging the step, if anything does, judging the end, and an autoreset.
        self.longest_step = self.longest_call + (2 + self._step_judge.has_say) * hook_timeout + 1.0
        self._steps, self._earned = 0, 0.0
        self._running = False
        self._own_loop: asyncio.Runner | None = None

    # What an author writes.

    def setup(self, task: Task) -> Awaitable[None] | None:
        """Make the state of a new episode; ``self.np_random`` is seeded. A plain or an ``async def``."""

    def score(self, episode: Episode) -> ScoreLike | Awaitable[ScoreLike]:
        """What a finished episode is worth. A plain or an ``async def``. Not needed where reward functions say it."""
        raise NotImplementedError

    def score_step(self, step: StepView) -> ScoreLike | Awaitable[ScoreLike | None] | None:
        """What a step is worth by itself, after the tools have answered; None: nothing. A plain or an ``async def``.

        It is the reward of that step, in Gymnasium's sense, and at the end the score is added to it. A message that a
        budget cut off before it was acted on is no step.
        """

    @staticmethod
    def from_functions(
        tools: Sequence[Callable[..., Any]],
        tasks: TaskSource | Sequence[Task | str],
        reward: Reward | RewardFunction | Sequence[Reward | RewardFunction],
        *,
        system_prompt: str = "",
        **options: Any,
    ) -> "ToolEnv":
        """An environment around plain functions.

        Args:
            tools: functions with type hints; `@tool` on them is not needed.
            tasks: see the class.
            reward: what a finished episode is worth; a function or coroutine function, as `score`, or a list of
                reward functions, as ``rewards``.
            system_prompt: the standing instructions.
            **options: further arguments of the class.
        """
        if callable(reward):
            return _ScoredFunctionsEnv(tools, tasks, reward, system_prompt, **options)
        given = [reward] if isinstance(reward, RewardFunction) else reward
        rewards = [*as_reward_functions(given), *as_reward_functions(options.pop("rewards", None))]
        return _FunctionsEnv(tools, tasks, system_prompt, rewards=rewards, **options)

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
    def context(self) -> EpisodeContext:
        """What the episode is part of, and the numbers that it collects.

        Raises:
            ResetNeededError: no episode has begun yet.
        """
        if self._context is None:
            raise ResetNeededError("no episode has begun, so there is no context: call reset() first")
        return self._context

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
            options: ``"task"``, a `Task`; by default one is drawn from the source. ``"context"``, an
                `EpisodeContext`, made for this episode alone; by default a new one with the task's id.

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
        context = (options or {}).get("context")
        if context is not None and not isinstance(context, EpisodeContext):
            raise ConfigurationError(
                f"expected options['context'] to be an EpisodeContext, actual {type(context).__name__}"
            )
        self._context = EpisodeContext(task.id) if context is None else context
        self.task, self._steps, self._earned = task, 0, 0.0
        if type(self).setup is not ToolEnv.setup:  # which does nothing, and would cost a thread for it
            with inside(self._context):
                await run_hook(self._executor, functools.partial(self.setup, task), "setup", self._hook_timeout)
        system = (SystemMessage(self.system_prompt),) if self.system_prompt else ()
        self.messages = (*system, UserMessage(task.prompt))
        self._running = True
        return self.messages, {"task_id": task.id}

    async def astep(self, action: AssistantMessage | None, *, tool_timeout: float | None = None) -> Step:
        """Take one action: run its tool calls, or end the episode if it has none.

        Args:
            action: the message.
            tool_timeout: seconds that no tool call of this step may exceed, whatever its tool says; a call that does is
                answered as any that times out. None leaves it to the tools.

        Returns:
            observation: the answers to the calls, in their order; empty at the end without calls.
            reward: what the step is worth, 0.0 where nothing judges steps; at the end plus the score's total. The sum
                over the steps of an episode is its whole reward.
            terminated, truncated: as in Gymnasium; truncated after ``max_steps``.
            info: ``calls`` (status of each call, in order); ``step_score`` (components) where anything judges steps;
                at the end ``score`` (components) and ``solved``: whether what `score` returns counts as solved, by
                itself; where there is no `score`, what reward functions say of it by ``Score(success=...)``, else
                whether the whole reward, that of the steps included, reaches 1.

        Raises:
            ResetNeededError: there is no episode running.
            EnvironmentFailure: the environment itself failed; the episode is over and has no reward.
        """
        if not self._running:
            raise ResetNeededError("the episode has ended or never began: call reset() first")
        if not isinstance(action, AssistantMessage):
            raise ConfigurationError(f"expected an AssistantMessage as action, actual {type(action).__name__}")
        if tool_timeout is not None:
            _check_above_zero("tool_timeout", tool_timeout)
        self._steps += 1
        action = action.with_call_ids(f"call_{self._steps}_")
        self.messages = (*self.messages, action)
        with inside(self.context):
            try:
                return await self._take(action, tool_timeout)
            except Exception:
                self._running = False
                raise

    async def atruncate(self, last: AssistantMessage | None = None) -> Step:
        """End the running episode because a budget says so, and score what there is.

        Args:
            last: a message of the model that was sampled but will not be acted on, kept for the record. It is no
                step, so it is not judged as one.

        Returns:
            As `astep`, with ``truncated`` True; the reward is the score's total.
        """
        if not self._running:
            raise ResetNeededError("the episode has ended or never began: there is nothing to truncate")
        if last is not None:
            self.messages = (*self.messages, last)
        with inside(self.context):
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

    def _make_judges(self, rewards: Sequence[RewardFunction]) -> tuple[Judge, Judge]:
        """Who judges the steps of an episode, and who its end."""
        own_step = None if type(self).score_step is ToolEnv.score_step else self.score_step
        own_end = None if type(self).score is ToolEnv.score else self.score
        of_steps = [function for function in rewards if function.each_step]
        of_ends = [function for function in rewards if not function.each_step]
        step_judge = Judge("score_step", own_step, of_steps, self._executor, self._hook_timeout)
        end_judge = Judge("score", own_end, of_ends, self._executor, self._hook_timeout)
        if not (step_judge.has_say or end_judge.has_say):
            raise ConfigurationError(
                f"{type(self).__name__} needs a method score(episode), or reward functions, rewards=[...]: what is an "
                "episode worth?"
            )
        return step_judge, end_judge

    async def _take(self, action: AssistantMessage, tool_timeout: float | None) -> Step:
        """A step of a running episode, from the calls to the reward."""
        results = await self._runner.run(action.tool_calls, timeout=tool_timeout) if action.tool_calls else []
        answers = tuple(result.message for result in results)
        self.messages = (*self.messages, *answers)
        earned, info = await self._judge_step(action, answers)
        if results:
            info["calls"] = tuple(result.status.value for result in results)
        if any(result.ends_episode for result in results):
            info["ended_by_tool"] = _ending(results)
        answered = not results or "ended_by_tool" in info
        if not answered and (self._max_steps is None or self._steps < self._max_steps):
            return answers, earned, False, False, info
        reward, terminated, truncated, end_info = await self._end(truncated=not answered)
        return answers, earned + reward, terminated, truncated, {**end_info, **info}

    async def _judge_step(
        self, action: AssistantMessage, answers: tuple[ToolMessage, ...]
    ) -> tuple[float, dict[str, Any]]:
        """What a step is worth by itself, and its part of the info."""
        if not self._step_judge.has_say:
            return 0.0, {}
        assert self.task is not None  # a running episode has one
        step = StepView(self.task, action, answers, self._steps, self.messages, self.context)
        score = await self._step_judge.judge(step)
        self._earned += score.total
        return score.total, {"step_score": dict(score.components)}

    async def _end(self, *, truncated: bool) -> tuple[float, bool, bool, dict[str, Any]]:
        """Judge the episode, and end it. The reward is that of the end alone, without what its steps have earned."""
        self._running = False
        assert self.task is not None  # a running episode has one
        score = await self._end_judge.judge(Episode(self.task, self.messages, truncated, self.context))
        whole = as_score(Score({"whole": self._earned + score.total}, success=score.success))
        return score.total, not truncated, truncated, {"score": dict(score.components), "solved": whole.solved}


class _FunctionsEnv(ToolEnv):
    """Behind `ToolEnv.from_functions`."""

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        tasks: TaskSource | Sequence[Task | str],
        system_prompt: str,
        **options: Any,
    ) -> None:
        self._functions, self.system_prompt = tools, system_prompt
        super().__init__(tasks, **options)

    def _make_tools(self) -> Toolset:
        return Toolset(Tool(function) for function in self._functions)


class _ScoredFunctionsEnv(_FunctionsEnv):
    """The same, with one function as its score."""

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        tasks: TaskSource | Sequence[Task | str],
        reward: Reward,
        system_prompt: str,
        **options: Any,
    ) -> None:
        self._reward = reward
        super().__init__(tools, tasks, system_prompt, **options)

    def score(self, episode: Episode) -> ScoreLike | Awaitable[ScoreLike]:
        return self._reward(episode)


def _check_above_zero(name: str, value: object, *, whole: bool = False) -> None:
    if not isinstance(value, int if whole else int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigurationError(f"expected {name} as {'an int' if whole else 'a number'} above 0, actual {value!r}")


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
