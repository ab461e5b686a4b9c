"""A real engine: its start, and a rollout's rate against that of vLLM's own `LLM.generate` on the same prompts."""

import asyncio
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import psutil
from figures import Figure
from formats import embedded_format

from toolgym.agents.policy import SampleRequest, Sampling
from toolgym.agents.tiny import TINY_MODEL
from toolgym.agents.vllm_policy import VLLMPolicy
from toolgym.rollout.collector import Collector
from toolgym.rollout.limits import Limits
from toolgym.rollout.seeds import sampling_seed
from toolgym.rollout.trajectory import Trajectory

NOTES = """\
Rollout against LLM.generate: Ledger with the embedded model, 64 slots, groups of 8, an engine each of the same settings
(64 sequences at once, 2,048 tokens, prefix caching), in turns in one program; medians of the rounds. Every round has
tasks of its own and the prefix cache of LLM is emptied, so that neither engine has seen a prompt before; LLM.generate
gets the prompts of all turns of the round at once, first turns first, and samples as many tokens of each as the rollout
did. With the same seeds and logprobs the difference is the rollout's own. Tokenising, tools and the collector share 2
cores with the engine, whose model has 2 million parameters: a larger one would leave them time while it computes. At
the end of a round slots run empty, while LLM.generate has its batch full to the last prompts; and a turn waits for the
one before it. The bare engine is the policy's own with the same requests, at most 64 at a time; it has seen their
prompts in the rollout."""
LIMITS = Limits(max_trajectory_tokens=2_048, max_completion_tokens=256)
SETTINGS: dict[str, Any] = {"max_model_len": 2_048, "max_num_seqs": 64}
# What the policy sets of itself, for the engine beside it.
_SAME: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enable_prefix_caching": True,
    "logprobs_mode": "processed_logprobs",
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
    "dtype": "float32",
    "enforce_eager": True,
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 32_768,
}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
_GROUP = 8
_ROUNDS = (8, 40, 40, 40)  # tasks; the first round warms up
_ENDING = 30.0  # seconds


@dataclass(frozen=True)
class Prompt:
    """One turn, to be sampled again."""

    ids: list[int]
    count: int
    seed: int
    turn: int


@dataclass
class Rates:
    """Sampled tokens a second, by round."""

    rollout: list[float] = field(default_factory=list)
    generate: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)

    def ratio(self, other: list[float]) -> str:
        """The rollout's rate by another's, round by round."""
        ratios = [ours / theirs for ours, theirs in zip(self.rollout, other, strict=True)]
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def figures() -> list[Figure]:
    """Rounds in turns: rollout, `LLM.generate`, the policy's own engine."""
    os.environ.update({name: value for name, value in _ENVIRONMENT.items() if name not in os.environ})
    rates = Rates()
    began = time.perf_counter()
    with VLLMPolicy(TINY_MODEL, **SETTINGS) as policy:
        started = time.perf_counter() - began
        with offline_engine() as llm, rollouts(policy) as collect:
            for number in range(len(_ROUNDS)):
                began = time.perf_counter()
                prompts = prompts_of(collect(number))
                rollout = _rate(prompts, time.perf_counter() - began)
                measured = (rollout, generate(llm, prompts), generate(llm, prompts, plain=True), bare(policy, prompts))
                if number > 0:
                    for kept, rate in zip(vars(rates).values(), measured, strict=True):
                        kept.append(rate)
    engines = [child for child in psutil.Process().children(recursive=True) if child.name().startswith("VLLM")]
    if left := psutil.wait_procs(engines, timeout=_ENDING)[1]:
        raise AssertionError(f"left running: {left}")
    rows = {"LLM.generate, same seeds and logprobs": rates.generate, "LLM.generate without them": rates.plain}
    rate = f"{statistics.median(rates.rollout):,.0f} a second"
    return [
        Figure("engine start", f"{started:.0f} s"),
        Figure("sampled tokens of a rollout, 64 slots, vLLM", rate),
        *(
            Figure(f"that by {what}", f"{rates.ratio(kept)} of {statistics.median(kept):,.0f} a second", goal)
            for (what, kept), goal in zip(rows.items(), ("0.95", ""), strict=True)
        ),
        Figure(
            "that by the bare engine", f"{rates.ratio(rates.bare)} of {statistics.median(rates.bare):,.0f} a second"
        ),
    ]


@contextmanager
def rollouts(policy: VLLMPolicy) -> "Iterator[Any]":
    """A function that collects the trajectories of a round by its number."""
    envs = gymnasium.make_vec("toolgym/Ledger-v0", num_envs=64)
    tasks = envs.tasks.take(sum(_ROUNDS))  # type: ignore[attr-defined]
    collector = Collector(envs, policy, embedded_format(), LIMITS, Sampling(temperature=1.0))

    def collect(number: int) -> list[Trajectory]:
        first = sum(_ROUNDS[:number])
        return collector.collect(tasks[first : first + _ROUNDS[number]], _GROUP, first_index=first)

    try:
        yield collect
    finally:
        envs.close()


@contextmanager
def offline_engine() -> Iterator[Any]:
    """An `LLM` with the settings of the policy's engine."""
    from vllm import LLM  # noqa: PLC0415 - heavy

    llm = LLM(str(TINY_MODEL), **_SAME, **SETTINGS)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def prompts_of(trajectories: Sequence[Trajectory]) -> list[Prompt]:
    """All turns, first turns first, as a rollout asks for them."""
    found = []
    for trajectory in trajectories:
        if trajectory.failure is not None:
            raise AssertionError(f"{trajectory.id} failed: {trajectory.failure}")
        ids = trajectory.input_ids.tolist()
        actions = [segment for segment in trajectory.segments if segment.kind == "action"]
        for turn, action in enumerate(actions):
            seed = sampling_seed(trajectory.seed, trajectory.task_index, trajectory.member, turn)
            found.append(Prompt(ids[: action.start], action.end - action.start, seed, turn))
    return sorted(found, key=lambda prompt: prompt.turn)


def generate(llm: Any, prompts: Sequence[Prompt], *, plain: bool = False) -> float:
    """Tokens a second of `LLM.generate`; ``plain``: without seeds and logprobs."""
    from vllm import SamplingParams  # noqa: PLC0415 - heavy

    if not llm.reset_prefix_cache():
        raise AssertionError("the prefix cache could not be reset")
    parameters = [
        SamplingParams(
            temperature=1.0,
            max_tokens=prompt.count,
            ignore_eos=True,
            detokenize=False,
            seed=None if plain else prompt.seed,
            logprobs=None if plain else 0,
        )
        for prompt in prompts
    ]
    texts = [{"prompt_token_ids": prompt.ids} for prompt in prompts]
    began = time.perf_counter()
    outputs = llm.generate(texts, parameters, use_tqdm=False)
    took = time.perf_counter() - began
    if [len(output.outputs[0].token_ids) for output in outputs] != [prompt.count for prompt in prompts]:
        raise AssertionError("LLM.generate sampled other lengths")
    return _rate(prompts, took)


def bare(policy: VLLMPolicy, prompts: Sequence[Prompt]) -> float:
    """Tokens a second of the policy's engine, 64 requests at a time."""

    async def all_of_them() -> float:
        gate = asyncio.Semaphore(64)

        async def one(prompt: Prompt) -> None:
            async with gate:
                await policy.sample(SampleRequest(prompt.ids, prompt.count, seed=prompt.seed))

        began = time.perf_counter()
        await asyncio.gather(*map(one, prompts))
        return _rate(prompts, time.perf_counter() - began)

    return asyncio.run(all_of_them())


def _rate(prompts: Sequence[Prompt], seconds: float) -> float:
    return sum(prompt.count for prompt in prompts) / seconds
