"""What a policy is: token ids in; sampled ids with their logprobs out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from toolgym.envs.errors import ConfigurationError, ToolgymError
from toolgym.envs.finite import as_int
from toolgym.envs.messages import Message
from toolgym.envs.tasks import Task

InFlight = Literal["resume", "finish"]
_SENTINEL = -9_999.0  # what vLLM writes where it has no logprob


class PolicyFailure(ToolgymError):
    """The policy could not give a usable completion: engine dead, out of time, or output that does not add up.

    Args:
        message: what happened.
        kind: a short stable name of the kind of failure, e.g. ``"token_mismatch"``.
        permanent: asking again is of no use: the engine is dead, or the policy closed.
    """

    def __init__(self, message: str, *, kind: str = "policy_failure", permanent: bool = False) -> None:
        super().__init__(message)
        self.kind, self.permanent = kind, permanent


class SeedWarning(UserWarning):
    """Requests are sampled without their seeds, so that what is sampled depends on scheduling."""


class FinishReason(StrEnum):
    """Why the engine stopped sampling.

    Attributes:
        STOP: a stop token was sampled.
        LENGTH: ``max_tokens`` were sampled.
        ABORT: the engine broke off. What was sampled is good, and whoever asked continues it
            (`toolgym.agents.sampling.continued`).
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass, in (0, 1].
        top_k: how many of the likeliest tokens to keep; 0 keeps all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "top_k"):
            value = getattr(self, name)
            count = as_int(value)
            if count is not None:
                object.__setattr__(self, name, count)
            elif name == "top_k" or not isinstance(value, float):
                kind = "an int" if name == "top_k" else "a number"
                raise ConfigurationError(f"expected {name} as {kind}, actual {value!r}")
        if not 0.0 <= self.temperature <= 100.0:
            raise ConfigurationError(f"expected a temperature in [0, 100], actual {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigurationError(f"expected top_p in (0, 1], actual {self.top_p}")
        if self.top_k < 0:
            raise ConfigurationError(f"expected top_k of 0 (keep all) or more, actual {self.top_k}")


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """One prompt to continue.

    Attributes:
        prompt_ids: the exact prompt: (P,) int32, which a policy must not write to, or any sequence of ints.
        max_tokens: at most so many tokens are sampled, 1 or more.
        n: how many samples of this prompt.
        seed: sample k is drawn with ``seed + k``; None leaves the engine to its own randomness.
        sampling: how to sample.
        stop_token_ids: sampling ends after any of these; the stop token is part of the completion.
        task: what is being solved; for scripted policies and for logs.
        member: which member of the task's group the first sample is for.
        turn: number of the assistant's turn, from 0.
        messages: the conversation that the prompt renders.
    """

    prompt_ids: Sequence[int] | npt.NDArray[np.int32]
    max_tokens: int
    n: int = 1
    seed: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: tuple[int, ...] = ()
    task: Task | None = None
    member: int = 0
    turn: int = 0
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled continuation, checked when it is made.

    Attributes:
        token_ids: (T,) int32, as sampled, the stop token included.
        logprobs: (T,) float32, of each sampled token under the distribution it was drawn from.
        versions: (T,) int32, the version of the weights that sampled each token.
        finish_reason: why sampling ended.
        prompt_ids: (P,) int32, the prompt that the engine says it was fed; None where it does not say.

    Raises:
        PolicyFailure: ids or versions that are negative or do not fit int32, not one finite logprob and one version
            for each token, or no token at all.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finish_reason: FinishReason
    prompt_ids: npt.NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "finish_reason", FinishReason(self.finish_reason))
        except ValueError as error:
            raise PolicyFailure(f"the policy returned finish reason {self.finish_reason!r}") from error
        for name in ("token_ids", "logprobs", "versions"):
            kind = np.floating if name == "logprobs" else np.integer
            column = getattr(self, name)
            if not isinstance(column, np.ndarray) or column.ndim != 1 or not np.issubdtype(column.dtype, kind):
                raise PolicyFailure(f"the policy returned {name} that are no flat array of numbers: {column!r:.100}")
            # A copy: a policy may fill its own arrays anew, long before what they held goes into a record.
            object.__setattr__(self, name, column.copy())
        for what, column in (("token id", self.token_ids), ("version", self.versions)):
            # Records keep them as int32, where larger ones would become others; -1 is for what was not sampled.
            for wrong in (int(column.min()), int(column.max())) if len(column) else ():
                if not 0 <= wrong < 2**31:
                    raise PolicyFailure(f"the policy returned the {what} {wrong}, expected 0 to 2**31 - 1")
        count = len(self.token_ids)
        if count == 0 and self.finish_reason is not FinishReason.ABORT:
            raise PolicyFailure("the policy returned a completion without a single token")
        if len(self.logprobs) != count or len(self.versions) != count:
            raise PolicyFailure(
                f"the policy returned {count} tokens, {len(self.logprobs)} logprobs and {len(self.versions)} versions"
            )
        bad = ~np.isfinite(self.logprobs) | (self.logprobs <= _SENTINEL) | (self.logprobs > 1e-3)
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise PolicyFailure(f"the policy returned {self.logprobs[at]} as the logprob of token {at} of {count}")


@runtime_checkable
class Policy(Protocol):
    """Anything that continues prompts. Awaited from any event loop, many requests at once."""

    async def sample(self, request: SampleRequest) -> list[Completion]:
        """Continue one prompt ``request.n`` times.

        Raises:
            PolicyFailure: no usable completions; other requests are not concerned.
        """
        ...


@runtime_checkable
class Updatable(Protocol):
    """A policy whose weights can be exchanged, also while it samples.

    Attributes:
        version: of the weights that sample now; it only ever grows.
    """

    @property
    def version(self) -> int:
        """See above."""
        ...

    async def aupdate_weights(
        self,
        source: Any,
        *,
        version: int | None = None,
        in_flight: InFlight = "resume",
        timeout: float = 600.0,
    ) -> int:
        """Exchange the weights; returns their version.

        Args:
            source: the new weights, in a form that the policy takes.
            version: theirs, above the present one; None counts one up.
            in_flight: what becomes of requests that are being sampled: ``"resume"`` breaks them off
                (`FinishReason.ABORT`), so that whoever asked continues them with the new weights; ``"finish"`` waits
                for their end.
            timeout: seconds that each step of it may take.

        Raises:
            ConfigurationError: what was given does not fit; nothing has changed.
            PolicyFailure: it failed; the message says in which state the policy is.
        """
        ...

    def update_weights(
        self,
        source: Any,
        *,
        version: int | None = None,
        in_flight: InFlight = "resume",
        timeout: float = 600.0,
    ) -> int:
        """As `aupdate_weights`, for callers without an event loop."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is. None stands for what it does not tell.

    Attributes:
        running: sequences that are being sampled.
        waiting: sequences that wait for room, preempted ones included.
        kv_usage: share of the KV cache that running sequences hold, 0 to 1; the fullest of several engines.
    """

    running: int | None
    waiting: int | None
    kv_usage: float | None


@runtime_checkable
class LoadReporting(Protocol):
    """A policy that tells how busy its engine is."""

    def load(self) -> EngineLoad:
        """The load at the engine's last step. May be called from any thread, at no cost."""
        ...
