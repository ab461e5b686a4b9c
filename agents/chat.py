"""`ChatFormat`: the only place where messages become tokens and tokens become messages."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolgym.envs.errors import ConfigurationError, ToolgymError
from toolgym.envs.messages import AssistantMessage, Message


class TemplateRefused(ToolgymError):
    """A conversation cannot be extended exactly in this chat format, so it is not extended at all."""


class ChatFormat(ABC):
    """Turns messages into tokens and back, for training and evaluation alike.

    With P the prompt ids, C the sampled ids and D the observation delta, ``P' = P + C + D`` is the next prompt:
    prompts are extended, never rebuilt, and what was sampled is never encoded again.
    """

    name: str
    stop_token_ids: tuple[int, ...]

    @abstractmethod
    def open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """The first prompt, ending where the model is to speak.

        Args:
            messages: the opening conversation.
            tools: OpenAI function schemas.
        """

    @abstractmethod
    def extend(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], new_messages: Sequence[Message]
    ) -> list[int]:
        """The delta D: closing tokens that the model did not sample, the new messages, and the next opening.

        Raises:
            TemplateRefused: it cannot be done exactly.
        """

    @abstractmethod
    def parse(self, completion_ids: Sequence[int], prompt_ids: Sequence[int]) -> AssistantMessage:
        """The message that was sampled. Never raises: a call that cannot be parsed becomes an `InvalidToolCall`."""

    @abstractmethod
    def write(self, message: AssistantMessage | str) -> list[int]:
        """The ids that a model would sample to say this, the stop token included; a str is its raw output.

        For scripted policies and for training data, not for anything that was sampled.
        """

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""


def load_chat_format(model: str | Path, **options: Any) -> ChatFormat:
    """The chat format of a model folder.

    Args:
        model: a folder with ``config.json`` and ``tokenizer.json``.
        **options: of the format, e.g. ``enable_thinking`` for Qwen3.

    Raises:
        ConfigurationError: no such folder, files missing, or a model family whose format is not known here.
        TemplateRefused: the folder's own chat template writes something else than the format does.
    """
    from toolgym.agents.qwen3_chat import Qwen3ChatFormat  # noqa: PLC0415 - the formats build on this module

    folder = check_model_folder(model)
    family = read_json(folder / "config.json").get("model_type")
    if family not in Qwen3ChatFormat.model_types:
        known = ", ".join(Qwen3ChatFormat.model_types)
        raise ConfigurationError(
            f"model type {family!r} in {folder} speaks a chat format that is not supported; supported: {known}"
        )
    return Qwen3ChatFormat.from_folder(folder, **options)


def check_model_folder(model: str | Path) -> Path:
    """The folder of a model, with what every model needs in it.

    Raises:
        ConfigurationError: it is not there, or not a model.
    """
    folder = Path(model)
    if not folder.is_dir():
        raise ConfigurationError(f"no model folder at {folder}: give a folder, or 'tiny' for the embedded model")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigurationError(f"model folder {folder} has no {name}")
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model folder.

    Raises:
        ConfigurationError: it cannot be read, or is none.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"expected a JSON object in {path}, actual {type(content).__name__}")
    return content
