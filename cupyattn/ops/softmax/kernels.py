"""Kernels of softmax, its logarithm and the log-sum-exp, and gradients with respect to a bias."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cupyattn.ops.softmax import reference
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.arrays import (
    Array,
    Description,
    Layout,
    adopt,
    contiguous,
    is_contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import (
    checked_once,
    factor,
    integer,
    require_apart,
    require_bool,
    require_given,
    require_kernel_dtype,
    require_same_dtype,
    require_shape,
)
from cupyattn.runtime.errors import error, made_beforehand
from cupyattn.runtime.outputs import round_into
from cupyattn.runtime.plan import Output, Plan, Planner, Step, allot, run
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.row_kernel import (
    COLUMN_SUMS_COLUMNS,
    Result,
    RowConfig,
    RowKernel,
    RowTable,
    column_sums,
)
from cupyattn.runtime.rows import RowOptions, broadcast_layout, call_rows
from cupyattn.runtime.spec import (
    Gates,
    KernelSpec,
    Pointer,
    Scalar,
    Specialisation,
    StructParameter,
    inputs,
)
from cupyattn.runtime.storage import STORAGE, rows_aligned, vector_items
from cupyattn.runtime.structs import row_params, rows_params
from cupyattn.runtime.tables import FLOAT_BYTES, cpp_bool, with_gates

_HELD = {
    128: RowConfig(128, 8, 16, "short rows: four to a warp keep its lanes busy"),
    1024: RowConfig(128, 32, 32, "a warp a row: no barrier, 32 items a thread in registers"),
    2048: RowConfig(128, 128, 16, "small CTAs: one loads while another stores"),
    4096: RowConfig(128, 128, 32, "small CTAs with twice the items a thread"),
    8192: RowConfig(256, 256, 32, "a CTA a row, still read once"),
    16384: RowConfig(512, 512, 32, "the most items that leave registers for a second CTA"),
    None: RowConfig(256, 256, 0, "longer: two reads", in_flight=32),
}
_HELD_GATES: dict[int | None, Gates] = {
    **dict.fromkeys((1024, 4096, 8192, 16384), Gates(registers=96)),
    None: Gates(registers=160),
}
HELD: RowTable = {75: with_gates(_HELD, _HELD_GATES)}
"""Configurations of kernels that use a row twice."""

_STREAMED = {
    128: RowConfig(128, 8, 0, "short rows: four to a warp keep its lanes busy", in_flight=16),
    2048: RowConfig(128, 32, 0, "a warp a row: no barrier", in_flight=32),
    16384: RowConfig(128, 128, 0, "small CTAs: one loads while others reduce", in_flight=32),
    None: RowConfig(512, 512, 0, "64 bytes and more in flight a thread", in_flight=32),
}
_STREAMED_GATES = {
    128: Gates(registers=72),
    2048: Gates(registers=168),
    16384: Gates(registers=168),
    None: Gates(registers=112),
}
STREAMED: RowTable = {75: with_gates(_STREAMED, _STREAMED_GATES)}
"""Configurations of kernels that read a row once, from its beginning to its end."""

_WRITTEN = {limit: replace(row, in_flight=16) for limit, row in _STREAMED.items()}
STREAMED_BACKWARD: RowTable = {
    75: with_gates(
        _WRITTEN,
        {
            128: Gates(registers=128),
            2048: Gates(registers=128),
            16384: Gates(registers=80),
            None: Gates(registers=88),
        },
    )
}
"""Configurations of kernels that also write rows: with a mask and a bias 32 items spill."""

_SCORES: dict[str, Any] = {
    "broadcast": {"mask": ("bool",), "bias": tuple(STORAGE)},
    "choices": {"causal": (False, True)},
    "scalars": {"scale": np.float32, "queries": np.int64},
}
"""Parameters of the kernels that compute scores, apart from x."""
_LOGARITHM = {"logarithm": (False, True)}
_ACCUMULATE = {"accumulate": (False, True)}


@dataclass(slots=True)
class ScoreArrays(Record[T]):
    """Arrays of softmax, its logarithm and log-sum-exp, forward."""

    x: T
    mask: T | None = None
    bias: T | None = None
    out: T | None = None


@dataclass(slots=True)
class SoftmaxBackwardArrays(Record[T]):
    """Arrays of the backward of softmax and its logarithm."""

    SHOWN_AS: ClassVar = MappingProxyType({"dx": "grads"})

    dout: T
    out: T
    dx: T | None = None
    row_sum: T | None = None


@dataclass(slots=True)
class LogSumExpBackwardArrays(Record[T]):
    """Arrays of the backward of log-sum-exp."""

    SHOWN_AS: ClassVar = MappingProxyType({"dx": "grads"})

    x: T
    dout: T
    out: T
    mask: T | None = None
    bias: T | None = None
    dx: T | None = None


FORWARD = RowKernel(
    "softmax_forward",
    "softmax/forward.cu",
    ScoreArrays,
    rows=("x",),
    results={"out": Result.ROW},
    optional=("mask", "bias"),
    table=HELD,
    **{**_SCORES, "choices": _SCORES["choices"] | _LOGARITHM},
)
BACKWARD = RowKernel(
    "softmax_backward",
    "softmax/backward.cu",
    SoftmaxBackwardArrays,
    rows=("dout", "out"),
    results={"dx": Result.ROW, "row_sum": Result.PER_ROW},
    optional=("row_sum",),
    choices=_LOGARITHM | _ACCUMULATE,
    scalars={"scale": np.float32},
    table=HELD,
)
"""`row_sum` is an input of softmax_dbias, which sums the gradient of a bias."""
LOGSUMEXP = RowKernel(
    "logsumexp",
    "softmax/logsumexp.cu",
    ScoreArrays,
    rows=("x",),
    results={"out": Result.PER_ROW},
    optional=("mask", "bias"),
    table=STREAMED,
    **_SCORES,
)
LOGSUMEXP_BACKWARD = RowKernel(
    "logsumexp_backward",
    "softmax/logsumexp_backward.cu",
    LogSumExpBackwardArrays,
    rows=("x",),
    per_row=("dout", "out"),
    results={"dx": Result.ROW},
    optional=("mask", "bias"),
    table=STREAMED_BACKWARD,
    **{**_SCORES, "choices": _SCORES["choices"] | _ACCUMULATE},
)

_WARP = 32
_DBIAS_THREADS = 256
"""Eight warps on one block of columns: enough loads in flight if there are few columns."""
_DBIAS_ROWS_OF_A_WARP = 8
"""The fewest rows of one split: with fewer, a partial sum costs as much as it saves."""
_DBIAS_CTAS = 4
"""CTAs for each multiprocessor, if there are enough rows to split."""


@dataclass(slots=True)
class BiasSumArrays(Record[T]):
    """Arrays of the sum that is the gradient of a bias."""

    dout: T
    out: T
    bias: T
    row_sum: T
    dbias: T | None = None
    workspace: T | None = None


DBIAS = KernelSpec(
    "softmax_dbias",
    "softmax/dbias.cu",
    (
        *inputs("dout", "out", "row_sum"),
        Pointer("partials"),
        Scalar("splits", np.dtype(np.int64)),
        *(StructParameter(name, rows_params(3), "RowsParams") for name in ("kept", "summed")),
    ),
)
ROW_SUM_DTYPE = np.dtype(np.float32)
_BYTES = np.dtype(np.uint8)

Reference = Callable[..., np.ndarray]


@cache
def _bias_sum(dtype: str, vec: int, logarithm: bool) -> Specialisation:
    """Specialise softmax_dbias for arrays of a dtype; `vec` is the number of items in one load."""
    pitch = _WARP + _WARP // vec
    return DBIAS.specialise(
        threads=_DBIAS_THREADS,
        static_shared_bytes=_DBIAS_THREADS // _WARP * vec * pitch * FLOAT_BYTES,
        gates=Gates(registers=80),
        DTYPE=dtype,
        VEC=vec,
        LOGARITHM=cpp_bool(logarithm),
    )


@lru_cache(maxsize=4096)
def _bias_sum_plan(
    description: Description, logarithm: bool, multiprocessors: int, accumulate: bool
) -> Plan:
    """Plan the gradient of a bias: its sum over the axes that it broadcasts along.

    The last axis of dout and out is contiguous. softmax_backward has written row_sum, float32 for
    each row in C order. The bias is not read.
    """
    layouts = layouts_of(BiasSumArrays[Layout], description)
    starts = starts_of(BiasSumArrays[int], description)
    (*rows, length), bias = layouts.out.shape, layouts.bias
    planner = Planner(BiasSumArrays, layouts, {"dbias": Output(bias.shape, bias.dtype)})
    slots = planner.slots
    extents = (1,) * (len(rows) + 1 - len(bias.shape)) + bias.shape
    # Adding one number to all scores of a row changes no weight: those sums are 0.
    if 0 in (*rows, length) or extents[-1] != length:
        zero_first = [slots.dbias] if slots.dbias is not None and not accumulate else []
        return planner.plan(zero_first=zero_first, zero_new=accumulate)
    read = {"dout": layouts.dout, "out": layouts.out}
    items = vector_items(layouts.out.dtype.name)
    aligned = rows_aligned(((layouts.dout, starts.dout), (layouts.out, starts.out)))
    vec = items if aligned and length % items == 0 else 1
    read["row_sum"] = contiguous(tuple(rows), ROW_SUM_DTYPE)
    params, counts = [], []
    for keep in (True, False):
        axes = [axis for axis, n in enumerate(rows) if (extents[axis] == n) == keep]
        shape = tuple(rows[axis] for axis in axes)
        strides = {
            name: tuple(layout.strides[axis] // layout.dtype.itemsize for axis in axes)
            for name, layout in read.items()
        }
        params.append(row_params(shape, length, strides))
        counts.append(math.prod(shape))
    kept, summed = counts
    ctas = kept * -(-length // (_WARP * vec))
    wanted = -(-_DBIAS_CTAS * multiprocessors // ctas)
    warps = _DBIAS_THREADS // _WARP
    splits = max(min(wanted, summed // (warps * _DBIAS_ROWS_OF_A_WARP)), 1)
    count = kept * length
    specialisation = _bias_sum(layouts.out.dtype.name, vec, logarithm)
    partials = planner.scratch(splits * count)
    terms = (slots.dout, slots.out, slots.row_sum, partials)
    sums = column_sums(bias.dtype.name)
    return planner.plan(
        Step.of(specialisation, ctas * splits, terms, splits, *params),
        Step.of(
            sums,
            -(-count // COLUMN_SUMS_COLUMNS),
            (partials, None, slots.dbias, None),
            *(splits, count, accumulate),
        ),
        zero_new=accumulate,
    )


class SoftmaxGrads(NamedTuple):
    """Gradients of the inputs of `softmax` or `log_softmax`, each of its input's shape.

    In ``grads=`` a field that is None, the default, makes a new array.

    Attributes
    ----------
    dx : array (..., N)
        Gradient with respect to x.
    dbias : array of bias's shape
        Gradient with respect to the bias, summed over the axes that it broadcast along.
    """

    dx: Array | None = None
    dbias: Array | None = None


@dataclass(slots=True)
class BiasGradientArrays(Record[T]):
    """Arrays of a backward of softmax whose bias has a gradient."""

    SHOWN_AS: ClassVar = MappingProxyType({"dx": "grads.dx", "dbias": "grads.dbias"})

    dout: T
    out: T
    bias: T | None = None
    workspace: T | None = None
    dx: T | None = None
    dbias: T | None = None


@checked_once
def backward_options(
    gradient: Reference, scale: object, accumulate: object, logarithm: bool
) -> tuple[Reference, RowOptions]:
    """Check the options of a backward; return the reference of dx with them, and the kernel's."""
    scale = factor("scale", scale)
    require_bool("accumulate", accumulate)
    choices = {"logarithm": logarithm}
    options = RowOptions.of(choices=choices, accumulate=bool(accumulate), scale=scale)
    return partial(gradient, scale=scale), options


def softmax_gradients(
    arrays: BiasGradientArrays[Array],
    axis: Any,
    gradient: Reference,
    exact: Reference,
    options: RowOptions,
) -> SoftmaxGrads:
    """Return dx and dbias, the gradient of the scores summed over the axes that bias lacks.

    `gradient` is the reference of the gradient of the scores. `exact`, the reference of dx, and the
    options of its kernel are from `backward_options`. Softmax ran over `axis`, which must be the
    last.
    """
    operands = adopt(arrays)
    layouts = layouts_of(BiasGradientArrays[Layout], operands.description)
    require_given("dout", layouts.dout)
    require_given("out", layouts.out)
    out, bias = layouts.out, layouts.bias
    assert bias is not None
    assert arrays.bias is not None
    _require_last(axis, len(out.shape))
    require_same_dtype({"dout": layouts.dout, "out": out})
    require_shape("dout", layouts.dout, out.shape, "shaped like out")
    broadcast_layout(FORWARD, "bias", bias, out)
    results = {"dx": Output(out.shape, out.dtype), "dbias": Output(bias.shape, bias.dtype)}
    require_apart(operands, results)
    if layouts.dbias is not None and not is_contiguous(layouts.dbias):
        raise error(
            ValueError,
            f"grads.dbias has strides {layouts.dbias.strides}",
            "it is contiguous in C order",
            made_beforehand("grads.dbias"),
        )
    device, accumulate = device_of(operands), options.accumulate
    if arrays.dx is None:
        options = options._replace(accumulate=False)
    if device is None:
        exact_dbias = reference.broadcast_sums(gradient(arrays.dout, arrays.out), bias.shape)
        if accumulate and arrays.dbias is not None:
            exact_dbias = exact_dbias + arrays.dbias.astype(exact_dbias.dtype)
        dx = call_rows(
            BACKWARD, SoftmaxBackwardArrays(arrays.dout, arrays.out, arrays.dx), exact, options
        ).dx
        return SoftmaxGrads(dx, round_into(arrays.dbias, exact_dbias, bias.dtype))

    require_kernel_dtype("dout", layouts.dout.dtype)
    statistics = Output(out.shape[:-1], ROW_SUM_DTYPE)
    dout, outs, biases = (operands.description[n] for n in range(3))
    row_sums = (*contiguous(*statistics)[:2], ROW_SUM_DTYPE, 0)
    sizes = (dout, outs, biases, row_sums, None, None)
    needed = _bias_sum_plan(sizes, False, device.multiprocessors, False).workspace_bytes
    row_sum, sums = allot(device, [statistics, Output((needed,), _BYTES)], arrays.workspace)
    each = SoftmaxBackwardArrays(arrays.dout, arrays.out, arrays.dx, row_sum)
    dx = call_rows(BACKWARD, each, exact, options).dx
    summed = adopt(BiasSumArrays(arrays.dout, arrays.out, arrays.bias, row_sum, arrays.dbias, sums))
    logarithm = dict(options.choices)["logarithm"]
    plan = _bias_sum_plan(summed.description, logarithm, device.multiprocessors, accumulate)
    return SoftmaxGrads(dx, run(device, plan, summed).dbias)


def require_bias_gradient(call: Mapping[str, Any]) -> None:
    """Raise ValueError if a recorded call of softmax has no gradient with respect to its bias."""
    _require_last(call["axis"], call["out"].ndim)


def _require_last(axis: Any, rank: int) -> None:
    if integer("axis", axis) not in (-1, rank - 1):
        raise error(
            ValueError,
            f"axis = {axis!r} with a bias",
            "the gradient of a bias is available only for softmax over the last axis",
            "pass transposed views, or sum the gradient with a scale of 1 over the bias's axes",
        )


_ROW_KERNELS = (FORWARD, BACKWARD, LOGSUMEXP, LOGSUMEXP_BACKWARD)
KERNELS = (*(kernel.spec for kernel in _ROW_KERNELS), DBIAS)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every configuration, with dtypes, loads and options in pairs."""
    for kernel in _ROW_KERNELS:
        yield from kernel.catalogue(arch)
    for dtype, whole, logarithm in itertools.product(STORAGE, (True, False), (False, True)):
        yield _bias_sum(dtype, vector_items(dtype) if whole else 1, logarithm)
