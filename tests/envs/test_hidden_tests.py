"""How results of hidden tests are told and compared: exactly, and without trust in who tells them."""

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgym.envs.catalog.hidden_tests import HiddenTest, judge, same_value
from toolgym.envs.catalog.hidden_tests_box import CodecError, decode, encode

_HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.just(2**80),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
VALUES = st.recursive(
    _HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.sets(_HASHABLE, max_size=3)
        | st.dictionaries(_HASHABLE | st.sampled_from(["$set", "$raises", "a"]), inner, max_size=3)
    ),
    max_leaves=10,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["$set", "$dict", "$tuple", "$int", "$float", "value", "a"]), inner, max_size=2
        )
    ),
    max_leaves=8,
)


def alike(a: Any, b: Any) -> bool:
    """The same value of the same type, told in another way than the code does."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(alike(x, y) for y in b) for x in a)
    if isinstance(a, dict):
        return len(a) == len(b) and all(any(alike(k, j) and alike(a[k], b[j]) for j in b) for k in a)
    return bool(a == b)


@given(VALUES)
def test_a_value_travels_as_json_and_is_itself_again(value: Any) -> None:
    form = json.loads(json.dumps(encode(value)))
    assert alike(decode(form), value)
    assert same_value(encode(value), form)
    assert json.dumps(encode(decode(form)), sort_keys=True) == json.dumps(encode(value), sort_keys=True)


@given(VALUES, VALUES)
def test_what_counts_as_the_same_is_the_same(one: Any, other: Any) -> None:
    if alike(one, other):
        assert same_value(encode(one), encode(other)) or "-0.0" in repr((one, other))
    elif same_value(encode(one), encode(other)):
        assert "." in repr(one) or "e" in repr(one), "only floats have a tolerance"


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        (1, True, False),
        (0, False, False),
        (1, 1.0, False),
        (1.0, 1.0 + 1e-12, True),
        (1.0, 1.001, False),
        (0.0, -0.0, True),
        (float("nan"), float("nan"), True),
        (float("inf"), -float("inf"), False),
        (float("inf"), 1e308, False),
        ([1], (1,), False),
        ((1, 2), (1, 2), True),
        ({1, 2}, {2, 1}, True),
        ({1}, frozenset({1}), False),
        ({1}, {True}, False),
        ({1: 2, 3: 4}, {3: 4, 1: 2}, True),
        ({1: 2}, {True: 2}, False),
        ({"a": 0.5}, {"a": 0.5 + 1e-12}, True),
        ({1: 0.5}, {1: 0.5 + 1e-12}, True),
        ({"a": [None]}, {"a": [[]]}, False),
        ({}, set(), False),
        ([], {}, False),
        (None, False, False),
        ("1", 1, False),
        ("a", b"a", False),
        (2**80, 2**80, True),
        (2**80, 2**80 + 1, False),
        (2**80, float(2**80), False),
        ({"$int": "0x1"}, 1, False),
    ],
)
def test_types_and_values_are_compared_strictly(expected: Any, actual: Any, same: bool) -> None:
    assert same_value(encode(expected), encode(actual)) is same


@pytest.mark.parametrize("value", [object(), 1j, range(3), {1: object()}, type("L", (list,), {})(), Ellipsis, print])
def test_what_has_no_form_is_refused(value: Any) -> None:
    with pytest.raises(CodecError):
        encode(value)


@pytest.mark.parametrize("value", [[[]] * 60_000, list(itertools.accumulate([[]] * 100, lambda a, _: [a]))[-1]])
def test_what_is_too_large_or_deep_is_refused(value: Any) -> None:
    with pytest.raises(CodecError, match="too deeply, or too large"):
        encode(value)


FOUR = [HiddenTest([n], n * n) for n in (2, 3, 5, 7)]


@given(st.binary() | JSON.map(lambda data: json.dumps(data).encode()))
def test_any_bytes_from_a_box_are_judged(data: bytes) -> None:
    assert judge(data, FOUR) == [False] * 4


@given(st.lists(JSON | JSON.map(lambda data: json.dumps({"value": data})), min_size=4, max_size=4))
def test_any_results_from_a_box_are_judged(lines: list[Any]) -> None:
    right = [
        isinstance(line, str) and line == json.dumps({"value": t.expected}) for line, t in zip(lines, FOUR, strict=True)
    ]
    assert judge(json.dumps(lines).encode(), FOUR) == right


@given(VALUES, JSON)
def test_a_forged_result_is_wrong_and_nothing_more(value: Any, forged: Any) -> None:
    test = HiddenTest([], encode(value))
    line = json.dumps([json.dumps({"value": forged})]).encode()
    assert judge(line, [test]) in ([False], [True])


def test_a_flood_of_results_is_judged() -> None:
    assert judge(b"[" + b" " * 9 * 1024 * 1024 + b"]", FOUR) == [False] * 4
    for data in (b"[" * 10**6, b"9" * 10**6, b'["' + b"x" * 10**7 + b'"]', b"", b"\xff", b"null"):
        assert judge(data, FOUR) == [False] * 4
    deep = json.dumps(["[" * 10**5, "9" * 10**4, '{"value": ' + "[" * 10**5, '{"value": 49}']).encode()
    assert judge(deep, FOUR) == [False, False, False, True]
