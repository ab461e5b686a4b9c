"""Collections whose tools run code in Docker: exact records, failures with names, and nothing left behind."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator

import docker
import gymnasium
import numpy as np
import psutil
import pytest

import toolgym.envs  # noqa: F401 - registers
from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import SampleRequest
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.agents.vllm_policy import VLLMPolicy
from toolgym.envs import AssistantMessage, ConfigurationError, ToolCall
from toolgym.envs.catalog import code_math, code_tests, shell
from toolgym.envs.sandbox.docker_engine import LABEL, OWNER
from toolgym.envs.sandbox.owners import Owner
from toolgym.envs.sandbox.sandbox import SandboxPool
from toolgym.rollout.collector import Collector
from toolgym.rollout.limits import Limits
from toolgym.rollout.trajectory import StopReason, Trajectory

pytestmark = pytest.mark.docker
LIMITS = Limits(max_turns=6, max_trajectory_tokens=8_192, max_completion_tokens=2_048)


@pytest.fixture
def api(docker_engine: None) -> Iterator[docker.APIClient]:
    client = docker.APIClient(version="auto")
    yield client
    client.close()


def mine(api: docker.APIClient) -> set[str]:
    """The boxes of this process; other tests may have some of their own."""
    found = api.containers(all=True, filters={"label": LABEL})
    return {entry["Id"] for entry in found if Owner.parse(entry["Labels"][OWNER]) == Owner.me()}


def solver(chat: ChatFormat, module: object) -> ScriptedPolicy:
    """Plays the reference solution."""

    def play(request: SampleRequest, member: int) -> AssistantMessage:
        assert request.task is not None
        said: AssistantMessage = module.solve(request.task, request.messages)  # type: ignore[attr-defined]
        return said

    return ScriptedPolicy(chat, play)


def check_records(trajectories: list[Trajectory]) -> None:
    for trajectory in trajectories:
        assert trajectory.stop_reason is not None
        sizes = {len(column) for column in (trajectory.input_ids, trajectory.loss_mask, trajectory.logprobs)}
        assert sizes == {sum(segment.end - segment.start for segment in trajectory.segments)}
        assert np.isfinite(trajectory.logprobs[trajectory.loss_mask]).all()


@pytest.mark.parametrize("mode", ["stateless", "session"])
def test_64_episodes_of_code_math_leave_no_box(chat: ChatFormat, api: docker.APIClient, mode: str) -> None:
    before = mine(api)
    slots = 16 if mode == "stateless" else 8
    envs = gymnasium.make_vec("toolgym/CodeMath-v0", num_envs=slots, sandbox="docker", mode=mode, split="test")
    trajectories = Collector(envs, solver(chat, code_math), chat, LIMITS, schedule="overlap").collect(16, 4)
    envs.close()
    assert len(trajectories) == 64
    check_records(trajectories)
    assert {t.stop_reason for t in trajectories} == {StopReason.ANSWERED}
    assert [t.reward for t in trajectories] == [1.0] * 64
    assert mine(api) <= before


@pytest.mark.parametrize(("name", "module"), [("CodeTests", code_tests), ("Shell", shell)])
def test_the_other_environments_on_docker(chat: ChatFormat, api: docker.APIClient, name: str, module: object) -> None:
    before = mine(api)
    envs = gymnasium.make_vec(f"toolgym/{name}-v0", num_envs=4, sandbox="docker", split="test")
    trajectories = Collector(envs, solver(chat, module), chat, LIMITS).collect(8, 1)
    envs.close()
    check_records(trajectories)
    assert [(t.reward, t.failure) for t in trajectories] == [(1.0, None)] * 8
    assert mine(api) <= before


def test_a_traceback_that_is_too_long_keeps_its_end(chat: ChatFormat) -> None:
    """Where the error stands; and the text says that something was cut."""

    def play(request: SampleRequest, member: int) -> AssistantMessage:
        code = "print('x' * 30_000)\nraise ValueError('the end of it')"
        return AssistantMessage("", (ToolCall("python", {"code": code}),)) if not request.turn else AssistantMessage("")

    envs = gymnasium.make_vec("toolgym/CodeMath-v0", num_envs=1, sandbox="docker", max_output_chars=100_000)
    limits = Limits(max_trajectory_tokens=4_096, max_observation_tokens=200)
    (trajectory,) = Collector(envs, ScriptedPolicy(chat, play), chat, limits).collect(1)
    envs.close()
    shown = trajectory.messages[-2].content
    assert shown.rstrip().endswith("ValueError: the end of it")
    assert "characters cut" in shown
    observation = next(s for s in trajectory.segments if s.kind == "observation")
    assert observation.end - observation.start <= 200


def test_boxes_that_die_fail_their_episodes_by_name_and_no_others(chat: ChatFormat, api: docker.APIClient) -> None:
    """Boxes are removed in mid-call; later episodes run on fresh ones, and no model is told."""
    victims = threading.Semaphore(3)

    def play(request: SampleRequest, member: int) -> AssistantMessage:
        assert request.task is not None
        if not request.turn and request.task.data["kill"]:
            return AssistantMessage("", (ToolCall("python", {"code": "while True: pass"}),))
        return code_math.solve(request.task, request.messages)

    with SandboxPool("docker", size=4) as pool:
        envs = gymnasium.make_vec("toolgym/CodeMath-v0", num_envs=4, sandbox=pool, mode="session")
        tasks = [
            type(task)(task.id, task.prompt, {**task.data, "kill": k in (1, 5, 9)})
            for k, task in enumerate(envs.tasks.take(16))  # type: ignore[attr-defined]
        ]
        done = threading.Event()

        def assassin() -> None:
            while not done.wait(0.02):
                for box in list(pool._pool._leased):
                    for pending in list(box._connection._pending.values()):
                        if pending.began and _busy(api, box.name) and victims.acquire(blocking=False):
                            api.remove_container(box.name, force=True)

        thread = threading.Thread(target=assassin)
        thread.start()
        trajectories = Collector(envs, ScriptedPolicy(chat, play), chat, LIMITS).collect(tasks)
        done.set()
        thread.join()
        envs.close()
    assert len(trajectories) == 16
    check_records(trajectories)
    failed = [t for t in trajectories if t.failure is not None]
    assert Counter(t.failure.kind for t in failed if t.failure) == {"sandbox_box_died": 3}
    assert all(t.reward is None for t in failed)
    assert "died" not in " ".join(message.content for t in failed for message in t.messages)
    assert [t.reward for t in trajectories if t.failure is None] == [1.0] * 13


def _busy(api: docker.APIClient, name: str) -> bool:
    """Whether code in the box has used half a second of CPU: it is one that never ends."""
    try:
        usage = api.stats(name, stream=False, one_shot=True)["cpu_stats"]["cpu_usage"]["total_usage"]
    except docker.errors.APIError:
        return False
    return bool(usage > 1_000_000_000)


def test_5000_calls_let_nothing_grow(api: docker.APIClient) -> None:
    """Of the client, of the engine, and of the boxes."""
    engine = next(p for p in psutil.process_iter(["name"]) if p.info["name"] == "dockerd")
    with SandboxPool("docker", size=4, episodes=10_000) as pool:  # none is replaced meanwhile

        async def calls(count: int) -> None:
            async def caller() -> None:
                sandbox = pool.sandbox(lease="call")
                for _ in range(count // 4):
                    assert (await sandbox.run("print(6 * 7)")).stdout.text == "42\n"

            await asyncio.gather(*(caller() for _ in range(4)))

        def memory() -> dict[str, float]:
            boxes = sum(api.stats(name, stream=False, one_shot=True)["memory_stats"]["usage"] for name in mine(api))
            client = psutil.Process().memory_info().rss
            return {"client": client / 1e6, "engine": engine.memory_info().rss / 1e6, "boxes": boxes / 1e6}

        asyncio.run(calls(1_000))
        before = memory()
        asyncio.run(calls(4_000))
        after = memory()
        assert pool.state.made == 4
    grown = {name: after[name] - before[name] for name in before}
    assert grown["client"] < 10, grown
    assert grown["engine"] < 20, grown
    assert grown["boxes"] < 20, grown


@pytest.mark.vllm
def test_the_embedded_model_calls_python_in_docker(engine: VLLMPolicy, chat: ChatFormat, api: docker.APIClient) -> None:
    """It was never taught to: what counts is that every record is exact, whatever it says."""
    before = mine(api)
    envs = gymnasium.make_vec("toolgym/CodeMath-v0", num_envs=8, sandbox="docker", split="test", levels=(1,))
    limits = Limits(max_turns=4, max_trajectory_tokens=2_048, max_completion_tokens=256)
    trajectories = Collector(envs, engine, chat, limits, schedule="overlap").collect(4, 4)
    envs.close()
    assert len(trajectories) == 16
    check_records(trajectories)
    assert all(t.failure is None for t in trajectories), Counter(str(t.failure) for t in trajectories)
    assert StopReason.TOKEN_MISMATCH not in {t.stop_reason for t in trajectories}
    assert mine(api) <= before


def test_waiting_for_a_box_is_never_told_as_a_slow_tool(chat: ChatFormat) -> None:
    envs = gymnasium.make_vec("toolgym/CodeMath-v0", num_envs=1, sandbox="local")
    policy = ScriptedPolicy(chat, lambda request, member: AssistantMessage("7"))
    with pytest.raises(ConfigurationError, match=r"Limits.tool_timeout is 1 s, but one run in the sandbox may take"):
        Collector(envs, policy, chat, Limits(tool_timeout=1.0))
    envs.close()
