"""What the collector itself costs: CPU of a turn, delay of the event loop, memory of what it brings back."""

import asyncio
import contextlib
import gc
import itertools
import math
import random
import time
import tracemalloc
from collections.abc import Sequence

import numpy as np
from figures import Figure
from formats import embedded_format, real_format
from simulated import SimulatedEngine, WaitingEnv, Workload

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Completion, Policy, SampleRequest
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.envs import Task, ToolMessage, ToolVectorEnv
from toolgym.envs.catalog.ledger import LedgerEnv, solve
from toolgym.rollout.collector import Collector
from toolgym.rollout.limits import Limits
from toolgym.rollout.trajectory import SegmentKind, Trajectory

NOTES = """\
CPU a turn: user and system time of all threads, in episodes of Ledger (5 turns on average, about 23 tokens sampled in
each) whose completions are taken from a table. A quarter of it is the chat format (named alone); the rest is spread
thin: a change of thread there and back for each of parse and extend, a task and a time-out for the policy and for the
tool, the check of arguments by pydantic, the record's own checks, seeds, garbage collection. Beyond 64 slots it grows
by what caches no longer hold. Delay of the loop: a heartbeat every 5 ms on the loop of the environments, each beat
measured from when it should have run, also those that were missed meanwhile; 10,000 slots from their start on, and a
policy that answers after 2 to 18 s. What is over the goal comes from the start, when all episodes open, and from passes
of Python's garbage collector over what is young; full ones are held off (with them p99 was 1.3 s). Bytes a token: the
arrays alone, and beside it all that stays in memory for a finished trajectory, as tracemalloc sees it: messages, turns,
segments, and what numpy and Python need for each object; it weighs the more the shorter the trajectory is."""
LIMITS = Limits(max_trajectory_tokens=16_384, max_completion_tokens=1_024)
_TASKS = 64  # different ones; they are repeated
_FLOOD, _SECONDS, _BEAT = 10_000, 30.0, 0.005
Table = dict[tuple[str, int], list[Completion]]


class Replay:
    """Answers at once from a table of what another policy has said."""

    def __init__(self, table: Table) -> None:
        self.table = table

    async def sample(self, request: SampleRequest) -> list[Completion]:
        """See `Policy.sample`."""
        assert request.task is not None
        return self.table[request.task.id, request.turn]


class SlowReplay(Replay):
    """Answers from the table after 2 to 18 s, drawn by seed; counts who is waiting."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self.waiting = self.begun = self.answered = 0
        self._rng = random.Random(0)

    async def sample(self, request: SampleRequest) -> list[Completion]:
        """See `Policy.sample`."""
        self.waiting += 1
        self.begun += request.turn == 0
        try:
            await asyncio.sleep(self._rng.uniform(2.0, 18.0))
        finally:
            self.waiting -= 1
        self.answered += 1
        return await super().sample(request)


class _Recorder:
    def __init__(self, policy: Policy) -> None:
        self._policy, self.table = policy, Table()

    async def sample(self, request: SampleRequest) -> list[Completion]:
        said = await self._policy.sample(request)
        assert request.task is not None
        self.table[request.task.id, request.turn] = said
        return said


def ledger_script(chat: ChatFormat) -> Policy:
    """The reference solution, written in a chat format."""
    return ScriptedPolicy(chat, lambda request, member: solve(request.task, request.messages))  # type: ignore[arg-type]


def record(envs: ToolVectorEnv, chat: ChatFormat, policy: Policy, tasks: Sequence[Task]) -> Table:
    """What a policy says to some tasks. It also starts threads and fills caches."""
    recorder = _Recorder(policy)
    _check(Collector(envs, recorder, chat, LIMITS, env_id="bench").collect(tasks))
    return recorder.table


def figures() -> list[Figure]:
    """All of it, with both tokenizers."""
    rows = []
    for name, chat in (("embedded tokenizer", embedded_format()), ("SmolLM2's tokenizer", real_format())):
        for slots, episodes in ((64, 1_024), (4_096, 5_120)):
            spent, alone = cpu_of_turns(LedgerEnv, chat, slots, episodes)
            what = f"CPU a turn, {slots:,} in flight, {name}"
            rows.append(Figure(what, f"{spent:.2f} ms, of that the chat format {alone:.2f} ms", "0.3 ms"))
    return [*rows, *loop_delay(), *memory()]


def cpu_of_turns(env_class: type[LedgerEnv], chat: ChatFormat, slots: int, episodes: int) -> tuple[float, float]:
    """CPU milliseconds of a turn, in the collector and in the chat format alone."""
    envs = ToolVectorEnv.of(env_class, num_envs=slots)
    tasks = envs.tasks.take(_TASKS)
    table = record(envs, chat, ledger_script(chat), tasks)
    collector = Collector(envs, Replay(table), chat, LIMITS, env_id="bench")
    many = list(itertools.islice(itertools.cycle(tasks), episodes))
    gc.collect()
    began = time.process_time()
    trajectories = collector.collect(many)
    spent = time.process_time() - began
    _check(trajectories)
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    alone = _chat_alone(chat, trajectories[: len(tasks)], envs.tools.schemas)
    envs.close()
    return spent / turns * 1e3, alone


def _chat_alone(chat: ChatFormat, trajectories: Sequence[Trajectory], tools: Sequence[dict[str, object]]) -> float:
    """CPU milliseconds of a turn that opening, parsing and extending take by themselves."""
    work = []
    for trajectory in trajectories:
        ids = trajectory.input_ids.tolist()
        answers = [message for message in trajectory.messages if isinstance(message, ToolMessage)]
        actions = [segment for segment in trajectory.segments if segment.kind is SegmentKind.ACTION]
        opening = trajectory.messages[:2]  # the system's, the user's
        work.append((opening, [(ids[: s.start], ids[s.start : s.end]) for s in actions], answers))
    began = time.process_time()
    for opening, turns, answers in work:
        chat.open(opening, tools)
        for (prompt, sampled), answer in itertools.zip_longest(turns, answers):
            chat.parse(sampled, prompt, tools)
            if answer is not None:
                chat.extend(prompt, sampled, [answer], tools)
    return (time.process_time() - began) / sum(len(turns) for _, turns, _ in work) * 1e3


class Heartbeat:
    """How late a loop is, for everything that should have run at a certain time.

    A loop that stood still for a second has missed all the beats of it, and each of them counts, with its own delay.

    Attributes:
        delays: seconds, one for each beat.
        waiting: how many waited for the policy, at each look.
        begun: how many beats there were when all slots had asked the policy for their first turn; None: not all have.
    """

    def __init__(self, policy: SlowReplay) -> None:
        self.delays: list[float] = []
        self.waiting: list[int] = []
        self.begun: int | None = None
        self._policy = policy

    async def run(self, seconds: float) -> None:
        """Beat for so long, on the loop that awaits this."""
        clock = asyncio.get_running_loop().time
        due = clock() + _BEAT
        end = clock() + seconds
        while due < end:
            await asyncio.sleep(due - clock())
            self.waiting.append(self._policy.waiting)
            if self.begun is None and self._policy.begun >= _FLOOD:
                self.begun = len(self.delays)
            while due <= (now := clock()):
                self.delays.append(now - due)
                due += _BEAT


def loop_delay() -> list[Figure]:
    """With 10,000 episodes in flight, for half a minute from their start on."""
    chat = real_format()
    envs = ToolVectorEnv.of(LedgerEnv, num_envs=_FLOOD)
    tasks = envs.tasks.take(_TASKS)
    policy = SlowReplay(record(envs, chat, ledger_script(chat), tasks))
    collector = Collector(envs, policy, chat, LIMITS, env_id="bench")
    heart = Heartbeat(policy)
    many = list(itertools.islice(itertools.cycle(tasks), 20 * _FLOOD))  # more than can end meanwhile

    async def collect() -> None:
        async for trajectory in collector.astream(many):
            _check([trajectory])

    async def for_a_while() -> None:
        collecting = asyncio.create_task(collect())
        await asyncio.wrap_future(envs.loop.submit(heart.run(_SECONDS)))
        collecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await collecting

    asyncio.run(for_a_while())
    envs.close()
    after = heart.delays[heart.begun :] if heart.begun else []
    return [
        Figure(f"delay of the event loop, {_FLOOD:,} in flight", _delays(heart.delays), "p99 50 ms"),
        Figure("of that, once all have begun", _delays(after) if after else f"not within {_SECONDS:g} s"),
        Figure(
            "meanwhile",
            f"{policy.answered / _SECONDS:,.0f} answers a second, {np.median(heart.waiting):,.0f} slots wait for one",
        ),
    ]


def _delays(seconds: Sequence[float]) -> str:
    p50, p99, most = np.percentile(seconds, (50, 99, 100)) * 1e3
    return f"p99 {p99:,.0f} ms (p50 {p50:,.1f} ms, most {most:,.0f} ms)"


def memory() -> list[Figure]:
    """What finished trajectories hold, short ones and longer ones."""
    embedded, real = embedded_format(), real_format()
    ledger = ToolVectorEnv.of(LedgerEnv, num_envs=64)
    short = ledger.tasks.take(_TASKS)
    tasks = Workload(trajectories=_TASKS, wait=1e-6, slow_part=0.0).draw(seed=0)
    waiting = ToolVectorEnv.of(WaitingEnv, num_envs=64, tasks=tasks)
    rows = [
        _held("Ledger", ledger, embedded, ledger_script(embedded), short, 8),
        _held("150 tokens a turn", waiting, real, SimulatedEngine(real, batch=64, rate=math.inf), tasks, 4),
    ]
    ledger.close()
    waiting.close()
    return rows


def _held(
    name: str, envs: ToolVectorEnv, chat: ChatFormat, policy: Policy, tasks: Sequence[Task], repeats: int
) -> Figure:
    replay = Replay(record(envs, chat, policy, tasks))
    collector = Collector(envs, replay, chat, LIMITS, env_id="bench")
    tracemalloc.start()
    try:
        collector.collect(tasks)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        trajectories = collector.collect(list(tasks) * repeats)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    _check(trajectories)
    tokens = sum(map(len, trajectories))
    arrays = sum(_room(getattr(t, name)) for t in trajectories for name in _COLUMNS)
    text = f"{arrays / tokens:.1f} in the arrays, {held / tokens:.1f} in all"
    return Figure(f"bytes a token held, {name} ({tokens / len(trajectories):,.0f} tokens each)", text, "13")


_COLUMNS = ("input_ids", "loss_mask", "logprobs", "versions")


def _room(view: np.ndarray) -> int:
    """Bytes of the array that a view is of."""
    return int(view.nbytes if view.base is None else view.base.nbytes)


def _check(trajectories: Sequence[Trajectory]) -> None:
    """A figure of episodes that went wrong would be of something else."""
    if wrong := [t for t in trajectories if t.failure is not None or not t.solved]:
        raise AssertionError(
            f"{len(wrong)} of {len(trajectories)} went wrong: {wrong[0].stop_reason} {wrong[0].failure}"
        )
