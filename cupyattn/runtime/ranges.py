"""NVTX ranges, which show calls by name in Nsight. They are off unless CUPYATTN_NVTX=1."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from cupyattn.runtime.arch import flag
from cupyattn.runtime.cupy_library import loaded_nvtx

NVTX_VARIABLE = "CUPYATTN_NVTX"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def ranged(function: _Function) -> _Function:
    """Return a function whose calls are NVTX ranges, or the function itself if ranges are off.

    The name of a range is the function's name with shape and dtype of the first array. A process
    that has not loaded CuPy has nothing on a GPU, and no ranges.

    Raises
    ------
    ValueError
        If CUPYATTN_NVTX is neither 0 nor 1.
    """
    if not flag(NVTX_VARIABLE, on="have NVTX ranges around calls", off="have none"):
        return function

    @wraps(function)
    def in_range(*args: object, **options: object) -> object:
        nvtx = loaded_nvtx()
        if nvtx is None:
            return function(*args, **options)
        nvtx.RangePush(_title(function.__name__, args))
        try:
            return function(*args, **options)
        finally:
            nvtx.RangePop()

    return in_range  # type: ignore[return-value]


def _title(name: str, args: tuple[object, ...]) -> str:
    first: object = args[0] if args else None
    if not hasattr(first, "shape") or not hasattr(first, "dtype"):
        return name
    return f"{name} {first.shape} {first.dtype}"
