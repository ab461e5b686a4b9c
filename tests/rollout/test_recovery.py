"""Failures are kept, tried again on a fresh environment, or raised, as told; code on the loop cannot stop the rest."""

import asyncio
import gc
import threading
from typing import Any

import pytest
from control import BOTH, ActionEnv, VersionedPolicy, answer, nothing_left, tool_then_answer
from helpers import EchoEnv, TroubledPolicy, call, echo_twice, vector

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Completion, PolicyFailure, SampleRequest
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.envs import (
    AssistantMessage,
    ConfigurationError,
    EnvironmentFailure,
    RewardFunction,
    Task,
    ToolgymError,
    ToolVectorEnv,
)
from toolgym.rollout import (
    Admission,
    CollectionFailed,
    Collector,
    Filters,
    Limits,
    Recovery,
    RolloutFailed,
    StopReason,
    Trajectory,
    rollout,
)

AT_ONCE = Recovery(backoff=0.0)


class MendedEnv(EchoEnv):
    """Environments that were made first fail; those that are made later do not."""

    def __init__(self, made: list[Any], failing: int = 4, **options: Any) -> None:
        made.append(self)
        self.fails = len(made) <= failing
        super().__init__(**options)

    async def setup(self, task: Task) -> None:
        self.context.stats.add("attempts", 1)
        if self.fails:
            raise EnvironmentFailure("the disk is full", kind="disk")


@BOTH
def test_a_failed_episode_is_begun_anew_on_a_fresh_environment(chat: ChatFormat, schedule: Any) -> None:
    made: list[Any] = []
    envs = ToolVectorEnv.of(MendedEnv, num_envs=4, made=made)
    policy = ScriptedPolicy(chat, echo_twice, version=3)
    collector = Collector(envs, policy, chat, schedule=schedule, recovery=Recovery("retry", backoff=0.0))
    with nothing_left(envs):
        found = rollout(collector, 6, 2)
        assert all(t.solved for t in found.trajectories)
        assert len(found.trajectories) == 12
        retried = [t for t in found.trajectories if t.earlier]
        assert len(retried) == found.progress.retried == 4
        assert {failure.kind for t in retried for failure in t.earlier} == {"disk"}
        assert len(made) == 8
        assert found.stats["rollout/attempts"].count == 12, "what the failed attempts noted does not count"


@BOTH
def test_retries_are_bounded_and_then_the_failure_is_kept(chat: ChatFormat, schedule: Any) -> None:
    envs = vector(trouble=lambda k: "setup raises" if k == 1 else None)
    collector = Collector(
        envs, ScriptedPolicy(chat, echo_twice), chat, schedule=schedule, recovery=Recovery("retry", 3, backoff=0.0)
    )
    with nothing_left(envs):
        found = collector.collect(3, 2)
        assert [t.solved for t in found] == [True, True, False, False, True, True]
        assert [len(t.earlier) for t in found] == [0, 0, 3, 3, 0, 0]
        assert {(t.failure.kind, t.reward) for t in found if t.failure} == {("setup_raised", None)}


def test_a_retried_episode_equals_one_that_never_failed(chat: ChatFormat) -> None:
    failed: set[tuple[Any, int]] = set()

    def once(request: SampleRequest) -> Exception | None:
        assert request.task is not None
        key = (request.task.id, request.member)
        if request.turn == 1 and key not in failed:
            failed.add(key)
            return PolicyFailure("hiccup")
        return None

    envs = vector()
    good = Collector(envs, ScriptedPolicy(chat, echo_twice), chat).collect(3, 2)
    recovery = Recovery("retry", request_retries=0, backoff=0.0)
    again = Collector(envs, TroubledPolicy(chat, echo_twice, once), chat, recovery=recovery).collect(3, 2)
    for before, after in zip(good, again, strict=True):
        assert [failure.message for failure in after.earlier] == ["hiccup"]
        after.earlier = ()
        assert after == before
    envs.close()


def test_a_request_that_failed_is_made_again_by_itself_and_leaves_no_trace(chat: ChatFormat) -> None:
    seen: dict[Any, int] = {}

    def twice(request: SampleRequest) -> Exception | None:
        key = (request.task and request.task.id, request.member, request.turn)
        seen[key] = seen.get(key, 0) + 1
        return PolicyFailure("busy") if seen[key] < 3 else None

    envs = vector()
    policy = TroubledPolicy(chat, echo_twice, twice)
    found = Collector(envs, policy, chat, recovery=AT_ONCE).collect(3)
    good = Collector(envs, ScriptedPolicy(chat, echo_twice), chat).collect(3)
    assert found == good
    by_turn = {
        (r.task and r.task.id, r.turn): {q.seed for q in policy.requests if q.turn == r.turn and q.task == r.task}
        for r in policy.requests
    }
    assert all(len(seeds) == 1 for seeds in by_turn.values()), "a repetition has the same seed"
    envs.close()


def test_asking_a_dead_policy_again_is_not_tried(chat: ChatFormat) -> None:
    envs = vector()
    policy = TroubledPolicy(chat, answer, lambda request: PolicyFailure("engine dead", permanent=True))
    recovery = Recovery("retry", retries=5, request_retries=5, backoff=30.0)
    found = Collector(envs, policy, chat, recovery=recovery).collect(4)
    assert len(policy.requests) == 4
    assert {t.stop_reason for t in found} == {StopReason.POLICY_FAILURE}
    assert {t.earlier for t in found} == {()}
    envs.close()


def test_the_back_off_doubles_up_to_its_bound() -> None:
    recovery = Recovery(backoff=0.5, max_backoff=3.0)
    assert [recovery.delay(k) for k in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert recovery.delay(100_000) == 3.0


@BOTH
@pytest.mark.parametrize("bad", [0, 5])
def test_the_first_failure_is_raised_with_all_that_is_finished(chat: ChatFormat, schedule: Any, bad: int) -> None:
    """In lockstep the failure may come with the last round, when there is nothing left to cancel."""
    envs = vector(2, trouble=lambda k: "tool breaks" if k == bad else None)
    collector = Collector(envs, ScriptedPolicy(chat, echo_twice), chat, schedule=schedule, recovery=Recovery("raise"))
    with nothing_left(envs):
        with pytest.raises(RolloutFailed, match=rf"trajectory {bad}.0 failed in step \(box_died\)") as caught:
            rollout(collector, 6)
        found = caught.value.rollout
        assert isinstance(caught.value.__cause__, CollectionFailed)
        assert [t.task_index for t in found.trajectories] == list(range(6))
        assert found.progress.failed == 1
        assert found.progress.cancelled == sum(t.stop_reason is StopReason.CANCELLED for t in found.trajectories)
        assert bad == 0 or found.trajectories[0].solved
        assert collector.collect([Task("again", "again", {"k": 9, "trouble": None})])[0].solved


@BOTH
def test_a_stop_during_the_back_off_keeps_the_failure(chat: ChatFormat, schedule: Any) -> None:
    failed = threading.Event()

    def bad(request: SampleRequest) -> Exception | None:
        failed.set()
        return PolicyFailure("engine restarts")

    envs = vector(1)
    recovery = Recovery("retry", request_retries=0, backoff=60.0, max_backoff=60.0)
    collector = Collector(envs, TroubledPolicy(chat, answer, bad), chat, schedule=schedule, recovery=recovery)
    stream = collector.start(3)
    reader = stream.read()
    with nothing_left(envs):
        watcher = threading.Thread(target=lambda: (failed.wait(), stream.cancel()))
        watcher.start()
        found = [ended.trajectory for ended in reader]
        watcher.join()
        assert sorted(t.task_index for t in found) == [0, 1, 2]
        assert {t.stop_reason for t in found} <= {StopReason.CANCELLED, StopReason.POLICY_FAILURE}
        assert {t.earlier for t in found} == {()}


def cancel_everything(env: Any) -> None:
    for task in asyncio.all_tasks():
        task.cancel()


def cancel_later(env: Any) -> str:
    """Between two turns of other episodes, wherever they are."""
    loop = asyncio.get_running_loop()
    for k in range(1, 4):
        loop.call_later(0.002 * k, cancel_everything, env)
    return "soon"


def stop_the_loop(env: Any) -> str:
    asyncio.get_running_loop().stop()
    return "stopped"


@BOTH
@pytest.mark.parametrize("action", [cancel_everything, cancel_later, stop_the_loop])
@pytest.mark.parametrize("admission", [Admission(), Admission(max_in_flight=1)])
def test_a_tool_that_cancels_or_stops_all_on_its_loop_ends_no_more_than_what_runs(
    chat: ChatFormat, action: Any, schedule: Any, admission: Admission
) -> None:
    def script(request: SampleRequest, member: int) -> AssistantMessage:
        assert request.task is not None
        if request.turn:
            return AssistantMessage("done")
        return call("act") if request.task.data["k"] == 2 else call()

    async def accept(trajectory: Trajectory) -> bool:
        await asyncio.sleep(0.001)
        return True

    envs = ToolVectorEnv.of(ActionEnv, num_envs=4, action=action, count=40)
    filters = Filters(accept=accept, accept_group=lambda group: True)
    collector = Collector(
        envs, ScriptedPolicy(chat, script), chat, schedule=schedule, filters=filters, admission=admission
    )
    with nothing_left(envs):
        found = rollout(collector, 40, 2)
        assert [(t.task_index, t.member) for t in found.trajectories] == [(k // 2, k % 2) for k in range(80)]
        others = [t for t in found.trajectories if not t.solved]
        assert all(t.failure and t.failure.kind in ("cancelled_by_other", "sample_raised") for t in others)
        assert len(others) < 30


@BOTH
def test_what_was_cancelled_by_a_tool_is_begun_anew_where_retries_are_wanted(chat: ChatFormat, schedule: Any) -> None:
    struck: list[int] = []

    def once(env: Any) -> str:
        if not struck:
            struck.append(1)
            cancel_everything(env)
        return "fine"

    envs = ToolVectorEnv.of(ActionEnv, num_envs=4, action=once, count=8)
    policy = ScriptedPolicy(chat, tool_then_answer("act"))
    collector = Collector(envs, policy, chat, schedule=schedule, recovery=Recovery("retry", backoff=0.0))
    with nothing_left(envs):
        found = collector.collect(8)
        assert all(t.solved for t in found)
        assert {len(t.earlier) for t in found} == {0, 1}


class OnceEnv(EchoEnv):
    """Can be made only so many times; cannot be reset the first time."""

    def __init__(self, made: list[Any], error: BaseException, **options: Any) -> None:
        if len(made) == 2:
            raise error
        made.append(self)
        self.used = False
        super().__init__(**options)

    async def setup(self, task: Task) -> None:
        if not self.used:
            self.used = True
            raise OSError("cold")


@pytest.mark.parametrize("error", [RuntimeError("no licence"), SystemExit(1)])
def test_where_no_fresh_environment_can_be_made_the_old_one_goes_on(chat: ChatFormat, error: BaseException) -> None:
    envs = ToolVectorEnv.of(OnceEnv, num_envs=2, made=[], error=error)
    collector = Collector(envs, ScriptedPolicy(chat, answer), chat, recovery=Recovery("retry", backoff=0.0))
    with nothing_left(envs), pytest.warns(ResourceWarning, match="no new environment for slot .*the old one stays"):
        assert [t.solved for t in collector.collect(4)] == [True] * 4


def _collect_and_close(collector: Collector, envs: ToolVectorEnv) -> None:
    assert [t.solved for t in collector.collect(3)] == [True] * 3
    envs.close()


class ColdEnv(EchoEnv):
    """Fails its first episode of all."""

    used = False

    async def setup(self, task: Task) -> None:
        if not type(self).used:
            type(self).used = True
            raise OSError("cold")


class StubbornEnv(ColdEnv):
    """Fails to close, too."""

    async def aclose(self) -> None:
        raise OSError("the socket is gone")


def test_an_old_environment_that_fails_to_close_holds_nothing_up(chat: ChatFormat) -> None:
    envs = ToolVectorEnv.of(StubbornEnv, num_envs=1)
    StubbornEnv.used = False
    collector = Collector(envs, ScriptedPolicy(chat, answer), chat, recovery=Recovery("retry", backoff=0.0))
    with pytest.warns(ResourceWarning, match="failed to close: OSError: the socket is gone"):
        _collect_and_close(collector, envs)


class HangingEnv(ColdEnv):
    """Never closes, either."""

    async def aclose(self) -> None:
        await asyncio.Event().wait()


def test_an_old_environment_that_never_closes_is_left(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolgym.envs.vector._CLOSING", 0.05)
    HangingEnv.used = False
    envs = ToolVectorEnv.of(HangingEnv, num_envs=1)
    collector = Collector(envs, ScriptedPolicy(chat, answer), chat, recovery=Recovery("retry", backoff=0.0))
    with pytest.warns(ResourceWarning, match="took over 0.05 s to close"):
        _collect_and_close(collector, envs)


class Mute(VersionedPolicy):
    """Its properties raise from some request on."""

    after = 0

    @property
    def version(self) -> int:
        if self.asked >= self.after:
            raise OSError("no answer from the engine")
        return 0

    @version.setter
    def version(self, value: int) -> None:
        pass

    def load(self) -> Any:
        raise OSError("no answer from the engine")


def _mute(chat: ChatFormat, after: int) -> Mute:
    policy = Mute(chat, answer)
    policy.after = after
    policy._say = lambda request, member: ScriptedPolicy(chat, answer)._say(request, member)  # type: ignore[method-assign]
    return policy


def test_a_policy_that_tells_no_load_counts_as_one_that_cannot(chat: ChatFormat) -> None:
    envs = vector()
    with nothing_left(envs):
        assert all(t.solved for t in Collector(envs, _mute(chat, 100), chat).collect(6))


@BOTH
@pytest.mark.parametrize("after", [0, 3])
def test_a_policy_that_tells_no_version_fails_its_episodes_by_name(chat: ChatFormat, after: int, schedule: Any) -> None:
    envs = vector(1)
    with nothing_left(envs):
        found = Collector(envs, _mute(chat, after), chat, schedule=schedule).collect(6)
        assert [t.solved for t in found] == [True] * after + [False] * (6 - after)
        failed = [t for t in found if not t.solved]
        assert {t.failure and t.failure.kind for t in failed} == {"version_raised"}
        assert {t.stop_reason for t in failed} == {StopReason.POLICY_FAILURE}


@BOTH
def test_batches_end_where_the_policy_tells_no_version_any_more(chat: ChatFormat, schedule: Any) -> None:
    envs = vector(2)
    policy = _mute(chat, 2)
    with nothing_left(envs):
        batches = Collector(envs, policy, chat, schedule=schedule).batches(6, 1, groups=1)
        with pytest.raises(ToolgymError, match="told no version: OSError: no answer") as caught:
            list(batches)
        assert caught.value.__cause__ is not None


def test_a_stream_may_be_cancelled_before_anything_has_begun(chat: ChatFormat) -> None:
    envs = vector()
    policy = VersionedPolicy(chat, answer)
    stream = Collector(envs, policy, chat).start(5)
    stream.cancel()
    with nothing_left(envs):
        assert {ended.trajectory.stop_reason for ended in stream.read()} == {StopReason.CANCELLED}
        assert policy.asked == 0
        with pytest.raises(ToolgymError, match="read once"):
            next(stream.read())


def test_a_stream_that_is_dropped_half_way_leaves_nothing(chat: ChatFormat) -> None:
    envs = vector(2, trouble=lambda k: "tool hangs" if k > 0 else None)
    stream = Collector(envs, ScriptedPolicy(chat, echo_twice), chat).stream(6)
    next(stream)
    with nothing_left(envs):
        del stream
        gc.collect()
        envs.reset()  # nobody holds the slots


def test_an_async_stream_that_is_dropped_or_cancelled_leaves_nothing(chat: ChatFormat) -> None:
    envs = vector(2, trouble=lambda k: "tool hangs" if k > 0 else None)
    collector = Collector(envs, ScriptedPolicy(chat, echo_twice), chat)

    async def dropped() -> None:
        async for _ in collector.astream(6):
            break

    async def cancelled() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in collector.astream(6):
                begun.set()

        reading = asyncio.create_task(read())
        await begun.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    with nothing_left(envs):
        asyncio.run(dropped())
        asyncio.run(cancelled())
        envs.reset()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on_failure": "ignore"}, "on_failure among keep, retry, raise, actual 'ignore'"),
        ({"retries": -1}, "retries as an int of 0 or more, actual -1"),
        ({"request_retries": True}, "request_retries as an int"),
        ({"backoff": float("nan")}, "backoff as seconds"),
        ({"max_backoff": float("inf")}, "max_backoff as seconds"),
    ],
)
def test_wrong_numbers_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Recovery(**options)


@BOTH
@pytest.mark.parametrize(("permanent", "retries", "asked"), [(True, 2, [4]), (False, 1, [4, 1, 1, 1, 1])])
def test_a_groups_first_request_is_made_again_by_the_same_rules(
    chat: ChatFormat, schedule: Any, permanent: bool, retries: int, asked: list[int]
) -> None:
    failure = PolicyFailure("the engine is overloaded", permanent=permanent)
    envs = vector(4)
    policy = TroubledPolicy(chat, echo_twice, lambda request: failure if request.turn == 0 else None)
    recovery = Recovery(request_retries=retries, backoff=0.0)
    with nothing_left(envs):
        found = Collector(envs, policy, chat, schedule=schedule, recovery=recovery).collect(1, 4)
    assert [request.n for request in policy.requests] == asked
    assert {t.stop_reason for t in found} == {StopReason.POLICY_FAILURE}


def test_a_request_that_nobody_waits_for_any_more_is_given_up(chat: ChatFormat) -> None:
    given_up = 0

    class Wedged(ScriptedPolicy):
        async def sample(self, request: SampleRequest) -> list[Completion]:
            nonlocal given_up
            try:
                await asyncio.Event().wait()
            finally:
                given_up += request.n == 2
            return []

    envs = vector(2, count=3)
    limits, recovery = Limits(sample_timeout=0.05), Recovery(request_retries=0)
    seen = []
    with nothing_left(envs):
        for trajectory in Collector(envs, Wedged(chat, echo_twice), chat, limits, recovery=recovery).stream(3, 2):
            seen.append((trajectory.task_index, given_up))
    assert min(count for index, count in seen if index == 2) >= 2, "those of the groups before"


@BOTH
@pytest.mark.parametrize("script", [answer, echo_twice, lambda request, member: call()])
def test_rewards_of_steps_sum_to_the_whole_however_an_episode_ends(
    chat: ChatFormat, schedule: Any, script: Any
) -> None:
    envs = vector(2, rewards=[RewardFunction(lambda step: 0.25, name="step", each_step=True)])
    limits = Limits(max_turns=3)
    with nothing_left(envs):
        found = Collector(envs, ScriptedPolicy(chat, script), chat, limits, schedule=schedule).collect(2)
    for trajectory in found:
        assert trajectory.reward == sum(turn.reward for turn in trajectory.turns)
        assert trajectory.reward > sum(trajectory.score.values())
