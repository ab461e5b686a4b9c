"""Two thousand rollouts under fire: as many come back as were asked for, each failure by name, the rest untouched."""

import asyncio
import dataclasses
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from campaign import (
    BLOCKED,
    IN_ENVIRONMENT,
    IN_POLICY,
    MEMBERS,
    QUICK,
    RELEASE,
    SLOTS,
    TASKS,
    CampaignEnv,
    CampaignPolicy,
    expected_failure,
    is_untouched,
    left_on,
    slots,
    tasks,
)
from control import OURS
from helpers import EchoEnv

from toolgym.agents.chat import ChatFormat
from toolgym.envs import EnvironmentFailure, Task, ToolVectorEnv, tool
from toolgym.rollout import (
    Collector,
    Recovery,
    RolloutFailed,
    Stall,
    StopReason,
    Trajectory,
    Watch,
    rollout,
)
from toolgym.rollout.store import RunFolder
from toolgym.rollout.trajectory import SegmentKind

AGAIN = {"setup raises", "tool breaks", None}  # what comes and goes in an environment; a policy's trouble always may


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("toolgym.envs.vector._CLOSING", 2.0)  # for those that hang at it
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


@pytest.fixture(scope="module")
def healthy(chat: ChatFormat) -> list[Trajectory]:
    """The same rollouts without a fault."""
    envs = slots()
    found = collected(Collector(envs, CampaignPolicy(chat), chat), envs, tasks(healthy=True))
    with pytest.warns(ResourceWarning, match="close"):
        envs.close()
    assert all(trajectory.solved for trajectory in found)
    return found


@pytest.mark.parametrize(("schedule", "count"), [("overlap", TASKS), ("lockstep", 85)])
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
        if is_untouched(task, trajectory.member):
            assert trajectory == good
        elif kind is None:
            assert trajectory.stop_reason is StopReason.ANSWERED, "the model is told, and goes on"
        elif task.data.get("policy") == "misaligned logprobs":
            assert_not_recorded(trajectory)
    assert min(kinds.values()) >= count // 100
    assert len(kinds) == 1 + len({*IN_ENVIRONMENT.values(), *IN_POLICY.values()} - {None})
    with pytest.warns(ResourceWarning, match="close"):
        envs.close()


def assert_not_recorded(trajectory: Trajectory) -> None:
    """What does not add up is no part of the record, whose columns are whole."""
    assert trajectory.failure is not None
    assert "sampled tokens" in trajectory.failure.message, "the record's own check has found it"
    assert len(trajectory.turns) == 1
    assert trajectory.segments[-1].kind is SegmentKind.OBSERVATION
    assert len({len(column) for column in (trajectory.input_ids, trajectory.logprobs, trajectory.loss_mask)}) == 1


class OnceEnv(CampaignEnv):
    """Fails the first attempt at a troubled episode; then it must go, but hangs at that, fails, or closes."""

    seen: set[tuple[str, int]]
    closing: Iterator[str]
    closed: Counter[str]
    broken = failed = False

    async def setup(self, task: Task) -> None:
        key = (task.id, self.context.member)
        first = key not in self.seen
        self.seen.add(key)
        self.broken = first and task.data["trouble"] == "tool breaks"
        if first and task.data["trouble"] == "setup raises":
            self.failed = True
            raise OSError("no disk")

    @tool
    async def echo(self, text: str) -> str:  # type: ignore[override]
        """Say it again."""
        if self.broken:
            self.failed = True
            raise EnvironmentFailure("no box", kind="box_died")
        return text

    async def aclose(self) -> None:
        await EchoEnv.aclose(self)
        if not self.failed:
            return
        how = next(self.closing)
        self.closed[how] += 1
        if how == "fails":
            raise OSError("cannot close")
        if how == "hangs":
            await asyncio.Event().wait()


def test_what_fails_once_is_as_without_faults_when_it_is_tried_again(
    chat: ChatFormat, healthy: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is made again by itself; an episode is begun anew in a fresh environment, however the old one ends."""
    OnceEnv.seen, OnceEnv.closing, OnceEnv.closed = set(), cycle(("fails", "hangs", "closes")), Counter()
    envs = ToolVectorEnv.of(OnceEnv, num_envs=SLOTS, tool_timeout=1.0)
    recovery = Recovery(on_failure="retry", retries=1, request_retries=1, backoff=0.01)
    well = tasks(healthy=True)
    chosen = [task if task.data["trouble"] in AGAIN else well[k] for k, task in enumerate(tasks())]
    collector = Collector(envs, CampaignPolicy(chat, times=1), chat, QUICK, recovery=recovery)
    monkeypatch.setattr("toolgym.envs.vector._CLOSING", 0.5)
    with pytest.warns(ResourceWarning, match="close") as warned:
        made = rollout(collector, chosen, MEMBERS)
    monkeypatch.undo()
    retried = 0
    for good, trajectory in zip(healthy, made.trajectories, strict=True):
        retried += len(trajectory.earlier)
        kind = expected_failure(chosen[trajectory.task_index], trajectory.member)
        of_record = chosen[trajectory.task_index].data.get("policy") in (None, "misaligned logprobs", "misfed")
        assert [failure.kind for failure in trajectory.earlier] == ([kind] if kind and of_record else [])
        trajectory.earlier, trajectory.env_id = (), good.env_id
        assert trajectory == good
    assert retried == made.progress.retried >= 20
    said = Counter(str(warning.message).partition("OnceEnv ")[2] for warning in warned)
    assert said["failed to close: OSError: cannot close"] == OnceEnv.closed["fails"] >= 10
    assert said["took over 0.5 s to close; left as it is"] == OnceEnv.closed["hangs"] >= 10
    assert OnceEnv.closed["closes"] >= 10
    assert left_on(envs) == []
    envs.close()


def test_a_tool_that_blocks_the_event_loop_is_named_by_its_line_and_the_others_come_back(
    chat: ChatFormat, healthy: list[Trajectory]
) -> None:
    heard: list[Stall] = []
    envs = ToolVectorEnv.of(CampaignEnv, num_envs=SLOTS)
    chosen = tasks(100, healthy=True)
    chosen[7] = dataclasses.replace(chosen[7], data={**chosen[7].data, "trouble": "tool blocks its loop"})
    collector = Collector(envs, CampaignPolicy(chat), chat, watch=Watch(BLOCKED / 8, heard.append))
    assert collected(collector, envs, chosen) == healthy[: 100 * MEMBERS]
    where = [stall.where for stall in heard if stall.blocked]
    assert any("in echo\n    time.sleep(BLOCKED)" in lines for lines in where), where
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
    troubled = tasks()
    for good, trajectory in zip(healthy, made.trajectories, strict=True):
        if trajectory.solved and is_untouched(troubled[trajectory.task_index], trajectory.member):
            assert trajectory == good
    assert left_on(envs) == []
    with pytest.warns(ResourceWarning, match="close"):
        envs.close()


PROGRAM = """
    import signal, sys, threading, warnings
    from campaign import MEMBERS, RELEASE, CampaignEnv, CampaignPolicy, left_on, tasks
    from toolgym.agents.chat import load_chat_format
    from toolgym.agents.tiny import TINY_MODEL
    from toolgym.envs import ToolVectorEnv
    from toolgym.rollout import Collector, Limits, Recovery, RolloutInterrupted, Watch, rollout
    from toolgym.rollout.store import RunFolder

    say = lambda *words: print(*words, flush=True)
    awaited = {"tools: echo", "tools: block", "reset of the environment", "score of the environment", "the policy"}
    announced = []

    def look(stall):
        awaited.difference_update(entry.what for entry in stall.waiting)
        if not awaited and not announced:
            announced.append(say("READY"))

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal
        warnings.simplefilter("ignore")
        chat = load_chat_format(TINY_MODEL)
        # What hangs does so for longer than the test takes, and in more episodes than there are slots.
        envs = ToolVectorEnv.of(CampaignEnv, num_envs=48, tool_timeout=100.0)
        limits = Limits(reset_timeout=100.0, sample_timeout=100.0, step_timeout=150.0)
        recovery, watch = Recovery(request_retries=0), Watch(0.5, look)
        collector = Collector(envs, CampaignPolicy(chat), chat, limits, recovery=recovery, watch=watch)
        told = RunFolder.create(sys.argv[1], {})
        try:
            rollout(collector, tasks(int(sys.argv[2])), MEMBERS, on_trajectory=told.append)
        except RolloutInterrupted as interrupt:
            kept = interrupt.rollout.trajectories
            say("KEPT", len(kept))
            ended = [t for t in kept if t.stop_reason.value != "cancelled"]
            say("SAME", sorted(told.trajectories(), key=lambda t: (t.task_index, t.member)) == ended)
            say("CANCELLED", len(kept) - len(ended))
        say("TASKS", left_on(envs))
        RELEASE.set()
        envs.close()
        for thread in threading.enumerate():
            if thread.name == "tool block":
                thread.join()
        say("THREADS", [t.name for t in threading.enumerate() if not t.name.startswith("toolgym chat")])
"""


def test_ctrl_c_under_fire_keeps_what_is_finished_cancels_the_rest_and_leaves_nothing(
    healthy: list[Trajectory], tmp_path: Path
) -> None:
    count, folder = 500, tmp_path / "run"
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    environ = {**OURS, "PYTHONPATH": f"{OURS['PYTHONPATH']}:{Path(__file__).parent}"}
    command = [sys.executable, str(tmp_path / "program.py"), str(folder), str(count)]
    with (
        (tmp_path / "errors").open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "READY\n"
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)  # it ends by itself
        finally:
            process.kill()
    assert process.returncode == 0, (tmp_path / "errors").read_text()
    said = {line.partition(" ")[0]: line.partition(" ")[2] for line in out.splitlines()}
    cancelled = int(said.pop("CANCELLED"))
    assert said == {"KEPT": str(count * MEMBERS), "SAME": "True", "TASKS": "[]", "THREADS": "['MainThread']"}
    found = list(RunFolder.open(folder).trajectories())
    assert len(found) + cancelled == count * MEMBERS
    troubled, ended = tasks(count), Counter({StopReason.CANCELLED: cancelled})
    for trajectory in found:
        good = healthy[trajectory.task_index * MEMBERS + trajectory.member]
        ended[trajectory.stop_reason] += 1
        task, kind = troubled[trajectory.task_index], trajectory.failure and trajectory.failure.kind
        if is_untouched(task, trajectory.member):
            assert trajectory == good
        else:
            assert kind == expected_failure(task, trajectory.member)
    assert ended[StopReason.ANSWERED] > 100
    assert ended[StopReason.CANCELLED] > 48, "those in the slots, and some that had not begun"
