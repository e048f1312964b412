"""Many rows in float16: products on tensor cores."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.kernels.configs.dtypes import vector_items
from cupyattn.kernels.configs.linear import tensor_core as configs
from cupyattn.kernels.configs.linear.tensor_core import Lines, Shape
from cupyattn.kernels.configs.rows import COLUMN_SUMS_COLUMNS, column_sums
from cupyattn.kernels.spec import KernelSpec
from cupyattn.kernels.structs import PREACTIVATION_GRADIENT_PARAMS, PRODUCT_PARAMS
from cupyattn.ops.linear.implementations import Launches, LinearPlan
from cupyattn.ops.linear.problem import LinearProblem, Matrix
from cupyattn.ops.plan import SCRATCH_DTYPE, Step

_OFFSET_BYTES = 2**32  # from the lowest item of a tile to its highest
_MOST_TILE_LINES = 256
_VECTOR = vector_items("float16")
_GROUP_LOG2 = 3  # tiles of rows that neighbouring CTAs go down
_RECIPROCAL_REACH = 2**30  # groups of CTAs times tiles of columns (params.cuh)
_ENOUGH_CTAS = 80  # two for each SM of a T4
_LONG_SUM = 2048  # items from which on it is split, rather than the result into small tiles
_LEAST_PART = 512  # items of the sum for a CTA
_GRADIENT_ROWS = 64  # of a CTA that forms dz
_ABSENT = "none"  # names no array


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


class _Product(NamedTuple):
    """result = A B, whatever these are."""

    a: Matrix
    b: Matrix
    halves: int = 1
    """Of the columns, which lie in turn."""

    @property
    def lines(self) -> Lines:
        """Whether each operand's lines run along the sum."""
        return Lines(self.a.along_columns, not self.b.along_columns)

    @property
    def vec(self) -> int:
        """Items of a load."""
        return _vector(self.a.vector, self.b.vector)

    @property
    def columns(self) -> int:
        """Of the result, or of one of their halves."""
        return self.b.columns // self.halves

    def shape(self, kernel: KernelSpec, arch: int, parts: int = 1) -> Shape:
        """Choose the tile: by its empty part, and by what the model says of it."""

        def duration(shape: Shape) -> float:
            row = configs.row_of(kernel, arch, shape, self.lines)
            return -(-self.b.columns // row.tile_columns) * row.tile_columns / row.models

        down, across = self.tiles(kernel, arch, "narrow")
        if down * across * parts < _ENOUGH_CTAS:
            return "small"
        return "narrow" if self.vec == 1 or duration("narrow") < duration("wide") else "wide"

    def tiles(self, kernel: KernelSpec, arch: int, shape: Shape) -> tuple[int, int]:
        """Return how many tiles of rows and of columns there are."""
        row = configs.row_of(kernel, arch, shape, self.lines)
        return -(-self.a.rows // row.tile_rows), -(-self.b.columns // row.tile_columns)

    def params(self, tiles: tuple[int, int], splits_log2: int = 0) -> tuple[int, Any]:
        """Return how many CTAs it takes, and the C struct ProductParams without the results."""
        row_tiles, column_tiles = tiles
        group_log2 = min((row_tiles - 1).bit_length(), _GROUP_LOG2)
        while -(-row_tiles >> group_log2) * column_tiles**2 >= _RECIPROCAL_REACH:
            group_log2 += 1
        groups = -(-row_tiles // (1 << group_log2))
        params = np.zeros((), PRODUCT_PARAMS)
        params["a_stride"], params["b_stride"] = self.a.leading, self.b.leading
        params["rows"], params["columns"] = self.a.rows, self.columns
        params["inner"], params["split_inner"] = self.a.columns, self.part(splits_log2)
        params["group_log2"], params["splits_log2"] = group_log2, splits_log2
        params["column_tiles"] = column_tiles
        params["column_tiles_reciprocal"] = -(-(2**31) // column_tiles)
        return (groups << group_log2 + splits_log2) * column_tiles, params

    def part(self, splits_log2: int) -> int:
        """Return how many items of the sum a CTA adds up."""
        return -(-self.a.columns >> splits_log2)


def _vector(*items: int) -> int:
    return _VECTOR if all(each % _VECTOR == 0 for each in items) else 1


def forward_launches(problem: LinearProblem, arch: int) -> Launches:
    """Plan the forward."""
    matrices = problem.matrices
    results = [name for name in ("out", "residual", "preactivation") if name in matrices]
    product = _Product(matrices["x"], matrices["w"], 2 if problem.gated else 1)
    # Of halves each has to start at a whole vector.
    halves = problem.outer if problem.gated else _VECTOR
    vec = product.vec if product.lines.b else _vector(product.vec, halves)
    shape = product.shape(configs.FORWARD, arch)
    specialisation = configs.forward(
        arch,
        shape,
        vec,
        _vector(problem.vector(*results), halves),
        w_along=product.lines.b,
        activation=problem.scalar_activation,
        paired=problem.gated,
    )
    ctas, params = product.params(product.tiles(configs.FORWARD, arch, shape))
    for name, stride in {**dict(zip(results, results, strict=True)), "residual": "addend"}.items():
        if name in matrices:
            params[f"{stride}_stride"] = matrices[name].leading
    return Launches((Step.of(specialisation, ctas, params[()]),))


def dx_launches(problem: LinearProblem, arch: int) -> Launches:
    """Plan dx = dz w^T."""
    gradient = _gradient(problem)
    product = _Product(_dz(problem), problem.matrices["w"].transposed)
    shape = product.shape(configs.PRODUCT, arch)
    dx = problem.matrices["dx"]
    ctas, params = product.params(product.tiles(configs.PRODUCT, arch, shape))
    params["out_stride"] = params["addend_stride"] = dx.leading
    specialisation = configs.product(arch, shape, product.lines, product.vec, _vector(dx.vector))
    names = {"a": _dz_name(problem), "b": "w", "result": "dx", "partials": _ABSENT}
    step = Step.of(
        specialisation, ctas, params[()], renamed={**names, "addend": _addend(problem, "dx")}
    )
    formed = gradient.steps if problem.activation else ()
    return Launches((*formed, step), gradient.scratch if formed else {})


def dw_launches(problem: LinearProblem, arch: int) -> Launches:
    """Plan dw = x^T dz, and db."""
    gradient = _gradient(problem)
    dw, names = problem.matrices["dw"], {"a": "x", "b": _dz_name(problem)}
    product = _Product(problem.matrices["x"].transposed, _dz(problem))
    if not dw.along_columns:  # its transpose has contiguous rows
        dw, names = dw.transposed, {"a": names["b"], "b": names["a"]}
        product = _Product(product.b.transposed, product.a.transposed)
    steps, scratch = [*gradient.steps], dict(gradient.scratch)
    most = product.a.columns // _LEAST_PART if product.a.columns >= _LONG_SUM else 1
    shape = product.shape(configs.PRODUCT, arch, most)
    tiles = product.tiles(configs.PRODUCT, arch, shape)
    splits_log2 = 0
    while 2 << splits_log2 <= most and (tiles[0] * tiles[1] << splits_log2) < 2 * _ENOUGH_CTAS:
        splits_log2 += 1
    split, out_vec = splits_log2 > 0, _vector(dw.vector)
    ctas, params = product.params(tiles, splits_log2)
    params["out_stride"] = params["addend_stride"] = dw.leading
    specialisation = configs.product(arch, shape, product.lines, product.vec, out_vec, split=split)
    last = {"result": "dw", "addend": _addend(problem, "dw")}
    if split:
        names |= {"partials": "dw_partials", "result": _ABSENT, "addend": _ABSENT}
        scratch["dw_partials"] = product.a.rows * product.b.columns << splits_log2
    else:
        names |= {"partials": _ABSENT, **last}
    steps.append(Step.of(specialisation, ctas, params[()], renamed=names))
    if split:
        sizes = product.a.rows, product.b.columns, 1 << splits_log2, dw.leading, dw.leading
        sums = configs.split_sums(out_vec)
        threads = -(-product.a.rows * product.b.columns // out_vec)
        renamed = {"partials": "dw_partials", **last}
        steps.append(Step.of(sums, -(-threads // sums.threads), *sizes, renamed=renamed))
    if problem.biased:
        width = problem.weight_columns
        counts = (_gradient_blocks(problem), width, problem.accumulate)
        renamed = {"partials": "dz_partials", "sums": "db"}
        ctas = -(-width // COLUMN_SUMS_COLUMNS)
        steps.append(Step.of(column_sums(problem.dtype.name), ctas, *counts, renamed=renamed))
    return Launches(tuple(steps), scratch)


def _addend(problem: LinearProblem, name: str) -> str:
    return name if problem.accumulate else _ABSENT


def _dz_name(problem: LinearProblem) -> str:
    return "dz" if problem.activation else "dout"


def _dz(problem: LinearProblem) -> Matrix:
    """Return dz as a matrix: dout, or what is formed of it in scratch memory."""
    if problem.activation is None:
        return problem.matrices["dout"]
    width = problem.weight_columns
    return Matrix(problem.rows, width, width, 1, problem.dtype.itemsize, 0)


def _gradient_blocks(problem: LinearProblem) -> int:
    return -(-problem.rows // _GRADIENT_ROWS)


@lru_cache(maxsize=4096)
def _gradient(problem: LinearProblem) -> Launches:
    """Return what forms dz and its sums over rows; one object, which dx and dw share."""
    if problem.activation is None and not problem.biased:
        return Launches(())
    names = ("dout", "preactivation") if problem.activation else ("dout",)
    halves = problem.outer if problem.gated else _VECTOR
    vec = _vector(*(problem.matrices[name].vector for name in names), halves)
    params = np.zeros((), PREACTIVATION_GRADIENT_PARAMS)
    for name in names:
        params[f"{name}_stride"] = problem.matrices[name].leading
    params["rows"], params["columns"] = problem.rows, problem.outer
    params["block_rows"] = _GRADIENT_ROWS
    specialisation = configs.preactivation_gradient(
        vec, problem.scalar_activation, paired=problem.gated
    )
    params["column_blocks"] = -(-problem.outer // (configs.WARP_SIZE * vec))
    blocks = _gradient_blocks(problem)
    ctas = int(params["column_blocks"]) * blocks
    scratch, size = {}, problem.rows * problem.weight_columns
    renamed = {"dz": _ABSENT, "partials": _ABSENT}
    if problem.activation:
        renamed["dz"] = "dz"
        scratch["dz"] = -(-size * problem.dtype.itemsize // SCRATCH_DTYPE.itemsize)
    else:
        renamed["preactivation"] = _ABSENT
    if problem.biased:
        renamed["partials"] = "dz_partials"
        scratch["dz_partials"] = blocks * problem.weight_columns
    return Launches((Step.of(specialisation, ctas, params[()], renamed=renamed),), scratch)


_DTYPES = ("float16",)
PLANS: tuple[LinearPlan, ...] = (
    LinearPlan("forward", _DTYPES, forward_launches, takes),
    LinearPlan("dx", _DTYPES, dx_launches, takes),
    LinearPlan("dw", _DTYPES, dw_launches, takes),
)
