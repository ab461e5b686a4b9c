"""A hundred rollouts on a real engine under fire: each failure by name, the others as without faults."""

import asyncio
import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from campaign import IN_ENVIRONMENT, IN_POLICY, misaligned

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Completion, SampleRequest
from toolgym.agents.vllm_policy import VLLMPolicy
from toolgym.envs import EnvironmentFailure, Task, ToolVectorEnv, tool
from toolgym.envs.catalog.calculator import CalculatorEnv
from toolgym.rollout import Collector, Limits, Recovery, StopReason, Trajectory, rollout

pytestmark = pytest.mark.vllm
LIMITS = Limits(
    max_trajectory_tokens=2_048,
    max_completion_tokens=256,
    reset_timeout=3.0,
    sample_timeout=20.0,
    step_timeout=10.0,
    max_turns=4,
)
OF_ENVIRONMENT = (
    *("tool hangs", "tool raises", "tool returns 50 MB", "tool stops its loop", "tool breaks"),
    *("setup raises", "setup hangs", "score raises"),
)
OF_POLICY = ("raises", "hangs", "misaligned logprobs", "misfed")
KINDS: dict[str, str | None] = {
    **{kind: IN_ENVIRONMENT[kind] for kind in OF_ENVIRONMENT},
    **{f"policy {kind}": IN_POLICY[kind] for kind in OF_POLICY},
}


class TroubledCalculator(CalculatorEnv):
    """Its tasks ask for trouble."""

    @property
    def trouble(self) -> str:
        return str(self.task.data["trouble"]) if self.task else ""

    async def setup(self, task: Task) -> None:
        if self.trouble == "setup raises":
            raise OSError("no disk")
        if self.trouble == "setup hangs":
            await asyncio.sleep(60)

    @tool(timeout=1.0)
    async def calculate(self, expression: str) -> str:
        """Work out an arithmetic expression."""
        match self.trouble:
            case "tool hangs":
                await asyncio.sleep(60)
            case "tool raises":
                raise LookupError(expression)
            case "tool returns 50 MB":
                return "7" * 50_000_000
            case "tool stops its loop":
                asyncio.get_running_loop().stop()
            case "tool breaks":
                raise EnvironmentFailure("the box died", kind="box_died")
        return await super().calculate(expression)

    async def score(self, episode: Any) -> float:
        if self.trouble == "score raises":
            raise ZeroDivisionError
        return await super().score(episode)


class TroubledEngine:
    """The real engine, in trouble at the second turn of the tasks that ask for it."""

    def __init__(self, engine: VLLMPolicy) -> None:
        self._engine, self.max_model_len = engine, engine.max_model_len

    async def sample(self, request: SampleRequest) -> list[Completion]:
        assert request.task is not None
        completions = await self._engine.sample(request)
        if request.turn != 1:
            return completions
        (good,) = completions
        match request.task.data["trouble"]:
            case "policy raises":
                raise RuntimeError("oops")
            case "policy hangs":
                await asyncio.sleep(60)
            case "policy misaligned logprobs":
                return [misaligned(good)]
            case "policy misfed":
                assert good.prompt_ids is not None
                return [dataclasses.replace(good, prompt_ids=good.prompt_ids[::-1])]
        return completions


def collected(engine: VLLMPolicy, chat: ChatFormat, *, healthy: bool) -> list[Trajectory]:
    kinds = list(KINDS)
    envs = ToolVectorEnv.of(TroubledCalculator, num_envs=32, split="test", levels=(3, 4))
    tasks = []
    for k, task in enumerate(envs.tasks.take(50)):
        trouble = kinds[k // 2 % len(kinds)] if k % 2 and not healthy else None
        tasks.append(dataclasses.replace(task, data={**task.data, "trouble": trouble}))
    collector = Collector(envs, TroubledEngine(engine), chat, LIMITS, seed=4, recovery=Recovery(request_retries=0))
    found = rollout(collector, tasks, 2).trajectories

    async def left() -> list[str]:
        return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert envs.loop.run(left()) == []
    envs.close()
    return found


def test_a_hundred_rollouts_under_fire(engine: VLLMPolicy, chat: ChatFormat) -> None:
    healthy = collected(engine, chat, healthy=True)
    troubled = collected(engine, chat, healthy=False)
    assert [t.id for t in troubled] == [f"{k}.{m}" for k in range(50) for m in range(2)]
    assert not [t.failure for t in healthy if t.failure]
    failures: Counter[str] = Counter()
    for good, trajectory in zip(healthy, troubled, strict=True):
        k = trajectory.task_index
        if k % 2 == 0:
            assert same(good, trajectory), "others are as in a run without faults"
            continue
        trouble = list(KINDS)[k // 2 % len(KINDS)]
        kind = trajectory.failure and trajectory.failure.kind
        # Trouble at the second turn, or in a tool, comes only where the model gets so far.
        assert kind in {KINDS[trouble], None}, (trouble, trajectory.failure)
        assert (trajectory.reward is None) == (kind is not None)
        failures.update([kind] if kind else [])
        if kind is None and trajectory.stop_reason is not StopReason.ANSWERED:
            assert trajectory.reward is not None
    assert set(failures) == {kind for kind in KINDS.values() if kind}
    assert min(failures.values()) >= 2
    assert collected(engine, chat, healthy=True)[0] == healthy[0], "the engine goes on"


def same(one: Trajectory, two: Trajectory) -> bool:
    """Equal tokens and ends; logprobs as equal as an engine gives them whose batches differ."""
    return (
        np.array_equal(one.input_ids, two.input_ids)
        and np.array_equal(one.loss_mask, two.loss_mask)
        and np.allclose(one.logprobs, two.logprobs, atol=1e-3)
        and (one.stop_reason, one.reward, one.turns) == (two.stop_reason, two.reward, two.turns)
    )
