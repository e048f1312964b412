"""Spans and overlaps of arrays, compared with brute force."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyattn.runtime.arrays import Layout, Operands, address, overlaps_itself, share_an_item, span
from cupyattn.runtime.checks import Overlaps
from cupyattn.runtime.records import Record, T

SPACE = 256  # bytes in which the small arrays of these tests lie


@dataclass(slots=True)
class Pair(Record[T]):
    """An array that is written, and one that is read."""

    a: T
    b: T


@dataclass
class Addresses:
    """A replacement of a CuPy array without a GPU."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.start)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"V{self.itemsize}")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def items(self) -> list[int]:
        """Return the address of every item, computed from all indices."""
        return [
            self.start + sum(i * stride for i, stride in zip(index, self.strides, strict=True))
            for index in np.ndindex(*self.shape)
        ]

    def bytes(self) -> set[int]:
        return {item + byte for item in self.items() for byte in range(self.itemsize)}


@st.composite
def any_arrays(draw: st.DrawFn) -> Addresses:
    """Arrays of up to three axes with arbitrary strides."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = draw(st.lists(st.integers(-40, 40), min_size=len(shape), max_size=len(shape)))
    return Addresses(
        1000 + draw(st.integers(0, SPACE)),
        tuple(shape),
        tuple(strides),
        draw(st.sampled_from((1, 2, 4))),
    )


@st.composite
def views(draw: st.DrawFn) -> np.ndarray:
    """Views made by slicing, transposing and reversing: no item twice."""
    base = np.empty(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)), np.float32)
    slices = []
    for extent in base.shape:
        step = draw(st.sampled_from((1, 1, 2, 3, -1, -2)))
        start = draw(st.integers(0, extent - 1))
        slices.append(slice(start, None, step))
    view = base[tuple(slices)]
    return view.transpose(draw(st.permutations(range(view.ndim))))


def layout_of(array: Any) -> Layout:
    return Layout(array.shape, array.strides, array.dtype)


def addresses_of(view: np.ndarray) -> Addresses:
    return Addresses(view.ctypes.data, view.shape, view.strides, view.itemsize)


def overlap(a: Any, b: Any) -> bool:
    """Tell whether operations refuse to write a while b is read."""
    layouts = [layout_of(array) for array in (a, b)]
    described = tuple((*layout, 0) for layout in layouts)
    operands = Operands(0, Pair(a, b), [address(a), address(b)], described)
    try:
        Overlaps.of(Pair(*layouts), ("a",)).check(operands)
    except ValueError:
        return True
    return False


@given(any_arrays())
def test_span_is_the_first_and_last_byte(a: Addresses):
    if a.size == 0:
        assert span(layout_of(a)) == (0, 0)
    else:
        expected = (min(a.bytes()) - a.start, max(a.bytes()) + 1 - a.start)
        assert span(layout_of(a)) == expected


@settings(max_examples=300)
@given(any_arrays(), any_arrays())
def test_overlap_is_exact(a: Addresses, b: Addresses):
    expected = bool(a.bytes() & b.bytes())
    assert share_an_item(layout_of(a), layout_of(b), b.start - a.start) == expected
    assert overlap(a, b) == expected
    assert overlap(b, a) == expected


@given(st.data())
def test_overlap_of_views_of_one_array_is_exact(data: st.DataObject):
    """NumPy arrays: their own addresses, memory untouched."""
    base = np.empty((3, 4, 5), np.float16)
    pair = []
    for _ in range(2):
        starts = [data.draw(st.integers(0, extent)) for extent in base.shape]
        steps = [data.draw(st.sampled_from((1, 2, -1))) for _ in base.shape]
        view = base[tuple(slice(a, None, by) for a, by in zip(starts, steps, strict=True))]
        pair.append(view.transpose(data.draw(st.permutations(range(3)))))
    expected = bool(addresses_of(pair[0]).bytes() & addresses_of(pair[1]).bytes())
    assert overlap(*pair) == expected


@given(
    st.tuples(*(st.sampled_from((1, 2, 3, 7, 16, 61, 127)) for _ in range(5))),
    st.integers(0, 4),
    st.permutations(range(5)),
    st.tuples(*(st.booleans() for _ in range(5))),
)
def test_neighbours_in_a_large_array_do_not_overlap(shape, axis, order, reverse):
    """Halves and odd and even slices along any axis, in memory that is never touched."""
    strides = tuple(2 * math.prod(shape[i + 1 :]) for i in range(5))

    def part(first: int, step: int, count: int) -> Addresses:
        extents = [count if i == axis else shape[i] for i in range(5)]
        steps = [strides[i] * (step if i == axis else 1) for i in range(5)]
        start = 2**40 + first * strides[axis]
        for i in range(5):
            if reverse[i]:
                start, steps[i] = start + max(extents[i] - 1, 0) * steps[i], -steps[i]
        ordered = (tuple(extents[i] for i in order), tuple(steps[i] for i in order))
        return Addresses(start, *ordered, 2)

    extent = shape[axis]
    low, high = part(0, 1, extent // 2), part(extent // 2, 1, extent - extent // 2)
    even, odd = part(0, 2, (extent + 1) // 2), part(1, 2, extent // 2)
    assert not overlap(low, high)
    assert not overlap(even, odd)
    assert overlap(high, part(extent - 1, 1, 1))
    assert overlap(even, part(0, 1, extent))


@settings(max_examples=300)
@given(any_arrays())
def test_overlaps_itself_never_misses(a: Addresses):
    """For strides that no view has the result may be True without an overlap."""
    places = [item + byte for item in a.items() for byte in range(a.itemsize)]
    if len(places) != len(set(places)):
        assert overlaps_itself(layout_of(a))


@given(views())
def test_no_view_of_an_array_overlaps_itself(view: np.ndarray):
    assert not overlaps_itself(layout_of(view))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3, 0, 2, 8), (0, 0, 0, 0)), ((5, 0, 4), (0, 0, 4)), ((0, 3), (0, 0)), ((0,), (0,))],
)
def test_an_empty_array_does_not_overlap_itself(shape: tuple[int, ...], strides: tuple[int, ...]):
    """CuPy's empty arrays have strides of 0, but no items that overlap."""
    assert not overlaps_itself(Layout(shape, strides, np.dtype(np.float32)))


def test_broadcast_and_sliding_views_overlap_themselves():
    base = np.empty((4, 6), np.float32)
    for view in (
        np.broadcast_to(base[:1], base.shape),
        np.lib.stride_tricks.sliding_window_view(base, 3, axis=1),
    ):
        assert overlaps_itself(layout_of(view))
