"""Batching the infos of several slots in Gymnasium's form: arrays by key, each with a ``_key`` mask of who has it.

Gymnasium's own ``_add_info`` lets the first value decide the dtype, so that 0.5 after a 1 becomes 0, and it raises on
arrays of unequal shapes. Here the dtype fits all values.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def batch_infos(infos: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """One dict of arrays from N dicts (None: nothing from that slot). Nested dicts are batched in the same way.

    Returns:
        For each key an (N,) array - bool, int64 or float64 where all values are of that kind, else object - and a
        bool (N,) array ``_key`` that says which slots have it.
    """
    batched: dict[str, Any] = {}
    for key in dict.fromkeys(key for info in infos if info for key in info):
        present = np.asarray([bool(info) and key in (info or {}) for info in infos], dtype=np.bool_)
        values = [info[key] if info and has else None for info, has in zip(infos, present, strict=True)]
        batched[key] = _column(key, values, present)
        batched[f"_{key}"] = present
    return batched


def _column(key: str, values: list[Any], present: npt.NDArray[np.bool_]) -> Any:
    held = [value for value, has in zip(values, present, strict=True) if has]
    if all(isinstance(value, Mapping) for value in held) and key != "final_obs":
        return batch_infos(values)
    dtype: Any = object
    if all(isinstance(value, bool | np.bool_) for value in held):
        dtype = np.bool_
    elif all(isinstance(value, int | np.integer) and not isinstance(value, bool) for value in held):
        dtype = np.int64
    elif all(isinstance(value, int | float | np.number) and not isinstance(value, bool) for value in held):
        dtype = np.float64
    column = np.full(len(values), None if dtype is object else 0, dtype=dtype)
    for index in np.flatnonzero(present):
        column[index] = values[index]
    return column
