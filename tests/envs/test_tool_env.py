"""A tool environment is a Gymnasium environment, and its failures are never rewards."""

import asyncio
import os
import signal
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from toolgym.envs import (
    AssistantMessage,
    ConfigurationError,
    EnvironmentFailure,
    Episode,
    ResetNeededError,
    Score,
    SystemMessage,
    Task,
    ToolCall,
    ToolEnv,
    ToolgymError,
    ToolMessage,
    UserMessage,
    tool,
    tool_env_ids,
)


class GuessEnv(ToolEnv):
    """Guess a number."""

    system_prompt = "Guess."

    def __init__(self, **options: Any) -> None:
        self.secret = 0
        super().__init__(["first", "second", "third"], **options)

    async def setup(self, task: Task) -> None:
        self.secret = int(self.np_random.integers(100))

    @tool
    def guess(self, number: int) -> str:
        """Guess."""
        return "right" if number == self.secret else "wrong"

    @tool(ends_episode=True)
    def give_up(self) -> str:
        """End it."""
        return "as you like"

    def score(self, episode: Episode) -> dict[str, float]:
        return {"found": float(any("right" in message.content for message in episode.messages)), "style": 0.25}


def say(text: str = "", *calls: tuple[str, dict[str, Any]]) -> AssistantMessage:
    return AssistantMessage(text, tuple(ToolCall(name, arguments) for name, arguments in calls))


@pytest.mark.parametrize("env_id", tool_env_ids())
@pytest.mark.filterwarnings("error", "ignore::toolgym.envs.sandbox.choice.SandboxWarning")
def test_shipped_environments_pass_gymnasiums_check(env_id: str) -> None:
    env = gymnasium.make(env_id, render_mode="ansi").unwrapped
    check_env(env)
    env.close()


@pytest.mark.filterwarnings("ignore:.*alternative render modes")
def test_an_authors_environment_passes_gymnasiums_check() -> None:
    env = GuessEnv()
    check_env(env)
    env.close()


def test_observations_are_what_is_new() -> None:
    env = GuessEnv()
    observation, info = env.reset(seed=1, options={"task": Task("t", "go")})
    assert observation == (SystemMessage("Guess."), UserMessage("go"))
    assert info == {"task_id": "t"}
    observation, reward, terminated, truncated, info = env.step(
        say("", ("guess", {"number": env.secret}), ("guess", {}), ("gess", {}))
    )
    assert [message.content[:20] for message in observation if isinstance(message, ToolMessage)] == [
        "right",
        "Invalid arguments fo",
        "No tool is named 'ge",
    ]
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"calls": ("ok", "bad_arguments", "unknown_tool")}
    observation, reward, terminated, truncated, info = env.step(say("it is found"))
    assert (observation, reward, terminated, truncated) == ((), 1.25, True, False)
    assert info == {"score": {"found": 1.0, "style": 0.25}, "solved": True}
    assert len(env.messages) == 7
    env.close()


def test_answers_carry_the_ids_of_their_calls_and_get_one_where_there_is_none() -> None:
    env = GuessEnv()
    env.reset(seed=1)
    given = AssistantMessage("", (ToolCall("guess", {"number": 1}, "mine"), ToolCall("guess", {"number": 2})))
    observation, *_ = env.step(given)
    said = env.messages[-3]
    assert isinstance(said, AssistantMessage)
    assert [call.id for call in said.tool_calls] == ["mine", "call_1_1"]
    assert [message.tool_call_id for message in observation if isinstance(message, ToolMessage)] == ["mine", "call_1_1"]
    env.close()


def test_seeds_reproduce_the_task_and_the_state() -> None:
    env, other = GuessEnv(), GuessEnv()
    seen = [(e.reset(seed=s)[0], e.secret) for s in range(20) for e in (env, other)]
    assert seen[::2] == seen[1::2]
    assert len({secret for _, secret in seen}) > 3
    assert len({observation for observation, _ in seen}) == 3
    env.close()
    other.close()


def test_a_tool_may_end_the_episode() -> None:
    env = GuessEnv()
    env.reset(seed=1)
    observation, reward, terminated, _, info = env.step(say("", ("give_up", {})))
    assert terminated
    assert reward == 0.25
    assert info["ended_by_tool"] == "give_up"
    assert observation[0].content == "as you like"
    env.close()


def test_a_bound_on_steps_truncates_and_scores() -> None:
    env = GuessEnv(max_steps=2)
    env.reset(seed=1)
    assert env.step(say("", ("guess", {"number": -1})))[2:4] == (False, False)
    observation, reward, terminated, truncated, info = env.step(say("", ("guess", {"number": -1})))
    assert len(observation) == 1
    assert (reward, terminated, truncated, info["solved"]) == (0.25, False, True, False)
    env.close()


def test_a_budget_ends_an_episode_by_one_call_that_scores_what_there_is() -> None:
    async def main() -> None:
        env = GuessEnv()
        await env.areset(seed=1)
        _, reward, terminated, truncated, info = await env.atruncate(say("", ("guess", {"number": 1})))
        assert (reward, terminated, truncated, info["solved"]) == (0.25, False, True, False)
        assert env.messages[-1] == say("", ("guess", {"number": 1}))
        with pytest.raises(ResetNeededError):
            await env.atruncate()

    asyncio.run(main())


def test_steps_need_a_running_episode() -> None:
    env = GuessEnv()
    with pytest.raises(ResetNeededError, match="call reset"):
        env.step(say("hi"))
    env.reset()
    env.step(say("done"))
    with pytest.raises(ResetNeededError, match="call reset"):
        env.step(say("more"))
    env.close()
    env.close()


@pytest.mark.parametrize("action", ["text", None, {"role": "assistant"}, UserMessage("no")])
def test_an_action_must_be_an_assistant_message(action: Any) -> None:
    env = GuessEnv()
    env.reset()
    with pytest.raises(ConfigurationError, match="expected an AssistantMessage"):
        env.step(action)
    env.close()


def test_the_synchronous_face_refuses_a_running_loop_and_says_what_to_do() -> None:
    async def main() -> None:
        with pytest.raises(ToolgymError, match="await areset"):
            GuessEnv().reset()

    asyncio.run(main())


class Faulty(GuessEnv):
    """Its hooks fail as told."""

    def __init__(self, where: str, what: Any, **options: Any) -> None:
        self.where, self.what = where, what
        super().__init__(**options)

    async def setup(self, task: Task) -> None:
        if self.where == "setup":
            await self._fail()

    async def score(self, episode: Episode) -> Any:  # type: ignore[override]
        if self.where == "score":
            return await self._fail()
        return 0.0

    async def _fail(self) -> Any:
        if isinstance(self.what, BaseException):
            raise self.what
        if isinstance(self.what, str) and self.what == "hang":
            await asyncio.sleep(60)
        return self.what


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (ValueError("x"), "raised"),
        (EnvironmentFailure("x", kind="box_died"), "box_died"),
        (ConfigurationError("x"), "raised"),
        (SystemExit(3), "raised"),
        (KeyboardInterrupt(), "raised"),
        (asyncio.CancelledError(), "raised"),
        (GeneratorExit(), "raised"),
        (BaseExceptionGroup("x", [SystemExit(1)]), "raised"),
        ("hang", "timeout"),
    ],
)
@pytest.mark.parametrize("where", ["setup", "score"])
def test_hooks_that_fail_are_failures_with_a_kind(where: str, what: Any, kind: str) -> None:
    env = Faulty(where, what, hook_timeout=0.05)
    with pytest.raises(EnvironmentFailure) as caught:  # noqa: PT012 - which of the two raises depends on the case
        env.reset()
        env.step(say("done"))
    assert caught.value.kind in (kind, f"{where}_{kind}")
    with pytest.raises(ResetNeededError):
        env.step(say("done"))
    env.close()


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "good", {"a": float("nan")}, None, Score({"a": 1}, {"a": float("nan")}), np.ones(3), 10**400, {"a": 1e308, "b": 1e308}, {}, {"_a": 1}, {1: 1.0}])  # fmt: skip  # noqa: E501
def test_a_reward_that_is_no_number_is_a_failure_not_a_zero(reward: Any) -> None:
    env = Faulty("score", reward)
    env.reset()
    with pytest.raises(EnvironmentFailure, match=r"not a finite number|need names") as caught:
        env.step(say("done"))
    assert caught.value.kind == "bad_reward"
    env.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tool_timeout": 0}, "expected tool_timeout as a number above 0, actual 0"),
        ({"max_output_chars": -1}, "expected max_output_chars as an int above 0"),
        ({"max_steps": 0}, "expected max_steps as an int above 0"),
        ({"hook_timeout": float("nan")}, "expected hook_timeout as a number above 0"),
        ({"tool_timeout": "a"}, "expected tool_timeout as a number above 0, actual 'a'"),
        ({"max_output_chars": 0.5}, "expected max_output_chars as an int"),
        ({"render_mode": "human"}, "expected render_mode 'ansi' or None"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        GuessEnv(**options)


@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.bool_(True), np.array(1), Score({"a": 2}, {"a": 0.5})])
def test_numbers_of_all_kinds_are_rewards(reward: Any) -> None:
    env = Faulty("score", reward)
    env.reset()
    assert env.step(say("done"))[1] == 1.0
    env.close()


def test_weights_must_name_components() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown components \{'b'\}"):
        Score({"a": 1.0}, {"b": 1.0})


@pytest.mark.parametrize("where", ["setup", "score"])
def test_plain_hooks_may_block_and_are_bounded(where: str) -> None:
    release = threading.Event()

    class Blocking(GuessEnv):
        def setup(self, task: Task) -> Any:
            return where == "setup" and release.wait(20)

        def score(self, episode: Episode) -> Any:
            return float(where == "score" and release.wait(20))

    env = Blocking(hook_timeout=0.05)
    with pytest.raises(EnvironmentFailure, match=r"took over 0\.05 s"):  # noqa: PT012 - which raises depends on the case
        env.reset()
        env.step(say("done"))
    release.set()
    env.close()


def test_a_tool_of_an_earlier_episode_never_acts_in_a_later_one() -> None:
    release = threading.Event()

    class Late(GuessEnv):
        acted = 0

        @tool(timeout=0.02)
        def slow(self) -> str:
            release.wait(20)
            self.acted += 1
            return "late"

    env = Late()
    env.reset()
    assert env.step(say("", ("slow", {})))[4]["calls"] == ("timeout",)
    with pytest.raises(EnvironmentFailure, match=r"still running from an earlier episode: .*tool slow") as caught:
        env.reset()
    assert caught.value.kind == "still_busy"
    release.set()
    env.reset()  # it has ended, so nothing of it can act any more
    assert (env.acted, env.busy) == (1, [])
    env.close()


def test_an_environment_without_a_score_is_refused_when_it_is_made() -> None:
    class Scoreless(ToolEnv):
        pass

    with pytest.raises(ConfigurationError, match="Scoreless needs a method score"):
        Scoreless(["task"])


@pytest.mark.parametrize(
    ("tools", "tasks", "said"),
    [
        ([], [], "expected at least one task"),
        ([], "abc", "expected a list of tasks"),
        ([], None, "expected a list of tasks"),
        ([], ["a", 1], "expected tasks as Task or str, actual 1"),
        ([5], ["a"], "expected a function as a tool, actual 5"),
        ([int], ["a"], "expected a function as a tool"),
    ],
)
def test_what_makes_no_environment_is_refused(tools: Any, tasks: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ToolEnv.from_functions(tools, tasks, lambda episode: 0.0)


def test_an_interrupted_step_leaves_no_episode_to_score() -> None:
    class Interrupted(GuessEnv):
        @tool
        async def press(self) -> None:
            """Press Ctrl-C."""
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)

    env = Interrupted()
    env.reset()
    # A process that was started in the background may have been told to ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            env.step(say("", ("press", {})))
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ResetNeededError):
        env.step(say("done"))
    env.close()


def test_plain_functions_make_an_environment() -> None:
    def shout(text: str) -> str:
        """Make text loud.

        Args:
            text: what to say.
        """
        return text.upper()

    async def judge(episode: Episode) -> Score:
        return Score({"loud": float(episode.answer == "HI")}, success=episode.answer == "HI")

    env = ToolEnv.from_functions([shout], ["Shout hi."], judge, system_prompt="Shout.", tool_timeout=5)
    env.reset(seed=0)
    observation, *_ = env.step(say("", ("shout", {"text": "hi"})))
    assert observation[0].content == "HI"
    assert env.step(say("HI"))[1] == 1.0
    env.close()


def test_rendering_shows_the_conversation() -> None:
    env = GuessEnv(render_mode="ansi")
    env.reset(seed=0)
    env.step(say("hm", ("guess", {"number": -5})))
    assert env.render() == "[system] Guess.\n[user] third\n[assistant] hm -> guess\n[tool guess] wrong"
    env.close()
