"""`Prompting`: the prompt of one episode as it grows, and what still fits into it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from toolgym.agents.chat import ChatFormat, TemplateRefused
from toolgym.envs.messages import AssistantMessage, Message, ToolMessage
from toolgym.rollout.limits import Limits
from toolgym.rollout.observations import fit
from toolgym.rollout.trajectory import Ints, SegmentKind, StopReason, Trajectory

OnBreak = Literal["stop", "split"]
_CUT_AWAY = "[... 999999 characters cut ...]"  # what is left of an answer that is cut away


@dataclass(frozen=True, slots=True)
class Extension:
    """What an observation did to the prompt.

    Attributes:
        messages: the observation as it is shown to the model, cut where it was too long.
        stopped: why there is no next prompt; None if there is one.
        refused: what the chat format said, where it refused.
    """

    messages: tuple[Message, ...]
    stopped: StopReason | None = None
    refused: str = ""


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
        spare = room - self._reserve
        # Where an answer of the least length and the wrapper do not both fit, the answer goes first.
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
        ids = await self._threads.run(lambda: self._chat.open(messages, self._tools))
        if len(ids) + self._least > self._limits.max_trajectory_tokens:
            return StopReason.PROMPT_TOO_LONG
        self._trajectory.append(SegmentKind.PROMPT, ids)
        return None

    async def parse(self, sampled: list[int], prompt: Ints) -> AssistantMessage:
        """The message that was sampled."""
        return await self._threads.run(lambda: self._chat.parse(sampled, prompt, self._tools))

    async def extend(self, prompt: Ints, sampled: list[int], observation: Sequence[Message]) -> Extension:
        """Make the next prompt out of what the environment said, cut until it fits.

        Args:
            prompt: that the turn was sampled from.
            sampled: the turn.
            observation: the new messages.
        """

        def encode(messages: Sequence[Message]) -> list[int]:
            return self._chat.extend(prompt, sampled, messages, self._tools)

        left = self._limits.max_trajectory_tokens - len(self.ids) - self._least
        room = min(self._limits.max_observation_tokens, left)
        try:
            fitted = await self._threads.run(lambda: fit(observation, encode, room, self._limits.observation_keep))
        except TemplateRefused as refused:
            if self._on_break == "split":
                return await self._split(observation)
            return Extension(tuple(observation), StopReason.TEMPLATE_REFUSED, str(refused))
        if fitted is None:
            return self._unfit(observation, full=room < self._limits.max_observation_tokens)
        shown, delta = fitted
        self._trajectory.append(SegmentKind.OBSERVATION, delta)
        return Extension(shown)

    async def _split(self, observation: Sequence[Message]) -> Extension:
        """Go on from a new prompt, in which the whole conversation is rendered, as another sample."""
        messages, most = self._trajectory.messages, self._limits.max_trajectory_tokens - self._least

        def encode(shown: Sequence[Message]) -> list[int]:
            return self._chat.open((*messages, *shown), self._tools)

        def fitted() -> tuple[int, tuple[tuple[Message, ...], list[int]] | None]:
            least = len(encode(_emptied(observation)))
            room = min(least + self._limits.max_observation_tokens, most)
            return least, fit(observation, encode, room, self._limits.observation_keep)

        try:
            least, found = await self._threads.run(fitted)
        except TemplateRefused as refused:
            return Extension(tuple(observation), StopReason.TEMPLATE_REFUSED, str(refused))
        if found is None:
            return self._unfit(observation, full=least >= most)
        shown, prompt = found
        self._start = len(self._trajectory)
        self._trajectory.begin_sample(prompt)
        return Extension(shown)

    def _unfit(self, observation: Sequence[Message], *, full: bool) -> Extension:
        return Extension(tuple(observation), StopReason.TRAJECTORY_BUDGET if full else StopReason.OBSERVATION_TOO_LONG)

    async def doomed(self, prompt: Ints, sampled: list[int], said: AssistantMessage) -> bool:
        """Whether the answers to a message's calls cannot fit, even if all of them are cut to nothing.

        Raises:
            TemplateRefused: they cannot be written at all, and the record is not to be split.
        """
        left = self._limits.max_trajectory_tokens - len(self.ids) - self._least
        if left >= self._limits.max_observation_tokens:
            return False
        cut = [ToolMessage(_CUT_AWAY, call.id, call.name) for call in said.tool_calls]
        try:
            delta = await self._threads.run(lambda: self._chat.extend(prompt, sampled, cut, self._tools))
        except TemplateRefused:
            if self._on_break == "stop":
                raise
            whole = (*self._trajectory.messages, *cut)
            opened = await self._threads.run(lambda: self._chat.open(whole, self._tools))
            return len(opened) + self._least > self._limits.max_trajectory_tokens
        return len(delta) > left


def _emptied(observation: Sequence[Message]) -> list[Message]:
    """An observation in which tools said next to nothing."""
    return [replace(message, content="-") if isinstance(message, ToolMessage) else message for message in observation]


def same_tokens(recorded: Ints, fed: Any) -> str | None:
    """None if both are the same ids; else where they part, in words."""
    if np.array_equal(recorded, fed):
        return None
    same = next(
        (k for k, (a, b) in enumerate(zip(recorded, fed, strict=False)) if a != b), min(len(recorded), len(fed))
    )
    return f"recorded {len(recorded)} prompt tokens, the engine was fed {len(fed)}; they part at {same}"
