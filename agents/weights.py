"""New weights for a running model: judged by the files' headers before anything is touched."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolgym.agents.chat import read_json
from toolgym.envs.errors import ConfigurationError

_INDEX = "model.safetensors.index.json"
# Any of these may be loaded into any other.
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# Entries of config.json that do not change what a model computes when it samples.
_IDLE = frozenset(
    {
        "_name_or_path",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_SHOWN = 3  # names in a message


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    kind: str  # as safetensors names it, all floats that fit each other as one

    def __str__(self) -> str:
        return f"{self.kind} {list(self.shape)}"


class WeightLayout:
    """What weights must look like to take the place of a model's: names, shapes, kinds of number, and configuration.

    Args:
        folder: the model's.

    Raises:
        ConfigurationError: its config.json or its safetensors cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._config = read_json(folder / "config.json")
        self._tensors = _headers(folder)

    def check(self, folder: Path) -> None:
        """Check a model folder by its config.json and the headers of its safetensors; tensors are not read.

        Raises:
            ConfigurationError: it is not there, broken, or another model's.
        """
        if not folder.is_dir():
            raise ConfigurationError(f"no model folder at {folder}: give one that holds config.json and safetensors")
        config = read_json(folder / "config.json")
        if other := _other(self._config, config):
            key, ours, theirs = other
            raise ConfigurationError(f"{folder} is another model: {key} is {theirs!r}, the running model's {ours!r}")
        if missing := [key for key in ("architectures", "model_type") if key in self._config and key not in config]:
            raise ConfigurationError(f"{folder}/config.json does not say its {missing[0]}")
        self.check_tensors(folder)

    def check_tensors(self, folder: Path) -> None:
        """Check the safetensors of a folder alone. Raises as `check`."""
        found = _headers(folder)
        extra = found.keys() - self._tensors.keys()
        if self._config.get("tie_word_embeddings"):
            extra -= {name for name in extra if name.endswith("lm_head.weight") and self._is_copy(folder, name)}
        for said, names in (("lack", self._tensors.keys() - found.keys()), ("have, beyond the model's,", extra)):
            if names:
                shown = ", ".join(sorted(names)[:_SHOWN])
                raise ConfigurationError(f"the weights in {folder} {said} {len(names)} tensors: {shown}")
        for name, tensor in self._tensors.items():
            if found[name] != tensor:
                raise ConfigurationError(
                    f"the weights in {folder} do not fit: expected {name} as {tensor}, actual {found[name]}"
                )

    def _is_copy(self, folder: Path, name: str) -> bool:
        """Whether a tensor that the model does not have repeats one that it has, as tied weights may."""
        import torch  # noqa: PLC0415 - heavy
        from safetensors import safe_open  # noqa: PLC0415 - heavy

        files = {key: file for file in _files(folder) for key in _names(file)}

        def read(key: str) -> Any:
            with safe_open(files[key], framework="pt") as opened:
                return opened.get_tensor(key)

        tensor = read(name)
        alike = [key for key, known in self._tensors.items() if known.shape == tuple(tensor.shape) and key in files]
        return any(torch.equal(tensor, read(key)) for key in alike)


def _other(ours: Mapping[str, Any], theirs: Mapping[str, Any], within: str = "") -> tuple[str, Any, Any] | None:
    """The first entry on which two configurations differ; what only one of them says is a default of the other's."""
    for key in sorted((ours.keys() & theirs.keys()) - _IDLE):
        if isinstance(ours[key], dict) and isinstance(theirs[key], dict):
            if found := _other(ours[key], theirs[key], f"{within}{key}."):
                return found
        elif ours[key] != theirs[key]:
            return f"{within}{key}", ours[key], theirs[key]
    return None


@contextlib.contextmanager
def as_folder(source: Any, layout: WeightLayout) -> Iterator[Path]:
    """New weights as a folder that an engine can load, checked.

    Args:
        source: a model folder, or a mapping of names to whole torch tensors (on any device), which is written to a
            temporary folder. Names of tensors that repeat another's memory, as tied weights do, may be among them.
        layout: the running model's.

    Raises:
        ConfigurationError: they do not fit, or cannot be written.
    """
    if isinstance(source, str | Path):
        folder = Path(source).absolute()  # the engine's process may have another working directory
        layout.check(folder)
        yield folder
    elif isinstance(source, Mapping):
        with tempfile.TemporaryDirectory(prefix="toolgym-weights-") as name:
            _write(source, Path(name))
            layout.check_tensors(Path(name))
            yield Path(name)
    else:
        raise ConfigurationError(
            f"expected new weights as a model folder or a mapping of tensors, actual {type(source).__name__}"
        )


def _write(tensors: Mapping[Any, Any], folder: Path) -> None:
    import torch  # noqa: PLC0415 - heavy
    from safetensors import SafetensorError  # noqa: PLC0415 - heavy
    from safetensors.torch import save_file  # noqa: PLC0415 - heavy

    if wrong := [name for name, tensor in tensors.items() if not isinstance(tensor, torch.Tensor)]:
        raise ConfigurationError(f"expected torch tensors, actual {type(tensors[wrong[0]]).__name__} for {wrong[0]!r}")
    if odd := [name for name in tensors if not isinstance(name, str)]:
        raise ConfigurationError(f"expected the names of tensors as str, actual {odd[0]!r}")
    # By what they can do: to import the class takes a torch that is built with distribution.
    if parts := [name for name, tensor in tensors.items() if hasattr(tensor, "full_tensor")]:
        raise ConfigurationError(
            f"{parts[0]!r} is a {type(tensors[parts[0]]).__name__}, of which each process has a part: gather full "
            "tensors first (full_tensor(), on all ranks)"
        )
    own: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        flat = tensor.detach().to("cpu").contiguous()
        if flat.untyped_storage().data_ptr() in seen:
            flat = flat.clone()  # the file format refuses memory that is shared, as that of tied weights is
        seen.add(flat.untyped_storage().data_ptr())
        own[name] = flat
    try:
        save_file(own, folder / "model.safetensors")
    except (OSError, SafetensorError) as error:  # a full disk is one of the latter
        raise ConfigurationError(f"the weights cannot be written to {folder}: {error} (TMPDIR says where)") from error


def _headers(folder: Path) -> dict[str, _Tensor]:
    """Every tensor of a folder's safetensors."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - heavy

    found: dict[str, _Tensor] = {}
    for file in _files(folder):
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping
                    part = opened.get_slice(name)
                    kind = part.get_dtype()
                    found[name] = _Tensor(tuple(part.get_shape()), "float" if kind in _FLOATS else kind)
        except (SafetensorError, OSError) as error:
            raise ConfigurationError(f"{file} cannot be read as safetensors: {error}") from error
    return found


def _names(file: Path) -> list[str]:
    from safetensors import safe_open  # noqa: PLC0415 - heavy

    with safe_open(file, framework="numpy") as opened:
        return list(opened.keys())


def _files(folder: Path) -> list[Path]:
    """The safetensors that an engine would load."""
    if (folder / _INDEX).is_file():
        shards = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise ConfigurationError(f"expected names of files in weight_map of {folder / _INDEX}")
        files = sorted({folder / shard for shard in shards.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigurationError(f"{folder} holds no safetensors")
    return files
