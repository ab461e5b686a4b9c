"""Filters leave trajectories and groups out of the results, and count them."""

import asyncio
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
from control import BOTH, OURS, answer, nothing_left
from helpers import echo_twice, vector

from toolgym.agents.chat import ChatFormat
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.envs import ConfigurationError
from toolgym.rollout import Collector, Filters, Group, RolloutFailed, Trajectory, arollout, rollout


async def _odd(trajectory: Trajectory) -> bool:
    await asyncio.sleep(0)
    return trajectory.member % 2 == 1


class _Odd:
    async def __call__(self, trajectory: Trajectory) -> bool:
        return await _odd(trajectory)


@BOTH
@pytest.mark.parametrize(
    "accept",
    [lambda t: t.member % 2 == 1, lambda t: True if t.member % 2 else None, _odd, _Odd(), lambda t: _odd(trajectory=t)],
    ids=["plain", "none", "async", "callable", "lambda"],
)
def test_rejected_trajectories_are_left_out_and_counted(chat: ChatFormat, accept: Any, schedule: Any) -> None:
    envs = vector()
    collector = Collector(
        envs, ScriptedPolicy(chat, echo_twice), chat, schedule=schedule, filters=Filters(accept=accept)
    )
    told: list[str] = []
    with nothing_left(envs):
        found = rollout(collector, 3, 4, on_trajectory=lambda t: told.append(t.id))
        assert [t.id for t in found.trajectories] == ["0.1", "0.3", "1.1", "1.3", "2.1", "2.3"]
        assert [t.id for t in found.rejected] == ["0.0", "0.2", "1.0", "1.2", "2.0", "2.2"]
        assert (found.progress.finished, found.progress.rejected) == (12, 6)
        assert sorted(told) == [t.id for t in found.trajectories]
        assert [(len(group.trajectories), group.partial) for group in found.groups] == [(2, True)] * 3
        assert collector.collect(3, 4) == found.trajectories
        again = asyncio.run(arollout(collector, 3, 4))
        assert (again.trajectories, again.rejected) == (found.trajectories, found.rejected)


@BOTH
def test_rejected_groups_are_left_out_whole(chat: ChatFormat, schedule: Any) -> None:
    asked: list[Group] = []

    def accept_group(group: Group) -> bool:
        asked.append(group)
        return group.task_index != 1

    envs = vector(trouble=lambda k: "tool breaks" if k == 2 else None)
    filters = Filters(lambda t: t.member != 0, accept_group)
    collector = Collector(envs, ScriptedPolicy(chat, echo_twice), chat, schedule=schedule, filters=filters)
    with nothing_left(envs):
        found = rollout(collector, 4, 3)
        ids = ["0.1", "0.2", "2.0", "2.1", "2.2", "3.1", "3.2"]
        assert [t.id for t in found.trajectories] == ids, "failed ones are not asked about one by one"
        assert [t.id for t in found.rejected] == ["0.0", "1.0", "1.1", "1.2", "3.0"]
        by_index = {group.task_index: group for group in asked}
        assert len(asked) == len(by_index) == 4
        assert [t.member for t in by_index[1].trajectories] == [1, 2]
        assert by_index[2].scored == ()
        assert found.progress.rejected == 5


def test_a_group_of_which_nothing_is_left_is_not_asked_about(chat: ChatFormat) -> None:
    asked: list[int] = []
    envs = vector()
    filters = Filters(lambda t: t.task_index == 1, lambda group: asked.append(group.task_index) or True)  # type: ignore[func-returns-value]
    with nothing_left(envs):
        found = rollout(Collector(envs, ScriptedPolicy(chat, answer), chat, filters=filters), 3, 2)
        assert asked == [1]
        assert [group.task_index for group in found.groups] == [1]


def test_batches_are_whole_after_rejections(chat: ChatFormat) -> None:
    envs = vector(3, count=12)
    filters = Filters(lambda t: t.task_index % 3 != 0, lambda group: group.task_index % 4 != 1)
    policy = ScriptedPolicy(chat, echo_twice)
    batches = []
    with nothing_left(envs):
        for batch in Collector(envs, policy, chat, filters=filters).batches(12, 2, groups=2, max_staleness=0):
            batches.append([group.task_index for group in batch])
            policy.version += 1
        assert batches == [[2, 4], [7, 8], [10, 11]]


def _raises(what: Any) -> bool:
    raise ZeroDivisionError("no tokens")


def _exits(what: Any) -> bool:
    raise SystemExit(3)


async def _raises_too(what: Any) -> bool:
    raise ZeroDivisionError("no tokens")


async def _is_cancelled(what: Any) -> bool:
    raise asyncio.CancelledError


@BOTH
@pytest.mark.parametrize("name", ["accept", "accept_group"])
@pytest.mark.parametrize("filter_", [_raises, _exits, _raises_too, _is_cancelled])
def test_a_filter_that_raises_ends_it_with_all_that_is_finished(
    chat: ChatFormat, name: str, filter_: Any, schedule: Any
) -> None:
    envs = vector(2)
    filters = Filters(**{name: filter_})
    collector = Collector(envs, ScriptedPolicy(chat, answer), chat, schedule=schedule, filters=filters)
    with nothing_left(envs):
        with pytest.raises(RolloutFailed, match=rf"{name} on (trajectory|group) .* raised") as caught:
            rollout(collector, 6, 2)
        found = caught.value.rollout
        assert len(found.trajectories) == 12
        assert found.rejected == []
        assert any(t.solved for t in found.trajectories)


@pytest.mark.parametrize("name", ["accept", "accept_group"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_filter_that_hangs_ends_it_too(chat: ChatFormat, name: str, asynchronous: bool) -> None:
    let_go = threading.Event()

    async def hang(what: Any) -> bool:
        await asyncio.Event().wait()
        return True

    filters = Filters(**{name: hang if asynchronous else lambda what: let_go.wait()}, timeout=0.1)  # type: ignore[arg-type]
    envs = vector(2)
    with nothing_left(envs):
        with pytest.raises(RolloutFailed, match=r"took over 0\.1 s") as caught:
            rollout(Collector(envs, ScriptedPolicy(chat, answer), chat, filters=filters), 4)
        assert len(caught.value.rollout.trajectories) == 4
        let_go.set()


def test_a_filter_that_never_returns_keeps_no_process_alive() -> None:
    script = """
        import threading
        import toolgym.envs as tg
        from toolgym.agents.chat import load_chat_format
        from toolgym.agents.scripted_policy import ScriptedPolicy
        from toolgym.agents.tiny import TINY_MODEL
        from toolgym.rollout import Collector, Filters, RolloutFailed, rollout

        chat = load_chat_format(TINY_MODEL)
        envs = tg.ToolVectorEnv.of(lambda **o: tg.ToolEnv.from_functions([], ["hello"], lambda e: 1.0, **o), num_envs=1)
        policy = ScriptedPolicy(chat, lambda request, member: "hi")
        filters = Filters(lambda t: threading.Event().wait(), timeout=0.2)
        try:
            rollout(Collector(envs, policy, chat, filters=filters), 1)
        except RolloutFailed as failed:
            print(failed)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=OURS,
    )
    assert (ran.returncode, ran.stdout) == (0, "accept on trajectory 0.0 took over 0.2 s\n"), ran.stderr


@pytest.mark.parametrize(
    "options", [{"accept": 5}, {"accept_group": "all"}, {"timeout": 0}, {"timeout": float("inf")}, {"timeout": True}]
)
def test_wrong_filters_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"expected Filters.{next(iter(options))}"):
        Filters(**options)
