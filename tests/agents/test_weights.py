"""Weights that change under a real engine: between requests, in their middle, and when something is wrong."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from logprobs import PROMPT, agrees, reference
from safetensors.torch import load_file, save_file

from toolgym.agents.policy import (
    Completion,
    EngineLoad,
    FinishReason,
    LoadReporting,
    PolicyFailure,
    SampleRequest,
    Updatable,
)
from toolgym.agents.sampling import continued, sample_all, sample_one
from toolgym.agents.tiny import TINY_MODEL
from toolgym.agents.vllm_policy import VLLMPolicy
from toolgym.envs import ConfigurationError

pytestmark = pytest.mark.vllm


def copy_of(folder: Path, name: str) -> Path:
    made = folder / name
    shutil.copytree(TINY_MODEL, made, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return made


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two more sets of weights for the embedded model."""
    folder = tmp_path_factory.mktemp("weights")
    made = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        weights = load_file(TINY_MODEL / "model.safetensors")
        moved = {k: v + 0.02 * torch.randn(v.shape, generator=generator) for k, v in weights.items()}
        made.append(copy_of(folder, f"moved_{seed}"))
        save_file(moved, made[-1] / "model.safetensors", metadata={"format": "pt"})
    return made


@pytest.fixture
def restored(engine: VLLMPolicy) -> Iterator[VLLMPolicy]:
    """The engine that all tests share, which has its own weights again afterwards."""
    yield engine
    engine.update_weights(TINY_MODEL)


def ask(policy: VLLMPolicy, request: SampleRequest) -> Completion:
    return asyncio.run(sample_one(policy, request))


async def under_way(policy: VLLMPolicy, tokens: int) -> None:
    """Return when requests that run already have got about so many tokens further."""
    await sample_one(policy, SampleRequest(PROMPT, tokens))


async def closed(policy: VLLMPolicy) -> "asyncio.Task[Completion]":
    """Return when an update lets nobody in: a request that waits at the gate."""
    while True:
        asking = asyncio.create_task(sample_one(policy, SampleRequest(PROMPT, 1)))
        while not asking.done():
            if policy._gate.waiting:
                return asking
            await asyncio.sleep(0.001)


def test_the_policy_says_that_it_can_be_updated_and_tells_its_load(engine: VLLMPolicy) -> None:
    assert isinstance(engine, Updatable)
    assert isinstance(engine, LoadReporting)
    assert engine.load() == EngineLoad(0, 0, 0.0)


def test_after_an_update_logprobs_are_those_of_the_new_weights(restored: VLLMPolicy, others: list[Path]) -> None:
    request = SampleRequest(PROMPT, 40, seed=3)
    before, version = ask(restored, request), restored.version
    assert restored.update_weights(others[0]) == version + 1 == restored.version
    after = ask(restored, request)
    assert set(before.versions) == {version}
    assert set(after.versions) == {version + 1}
    assert agrees(before, {version: TINY_MODEL})
    assert agrees(after, {version + 1: others[0]})
    assert not np.array_equal(before.token_ids, after.token_ids)


def test_weights_may_be_tensors_in_memory_tied_ones_included(restored: VLLMPolicy, others: list[Path]) -> None:
    state = reference(others[1]).state_dict()
    assert "lm_head.weight" in state
    version = restored.update_weights(state, version=restored.version + 10)
    assert agrees(ask(restored, SampleRequest(PROMPT, 40, seed=3)), {version: others[1]})
    half = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    assert restored.update_weights(half) == version + 1
    assert len(ask(restored, SampleRequest(PROMPT, 4)).token_ids) == 4


def test_requests_caught_in_the_middle_are_continued_with_the_new_weights(
    restored: VLLMPolicy, others: list[Path]
) -> None:
    first = restored.version
    folders = {first: TINY_MODEL, first + 1: others[0], first + 2: others[1], first + 3: TINY_MODEL}

    async def group(seed: int) -> list[Completion]:
        request = SampleRequest(PROMPT, 150, n=4, seed=seed)
        parts = await sample_all(restored, request)
        return await asyncio.gather(*(continued(restored, request, part) for part in parts))

    async def main() -> list[Completion]:
        alone = [asyncio.create_task(sample_one(restored, SampleRequest(PROMPT, 150, seed=k))) for k in range(28)]
        together = asyncio.create_task(group(100))
        for version in list(folders)[1:]:
            await under_way(restored, 20)
            assert await restored.aupdate_weights(folders[version]) == version
        return [*await asyncio.gather(*alone), *await together]

    completions = asyncio.run(main())
    assert len(completions) == 32
    for completion in completions:
        assert len(completion.token_ids) == 150
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.prompt_ids is not None
        assert np.array_equal(completion.prompt_ids, PROMPT)
        assert (np.diff(completion.versions) >= 0).all()
        assert agrees(completion, folders)
    assert all(set(completion.versions) == set(folders) for completion in completions)


def test_requests_that_are_to_finish_first_have_one_version_each(restored: VLLMPolicy, others: list[Path]) -> None:
    version = restored.version

    async def main() -> tuple[list[Completion], Completion]:
        running = [asyncio.create_task(sample_one(restored, SampleRequest(PROMPT, 100, seed=k))) for k in range(16)]
        await under_way(restored, 5)
        update = asyncio.create_task(restored.aupdate_weights(others[0], in_flight="finish"))
        late = await closed(restored)
        assert restored.load().waiting
        await update
        return await asyncio.gather(*running), await late

    running, late = asyncio.run(main())
    assert {v for completion in running for v in completion.versions} == {version}
    assert {len(completion.token_ids) for completion in running} == {100}
    assert late.versions.tolist() == [version + 1]
    assert agrees(late, {version + 1: others[0]})


def test_requests_that_do_not_finish_in_time_leave_the_weights_as_they_are(engine: VLLMPolicy) -> None:
    version = engine.version

    async def main() -> Completion:
        running = asyncio.create_task(sample_one(engine, SampleRequest(PROMPT, 200)))
        await under_way(engine, 2)
        with pytest.raises(PolicyFailure, match=r"1 samples did not end within 0\.01 s"):
            await engine.aupdate_weights(TINY_MODEL, in_flight="finish", timeout=0.01)
        return await running

    completion = asyncio.run(main())
    assert (completion.versions == version).all()
    assert engine.version == version


def test_a_request_waits_no_longer_for_an_update_than_it_was_told(
    engine: VLLMPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_patience", 0.01)

    async def main() -> None:
        running = asyncio.create_task(sample_one(engine, SampleRequest(PROMPT, 400)))
        await under_way(engine, 2)
        update = asyncio.create_task(engine.aupdate_weights(TINY_MODEL, in_flight="finish"))
        with pytest.raises(PolicyFailure, match=r"an update of the weights took over 0\.01 s") as failure:
            await (await closed(engine))
        assert not failure.value.permanent
        await update
        await running

    asyncio.run(main())


def test_updates_at_the_same_time_come_one_after_the_other(restored: VLLMPolicy, others: list[Path]) -> None:
    version = restored.version

    async def main() -> list[int]:
        running = asyncio.create_task(sample_one(restored, SampleRequest(PROMPT, 200)))
        await under_way(restored, 2)
        got = await asyncio.gather(*(restored.aupdate_weights(folder) for folder in (*others, TINY_MODEL, *others)))
        await running
        return got

    assert asyncio.run(main()) == [version + k for k in range(1, 6)]
    assert agrees(ask(restored, SampleRequest(PROMPT, 20)), {version + 5: others[1]})


def test_an_update_that_is_cancelled_while_it_waits_changes_nothing(engine: VLLMPolicy) -> None:
    version = engine.version

    async def main() -> Completion:
        running = asyncio.create_task(sample_one(engine, SampleRequest(PROMPT, 300)))
        await under_way(engine, 2)
        update = asyncio.create_task(engine.aupdate_weights(TINY_MODEL, in_flight="finish"))
        late = await closed(engine)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert (await late).versions.tolist() == [version]
        return await running

    assert (asyncio.run(main()).versions == version).all()
    assert engine.version == version


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def configured(folder: Path, **entries: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))
    return folder


def truncated(folder: Path) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1_000])
    return folder


def without(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


NORM = "model.norm.weight"
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda folder: folder / "nowhere", "no model folder at .*nowhere"),
    "no config": (lambda folder: without(folder, "config.json"), r"config\.json cannot be read"),
    "no weights": (lambda folder: without(folder, "model.safetensors"), "holds no safetensors"),
    "cut off": (truncated, "cannot be read as safetensors"),
    "other architecture": (
        lambda folder: configured(folder, architectures=["LlamaForCausalLM"]),
        "is another model: architectures is .*LlamaForCausalLM.*running model's .*Qwen3ForCausalLM",
    ),
    "other rotation": (
        lambda folder: configured(folder, rope_parameters={"rope_theta": 5.0, "rope_type": "default"}),
        r"rope_parameters\.rope_theta is 5\.0, the running model's 10000\.0",
    ),
    "other heads": (lambda folder: configured(folder, num_attention_heads=8), "num_attention_heads is 8"),
    "other shape": (
        lambda folder: rewritten(folder, lambda w: w.update({NORM: torch.zeros(7)})),
        r"expected model\.norm\.weight as float \[192\], actual float \[7\]",
    ),
    "other kind": (
        lambda folder: rewritten(folder, lambda w: w.update({NORM: torch.zeros(192, dtype=torch.int8)})),
        r"actual I8 \[192\]",
    ),
    "too few": (lambda folder: rewritten(folder, lambda w: w.pop(NORM)), r"lack 1 tensors: model\.norm\.weight"),
    "too many": (
        lambda folder: rewritten(folder, lambda w: w.update({"more": torch.zeros(1)})),
        "have, beyond the model's, 1 tensors: more",
    ),
    "untied": (
        lambda folder: rewritten(folder, lambda w: w.update({"lm_head.weight": torch.zeros(1024, 192)})),
        r"beyond the model's, 1 tensors: lm_head\.weight",
    ),
    "too few in memory": (lambda _: {NORM: torch.zeros(192)}, r"lack \d+ tensors"),
    "no tensors": (lambda _: {NORM: [1.0]}, "expected torch tensors, actual list"),
    "no source": (lambda _: 7, "a model folder or a mapping of tensors, actual int"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_source_is_refused_before_anything_is_touched(engine: VLLMPolicy, tmp_path: Path, case: str) -> None:
    make, said = WRONG[case]
    version = engine.version

    async def main() -> Completion:
        running = asyncio.create_task(sample_one(engine, SampleRequest(PROMPT, 60, seed=1)))
        await under_way(engine, 2)
        with pytest.raises(ConfigurationError, match=said):
            await engine.aupdate_weights(make(copy_of(tmp_path, "wrong")))
        return await running

    completion = asyncio.run(main())
    assert (completion.versions == version).all()
    assert agrees(completion, {version: TINY_MODEL})
    assert engine.version == version


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"version": 0}, "expected a version above"),
        ({"version": 1.5}, "expected a version above"),
        ({"in_flight": "drop"}, "expected in_flight as one of .*resume.*finish"),
        ({"timeout": 0}, "expected a timeout above 0 s"),
    ],
)
def test_wrong_options_of_an_update_are_refused(engine: VLLMPolicy, options: dict[str, Any], said: str) -> None:
    version = engine.version
    with pytest.raises(ConfigurationError, match=said):
        engine.update_weights(TINY_MODEL, **options)
    assert engine.version == version


def in_shards(folder: Path) -> Path:
    """The same weights in two files."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    halves = {"one.safetensors": names[: len(names) // 2], "two.safetensors": names[len(names) // 2 :]}
    for file, held in halves.items():
        save_file({name: weights[name] for name in held}, folder / file)
    where = {name: file for file, held in halves.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def test_a_load_that_fails_half_way_stops_sampling_until_an_update_succeeds(
    restored: VLLMPolicy, others: list[Path], tmp_path: Path
) -> None:
    """The source is right when it is checked, and is damaged before it is read."""
    source, version = in_shards(copy_of(tmp_path, "shards")), restored.version

    async def main() -> None:
        running = asyncio.create_task(sample_one(restored, SampleRequest(PROMPT, 100)))
        await under_way(restored, 2)
        update = asyncio.create_task(restored.aupdate_weights(source, in_flight="finish"))
        late = await closed(restored)
        (source / "two.safetensors").write_bytes(b"nothing")
        with pytest.raises(PolicyFailure, match="failed loading the weights"):
            await update
        assert len((await running).token_ids) == 100
        with pytest.raises(PolicyFailure, match="may be half loaded until an update succeeds") as failure:
            await late
        assert failure.value.permanent

    asyncio.run(main())
    assert restored.version == version
    assert restored.update_weights(others[0]) == version + 1
    assert agrees(ask(restored, SampleRequest(PROMPT, 40)), {version + 1: others[0]})


def test_a_load_that_takes_too_long_stops_sampling_until_an_update_succeeds(
    restored: VLLMPolicy, others: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    version, never = restored.version, asyncio.Event()

    async def hangs(*_: Any, **__: Any) -> None:
        await never.wait()

    with monkeypatch.context() as patched:
        patched.setattr(type(restored._box[0]), "collective_rpc", hangs)
        with pytest.raises(PolicyFailure, match=r"took over 0\.5 s loading the weights"):
            restored.update_weights(others[0], timeout=0.5)
    with pytest.raises(PolicyFailure, match="may be half loaded"):
        ask(restored, SampleRequest(PROMPT, 1))
    assert restored.update_weights(others[0]) == version + 1
    assert agrees(ask(restored, SampleRequest(PROMPT, 20)), {version + 1: others[0]})


def test_an_engine_that_does_not_go_on_is_not_asked_until_an_update_succeeds(
    restored: VLLMPolicy, others: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = restored.version

    async def fails(*_: Any) -> None:
        raise OSError("no answer")

    async def main() -> None:
        with pytest.raises(PolicyFailure, match="stays paused until an update succeeds") as failure:
            await asyncio.wait_for(sample_one(restored, SampleRequest(PROMPT, 1)), 60)
        assert failure.value.permanent

    with monkeypatch.context() as patched:
        patched.setattr(type(restored._box[0]), "resume_generation", fails)
        with pytest.raises(PolicyFailure, match=r"no answer; the engine stays paused .* version") as failure:
            restored.update_weights(others[0])
    assert str(failure.value).endswith(f"weights of version {version + 1}")
    assert restored.version == version + 1
    asyncio.run(main())
    assert restored.update_weights(others[1]) == version + 2
    assert agrees(ask(restored, SampleRequest(PROMPT, 20)), {version + 2: others[1]})


def test_an_update_that_is_cancelled_while_it_loads_is_seen_through(
    restored: VLLMPolicy, others: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = restored.version
    loading, go_on = threading.Event(), threading.Event()
    real = type(restored._box[0]).collective_rpc

    async def held(*arguments: Any, **options: Any) -> Any:
        loading.set()
        await asyncio.to_thread(go_on.wait)
        return await real(*arguments, **options)

    monkeypatch.setattr(type(restored._box[0]), "collective_rpc", held)

    async def main() -> Completion:
        update = asyncio.create_task(restored.aupdate_weights(others[1]))
        await asyncio.to_thread(loading.wait)
        late = asyncio.create_task(sample_one(restored, SampleRequest(PROMPT, 20)))
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        go_on.set()
        return await late

    completion = asyncio.run(main())
    assert restored.version == version + 1
    assert agrees(completion, {version + 1: others[1]})
