"""A trace is one readable file a trajectory, whose name tells how it went."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import call, echo_twice
from records import collected, split

from toolgym.agents.chat import ChatFormat
from toolgym.envs import AssistantMessage, ConfigurationError, Failure, ToolgymError, UserMessage
from toolgym.envs.messages import from_dict
from toolgym.rollout.traces import CallbackError, TraceFolder
from toolgym.rollout.trajectory import Trajectory


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_trajectory_has_a_file_named_by_whether_it_was_solved(chat: ChatFormat, tmp_path: Path) -> None:
    def script(request: Any, member: int) -> AssistantMessage:
        return echo_twice(request, member) if member else AssistantMessage("no idea")

    trajectories = collected(chat, 2, 2, script=script, trouble={1: "tool breaks"}.get)
    folder = TraceFolder(tmp_path / "deep" / "traces")
    paths = [folder.write(trajectory) for trajectory in trajectories]
    assert names(folder.path) == ["fail-0.0.json", "fail-1.0.json", "fail-1.1.json", "ok-0.1.json"]
    assert [path.name for path in paths if path] == ["fail-0.0.json", "ok-0.1.json", "fail-1.0.json", "fail-1.1.json"]


def test_a_trace_tells_all_that_happened(chat: ChatFormat, tmp_path: Path) -> None:
    (trajectory,) = collected(chat)
    path = TraceFolder(tmp_path).write(trajectory)
    assert path is not None
    text = path.read_text(encoding="utf-8")
    trace = json.loads(text)
    assert (trace["id"], trace["task_id"], trace["stop_reason"], trace["failure"]) == ("0.0", "t0", "answered", None)
    assert (trace["reward"], trace["score"], trace["solved"], trace["truncated"]) == (1.0, {"reward": 1.0}, True, False)
    assert tuple(from_dict(message) for message in trace["messages"]) == trajectory.messages
    assert [turn["finish_reason"] for turn in trace["turns"]] == ["stop"] * 3
    assert [turn["calls"] for turn in trace["turns"]] == [["ok"], ["ok"], []]
    assert trace["input_ids"] == trajectory.input_ids.tolist()
    assert trace["loss_mask"] == trajectory.loss_mask.astype(int).tolist()
    assert trace["versions"] == trajectory.versions.tolist()
    assert np.asarray(trace["logprobs"], np.float32).tobytes() == trajectory.logprobs.tobytes()
    kinds = ["prompt", "action", "observation", "action", "observation", "action"]
    assert [segment[0] for segment in trace["segments"]] == kinds
    assert trace["segments"][-1][2] == trace["tokens"]["all"] == len(trajectory)
    assert (
        trace["tokens"]["action"] == trajectory.loss_mask.sum() == sum(t["completion_tokens"] for t in trace["turns"])
    )
    assert sum(trace["tokens"][kind] for kind in ("prompt", "action", "observation")) == len(trajectory)


def test_a_trace_can_be_read_by_eye(chat: ChatFormat, tmp_path: Path) -> None:
    (trajectory,) = collected(chat, script=lambda request, member: AssistantMessage("très 好的"))
    path = TraceFolder(tmp_path).write(trajectory)
    assert path is not None
    lines = path.read_text(encoding="utf-8").splitlines()
    assert '      "content": "très 好的"' in lines
    columns = [line for line in lines if re.match(r'  "(segments|input_ids|loss_mask|logprobs|versions)": ', line)]
    assert len(columns) == 5
    assert lines[-6:-1] == columns, "each column is one line, at the end"


@pytest.mark.parametrize("text", ["\ud800", "a\\\udcff", '"\ud83d', "\0\x1b[2J\u2028"])
def test_any_text_comes_back(tmp_path: Path, text: str) -> None:
    trajectory = Trajectory(text, text, 0, 0, 0, messages=(UserMessage(text),), score={text: 1.0})
    trajectory.failure = Failure("kind", "where", text)
    path = TraceFolder(tmp_path).write(trajectory)
    assert path is not None
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert (trace["task_id"], trace["messages"][0]["content"], trace["failure"]["message"]) == (text, text, text)
    assert trace["score"] == {text: 1.0}


def test_what_failed_before_its_first_token_and_what_was_split_have_traces_too(
    chat: ChatFormat, tmp_path: Path
) -> None:
    (failed,) = collected(chat, trouble=lambda k: "setup raises")
    path = TraceFolder(tmp_path / "failed").write(failed)
    assert path is not None
    trace = json.loads(path.read_text())
    assert (trace["failure"]["kind"], trace["reward"], trace["input_ids"], trace["tokens"]["all"]) == (
        "setup_raised",
        None,
        [],
        0,
    )
    path = TraceFolder(tmp_path / "split").write(split(chat))
    assert path is not None
    kinds = [segment[0] for segment in json.loads(path.read_text())["segments"]]
    assert kinds == ["prompt", "action"] * 3


def test_the_user_says_what_is_kept_and_what_is_a_success(chat: ChatFormat, tmp_path: Path) -> None:
    trajectories = collected(chat, 2, 2)
    folder = TraceFolder(tmp_path, keep=lambda t: t.task_index == 1, success=lambda t: t.member == 0)
    paths = [folder.write(trajectory) for trajectory in trajectories]
    assert paths[:2] == [None, None]
    assert names(tmp_path) == ["fail-1.1.json", "ok-1.0.json"]


def broken(trajectory: Trajectory) -> bool:
    raise KeyError("no such thing")


@pytest.mark.parametrize("name", ["keep", "success"])
def test_a_callback_that_raises_is_named_and_the_trajectory_is_not_lost(
    chat: ChatFormat, tmp_path: Path, name: str
) -> None:
    (trajectory,) = collected(chat)
    folder = TraceFolder(tmp_path, **{name: broken})  # type: ignore[arg-type]
    with pytest.raises(
        CallbackError, match=rf"callback {name} of the traces raised on trajectory 0\.0: KeyError"
    ) as caught:
        folder.write(trajectory)
    assert isinstance(caught.value, ToolgymError)
    assert isinstance(caught.value.__cause__, KeyError)
    assert json.loads((tmp_path / "ok-0.0.json").read_text())["input_ids"] == trajectory.input_ids.tolist()


async def asynchronous(trajectory: Trajectory) -> bool:
    return True


class AsynchronousObject:
    async def __call__(self, trajectory: Trajectory) -> bool:
        return True


@pytest.mark.parametrize("callback", ["yes", 1, asynchronous, AsynchronousObject()])
@pytest.mark.parametrize("name", ["keep", "success"])
def test_a_callback_that_cannot_be_asked_is_refused_before_the_run(tmp_path: Path, name: str, callback: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"expected {name} as a (plain )?function"):
        TraceFolder(tmp_path / "traces", **{name: callback})
    assert not (tmp_path / "traces").exists()


def test_a_trajectory_that_is_written_again_has_one_file(chat: ChatFormat, tmp_path: Path) -> None:
    (lost,) = collected(chat, script=lambda request, member: AssistantMessage("no"))
    (solved,) = collected(chat)
    folder = TraceFolder(tmp_path)
    for trajectory in (lost, solved, solved):
        folder.write(trajectory)
    assert names(tmp_path) == ["ok-0.0.json"]
    folder.write(lost)
    assert names(tmp_path) == ["fail-0.0.json"]


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_half(
    chat: ChatFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trajectory,) = collected(chat, script=lambda request, member: call("finish"))
    folder = TraceFolder(tmp_path)
    path = folder.write(trajectory)
    assert path is not None
    before = path.read_bytes()

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write(trajectory)
    assert names(tmp_path) == [path.name]
    assert path.read_bytes() == before


def test_a_folder_that_was_removed_meanwhile_is_made_again(chat: ChatFormat, tmp_path: Path) -> None:
    (trajectory,) = collected(chat)
    folder = TraceFolder(tmp_path / "traces")
    folder.path.rmdir()
    folder.write(trajectory)
    assert names(folder.path) == ["ok-0.0.json"]


@pytest.mark.parametrize("path", ["/dev/null/traces", "/proc/traces", "a\0b", 7, None])
def test_a_folder_that_cannot_be_made_is_refused(path: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"folder of traces"):
        TraceFolder(path)
