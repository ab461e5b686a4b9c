"""What the documents name is there."""

import inspect
import re
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from toolgym import envs, rollout
from toolgym.agents import policy, vllm_policy
from toolgym.envs.context import EpisodeContext
from toolgym.rollout import dumps, progress, tensors, traces, trajectory

DOCS = Path(__file__).resolve().parent.parent / "docs"
NAMES: dict[str, Any] = {}
for module in (policy, vllm_policy, dumps, progress, tensors, traces, trajectory, envs, rollout):
    NAMES |= {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
NAMES |= {"EpisodeContext": EpisodeContext}


def named() -> list[str]:
    """The names of ours in the tables: what stands in code in their second column."""
    rows = [line for line in (DOCS / "coming-from.md").read_text().splitlines() if line.startswith("| ")]
    cells = [row.split(" | ", 1)[1] for row in rows if not row.startswith("| there")]
    spans = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
    return sorted({span for span in spans if re.match(r"[A-Z]\w+|\w+\(", span)})


def part_of(owner: Any, part: str) -> list[Any]:
    """What a name of the documents may mean: an attribute or, where it is a field, the classes of its values."""
    if part not in getattr(owner, "__dataclass_fields__", {}):
        return [getattr(owner, part)] if hasattr(owner, part) else []
    hint = get_type_hints(owner)[part]
    return list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [get_origin(hint) or hint]


def check(span: str) -> None:
    path, _, arguments = span.partition("(")
    first, *parts = path.split(".")
    found = [NAMES[first]]
    for part in parts:
        owners, found = found, [entry for owner in found for entry in part_of(owner, part)]
        assert found, f"{part} of {owners}"
    for keyword in re.findall(r"(\w+)=", arguments):
        assert keyword in inspect.signature(found[0]).parameters


@pytest.mark.parametrize("span", named())
def test_every_place_that_is_named_exists(span: str) -> None:
    check(span)


@pytest.mark.parametrize(
    "span",
    ["Nowhere", "Collector.nothing", "Collector.limits.nothing", "Rollout.progress.nothing", "rollout(nothing=)"],
)
def test_one_that_does_not_is_found_out(span: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        check(span)
