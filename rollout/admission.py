"""Which episode may begin, and when: as many as the engine can hold, its reader can take, and its weights allow."""

from dataclasses import dataclass

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.finite import checked_int, checked_seconds


@dataclass(frozen=True, slots=True)
class Admission:
    """How many episodes may be under way. Slots are the first bound: there is one episode in each.

    Attributes:
        max_in_flight: episodes at once, all groups together; None: as many as there are slots.
        max_kv_usage: share of the engine's KV cache, above which no further episode begins; those that run are left
            alone. Counts where the policy tells of its load (`LoadReporting`); there, no more begin between two looks
            at it than are under way, and 8 at least, so that it is seen before it is too much (in lockstep, a batch
            begins as a whole). What an engine cannot hold it throws out and computes again, so that more in flight
            would be slower.
        max_waiting: requests that wait in the engine for a place, above which no further episode begins; None: any.
            It takes a policy that tells of its load.
        max_unread: finished trajectories that nobody has read yet, above which no further episode begins.
        weights_timeout: seconds for which a collection waits for newer weights (see `Collector.batches`) with nothing
            else to do, before it gives up.

    Raises:
        ConfigurationError: a number out of its range.
    """

    max_in_flight: int | None = None
    max_kv_usage: float = 0.95
    max_waiting: int | None = None
    max_unread: int = 4_096
    weights_timeout: float = 3_600.0

    def __post_init__(self) -> None:
        for name in ("max_in_flight", "max_waiting", "max_unread"):
            given = getattr(self, name)
            if given is None and name != "max_unread":
                continue
            object.__setattr__(self, name, checked_int(f"Admission.{name}", given, least=1))
        wait = checked_seconds("Admission.weights_timeout", self.weights_timeout)
        object.__setattr__(self, "weights_timeout", wait)
        usage = self.max_kv_usage
        if isinstance(usage, bool) or not isinstance(usage, int | float) or not 0 < usage <= 1:
            raise ConfigurationError(f"expected Admission.max_kv_usage in (0, 1], actual {usage!r}")

    def refusal(self, state: "Underway") -> str | None:
        """Why no further episode may begin now; None if one may. One always may where none is under way."""
        if state.unread >= self.max_unread:
            return f"{state.unread} finished trajectories that nobody has read"
        if state.episodes == 0:
            return None
        if self.max_in_flight is not None and state.episodes >= self.max_in_flight:
            return f"{state.episodes} episodes in flight"
        if state.kv_usage is not None and state.kv_usage > self.max_kv_usage:
            return f"a KV cache that is {state.kv_usage:.0%} full"
        if self.max_waiting is not None and state.waiting is not None and state.waiting > self.max_waiting:
            return f"{state.waiting} requests that wait in the engine"
        return None


@dataclass(frozen=True, slots=True)
class Underway:
    """What is under way.

    Attributes:
        episodes: that run.
        unread: trajectories that have ended and were not read.
        kv_usage: share of the engine's KV cache in use; None where it does not tell.
        waiting: requests waiting in the engine; None where it does not tell.
    """

    episodes: int = 0
    unread: int = 0
    kv_usage: float | None = None
    waiting: int | None = None


@dataclass(frozen=True, slots=True)
class Staleness:
    """A bound on how old the weights of a trajectory may be when a trainer takes it.

    The trainer takes groups in the order in which they were begun, ``batch`` of them for one version of the weights.
    So group number p of those it takes (from 0, rejected ones not counted) is trained on at version
    ``first + p // batch``. A group may begin at version v only if the groups begun and not rejected, itself included,
    are at most ``(v - first + bound + 1) * batch`` (the bound of AReaL, arXiv 2505.24298, section 5): then p // batch
    is at most ``v - first + bound``, whatever is rejected later, and the group is at most ``bound`` versions old.
    Failed members stay in their groups, and one that is begun anew only gets younger weights: neither changes p.
    Nothing that has been sampled is ever thrown away for its age. Versions are counted, so they are to go up by one.

    Attributes:
        bound: versions, 0 or more. 0: every group begins with the very weights that are trained on it.
        batch: groups that the trainer takes for one version.

    Raises:
        ConfigurationError: a number out of its range.
    """

    bound: int
    batch: int

    def __post_init__(self) -> None:
        for name, least in (("bound", 0), ("batch", 1)):
            words = {"bound": "max_staleness", "batch": "groups"}[name]  # as Collector.batches calls them
            object.__setattr__(self, name, checked_int(words, getattr(self, name), least=least))

    def admits(self, held: int, updates: int) -> bool:
        """Whether one more group may begin.

        Args:
            held: groups begun and not rejected so far.
            updates: versions that the weights have gone up since the collection began.
        """
        return held < (updates + self.bound + 1) * self.batch
