"""Sums over the axes along which an array had been broadcast, on a device."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from cupyattn.arrays import Array, Description, Layout, Operands, layouts_of, starts_of
from cupyattn.kernels.configs.dtypes import VECTOR_BYTES, vector_items
from cupyattn.kernels.configs.layers import broadcast_sums as config
from cupyattn.kernels.configs.rows import COLUMN_SUMS_COLUMNS, column_sums
from cupyattn.kernels.device import Device
from cupyattn.ops.axes import Strides, row_params
from cupyattn.ops.plan import Output, Plan, Step, lay_out_scratch, run


def broadcast_sums(
    device: Device, operands: Operands, dtype: np.dtype, accumulate: bool = False
) -> Array:
    """Return the sums of `x` over axes, in the shape `shape` of the call and a dtype.

    Parameters
    ----------
    operands : Operands
        x, of which the last axis is contiguous, `like`, an array of the shape of the sums, which
        broadcasts to x and is not read, and perhaps `result` and `workspace`.
    dtype : dtype
        Of the sums.
    accumulate : bool
        Add them to what `result` holds.
    """
    plan = _plan(operands.description, dtype, device.multiprocessors, accumulate)
    return run(device, plan, operands.arrays)["result"]


def scratch_bytes(device: Device, description: Description, dtype: np.dtype) -> int:
    """Return the bytes of scratch memory that it takes."""
    return _plan(description, dtype, device.multiprocessors, False).workspace_bytes


@lru_cache(maxsize=4096)
def _plan(
    description: Description, dtype: np.dtype, multiprocessors: int, accumulate: bool
) -> Plan:
    layouts = layouts_of(description)
    x, shape = layouts["x"], layouts["like"].shape
    outputs = (("result", Output(shape, dtype)),)
    extents = (1,) * (len(x.shape) - len(shape)) + shape
    # Scores that move together along a row move no weight: those sums are 0.
    if 0 in x.shape or extents[-1] != x.shape[-1]:
        zero_first = () if accumulate else ("result",)
        return Plan((), outputs, zero_first=zero_first, zero_new=accumulate)
    vec = _vector(x, starts_of(description)["x"])
    kept, summed = (_rows(x, extents, keep) for keep in (True, False))
    blocks = -(-x.shape[-1] // config.columns(vec))
    ctas, rows = math.prod(kept[0]) * blocks, math.prod(summed[0])
    wanted = -(-config.SUMMING_CTAS * multiprocessors // ctas)
    warps = config.THREADS // config.WARP
    splits = max(min(wanted, rows // (warps * config.ROWS_OF_A_WARP)), 1)
    count = math.prod(kept[0]) * x.shape[-1]
    params = [row_params(axes, x.shape[-1], {"x": strides}) for axes, strides in (kept, summed)]
    steps = (
        Step.of(config.broadcast_sums(x.dtype.name, vec), ctas * splits, splits, *params),
        Step.of(
            column_sums(dtype.name), -(-count // COLUMN_SUMS_COLUMNS), splits, count, accumulate,
            renamed={"sums": "result", "more_partials": "none", "more_sums": "none"},
        ),
    )  # fmt: skip
    scratch = lay_out_scratch({"partials": splits * count})
    return Plan(steps, outputs, scratch, zero_new=accumulate)


def _rows(x: Layout, extents: tuple[int, ...], keep: bool) -> tuple[tuple[int, ...], Strides]:
    """Return the axes of x before its last that are kept, or that are summed, and their strides."""
    axes = [axis for axis, extent in enumerate(extents[:-1]) if (extent == x.shape[axis]) == keep]
    strides = tuple(x.strides[axis] // x.dtype.itemsize for axis in axes)
    return tuple(x.shape[axis] for axis in axes), strides


def _vector(x: Layout, start: int) -> int:
    """Return how many items one load brings: a vector's where every row starts at one, or 1."""
    items = vector_items(x.dtype.name)
    steps = [n for n, extent in zip(x.strides[:-1], x.shape[:-1], strict=True) if extent > 1]
    aligned = not any(n % VECTOR_BYTES for n in (start, *steps))
    return items if aligned and x.shape[-1] % items == 0 else 1
