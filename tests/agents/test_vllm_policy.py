"""A real vLLM engine: exact ids in and out, true logprobs, and an end that is clean even when the engine dies."""

import asyncio
import signal
import threading
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Completion, FinishReason, PolicyFailure, SampleRequest, Sampling
from toolgym.agents.tiny import TINY_MODEL
from toolgym.agents.vllm_policy import VLLMPolicy
from toolgym.envs import ConfigurationError, SystemMessage, UserMessage
from toolgym.rollout import Admission, Collector, Limits, Recovery, StopReason, Trajectory, arollout

pytestmark = pytest.mark.vllm


def ask(policy: VLLMPolicy, *requests: SampleRequest) -> list[list[Completion]]:
    async def main() -> list[list[Completion]]:
        return await asyncio.gather(*(policy.sample(request) for request in requests))

    return asyncio.run(main())


def prompt(chat: ChatFormat, text: str = "What is 12 + 7?") -> list[int]:
    return chat.open([SystemMessage("Use the calculator. Then say the result."), UserMessage(text)], [])


def same(one: Completion, two: Completion) -> bool:
    return np.array_equal(one.token_ids, two.token_ids)


def test_a_completion_says_what_was_fed_and_what_was_sampled(engine: VLLMPolicy, chat: ChatFormat) -> None:
    ids = prompt(chat)
    request = SampleRequest(ids, max_tokens=60, stop_token_ids=chat.stop_token_ids, sampling=Sampling(temperature=0))
    ((completion,),) = ask(engine, request)
    assert completion.prompt_ids is not None
    assert completion.prompt_ids.tolist() == ids
    assert completion.token_ids.dtype == np.int32
    assert completion.logprobs.dtype == np.float32
    assert (completion.logprobs <= 0).all()
    assert (completion.versions == engine.version).all()
    if completion.finish_reason is FinishReason.STOP:
        assert completion.token_ids[-1] in chat.stop_token_ids


def test_max_tokens_cuts_and_says_so(engine: VLLMPolicy, chat: ChatFormat) -> None:
    ((completion,),) = ask(engine, SampleRequest(prompt(chat), max_tokens=3))
    assert len(completion.token_ids) == 3
    assert completion.finish_reason is FinishReason.LENGTH


def test_any_stop_token_ends_the_completion_and_is_part_of_it(engine: VLLMPolicy, chat: ChatFormat) -> None:
    everything = tuple(range(1_024))
    ((completion,),) = ask(engine, SampleRequest(prompt(chat), max_tokens=50, stop_token_ids=everything))
    assert len(completion.token_ids) == 1
    assert completion.finish_reason is FinishReason.STOP


def test_samples_of_one_request_are_those_of_their_seeds(engine: VLLMPolicy, chat: ChatFormat) -> None:
    hot = Sampling(temperature=1.5)
    request = SampleRequest(prompt(chat), max_tokens=24, n=4, seed=11, sampling=hot)
    (group,) = ask(engine, request)
    assert len({completion.token_ids.tobytes() for completion in group}) == 4
    alone = ask(engine, *(SampleRequest(prompt(chat), 24, seed=11 + k, sampling=hot) for k in range(4)))
    assert all(same(one, two[0]) for one, two in zip(group, alone, strict=True))
    (again,) = ask(engine, request)
    assert all(same(one, two) for one, two in zip(group, again, strict=True))


def test_long_seeded_prompts_do_not_kill_the_engine(engine: VLLMPolicy, chat: ChatFormat) -> None:
    """vLLM's CPU engine dies of a seeded request whose prefill is chunked; it must never chunk."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1_000, size=int(rng.integers(900, 2_000))).tolist() for _ in range(64)]
    completions = ask(engine, *(SampleRequest(ids, 4, seed=k) for k, ids in enumerate(prompts)))
    assert [c[0].prompt_ids.tolist() for c in completions if c[0].prompt_ids is not None] == prompts
    assert len(ask(engine, SampleRequest(prompt(chat), 4, seed=1))[0]) == 1


def test_logprobs_are_of_the_distribution_that_was_sampled_from(engine: VLLMPolicy, chat: ChatFormat) -> None:
    ids = prompt(chat)
    (hot,) = ask(engine, SampleRequest(ids, 1, n=64, seed=0, sampling=Sampling(temperature=2.0)))
    (cold,) = ask(engine, SampleRequest(ids, 1, n=64, seed=0, sampling=Sampling(temperature=0.5)))
    by_token = [{int(c.token_ids[0]): float(c.logprobs[0]) for c in found} for found in (hot, cold)]
    shared = set(by_token[0]) & set(by_token[1])
    best = max(shared, key=lambda token: by_token[1][token])
    assert by_token[0][best] < by_token[1][best]
    (cut,) = ask(engine, SampleRequest(ids, 1, n=8, seed=0, sampling=Sampling(top_k=1)))
    assert all(abs(float(c.logprobs[0])) < 1e-5 for c in cut)


def test_a_refused_request_is_a_failure_of_that_request(engine: VLLMPolicy, chat: ChatFormat) -> None:
    too_long = SampleRequest([1] * 5_000, 4)
    with pytest.raises(PolicyFailure, match="refused"):
        ask(engine, too_long)
    assert len(ask(engine, SampleRequest(prompt(chat), 4))[0]) == 1


def test_cancelling_aborts_and_the_engine_goes_on(engine: VLLMPolicy, chat: ChatFormat) -> None:
    async def main() -> None:
        running = asyncio.create_task(engine.sample(SampleRequest(prompt(chat), 1_500)))
        await engine.sample(SampleRequest(prompt(chat), 2))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert len(ask(engine, SampleRequest(prompt(chat), 4))[0]) == 1


def test_an_interrupt_of_the_whole_process_group_leaves_the_engine_alive(engine: VLLMPolicy, chat: ChatFormat) -> None:
    """Ctrl-C reaches all processes of a terminal: what has finished is kept first, then the engine is shut down."""
    for child in psutil.Process().children(recursive=True):
        if "VLLM" in child.name() or any("VLLM" in word or "multiprocessing" in word for word in child.cmdline()):
            child.send_signal(signal.SIGINT)
    assert len(ask(engine, SampleRequest(prompt(chat), 4))[0]) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enable_chunked_prefill": True}, "leave it off, or say seeds=False"),
        ({"long_prefill_token_threshold": 64}, "leave it off, or say seeds=False"),
        (
            {"max_num_batched_tokens": 1_024},
            "expected 4096 or more, actual 1024; lower max_model_len, or say seeds=False",
        ),
        ({"colour": "red"}, "an engine option is not vLLM's: .*colour"),
        ({"max_model_len": 10_000_000}, "takes at most 4096 tokens"),
        ({"quantization": "nonsense"}, "vLLM cannot start on"),
    ],
)
def test_wrong_engine_options_are_refused(options: dict[str, object], said: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigurationError, match=said):
        VLLMPolicy(TINY_MODEL, **options)  # type: ignore[arg-type]
    assert set(threading.enumerate()) == before


def test_a_model_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="no model folder at /nowhere"):
        VLLMPolicy("/nowhere")


def test_an_engine_that_dies_is_a_policy_failure_and_leaves_nothing(engine: VLLMPolicy, chat: ChatFormat) -> None:
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    threads = set(threading.enumerate())
    policy = VLLMPolicy(TINY_MODEL, max_model_len=512, max_num_seqs=4)
    mine = [child for child in psutil.Process().children(recursive=True) if child.pid not in others]
    assert mine
    envs = gymnasium.make_vec("toolgym/Calculator-v0", num_envs=4)
    limits = Limits(max_trajectory_tokens=512, max_completion_tokens=64, max_observation_tokens=64)
    # One repetition of a request would take longer than the test may.
    recovery = Recovery(request_retries=3, backoff=600.0, max_backoff=600.0)
    doomed = Doomed(policy, prompt(chat), mine)
    collector = Collector(envs, doomed, chat, limits, recovery=recovery, admission=Admission(max_unread=8))
    scored, failed = asyncio.run(_killed_half_way(doomed, collector))
    assert len(scored) >= 10
    assert len(scored) + len(failed) == 40
    assert len(failed) >= 40 - 10 - 8 - 2 * 4, "at most those that nobody had read, and what the slots then ended"
    assert all(trajectory.reward is not None for trajectory in scored)
    assert {(t.stop_reason, t.reward) for t in failed} == {(StopReason.POLICY_FAILURE, None)}
    assert {t.failure and (t.failure.kind, t.failure.where) for t in failed} == {("policy_failure", "sample")}
    assert doomed.last in {(t.task_id, t.member) for t in failed}, "it was being sampled"
    assert all(isinstance(ended, PolicyFailure) for ended in doomed.beside)
    with pytest.raises(PolicyFailure, match="dead"):
        ask(policy, SampleRequest(prompt(chat), 1))
    trajectories = collector.collect(4, 2)
    assert {(t.stop_reason, t.reward) for t in trajectories} == {(StopReason.POLICY_FAILURE, None)}
    assert len(trajectories) == 8
    envs.close()
    policy.close()
    policy.close()
    with pytest.raises(PolicyFailure, match="closed"):
        ask(policy, SampleRequest(prompt(chat), 1))
    psutil.wait_procs(mine, timeout=20)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= others
    # The chat format keeps its own threads, which may be new if this test runs by itself.
    assert {thread for thread in threading.enumerate() if not thread.name.startswith("toolgym chat")} <= threads
    assert len(ask(engine, SampleRequest(prompt(chat), 4))[0]) == 1


class Doomed:
    """Kills the processes of an engine as soon as a further request is under way, once it is told to."""

    def __init__(self, policy: VLLMPolicy, prompt_ids: list[int], processes: list[psutil.Process]) -> None:
        self._policy, self._prompt, self._processes = policy, prompt_ids, processes
        self.max_model_len = policy.max_model_len
        self.armed = False
        self.last: tuple[str, int] | None = None
        self.beside: list[Any] = []

    async def sample(self, request: SampleRequest) -> list[Completion]:
        if not self.armed or self.last is not None:
            return await self._policy.sample(request)
        assert request.task is not None
        self.last = request.task.id, request.member
        long = [SampleRequest(self._prompt, 400)] * 4
        running = [asyncio.create_task(self._policy.sample(asked)) for asked in (request, *long)]
        await asyncio.sleep(0)
        for process in self._processes:
            process.kill()
        first, *self.beside = await asyncio.gather(*running, return_exceptions=True)
        if isinstance(first, BaseException):
            raise first
        return first


async def _killed_half_way(doomed: Doomed, collector: Collector) -> tuple[list[Trajectory], list[Trajectory]]:
    """A rollout of 40 whose engine is killed behind the 10th. Returns those that are scored and those that failed."""
    told: list[Trajectory] = []

    def arm(trajectory: Trajectory) -> None:
        told.append(trajectory)
        doomed.armed = len(told) >= 10

    found = await asyncio.wait_for(arollout(collector, 20, 2, on_trajectory=arm), 120)
    assert all(trajectory.failure is None for trajectory in told[:10])
    assert sorted(t.id for t in told) == sorted(t.id for t in found.trajectories)
    failed = [trajectory for trajectory in found.trajectories if trajectory.failure is not None]
    return [trajectory for trajectory in found.trajectories if trajectory.failure is None], failed
