"""Kernels of one pass over rows (cuda_src/common/rows.cuh): how they are declared and configured.

A row kernel reads arrays of one shape row by row, and perhaps arrays with an item for each column,
and writes rows, an item for each row, or sums over all rows. One table serves them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache, cached_property

import numpy as np

from cupyattn.kernels.arch import TURING
from cupyattn.kernels.configs.dtypes import STORAGE, vector_items
from cupyattn.kernels.configs.tables import FLOAT_BYTES, cpp_bool, pairs, rows_for
from cupyattn.kernels.spec import KernelSpec, Parameter, Pointer, Scalar, Specialisation, inputs
from cupyattn.kernels.structs import rows_struct


class Result(Enum):
    """What a row kernel writes."""

    ROW = auto()
    """An array of the rows' shape and dtype, with strides of its own."""
    PER_ROW = auto()
    """One float32 for each row: statistics. On the CPU float64 for float64 rows."""
    COLUMN_SUM = auto()
    """One item for each column, summed over all rows: gradients of column parameters."""


@dataclass(frozen=True)
class RowConfig:
    """How many threads share a row, and how much of it each keeps in registers."""

    threads: int
    lanes: int
    items: int
    """Items of a row that a thread holds; 0 where the row is read again in each pass."""
    reason: str

    @property
    def rows_per_cta(self) -> int:
        """Rows that one CTA works on side by side."""
        return self.threads // self.lanes


RowTable = Mapping[int, Mapping[int | None, RowConfig]]

# The first row whose length is not below that of the array's last axis; None takes the rest.
ROWS: RowTable = {
    75: {
        128: RowConfig(128, 8, 16, "short rows: four to a warp keep its lanes busy"),
        1024: RowConfig(128, 32, 32, "a warp a row: no barrier, 32 items a thread in registers"),
        8192: RowConfig(256, 256, 32, "a CTA a row, still read once"),
        None: RowConfig(512, 512, 0, "longer than registers hold: two reads"),
    }
}

SUMMING_CTAS = 512
"""CTAs of a kernel with column sums, each of which leaves a partial sum of the rows it walked."""


@dataclass(frozen=True, eq=False)
class RowKernel:
    """A row kernel: its names are those of the C parameters, in this order.

    Attributes
    ----------
    entry, source : str
        As of a `KernelSpec`.
    rows : tuple of str
        Arrays that are read row by row.
    results : mapping
        What is written, by name. A COLUMN_SUM is passed as float32 partial sums (CTAs, length).
    columns : tuple of str
        Arrays (length,) of the rows' dtype.
    scalars : mapping
        Numbers passed by value, with their dtypes.
    table : RowTable
        By architecture and length.
    """

    entry: str
    source: str
    rows: tuple[str, ...]
    results: Mapping[str, Result]
    columns: tuple[str, ...] = ()
    scalars: Mapping[str, type[np.generic]] = field(default_factory=dict)
    table: RowTable = field(default_factory=lambda: ROWS)

    def results_of(self, kind: Result) -> tuple[str, ...]:
        """Return the names of the results of a kind."""
        return tuple(name for name, result in self.results.items() if result is kind)

    @property
    def strided(self) -> tuple[str, ...]:
        """The arrays that RowsParams has strides for, in their order there."""
        return (*self.rows, *self.results_of(Result.ROW))

    @cached_property
    def spec(self) -> KernelSpec:
        """What is compiled and launched."""
        parameters: tuple[Parameter, ...] = (
            *inputs(*self.rows, *self.columns),
            *(Pointer(name) for name in self.results),
            *(Scalar(name, np.dtype(kind)) for name, kind in self.scalars.items()),
            rows_struct(len(self.strided)),
        )
        return KernelSpec(self.entry, self.source, parameters)

    def config(self, arch: int, length: int) -> RowConfig:
        """Return the table row for rows of `length` items."""
        rows = rows_for(self.table, arch).items()
        return next(row for limit, row in rows if limit is None or length <= limit)

    def specialise(self, arch: int, dtype: str, length: int, vec: int) -> Specialisation:
        """Specialise the kernel; `vec` is the items of one load, 1 or 16 bytes' worth."""
        return _specialise(self, self.config(arch, length), dtype, vec)

    def catalogue(self, arch: int = TURING.number) -> Iterator[Specialisation]:
        """Yield every row of the table, dtypes and loads in pairs."""
        limits = rows_for(self.table, arch)
        beyond = max(filter(None, limits)) + 1
        for dtype, limit, whole in pairs(STORAGE, limits, (True, False)):
            vec = vector_items(dtype) if whole else 1
            yield self.specialise(arch, dtype, limit or beyond, vec)


@cache
def _specialise(kernel: RowKernel, config: RowConfig, dtype: str, vec: int) -> Specialisation:
    return kernel.spec.specialise(
        threads=config.threads,
        DTYPE=dtype,
        LANES=config.lanes,
        STRIPS=max(config.items // vec, 1),
        VEC=vec,
        RESIDENT=cpp_bool(bool(config.items)),
    )


COLUMN_SUMS = KernelSpec(
    "column_sums",
    "layers/column_sums.cu",
    (
        *inputs("partials"),
        Pointer("sums"),
        *(Scalar(name, np.dtype(np.int64)) for name in ("count", "length")),
        Scalar("accumulate", np.dtype(np.int32)),
    ),
)
"""Adds the partial sums that a row kernel left, in a fixed order."""

COLUMN_SUMS_COLUMNS = 32
"""Columns of one CTA: a warp reads 128 bytes of a row of partial sums at a time."""
_COLUMN_SUMS_THREADS = 256


@cache
def column_sums(dtype: str) -> Specialisation:
    """Specialise the kernel that adds partial sums to a result of a dtype."""
    return COLUMN_SUMS.specialise(
        threads=_COLUMN_SUMS_THREADS,
        static_shared_bytes=_COLUMN_SUMS_THREADS * FLOAT_BYTES,
        DTYPE=dtype,
    )
