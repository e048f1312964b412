"""What is read for each item of rows, such as a mask, and varies along some of their axes only."""

from __future__ import annotations

import numpy as np

from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.checks import require_bool_mask, require_dtype, require_whole_item_strides
from cupyattn.runtime.errors import error
from cupyattn.runtime.row_kernel import RowKernel


def broadcast_layout(kernel: RowKernel, name: str, layout: Layout, rows: Layout) -> Layout:
    """Return the layout of an array as it is read for each item of the rows.

    Raises
    ------
    TypeError, ValueError
        For another dtype, or a shape that does not broadcast.
    """
    shape, dtypes = rows.shape, kernel.broadcast[name]
    if "float32" in dtypes and rows.dtype == np.float64:
        dtypes = (*dtypes, "float64")
    if dtypes == ("bool",):
        require_bool_mask(name, layout)
    else:
        require_dtype(name, layout, dtypes)
    require_whole_item_strides(name, layout)
    extents = (1,) * (len(shape) - len(layout.shape)) + layout.shape
    fits = len(extents) == len(shape) and all(
        extent in (1, full) for extent, full in zip(extents, shape, strict=True)
    )
    if not fits:
        raise error(
            ValueError,
            f"{name} has shape {layout.shape}",
            f"it broadcasts to the rows' shape {shape}",
            f"give it axes of 1 where it does not vary, as {name}[:, None] does",
        )
    strides = (0,) * (len(shape) - len(layout.shape)) + layout.strides
    return Layout(
        shape,
        tuple(0 if n == 1 else stride for n, stride in zip(extents, strides, strict=True)),
        layout.dtype,
    )
