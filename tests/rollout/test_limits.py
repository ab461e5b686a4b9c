"""Limits are checked when they are made."""

from typing import Any

import numpy as np
import pytest

from toolgym.envs import ConfigurationError
from toolgym.rollout.admission import Admission, Staleness
from toolgym.rollout.limits import Limits
from toolgym.rollout.recovery import Recovery


@pytest.mark.parametrize("name", ["max_completion_tokens", "max_observation_tokens"])
def test_a_part_may_not_be_larger_than_the_whole(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"Limits\.{name} \(101\) is more than a whole trajectory may have"):
        Limits(**{"max_trajectory_tokens": 100, "max_completion_tokens": 100, "max_observation_tokens": 100, name: 101})


def test_limits_are_frozen_values() -> None:
    assert Limits() == Limits()
    with pytest.raises(AttributeError):
        Limits().max_turns = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda n: Limits(max_turns=n), "max_turns"),
        (lambda n: Recovery(retries=n), "retries"),
        (lambda n: Recovery(request_retries=n), "request_retries"),
        (lambda n: Admission(max_in_flight=n), "max_in_flight"),
        (lambda n: Admission(max_waiting=n), "max_waiting"),
        (lambda n: Admission(max_unread=n), "max_unread"),
        (lambda n: Staleness(bound=n, batch=1), "bound"),
        (lambda n: Staleness(bound=0, batch=n), "batch"),
    ],
)
def test_counts_of_numpy_are_kept_as_plain_ints(made: Any, name: str) -> None:
    assert made(np.int64(3)) == made(3)
    assert type(getattr(made(np.int32(3)), name)) is int
    for wrong in (np.int64(-1), np.float64(3.0), np.bool_(True), True):
        with pytest.raises(ConfigurationError, match="actual"):
            made(wrong)
