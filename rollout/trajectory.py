"""`Trajectory`: the record of one episode, in messages and in exact tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from toolgym.agents.policy import Completion, FinishReason
from toolgym.envs.context import Scope
from toolgym.envs.errors import Failure, ToolgymError
from toolgym.envs.messages import Message, to_dict

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
NO_VERSION = -1
_LARGEST_ID = 2**31 - 1
NOT_TRAINED = -100  # the label that losses leave out


class AlignmentError(ToolgymError, ValueError):
    """Token data that does not fit together was refused; the record is as it was before."""


class SegmentKind(StrEnum):
    """Where a stretch of tokens comes from. Only actions were sampled, and only they are trained on."""

    PROMPT = "prompt"
    ACTION = "action"
    OBSERVATION = "observation"


class StopReason(StrEnum):
    """Why an episode ended. Exactly one for each trajectory; a failure of ours has a `Failure` beside it.

    Attributes:
        ANSWERED: the model ended it, by a message without tool calls.
        ENDED_BY_TOOL: a tool that ends episodes succeeded.
        ENDED_BY_ENVIRONMENT: by a bound of the environment's own, such as ``max_steps``.
        MAX_TURNS: calls in the last allowed turn, which are not run.
        MAX_TOOL_CALLS: more calls than are allowed, which are not run.
        COMPLETION_CUT: a turn reached ``max_completion_tokens``.
        TRAJECTORY_BUDGET: a turn, or the answers to its calls, did not fit into what is left of the trajectory.
        OBSERVATION_TOO_LONG: answers do not fit ``max_observation_tokens``, even with all output cut away.
        PROMPT_TOO_LONG: the first prompt leaves no room for a turn.
        UNPARSABLE: too many messages in a row in which no call could be parsed.
        TEMPLATE_REFUSED: the chat format cannot go on exactly; see ``detail``.
        EPISODE_DEADLINE: the episode's time was up; see ``detail`` for what it waited for.
        POLICY_FAILURE: the policy failed: without a reward.
        TOKEN_MISMATCH: the policy was fed other tokens than were recorded: without a reward.
        ENVIRONMENT_FAILURE: the environment failed: without a reward.
        CANCELLED: the collection was ended before: without a reward.
    """

    ANSWERED = "answered"
    ENDED_BY_TOOL = "ended_by_tool"
    ENDED_BY_ENVIRONMENT = "ended_by_environment"
    MAX_TURNS = "max_turns"
    MAX_TOOL_CALLS = "max_tool_calls"
    COMPLETION_CUT = "completion_cut"
    TRAJECTORY_BUDGET = "trajectory_budget"
    OBSERVATION_TOO_LONG = "observation_too_long"
    PROMPT_TOO_LONG = "prompt_too_long"
    UNPARSABLE = "unparsable"
    TEMPLATE_REFUSED = "template_refused"
    EPISODE_DEADLINE = "episode_deadline"
    POLICY_FAILURE = "policy_failure"
    TOKEN_MISMATCH = "token_mismatch"
    ENVIRONMENT_FAILURE = "environment_failure"
    CANCELLED = "cancelled"


_CUT_SHORT = frozenset(
    {
        StopReason.ENDED_BY_ENVIRONMENT,
        StopReason.MAX_TURNS,
        StopReason.MAX_TOOL_CALLS,
        StopReason.COMPLETION_CUT,
        StopReason.TRAJECTORY_BUDGET,
        StopReason.OBSERVATION_TOO_LONG,
        StopReason.PROMPT_TOO_LONG,
        StopReason.UNPARSABLE,
        StopReason.TEMPLATE_REFUSED,
        StopReason.EPISODE_DEADLINE,
    }
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the flat arrays: ``[start, end)``."""

    kind: SegmentKind
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sample: tokens that were one sequence to the model. All arrays (T,), read-only views.

    Attributes:
        input_ids: int32.
        loss_mask: bool, True exactly where the token was sampled.
        logprobs: float32, of sampled tokens; 0.0 elsewhere.
        versions: int32, weight version of sampled tokens; -1 elsewhere.
    """

    input_ids: Ints
    loss_mask: Bools
    logprobs: Floats
    versions: Ints

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def version_span(self) -> tuple[int, int]:
        """The versions of the weights that sampled the first token and the last one; -1 where none was sampled."""
        return _span(self.versions, self.loss_mask)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the model.

    Attributes:
        finish_reason: why the engine stopped sampling it.
        prompt_tokens: length of the prompt it was sampled from.
        completion_tokens: how many tokens were sampled.
        calls: how each of its tool calls ended, in order; ``"unfinished"`` where the step was broken off; empty if
            they were not run.
        reward: what this step gave; with its last step comes the score of the whole.
        score: the components of what was judged at this step, by name; empty without step rewards.
    """

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    calls: tuple[str, ...] = ()
    reward: float = 0.0
    score: Mapping[str, float] = field(default_factory=dict)


class TokenColumns:
    """The flat token arrays of a trajectory, which grow together or not at all: 13 bytes a token.

    ``ids`` (T,) int32; ``mask`` (T,) bool, True where sampled; ``logprobs`` (T,) float32, 0.0 where not sampled;
    ``versions`` (T,) int32, -1 where not sampled.
    """

    _DTYPES: Mapping[str, Any] = {"ids": np.int32, "mask": np.bool_, "logprobs": np.float32, "versions": np.int32}

    def __init__(self) -> None:
        self._columns = {name: np.empty(0, dtype=dtype) for name, dtype in self._DTYPES.items()}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, ids: Ints, mask: bool, logprobs: Floats | float, versions: Ints | int) -> None:
        """Add tokens to all columns. The lengths have been checked by the trajectory."""
        end = self._length + len(ids)
        if end > len(self._columns["ids"]):
            room = max(end, 2 * self._length, 256)
            self._columns = {name: _grown(column, room) for name, column in self._columns.items()}
        for name, value in (("ids", ids), ("mask", mask), ("logprobs", logprobs), ("versions", versions)):
            self._columns[name][self._length : end] = value
        self._length = end

    def view(self, name: str) -> npt.NDArray[Any]:
        """A column as a read-only view."""
        view = self._columns[name][: self._length]
        view.flags.writeable = False
        return view

    def trim(self) -> None:
        """Give back the room that was kept for growing."""
        self._columns = {name: column[: self._length].copy() for name, column in self._columns.items()}


@dataclass(eq=False)
class Trajectory:
    """One episode: messages, tokens, turns, and how it ended.

    The tokens are a list of `Segment`: first the prompt, then actions and observations in turn. `append` is the only
    way in, and refuses what does not fit, so the flat arrays are aligned by construction. Where the prompt could not be
    extended exactly and the run was told to split, a second prompt begins a second sample; see `samples`.

    Attributes:
        env_id: the environment.
        task_id: the task, by its content.
        task_index: position of the task in the run: with ``member`` it names the trajectory.
        member: number within the task's group.
        seed: of the run; sampling and environment seeds are derived from it.
        messages: the conversation; what was sampled is in the tokens, exactly.
        turns: one for each message of the model.
        stop_reason: why it ended; None while it runs.
        reward: of the finished episode, its steps and its end together; None where it failed or was cancelled:
            absent, not zero.
        score: the components of what was judged at the end.
        solved: whether the task was solved.
        failure: what went wrong on our side, if anything did.
        detail: more about why it ended, in words; empty where the stop reason says all.
        seconds: wall time from reset to end.
        evaluation: whether it was made for evaluation rather than for training.
        earlier: the failures of earlier attempts, where the episode was begun anew.
        stats: what environment, tools and rewards have noted in `EpisodeContext.stats`, by name.
    """

    env_id: str
    task_id: str
    task_index: int
    member: int
    seed: int
    messages: tuple[Message, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    stop_reason: StopReason | None = None
    reward: float | None = None
    score: dict[str, float] = field(default_factory=dict)
    solved: bool = False
    failure: Failure | None = None
    detail: str = ""
    seconds: float = 0.0
    evaluation: bool = False
    earlier: tuple[Failure, ...] = ()
    stats: dict[str, tuple[float, ...]] = field(default_factory=dict)
    _tokens: TokenColumns = field(default_factory=TokenColumns, repr=False)

    @property
    def id(self) -> str:
        """Names the trajectory within its run: task index and member."""
        return f"{self.task_index}.{self.member}"

    @property
    def scope(self) -> Scope:
        """The scope of its statistics and of its dump: ``"rollout"``, or ``"eval-rollout"`` in an evaluation."""
        return "eval-rollout" if self.evaluation else "rollout"

    @property
    def cancelled(self) -> bool:
        """Whether the collection was ended before it."""
        return self.stop_reason is StopReason.CANCELLED

    @property
    def input_ids(self) -> Ints:
        """(T,) int32, read-only view. One sequence, unless the trajectory was split: then see `samples`."""
        return self._tokens.view("ids")

    @property
    def loss_mask(self) -> Bools:
        """(T,) bool, True exactly where the token was sampled; read-only view."""
        return self._tokens.view("mask")

    @property
    def logprobs(self) -> Floats:
        """(T,) float32, of sampled tokens; 0.0 elsewhere; read-only view."""
        return self._tokens.view("logprobs")

    @property
    def versions(self) -> Ints:
        """(T,) int32, weight version of sampled tokens; -1 elsewhere; read-only view."""
        return self._tokens.view("versions")

    @property
    def version_span(self) -> tuple[int, int]:
        """The versions of the weights that sampled the first token and the last one; -1 where none was sampled."""
        return _span(self.versions, self.loss_mask)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The training samples: the flat arrays, cut before each prompt. One, unless the trajectory was split.

        None where there are no tokens: it failed before its first prompt.
        """
        starts = [segment.start for segment in self.segments if segment.kind is SegmentKind.PROMPT]
        ends = [*starts[1:], len(self)] if starts else []
        parts = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
        return tuple(Sample(self.input_ids[p], self.loss_mask[p], self.logprobs[p], self.versions[p]) for p in parts)

    @property
    def breaks(self) -> int:
        """How often the prompt could not be extended, and a new sample was begun."""
        return max(0, sum(segment.kind is SegmentKind.PROMPT for segment in self.segments) - 1)

    @property
    def truncated(self) -> bool:
        """Whether it was cut short: a limit ended it and it was scored as it stood, as Gymnasium's ``truncated`` says.

        Not where it came to its own end, nor where something failed or it was cancelled.
        """
        return self.failure is None and self.stop_reason in _CUT_SHORT

    def __len__(self) -> int:
        return len(self._tokens)

    def as_dict(self) -> dict[str, Any]:
        """The record by the field names of multi-turn rollouts. T tokens; all arrays are copies.

        Returns:
            ``input_ids`` (T,) int32; ``labels`` (T,) int32, the ids where sampled, -100 elsewhere; ``loss_mask`` (T,)
            bool; ``logprobs`` (T,) float32; ``versions`` (T,) int32. ``messages`` in OpenAI's form, ``turns`` as their
            number, ``finish_reasons`` as a list of str, one a turn, ``stop_reason`` as a str (None while it runs),
            ``truncated``, ``reward``, ``score``, ``failure`` (a dict of ``kind``, ``where`` and ``message``, or None),
            ``env_id``, ``task_id``, ``task_index``, ``member``. What ended before its first token has empty arrays.

        Raises:
            AlignmentError: the trajectory was split, and so is not one sequence.
        """
        if self.breaks:
            raise AlignmentError(f"trajectory {self.id} was split into {self.breaks + 1} samples: use as_dicts()")
        return self._as_dict(Sample(self.input_ids, self.loss_mask, self.logprobs, self.versions))

    def as_dicts(self) -> list[dict[str, Any]]:
        """`as_dict` for each sample: the arrays are the sample's, all else the trajectory's. One if it is not split."""
        return [self._as_dict(sample) for sample in self.samples] if self.breaks else [self.as_dict()]

    def _as_dict(self, sample: Sample) -> dict[str, Any]:
        failure = self.failure
        return {
            "messages": [to_dict(message) for message in self.messages],
            "input_ids": sample.input_ids.copy(),
            "labels": np.where(sample.loss_mask, sample.input_ids, np.int32(NOT_TRAINED)),
            "loss_mask": sample.loss_mask.copy(),
            "logprobs": sample.logprobs.copy(),
            "versions": sample.versions.copy(),
            "turns": len(self.turns),
            "finish_reasons": [turn.finish_reason.value for turn in self.turns],
            "stop_reason": None if self.stop_reason is None else self.stop_reason.value,
            "truncated": self.truncated,
            "reward": self.reward,
            "score": dict(self.score),
            "failure": failure and {"kind": failure.kind, "where": failure.where, "message": failure.message},
            "env_id": self.env_id,
            "task_id": self.task_id,
            "task_index": self.task_index,
            "member": self.member,
        }

    def append(self, kind: SegmentKind, ids: Sequence[int] | Ints | Completion) -> None:
        """Add a segment: ids for the prompt or an observation, a `Completion` for an action.

        An observation of no tokens is recorded as such; a prompt or an action without tokens is refused.

        Raises:
            AlignmentError: a segment out of order, ids that are no token ids, or an action that is not a completion;
                nothing is changed.
        """
        self._check_order(kind)
        self._add(kind, ids)

    def begin_sample(self, prompt_ids: Sequence[int] | Ints) -> None:
        """Go on from another prompt, which is no continuation of what was recorded: another training sample.

        Raises:
            AlignmentError: what was recorded does not end with an action, or ids that are no token ids.
        """
        if not self.segments or self.segments[-1].kind is not SegmentKind.ACTION:
            raise AlignmentError("another sample begins after an action")
        self._add(SegmentKind.PROMPT, prompt_ids)

    def _add(self, kind: SegmentKind, ids: Sequence[int] | Ints | Completion) -> None:
        start = len(self._tokens)
        if kind is SegmentKind.ACTION:
            if not isinstance(ids, Completion):
                raise AlignmentError("an action is appended as a Completion, with its logprobs and versions")
            values = _checked_ids(ids.token_ids, kind)
            if not len(values) == len(ids.logprobs) == len(ids.versions):
                raise AlignmentError(
                    f"{len(values)} sampled tokens, {len(ids.logprobs)} logprobs, {len(ids.versions)} versions"
                )
            self._tokens.append(values, True, ids.logprobs, ids.versions)
        else:
            if isinstance(ids, Completion):
                raise AlignmentError(f"a completion is an action, not {kind}")
            self._tokens.append(_checked_ids(ids, kind), False, 0.0, NO_VERSION)
        self.segments.append(Segment(kind, start, len(self._tokens)))

    def finish(self) -> None:
        """Give back spare memory; called when the episode has ended."""
        self._tokens.trim()

    def _check_order(self, kind: SegmentKind) -> None:
        last = self.segments[-1].kind if self.segments else None
        expected = {
            None: (SegmentKind.PROMPT,),
            SegmentKind.PROMPT: (SegmentKind.ACTION,),
            SegmentKind.ACTION: (SegmentKind.OBSERVATION,),
            SegmentKind.OBSERVATION: (SegmentKind.ACTION,),
        }[last]
        if kind not in expected:
            raise AlignmentError(f"expected {expected[0]} after {last or 'nothing'}, actual {kind}")

    def __eq__(self, other: object) -> bool:
        """Whether two records say the same, token by token; wall time does not count."""
        if not isinstance(other, Trajectory):
            return NotImplemented
        return _comparable(self) == _comparable(other) and all(
            np.array_equal(self._tokens.view(name), other._tokens.view(name)) for name in TokenColumns._DTYPES
        )

    __hash__ = None  # type: ignore[assignment]  # compared by value, and mutable


def _comparable(trajectory: Trajectory) -> list[Any]:
    skipped = {"_tokens", "seconds"}
    return [getattr(trajectory, name) for name in trajectory.__dataclass_fields__ if name not in skipped]


def _span(versions: Ints, mask: Bools) -> tuple[int, int]:
    sampled = versions[mask]
    return (int(sampled[0]), int(sampled[-1])) if len(sampled) else (NO_VERSION, NO_VERSION)


def _grown(column: npt.NDArray[Any], room: int) -> npt.NDArray[Any]:
    grown = np.empty(room, dtype=column.dtype)
    grown[: len(column)] = column
    return grown


def _checked_ids(ids: Sequence[int] | Ints, kind: SegmentKind) -> Ints:
    values = np.asarray(ids)
    if values.ndim != 1 or (len(values) and not np.issubdtype(values.dtype, np.integer)):
        raise AlignmentError(f"expected {kind} ids as a flat sequence of ints, actual {values.dtype} of {values.shape}")
    if len(values) == 0 and kind is not SegmentKind.OBSERVATION:
        raise AlignmentError(f"expected at least one token in a {kind}, actual none")
    wide = values.dtype != np.int32  # what is not wide cannot be too large
    if len(values) and (values.min() < 0 or (wide and values.max() > _LARGEST_ID)):
        raise AlignmentError(f"{kind} ids out of range: {values.min()} to {values.max()}")
    return values.astype(np.int32, copy=False)  # the columns copy it
