"""A step may bound the time of its tool calls; the smaller time counts."""

import asyncio
from typing import Any

import pytest
from judged import DONE

from toolgym.envs import (
    AssistantMessage,
    ConfigurationError,
    Episode,
    ToolCall,
    ToolEnv,
    tool,
)


class SlowEnv(ToolEnv):
    """A tool with time, and one with less."""

    @tool
    async def slow(self) -> None:
        """Never ends."""
        await asyncio.sleep(600)

    @tool(timeout=0.01)
    async def hasty(self) -> None:
        """Never ends, but has little time."""
        await asyncio.sleep(600)

    def score(self, episode: Episode) -> float:
        return 1.0


def test_a_step_may_bound_its_tool_calls_and_the_smaller_time_counts() -> None:
    async def main() -> None:
        env = SlowEnv(["go"], tool_timeout=500)
        await env.areset()
        said = AssistantMessage("", (ToolCall("slow", {}), ToolCall("hasty", {})))
        observation, _, _, _, info = await env.astep(said, tool_timeout=0.05)
        assert [message.content for message in observation] == [
            "slow timed out after 0.05 seconds.",
            "hasty timed out after 0.01 seconds.",
        ]
        assert info["calls"] == ("timeout", "timeout")
        await env.aclose()

    asyncio.run(main())


def test_the_bound_of_one_step_is_not_that_of_the_next() -> None:
    async def main() -> None:
        env = SlowEnv(["go"], tool_timeout=0.02)
        await env.areset()
        for bound, said in ((0.01, "0.01"), (None, "0.02"), (500.0, "0.02")):
            observation, *_ = await env.astep(AssistantMessage("", (ToolCall("slow", {}),)), tool_timeout=bound)
            assert observation[0].content == f"slow timed out after {said} seconds."
        await env.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("bound", [0, -1, float("nan"), "1", True])
def test_a_bound_that_is_none_is_refused_and_nothing_moves(bound: Any) -> None:
    async def main() -> None:
        env = SlowEnv(["go"])
        await env.areset()
        before = env.messages
        with pytest.raises(ConfigurationError, match="expected tool_timeout as a number above 0, actual"):
            await env.astep(DONE, tool_timeout=bound)
        assert (env.messages, env.running) == (before, True)
        await env.aclose()

    asyncio.run(main())
