"""The rules of the house: light imports that go one way, and files that fit on a few screens."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("envs", "agents", "rollout")
HEAVY = ("torch", "vllm", "transformers", "ray", "docker")
SOURCES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


@pytest.mark.parametrize(
    "module", ["toolgym", "toolgym.envs", "toolgym.agents.policy", "toolgym.agents.vllm_policy", "toolgym.rollout.cli"]
)
def test_imports_are_light(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    above = {"envs": ("agents", "rollout"), "agents": ("rollout",), "rollout": ()}[path.relative_to(ROOT).parts[0]]
    wrong = [name for name in imported(path) for room in above if name.startswith(f"toolgym.{room}")]
    assert not wrong
    assert not [name for name in imported(path) if name.split(".")[0] in ROOMS]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 66, f"{node.name} is longer than a screen"


@pytest.mark.parametrize("room", ROOMS)
def test_the_package_is_the_rooms(room: str) -> None:
    link = ROOT / "src" / "toolgym" / room
    assert link.is_symlink()
    assert link.resolve() == ROOT / room


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "src" / "toolgym" / "py.typed").exists()
