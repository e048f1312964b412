"""Declarations and configurations of row kernels (cuda_src/common/rows.cuh).

A row kernel reads arrays of one shape row by row, and optionally arrays with an item for each
column. It writes rows, an item for each row, or sums over all rows.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache, cached_property
from typing import Any

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.checks import INTEGERS as INTEGERS
from cupyattn.runtime.checks import fixes_of_results
from cupyattn.runtime.records import Record, fields_of
from cupyattn.runtime.spec import (
    Gates,
    KernelSpec,
    Parameter,
    Pointer,
    Scalar,
    Specialisation,
    inputs,
)
from cupyattn.runtime.storage import STORAGE, vector_items
from cupyattn.runtime.structs import rows_struct
from cupyattn.runtime.tables import FLOAT_BYTES, cpp_bool, pairs, round_up, rows_for


class Result(Enum):
    """The kinds of results of a row kernel."""

    ROW = auto()
    """An array of the rows' shape and dtype, of any strides."""
    PER_ROW = auto()
    """One float32 for each row: statistics. On the CPU float64 for float64 rows."""
    CODES = auto()
    """The rows in int8, in C order."""
    SCALE = auto()
    """One float32 for each row, in C order: the scale of its codes."""
    COLUMN_SUM = auto()
    """One item for each column, summed over all rows: gradients of column parameters."""


@dataclass(frozen=True)
class RowConfig:
    """A configuration: the threads that share a row, and the items each keeps in registers."""

    threads: int
    lanes: int
    items: int
    """Items of a row that a thread holds in registers; 0 if each pass reads the row again."""
    reason: str
    in_flight: int = 0
    """Items that a thread loads before it uses the first of them, if `items` is 0."""
    summing_ctas: int = 4
    """CTAs for each multiprocessor if there are sums over rows: enough to fill it, and few, because
    each CTA loops over rows and writes a partial sum."""
    gates: Gates = Gates()

    @property
    def rows_per_cta(self) -> int:
        """Rows that one CTA computes at the same time."""
        return self.threads // self.lanes

    def items_of(self, length: int) -> int:
        """Return how many items of a row of this length a thread holds, or has in flight."""
        if not self.items:
            return self.in_flight
        return min(self.items, round_up(-(-length // self.lanes), _ITEMS_STEP))


_ITEMS_STEP = 8
"""The number of items that a thread holds is a multiple of a vector of 16-bit items."""

Macros = tuple[tuple[str, int | str], ...]
RowTable = Mapping[int, Mapping[int | None, RowConfig]]

# A call takes the first configuration whose limit is not below the length of its rows.
ROWS: RowTable = {
    75: {
        128: RowConfig(128, 8, 16, "short rows: four rows in a warp keep its lanes busy"),
        1024: RowConfig(128, 32, 32, "one warp for a row: no barrier, 32 items per thread"),
        8192: RowConfig(256, 256, 32, "one CTA for a row, which is still read once"),
        None: RowConfig(512, 512, 0, "too long for registers: the row is read twice"),
    }
}

OF_THE_PLAN = ("accumulate", "queries")
"""Choices and scalars that the plan sets: whether the call adds to the contents of its results (not
for column sums), and the length of the axis before the last."""


@dataclass(frozen=True, eq=False)
class RowKernel:
    """A row kernel, declared by the names of its C parameters in the order of these attributes.

    Attributes
    ----------
    entry, source : str
        The kernel's entry and file, as in a `KernelSpec`.
    record : type of Record
        The record of a call's arrays, in the order of the kernel's parameters; `workspace` may
        come last.
    rows : tuple of str
        Arrays that are read row by row.
    columns : tuple of str
        Arrays (length,) of the rows' dtype.
    per_row : tuple of str
        Arrays with one item for each row, in the dtype of statistics, of any strides.
    integers : tuple of str
        Arrays with one item for each row, int32 or int64. The macro <NAME>_DTYPE has the dtype.
    broadcast : mapping
        Arrays that broadcast to the rows' shape, with their allowed dtypes. The macro <NAME>_DTYPE
        has the dtype. If the macro <NAME>_WHOLE is true, neighbouring columns are loaded in vectors
        as rows are; otherwise the scalar <name>_stride is their distance in items, 0 if one item
        serves all columns.
    results : mapping
        Results by name, each with its kind. The kernel writes a COLUMN_SUM as float32 partial sums
        (CTAs, length).
    optional : tuple of str
        Inputs and results that may be absent; the macro WITH_<NAME> is true if one is present.
    follows : mapping
        Results that are present exactly if an optional input is; one macro describes both.
    replaces : mapping
        Optional results that take the place of another one, which is absent where they are present.
        `catalogue` leaves them out.
    in_place : mapping
        Results that may be an input itself, because each item is read before it is written.
    stream : tuple of str
        Rows, columns and results that are float32, where all other rows and columns are one 16-bit
        dtype: the residual stream of a transformer. A call must have the first column.
    choices : mapping
        Macros that a call decides, each with its possible values.
    constants : mapping
        Macros with one value in all calls, where two kernels share a source.
    scalars : mapping
        Numbers passed by value, with their dtypes. Scalars and choices in `OF_THE_PLAN` follow from
        the call.
    table : RowTable
        Configurations by architecture and length.
    fixes : mapping
        What to pass instead of something that is no array, by the names in errors.
    """

    entry: str
    source: str
    record: type[Record]
    rows: tuple[str, ...]
    results: Mapping[str, Result]
    columns: tuple[str, ...] = ()
    per_row: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    broadcast: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    follows: Mapping[str, str] = field(default_factory=dict)
    replaces: Mapping[str, str] = field(default_factory=dict)
    in_place: Mapping[str, str] = field(default_factory=dict)
    stream: tuple[str, ...] = ()
    choices: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)
    scalars: Mapping[str, type[np.generic]] = field(default_factory=dict)
    table: RowTable = field(default_factory=lambda: ROWS)
    fixes: Mapping[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        fields = [name for name in fields_of(self.record) if name != "workspace"]
        if fields != [*self.inputs, *self.results]:
            raise TypeError(f"{self.record.__name__} is {fields}, not the arrays of {self.entry}")
        rows = self.shown_as.get(self.rows[0], self.rows[0])
        of_row = f"pass an int32 array with an item for each row, of shape {rows}.shape[:-1]"
        of_column = "pass an array of shape (N,), an item for each column"
        fixes = {**dict.fromkeys(self.columns, of_column), **dict.fromkeys(self.integers, of_row)}
        fixes |= fixes_of_results(*(self.shown_as.get(name, name) for name in self.results))
        object.__setattr__(self, "fixes", fixes)

    @property
    def shown_as(self) -> Mapping[str, str]:
        """Names in errors of arrays that callers know by another name."""
        return self.record.SHOWN_AS

    def results_of(self, kind: Result) -> tuple[str, ...]:
        """Return the names of the results of a kind."""
        return tuple(name for name, result in self.results.items() if result is kind)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs, in the order of the parameters."""
        return (*self.rows, *self.columns, *self.per_row, *self.integers, *self.broadcast)

    @property
    def whole_rows(self) -> tuple[str, ...]:
        """Names of the arrays of rows, inputs and results."""
        return (*self.rows, *self.results_of(Result.ROW))

    @property
    def strided(self) -> tuple[str, ...]:
        """Names of the arrays that RowsParams has strides for, in its order."""
        return (
            *self.rows,
            *self.per_row,
            *self.integers,
            *self.broadcast,
            *self.results_of(Result.ROW),
            *self.results_of(Result.PER_ROW),
        )

    @property
    def storage(self) -> tuple[str, ...]:
        """The dtypes of its rows and columns, except those of `stream`."""
        return tuple(each for each, size in STORAGE.items() if size == 2 or not self.stream)

    def may_be_absent(self, name: str) -> bool:
        """Tell whether an array may be absent."""
        return name in (*self.optional, *self.follows, *self.replaces.values())

    @cached_property
    def spec(self) -> KernelSpec:
        """The kernel as it is compiled and launched."""
        parameters: tuple[Parameter, ...] = (
            *(Pointer(name, const=True, optional=self.may_be_absent(name)) for name in self.inputs),
            *(Pointer(name, optional=self.may_be_absent(name)) for name in self.results),
            *(Scalar(f"{name}_stride", np.dtype(np.int64)) for name in self.broadcast),
            *(Scalar(name, np.dtype(kind)) for name, kind in self.scalars.items()),
            rows_struct(len(self.strided)),
        )
        return KernelSpec(self.entry, self.source, parameters)

    def config(self, arch: int, length: int) -> RowConfig:
        """Return the configuration for rows of `length` items."""
        rows = rows_for(self.table, arch).items()
        return next(row for limit, row in rows if limit is None or length <= limit)

    def macros_of(
        self,
        present: Container[str],
        dtypes: Mapping[str, str],
        choices: Mapping[str, Any],
        whole: Container[str] = (),
    ) -> Macros:
        """Return the macros of a call.

        Parameters
        ----------
        present : container of str
            Optional arrays that the call has.
        dtypes : mapping
            Dtypes of the arrays of integers, and of the arrays that broadcast and are present.
        choices : mapping
            A value for each choice.
        whole : container of str
            Arrays that broadcast and are loaded in vectors.
        """
        macros: dict[str, int | str] = {
            f"WITH_{name.upper()}": cpp_bool(name in present) for name in self.optional
        }
        macros |= {f"{name.upper()}_DTYPE": dtypes[name] for name in self.integers}
        for name, allowed in self.broadcast.items():
            macros[f"{name.upper()}_DTYPE"] = dtypes.get(name, allowed[0])
            macros[f"{name.upper()}_WHOLE"] = cpp_bool(name in whole)
        for name in self.choices:
            value = choices[name]
            macros[name.upper()] = cpp_bool(value) if isinstance(value, bool) else value
        macros |= self.constants
        return tuple(macros.items())

    def specialise(
        self, arch: int, dtype: str, length: int, vec: int, macros: Macros | None = None
    ) -> Specialisation:
        """Specialise the kernel; `vec` is the number of items in one load, 1 or 16 bytes of them.

        Without `macros` no optional array is present, and each choice has its first value.
        """
        macros = self._plainest if macros is None else macros
        config = self.config(arch, length)
        return _specialise(self, config, config.items_of(length), dtype, vec, macros)

    @cached_property
    def _plainest(self) -> Macros:
        choices = {name: values[0] for name, values in self.choices.items()}
        return self.macros_of((), dict.fromkeys(self.integers, INTEGERS[0]), choices)

    def catalogue(self, arch: int = TURING.number) -> Iterator[Specialisation]:
        """Yield every configuration, with dtypes, loads, optional arrays and choices in pairs."""
        limits = rows_for(self.table, arch)
        beyond = max(filter(None, limits)) + 1
        optional = [name for name in self.optional if name not in (*self.broadcast, *self.replaces)]
        absent = [(True, False)] * len(optional)
        integers = [INTEGERS] * len(self.integers)
        broadcast = [self._ways_of(name) for name in self.broadcast]
        decided = {name: values[0] for name, values in self.choices.items() if len(values) == 1}
        open_to = {name: values for name, values in self.choices.items() if name not in decided}
        for dtype, limit, vectors, *more in pairs(
            self.storage,
            limits,
            (True, False),
            *absent,
            *integers,
            *broadcast,
            *open_to.values(),
        ):
            rest = iter(more)
            present = [name for name in optional if next(rest)]
            dtypes = {name: next(rest) for name in self.integers}
            ways = {name: next(rest) for name in self.broadcast}
            present += [name for name, way in ways.items() if way]
            dtypes |= {name: way[0] for name, way in ways.items() if way}
            whole = [name for name, way in ways.items() if way and way[1] and vectors]
            choices = {**decided, **dict(zip(open_to, rest, strict=True))}
            macros = self.macros_of(present, dtypes, choices, whole)
            vec = vector_items(dtype) if vectors else 1
            yield self.specialise(arch, dtype, limit or beyond, vec, macros)

    def _ways_of(self, name: str) -> list[tuple[str, bool] | None]:
        """Return the ways to pass an array that broadcasts: dtype and in vectors or not; absent."""
        allowed = self.broadcast[name]
        ways = (allowed[0], True), (allowed[-1], False)
        return [*ways, None] if self.may_be_absent(name) else [*ways]


@cache
def _specialise(
    kernel: RowKernel, config: RowConfig, items: int, dtype: str, vec: int, macros: Macros
) -> Specialisation:
    decided: dict[str, Any] = dict(macros)
    return kernel.spec.specialise(
        threads=config.threads,
        gates=config.gates,
        reason=config.reason,
        DTYPE=dtype,
        LANES=config.lanes,
        STRIPS=max(items // vec, 1),
        VEC=vec,
        RESIDENT=cpp_bool(bool(config.items)),
        **decided,
    )


COLUMN_SUMS = KernelSpec(
    "column_sums",
    "common/column_sums.cu",
    (
        *inputs("partials"),
        *inputs("more_partials", optional=True),
        Pointer("sums"),
        Pointer("more_sums", optional=True),
        *(Scalar(name, np.dtype(np.int64)) for name in ("count", "length")),
        Scalar("accumulate", np.dtype(np.int32)),
    ),
)
"""Adds the partial sums that a row kernel wrote, in a fixed order."""

COLUMN_SUMS_COLUMNS = 32
"""Columns of one CTA: a warp reads 128 bytes of a row of partial sums at a time."""
_COLUMN_SUMS_THREADS = 512


@cache
def column_sums(dtype: str) -> Specialisation:
    """Specialise the kernel that adds partial sums to a result of a dtype."""
    return COLUMN_SUMS.specialise(
        threads=_COLUMN_SUMS_THREADS,
        static_shared_bytes=_COLUMN_SUMS_THREADS * FLOAT_BYTES,
        DTYPE=dtype,
    )


KERNELS = (COLUMN_SUMS,)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield the kernel for each dtype of the result."""
    del arch  # one configuration for all
    yield from map(column_sums, STORAGE)
