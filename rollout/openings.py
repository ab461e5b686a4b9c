"""The first turn of a group: one request with as many samples as the group has members, its prefill shared."""

import asyncio
import dataclasses
from typing import Any

import numpy as np

from toolgym.agents.policy import Completion, Policy, PolicyFailure, SampleRequest
from toolgym.agents.sampling import continued, sample_all, sample_one
from toolgym.envs.waiting import take_outcome, tamed


class GroupOpening:
    """Samples the first turn of all members at once, when the first of them asks.

    Members that come later (there may be fewer slots than members) find their sample waiting. A member whose prompt
    is not the group's samples alone.

    Args:
        policy: who answers.
        size: members of the group.
        running: where shared requests are kept while they run; whoever owns it cancels them.
        retried: whether those who ask make a failed request again by themselves, after a while.
    """

    def __init__(self, policy: Policy, size: int, running: "set[asyncio.Task[Any]]", *, retried: bool) -> None:
        self._policy, self._size, self._running, self._retried = policy, size, running, retried
        self._prompt: Any = None
        self._given: set[int] = set()
        self._shared: asyncio.Task[list[Completion]] | None = None
        self._asking = 0

    async def sample(self, request: SampleRequest) -> Completion:
        """The completion of one member's request, whole; its seed is the group's plus its number.

        Raises:
            PolicyFailure: as `sample_one`. One sample that does not add up fails the request of all: each then asks
                alone, at once or with its next attempt.
        """
        if request.turn > 0 or self._size == 1:
            return await sample_one(self._policy, request)
        if self._shared is None:
            seed = None if request.seed is None else request.seed - request.member
            group = dataclasses.replace(request, n=self._size, member=0, seed=seed)
            self._prompt = request.prompt_ids
            work = sample_all(self._policy, group)
            self._shared = asyncio.create_task(tamed(work))
            self._shared.add_done_callback(lambda _: work.close())  # if it is cancelled before it has begun
            self._shared.add_done_callback(take_outcome)
            self._running.add(self._shared)
            self._shared.add_done_callback(self._running.discard)
        if request.member in self._given or not np.array_equal(request.prompt_ids, self._prompt):
            return await sample_one(self._policy, request)
        self._given.add(request.member)
        try:
            first = (await self._drawn(self._shared))[request.member]
        except Exception as error:  # a policy may raise anything
            if self._retried or (isinstance(error, PolicyFailure) and error.permanent):
                raise
            return await sample_one(self._policy, request)
        return await continued(self._policy, request, first)

    async def _drawn(self, shared: "asyncio.Task[list[Completion]]") -> list[Completion]:
        """The samples of all. When nobody waits for them any more, the request is given up."""
        self._asking += 1
        try:
            # Shielded: one member that runs out of time does not take the others' samples with it.
            return await asyncio.shield(shared)
        finally:
            self._asking -= 1
            if not self._asking and not shared.done():
                shared.cancel()
                self._shared = None
