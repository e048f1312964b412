"""Checked calls of linear: records of arrays, sizes, matrices, and how plans are drawn up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from cupyattn.ops.linear.reference import GATES
from cupyattn.ops.linear.row_formats import MOST_INNER
from cupyattn.ops.linear.weight_formats import QuantizedWeight
from cupyattn.runtime.arrays import Array, Layout, contiguous
from cupyattn.runtime.checks import FLOATS, Overlaps, require_dtype, require_given
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Output, Planner, Step
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.storage import VECTOR_BYTES

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")
STRUCTS = {
    None: "Identity",
    "gelu": "Gelu",
    "gelu_tanh": "GeluTanh",
    "silu": "Silu",
    "relu": "Relu",
}
"""Activations of one number, with the struct of common/activations.cuh that computes each."""


@dataclass(slots=True)
class LinearArrays(Record[T]):
    """Arrays of a forward call. A quantised weight has codes and scales in place of w."""

    x: T
    w: T | None = None
    codes: T | None = None
    scales: T | None = None
    super_scales: T | None = None
    scale_table: T | None = None
    b: T | None = None
    residual: T | None = None
    out: T | None = None
    preactivation: T | None = None
    workspace: T | None = None
    x_scales: T | None = None
    """The scales of `QuantizedRows`, whose codes are then x."""


@dataclass(slots=True)
class LinearBackwardArrays(Record[T]):
    """Arrays of a backward call. A quantised weight has codes and scales in place of w."""

    SHOWN_AS: ClassVar = MappingProxyType({name: f"grads.{name}" for name in ("dx", "dw", "db")})

    dout: T
    x: T
    w: T | None = None
    codes: T | None = None
    scales: T | None = None
    super_scales: T | None = None
    scale_table: T | None = None
    b: T | None = None
    preactivation: T | None = None
    workspace: T | None = None
    dx: T | None = None
    dw: T | None = None
    db: T | None = None


class WeightFormat(NamedTuple):
    """The fields of a `QuantizedWeight` that are no arrays."""

    format: str
    block_size: int
    """Neighbouring weights in a row of codes that share a scale."""
    transposed: bool
    """Whether rows of codes are rows of w; otherwise they are its columns."""
    rotation: int | None = None
    """The size of the rotated blocks of a row of codes."""


class RowFormat(NamedTuple):
    """The int8 rows of x that a call multiplies with int8 codes of w."""

    rotation: int | None
    dtype: np.dtype | None = None
    """The dtype of results if x is `QuantizedRows`; None if x is an array that the call
    quantises."""


WeightFields = tuple[Array | None, Array | None, Array | None, Array | None, Array | None]
"""A weight as fields of a record: w, codes, scales, super_scales, scale_table."""


def weight_fields(w: Array | QuantizedWeight) -> tuple[WeightFields, WeightFormat | None]:
    """Return a weight's fields, None for what is absent, and the format if it is quantised."""
    if not isinstance(w, QuantizedWeight):
        return (w, None, None, None, None), None
    form = WeightFormat(w.format, w.block_size, w.transposed, w.rotation)
    return (None, w.codes, w.scales, w.super_scales, w.scale_table), form


class Matrix(NamedTuple):
    """The layout of an array as rows by columns of items."""

    rows: int
    columns: int
    row_stride: int
    """From one row to the next, in items."""
    column_stride: int
    """From one column to the next, in items. This stride is 1, or `row_stride` is."""
    itemsize: int
    start: int
    """By how many bytes the first item misses a vector's alignment."""

    @property
    def along_columns(self) -> bool:
        """Whether the items of a row are neighbours in memory; otherwise those of a column are."""
        return self.column_stride == 1

    @property
    def leading(self) -> int:
        """The other stride, in items: from one contiguous line to the next."""
        return self.row_stride if self.along_columns else self.column_stride

    @property
    def transposed(self) -> Matrix:
        """The matrix of this memory with rows and columns exchanged."""
        rows, columns, row_stride, column_stride, *rest = self
        return Matrix(columns, rows, column_stride, row_stride, *rest)

    @property
    def vector(self) -> int:
        """Items of one load: each line starts at a whole vector and consists of whole vectors.

        A power of two, at most 16 bytes.
        """
        lines, length = self.rows, self.columns
        if not self.along_columns:
            lines, length = length, lines
        apart = self.leading if lines > 1 else 0
        return math.gcd(
            VECTOR_BYTES, self.start, apart * self.itemsize, length * self.itemsize
        ) // (self.itemsize)

    def columns_from(self, first: int, count: int) -> Matrix:
        """Return `count` neighbouring columns, for example one half of a gated weight."""
        beyond = first * self.column_stride * self.itemsize
        return self._replace(columns=count, start=(self.start + beyond) % VECTOR_BYTES)


class QuantisedOperand(NamedTuple):
    """A quantised weight: its arrays in C order as matrices, the first axis by all others."""

    format: str
    block_size: int
    transposed: bool
    rotation: int | None
    codes: Matrix
    scales: Matrix
    super_scales: Matrix | None = None


@dataclass(frozen=True, eq=False)
class LinearProblem:
    """The sizes of a product and the layouts of its inputs; letters as in the public API."""

    rows: int
    """M: all axes of x before its last, merged."""
    inner: int
    """K."""
    outer: int
    """N: columns of the result. With a gated activation, w has twice as many."""
    dtype: np.dtype
    activation: str | None
    """One of `ACTIVATIONS` or `GATES`, or None."""
    x: Matrix
    """(M, K), with contiguous rows."""
    w: Matrix
    """(K, W), W being `weight_columns`, with contiguous rows or contiguous columns. A quantised
    weight is described as if its codes were items of x's dtype."""
    weight: QuantisedOperand | None
    b: Matrix | None
    """(1, W), contiguous."""

    @property
    def gated(self) -> bool:
        """Whether the result is the activation of the first N columns of x w + b times the rest."""
        return self.activation in GATES

    @property
    def scalar_activation(self) -> str | None:
        """The function of one number that the activation applies, to its gate if it is gated."""
        return GATES.get(self.activation or "", self.activation)

    @property
    def weight_columns(self) -> int:
        """W: N, or with a gated activation 2 N: those of the gate, then those it multiplies."""
        return self.outer * (2 if self.gated else 1)

    @property
    def biased(self) -> bool:
        """Whether there is a b, and in the backward a db."""
        return self.b is not None

    @property
    def quantised(self) -> QuantisedOperand:
        """The quantised weight of a problem that has one."""
        assert self.weight is not None
        return self.weight

    def vector(self, *matrices: Matrix | None) -> int:
        """Return the items that one load or store of any of these may have; None is skipped.

        The greatest common divisor of each `Matrix.vector`: for float16, 8 if everything is aligned
        to 16 bytes and every line consists of whole vectors; at least 1.
        """
        items = VECTOR_BYTES // self.dtype.itemsize
        return math.gcd(items, *(matrix.vector for matrix in matrices if matrix is not None))

    def _weight_matrices(self) -> Iterator[Matrix]:
        if self.weight is None:
            yield self.w
        else:
            arrays = (self.weight.codes, self.weight.scales, self.weight.super_scales)
            yield from (each for each in arrays if each is not None)


@dataclass(frozen=True, eq=False)
class ForwardProblem(LinearProblem):
    """The problem out = activation(x w + b) + residual."""

    out: Matrix
    """(M, N), with contiguous rows."""
    residual: Matrix | None = None
    """(M, N), with contiguous rows."""
    preactivation: Matrix | None = None
    """(M, W), with contiguous rows: x w + b is written there too."""
    row_format: RowFormat | None = None
    """How x is quantised. `x` is then the layout of its floats, also where only codes are given."""

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices that kernels read and write."""
        results = (self.out, self.residual, self.preactivation)
        return [self.x, *self._weight_matrices(), *(each for each in results if each is not None)]


@dataclass(frozen=True, eq=False)
class BackwardProblem(LinearProblem):
    """The problem of dx, dw and db, with dz = dout * activation'(preactivation)."""

    dout: Matrix
    """(M, N), with contiguous rows."""
    dx: Matrix
    """(M, K), with contiguous rows."""
    dw: Matrix | None
    """(K, W), with contiguous rows or columns; None for a quantised weight."""
    preactivation: Matrix | None
    """(M, W), with contiguous rows: the caller's, or scratch; None without an activation."""
    accumulate: bool
    """Whether gradients are added to the contents of the results."""

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices that kernels read and write."""
        others = (self.preactivation, self.dw)
        given = [self.dout, self.x, *self._weight_matrices(), self.dx]
        return [*given, *(each for each in others if each is not None)]

    @property
    def half(self) -> int:
        """N with a gated activation, otherwise 0: where the second half of dz's columns begins."""
        return self.outer if self.gated else 0

    @property
    def recomputed(self) -> ForwardProblem:
        """The forward out = x w + b, whose result is the preactivation."""
        assert self.preactivation is not None
        sizes = (self.rows, self.inner, self.weight_columns, self.dtype, None)
        return ForwardProblem(*sizes, self.x, self.w, self.weight, self.b, self.preactivation)


@dataclass(frozen=True, eq=False)
class ForwardCall:
    """A valid call of linear. Calls of one description share one object: a key for caches."""

    problem: ForwardProblem
    layouts: LinearArrays[Layout]
    """The layouts of the arrays that the caller gave."""
    starts: LinearArrays[int]
    """By how many bytes each given array misses a vector's alignment."""
    outputs: Mapping[str, Output]
    """The results by field."""
    overlaps: Overlaps


@dataclass(frozen=True, eq=False)
class BackwardCall:
    """A valid call of the backward. Calls of one description share one object: a key for caches."""

    problem: BackwardProblem
    layouts: LinearBackwardArrays[Layout]
    """The layouts of the arrays that the caller gave."""
    starts: LinearBackwardArrays[int]
    """By how many bytes each given array misses a vector's alignment."""
    outputs: Mapping[str, Output]
    """The results by field."""
    overlaps: Overlaps
    turns_dw: bool
    """Whether a new dw is the transpose of an array in C order, because w is.

    An optimizer that keeps w.T then finds the last axis of dw.T contiguous. A w of one row or one
    column counts as C order.
    """


def float_layouts(
    layouts: LinearArrays[Layout], weight: WeightFormat | None, row_format: RowFormat
) -> LinearArrays[Layout]:
    """Check the formats of an int8 product; return its layouts, with that of floats for x."""
    require_given("x", layouts.x)
    x, codes = layouts.x, layouts.codes
    form = "a w that is not quantised" if weight is None else f"a w of {weight.format!r}"
    if weight is None or weight.format != "int8":
        rows, other = "activations = 'int8'", "activations=None"
        if row_format.dtype is not None:
            rows, other = "QuantizedRows as x", "x in its dtype"
        rotation = 64 if row_format.dtype is None else row_format.rotation
        raise error(
            TypeError,
            f"{form} with {rows}",
            "int8 rows of x are multiplied with a weight in int8",
            f'pass quantize(w, format="int8", rotation={rotation}), or {other}',
        )
    require_given("codes", codes)
    assert codes is not None
    inner = codes.shape[1]
    if weight.transposed or weight.block_size != inner:
        blocks = "along N" if weight.transposed else f"of {weight.block_size} along K = {inner}"
        raise error(
            ValueError,
            f"w has scales for blocks {blocks}",
            "a product of int8 rows has one scale for each column of w",
            'pass quantize(w, format="int8"), whose blocks are whole columns',
        )
    if row_format.rotation != weight.rotation:
        raise error(
            ValueError,
            f"x has rotation = {row_format.rotation}, w rotation = {weight.rotation}",
            "both are rotated alike, so that the rotations cancel in the product",
            f"pass quantize_rows(x, rotation={weight.rotation})",
        )
    if inner > MOST_INNER:
        raise error(
            ValueError,
            f"K = {inner} with activations = 'int8'",
            f"K is at most {MOST_INNER:,}: the sums of a longer one may exceed int32",
            "pass activations=None, or split the sum",
        )
    if row_format.dtype is None:
        require_dtype("x", x, FLOATS)
        return layouts
    return replace(layouts, x=contiguous(x.shape, row_format.dtype), x_scales=None)


@dataclass(slots=True)
class ForwardDraft:
    """A forward that is being planned, and the slots of its arrays."""

    problem: ForwardProblem
    slots: LinearArrays[int]
    traits: DeviceTraits
    planner: Planner[Any]
    """Hands out slots of scratch memory."""


class FormedGradient(NamedTuple):
    """The launch that forms dz and its partial sums over rows, and the slots of its results."""

    steps: tuple[Step, ...]
    dz: int | None
    """None without an activation: dz is dout."""
    partials: int | None
    """None without a bias."""


@dataclass(slots=True)
class BackwardDraft:
    """A backward that is being planned, and the slots of its arrays."""

    problem: BackwardProblem
    slots: LinearBackwardArrays[int]
    traits: DeviceTraits
    planner: Planner[Any]
    """Hands out slots of scratch memory."""
    formed: FormedGradient | None = None
    """Set by the first product that needs dz, and used by the others."""


D = TypeVar("D", ForwardDraft, BackwardDraft)


@dataclass(frozen=True)
class LinearPlan(Generic[D]):
    """One implementation of one product: which problems it takes, and the function that plans it.

    A plan function receives a draft whose problem has M, N and K of at least 1, item-aligned
    arrays, a dtype in `dtypes`, and for which `takes` is true. Nothing else is promised: lines may
    be odd in length and strides, so `problem.vector(...)` and `Matrix.vector` choose between vector
    and scalar loads. It returns the launches in their order.

    "forward"
        out = activation(x w + b) + residual, rounded once to the dtype. It reads b and residual,
        and writes preactivation = x w + b, in the dtype, if the problem has them; kernels get null
        otherwise. The activation acts on the float32 sum, not on the rounded preactivation. With a
        gated activation, w and preactivation have 2 N columns, and out =
        scalar_activation(gate) * up + residual.
    "dx"
        dx = dz w^T, with dz = dout * activation'(preactivation) (N or 2 N columns), and dz = dout
        without an activation.
    "dw"
        dw = x^T dz, and if the problem is biased db = the sum of dz over rows, in one kernel or
        two. Both are reproducible: no float atomics. With `problem.accumulate`, results are added
        to the contents of the arrays, before the one rounding.
    "db"
        db alone, for a quantised weight, which has no dw; no launches without a bias.
    """

    product: str
    dtypes: tuple[str, ...]
    plan: Callable[[D], tuple[Step, ...]]
    reason: str
    """For `cupyattn.explain`, with {rows} and {dtype} of the problem."""
    takes: Callable[[Any], bool] = lambda problem: True
    tensor_cores: bool = False
    """Whether its kernels need tensor cores that multiply the dtype."""

    def runs(self, traits: DeviceTraits, dtype: str) -> bool:
        """Tell whether a device has the instructions of the kernels for one of the dtypes."""
        return not self.tensor_cores or traits.multiplies(dtype)


HALVES = ("float16", "bfloat16")
"""The floats of 16 bits, which tensor cores multiply: bfloat16 from sm_80 on."""
ON_TENSOR_CORES = "{dtype} runs on tensor cores"
IN_FLOAT32 = "{dtype} runs in float32 arithmetic on this GPU"
READS_ONCE = "M = {{rows}} is at most {most}, where the kernels read each weight once"
"""Reasons of implementations; `most` is a number of rows."""

Plans = tuple[LinearPlan[Any], ...]
"""Implementations by preference."""
