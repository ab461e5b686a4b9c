"""Environments and reward functions that count."""

import asyncio
from typing import Any

from toolgym.envs import (
    AssistantMessage,
    Episode,
    StepView,
    Task,
    ToolCall,
    ToolEnv,
    tool,
)

DONE = AssistantMessage("done")
UP = AssistantMessage("", (ToolCall("up", {}),))
STOP = AssistantMessage("", (ToolCall("stop", {}),))


class BareEnv(ToolEnv):
    """Counts; what that is worth, others say."""

    def __init__(self, **options: Any) -> None:
        self.count = 0
        super().__init__(["one", "two"], **options)

    async def setup(self, task: Task) -> None:
        self.count = 0

    @tool
    async def up(self) -> int:
        """Count up."""
        self.count += 1
        return self.count

    @tool(ends_episode=True)
    async def stop(self) -> str:
        """End the episode."""
        return "stopped"


class CountEnv(BareEnv):
    """Has a score of its own."""

    def score(self, episode: Episode) -> Any:
        return {"counted": float(self.count >= 1)}


class SteppedEnv(CountEnv):
    """Pays for every odd step, too."""

    def score_step(self, step: StepView) -> Any:
        return 0.25 if step.number % 2 else None


def turns(episode: Episode) -> float:
    return float(len(episode.messages))


async def politeness(episode: Episode) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"please": 1.0, "thanks": 3.0}


def answered(step: StepView) -> int:
    return len(step.observation)


def play(env: ToolEnv, *actions: AssistantMessage) -> list[Any]:
    env.reset(seed=0)
    try:
        return [env.step(action) for action in actions]
    finally:
        env.close()


# Several functions, by name and weight.
