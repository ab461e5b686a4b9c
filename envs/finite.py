"""Numbers from authors: Python's own, numpy's and torch's."""

import math
import numbers

from toolgym.envs.errors import ConfigurationError


def as_int(value: object) -> int | None:
    """An int of Python or numpy as Python's own; None if it is none, or a bool."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


def as_finite(value: object) -> float | None:
    """A number, or an array of one number, as a float; None if it is no number, or not finite."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, numbers.Real) and math.isfinite(plain):
            return float(plain)
    except (OverflowError, TypeError, ValueError, RuntimeError):  # too large for a float, or several numbers
        pass
    return None


def checked_int(name: str, value: object, *, least: int) -> int:
    """A number of things, as Python's own int.

    Raises:
        ConfigurationError: it is no int of ``least`` or more.
    """
    count = as_int(value)
    if count is None or count < least:
        raise ConfigurationError(f"expected {name} as an int of {least} or more, actual {value!r:.100}")
    return count


def checked_seconds(name: str, value: object, *, zero: bool = False) -> float:
    """A time, as Python's own float.

    Raises:
        ConfigurationError: it is not finite, or not above 0 (with ``zero``: not of 0 or more).
    """
    seconds = None if isinstance(value, bool) else as_finite(value)
    if seconds is None or seconds < 0 or (seconds == 0 and not zero):
        raise ConfigurationError(
            f"expected {name} as seconds {'of 0 or more' if zero else 'above 0'}, actual {value!r:.100}"
        )
    return seconds
