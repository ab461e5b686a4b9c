"""A vector of tool environments keeps Gymnasium's vector contract, and slots do not touch each other."""

import asyncio
import gc
import subprocess
import sys
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from counting import BREAK, DONE, UP, CountEnv, ask, vector
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from toolgym.envs import (
    AssistantMessage,
    ConfigurationError,
    Episode,
    Failure,
    ResetNeededError,
    Task,
    ToolCall,
    ToolEnv,
    ToolgymError,
    ToolVectorEnv,
    register_env,
    tool,
    tool_env_ids,
)
from toolgym.envs.infos import batch_infos


@pytest.mark.parametrize("env_id", tool_env_ids())
@pytest.mark.filterwarnings("error", "ignore::toolgym.envs.sandbox.choice.SandboxWarning")
def test_make_vec_makes_the_shipped_environments(env_id: str) -> None:
    venv = gymnasium.make_vec(env_id, num_envs=4)
    assert isinstance(venv, ToolVectorEnv)
    assert venv.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    observations, infos = venv.reset(seed=3)
    assert observations in venv.observation_space
    assert infos["_task_id"].all()
    actions = venv.action_space.sample()
    assert actions in venv.action_space
    assert (None,) * 4 in venv.action_space
    stepped = venv.step(actions)
    assert stepped[0] in venv.observation_space
    assert stepped[1].dtype == np.float64
    assert stepped[2].dtype == stepped[3].dtype == np.bool_
    venv.close()


def test_make_vec_needs_no_import_of_ours() -> None:
    code = (
        "import gymnasium; v = gymnasium.make_vec('toolgym.envs:toolgym/Calculator-v0', num_envs=2);"
        "print(len(v.reset(seed=0)[0])); v.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "2"


def test_options_reach_the_environments() -> None:
    venv = gymnasium.make_vec("toolgym/Calculator-v0", num_envs=2, levels=[1], split="test", max_episode_steps=1)
    _, infos = venv.reset(seed=0)
    assert all(len(task_id.split()) == 3 for task_id in infos["task_id"])
    call = AssistantMessage("", (ToolCall("calculate", {"expression": "1"}),))
    assert venv.step([call, None])[3].tolist() == [True, False]
    venv.close()


def _script(step: int) -> list[AssistantMessage]:
    """Slot i says DONE in step i + 1, so that episodes end at different times."""
    return [DONE if (step + i) % 3 == 2 else UP for i in range(3)]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_autoreset_is_what_sync_vector_env_does(mode: AutoresetMode) -> None:
    ours = vector(autoreset_mode=mode)
    theirs = SyncVectorEnv([CountEnv] * 3, autoreset_mode=mode)
    compare(ours.reset(seed=5), theirs.reset(seed=5))
    for step in range(12):
        compare(ours.step(_script(step)), theirs.step(tuple(_script(step))))
    ours.close()
    theirs.close()


def test_partial_reset_is_what_sync_vector_env_does() -> None:
    ours, theirs = vector(), SyncVectorEnv([CountEnv] * 3, autoreset_mode=AutoresetMode.DISABLED)
    compare(ours.reset(seed=5), theirs.reset(seed=5))
    for step in range(12):
        mine, other = ours.step(_script(step)), theirs.step(tuple(_script(step)))
        compare(mine, other)
        ended = mine[2] | mine[3]
        if ended.any():
            compare(ours.reset(options={"reset_mask": ended}), theirs.reset(options={"reset_mask": ended.copy()}))
    ours.close()
    theirs.close()


def compare(mine: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Equal but for the dtype of numbers in infos, which Gymnasium takes from the first value alone."""
    assert mine[0] == other[0]
    for one, two in zip(mine[1:-1], other[1:-1], strict=True):
        np.testing.assert_array_equal(one, two)
    _compare_infos(mine[-1], other[-1])


def _compare_infos(mine: dict[str, Any], other: dict[str, Any]) -> None:
    assert mine.keys() == other.keys()
    for key, value in mine.items():
        if isinstance(value, dict):
            _compare_infos(value, other[key])
        else:
            assert data_equivalence(value.tolist(), other[key].tolist()), key


def test_the_callers_options_are_left_alone() -> None:
    venv = vector()
    venv.reset(seed=0)
    options = {"reset_mask": np.array([True, False, True])}
    venv.reset(options=options)
    assert list(options) == ["reset_mask"]
    venv.close()


def test_a_slot_without_an_action_stays_as_it_is() -> None:
    venv = vector()
    observations, _ = ask(venv, 1, 1, 1)
    stepped = venv.step([None, UP, None])
    assert stepped[0][0] == observations[0]
    assert stepped[0][1][0].content == "1"
    assert stepped[4]["_calls"].tolist() == [False, True, False]
    venv.step([UP, None, UP])
    assert venv.step([DONE, DONE, DONE])[1].tolist() == [1.0, 1.0, 1.0]
    venv.close()


def test_stepping_an_ended_slot_is_refused_by_name_and_nothing_moves() -> None:
    venv = vector()
    ask(venv, 0, 1, 1)
    venv.step([DONE, None, None])
    with pytest.raises(ResetNeededError, match=r"slots \[0\] have no running episode"):
        venv.step([UP, UP, UP])
    assert [env.count for env in venv.envs] == [0, 0, 0]  # type: ignore[attr-defined]
    venv.step([None, UP, UP])
    venv.close()


def test_a_failing_slot_does_not_touch_the_others() -> None:
    venv = vector()
    ask(venv, 1, 1, 1)
    _, rewards, terminations, truncations, infos = venv.step([UP, BREAK, UP])
    assert np.isnan(rewards[1])
    assert (terminations.tolist(), truncations.tolist()) == ([False] * 3, [False, True, False])
    assert infos["failure"][1] == Failure("counter_broke", "step", "counter broke")
    assert venv.step([DONE, None, DONE])[1].tolist() == [1.0, 0.0, 1.0]
    broken = [None, Task("t", "t", {"fail": "setup"}), Task("ok", "ok", {"n": 0})]
    _, infos = venv.reset(options={"tasks": broken})
    assert infos["_failure"].tolist() == [False, True, False]
    assert infos["failure"][1].kind == "setup_raised"
    assert venv.step([None, None, DONE])[1][2] == 1.0
    venv.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_failing_slot_begins_anew_under_autoreset(mode: AutoresetMode) -> None:
    venv = vector(autoreset_mode=mode)
    ask(venv, 1, 1, 1)
    venv.step([UP, BREAK, UP])
    if mode is AutoresetMode.NEXT_STEP:
        observations, *_ = venv.step([None, UP, None])
        assert "count to" in observations[1][0].content
    stepped = venv.step([DONE, UP, DONE])
    assert stepped[1].tolist() == [1.0, 0.0, 1.0]
    venv.close()


@pytest.mark.parametrize(
    "mask",
    [
        np.zeros(3, dtype=bool),
        np.ones(2, dtype=bool),
        np.ones(3, dtype=np.int64),
        [True, False, True],
    ],
)
def test_a_mask_that_is_none_is_refused(mask: Any) -> None:
    venv = vector()
    with pytest.raises(ConfigurationError, match="reset_mask"):
        venv.reset(options={"reset_mask": mask})
    venv.close()


class FlakyEnv(CountEnv):
    """Its setup fails every other time."""

    tries = 0

    def setup(self, task: Task) -> None:
        self.tries += 1
        if self.tries % 2 == 0:
            raise OSError("no disk")
        self.count = 0


def test_a_reset_that_fails_under_same_step_is_tried_again_and_holds_up_nobody() -> None:
    venv = ToolVectorEnv([CountEnv, FlakyEnv], autoreset_mode=AutoresetMode.SAME_STEP)
    venv.reset(seed=0)
    _, rewards, _, _, infos = venv.step([UP, DONE])
    assert infos["final_info"]["solved"][1] in (True, False)
    assert infos["failure"][1].where == "reset"
    assert not np.isnan(rewards[1])
    observations, _, _, truncations, infos = venv.step([UP, UP])
    assert "count to" in observations[1][0].content
    assert not truncations[1]
    assert "failure" not in infos
    venv.close()


def test_a_reset_that_fails_under_next_step_has_no_reward() -> None:
    venv = ToolVectorEnv([FlakyEnv], autoreset_mode=AutoresetMode.NEXT_STEP)
    venv.reset(seed=0)
    venv.step([DONE])
    _, rewards, _, truncations, infos = venv.step([UP])
    assert np.isnan(rewards[0])
    assert truncations[0]
    assert infos["failure"][0].kind == "setup_raised"
    assert venv.step([UP])[3].tolist() == [False]
    venv.close()


def test_what_ends_processes_and_tasks_ends_one_slot() -> None:
    class Exits(CountEnv):
        async def setup(self, task: Task) -> None:
            if task.id == "exit":
                sys.exit(3)
            if task.id == "cancel":
                raise asyncio.CancelledError

        async def score(self, episode: Episode) -> float:
            sys.exit(4)

    venv = ToolVectorEnv([Exits] * 3)
    _, infos = venv.reset(options={"tasks": [Task("exit", ""), Task("cancel", ""), Task("fine", "")]})
    assert infos["_failure"].tolist() == [True, True, False]
    venv.send([DONE], [2])
    *_, infos, _ = venv.recv()
    assert infos["failure"][0].kind == "score_raised"
    venv.close()


def test_closing_ends_even_if_a_tool_blocks_the_loop() -> None:
    began, release = threading.Event(), threading.Event()

    class Blocks(CountEnv):
        @tool
        async def block(self) -> bool:
            """Block, as no coroutine may."""
            began.set()
            return release.wait(60)

    venv = ToolVectorEnv([Blocks])
    venv.reset()
    venv.send([AssistantMessage("", (ToolCall("block", {}),))], [0])
    assert began.wait(20)
    with pytest.warns(ResourceWarning, match="blocked by code that does not await"):
        venv.close()
    release.set()


def test_wrong_numbers_of_things_are_refused() -> None:
    venv = vector()
    with pytest.raises(ResetNeededError, match="no episode has begun"):
        venv.step([None] * 3)
    venv.reset(seed=[np.int64(1), None, 3])  # type: ignore[list-item]
    for wrong, said in (
        (lambda: venv.step([UP]), "expected 3 actions"),
        (lambda: venv.step([UP, "text", None]), "actual by slot: {1: 'str'}"),
        (lambda: venv.reset(seed=[1, 2]), "expected 3 seeds"),
        (lambda: venv.reset(seed=-5), "expected seeds of 0 or more"),
        (lambda: vector(autoreset_mode="next_step"), "expected an autoreset_mode among NextStep"),
        (lambda: venv.reset(options={"tasks": ["x", None, None]}), "expected 3 Tasks or Nones"),
        (lambda: venv.send([UP], [7]), "idle slots below 3"),
        (lambda: venv.send([UP, UP], [1, 1]), "each once"),
        (venv.recv, r"send\(\) first"),
        (lambda: vector(0), "expected num_envs of 1 or more"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            wrong()
    venv.close()


def test_no_slot_waits_for_a_slower_one() -> None:
    gate = threading.Event()

    def wait(slow: bool) -> str:
        """Wait, if it is slow."""
        return str(gate.wait(20)) if slow else "at once"

    def make() -> ToolEnv:
        return ToolEnv.from_functions([wait], ["go"], lambda episode: 1.0)

    venv = ToolVectorEnv([make] * 3)
    venv.reset(seed=0)
    actions = [AssistantMessage("", (ToolCall("wait", {"slow": i == 0}),)) for i in range(3)]
    venv.send(actions, [0, 1, 2])
    observations, *_, ids = venv.recv(min_count=2)
    assert sorted(ids.tolist()) == [1, 2]
    assert {observation[0].content for observation in observations} == {"at once"}
    with pytest.raises(ToolgymError, match=r"recv\(\) first"):
        venv.step([None] * 3)
    with pytest.raises(ConfigurationError, match="idle slots"):
        venv.send([UP], [0])
    with pytest.raises(ToolgymError, match=r"slots in flight: \[0\]"):
        venv.recv(timeout=0.01)
    gate.set()
    observations, rewards, terminations, _, infos, ids = venv.recv()
    assert (ids.tolist(), observations[0][0].content) == ([0], "True")
    assert (rewards.shape, terminations.shape, infos["calls"][0]) == ((1,), (1,), ("ok",))
    venv.close()


def test_close_leaves_no_thread_and_may_be_called_again() -> None:
    before = set(threading.enumerate())
    venv = vector(8)
    venv.reset(seed=0)
    venv.step([UP] * 8)
    assert set(threading.enumerate()) != before
    venv.close()
    venv.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(ToolgymError, match="closed"):
        venv.reset()


def test_a_forgotten_vector_closes_itself() -> None:
    before = set(threading.enumerate())
    venv = vector()
    venv.reset(seed=0)
    del venv
    gc.collect()
    assert set(threading.enumerate()) == before


def test_environments_with_different_tools_are_refused() -> None:
    def f() -> int:
        """F."""
        return 0

    def g() -> int:
        """G."""
        return 0

    with pytest.raises(ConfigurationError, match="same tools"):
        ToolVectorEnv([lambda t=t: ToolEnv.from_functions([t], ["x"], lambda e: 0.0) for t in (f, g)])  # type: ignore[misc]


def test_an_authors_environment_can_be_registered_once() -> None:
    register_env("tests/Count-v0", CountEnv)
    try:
        venv = gymnasium.make_vec("tests/Count-v0", num_envs=2, max_steps=1)
        assert isinstance(venv, ToolVectorEnv)
        venv.close()
        assert "tests/Count-v0" in tool_env_ids()
        gymnasium.make("tests/Count-v0").close()
        with pytest.raises(ConfigurationError, match="is taken"):
            register_env("tests/Count-v0", CountEnv)
        with pytest.raises(ConfigurationError, match="cannot be registered"):
            register_env("no good id", CountEnv)
    finally:
        gymnasium.registry.pop("tests/Count-v0")


def test_infos_keep_their_values_whatever_came_first() -> None:
    batched = batch_infos([{"a": 1, "n": {"x": True}}, None, {"a": 0.5, "r": [1]}, {"r": [1, 2], "n": {"y": 3}}])
    assert batched["a"].tolist() == [1.0, 0.0, 0.5, 0.0]
    assert batched["_a"].tolist() == [True, False, True, False]
    assert batched["r"].tolist() == [None, None, [1], [1, 2]]
    assert batched["n"]["x"].dtype == np.bool_
    assert batched["n"]["_y"].tolist() == [False, False, False, True]
    assert batch_infos([None, {}]) == {}
