"""Products of batches of matrices: checked problems, and their launches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from cupyattn.ops.linear import kernels_skinny
from cupyattn.ops.linear.kernels_float32 import OUT_VECTOR, float_params
from cupyattn.ops.linear.kernels_matmul import (
    BATCH_AXES,
    BATCH_PARAMS,
    BATCHED_FLOAT_PARAMS,
    BATCHED_INTEGER_PARAMS,
    BATCHED_PRODUCT_PARAMS,
    INT8,
    ITEMS,
    PAIRS,
    TENSOR_CORE,
    TRANSPOSING,
    config_of,
    float32,
    float_config,
    int8,
    int8_config,
    int8_shapes,
    shapes_for,
    tensor_core,
)
from cupyattn.ops.linear.kernels_tensor_core import ArrayProduct
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
    VECTOR,
    Lines,
    Shape,
    TileConfig,
    item_by_item,
    tile_bytes,
)
from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.checks import Overlaps
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Output, Plan, Planner, Step
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.spec import Specialisation
from cupyattn.runtime.storage import VECTOR_BYTES
from cupyattn.runtime.structs import Strides, merge_axes, new_struct


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
        more rows, and likewise those with the same a are one of more columns. The lines of out stay
        contiguous along an axis: kernels need it.
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
        out_row_stride = out_stride if rows == 1 else self.out.row_stride
        stores = self.out.columns == 1 or 1 in (out_row_stride, self.out.column_stride)
        if b_stride or not continued or not stores or rows * extent > MAX_EXTENT:
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


def _lines(problem: MatmulProblem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the strides of a and b from line to line, and from item to item of a line."""

    def strides(matrix: Matrix) -> tuple[int, int]:
        of_rows = matrix.row_stride, matrix.column_stride
        return of_rows if _lines_are_rows(matrix) else of_rows[::-1]

    return strides(problem.a), strides(problem.b)


def _vector(matrix: Matrix, batch: Strides) -> int:
    """Return the items of one load or store of a matrix of any member."""
    if not _is_contiguous(matrix):
        return 1
    apart = [stride * matrix.itemsize for stride in batch]
    return math.gcd(
        matrix.vector, *(math.gcd(VECTOR_BYTES, each) // matrix.itemsize for each in apart)
    )


@dataclass(frozen=True)
class BatchedProduct(ArrayProduct):
    """The products of a batch in float16 or bfloat16, whose operands may have any strides."""

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
        return config_of(arch, shape, self.lines, self.vec)

    def shapes(self, arch: int) -> tuple[Shape, ...]:
        """Return the tiles to choose from."""
        return shapes_for(arch, self.vec, self.out_vec, self.lines)

    def specialise(self, arch: int, shape: Shape, out_vec: int, *, split: bool) -> Specialisation:
        """Specialise the product; sums are not split."""
        assert not split
        return tensor_core(arch, shape, self.lines, self.vec, out_vec, self.dtype)


@dataclass(frozen=True)
class IntegerProduct(BatchedProduct):
    """The products of a batch in int8; the matrices count pairs of items along the sum."""

    loaders: tuple[str, str] = field(kw_only=True)
    tensor_cores: bool = field(kw_only=True)

    @property
    def key(self) -> tuple[object, ...]:
        """The problem of a tuned choice: the sizes, how operands lie, and the members."""
        return (self.a.rows, self.b.columns, self.a.columns, *self.loaders, self.members)

    def config(self, arch: int, shape: Shape) -> TileConfig:
        """Return the configuration of a tile."""
        return int8_config(arch, shape, self.loaders)

    def shapes(self, arch: int) -> tuple[Shape, ...]:
        """Return the tiles to choose from."""
        return int8_shapes(arch, self.loaders) if self.tensor_cores else ("small",)

    def specialise(self, arch: int, shape: Shape, out_vec: int, *, split: bool) -> Specialisation:
        """Specialise the product; sums are not split."""
        assert not split
        return int8(arch, shape, self.loaders, out_vec, tensor_cores=self.tensor_cores)


@lru_cache(maxsize=4096)
def matmul_plan(call: MatmulCall, traits: DeviceTraits) -> Plan:
    """Return the launches of a call: one."""
    problem = call.problem.folded
    planner = Planner(MatmulArrays, call.layouts, call.outputs)
    if not problem.members * problem.out.rows * problem.out.columns:
        return planner.plan()
    if not problem.a.columns:
        return planner.plan(zero_first=[made.slot for made in planner.results])
    floats = problem.dtype != np.int8
    if (
        floats
        and problem.members == 1
        and (draft := _as_linear(problem, planner, traits)) is not None
    ):
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
    if problem.dtype == np.int8:
        return _in_int8(problem, slots, traits)
    a, b, out = problem.a, problem.b, problem.out
    items = VECTOR_BYTES // problem.dtype.itemsize
    loaded = math.gcd(*map(_vector, (a, b), problem.strides), items)
    stored = _vector(out, problem.strides[2])
    on_tensor_cores = traits.multiplies(problem.dtype.name)
    if on_tensor_cores and max(tile_bytes(each, False) for each in (a, b)) >= OFFSET_BYTES:
        loaded = 1
    loaded = items if loaded == items else 1
    if loaded == 1:
        traits.choices.because(item_by_item(traits))
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
        TENSOR_CORE,
        problem.a,
        problem.b,
        1,
        out_vec,
        problem.members,
        problem.dtype.name,
        items=loaded,
    )
    traits.choices.because(ON_TENSOR_CORES.format(dtype=problem.dtype.name))
    tiling = product.chosen(traits)
    ctas, params = product.geometry(traits.arch, tiling)
    specialisation = product.specialise(traits.arch, tiling.shape, out_vec, split=False)
    params["out_stride"] = problem.out.leading
    return _batched_step(
        problem, specialisation, slots, ctas, params, BATCHED_PRODUCT_PARAMS, _lines(problem)
    )


def _in_float32(
    problem: MatmulProblem,
    slots: tuple[int | None, ...],
    traits: DeviceTraits,
    loaded: int,
    stored: int,
) -> Step:
    a, b, out = problem.a, problem.b, problem.out
    config = float_config(out.rows, out.columns, problem.members)
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
    return _batched_step(
        problem, specialisation, slots, ctas, params, BATCHED_FLOAT_PARAMS, _lines(problem)
    )


def _in_int8(problem: MatmulProblem, slots: tuple[int | None, ...], traits: DeviceTraits) -> Step:
    a, b, out = problem.a, problem.b, problem.out
    loaders = (
        _int8_loader(a, problem.strides[0]),
        _int8_loader(b.transposed, problem.strides[1]),
    )
    out_vec = VECTOR if _vector(out, problem.strides[2]) > 1 else 1
    pairs = -(-a.columns // 2)
    product = IntegerProduct(
        INT8,
        a._replace(columns=pairs),
        b._replace(rows=pairs),
        1,
        out_vec,
        problem.members,
        items=VECTOR,
        loaders=loaders,
        tensor_cores=traits.tensor_cores,
    )
    traits.choices.because(
        "int8 runs on integer tensor cores"
        if traits.tensor_cores
        else "int8 runs on dot products of four items: the device has no tensor cores"
    )
    for name, loader in zip("ab", loaders, strict=True):
        if loader != PAIRS:
            traits.choices.because(_INT8_REASONS[loader].format(name))
    tiling = product.chosen(traits)
    ctas, params = product.geometry(traits.arch, tiling)
    specialisation = product.specialise(traits.arch, tiling.shape, out_vec, split=False)
    params["out_stride"] = out.leading
    lines = (a.row_stride, a.column_stride), (b.column_stride, b.row_stride)
    return _batched_step(
        problem, specialisation, slots, ctas, params, BATCHED_INTEGER_PARAMS, lines
    )


_WORD = 4  # items of a load across the sum
_INT8_REASONS = {
    TRANSPOSING: "{} is contiguous across the sum, and is transposed as it is loaded",
    ITEMS: "{} has no whole aligned vectors along the sum or across it: items are loaded singly",
}


def _int8_loader(rows: Matrix, batch: Strides) -> str:
    """Return the loader of an operand whose rows are to be lines along the sum."""
    items = _vector(rows, batch)
    if rows.along_columns and items == VECTOR_BYTES and tile_bytes(rows, False) < OFFSET_BYTES:
        return PAIRS
    across = rows.row_stride == 1 and items % _WORD == 0
    return TRANSPOSING if across else ITEMS


def _batched_step(
    problem: MatmulProblem,
    specialisation: Specialisation,
    slots: tuple[int | None, ...],
    ctas: int,
    product: np.ndarray,
    struct: np.dtype,
    lines: tuple[tuple[int, int], tuple[int, int]],
) -> Step:
    """Return the launch of `ctas` for each member.

    `lines` has the strides of a and b from line to line and from item to item of a line.
    """
    params = new_struct(struct)
    params["product"], params["batch"] = product, _batch_params(problem, ctas)
    for name, (line_stride, item_stride) in zip("ab", lines, strict=True):
        params["product"][f"{name}_stride"] = line_stride
        params[f"{name}_item_stride"] = item_stride
    if problem.dtype == np.int8:
        params["odd"] = problem.a.columns % 2
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
