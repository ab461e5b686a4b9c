"""Every trajectory asked for comes back, each with the reason for its end; nothing touches its neighbours."""

import asyncio
import threading
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
    ToolCall,
    ToolMessage,
    ToolVectorEnv,
    tool,
)
from toolgym.envs.catalog import calculator, ledger
from toolgym.rollout.collector import Collector
from toolgym.rollout.limits import Limits
from toolgym.rollout.losses import shift
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


def test_what_was_sampled_is_kept_even_if_it_is_not_acted_on(chat: ChatFormat) -> None:
    (trajectory,) = collect(chat, says(call(text="last words")), limits=Limits(max_turns=1))
    assert trajectory.turns[0].calls == ()
    assert trajectory.turns[0].finish_reason is FinishReason.STOP
    last = trajectory.messages[-1]
    assert isinstance(last, AssistantMessage)
    assert last.tool_calls == (ToolCall("echo", {"text": "last words"}, "call_0_0_0_0"),)
    assert trajectory.input_ids[trajectory.loss_mask].tolist() == chat.write(call(text="last words"))


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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_logprobs_of_a_script_are_certain(chat: ChatFormat) -> None:
    (trajectory,) = collect(chat, echo_twice)
    assert np.array_equal(trajectory.logprobs, np.zeros(len(trajectory), np.float32))
