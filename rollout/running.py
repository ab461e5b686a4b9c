"""What `toolgym run` does, once it knows what is asked of it."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from toolgym.agents.chat import ChatFormat, load_chat_format
from toolgym.agents.tiny import TINY_MODEL
from toolgym.envs import ConfigurationError, Task, ToolgymError, ToolVectorEnv, tool_env_ids
from toolgym.rollout.collector import Collector, check_time, take_tasks
from toolgym.rollout.dumps import DumpFolder
from toolgym.rollout.limits import Limits
from toolgym.rollout.progress import Progress as Count
from toolgym.rollout.report import summarize
from toolgym.rollout.rollouts import OnTrajectory, rollout
from toolgym.rollout.store import RunFolder, check_free
from toolgym.rollout.traces import TraceFolder
from toolgym.rollout.trajectory import Trajectory
from toolgym.rollout.viewer import plain, summary_table

_RECORDED = 5.0  # seconds between two notes of how long a run has taken


@dataclass(frozen=True)
class RunRequest:
    """A run that is asked for.

    Attributes:
        environments: by id.
        env_options: arguments of the environments.
        out: the run folder.
        model: a model folder, or ``"tiny"``.
        chat: arguments of `load_chat_format`.
        tasks: of each environment; None: 16, or all where there are fewer.
        group_size: trajectories of each task.
        slots: episodes in flight.
        limits: what an episode may use.
        settings: further arguments of `Collector`.
        traces: a folder for trace files, if wanted.
        dump: ``FILEROOT/EXPERIMENT/TRIAL`` of a dump in AReaL's layout, if wanted.
    """

    environments: Sequence[str]
    env_options: dict[str, Any]
    out: Path
    model: str
    chat: dict[str, Any]
    tasks: int | None
    group_size: int
    slots: int
    limits: Limits
    settings: dict[str, Any]
    traces: Path | None
    dump: Path | None

    @property
    def model_folder(self) -> Path:
        """The folder of the model."""
        return TINY_MODEL if self.model == "tiny" else Path(self.model)


def run_all(request: RunRequest, console: Console) -> None:
    """Run it, and print its table; also if it is interrupted or ended by a failure.

    Everything that can be wrong is found before the minute that the engine takes to start.

    Raises:
        ToolgymError: something is wrong, or a failure has ended the run.
        RolloutInterrupted: by Ctrl-C; what had finished is in the folder.
    """
    check_free(request.out)
    chat = load_chat(request.model_folder, request.chat, console)
    with contextlib.ExitStack() as stack:
        vectors = [make_vec(name, request.slots, request.env_options) for name in request.environments]
        chosen: list[Sequence[Task]] = []
        for vector in vectors:
            stack.callback(vector.close)
            chosen.append(take_tasks(vector, request.tasks or min(16, vector.tasks.size or 16)))
            check_time(vector, request.limits)
        sinks = _sinks(request, chat)
        RunFolder.create(request.out, {"environments": request.environments}).discard()
        from toolgym.agents.vllm_policy import VLLMPolicy  # noqa: PLC0415 - here alone, and heavy

        with console.status("starting the engine, this takes about a minute"):
            policy = VLLMPolicy(request.model_folder, max_model_len=request.limits.max_trajectory_tokens)
        stack.callback(policy.close)
        collectors = [
            Collector(vector, policy, chat, request.limits, env_id=name, **request.settings)
            for vector, name in zip(vectors, request.environments, strict=True)
        ]
        described = _described(request, collectors, chosen)
        asked = request.group_size * sum(described["tasks"])
        folder = RunFolder.create(request.out, {**described, "asked": asked})
        try:
            collect(console, collectors, chosen, folder, group_size=request.group_size, sinks=sinks)
        finally:
            show_table(folder, console)


def collect(
    console: Console,
    collectors: Sequence[Collector],
    chosen: Sequence[Sequence[Task]],
    folder: RunFolder,
    *,
    group_size: int,
    sinks: Sequence[OnTrajectory] = (),
) -> None:
    """Collect with each collector in turn, into one folder. What was cancelled is left out: it has not been run."""
    first = 0
    for collector, tasks in zip(collectors, chosen, strict=True):
        name, began = collector.env_id or "", time.monotonic()
        with _progress(console) as progress:
            bar = progress.add_task(name, total=len(tasks) * group_size, solved=0, failed=0, tokens=0)
            noted = began

            def show(count: Count, progress: Progress = progress, bar: Any = bar) -> None:
                progress.update(
                    bar, completed=count.finished, solved=count.solved, failed=count.failed, tokens=count.sampled_tokens
                )

            def keep(trajectory: Trajectory, name: str = name, began: float = began) -> None:
                nonlocal noted
                folder.append(trajectory)
                if time.monotonic() - noted > _RECORDED:
                    noted = time.monotonic()
                    folder.record("seconds", {**folder.seconds, name: noted - began})

            told = [keep, *sinks]
            try:
                rollout(collector, tasks, group_size, first_index=first, on_trajectory=told, on_progress=show)
            finally:
                folder.record("seconds", {**folder.seconds, name: time.monotonic() - began})
        first += len(tasks)


def show_table(folder: RunFolder, console: Console) -> None:
    """Print a run's table, and whether it is the whole of it."""
    summaries = summarize(folder.trajectories())
    console.print(summary_table(summaries, folder.seconds))
    there, asked = sum(summary.trajectories for summary in summaries), folder.info.get("asked")
    if isinstance(asked, int) and there < asked:
        console.print(plain(f"{there} of {asked} trajectories: the run has not come to its end", "yellow"))


def _sinks(request: RunRequest, chat: ChatFormat) -> list[OnTrajectory]:
    sinks: list[OnTrajectory] = []
    if request.traces is not None:
        sinks.append(TraceFolder(request.traces).write)
    if request.dump is not None:
        root, experiment, trial = request.dump.parent.parent, request.dump.parent.name, request.dump.name
        if len(request.dump.parts) < 3:
            raise ConfigurationError(f"expected --dump FILEROOT/EXPERIMENT/TRIAL, actual {str(request.dump)!r}")
        sinks.append(DumpFolder(root, experiment, trial, chat).write)
    return sinks


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("solved {task.fields[solved]}  failed {task.fields[failed]}  tokens {task.fields[tokens]}"),
        TimeElapsedColumn(),
        console=console,
    )


def make_vec(env_id: str, slots: int, options: dict[str, Any]) -> ToolVectorEnv:
    """An environment by id.

    Raises:
        ConfigurationError: there is none of that id, or not of ours, or its options are wrong.
    """
    try:
        vector = gymnasium.make_vec(env_id, num_envs=slots, **options)
    except ToolgymError:
        raise
    except (gymnasium.error.Error, ImportError, ValueError) as error:
        known = ", ".join(tool_env_ids())
        raise ConfigurationError(f"no environment {env_id!r} ({error}); there are: {known}, or module:id") from error
    except TypeError as error:
        raise ConfigurationError(f"environment {env_id}: {error}") from error
    if not isinstance(vector, ToolVectorEnv):
        vector.close()
        raise ConfigurationError(f"environment {env_id!r} is not a tool environment")
    return vector


def _described(
    request: RunRequest, collectors: Sequence[Collector], chosen: Sequence[Sequence[Task]]
) -> dict[str, Any]:
    """What a run remembers of itself and its environments."""
    return {
        "model": request.model,
        "env_options": request.env_options,
        "chat": request.chat,
        "group_size": request.group_size,
        "seed": request.settings["seed"],
        "environments": [collector.env_id for collector in collectors],
        "tasks": [len(tasks) for tasks in chosen],
        "collectors": [collector.config() for collector in collectors],
    }


def load_chat(folder: Path, settings: dict[str, Any], console: Console) -> ChatFormat:
    """The chat format of a model; what its certificate refuses is printed before anything starts."""
    chat = load_chat_format(folder, **settings)
    for probe, reason in (chat.certificate.refused if chat.certificate else {}).items():
        console.print(plain(f"{chat.name} refuses {probe}: {reason}", "yellow"))
    return chat
