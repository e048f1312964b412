"""Many rows in float16: products on tensor cores."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.kernels.configs.dtypes import vector_items
from cupyattn.kernels.configs.linear import tensor_core as configs
from cupyattn.kernels.configs.linear.tensor_core import Lines, ProductConfig, Shape
from cupyattn.kernels.structs import PRODUCT_PARAMS
from cupyattn.ops.linear.implementations import Launches, LinearPlan
from cupyattn.ops.linear.problem import LinearProblem, Matrix
from cupyattn.ops.plan import Step

_OFFSET_BYTES = 2**32  # from the lowest item of a tile to its highest
_MOST_TILE_LINES = 256
_VECTOR = vector_items("float16")
_GROUP_ROWS = 8  # tiles of rows that neighbouring CTAs go down
_ENOUGH_CTAS = 80  # two for each SM of a T4


def takes(problem: LinearProblem) -> bool:
    """Tell whether the kernels' offsets reach what one tile of each array spans."""
    return all(
        _spans(matrix, problem.gated) < _OFFSET_BYTES for matrix in problem.matrices.values()
    )


def _spans(matrix: Matrix, gated: bool) -> int:
    """Return the bytes between a tile's lines; where they may be of two halves, all of them."""
    lines = matrix.rows if matrix.along_columns else matrix.columns
    reached = lines if gated else min(lines, _MOST_TILE_LINES)
    return reached * abs(matrix.leading) * matrix.itemsize


def forward_launches(problem: LinearProblem, arch: int) -> Launches:
    """Plan the forward."""
    w = problem.matrices["w"].transposed  # its lines run along the sum if K is contiguous
    lines = Lines(True, w.along_columns)
    vec = _vector(problem, "x", "w")
    shape = _shape(arch, lines, vec, problem.rows, problem.weight_columns)
    specialisation = configs.forward(
        arch,
        shape,
        vec,
        _vector(problem, "out", "residual", "preactivation"),
        w_along=lines.b,
        activation=problem.scalar_activation,
        paired=problem.gated,
    )
    strides = {"a": "x", "b": "w", "out": "out", "addend": "residual"}
    ctas, params = _geometry(
        configs.product_row(arch, shape, lines),
        problem,
        {**strides, "preactivation": "preactivation"},
        sizes=(problem.rows, problem.outer, problem.inner),
        halves=(1, 2 if problem.gated else 1),
    )
    return Launches((Step.of(specialisation, ctas, params),))


def _vector(problem: LinearProblem, *names: str) -> int:
    """Return 8 where vectors of all of these are whole, in each half too; otherwise 1."""
    whole = problem.vector(*names) == _VECTOR
    return _VECTOR if whole and (not problem.gated or problem.outer % _VECTOR == 0) else 1


def _shape(arch: int, lines: Lines, vec: int, rows: int, columns: int) -> Shape:
    """Choose the tile: by the empty part of its columns, and by what the model says of it."""

    def tiles(shape: Shape) -> tuple[int, int]:
        row = configs.product_row(arch, shape, lines)
        return -(-rows // row.tile_rows), -(-columns // row.tile_columns)

    def duration(shape: Shape) -> float:
        row = configs.product_row(arch, shape, lines)
        across = tiles(shape)[1]
        return across * row.tile_columns / row.models

    down, across = tiles("narrow")
    if down * across < _ENOUGH_CTAS:
        return "small"
    return "narrow" if vec == 1 or duration("narrow") < duration("wide") else "wide"


def _geometry(
    row: ProductConfig,
    problem: LinearProblem,
    strides: dict[str, str],
    *,
    sizes: tuple[int, int, int],
    halves: tuple[int, int],
) -> tuple[int, Any]:
    """Return how many CTAs a product takes, and the C struct ProductParams.

    `strides` names the array of each stride; `sizes` are rows, columns and the sum's items, of a
    paired axis those of one half; `halves` says which of rows and columns are paired.
    """
    rows, columns, inner = sizes
    row_tiles = -(-rows * halves[0] // row.tile_rows)
    column_tiles = -(-columns * halves[1] // row.tile_columns)
    group_log2 = (min(row_tiles, _GROUP_ROWS) - 1).bit_length()
    groups = -(-row_tiles >> group_log2)
    params = np.zeros((), PRODUCT_PARAMS)
    for stride, name in strides.items():
        if problem.has(name):
            params[f"{stride}_stride"] = problem.matrices[name].leading
    params["rows"], params["columns"], params["inner"] = sizes
    params["split_inner"] = inner
    params["group_log2"] = group_log2
    params["column_tiles"] = column_tiles
    params["column_tiles_reciprocal"] = -(-(2**31) // column_tiles)
    return (groups << group_log2) * column_tiles, params[()]


PLANS: tuple[LinearPlan, ...] = (LinearPlan("forward", ("float16",), forward_launches, takes),)
