"""Numbers from authors: Python's own, numpy's and torch's."""

import math
import numbers


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
