"""Shell: the files a model leaves are what counts, not what it says and not what it has prepared for the check."""

import itertools
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolgym.envs import AssistantMessage, ConfigurationError, EnvironmentFailure, Task, ToolCall
from toolgym.envs.catalog import shell
from toolgym.envs.catalog.shell import ShellEnv
from toolgym.envs.catalog.shell_tasks import KINDS
from toolgym.envs.sandbox.sandbox import SandboxPool
from toolgym.envs.tasks import split_of


@pytest.fixture(scope="module", params=["local", pytest.param("docker", marks=pytest.mark.docker)])
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the local sandbox says what it does not protect
        made = SandboxPool(request.param, size=2)
    with made:
        yield made


def bash(command: str) -> AssistantMessage:
    return AssistantMessage("", (ToolCall("bash", {"command": command}),))


def run(pool: SandboxPool, data: dict[str, Any], commands: Sequence[str] = (), answer: str = "done") -> float:
    """What some commands and a final message get."""
    env = ShellEnv(sandbox=pool)
    try:
        env.reset(options={"task": Task("t", "?", {"files": {}, **data})})
        for command in commands:
            env.step(bash(command))
        return env.step(AssistantMessage(answer))[1]
    finally:
        env.close()


def test_the_reference_solution_solves_every_task(pool: SandboxPool) -> None:
    env = ShellEnv(sandbox=pool, split="test")
    tasks = env.tasks.take(60)
    assert {task.data["level"] for task in tasks} == set(shell.LEVELS)
    for task in tasks:
        env.reset(options={"task": task})
        env.step(shell.solve(task, env.messages))
        _, reward, terminated, _, info = env.step(shell.solve(task, env.messages))
        assert (reward, terminated, info["solved"]) == (1.0, True, True), task
    env.close()


def test_every_kind_is_solved_by_its_command_and_by_nothing_less(pool: SandboxPool) -> None:
    assert len({kind for kinds in KINDS.values() for kind in kinds}) == 15
    rng = np.random.default_rng(5)
    for kind in itertools.chain(*KINDS.values()):
        problem = kind(rng)
        data = {"files": problem.files, "expect": problem.expect}
        assert run(pool, data, [problem.command]) == 1.0, problem
        assert run(pool, data) == 0.0, problem


def test_tasks_come_from_the_seed_and_no_problem_is_in_both_splits(pool: SandboxPool) -> None:
    def drawn(**options: Any) -> list[Task]:
        env = ShellEnv(sandbox=pool, **options)
        found = env.tasks.take(200)
        env.close()
        return found

    train, test = drawn(split="train"), drawn(split="test")
    assert train == drawn(split="train")
    assert train != drawn(split="train", task_seed=1)
    assert not {task.id for task in train} & {task.id for task in test}
    assert {split_of(task.id) for task in test} == {"test"}
    assert len({task.id for task in train}) == 200


def test_wrong_levels_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected levels among"):
        ShellEnv(levels=[4])


def test_commands_work_in_the_folder_of_the_files(pool: SandboxPool) -> None:
    env = ShellEnv(sandbox=pool)
    env.reset(options={"task": Task("t", "?", {"files": {"a/b c.txt": "hi\n"}, "expect": {}})})
    assert env.step(bash("cat 'a/b c.txt'; cd a; X=5"))[0][0].content == "hi"
    assert env.step(bash("ls; echo $X; exit 3"))[0][0].content == "a\n[exit code 3]"
    env.close()


TASK = {"files": {"in.txt": "1\n2\n", "d/keep.txt": "keep\n"}, "expect": {"out.txt": "2\n1\n", "old.txt": None}}


@pytest.mark.parametrize(
    ("commands", "reward"),
    [
        (["tac in.txt > out.txt"], 1.0),
        (["tac in.txt > out.txt; rm -f old.txt; touch new"], 1.0),
        (["printf '2\\n1' > out.txt"], 1.0),
        (["printf '2\\n1\\n\\n' > out.txt"], 1.0),
        (["printf '2\\n1\\n2\\n' > out.txt"], 0.0),
        (["tac in.txt > out.txt; touch old.txt"], 0.0),
        (["tac in.txt > out.txt; echo >> d/keep.txt x"], 0.0),
        (["tac in.txt > out.txt; rm -r d"], 0.0),
        (["tac in.txt > Out.txt"], 0.0),
        ([], 0.0),
    ],
)
def test_the_files_decide(pool: SandboxPool, commands: list[str], reward: float) -> None:
    assert run(pool, TASK, commands) == reward


@pytest.mark.parametrize(
    "command",
    [
        "mkdir out.txt",
        "mkfifo out.txt",
        "tac in.txt > x; ln -s x out.txt",
        "ln -s /etc/passwd out.txt",
        "ln -s /dev/zero out.txt",
        "mknod out.txt c 1 5 || true",
        "tac in.txt > out.txt; chmod 000 out.txt in.txt",
        "tac in.txt > out.txt; chmod 000 .; mv d e",
        "head -c 60000000 /dev/zero > out.txt",
        "truncate -s 50G out.txt || truncate -s 60M out.txt",
        "tac in.txt > out.txt; for i in $(seq 15000); do : > f$i; done",
        "tac in.txt > out.txt; mv d e; mkdir x; cp -r e x/d; ln -s x/d d",
        "touch \"$(printf 'a\\nb')\" \"$(printf '\\377')\"",
        "echo > '-rf'; mkdir -p $(printf 'd/%.0s' $(seq 300))",
        "exit 0",
        "kill -9 -1",
    ],
)
def test_what_is_no_file_or_cannot_be_read_is_not_right(pool: SandboxPool, command: str) -> None:
    assert run(pool, TASK, [command]) == 0.0


def test_odd_things_beside_the_right_files_do_no_harm(pool: SandboxPool) -> None:
    odd = "mkfifo p; ln -s p l; ln -s . loop; mkdir -p e/f; tac in.txt > out.txt; "
    odd += "touch \"$(printf 'a\\nb')\" \"$(printf '\\377')\""
    assert run(pool, TASK, [odd]) == 1.0
    assert run(pool, {**TASK, "check": "assert open('out.txt').read() == '2\\n1\\n'"}, [odd]) == 1.0


def test_processes_left_behind_change_nothing(pool: SandboxPool) -> None:
    waits = (
        "tac in.txt > out.txt; (setsid bash -c 'while :; do echo x > out.txt; echo x > d/keep.txt; done' &>/dev/null &)"
    )
    assert (
        run(
            pool,
            {**TASK, "check": "assert open('out.txt').read() == '2\\n1\\n'"},
            [waits, "tac in.txt > out.txt", "echo keep > d/keep.txt"],
        )
        == 1.0
    )


CHECK = """
import csv, json, os, statistics, subprocess, sys
from collections import Counter
assert json.loads(open("out.json").read()) == {"n": 2}, "n"
assert Counter("aab")["a"] == 2
own = subprocess.run(["python3", "-P", "-c", "import wave; print(7)"], check=True, capture_output=True)
assert own.stdout == b"7\\n"
assert sys.stdin.read().strip() == "two"
"""
DATA = {"files": {"in.txt": "1\n2\n"}, "check": CHECK}
RIGHT = "echo '{\"n\": 2}' > out.json"


def test_a_check_of_the_authors_decides(pool: SandboxPool) -> None:
    assert run(pool, DATA, [RIGHT], "two\n") == 1.0
    assert run(pool, DATA, [RIGHT], "three") == 0.0
    assert run(pool, DATA, ["echo '{\"n\": 3}' > out.json"], "two") == 0.0
    assert run(pool, DATA, [], "two") == 0.0
    assert run(pool, {**DATA, "expect": {"in.txt": None}}, [RIGHT], "two") == 0.0
    assert run(pool, {**DATA, "expect": {"in.txt": None}}, [f"{RIGHT}; rm in.txt"], "two") == 1.0


PASS = "import os\nopen('/tmp/was-here', 'w').write('x')\nos._exit(0)\n"


@pytest.mark.parametrize(
    "command",
    [
        *(
            f"printf %s {PASS!r} | sed 's/\\\\n/\\n/g' > {name}.py"
            for name in ("json", "os", "csv", "statistics", "subprocess")
        ),
        "mkdir json; echo 'import os; os._exit(0)' > json/__init__.py",
        "for n in sitecustomize usercustomize conftest check snippet; do echo 'import os; os._exit(0)' > $n.py; done",
        "p=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $p; "
        "echo 'import os; os._exit(0)' > $p/usercustomize.py; echo 'import os; os._exit(0)' > $p/json.py",
        "mkdir bin; printf '#!/bin/sh\\nexit 0\\n' > bin/python3; chmod +x bin/python3; export PATH=$PWD/bin:$PATH; "
        "echo 'export PATH=/workspace/bin' > .bashrc; cp .bashrc .profile; cp .bashrc .bash_profile",
        "ln -s /proc/self/fd/0 out.json",
        "mkfifo out.json",
        "echo 'import os; os._exit(0)' > /tmp/json.py; echo > /dev/shm/json.py",
        "head -c 20000000 /dev/urandom > big; echo '{\"n\": 2}' > out.json",
        "for i in $(seq 1500); do : > f$i; done; echo '{\"n\": 2}' > out.json",
        "echo '{\"n\": 3}' > out.json; python3 -c 'import sys; sys.exit(0)'",
    ],
)
def test_a_check_cannot_be_prepared_for(pool: SandboxPool, command: str) -> None:
    assert run(pool, DATA, [command], "two") == 0.0


def test_a_check_is_not_disturbed_by_what_is_planted(pool: SandboxPool) -> None:
    site = "$(python3 -c 'import site; print(site.getusersitepackages())')"
    modules = "json os csv statistics wave subprocess collections sitecustomize usercustomize io re"
    for folder in (".", site):
        plant = f"mkdir -p {folder}; for n in {modules}; do echo 'import os; os._exit(1)' > {folder}/$n.py; done"
        assert run(pool, DATA, [RIGHT, plant], "two") == 1.0
    clean = "import os\nassert not os.path.exists('/tmp/was-here')\nassert os.environ['HOME'] == '/tmp'"
    assert run(pool, {"check": clean}, ["touch /tmp/was-here"]) == 1.0


def test_a_check_that_exits_or_hangs_is_not_passed(pool: SandboxPool) -> None:
    for check, reward in (
        ("import sys; sys.exit(1)", 0.0),
        ("import sys; sys.exit(0)", 1.0),
        ("1 / 0", 0.0),
        ("", 1.0),
    ):
        assert run(pool, {"check": check}) == reward


def test_any_final_message_is_passed_on(pool: SandboxPool) -> None:
    check = "import sys; assert 'x' in sys.stdin.read()"
    for answer in ("x", "x\ud800", "\0x", "x" * 10**6):
        assert run(pool, {"check": check}, [], answer) == 1.0


def test_files_that_cannot_be_put_are_our_failure(pool: SandboxPool) -> None:
    env = ShellEnv(sandbox=pool)
    with pytest.raises(EnvironmentFailure) as caught:
        env.reset(options={"task": Task("t", "?", {"files": {"../x": "y"}, "expect": {}})})
    assert caught.value.kind == "setup_raised"
    env.close()


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_tasks_are_read_from_a_file(tmp_path: Path, pool: SandboxPool) -> None:
    check = "assert open('b/c').read() == 'x\\n'"
    path = write(tmp_path, {"prompt": "Copy a to b/c.", "files": {"a": "x\n"}, "check": check, "expect": {"a": "x"}})
    env = ShellEnv(sandbox=pool, tasks=path)
    for command, reward in (("mkdir b; cp a b/c", 1.0), ("mkdir b; mv a b/c", 0.0), ("true", 0.0)):
        env.reset(seed=0)
        assert env.messages[-1].content == "Copy a to b/c."
        env.step(bash(command))
        assert env.step(AssistantMessage("done"))[1] == reward
    env.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": None}, "expected text in field 'prompt'"),
        ({"files": ["a"]}, "expected field 'files' as an object of path and text"),
        ({"files": {"a": None}}, "expected text as content of 'a' in field 'files', actual None"),
        ({"files": {"/etc/x": ""}}, "expected a plain path within the workspace in field 'files', .*actual '/etc/x'"),
        ({"files": {"../x": ""}}, "expected a plain path"),
        ({"files": {"a/../../x": ""}}, "expected a plain path"),
        ({"files": {"": ""}}, "expected a plain path"),
        ({"files": {"a//b": ""}}, "expected a plain path"),
        ({"files": {"a": "", "a/b": ""}}, "in field 'files', 'a' is a file and a folder"),
        ({"expect": {"a": 5}}, "expected text as content of 'a' in field 'expect', actual 5"),
        ({"check": "def"}, "field 'check' is no Python"),
        ({"check": 5}, "expected text in field 'check', actual 5"),
    ],
)
def test_a_wrong_line_is_named_with_its_remedy(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    good = {"prompt": "p", "files": {"a": "x"}, "expect": {"a": None}}
    path = write(tmp_path, good, {**good, **change})
    with pytest.raises(ConfigurationError, match=f"line 2: {said}"):
        ShellEnv(tasks=path)


def test_a_task_needs_a_way_to_be_judged(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="line 1: expected a field 'expect' that is not empty, or 'check'; actual fields"
    ):
        ShellEnv(tasks=write(tmp_path, {"prompt": "p", "files": {}}))
