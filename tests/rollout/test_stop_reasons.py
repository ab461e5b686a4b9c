"""Every stop reason and every finish reason is reached through the collector, and touches no neighbour."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tokenizers
from helpers import EchoEnv, TroubledPolicy, call, echo_twice

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Completion, FinishReason, PolicyFailure, SampleRequest
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.agents.template_chat import TemplateChatFormat
from toolgym.agents.tiny import TINY_MODEL
from toolgym.envs import AssistantMessage, Episode, Task, ToolMessage, ToolVectorEnv, UserMessage
from toolgym.rollout.collector import Collector
from toolgym.rollout.limits import Limits
from toolgym.rollout.progress import Progress
from toolgym.rollout.recovery import Recovery
from toolgym.rollout.rollouts import RolloutInterrupted, rollout
from toolgym.rollout.trajectory import SegmentKind, StopReason, Trajectory
from toolgym.rollout.waits import Waits

TASKS, MEMBERS, BAD = 4, 2, 1  # the troubled task, all its members
LONG = "7" * 200  # tokens: the embedded model's tokenizer has one a digit
SCHEDULES = pytest.mark.parametrize("schedule", ["overlap", "lockstep"])


@dataclass(frozen=True)
class Scenario:
    """What the troubled task is like, and what comes of it. ``says``: one message a turn, the last one for ever."""

    says: tuple[AssistantMessage | str, ...] = (call(),)
    limits: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    environment: str | None = None
    policy: Callable[[SampleRequest], BaseException | str | None] = lambda request: None
    prompt: str = "troubled"
    turns: int = 1
    reward: float | None = 0.25
    failure: tuple[str, str] | None = None
    detail: str = ""
    cancel: bool = False


def _hangs_later(request: SampleRequest) -> str | None:
    return "hang" if request.turn == 3 else None


REASONS = {
    StopReason.ANSWERED: Scenario((AssistantMessage("done"),), reward=1.0),
    StopReason.ENDED_BY_TOOL: Scenario((call("finish"),)),
    StopReason.ENDED_BY_ENVIRONMENT: Scenario(options={"max_steps": 3}, turns=3),
    StopReason.MAX_TURNS: Scenario(limits={"max_turns": 3}, turns=3),
    StopReason.MAX_TOOL_CALLS: Scenario(limits={"max_tool_calls": 2}, turns=3),
    StopReason.COMPLETION_CUT: Scenario((AssistantMessage(LONG),), {"max_completion_tokens": 150}),
    StopReason.TRAJECTORY_BUDGET: Scenario(
        (call(text=LONG[:90]),), {"max_trajectory_tokens": 700, "max_observation_tokens": 500}, turns=3
    ),
    StopReason.OBSERVATION_TOO_LONG: Scenario(
        (AssistantMessage("", call(text="a").tool_calls * 12),), {"max_observation_tokens": 100}
    ),
    StopReason.PROMPT_TOO_LONG: Scenario(prompt="so long " * 2_000, turns=0),
    StopReason.UNPARSABLE: Scenario(("<tool_call>{</tool_call>",), {"max_parse_retries": 2}, turns=3),
    StopReason.TEMPLATE_REFUSED: Scenario((call(text="unwritable"),), detail="does not write this"),
    StopReason.EPISODE_DEADLINE: Scenario(
        limits={"episode_timeout": 2.0}, environment="tool hangs", detail="was up while it waited for tools: echo"
    ),
    StopReason.POLICY_FAILURE: Scenario(
        policy=lambda request: PolicyFailure("engine dead") if request.turn == 2 else None,
        turns=2,
        reward=None,
        failure=("policy_failure", "sample"),
    ),
    StopReason.TOKEN_MISMATCH: Scenario(
        policy=lambda request: "misfed" if request.turn == 1 else None,
        reward=None,
        failure=("token_mismatch", "sample"),
    ),
    StopReason.ENVIRONMENT_FAILURE: Scenario(environment="tool breaks", reward=None, failure=("box_died", "step")),
    StopReason.CANCELLED: Scenario(policy=_hangs_later, turns=3, reward=None, cancel=True),
}


@pytest.fixture(scope="module")
def picky() -> ChatFormat:
    """The embedded model's format, whose template refuses one word of tools."""
    source = (TINY_MODEL / "chat_template.jinja").read_text()
    refuses = "{% if 'unwritable' in message.content %}{{ raise_exception('does not write this') }}{% endif %}"
    marked = source.replace("{%- elif message.role == 'tool' %}", "{%- elif message.role == 'tool' %}" + refuses)
    assert marked != source
    return TemplateChatFormat(tokenizers.Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json")), marked)


def tasks(scenario: Scenario | None) -> list[Task]:
    made = []
    for k in range(TASKS):
        bad = scenario is not None and k == BAD
        prompt = scenario.prompt if scenario is not None and bad else f"task {k}"
        made.append(Task(f"t{k}", prompt, {"k": k, "trouble": scenario.environment if scenario and bad else None}))
    return made


def is_bad(request: SampleRequest) -> bool:
    assert request.task is not None
    return request.task.id == f"t{BAD}"


def collector(chat: ChatFormat, envs: ToolVectorEnv, scenario: Scenario, schedule: Any, *, troubled: bool) -> Collector:
    def script(request: SampleRequest, member: int) -> AssistantMessage | str:
        if troubled and is_bad(request):
            return scenario.says[min(request.turn, len(scenario.says) - 1)]
        return echo_twice(request, member)

    def trouble(request: SampleRequest) -> BaseException | str | None:
        return scenario.policy(request) if troubled and is_bad(request) else None

    limits, recovery = Limits(**scenario.limits), Recovery(backoff=0.01)
    return Collector(
        envs, TroubledPolicy(chat, script, trouble), chat, limits, schedule=schedule, recovery=recovery, seed=3
    )


def collected(chat: ChatFormat, scenario: Scenario, schedule: Any, *, troubled: bool) -> list[Trajectory]:
    envs = ToolVectorEnv.of(EchoEnv, num_envs=TASKS * MEMBERS, **scenario.options)
    made = collector(chat, envs, scenario, schedule, troubled=troubled)
    stream = made.start(tasks(scenario if troubled else None), MEMBERS)
    found = []
    for ended in stream.read():
        found.append(ended.trajectory)
        if troubled and scenario.cancel and len(found) == (TASKS - 1) * MEMBERS:
            stream.cancel()
    envs.close()
    return sorted(found, key=lambda trajectory: (trajectory.task_index, trajectory.member))


def check_neighbours(chat: ChatFormat, scenario: Scenario, schedule: Any, found: list[Trajectory]) -> list[Trajectory]:
    """The neighbours are as without the trouble; returns the troubled ones."""
    healthy = collected(chat, scenario, schedule, troubled=False)
    assert [t.id for t in found] == [t.id for t in healthy], "as many as were asked for"
    assert all(t.solved for t in healthy)
    for good, trajectory in zip(healthy, found, strict=True):
        if trajectory.task_index != BAD:
            assert trajectory == good
    return [trajectory for trajectory in found if trajectory.task_index == BAD]


def test_the_table_of_stop_reasons_is_whole() -> None:
    assert set(REASONS) == set(StopReason)


@SCHEDULES
@pytest.mark.parametrize("reason", REASONS)
def test_every_stop_reason_is_reached_and_scored_as_promised(
    picky: ChatFormat, reason: StopReason, schedule: Any
) -> None:
    scenario = REASONS[reason]
    found = collected(picky, scenario, schedule, troubled=True)
    for trajectory in check_neighbours(picky, scenario, schedule, found):
        assert trajectory.stop_reason is reason
        assert len(trajectory.turns) == scenario.turns
        assert trajectory.reward == scenario.reward
        failure = trajectory.failure
        assert (failure and (failure.kind, failure.where)) == scenario.failure
        own_end = reason in (StopReason.ANSWERED, StopReason.ENDED_BY_TOOL)
        assert trajectory.truncated == (scenario.reward is not None and not own_end)
        assert scenario.detail in trajectory.detail
        assert bool(trajectory.detail) == bool(scenario.detail)
        assert len(trajectory) <= Limits(**scenario.limits).max_trajectory_tokens
        sampled = [segment for segment in trajectory.segments if segment.kind is SegmentKind.ACTION]
        assert len(sampled) == len(trajectory.turns), "what was sampled is kept"


class BreakingOff(ScriptedPolicy):
    """Breaks off the troubled task's turn number ``at`` after ``after`` tokens, and never goes on."""

    def __init__(self, *args: Any, at: int, after: int) -> None:
        super().__init__(*args)
        self._at, self._after = at, after
        self._begun: set[tuple[int, int]] = set()

    async def sample(self, request: SampleRequest) -> list[Completion]:
        whole = await super().sample(request)
        if not is_bad(request) or request.turn != self._at:
            return whole
        members = {(request.turn, request.member + k) for k in range(request.n)}
        kept = 0 if members & self._begun else self._after
        self._begun |= members
        parts = [(c.token_ids[:kept], c.logprobs[:kept], c.versions[:kept]) for c in whole]
        return [Completion(*part, FinishReason.ABORT, whole[0].prompt_ids) for part in parts]


FINISHES = {
    FinishReason.STOP: (Scenario((AssistantMessage("done"),), reward=1.0), StopReason.ANSWERED),
    FinishReason.LENGTH: (REASONS[StopReason.COMPLETION_CUT], StopReason.COMPLETION_CUT),
    FinishReason.ABORT: (
        Scenario((call(), call(text=LONG)), reward=None, failure=("policy_failure", "sample"), turns=2),
        StopReason.POLICY_FAILURE,
    ),
}


def test_the_table_of_finish_reasons_is_whole() -> None:
    assert set(FINISHES) == set(FinishReason)


@SCHEDULES
@pytest.mark.parametrize("finish", FINISHES)
def test_every_finish_reason_is_reached_and_recorded_with_its_turn(
    chat: ChatFormat, finish: FinishReason, schedule: Any
) -> None:
    scenario, reason = FINISHES[finish]
    envs = ToolVectorEnv.of(EchoEnv, num_envs=TASKS * MEMBERS)
    made = collector(chat, envs, scenario, schedule, troubled=True)
    if finish is FinishReason.ABORT:
        policy = BreakingOff(chat, made.policy._inner._script, at=1, after=5)  # type: ignore[attr-defined]
        made = Collector(envs, policy, chat, made.limits, schedule=schedule, recovery=made.recovery, seed=3)
    found = made.collect(tasks(scenario), MEMBERS)
    envs.close()
    for trajectory in check_neighbours(chat, scenario, schedule, found):
        assert (trajectory.stop_reason, trajectory.reward) == (reason, scenario.reward)
        failure = trajectory.failure
        assert (failure and (failure.kind, failure.where)) == scenario.failure
        assert [turn.finish_reason for turn in trajectory.turns][:-1] == [FinishReason.STOP] * (scenario.turns - 1)
        last = trajectory.turns[-1]
        assert last.finish_reason is finish
        written = chat.write(scenario.says[-1])
        kept = {FinishReason.STOP: len(written), FinishReason.LENGTH: 150, FinishReason.ABORT: 5}[finish]
        assert last.completion_tokens == kept
        assert trajectory.input_ids[trajectory.loss_mask].tolist()[-kept:] == written[:kept]


@SCHEDULES
def test_an_answer_broken_off_before_its_first_token_is_no_turn(chat: ChatFormat, schedule: Any) -> None:
    scenario = Scenario((call(),))
    envs = ToolVectorEnv.of(EchoEnv, num_envs=TASKS * MEMBERS)
    policy = BreakingOff(chat, echo_twice, at=1, after=0)
    found = Collector(envs, policy, chat, schedule=schedule, recovery=Recovery(backoff=0.01), seed=3).collect(
        tasks(scenario), MEMBERS
    )
    envs.close()
    for trajectory in check_neighbours(chat, scenario, schedule, found):
        assert (trajectory.stop_reason, trajectory.reward) == (StopReason.POLICY_FAILURE, None)
        assert trajectory.failure is not None
        assert trajectory.failure.where == "sample"
        assert "before its first token" in trajectory.failure.message
        assert len(trajectory.turns) == 1


@SCHEDULES
def test_an_interrupt_keeps_what_is_finished_and_cancels_the_rest(chat: ChatFormat, schedule: Any) -> None:
    scenario = REASONS[StopReason.CANCELLED]
    envs = ToolVectorEnv.of(EchoEnv, num_envs=TASKS * MEMBERS)

    def interrupt(progress: Progress) -> None:
        if progress.finished == (TASKS - 1) * MEMBERS:
            signal.raise_signal(signal.SIGINT)

    made = collector(chat, envs, scenario, schedule, troubled=True)
    with pytest.raises(RolloutInterrupted, match="6 of 8 trajectories are finished") as raised:
        rollout(made, tasks(scenario), MEMBERS, on_progress=interrupt)
    envs.close()
    for trajectory in check_neighbours(chat, scenario, schedule, raised.value.rollout.trajectories):
        assert (trajectory.stop_reason, trajectory.reward) == (StopReason.CANCELLED, None)
        assert (trajectory.failure, trajectory.truncated) == (None, False)


def one(chat: ChatFormat, env: type[EchoEnv] = EchoEnv, *, trouble: str | None = None, **settings: Any) -> Trajectory:
    """One episode."""
    envs = ToolVectorEnv.of(env, num_envs=1)
    policy = settings.pop("policy", None) or ScriptedPolicy(chat, settings.pop("script"))
    (found,) = Collector(envs, policy, chat, **settings).collect([Task("t", "task", {"k": 0, "trouble": trouble})])
    envs.close()
    return found


def test_time_that_went_by_while_the_policy_failed_is_the_policys(chat: ChatFormat) -> None:
    """Waiting for it to recover is no budget that the model has used up: it is not scored."""
    policy = TroubledPolicy(chat, echo_twice, lambda r: PolicyFailure("engine busy") if r.turn == 1 else None)
    found = one(chat, policy=policy, limits=Limits(episode_timeout=1.0), recovery=Recovery(backoff=20.0))
    assert (found.stop_reason, found.reward) == (StopReason.POLICY_FAILURE, None)
    assert found.failure is not None
    assert "engine busy" in found.failure.message


@pytest.mark.parametrize("silent_from", [0, 1])
def test_a_policy_that_never_answers_at_all_is_not_scored(chat: ChatFormat, silent_from: int) -> None:
    policy = TroubledPolicy(chat, echo_twice, lambda r: "hang" if r.turn == silent_from else None)
    found = one(chat, policy=policy, limits=Limits(episode_timeout=1.0))
    if silent_from:  # what it has said until then is scored
        assert (found.stop_reason, found.reward, found.failure) == (StopReason.EPISODE_DEADLINE, 0.25, None)
        assert found.detail == "the episode's time of 1 s was up while it waited for the policy"
        return
    assert (found.stop_reason, found.reward) == (StopReason.POLICY_FAILURE, None)
    assert found.failure is not None
    assert found.failure.where == "sample"


def test_calls_that_were_broken_off_are_counted_as_calls(chat: ChatFormat) -> None:
    two = AssistantMessage("", call().tool_calls * 2)
    found = one(chat, script=lambda r, m: two, trouble="tool hangs", limits=Limits(episode_timeout=1.0))
    assert found.stop_reason is StopReason.EPISODE_DEADLINE
    assert found.turns[0].calls == ("unfinished", "unfinished")


def test_scoring_is_not_cut_short_by_the_episodes_time(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    up: list[asyncio.Event] = []

    class Late(Waits):
        """All but a second of the episode's time is gone when its last step begins; tells when that second is."""

        async def within(self, *args: Any, scoring: Any = None, **options: Any) -> Any:
            def asked() -> bool:
                up[-1].set()
                return bool(scoring())

            if scoring is None:
                return await super().within(*args, **options)
            self._left = 1.0
            return await super().within(*args, scoring=asked, **options)

    class Slow(EchoEnv):
        async def score(self, episode: Episode) -> float:
            await up[-1].wait()
            return 0.5

    monkeypatch.setattr("toolgym.rollout.episode.Waits", Late)
    for said, reason in ((call("finish"), StopReason.ENDED_BY_TOOL), (AssistantMessage("x"), StopReason.ANSWERED)):
        up.append(asyncio.Event())
        found = one(chat, Slow, script=lambda r, m, said=said: said)
        assert up[-1].is_set()
        assert (found.stop_reason, found.reward, found.failure) == (reason, 0.5, None)


def test_a_last_answer_is_the_last_even_where_the_environment_goes_on(chat: ChatFormat) -> None:
    class Asking(EchoEnv):
        """Its user always has another question."""

        async def astep(self, action: Any, *, tool_timeout: float | None = None) -> Any:
            self.messages = (*self.messages, action, UserMessage("And then?"))
            return (UserMessage("And then?"),), 0.0, False, False, {}

    found = one(chat, Asking, script=lambda r, m: AssistantMessage("done"), limits=Limits(max_turns=3))
    assert (found.stop_reason, len(found.turns), found.reward) == (StopReason.MAX_TURNS, 3, 0.25)
    assert isinstance(found.messages[-1], UserMessage)


@pytest.mark.parametrize(
    ("tamper", "reason", "said"),
    [
        ({"token_ids": np.array([2**40])}, StopReason.POLICY_FAILURE, "expected 0 to 2**31 - 1"),
        ({"prompt_ids": 7}, StopReason.TOKEN_MISMATCH, "no token ids"),
    ],
)
def test_nonsense_of_the_policy_is_the_policys_failure(
    chat: ChatFormat, tamper: dict[str, Any], reason: StopReason, said: str
) -> None:
    class Wrong(ScriptedPolicy):
        async def sample(self, request: SampleRequest) -> list[Completion]:
            zeros = {"logprobs": np.zeros(1, np.float32), "versions": np.zeros(1, np.int32)}
            good = {"token_ids": np.array([5]), **zeros, "finish_reason": "stop"}
            return [Completion(**{**good, **tamper})]

    found = one(chat, policy=Wrong(chat, echo_twice))
    assert (found.stop_reason, found.reward) == (reason, None)
    assert found.failure is not None
    assert found.failure.where == "sample"
    assert said in found.failure.message


def test_what_a_template_cannot_write_is_not_asked_of_a_tool(chat: ChatFormat) -> None:
    """Calls whose answers could not be shown, whatever they are, are not made; what was said is judged all the same."""
    source = (TINY_MODEL / "chat_template.jinja").read_text()
    blind = TemplateChatFormat(
        tokenizers.Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json")),
        source.replace("~ message.content ~ '\\n</tool_response>'", "~ ''"),
    )
    assert blind.certificate is not None
    assert "P1" in blind.certificate.refused
    for on_break in ("stop", "split"):
        found = one(blind, policy=ScriptedPolicy(chat, echo_twice), on_break=on_break)
        assert (found.stop_reason, found.reward) == (StopReason.TEMPLATE_REFUSED, 0.25)
        assert found.turns[0].calls == ()
        assert not any(isinstance(message, ToolMessage) for message in found.messages)
        assert found.detail


def test_reasoning_is_no_answer_and_a_call_drafted_in_it_is_told_to_the_model(chat: ChatFormat) -> None:
    assert one(chat, script=lambda r, m: "<think>\nhm").stop_reason is StopReason.ANSWERED
    drafted = '<think>\n<tool_call>{"name": "echo"}</tool_call>'
    found = one(chat, script=lambda r, m: AssistantMessage("done") if r.turn else drafted)
    assert (found.stop_reason, found.reward, len(found.turns)) == (StopReason.ANSWERED, 1.0, 2)
    assert found.turns[0].calls == ("in_reasoning",)
