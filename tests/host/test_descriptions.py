"""How CuPy's arrays are described for caches: those in C order without asking for strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.recording_device import Recorder, device_array, launched

from cupyattn.arrays import Layout, adopt, contiguous, layouts_of
from cupyattn.functional.attention import forward

VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda x: x,
    "rows": lambda x: x[1:],
    "columns": lambda x: x[..., :2],
    "every other row": lambda x: x[::2],
    "backwards": lambda x: x[:, ::-1],
    "transposed": lambda x: x.T,
    "one row": lambda x: x[:1],
    "one column": lambda x: x[..., :1],
    "a new axis": lambda x: x[:, None],
    "a broadcast row": lambda x: device_array(x.shape, x.dtype, strides=(0, 12, 4)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_description_says_how_an_array_lies(name):
    x = VIEWS[name](device_array((4, 5, 3), np.float32))
    (layout,) = layouts_of(adopt({"x": x}).description).values()
    if x.flags.c_contiguous:  # axes of one item may have any strides then
        assert layout == contiguous(x.shape, x.dtype)
    else:
        assert layout == Layout(x.shape, x.strides, x.dtype)


def test_an_empty_array_is_described_too():
    x = device_array((4, 0, 3), np.float32)
    assert layouts_of(adopt({"x": x}).description) == {"x": contiguous(x.shape, x.dtype)}


def test_arrays_that_lie_differently_are_described_differently():
    x = device_array((4, 4, 4), np.float32)
    described = [adopt({"x": view(x)}).description for view in VIEWS.values()]
    described += [adopt({"x": x.view(np.int32)}).description, adopt({"y": x}).description]
    shifted = device_array((4, 4, 4), np.float32, address=x.data.ptr + 4)
    described.append(adopt({"x": shifted}).description)
    assert len({*described}) == len(described)


def test_a_shape_that_was_set_in_place_is_seen():
    x = device_array((4, 6), np.float32)
    before = adopt({"x": x}).description
    x.shape = (6, 4)
    after = adopt({"x": x}).description
    assert layouts_of(after) == {"x": contiguous((6, 4), x.dtype)}
    assert after != before


def test_kernels_are_told_of_the_strides_of_each_call(monkeypatch):
    """Calls of one shape whose arrays lie differently, in turns."""
    recorder = Recorder()
    monkeypatch.setattr(forward, "device_of", lambda operands: recorder)
    k, v = device_array((2, 5, 4, 8)), device_array((2, 5, 4, 8))
    dense, packed = device_array((2, 3, 4, 8)), device_array((2, 3, 3, 4, 8))[:, :, 1]
    for _ in range(2):
        for q in (dense, packed):
            _, params, _ = launched(recorder, q, k, v)
            assert params["q"].tolist() == tuple(stride // 2 for stride in q.strides[:-1])
