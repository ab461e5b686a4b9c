"""The fault campaign: an environment and a policy that are in trouble where a task says so, and what comes of it."""

import asyncio
import dataclasses
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
from helpers import EchoEnv, call, echo_twice

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Completion, PolicyFailure, SampleRequest
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.envs import AssistantMessage, Task, ToolVectorEnv, tool
from toolgym.rollout import Limits

TASKS, MEMBERS, SLOTS = 1_000, 2, 128
QUICK = Limits(reset_timeout=3.0, step_timeout=4.0, sample_timeout=3.0)  # short, for those that hang
# What goes wrong, in an environment or in the policy, and the failure it must end in; None: the model is told, and the
# episode goes on.
IN_ENVIRONMENT = {
    "tool hangs": None,
    "tool hangs in its thread": None,
    "tool raises": None,
    "tool exits": None,
    "tool returns 50 MB": None,
    "tool stops its loop": None,
    "tool breaks": "box_died",
    "setup raises": "setup_raised",
    "setup hangs": "reset_timeout",
    "score raises": "score_raised",
    "score hangs": "step_timeout",
}
IN_POLICY = {
    "raises": "sample_raised",
    "exits": "sample_raised",
    "hangs": "policy_failure",
    "misaligned logprobs": "policy_failure",
    "too few": "policy_failure",
    "misfed": "token_mismatch",
}
RELEASE = threading.Event()
BLOCKED = 1.5  # seconds for which a tool blocks the event loop


class CampaignEnv(EchoEnv):
    """Its tasks ask for trouble; half of the slots fail to close."""

    made = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        CampaignEnv.made += 1
        self.number = CampaignEnv.made

    @tool
    async def echo(self, text: str) -> str:  # type: ignore[override]
        """Say it again."""
        match self.trouble:
            case "tool raises":
                raise LookupError(text)
            case "tool exits":
                raise SystemExit(3)
            case "tool returns 50 MB":
                return "7" * 50_000_000
            case "tool blocks its loop" if self.context.member == 0:
                time.sleep(BLOCKED)  # noqa: ASYNC251 - that is the trouble
            case "tool stops its loop":
                asyncio.get_running_loop().stop()
        return await super().echo(text)

    @tool
    def block(self) -> str:
        """Wait in a thread."""
        RELEASE.wait(60)
        return "released"

    async def aclose(self) -> None:
        await super().aclose()
        if self.number % 4 == 0:
            raise OSError("cannot close")
        if self.number % 64 == 1:
            await asyncio.sleep(60)


def script(request: SampleRequest, member: int) -> AssistantMessage:
    assert request.task is not None
    if request.turn == 0 and request.task.data["trouble"] == "tool hangs in its thread":
        return call("block")
    return echo_twice(request, member)


class CampaignPolicy(ScriptedPolicy):
    """In trouble at the turn and for the member that a task names; ``times`` of each request, then no more."""

    def __init__(self, chat: ChatFormat, times: int = 1_000, dies_after: int | None = None) -> None:
        super().__init__(chat, script)
        self.times, self.dies_after = times, dies_after
        self.asked: Counter[tuple[str, int]] = Counter()
        self.requests = 0

    async def sample(self, request: SampleRequest) -> list[Completion]:
        assert request.task is not None
        self.requests += 1
        if self.dies_after is not None and self.requests > self.dies_after:
            raise PolicyFailure("the engine is dead", permanent=True)
        wrong = request.task.data.get("policy")
        if wrong is None or (request.turn, 1) != (1, request.member):
            return await super().sample(request)
        self.asked[request.task.id, request.turn] += 1
        if self.asked[request.task.id, request.turn] > self.times:
            return await super().sample(request)
        return await self._wrong(wrong, request)

    async def _wrong(self, wrong: str, request: SampleRequest) -> list[Completion]:
        (good,) = await super().sample(request)
        match wrong:
            case "raises":
                raise RuntimeError("oops")
            case "exits":
                raise SystemExit(3)
            case "hangs":
                await asyncio.sleep(60)
            case "misaligned logprobs":
                return [misaligned(good)]
            case "misfed":
                assert good.prompt_ids is not None
                return [dataclasses.replace(good, prompt_ids=good.prompt_ids + np.int32(1))]
        return []


def misaligned(good: Completion) -> Completion:
    """One logprob short. It is taken away from a completion that has been checked: the record must find it out."""
    bad = dataclasses.replace(good)
    object.__setattr__(bad, "logprobs", good.logprobs[1:])
    return bad


def tasks(count: int = TASKS, *, healthy: bool = False) -> list[Task]:
    """Every fifth task asks for trouble, each kind as often as the others."""
    kinds = [("trouble", kind) for kind in IN_ENVIRONMENT] + [("policy", kind) for kind in IN_POLICY]
    made = []
    for k in range(count):
        data: dict[str, Any] = {"k": k, "trouble": None}
        if k % 5 == 2 and not healthy:
            where, kind = kinds[k // 5 % len(kinds)]
            data[where] = kind
        made.append(Task(f"t{k}", f"task {k}", data))
    return made


def left_on(envs: ToolVectorEnv) -> list[str]:
    """What still runs on the loop: nothing may, but for tools that cannot be stopped."""

    async def names() -> list[str]:
        return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    return [name for name in envs.loop.run(names()) if name != "tool block"]


def slots() -> ToolVectorEnv:
    return ToolVectorEnv.of(CampaignEnv, num_envs=SLOTS, tool_timeout=1.0)


def expected_failure(task: Task, member: int) -> str | None:
    wrong = IN_POLICY.get(task.data.get("policy", "")) if member == 1 else None
    return wrong or IN_ENVIRONMENT.get(task.data["trouble"] or "")


def is_untouched(task: Task, member: int) -> bool:
    """Whether nothing is wrong with this member's episode."""
    return task.data["trouble"] is None and not (task.data.get("policy") and member == 1)
