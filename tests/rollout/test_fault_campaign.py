"""Two thousand rollouts under fire: as many come back as were asked for, each failure by name, the rest untouched."""

import asyncio
import dataclasses
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import EchoEnv, call, echo_twice

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Completion, PolicyFailure, SampleRequest
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.envs import AssistantMessage, EnvironmentFailure, Task, ToolVectorEnv, tool
from toolgym.rollout import Collector, Limits, Recovery, RolloutFailed, StopReason, Trajectory, rollout

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
                return [dataclasses.replace(good, logprobs=good.logprobs[1:])]
            case "misfed":
                assert good.prompt_ids is not None
                return [dataclasses.replace(good, prompt_ids=good.prompt_ids + np.int32(1))]
        return []


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


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    RELEASE.set()  # no thread can be stopped from outside; but those that wait for this end now
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    RELEASE.clear()
    assert {t for t in set(threading.enumerate()) - before if not t.name.startswith("toolgym chat")} == set()


def collected(collector: Collector, envs: ToolVectorEnv, chosen: list[Task]) -> list[Trajectory]:
    found = rollout(collector, chosen, MEMBERS).trajectories
    assert left_on(envs) == []
    return found


def left_on(envs: ToolVectorEnv) -> list[str]:
    """What still runs on the loop: nothing may, but for tools that cannot be stopped."""

    async def names() -> list[str]:
        return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    return [name for name in envs.loop.run(names()) if name != "tool block"]


def slots() -> ToolVectorEnv:
    return ToolVectorEnv.of(CampaignEnv, num_envs=SLOTS, tool_timeout=1.0)


@pytest.fixture(scope="module")
def healthy(chat: ChatFormat) -> list[Trajectory]:
    """The same rollouts without a fault."""
    envs = slots()
    found = collected(Collector(envs, CampaignPolicy(chat), chat), envs, tasks(healthy=True))
    with pytest.warns(ResourceWarning, match="close"):
        envs.close()
    assert all(trajectory.solved for trajectory in found)
    return found


def expected_failure(task: Task, member: int) -> str | None:
    wrong = IN_POLICY.get(task.data.get("policy", "")) if member == 1 else None
    return wrong or IN_ENVIRONMENT.get(task.data["trouble"] or "")


@pytest.mark.parametrize(("schedule", "count"), [("overlap", TASKS), ("lockstep", 170)])
def test_each_failure_has_its_kind_and_the_others_are_as_without_faults(
    chat: ChatFormat, healthy: list[Trajectory], schedule: Any, count: int
) -> None:
    envs, recovery = slots(), Recovery(request_retries=0)
    collector = Collector(envs, CampaignPolicy(chat), chat, QUICK, schedule=schedule, recovery=recovery)
    found = collected(collector, envs, tasks(count))
    assert [(t.task_index, t.member) for t in found] == [(k, m) for k in range(count) for m in range(MEMBERS)]
    troubled = tasks()
    kinds: Counter[str | None] = Counter()
    for good, trajectory in zip(healthy, found, strict=False):
        task = troubled[trajectory.task_index]
        kind = expected_failure(task, trajectory.member)
        kinds[kind] += 1
        assert (trajectory.failure and trajectory.failure.kind) == kind, (task, trajectory.failure)
        assert (trajectory.reward is None) == (kind is not None)
        assert trajectory.stop_reason is not None
        if task.data["trouble"] is None and not (task.data.get("policy") and trajectory.member == 1):
            assert trajectory == good
        elif kind is None:
            assert trajectory.stop_reason is StopReason.ANSWERED, "the model is told, and goes on"
    assert min(kinds.values()) >= count // 100
    assert len(kinds) == 1 + len({*IN_ENVIRONMENT.values(), *IN_POLICY.values()} - {None})
    with pytest.warns(ResourceWarning, match="close"):
        envs.close()


def test_what_fails_once_is_as_without_faults_when_it_is_tried_again(
    chat: ChatFormat, healthy: list[Trajectory]
) -> None:
    """A request is made again by itself; an episode is begun anew in a fresh environment."""
    failed_once: set[tuple[str, int]] = set()
    lock = threading.Lock()

    class OnceEnv(CampaignEnv):
        async def setup(self, task: Task) -> None:
            key = (task.id, self.context.member)
            with lock:
                first = key not in failed_once
                failed_once.add(key)
            self.broken = first and task.data["trouble"] == "tool breaks"
            if first and task.data["trouble"] == "setup raises":
                raise OSError("no disk")

        @tool
        async def echo(self, text: str) -> str:  # type: ignore[override]
            """Say it again."""
            if self.broken:
                raise EnvironmentFailure("no box", kind="box_died")
            return text

    envs = ToolVectorEnv.of(OnceEnv, num_envs=SLOTS, tool_timeout=1.0)
    recovery = Recovery(on_failure="retry", retries=1, request_retries=1, backoff=0.01)
    again = {"setup raises", "tool breaks", None}
    chosen = [
        task if task.data["trouble"] in again and task.data.get("policy") != "misfed" else well
        for task, well in zip(tasks(), tasks(healthy=True), strict=True)
    ]
    made = rollout(Collector(envs, CampaignPolicy(chat, times=1), chat, QUICK, recovery=recovery), chosen, MEMBERS)
    retried = 0
    for good, trajectory in zip(healthy, made.trajectories, strict=True):
        retried += len(trajectory.earlier)
        assert [failure.kind for failure in trajectory.earlier] in ([], ["setup_raised"], ["box_died"])
        trajectory.earlier, trajectory.env_id = (), good.env_id
        assert trajectory == good
    assert retried == made.progress.retried >= 20
    with pytest.warns(ResourceWarning, match="close"):
        envs.close()


def test_a_policy_that_dies_for_good_half_way_fails_the_rest_at_once(
    chat: ChatFormat, healthy: list[Trajectory]
) -> None:
    envs = slots()
    policy = CampaignPolicy(chat, dies_after=2_000)
    found = collected(Collector(envs, policy, chat, recovery=Recovery(backoff=30.0)), envs, tasks(healthy=True))
    ended = Counter(trajectory.stop_reason for trajectory in found)
    assert set(ended) == {StopReason.ANSWERED, StopReason.POLICY_FAILURE}
    assert sum(ended.values()) == TASKS * MEMBERS
    assert ended[StopReason.ANSWERED] > 200
    for good, trajectory in zip(healthy, found, strict=True):
        assert trajectory == good if trajectory.failure is None else trajectory.reward is None
    with pytest.warns(ResourceWarning, match="close"):
        envs.close()


def test_the_first_failure_ends_everything_where_it_is_told_to(chat: ChatFormat, healthy: list[Trajectory]) -> None:
    envs = slots()
    collector = Collector(envs, CampaignPolicy(chat), chat, QUICK, recovery=Recovery("raise", request_retries=0))
    with pytest.raises(RolloutFailed, match=r"trajectory \d+\.\d failed in") as raised:
        rollout(collector, tasks(), MEMBERS)
    made = raised.value.rollout
    assert made.progress.finished == len(made.trajectories) == TASKS * MEMBERS
    assert made.progress.failed >= 1
    assert made.progress.cancelled > 1_000
    for good, trajectory in zip(healthy, made.trajectories, strict=True):
        if trajectory.solved and tasks()[trajectory.task_index].data["trouble"] is None:
            assert trajectory == good
    assert left_on(envs) == []
    with pytest.warns(ResourceWarning, match="close"):
        envs.close()
