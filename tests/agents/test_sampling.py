"""What a policy returns is checked, and what it breaks off is continued from its tokens, so that nothing is lost."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgym.agents.policy import (
    Completion,
    FinishReason,
    LoadReporting,
    Policy,
    PolicyFailure,
    SampleRequest,
    Sampling,
    Updatable,
)
from toolgym.agents.sampling import continued, sample_all, sample_one
from toolgym.envs import ConfigurationError

STOP = 9
PROMPT = (3, 1, 4)


def token_after(prefix: Sequence[int]) -> int:
    """A "model" that is deterministic in its prefix: a tenth of all prefixes are followed by the stop token."""
    return int(np.random.default_rng([len(prefix), *prefix[-5:]]).integers(10))


class Interrupted:
    """Samples `token_after`, and breaks off after so many tokens, as planned; in the end it samples to the end.

    The version of its weights is the number of times it was broken off.
    """

    def __init__(self, plan: Sequence[int] = (), *, says_what_it_was_fed: bool = True) -> None:
        self.plan, self.requests = list(plan), list[SampleRequest]()
        self._says = says_what_it_was_fed

    async def sample(self, request: SampleRequest) -> list[Completion]:
        number = len(self.requests)
        self.requests.append(request)
        prefix = [int(token) for token in request.prompt_ids]
        fed, ids, finish = np.array(prefix, np.int32), list[int](), FinishReason.LENGTH
        limit = self.plan[number] if number < len(self.plan) else request.max_tokens
        while len(ids) < request.max_tokens:
            if len(ids) >= limit:
                finish = FinishReason.ABORT
                break
            ids.append(token_after(prefix))
            prefix.append(ids[-1])
            if ids[-1] in request.stop_token_ids:
                finish = FinishReason.STOP
                break
        count = len(ids)
        logprobs = np.array([-0.25 * (token + 1) for token in ids], np.float32)
        versions = np.full(count, number, np.int32)
        shown = fed if self._says else None
        made = Completion(np.array(ids, np.int32), logprobs, versions, finish, shown)
        return [made] * request.n


def sampled(policy: Policy, request: SampleRequest) -> Completion:
    return asyncio.run(sample_one(policy, request))


@given(
    plan=st.lists(st.integers(0, 6), max_size=7),
    max_tokens=st.integers(1, 30),
    stops=st.booleans(),
    seed=st.none() | st.integers(-5, 2**40),
    array=st.booleans(),
)
def test_a_sample_that_is_broken_off_anywhere_is_the_same_as_an_unbroken_one(
    plan: list[int], max_tokens: int, stops: bool, seed: int | None, array: bool
) -> None:
    prompt = np.array(PROMPT, np.int32) if array else PROMPT
    request = SampleRequest(prompt, max_tokens, seed=seed, stop_token_ids=(STOP,) if stops else ())
    policy = Interrupted(plan)
    broken, whole = sampled(policy, request), sampled(Interrupted(), request)
    assert np.array_equal(broken.token_ids, whole.token_ids)
    assert np.array_equal(broken.logprobs, whole.logprobs)
    assert broken.finish_reason is whole.finish_reason
    assert broken.prompt_ids is not None
    assert broken.prompt_ids.tolist() == list(PROMPT)
    assert (broken.token_ids.dtype, broken.logprobs.dtype, broken.versions.dtype) == (np.int32, np.float32, np.int32)
    # Each token bears the version of the part that sampled it.
    parts = [part.max_tokens for part in policy.requests] + [max_tokens - len(whole.token_ids)]
    lengths = -np.diff(parts)
    assert broken.versions.tolist() == np.repeat(np.arange(len(lengths)), lengths).tolist()
    # And has a seed of its own.
    seeds = [part.seed for part in policy.requests]
    assert seeds[0] == seed
    assert len(set(seeds)) == (1 if seed is None else len(seeds))
    assert all(part.n == 1 and len(part.prompt_ids) + part.max_tokens == 3 + max_tokens for part in policy.requests)


def test_each_sample_of_a_group_is_continued_from_where_it_got() -> None:
    request = SampleRequest(PROMPT, 12, n=3, seed=5)
    policy = Interrupted([2])

    async def main() -> list[Completion]:
        first = await sample_all(policy, request)
        members = [dataclasses.replace(request, n=1, seed=5 + k, member=k) for k in range(3)]
        return await asyncio.gather(*(continued(policy, m, c) for m, c in zip(members, first, strict=True)))

    group = asyncio.run(main())
    whole = sampled(Interrupted(), SampleRequest(PROMPT, 12))
    assert all(np.array_equal(completion.token_ids, whole.token_ids) for completion in group)
    assert len({part.seed for part in policy.requests}) == 4


def test_a_policy_that_gets_nowhere_is_given_up_with_what_there_is() -> None:
    policy = Interrupted([4, 0, 0, 2] + [0] * 100)
    completion = sampled(policy, SampleRequest(PROMPT, 20))
    assert completion.finish_reason is FinishReason.ABORT
    assert len(completion.token_ids) == 6
    assert len(policy.requests) == 4 + 8


def test_a_policy_that_aborts_before_its_first_token_is_asked_again() -> None:
    completion = sampled(Interrupted([0, 0]), SampleRequest(PROMPT, 5))
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.versions.tolist() == [2] * 5


class Returning:
    """Returns what it was given, one answer after the other."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    async def sample(self, request: SampleRequest) -> list[Completion]:
        return self.answers.pop(0)  # type: ignore[no-any-return]


def made(ids: list[int], finish: FinishReason = FinishReason.ABORT, fed: Sequence[int] | None = None) -> Completion:
    shown = None if fed is None else np.array(fed, np.int32)
    return Completion(
        np.array(ids, np.int32), np.full(len(ids), -1.0, np.float32), np.zeros(len(ids), np.int32), finish, shown
    )


def test_an_abort_with_nothing_left_to_sample_is_no_abort() -> None:
    request = SampleRequest(PROMPT, 3, stop_token_ids=(STOP,))
    assert sampled(Returning([made([1, 2, 3])]), request).finish_reason is FinishReason.LENGTH
    assert sampled(Returning([made([1, STOP])]), request).finish_reason is FinishReason.STOP
    assert sampled(Returning([made([1, 2, STOP])]), request).finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([[made([1], fed=(3, 1, 5))]], "from 3 tokens, the engine was fed 3; they part at 2"),
        ([[made([1], fed=(3, 1))]], "from 3 tokens, the engine was fed 2; they part at 2"),
        ([[made([1], fed=PROMPT)], [made([1], fed=PROMPT)]], "from 4 tokens, the engine was fed 3; they part at 3"),
        ([[made([1])], [made([1], fed=(*PROMPT, 2))]], "from 4 tokens, the engine was fed 4; they part at 3"),
    ],
)
def test_a_part_that_was_fed_something_else_is_no_part(answers: list[Any], said: str) -> None:
    with pytest.raises(PolicyFailure, match=said) as failure:
        sampled(Returning(*answers), SampleRequest(PROMPT, 8))
    assert failure.value.kind == "token_mismatch"


def test_a_policy_need_not_say_what_it_was_fed() -> None:
    completion = sampled(Interrupted([2, 2], says_what_it_was_fed=False), SampleRequest(PROMPT, 8))
    assert completion.prompt_ids is None
    assert len(completion.token_ids) == 8


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "a NoneType instead of a list"),
        ([made([1]), "text"], "a str instead of a Completion"),
        ([made([1] * 9)], "9 tokens where max_tokens is 8"),
        ([], "0 completions for 1 samples"),
        ([made([1]), made([1])], "2 completions for 1 samples"),
    ],
)
def test_what_a_policy_must_not_return_is_its_failure(answer: Any, said: str) -> None:
    with pytest.raises(PolicyFailure, match=said) as failure:
        sampled(Returning(answer), SampleRequest(PROMPT, 8))
    assert not failure.value.permanent
    with pytest.raises(PolicyFailure, match=said.replace("max_tokens is 8", "max_tokens is 7")):
        sampled(Returning([made([1])], answer), SampleRequest(PROMPT, 8))


@pytest.mark.parametrize("name", ["token_ids", "versions"])
@pytest.mark.parametrize("wrong", [2**32 + 1, 2**31, -1])
def test_ids_and_versions_that_records_cannot_hold_are_the_policys_failure(name: str, wrong: int) -> None:
    columns = {"token_ids": np.array([7, 7]), "versions": np.array([0, 0]), name: np.array([2**31 - 1, wrong])}
    with pytest.raises(PolicyFailure, match=f"returned the (token id|version) {wrong}, expected 0 to "):
        Completion(logprobs=np.array([-1.0, -1.0]), finish_reason=FinishReason.STOP, **columns)
    columns[name][1] = 0
    Completion(logprobs=np.array([-1.0, -1.0]), finish_reason=FinishReason.STOP, **columns)


def test_a_top_k_of_numpy_is_kept_as_a_plain_int() -> None:
    assert type(Sampling(top_k=np.int64(5)).top_k) is int
    with pytest.raises(ConfigurationError, match="top_k as an int, actual True"):
        Sampling(top_k=True)
    with pytest.raises(ConfigurationError, match=r"top_k as an int, actual 5\.0"):
        Sampling(top_k=5.0)  # type: ignore[arg-type]


def test_a_policy_may_do_no_more_than_sample() -> None:
    assert isinstance(Interrupted(), Policy)
    assert not isinstance(Interrupted(), Updatable)
    assert not isinstance(Interrupted(), LoadReporting)
