"""Every trajectory asked for comes back, each with the reason for its end; nothing touches its neighbours."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import tokenizers
from helpers import EchoEnv, JitteryPolicy, TroubledPolicy, call, echo_twice, vector
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolgym.agents.chat import ChatFormat, TemplateRefused
from toolgym.agents.policy import FinishReason, SampleRequest
from toolgym.agents.scripted_policy import Script, ScriptedPolicy
from toolgym.agents.template_chat import TemplateChatFormat
from toolgym.agents.tiny import TINY_MODEL
from toolgym.envs import (
    AssistantMessage,
    ConfigurationError,
    Task,
    ToolCall,
    ToolMessage,
    ToolVectorEnv,
    tool,
)
from toolgym.envs.catalog import calculator, ledger
from toolgym.rollout.collector import Collector
from toolgym.rollout.limits import Limits
from toolgym.rollout.losses import shift
from toolgym.rollout.observations import fit
from toolgym.rollout.progress import Progress
from toolgym.rollout.report import summarize
from toolgym.rollout.store import trajectory_from_dict, trajectory_to_dict
from toolgym.rollout.trajectory import AlignmentError, SegmentKind, StopReason, Trajectory

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
    reason = "The call is not valid JSON: Expecting property name enclosed in double quotes at 1."
    assert answers == [f"{reason}\nYour call was: {{oops", "hi"]
    assert trajectory.turns[0].calls == ("bad_json", "ok")
    assert trajectory.solved


def test_tools_may_not_take_longer_than_a_step(chat: ChatFormat) -> None:
    envs = vector(tool_timeout=300)
    with pytest.raises(ConfigurationError, match=r"step_timeout is 120 s, but one tool call .* may take 300 s"):
        Collector(envs, ScriptedPolicy(chat, echo_twice), chat)
    envs.close()


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


def refusing() -> ChatFormat:
    """A format that is never able to continue."""

    class Refusing(TemplateChatFormat):
        def extend(self, *args: Any) -> list[int]:
            if self.certificate is None:
                return super().extend(*args)
            raise TemplateRefused("no")

    tokenizer = tokenizers.Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    return Refusing(tokenizer, (TINY_MODEL / "chat_template.jinja").read_text())


def test_a_turn_that_the_format_cannot_continue_ends_the_episode_with_a_score(chat: ChatFormat) -> None:
    envs = vector(1)
    collector = Collector(envs, ScriptedPolicy(chat, says(call())), refusing())
    (trajectory,) = collector.collect(1)
    envs.close()
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.TEMPLATE_REFUSED, 0.25)
    assert summarize([trajectory])[0].stop_reasons == {"template_refused": 1}


def test_or_it_goes_on_as_another_sample(chat: ChatFormat) -> None:
    envs = vector(1)
    collector = Collector(envs, ScriptedPolicy(chat, echo_twice), refusing(), on_break="split")
    (trajectory,) = collector.collect(1)
    envs.close()
    assert (trajectory.stop_reason, trajectory.reward, trajectory.breaks) == (StopReason.ANSWERED, 1.0, 2)
    assert summarize([trajectory])[0].breaks == 2
    assert len(trajectory.samples) == len(trajectory.turns) == 3
    for number, (sample, turn) in enumerate(zip(trajectory.samples, trajectory.turns, strict=True)):
        prompt = chat.open(trajectory.messages[: 1 + 2 * number], envs.envs[0].tools.schemas)
        assert sample.input_ids[: turn.prompt_tokens].tolist() == prompt
        assert sample.loss_mask.tolist() == [False] * len(prompt) + [True] * turn.completion_tokens
        assert len(shift(sample).targets) == len(sample) - 1
    with pytest.raises(AlignmentError, match="was split: shift each of its 3 samples"):
        shift(trajectory)
    assert trajectory_from_dict(trajectory_to_dict(trajectory)) == trajectory


def test_a_split_tells_of_calls_that_could_not_be_parsed_and_cuts_what_does_not_fit(chat: ChatFormat) -> None:
    broken = "<tool_call>{oops</tool_call>"
    envs = vector(1)
    limits = Limits(max_observation_tokens=60, max_trajectory_tokens=2_000, max_completion_tokens=900)
    script = says(broken, call(text="long " * 150), AssistantMessage("done"))
    collector = Collector(envs, ScriptedPolicy(chat, script), refusing(), limits, on_break="split")
    (trajectory,) = collector.collect(1)
    envs.close()
    assert (trajectory.stop_reason, trajectory.reward, trajectory.breaks) == (StopReason.ANSWERED, 1.0, 2)
    _, second, third = trajectory.samples
    assert "{oops" in chat.decode(second.input_ids.tolist())
    assert "characters cut" in chat.decode(third.input_ids.tolist())
    assert third.loss_mask.sum() < 20
    assert len(third) < len(second) + 60 + 40
    assert isinstance(trajectory.messages[-2], ToolMessage)
    assert len(trajectory.messages[-2].content) < 400


def test_a_split_that_does_not_fit_ends_with_a_score(chat: ChatFormat) -> None:
    envs = vector(1)
    limits = Limits(max_observation_tokens=150, max_trajectory_tokens=400, max_completion_tokens=100)
    script = says(*[call(text=f"{k} and so on " * 3) for k in range(20)])
    collector = Collector(envs, ScriptedPolicy(chat, script), refusing(), limits, on_break="split")
    (trajectory,) = collector.collect(1)
    envs.close()
    assert trajectory.stop_reason is StopReason.TRAJECTORY_BUDGET
    assert trajectory.reward == 0.25
    assert all(len(sample) <= 400 for sample in trajectory.samples)


def test_a_prompt_that_a_template_cannot_write_whole_ends_a_split(chat: ChatFormat) -> None:
    class Blind(TemplateChatFormat):
        """Its template drops what tools say."""

    tokenizer = tokenizers.Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    source = (
        (TINY_MODEL / "chat_template.jinja").read_text().replace("~ message.content ~ '\\n</tool_response>'", "~ ''")
    )
    blind = Blind(tokenizer, source)
    assert blind.certificate is not None
    assert "P1" in blind.certificate.refused
    envs = vector(1)
    for on_break in ("stop", "split"):
        collector = Collector(envs, ScriptedPolicy(chat, echo_twice), blind, on_break=on_break)  # type: ignore[arg-type]
        (trajectory,) = collector.collect(1)
        assert (trajectory.stop_reason, trajectory.reward) == (StopReason.TEMPLATE_REFUSED, 0.25)
        assert isinstance(trajectory.messages[-1], ToolMessage)
    envs.close()


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
