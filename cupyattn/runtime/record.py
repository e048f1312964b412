"""A C struct to be filled, whose fields refuse integers that they cannot hold."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyattn.runtime.errors import error, shown


def record(dtype: np.dtype) -> NDArray[Any]:
    """Return a struct of zeros, an array without axes: fill it by field, then take its ``[()]``.

    Setting a field, or one of a struct within, raises ValueError for an integer beyond its type.

    Examples
    --------
    >>> params = record(np.dtype([("rows", np.int64), ("heads", np.int32)]))
    >>> params["rows"] = 2**31
    >>> params["heads"] = 2**31
    Traceback (most recent call last):
    ValueError: heads = 2147483648; kernels take heads as int32, -2147483648 to 2147483647; ...
    """
    return np.zeros((), dtype).view(_Record)


def beyond(name: str, value: Any, dtype: np.dtype) -> ValueError:
    """Return what to raise for an integer that a kernel's type does not hold."""
    holds = np.iinfo(dtype)
    return error(
        ValueError,
        f"{name} = {shown(value)}",
        f"kernels take {name} as {dtype.name}, {holds.min} to {holds.max}",
        "split the problem over several calls",
    )


class _Record(np.ndarray[Any, Any]):
    """A struct that `record` returns, or a field of it that is a struct or an array."""

    field = ""

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(found, _Record):
            found.field = str(key)
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        try:
            super().__setitem__(key, value)
        except OverflowError:
            name, dtype = (
                (key, self.dtype[key].base) if self.dtype.names else (self.field, self.dtype)
            )
            if dtype.kind not in "iu":
                raise
            raise beyond(name, value, dtype) from None
