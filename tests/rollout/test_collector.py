"""Every trajectory asked for comes back, each with the reason for its end; nothing touches its neighbours."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import tokenizers
from helpers import EchoEnv, JitteryPolicy, TroubledPolicy, call, echo_twice, vector
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolgym.agents.chat import ChatFormat, TemplateRefused
from toolgym.agents.policy import Completion, FinishReason, PolicyFailure, SampleRequest
from toolgym.agents.qwen3_chat import Qwen3ChatFormat
from toolgym.agents.scripted_policy import Script, ScriptedPolicy
from toolgym.agents.tiny import TINY_MODEL
from toolgym.envs import (
    AssistantMessage,
    ConfigurationError,
    Task,
    ToolCall,
    ToolgymError,
    ToolMessage,
    ToolVectorEnv,
    tool,
)
from toolgym.envs.catalog import calculator, ledger
from toolgym.rollout.collector import Collector, Progress
from toolgym.rollout.limits import Limits
from toolgym.rollout.observations import fit
from toolgym.rollout.trajectory import SegmentKind, StopReason, Trajectory

SOLVERS = {"toolgym/Calculator-v0": calculator.solve, "toolgym/Ledger-v0": ledger.solve}


def collect(
    chat: ChatFormat, script: Script, count: int = 1, group: int = 1, *, limits: Limits | None = None, **options: Any
) -> list[Trajectory]:
    envs = vector(**options)
    try:
        return Collector(envs, ScriptedPolicy(chat, script), chat, limits or Limits()).collect(count, group)
    finally:
        envs.close()


@pytest.mark.parametrize("env_id", SOLVERS)
def test_overlap_and_lockstep_give_equal_trajectories(chat: ChatFormat, env_id: str) -> None:
    def script(request: SampleRequest, member: int) -> AssistantMessage:
        assert request.task is not None
        if member == 3 and request.turn == 0:  # members differ, and so end at different times
            return AssistantMessage("I think it is 7.")
        return SOLVERS[env_id](request.task, request.messages)

    envs = gymnasium.make_vec(env_id, num_envs=64)
    both = [
        Collector(envs, JitteryPolicy(chat, script), chat, schedule=schedule, seed=5).collect(200, 4)  # type: ignore[arg-type]
        for schedule in ("overlap", "lockstep")
    ]
    envs.close()
    assert both[0] == both[1]
    assert [(t.task_index, t.member) for t in both[0]] == [(k, m) for k in range(200) for m in range(4)]
    assert sum(t.solved for t in both[0]) == 600
    assert {t.stop_reason for t in both[0]} == {StopReason.ANSWERED}


def test_a_trajectory_is_the_chain_of_prompts_that_the_policy_was_fed(chat: ChatFormat) -> None:
    envs = vector()
    policy = TroubledPolicy(chat, echo_twice, lambda request: None)
    trajectories = Collector(envs, policy, chat).collect(8, 2)
    envs.close()
    for trajectory in trajectories:
        assert trajectory.task_id == f"t{trajectory.task_index}"
        fed = [
            request.prompt_ids
            for request in policy.requests
            if request.task is not None
            and request.task.id == trajectory.task_id
            and (request.member == trajectory.member or request.n == 2)
        ]
        ids = trajectory.input_ids.tolist()
        starts = [segment.start for segment in trajectory.segments if segment.kind is SegmentKind.ACTION]
        assert [list(prompt) for prompt in fed] == [ids[:start] for start in starts]
        assert [turn.prompt_tokens for turn in trajectory.turns] == starts
        answers = [message.content for message in trajectory.messages if isinstance(message, ToolMessage)]
        assert answers == [f"{trajectory.task_id} of member {trajectory.member}, turn {k}" for k in (0, 1)]
        assert [turn.calls for turn in trajectory.turns] == [("ok",), ("ok",), ()]
        assert (trajectory.reward, trajectory.score, trajectory.solved) == (1.0, {"reward": 1.0}, True)


def test_call_ids_name_question_member_and_number(chat: ChatFormat) -> None:
    last = collect(chat, echo_twice, 2, 2)[-1]
    ids = [c.id for m in last.messages if isinstance(m, AssistantMessage) for c in m.tool_calls]
    assert ids == ["call_1_1_0_0", "call_1_1_1_0"]
    assert [m.tool_call_id for m in last.messages if isinstance(m, ToolMessage)] == ids


def test_a_group_begins_with_one_request(chat: ChatFormat) -> None:
    for slots in (2, 8):  # fewer slots than members, and more
        envs = vector(slots)
        policy = TroubledPolicy(chat, echo_twice, lambda request: None)
        Collector(envs, policy, chat).collect(3, 4)
        envs.close()
        first = [request for request in policy.requests if request.turn == 0]
        assert [request.n for request in first] == [4, 4, 4]
        later = [request for request in policy.requests if request.turn > 0]
        assert {request.n for request in later} == {1}
        assert len({request.seed for request in policy.requests}) == len(policy.requests)


def test_seeds_do_not_depend_on_scheduling(chat: ChatFormat) -> None:
    seen = []
    for slots, schedule in ((1, "overlap"), (8, "overlap"), (3, "lockstep")):
        envs = vector(slots)
        policy = TroubledPolicy(chat, echo_twice, lambda request: None)
        Collector(envs, policy, chat, schedule=schedule, seed=9).collect(4, 3)  # type: ignore[arg-type]
        envs.close()
        seen.append({(r.task.id, r.member, r.turn): r.seed for r in policy.requests if r.task})
    assert seen[0] == seen[1] == seen[2]


def says(*messages: AssistantMessage | str) -> Script:
    return lambda request, member: messages[min(request.turn, len(messages) - 1)]


LONG = "7" * 200  # tokens: the embedded model's tokenizer has one a digit


@pytest.mark.parametrize(
    ("script", "limits", "reason", "turns"),
    [
        (says(AssistantMessage("done")), {}, StopReason.ANSWERED, 1),
        (says(call("finish")), {}, StopReason.ENDED_BY_TOOL, 1),
        (says(call()), {"max_turns": 3}, StopReason.MAX_TURNS, 3),
        (says(call()), {"max_tool_calls": 2}, StopReason.MAX_TOOL_CALLS, 3),
        (says(AssistantMessage(LONG)), {"max_completion_tokens": 20}, StopReason.COMPLETION_CUT, 1),
        (says(call(text=LONG)), {"max_observation_tokens": 10}, StopReason.OBSERVATION_TOO_LONG, 1),
        (says(call()), {"max_trajectory_tokens": 10}, StopReason.PROMPT_TOO_LONG, 0),
        (says(call()), {"max_trajectory_tokens": 500}, StopReason.TRAJECTORY_BUDGET, None),
        (says("<tool_call>{</tool_call>"), {"max_parse_retries": 2}, StopReason.UNPARSABLE, 3),
        (says("<think>\nhm"), {}, StopReason.ANSWERED, 1),
        (says('<think>\n<tool_call>{"name": "echo"}</tool_call>', AssistantMessage("done")), {}, None, 2),
    ],
)  # fmt: skip
def test_every_budget_ends_an_episode_with_its_reason_and_a_score(
    chat: ChatFormat, script: Script, limits: dict[str, int], reason: StopReason | None, turns: int | None
) -> None:
    room = min(limits.get("max_trajectory_tokens", 4_096), 512)
    sizes = {"max_completion_tokens": room, "max_observation_tokens": room, **limits}
    (trajectory,) = collect(chat, script, limits=Limits(**sizes))
    assert trajectory.stop_reason is (reason or StopReason.ANSWERED)
    assert turns is None or len(trajectory.turns) == turns
    assert trajectory.failure is None
    assert trajectory.reward == (1.0 if trajectory.messages[-1] == AssistantMessage("done") else 0.25)
    assert len(trajectory) <= Limits(**sizes).max_trajectory_tokens
    assert len([s for s in trajectory.segments if s.kind is SegmentKind.ACTION]) == len(trajectory.turns)


def test_what_was_sampled_is_kept_even_if_it_is_not_acted_on(chat: ChatFormat) -> None:
    (trajectory,) = collect(chat, says(call(text="last words")), limits=Limits(max_turns=1))
    assert trajectory.turns[0].calls == ()
    assert trajectory.turns[0].finish_reason is FinishReason.STOP
    last = trajectory.messages[-1]
    assert isinstance(last, AssistantMessage)
    assert last.tool_calls == (ToolCall("echo", {"text": "last words"}, "call_0_0_0_0"),)
    assert trajectory.input_ids[trajectory.loss_mask].tolist() == chat.write(call(text="last words"))


@pytest.mark.parametrize(
    ("keep", "left"),
    [("tail", lambda text: text.endswith("89")), ("head", lambda text: text.startswith("01")), ("ends", None)],
)
def test_over_long_output_is_cut_in_tokens_and_comes_back_to_the_model(
    chat: ChatFormat, keep: Any, left: Callable[[str], bool] | None
) -> None:
    text = "0123456789" * 20
    limits = Limits(max_observation_tokens=100, observation_keep=keep)
    (trajectory,) = collect(chat, says(call(text=text), AssistantMessage("done")), limits=limits)
    assert trajectory.solved
    segment = trajectory.segments[2]
    assert 95 < segment.end - segment.start <= 100  # as much as fits
    shown = next(m.content for m in trajectory.messages if isinstance(m, ToolMessage))
    assert shown in chat.decode(trajectory.input_ids[segment.start : segment.end].tolist())
    kept = sum(character.isdigit() for character in shown.replace(shown[shown.index("[") : shown.index("]")], ""))
    assert f"[... {200 - kept} characters cut ...]" in shown
    assert left(shown) if left else shown.startswith("01") and shown.endswith("89")


@given(texts=st.lists(st.text(max_size=200), min_size=1, max_size=3), room=st.integers(0, 300), keep=st.sampled_from(["head", "tail", "ends"]))  # fmt: skip  # noqa: E501
def test_cutting_always_ends_and_never_exceeds_its_room(texts: list[str], room: int, keep: Any) -> None:
    messages = [ToolMessage(text) for text in texts]
    encodings = 0

    def encode(shown: Any) -> list[int]:
        nonlocal encodings
        encodings += 1
        return [0] * sum(5 + len(message.content.encode()) for message in shown)

    fitted = fit(messages, encode, room, keep)
    assert encodings <= 10
    if fitted is None:
        assert len(encode(messages)) > room
        return
    shown, ids = fitted
    assert len(ids) == len(encode(shown)) <= room
    assert len(shown) == len(messages)


def test_no_call_is_made_whose_answer_cannot_fit(chat: ChatFormat) -> None:
    whole = collect(chat, says(call(), AssistantMessage("done")))[0]
    asked = whole.segments[1].end
    outcomes = set()
    for room in range(1, 80):
        limits = Limits(
            max_trajectory_tokens=asked + room, max_completion_tokens=asked, max_observation_tokens=asked + room
        )
        (trajectory,) = collect(chat, says(call(), AssistantMessage("done")), limits=limits)
        ran = bool(trajectory.turns[0].calls)
        assert len(trajectory.turns) == (2 if ran else 1), "a call that is run is read by the model"
        assert len(trajectory) <= limits.max_trajectory_tokens
        outcomes.add((ran, trajectory.stop_reason))
    assert outcomes == {(False, StopReason.TRAJECTORY_BUDGET), (True, StopReason.ANSWERED)}


def test_calls_that_cannot_be_parsed_are_answered_and_good_ones_run(chat: ChatFormat) -> None:
    both = '<tool_call>{oops</tool_call><tool_call>{"name": "echo", "arguments": {"text": "hi"}}</tool_call>'
    (trajectory,) = collect(chat, says(both, AssistantMessage("done")))
    answers = [m.content for m in trajectory.messages if isinstance(m, ToolMessage)]
    assert answers == ["The call is not valid JSON.\nYour call was: {oops", "hi"]
    assert trajectory.turns[0].calls == ("invalid_call", "ok")
    assert trajectory.solved


TROUBLE = {
    "setup raises": ("setup_raised", "reset"),
    "setup hangs": ("reset_timeout", "reset"),
    "tool breaks": ("box_died", "step"),
    "score raises": ("score_raised", "step"),
    "score hangs": ("step_timeout", "step"),
}
QUICK = Limits(reset_timeout=0.2, step_timeout=0.2, sample_timeout=0.2)


@pytest.mark.parametrize("schedule", ["overlap", "lockstep"])
@pytest.mark.parametrize("trouble", TROUBLE)
def test_a_failing_environment_is_a_failure_with_a_kind_and_touches_no_other(
    chat: ChatFormat, trouble: str, schedule: Any
) -> None:
    def collected(bad: Callable[[int], str | None]) -> list[Trajectory]:
        envs = vector(trouble=bad, tool_timeout=0.1)
        found = Collector(envs, ScriptedPolicy(chat, echo_twice), chat, QUICK, schedule=schedule).collect(8, 2)
        envs.close()
        return found

    healthy, troubled = collected(lambda k: None), collected(lambda k: trouble if k % 3 == 1 else None)
    assert len(troubled) == 16
    for good, trajectory in zip(healthy, troubled, strict=True):
        if trajectory.task_index % 3 != 1:
            assert trajectory == good
            continue
        assert trajectory.stop_reason is StopReason.ENVIRONMENT_FAILURE
        assert trajectory.failure is not None
        assert (trajectory.failure.kind, trajectory.failure.where) == TROUBLE[trouble]
        assert trajectory.reward is None
        assert not trajectory.solved


@pytest.mark.parametrize("schedule", ["overlap", "lockstep"])
@pytest.mark.parametrize(
    ("trouble", "kind", "said"),
    [
        (PolicyFailure("engine dead"), "policy_failure", "engine dead"),
        (RuntimeError("oops"), "sample_raised", "RuntimeError: oops"),
        (SystemExit(3), "sample_raised", "SystemExit: 3"),
        (asyncio.CancelledError(), "sample_raised", "nobody had asked for it"),
        ("hang", "policy_failure", "no answer within 0.2 s"),
        ("too few", "policy_failure", "completions for"),
        ("misfed", "token_mismatch", "they part at"),
    ],
)
def test_a_failing_policy_is_a_failure_with_a_kind_and_touches_no_other(
    chat: ChatFormat, trouble: Any, kind: str, said: str, schedule: Any
) -> None:
    def bad(request: SampleRequest) -> Any:
        assert request.task is not None
        group = request.task.data["k"] == 1 and request.turn == 0
        alone = request.task.data["k"] == 2 and request.turn == 1 and request.member == 1
        return trouble if group or alone else None

    envs = vector(tool_timeout=0.1)
    policy = TroubledPolicy(chat, echo_twice, bad)
    trajectories = Collector(envs, policy, chat, QUICK, schedule=schedule).collect(4, 2)
    envs.close()
    failed = [t.id for t in trajectories if t.failure is not None]
    assert failed == ["1.0", "1.1", "2.1"]
    for trajectory in trajectories:
        if trajectory.failure is None:
            assert trajectory.solved
            continue
        assert trajectory.failure.kind == kind
        assert said in trajectory.failure.message
        assert trajectory.reward is None
        mismatch = kind == "token_mismatch"
        assert trajectory.stop_reason is (StopReason.TOKEN_MISMATCH if mismatch else StopReason.POLICY_FAILURE)


def test_a_tool_that_hangs_is_told_to_the_model(chat: ChatFormat) -> None:
    envs = vector(trouble=lambda k: "tool hangs", tool_timeout=0.05)
    (trajectory,) = Collector(envs, ScriptedPolicy(chat, echo_twice), chat).collect(1)
    envs.close()
    assert trajectory.solved
    assert [turn.calls for turn in trajectory.turns] == [("timeout",), ("timeout",), ()]


def test_tools_may_not_take_longer_than_a_step(chat: ChatFormat) -> None:
    envs = vector(tool_timeout=300)
    with pytest.raises(ConfigurationError, match=r"step_timeout is 120 s, but one tool call .* may take 300 s"):
        Collector(envs, ScriptedPolicy(chat, echo_twice), chat)
    envs.close()


def test_one_bad_sample_of_a_group_fails_its_member_alone(chat: ChatFormat) -> None:
    def bad(request: SampleRequest) -> Exception | None:
        wrong = request.turn == 0 and (request.n > 1 or request.member == 2)
        return PolicyFailure("half a logprob") if wrong else None

    envs = vector()
    trajectories = Collector(envs, TroubledPolicy(chat, echo_twice, bad), chat).collect(1, 4)
    envs.close()
    assert [t.solved for t in trajectories] == [True, True, False, True]


def test_the_same_in_lockstep_whatever_the_neighbours_take(chat: ChatFormat) -> None:
    """Waiting for others in a round is not held against an episode's own time."""
    envs = vector(trouble=lambda k: "slow tool" if k == 0 else None)
    limits = Limits(episode_timeout=0.5)
    first, second = Collector(envs, ScriptedPolicy(chat, echo_twice), chat, limits, schedule="lockstep").collect(2)
    envs.close()
    assert first.stop_reason is StopReason.EPISODE_DEADLINE
    assert second.solved


def test_slots_have_one_user_at_a_time(chat: ChatFormat) -> None:
    envs = vector(2, trouble=lambda k: "tool hangs" if k > 0 else None)
    collector = Collector(envs, ScriptedPolicy(chat, echo_twice), chat)
    stream = collector.stream(4)
    next(stream)
    for use in (envs.reset, lambda: envs.step([None, None]), lambda: collector.collect(1)):
        with pytest.raises(ToolgymError, match="used by a collection"):
            use()  # type: ignore[operator]
    stream.close()  # type: ignore[attr-defined]
    envs.reset()
    envs.close()


def test_closing_the_environments_ends_a_collection_with_an_error(chat: ChatFormat) -> None:
    envs = vector(2, trouble=lambda k: "tool hangs" if k > 0 else None)
    stream = Collector(envs, ScriptedPolicy(chat, echo_twice), chat).stream(4)
    finished = [next(stream)]
    envs.close()
    with pytest.raises(ToolgymError, match="closed while a collection ran"):
        finished += list(stream)
    assert finished[0].solved


def test_no_request_is_left_on_the_loop(chat: ChatFormat) -> None:
    envs = vector(4)
    policy = TroubledPolicy(chat, echo_twice, lambda request: "hang" if request.turn == 0 else None)
    limits = Limits(sample_timeout=0.05)
    assert len(Collector(envs, policy, chat, limits).collect(3, 4)) == 12

    async def others() -> list[str]:
        return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert envs.loop.run(others()) == []
    envs.close()


def test_a_stream_that_is_dropped_is_stopped_even_by_the_loops_own_thread(chat: ChatFormat) -> None:
    envs = vector(2, count=200)
    dropped: list[Any] = []
    asked = 0

    def script(request: SampleRequest, member: int) -> AssistantMessage:
        nonlocal asked
        asked += 1
        if dropped:
            dropped.clear()
            gc.collect()
        return call()

    class Holder:
        pass

    holder = Holder()
    holder.me, holder.stream = holder, Collector(envs, ScriptedPolicy(chat, script), chat).stream(200)  # type: ignore[attr-defined]
    next(holder.stream)  # type: ignore[attr-defined]
    dropped.append(holder)
    del holder
    while dropped:
        envs.loop.run(asyncio.sleep(0))
    after = asked
    for _ in range(200):
        envs.loop.run(asyncio.sleep(0))
    assert asked < after + 20
    envs.reset()
    envs.close()


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (lambda c: {"finish_reason": "lenght"}, "finish reason 'lenght'"),
        (lambda c: {"token_ids": c.token_ids.tolist()}, "token_ids that are no flat array"),
        (lambda c: {"token_ids": -c.token_ids - 1}, "the token id -"),
        (lambda c: {"logprobs": c.logprobs[:, None]}, "logprobs that are no flat array"),
        (lambda c: {"versions": np.array([object()] * len(c.versions))}, "versions that are no flat array"),
        (lambda c: dict.fromkeys(("token_ids",), np.tile(c.token_ids, 99)), "tokens"),
    ],
)
def test_a_policy_that_returns_nonsense_is_a_policy_failure(
    chat: ChatFormat, tamper: Callable[[Completion], dict[str, Any]], said: str
) -> None:
    class Wrong(ScriptedPolicy):
        async def sample(self, request: SampleRequest) -> list[Completion]:
            (good,) = await super().sample(request)
            columns = {f: getattr(good, f) for f in ("token_ids", "logprobs", "versions", "finish_reason")}
            return [Completion(**{**columns, **tamper(good)})]

    envs = vector(1)
    (trajectory,) = Collector(envs, Wrong(chat, echo_twice), chat).collect(1)
    envs.close()
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.POLICY_FAILURE, None)
    assert trajectory.failure is not None
    assert said in trajectory.failure.message


def test_a_completion_longer_than_asked_for_is_a_policy_failure(chat: ChatFormat) -> None:
    class Long(ScriptedPolicy):
        async def sample(self, request: SampleRequest) -> list[Completion]:
            return await super().sample(replace(request, max_tokens=10_000))

    envs = vector(1)
    limits = Limits(max_completion_tokens=5)
    (trajectory,) = Collector(envs, Long(chat, echo_twice), chat, limits).collect(1)
    envs.close()
    assert trajectory.failure is not None
    assert "tokens where max_tokens is 5" in trajectory.failure.message


turns_ = st.lists(
    st.lists(st.text(max_size=8), min_size=1, max_size=3) | st.sampled_from(["<tool_call>{</tool_call>", "bare"]),
    max_size=5,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversations=st.lists(turns_, min_size=1, max_size=4))
def test_any_conversation_is_a_chain_with_the_mask_on_what_was_sampled(
    chat: ChatFormat, conversations: list[list[list[str] | str]]
) -> None:
    """P(i+1) = P(i) + C(i) + D(i), for whatever is said and whatever the tools answer, through the real collector."""
    written: dict[tuple[str, int], list[int]] = {}

    def script(request: SampleRequest, member: int) -> AssistantMessage | str:
        assert request.task is not None
        plan = conversations[request.task.data["k"]]
        said: AssistantMessage | str = AssistantMessage("done")
        if request.turn < len(plan) and plan[request.turn] != "bare":
            part = plan[request.turn]
            calls = tuple(ToolCall("echo", {"text": text}) for text in part)
            said = part if isinstance(part, str) else AssistantMessage("", calls)
        written[request.task.id, request.turn] = chat.write(said)
        return said

    envs = vector(2)
    policy = TroubledPolicy(chat, script, lambda request: None)
    trajectories = Collector(envs, policy, chat, Limits(max_turns=20)).collect(len(conversations))
    envs.close()
    for trajectory in trajectories:
        fed = [r for r in policy.requests if r.task is not None and r.task.id == trajectory.task_id]
        ids, mask = trajectory.input_ids.tolist(), trajectory.loss_mask.tolist()
        assert len(ids) == len(mask) == len(trajectory.logprobs) == len(trajectory.versions)
        expected = [False] * len(ids)
        for request in fed:
            sampled = written[trajectory.task_id, request.turn]
            start = len(request.prompt_ids)
            assert ids[: start + len(sampled)] == [*request.prompt_ids, *sampled]
            expected[start : start + len(sampled)] = [True] * len(sampled)
        assert mask == expected


def test_an_episode_that_runs_out_of_time_is_scored(chat: ChatFormat) -> None:
    envs = vector(trouble=lambda k: "tool hangs" if k == 0 else None)
    limits = Limits(episode_timeout=0.3)
    first, second = Collector(envs, ScriptedPolicy(chat, echo_twice), chat, limits).collect(2)
    envs.close()
    assert (first.stop_reason, first.reward, first.failure) == (StopReason.EPISODE_DEADLINE, 0.25, None)
    assert second.solved


def test_a_turn_that_the_format_cannot_continue_ends_the_episode_with_a_score(chat: ChatFormat) -> None:
    class Refusing(Qwen3ChatFormat):
        def extend(self, *args: Any) -> list[int]:
            raise TemplateRefused("no")

    envs = vector(1)
    refusing = Refusing(tokenizers.Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json")))
    collector = Collector(envs, ScriptedPolicy(chat, says(call())), refusing)
    (trajectory,) = collector.collect(1)
    envs.close()
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.TEMPLATE_REFUSED, 0.25)


def test_trajectories_stream_out_as_they_finish(chat: ChatFormat) -> None:
    gate = threading.Event()

    def script(request: SampleRequest, member: int) -> AssistantMessage:
        assert request.task is not None
        if request.task.data["k"] == 0 and request.turn == 1:
            return call(text="slow")
        return AssistantMessage("done") if request.turn == 2 or request.task.data["k"] else call()

    class SlowEnv(EchoEnv):
        @tool
        def echo(self, text: str) -> str:  # type: ignore[override]
            """Wait for the gate if it is slow."""
            return f"{text} {text != 'slow' or gate.wait(20)}"

    envs = ToolVectorEnv.of(SlowEnv, num_envs=2)
    stream = Collector(envs, ScriptedPolicy(chat, script), chat).stream(4)
    order = [next(stream).task_index for _ in range(3)]
    assert order == [1, 2, 3]  # one slot ran them all while the other waited
    gate.set()
    assert [trajectory.task_index for trajectory in stream] == [0]
    envs.close()


def test_closing_a_stream_cancels_what_runs_and_leaves_the_slots_usable(chat: ChatFormat) -> None:
    envs = vector(2, trouble=lambda k: "tool hangs" if k > 0 else None)
    collector = Collector(envs, ScriptedPolicy(chat, echo_twice), chat)
    stream: Iterator[Trajectory] = collector.stream(4)
    assert next(stream).task_index == 0
    stream.close()  # type: ignore[attr-defined]
    assert collector.collect([Task("again", "again", {"k": 9, "trouble": None})])[0].solved
    envs.close()


def test_it_may_be_awaited(chat: ChatFormat) -> None:
    envs = vector()
    collector = Collector(envs, ScriptedPolicy(chat, echo_twice), chat)

    assert asyncio.run(collector.acollect(3, 2)) == collector.collect(3, 2)
    envs.close()


def test_a_repeated_task_is_a_group_of_its_own(chat: ChatFormat) -> None:
    envs = vector()
    task = Task("same", "same", {"k": 0, "trouble": None})
    trajectories = Collector(envs, ScriptedPolicy(chat, echo_twice), chat).collect([task, task], 2)
    envs.close()
    assert [(t.task_index, t.member) for t in trajectories] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_nothing_asked_for_is_nothing_returned(chat: ChatFormat) -> None:
    assert collect(chat, echo_twice, 0) == []


def test_progress_counts_finished_trajectories(chat: ChatFormat) -> None:
    progress = Progress(total=8)
    for trajectory in collect(chat, echo_twice, 4, 2, trouble=lambda k: "tool breaks" if k == 3 else None):
        progress = progress.plus(trajectory)
    assert (progress.finished, progress.solved, progress.failed, progress.turns) == (8, 6, 2, 20)
    assert progress.sampled_tokens > 0


def test_no_thread_is_left(chat: ChatFormat) -> None:
    before = set(threading.enumerate())
    collect(chat, echo_twice, 8, 2)
    assert set(threading.enumerate()) == before


class Small:
    max_model_len = 100

    async def sample(self, request: SampleRequest) -> list[Any]:
        raise AssertionError("never asked")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"envs": gymnasium.vector.SyncVectorEnv([EchoEnv])}, "expected a ToolVectorEnv without wrappers"),
        ({"schedule": "sideways"}, "expected a schedule among overlap, lockstep, actual 'sideways'"),
        ({"schedule": []}, "expected a schedule among"),
        ({"seed": -1}, "expected seed as an int of 0 or more, actual -1"),
        ({"seed": 1.5}, "expected seed as an int of 0 or more"),
        ({"policy": None}, "expected policy as a Policy, actual None"),
        ({"chat": None}, "expected chat as a ChatFormat"),
        ({"limits": None}, "expected limits as a Limits"),
        ({"sampling": 0.7}, "expected sampling as a Sampling"),
        ({"policy": Small()}, "lower the limit, or give the policy a larger max_model_len"),
    ],
)
def test_wrong_settings_are_refused_when_the_collector_is_made(
    chat: ChatFormat, options: dict[str, Any], said: str
) -> None:
    envs = vector(1)
    with pytest.raises(ConfigurationError, match=said):
        Collector(**{"envs": envs, "policy": ScriptedPolicy(chat, echo_twice), "chat": chat, **options})
    envs.close()


@pytest.mark.parametrize(
    ("tasks", "group"), [(1, 0), (-1, 1), (9, 1), ("ab", 1), ([None], 1), (1.5, 1), (True, 1), (1, "2"), (None, 1)]
)
def test_wrong_numbers_are_refused_before_anything_runs(chat: ChatFormat, tasks: Any, group: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        collect(chat, echo_twice, tasks, group)


def test_logprobs_of_a_script_are_certain(chat: ChatFormat) -> None:
    (trajectory,) = collect(chat, echo_twice)
    assert np.array_equal(trajectory.logprobs, np.zeros(len(trajectory), np.float32))
