"""New weights in memory are written for the engine, or refused in words that say what to do."""

import contextlib
import resource
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from toolgym.agents.tiny import TINY_MODEL
from toolgym.agents.weights import WeightLayout, as_folder
from toolgym.envs import ConfigurationError


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a kilobyte. So it is for the whole process: nothing else may write meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_where_the_disk_is_full_it_says_where_that_is() -> None:
    weights, layout = load_file(TINY_MODEL / "model.safetensors"), WeightLayout(TINY_MODEL)
    said = r"cannot be written to .*File too large.*TMPDIR says where"
    with pytest.raises(ConfigurationError, match=said), full_disk(), as_folder(weights, layout):
        pass


@pytest.fixture
def mesh() -> Iterator[Any]:
    """One process that trains in parts."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_tensors_of_which_each_process_has_a_part_are_to_be_gathered(mesh: Any) -> None:
    whole = load_file(TINY_MODEL / "model.safetensors")
    parts = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    layout = WeightLayout(TINY_MODEL)
    with (
        pytest.raises(ConfigurationError, match=r"is a DTensor, .*gather full tensors first"),
        as_folder(parts, layout),
    ):
        pass
    with as_folder({name: tensor.full_tensor() for name, tensor in parts.items()}, layout) as folder:
        written = load_file(folder / "model.safetensors")
    assert all(torch.equal(written[name], whole[name]) for name in whole)
