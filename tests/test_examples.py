"""The examples run as they are."""

import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

from toolgym.agents.chat import load_chat_format
from toolgym.agents.tiny import TINY_MODEL

ROOT = Path(__file__).resolve().parent.parent


def test_an_environment_of_ones_own_is_thirty_lines_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "examples" / "own_environment.py"
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["50", "higher", "75", "higher", "88", "higher", "95", "found", "reward", "1.0"]
    body = path.read_text().split("if __name__")[0]
    assert len(body.splitlines()) <= 31
    monkeypatch.syspath_prepend(str(path.parent))
    envs = gymnasium.make_vec("own_environment:examples/HotCold-v0", num_envs=3)
    assert len(envs.reset(seed=0)[0]) == 3
    envs.close()


def test_the_embedded_model_is_made_by_its_script(tmp_path: Path) -> None:
    """A few steps of it: the same tokenizer to the last byte, and a model that can be loaded."""
    command = [sys.executable, ROOT / "examples" / "train_tiny_model.py", "--out", tmp_path / "tiny"]
    few = ["--steps", "2", "--rows", "1", "--conversations", "60"]
    done = subprocess.run([*command, *few], capture_output=True, text=True, timeout=300, check=True)
    assert "1,968,320 parameters" in done.stdout
    assert (tmp_path / "tiny" / "tokenizer.json").read_bytes() == (TINY_MODEL / "tokenizer.json").read_bytes()
    made = (tmp_path / "tiny" / "model.safetensors").stat().st_size
    assert made == (TINY_MODEL / "model.safetensors").stat().st_size <= 8_000_000
    assert load_chat_format(tmp_path / "tiny").stop_token_ids == load_chat_format(TINY_MODEL).stop_token_ids
