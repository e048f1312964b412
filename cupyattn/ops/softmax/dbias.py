"""The gradient of a bias of softmax, on a device: summed over the axes that the bias has not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from cupyattn.ops.softmax import kernels_dbias as config
from cupyattn.runtime.arrays import (
    Array,
    Description,
    Layout,
    Operands,
    contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.axes import row_params
from cupyattn.runtime.device import Device
from cupyattn.runtime.plan import ABSENT, Output, Plan, Step, lay_out_scratch, run
from cupyattn.runtime.row_kernel import COLUMN_SUMS_COLUMNS, column_sums
from cupyattn.runtime.storage import VECTOR_BYTES, vector_items

ROW_SUM_DTYPE = np.dtype(np.float32)


def softmax_dbias(
    device: Device, operands: Operands, *, logarithm: bool, accumulate: bool = False
) -> Array:
    """Return the gradient of a bias, like it.

    Parameters
    ----------
    operands : Operands
        dout and out, of which the last axis is contiguous; row_sum, an array in C order that
        softmax_backward left, float32 for each row; bias, which broadcasts to them and is not read;
        and perhaps dbias and workspace.
    logarithm : bool
        Of the logarithm of softmax.
    accumulate : bool
        Add to what dbias holds.
    """
    plan = _plan(operands.description, logarithm, device.multiprocessors, accumulate)
    return run(device, plan, operands)["dbias"]


def scratch_bytes(device: Device, description: Description) -> int:
    """Return the bytes of scratch memory that it takes, from dout, out and bias alone."""
    return _plan(description, False, device.multiprocessors, False).workspace_bytes


@lru_cache(maxsize=4096)
def _plan(
    description: Description, logarithm: bool, multiprocessors: int, accumulate: bool
) -> Plan:
    layouts, starts = layouts_of(description), starts_of(description)
    (*rows, length), bias = layouts["out"].shape, layouts["bias"]
    outputs = (("dbias", Output(bias.shape, bias.dtype)),)
    extents = (1,) * (len(rows) + 1 - len(bias.shape)) + bias.shape
    # Scores that move together along a row move no weight: those sums are 0.
    if 0 in (*rows, length) or extents[-1] != length:
        zero_first = () if accumulate else ("dbias",)
        return Plan((), outputs, zero_first=zero_first, zero_new=accumulate)
    read = {name: layouts[name] for name in ("dout", "out")}
    vec = _vector(read, starts)
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
    ctas = kept * -(-length // config.columns(vec))
    wanted = -(-config.SUMMING_CTAS * multiprocessors // ctas)
    warps = config.THREADS // config.WARP
    splits = max(min(wanted, summed // (warps * config.ROWS_OF_A_WARP)), 1)
    count = kept * length
    specialisation = config.softmax_dbias(read["out"].dtype.name, vec, logarithm)
    steps = (
        Step.of(specialisation, ctas * splits, splits, *params),
        Step.of(
            column_sums(bias.dtype.name), -(-count // COLUMN_SUMS_COLUMNS),
            splits, count, accumulate,
            renamed={"sums": "dbias", "more_partials": ABSENT, "more_sums": ABSENT},
        ),
    )  # fmt: skip
    scratch = lay_out_scratch({"partials": splits * count})
    return Plan(steps, outputs, scratch, zero_new=accumulate)


def _vector(read: Mapping[str, Layout], starts: Mapping[str, int]) -> int:
    """Return how many items one load brings: a vector's where every row starts at one, or 1."""
    vec = 1
    for name, layout in read.items():
        *outer, length = layout.shape
        vec = vector_items(layout.dtype.name)
        steps = [n for n, extent in zip(layout.strides, outer, strict=False) if extent > 1]
        if length % vec or any(n % VECTOR_BYTES for n in (starts[name], *steps)):
            return 1
    return vec
