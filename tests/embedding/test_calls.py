"""Embedding: rows by their numbers, and the gradient of the table in a fixed order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import DTYPES, KERNELS, dtype_of, everywhere
from support.search import examples, mostly_deep, wider

import cupyattn
from cupyattn import reference
from cupyattn.emulator import Report
from cupyattn.ops.embedding import kernels as configs


def floats(seed: int, dtype: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype_of(dtype))


def ids_of(rows: int, shape: tuple[int, ...], dtype: str, spread: str) -> np.ndarray:
    rng = np.random.default_rng(rows)
    ids = rng.integers(0, rows, shape)
    if spread == "one row":
        ids[...] = rows - 1
    elif spread == "padding":
        ids = np.where(rng.random(shape) < 0.7, rows // 2, ids)
    elif spread == "from a chunk's last on":
        ids = (np.arange(ids.size).reshape(shape) >= 31) * (rows - 1)
    return ids.astype(dtype)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(4)
@given(
    dtype=st.sampled_from(wider(("float16",), DTYPES)),
    rows=st.sampled_from((1, 2, 255, 256, 257, 1000)),
    shape=st.sampled_from(((1,), (31,), (2, 16), (33,), (3, 5, 7), (97,), (1030,))),
    length=st.sampled_from(wider((7, 24, 264), (1, 8))),
    ids=st.sampled_from(wider(("int32",), ("int64",))),
    spread=st.sampled_from(("any", "one row", "padding")),
    accumulate=st.booleans(),
)
@example("float16", 2, (1030,), 8, "int32", "any", False)  # a run begins after the first CTA's
@example("float16", 2, (97,), 8, "int32", "from a chunk's last on", False)
def test_lookup_and_gradient(dtype, rows, shape, length, ids, spread, accumulate):
    numbers = ids_of(rows, shape, ids, spread)
    table, dout = floats(0, dtype, rows, length), floats(1, dtype, *shape, length)
    placed = [KERNELS.put(array) for array in (dout, table, numbers)]
    assert_array_equal(KERNELS.get(cupyattn.embedding(*placed[1:])), table[numbers])
    present = (
        floats(2, dtype, rows, length) if accumulate else np.zeros((rows, length), table.dtype)
    )
    given_dtable = KERNELS.put(present.copy()) if accumulate else None
    found = cupyattn.embedding_backward(*placed, grads=given_dtable, accumulate=accumulate)
    exact = reference.embedding_backward(dout, rows, numbers) + present.astype(float)
    bound = reference.embedding_backward_bound(dout, rows, numbers, dtype=dtype, present=present)
    assert reference.error_ratio(KERNELS.get(found), exact, bound) <= 1
    again = cupyattn.embedding_backward(
        *placed, grads=KERNELS.put(present.copy()) if accumulate else None, accumulate=accumulate
    )
    assert KERNELS.get(again).tobytes() == KERNELS.get(found).tobytes()


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("length", [13, 24])
@pytest.mark.parametrize("dtype", [*wider(("float16", "float32"), ("bfloat16",))])
def test_scaled_rows_are_float32(dtype, length):
    """The products are beyond float16."""
    table, ids = 1000 * floats(0, dtype, 20, length), ids_of(20, (3, 5), "int32", "any")
    table = table.astype(dtype_of(dtype))
    found = cupyattn.embedding(KERNELS.put(table), KERNELS.put(ids), scale=100.5)
    assert found.dtype == np.float32
    exact = 100.5 * table.astype(np.float64)[ids]
    assert_array_equal(KERNELS.get(found), exact.astype(np.float32))
    with pytest.raises(NotImplementedError, match="vjp of embedding with a scale"):
        cupyattn.vjp(lambda each: cupyattn.embedding(each, ids, scale=2.0), table)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
def test_id_of_the_next_cta_leaves_other_rows_unchanged():
    """The second batch of ids that the sort reads begins with the first row of the next CTA.

    A CTA that counts this id reads an old token of row 5 after the new one, and writes it over the
    only token of row 6.
    """
    batch = configs.THREADS * configs.SORT_READS
    ids = np.full(batch + 2, 5, np.int32)
    ids[batch - 1], ids[batch] = 6, configs.THREADS
    rows = configs.THREADS + 1
    dout = np.ones((batch + 2, 8), np.float32)
    placed = [KERNELS.put(array) for array in (dout, np.zeros((rows, 8), np.float32), ids)]
    found = KERNELS.get(cupyattn.embedding_backward(*placed))
    assert_array_equal(found[:, 0], np.bincount(ids, minlength=rows))


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("margin", [1, 8])
def test_strided_views_give_what_copies_give(margin):
    """Ids are strided; rows of the table and of results are apart, aligned and unaligned."""
    table = floats(0, "float16", 20, 24 + margin)[:, margin:]
    numbers = np.random.default_rng(0).integers(0, 20, (5, 9)).astype(np.int32)[:, :-2][::-1]
    dout = floats(1, "float16", 7, 5, 24 + margin)[..., margin:].transpose(1, 0, 2)
    placed = [KERNELS.put(array) for array in (dout, table, numbers)]
    out = KERNELS.put(floats(2, "float16", 7, 5, 24 + margin))[..., margin:].transpose(1, 0, 2)
    assert cupyattn.embedding(*placed[1:], out=out) is out
    assert_array_equal(KERNELS.get(out), table[numbers])
    memory = KERNELS.put(np.full((20, 40), 77, np.float16))
    dtable = cupyattn.embedding_backward(*placed, grads=memory[:, margin : margin + 24])
    expected = cupyattn.embedding_backward(
        *(KERNELS.put(np.ascontiguousarray(array)) for array in (dout, table, numbers))
    )
    assert_array_equal(KERNELS.get(dtable), KERNELS.get(expected))
    whole = KERNELS.get(memory)
    assert (np.delete(whole, slice(margin, margin + 24), axis=1) == 77).all()


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(
    ("dtype", "length"),
    mostly_deep(
        itertools.product(DTYPES, (8, 13, 1024, 1037)),
        [("float16", 8), ("float32", 13), ("float16", 1024), ("float16", 1037)],
    ),
)
def test_rows_are_copied_bit_for_bit(dtype, length):
    """Every NaN keeps its bits, in wide rows and in rows narrower than a warp copies."""
    size = 3 * length * dtype_of(dtype).itemsize
    bits = np.random.default_rng(length).integers(0, 256, size).astype(np.uint8)
    table = bits.view(dtype_of(dtype)).reshape(3, length)
    table[:, 0] = np.nan
    table.view(np.uint8).reshape(3, -1)[:, 0] = 129, 130, 131
    numbers = np.array([2, 0, 1, 2], np.int32)
    out = KERNELS.get(cupyattn.embedding(KERNELS.put(table), KERNELS.put(numbers)))
    assert out.tobytes() == table[numbers].tobytes()


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_ids_out_of_range_give_nan_and_no_gradient(monkeypatch, ids):
    """Without checks of values nothing beyond the table is read or written."""
    monkeypatch.setattr(configs, "checks_values", lambda operands: False)
    table, dout = floats(0, "float32", 5, 8), floats(1, "float32", 40, 8)
    numbers = np.random.default_rng(0).integers(-3, 9, 40).astype(ids)
    numbers[:2] = np.iinfo(ids).max, np.iinfo(ids).min
    placed = [KERNELS.put(array) for array in (dout, table, numbers)]
    out = KERNELS.get(cupyattn.embedding(*placed[1:]))
    inside = (numbers >= 0) & (numbers < 5)
    assert_array_equal(out[inside], table[numbers[inside]])
    assert np.isnan(out[~inside]).all()
    found = KERNELS.get(cupyattn.embedding_backward(*placed))
    exact = reference.embedding_backward(dout[inside], 5, numbers[inside])
    bound = reference.embedding_backward_bound(dout[inside], 5, numbers[inside], dtype="float32")
    assert reference.error_ratio(found, exact, bound) <= 1


@everywhere
def test_vjp_gives_zero_to_rows_without_an_id(side):
    table, dout = side.put(floats(0, "float32", 9, 8)), side.put(floats(1, "float32", 4, 8))
    ids = side.put(np.array([3, 3, 0, 7]))
    out, pullback = cupyattn.vjp(cupyattn.embedding, table, ids)
    assert_array_equal(side.get(out), side.get(table)[[3, 3, 0, 7]])
    dtable, dids = pullback(dout)
    assert dids is None
    rows = side.get(dtable)
    assert_array_equal(rows[[1, 2, 4, 5, 6, 8]], 0)
    d = side.get(dout)
    assert_array_equal(rows[3], (d[0].astype(float) + d[1]).astype(np.float32))
    there = side.put(np.full((9, 8), np.nan, np.float32))
    found = cupyattn.embedding_backward(dout, table, ids, grads=there)
    assert found is there
    assert_array_equal(side.get(found), rows)


@pytest.mark.nvrtc
def test_infinities_and_nan_stay_in_their_rows():
    dout = np.ones((70, 8), np.float16)
    dout[5], dout[6, 3] = np.inf, np.nan
    ids = np.arange(70) % 3
    with cupyattn.backend("emulator"):
        found = cupyattn.embedding_backward(dout, np.zeros((3, 8), np.float16), ids)
    assert np.isinf(found[2]).all()
    assert np.isnan(found[0, 3])
    assert np.isfinite(np.delete(found[0], 3)).all()
    assert (found[1] == 23).all()


@pytest.mark.nvrtc
def test_whole_sectors_of_table_and_result():
    report = Report()
    table, ids = floats(0, "float16", 40, 64), np.arange(24) % 40
    with cupyattn.backend("emulator", report=report):
        out = cupyattn.embedding(table, ids)
        cupyattn.embedding_backward(out, table, ids)
    assert report.sector_efficiency == 1.0


T, IDS = np.zeros((5, 8), np.float32), np.zeros((2, 3), np.int32)
D = np.zeros((2, 3, 8), np.float32)


@everywhere
@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda t, i, d: cupyattn.embedding(None, i), TypeError, "table is None"),
        (lambda t, i, d: cupyattn.embedding(t[0], i), ValueError, r"table has shape \(8,\)"),
        (lambda t, i, d: cupyattn.embedding(t, d), TypeError, "ids has dtype float32"),
        (lambda t, i, d: cupyattn.embedding(t[:, ::2], i), ValueError, "table has strides"),
        (lambda t, i, d: cupyattn.embedding(t, i, out=d[0]), ValueError, "out is float32"),
        (lambda t, i, d: cupyattn.embedding_backward(d[0], t, i), ValueError, "dout has shape"),
        (
            lambda t, i, d: cupyattn.embedding_backward(d, t, i, accumulate=True),
            ValueError, "accumulate=True without grads",
        ),
        (
            lambda t, i, d: cupyattn.embedding_backward(d, t, i, grads=t[:4]),
            ValueError, "grads is float32",
        ),
        (
            lambda t, i, d: cupyattn.embedding_backward(d, t, i, grads=t),
            ValueError, "grads overlaps table",
        ),
    ],
)  # fmt: skip
def test_bad_input(side, call, kind, message):
    with pytest.raises(kind, match=message):
        call(*(side.put(array.copy()) for array in (T, IDS, D)))


@everywhere
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 4], [5, -1]], r"ids\[1, 0\] is 5; the table has rows 0 to 4"),
        ([0, -1], r"ids\[1\] is -1"),
    ],
)
def test_error_names_the_first_id_out_of_range(side, ids, message):
    with cupyattn.backend(checks=True), pytest.raises(ValueError, match=message):
        cupyattn.embedding(side.put(T.copy()), side.put(np.array(ids)))


@everywhere
@pytest.mark.parametrize(("rows", "shape", "length"), [(5, (0,), 8), (5, (2, 3), 0), (0, (0,), 8)])
def test_empty_arrays_give_empty_results(side, rows, shape, length):
    table, ids = side.put(np.ones((rows, length), np.float32)), side.put(np.zeros(shape, int))
    out = cupyattn.embedding(table, ids)
    assert out.shape == (*shape, length)
    dtable = cupyattn.embedding_backward(out, table, ids)
    assert dtable.shape == (rows, length)
    assert not side.get(dtable).any()


@pytest.mark.deep
def test_results_match_torch():
    torch = pytest.importorskip("torch")
    table, dout = floats(0, "float32", 9, 5), floats(1, "float32", 4, 30, 5)
    ids = ids_of(9, (4, 30), "int64", "padding")
    given = torch.tensor(table, requires_grad=True)
    expected = torch.nn.functional.embedding(torch.tensor(ids), given)
    out, pullback = cupyattn.vjp(cupyattn.embedding, table, ids)
    assert_array_equal(out, expected.detach().numpy())
    (gradient,) = torch.autograd.grad(expected, given, torch.tensor(dout))
    assert_allclose(pullback(dout)[0], gradient.numpy(), rtol=1e-5, atol=1e-5)
