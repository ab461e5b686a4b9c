"""CodeMath: a problem is solved by running Python, and only the right answer in the last box counts."""

import asyncio
import contextlib
import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgym.envs import AssistantMessage, ConfigurationError, EnvironmentFailure, Task, ToolCall, ToolEnv
from toolgym.envs.catalog import code_math, math_answers
from toolgym.envs.catalog.code_math import CodeMathEnv
from toolgym.envs.catalog.math_answers import boxed, readings, same
from toolgym.envs.catalog.math_tasks import KINDS
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


@pytest.fixture(scope="module")
def local_pool() -> Iterator[SandboxPool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = SandboxPool("local", size=4)
    with made:
        yield made


def play(env: ToolEnv, task: Task) -> tuple[float, bool]:
    """What the reference solution gets."""

    async def main() -> tuple[float, bool]:
        await env.areset(options={"task": task})
        for _ in itertools.count():
            _, reward, terminated, _, info = await env.astep(code_math.solve(task, env.messages))
            if terminated:
                return reward, info["solved"]
        raise AssertionError

    return asyncio.run(main())


def reward_for(answer: str, gold: str, pool: SandboxPool) -> float:
    env = CodeMathEnv(sandbox=pool)
    env.reset(options={"task": Task("t", "?", {"answer": gold})})
    reward = env.step(AssistantMessage(answer))[1]
    env.close()
    return reward


def is_same(answer: str, gold: str) -> bool:
    return asyncio.run(same(answer, gold))


@pytest.mark.parametrize("mode", ["stateless", "session"])
def test_the_reference_solution_solves_every_task(pool: SandboxPool, mode: code_math.Mode) -> None:
    env = CodeMathEnv(sandbox=pool, mode=mode, split="test")
    tasks = env.tasks.take(60)
    assert {task.data["level"] for task in tasks} == set(code_math.LEVELS)
    for task in tasks:
        assert play(env, task) == (1.0, True), task
    env.close()


def test_every_kind_of_problem_agrees_with_its_program(local_pool: SandboxPool) -> None:
    assert sum(map(len, KINDS.values())) == len({kind for kinds in KINDS.values() for kind in kinds}) == 28
    rng = np.random.default_rng(11)
    sandbox = local_pool.sandbox()
    for kind in itertools.chain(*KINDS.values()):
        for _ in range(3):
            problem = kind(rng)
            assert is_same(sandbox.sync.run(problem.program).text, problem.answer), problem
    sandbox.sync.release()


def test_tasks_come_from_the_seed_and_no_problem_is_in_both_splits(local_pool: SandboxPool) -> None:
    def ids(**options: Any) -> list[str]:
        env = CodeMathEnv(sandbox=local_pool, **options)
        found = [task.id for task in env.tasks.take(400)]
        env.close()
        return found

    train, test = ids(split="train"), ids(split="test")
    assert train == ids(split="train")
    assert train != ids(split="train", task_seed=1)
    assert not set(train) & set(test)
    assert len(set(train)) > 390
    assert {split_of(task_id) for task_id in test} == {"test"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"levels": []}, "expected levels among"),
        ({"levels": [6]}, "expected levels among"),
        ({"levels": 3}, "expected levels among"),
        ({"split": "dev"}, "expected split 'train' or 'test'"),
        ({"mode": "notebook"}, "expected mode among stateless, session, actual 'notebook'"),
        ({"tasks": 5}, "expected tasks as the path"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        CodeMathEnv(**options)


def run_python(env: CodeMathEnv, *codes: str) -> list[str]:
    env.reset(options={"task": Task("t", "?", {"answer": "1"})})
    said = []
    for code in codes:
        observation, *_ = env.step(AssistantMessage("", (ToolCall("python", {"code": code}),)))
        said.append(observation[0].content)
    return said


def test_a_session_keeps_variables_and_shows_the_last_value(pool: SandboxPool) -> None:
    env = CodeMathEnv(sandbox=pool, mode="session")
    assert run_python(env, "x = 6", "x * 7") == ["(no output)", "42"]
    assert "NameError" in run_python(env, "print(x)")[0], "an episode begins with a new session"
    env.close()


def test_stateless_calls_keep_nothing(pool: SandboxPool) -> None:
    env = CodeMathEnv(sandbox=pool)
    said = run_python(env, "x = 6; open('f', 'w').write('x')", "import os; print(os.listdir())", "x")
    assert said[:2] == ["(no output)", "[]"]
    assert "NameError" in said[2]
    env.close()


def test_both_modes_have_one_schema_and_say_what_is_kept(local_pool: SandboxPool) -> None:
    tools = [CodeMathEnv(sandbox=local_pool, mode=mode).tools["python"].schema for mode in ("stateless", "session")]
    parameters = [tool["function"]["parameters"] for tool in tools]
    assert parameters[0] == parameters[1]
    assert [tool["function"]["name"] for tool in tools] == ["python", "python"]
    assert "Nothing is kept" in tools[0]["function"]["description"]
    assert "Variables are kept" in tools[1]["function"]["description"]


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"{ \boxed{3}", "3"),
        (r"} \boxed{3}", "3"),
        (r"\boxed{\boxed{4}}", "4"),
        ("\\boxed{}", ""),
        (r"\boxed5", None),
        (r"\fbox{5}", None),
        ("5", None),
        ("", None),
        ("\\boxed{" * 20_000, None),
        ("{" * 100_000, None),
        ("}" * 100_000, None),
        ("\\" * 100_001, None),
    ],
)
def test_the_last_complete_box_counts(text: str, inside: str | None) -> None:
    assert boxed(text) == inside


_PLAIN = st.text(st.characters(blacklist_characters="\\{}", blacklist_categories=("Cs",)))


@given(_PLAIN, _PLAIN, _PLAIN)
def test_a_box_is_found_wherever_it_stands(before: str, inside: str, after: str) -> None:
    assert boxed(f"{before}\\boxed{{{inside}}}{after}") == inside.strip()
    assert boxed(f"{before}\\boxed{{\\frac{{{inside}}}{{2}}}}{after}") == f"\\frac{{{inside}}}{{2}}"


@given(st.text(alphabet="\\boxed{} 1", max_size=200))
def test_any_text_has_a_box_or_none(text: str) -> None:
    found = boxed(text)
    assert found is None or found in text


RIGHT = [
    ("1234", "1,234"),
    ("1234", r"1{,}234"),
    ("1234", "1234.0"),
    ("1234", r"\text{1234}"),
    ("1234", r"n = 1234"),
    ("1234", r"1234\text{ cm}^2"),
    ("1234", "1234 apples"),
    ("-3", "\u22123"),
    (r"\frac{3}{7}", "3/7"),
    (r"\frac{3}{7}", r"\dfrac{6}{14}"),
    (r"-\frac{3}{7}", r"\frac{-3}{7}"),
    (r"\frac{7}{2}", "3.5"),
    (r"\frac{7}{2}", r"3\frac{1}{2}"),
    ("0.5", r"50\%"),
    ("1500", r"1.5 \times 10^{3}"),
    (r"2\sqrt{5}", r"\sqrt{20}"),
    (r"2\sqrt{5}", r" 2 \sqrt {5} "),
    (r"\frac{9}{5}+\frac{\sqrt{151}}{5}", r"\frac{9+\sqrt{151}}{5}"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\{1,2\}", r"\{2, 1\}"),
    ("yes", r"\text{Yes}."),
    ("A", r"(\text{A})"),
]
WRONG = [
    ("1234", "1235"),
    ("1234", "1234, 1235"),
    ("1234", "1 234 or so 5"),
    ("5", "5 million"),
    ("12", "1 2"),
    (r"\frac{3}{7}", "0.428571"),
    (r"\frac{1}{1000000007}", "0"),
    (r"\frac{1}{1000000007}", "0.0"),
    (r"2\sqrt{5}", r"5\sqrt{2}"),
    ("yes", "sey"),
    ("5", ""),
    ("5", "x"),
    ("5", r"\frac{5}{0}"),
]


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_a_right_answer_counts_however_it_is_written(gold: str, answer: str) -> None:
    assert is_same(answer, gold)


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_a_wrong_answer_does_not_count(gold: str, answer: str) -> None:
    assert not is_same(answer, gold)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("6", r"\gcd(12, 18)"),
        ("6", "3!"),
        ("10", r"\binom{5}{2}"),
        ("55", r"\sum_{k=1}^{10} k"),
        ("1024", "2^{10}"),
        ("83810205", "12345 * 6789"),
        ("83810205", "(12345)(6789)"),
        ("-2", r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        ("5", "5+0i"),
        (r"2\sqrt{5}", r"\sqrt{(7-3)^2+(5-3)^2}"),
    ],
)
def test_the_question_is_no_answer_to_itself(gold: str, answer: str) -> None:
    assert not is_same(answer, gold)


@given(st.integers(-(10**40), 10**40), st.integers(1, 10**20))
def test_a_number_is_read_exactly(above: int, below: int) -> None:
    sign = "-" if above < 0 else ""
    value = Fraction(above, below)
    for text in (f"{above}/{below}", f"\\frac{{{above}}}{{{below}}}", f"{sign}\\frac{{{abs(above)}}}{{{below}}}"):
        assert readings(text) == {value}
    assert readings(f"{above:,}") == {Fraction(above)}


@given(st.text(alphabet="0123456789.,-+/*^{}()\\ fractexmsd%=!", max_size=60))
def test_any_text_is_a_number_or_not(text: str) -> None:
    assert len(readings(text)) <= 2


HOSTILE = [
    "9**9**9**9",
    "9^{9^{9^{9}}}",
    r"\sqrt{9^{9^{9^{9}}}}",
    r"(x+y+z)^{5000}",
    "{" * 50_000 + "}" * 50_000,
    "\\frac" * 10_000,
    r"\sqrt{" * 200 + "5" + "}" * 200,
    "10^{999999999}",
    "1e999999999",
    "9" * 100_000,
    "\u0665\u0665",  # digits, but not ours
    r"\text{__import__('os').abort()}",
    "$$ \\] \\) $",
    "\ud800",
    "\0",
]


@pytest.mark.parametrize("gold", ["7", r"2\sqrt{5}", "yes"])
def test_hostile_answers_are_wrong_and_nothing_more(gold: str, local_pool: SandboxPool) -> None:
    for answer in HOSTILE:
        assert reward_for(f"\\boxed{{{answer}}}", gold, local_pool) == 0.0, answer[:50]


def test_only_the_final_message_is_looked_at(local_pool: SandboxPool) -> None:
    env = CodeMathEnv(sandbox=local_pool)
    for last, reward in ((r"It is \boxed{7}.", 1.0), ("It is 7.", 0.0), ("", 0.0), (r"\boxed{7} or \boxed{8}", 0.0)):
        env.reset(options={"task": Task("t", r"\boxed{7}?", {"answer": "7"})})
        env.step(AssistantMessage(r"\boxed{7}", (ToolCall("python", {"code": r"print(r'\boxed{7}')"}),)))
        assert env.step(AssistantMessage(last))[1] == reward
    env.close()


def test_a_checker_that_cannot_start_is_our_failure(local_pool: SandboxPool, monkeypatch: pytest.MonkeyPatch) -> None:
    for executable in ("/nowhere/python", "/bin/false"):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(EnvironmentFailure) as caught:
            reward_for(r"\boxed{\sqrt{20}}", r"2\sqrt{5}", local_pool)
        assert caught.value.kind == "math_checker"
        assert reward_for(r"\boxed{4}", "4", local_pool) == 1.0, "plain answers need no checker"


def test_no_checker_outlives_a_score_that_ran_out_of_time(local_pool: SandboxPool) -> None:
    env = CodeMathEnv(sandbox=local_pool, hook_timeout=0.01)
    env.reset(options={"task": Task("t", "?", {"answer": r"2\sqrt{5}"})})
    with pytest.raises(EnvironmentFailure) as caught:
        env.step(AssistantMessage(r"\boxed{(x+y+z)^{5000}}"))
    assert caught.value.kind == "score_timeout"
    env.close()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            assert math_answers.__file__ not in child.cmdline()


@pytest.mark.docker
@pytest.mark.usefixtures("docker_engine")
def test_a_vector_scores_many_answers_at_once() -> None:
    envs = gymnasium.make_vec("toolgym/CodeMath-v0", num_envs=4, sandbox="docker")
    envs.reset(seed=0, options={"tasks": [Task("t", "?", {"answer": r"2\sqrt{5}"})] * 4})
    said = (r"\sqrt{20}", r"2\sqrt{5}", r"\sqrt{21}", r"\sqrt{80}/2")
    _, rewards, terminated, _, _ = envs.step([AssistantMessage(f"\\boxed{{{text}}}") for text in said])
    assert rewards.tolist() == [1.0, 1.0, 0.0, 1.0]
    assert terminated.all()
    envs.close()


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_tasks_are_read_from_a_file_of_any_usual_form(tmp_path: Path, local_pool: SandboxPool) -> None:
    path = write(
        tmp_path,
        {"question": "q1", "answer": "She has 40 + 2 = <<40+2=42>>42.\n#### 42"},
        {"problem": "q2", "answer": r"\frac{1}{2}", "level": 3},
        "",
        {"prompt": "q3", "answer": 7},
        {"question": "q4", "answer": r"so $\boxed{x^2}$"},
        {"problem": "q5", "solution": r"so $\boxed{9}$"},
        {"question": "q6", "answer": "#### 1,234"},
    )
    for given_path in (path, str(path)):
        env = CodeMathEnv(sandbox=local_pool, tasks=given_path)
        tasks = env.tasks.take(6)
        assert [task.prompt for task in tasks] == ["q1", "q2", "q3", "q4", "q5", "q6"]
        assert [task.data["answer"] for task in tasks] == ["42", r"\frac{1}{2}", "7", "x^2", "9", "1,234"]
        assert len({task.id for task in tasks}) == env.tasks.size == 6
        env.close()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"answer": "1"}, "line 2: expected a field 'question' or 'problem' or 'prompt', actual fields .'answer'."),
        ({"question": "q"}, "line 2: expected a field 'answer' or 'solution'"),
        ({"question": "q", "answer": None}, "line 2: expected text in field 'answer', actual None"),
        ({"question": "q", "answer": True}, "line 2: expected text in field 'answer', actual True"),
        ({"question": "q", "answer": float("nan")}, "line 2: expected text in field 'answer', actual nan"),
        ({"question": "q", "answer": " "}, "line 2: expected text in field 'answer'"),
        ({"question": "q", "answer": "it is ####"}, "line 2: expected an answer"),
        ({"question": "q", "solution": "no box"}, "line 2: expected an answer, or a solution"),
        ({"question": 5, "answer": "1"}, "line 2: expected text in field 'question', actual 5"),
        ("{'question'", "line 2: this is no JSON .*: expected one object a line"),
        ("[1]", "line 2: expected a JSON object, actual a list"),
        ("[" * 100_000, "line 2: this is no JSON"),
    ],
)
def test_a_wrong_line_is_named_with_its_remedy(tmp_path: Path, row: Any, said: str) -> None:
    path = write(tmp_path, {"question": "q", "answer": "1"}, row)
    with pytest.raises(ConfigurationError, match=said) as caught:
        CodeMathEnv(tasks=path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    for name, said in (("none.jsonl", "cannot be read"), ("empty.jsonl", "has no lines"), ("bytes.jsonl", "cannot be")):
        with pytest.raises(ConfigurationError, match=said):
            CodeMathEnv(tasks=tmp_path / name)


def test_the_slots_of_a_vector_share_one_list_of_tasks(tmp_path: Path, local_pool: SandboxPool) -> None:
    path = write(tmp_path, {"question": "q", "answer": "1"})
    envs = code_math.make_vec(num_envs=3, sandbox=local_pool, tasks=path)
    assert len({id(env.tasks) for env in envs.envs}) == 1
    envs.close()
