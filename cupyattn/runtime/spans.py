"""Which bytes an array's items lie in, and whether two arrays have an item in common."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.runtime.arrays import Layout

_SOMEWHERE = 1 << 62
"""An address in the middle of all there may be."""
_MOST_CANDIDATES: Any = 100_000  # Any: to the stubs of NumPy 2.4 max_work is 0 or -1


class Span(NamedTuple):
    """The bytes that an array's items lie in, counted from its first item."""

    start: int
    end: int


def span(layout: Layout) -> Span:
    """Return where the items lie; nowhere for an empty array.

    Examples
    --------
    >>> span(Layout((3, 2), (-8, 4), np.dtype(np.float32)))
    Span(start=-16, end=8)
    """
    if 0 in layout.shape:
        return Span(0, 0)
    steps = [(n - 1) * stride for n, stride in zip(layout.shape, layout.strides, strict=True)]
    return Span(
        sum(step for step in steps if step < 0),
        sum(step for step in steps if step > 0) + layout.dtype.itemsize,
    )


@lru_cache(maxsize=4096)
def share_an_item(a: Layout, b: Layout, distance: int) -> bool:
    """Tell whether two arrays have an item in common, b's first that many bytes behind a's.

    NumPy solves for a common address on stand-ins, whose memory it never touches. For operations to
    ask where `span` says that two arrays meet, as two slices of one packed array do: those are as
    far apart in the next call, so answers are remembered.
    """
    first, second = _StandIn(a, _SOMEWHERE), _StandIn(b, _SOMEWHERE + distance)
    try:
        return np.shares_memory(np.asarray(first), np.asarray(second), max_work=_MOST_CANDIDATES)
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(layout: Layout) -> bool:
    """Tell whether two indices of an array may name one item, as in a broadcast view.

    Exact for views made by slicing, transposing and broadcasting; some arrays from as_strided whose
    axes interleave are taken for overlapping too.
    """
    if 0 in layout.shape:
        return False
    reach = layout.dtype.itemsize
    for stride, extent in sorted(
        (abs(stride), extent) for stride, extent in zip(layout.strides, layout.shape, strict=True)
    ):
        if extent <= 1:
            continue
        if stride < reach:
            return True
        reach += (extent - 1) * stride
    return False


class _StandIn:
    """An array of that layout at an address, for questions about addresses alone."""

    def __init__(self, layout: Layout, place: int) -> None:
        self.__array_interface__ = {
            "data": (place, True),
            "shape": layout.shape,
            "strides": layout.strides,
            "typestr": f"|V{layout.dtype.itemsize}",
            "version": 3,
        }
