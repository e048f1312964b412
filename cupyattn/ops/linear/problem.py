"""What a call of linear or of its backward asks for: sizes, and how each array lies as a matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.by_name import Overlaps
from cupyattn.runtime.plan import Output
from cupyattn.runtime.storage import VECTOR_BYTES

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")
GATED = {"swiglu": "silu", "geglu": "gelu"}
"""The gated activations, and what each does to its gate."""
FORWARD_RESULTS = ("out", "preactivation")
BACKWARD_RESULTS = ("dx", "dw", "db")
SHOWN_AS = {name: f"grads.{name}" for name in BACKWARD_RESULTS}
"""The names of backward's results in errors: as the caller gives them."""
ARRAY_FIXES = {
    "b": "pass an array of shape (N,), an item for each column of w",
    "residual": "pass an array of the result's shape",
}
"""What to pass instead of a number, of which an array has no axes."""
WEIGHT_ARRAYS = ("codes", "scales", "super_scales", "scale_table")
"""What stands in the place of w where the weight is quantised."""


class WeightFormat(NamedTuple):
    """What the arrays of a `QuantizedWeight` stand for: its fields that are no arrays."""

    format: str
    block_size: int
    """Weights along the rows of codes that share a scale."""
    transposed: bool
    """Whether rows of codes are rows of w; otherwise its columns."""


class Matrix(NamedTuple):
    """How an array lies in memory, as rows by columns of items."""

    rows: int
    columns: int
    row_stride: int
    """From one row to the next, in items."""
    column_stride: int
    """From one column to the next, in items. This one is 1, or `row_stride` is."""
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
        """The same memory, its rows taken for columns."""
        rows, columns, row_stride, column_stride, *rest = self
        return Matrix(columns, rows, column_stride, row_stride, *rest)

    @property
    def vector(self) -> int:
        """How many items a load may bring: lines start at, and consist of, whole such vectors.

        A power of two, 16 bytes' worth at the most.
        """
        lines, length = self.rows, self.columns
        if not self.along_columns:
            lines, length = length, lines
        apart = self.leading if lines > 1 else 0
        return math.gcd(
            VECTOR_BYTES, self.start, apart * self.itemsize, length * self.itemsize
        ) // (self.itemsize)

    def columns_from(self, first: int, count: int) -> Matrix:
        """Return `count` neighbouring columns: one half of a gated weight, say."""
        beyond = first * self.column_stride * self.itemsize
        return self._replace(columns=count, start=(self.start + beyond) % VECTOR_BYTES)


@dataclass(frozen=True, eq=False)
class LinearProblem:
    """A valid call of linear or of its backward; letters as in the public API.

    Two calls of one description share one object, so it stands for the description in caches.
    """

    rows: int
    """M: all axes of x before its last, merged."""
    inner: int
    """K."""
    outer: int
    """N: columns of the result. A gated activation makes them of twice as many."""
    dtype: np.dtype
    activation: str | None
    """One of `ACTIVATIONS` or `GATED`, or None."""
    layouts: dict[str, Layout]
    """The arrays as the caller gave them."""
    matrices: dict[str, Matrix]
    """The arrays that kernels see as matrices, results that are to be made among them.

    Forward: x (M, K), w (K, W), out (M, N), and where they are there residual (M, N) and
    preactivation (M, W), W being `weight_columns`. Backward: dout (M, N), x, w, dx (M, K),
    dw (K, W), and with an activation preactivation, which is always there for kernels: the
    caller's, or scratch that was filled before. All but w and dw have contiguous rows; those two
    have contiguous rows or contiguous columns. b and db, which are no matrices, are contiguous.

    A quantised weight stands as codes, scales, super_scales and scale_table (of the formats that
    have these) in place of w, each in C order, its first axis by all others; there is no dw then.
    """
    outputs: dict[str, Output]
    """What the call writes, by name."""
    starts: dict[str, int]
    """By how many bytes each given array misses a vector's alignment."""
    overlaps: Overlaps
    accumulate: bool = False
    """Whether gradients are added to what is there."""
    weight: WeightFormat | None = None
    """What the weight is kept in, where it is quantised."""

    @property
    def gated(self) -> bool:
        """Whether the result is the activation of the first N columns of x w + b times the rest."""
        return self.activation in GATED

    @property
    def scalar_activation(self) -> str | None:
        """What is applied to a number: of a gated activation what its gate goes through."""
        return GATED.get(self.activation or "", self.activation)

    @property
    def weight_columns(self) -> int:
        """W: N, or 2 N where the activation is gated: N columns of the gate, then N it acts on."""
        return self.outer * (2 if self.gated else 1)

    @property
    def transposed(self) -> tuple[str, ...]:
        """The results that are made as transposes of arrays in C order: dw of such a w.

        So an optimizer that keeps w.T finds the last axis of dw.T contiguous, as it is of w.T. A w
        of one row or one column may be taken for either; C order it is.
        """
        if "dw" not in self.outputs:
            return ()
        w = self.matrices["w"]
        turned = not w.along_columns and min(w.rows, w.columns) > 1
        return ("dw",) if turned else ()

    @property
    def biased(self) -> bool:
        """Whether there is a b (in the backward: whether db is wanted)."""
        return "b" in self.layouts

    def has(self, name: str) -> bool:
        """Tell whether kernels are to read or write residual, preactivation or another matrix."""
        return name in self.matrices

    def vector(self, *names: str) -> int:
        """Return how many items a load or store may bring of each of these, b and db included.

        `Matrix.vector` of all of them: 8 of float16 where everything is aligned to 16 bytes and
        every line is whole vectors; 1 at the least.
        """
        items = VECTOR_BYTES // self.dtype.itemsize
        for name in names:
            if name in self.matrices:
                items = math.gcd(items, self.matrices[name].vector)
            elif name in ("b", "db"):
                start = self.starts.get(name, 0) // self.dtype.itemsize
                items = math.gcd(items, start, self.weight_columns)
        return items

    def plain_preactivation(self) -> LinearProblem:
        """Return the forward problem preactivation = x w + b, its result named out.

        What the backward computes first where it was given no preactivation.
        """
        inputs = ("x", "w", *WEIGHT_ARRAYS, "b")
        read = {name: self.matrices[name] for name in inputs if name in self.matrices}
        return replace(
            self,
            outer=self.weight_columns,
            activation=None,
            layouts={name: self.layouts[name] for name in inputs if name in self.layouts},
            matrices={**read, "out": self.matrices["preactivation"]},
            outputs={},
            accumulate=False,
        )
