"""Ledger: money moved between accounts by tool calls, scored on the state it leaves and on the answer."""

import json
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from toolgym.envs.errors import ConfigurationError, ToolError
from toolgym.envs.messages import AssistantMessage, Message, ToolCall, ToolMessage
from toolgym.envs.rewards import Episode, Score, last_number
from toolgym.envs.tasks import ProceduralTasks, Split, Task
from toolgym.envs.tool_env import ToolEnv
from toolgym.envs.tools import tool
from toolgym.envs.vector import ToolVectorEnv

LEVELS = (1, 2, 3, 4)
NAMES = ("ann", "bob", "cat", "dan", "eve", "fay", "gus", "hal", "ivy", "joe", "kim", "leo")
_ACCOUNTS = 3
_RICHEST = "the richest account"


class LedgerEnv(ToolEnv):
    """Move money between accounts, then report a balance.

    Every episode has three accounts with balances of its own. Level L needs L + 1 tool calls: L transfers and a
    look-up, or (from level 2 on) an account emptied, or the richest one found, which takes a look-up first. The
    score is half for the final state, half for the answer; both are needed to count as solved.

    Args:
        levels: the levels to draw tasks from.
        split: ``"train"`` or ``"test"``; no problem is in both.
        task_seed: seeds the task source.
        **options: see `ToolEnv`.
    """

    system_prompt = "You keep the accounts. Use the tools. Then say the balance."

    def __init__(
        self, *, levels: Sequence[int] = LEVELS, split: Split = "train", task_seed: int = 0, **options: Any
    ) -> None:
        chosen = tuple(levels) if isinstance(levels, Sequence) else ()
        if not chosen or not set(chosen) <= set(LEVELS):
            raise ConfigurationError(f"expected levels among {LEVELS}, actual {levels!r}")
        self.accounts: dict[str, int] = {}
        super().__init__(ProceduralTasks(lambda rng: draw(rng, chosen), split=split, seed=task_seed), **options)

    async def setup(self, task: Task) -> None:
        """Open the accounts."""
        self.accounts = dict(task.data["accounts"])

    # The tools never await, so calls of one message act in their order, each as a whole.

    @tool
    async def balance(self, account: str) -> int:
        """Look up a balance."""
        return self.accounts[self._known(account)]

    @tool
    async def transfer(self, source: str, target: str, amount: int) -> str:
        """Move money from source to target."""
        source, target = self._known(source), self._known(target)
        if amount <= 0:
            raise ToolError(f"the amount must be above 0, not {amount}")
        if source == target:
            raise ToolError(f"source and target are both {source!r}")
        if self.accounts[source] < amount:
            raise ToolError(f"{source} has only {self.accounts[source]}")
        self.accounts[source] -= amount
        self.accounts[target] += amount
        return "ok"

    @tool
    async def list_accounts(self) -> dict[str, int]:
        """List all accounts with their balances."""
        return dict(self.accounts)

    async def score(self, episode: Episode) -> Score:
        """Half for the state, half for the answer."""
        said = last_number(episode.answer or "")
        components = {
            "state": float(self.accounts == episode.task.data["final"]),
            "answer": float(said is not None and said == episode.task.data["answer"]),
        }
        return Score(components, weights={"state": 0.5, "answer": 0.5})

    def _known(self, account: str) -> str:
        if account not in self.accounts:
            raise ToolError(f"no account {account!r}; the accounts are {', '.join(self.accounts)}")
        return account


def draw(rng: np.random.Generator, levels: Sequence[int]) -> Task:
    """One task of a level drawn from ``levels``. Its id names the accounts and what is to be done."""
    level = int(rng.choice(np.asarray(levels)))
    names = [str(name) for name in rng.choice(NAMES, size=_ACCOUNTS, replace=False)]
    # Without replacement, so that there is one richest account.
    accounts = {name: 20 + int(n) for name, n in zip(names, rng.choice(80, size=_ACCOUNTS, replace=False), strict=True)}
    final, calls = dict(accounts), 0
    orders: list[tuple[str, str, int | None]] = []
    if level > 1 and rng.random() < 0.25:
        richest = max(final, key=lambda name: final[name])
        target = str(rng.choice([name for name in names if name != richest]))
        orders.append((_RICHEST, target, _move(rng, final, richest, target)))
        calls += 2
    while calls < level:
        source, target = (str(name) for name in rng.choice(names, size=2, replace=False))
        if level - calls >= 2 and final[source] > 0 and rng.random() < 0.4:
            final[target], final[source] = final[target] + final[source], 0
            orders.append((source, target, None))
            calls += 2
        elif final[source] > 1:
            orders.append((source, target, _move(rng, final, source, target)))
            calls += 1
    if final == accounts:
        return draw(rng, levels)  # doing nothing must not leave the right state
    asked = orders[-1][1]
    question = " ".join([*(_words(*order) for order in orders), f"Report {asked}."])
    state = " ".join(f"{name}={accounts[name]}" for name in sorted(accounts))
    data = {"level": level, "accounts": accounts, "orders": orders, "final": final, "answer": final[asked]}
    return Task(f"ledger:{state}: {question}", question, data)


def _move(rng: np.random.Generator, state: dict[str, int], source: str, target: str) -> int:
    """Move a drawn part of an account, and say how much."""
    amount = int(rng.integers(1, max(2, min(state[source], 100))))
    state[source], state[target] = state[source] - amount, state[target] + amount
    return amount


def _words(source: str, target: str, amount: int | None) -> str:
    if amount is None:
        return f"Move all of {source} to {target}."
    return f"Move {amount} from {source} to {target}."


def solve(task: Task, messages: Sequence[Message]) -> AssistantMessage:
    """The reference solution's next message: one call a turn, then the balance.

    Args:
        task: a task of this environment.
        messages: the conversation so far.
    """
    plan = _plan(task)
    call = next(plan)
    for message in messages:
        if isinstance(message, ToolMessage):
            try:
                call = plan.send(message.content)
            except StopIteration:
                return AssistantMessage(f"The balance is {message.content}.")
    return AssistantMessage("", (call,))


def _plan(task: Task) -> Generator[ToolCall, str, None]:
    """The calls that carry out a task's orders; each is answered with its result."""
    for source, target, amount in task.data["orders"]:
        payer, due = source, amount
        if source == _RICHEST:
            accounts: dict[str, int] = json.loads((yield ToolCall("list_accounts", {})))
            payer = max(accounts, key=lambda name: accounts[name])
        elif amount is None:
            due = int((yield ToolCall("balance", {"account": source})))
        yield ToolCall("transfer", {"source": payer, "target": target, "amount": due})
    yield ToolCall("balance", {"account": task.data["orders"][-1][1]})


def make_vec(**options: Any) -> ToolVectorEnv:
    """What `gymnasium.make_vec` calls."""
    return ToolVectorEnv.of(LedgerEnv, **options)
