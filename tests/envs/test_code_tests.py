"""CodeTests: only a function that gives the right values counts, whatever the code does to look as if it did."""

import functools
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from toolgym.envs import AssistantMessage, ConfigurationError, EnvironmentFailure, Task, ToolCall
from toolgym.envs.catalog import code_tests, hidden_tests_box
from toolgym.envs.catalog.code_tasks import FAMILIES, TESTS, runner
from toolgym.envs.catalog.code_tests import CodeTestsEnv, submission
from toolgym.envs.catalog.hidden_tests import same_value
from toolgym.envs.catalog.hidden_tests_box import decode, encode
from toolgym.envs.sandbox.sandbox import SandboxPool
from toolgym.envs.tasks import Split, split_of


@pytest.fixture(scope="module", params=["local", pytest.param("docker", marks=pytest.mark.docker)])
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the local sandbox says what it does not protect
        made = SandboxPool(request.param, size=2)
    with made:
        yield made


# Nobody can work these out: whoever gives one of them has found where it is written.
MARK = "7331"
ORACLE = Task(
    "oracle",
    "Write oracle(n).",
    {
        "function": "oracle",
        "tests": [{"args": [n], "expected": int(f"{MARK}{n * 982_451_653 % 10**9:09}")} for n in range(1, 7)],
    },
)
SQUARES = Task(
    "square",
    "Write square(n).",
    {"function": "square", "tests": [{"args": [n], "expected": n * n} for n in (2, 3, 5, 7)]},
)
SQUARE = "def square(n):\n    return n * n\n"


def say(tool: str, code: str) -> AssistantMessage:
    return AssistantMessage("", (ToolCall(tool, {"code": code}),))


def submit(pool: SandboxPool, task: Task, code: str, before: Sequence[str] = (), **options: Any) -> dict[str, Any]:
    """What a submission gets, after some programs were run in the same episode."""
    env = CodeTestsEnv(sandbox=pool, **options)
    try:
        env.reset(options={"task": task})
        for program in before:
            env.step(say("python", program))
        _, reward, terminated, _, info = env.step(say("submit", code))
        assert terminated
        return {"tests": reward, "solved": info["solved"]}
    finally:
        env.close()


def test_the_reference_solution_solves_every_task(pool: SandboxPool) -> None:
    env = CodeTestsEnv(sandbox=pool, split="test")
    tasks = env.tasks.take(60)
    assert {task.data["level"] for task in tasks} == set(code_tests.LEVELS)
    assert {task.data["kind"] for task in tasks} == {"write", "mend"}
    for task in tasks:
        env.reset(options={"task": task})
        _, reward, terminated, _, info = env.step(code_tests.solve(task, env.messages))
        assert (reward, terminated, info["solved"]) == (1.0, True, True), task
    env.close()


@functools.cache
def drawn(split: Split = "train", task_seed: int = 0) -> list[Task]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = CodeTestsEnv(sandbox="local", split=split, task_seed=task_seed)
    found = env.tasks.take(300)
    env.close()
    return found


def test_tasks_come_from_the_seed_and_no_problem_is_in_both_splits() -> None:
    train, test = drawn(split="train"), drawn(split="test")
    assert train[:50] == drawn.__wrapped__(split="train")[:50]
    assert train != drawn(split="train", task_seed=1)
    assert not {task.id for task in train} & {task.id for task in test}
    assert {split_of(task.id) for task in test} == {"test"}
    assert len(FAMILIES) == len({task.data["function"] for task in train}) == 20


def test_prompts_show_neither_the_solution_nor_a_hidden_test() -> None:
    for task in drawn():
        assert task.data["solution"] not in task.prompt
        for test in task.data["tests"]:
            shown = f">>> {task.data['function']}({', '.join(map(repr, decode(test['args'])))})\n"
            assert shown not in task.prompt


def test_doing_nothing_gains_little() -> None:
    for task in drawn():
        results = [json.dumps(test["expected"], sort_keys=True) for test in task.data["tests"]]
        assert len(results) == TESTS
        assert max(map(results.count, results)) <= 3, "one constant result"
        if task.data["kind"] == "mend":
            run = runner(task.data["broken"], task.data["function"])
            passed = [same_value(test["expected"], run(test["args"])) for test in task.data["tests"]]
            assert sum(passed) <= 3, "the function as it was given"
            assert task.data["broken"] in task.prompt


def test_every_fault_of_a_family_stands_once_in_its_source() -> None:
    for family in FAMILIES:
        assert len(family.bugs) >= 2
        for right, _ in family.bugs:
            assert family.source.count(right) == 1, (family.function, right)


@pytest.mark.parametrize("padding", ["\u00e9", "\U0001f600", "\\", "'", "\n"])
def test_the_size_of_a_submission_is_no_way_out(pool: SandboxPool, padding: str) -> None:
    """Whatever its characters cost on their way: it is scored, never dropped as a failure of ours."""
    code = f"{SQUARE}\npadding = {{}}\n".format(repr(padding * 190_000) if padding != "\n" else "0" + "\n" * 190_000)
    assert submit(pool, SQUARES, code[:200_000])["tests"] in (0.0, 1.0)


def test_partial_success_is_told_but_does_not_solve(pool: SandboxPool) -> None:
    got = submit(pool, SQUARES, "def square(n):\n    return n * n if n < 5 else n")
    assert got == {"tests": 0.5, "solved": False}
    assert submit(pool, SQUARES, SQUARE) == {"tests": 1.0, "solved": True}


def test_a_fenced_block_in_the_final_message_is_a_submission_too(pool: SandboxPool) -> None:
    env = CodeTestsEnv(sandbox=pool)
    for text, reward in (
        (f"First\n```python\ndef square(n): return 0\n```\nno:\n```python\n{SQUARE}```\ndone", 1.0),
        (f"```python\n{SQUARE}```", 1.0),
        (f"```\n{SQUARE}```", 0.0),
        (SQUARE, 0.0),
        ("", 0.0),
    ):
        env.reset(options={"task": SQUARES})
        assert env.step(AssistantMessage(text))[1] == reward
    env.reset(options={"task": SQUARES})
    assert env.step(AssistantMessage("I cannot."))[1:3] == (0.0, True), "nothing of an earlier episode counts"
    env.close()


def test_blocks_are_found_by_their_fences() -> None:
    assert submission("a\n  ```py\nx\n  ```\nb") == "x\n"
    assert submission("```python\nx") is None
    assert submission("```pythonic\nx\n```") is None
    assert submission("```python\n" * 200_000) is None
    assert submission("```\n```python\nx\n```\n") is None, "a block within a block"
    assert submission("```python\nx\n```\n```text\ny\n```") == "x\n"


def test_a_submission_that_cannot_be_right_may_be_mended(pool: SandboxPool) -> None:
    env = CodeTestsEnv(sandbox=pool)
    env.reset(options={"task": SQUARES})
    observation, _, terminated, *_ = env.step(say("submit", "def sqare(n): return n * n"))
    assert not terminated
    assert "the code does not define square" in observation[0].content
    observation, _, terminated, *_ = env.step(say("submit", f"{SQUARE}#{'x' * 200_000}"))
    assert not terminated
    assert "at most 200000" in observation[0].content
    assert env.step(say("submit", SQUARE))[1:3] == (1.0, True)
    env.close()


def test_programs_share_the_workspace_until_the_tests(pool: SandboxPool) -> None:
    env = CodeTestsEnv(sandbox=pool)
    env.reset(options={"task": SQUARES})
    env.step(say("python", "open('mine.py', 'w').write('A = 5')"))
    assert env.step(say("python", "import mine; print(mine.A)"))[0][0].content == "5"
    helped = "import mine\ndef square(n):\n    return n * n"
    assert env.step(say("submit", helped))[1] == 0.0, "a submission is all of the code"
    env.close()


def test_each_call_begins_anew_and_is_timed_alone(pool: SandboxPool) -> None:
    keeps = "calls = []\ndef square(n):\n    calls.append(n)\n    return n * n * len(calls)"
    assert submit(pool, SQUARES, keeps)["tests"] == 1.0
    hangs = "def square(n):\n    while n == 3:\n        pass\n    return n * n"
    assert submit(pool, SQUARES, hangs, call_timeout=1.0)["tests"] == 0.75
    dies = "import os\ndef square(n):\n    if n == 3:\n        os.kill(os.getpid(), 9)\n    return n * n"
    assert submit(pool, SQUARES, dies)["tests"] == 0.75
    daemon = "import os\ndef square(n):\n    if os.fork():\n        return n * n\n    os.setsid()\n    while True: pass"
    assert submit(pool, SQUARES, daemon, call_timeout=1.0)["tests"] == 1.0
    eats = "def square(n):\n    if n == 3:\n        'x' * 10**13\n    return n * n"
    assert submit(pool, SQUARES, eats)["tests"] == 0.75


def test_arguments_are_fresh_and_of_their_types(pool: SandboxPool) -> None:
    args: list[Any] = [[1, 2], (3,), {4}, {5: "a"}, b"\x00\xff", 2**70, None, True, -0.5]
    task = Task(
        "types",
        "",
        {"function": "f", "tests": [{"args": [encode(args)], "expected": encode([repr(args), 9])}] * 2},
    )
    code = "def f(a):\n    text = repr(a)\n    a.append(1)\n    return [text, len(a) - 1]"
    assert submit(pool, task, code)["solved"]


def test_numpy_may_be_used_but_its_numbers_are_not_pythons(pool: SandboxPool) -> None:
    code = "import numpy\ndef square(n):\n    return {}(numpy.int64(n) * n)"
    assert submit(pool, SQUARES, code.format("int"))["solved"]
    assert submit(pool, SQUARES, code.format(""))["tests"] == 0.0


def test_exceptions_are_expected_by_name_and_only_of_the_call(pool: SandboxPool) -> None:
    tests = [{"args": [0], "expected": {"$raises": "ValueError"}}, {"args": [1], "expected": 1}]
    task = Task("raises", "", {"function": "f", "tests": tests})
    assert submit(pool, task, "def f(n):\n    if not n: raise ValueError\n    return n")["solved"]
    assert submit(pool, task, "def f(n):\n    if not n: raise TypeError\n    return n")["tests"] == 0.5
    assert submit(pool, task, "raise ValueError\ndef f(n): pass")["tests"] == 0.0
    assert submit(pool, task, "def f(n): return {'$raises': 'ValueError'}")["tests"] == 0.0


_SEARCH = rf"""
import gc, glob, os, re, sys

def found():
    places = []
    frame = sys._getframe()
    while frame:
        places.append(repr(frame.f_locals) + repr(frame.f_globals.get("job", "")))
        frame = frame.f_back
    places += [repr(thing) for thing in gc.get_objects() if isinstance(thing, (dict, list, tuple)) and len(thing) < 99]
    patterns = ("./**", "/tmp/**", "/proc/*/environ", "/proc/*/cmdline")
    for name in (name for pattern in patterns for name in glob.glob(pattern, recursive=True)):
        try:
            places.append(open(name, errors="replace").read(10**6))
        except OSError:
            pass
    for pid in ("self", os.getppid()):
        try:
            for line in open(f"/proc/{{pid}}/maps"):
                low, high = (int(n, 16) for n in line.split()[0].split("-"))
                if "rw" in line and high - low < 10**8:
                    with open(f"/proc/{{pid}}/mem", "rb") as memory:
                        memory.seek(low)
                        places.append(memory.read(high - low).decode("latin-1"))
        except (OSError, OverflowError, ValueError):
            pass
    values = {{int(n) for text in places for n in re.findall(r"{MARK}[0-9]{{9}}", text)}}
    return min(values, default=None)
"""
_FORGE = """
import json
with open("results.json", "w") as file:
    json.dump([json.dumps({"value": True, "passed": True})] * 6, file)
"""
CHEATS: Mapping[str, str] = {
    "exit at import": "import os\ndef oracle(n): pass\nos._exit(0)",
    "sys.exit in the call": "import sys\ndef oracle(n): sys.exit(0)",
    "prints": "def oracle(n):\n    print('begun'); print('6 passed'); print('[\"{}\"]')",
    "says it passed": "def oracle(n): return {'value': True, 'passed': True, 'tests': 1.0}",
    "equal to everything": "class E(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\n"
    "def oracle(n): return E(n)",
    "a class that lies about itself": "class L:\n    __class__ = int\n    def __index__(s): return 1\n"
    "    def __eq__(s, o): return True\ndef oracle(n): return L()",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef oracle(n): raise SystemExit(0)",
    "patches json": "import json\njson.dumps = lambda *a, **k: '{\"value\": null}'\njson.loads = lambda *a: True\n"
    "def oracle(n): return None",
    "patches builtins": "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.type = lambda o: int\n"
    "def oracle(n): return n",
    "patches the harness": "import sys\nm = sys.modules['__main__']\n"
    "for name in ('encode', '_encode', '_call_apart', 'run_calls', 'canonical'):\n"
    "    setattr(m, name, lambda *a, **k: True)\ndef oracle(n): return n",
    "writes to every descriptor": "import os\ndef oracle(n):\n    for fd in range(64):\n"
    "        try: os.write(fd, b'{\"value\": true}\\n')\n        except OSError: pass\n    os._exit(0)",
    "closes every descriptor": "import os\nos.closerange(0, 256)\ndef oracle(n): return n",
    "forges the results": f"{_FORGE}\ndef oracle(n): return n",
    "forges them at the end": f"import os, time\ndef oracle(n):\n    if os.fork() == 0:\n        os.setsid()\n"
    f"        while True:\n            exec({_FORGE!r})\n    return n",
    "puts a folder in their place": "import os\nos.remove('results.json')\nos.mkdir('results.json')\n"
    "def oracle(n): return n",
    "puts a link in their place": "import os\nos.remove('results.json')\nos.symlink('/etc/passwd', 'results.json')\n"
    "def oracle(n): return n",
    "kills the harness": "import os, signal\ndef oracle(n): os.kill(os.getppid(), signal.SIGKILL)",
    "kills whatever it can": "import os, signal\ndef oracle(n):\n    for pid in range(2, 5000):\n"
    "        try: os.kill(pid, signal.SIGKILL)\n        except OSError: pass",
    "searches memory, files and frames": f"{_SEARCH}\ndef oracle(n): return found()",
    "fills the disk": "def oracle(n):\n    with open('big', 'wb') as f:\n        while True: f.write(bytes(1 << 20))",
    "returns too much": "def oracle(n): return 'x' * 10**8",
    "returns something endless": "def oracle(n):\n    a = []\n    a.append(a)\n    return a",
    "returns something deep": "def oracle(n):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "recurses": "def oracle(n): return oracle(n)",
    "is no function": "oracle = 5",
    "is not there": "# oracle",
    "is no Python": "def oracle(n",
    "has a null": "def oracle(n): pass\0",
    "has a lone surrogate": "def oracle(n): return '\ud800'",
    "takes everything": "class oracle(int):\n    def __new__(cls, *a): raise BaseException",
    "a keyboard interrupt": "def oracle(n): raise KeyboardInterrupt",
    "a segmentation fault": "import ctypes\ndef oracle(n): ctypes.string_at(0)",
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_submission_that_cheats_scores_nothing(pool: SandboxPool, name: str) -> None:
    assert submit(pool, ORACLE, CHEATS[name], call_timeout=2.0) == {"tests": 0.0, "solved": False}


def test_that_search_would_find_what_is_there(pool: SandboxPool) -> None:
    number = int(f"{MARK}123456789")
    task = Task("control", "", {"function": "oracle", "tests": [{"args": [number], "expected": number}]})
    assert submit(pool, task, CHEATS["searches memory, files and frames"])["solved"]


_PLANT = """
import os, pathlib
code = "import builtins, os, sys\\nopen('/tmp/was-here', 'w').write('x')\\nbuiltins.PLANTED = True\\n"
home = f".local/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
for folder in (".", "/tmp", home):
    os.makedirs(folder, exist_ok=True)
    for name in ("sitecustomize", "usercustomize", "conftest", "json", "os", "linecache", "select", "types"):
        pathlib.Path(folder, f"{name}.py").write_text(code)
pathlib.Path(home, "x.pth").write_text("import usercustomize")
pathlib.Path("results.json").write_text('["{\\\\"value\\\\": true}"]')
for name in (".bashrc", ".profile", "pytest.ini"):
    pathlib.Path(name).write_text("[pytest]")
"""
_WAIT = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        while True:
            try:
                if os.path.exists("results.json"):
                    exec({_FORGE!r})
                open("/tmp/was-here", "a").write("x")
            except OSError: pass
    os._exit(0)
"""
ASKS = """
import builtins, os
def square(n):
    assert not hasattr(builtins, "PLANTED") and not os.path.exists("/tmp/was-here")
    assert os.listdir() == ["results.json"]
    return n * n
"""


@pytest.mark.parametrize("before", [f"import sys\n{_PLANT}", _WAIT], ids=["planted files", "a process that waits"])
def test_nothing_of_the_episode_is_there_when_the_tests_run(pool: SandboxPool, before: str) -> None:
    assert submit(pool, ORACLE, "def oracle(n): return True", [before])["tests"] == 0.0
    assert submit(pool, SQUARES, ASKS, [before]) == {"tests": 1.0, "solved": True}


def test_the_box_holds_nothing_of_the_catalogue(pool: SandboxPool) -> None:
    if pool.backend == "local":
        pytest.skip("the local sandbox says that files of this machine can be read")
    names = " -o ".join(f"-name {path.name}" for path in Path(code_tests.__file__).parent.glob("[a-z]*_*.py"))
    sandbox = pool.sandbox()
    found = sandbox.sync.shell(f"find / -name proc -prune -o \\( -name math_tasks.py -o {names} \\) -print")
    assert (found.stdout.total, found.exit_code) == (0, 0), found.text
    assert "ModuleNotFoundError" in sandbox.sync.run("import toolgym.envs.catalog").text
    sandbox.sync.release()


def test_tests_that_do_not_begin_are_our_failure(pool: SandboxPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_tests_box, "BEGUN", b"never said")
    with pytest.raises(EnvironmentFailure) as caught:
        submit(pool, SQUARES, SQUARE)
    assert caught.value.kind == "hidden_tests"


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_tasks_are_read_from_a_file(tmp_path: Path, pool: SandboxPool) -> None:
    tests = [
        {"args": [[1, 2]], "expected": {"$tuple": [2, 1]}},
        {"args": [], "kwargs": {"a": [3]}, "expected": {"$tuple": [3]}},
        {"args": [None], "expected": {"$raises": "TypeError"}},
        {"args": [["a"]], "expected": {"$dict": [["tuple", "a"]]}},
    ]
    path = write(tmp_path, {"prompt": "Reverse.", "function": "turn", "tests": tests})
    env = CodeTestsEnv(sandbox=pool, tasks=path)
    env.reset(seed=0)
    assert env.messages[-1].content == "Reverse."
    assert env.step(say("submit", "def turn(a): return tuple(reversed(a))"))[1] == 0.75
    env.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": ""}, "expected text in field 'prompt'"),
        ({"function": "a.b"}, "expected field 'function' as the name of a function, actual 'a.b'"),
        ({"tests": []}, "expected field 'tests' as a list of 1 to 100 calls"),
        ({"tests": "x"}, "expected field 'tests' as a list"),
        ({"tests": [{"args": [1]}]}, "test 1: expected {.args.*actual {'args'"),
        ({"tests": [{"arg": [1], "expected": 1}]}, "test 1: unknown fields .'arg'."),
        ({"tests": [{"args": 1, "expected": 1}]}, "test 1: expected args as a list"),
        ({"tests": [{"args": [], "expected": {"$set": 1}}]}, "test 1: .*stands for no value"),
        ({"tests": [{"args": [], "expected": {"$raises": 1}}]}, "test 1: expected .raises with the name"),
        ({"tests": [{"args": [{"$date": "x"}], "expected": 1}]}, "unknown or wrong .date"),
        ({"tests": [{"args": [], "expected": {"$set": [[1]]}}]}, "stands for no value"),
    ],
)
def test_a_wrong_line_is_named_with_its_remedy(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    good = {"prompt": "p", "function": "f", "tests": [{"args": [], "expected": 1}]}
    path = write(tmp_path, good, {**good, **change})
    with pytest.raises(ConfigurationError, match=f"line 2: .*{said}|line 2: {said}"):
        CodeTestsEnv(tasks=path)


@pytest.mark.parametrize("call_timeout", [0, -1, True, "1"])
def test_wrong_options_are_refused(call_timeout: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected call_timeout as a number above 0"):
        CodeTestsEnv(call_timeout=call_timeout)
    with pytest.raises(ConfigurationError, match="expected levels among"):
        CodeTestsEnv(levels=[5])
