"""The mechanism of element-wise operations: views, unaligned and ragged rows, what is in memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS
from support.recording_device import device_array
from support.search import examples

import cupyattn
from cupyattn.arrays import adopt
from cupyattn.emulator import Report
from cupyattn.kernels.configs.layers import activations
from cupyattn.ops.elements import element_problem

pytestmark = pytest.mark.nvrtc


@pytest.mark.usefixtures("kernels_run")
@examples(10)
@given(
    shape=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    order=st.permutations(range(4)),
    steps=st.lists(st.sampled_from((1, 2, -1)), min_size=4, max_size=4),
    length=st.sampled_from((1, 5, 24, 40)),
    margin=st.sampled_from((0, 1, 8)),
)
def test_views_give_what_copies_give(shape, order, steps, length, margin):
    """Transposed, strided, reversed and unaligned: bit for bit, inputs and results."""
    sizes = [extent * abs(step) for extent, step in zip(shape, steps, strict=True)]
    rng = np.random.default_rng(length)
    memory = rng.standard_normal((3, *sizes, margin + length)).astype(np.float16)
    cut = (slice(None), *(slice(None, None, step) for step in steps), slice(margin, None))
    view = memory[cut].transpose(0, *(1 + axis for axis in order), 5)
    gate, up, out = view
    expected = cupyattn.swiglu(*(KERNELS.put(np.ascontiguousarray(x)) for x in (gate, up)))
    placed = KERNELS.put(out)
    assert cupyattn.swiglu(KERNELS.put(gate), KERNELS.put(up), out=placed) is placed
    assert_array_equal(KERNELS.get(placed), KERNELS.get(expected))


@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("length", [1, 8, 255, 256, 257, 4095, 4096, 4097, 8200])
@pytest.mark.parametrize("start", [0, 1])
def test_nothing_beside_the_result_is_written(dtype, length, start):
    """Long rows and short ones, from an aligned start and an unaligned one."""
    memory = np.full(length + 48, 77, dtype)
    x = np.random.default_rng(0).standard_normal(length).astype(dtype)
    aligned = -memory.ctypes.data % 16 // memory.itemsize + start
    placed = KERNELS.put(memory)
    cupyattn.silu(KERNELS.put(x), out=placed[aligned : aligned + length])
    found = KERNELS.get(placed)
    expected = KERNELS.get(cupyattn.silu(KERNELS.put(x)))
    assert_array_equal(found[aligned : aligned + length], expected)
    assert (found[:aligned] == 77).all()
    assert (found[aligned + length :] == 77).all()


def test_arrays_that_lie_alike_are_one_row(recorder):
    x = device_array((3, 4, 5, 24), np.float16)
    cupyattn.silu(x)
    cupyattn.silu(x.transpose(1, 0, 2, 3), out=device_array((3, 4, 5, 24)).transpose(1, 0, 2, 3))
    (first, second) = recorder.started
    for specialisation, _, arguments in (first, second):
        macros = dict(specialisation.macros)
        params = arguments[-1]
        assert macros["VEC"] == 8
        assert (params["rows"], params["strides"][0].tolist()) != (1, [0, 0, 0, 60])
    assert (first[2][-1]["rows"], first[2][-1]["length"]) == (1, 1440)
    assert second[2][-1]["shape"].tolist() == [1, 1, 4, 3]
    assert second[2][-1]["length"] == 120


def test_packed_halves_have_offsets(recorder):
    packed = device_array((6, 64), np.float16)
    cupyattn.swiglu(packed)
    ((specialisation, grid, (gate, up, _, params)),) = recorder.started
    assert gate is packed and up is packed
    assert params["offsets"].tolist() == [0, 32, 0]
    assert params["strides"][:, -1].tolist() == [64, 64, 32]
    assert (params["rows"], params["length"], params["units"]) == (6, 32, 1)
    assert dict(specialisation.macros)["VEC"] == 8
    assert grid == (1, 1, 1)


def test_rows_that_are_too_many_are_refused():
    x = np.zeros((3, 5, 3, 5, 3, 4), np.float16)[::2, ::2, ::2, ::2, ::2]
    with (
        cupyattn.backend("emulator"),
        pytest.raises(ValueError, match=r"strides of x leave 5 axes apart; at most 4"),
    ):
        cupyattn.silu(x)


@pytest.mark.parametrize(
    ("dtype", "length"), [("float16", 4096), ("float32", 4104), ("float16", 96)]
)
def test_whole_sectors_and_nothing_else(dtype, length):
    """Every byte of a sector that is moved is used, and moved in 16-byte pieces."""
    gate, up, dout = np.random.default_rng(0).standard_normal((3, 2, length)).astype(dtype)
    packed = np.concatenate([gate, up], axis=-1)
    for arrays in ((gate, up), (packed,)):
        report = Report()
        with cupyattn.backend("emulator", report=report):
            cupyattn.swiglu(*arrays)
            cupyattn.swiglu_backward(dout, *arrays)
        assert report.sector_efficiency == 1.0


def test_a_problem_is_checked_once():
    operands = adopt({"x": np.zeros((2, 3), np.float32)})
    first, second = (element_problem(activations.FORWARD, operands) for _ in range(2))
    assert first is second
