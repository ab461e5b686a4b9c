"""A dump is laid out as AReaL's users know it, and right for many turns."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import call
from hypothesis import given
from hypothesis import strategies as st
from records import collected, split

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import PolicyFailure
from toolgym.envs import AssistantMessage, ConfigurationError, Task
from toolgym.rollout.dumps import DumpFolder
from toolgym.rollout.files import safe_name
from toolgym.rollout.limits import Limits
from toolgym.rollout.trajectory import SegmentKind, Trajectory

FIELDS = [
    "task_id",
    "sample_idx",
    "seqlen",
    "prompt_len",
    "head_version",
    "tail_version",
    "reward",
    "prompt",
    "completion",
]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_of_many_turns_parts_the_first_prompt_from_all_after_it(chat: ChatFormat, tmp_path: Path) -> None:
    (trajectory,) = collected(chat)
    path = DumpFolder(tmp_path, "math", "trial-1", chat).write(trajectory)
    assert path == tmp_path / "math" / "trial-1" / "rollout" / "31" / "t0.jsonl"
    (line,) = lines(path)
    assert list(line) == FIELDS
    first = trajectory.segments[0]
    assert (line["seqlen"], line["prompt_len"]) == (len(trajectory), first.end)
    assert line["prompt"] == chat.decode(trajectory.input_ids[: first.end].tolist())
    assert line["prompt"] + line["completion"] == chat.decode(trajectory.input_ids.tolist())
    for turn in (0, 1):
        assert line["completion"].count(f"t0 of member 0, turn {turn}") == 2, "the call and what the tool answered"
    assert "t0 of member 0, turn" not in line["prompt"]
    assert line["completion"].startswith(chat.decode(chat.write(call(text="t0 of member 0, turn 0"))))
    assert (line["task_id"], line["sample_idx"], line["reward"]) == ("t0", 0, 1.0)


def test_head_and_tail_are_the_versions_of_the_first_and_the_last_sampled_token(
    chat: ChatFormat, tmp_path: Path
) -> None:
    (trajectory,) = collected(chat)
    (line,) = lines(DumpFolder(tmp_path, "e", "t", chat).write(trajectory))
    assert (line["head_version"], line["tail_version"]) == (10, 31)


def test_an_episode_that_ends_with_an_observation_is_dumped_too(chat: ChatFormat, tmp_path: Path) -> None:
    def trouble(request: Any) -> BaseException | None:
        return PolicyFailure("engine dead") if request.turn == 1 else None

    (trajectory,) = collected(chat, sampling_trouble=trouble)
    assert trajectory.segments[-1].kind is SegmentKind.OBSERVATION
    path = DumpFolder(tmp_path, "e", "t", chat).write(trajectory)
    (line,) = lines(path)
    assert path.parent.name == "11"
    assert (line["head_version"], line["tail_version"], line["reward"]) == (10, 11, None)
    assert line["prompt_len"] == trajectory.segments[0].end < line["seqlen"] == len(trajectory)


def test_groups_share_the_file_of_their_task_and_evaluation_has_its_own_folder(
    chat: ChatFormat, tmp_path: Path
) -> None:
    trajectories = collected(chat, 2, 3)
    for evaluation in (False, True):
        folder = DumpFolder(tmp_path, "e", "t", chat)
        for trajectory in trajectories:
            trajectory.evaluation = evaluation
            folder.write(trajectory)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jsonl"))
    assert found == [f"e/t/{kind}/31/t{k}.jsonl" for kind in ("eval-rollout", "rollout") for k in (0, 1)]
    for name in found:
        entries = lines(tmp_path / name)
        assert [entry["sample_idx"] for entry in entries] == [0, 1, 2]
        assert {entry["task_id"] for entry in entries} == {name[-8:-6]}
        assert all(f"of member {entry['sample_idx']}," in entry["completion"] for entry in entries)


def test_what_has_no_sampled_token_is_under_version_minus_one(chat: ChatFormat, tmp_path: Path) -> None:
    (at_reset,) = collected(chat, trouble=lambda k: "setup raises")
    (at_sampling,) = collected(chat, sampling_trouble=lambda request: PolicyFailure("engine dead"))
    sizes = dict.fromkeys(["max_trajectory_tokens", "max_completion_tokens", "max_observation_tokens"], 3)
    (too_long,) = collected(chat, limits=Limits(**sizes))
    folder = DumpFolder(tmp_path, "e", "t", chat)
    (path,) = {folder.write(trajectory) for trajectory in (at_reset, at_sampling, too_long)}
    assert path == folder.path / "rollout" / "-1" / "t0.jsonl"
    first, second, third = lines(path)
    assert {(line["head_version"], line["tail_version"], line["completion"]) for line in lines(path)} == {(-1, -1, "")}
    assert (first["seqlen"], first["prompt_len"], first["prompt"], first["reward"]) == (0, 0, "", None)
    assert second["seqlen"] == second["prompt_len"] == len(at_sampling) > 0
    assert second["prompt"] == chat.decode(at_sampling.input_ids.tolist())
    assert (third["seqlen"], third["reward"]) == (0, 0.25)


def test_a_split_trajectory_has_a_line_for_each_sample(chat: ChatFormat, tmp_path: Path) -> None:
    trajectory = split(chat)
    path = DumpFolder(tmp_path, "e", "t", chat).write(trajectory)
    assert path.parent.name == "31"
    entries = lines(path)
    assert [entry["seqlen"] for entry in entries] == [len(sample) for sample in trajectory.samples]
    assert [(entry["head_version"], entry["tail_version"]) for entry in entries] == [(10, 11), (20, 21), (30, 31)]
    assert {(entry["sample_idx"], entry["reward"]) for entry in entries} == {(0, 1.0)}
    for entry, sample in zip(entries, trajectory.samples, strict=True):
        assert entry["completion"] == chat.decode(sample.input_ids[sample.loss_mask].tolist())
        assert entry["prompt"] + entry["completion"] == chat.decode(sample.input_ids.tolist())


def test_a_line_that_a_kill_cut_off_does_not_spoil_the_next(chat: ChatFormat, tmp_path: Path) -> None:
    one, other = collected(chat, 1, 2)
    folder = DumpFolder(tmp_path, "e", "t", chat)
    whole = folder.write(one).read_bytes()
    for rest in range(0, len(whole), 97):
        path = folder.write(one)
        path.write_bytes(whole + whole[:rest])
        folder.write(other)
        assert [entry["sample_idx"] for entry in lines(path)] == [0, 1]
    path.write_bytes(whole[:-1])
    folder.write(other)
    assert [entry["sample_idx"] for entry in lines(path)] == [1]


ODD = [
    "../../escape",
    "..",
    ".",
    "",
    "/etc/passwd",
    "a/b",
    "a%2Fb",
    "nul\0",
    "\ud800",
    "\ud801",
    '*?<>|:"\\',
    "très",
    "x " * 900,
]


def test_any_task_id_has_a_file_of_its_own_below_its_version(chat: ChatFormat, tmp_path: Path) -> None:
    tasks = [Task(name, "task", {"k": 0, "trouble": None}) for name in [*ODD, "x " * 901, "x " * 900 + "y"]]
    folder = DumpFolder(tmp_path, "e", "t", chat)
    trajectories = collected(chat, tasks, script=lambda request, member: AssistantMessage("done"))  # type: ignore[arg-type]
    paths = [folder.write(trajectory) for trajectory in trajectories]
    assert {path.parent for path in paths} == {folder.path / "rollout" / "11"}
    assert len(set(paths)) == len(tasks)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(paths)
    for path, task in zip(paths, tasks, strict=True):
        assert path.resolve() == path
        assert [entry["task_id"] for entry in lines(path)] == [task.id]


@given(st.lists(st.text(st.characters(), max_size=200), unique=True, max_size=5))
def test_names_are_safe_and_one_for_each_text(texts: list[str]) -> None:
    names = [safe_name(text) for text in texts]
    assert len(set(names)) == len(texts)
    for name in names:
        assert 0 < len(name) <= 120
        assert not name.startswith(".")
        assert all(character.isascii() and (character.isalnum() or character in "_.-~%+") for character in name)


def test_plain_ids_are_their_own_names() -> None:
    for plain in ("gsm8k-12", "Math_7.b", "42"):
        assert safe_name(plain) == plain
    assert safe_name(safe_name("x " * 900)) != safe_name("x " * 900), "no text has the short name of another"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a\\b", "a\0", 7, None])
@pytest.mark.parametrize("what", ["experiment", "trial"])
def test_experiment_and_trial_are_names_of_folders(chat: ChatFormat, tmp_path: Path, what: str, name: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"expected {what} as the name of one folder, actual"):
        DumpFolder(tmp_path, **{"experiment": "e", "trial": "t", "chat": chat, what: name})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("root", ["/dev/null/dumps", "/proc/dumps", 7])
def test_a_root_that_cannot_be_made_is_refused(chat: ChatFormat, root: Any) -> None:
    with pytest.raises(ConfigurationError, match="folder of dumps"):
        DumpFolder(root, "e", "t", chat)


def test_a_dump_needs_a_chat_format(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="expected chat as a ChatFormat, actual 'tiny'"):
        DumpFolder(tmp_path, "e", "t", "tiny")  # type: ignore[arg-type]


def test_a_cancelled_trajectory_has_no_reward(chat: ChatFormat, tmp_path: Path) -> None:
    (line,) = lines(DumpFolder(tmp_path, "e", "t", chat).write(Trajectory("env", "t9", 9, 3, 0)))
    assert (line["task_id"], line["sample_idx"], line["reward"]) == ("t9", 3, None)
