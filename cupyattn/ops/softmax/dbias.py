"""The gradient of a bias of softmax, on a device: summed over the axes that the bias has not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from cupyattn.ops.softmax import kernels_dbias as config
from cupyattn.ops.softmax.kernels_dbias import BiasSumArrays
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
from cupyattn.runtime.plan import Output, Plan, Planner, Step, run
from cupyattn.runtime.row_kernel import COLUMN_SUMS_COLUMNS, column_sums
from cupyattn.runtime.storage import VECTOR_BYTES, vector_items

ROW_SUM_DTYPE = np.dtype(np.float32)


def softmax_dbias(
    device: Device,
    operands: Operands[BiasSumArrays[Array]],
    *,
    logarithm: bool,
    accumulate: bool = False,
) -> Array:
    """Return the gradient of a bias, in an array like it.

    Parameters
    ----------
    operands : Operands
        dout and out, of which the last axis is contiguous; row_sum, an array in C order that
        softmax_backward left, float32 for each row; bias, which broadcasts to them and is not read;
        and perhaps dbias and workspace.
    logarithm : bool
        Whether it is the gradient of log_softmax.
    accumulate : bool
        Add to what dbias holds.
    """
    plan = _plan(operands.description, logarithm, device.multiprocessors, accumulate)
    return run(device, plan, operands).dbias


def scratch_bytes(device: Device, description: Description) -> int:
    """Return the bytes of scratch memory of a call that is described with or without row_sum."""
    return _plan(description, False, device.multiprocessors, False).workspace_bytes


@lru_cache(maxsize=4096)
def _plan(
    description: Description, logarithm: bool, multiprocessors: int, accumulate: bool
) -> Plan:
    layouts = layouts_of(BiasSumArrays[Layout], description)
    starts = starts_of(BiasSumArrays[int], description)
    (*rows, length), bias = layouts.out.shape, layouts.bias
    planner = Planner(BiasSumArrays, layouts, {"dbias": Output(bias.shape, bias.dtype)})
    slots = planner.slots
    extents = (1,) * (len(rows) + 1 - len(bias.shape)) + bias.shape
    # Scores that move together along a row move no weight: those sums are 0.
    if 0 in (*rows, length) or extents[-1] != length:
        zero_first = [slots.dbias] if slots.dbias is not None and not accumulate else []
        return planner.plan(zero_first=zero_first, zero_new=accumulate)
    read = {"dout": layouts.dout, "out": layouts.out}
    vec = _vector(read, {"dout": starts.dout, "out": starts.out})
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
    specialisation = config.softmax_dbias(layouts.out.dtype.name, vec, logarithm)
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
