"""What many tests share: the embedded model's chat format, and one real vLLM engine for the whole run."""

from collections.abc import Iterator

import pytest

from toolgym.agents.chat import ChatFormat, load_chat_format
from toolgym.agents.tiny import TINY_MODEL
from toolgym.agents.vllm_policy import VLLMPolicy


@pytest.fixture(scope="session")
def chat() -> ChatFormat:
    """The chat format of the embedded model."""
    return load_chat_format(TINY_MODEL)


@pytest.fixture(scope="session")
def engine() -> Iterator[VLLMPolicy]:
    """A real engine with the embedded model; it takes about a minute to start, so there is one for all tests."""
    with VLLMPolicy(TINY_MODEL, max_model_len=2_048, max_num_seqs=64) as policy:
        yield policy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what needs the engine last, so that all else has failed fast before it starts."""
    items.sort(key=lambda item: item.get_closest_marker("vllm") is not None)
