"""An environment that counts, and a vector of it."""

from typing import Any

from toolgym.envs import (
    AssistantMessage,
    EnvironmentFailure,
    Episode,
    Task,
    ToolCall,
    ToolEnv,
    ToolVectorEnv,
    tool,
)


class CountEnv(ToolEnv):
    """Counts to what is asked for."""

    def __init__(self, **options: Any) -> None:
        self.count = 0
        super().__init__([Task(f"to-{n}", f"count to {n}", {"n": n}) for n in range(3)], **options)

    def setup(self, task: Task) -> None:
        if task.data.get("fail") == "setup":
            raise OSError("no disk")
        self.count = 0

    @tool
    async def up(self, by: float = 1.0) -> int:
        """Count up."""
        if by < 0:
            raise EnvironmentFailure("counter broke", kind="counter_broke")
        self.count += int(by)
        return self.count

    def score(self, episode: Episode) -> dict[str, float]:
        return {"reached": float(self.count == episode.task.data["n"])}


UP = AssistantMessage("", (ToolCall("up", {}),))
BREAK = AssistantMessage("", (ToolCall("up", {"by": -1}),))
DONE = AssistantMessage("done")


def vector(num_envs: int = 3, **options: Any) -> ToolVectorEnv:
    return ToolVectorEnv.of(CountEnv, num_envs=num_envs, **options)


def ask(venv: ToolVectorEnv, *numbers: int) -> tuple[Any, dict[str, Any]]:
    return venv.reset(seed=0, options={"tasks": [Task(f"to-{n}", f"count to {n}", {"n": n}) for n in numbers]})
