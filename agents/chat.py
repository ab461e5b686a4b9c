"""`ChatFormat`: the only place where messages become tokens and tokens become messages."""

import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from toolgym.envs.errors import ConfigurationError, ToolgymError
from toolgym.envs.messages import AssistantMessage, Message, ToolCall, ToolMessage, UserMessage

if TYPE_CHECKING:
    from toolgym.agents.certificate import Certificate
    from toolgym.agents.chat_threads import ChatThreads

PromptIds: TypeAlias = Sequence[int] | npt.NDArray[np.int32]

_LONG = 200  # characters, from which on a template that cuts texts may cut one
# Text in which no template can see more than text.
_PLAIN = re.compile(r"[A-Za-z0-9.,;:!?()'-]([A-Za-z0-9 .,;:!?()'-]*[A-Za-z0-9.,;:!?()'-])?")


class TemplateWarning(UserWarning):
    """A model's chat template leaves something out that its user will miss."""


class TemplateRefused(ToolgymError):
    """A conversation cannot be extended exactly in this chat format, so it is not extended at all."""


class ChatFormat(ABC):
    """Turns messages into tokens and back, for training and evaluation alike. May be used from any number of threads.

    With P the prompt ids, C the sampled ids and D the observation delta, ``P' = P + C + D`` is the next prompt:
    prompts are extended, never rebuilt, and what was sampled is never encoded again.

    Attributes:
        name: for records and messages.
        call_syntax: name of the syntax of tool calls.
        stop_token_ids: tokens that end a turn.
        certificate: what was proven about the format when it was made; what it refuses is never done.
    """

    name: str
    call_syntax: str
    stop_token_ids: tuple[int, ...]
    certificate: "Certificate | None" = None

    @staticmethod
    def for_tokenizer(
        tokenizer: Any,
        *,
        template: str | None = None,
        family: str | None = None,
        syntax: str | None = None,
        stop_token_ids: Sequence[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> "ChatFormat":
        """The chat format of a tokenizer, with its certificate.

        A family of the renderers library where you name one, or where the tokenizer's own name is one that the library
        knows and the certificate refuses nothing; else whatever the chat template itself shows.

        Args:
            tokenizer: a fast tokenizer of transformers, or a `tokenizers.Tokenizer` with a ``template``.
            template: in Jinja; None takes the tokenizer's own.
            family: of the renderers library, e.g. ``"qwen3"``.
            syntax: of tool calls, e.g. ``"hermes"``; None finds it out.
            stop_token_ids: tokens that end a turn, beyond those which the tokenizer and the template show.
            options: of the template or family, e.g. ``{"enable_thinking": False}``.

        Raises:
            ConfigurationError: a slow tokenizer, no template and no family, or something that does not fit.
        """
        from toolgym.agents.choice import format_of_tokenizer  # noqa: PLC0415 - the formats build on this module

        return format_of_tokenizer(
            tokenizer, template=template, family=family, syntax=syntax, stops=stop_token_ids, options=options or {}
        )

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of all that the format is made of: the same for the same tokenizer and template."""

    @property
    @abstractmethod
    def control_token_ids(self) -> frozenset[int]:
        """The tokens that no text of anybody's can become."""

    @property
    def turn_end_token_ids(self) -> frozenset[int]:
        """The tokens that end turns of the model in a conversation's history."""
        return frozenset(self.stop_token_ids)

    def writes_inline(self, message: AssistantMessage) -> bool:
        """Whether the template can be told of a message only by its raw text, because it writes no such calls."""
        return False

    @abstractmethod
    def inline_reasoning(self, reasoning: str, content: str) -> str | None:
        """The raw output of a model that reasons in its content; None where reasoning has a channel of its own."""

    def open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """The first prompt, ending where the model is to speak.

        Args:
            messages: the opening conversation.
            tools: OpenAI function schemas.

        Raises:
            TemplateRefused: the template cannot write it, or not as the certificate demands.
        """
        try:
            ids = self._open(messages, tools)
        except RecursionError as error:
            raise ConfigurationError("a tool's schema or the arguments of a call are nested too deeply") from error
        later = any(isinstance(message, AssistantMessage | ToolMessage) for message in messages)
        if "P1" in self._refused and any(isinstance(message, ToolMessage) for message in messages):
            raise TemplateRefused(f"{self.name} cannot tell of results (P1: {self._refused['P1']})")
        if "P8" in self._refused or later:
            shown = self.decode(ids)
            if dropped := [m for m in messages if _PLAIN.fullmatch(m.content) and m.content not in shown]:
                raise TemplateRefused(f"{self.name} drops the text of a {type(dropped[0]).__name__}")
        if "P8" in self._refused and ids != self.render(messages, tools, opens=True):
            raise TemplateRefused(f"{self.name} is not exact on this opening (P8: {self._refused['P8']})")
        return ids

    def extend(
        self,
        prompt_ids: PromptIds,
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The delta D: closing tokens that the model did not sample, the new messages, and the next opening.

        Its cost depends on the new messages, not on the prompt's length.

        Args:
            prompt_ids: P, a sequence of ints or an array (P,) int32, whose end alone is looked at.
            completion_ids: C.
            new_messages: all that is new, the answers to all calls of the turn together.
            tools: as given to `open`.

        Raises:
            TemplateRefused: it cannot be done exactly: the certificate says so, or the template cannot write it.
        """
        self._check_extension(prompt_ids, completion_ids, new_messages)
        return self._extend(prompt_ids, completion_ids, new_messages, tools)

    @functools.cached_property
    def threads(self) -> "ChatThreads":
        """A few threads for this format's work; all collections with it share them. They end with it."""
        from toolgym.agents.chat_threads import ChatThreads  # noqa: PLC0415 - it builds on this module

        return ChatThreads()

    @property
    def _refused(self) -> Mapping[str, str]:
        return {} if self.certificate is None else self.certificate.refused

    def _check_extension(
        self, prompt_ids: PromptIds, completion_ids: Sequence[int], new_messages: Sequence[Message]
    ) -> None:
        """Refuse what the certificate refuses."""
        if self.certificate is None:
            return
        refused = self._refused
        if not refused and not self.certificate.one_call:
            return
        answers = sum(isinstance(message, ToolMessage) for message in new_messages)
        if answers > 1 and self.certificate.one_call:
            raise TemplateRefused(f"{self.name} has one call a turn, and cannot write {answers} answers")
        for probe in self._needs(prompt_ids, completion_ids, new_messages, answers):
            if probe in refused:
                raise TemplateRefused(f"{self.name} cannot be extended so ({probe}: {refused[probe]})")

    def _needs(
        self,
        prompt_ids: PromptIds,
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        answers: int,
    ) -> Iterator[str]:
        """The probes on which an extension depends."""
        if answers:
            yield "P1"
            # Only where it matters is the history looked at: whether tools were answered before.
            if "P5" in self._refused and not self._answer_marks.isdisjoint(as_list(prompt_ids)):
                yield "P5"
        if answers > 1:
            yield "P2"
        concerns = {"results"} if answers else set()
        concerns |= {"turns"} if answers < len(new_messages) else set()
        for probe in ("P3", "P4"):
            if self.certificate is not None and concerns & {str(c) for c in self.certificate[probe].concerns}:
                yield probe
        if "P6" in self._refused:
            yield from self._needs_odd(prompt_ids, completion_ids, new_messages, answers)
        if not len(completion_ids) or completion_ids[-1] not in self.stop_token_ids:
            yield "P7"

    def _needs_odd(
        self,
        prompt_ids: PromptIds,
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        answers: int,
    ) -> Iterator[str]:
        """Whether an extension depends on P6, where that was refused: on odd texts, or on text beside calls."""
        assert self.certificate is not None  # it has refused
        concerns = {str(concern) for concern in self.certificate["P6"].concerns}
        odd = not all(_PLAIN.fullmatch(m.content) and len(m.content) <= _LONG for m in new_messages)
        beside = "text beside calls" in concerns and answers and self.parse(completion_ids, prompt_ids).content
        if (odd and concerns != {"text beside calls"}) or beside:
            yield "P6"

    @functools.cached_property
    def _answer_marks(self) -> frozenset[int]:
        """Control tokens that stand beside answers of tools alone; where there are none, those of every prompt."""
        said = self.write(AssistantMessage("", (ToolCall("f", {}),)))
        prompt = self._open((UserMessage("Hi."),), ())
        answer = self._extend(prompt, said, (ToolMessage("x", "call_0", "f"),), ())
        other = self._extend(prompt, self.write(AssistantMessage("x")), (UserMessage("x"),), ())
        marks = self.control_token_ids & set(answer) - set(other) - set(prompt)
        return marks or self.control_token_ids & set(prompt)

    @abstractmethod
    def _open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """`open`, whatever the certificate says."""

    @abstractmethod
    def _extend(
        self,
        prompt_ids: PromptIds,
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        """`extend`, whatever the certificate says."""

    @abstractmethod
    def parse(
        self,
        completion_ids: Sequence[int],
        prompt_ids: PromptIds,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> AssistantMessage:
        """The message that was sampled. Never raises: a call that cannot be parsed becomes an `InvalidToolCall`.

        Args:
            completion_ids: C.
            prompt_ids: P, whose end alone is looked at: it may have opened the reasoning.
            tools: as given to `open`: their schemas give the arguments of untyped syntaxes their types.
        """

    @abstractmethod
    def write(self, message: AssistantMessage | str) -> list[int]:
        """The ids that a model would sample to say this, the stop token included; a str is its raw output.

        For scripted policies and for training data, not for anything that was sampled.
        """

    @abstractmethod
    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, opens: bool) -> list[int]:
        """A whole conversation as the model's own template and tokenizer give it, to compare with. Never a prompt.

        Args:
            messages: the conversation, its texts as they are.
            tools: function schemas.
            opens: whether the assistant's next turn is opened.

        Raises:
            TemplateRefused: the template cannot write this conversation.
        """

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""


def load_chat_format(
    model: str | Path,
    *,
    family: str | None = None,
    syntax: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> ChatFormat:
    """The chat format of a model folder: see `ChatFormat.for_tokenizer`.

    Args:
        model: a folder with ``config.json`` and ``tokenizer.json``.
        family: of the renderers library; None decides by the model.
        syntax: of tool calls; None finds it out.
        options: of the template or family, e.g. ``{"enable_thinking": False}``.

    Raises:
        ConfigurationError: no such folder, files missing or broken, or no chat template and no family known to fit.
    """
    from toolgym.agents.choice import format_of_folder  # noqa: PLC0415 - the formats build on this module

    return format_of_folder(check_model_folder(model), family=family, syntax=syntax, options=options or {})


def check_model_folder(model: str | Path) -> Path:
    """The folder of a model, with what every model needs in it.

    Raises:
        ConfigurationError: it is not there, or not a model.
    """
    if not isinstance(model, str | Path):
        raise ConfigurationError(f"expected a model folder as a path, actual {type(model).__name__}")
    folder = Path(model)
    try:
        there = folder.is_dir()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"no model folder at {str(model)[:60]}: {error}") from error
    if not there:
        raise ConfigurationError(f"no model folder at {folder}: give a folder, or 'tiny' for the embedded model")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigurationError(f"model folder {folder} has no {name}")
    return folder


def as_list(ids: PromptIds) -> list[int]:
    """Token ids as a list of ints."""
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model folder.

    Raises:
        ConfigurationError: it cannot be read, or is none.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"expected a JSON object in {path}, actual {type(content).__name__}")
    return content
