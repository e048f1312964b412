"""Embedding: its kernels, and the checks and plans of its calls.

The forward copies rows of a table. The backward sums the gradient of each row in a fixed order: it
sorts the ids, adds the tokens of each row in chunks of 32, and combines the sums of rows whose
tokens are in several chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.arrays import (
    Array,
    Description,
    Layout,
    Operands,
    contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    INTEGERS,
    Overlaps,
    require_contiguous_rows,
    require_dtype,
    require_given,
    require_item_alignment,
    require_kernel_dtype,
    require_output,
    require_rank,
    require_same_dtype,
    require_shape,
    require_whole_item_strides,
    require_workspace,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.elements import ElementConfig, ElementTable
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Output, Plan, Planner, Step, run
from cupyattn.runtime.records import R, Record, T, given_of
from cupyattn.runtime.spec import KernelSpec, Pointer, Scalar, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE, rows_aligned, vector_items
from cupyattn.runtime.structs import Strides, element_params, elements_struct, merge_axes
from cupyattn.runtime.tables import cpp_bool, pairs, rows_for
from cupyattn.runtime.value_checks import checks_values, require_within

_INT32, _INT64, _UINT32 = (np.dtype(kind) for kind in (np.int32, np.int64, np.uint32))
_FLOAT32 = np.dtype(np.float32)


@dataclass(slots=True)
class EmbeddingArrays(Record[T]):
    """Arrays of embedding."""

    table: T
    ids: T
    out: T | None = None


@dataclass(slots=True)
class EmbeddingBackwardArrays(Record[T]):
    """Arrays of the backward of embedding; only the shape and dtype of table matter."""

    SHOWN_AS: ClassVar = MappingProxyType({"dtable": "grads"})

    dout: T
    table: T
    ids: T
    dtable: T | None = None
    workspace: T | None = None


FORWARD = KernelSpec(
    "embedding",
    "embedding/forward.cu",
    (
        *inputs("table", "ids"),
        Pointer("out"),
        Scalar("table_rows", _INT64),
        Scalar("table_stride", _INT64),
        elements_struct(2),
    ),
)
WIDE_FORWARD = KernelSpec(
    FORWARD.entry,
    FORWARD.source,
    (*FORWARD.parameters[:-1], Scalar("scale", _FLOAT32), elements_struct(2)),
)
"""The lookup of rows that are scaled, in float32."""
IDS = KernelSpec(
    "embedding_ids",
    "embedding/ids.cu",
    (
        *inputs("ids"),
        Pointer("flat"),
        Scalar("rows", _INT32),
        Scalar("padded", _INT32),
        elements_struct(1),
    ),
)
SORT = KernelSpec(
    "embedding_sort",
    "embedding/sort.cu",
    (*inputs("ids"), Pointer("order"), Pointer("rows"), Scalar("count", _INT32)),
)
SUM = KernelSpec(
    "embedding_backward",
    "embedding/backward.cu",
    (
        *inputs("dout", "order", "rows"),
        Pointer("dtable"),
        Pointer("partials"),
        Scalar("table_rows", _INT32),
        Scalar("table_stride", _INT64),
        elements_struct(1),
    ),
)
COMBINE = KernelSpec(
    "embedding_combine",
    "embedding/combine.cu",
    (
        *inputs("rows", "partials"),
        Pointer("dtable"),
        Scalar("count", _INT32),
        Scalar("table_rows", _INT32),
        Scalar("table_stride", _INT64),
        Scalar("length", _INT64),
        Scalar("column_blocks", _UINT32),
    ),
)
KERNELS = (FORWARD, WIDE_FORWARD, IDS, SORT, SUM, COMBINE)

_IDS = {"int32": "int", "int64": "int64"}
"""Dtypes of ids, with their names in C."""

THREADS = 256
SORT_READS = 4
"""Ids that a thread of the sorting kernel reads at a time; ids are padded to those of a CTA."""
CHUNK = 32
"""Sorted tokens that a warp sums: each lane has the id of one."""
_WARP = 32


# A load of a row waits for its id: two loads a thread are 2, 8 and 9 % faster than one, for 8192
# float16 rows of 768, 2048 and 4096 items (H200, compute_75 code, 2026-11-22, `python -m
# cupyattn.benchmark layers --operation embedding`). Rows copied as words with a warp a unit take
# 8.96, 18.92 and 35.69 us there; converted to float32 and back with 8 threads a unit they took
# 9.03, 19.03 and 36.33 us (H200, 2026-11-24). Rows that fit in one such unit were not measured and
# keep 8 threads. The key is the most bytes of a row.
FORWARD_ROWS: ElementTable = {
    75: {
        1024: ElementConfig(128, 8, 2, 8, "rows of up to 1 KiB: units of 256 bytes leave few idle"),
        None: ElementConfig(128, 32, 2, 8, "a warp 1,024 bytes"),
    }
}


def forward_config(arch: int, row_bytes: int) -> ElementConfig:
    """Return the configuration for rows of `row_bytes` bytes."""
    rows = rows_for(FORWARD_ROWS, arch).items()
    return next(row for limit, row in rows if limit is None or row_bytes <= limit)


@cache
def specialise_forward(
    config: ElementConfig, dtype: str, vec: int, ids: str, wide: bool = False
) -> Specialisation:
    """Specialise the lookup with `vec` items a load: 1, or 16 bytes of them."""
    return (WIDE_FORWARD if wide else FORWARD).specialise(
        threads=config.threads,
        reason=config.reason,
        DTYPE=dtype,
        LANES=config.lanes,
        VECTORS=config.loads(vec),
        VEC=vec,
        IDS=_IDS[ids],
        WIDE=cpp_bool(wide),
    )


@cache
def specialise_ids(ids: str) -> Specialisation:
    """Specialise the kernel that copies ids to contiguous int32."""
    return IDS.specialise(
        threads=THREADS, reason="pads ids so that the sort reads 16 bytes a load", IDS=_IDS[ids]
    )


@cache
def specialise_sort() -> Specialisation:
    """Specialise the counting sort of the ids."""
    words = THREADS + 1 + THREADS // _WARP + 2 * SORT_READS * THREADS
    return SORT.specialise(
        threads=THREADS,
        static_shared_bytes=4 * words,
        reason="a counting sort, in which no CTA waits for another",
        READS=SORT_READS,
    )


@cache
def specialise_sums(spec: KernelSpec, dtype: str, vec: int, accumulate: bool) -> Specialisation:
    """Specialise SUM or COMBINE."""
    return spec.specialise(
        threads=THREADS,
        reason=f"chunks of {CHUNK} sorted tokens: frequent ids take no longer, in a fixed order",
        DTYPE=dtype,
        VEC=vec,
        CHUNK=CHUNK,
        ACCUMULATE=cpp_bool(accumulate),
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield pairwise combinations of the lookup's options, and the kernels of the backward."""
    rows = rows_for(FORWARD_ROWS, arch)
    for dtype, limit, whole, ids in pairs(STORAGE, rows, (True, False), _IDS):
        yield specialise_forward(rows[limit], dtype, vector_items(dtype) if whole else 1, ids)
    for dtype, limit, whole, ids in pairs(STORAGE, rows, (True, False), _IDS):
        yield specialise_forward(rows[limit], dtype, vector_items(dtype) if whole else 1, ids, True)
    yield from map(specialise_ids, _IDS)
    yield specialise_sort()
    for dtype, whole, accumulate in pairs(STORAGE, (True, False), (False, True)):
        for spec in (SUM, COMBINE):
            vec = vector_items(dtype) if whole else 1
            yield specialise_sums(spec, dtype, vec, accumulate)


_MOST_UNITS = 2**32 - 1
_MOST = 2**31 - 2**16
"""Tokens, and rows of a table, that the backward can number with 32 bits."""


@dataclass(frozen=True, eq=False)
class EmbeddingProblem:
    """A valid call, forward or backward."""

    arrays: Record[Layout]
    starts: dict[str, int]
    """How many bytes each array starts after a multiple of a vector's size."""
    ids: Layout
    rows: Layout
    """The layout of out, or of dout."""
    target: Layout
    """The layout of table, or of its gradient."""
    field: str
    """The result's field in the record of arrays."""
    output: Output
    accumulate: bool
    overlaps: Overlaps
    scale: float | None = None
    """The factor of the rows, which then become float32."""

    @property
    def vec(self) -> int:
        """How many items one load has: a vector's if every row starts at one, or 1."""
        items = vector_items(self.target.dtype.name)
        rows, target = ("dout", "dtable") if self.field == "dtable" else ("out", "table")
        used = (self.rows, self.starts.get(rows)), (self.target, self.starts.get(target))
        return items if self.target.shape[1] % items == 0 and rows_aligned(used) else 1


def embedding_problem(
    operands: Operands[EmbeddingArrays[Array]], scale: float | None = None
) -> EmbeddingProblem:
    """Check the arrays of a forward call; a call that was checked before is found in a cache."""
    problem = _forward_problem(operands.description, scale)
    _check_memory(problem, operands, operands.arrays.ids)
    return problem


def embedding_backward_problem(
    operands: Operands[EmbeddingBackwardArrays[Array]], accumulate: bool
) -> EmbeddingProblem:
    """Check the arrays of a backward call; a call that was checked before is found in a cache."""
    problem = _backward_problem(operands.description, accumulate)
    _check_memory(problem, operands, operands.arrays.ids)
    return problem


def _check_memory(problem: EmbeddingProblem, operands: Operands[Any], ids: Array) -> None:
    problem.overlaps.check(operands)
    if checks_values(operands):
        rows = problem.target.shape[0]
        require_within("ids", ids, rows, "the table has", "pass other ids, or a larger table")


@lru_cache(maxsize=4096)
def _forward_problem(description: Description, scale: float | None) -> EmbeddingProblem:
    layouts = layouts_of(EmbeddingArrays[Layout], description)
    table, ids, out = layouts.table, layouts.ids, layouts.out
    _check_table(table, ids)
    overlaps = Overlaps.of(layouts, ("out",))
    wide = np.dtype(np.float64) if table.dtype == np.float64 else _FLOAT32
    output = Output((*ids.shape, table.shape[1]), table.dtype if scale is None else wide)
    if out is not None:
        require_output("out", out, *output)
    rows = out or contiguous(*output)
    starts = given_of(starts_of(EmbeddingArrays[int], description))
    return EmbeddingProblem(
        layouts, starts, ids, rows, table, "out", output, False, overlaps, scale
    )


@lru_cache(maxsize=4096)
def _backward_problem(description: Description, accumulate: bool) -> EmbeddingProblem:
    layouts = layouts_of(EmbeddingBackwardArrays[Layout], description)
    dout, table, ids, dtable = layouts.dout, layouts.table, layouts.ids, layouts.dtable
    require_given("dout", dout)
    _check_table(table, ids)
    require_dtype("dout", dout, CPU_FLOATS)
    require_shape("dout", dout, (*ids.shape, table.shape[1]), "(*ids.shape, N)")
    require_contiguous_rows("dout", dout)
    require_same_dtype({"dout": dout, "table": table})
    if layouts.workspace is not None:
        require_workspace(layouts.workspace)
    overlaps = Overlaps.of(layouts, ("dtable", "workspace"))
    output = Output(table.shape, table.dtype)
    if dtable is not None:
        require_output("grads", dtable, *output)
    target = dtable or contiguous(*output)
    starts = given_of(starts_of(EmbeddingBackwardArrays[int], description))
    return EmbeddingProblem(
        layouts, starts, ids, dout, target, "dtable", output, accumulate, overlaps
    )


def _check_table(table: Layout, ids: Layout) -> None:
    require_given("table", table)
    require_given("ids", ids)
    require_dtype("table", table, CPU_FLOATS)
    require_rank("table", table, "rows N")
    require_contiguous_rows("table", table)
    require_dtype("ids", ids, INTEGERS)
    require_whole_item_strides("ids", ids)


def run_embedding(device: Device, problem: EmbeddingProblem, operands: Operands[R]) -> R:
    """Run the lookup, or the gradient of the table; return the arrays with the result."""
    make = _backward_plan if problem.field == "dtable" else _forward_plan
    return run(device, make(problem, device.arch.number), operands)


def _require_for_kernels(problem: EmbeddingProblem) -> None:
    require_item_alignment(given_of(problem.arrays), problem.starts, problem.arrays.SHOWN_AS)
    require_kernel_dtype("table", problem.target.dtype)


def _merged(axes: int, **layouts: Layout) -> tuple[tuple[int, ...], dict[str, Strides]]:
    """Merge the first axes of arrays; strides are in items."""
    strides = [
        tuple(stride // layout.dtype.itemsize for stride in layout.strides[:axes])
        for layout in layouts.values()
    ]
    first = next(iter(layouts.values()))
    shape, merged = merge_axes(first.shape[:axes], strides)
    return shape, dict(zip(layouts, merged, strict=True))


@lru_cache(maxsize=4096)
def _forward_plan(problem: EmbeddingProblem, arch: int) -> Plan:
    _require_for_kernels(problem)
    table, ids = problem.target, problem.ids
    planner = Planner(EmbeddingArrays, problem.arrays, {"out": problem.output})
    if 0 in problem.output.shape:
        return planner.plan()
    vec = problem.vec
    loads = -(-table.shape[1] // vec)
    config = forward_config(arch, table.shape[1] * table.dtype.itemsize)
    units = -(-loads // (config.lanes * config.loads(vec)))
    tokens = math.prod(ids.shape)
    ctas = -(-tokens * units // config.units_per_cta)
    if ctas * config.units_per_cta > _MOST_UNITS:
        raise error(
            ValueError,
            f"ids has {tokens} items",
            f"a launch of embedding takes at most {_MOST_UNITS // units} of {table.shape[1]}",
            "split them over several calls",
        )
    shape, strides = _merged(len(ids.shape), ids=ids, out=problem.rows)
    params = element_params(shape, strides, table.shape[1], units)
    scale = problem.scale
    wide, scales = scale is not None, () if scale is None else (scale,)
    specialisation = specialise_forward(config, table.dtype.name, vec, ids.dtype.name, wide)
    stride = table.strides[0] // table.dtype.itemsize
    slots = planner.slots
    arrays = (slots.table, slots.ids, slots.out)
    rows = table.shape[0]
    return planner.plan(Step.of(specialisation, ctas, arrays, rows, stride, *scales, params[()]))


@lru_cache(maxsize=4096)
def _backward_plan(problem: EmbeddingProblem, arch: int) -> Plan:
    del arch  # one configuration serves all
    _require_for_kernels(problem)
    ids, accumulate, (rows, length) = problem.ids, problem.accumulate, problem.target.shape
    planner = Planner(EmbeddingBackwardArrays, problem.arrays, {"dtable": problem.output})
    slots = planner.slots
    assert slots.dtable is not None
    zero_first = () if accumulate else (slots.dtable,)
    tokens = math.prod(ids.shape)
    if tokens == 0 or rows * length == 0:
        return planner.plan(zero_first=zero_first, zero_new=accumulate)
    if max(tokens, rows) > _MOST:
        raise error(
            ValueError,
            f"{tokens} ids of a table of {rows} rows",
            f"the backward on a GPU numbers up to {_MOST} of either",
            "split the ids over several calls with accumulate=True",
        )
    vec = problem.vec
    padded = -(-tokens // (THREADS * SORT_READS)) * THREADS * SORT_READS
    chunks = -(-tokens // CHUNK)
    blocks = -(-length // (_WARP * vec))
    stride = problem.target.strides[0] // problem.target.dtype.itemsize
    ids_shape, ids_strides = _merged(len(ids.shape), ids=ids)
    dout_shape, dout_strides = _merged(len(ids.shape), dout=problem.rows)
    of_ids = element_params(ids_shape, ids_strides, 1, 1)
    of_dout = element_params(dout_shape, dout_strides, length, blocks)
    flat, order, sorted_ids, partials = map(
        planner.scratch, (padded, tokens, tokens, 2 * chunks * length)
    )
    copy, sort = specialise_ids(ids.dtype.name), specialise_sort()
    sums, combine = (
        specialise_sums(spec, problem.target.dtype.name, vec, accumulate) for spec in (SUM, COMBINE)
    )
    summed = (slots.dout, order, sorted_ids, slots.dtable, partials)
    combined = (sorted_ids, partials, slots.dtable)
    ctas = -(-chunks * blocks // (THREADS // _WARP))
    return planner.plan(
        Step.of(copy, -(-padded // THREADS), (slots.ids, flat), rows, padded, of_ids[()]),
        Step.of(sort, rows // THREADS + 1, (flat, order, sorted_ids), padded),
        Step.of(sums, ctas, summed, rows, stride, of_dout[()]),
        Step.of(combine, ctas, combined, tokens, rows, stride, length, blocks),
        zero_first=zero_first,
        zero_new=accumulate,
    )
