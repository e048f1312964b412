"""The structs of walks over rows and over elements, by the number of their arrays."""

from __future__ import annotations

import numpy as np

from cupyattn.runtime.spec import Struct

OUTER_AXES = 4
"""Axes before the last that a row-wise kernel can walk, after merging (kOuterAxes in rows.cuh)."""

ELEMENTS_AXES = 4
"""Axes before the rows that an element-wise kernel can walk (kElementsAxes in elements.cuh)."""


def rows_params(arrays: int) -> np.dtype:
    """RowsParams<arrays> in cuda_src/common/rows.cuh."""
    return np.dtype(
        [
            ("shape", np.int64, (OUTER_AXES,)),
            ("strides", np.int64, (arrays, OUTER_AXES)),
            ("rows", np.int64),
            ("length", np.int64),
        ],
        align=True,
    )


def rows_struct(arrays: int) -> Struct:
    """RowsParams of that many arrays, as a parameter."""
    return Struct("params", rows_params(arrays), "RowsParams")


def elements_params(arrays: int) -> np.dtype:
    """ElementsParams<arrays> in cuda_src/common/elements.cuh."""
    return np.dtype(
        [
            ("shape", np.int64, (ELEMENTS_AXES,)),
            ("strides", np.int64, (arrays, ELEMENTS_AXES)),
            ("offsets", np.int64, (arrays,)),
            ("length", np.int64),
            ("rows", np.uint32),
            ("units", np.uint32),
        ],
        align=True,
    )


def elements_struct(arrays: int) -> Struct:
    """ElementsParams of that many arrays, as a parameter."""
    return Struct("params", elements_params(arrays), "ElementsParams")
