"""A run folder holds what was collected, to the last bit, and is never mixed with another."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import call, echo_twice, vector
from hypothesis import given
from hypothesis import strategies as st

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Completion, FinishReason, PolicyFailure
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.envs import AssistantMessage, ConfigurationError, Failure, UserMessage
from toolgym.rollout.collector import Collector
from toolgym.rollout.report import summarize
from toolgym.rollout.store import RunFolder, trajectory_from_dict, trajectory_to_dict
from toolgym.rollout.trajectory import AlignmentError, SegmentKind, StopReason, Trajectory, Turn

floats = st.floats(-50, 0, width=32)
ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30)
actions = ids.flatmap(
    lambda tokens: st.builds(
        lambda logprobs, versions, finish: Completion(
            np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32), np.asarray(versions, np.int32), finish
        ),
        st.lists(floats, min_size=len(tokens), max_size=len(tokens)),
        st.lists(st.integers(0, 9), min_size=len(tokens), max_size=len(tokens)),
        st.sampled_from(FinishReason),
    )
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    made = Trajectory(draw(st.text()), draw(st.text()), draw(st.integers(0, 99)), draw(st.integers(0, 9)), 3)
    made.messages = (UserMessage(draw(st.text())), AssistantMessage(draw(st.text())))
    made.append(SegmentKind.PROMPT, draw(ids))
    for action in draw(st.lists(actions, max_size=3)):
        if made.segments[-1].kind is SegmentKind.ACTION:
            made.append(SegmentKind.OBSERVATION, draw(st.just([]) | ids))
        made.append(SegmentKind.ACTION, action)
        made.turns.append(Turn(action.finish_reason, 1, len(action.token_ids), ("ok", "timeout"), draw(floats)))
    made.stop_reason = draw(st.sampled_from(StopReason))
    made.reward = draw(st.none() | st.floats(allow_nan=False, allow_infinity=False))
    made.score = draw(st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=2))
    made.solved = draw(st.booleans())
    made.failure = draw(st.none() | st.builds(Failure, st.text(), st.text(), st.text()))
    made.seconds = draw(st.floats(0, 1e6))
    return made


@given(trajectories())
def test_trajectories_survive_json_to_the_last_bit(trajectory: Trajectory) -> None:
    read = trajectory_from_dict(json.loads(json.dumps(trajectory_to_dict(trajectory))))
    assert read == trajectory
    assert read.logprobs.tobytes() == trajectory.logprobs.tobytes()
    assert read.seconds == trajectory.seconds


def collected(chat: ChatFormat) -> list[Trajectory]:
    envs = vector(trouble={1: "tool breaks", 2: "setup raises"}.get)
    found = Collector(envs, ScriptedPolicy(chat, echo_twice), chat).collect(4, 2)
    envs.close()
    return found


def test_a_run_is_read_back_equal(chat: ChatFormat, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "deep" / "run", {"seed": 3, "model": "tiny"})
    trajectories = collected(chat)
    for trajectory in trajectories:
        folder.append(trajectory)
    folder.record("more", {"a": 1})
    read = RunFolder.open(tmp_path / "deep" / "run")
    assert list(read.trajectories()) == trajectories
    assert (read.info["seed"], read.info["more"]) == (3, {"a": 1})
    assert {"gymnasium", "renderers"} <= set(read.info["packages"])
    assert read.seconds == {}


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", {"seed": 1})
    with pytest.raises(ConfigurationError, match="holds a run already"):
        RunFolder.create(tmp_path / "run", {"seed": 2})
    assert RunFolder.open(tmp_path / "run").info["seed"] == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for path in (tmp_path / "other", tmp_path / "file"):
        with pytest.raises(ConfigurationError, match="not an empty folder"):
            RunFolder.create(path, {})
    assert (tmp_path / "other" / "thesis.txt").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path / "empty", {})


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"it has no run\.json"):
        RunFolder.open(tmp_path)
    (tmp_path / "run.json").write_text('{"format": "other/9"}')
    with pytest.raises(ConfigurationError, match="format 'other/9'"):
        RunFolder.open(tmp_path)


def test_a_line_cut_off_by_a_crash_costs_that_line_alone(chat: ChatFormat, tmp_path: Path) -> None:
    folder, trajectories = RunFolder.create(tmp_path / "run", {}), collected(chat)
    for trajectory in trajectories:
        folder.append(trajectory)
    lines = folder.path / "trajectories.jsonl"
    lines.write_bytes(lines.read_bytes()[:-40])
    with pytest.warns(UserWarning, match="line 8 was cut off"):
        assert list(folder.trajectories()) == trajectories[:-1]


def test_a_run_goes_on_behind_a_line_that_was_cut_off(chat: ChatFormat, tmp_path: Path) -> None:
    folder, trajectories = RunFolder.create(tmp_path / "run", {}), collected(chat)
    for keep in (-1, -40, 0):
        folder.append(trajectories[0])
        lines = folder.path / "trajectories.jsonl"
        lines.write_bytes(lines.read_bytes()[:keep] if keep else b"x" * 10_000)
        folder.append(trajectories[1])
        assert list(folder.trajectories())[-1] == trajectories[1]
    assert list(folder.trajectories()) == [trajectories[1]]


@pytest.mark.parametrize("content", ["", "[1]", "{", "\0\1"])
def test_a_broken_run_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"run\.json"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("line", ["", "[1, 2]", "{", '{"id": "9.9"}', "\udcff", "null"])
def test_a_broken_line_is_named(chat: ChatFormat, tmp_path: Path, line: str) -> None:
    folder = RunFolder.create(tmp_path / "run", {"seconds": [1], "model": 5})
    folder.append(collected(chat)[0])
    with (folder.path / "trajectories.jsonl").open("a", errors="surrogateescape") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigurationError, match=r"trajectories\.jsonl line 2 is no trajectory"):
        list(folder.trajectories())
    assert folder.seconds == {}
    (folder.path / "trajectories.jsonl").unlink()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        list(folder.trajectories())


def test_a_run_that_is_discarded_leaves_nothing_but_what_others_put_there(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", {}).discard()
    assert not (tmp_path / "run").exists()
    kept = RunFolder.create(tmp_path / "kept", {})
    (kept.path / "thesis.txt").write_text("precious")
    kept.discard()
    assert [path.name for path in kept.path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("path", ["/dev/null/run", "/proc/run"])
def test_a_folder_that_cannot_be_made_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no run folder can be made|not an empty folder"):
        RunFolder.create(path, {})


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("logprobs", [0.0] * 500),
        ("versions", [0] * 500),
        ("logprobs", [0.0]),
        ("versions", []),
        ("input_ids", [-1] * 500),
    ],
)
def test_a_record_that_was_tampered_with_is_refused(chat: ChatFormat, column: str, value: Any) -> None:
    entry = trajectory_to_dict(collected(chat)[0])
    entry[column] = value
    with pytest.raises((AlignmentError, PolicyFailure), match=r"logprobs|versions|out of range"):
        trajectory_from_dict(entry)


def test_a_report_counts_what_happened_and_gives_failures_no_reward(chat: ChatFormat) -> None:
    (summary,) = summarize(collected(chat))
    assert (summary.trajectories, summary.solved, summary.rewards) == (8, 4, [1.0] * 4)
    assert summary.failures == {"box_died": 2, "setup_raised": 2}
    assert summary.stop_reasons == {"answered": 4, "environment_failure": 4}
    # Two of the calls were made by each that was answered, one by each whose box died of it.
    assert (summary.mean_reward, summary.mismatches, summary.tool_calls) == (1.0, 0, 10)
    assert summary.turns == 4 * 3 + 2
    assert summarize([]) == []


def test_a_run_of_failures_alone_has_no_mean_reward(chat: ChatFormat) -> None:
    envs = vector(trouble=lambda k: "tool breaks")
    (summary,) = summarize(Collector(envs, ScriptedPolicy(chat, lambda r, m: call()), chat).collect(2))
    envs.close()
    assert summary.mean_reward is None
