"""Embedding, on a device: rows of a table, and the gradient of the table in a fixed order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from cupyattn.ops.embedding import kernels as configs
from cupyattn.runtime.arrays import Array, Layout, contiguous
from cupyattn.runtime.axes import Strides, merge_axes, walk_params
from cupyattn.runtime.by_name import (
    Description,
    Operands,
    Overlaps,
    Plan,
    Step,
    lay_out_scratch,
    layouts_of,
    run,
    starts_of,
)
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    INTEGERS,
    require_arrays,
    require_contiguous_rows,
    require_dtype,
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
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Output
from cupyattn.runtime.storage import VECTOR_BYTES, vector_items
from cupyattn.runtime.value_checks import checks_values, require_within

_GRADS = {"dtable": "grads"}
_MOST_UNITS = 2**32 - 1
_MOST = 2**31 - 2**16
"""Tokens, and rows of a table, that the backward numbers with 32 bits."""


@dataclass(frozen=True, eq=False)
class EmbeddingProblem:
    """A valid call, forward or backward: one of them has `rows`, the array like the result."""

    layouts: dict[str, Layout]
    starts: dict[str, int]
    """By how many bytes each array misses a vector's alignment."""
    backward: bool
    accumulate: bool
    overlaps: Overlaps

    @property
    def output(self) -> tuple[str, Output]:
        """What is written."""
        table = self.layouts["table"]
        if self.backward:
            return "grads", Output(table.shape, table.dtype)
        return "out", Output((*self.layouts["ids"].shape, table.shape[1]), table.dtype)

    @property
    def rows(self) -> Layout:
        """The layout of out, or of dout."""
        if self.backward:
            return self.layouts["dout"]
        return self.layouts.get("out") or contiguous(*self.output[1])

    @property
    def target(self) -> Layout:
        """The layout of table, or of its gradient."""
        if not self.backward:
            return self.layouts["table"]
        return self.layouts.get("grads") or contiguous(*self.output[1])

    @property
    def vec(self) -> int:
        """How many items one load brings: a vector's where every row starts at one, or 1."""
        items = vector_items(self.target.dtype.name)
        names = ("dout", "grads") if self.backward else ("out", "table")
        strides = [
            stride
            for layout in (self.rows, self.target)
            for extent, stride in zip(layout.shape[:-1], layout.strides[:-1], strict=True)
            if extent > 1
        ]
        aligned = not any(self.starts.get(name, 0) for name in names)
        whole = self.target.shape[1] % items == 0
        return items if aligned and whole and not any(s % VECTOR_BYTES for s in strides) else 1


def embedding_problem(
    operands: Operands, *, backward: bool = False, accumulate: bool = False
) -> EmbeddingProblem:
    """Check the arrays of a call, or find that they were checked before.

    Raises
    ------
    TypeError, ValueError
        As `embedding` documents.
    """
    problem = _cached_problem(operands.description, backward, accumulate)
    problem.overlaps.check(operands)
    if checks_values(operands):
        ids, rows = operands.arrays["ids"], problem.layouts["table"].shape[0]
        require_within("ids", ids, rows, "the table has", "pass other ids, or a larger table")
    return problem


@lru_cache(maxsize=4096)
def _cached_problem(description: Description, backward: bool, accumulate: bool) -> EmbeddingProblem:
    layouts = layouts_of(description)
    require_arrays(layouts, ("dout", "table", "ids") if backward else ("table", "ids"))
    table, ids = layouts["table"], layouts["ids"]
    require_dtype("table", table, CPU_FLOATS)
    require_rank("table", table, "rows N")
    require_contiguous_rows("table", table)
    require_dtype("ids", ids, INTEGERS)
    require_whole_item_strides("ids", ids)
    if backward:
        dout = layouts["dout"]
        require_dtype("dout", dout, CPU_FLOATS)
        require_shape("dout", dout, (*ids.shape, table.shape[1]), "(*ids.shape, N)")
        require_contiguous_rows("dout", dout)
        require_same_dtype(layouts, ("dout", "table"))
    if "workspace" in layouts:
        require_workspace(layouts["workspace"])
    writes = ("grads", "workspace") if backward else ("out",)
    overlaps = Overlaps.of(layouts, writes)
    problem = EmbeddingProblem(layouts, starts_of(description), backward, accumulate, overlaps)
    name, output = problem.output
    if name in layouts:
        require_output(name, layouts[name], *output)
    return problem


def run_embedding(device: Device, problem: EmbeddingProblem, operands: Operands) -> Array:
    """Run the lookup, or the gradient of the table."""
    make = _backward_plan if problem.backward else _forward_plan
    (result,) = run(device, make(problem, device.arch.number), operands).values()
    return result


def _require_for_kernels(problem: EmbeddingProblem) -> None:
    require_item_alignment(problem.layouts, problem.starts)
    require_kernel_dtype("table", problem.layouts["table"].dtype)


def _merged(axes: int, **layouts: Layout) -> tuple[tuple[int, ...], dict[str, Strides]]:
    """Merge the first axes of arrays, with strides in items."""
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
    table, ids = problem.layouts["table"], problem.layouts["ids"]
    name, output = problem.output
    if 0 in output.shape:
        return Plan((), ((name, output),))
    vec = problem.vec
    loads = -(-table.shape[1] // vec)
    config = configs.forward_config(arch, table.shape[1] * table.dtype.itemsize)
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
    params = walk_params(shape, strides, table.shape[1], units)
    specialisation = configs.specialise_forward(config, table.dtype.name, vec, ids.dtype.name)
    stride = table.strides[0] // table.dtype.itemsize
    step = Step.of(specialisation, ctas, table.shape[0], stride, params[()])
    plan = Plan((step,), ((name, output),))
    return plan.for_arrays(problem.layouts)


@lru_cache(maxsize=4096)
def _backward_plan(problem: EmbeddingProblem, arch: int) -> Plan:
    del arch  # one row serves all
    _require_for_kernels(problem)
    layouts, (rows, length) = problem.layouts, problem.target.shape
    ids, dtype, accumulate = layouts["ids"], problem.target.dtype.name, problem.accumulate
    tokens = math.prod(ids.shape)
    outputs = (problem.output,)
    zero_first = () if accumulate else ("grads",)
    if tokens == 0 or rows * length == 0:
        return Plan((), outputs, zero_first=zero_first, zero_new=accumulate)
    if max(tokens, rows) > _MOST:
        raise error(
            ValueError,
            f"{tokens} ids of a table of {rows} rows",
            f"the backward on a GPU numbers up to {_MOST} of either",
            "split the ids over several calls with accumulate=True",
        )
    vec = problem.vec
    read = configs.THREADS * configs.SORT_READS
    padded = -(-tokens // read) * read
    chunks = -(-tokens // configs.CHUNK)
    blocks = -(-length // (32 * vec))
    warps = configs.THREADS // 32
    stride = problem.target.strides[0] // problem.target.dtype.itemsize
    ids_shape, ids_strides = _merged(len(ids.shape), ids=ids)
    dout_shape, dout_strides = _merged(len(ids.shape), dout=layouts["dout"])
    of_ids = walk_params(ids_shape, ids_strides, 1, 1)
    of_dout = walk_params(dout_shape, dout_strides, length, blocks)
    sums, combine = (
        configs.specialise_sums(spec, dtype, vec, accumulate)
        for spec in (configs.SUM, configs.COMBINE)
    )
    ctas = -(-chunks * blocks // warps)
    steps = (
        Step.of(
            configs.specialise_ids(ids.dtype.name), -(-padded // configs.THREADS),
            rows, padded, of_ids[()],
        ),
        Step.of(
            configs.specialise_sort(), rows // configs.THREADS + 1, padded, renamed={"ids": "flat"}
        ),
        Step.of(sums, ctas, rows, stride, of_dout[()], renamed=_GRADS),
        Step.of(combine, ctas, tokens, rows, stride, length, blocks, renamed=_GRADS),
    )  # fmt: skip
    sizes = {"flat": padded, "order": tokens, "rows": tokens, "partials": 2 * chunks * length}
    plan = Plan(steps, outputs, lay_out_scratch(sizes), zero_first, zero_new=accumulate)
    return plan.for_arrays(layouts)
