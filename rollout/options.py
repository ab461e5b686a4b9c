"""Options on the command line, as ``name=JSON``."""

import json
from collections.abc import Sequence
from typing import Any

from toolgym.envs import ConfigurationError

_PYTHON = {"True": "true", "False": "false", "None": "null"}


def parse_options(pairs: Sequence[str], flag: str) -> dict[str, Any]:
    """Options by name; a value that is no JSON is text.

    Args:
        pairs: each ``name=value``.
        flag: how they were given, for the error.

    Raises:
        ConfigurationError: a pair without a name or a value.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigurationError(f"expected {flag} name=value, actual {pair!r}")
        if value in _PYTHON:
            raise ConfigurationError(f"expected {flag} {name}=JSON, actual {value}: write {_PYTHON[value]}")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value  # a bare word is text
    return options
