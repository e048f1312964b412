"""Row operations: their declaration, column sums, and accesses to global memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.devices import KERNELS, dtype_of
from support.search import mostly_deep

import cupyattn
from cupyattn.emulator import Report
from cupyattn.emulator.report import Access
from cupyattn.runtime.arrays import adopt
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.row_kernel import ROWS, Result, RowKernel
from cupyattn.runtime.rows import RowOptions, call_rows, row_problem, run_rows

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]


@dataclass(slots=True)
class CentreBackwardArrays(Record[T]):
    dout: T
    x: T
    weight: T
    dx: T | None = None
    mean: T | None = None
    dweight: T | None = None


CENTRE_BACKWARD = RowKernel(
    "centre_backward",
    str(Path(__file__).parent / "kernels" / "centre_backward.cu"),
    CentreBackwardArrays,
    rows=("dout", "x"),
    columns=("weight",),
    results={"dx": Result.ROW, "mean": Result.PER_ROW, "dweight": Result.COLUMN_SUM},
    scalars={"scale": np.float32},
)


def reference(dout, x, weight, *, scale):
    dout, x, weight = (array.astype(np.float64) for array in (dout, x, weight))
    g = dout * weight
    mean = x.mean(axis=-1)
    dweight = (dout * (x - mean[..., None])).reshape(-1, x.shape[-1]).sum(axis=0)
    return scale * (g - g.mean(axis=-1, keepdims=True)), mean, dweight


def centre_backward(dout, x, weight, *, scale, **given):
    arrays = CentreBackwardArrays(dout, x, weight, **given)
    return call_rows(
        CENTRE_BACKWARD, arrays, partial(reference, scale=scale), RowOptions.of(scale=scale)
    )


RESULTS = ("dx", "mean", "dweight")
LENGTHS = (1, 24, 128, 129, 1000, 1024, 1025, 8192, 8193, 9001)
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


def problem(rows, length, dtype):
    rng = np.random.default_rng(rows + length)
    arrays = rng.standard_normal((3, rows, length)).astype(dtype_of(dtype))
    return arrays[0], arrays[1], arrays[2, 0]


def require_right(found, dout, x, weight, dtype):
    """Check errors against the rounding of float32 sums and of one store."""
    rows, length = x.shape
    exact = dict(zip(RESULTS, reference(dout, x, weight, scale=0.5), strict=True))
    absolute = [np.abs(array.astype(np.float64)) for array in (dout, x, weight)]
    size = {
        "dx": absolute[0] * absolute[2] + (absolute[0] * absolute[2]).mean(-1, keepdims=True),
        "mean": absolute[1].mean(-1),
        "dweight": (absolute[0] * (absolute[1] + absolute[1].mean(-1, keepdims=True))).sum(0),
    }
    for name, terms in (("dx", length), ("mean", length), ("dweight", rows + length)):
        store = UNITS[dtype if name != "mean" else "float32"]
        bound = (terms + 8) * 2.0**-24 * size[name] + store * np.abs(exact[name]) + 1e-7
        assert (np.abs(KERNELS.get(getattr(found, name)) - exact[name]) <= bound).all(), name


ALL = [*itertools.product((1, 3, 37), LENGTHS, UNITS)]
EACH_LENGTH = [*zip(itertools.cycle((1, 3, 37, 3)), LENGTHS, itertools.cycle(UNITS), strict=False)]


@pytest.mark.parametrize(("rows", "length", "dtype"), mostly_deep(ALL, EACH_LENGTH[::2]))
def test_row_operation_of_each_length_is_right(rows, length, dtype):
    dout, x, weight = problem(rows, length, dtype)
    found = centre_backward(*map(KERNELS.put, (dout, x, weight)), scale=0.5)
    assert (found.mean.shape, found.dweight.shape) == ((rows,), (length,))
    require_right(found, dout, x, weight, dtype)


def test_scalars_of_each_call_reach_the_kernel():
    """Plans do not keep the scalars of an earlier call, whatever their types."""
    dout, x, weight = map(KERNELS.put, problem(3, 24, "float32"))
    once = KERNELS.get(centre_backward(dout, x, weight, scale=1.0).dx)
    for scale in (0.5, 2, 2.0, np.float32(4), np.float64(0.25), 0.5):
        found = centre_backward(dout, x, weight, scale=scale).dx
        np.testing.assert_array_equal(KERNELS.get(found), once * np.float32(scale))


def test_sums_of_more_rows_than_ctas_repeat_their_bits():
    row = ROWS[75][128]
    rows_at_once = KERNELS.device.multiprocessors * row.summing_ctas * row.rows_per_cta
    dout, x, weight = problem(rows_at_once + 5, 24, "float32")
    placed = [KERNELS.put(array) for array in (dout, x, weight)]
    first, second = (centre_backward(*placed, scale=0.5) for _ in range(2))
    require_right(first, dout, x, weight, "float32")
    for name in RESULTS:
        one, other = (KERNELS.get(getattr(found, name)) for found in (first, second))
        assert one.tobytes() == other.tobytes()


def test_column_sums_accumulate():
    dout, x, weight = problem(7, 129, "float32")
    dweight = KERNELS.put(np.arange(129, dtype=np.float32))
    placed = map(KERNELS.put, (dout, x, weight))
    operands = adopt(CentreBackwardArrays(*placed, dweight=dweight))
    described = row_problem(CENTRE_BACKWARD, operands, RowOptions.of(scale=0.5, accumulate=True))
    found = run_rows(KERNELS.device, described, operands)
    assert found.dweight is dweight
    expected = reference(dout, x, weight, scale=0.5)[2] + np.arange(129)
    np.testing.assert_allclose(KERNELS.get(dweight), expected, rtol=1e-5, atol=1e-5)


def test_a_sum_is_written_by_one_warp():
    """A second writer would add the sum twice with accumulate=True."""
    report = Report()
    with cupyattn.backend("emulator", report=report):
        centre_backward(*problem(7, 129, "float32"), scale=0.5)
    lines = [line for line in report.lines if line.file.endswith("column_sums.cu")]
    stores = [x for line in lines for x in line.accesses if x.write and x.space == "global"]
    assert sum(x.bytes for x in stores) == 129 * 4


def test_results_are_written_in_place():
    dout, x, weight = problem(5, 129, "float32")
    wide = KERNELS.put(np.full((5, 300), 77, np.float32))
    mean, dweight = (KERNELS.put(np.full(n, 77, np.float32)) for n in (5, 129))
    given = {"dx": wide[:, :129], "mean": mean, "dweight": dweight}
    found = centre_backward(*map(KERNELS.put, (dout, x, weight)), scale=0.5, **given)
    for name, array in given.items():
        assert getattr(found, name) is array
    require_right(found, dout, x, weight, "float32")
    assert (KERNELS.get(wide)[:, 129:] == 77).all()


@pytest.mark.parametrize("shape", [(0, 24), (3, 0), (2, 0, 24)])
def test_no_rows_or_columns_give_sums_of_zero(shape):
    dout = KERNELS.put(np.zeros(shape, np.float32))
    weight = KERNELS.put(np.zeros(shape[-1], np.float32))
    found = centre_backward(dout, dout, weight, scale=0.5)
    assert found.dx.shape == shape
    assert found.mean.shape == shape[:-1]
    assert (KERNELS.get(found.dweight) == 0).all()


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("weight", np.zeros(9, np.float32), r"weight has shape \(9,\); .*for each column.*\(24,\)"),
        ("weight", np.zeros(24, np.float16), "dout has float32, x has float32, weight has float16"),
        ("mean", np.zeros((2, 3))[:, 0], "mean is float64"),
        ("mean", np.zeros((3, 2), np.float32)[:, 0], "mean has strides .*contiguous"),
        ("dweight", np.zeros(23, np.float32), "dweight is float32"),
        ("x", np.zeros((3, 25), np.float32), "x has shape .*shaped like dout"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(name, wrong, message):
    arrays = {"dout": np.zeros((3, 24), np.float32), "x": np.zeros((3, 24), np.float32)}
    arrays |= {"weight": np.zeros(24, np.float32), name: wrong}
    with pytest.raises((TypeError, ValueError), match=message):
        centre_backward(**{key: KERNELS.put(array) for key, array in arrays.items()}, scale=0.5)


RNG = np.random.default_rng(0)
ROW_COUNT, WIDTH = 3, 4096
X = RNG.standard_normal((ROW_COUNT, WIDTH)).astype(np.float16)
MASK = RNG.random((ROW_COUNT, WIDTH)) < 0.7
BIAS = RNG.standard_normal((1, WIDTH)).astype(np.float16)
LABELS = np.array([5, 4095, -100], np.int32)
LSE = cupyattn.logsumexp(X)
OUT = cupyattn.softmax(X)
ONES = np.ones(ROW_COUNT, np.float32)


def accesses(call: Callable[[], Any]) -> list[Access]:
    """Return the accesses to global memory of a call."""
    report = Report()
    with cupyattn.backend("emulator", report=report):
        call()
    assert report.bank_conflict_ways == 1.0
    return [access for access in report.accesses if access.space == "global"]


# the call; what it reads and writes in vectors of 16 bytes, in arrays of the size of X
CALLS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "softmax": (lambda: cupyattn.softmax(X), 1, 1),
    "log_softmax": (lambda: cupyattn.log_softmax(X, mask=MASK, bias=BIAS), 2, 1),
    "softmax_backward": (lambda: cupyattn.softmax_backward(X, OUT), 2, 1),
    "logsumexp": (lambda: cupyattn.logsumexp(X, mask=MASK), 1, 0),
    "logsumexp_backward": (lambda: cupyattn.logsumexp_backward(ONES, X, LSE), 1, 1),
    "cross_entropy": (
        lambda: cupyattn.cross_entropy(X, LABELS, return_lse=True, label_smoothing=0.1), 1, 0,
    ),
    "cross_entropy_backward": (
        lambda: cupyattn.cross_entropy_backward(ONES[0, ...], X, LABELS, LSE), 1, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_rows_are_moved_once_in_whole_vectors(name):
    """A thread moves 16 bytes, sectors are used in full, and rows are read once."""
    call, reads, writes = CALLS[name]
    found = accesses(call)
    for write, count in ((False, reads), (True, writes)):
        whole = [a for a in found if a.write == write and a.instruction.opcode.endswith("v4.u32")]
        ignored = WIDTH * 2 * (name == "cross_entropy_backward" and not write)
        assert sum(access.bytes for access in whole) == count * X.nbytes - ignored
        assert all(access.efficiency == 1.0 for access in found if access.write == write)


def test_broadcast_arrays_are_read_in_vectors():
    found = accesses(lambda: cupyattn.softmax(X, mask=MASK, bias=BIAS))
    reads = [access for access in found if not access.write]
    assert sum(access.bytes for access in reads) == X.nbytes + MASK.nbytes + ROW_COUNT * BIAS.nbytes
    assert {access.instruction.opcode.rsplit(".", 2)[-2] for access in reads} == {"v4"}


def test_causal_rows_are_read_up_to_the_diagonal():
    x = RNG.standard_normal((64, 64)).astype(np.float32)
    found = accesses(lambda: cupyattn.softmax(x, causal=True))
    vectors = sum(-(-(row + 1) // 4) for row in range(64))
    assert sum(access.bytes for access in found if not access.write) == 16 * vectors
    assert sum(access.bytes for access in found if access.write) == x.nbytes


def test_logits_of_ignored_rows_are_not_read_without_lse():
    found = accesses(lambda: cupyattn.cross_entropy(X, LABELS, reduction="none"))
    large = sum(access.bytes for access in found if access.instruction.opcode.endswith("v4.u32"))
    assert large == 2 * WIDTH * 2


def test_scalar_loads_are_whole_sectors():
    """Rows of an odd number of items cannot come in vectors; neighbours read neighbours."""
    odd = RNG.standard_normal((2, 3001)).astype(np.float32)
    found = accesses(lambda: cupyattn.logsumexp(odd))
    # 128 bytes a warp, which lie in five sectors where they do not begin with one.
    assert max(access.sectors_per_request for access in found) <= 5
