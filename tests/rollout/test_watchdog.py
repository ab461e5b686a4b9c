"""The watchdog says which slots are stuck, on what, and at which line an event loop is blocked."""

import asyncio
import logging
import threading
import time
from typing import Any

import pytest
from control import BOTH, ActionEnv, VersionedPolicy, answer, nothing_left, tool_then_answer
from helpers import TroubledPolicy, vector

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Completion, PolicyFailure, SampleRequest
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.envs import ConfigurationError, ToolVectorEnv
from toolgym.rollout import (
    Admission,
    Collector,
    Filters,
    Recovery,
    RolloutFailed,
    Stall,
    Waiting,
    Watch,
    arollout,
    rollout,
)
from toolgym.rollout.watchdog import Heartbeat, Watchdog


class Ears:
    """Hears reports, and lets go of what is stuck when it has heard what it waits for."""

    def __init__(self, *wanted: str) -> None:
        self.wanted, self.heard = set(wanted), list[Stall]()
        self.enough = threading.Event()

    def __call__(self, stall: Stall) -> None:
        self.heard.append(stall)
        self.wanted -= {word for word in self.wanted if word in str(stall)}
        if not self.wanted:
            self.enough.set()

    async def wait(self, env: Any = None) -> str:
        while not self.enough.is_set():  # noqa: ASYNC110 - set by the watchdog's thread
            await asyncio.sleep(0.005)
        return "go on"


def test_a_slot_that_waits_for_a_tool_is_named_with_its_tool(chat: ChatFormat) -> None:
    ears = Ears("waits for tools: act", "slot 0 (trajectory ", "turn 1)")
    envs = ToolVectorEnv.of(ActionEnv, num_envs=2, action=ears.wait)
    policy = ScriptedPolicy(chat, tool_then_answer("act"))
    with nothing_left(envs):
        assert all(t.solved for t in Collector(envs, policy, chat, watch=Watch(0.05, ears)).collect(2))
        assert {entry.what for stall in ears.heard for entry in stall.waiting} >= {"tools: act"}


@BOTH
def test_so_is_one_that_waits_for_the_policy_or_its_recovery(chat: ChatFormat, schedule: Any) -> None:
    ears = Ears("waits for the policy since")

    class Slow(ScriptedPolicy):
        async def sample(self, request: SampleRequest) -> list[Completion]:
            await ears.wait()
            return await super().sample(request)

    envs = vector(2)
    with nothing_left(envs):
        Collector(envs, Slow(chat, answer), chat, schedule=schedule, watch=Watch(0.05, ears)).collect(2)
        ears = Ears("waits for the policy to recover from: busy")
        policy = TroubledPolicy(chat, answer, lambda r: None if ears.enough.is_set() else _busy())
        recovery = Recovery(request_retries=50, backoff=0.3, max_backoff=0.3)
        collector = Collector(envs, policy, chat, schedule=schedule, recovery=recovery, watch=Watch(0.05, ears))
        assert all(t.solved for t in collector.collect(2))


def _busy() -> Exception:
    return PolicyFailure("busy")


@pytest.mark.parametrize("name", ["accept", "accept_group"])
def test_so_is_one_that_waits_for_a_filter(chat: ChatFormat, name: str) -> None:
    ears = Ears(f"waits for the filter {name}")
    filters = Filters(**{name: lambda what: ears.enough.wait(30)})  # type: ignore[arg-type]
    envs = vector(1)
    with nothing_left(envs):
        policy = ScriptedPolicy(chat, answer)
        assert len(Collector(envs, policy, chat, filters=filters, watch=Watch(0.05, ears)).collect(1)) == 1


def test_and_one_that_waits_for_admission(chat: ChatFormat) -> None:
    ears = Ears("admission: 1 episodes in flight", "waits for the policy")

    class Slow(ScriptedPolicy):
        async def sample(self, request: SampleRequest) -> list[Completion]:
            await ears.wait()
            return await super().sample(request)

    envs = vector(2)
    with nothing_left(envs):
        watch = Watch(0.05, ears)
        collector = Collector(envs, Slow(chat, answer), chat, admission=Admission(max_in_flight=1), watch=watch)
        assert len(collector.collect(2)) == 2


def test_or_for_newer_weights(chat: ChatFormat) -> None:
    ears = Ears("admission: newer weights than version 0, after 1 groups")
    envs = vector(2)
    policy = VersionedPolicy(chat, answer)
    with nothing_left(envs):
        batches = Collector(envs, policy, chat, watch=Watch(0.05, ears)).batches(2, 1, groups=1, max_staleness=0)
        next(batches)
        assert ears.enough.wait(30)
        policy.version += 1
        assert len(next(batches)) == 1
        assert list(batches) == []


def test_a_blocked_loop_is_reported_with_the_line_that_blocks_it(chat: ChatFormat) -> None:
    ears = Ears("the event loop is blocked")

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            ears.enough.wait(30)

    def block_the_loop(env: Any) -> str:
        deep(40)
        return "go on"

    envs = ToolVectorEnv.of(ActionEnv, num_envs=2, action=block_the_loop)
    policy = ScriptedPolicy(chat, tool_then_answer("act"))
    with nothing_left(envs):
        assert all(t.solved for t in Collector(envs, policy, chat, watch=Watch(0.1, ears)).collect(2))
        (stall, *_) = [stall for stall in ears.heard if stall.blocked]
        assert "in block_the_loop\n    deep(40)" in stall.where, "the tool's line, however deep it calls"
        assert "ears.enough.wait(30)" in stall.where, "and where it is"
        assert "calls ..." in stall.where
        assert "run_forever" not in stall.where


def test_without_a_function_it_is_a_warning_in_the_log(chat: ChatFormat, caplog: pytest.LogCaptureFixture) -> None:
    logged = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waits for tools: act" in record.getMessage():
                logged.set()

    async def wait(env: Any) -> str:
        while not logged.is_set():  # noqa: ASYNC110 - set by the watchdog's thread
            await asyncio.sleep(0.005)
        return "go on"

    handler = Handler()
    logging.getLogger("toolgym.rollout").addHandler(handler)
    envs = ToolVectorEnv.of(ActionEnv, num_envs=1, action=wait)
    with nothing_left(envs):
        policy = ScriptedPolicy(chat, tool_then_answer("act"))
        assert len(Collector(envs, policy, chat, watch=Watch(0.05)).collect(1)) == 1
    logging.getLogger("toolgym.rollout").removeHandler(handler)


def test_a_function_that_raises_or_hangs_stops_nothing(chat: ChatFormat) -> None:
    ears, held = Ears("waits for"), threading.Event()

    def bad(stall: Stall) -> None:
        ears(stall)
        if len(ears.heard) > 1:
            held.wait(30)
        raise OSError("no pager")

    envs = ToolVectorEnv.of(ActionEnv, num_envs=1, action=ears.wait)
    policy = ScriptedPolicy(chat, tool_then_answer("act"))
    assert Collector(envs, policy, chat, watch=Watch(0.02, bad)).collect(1)[0].solved
    held.set()
    with nothing_left(envs):
        while any("watchdog" in thread.name for thread in threading.enumerate()):
            time.sleep(0.001)


def test_a_slot_is_reported_again_only_after_twice_the_time() -> None:
    now = Waiting(0, "3.1", 2, "the policy", 1.0)
    slots = [now]
    watchdog = Watchdog(Watch(1e6), lambda: slots, Heartbeat(0), lambda text: None)
    watchdog.close()
    watchdog._after = 1.0
    watchdog._heart.last = float("inf")

    def seconds(value: float, what: str = "the policy") -> bool:
        slots[0] = Waiting(0, "3.1", 2, what, value)
        return watchdog.look() is not None

    assert [seconds(s) for s in (0.5, 1.0, 1.9, 2.0, 3.9, 4.0)] == [False, True, False, True, False, True]
    assert seconds(1.0, "tools: python"), "another wait is another report"
    assert str(now) == "slot 0 (trajectory 3.1, turn 2) waits for the policy since 1 s"
    many = Stall(tuple(Waiting(k, "", 0, "admission: x", 9.0) for k in range(11)))
    assert str(many).splitlines()[-1] == "and 3 more slots"
    assert str(many).splitlines()[0] == "slot 0 waits for admission: x since 9 s"


@pytest.mark.parametrize("options", [{"after": 0.0}, {"after": True}, {"after": float("nan")}, {"on_stall": "page me"}])
def test_wrong_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"expected Watch.{next(iter(options))}"):
        Watch(**options)


@pytest.mark.parametrize("awaited", [False, True])
def test_a_loop_that_is_blocked_for_good_ends_a_rollout_with_what_is_finished(chat: ChatFormat, awaited: bool) -> None:
    """No code can be stopped that does not await; whoever waits for it can be told."""
    free = threading.Event()

    def block(env: ActionEnv) -> str:
        if env.task is not None and env.task.id == "t2":
            free.wait(60)
        return "done"

    envs = ToolVectorEnv.of(ActionEnv, num_envs=1, action=block)
    policy = ScriptedPolicy(chat, tool_then_answer("act"))
    collector = Collector(envs, policy, chat, watch=Watch(after=None, give_up=0.3))
    with pytest.raises(RolloutFailed, match=r"(?s)the event loop is blocked since .* free.wait\(60\)") as raised:
        asyncio.run(arollout(collector, 4)) if awaited else rollout(collector, 4)
    assert [t.id for t in raised.value.rollout.trajectories if t.solved] == ["0.0", "1.0"]
    free.set()
    envs.close()


@pytest.mark.parametrize("after", [0, -1, float("inf"), float("nan"), "5", True])
def test_times_of_a_watch_that_mean_nothing_are_refused(after: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"expected Watch.after as seconds above 0"):
        Watch(after=after)
    with pytest.raises(ConfigurationError, match=r"expected Watch.give_up as seconds above 0"):
        Watch(give_up=after)
