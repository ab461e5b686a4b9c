"""The first turn of a group: one request with as many samples as the group has members, its prefill shared."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from toolgym.agents.policy import Completion, Policy, PolicyFailure, SampleRequest
from toolgym.envs.waiting import take_outcome, tamed


class GroupOpening:
    """Samples the first turn of all members at once, when the first of them asks.

    Members that come later (there may be fewer slots than members) find their sample waiting. A member whose prompt
    is not the group's samples alone.

    Args:
        policy: who answers.
        size: members of the group.
        running: where shared requests are kept while they run; whoever owns it cancels them.
    """

    def __init__(self, policy: Policy, size: int, running: "set[asyncio.Task[Any]]") -> None:
        self._policy, self._size, self._running = policy, size, running
        self._prompt: Sequence[int] | None = None
        self._shared: asyncio.Task[list[Completion]] | None = None

    async def sample(self, request: SampleRequest) -> Completion:
        """The completion of one member's request; its seed is the group's plus its number."""
        if request.turn > 0 or self._size == 1:
            return await sample_one(self._policy, request)
        if self._shared is None:
            seed = None if request.seed is None else request.seed - request.member
            group = dataclasses.replace(request, n=self._size, member=0, seed=seed)
            self._prompt = request.prompt_ids
            self._shared = asyncio.create_task(tamed(sample_all(self._policy, group)))
            self._shared.add_done_callback(take_outcome)
            self._running.add(self._shared)
            self._shared.add_done_callback(self._running.discard)
        if request.prompt_ids != self._prompt:
            return await sample_one(self._policy, request)
        try:
            # Shielded: one member that runs out of time does not take the others' samples with it.
            return (await asyncio.shield(self._shared))[request.member]
        except PolicyFailure:
            # One sample that does not add up fails the request of all: each asks again for itself.
            return await sample_one(self._policy, request)


async def sample_all(policy: Policy, request: SampleRequest) -> list[Completion]:
    """All samples of a request.

    Raises:
        PolicyFailure: the policy returned another number of them, longer ones, or something else.
    """
    completions = await policy.sample(request)
    if wrong := [entry for entry in completions if not isinstance(entry, Completion)]:
        raise PolicyFailure(f"the policy returned a {type(wrong[0]).__name__} instead of a Completion")
    if longer := [len(entry.token_ids) for entry in completions if len(entry.token_ids) > request.max_tokens]:
        raise PolicyFailure(f"the policy returned {longer[0]} tokens where max_tokens is {request.max_tokens}")
    if len(completions) != request.n:
        raise PolicyFailure(f"the policy returned {len(completions)} completions for {request.n} samples")
    return completions


async def sample_one(policy: Policy, request: SampleRequest) -> Completion:
    """The only sample of a request. Raises PolicyFailure as `sample_all`."""
    return (await sample_all(policy, request))[0]
