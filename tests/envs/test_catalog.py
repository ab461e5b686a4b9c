"""The shipped environments: procedural tasks, honest scores, tools that never execute what they are given."""

import asyncio
import contextlib
import itertools
from fractions import Fraction
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgym.envs import (
    AssistantMessage,
    ConfigurationError,
    ProceduralTasks,
    Task,
    TaskList,
    ToolCall,
    ToolEnv,
    ToolError,
)
from toolgym.envs.catalog import calculator, ledger
from toolgym.envs.catalog.calculator import CalculatorEnv, evaluate, format_number
from toolgym.envs.catalog.ledger import LedgerEnv
from toolgym.envs.rewards import last_number
from toolgym.envs.tasks import split_of

SHIPPED = [(CalculatorEnv, calculator), (LedgerEnv, ledger)]


def play(env: ToolEnv, module: ModuleType, task: Task) -> tuple[float, int, dict[str, Any]]:
    """The reference solution's reward, how many calls it took, and the last info."""

    async def main() -> tuple[float, int, dict[str, Any]]:
        await env.areset(options={"task": task})
        for calls in itertools.count():
            _, reward, terminated, _, info = await env.astep(module.solve(task, env.messages))
            if terminated:
                return reward, calls, info
        raise AssertionError

    return asyncio.run(main())


@pytest.mark.parametrize(("env_class", "module"), SHIPPED)
def test_the_reference_solution_solves_every_task(env_class: Any, module: ModuleType) -> None:
    env = env_class(levels=module.LEVELS, split="test")
    for task in env.tasks.take(200):
        reward, calls, info = play(env, module, task)
        assert reward == 1.0
        assert info["solved"]
        assert calls == (task.data["level"] + 1 if module is ledger else 1)


@pytest.mark.parametrize(("env_class", "module"), SHIPPED)
def test_tasks_come_from_the_seed_and_every_level_is_drawn(env_class: Any, module: ModuleType) -> None:
    one, two, other = (env_class(levels=module.LEVELS, task_seed=seed).tasks.take(100) for seed in (3, 3, 4))
    assert one == two
    assert one != other
    assert {task.data["level"] for task in one} == set(module.LEVELS)


@pytest.mark.parametrize(("env_class", "module"), SHIPPED)
def test_no_problem_is_in_both_splits(env_class: Any, module: ModuleType) -> None:
    ids = {
        split: {task.id for seed in range(3) for task in env_class(split=split, task_seed=seed).tasks.take(1_000)}
        for split in ("train", "test")
    }
    assert not ids["train"] & ids["test"]
    assert min(len(found) for found in ids.values()) > 1_500
    assert {split_of(task_id) for task_id in ids["test"]} == {"test"}


@pytest.mark.parametrize("env_class", [CalculatorEnv, LedgerEnv])
@pytest.mark.parametrize("levels", [[], [0], [1, 9]])
def test_unknown_levels_are_refused(env_class: Any, levels: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="expected levels among"):
        env_class(levels=levels)


@pytest.mark.parametrize(
    ("options", "said"), [({"split": "dev"}, "expected split 'train' or 'test'"), ({"task_seed": -1}, "task seed of 0")]
)
def test_wrong_sources_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        CalculatorEnv(**options)


def test_a_source_that_cannot_fill_a_split_says_so() -> None:
    source = ProceduralTasks(
        lambda rng: Task("always the same", "x"), split="test" if split_of("always the same") == "train" else "train"
    )
    with pytest.raises(ConfigurationError, match="too few different problems"):
        source.get(0)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_list_of_tasks_has_bounds(index: int) -> None:
    with pytest.raises(ConfigurationError, match=r"expected a task index in \[0, 2\)"):
        TaskList([Task("a", "a"), Task("b", "b")]).get(index)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * -4", "-20"),
        ("7 / 2", "3.5"),
        ("1 / 3", "1/3"),
        ("7 // 2 + 7 % 4", "6"),
        ("0.1 + 0.2", "0.3"),
        ("+5", "5"),
        (" 12 ", "12"),
        ("9999999999 * 9999999999", "99999999980000000001"),
        ("99999999999999999 / 2", "49999999999999999.5"),
        ("-1 / 800", "-0.00125"),
        ("1e300 * 1e300 / 1e299 + 0.5", "1" + "0" * 301 + ".5"),
    ],
)
def test_expressions_have_exact_values(expression: str, value: str) -> None:
    assert format_number(evaluate(expression)) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("__import__('os').system('true')", "is not arithmetic"),
        ("(lambda: 1)()", "is not arithmetic"),
        ("x + 1", "'x' is not arithmetic"),
        ("'a' * 3", "is not arithmetic"),
        ("True + 1", "'True' is not arithmetic"),
        ("2 ** 99999", "is not arithmetic"),
        ("1j", "is not arithmetic"),
        ("1 +", "is not an arithmetic expression"),
        ("", "is not an arithmetic expression"),
        ("1\0", "is not an arithmetic expression"),
        ("(" * 150, "is not an arithmetic expression"),
        ("-" * 199 + "1", None),
        ("1e999", "is not a finite number"),
        ("9" * 201, "200 are allowed"),
        ("*".join(["1e99"] * 40), "too large"),
        ("1 / 0", "division by zero"),
        ("1 % (2 - 2)", "division by zero"),
    ],
)
def test_what_is_no_arithmetic_is_refused_in_words_for_the_model(expression: str, said: str | None) -> None:
    if said is None:
        assert abs(evaluate(expression)) == 1
        return
    with pytest.raises(ToolError, match=said):
        evaluate(expression)


@given(st.text(alphabet="0123456789+-*/%(). _aex", max_size=60))
def test_any_text_has_a_value_or_is_refused(text: str) -> None:
    with contextlib.suppress(ToolError):
        assert isinstance(evaluate(text), Fraction)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The result is -87.", -87),
        ("no number", None),
        ("1,234.5 and 7", 7),
        ("it is 1,234.50", Fraction("1234.5")),
        ("12 + 7 = 19", 19),
        ("\u22125", -5),
        ("v2 is out", None),
        ("-3, or 10-5", 5),
        ("10,20,30", 30),
        ("5/12", None),
        ("12e99 or 12e-5", None),
        ("1.2.3", None),
        ("1,234,567", 1234567),
        ("9" * 5_000, None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: Any) -> None:
    assert last_number(text) == number


def test_calculator_scores_the_answer_alone() -> None:
    env = gymnasium.make("toolgym/Calculator-v0").unwrapped
    for said, reward in (("It is 14.", 1.0), ("It is 15.", 0.0), ("I do not know", 0.0), ("", 0.0)):
        env.reset(options={"task": Task("t", "What is 14?", {"level": 1, "expression": "14", "result": "14"})})
        assert env.step(AssistantMessage(said))[1] == reward
    env.close()


def transfer(source: str, target: str, amount: Any) -> AssistantMessage:
    return AssistantMessage("", (ToolCall("transfer", {"source": source, "target": target, "amount": amount}),))


def test_ledger_scores_state_and_answer() -> None:
    env = LedgerEnv()
    data = {"accounts": {"ann": 9, "bob": 1}, "final": {"ann": 4, "bob": 6}, "answer": 6}
    task = Task("t", "Move 5 from ann to bob. Report bob.", data)
    for moved, said, reward in ((5, "6", 1.0), (5, "7", 0.5), (4, "6", 0.5), (4, "5", 0.0)):
        env.reset(options={"task": task})
        env.step(transfer("ann", "bob", moved))
        _, got, _, _, info = env.step(AssistantMessage(f"The balance is {said}."))
        assert got == reward
        assert info["solved"] == (reward == 1.0)
    assert task.data["accounts"] == {"ann": 9, "bob": 1}
    env.close()


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (transfer("ann", "bob", 10), "ann has only 9"),
        (transfer("ann", "bob", 0), "above 0"),
        (transfer("ann", "bob", -3), "above 0"),
        (transfer("ann", "ann", 1), "both 'ann'"),
        (transfer("ann", "zoe", 1), "no account 'zoe'; the accounts are ann, bob"),
        (transfer("ann", "bob", "lots"), "Invalid arguments for transfer"),
    ],
)
def test_a_refused_transfer_moves_nothing_and_says_why(action: AssistantMessage, said: str) -> None:
    env = LedgerEnv()
    env.reset(options={"task": Task("t", "x", {"accounts": {"ann": 9, "bob": 1}, "final": {}, "answer": 0})})
    observation, *_ = env.step(action)
    assert said in observation[0].content
    assert env.accounts == {"ann": 9, "bob": 1}
    env.close()


def test_transfers_of_one_message_act_in_their_order() -> None:
    env = LedgerEnv()
    env.reset(options={"task": Task("t", "x", {"accounts": {"ann": 9, "bob": 0, "cat": 0}, "final": {}, "answer": 0})})
    calls = (*transfer("ann", "bob", 9).tool_calls, *transfer("bob", "cat", 9).tool_calls)
    env.step(AssistantMessage("", calls))
    assert env.accounts == {"ann": 0, "bob": 0, "cat": 9}
    env.close()


def test_money_is_neither_made_nor_lost() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5_000):
        data = ledger.draw(rng, ledger.LEVELS).data
        assert sum(data["accounts"].values()) == sum(data["final"].values())
        assert min(data["final"].values()) >= 0
        assert data["accounts"] != data["final"], "doing nothing is no solution"
