"""A record is aligned by construction: what does not fit is refused and changes nothing."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgym.agents.policy import Completion, FinishReason, PolicyFailure
from toolgym.rollout.losses import shift
from toolgym.rollout.trajectory import AlignmentError, SegmentKind, Trajectory

PROMPT, ACTION, OBSERVATION = SegmentKind.PROMPT, SegmentKind.ACTION, SegmentKind.OBSERVATION


def completion(ids: list[int], logprob: float = -0.5, version: int = 3) -> Completion:
    count = len(ids)
    return Completion(
        np.asarray(ids, np.int32),
        np.full(count, logprob, np.float32),
        np.full(count, version, np.int32),
        FinishReason.STOP,
    )


def trajectory(*parts: list[int]) -> Trajectory:
    made = Trajectory("env", "task", 0, 0, 0)
    for position, ids in enumerate(parts):
        if position == 0:
            made.append(PROMPT, ids)
        elif position % 2:
            made.append(ACTION, completion(ids))
        else:
            made.append(OBSERVATION, ids)
    return made


token_ids = st.integers(0, 2**31 - 1)
some = st.lists(token_ids, min_size=1, max_size=300)


@given(some, st.lists(st.tuples(some, st.lists(token_ids, max_size=20)), max_size=6))
def test_any_interleaving_is_a_chain_of_prompts_with_the_mask_on_what_was_sampled(
    first: list[int], turns: list[tuple[list[int], list[int]]]
) -> None:
    made = trajectory(first)
    prompt, mask = list(first), [False] * len(first)
    for sampled, delta in turns:
        assert made.input_ids.tolist() == prompt
        made.append(ACTION, completion(sampled))
        made.append(OBSERVATION, delta)
        prompt = prompt + sampled + delta  # P(i+1) = P(i) + C(i) + D(i)
        mask += [True] * len(sampled) + [False] * len(delta)
    made.finish()
    assert made.input_ids.tolist() == prompt
    assert made.loss_mask.tolist() == mask
    assert len(made) == len(made.logprobs) == len(made.versions) == len(mask)
    assert (made.logprobs[made.loss_mask] == np.float32(-0.5)).all()
    assert (made.logprobs[~made.loss_mask] == 0).all()
    assert (made.versions[made.loss_mask] == 3).all()
    assert (made.versions[~made.loss_mask] == -1).all()
    assert [segment.end for segment in made.segments[:-1]] == [segment.start for segment in made.segments[1:]]
    assert (made.input_ids.dtype, made.loss_mask.dtype, made.logprobs.dtype) == (np.int32, np.bool_, np.float32)


@pytest.mark.parametrize(
    ("parts", "kind", "ids", "said"),
    [
        ([], ACTION, completion([1]), "expected prompt after nothing, actual action"),
        ([], OBSERVATION, [1], "expected prompt after nothing, actual observation"),
        ([[1]], PROMPT, [1], "expected action after prompt, actual prompt"),
        ([[1], [2]], ACTION, completion([1]), "expected observation after action"),
        ([[1], [2], [3]], OBSERVATION, [1], "expected action after observation"),
        ([[1]], ACTION, [2], "appended as a Completion"),
        ([[1], [2]], OBSERVATION, completion([2]), "a completion is an action"),
        ([], PROMPT, [], "at least one token in a prompt"),
        ([], PROMPT, [-1], "out of range"),
        ([], PROMPT, [2**31], "out of range"),
        ([], PROMPT, [0.5], "flat sequence of ints"),
        ([], PROMPT, [[1]], "flat sequence of ints"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    parts: list[list[int]], kind: SegmentKind, ids: Any, said: str
) -> None:
    made, before = trajectory(*parts), trajectory(*parts)
    with pytest.raises(AlignmentError, match=said):
        made.append(kind, ids)
    assert made == before


@pytest.mark.parametrize("column", ["logprobs", "versions"])
def test_a_completion_that_was_tampered_with_is_refused(column: str) -> None:
    made, sampled = trajectory([1]), completion([1, 2])
    object.__setattr__(sampled, column, getattr(sampled, column)[:-1])
    with pytest.raises(AlignmentError, match="2 sampled tokens"):
        made.append(ACTION, sampled)
    assert made == trajectory([1])


@pytest.mark.parametrize(
    ("logprobs", "said"),
    [
        ([-0.1], "2 tokens, 1 logprobs"),
        ([-0.1, float("nan")], "nan as the logprob of token 1 of 2"),
        ([float("-inf"), -0.1], "-inf as the logprob of token 0"),
        ([-0.1, -9999.0], "-9999.0 as the logprob"),
        ([0.5, -0.1], "0.5 as the logprob"),
    ],
)
def test_a_completion_needs_one_finite_logprob_a_token(logprobs: list[float], said: str) -> None:
    with pytest.raises(PolicyFailure, match=said):
        Completion(np.array([1, 2], np.int32), np.array(logprobs, np.float32), np.zeros(2, np.int32), FinishReason.STOP)
    with pytest.raises(PolicyFailure, match="without a single token"):
        completion([])


def test_views_cannot_be_written_through() -> None:
    made = trajectory([1], [2, 3], [4])
    for view in (made.input_ids, made.loss_mask, made.logprobs, made.versions):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


def test_a_token_takes_thirteen_bytes() -> None:
    made = trajectory(list(range(1_000)), list(range(1_000)))
    made.finish()
    held = sum(column.base.nbytes if column.base is not None else 0 for column in (made.input_ids, made.loss_mask))
    held += sum(column.base.nbytes if column.base is not None else 0 for column in (made.logprobs, made.versions))
    assert held == 13 * 2_000


def test_shifting_scores_each_token_where_it_is_predicted() -> None:
    made = trajectory([10, 11], [12, 13], [14], [15])
    shifted = shift(made)
    assert shifted.input_ids.tolist() == [10, 11, 12, 13, 14]
    assert shifted.targets.tolist() == [11, 12, 13, 14, 15]
    assert shifted.loss_mask.tolist() == [False, True, True, False, True]
    assert shifted.targets[shifted.loss_mask].tolist() == [12, 13, 15]
    assert (shifted.logprobs[shifted.loss_mask] == np.float32(-0.5)).all()
    assert shifted.versions.tolist() == [-1, 3, 3, -1, 3]


def test_equality_sees_every_token_and_not_the_clock() -> None:
    one, two = trajectory([1], [2]), trajectory([1], [2])
    two.seconds = 9.0
    assert one == two
    assert one != trajectory([1], [3])
    two.solved = True
    assert one != two
    assert one != "something else"


def test_a_second_prompt_begins_another_sample_and_only_by_name() -> None:
    made = trajectory([1, 2], [3], [4, 5], [6])
    with pytest.raises(AlignmentError, match="expected observation after action, actual prompt"):
        made.append(PROMPT, [7])
    made.begin_sample([7, 8, 9])
    with pytest.raises(AlignmentError, match="another sample begins after an action"):
        made.begin_sample([1])
    made.append(ACTION, completion([10, 11]))
    first, second = made.samples
    assert made.breaks == 1
    assert (first.input_ids.tolist(), first.loss_mask.tolist()) == (
        [1, 2, 3, 4, 5, 6],
        [False, False, True, False, False, True],
    )
    assert (second.input_ids.tolist(), second.loss_mask.tolist()) == (
        [7, 8, 9, 10, 11],
        [False, False, False, True, True],
    )
    assert shift(second).targets.tolist() == [8, 9, 10, 11]
    with pytest.raises(AlignmentError, match="was split: shift each of its 2 samples"):
        shift(made)
    with pytest.raises(AlignmentError, match="another sample begins after an action"):
        trajectory().begin_sample([1])
