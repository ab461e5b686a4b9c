"""Prints what things cost beside their goals, and writes them to results.md. Run it on an idle machine: make bench."""

import asyncio
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium

from toolgym.agents.chat import load_chat_format
from toolgym.agents.policy import SampleRequest, Sampling
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.agents.tiny import TINY_MODEL
from toolgym.agents.vllm_policy import VLLMPolicy
from toolgym.envs import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage
from toolgym.envs.catalog import ledger
from toolgym.envs.sandbox import latency
from toolgym.envs.sandbox.docker_backend import DockerBackend
from toolgym.envs.sandbox.sandbox import SandboxPool
from toolgym.rollout.collector import Collector
from toolgym.rollout.limits import Limits

RESULTS = Path(__file__).with_name("results.md")
NOTES = """\
What limits a figure that misses its goal. extend + parse: the renderers library, which encodes each part of a
turn by itself and attributes every token to its text; it is flat in the history. CPU a turn: a third of it is
that, the rest the scripted policy's own writing, asyncio tasks, and a thread each for `setup` and `score` of
every episode. Rollout against the bare engine: on 2 cores, tokenising, tools and the collector share the cores
with the engine. Sandbox: a question and its answer alone cost 0.3 ms on the pool's loop and 0.5 ms for a blocking
caller (the engine copies the stream twice, and there are two changes of thread); each call also sends a word that its
code has begun, so that a box that dies before is replaced without a failure, and reads memory and CPU from /proc. A
stateless call is a fork of a template that has seen no request (made ahead of time), which gives up its rights under
Landlock: about 1.5 ms of CPU. On 2 cores that CPU,
with the engine's and the client's, bounds the rates; with each stateless call its box is pinged before and reset after.
With 32 boxes the stateless rate is 210 to 235 in a process that holds nothing else, and falls to a quarter of it in
one that has imported the rest of Toolgym: not explained yet.
"""
LIMITS = Limits(max_trajectory_tokens=2_048, max_completion_tokens=256)


@dataclass(frozen=True)
class Figure:
    """One measurement."""

    what: str
    value: str
    goal: str = ""


def best(work: Callable[[], object], rounds: int = 5) -> float:
    """The least wall time of several rounds, in seconds."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def import_time() -> list[Figure]:
    """Fresh interpreters: ours against Gymnasium's own import."""

    def importing(what: str) -> float:
        return best(lambda: subprocess.run([sys.executable, "-c", f"import {what}"], check=True))

    bare, theirs, package, ours = (importing(what) for what in ("sys", "gymnasium", "toolgym", "toolgym.envs"))
    return [
        Figure("import toolgym", f"{package - bare:.2f} s", "under 0.5 s"),
        Figure("import toolgym.envs", f"{ours - bare:.2f} s, {(ours - bare) / (theirs - bare):.1f}x gymnasium alone"),
    ]


def vector_steps() -> list[Figure]:
    """Steps of a vector whose tools cost next to nothing, against Gymnasium's serial one."""
    action = AssistantMessage("", (ToolCall("calculate", {"expression": "6 * 7"}),))
    rates = {}
    for mode in ("vector_entry_point", "sync"):
        envs = gymnasium.make_vec("toolgym/Calculator-v0", num_envs=64, vectorization_mode=mode)
        envs.reset(seed=0)
        rates[mode] = 64 * 20 / best(lambda envs=envs: [envs.step([action] * 64) for _ in range(20)])  # type: ignore[misc]
        envs.close()
    ours, theirs = rates["vector_entry_point"], rates["sync"]
    return [Figure("env steps, 64 slots", f"{ours:,.0f} a second, {ours / theirs:.1f}x SyncVectorEnv")]


def chat_turns() -> list[Figure]:
    """Extend and parse of one turn, early and late in a conversation."""
    chat = load_chat_format(TINY_MODEL)
    said = chat.write(AssistantMessage("", (ToolCall("balance", {"account": "ann"}),)))
    answer = [ToolMessage("The balance is 42. " * 20)]
    ids = chat.open([SystemMessage("Be brief."), UserMessage("Report ann.")], [])
    costs = {}
    for turn in range(1, 101):
        delta = chat.extend(ids, said, answer)
        if turn in (2, 100):
            work = (partial(chat.extend, ids, said, answer), partial(chat.parse, said, ids))
            costs[turn] = sum(best(part, 50) for part in work) * 1e3
        ids = [*ids, *said, *delta]
    late = f"{costs[100]:.2f} ms at turn 100 ({len(ids):,} tokens)"
    return [Figure("extend + parse", f"{costs[2]:.2f} ms at turn 2, {late}", "0.2 ms, flat in the history")]


def collector_overhead() -> list[Figure]:
    """CPU time of a turn with a policy that costs nothing but its writing."""
    chat = load_chat_format(TINY_MODEL)
    envs = gymnasium.make_vec("toolgym/Ledger-v0", num_envs=64)
    policy = ScriptedPolicy(chat, lambda request, member: ledger.solve(request.task, request.messages))  # type: ignore[arg-type]
    collector = Collector(envs, policy, chat, LIMITS)
    collector.collect(16, 4)
    began = time.process_time()
    turns = sum(len(trajectory.turns) for trajectory in collector.collect(64, 4))
    spent = time.process_time() - began
    envs.close()
    cost = f"{spent / turns * 1e3:.2f} ms over {turns} turns"
    return [Figure("CPU a turn, scripted policy, 64 slots", cost, "0.3 ms")]


def engine() -> list[Figure]:
    """A real engine: its start, and a rollout's rate against that of the bare engine on the same prompts."""
    began = time.perf_counter()
    with VLLMPolicy(TINY_MODEL, max_model_len=2_048) as policy:
        started = time.perf_counter() - began
        chat = load_chat_format(TINY_MODEL)
        envs = gymnasium.make_vec("toolgym/Ledger-v0", num_envs=64)
        collector = Collector(envs, policy, chat, LIMITS, Sampling(temperature=1.0))
        collector.collect(16, 4)
        began = time.perf_counter()
        trajectories = collector.collect(64, 4)
        rollout = sum(int(t.loss_mask.sum()) for t in trajectories) / (time.perf_counter() - began)
        envs.close()

        async def bare() -> float:
            requests = [
                SampleRequest(t.input_ids[: s.start].tolist(), s.end - s.start, stop_token_ids=())
                for t in trajectories
                for s in t.segments
                if s.kind == "action"
            ]
            gate = asyncio.Semaphore(64)

            async def one(request: SampleRequest) -> int:
                async with gate:
                    return len((await policy.sample(request))[0].token_ids)

            began = time.perf_counter()
            return sum(await asyncio.gather(*map(one, requests))) / (time.perf_counter() - began)

        alone = asyncio.run(bare())
    return [
        Figure("engine start", f"{started:.0f} s"),
        Figure(
            "sampled tokens, 64 slots, vLLM",
            f"{rollout:,.0f} a second, {rollout / alone:.2f} of the bare engine",
            "0.95",
        ),
    ]


def sandbox() -> list[Figure]:
    """Calls of the Docker sandbox, beside what the engine's own ways cost for the same snippet."""
    figures = []
    calls = {}
    with SandboxPool("docker", size=1, limits=latency.LIMITS) as pool:
        for entry in latency.measure_calls(pool):
            calls[entry.what] = entry.p50
            goal = "" if entry.goal is None else f"{entry.goal * 1e3:g} ms"
            figures.append(Figure(f"sandbox: {entry.what}", _milliseconds(entry), goal))
        figures.append(Figure("sandbox: a flooded box replaced", f"{latency.measure_refill(pool) * 1e3:.0f} ms"))
    for boxes in (1, 8, 32):
        with SandboxPool("docker", size=boxes, limits=latency.LIMITS) as pool:  # a larger one would grow meanwhile
            for rate in asyncio.run(latency.measure_rate(pool, boxes)):
                goal = "" if rate.goal is None else f"{rate.goal:g} a second"
                what = f"sandbox: {rate.what} calls, {rate.boxes} boxes"
                figures.append(Figure(what, f"{rate.value:,.0f} a second", goal))
    for entry in latency.measure_start(DockerBackend(latency.LIMITS)):
        times = entry.p50 / calls["stateless call"]
        goal = "20x a stateless call" if "exec" in entry.what else ""
        figures.append(Figure(f"sandbox: {entry.what}", f"{_milliseconds(entry)}, {times:.0f}x a stateless call", goal))
    return figures


def _milliseconds(entry: latency.Latency) -> str:
    return f"p50 {entry.p50 * 1e3:.2f} ms, p99 {entry.p99 * 1e3:.2f} ms"


def main() -> None:
    """Measure, print, write."""
    parts = (import_time, vector_steps, chat_turns, collector_overhead, sandbox, engine)
    figures = [f for part in parts for f in part()]
    rows = [f"| {f.what} | {f.value} | {f.goal} |" for f in figures]
    table = "\n".join(["| what | measured | goal |", "|---|---|---|", *rows])
    head = f"# Benchmark results\n\nBy `make bench`, Python {platform.python_version()}, 2 cores. Trust the ratios.\n\n"
    print(table)
    RESULTS.write_text(f"{head}{table}\n\n{NOTES}")


if __name__ == "__main__":
    main()
