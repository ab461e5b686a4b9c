"""Where budgets meet: each edge at which rollouts are known to hang, to vanish or to blame the model."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import tokenizers
from helpers import EchoEnv, TroubledPolicy, call, echo_twice, vector
from hypothesis import given, settings
from hypothesis import strategies as st

from toolgym.agents.chat import ChatFormat, TemplateRefused
from toolgym.agents.policy import Completion, PolicyFailure, SampleRequest
from toolgym.agents.scripted_policy import Script, ScriptedPolicy
from toolgym.agents.template_chat import TemplateChatFormat
from toolgym.agents.tiny import TINY_MODEL
from toolgym.envs import AssistantMessage, ConfigurationError, Task, ToolCall, ToolMessage, ToolVectorEnv, UserMessage
from toolgym.rollout.collector import Collector
from toolgym.rollout.groups import group_trajectories
from toolgym.rollout.limits import Limits
from toolgym.rollout.observations import fit
from toolgym.rollout.prompting import OnBreak
from toolgym.rollout.report import summarize
from toolgym.rollout.trajectory import SegmentKind, StopReason, Trajectory

LIKELY = settings(max_examples=30, deadline=None)
KEEPS = st.sampled_from(["head", "tail", "ends"])
DONE = AssistantMessage("done")


@pytest.fixture(scope="module")
def envs() -> Iterator[ToolVectorEnv]:
    made = vector(2, count=4)
    yield made
    made.close()


@pytest.fixture(scope="module")
def splitting() -> ChatFormat:
    """A format that is never able to continue, so that every turn is a sample of its own."""

    class Splitting(TemplateChatFormat):
        def extend(self, *args: Any) -> list[int]:
            if self.certificate is None:
                return super().extend(*args)
            raise TemplateRefused("no")

    tokenizer = tokenizers.Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    return Splitting(tokenizer, (TINY_MODEL / "chat_template.jinja").read_text())


def limits(**values: Any) -> Limits:
    """Limits whose parts are no larger than the whole."""
    whole = values.get("max_trajectory_tokens", 4_096)
    sizes = {
        "max_completion_tokens": min(512, whole),
        "max_observation_tokens": min(1_024, whole),
    }
    return Limits(**{**sizes, **values})


def one(
    envs: ToolVectorEnv, chat: ChatFormat, script: Script, bounds: Limits
) -> tuple[Trajectory, list[SampleRequest]]:
    """One episode, and what was asked of the policy."""
    policy = TroubledPolicy(chat, script, lambda request: None)
    (found,) = Collector(envs, policy, chat, bounds).collect(1)
    return found, policy.requests


def says(*messages: AssistantMessage | str) -> Script:
    return lambda request, member: messages[min(request.turn, len(messages) - 1)]


def answers(trajectory: Trajectory) -> list[str]:
    return [message.content for message in trajectory.messages if isinstance(message, ToolMessage)]


def observations(trajectory: Trajectory) -> list[int]:
    return [s.end - s.start for s in trajectory.segments if s.kind is SegmentKind.OBSERVATION]


@LIKELY
@given(length=st.integers(60, 70) | st.integers(0, 300), room=st.integers(40, 90), keep=KEEPS, letter=st.sampled_from("7é東"))  # fmt: skip  # noqa: E501
def test_edge_1_shortening_a_result_always_ends_within_its_room(
    chat: ChatFormat, envs: ToolVectorEnv, length: int, room: int, keep: Any, letter: str
) -> None:
    bounds = limits(max_observation_tokens=room, observation_keep=keep, max_completion_tokens=2_000)
    found, _ = one(envs, chat, says(call(text=letter * length), DONE), bounds)
    assert found.solved
    assert observations(found)[0] <= room
    (shown,) = answers(found)
    assert shown == letter * length or "cut" in shown


@pytest.mark.parametrize(
    ("keep", "left"),
    [("tail", lambda text: text.endswith("89")), ("head", lambda text: text.startswith("01")), ("ends", None)],
)
def test_edge_1_as_much_is_kept_as_fits_with_a_marker_that_counts_the_rest(
    chat: ChatFormat, envs: ToolVectorEnv, keep: Any, left: Callable[[str], bool] | None
) -> None:
    text = "0123456789" * 20
    bounds = limits(max_observation_tokens=100, observation_keep=keep)
    found, _ = one(envs, chat, says(call(text=text), DONE), bounds)
    assert found.solved
    segment = found.segments[2]
    assert 95 < segment.end - segment.start <= 100
    (shown,) = answers(found)
    assert shown in chat.decode(found.input_ids[segment.start : segment.end].tolist())
    kept = sum(character.isdigit() for character in shown.replace(shown[shown.index("[") : shown.index("]")], ""))
    assert f"[... {200 - kept} characters cut ...]" in shown
    assert left(shown) if left else shown.startswith("01") and shown.endswith("89")


@settings(deadline=None)
@given(texts=st.lists(st.text(max_size=200), min_size=1, max_size=3), room=st.integers(0, 300), keep=KEEPS)
def test_edge_1_cutting_tries_few_lengths_and_fits_whatever_fits_when_it_is_cut_away(
    texts: list[str], room: int, keep: Any
) -> None:
    messages = [ToolMessage(text) for text in texts]
    encodings = 0

    def encode(shown: Any) -> list[int]:
        nonlocal encodings
        encodings += 1
        return [0] * sum(5 + len(message.content.encode()) for message in shown)

    fitted = fit(messages, encode, room, keep)
    assert encodings <= 11
    if fitted is None:
        assert room < 10 * len(texts), "(cut) and 5 tokens for each"
        return
    shown, ids = fitted
    assert len(ids) == len(encode(shown)) <= room
    assert len(shown) == len(messages)


@pytest.mark.parametrize("schedule", ["overlap", "lockstep"])
def test_edge_2_a_first_prompt_over_budget_comes_back_like_any_other(
    chat: ChatFormat, envs: ToolVectorEnv, schedule: Any
) -> None:
    tasks = [Task(f"t{k}", "why? " * (2_000 if k == 1 else 1), {"k": k, "trouble": None}) for k in range(3)]
    found = Collector(envs, ScriptedPolicy(chat, echo_twice), chat, schedule=schedule).collect(tasks, 2)
    assert [t.id for t in found] == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    for trajectory in found[2:4]:
        assert (trajectory.stop_reason, trajectory.reward) == (StopReason.PROMPT_TOO_LONG, 0.25)
        assert trajectory.messages == (UserMessage("why? " * 2_000),)
        assert (len(trajectory), trajectory.samples, trajectory.turns) == (0, (), [])
    assert all(t.solved for t in found[:2] + found[4:])


def test_edge_2_the_longest_prompt_that_fits_is_asked_and_one_token_more_is_not(
    chat: ChatFormat, envs: ToolVectorEnv
) -> None:
    size = len(chat.open([UserMessage("task 0")], envs.envs[0].tools.schemas))
    fits, asked = one(envs, chat, says(DONE), limits(max_trajectory_tokens=size + 16))
    assert (fits.stop_reason, asked[0].max_tokens) == (StopReason.ANSWERED, 16)
    over, asked = one(envs, chat, says(DONE), limits(max_trajectory_tokens=size + 15))
    assert (over.stop_reason, asked) == (StopReason.PROMPT_TOO_LONG, [])


def test_edge_3_a_result_never_fills_the_budget_so_that_an_answer_is_left_empty(
    chat: ChatFormat, envs: ToolVectorEnv
) -> None:
    """Whatever the budget: where a result is shown, there is room to say something about it."""
    whole, _ = one(envs, chat, says(call(text="7" * 60), DONE), limits())
    filled = whole.segments[2].end  # prompt, call and result
    cut = 0
    for most in range(filled - 60, filled + 40):
        bounds = limits(max_trajectory_tokens=most, max_observation_tokens=most)
        found, asked = one(envs, chat, says(call(text="7" * 60), DONE), bounds)
        assert all(request.max_tokens >= bounds.min_completion_tokens for request in asked)
        assert found.stop_reason in (StopReason.ANSWERED, StopReason.TRAJECTORY_BUDGET)
        if found.stop_reason is StopReason.ANSWERED:
            assert found.solved, "the answer is whole"
        assert (len(found.turns) == 2) == bool(answers(found)), "a result that is shown is followed by a turn"
        cut += any("cut" in answer for answer in answers(found))
    assert cut > 5


def test_edge_4_a_call_at_the_end_of_the_budget_is_answered(chat: ChatFormat, envs: ToolVectorEnv) -> None:
    """A model that uses up all that it is given, call after call, has each of them answered."""
    empty = len(chat.write(call(text="")))
    reserved = 0
    for most in range(400, 560, 3):
        bounds = limits(max_trajectory_tokens=most, max_completion_tokens=90)

        def greedy(request: SampleRequest, member: int) -> AssistantMessage:
            digits = request.max_tokens - empty
            return call(text="7" * digits) if digits >= 0 else DONE

        found, asked = one(envs, chat, greedy, bounds)
        for turn, request in zip(found.turns, asked, strict=True):
            left = most - turn.prompt_tokens - request.max_tokens
            if left < bounds.reserved_observation_tokens + bounds.min_completion_tokens:
                continue  # for an answer: there was no room for a call any more
            assert turn.calls == ("ok",) or turn.completion_tokens < empty
            assert turn is not found.turns[-1] or found.stop_reason is StopReason.ANSWERED
            reserved += request.max_tokens < bounds.max_completion_tokens
        assert all(request.max_tokens >= bounds.min_completion_tokens for request in asked)
    assert reserved > 10


def test_edge_4_no_call_is_made_whose_answer_cannot_be_shown(chat: ChatFormat, envs: ToolVectorEnv) -> None:
    whole, _ = one(envs, chat, says(call(), DONE), limits())
    asked = whole.segments[1].end
    outcomes = set()
    for room in range(1, 80):
        bounds = limits(max_trajectory_tokens=asked + room, max_completion_tokens=asked)
        found, _ = one(envs, chat, says(call(), DONE), bounds)
        ran = bool(found.turns[0].calls)
        assert len(found.turns) == (2 if ran else 1), "a call that is run is read by the model"
        assert len(found) <= bounds.max_trajectory_tokens
        outcomes.add((ran, found.stop_reason))
    assert outcomes == {(False, StopReason.TRAJECTORY_BUDGET), (True, StopReason.ANSWERED)}


@pytest.mark.parametrize("count", range(1, 12))
def test_edge_4_many_calls_are_all_answered_or_none_is_made(chat: ChatFormat, envs: ToolVectorEnv, count: int) -> None:
    many = AssistantMessage("", call(text="7" * 20).tool_calls * count)
    found, _ = one(envs, chat, says(many, DONE), limits(max_observation_tokens=80))
    ran = len(found.turns[0].calls)
    assert ran in (0, count)
    assert found.stop_reason is (StopReason.ANSWERED if ran else StopReason.OBSERVATION_TOO_LONG)
    assert len(answers(found)) == ran
    assert bool(ran) == (count <= 8), "9 tokens each, 8 around them"


def test_edge_4_nothing_is_kept_free_for_calls_that_would_not_be_run(chat: ChatFormat, envs: ToolVectorEnv) -> None:
    bounds = limits(max_trajectory_tokens=500, max_tool_calls=1, max_turns=4)
    found, asked = one(envs, chat, says(call(), DONE), bounds)
    first, second = ((turn, request) for turn, request in zip(found.turns, asked, strict=True))
    assert first[1].max_tokens == 500 - first[0].prompt_tokens - 64 - 16
    assert second[1].max_tokens == 500 - second[0].prompt_tokens


def test_edge_5_limits_beyond_what_the_policy_takes_are_refused_before_anything_runs(
    chat: ChatFormat, envs: ToolVectorEnv
) -> None:
    class Small(ScriptedPolicy):
        max_model_len = 1_000

    assert Collector(envs, Small(chat, echo_twice), chat, limits(max_trajectory_tokens=1_000)).collect(1)[0].solved
    with pytest.raises(ConfigurationError, match="is 1001, but the policy's model takes 1000 tokens"):
        Collector(envs, Small(chat, echo_twice), chat, limits(max_trajectory_tokens=1_001))


@LIKELY
@given(most=st.integers(330, 700), on_break=st.sampled_from(["stop", "split"]))
def test_edge_5_every_sample_is_within_the_limit_that_a_trainer_is_told(
    chat: ChatFormat, splitting: ChatFormat, envs: ToolVectorEnv, most: int, on_break: OnBreak
) -> None:
    policy = ScriptedPolicy(chat, says(call(text="7" * 40)))
    fmt = splitting if on_break == "split" else chat
    (found,) = Collector(envs, policy, fmt, limits(max_trajectory_tokens=most), on_break=on_break).collect(1)
    assert found.failure is None
    assert all(len(sample) <= most for sample in found.samples)
    assert on_break == "stop" or len(found.samples) == len(found.turns)


def test_edge_6_what_is_acted_on_is_what_the_tokens_say(chat: ChatFormat, envs: ToolVectorEnv) -> None:
    """A completion has no text of its own: the message is read from the tokens that are trained on."""
    assert {entry.name for entry in fields(Completion)} == {
        "token_ids",
        "logprobs",
        "versions",
        "finish_reason",
        "prompt_ids",
    }
    found, _ = one(envs, chat, says(call(text="a"), call(text="b c"), DONE), limits())
    acted = [message for message in found.messages if isinstance(message, AssistantMessage)]
    sampled = [segment for segment in found.segments if segment.kind is SegmentKind.ACTION]
    assert len(acted) == len(sampled) == 3
    for turn, (message, segment) in enumerate(zip(acted, sampled, strict=True)):
        said = chat.parse(found.input_ids[segment.start : segment.end], found.input_ids[: segment.start])
        assert said.with_call_ids(f"call_0_0_{turn}_") == message
    assert answers(found) == ["a", "b c"]


def test_edge_6_an_engine_that_was_fed_another_prompt_is_found_out(chat: ChatFormat, envs: ToolVectorEnv) -> None:
    policy = TroubledPolicy(chat, echo_twice, lambda request: "misfed" if request.turn == 1 else None)
    (found,) = Collector(envs, policy, chat).collect(1)
    assert (found.stop_reason, found.reward) == (StopReason.TOKEN_MISMATCH, None)
    assert len(found.turns) == 1, "what was sampled from another prompt is not kept under this one"


@pytest.mark.parametrize("schedule", ["overlap", "lockstep"])
def test_edge_7_errors_of_the_engine_and_of_tools_end_their_own_episode_alone(chat: ChatFormat, schedule: Any) -> None:
    def dead(request: SampleRequest) -> Exception | None:
        wrong = request.task is not None and request.task.id == "t1"
        return PolicyFailure("engine error", permanent=True) if wrong else None

    slots = vector(4, trouble=lambda k: "tool breaks" if k == 2 else None)
    found = Collector(slots, TroubledPolicy(chat, echo_twice, dead), chat, schedule=schedule).collect(4, 2)
    slots.close()
    assert [t.id for t in found] == [f"{k}.{m}" for k in range(4) for m in range(2)]
    kinds = [t.failure and t.failure.kind for t in found]
    assert kinds == [None] * 2 + ["policy_failure"] * 2 + ["box_died"] * 2 + [None] * 2
    assert [t.reward for t in found] == [1.0] * 2 + [None] * 4 + [1.0] * 2


@pytest.mark.parametrize("name", [entry.name for entry in fields(Limits)])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "5", None, True])
def test_edge_8_budgets_of_zero_and_below_are_refused_by_name(name: str, value: Any) -> None:
    if (name, value) == ("tool_timeout", None):
        assert Limits(tool_timeout=None).tool_timeout is None  # the tools' own
        return
    with pytest.raises(ConfigurationError, match=rf"expected Limits\.{name}"):
        Limits(**{name: value})


@pytest.mark.parametrize(
    ("tasks", "group"), [(1, 0), (-1, 1), (9, 1), ("ab", 1), ([None], 1), (1.5, 1), (True, 1), (1, "2"), (None, 1)]
)
def test_edge_8_wrong_numbers_are_refused_before_anything_runs(
    chat: ChatFormat, envs: ToolVectorEnv, tasks: Any, group: Any
) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        Collector(envs, ScriptedPolicy(chat, echo_twice), chat).collect(tasks, group)


@pytest.mark.parametrize("schedule", ["overlap", "lockstep"])
def test_edge_9_nothing_asked_for_is_nothing_returned(chat: ChatFormat, envs: ToolVectorEnv, schedule: Any) -> None:
    made = Collector(envs, ScriptedPolicy(chat, echo_twice), chat, schedule=schedule)
    assert made.collect(0) == made.collect([]) == made.collect([], 4) == []


def test_also_a_call_that_ran_is_counted_even_if_its_result_does_not_fit(chat: ChatFormat) -> None:
    class Talkative(EchoEnv):
        """Its user says more than fits after every answer of a tool, which nobody may cut."""

        async def astep(self, action: AssistantMessage | None, *, tool_timeout: float | None = None) -> Any:
            observation, *rest = await super().astep(action, tool_timeout=tool_timeout)
            return ((*observation, UserMessage("well, " * 2_000)), *rest)

    slots = ToolVectorEnv.of(Talkative, num_envs=1)
    found, _ = one(slots, chat, says(call(text="a")), limits())
    slots.close()
    assert (found.stop_reason, found.reward) == (StopReason.OBSERVATION_TOO_LONG, 0.25)
    assert found.turns[0].calls == ("ok",)
    assert summarize([found])[0].tool_calls == 1
    assert answers(found) == ["a"], "the record has what the tool said"
    assert observations(found) == [], "which the model has never seen"


def test_also_a_repeated_question_is_a_group_of_its_own(chat: ChatFormat, envs: ToolVectorEnv) -> None:
    task = Task("same", "same", {"k": 0, "trouble": None})
    found = Collector(envs, ScriptedPolicy(chat, echo_twice), chat).collect([task, task], 2)
    assert [(t.task_index, t.member, t.task_id) for t in found] == [
        (0, 0, "same"),
        (0, 1, "same"),
        (1, 0, "same"),
        (1, 1, "same"),
    ]
    assert [len(group.trajectories) for group in group_trajectories(found, 2)] == [2, 2]


@st.composite
def any_limits(draw: st.DrawFn) -> Limits:
    most = draw(st.integers(1, 900))
    return Limits(
        max_turns=draw(st.integers(1, 5)),
        max_tool_calls=draw(st.integers(1, 6)),
        max_parse_retries=draw(st.integers(1, 3)),
        max_trajectory_tokens=most,
        max_completion_tokens=draw(st.integers(1, most)),
        max_observation_tokens=draw(st.integers(1, most)),
        min_completion_tokens=draw(st.integers(1, 60)),
        reserved_observation_tokens=draw(st.integers(1, 120)),
        observation_keep=draw(KEEPS),
    )


SAID = st.lists(
    st.lists(st.text("7é \n[", max_size=60), min_size=1, max_size=3)
    | st.sampled_from(["<tool_call>{</tool_call>", "ok"]),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(bounds=any_limits(), said=SAID, on_break=st.sampled_from(["stop", "split"]))
def test_whatever_the_budgets_every_call_that_is_run_is_read_and_all_come_back(
    chat: ChatFormat, splitting: ChatFormat, envs: ToolVectorEnv, bounds: Limits, said: list[Any], on_break: OnBreak
) -> None:
    def script(request: SampleRequest, member: int) -> AssistantMessage | str:
        part = said[min(request.turn, len(said) - 1)]
        if isinstance(part, str):
            return part
        return AssistantMessage("", tuple(ToolCall("echo", {"text": text}) for text in part))

    policy = TroubledPolicy(chat, script, lambda request: None)
    fmt = splitting if on_break == "split" else chat
    found = Collector(envs, policy, fmt, bounds, on_break=on_break).collect(2, 2)
    assert [t.id for t in found] == ["0.0", "0.1", "1.0", "1.1"]
    for trajectory in found:
        check(trajectory, bounds, split=on_break == "split")
    least = min(bounds.min_completion_tokens, bounds.max_completion_tokens)
    for request in policy.requests:
        assert least <= request.max_tokens <= bounds.max_completion_tokens
        assert len(request.prompt_ids) + request.max_tokens <= bounds.max_trajectory_tokens


def check(trajectory: Trajectory, bounds: Limits, *, split: bool) -> None:
    """A record keeps to its limits, is scored, and has every call that was run answered and read."""
    assert (trajectory.failure, trajectory.reward, trajectory.detail) == (None, 0.25, "")
    assert all(len(sample) <= bounds.max_trajectory_tokens for sample in trajectory.samples)
    assert len(trajectory.turns) <= bounds.max_turns
    calls = [len(turn.calls) for turn in trajectory.turns]
    assert sum(calls) == len(answers(trajectory)) <= bounds.max_tool_calls
    assert not calls or calls[-1] == 0, "behind a call that was run there is another turn"
    assert all(calls[:-1])
    assert split or all(size <= bounds.max_observation_tokens for size in observations(trajectory))
    sampled = np.array([turn.completion_tokens for turn in trajectory.turns])
    assert (sampled <= bounds.max_completion_tokens).all()
    assert int(trajectory.loss_mask.sum()) == sampled.sum()
