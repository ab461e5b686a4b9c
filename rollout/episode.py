"""One episode as a state machine: what a slot does between two answers of the policy.

`open` resets the environment and makes the first prompt; then `sample` and `act` alternate until `ended`. None of them
raises (but for cancellation): whatever goes wrong ends this episode, with its kind, and no other.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from toolgym.agents.chat import ChatFormat, TemplateRefused
from toolgym.agents.policy import Completion, FinishReason, PolicyFailure, SampleRequest, Sampling
from toolgym.envs.context import EpisodeContext
from toolgym.envs.errors import EnvironmentFailure, Failure
from toolgym.envs.messages import AssistantMessage, ToolCall
from toolgym.envs.tasks import Task
from toolgym.envs.tool_env import ToolEnv
from toolgym.envs.waiting import described, located
from toolgym.rollout.limits import Limits
from toolgym.rollout.prompting import OnBreak, Prompting, Stop, same_tokens
from toolgym.rollout.recovery import Recovery
from toolgym.rollout.seeds import environment_seed, sampling_seed
from toolgym.rollout.trajectory import AlignmentError, SegmentKind, StopReason, Trajectory, Turn
from toolgym.rollout.waits import Deadline, Waits

_T = TypeVar("_T")
Sampler = Callable[[SampleRequest], Awaitable[Completion]]
_MISMATCH = "token_mismatch"  # as `continued` names it
_UNFINISHED = "unfinished"  # a call whose step was broken off: by a failure, the episode's time, or from outside


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """What all episodes of a collection have in common.

    Attributes:
        env_id: name of the environment, for the record.
        seed: of the run.
        limits: what an episode may use.
        sampling: how to sample.
        on_break: what is done where the prompt cannot be extended exactly: ``"stop"`` ends the episode, ``"split"``
            goes on from a new prompt that renders the whole conversation, as another training sample.
        recovery: what is done about requests that the policy failed.
        evaluation: whether this is for evaluation rather than for training.
        version: the version of the policy's weights now; None where it has none.
    """

    env_id: str
    seed: int
    limits: Limits
    sampling: Sampling
    on_break: OnBreak
    recovery: Recovery
    evaluation: bool
    version: Callable[[], int | None]


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """Which episode it is.

    Attributes:
        task: what is to be solved.
        task_index: position of the task in the run.
        member: number within the task's group.
    """

    task: Task
    task_index: int
    member: int


class EpisodeRun:
    """A running episode.

    Args:
        env: the slot's environment.
        chat: the chat format.
        settings: what it has in common with the others.
        plan: which one it is.
        sampler: continues one prompt once.
    """

    def __init__(
        self, env: ToolEnv, chat: ChatFormat, settings: EpisodeSettings, plan: EpisodePlan, sampler: Sampler
    ) -> None:
        self._env, self._settings, self._limits = env, settings, settings.limits
        self._plan, self._sampler = plan, sampler
        self.trajectory = Trajectory(
            settings.env_id, plan.task.id, plan.task_index, plan.member, settings.seed, evaluation=settings.evaluation
        )
        self.waits = Waits(settings.limits.episode_timeout)
        self.hopeless = False
        self._context = EpisodeContext(plan.task.id, plan.task_index, plan.member, settings.evaluation)
        self._prompting = Prompting(chat, settings.limits, env.tools.schemas, self.trajectory, settings.on_break)
        self._stops = chat.stop_token_ids
        self._tool_calls = 0
        self._unparsed = 0
        self._stage = "reset"
        self._return = 0.0
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

    def fail(self, kind: str, message: str) -> None:
        """End the episode by a failure from outside, unless it has ended."""
        if not self.ended:
            self._end(StopReason.ENVIRONMENT_FAILURE, Failure(kind, self._stage, message))

    async def _open(self) -> None:
        self._context.policy_version = self._settings.version()
        options = {"task": self._plan.task, "context": self._context}
        reset = self._env.areset(seed=environment_seed(self._settings.seed, self._plan.task_index), options=options)
        observation, _ = await self.waits.within("reset", "reset of the environment", reset, self._limits.reset_timeout)
        self.trajectory.messages = observation
        stopped = await self.waits.named("the chat format", self._prompting.open(observation))
        if stopped is not None:
            await self._truncate(stopped)

    async def _sample(self) -> Completion:
        """One answer. A request that fails is made again, with the same seed; the wait between doubles."""
        request, recovery = self._request(), self._settings.recovery
        failed: PolicyFailure | None = None
        for attempt in range(recovery.request_retries + 1):
            try:
                if failed is not None:
                    what, pause = f"the policy to recover from: {failed!s:.200}", recovery.delay(attempt - 1)
                    await self.waits.within("sample", what, asyncio.sleep(pause), pause + 60)
                return await self._ask(request)
            except PolicyFailure as failure:
                failed = failure
                if failure.permanent or failure.kind == _MISMATCH:
                    break
            except Deadline:  # the time went by while the policy failed: that is no budget that the model has used up
                if failed is None:
                    raise
                break
        assert failed is not None  # it is asked once at least
        raise failed

    async def _ask(self, request: SampleRequest) -> Completion:
        try:
            completion = await self.waits.within(
                "sample", "the policy", self._sampler(request), self._limits.sample_timeout
            )
        except (PolicyFailure, Deadline):
            raise
        except Exception as error:  # a policy may raise anything: it is its failure, and of this request alone
            raise PolicyFailure(located(error), kind="sample_raised") from error
        if not len(completion.token_ids):
            raise PolicyFailure("the policy broke the answer off before its first token, and did not go on with it")
        return completion

    def _request(self) -> SampleRequest:
        turn, plan, settings, limits = len(self.trajectory.turns), self._plan, self._settings, self._limits
        # No call of this turn would be run.
        last = turn + 1 >= limits.max_turns or self._tool_calls >= limits.max_tool_calls
        return SampleRequest(
            prompt_ids=self._prompting.ids,
            max_tokens=self._prompting.room(last=last),
            seed=sampling_seed(settings.seed, plan.task_index, plan.member, turn),
            sampling=settings.sampling,
            stop_token_ids=self._stops,
            task=plan.task,
            member=plan.member,
            turn=turn,
            messages=self.trajectory.messages,
        )

    async def _act(self, completion: Completion) -> None:
        prompt = self._prompting.ids
        if completion.prompt_ids is not None and (parted := same_tokens(prompt, completion.prompt_ids)):
            raise PolicyFailure(parted, kind=_MISMATCH)
        sampled = completion.token_ids.tolist()
        said = await self._record(completion, prompt, sampled)
        if completion.finish_reason is FinishReason.ABORT:
            raise PolicyFailure("the policy broke the answer off, and did not go on with it")
        if stopped := await self._why_not(said, prompt, sampled, completion.finish_reason):
            self.trajectory.detail = stopped.refused
            await self._truncate(stopped.reason, said)
            return
        self._tool_calls += len(said.tool_calls)
        observation, reward, terminated, truncated, info = await self._step(said)
        self._return += reward
        self._mark(calls=info.get("calls", ()), reward=reward, score=info.get("step_score", {}))
        if terminated or truncated:
            self.trajectory.messages += observation
            by_tool = StopReason.ENDED_BY_TOOL if said.tool_calls else StopReason.ANSWERED
            self._score(StopReason.ENDED_BY_ENVIRONMENT if truncated else by_tool, info)
            return
        if len(self.trajectory.turns) >= self._limits.max_turns:  # an environment that goes on after a last answer
            self.trajectory.messages += observation
            await self._truncate(StopReason.MAX_TURNS)
            return
        extended = await self.waits.named("the chat format", self._prompting.extend(prompt, sampled, observation))
        self.trajectory.messages = (*self.trajectory.messages, *extended.messages)
        if extended.stop is not None:
            self.trajectory.detail = extended.stop.refused
            await self._truncate(extended.stop.reason)

    async def _step(self, said: AssistantMessage) -> Any:
        names = ", ".join(dict.fromkeys(str(call.name) for call in said.tool_calls))
        self._mark(calls=(_UNFINISHED,) * len(said.tool_calls))
        step = self._env.astep(said, tool_timeout=self._limits.tool_timeout)
        what = f"tools: {names}" if names else "score of the environment"

        def scoring() -> bool:
            return not said.tool_calls or not self._env.running

        return await self.waits.within("step", what, step, self._limits.step_timeout, scoring=scoring)

    def _mark(self, **values: Any) -> None:
        """Note what came of the last turn."""
        self.trajectory.turns[-1] = replace(self.trajectory.turns[-1], **values)

    async def _record(self, completion: Completion, prompt: Any, sampled: list[int]) -> AssistantMessage:
        """Record a turn before it is parsed, so that what was sampled is never lost; then parse it."""
        try:
            self.trajectory.append(SegmentKind.ACTION, completion)
        except AlignmentError as error:
            raise PolicyFailure(str(error)) from error
        number = len(self.trajectory.turns)
        self.trajectory.turns.append(Turn(completion.finish_reason, len(prompt), len(sampled)))
        self._context.policy_version = int(completion.versions[-1])
        said = await self.waits.named("the chat format", self._prompting.parse(sampled, prompt))
        said = said.with_call_ids(f"call_{self._plan.task_index}_{self._plan.member}_{number}_")
        self.trajectory.messages = (*self.trajectory.messages, said)
        return said

    async def _why_not(
        self, said: AssistantMessage, prompt: Any, sampled: list[int], finish: FinishReason
    ) -> Stop | None:
        """Why a message is not acted on, if a limit says so."""
        if finish is FinishReason.LENGTH:
            whole = len(sampled) >= self._limits.max_completion_tokens
            return Stop(StopReason.COMPLETION_CUT if whole else StopReason.TRAJECTORY_BUDGET)
        unparsed = said.tool_calls and not any(isinstance(call, ToolCall) for call in said.tool_calls)
        self._unparsed = self._unparsed + 1 if unparsed else 0
        if not said.tool_calls:
            return None
        if self._unparsed > self._limits.max_parse_retries:
            return Stop(StopReason.UNPARSABLE)
        if len(self.trajectory.turns) >= self._limits.max_turns:
            return Stop(StopReason.MAX_TURNS)
        if self._tool_calls + len(said.tool_calls) > self._limits.max_tool_calls:
            return Stop(StopReason.MAX_TOOL_CALLS)
        # A call that is doomed is not made.
        return await self.waits.named("the chat format", self._prompting.doomed(prompt, sampled, said))

    async def _truncate(self, reason: StopReason, last: AssistantMessage | None = None) -> None:
        """End the episode by a budget, and score what there is."""
        ending = self._env.atruncate(last)
        _, reward, _, _, info = await self.waits.within(
            "score", "score of the environment", ending, self._limits.step_timeout, scoring=lambda: True
        )
        self._return += reward
        if self.trajectory.turns:  # the steps sum to the whole
            self._mark(reward=self.trajectory.turns[-1].reward + reward)
        self._score(reason, info)

    def _score(self, reason: StopReason, info: dict[str, Any]) -> None:
        self.trajectory.reward = self._return
        self.trajectory.score = info["score"]
        self.trajectory.solved = info["solved"]
        self._end(reason)

    def _end(self, reason: StopReason, failure: Failure | None = None) -> None:
        self.trajectory.stop_reason, self.trajectory.failure = reason, failure
        self.trajectory.stats = self._context.stats.as_dict()
        self.trajectory.seconds = time.monotonic() - self._began
        self.trajectory.finish()

    async def _guard(self, where: str, work: Awaitable[_T]) -> _T | None:
        """Await a stage of the episode; whatever it raises ends the episode."""
        self._stage = where
        try:
            return await work
        except Deadline as deadline:
            await self._guard("score", self._overdue(where, str(deadline)))
        except TemplateRefused as refused:
            await self._guard("score", self._refused(refused))
        except PolicyFailure as failure:
            self.hopeless = failure.permanent
            mismatch = failure.kind == _MISMATCH
            reason = StopReason.TOKEN_MISMATCH if mismatch else StopReason.POLICY_FAILURE
            self._end(reason, Failure(failure.kind, "sample", str(failure)))
        except EnvironmentFailure as failure:
            self._end(StopReason.ENVIRONMENT_FAILURE, Failure(failure.kind, where, str(failure)))
        except Exception as error:  # noqa: BLE001 - isolation: one bad episode never takes the others with it
            self._end(StopReason.ENVIRONMENT_FAILURE, Failure(f"{where}_raised", where, described(error)))
        return None

    async def _overdue(self, where: str, what: str) -> None:
        text = f"the episode's time of {self._limits.episode_timeout:g} s was up while it waited for {what}"
        if where == "reset":  # it has not begun
            raise EnvironmentFailure(text, kind="reset_timeout")
        if not self.trajectory.turns:  # nothing of the model's is there to be scored
            raise PolicyFailure(text)
        self.trajectory.detail = text
        await self._truncate(StopReason.EPISODE_DEADLINE)

    async def _refused(self, refused: TemplateRefused) -> None:
        if not self.trajectory.segments:
            raise EnvironmentFailure(str(refused), kind="template_refused")
        self.trajectory.detail = str(refused)
        await self._truncate(StopReason.TEMPLATE_REFUSED)
