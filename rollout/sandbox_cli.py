"""``toolgym sandbox``: build the image, examine what isolates, remove orphans, measure."""

import asyncio
import time
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.sandbox.choice import BackendName
from toolgym.envs.sandbox.limits import SandboxLimits
from toolgym.envs.sandbox.sandbox import SandboxPool
from toolgym.rollout.viewer import plain

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False, rich_markup_mode=None
)
Packages = Annotated[
    list[str] | None,
    typer.Option("--package", help="A package for the image, imported in its template. By default numpy and sympy."),
]


@app.command()
def build(
    package: Packages = None,
    route: Annotated[
        str, typer.Option(help="dockerfile: on python:slim, from a registry; host: this interpreter; auto.")
    ] = "auto",
    bare: Annotated[bool, typer.Option("--bare", help="No packages at all.")] = False,
) -> None:
    """Build the image of the boxes, unless it is there."""
    console = Console()
    began = time.monotonic()
    backend = _backend(package, route, bare=bare)
    with console.status("building the image"), asyncio.Runner() as runner:
        tag = runner.run(backend.image())
        facts = runner.run(backend.engine.call(lambda api: api.inspect_image(tag)))
    backend.engine.close()
    console.print(f"{tag}  {facts['Size'] / 1e6:.0f} MB  {time.monotonic() - began:.1f} s")


@app.command()
def doctor(
    backend: Annotated[str, typer.Option(help="docker, local or auto.")] = "docker",
    runtime: Annotated[str | None, typer.Option(help="Of the engine, e.g. runsc.")] = None,
) -> None:
    """Try what isolates a box on this machine; ends with 1 if something does not hold."""
    from toolgym.envs.sandbox.doctor import examine  # noqa: PLC0415 - here alone

    options: dict[str, Any] = {} if runtime is None else {"runtime": runtime}
    table = Table("promise", "holds", "seen")
    with SandboxPool(cast(BackendName, backend), size=1, **options) as pool:
        findings = list(examine(pool))
    for finding in findings:
        table.add_row(plain(finding.name), plain("yes" if finding.held else "NO"), plain(finding.detail))
    console = Console()
    console.print(table)
    broken = [finding.name for finding in findings if not finding.held]
    console.print(f"{pool.backend}: {len(findings) - len(broken)} of {len(findings)} promises hold")
    if broken:
        raise typer.Exit(1)


@app.command()
def prune(
    images: Annotated[
        bool, typer.Option("--images", help="Also images of ours that no box uses; they are rebuilt.")
    ] = False,
) -> None:
    """Remove boxes whose owners are dead."""
    from toolgym.envs.sandbox.docker_backend import DockerBackend  # noqa: PLC0415 - here alone, and heavy
    from toolgym.envs.sandbox.local_backend import LocalBackend  # noqa: PLC0415 - here alone

    async def sweep() -> tuple[int, int, int]:
        docker = DockerBackend(SandboxLimits())
        there = await docker.engine.answers()
        containers = await docker.sweep() if there else 0
        removed = await docker.remove_images() if there and images else 0
        await docker.close()
        return containers, removed, await LocalBackend(SandboxLimits()).sweep()

    containers, removed, folders = asyncio.run(sweep())
    Console().print(f"removed {containers} containers, {removed} images and {folders} folders")


@app.command()
def bench(
    backend: Annotated[str, typer.Option(help="docker, local or auto.")] = "docker",
    boxes: Annotated[list[int] | None, typer.Option(help="How many boxes to measure rates with.")] = None,
) -> None:
    """Measure what calls cost, beside docker exec and docker run."""
    from toolgym.envs.sandbox import latency  # noqa: PLC0415 - here alone

    table = Table("call", "p50", "p99", "goal")
    sizes = boxes or [1, 8]
    with SandboxPool(cast(BackendName, backend), size=1, limits=latency.LIMITS) as pool:
        for entry in latency.measure_calls(pool):
            goal = "" if entry.goal is None else f"{entry.goal * 1e3:g} ms"
            table.add_row(entry.what, f"{entry.p50 * 1e3:.2f} ms", f"{entry.p99 * 1e3:.2f} ms", goal)
        table.add_row("a flooded box replaced", f"{latency.measure_refill(pool) * 1e3:.0f} ms", "", "")
        name = pool.backend
    for size in sizes:
        with SandboxPool(cast(BackendName, backend), size=size, limits=latency.LIMITS) as pool:
            for rate in asyncio.run(latency.measure_rate(pool, size)):
                table.add_row(f"{rate.what} calls, {rate.boxes} boxes", f"{rate.value:,.0f} a second", "", "")
    if name == "docker":
        made = _backend(None, "auto", bare=False)
        for entry in latency.measure_start(made):
            table.add_row(entry.what, f"{entry.p50 * 1e3:.1f} ms", f"{entry.p99 * 1e3:.1f} ms", "")
        made.engine.close()
    Console().print(table)


def _backend(packages: list[str] | None, route: str, *, bare: bool) -> Any:
    from toolgym.envs.sandbox.docker_backend import DockerBackend  # noqa: PLC0415 - heavy
    from toolgym.envs.sandbox.image import ImageSpec  # noqa: PLC0415 - with it

    if bare and packages:
        raise ConfigurationError("--bare and --package exclude each other")
    spec = ImageSpec() if packages is None and not bare else ImageSpec(packages=tuple(packages or ()))
    return DockerBackend(SandboxLimits(), image=spec, route=route)
