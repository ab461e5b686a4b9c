"""What many tests share: the embedded model's chat format, one real vLLM engine for the whole run, a Docker engine."""

import os
from collections.abc import Iterator

import docker
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


@pytest.fixture(scope="session")
def docker_engine() -> None:
    """A Docker engine. Tests that need one fail without it, unless TOOLGYM_NO_DOCKER=1 says that none is there."""
    if os.environ.get("TOOLGYM_NO_DOCKER") == "1":
        pytest.skip("no Docker engine (TOOLGYM_NO_DOCKER=1)")
    try:
        client = docker.APIClient(version="auto", timeout=10)
        client.ping()
        client.close()
    except docker.errors.DockerException as error:
        pytest.fail(f"no Docker engine answers ({error}): run 'make docker', or set TOOLGYM_NO_DOCKER=1")


@pytest.fixture(autouse=True)
def _needs_docker(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("docker") is not None:
        request.getfixturevalue("docker_engine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what needs the engine last, so that all else has failed fast before it starts."""
    items.sort(key=lambda item: item.get_closest_marker("vllm") is not None)
