"""Slots of a vector: who uses them, and what takes their place."""

import queue
import threading
from typing import Any, ClassVar

import pytest
from counting import DONE, UP, CountEnv, ask

from toolgym.envs import (
    AssistantMessage,
    ToolCall,
    ToolEnv,
    ToolgymError,
    ToolVectorEnv,
    tool,
)
from toolgym.envs.catalog.calculator import CalculatorEnv


def test_a_slot_with_a_tool_that_cannot_be_stopped_gets_a_new_environment() -> None:
    release = threading.Event()

    class Stuck(CountEnv):
        @tool(timeout=0.02)
        def stick(self) -> int:
            """Hang."""
            release.wait(30)
            self.count += 1_000
            return self.count

    venv = ToolVectorEnv([Stuck] * 2)
    ask(venv, 1, 1)
    old = venv.envs[0]
    venv.step([AssistantMessage("", (ToolCall("stick", {}),)), UP])
    ask(venv, 1, 1)
    assert venv.envs[0] is not old
    release.set()
    venv.step([UP, UP])
    assert venv.step([DONE, DONE])[1].tolist() == [1.0, 1.0]
    venv.close()


class LateEnv(CountEnv):
    """From the second on, they are made only when it is allowed."""

    made: ClassVar[list["LateEnv"]] = []
    began: ClassVar[threading.Event] = threading.Event()

    def __init__(self, may: threading.Event, closed: "queue.Queue[LateEnv]") -> None:
        if self.made:
            self.began.set()
            may.wait(30)
        self.closed = closed
        super().__init__()
        self.made.append(self)

    async def aclose(self) -> None:
        await super().aclose()
        self.closed.put(self)


@pytest.mark.parametrize("vector_is_closed", [False, True])
def test_an_environment_that_is_made_too_late_is_closed(
    monkeypatch: pytest.MonkeyPatch, vector_is_closed: bool
) -> None:
    monkeypatch.setattr("toolgym.envs.vector._MAKING", 0.01)
    monkeypatch.setattr(LateEnv, "made", [])
    may, closed = threading.Event(), queue.Queue[LateEnv]()
    venv = ToolVectorEnv([lambda: LateEnv(may, closed)])
    (first,) = venv.envs
    with pytest.warns(ResourceWarning, match=r"no new environment for slot 0, the old one stays: it took over 0\.01 s"):
        venv.loop.run(venv.renew(0))
    assert venv.envs == [first]
    if vector_is_closed:
        venv.close()
        assert closed.get(timeout=20) is first
    may.set()
    late = closed.get(timeout=20)
    assert late is not first
    assert late is LateEnv.made[1]
    venv.close()


def test_an_environment_that_is_made_after_its_vector_was_closed_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateEnv, "made", [])
    monkeypatch.setattr(LateEnv, "began", threading.Event())
    may, closed = threading.Event(), queue.Queue[LateEnv]()
    venv = ToolVectorEnv([lambda: LateEnv(may, closed)])
    renewing = venv.loop.submit(venv.renew(0))
    assert LateEnv.began.wait(20)
    venv.close()
    assert renewing.cancelled()
    assert closed.get(timeout=20) is venv.envs[0]
    may.set()
    assert closed.get(timeout=20) is LateEnv.made[1]


def test_slots_that_somebody_steps_cannot_be_held_and_the_other_way_round() -> None:
    began, release = threading.Event(), threading.Event()

    def wait() -> bool:
        """Wait."""
        began.set()
        return release.wait(30)

    venv = ToolVectorEnv([lambda: ToolEnv.from_functions([wait], ["go"], lambda episode: 1.0)])
    venv.reset(seed=0)
    stepping = threading.Thread(target=venv.step, args=([AssistantMessage("", (ToolCall("wait", {}),))],))
    stepping.start()
    assert began.wait(20)
    with pytest.raises(ToolgymError, match="a test while the slots are used by step"), venv.held("a test"):
        pass
    with pytest.raises(ToolgymError, match="reset while the slots are used by step"):
        venv.reset()
    with pytest.raises(ToolgymError, match="send while the slots are used by step"):
        venv.send([None], [0])
    release.set()
    stepping.join()
    with venv.held("a test"), pytest.raises(ToolgymError, match="step while the slots are used by a test"):
        venv.step([None])
    venv.reset()
    venv.close()


def other(x: int) -> int:
    """Another tool."""
    return x


@pytest.mark.parametrize(
    "later", [lambda: None, lambda: ToolEnv.from_functions([other], ["x"], lambda e: 0.0), "raises"]
)
def test_what_takes_a_slot_later_must_be_like_the_others(later: Any) -> None:
    made: list[ToolEnv] = []

    def make() -> Any:
        if len(made) < 2:
            made.append(CalculatorEnv())
            return made[-1]
        if later == "raises":
            raise OSError("no disk")
        return later()

    envs = ToolVectorEnv([make, make])
    with pytest.warns(ResourceWarning, match="no new environment for slot 1, the old one stays"):
        envs.loop.run(envs.renew(1))
    assert envs.envs == made
    envs.close()
