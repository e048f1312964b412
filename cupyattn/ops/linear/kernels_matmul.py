"""Products of batches of matrices: checked problems, kernels, configurations and plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

import numpy as np

from cupyattn.ops.linear import kernels_skinny
from cupyattn.ops.linear.kernels_float32 import (
    DTYPES,
    FLOAT_PRODUCT_PARAMS,
    FLOAT_PRODUCT_STRUCT,
    OUT_VECTOR,
    FloatTileConfig,
    float_params,
    float_tile,
)
from cupyattn.ops.linear.kernels_tensor_core import (
    ACROSS,
    ALONG,
    B_ACROSS,
    Float16Product,
)
from cupyattn.ops.linear.plan import MAX_EXTENT, _steps
from cupyattn.ops.linear.problem import (
    IN_FLOAT32,
    ON_TENSOR_CORES,
    ForwardDraft,
    ForwardProblem,
    LinearArrays,
    Matrix,
)
from cupyattn.ops.linear.tiles import (
    OFFSET_BYTES,
    PRODUCT_PARAMS,
    PRODUCT_STRUCT,
    VECTOR,
    Lines,
    Moves,
    Shape,
    TileConfig,
    ampere_config,
    lines_macro,
    specialise_tile,
    tile_bytes,
)
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.checks import Overlaps
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Output, Plan, Planner, Step
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.spec import (
    KernelSpec,
    Pointer,
    Specialisation,
    StructParameter,
    inputs,
)
from cupyattn.runtime.storage import VECTOR_BYTES, vector_items
from cupyattn.runtime.structs import Strides, merge_axes, new_struct
from cupyattn.runtime.tables import pairs, rows_for

BATCH_AXES = 4
"""Batch axes that kernels support, after merging (kBatchAxes in batch.cuh)."""

_DIVISOR = np.dtype([(name, np.uint32) for name in ("divisor", "multiplier", "shift")])
# BatchParams in cuda_src/linear/batched/batch.cuh
BATCH_PARAMS = np.dtype(
    [
        ("strides", np.int64, (BATCH_AXES, 3)),
        ("extents", _DIVISOR, (BATCH_AXES,)),
        ("ctas", _DIVISOR),
    ],
    align=True,
)
BATCH_STRUCT = StructParameter("batch", BATCH_PARAMS, "BatchParams")


def _batched(product: np.dtype) -> np.dtype:
    strides = [(f"{operand}_item_stride", np.int64) for operand in ("a", "b")]
    return np.dtype([("product", product), ("batch", BATCH_PARAMS), *strides], align=True)


# BatchedProductParams in cuda_src/linear/batched/product.cu
BATCHED_PRODUCT_PARAMS = _batched(PRODUCT_PARAMS)
# BatchedFloatParams in cuda_src/linear/batched/product_f32.cu
BATCHED_FLOAT_PARAMS = _batched(FLOAT_PRODUCT_PARAMS)

_ARRAYS = (*inputs("a", "b"), Pointer("out"))
TENSOR_CORE = KernelSpec(
    "matmul",
    "linear/batched/product.cu",
    (
        *_ARRAYS,
        StructParameter(
            "params",
            BATCHED_PRODUCT_PARAMS,
            "BatchedProductParams",
            includes=(PRODUCT_STRUCT, BATCH_STRUCT),
        ),
    ),
)
FLOAT32 = KernelSpec(
    "matmul_f32",
    "linear/batched/product_f32.cu",
    (
        *_ARRAYS,
        StructParameter(
            "params",
            BATCHED_FLOAT_PARAMS,
            "BatchedFloatParams",
            includes=(FLOAT_PRODUCT_STRUCT, BATCH_STRUCT),
        ),
    ),
)
KERNELS = (TENSOR_CORE, FLOAT32)


# --- configurations

A_ACROSS = Lines(False, True)
_WIDE = (256, 192, 32, 64, 96, 1)
_NARROW = (256, 128, 32, 64, 64, 1)
_SMALL = (128, 128, 32, 64, 64, 2)
_SHORT = (128, 192, 16, 64, 96, 2)
_TINY = (64, 64, 32, 32, 32, 4)
_SKINNY = (32, 128, 32, 32, 32, 3)

_Table = Mapping[tuple[Shape, Lines], TileConfig]

# Slots are those of linear's products. `models` is by the model of a T4 (NVRTC 12.9.86, 2026-11-28,
# +-0.05): no Turing GPU has been measured.
_TURING: _Table = {
    ("wide", ALONG): TileConfig(*_WIDE, Moves(4, 1, 2), Moves(11, 2, 3), 1, 0.928),
    ("wide", B_ACROSS): TileConfig(*_WIDE, Moves(4, 1, 2), Moves(11, 2, 3), 1, 0.931),
    ("wide", ACROSS): TileConfig(*_WIDE, Moves(4, 1, 2), Moves(3, 3, 2), 1, 0.912),
    ("wide", A_ACROSS): TileConfig(*_WIDE, Moves(4, 1, 2), Moves(3, 3, 2), 1, 0.928),
    ("narrow", ALONG): TileConfig(*_NARROW, Moves(7, 1, 4), Moves(2, 5, 1), 1, 0.87),
    ("narrow", B_ACROSS): TileConfig(*_NARROW, Moves(5, 1, 4), Moves(10, 1, 2), 1, 0.88),
    ("narrow", ACROSS): TileConfig(*_NARROW, Moves(7, 1, 4), Moves(2, 5, 1), 1, 0.917),
    ("narrow", A_ACROSS): TileConfig(*_NARROW, Moves(7, 1, 4), Moves(2, 5, 1), 1, 0.884),
    ("small", ALONG): TileConfig(*_SMALL, Moves(4, 2, 4), Moves(5, 1, 4), 1, 0.826),
    ("small", B_ACROSS): TileConfig(*_SMALL, Moves(10, 1, 4), Moves(1, 4, 2), 2, 0.895),
    ("small", ACROSS): TileConfig(*_SMALL, Moves(10, 1, 4), Moves(1, 4, 2), 2, 0.9),
    ("small", A_ACROSS): TileConfig(*_SMALL, Moves(10, 1, 4), Moves(1, 4, 2), 2, 0.895),
    ("short", ALONG): TileConfig(*_SHORT, Moves(1, 3, 1), Moves(2, 2, 2), 1, 0.892),
    ("short", B_ACROSS): TileConfig(*_SHORT, Moves(1, 5, 1), Moves(0, 1, 2), 1, 0.936),
    ("short", ACROSS): TileConfig(*_SHORT, Moves(1, 5, 1), Moves(0, 1, 2), 1, 0.939),
    ("short", A_ACROSS): TileConfig(*_SHORT, Moves(1, 5, 1), Moves(0, 1, 2), 1, 0.932),
    **{
        ("tiny", lines): TileConfig(*_TINY, Moves(0, 1, 2), Moves(1, 1, 2), 2, 0.5)
        for lines in (ALONG, B_ACROSS, ACROSS, A_ACROSS)
    },
    # A tile across the sum has at least 64 rows.
    **{
        ("skinny", lines): TileConfig(*_SKINNY, Moves(0, 1, 1), Moves(0, 1, 4), 2, 0.444)
        for lines in (ALONG, B_ACROSS)
    },
}


def _ampere(rows: _Table) -> _Table:
    """Return configurations with two steps an instruction, as those of linear's products."""
    moves = {
        "tiny": (Moves(0, 1, 2), Moves(0, 1, 2)),
        "skinny": (Moves(0, 1, 1), Moves(0, 0, 4)),
    }
    others: dict[Shape, Shape] = {"wide": "narrow", "short": "small"}
    found = {}
    for shape, lines in rows:
        config = rows[others.get(shape, shape), lines]
        if shape in moves:
            a_moves, b_moves = moves[shape]
            config = replace(config, mma_k=16, a_moves=a_moves, b_moves=b_moves)
        else:
            config = ampere_config(config, Moves(2, 1, 2))
        found[shape, lines] = config
    return found


CONFIGURATIONS = {75: _TURING, 80: _ampere(_TURING)}
"""Configurations by architecture, then by the tile and the directions of the operands' lines."""


def shapes_for(vec: int, out_vec: int, lines: Lines) -> tuple[Shape, ...]:
    """Return the tiles for arrays that are loaded `vec` and stored `out_vec` items at a time.

    Single loads need registers for their addresses: the other tiles would spill.
    """
    if vec == 1:
        return ("narrow", "small")
    few: tuple[Shape, ...] = ("skinny",) if lines.a else ()
    fitting: tuple[Shape, ...] = ("narrow", "small", "short", "tiny", *few)
    return fitting if out_vec == 1 and not lines.b else ("wide", *fitting)


@cache
def tensor_core(arch: int, shape: Shape, lines: Lines, vec: int, out_vec: int) -> Specialisation:
    """Specialise the kernel on tensor cores."""
    return specialise_tile(
        TENSOR_CORE,
        rows_for(CONFIGURATIONS, arch)[shape, lines],
        vec,
        out_vec,
        A_LINES=lines_macro(lines.a),
        B_LINES=lines_macro(lines.b),
    )


_FLOAT_TILES = (
    FloatTileConfig(128, 64, 3, "168 registers hold the sums and the loads in flight"),
    FloatTileConfig(64, 64, 4, "for few tiles, or results that leave half of a larger one empty"),
)
_FEW_TILES = 80  # as in kernels_float32: two for each multiprocessor of a T4


def _float_config(rows: int, columns: int, members: int) -> FloatTileConfig:
    large, small = _FLOAT_TILES
    tiles = -(-rows // large.tile_m) * -(-columns // large.tile_n) * members
    fills = -(-rows // large.tile_m) * large.tile_m < rows + large.tile_m // 2
    return large if fills and tiles >= _FEW_TILES else small


@cache
def float32(
    dtype: str, config: FloatTileConfig, a_along: str, b_along: str, vec: int, vec_out: int
) -> Specialisation:
    """Specialise the kernel in float32 arithmetic."""
    return float_tile(
        FLOAT32, dtype, config, A_ALONG=a_along, B_ALONG=b_along, VEC=vec, VEC_OUT=vec_out
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every configuration, with vector and scalar accesses; in float32 in pairs."""
    for shape, lines in rows_for(CONFIGURATIONS, arch):
        yield tensor_core(arch, shape, lines, VECTOR, VECTOR)
    for shape in shapes_for(1, 1, ALONG):
        for lines in (ALONG, B_ACROSS, ACROSS, A_ACROSS):
            yield tensor_core(arch, shape, lines, 1, 1)
    along, whole_or_not = ("kDepth", "kLines"), (True, False)
    for dtype, config, a_along, b_along, whole, whole_out in pairs(
        DTYPES, _FLOAT_TILES, along, along, whole_or_not, whole_or_not
    ):
        vec, vec_out = vector_items(dtype) if whole else 1, OUT_VECTOR if whole_out else 1
        yield float32(dtype, config, a_along, b_along, vec, vec_out)


# --- problems


@dataclass(slots=True)
class MatmulArrays(Record[T]):
    """Arrays of a call."""

    a: T
    b: T
    out: T | None = None


@dataclass(frozen=True)
class MatmulProblem:
    """Products of equal sizes: out = a b for each member of a batch."""

    dtype: np.dtype
    """That of a and b."""
    a: Matrix
    """(M, K) of the first member. Unlike other matrices, a and b may have any two strides."""
    b: Matrix
    """(K, N)."""
    out: Matrix
    """(M, N), with contiguous rows or contiguous columns."""
    batch: tuple[int, ...]
    """Extents of the batch axes."""
    strides: tuple[Strides, ...]
    """Strides of the batch axes of a, b and out, in items; 0 where an array is broadcast."""

    @property
    def members(self) -> int:
        """Products of the batch."""
        return math.prod(self.batch)

    @property
    def exchanged(self) -> MatmulProblem:
        """The problem out^T = b^T a^T."""
        a, b, out = self.b.transposed, self.a.transposed, self.out.transposed
        of_a, of_b, of_out = self.strides
        return MatmulProblem(self.dtype, a, b, out, self.batch, (of_b, of_a, of_out))

    @property
    def folded(self) -> MatmulProblem:
        """The problem with as few members as possible.

        Members with the same b whose rows of a and of out continue each other are one product of
        more rows, and likewise those with the same a are one of more columns.
        """
        batch, strides = merge_axes(self.batch, [*self.strides])
        problem = replace(self, batch=batch, strides=tuple(strides))
        for _ in range(2):
            for axis in reversed(range(len(problem.batch))):
                problem = problem._with_rows_of(axis)
            problem = problem.exchanged
        return replace(
            problem,
            a=_with_contiguous_lines(problem.a),
            b=_with_contiguous_lines(problem.b),
            out=_with_contiguous_lines(problem.out),
        )

    def _with_rows_of(self, axis: int) -> MatmulProblem:
        """Return the problem with a batch axis among the rows if that is possible."""
        extent, rows = self.batch[axis], self.a.rows
        a_stride, b_stride, out_stride = (each[axis] for each in self.strides)
        continued = rows == 1 or (a_stride, out_stride) == (
            rows * self.a.row_stride,
            rows * self.out.row_stride,
        )
        if b_stride or not continued or rows * extent > MAX_EXTENT:
            return self
        a, out = (
            matrix._replace(
                rows=rows * extent, row_stride=stride if rows == 1 else matrix.row_stride
            )
            for matrix, stride in ((self.a, a_stride), (self.out, out_stride))
        )
        batch, *strides = (each[:axis] + each[axis + 1 :] for each in (self.batch, *self.strides))
        return replace(self, a=a, out=out, batch=batch, strides=tuple(strides))


@dataclass(frozen=True, eq=False)
class MatmulCall:
    """A valid call. Calls of one description share one object: a key for caches."""

    problem: MatmulProblem
    layouts: MatmulArrays[Layout]
    starts: MatmulArrays[int]
    outputs: Mapping[str, Output]
    overlaps: Overlaps


def _with_contiguous_lines(matrix: Matrix) -> Matrix:
    """Return a matrix of the same items; strides of axes of one item make its lines contiguous."""
    rows, columns, row_stride, column_stride = matrix[:4]
    if columns == 1 < rows and row_stride == 1:
        return matrix._replace(column_stride=0)  # one line, not a line for each row
    if 1 in (row_stride, column_stride):
        return matrix
    if columns == 1:
        return matrix._replace(column_stride=1)
    return matrix._replace(row_stride=1) if rows == 1 else matrix


def _is_contiguous(matrix: Matrix) -> bool:
    return 1 in (matrix.row_stride, matrix.column_stride)


def _lines_are_rows(matrix: Matrix) -> bool:
    """Tell whether an operand's lines, which follow its smaller stride, are its rows."""
    if _is_contiguous(matrix):
        return matrix.along_columns
    return abs(matrix.column_stride) <= abs(matrix.row_stride)


def _strides_of_lines(matrix: Matrix) -> tuple[int, int]:
    """Return the strides from line to line, and from item to item of a line."""
    strides = matrix.row_stride, matrix.column_stride
    return strides if _lines_are_rows(matrix) else strides[::-1]


def _vector(matrix: Matrix, batch: Strides) -> int:
    """Return the items of one load or store of a matrix of any member."""
    if not _is_contiguous(matrix):
        return 1
    apart = [stride * matrix.itemsize for stride in batch]
    return math.gcd(
        matrix.vector, *(math.gcd(VECTOR_BYTES, each) // matrix.itemsize for each in apart)
    )


# --- plans


@dataclass(frozen=True)
class BatchedProduct(Float16Product):
    """The products of a batch in float16, whose operands may have any strides."""

    items: int = field(kw_only=True)
    """Items of a load."""

    @property
    def lines(self) -> Lines:
        """Whether each operand's lines run along the sum."""
        return Lines(_lines_are_rows(self.a), not _lines_are_rows(self.b))

    @property
    def vec(self) -> int:
        """Items of a load."""
        return self.items

    @property
    def key(self) -> tuple[object, ...]:
        """The problem of a tuned choice: that of one product, and the members."""
        return (*super().key, self.members)

    def config(self, arch: int, shape: Shape) -> TileConfig:
        """Return the configuration of a tile."""
        return rows_for(CONFIGURATIONS, arch)[shape, self.lines]

    def shapes(self) -> tuple[Shape, ...]:
        """Return the tiles to choose from."""
        return shapes_for(self.vec, self.out_vec, self.lines)

    def specialise(self, arch: int, shape: Shape, out_vec: int, *, split: bool) -> Specialisation:
        """Specialise the product; sums are not split."""
        assert not split
        return tensor_core(arch, shape, self.lines, self.vec, out_vec)


@lru_cache(maxsize=4096)
def matmul_plan(call: MatmulCall, traits: DeviceTraits) -> Plan:
    """Return the launches of a call: one."""
    problem = call.problem.folded
    planner = Planner(MatmulArrays, call.layouts, call.outputs)
    if not problem.members * problem.out.rows * problem.out.columns:
        return planner.plan()
    if not problem.a.columns:
        return planner.plan(zero_first=[made.slot for made in planner.results])
    if problem.members == 1 and (draft := _as_linear(problem, planner, traits)) is not None:
        return planner.plan(*_steps("forward", draft))
    slots = planner.slots
    if problem.out.along_columns:
        step = _step(problem, (slots.a, slots.b, slots.out), traits)
    else:
        step = _step(problem.exchanged, (slots.b, slots.a, slots.out), traits)
    return planner.plan(step)


def _as_linear(
    problem: MatmulProblem, planner: Planner[MatmulArrays], traits: DeviceTraits
) -> ForwardDraft | None:
    """Return one product as a forward of linear, or None if its strides do not allow that.

    Of two possible ways, the product or its transpose, one of few rows has a kernel for them.
    """
    slots = planner.slots
    ways = ((problem, slots.a, slots.b), (problem.exchanged, slots.b, slots.a))
    fits = [
        way
        for way in ways
        if way[0].a.along_columns and way[0].out.along_columns and _is_contiguous(way[0].b)
    ]
    if not fits:
        return None
    few = [way for way in fits if way[0].a.rows <= kernels_skinny.MAX_ROWS]
    (product, x, w), *_ = few or fits
    a, b, out = product.a, product.b, product.out
    sizes = (a.rows, a.columns, b.columns, product.dtype, None)
    forward = ForwardProblem(*sizes, a, b, None, None, out)
    return ForwardDraft(forward, LinearArrays(x=x, w=w, out=slots.out), traits, planner)


def _step(problem: MatmulProblem, slots: tuple[int | None, ...], traits: DeviceTraits) -> Step:
    """Plan a batch of products into an out with contiguous rows."""
    a, b, out = problem.a, problem.b, problem.out
    items = VECTOR_BYTES // problem.dtype.itemsize
    loaded = math.gcd(*map(_vector, (a, b), problem.strides), items)
    stored = _vector(out, problem.strides[2])
    on_tensor_cores = traits.has_mma(problem.dtype.name)
    if on_tensor_cores and max(tile_bytes(each, False) for each in (a, b)) >= OFFSET_BYTES:
        loaded = 1
    loaded = items if loaded == items else 1
    if loaded == 1:
        traits.choices.because("lines that are no whole aligned vectors are loaded item by item")
    plan = _on_tensor_cores if on_tensor_cores else _in_float32
    return plan(problem, slots, traits, loaded, stored)


def _on_tensor_cores(
    problem: MatmulProblem,
    slots: tuple[int | None, ...],
    traits: DeviceTraits,
    loaded: int,
    stored: int,
) -> Step:
    out_vec = VECTOR if stored == VECTOR else 1
    product = BatchedProduct(
        TENSOR_CORE, problem.a, problem.b, 1, out_vec, problem.members, items=loaded
    )
    traits.choices.because(ON_TENSOR_CORES.format(dtype=problem.dtype.name))
    tiling = product.chosen(traits)
    ctas, params = product.geometry(traits.arch, tiling)
    specialisation = product.specialise(traits.arch, tiling.shape, out_vec, split=False)
    params["out_stride"] = problem.out.leading
    return _batched_step(problem, specialisation, slots, ctas, params, BATCHED_PRODUCT_PARAMS)


def _in_float32(
    problem: MatmulProblem,
    slots: tuple[int | None, ...],
    traits: DeviceTraits,
    loaded: int,
    stored: int,
) -> Step:
    a, b, out = problem.a, problem.b, problem.out
    config = _float_config(out.rows, out.columns, problem.members)
    traits.choices.because(IN_FLOAT32.format(dtype=problem.dtype.name))
    specialisation = float32(
        problem.dtype.name,
        config,
        "kDepth" if _lines_are_rows(a) else "kLines",
        "kLines" if _lines_are_rows(b) else "kDepth",
        loaded,
        OUT_VECTOR if stored % OUT_VECTOR == 0 else 1,
    )
    params = float_params(a=a, b=b, result=out, depth=a.columns)
    ctas = -(-out.rows // config.tile_m) * -(-out.columns // config.tile_n)
    return _batched_step(problem, specialisation, slots, ctas, params, BATCHED_FLOAT_PARAMS)


def _batched_step(
    problem: MatmulProblem,
    specialisation: Specialisation,
    slots: tuple[int | None, ...],
    ctas: int,
    product: np.ndarray,
    struct: np.dtype,
) -> Step:
    """Return the launch of `ctas` for each member, with the struct of product and batch."""
    params = new_struct(struct)
    params["product"], params["batch"] = product, _batch_params(problem, ctas)
    for name, matrix in (("a", problem.a), ("b", problem.b)):
        line_stride, item_stride = _strides_of_lines(matrix)
        params["product"][f"{name}_stride"] = line_stride
        params[f"{name}_item_stride"] = item_stride
    return Step.of(specialisation, ctas * problem.members, slots, params[()])


def _batch_params(problem: MatmulProblem, ctas: int) -> np.ndarray:
    """Fill the C struct BatchParams."""
    left = len(problem.batch)
    if left > BATCH_AXES:
        raise error(
            ValueError,
            f"the strides of a, b and out leave {left} batch axes apart",
            f"at most {BATCH_AXES}, after merging those that lie evenly",
            "copy with ascontiguousarray(...), in its whole shape what broadcasts, or reshape to "
            "fewer axes",
        )
    missing = BATCH_AXES - left
    params = new_struct(BATCH_PARAMS)
    params["strides"][missing:] = np.array(problem.strides, np.int64).T
    for axis, extent in enumerate((1,) * missing + problem.batch):
        params["extents"][axis] = _divisor(extent)
    params["ctas"] = _divisor(ctas)
    return params[()]


def _divisor(number: int) -> tuple[int, int, int]:
    """Return the C struct Divisor: its quotients are exact below 2^31.

    Examples
    --------
    >>> divisor, multiplier, shift = _divisor(7)
    >>> [2 * n * multiplier >> 32 + shift for n in (6, 7, 2**31 - 1)]
    [0, 1, 306783378]
    """
    shift = (number - 1).bit_length()
    return number, -(-(2 ** (31 + shift)) // number), shift
