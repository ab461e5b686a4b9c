"""Python's garbage collector is as it was when a large collection has ended, however it ended."""

import contextlib
import gc
from collections.abc import Iterator

import pytest
from helpers import echo_twice, vector

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import SampleRequest
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.envs import AssistantMessage
from toolgym.rollout import Collector
from toolgym.rollout.garbage import held_off


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    yield
    assert (gc.get_threshold(), gc.get_freeze_count(), gc.isenabled()) == (thresholds, frozen, True)


@pytest.mark.parametrize("slots", [2, 1_000])
def test_full_passes_are_held_off_only_while_thousands_of_slots_collect(chat: ChatFormat, slots: int) -> None:
    seen: set[int] = set()

    def script(request: SampleRequest, member: int) -> AssistantMessage:
        seen.add(gc.get_threshold()[2])
        return echo_twice(request, member)

    envs = vector(slots)
    Collector(envs, ScriptedPolicy(chat, script), chat).collect(2)
    envs.close()
    assert seen == {gc.get_threshold()[2] if slots == 2 else 2**30}


def test_collections_that_overlap_share_it() -> None:
    before = gc.get_threshold()
    one, two = held_off(1_000), held_off(2_000)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_threshold() != before
    two.__exit__(None, None, None)
    assert gc.get_threshold() == before


def test_it_is_put_back_after_an_error() -> None:
    with contextlib.suppress(OSError), held_off(1_000):
        raise OSError


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with held_off(1_000):
            assert gc.get_freeze_count() == 0
        assert not gc.isenabled()
    finally:
        gc.enable()
