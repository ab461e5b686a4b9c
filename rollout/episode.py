"""One episode as a state machine: what a slot does between two answers of the policy.

`open` resets the environment and makes the first prompt; then `sample` and `act` alternate until `ended`. None of them
raises (but for cancellation): whatever goes wrong ends this episode, with its kind, and no other.
"""

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np

from toolgym.agents.chat import ChatFormat, TemplateRefused
from toolgym.agents.policy import Completion, FinishReason, PolicyFailure, SampleRequest, Sampling
from toolgym.envs.errors import EnvironmentFailure, Failure
from toolgym.envs.messages import AssistantMessage, Message, ToolCall, ToolMessage
from toolgym.envs.tasks import Task
from toolgym.envs.tool_env import ToolEnv
from toolgym.envs.waiting import Overdue, within
from toolgym.rollout.limits import Limits
from toolgym.rollout.observations import fit
from toolgym.rollout.seeds import environment_seed, sampling_seed
from toolgym.rollout.trajectory import SegmentKind, StopReason, Trajectory, Turn

_T = TypeVar("_T")
OnBreak = Literal["stop", "split"]
Sampler = Callable[[SampleRequest], Awaitable[Completion]]


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """What one episode is to be.

    Attributes:
        env_id: name of the environment, for the record.
        task: what is to be solved.
        task_index: position of the task in the run.
        member: number within the task's group.
        seed: of the run.
        sampling: how to sample.
        on_break: what is done where the prompt cannot be extended exactly: ``"stop"`` ends the episode, ``"split"``
            goes on from a new prompt that renders the whole conversation, as another training sample.
    """

    env_id: str
    task: Task
    task_index: int
    member: int
    seed: int
    sampling: Sampling
    on_break: OnBreak = "stop"


class _Deadline(Exception):
    """The episode's time is up."""


class EpisodeRun:
    """A running episode.

    Args:
        env: the slot's environment.
        chat: the chat format.
        limits: what the episode may use.
        plan: what it is to be.
        sampler: continues one prompt once.
    """

    def __init__(
        self,
        env: ToolEnv,
        chat: ChatFormat,
        limits: Limits,
        plan: EpisodePlan,
        sampler: Sampler,
    ) -> None:
        self._env, self._chat, self._threads, self._limits = env, chat, chat.threads, limits
        self._plan, self._sampler = plan, sampler
        self._tools = env.tools.schemas
        self.trajectory = Trajectory(plan.env_id, plan.task.id, plan.task_index, plan.member, plan.seed)
        self._prompt_ids: list[int] = []
        self._sample_start = 0
        self._tool_calls = 0
        self._unparsed = 0
        self._spent = 0.0
        self._began = time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether the episode is over."""
        return self.trajectory.stop_reason is not None

    async def open(self) -> None:
        """Reset the environment and make the first prompt."""
        await self._guard("reset", self._open())

    async def sample(self) -> Completion | None:
        """The policy's next answer; None if there is none, in which case the episode has ended."""
        return await self._guard("sample", self._sample())

    async def act(self, completion: Completion) -> None:
        """Record an answer, act on it, and make the next prompt."""
        await self._guard("step", self._act(completion))

    def cancel(self) -> None:
        """Mark the episode as cancelled, unless it has ended."""
        if not self.ended:
            self._end(StopReason.CANCELLED)

    async def _open(self) -> None:
        options = {"task": self._plan.task}
        seed = environment_seed(self._plan.seed, self._plan.task_index)
        reset = self._env.areset(seed=seed, options=options)
        observation, _ = await self._within("reset", reset, self._limits.reset_timeout)
        self.trajectory.messages = observation
        self._prompt_ids = await self._threads.run(lambda: self._chat.open(observation, self._tools))
        if len(self._prompt_ids) >= self._limits.max_trajectory_tokens:
            await self._truncate(StopReason.PROMPT_TOO_LONG)
            return
        self.trajectory.append(SegmentKind.PROMPT, self._prompt_ids)

    async def _sample(self) -> Completion:
        turn = len(self.trajectory.turns)
        plan = self._plan
        request = SampleRequest(
            prompt_ids=tuple(self._prompt_ids),  # a copy: what a policy does to it must not change the record
            max_tokens=min(self._limits.max_completion_tokens, self._room),
            seed=sampling_seed(plan.seed, plan.task_index, plan.member, turn),
            sampling=plan.sampling,
            stop_token_ids=self._chat.stop_token_ids,
            task=plan.task,
            member=plan.member,
            turn=turn,
            messages=self.trajectory.messages,
        )
        return await self._within("sample", self._sampler(request), self._limits.sample_timeout)

    async def _act(self, completion: Completion) -> None:
        if completion.finish_reason is FinishReason.ABORT:
            raise PolicyFailure("the policy aborted the request")
        if completion.prompt_ids is not None and not np.array_equal(completion.prompt_ids, self._prompt_ids):
            failure = Failure("token_mismatch", "sample", _difference(self._prompt_ids, completion.prompt_ids))
            self._end(StopReason.TOKEN_MISMATCH, failure)
            return
        sampled = completion.token_ids.tolist()
        said = await self._record(completion, sampled)
        if stopped := await self._why_not(said, sampled, completion.finish_reason):
            await self._truncate(stopped, said)
            return
        self._tool_calls += len(said.tool_calls)
        # Scoring an answer is not cut short by the episode's deadline: the model is done.
        step = self._within("step", self._env.astep(said), self._limits.step_timeout, overtime=not said.tool_calls)
        observation, reward, terminated, truncated, info = await step
        self.trajectory.turns[-1] = replace(self.trajectory.turns[-1], calls=info.get("calls", ()), reward=reward)
        if terminated or truncated:
            self.trajectory.messages += observation
            by_tool = StopReason.ENDED_BY_TOOL if said.tool_calls else StopReason.ANSWERED
            self._score(StopReason.ENDED_BY_ENVIRONMENT if truncated else by_tool, reward, info)
            return
        await self._extend(sampled, observation)

    async def _record(self, completion: Completion, sampled: list[int]) -> AssistantMessage:
        """Record a turn before it is parsed, so that what was sampled is never lost; then parse it."""
        self.trajectory.append(SegmentKind.ACTION, completion)
        turn = Turn(completion.finish_reason, len(self._prompt_ids), len(sampled))
        self.trajectory.turns.append(turn)
        number = len(self.trajectory.turns) - 1
        prompt_ids = self._prompt_ids
        said = await self._threads.run(lambda: self._chat.parse(sampled, prompt_ids, self._tools))
        said = said.with_call_ids(f"call_{self._plan.task_index}_{self._plan.member}_{number}_")
        self.trajectory.messages = (*self.trajectory.messages, said)
        return said

    async def _extend(self, sampled: list[int], observation: Sequence[Message]) -> None:
        prompt_ids = self._prompt_ids

        def encode(messages: Sequence[Message]) -> list[int]:
            return self._chat.extend(prompt_ids, sampled, messages, self._tools)

        # One token must be left to sample.
        room = min(self._limits.max_observation_tokens, self._room - 1)
        try:
            fitted = await self._threads.run(lambda: fit(observation, encode, room, self._limits.observation_keep))
        except TemplateRefused:
            if self._plan.on_break == "split":
                await self._split(observation)
                return
            self.trajectory.messages = (*self.trajectory.messages, *observation)
            raise
        if fitted is None:
            await self._does_not_fit(observation, full=room < self._limits.max_observation_tokens)
            return
        shown, delta = fitted
        self.trajectory.messages = (*self.trajectory.messages, *shown)
        self.trajectory.append(SegmentKind.OBSERVATION, delta)
        self._prompt_ids = [*self._prompt_ids, *sampled, *delta]

    async def _split(self, observation: Sequence[Message]) -> None:
        """Go on from a new prompt, in which the whole conversation is rendered, as another sample."""
        messages = self.trajectory.messages

        def encode(shown: Sequence[Message]) -> list[int]:
            return self._chat.open((*messages, *shown), self._tools)

        def fitted() -> tuple[int, tuple[tuple[Message, ...], list[int]] | None]:
            least = len(encode(_emptied(observation)))
            room = min(least + self._limits.max_observation_tokens, self._limits.max_trajectory_tokens - 1)
            return least, fit(observation, encode, room, self._limits.observation_keep)

        try:
            least, found = await self._threads.run(fitted)
        except TemplateRefused:
            self.trajectory.messages = (*messages, *observation)
            raise
        if found is None:
            await self._does_not_fit(observation, full=least >= self._limits.max_trajectory_tokens - 1)
            return
        shown, self._prompt_ids = found
        self.trajectory.messages = (*messages, *shown)
        self._sample_start = len(self.trajectory)
        self.trajectory.begin_sample(self._prompt_ids)

    async def _does_not_fit(self, observation: Sequence[Message], *, full: bool) -> None:
        self.trajectory.messages = (*self.trajectory.messages, *observation)
        await self._truncate(StopReason.TRAJECTORY_BUDGET if full else StopReason.OBSERVATION_TOO_LONG)

    @property
    def _room(self) -> int:
        """How many tokens are left of the trajectory, or of its sample where it was split."""
        return self._limits.max_trajectory_tokens - (len(self.trajectory) - self._sample_start)

    async def _why_not(self, said: AssistantMessage, sampled: list[int], finish: FinishReason) -> StopReason | None:
        """Why a message is not acted on, if a limit says so."""
        if finish is FinishReason.LENGTH:
            return StopReason.TRAJECTORY_BUDGET if self._room <= 0 else StopReason.COMPLETION_CUT
        if not said.tool_calls:
            return None
        parsed = any(isinstance(call, ToolCall) for call in said.tool_calls)
        self._unparsed = 0 if parsed else self._unparsed + 1
        if self._unparsed > self._limits.max_parse_retries:
            return StopReason.UNPARSABLE
        if len(self.trajectory.turns) >= self._limits.max_turns:
            return StopReason.MAX_TURNS
        if self._tool_calls + len(said.tool_calls) > self._limits.max_tool_calls:
            return StopReason.MAX_TOOL_CALLS
        # Not even empty answers would fit: a call that is doomed is not made.
        return StopReason.TRAJECTORY_BUDGET if await self._doomed(said, sampled) else None

    async def _doomed(self, said: AssistantMessage, sampled: list[int]) -> bool:
        """Whether the answers to a message's calls cannot fit, even if all of them are cut to nothing."""
        if self._room - 1 >= self._limits.max_observation_tokens:
            return False
        marker = "[... 999999 characters cut ...]"  # what is left of an answer that is cut away
        cut = [ToolMessage(marker, call.id, call.name) for call in said.tool_calls]
        prompt_ids = self._prompt_ids
        try:
            delta = await self._threads.run(lambda: self._chat.extend(prompt_ids, sampled, cut, self._tools))
        except TemplateRefused:
            if self._plan.on_break == "stop":
                raise
            whole = (*self.trajectory.messages, *cut)
            prompt = await self._threads.run(lambda: self._chat.open(whole, self._tools))
            return len(prompt) > self._limits.max_trajectory_tokens - 1
        return len(delta) > self._room - 1

    async def _truncate(self, reason: StopReason, last: AssistantMessage | None = None) -> None:
        """End the episode by a budget, and score what there is."""
        step = await self._within("score", self._env.atruncate(last), self._limits.step_timeout, overtime=True)
        self._score(reason, step[1], step[4])

    def _score(self, reason: StopReason, reward: float, info: dict[str, Any]) -> None:
        self.trajectory.reward = reward
        self.trajectory.score = info["score"]
        self.trajectory.solved = info["solved"]
        self._end(reason)

    def _end(self, reason: StopReason, failure: Failure | None = None) -> None:
        self.trajectory.stop_reason, self.trajectory.failure = reason, failure
        self.trajectory.seconds = time.monotonic() - self._began
        self.trajectory.finish()

    async def _within(self, where: str, work: Awaitable[_T], limit: float, *, overtime: bool = False) -> _T:
        """Await within a limit and within what is left of the episode's time (unless in ``overtime``)."""
        left = math.inf if overtime else self._limits.episode_timeout - self._spent
        began = time.monotonic()
        try:
            return await within(work, min(limit, max(left, 0.0)))
        except Overdue as overdue:
            if left < limit and self._env.running:
                raise _Deadline from overdue
            if where == "sample":
                raise PolicyFailure(f"no answer within {min(limit, left):g} s") from overdue
            text = f"{where} took over {min(limit, left):g} s"
            raise EnvironmentFailure(text, kind=f"{where}_timeout") from overdue
        finally:
            # Its own waiting alone: what others take in a round of lockstep is not held against it.
            self._spent += time.monotonic() - began

    async def _guard(self, where: str, work: Awaitable[_T]) -> _T | None:
        """Await a stage of the episode; whatever it raises ends the episode."""
        try:
            return await work
        except _Deadline:
            await self._guard("score", self._truncate(StopReason.EPISODE_DEADLINE))
        except TemplateRefused as refused:
            await self._guard("score", self._refused(refused))
        except PolicyFailure as failure:
            self._end(StopReason.POLICY_FAILURE, Failure("policy_failure", where, str(failure)))
        except EnvironmentFailure as failure:
            self._end(StopReason.ENVIRONMENT_FAILURE, Failure(failure.kind, where, str(failure)))
        except Exception as error:  # noqa: BLE001 - isolation: one bad episode never takes the others with it
            reason = StopReason.POLICY_FAILURE if where == "sample" else StopReason.ENVIRONMENT_FAILURE
            self._end(reason, Failure(f"{where}_raised", where, f"{type(error).__name__}: {error}"))
        return None

    async def _refused(self, refused: TemplateRefused) -> None:
        if not self.trajectory.segments:
            raise EnvironmentFailure(str(refused), kind="template_refused")
        self.trajectory.detail = str(refused)
        await self._truncate(StopReason.TEMPLATE_REFUSED)


def _emptied(observation: Sequence[Message]) -> list[Message]:
    """An observation in which tools said next to nothing."""
    return [replace(message, content="-") if isinstance(message, ToolMessage) else message for message in observation]


def _difference(recorded: Sequence[int], fed: Any) -> str:
    """Where two prompts part."""
    same = next(
        (k for k, (a, b) in enumerate(zip(recorded, fed, strict=False)) if a != b), min(len(recorded), len(fed))
    )
    return f"recorded {len(recorded)} prompt tokens, the engine was fed {len(fed)}; they part at {same}"
