"""Element-wise operations: views and memory, sums in float32, and dropout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import DTYPES, KERNELS, dtype_of, everywhere
from support.recording_device import device_array
from support.search import deep, examples, wider

import cupyattn
from cupyattn import DropoutGrads, reference
from cupyattn.emulator import Report
from cupyattn.ops.activations import kernels as activations
from cupyattn.runtime.arrays import adopt
from cupyattn.runtime.elements import element_problem


# Tests on NumPy come first: `kernels_run` stays active from its first use to the module's end.
def test_add_to_keeps_digits_beyond_16_bits():
    total = np.full(1, 4096, np.float32)
    cupyattn.add_to(total, np.ones(1, np.float16))
    assert total[0] == 4097


def test_add_to_accepts_one_array_twice():
    total = np.arange(5, dtype=np.float32)
    cupyattn.add_to(total, total)
    np.testing.assert_array_equal(total, 2 * np.arange(5))


@pytest.mark.parametrize(
    ("total", "x", "kind", "says"),
    [
        (np.zeros(4, np.float16), np.zeros(4, np.float16), TypeError, "total has dtype float16"),
        (np.zeros(4, np.float32), np.zeros(3, np.float16), ValueError, "x has shape"),
        (np.zeros(4, np.float32), np.zeros(4, np.int8), TypeError, "x has dtype int8"),
    ],
)
def test_bad_input_of_add_to(total, x, kind, says):
    with pytest.raises(kind, match=says):
        cupyattn.add_to(total, x)


def test_dropout_fields_are_random_and_independent():
    items = np.arange(2**16)
    for p in (0.1, 0.5, 0.9):
        share = reference.element_keep(3, p, items).mean()
        assert abs(share - (1 - p)) < 6 * np.sqrt(p * (1 - p) / items.size)
    kept = [reference.element_keep(seed, 0.5, items) for seed in (1, 2, 2**32 + 1)]
    kept += [reference.element_keep(1, 0.5, items + 2**40), np.roll(kept[0], 1)]
    for i, first in enumerate(kept):
        for second in kept[:i]:
            assert abs((first == second).mean() - 0.5) < 0.02
    attention = reference.attention_keep(1, 0.5, 0, 0, np.arange(256), np.arange(256))
    assert abs((attention.ravel() == kept[0]).mean() - 0.5) < 0.02
    whole = reference.element_keep(1, 0.5, items)
    assert_array_equal(reference.element_keep(1, 0.5, items[77:99][::-1]), whole[77:99][::-1])


@pytest.mark.usefixtures("kernels_run")
@examples(4)
@given(
    shape=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    order=st.permutations(range(4)),
    steps=st.lists(st.sampled_from((1, 2, -1)), min_size=4, max_size=4),
    length=st.sampled_from((1, 5, 24, 40)),
    margin=st.sampled_from((0, 1, 8)),
)
@pytest.mark.nvrtc
def test_views_give_what_copies_give(shape, order, steps, length, margin):
    """Transposed, strided, reversed and unaligned views give the bits of copies."""
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


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
@pytest.mark.parametrize("length", [1, 8, 255, 256, 257, 4095, 4096, 4097, *deep(8200)])
@pytest.mark.parametrize("start", [0, 1])
def test_only_the_result_is_written(dtype, length, start):
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


def test_arrays_of_equal_layout_are_one_row(recorder):
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


@pytest.mark.nvrtc
def test_too_many_strided_axes_are_refused():
    x = np.zeros((3, 5, 3, 5, 3, 4), np.float16)[::2, ::2, ::2, ::2, ::2]
    with (
        cupyattn.backend("emulator"),
        pytest.raises(ValueError, match=r"strides of x leave 5 axes apart; at most 4"),
    ):
        cupyattn.silu(x)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("dtype", "length"), [("float16", 4096), ("float16", 96), *deep(("float32", 4104))]
)
def test_gated_accesses_use_every_byte_of_their_sectors(dtype, length):
    """Every byte of a sector is used."""
    gate, up, dout = np.random.default_rng(0).standard_normal((3, 2, length)).astype(dtype)
    packed = np.concatenate([gate, up], axis=-1)
    for arrays in ((gate, up), (packed,)):
        report = Report()
        with cupyattn.backend("emulator", report=report):
            cupyattn.swiglu(*arrays)
            cupyattn.swiglu_backward(dout, *arrays)
        assert report.sector_efficiency == 1.0


def test_a_problem_is_checked_once():
    operands = adopt(activations.ActivationArrays(np.zeros((2, 3), np.float32)))
    first, second = (element_problem(activations.FORWARD, operands) for _ in range(2))
    assert first is second


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(3)
@given(
    dtype=st.sampled_from(wider(("float16",), DTYPES)),
    rows=st.integers(1, 3),
    length=st.sampled_from((1, 4, 7, 33, 256, 1021)),
    sliced=st.booleans(),
)
def test_add_to_is_within_the_bound(dtype, rows, length, sliced):
    rng = np.random.default_rng(length)
    x = rng.standard_normal((2, rows, length)).astype(dtype_of(dtype))
    total = 100 * rng.standard_normal((2, rows, length + 3 * sliced)).astype(np.float32)
    on_device = KERNELS.put(total)
    cupyattn.add_to(on_device[..., 3 * sliced :], KERNELS.put(x))
    found, before = KERNELS.get(on_device), total.copy()
    part, exact = found[..., 3 * sliced :], reference.add_to(before[..., 3 * sliced :], x)
    bound = reference.add_to_bound(before[..., 3 * sliced :], x)
    assert reference.error_ratio(part, exact, bound) <= 1
    np.testing.assert_array_equal(found[..., : 3 * sliced], before[..., : 3 * sliced])


LENGTHS = (1, 4, 7, 8, 12, 33, 256, 1021)
SEEDS = (0, 1, 2**32 - 1, 2**32, 2**64 - 1)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(4)
@given(
    dtype=st.sampled_from(wider(("float16",), DTYPES)),
    rows=st.integers(1, 3),
    length=st.sampled_from(LENGTHS),
    p=st.sampled_from((0.0, 0.1, 0.5, 0.999, 0.999999)),
    seed=st.sampled_from(SEEDS),
    residual=st.booleans(),
    view=st.sampled_from(("contiguous", "transposed", "sliced")),
)
@example("float16", 1, 33, 0.5, 1, False, "sliced")  # a thread has several items, loaded alone
def test_dropout_mask_is_that_of_the_reference(dtype, rows, length, p, seed, residual, view):
    """The mask belongs to items in C order, for any strides."""
    rng = np.random.default_rng(length)
    shape = (2, rows, length)
    x = rng.uniform(1, 2, shape).astype(dtype_of(dtype))
    other = rng.standard_normal(shape).astype(x.dtype) if residual else None
    laid = x
    if view == "transposed":
        laid = np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2)
    elif view == "sliced":
        memory = np.zeros((2, rows, length + 3), x.dtype)
        laid = memory[..., 3:]
        laid[...] = x
    given_residual = None if other is None else KERNELS.put(other)
    out = KERNELS.get(cupyattn.dropout(KERNELS.put(laid), p, seed, residual=given_residual))
    exact = reference.dropout(x, p, seed, other)
    bound = reference.dropout_bound(x, p, seed, other, dtype=dtype)
    assert reference.error_ratio(out, exact, bound) <= 1
    if not residual:
        kept = reference.element_keep(seed, p, np.arange(x.size)).reshape(shape)
        assert_array_equal(out != 0, kept)


@everywhere
@pytest.mark.parametrize("p", [0.1, 1 - 1 / 65536])
def test_dropout_scales_by_the_rounded_probability(side, p):
    """round(65536 p) of 65,536 fields drop, so their average over x is x."""
    dropped = round(65536 * p)
    x = np.ones((4, 1024), np.float32)
    expected = np.float32(65536 / (65536 - dropped))
    for found in (
        side.get(cupyattn.dropout(side.put(x), p, 3)),
        side.get(cupyattn.dropout_backward(side.put(x), p, 3).dx),
    ):
        assert (set(np.unique(found)) - {np.float32(0)}) <= {expected}
    assert expected != np.float32(1 / (1 - p)) or p == 1 - 1 / 65536


@everywhere
def test_probabilities_that_round_to_0_and_to_1(side):
    x = np.full((3, 8), 3.0, np.float32)
    x[1] = np.nan
    assert_array_equal(side.get(cupyattn.dropout(side.put(x), 2.0**-18, 3)), x)
    almost = 1 - 2.0**-18
    zeros = np.zeros((3, 8))
    assert_array_equal(side.get(cupyattn.dropout(side.put(x), almost, 3)), zeros)
    assert_array_equal(side.get(cupyattn.dropout_backward(side.put(x), almost, 3).dx), zeros)
    residual = side.put(np.full((3, 8), 2.0, np.float32))
    found = cupyattn.dropout(side.put(x), almost, 3, residual=residual)
    assert_array_equal(side.get(found), np.full((3, 8), 2.0))


@everywhere
def test_dropout_gradients(side):
    x, dout, there = np.random.default_rng(0).standard_normal((3, 3, 24), dtype=np.float32)
    put = [side.put(a.copy()) for a in (x, dout, there)]
    expected = reference.dropout(dout, 0.3, 5).astype(np.float32)
    dx, dresidual = cupyattn.dropout_backward(put[1], 0.3, 5)
    assert_allclose(side.get(dx), expected, rtol=1e-6)
    assert dresidual is put[1]
    added = cupyattn.dropout_backward(
        put[1], 0.3, 5, grads=DropoutGrads(put[2]), accumulate=True
    ).dx
    assert added is put[2]
    assert_allclose(side.get(added), there + expected, rtol=1e-6, atol=1e-6)
    out, pullback = cupyattn.vjp(
        lambda r, x: cupyattn.dropout(x, 0.3, 5, residual=r), side.put(there), put[0]
    )
    dresidual, dx = pullback(put[1])
    assert_allclose(side.get(out), reference.dropout(x, 0.3, 5, there), rtol=1e-5, atol=1e-6)
    assert_array_equal(side.get(dresidual), dout)
    assert_allclose(side.get(dx), expected, rtol=1e-6)


@everywhere
def test_dropout_in_place_removes_dropped_nans(side):
    x = np.full((4, 64), np.nan, np.float16)
    placed = side.put(x)
    assert cupyattn.dropout(placed, 0.5, 3, out=placed) is placed
    kept = reference.element_keep(3, 0.5, np.arange(256)).reshape(4, 64)
    assert_array_equal(np.isnan(side.get(placed)), kept)
    residual = side.put(np.ones((4, 64), np.float16))
    cupyattn.dropout(
        side.put(np.zeros((4, 64), np.float16)), 0.5, 3, residual=residual, out=residual
    )
    assert (side.get(residual) == 1).all()


@pytest.mark.nvrtc
def test_another_seed_reuses_the_plan():
    """Seeds change in every call, so plans are not cached by seed."""
    from cupyattn.runtime import elements

    x = np.ones((2, 8), np.float16)
    with cupyattn.backend("emulator"):
        cupyattn.dropout(x, 0.5, 0)
        before = elements._plan.cache_info().misses
        found = [cupyattn.dropout(x, p, seed) for seed in (1, 2) for p in (0.5, 0.25)]
        assert elements._plan.cache_info().misses == before
    assert len({array.tobytes() for array in found}) == 4


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_dropout_uses_whole_sectors(dtype):
    report = Report()
    x = np.ones((2, 512), dtype)
    with cupyattn.backend("emulator", report=report):
        cupyattn.dropout(x, 0.1, 3, residual=x)
    assert report.sector_efficiency == 1.0


X = np.ones((2, 8), np.float32)


@everywhere
@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda x: cupyattn.dropout(x, 1.0, 3), ValueError, "p = 1.0; it is at least 0 and below"),
        (lambda x: cupyattn.dropout(x, -0.1, 3), ValueError, "p = -0.1; "),
        (lambda x: cupyattn.dropout(x, float("nan"), 3), ValueError, "p = nan; "),
        (
            lambda x: cupyattn.dropout(x, "0.1", 3),
            TypeError,
            "p has type str; it must be a real number",
        ),
        (lambda x: cupyattn.dropout(x, 0.1, None), ValueError, "p = 0.1 without a seed; "),
        (lambda x: cupyattn.dropout(x, 0.1, 1.0), TypeError, "seed is 1.0 of type float"),
        (lambda x: cupyattn.dropout(x, 0.1, -1), ValueError, "seed = -1; it is an integer from 0"),
        (lambda x: cupyattn.dropout(x, 0.1, 2**64), ValueError, "seed = 18446744073709551616; "),
        (lambda x: cupyattn.dropout(x, 0.1, 1, residual=x[:1]), ValueError, "residual has shape"),
        (lambda x: cupyattn.dropout(None, 0.1, 1), TypeError, "x is None"),
        (
            lambda x: cupyattn.dropout_backward(x, 0.1, 1, accumulate=True),
            ValueError,
            "without grads",
        ),
        (lambda x: cupyattn.dropout_backward(x, 0.1, 1, accumulate=2), TypeError, "accumulate = 2"),
        (
            lambda x: cupyattn.dropout_backward(x, 0.1, 1, grads=DropoutGrads(x[:1])),
            ValueError,
            r"grads\.dx is float32",
        ),
        (
            lambda x: cupyattn.dropout_backward(x, 0.1, 1, grads=DropoutGrads(x, x)),
            ValueError,
            r"grads\.dresidual was given; .*dout itself",
        ),
        (
            lambda x: cupyattn.dropout_backward(x, 0.1, 1, grads=x),
            TypeError,
            "grads has type .*; it must be a DropoutGrads",
        ),
    ],
)
def test_bad_input_of_dropout(side, call, kind, message):
    with pytest.raises(kind, match=message):
        call(side.put(X.copy()))


@everywhere
def test_dropout_of_zero_needs_no_seed(side):
    x = side.put(X.copy())
    assert_array_equal(side.get(cupyattn.dropout(x, 0.0, None)), X)
    assert_array_equal(side.get(cupyattn.dropout(x, 0, None, residual=x)), 2 * X)
