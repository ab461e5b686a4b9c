"""Calculator: procedural arithmetic in graded levels, with one tool that evaluates expressions."""

import ast
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from toolgym.envs.errors import ConfigurationError, ToolError
from toolgym.envs.messages import AssistantMessage, Message, ToolCall, ToolMessage
from toolgym.envs.rewards import Episode, last_number
from toolgym.envs.tasks import ProceduralTasks, Split, Task
from toolgym.envs.tool_env import ToolEnv
from toolgym.envs.tools import tool
from toolgym.envs.vector import ToolVectorEnv

LEVELS = (1, 2, 3, 4)
_MAX_CHARS = 200
_MAX_BITS = 4_096
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ASKS = ("What is {}?", "Compute {}.", "Calculate {}.", "Work out {}.")


class CalculatorEnv(ToolEnv):
    """Work out an arithmetic expression, with a calculator at hand.

    Levels: 1, the sum or difference of two numbers up to 99; 2, also products, up to 999; 3, three numbers up to 99
    in two operations; 4, four numbers up to 99 in three operations. The score is 1 if the last number of the answer
    is the exact result, else 0.

    Args:
        levels: the levels to draw tasks from.
        split: ``"train"`` or ``"test"``; no expression is in both.
        task_seed: seeds the task source.
        **options: see `ToolEnv`.
    """

    system_prompt = "Use the calculator. Then say the result."

    def __init__(
        self, *, levels: Sequence[int] = (1, 2, 3), split: Split = "train", task_seed: int = 0, **options: Any
    ) -> None:
        chosen = tuple(levels) if isinstance(levels, Sequence) else ()
        if not chosen or not set(chosen) <= set(LEVELS):
            raise ConfigurationError(f"expected levels among {LEVELS}, actual {levels!r}")
        tasks = ProceduralTasks(lambda rng: draw(rng, chosen), split=split, seed=task_seed)
        super().__init__(tasks, **options)

    @tool
    async def calculate(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: numbers, + - * / // % and parentheses.
        """
        return format_number(evaluate(expression))

    async def score(self, episode: Episode) -> float:
        """1 for the right number, 0 for another one or none."""
        found = last_number(episode.answer or "")
        return float(found is not None and found == Fraction(episode.task.data["result"]))


def draw(rng: np.random.Generator, levels: Sequence[int]) -> Task:
    """One task of a level drawn from ``levels``. Its id names the expression, however the question is worded."""
    level = int(rng.choice(np.asarray(levels)))
    bound = 1_000 if level == 2 else 100
    numbers = [int(n) for n in rng.integers(1, bound, size=max(2, level))]
    ops = [str(o) for o in rng.choice(["+", "-"] if level == 1 else ["+", "-", "*"], size=3)]
    match level:
        case 1 | 2:
            expression = f"{numbers[0]} {ops[0]} {numbers[1]}"
        case 3:
            expression = f"({numbers[0]} {ops[0]} {numbers[1]}) {ops[1]} {numbers[2]}"
        case _:
            expression = f"({numbers[0]} {ops[0]} {numbers[1]}) {ops[1]} ({numbers[2]} {ops[2]} {numbers[3]})"
    ask = _ASKS[int(rng.integers(len(_ASKS)))]
    result = format_number(evaluate(expression))
    data = {"level": level, "expression": expression, "result": result}
    return Task(f"calculator:{expression}", ask.format(expression), data)


def solve(task: Task, messages: Sequence[Message]) -> AssistantMessage:
    """The reference solution's next message: one call, then the result.

    Args:
        task: a task of this environment.
        messages: the conversation so far.
    """
    last = messages[-1]
    if isinstance(last, ToolMessage):
        return AssistantMessage(f"The result is {last.content}.")
    return AssistantMessage("", (ToolCall("calculate", {"expression": task.data["expression"]}),))


def evaluate(expression: str) -> Fraction:
    """The exact value of an arithmetic expression, found by parsing it; nothing of it is ever executed.

    Raises:
        ToolError: not an arithmetic expression, too long, too large, or a division by zero.
    """
    if len(expression) > _MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters; {_MAX_CHARS} are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ToolError(f"{expression!r} is not an arithmetic expression") from error
    return _value(tree.body)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            try:
                return _bounded(_BINARY[type(op)](_value(left), _value(right)))
            except ZeroDivisionError as error:
                raise ToolError("division by zero") from error
    raise ToolError(f"{ast.unparse(node)!r} is not arithmetic: use numbers, + - * / // % and parentheses")


def _bounded(number: float | Fraction) -> Fraction:
    try:
        value = Fraction(str(number)) if isinstance(number, float) else Fraction(number)
    except ValueError as error:
        raise ToolError(f"{number} is not a finite number") from error
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ToolError("the numbers grow too large")
    return value


def format_number(value: Fraction) -> str:
    """An integer as such, a finite decimal as a decimal, any other fraction as ``numerator/denominator``; exactly."""
    if value.denominator == 1:
        return str(value.numerator)
    places, rest = 0, value.denominator
    while rest % 10 == 0 or rest % 5 == 0 or rest % 2 == 0:
        rest //= 10 if rest % 10 == 0 else 5 if rest % 5 == 0 else 2
        places += 1
    if rest > 1:
        return f"{value.numerator}/{value.denominator}"
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def make_vec(**options: Any) -> ToolVectorEnv:
    """What `gymnasium.make_vec` calls."""
    return ToolVectorEnv.of(CalculatorEnv, **options)
