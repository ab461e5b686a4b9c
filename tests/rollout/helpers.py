"""Environments and policies that behave as told."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Completion, SampleRequest
from toolgym.agents.scripted_policy import Script, ScriptedPolicy
from toolgym.envs import AssistantMessage, EnvironmentFailure, Episode, Task, ToolCall, ToolEnv, ToolVectorEnv, tool


class EchoEnv(ToolEnv):
    """Echoes; its tasks may ask for trouble by ``data["trouble"]``."""

    def __init__(self, count: int = 8, trouble: Callable[[int], str | None] = lambda k: None, **options: Any) -> None:
        super().__init__([Task(f"t{k}", f"task {k}", {"k": k, "trouble": trouble(k)}) for k in range(count)], **options)

    @property
    def trouble(self) -> str | None:
        return self.task.data["trouble"] if self.task else None

    async def setup(self, task: Task) -> None:
        if task.data["trouble"] == "setup raises":
            raise OSError("no disk")
        if task.data["trouble"] == "setup hangs":
            await asyncio.sleep(60)

    @tool
    async def echo(self, text: str) -> str:
        """Say it again."""
        if self.trouble == "tool breaks":
            raise EnvironmentFailure("the box died", kind="box_died")
        if self.trouble == "tool hangs":
            await asyncio.sleep(60)
        if self.trouble == "slow tool":
            await asyncio.sleep(0.4)
        return text

    @tool(ends_episode=True)
    def finish(self) -> str:
        """End it."""
        return "ended"

    async def score(self, episode: Episode) -> float:
        if self.trouble == "score raises":
            raise ZeroDivisionError
        if self.trouble == "score hangs":
            await asyncio.sleep(60)
        return 1.0 if episode.answer == "done" else 0.25


def call(name: str = "echo", **arguments: Any) -> AssistantMessage:
    return AssistantMessage("", (ToolCall(name, arguments or ({"text": "x"} if name == "echo" else {})),))


def echo_twice(request: SampleRequest, member: int) -> AssistantMessage:
    """Two calls, told apart by task and member, then the answer."""
    if request.turn == 2:
        return AssistantMessage("done")
    assert request.task is not None
    return call(text=f"{request.task.id} of member {member}, turn {request.turn}")


def vector(slots: int = 4, **options: Any) -> ToolVectorEnv:
    return ToolVectorEnv.of(EchoEnv, num_envs=slots, **options)


class JitteryPolicy(ScriptedPolicy):
    """Answers after some turns of the loop, drawn by seed, so that episodes interleave in many ways."""

    _rng = random.Random(0)

    async def sample(self, request: SampleRequest) -> list[Completion]:
        for _ in range(self._rng.randrange(6)):
            await asyncio.sleep(0)
        return await super().sample(request)


class TroubledPolicy:
    """Says what a script says, but is in trouble whenever ``trouble(request)`` says so."""

    def __init__(
        self, chat: ChatFormat, script: Script, trouble: Callable[[SampleRequest], BaseException | str | None]
    ) -> None:
        self._inner, self._trouble = ScriptedPolicy(chat, script), trouble
        self.requests: list[SampleRequest] = []

    async def sample(self, request: SampleRequest) -> list[Completion]:
        self.requests.append(request)
        match self._trouble(request):
            case BaseException() as error:
                raise error
            case "hang":
                await asyncio.sleep(60)
            case "too few":
                return (await self._inner.sample(request))[1:]
            case "misfed":
                return [_misfed(completion) for completion in await self._inner.sample(request)]
        return await self._inner.sample(request)


def _misfed(completion: Completion) -> Completion:
    assert completion.prompt_ids is not None
    fed = completion.prompt_ids.copy()
    fed[-1] += 1
    return Completion(completion.token_ids, completion.logprobs, completion.versions, completion.finish_reason, fed)
