"""The command line: what is wrong is said in one line before anything starts; what ran can be looked at."""

import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import echo_twice, vector

from toolgym.agents.chat import ChatFormat, TemplateWarning
from toolgym.agents.policy import Completion, FinishReason
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.agents.tiny import TINY_MODEL
from toolgym.envs import AssistantMessage, Failure
from toolgym.rollout import cli
from toolgym.rollout.collector import Collector
from toolgym.rollout.store import RunFolder
from toolgym.rollout.trajectory import SegmentKind, StopReason, Trajectory


def toolgym(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["toolgym", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


CALCULATOR = "toolgym/Calculator-v0"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope"], "no environment 'nope'"),
        (["nomodule:x-v0"], "No module named 'nomodule'"),
        (["CartPole-v1"], "is not a tool environment"),
        ([CALCULATOR, "--model", "/nowhere"], "no model folder at /nowhere"),
        ([CALCULATOR, "--max-turns", "0"], "expected Limits.max_turns above 0 and finite, actual 0"),
        ([CALCULATOR, "--max-completion-tokens", "-5"], "expected Limits.max_completion_tokens above 0"),
        ([CALCULATOR, "--max-trajectory-tokens", "0"], "Limits"),
        ([CALCULATOR, "--tasks", "0"], "greater than or equal to 1"),
        ([CALCULATOR, "--group", "0"], "greater than or equal to 1"),
        ([CALCULATOR, "--slots", "0"], "greater than or equal to 1"),
        ([CALCULATOR, "--seed", "-1"], "greater than or equal to 0"),
        ([CALCULATOR, "--schedule", "sideways"], "'sideways' is not one of"),
        ([CALCULATOR, "--temperature", "-1"], "expected a temperature in [0, 100], actual -1.0"),
        ([CALCULATOR, "--top-p", "0"], "expected top_p in (0, 1], actual 0.0"),
        ([CALCULATOR, "--env-option", "levels=[9]"], "expected levels among"),
        ([CALCULATOR, "--env-option", "colour=red"], "unexpected keyword argument 'colour'"),
        ([CALCULATOR, "--env-option", "tool_timeout=500"], "one tool call of the environment may take 500 s"),
        ([CALCULATOR, "--env-option", "task_seed=1.5"], "expected a task seed of 0 or more, actual 1.5"),
        ([CALCULATOR, "--env-option", "vectorization_mode=foo"], "Invalid vectorization mode"),
        (["a:b:c"], "no environment 'a:b:c'"),
        ([":"], "no environment ':'"),
        ([CALCULATOR, "--env-option", "levels"], "expected --env-option name=value"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], said: str
) -> None:
    assert toolgym(monkeypatch, "run", *arguments, "--out", tmp_path / "out") == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_output_folder_with_another_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    RunFolder.create(tmp_path / "out", {"seed": 1})
    assert toolgym(monkeypatch, "run", CALCULATOR, "--out", tmp_path / "out") == 2
    assert "holds a run already" in capsys.readouterr().err


@pytest.fixture
def run(chat: ChatFormat, tmp_path: Path) -> Path:
    """A run with solved episodes and failures."""
    folder = RunFolder.create(tmp_path / "run", {"model": "tiny"})
    envs = vector(trouble=lambda k: "tool breaks" if k == 1 else None)
    for trajectory in Collector(envs, ScriptedPolicy(chat, echo_twice), chat).collect(3):
        folder.append(trajectory)
    envs.close()
    return folder.path


def test_show_prints_the_table_of_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    assert toolgym(monkeypatch, "show", run) == 0
    shown = capsys.readouterr().out
    for part in ("EchoEnv", "2 (67%)", "answered 2", "environment_failure 1", "box_died 1", "tokens/s", "0 in 7 turns"):
        assert part in shown


def test_show_prints_one_trajectory_turn_by_turn_with_its_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    assert toolgym(monkeypatch, "show", run, "2.0") == 0
    shown = capsys.readouterr().out
    for part in (
        "trajectory 2.0",
        'assistant: echo({"text": "t2 of member 0, turn 0"})',
        "tool: t2 of member 0, turn 1",
        "assistant: done",
        "stopped by answered",
        "<|im_start|>assistant",
        "<tool_response>",
    ):
        assert part in shown


def test_colours_tell_action_tokens_from_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert toolgym(monkeypatch, "show", run, "solved") == 0
    shown = capsys.readouterr().out
    assert "\x1b[1;32m<tool_call>" in shown
    assert "\x1b[1;32mdone<|im_end|>" in shown
    assert "\x1b[2m<|im_start|>system" in shown or "\x1b[2m<|im_start|>user" in shown
    assert "\x1b[36m" in shown


def test_show_draws_a_picture_that_stands_alone(monkeypatch: pytest.MonkeyPatch, run: Path, tmp_path: Path) -> None:
    assert toolgym(monkeypatch, "show", run, "--svg", tmp_path / "table.svg") == 0
    picture = (tmp_path / "table.svg").read_text()
    assert "EchoEnv" in picture
    assert "url(http" not in picture


def test_show_finds_failures_and_refuses_unknown_ids(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    assert toolgym(monkeypatch, "show", run, "failed") == 0
    assert "failure: box_died in step: the box died" in capsys.readouterr().out
    assert toolgym(monkeypatch, "show", run, "7.7") == 2
    assert "ids go from 0.0 to 2.0; or say solved, unsolved, failed" in capsys.readouterr().err
    assert toolgym(monkeypatch, "show", run / "nowhere") == 2
    assert "no run in" in capsys.readouterr().err


def test_what_cannot_be_a_folder_is_found_before_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert toolgym(monkeypatch, "run", CALCULATOR, "--out", "/dev/null/x") == 2
    assert "no run folder can be made at /dev/null/x" in capsys.readouterr().err


def test_names_and_failures_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = RunFolder.create(tmp_path / "run", {"model": 5})
    trajectory = Trajectory("[b]env[/x]", "\x1b[31m:x: \ud800", 0, 0, 0)
    trajectory.stop_reason, trajectory.failure = StopReason.POLICY_FAILURE, Failure("bad[/x]", "[red]", ":x: \x1b[2J")
    folder.append(trajectory)
    assert toolgym(monkeypatch, "show", folder.path) == 0
    assert toolgym(monkeypatch, "show", folder.path, "0.0") == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    for part in ("[b]env[/x]", "bad[/x]", "[red]", ":x:"):
        assert part in shown
    assert toolgym(monkeypatch, "show", folder.path, "--svg", "/nonexistent/x.svg") == 2
    assert "/nonexistent/x.svg cannot be written" in capsys.readouterr().err


def test_control_characters_of_models_and_tools_cannot_paint_over_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], chat: ChatFormat, tmp_path: Path
) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    envs = vector()
    evil = ScriptedPolicy(chat, lambda request, member: AssistantMessage("\x1b[31mred\x1b[2J\x9b1m"))
    for trajectory in Collector(envs, evil, chat).collect(1):
        folder.append(trajectory)
    envs.close()
    assert toolgym(monkeypatch, "show", folder.path, "0.0") == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert "\u241b[31mred" in shown


def test_an_environment_of_ones_own_module_is_found_in_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "my_envs.py").write_text(
        "import toolgym.envs as tg\n"
        "tg.register_env('my/One-v0', lambda **o: tg.ToolEnv.from_functions([], ['one'], lambda e: 1.0, **o))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert toolgym(monkeypatch, "run", "my_envs:my/One-v0", "--tasks", "2", "--out", tmp_path / "out") == 2
    assert "expected up to 1 tasks, all that there are; 2 were asked for" in capsys.readouterr().err


def test_template_check_prints_the_certificate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "certificate.svg"
    assert toolgym(monkeypatch, "template", "check", "tiny", "--svg", picture) == 0
    said = capsys.readouterr().out
    assert "calls: hermes" in said
    assert "turns end with: <|im_end|>" in said
    assert [f"P{k}" in said for k in range(1, 9)] == [True] * 8
    assert "refused" not in said
    assert "exact" in picture.read_text()
    assert toolgym(monkeypatch, "template", "check", "tiny", "--chat-option", "enable_thinking=false") == 0
    shown = capsys.readouterr().out
    assert "<think>\\n\\n</think>" in shown
    assert "which the template drops" in shown
    assert toolgym(monkeypatch, "template", "check", "tiny", "--family", "qwen3") == 0
    assert "renderers' qwen3, for tiny" in capsys.readouterr().out


def test_options_spelled_as_in_python_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert toolgym(monkeypatch, "template", "check", "tiny", "--chat-option", "enable_thinking=False") == 2
    assert "expected --chat-option enable_thinking=JSON, actual False: write false" in capsys.readouterr().err


def test_show_says_where_a_record_was_split_and_why_an_episode_stopped(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    envs = vector(1)
    (trajectory,) = Collector(envs, ScriptedPolicy(chat, echo_twice), chat).collect(1)
    envs.close()
    made = Trajectory("e", "t", 0, 0, 0, messages=trajectory.messages[:4], turns=trajectory.turns[:2])
    for sample in range(2):
        prompt, sampled = trajectory.input_ids[:20], trajectory.segments[1]
        (made.begin_sample if sample else partial(made.append, SegmentKind.PROMPT))(prompt)
        ids = trajectory.input_ids[sampled.start : sampled.end]
        zeros = np.zeros(len(ids), np.int32)
        made.append(SegmentKind.ACTION, Completion(ids, zeros.astype(np.float32), zeros, FinishReason.STOP))
    made.stop_reason, made.reward, made.detail = StopReason.TEMPLATE_REFUSED, 0.0, "template of x cannot be extended so"
    folder = RunFolder.create(tmp_path / "run", {"model": "tiny"})
    folder.append(made)
    assert next(iter(folder.trajectories())) == made
    assert toolgym(monkeypatch, "show", tmp_path / "run", "0.0") == 0
    shown = capsys.readouterr().out
    assert "split into 2 training samples" in shown
    assert "-- another sample --" in shown
    assert "because: template of x cannot be extended so" in shown


def test_template_check_ends_with_1_where_something_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(
        turns + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert toolgym(monkeypatch, "template", "check", folder) == 1
    said = capsys.readouterr().out
    assert "writes no calls; if its model can call tools, name the syntax" in said
    with pytest.warns(TemplateWarning, match="does not show tools"):
        assert toolgym(monkeypatch, "template", "check", folder, "--call-syntax", "hermes") == 0
    assert "the template does not show tools" in capsys.readouterr().out
    assert toolgym(monkeypatch, "template", "check", folder, "--call-syntax", "morse") == 2
    assert "expected a call syntax among" in capsys.readouterr().err


def test_envs_lists_what_is_registered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert toolgym(monkeypatch, "envs") == 0
    shown = capsys.readouterr().out
    assert CALCULATOR in shown
    assert "transfer" in shown
