"""What the documents name is there."""

import inspect
import re
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("span", named())
def test_every_place_that_is_named_exists(span: str) -> None:
    path, _, arguments = span.partition("(")
    found = NAMES[path.split(".")[0]]
    for part in path.split(".")[1:]:
        fields = getattr(found, "__dataclass_fields__", {})
        assert part in fields or hasattr(found, part), f"{part} of {found}"
        found = getattr(found, part, None)
    for keyword in re.findall(r"(\w+)=", arguments):
        assert keyword in inspect.signature(found).parameters
