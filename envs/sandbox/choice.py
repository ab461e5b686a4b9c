"""Which backend: Docker where an engine answers, else child processes of this machine, which is said aloud."""

import warnings
from collections.abc import Mapping
from typing import Any, Literal, get_args

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.sandbox.backend import Backend
from toolgym.envs.sandbox.docker_engine import DockerEngine
from toolgym.envs.sandbox.limits import SandboxLimits
from toolgym.envs.sandbox.local_backend import LocalBackend

BackendName = Literal["auto", "docker", "local"]


class SandboxWarning(UserWarning):
    """The sandbox protects from less than it should."""


async def choose(name: BackendName, limits: SandboxLimits, options: Mapping[str, Any]) -> Backend:
    """The backend of a name.

    Raises:
        ConfigurationError: an unknown name, or options that the backend does not have.
    """
    if name not in get_args(BackendName):
        raise ConfigurationError(f"expected sandbox among {', '.join(get_args(BackendName))}, actual {name!r}")
    if name == "docker" or (name == "auto" and await _engine_answers(options.get("base_url"))):
        # Its modules are only needed where boxes are containers.
        from toolgym.envs.sandbox.docker_backend import DockerBackend  # noqa: PLC0415

        docker: Backend = _made("docker", DockerBackend, limits, options)
        return docker
    local: LocalBackend = _made("local", LocalBackend, limits, {} if name == "auto" else options)
    await local.probe()
    why = "no Docker engine answers, so code runs" if name == "auto" else "code runs"
    lost = "; ".join(local.unprotected)
    warnings.warn(f"{why} in child processes of this machine, which do not protect: {lost}", SandboxWarning, 2)
    return local


def _made(name: str, kind: Any, limits: SandboxLimits, options: Mapping[str, Any]) -> Any:
    try:
        return kind(limits, **options)
    except TypeError as error:
        raise ConfigurationError(f"options of the {name} sandbox: {error}") from error


async def _engine_answers(base_url: str | None) -> bool:
    engine = DockerEngine(base_url)
    try:
        return await engine.answers()
    finally:
        engine.close()
