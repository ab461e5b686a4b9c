"""Limits are checked when they are made."""

from dataclasses import fields
from typing import Any

import pytest

from toolgym.envs import ConfigurationError
from toolgym.rollout.limits import Limits


@pytest.mark.parametrize("name", [entry.name for entry in fields(Limits)])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "5", None, True])
def test_zero_and_below_are_refused_by_name(name: str, value: Any) -> None:
    if (name, value) == ("tool_timeout", None):
        assert Limits(tool_timeout=None).tool_timeout is None  # the tools' own
        return
    with pytest.raises(ConfigurationError, match=rf"expected Limits\.{name}"):
        Limits(**{name: value})


@pytest.mark.parametrize("name", ["max_completion_tokens", "max_observation_tokens"])
def test_a_part_may_not_be_larger_than_the_whole(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"Limits\.{name} \(101\) is more than a whole trajectory may have"):
        Limits(**{"max_trajectory_tokens": 100, "max_completion_tokens": 100, "max_observation_tokens": 100, name: 101})


def test_limits_are_frozen_values() -> None:
    assert Limits() == Limits()
    with pytest.raises(AttributeError):
        Limits().max_turns = 3  # type: ignore[misc]
