"""Asking a policy: what it returns is checked, and what it broke off is continued from its tokens."""

import dataclasses

import numpy as np
import numpy.typing as npt

from toolgym.agents.policy import Completion, FinishReason, Policy, PolicyFailure, SampleRequest

_FUTILE = 8  # aborts in a row without a single token, after which it is no use to go on


async def sample_all(policy: Policy, request: SampleRequest) -> list[Completion]:
    """All samples of a request, of which some may have been broken off.

    Raises:
        PolicyFailure: the policy returned another number of them, longer ones, or something else.
    """
    completions = await policy.sample(request)
    if not isinstance(completions, list | tuple):
        raise PolicyFailure(f"the policy returned a {type(completions).__name__} instead of a list of completions")
    if wrong := [entry for entry in completions if not isinstance(entry, Completion)]:
        raise PolicyFailure(f"the policy returned a {type(wrong[0]).__name__} instead of a Completion")
    if longer := [len(entry.token_ids) for entry in completions if len(entry.token_ids) > request.max_tokens]:
        raise PolicyFailure(f"the policy returned {longer[0]} tokens where max_tokens is {request.max_tokens}")
    if len(completions) != request.n:
        raise PolicyFailure(f"the policy returned {len(completions)} completions for {request.n} samples")
    return list(completions)


async def sample_one(policy: Policy, request: SampleRequest) -> Completion:
    """The only sample of a request, continued where it is broken off. Raises as `sample_all` and `continued`."""
    return await continued(policy, request, (await sample_all(policy, request))[0])


async def continued(policy: Policy, request: SampleRequest, first: Completion) -> Completion:
    """A sample that is whole: where the policy broke it off, it is asked to go on behind the tokens so far.

    Every part has a seed of its own, derived from the request's and the part's number: the same seed would draw the
    same random numbers again.

    Args:
        policy: who continues.
        request: what this one sample was asked for, with its own seed and member; its ``n`` is not looked at.
        first: what the policy returned.

    Returns:
        All parts as one, with the versions of their tokens; ``prompt_ids`` is the first part's. It is still an
        `FinishReason.ABORT` if 8 aborts in a row have brought no token.

    Raises:
        PolicyFailure: as `sample_all`; of kind ``"token_mismatch"`` where the engine was fed anything but the prompt
            and the tokens so far.
    """
    if first.finish_reason is not FinishReason.ABORT:
        return first
    start = np.asarray(request.prompt_ids, dtype=np.int32)
    _check_fed(first, start)
    parts, futile = [first], 0
    while True:
        whole = _joined(parts, request)
        futile = 0 if len(parts[-1].token_ids) else futile + 1
        if whole.finish_reason is not FinishReason.ABORT or futile >= _FUTILE:
            return whole
        prompt = np.concatenate([start, whole.token_ids])
        prompt.flags.writeable = False
        left = request.max_tokens - len(whole.token_ids)
        seed = _part_seed(request.seed, len(parts))
        rest = dataclasses.replace(request, prompt_ids=prompt, max_tokens=left, n=1, seed=seed)
        (part,) = await sample_all(policy, rest)
        _check_fed(part, prompt)
        parts.append(part)


def _joined(parts: list[Completion], request: SampleRequest) -> Completion:
    ids = np.concatenate([part.token_ids for part in parts], dtype=np.int32)
    finish = parts[-1].finish_reason
    if finish is FinishReason.ABORT and len(ids):
        # It was broken off, but there was nothing left to sample.
        if int(ids[-1]) in request.stop_token_ids:
            finish = FinishReason.STOP
        elif len(ids) >= request.max_tokens:
            finish = FinishReason.LENGTH
    return Completion(
        ids,
        np.concatenate([part.logprobs for part in parts], dtype=np.float32),
        np.concatenate([part.versions for part in parts], dtype=np.int32),
        finish,
        parts[0].prompt_ids,
    )


def _part_seed(seed: int | None, part: int) -> int | None:
    if seed is None:
        return None
    words = (seed % 2**64, part)
    return int(np.random.SeedSequence(words).generate_state(1)[0]) % 2**31


def _check_fed(part: Completion, prompt: npt.NDArray[np.int32]) -> None:
    fed = part.prompt_ids
    if fed is None or np.array_equal(fed, prompt):
        return
    length = min(len(fed), len(prompt))
    parting = np.flatnonzero(np.asarray(fed)[:length] != prompt[:length])
    at = int(parting[0]) if len(parting) else length
    raise PolicyFailure(
        f"a completion was to be continued from {len(prompt)} tokens, the engine was fed {len(fed)}; they part at {at}",
        kind="token_mismatch",
    )
