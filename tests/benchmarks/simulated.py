"""A workload whose times are all drawn beforehand, an engine that keeps to them, and the environment beside it."""

import asyncio
import functools
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Completion, FinishReason, SampleRequest
from toolgym.envs import AssistantMessage, Episode, Task, ToolCall, ToolEnv, tool

_LEAST, _MOST = 24, 1_024  # tokens: the least that hold a call, and the most that a turn may have
_ANSWER = "Page found: every ship that left the harbour before noon came back by night, but for two of them. " * 3
_WORDS = "It may be on another page, so let us look there, and note what this one said of the harbour. "


@dataclass(frozen=True)
class Workload:
    """What is drawn, all of it by (seed, task, turn). Times are in seconds of the workload's own clock.

    Attributes:
        trajectories: how many.
        turns: the number of turns of each is uniform in [1, turns]; all but its last turn call a tool.
        tokens: mean length of a turn; log-normal.
        spread: standard deviation of the logarithm of that length.
        wait: median of a tool's time; log-normal with standard deviation 1 of the logarithm.
        slow_part: part of the calls that take ``slow`` seconds instead.
        slow: seconds.
        rate: tokens a second of each sequence in the engine.
    """

    trajectories: int = 512
    turns: int = 8
    tokens: float = 150.0
    spread: float = 0.6
    wait: float = 0.2
    slow_part: float = 0.01
    slow: float = 20.0
    rate: float = 50.0

    def draw(self, seed: int) -> list[Task]:
        """The tasks; ``data`` has ``tokens`` (one for each turn) and ``waits`` (one for each call)."""
        return [self._task(k, np.random.default_rng([seed, k])) for k in range(self.trajectories)]

    def _task(self, number: int, rng: np.random.Generator) -> Task:
        turns = int(rng.integers(1, self.turns + 1))
        scale = self.tokens * np.exp(-(self.spread**2) / 2)  # makes ``tokens`` the mean
        tokens = np.clip(np.rint(scale * np.exp(self.spread * rng.standard_normal(turns))), _LEAST, _MOST)
        waits = self.wait * np.exp(rng.standard_normal(turns - 1))
        waits[rng.random(turns - 1) < self.slow_part] = self.slow
        data = {"tokens": [int(count) for count in tokens], "waits": [float(wait) for wait in waits]}
        return Task(f"wait:{number}", f"Find out about ship {number}.", data)


class WaitingEnv(ToolEnv):
    """Its tool takes as long as was drawn.

    Args:
        tasks: as drawn by a workload.
        speed: how much faster than the workload's clock the tools run.
        **options: see `ToolEnv`.
    """

    system_prompt = "Find out about ships. Then say what you found."

    def __init__(self, tasks: list[Task], *, speed: float = 1.0, **options: Any) -> None:
        self._speed = speed
        super().__init__(tasks, **options)

    async def setup(self, task: Task) -> None: ...

    @tool
    async def look_up(self, page: int) -> str:
        """Look a page up."""
        assert self.task is not None
        await asyncio.sleep(self.task.data["waits"][page] / self._speed)
        return _ANSWER

    async def score(self, episode: Episode) -> float:
        return 1.0


class Script:
    """Completions as long as was drawn: words, then the call or the answer's end, written once and put together.

    Args:
        chat: the chat format.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._words = chat.write(AssistantMessage(_WORDS * (_MOST // 16)))[:_MOST]

    @functools.cache  # noqa: B019 - it lives as long as the benchmark
    def _tail(self, turn: int, last: bool) -> list[int]:
        calls = () if last else (ToolCall("look_up", {"page": turn}),)
        return self._chat.write(AssistantMessage("There." if last else "", calls))

    def completion(self, request: SampleRequest) -> Completion:
        """The next turn; cut at ``max_tokens``, as an engine would."""
        assert request.task is not None
        lengths = request.task.data["tokens"]
        tail = self._tail(request.turn, request.turn == len(lengths) - 1)
        whole = [*self._words[: lengths[request.turn] - len(tail)], *tail]
        ids = np.asarray(whole[: request.max_tokens], dtype=np.int32)
        finish = FinishReason.STOP if len(ids) == len(whole) else FinishReason.LENGTH
        fed = np.asarray(request.prompt_ids, dtype=np.int32)
        return Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), finish, fed)


class SimulatedEngine:
    """A policy that takes as long as an engine would: a fixed rate for each sequence, and a bounded batch.

    At most ``batch`` sequences are sampled at once; later ones queue, first come, first served. ``n`` samples of one
    request are ``n`` sequences, and are answered together. The engine's own times are exact, as if it ran in a process
    of its own: where the event loop is late to see that a sequence has ended, the next one has begun all the same, at
    that end or when it was asked for, whichever is later. What the loop is late for is late for the caller alone.

    Args:
        chat: the chat format.
        batch: sequences at once.
        rate: tokens a second of each sequence.
    """

    def __init__(self, chat: ChatFormat, *, batch: int, rate: float) -> None:
        self._script, self._free, self._rate = Script(chat), batch, rate
        self._queue: deque[tuple[asyncio.Future[None], float, float]] = deque()

    async def sample(self, request: SampleRequest) -> list[Completion]:
        """See `Policy.sample`."""
        completion = self._script.completion(request)
        await asyncio.gather(*(self._ended(len(completion.token_ids) / self._rate) for _ in range(request.n)))
        return [completion] * request.n

    def _ended(self, seconds: float) -> "asyncio.Future[None]":
        """Queue a sequence; the future is done when it has been sampled."""
        loop = asyncio.get_running_loop()
        entry = (loop.create_future(), loop.time(), seconds)
        if self._free:
            self._free -= 1
            self._start(entry, entry[1])
        else:
            self._queue.append(entry)
        return entry[0]

    def _start(self, entry: "tuple[asyncio.Future[None], float, float]", at: float) -> None:
        end = at + entry[2]
        entry[0].get_loop().call_at(end, self._end, entry[0], end)

    def _end(self, future: "asyncio.Future[None]", at: float) -> None:
        if not future.done():
            future.set_result(None)
        if self._queue:
            entry = self._queue.popleft()
            self._start(entry, max(at, entry[1]))
        else:
            self._free += 1
