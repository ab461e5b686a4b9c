"""A small engine without seeds: long prompts, its load, and its death in an update."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from logprobs import PROMPT, agrees

from toolgym.agents.policy import (
    Completion,
    EngineLoad,
    PolicyFailure,
    SampleRequest,
    SeedWarning,
)
from toolgym.agents.sampling import sample_one
from toolgym.agents.tiny import TINY_MODEL
from toolgym.agents.vllm_policy import VLLMPolicy

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def small() -> Iterator[VLLMPolicy]:
    """An engine that chunks prefills, without seeds, and has room for few tokens."""
    with pytest.warns(SeedWarning, match="results depend on scheduling"):
        policy = VLLMPolicy(
            TINY_MODEL,
            max_model_len=512,
            max_num_seqs=32,
            seeds=False,
            enable_chunked_prefill=True,
            max_num_batched_tokens=64,
            block_size=32,
            num_gpu_blocks_override=33,
        )
    with policy:
        yield policy


def test_an_engine_without_seeds_survives_long_prompts_in_chunks(small: VLLMPolicy) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 500, size=int(rng.integers(300, 480))).astype(np.int32) for _ in range(16)]

    async def main() -> list[Completion]:
        requests = [SampleRequest(prompt, 20, seed=k) for k, prompt in enumerate(prompts)]
        return await asyncio.gather(*(sample_one(small, request) for request in requests))

    for prompt, completion in zip(prompts, asyncio.run(main()), strict=True):
        assert agrees(completion, {0: TINY_MODEL}, prompt)
    assert small.description["seeds"] is False


def test_the_load_is_what_the_engine_can_hold(small: VLLMPolicy) -> None:
    """The cache has room for 1,024 tokens: two sequences of 512, or a few more shorter ones."""
    seen: list[EngineLoad] = []

    async def main() -> None:
        asking = [asyncio.create_task(small.sample(SampleRequest([k] * 30, 470))) for k in range(8)]
        everything = asyncio.gather(*asking)
        while not everything.done():
            seen.append(small.load())
            await asyncio.sleep(0.005)
        await everything

    asyncio.run(main())
    told = [load for load in seen if load.kv_usage is not None and load.running is not None]
    assert max(load.kv_usage for load in told if load.kv_usage is not None) > 0.9
    # Two to a few of them run at a time at the end, and the others wait, while the cache is nearly full.
    assert any(
        0 < load.running < 4 <= (load.waiting or 0) and (load.kv_usage or 0) > 0.8 for load in told if load.running
    )
    assert all(0 <= (load.running or 0) + (load.waiting or 0) <= 8 for load in seen)
    assert small.load() == EngineLoad(0, 0, 0.0)


def test_an_engine_that_dies_in_an_update_is_a_policy_failure_and_leaves_nothing(
    small: VLLMPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of this engine."""
    engine = small._box[0]
    engine_loads = type(engine).collective_rpc
    mine: list[psutil.Process] = []
    core = {process.pid for process in engine.engine_core.resources.engine_manager.processes}

    def fatal(*arguments: Any, **options: Any) -> Any:
        mine.extend(process for pid in core for process in psutil.Process(pid).children(recursive=True))
        mine.extend(psutil.Process(pid) for pid in core)
        for process in mine:
            process.kill()
        return engine_loads(*arguments, **options)

    monkeypatch.setattr(type(engine), "collective_rpc", fatal)

    async def main() -> None:
        running = [asyncio.create_task(sample_one(small, SampleRequest([k] * 30, 400))) for k in range(8)]
        await small.sample(SampleRequest(PROMPT, 2))
        with pytest.raises(PolicyFailure, match=r"dead|died") as failure:
            await asyncio.wait_for(small.aupdate_weights(TINY_MODEL), 60)
        assert failure.value.permanent
        for ended in await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 60):
            assert isinstance(ended, PolicyFailure)
            assert ended.permanent

    asyncio.run(main())
    small.close()
    with pytest.raises(PolicyFailure, match="closed") as failure:
        small.update_weights(TINY_MODEL)
    assert failure.value.permanent
    assert mine
    assert not psutil.wait_procs(mine, timeout=20)[1]
    assert sum(thread.name == "toolgym vllm" for thread in threading.enumerate()) <= 1
