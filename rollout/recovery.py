"""What is done when something of ours fails: keep the failure, try again, or stop everything."""

from dataclasses import dataclass
from typing import Literal, get_args

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.finite import checked_int, checked_seconds

OnFailure = Literal["keep", "retry", "raise"]


@dataclass(frozen=True, slots=True)
class Recovery:
    """What is done about failures.

    A request that the policy failed is made again by itself, with the same seed, so that nothing shows where it
    succeeds. What fails all the same is a failed episode, and `on_failure` says what becomes of it.

    Attributes:
        on_failure: ``"keep"``: the group goes on as it is, its failed member has no reward. ``"retry"``: the slot gets
            a fresh environment and begins the episode anew, with the same seeds, ``retries`` times at most; then it is
            kept. ``"raise"``: the first failure cancels what runs and is raised, with all that is finished.
        retries: how many times an episode is begun anew.
        request_retries: how many times one request to the policy is made again; none if asking again is of no use.
        backoff: seconds before the first repetition of a request or, where the policy failed, of an episode; they
            double with each further one.
        max_backoff: seconds that they grow to at most.

    Raises:
        ConfigurationError: another word, or a number that is negative or not finite.
    """

    on_failure: OnFailure = "keep"
    retries: int = 2
    request_retries: int = 2
    backoff: float = 0.5
    max_backoff: float = 30.0

    def __post_init__(self) -> None:
        if self.on_failure not in get_args(OnFailure):
            known = ", ".join(get_args(OnFailure))
            raise ConfigurationError(f"expected Recovery.on_failure among {known}, actual {self.on_failure!r}")
        for name in ("retries", "request_retries"):
            object.__setattr__(self, name, checked_int(f"Recovery.{name}", getattr(self, name), least=0))
        for name in ("backoff", "max_backoff"):
            object.__setattr__(self, name, checked_seconds(f"Recovery.{name}", getattr(self, name), zero=True))

    def delay(self, attempt: int) -> float:
        """Seconds to wait before repetition number ``attempt``, from 0."""
        return min(self.backoff * 2.0 ** min(attempt, 64), self.max_backoff)

    def begins_anew(self, attempt: int) -> bool:
        """Whether a failed episode, in its attempt number ``attempt`` from 0, is begun once more."""
        return self.on_failure == "retry" and attempt < self.retries
