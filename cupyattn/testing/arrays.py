"""Arrays of test cases, and what is expected of results: exact values and bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, cast

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from cupyattn.runtime.arrays import dtype_of

NumpyArray = NDArray[Any]

VIEWS = ("contiguous", "packed", "transposed", "sliced", "padded", "reversed", "broadcast")
EDGES = (0, 1, 7, 8, 13, 31, 32, 33, 53, 63, 64, 65, 97, 127, 128, 129, 255, 256, 257, 293, 300)
"""Lengths around the tiles that kernels have, and primes."""
SEEDS = st.integers(0, 2**32 - 1)


class PastableCase:
    """A dataclass that is printed without the fields that have their defaults."""

    def __repr__(self) -> str:
        given = {
            field.name: getattr(self, field.name)
            for field in fields(cast(Any, self))
            if field.default is MISSING or getattr(self, field.name) != field.default
        }
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in given.items())})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print a failing example of hypothesis, and a cell's value in IPython."""
        printer.text(repr(self))


def normal(seed: int, name: str, shape: Sequence[int], dtype: str = "float64") -> NumpyArray:
    """Return standard normal numbers that depend on the seed and on the array's name."""
    rng = np.random.default_rng([seed, *name.encode()])
    return rng.standard_normal(tuple(shape)).astype(dtype_of(dtype))


def lay_out(x: NumpyArray, view: str) -> NumpyArray:
    """Return an array's numbers with other strides; its last axis stays contiguous.

    Memory between and around the numbers holds NaN, which shows where a kernel reads too much.

    Parameters
    ----------
    x : array of floats, with at least one axis
        What the result holds.
    view : str
        The strides. "contiguous": C order. "packed": one of three arrays that are packed into one,
        as q, k and v often are. "transposed": the two axes before the last are swapped in memory.
        "sliced": rows are slices of longer rows, and start at any item. "padded": rows have
        padding, and start at multiples of eight items. "reversed": the second axis (the first of
        two) has a negative stride. "broadcast": the first item along the first axis is repeated
        with stride 0; the result is read-only and **holds other numbers than x**.

    Returns
    -------
    array, x.shape, x.dtype

    Raises
    ------
    ValueError
        For an unknown view.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    >>> view = lay_out(x, "transposed")
    >>> np.array_equal(x, view), x.strides, view.strides
    (True, (24, 8, 4), (8, 16, 4))
    """
    if view not in VIEWS:
        raise ValueError(f"view is {view!r}; allowed are {', '.join(VIEWS)}; choose one of them")
    if view == "contiguous" or (view == "broadcast" and x.ndim == 1):
        return np.ascontiguousarray(x)
    if view == "broadcast":
        return np.broadcast_to(x[:1].copy(), x.shape)
    *rows, columns = x.shape
    if view == "packed":
        at = min(max(x.ndim - 2, 1), x.ndim - 1)
        memory = np.full((*x.shape[:at], 3, *x.shape[at:]), np.nan, x.dtype)
        result = memory[(slice(None),) * at + (1,)]
    elif view == "transposed":
        axes = (-3, -2) if x.ndim > 2 else (-1, -1)
        memory = np.full(np.swapaxes(x, *axes).shape, np.nan, x.dtype)
        result = memory.swapaxes(*axes)
    elif view == "sliced":
        result = np.full((*rows, columns + 3), np.nan, x.dtype)[..., 1 : columns + 1]
    elif view == "padded":
        result = np.full((*rows, columns + 8 + -columns % 8), np.nan, x.dtype)[..., :columns]
    else:
        axis = min(1, x.ndim - 2)
        if axis < 0:
            return x.copy()
        shape = (*x.shape[:axis], 2 * x.shape[axis], *x.shape[axis + 1 :])
        result = np.full(shape, np.nan, x.dtype)[(slice(None),) * axis + (slice(None, None, -2),)]
    result[...] = x
    return result


def lay_out_option(x: NumpyArray, view: str) -> NumpyArray:
    """Return an option's array with other strides: "contiguous", "padded" or "strided".

    "padded" rows start at multiples of eight items, so that kernels may read several at once.
    Memory around the values holds what must not be read: NaN, far positions, the mask's opposite.
    """
    if view == "contiguous" or x.ndim == 0:
        return x
    length = x.shape[-1]
    items: tuple[Any, ...]
    if view == "padded":
        shape, items = (*x.shape[:-1], length + 8 + -length % 8), (..., slice(length))
    else:
        shape, items = (*x.shape[:-1], 2 * length), (..., slice(None, None, 2))
    if x.dtype == bool:
        memory = np.resize(~x, shape) if x.size else np.zeros(shape, bool)
    else:
        memory = np.full(shape, np.nan if x.dtype.kind not in "iu" else 2**20).astype(x.dtype)
    result = memory[items] if view == "padded" else memory[items][::-1]
    result[...] = x
    return result


def lengths(largest: int = 130, least: int = 0) -> st.SearchStrategy[int]:
    """Draw lengths: those around the tiles of kernels, and primes, more often than others.

    Parameters
    ----------
    largest, least : int
        The longest and the shortest length.

    Returns
    -------
    hypothesis strategy of int
    """
    edges = [length for length in EDGES if least <= length <= largest]
    any_length = st.integers(min(max(1, least), largest), largest)
    return st.one_of(st.sampled_from(edges), any_length) if edges else any_length


class ExpectedResult(NamedTuple):
    """The exact result of a call, and how far from it a result may be.

    Attributes
    ----------
    result : array in float64, or tuple of these and None
        The exact result, with the structure of the call's result.
    bound : array in float64, or tuple of these and None
        For each element, the largest error of a kernel in the dtype of the arrays.
    """

    result: Any
    bound: Any


Rule = Callable[..., ExpectedResult]
BoundOf = Callable[..., Any]
"""A function of the reference that returns bounds."""


def first_or_all(results: Iterable[Any], bounds: Iterable[Any], several: bool) -> ExpectedResult:
    """Return all results and bounds of a call, or the first ones alone."""
    results, bounds = tuple(results), tuple(bounds)
    return ExpectedResult(results, bounds) if several else ExpectedResult(results[0], bounds[0])
