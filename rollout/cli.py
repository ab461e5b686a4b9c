"""Tool use by language models as vectorized Gymnasium environments: collect, look at what came out, list."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from toolgym.agents.chat import ChatFormat, TemplateRefused, load_chat_format
from toolgym.agents.policy import Sampling
from toolgym.agents.tiny import TINY_MODEL
from toolgym.envs import ConfigurationError, ToolgymError, tool_env_ids
from toolgym.rollout.limits import Limits
from toolgym.rollout.options import parse_options
from toolgym.rollout.prompting import OnBreak
from toolgym.rollout.recovery import OnFailure, Recovery
from toolgym.rollout.rollouts import RolloutInterrupted
from toolgym.rollout.running import RunRequest, make_vec, run_all, show_table
from toolgym.rollout.sandbox_cli import app as sandbox_app
from toolgym.rollout.schedules import ScheduleName
from toolgym.rollout.store import RunFolder
from toolgym.rollout.template_cli import app as template_app
from toolgym.rollout.trajectory import Trajectory
from toolgym.rollout.viewer import TrajectoryView, draw, plain

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False, rich_markup_mode=None
)
app.add_typer(sandbox_app, name="sandbox")
app.add_typer(template_app, name="template")
_FIRST: dict[str, Callable[[Trajectory], bool]] = {
    "solved": lambda trajectory: trajectory.solved,
    "unsolved": lambda trajectory: not trajectory.solved,
    "failed": lambda trajectory: trajectory.failure is not None,
}


@app.command()
def run(
    env: Annotated[list[str], typer.Argument(help="Environments by id, e.g. toolgym/Calculator-v0, or module:id.")],
    out: Annotated[Path, typer.Option(help="A new folder for the run.")],
    model: Annotated[str, typer.Option(help="A model folder, or 'tiny' for the embedded model.")] = "tiny",
    tasks: Annotated[
        int | None, typer.Option(help="Tasks of each environment; by default 16, or all where there are fewer.", min=1)
    ] = None,
    group: Annotated[int, typer.Option(help="Trajectories of each task.", min=1)] = 4,
    slots: Annotated[int, typer.Option(help="Episodes in flight.", min=1)] = 64,
    schedule: Annotated[ScheduleName, typer.Option(help="How slots advance.")] = "overlap",
    seed: Annotated[int, typer.Option(help="Of the run: sampling and environments.", min=0)] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass.")] = 1.0,
    env_option: Annotated[
        list[str] | None, typer.Option(help='An argument of the environment, as name=JSON, e.g. split="test".')
    ] = None,
    on_break: Annotated[
        OnBreak, typer.Option(help="Where a prompt cannot be extended exactly: stop the episode, or split its record.")
    ] = "stop",
    on_failure: Annotated[
        OnFailure, typer.Option(help="A failure of ours: keep it, try the episode again, or end the run.")
    ] = "keep",
    retries: Annotated[int | None, typer.Option(help="How often, with --on-failure retry; 2.", min=0)] = None,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="Say so to environments and rewards.")] = False,
    traces: Annotated[Path | None, typer.Option(help="A folder for a JSON file a trajectory, ok-… or fail-….")] = None,
    dump: Annotated[
        Path | None, typer.Option(help="FILEROOT/EXPERIMENT/TRIAL: also dump text, in AReaL's layout.")
    ] = None,
    family: Annotated[str | None, typer.Option(help="Of the renderers library, e.g. qwen3.")] = None,
    call_syntax: Annotated[str | None, typer.Option(help="Of the model's calls, if it cannot be found out.")] = None,
    chat_option: Annotated[
        list[str] | None, typer.Option(help="An option of the chat template, as name=JSON, e.g. enable_thinking=false.")
    ] = None,
    max_turns: Annotated[int, typer.Option(help="Messages of the model in an episode.")] = 8,
    max_trajectory_tokens: Annotated[int, typer.Option(help="Tokens of an episode.")] = 2_048,
    max_completion_tokens: Annotated[int, typer.Option(help="Tokens of one message of the model.")] = 256,
) -> None:
    """Collect trajectories and keep them in a run folder. Ctrl-C ends it; what has finished is kept."""
    limits = Limits(
        max_turns=max_turns,
        max_trajectory_tokens=max_trajectory_tokens,
        max_completion_tokens=max_completion_tokens,
        max_observation_tokens=min(1_024, max_trajectory_tokens),
    )
    if retries is not None and on_failure != "retry":
        raise ConfigurationError(f"--retries {retries} goes with --on-failure retry, actual {on_failure}")
    settings = {
        "sampling": Sampling(temperature=temperature, top_p=top_p),
        "schedule": schedule,
        "seed": seed,
        "on_break": on_break,
        "recovery": Recovery(on_failure, retries=2 if retries is None else retries),
        "evaluation": evaluation,
    }
    options = parse_options(env_option or [], "--env-option")
    chat_options = parse_options(chat_option or [], "--chat-option")
    chat: dict[str, Any] = {"family": family, "syntax": call_syntax, "options": chat_options}
    request = RunRequest(env, options, out, model, chat, tasks, group, slots, limits, settings, traces, dump)
    try:
        run_all(request, Console())
    except RolloutInterrupted as interrupt:
        Console(stderr=True).print(plain(f"toolgym: {str(interrupt).partition(', see')[0]}: {out} has them", "yellow"))
        raise typer.Exit(130) from interrupt  # as shells have it: 128 and the number of the signal


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="A run folder.")],
    trajectory: Annotated[
        str | None, typer.Argument(help="A trajectory's id, or the first that is: solved, unsolved, failed.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw what is printed into this file.")] = None,
) -> None:
    """Print a run's table, or one of its trajectories turn by turn."""
    folder = RunFolder.open(path)
    console = Console(record=svg is not None)
    if trajectory is None:
        show_table(folder, console)
    else:
        console.print(TrajectoryView(_find(folder, trajectory), _chat_of(folder, console)))
    if svg is not None:
        draw(console, svg, f"toolgym show {path.name}")


def _find(folder: RunFolder, trajectory: str) -> Trajectory:
    wanted = _FIRST.get(trajectory)
    found = next((t for t in folder.trajectories() if (wanted(t) if wanted else t.id == trajectory)), None)
    if found is None:
        known = sorted((t.task_index, t.member) for t in folder.trajectories())
        if wanted:
            raise ConfigurationError(f"none of the {len(known)} trajectories in {folder.path} is {trajectory}")
        ids = f"ids go from {known[0][0]}.{known[0][1]} to {known[-1][0]}.{known[-1][1]}" if known else "it has none"
        names = ", ".join(_FIRST)
        raise ConfigurationError(f"no trajectory {trajectory!r} in {folder.path}: {ids}; or say {names} for the first")
    return found


@app.command()
def envs() -> None:
    """List the registered environments."""
    table = Table("environment", "tools", "what it is")
    for env_id in tool_env_ids():
        vector = make_vec(env_id, 1, {})
        about = (type(vector.envs[0]).__doc__ or "").strip().splitlines()
        table.add_row(plain(env_id), plain(", ".join(vector.tools)), plain(about[0] if about else ""))
        vector.close()
    Console().print(table)


def main() -> None:
    """The entry point: errors of the user's are one line, not a trace."""
    sys.path.insert(0, os.getcwd())  # as python -m does: for environments as module:id
    try:
        app()
    except ToolgymError as error:
        Console(stderr=True).print(plain(f"toolgym: {error}", "red"))
        sys.exit(2)


def _chat_of(folder: RunFolder, console: Console) -> ChatFormat | None:
    """The chat format that a run was made with, if its model is still there."""
    model = str(folder.info.get("model", ""))
    try:
        found = folder.info.get("chat", {})
        chosen = {name: found.get(name) for name in ("family", "syntax", "options")}
        return load_chat_format(TINY_MODEL if model == "tiny" else Path(model), **chosen)
    except (ConfigurationError, TemplateRefused) as error:
        console.print(f"tokens are not shown: {error}", style="yellow")
        return None


if __name__ == "__main__":
    main()
