"""The examples run as they are."""

import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

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
