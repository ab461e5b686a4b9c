"""Registering environments with Gymnasium."""

import functools
from typing import Any

import gymnasium

from toolgym.envs.errors import ConfigurationError

_SHIPPED = {
    "toolgym/Calculator-v0": ("toolgym.envs.catalog.calculator", "CalculatorEnv"),
    "toolgym/CodeMath-v0": ("toolgym.envs.catalog.code_math", "CodeMathEnv"),
    "toolgym/CodeTests-v0": ("toolgym.envs.catalog.code_tests", "CodeTestsEnv"),
    "toolgym/Ledger-v0": ("toolgym.envs.catalog.ledger", "LedgerEnv"),
    "toolgym/Shell-v0": ("toolgym.envs.catalog.shell", "ShellEnv"),
}


def register_shipped() -> None:
    """Register the environments of the catalogue. By name only: none of their modules is imported here."""
    for env_id, (module, name) in _SHIPPED.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(env_id, entry_point=f"{module}:{name}", vector_entry_point=f"{module}:make_vec")


def register_env(env_id: str, env_class: Any, **kwargs: Any) -> None:
    """Make an environment available to `gymnasium.make`, to `gymnasium.make_vec` and to the command line.

    Args:
        env_id: ``namespace/Name-vN``.
        env_class: a `ToolEnv` subclass, or a function that returns a `ToolEnv`.
        **kwargs: default arguments of the class.

    Raises:
        ConfigurationError: the id is taken, or not of that form.
    """
    from toolgym.envs.vector import ToolVectorEnv  # noqa: PLC0415 - the base class is not needed to register by name

    if not isinstance(env_id, str) or not callable(env_class):
        raise ConfigurationError(f"expected an id and a class or function, actual {env_id!r} and {env_class!r:.100}")
    if "max_episode_steps" in kwargs:
        kwargs["max_steps"] = kwargs.pop("max_episode_steps")  # scored at its end, in make and in make_vec alike
    if env_id in gymnasium.registry:
        raise ConfigurationError(f"environment id {env_id!r} is taken: choose another name or version")
    try:
        gymnasium.register(
            env_id,
            entry_point=env_class,
            vector_entry_point=functools.partial(ToolVectorEnv.of, env_class),
            kwargs=kwargs,
        )
    except gymnasium.error.Error as error:
        raise ConfigurationError(f"environment id {env_id!r} cannot be registered: {error}") from error


def tool_env_ids() -> list[str]:
    """The ids of all registered environments that are vectorized by Toolgym, sorted."""
    shipped = {env_id for env_id in _SHIPPED if env_id in gymnasium.registry}
    own = {i for i, spec in gymnasium.registry.items() if _is_ours(spec.vector_entry_point)}
    return sorted(shipped | own)


def _is_ours(entry_point: object) -> bool:
    from toolgym.envs.vector import ToolVectorEnv  # noqa: PLC0415 - see above

    return isinstance(entry_point, functools.partial) and entry_point.func == ToolVectorEnv.of
