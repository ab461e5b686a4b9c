"""Limits are checked when they are made."""

import pytest

from toolgym.envs import ConfigurationError
from toolgym.rollout.limits import Limits


@pytest.mark.parametrize("name", ["max_completion_tokens", "max_observation_tokens"])
def test_a_part_may_not_be_larger_than_the_whole(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"Limits\.{name} \(101\) is more than a whole trajectory may have"):
        Limits(**{"max_trajectory_tokens": 100, "max_completion_tokens": 100, "max_observation_tokens": 100, name: 101})


def test_limits_are_frozen_values() -> None:
    assert Limits() == Limits()
    with pytest.raises(AttributeError):
        Limits().max_turns = 3  # type: ignore[misc]
