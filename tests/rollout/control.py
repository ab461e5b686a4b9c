"""What the tests of recovery, admission, filters, rollouts and batches share."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import EchoEnv, call

import toolgym
from toolgym.agents.policy import Completion, SampleRequest
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.envs import AssistantMessage, ToolVectorEnv, tool
from toolgym.rollout import Group

OURS = {**os.environ, "PYTHONPATH": str(Path(toolgym.__file__).parents[1])}
"""The environment of a process that is to find the same package."""
BOTH = pytest.mark.parametrize("schedule", ["overlap", "lockstep"])


def answer(request: SampleRequest, member: int) -> AssistantMessage:
    """The answer at once."""
    return AssistantMessage("done")


def tool_then_answer(name: str, **arguments: Any) -> Callable[[SampleRequest, int], AssistantMessage]:
    """One call, then the answer."""
    return lambda request, member: AssistantMessage("done") if request.turn else call(name, **arguments)


class ActionEnv(EchoEnv):
    """Its tool ``act`` does what the test wants, on the loop; ``block`` does so in a thread."""

    def __init__(self, action: Callable[["ActionEnv"], Any] = lambda env: None, count: int = 8, **options: Any) -> None:
        self.action = action
        super().__init__(count, **options)

    @tool
    async def act(self) -> str:
        """Do it."""
        done = self.action(self)
        return str(await done if asyncio.iscoroutine(done) else done)

    @tool
    def block(self) -> str:
        """Do it in a thread."""
        return str(self.action(self))


class VersionedPolicy(ScriptedPolicy):
    """Its version is what the test sets; it counts what is asked of it."""

    asked = 0
    most = 0
    now = 0

    async def sample(self, request: SampleRequest) -> list[Completion]:
        self.asked += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return await super().sample(request)


@contextlib.contextmanager
def nothing_left(envs: ToolVectorEnv) -> Iterator[None]:
    """Check that nothing is left on the loop of the environments, then close them and check for threads."""

    async def others() -> list[str]:
        for _ in range(20):  # what was cancelled has some turns of the loop to end
            await asyncio.sleep(0)
        return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    yield
    assert envs.loop.run(others()) == []
    assert [thread.name for thread in threading.enumerate() if "watchdog" in thread.name] == []
    envs.close()
    thread = envs.loop._thread
    thread.join(10)
    assert not thread.is_alive()


def note_indices(batches: Iterable[list[Group]], seen: list[int]) -> None:
    """Take all batches, and note the task indices of their groups as they come."""
    for batch in batches:
        seen += [group.task_index for group in batch]
