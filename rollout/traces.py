"""`TraceFolder`: one readable file for each trajectory, to look at while a run goes on."""

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from toolgym.envs.errors import ConfigurationError, ToolgymError
from toolgym.envs.waiting import located
from toolgym.rollout.files import make_folder, replace_file, safe_name
from toolgym.rollout.store import trajectory_to_dict
from toolgym.rollout.trajectory import SegmentKind, Trajectory

Question: TypeAlias = Callable[[Trajectory], bool]


class CallbackError(ToolgymError):
    """A callback of the user's raised; what it was asked about was dealt with all the same."""


class TraceFolder:
    """Writes trajectories as JSON files named ``ok-0.3.json`` or ``fail-0.3.json``: task index and member.

    A file is indented, its messages in OpenAI's form; the token columns stand at its end, each on one line:
    ``segments`` as ``[kind, start, end]``, and ``input_ids``, ``loss_mask``, ``logprobs`` and ``versions``, all (T,).

    Args:
        path: the folder; made if it is not there.
        keep: whether a trajectory is written; None writes all.
        success: whether its name begins with ``ok-``; None asks whether it was solved.

    Raises:
        ConfigurationError: a folder that cannot be made, or a callback that cannot be called or is async.
    """

    def __init__(self, path: str | Path, *, keep: Question | None = None, success: Question | None = None) -> None:
        for name, callback in (("keep", keep), ("success", success)):
            _check_callback(name, callback)
        self._keep, self._success = keep, success
        self.path = make_folder(path, "traces")

    def write(self, trajectory: Trajectory) -> Path | None:
        """Write a trajectory, in place of what was written of it before; atomically, so no reader sees half of it.

        Where a callback raises, the trajectory is written nevertheless, as if there were no such callback.

        Returns:
            The file; None if the trajectory was not to be kept.

        Raises:
            CallbackError: a callback raised; it names it, and the trajectory.
            OSError: the file cannot be written.
        """
        wrong: list[CallbackError] = []
        path = None
        if self._ask("keep", self._keep, trajectory, True, wrong):
            ok = self._ask("success", self._success, trajectory, trajectory.solved, wrong)
            path = self._file(trajectory, ok)
            self.path.mkdir(parents=True, exist_ok=True)
            replace_file(path, _readable(trajectory).encode("utf-8", "backslashreplace"))
            self._file(trajectory, not ok).unlink(missing_ok=True)
        if wrong:
            raise wrong[0]
        return path

    def _file(self, trajectory: Trajectory, ok: bool) -> Path:
        return self.path / f"{'ok' if ok else 'fail'}-{safe_name(trajectory.id)}.json"

    @staticmethod
    def _ask(
        name: str, callback: Question | None, trajectory: Trajectory, default: bool, wrong: list[CallbackError]
    ) -> bool:
        if callback is None:
            return default
        try:
            return bool(callback(trajectory))
        except Exception as error:  # noqa: BLE001 - code of the user's, which may raise anything
            made = CallbackError(
                f"the callback {name} of the traces raised on trajectory {trajectory.id}: {located(error)}"
            )
            made.__cause__ = error
            wrong.append(made)
            return default


def _check_callback(name: str, callback: object) -> None:
    if callback is None:
        return
    if not callable(callback):
        raise ConfigurationError(f"expected {name} as a function of a trajectory, actual {callback!r:.100}")
    if inspect.iscoroutinefunction(callback) or inspect.iscoroutinefunction(type(callback).__call__):
        raise ConfigurationError(f"expected {name} as a plain function, actual the async {callback!r:.100}")


def _readable(trajectory: Trajectory) -> str:
    """The JSON of a trace. Lone surrogates are left in it: encoded with backslashes, they are valid JSON."""
    columns = {
        "segments": [[segment.kind.value, segment.start, segment.end] for segment in trajectory.segments],
        "input_ids": trajectory.input_ids.tolist(),
        "loss_mask": trajectory.loss_mask.astype(int).tolist(),
        "logprobs": trajectory.logprobs.tolist(),
        "versions": trajectory.versions.tolist(),
    }
    entry: dict[str, Any] = {k: v for k, v in trajectory_to_dict(trajectory).items() if k not in columns}
    entry["truncated"] = trajectory.truncated
    entry["tokens"] = _counts(trajectory)
    entry["turns"] = [asdict(turn) for turn in trajectory.turns]
    entry["messages"] = entry.pop("messages")  # the longest part last
    head = json.dumps(entry, indent=2, ensure_ascii=False).removesuffix("\n}")
    lines = [f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in columns.items()]
    return ",\n".join([head, *lines]) + "\n}\n"


def _counts(trajectory: Trajectory) -> dict[str, int]:
    """Tokens in all, and of each kind of segment."""
    counts = {"all": len(trajectory)}
    for kind in SegmentKind:
        counts[kind.value] = sum(s.end - s.start for s in trajectory.segments if s.kind is kind)
    return counts
