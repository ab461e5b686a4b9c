"""`Prompting`: the prompt of one episode as it grows, and what still fits into it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from toolgym.agents.chat import ChatFormat, TemplateRefused
from toolgym.envs.errors import EnvironmentFailure
from toolgym.envs.messages import AssistantMessage, Message, ToolMessage
from toolgym.envs.waiting import Overdue
from toolgym.rollout.limits import Limits
from toolgym.rollout.observations import CUT_AWAY, cut_away, fit
from toolgym.rollout.trajectory import Ints, SegmentKind, StopReason, Trajectory

_T = TypeVar("_T")
OnBreak = Literal["stop", "split"]
_WRAPPER = 64  # tokens in which a template wraps one answer, at most


@dataclass(frozen=True, slots=True)
class Stop:
    """Why an episode does not go on.

    Attributes:
        reason: which limit it is.
        refused: what the chat format said, where it refused.
    """

    reason: StopReason
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Extension:
    """What an observation did to the prompt.

    Attributes:
        messages: the observation as it is shown to the model, cut where it was too long.
        stop: why there is no next prompt; None if there is one.
    """

    messages: tuple[Message, ...]
    stop: Stop | None = None


class Prompting:
    """Writes the prompt of a trajectory, in whose record its tokens are.

    Rendering and tokenising run in the threads of the chat format, not on the event loop.

    Args:
        chat: the chat format.
        limits: what the episode may use.
        tools: OpenAI function schemas.
        trajectory: the record.
        on_break: what is done where the prompt cannot be extended exactly.
    """

    def __init__(
        self,
        chat: ChatFormat,
        limits: Limits,
        tools: Sequence[dict[str, Any]],
        trajectory: Trajectory,
        on_break: OnBreak,
    ) -> None:
        self._chat, self._threads, self._limits, self._tools = chat, chat.threads, limits, tools
        self._trajectory, self._on_break = trajectory, on_break
        self._start = 0  # of the sample: where the prompt begins in the record
        self._least = min(limits.min_completion_tokens, limits.max_completion_tokens)
        self._reserve = min(limits.reserved_observation_tokens, limits.max_observation_tokens)
        proven = chat.certificate
        self._exact = proven is not None and not proven.refused and not proven.one_call

    @property
    def ids(self) -> Ints:
        """(P,) int32, read-only view: the prompt, or the prompt and what was sampled from it."""
        return self._trajectory.input_ids[self._start :]

    def room(self, *, last: bool) -> int:
        """How many tokens a turn may have.

        Args:
            last: whether no call of the turn would be run, so that nothing is kept free for answers.
        """
        room = self._limits.max_trajectory_tokens - len(self.ids)
        # Behind a turn with calls stand their answers, and a turn of the least length that reads them.
        spare = room - self._reserve - self._least
        # Where a turn of the least length and all that do not fit, an answer without calls goes first.
        return min(
            self._limits.max_completion_tokens, room if last or not self._tools or spare < self._least else spare
        )

    async def open(self, messages: Sequence[Message]) -> StopReason | None:
        """Make the first prompt.

        Returns:
            Why there is none; None if there is one.

        Raises:
            TemplateRefused: the template cannot write it.
        """
        ids = await self._run(lambda: self._chat.open(messages, self._tools))
        if len(ids) + self._least > self._limits.max_trajectory_tokens:
            return StopReason.PROMPT_TOO_LONG
        self._trajectory.append(SegmentKind.PROMPT, ids)
        return None

    async def parse(self, sampled: list[int], prompt: Ints) -> AssistantMessage:
        """The message that was sampled."""
        return await self._run(lambda: self._chat.parse(sampled, prompt, self._tools))

    async def extend(self, prompt: Ints, sampled: list[int], observation: Sequence[Message]) -> Extension:
        """Make the next prompt out of what the environment said, cut until it fits.

        Args:
            prompt: that the turn was sampled from.
            sampled: the turn.
            observation: the new messages.
        """

        def encode(messages: Sequence[Message]) -> list[int]:
            return self._chat.extend(prompt, sampled, messages, self._tools)

        room = self._observation_room
        try:
            fitted = await self._run(lambda: fit(observation, encode, room, self._limits.observation_keep))
        except TemplateRefused as refused:
            if self._on_break == "split":
                return await self._split(observation)
            return Extension(tuple(observation), Stop(StopReason.TEMPLATE_REFUSED, str(refused)))
        if fitted is None:
            return Extension(tuple(observation), self._unfit)
        shown, delta = fitted
        self._trajectory.append(SegmentKind.OBSERVATION, delta)
        return Extension(shown)

    async def _split(self, observation: Sequence[Message]) -> Extension:
        """Go on from a new prompt, in which the whole conversation is rendered, as another sample."""
        messages, most = self._trajectory.messages, self._limits.max_trajectory_tokens - self._least

        def encode(shown: Sequence[Message]) -> list[int]:
            return self._chat.open((*messages, *shown), self._tools)

        def fitted() -> tuple[tuple[Message, ...], list[int]] | None:
            # What the wrapper takes cannot be told from all else that is rendered: the limit is on the text alone.
            room = min(len(encode(cut_away(observation))) + self._limits.max_observation_tokens, most)
            return fit(observation, encode, room, self._limits.observation_keep)

        try:
            found = await self._run(fitted)
        except TemplateRefused as refused:
            return Extension(tuple(observation), Stop(StopReason.TEMPLATE_REFUSED, str(refused)))
        if found is None:
            return Extension(tuple(observation), Stop(StopReason.TRAJECTORY_BUDGET))
        shown, prompt = found
        self._start = len(self._trajectory)
        self._trajectory.begin_sample(prompt)
        return Extension(shown)

    async def _run(self, work: Callable[[], _T]) -> _T:
        """Do the chat format's work in its threads, within the time of a step."""
        seconds = self._limits.step_timeout
        try:
            return await self._threads.run(work, seconds)
        except Overdue as overdue:
            raise EnvironmentFailure(f"the chat format took over {seconds:g} s", kind="chat_timeout") from overdue

    @property
    def _observation_room(self) -> int:
        """How many tokens the answers to a turn may have, such that a turn of the least length fits behind them."""
        left = self._limits.max_trajectory_tokens - len(self.ids) - self._least
        return min(self._limits.max_observation_tokens, left)

    @property
    def _unfit(self) -> Stop:
        """Which limit it is that an observation does not fit into."""
        full = self._observation_room < self._limits.max_observation_tokens
        return Stop(StopReason.TRAJECTORY_BUDGET if full else StopReason.OBSERVATION_TOO_LONG)

    async def doomed(self, prompt: Ints, sampled: list[int], said: AssistantMessage) -> Stop | None:
        """Why the answers to a message's calls could not be shown to the model, even if all of them were cut away.

        Returns:
            Which limit it is, or that the template cannot write them; None if they can be shown.
        """
        cut = [ToolMessage(CUT_AWAY, call.id, call.name) for call in said.tool_calls]
        if self._exact and self._ample(len(sampled), len(cut)):
            return None
        try:
            delta = await self._run(lambda: self._chat.extend(prompt, sampled, cut, self._tools))
        except TemplateRefused as refused:
            if self._on_break == "stop":
                return Stop(StopReason.TEMPLATE_REFUSED, str(refused))
            return await self._doomed_split(cut)
        return self._unfit if len(delta) > self._observation_room else None

    async def _doomed_split(self, cut: Sequence[Message]) -> Stop | None:
        whole = (*self._trajectory.messages, *cut)
        try:
            opened = await self._run(lambda: self._chat.open(whole, self._tools))
        except TemplateRefused as refused:
            return Stop(StopReason.TEMPLATE_REFUSED, str(refused))
        full = len(opened) + self._least > self._limits.max_trajectory_tokens
        return Stop(StopReason.TRAJECTORY_BUDGET) if full else None

    def _ample(self, sampled: int, calls: int) -> bool:
        """Whether there is room for any wrapper, so that none need be written to find out.

        A template may write the tools again, which are in the first prompt; and for each call its wrapper, with its
        name and id, which were sampled, some characters of them perhaps escaped.
        """
        first = self._trajectory.segments[0].end
        return self._observation_room >= first + calls * _WRAPPER + 2 * sampled


def same_tokens(recorded: Ints, fed: Any) -> str | None:
    """None if both are the same ids; else where they part, in words."""
    fed = np.asarray(fed)
    if fed.ndim != 1:
        return f"the engine says that it was fed {fed!r:.100}, which are no token ids"
    if np.array_equal(recorded, fed):
        return None
    same = next(
        (k for k, (a, b) in enumerate(zip(recorded, fed, strict=False)) if a != b), min(len(recorded), len(fed))
    )
    return f"recorded {len(recorded)} prompt tokens, the engine was fed {len(fed)}; they part at {same}"
