"""What a call of gather asks for, and its checks: of layouts once, of values each time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cupyattn.ops.cache.storage import Caches, first_where, require_caches
from cupyattn.runtime.arrays import Array, Layout
from cupyattn.runtime.by_name import Description, Operands, Overlaps, layouts_of, starts_of
from cupyattn.runtime.checks import (
    INTEGERS,
    require_arrays,
    require_dtype,
    require_output,
    require_rank,
    require_shape,
    require_whole_item_strides,
)
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Output
from cupyattn.runtime.value_checks import checks_values, on_host

RESULTS = ("k", "v")
SHOWN_AS = {name: f"out's {name}" for name in RESULTS}


@dataclass(frozen=True, eq=False)
class GatherProblem:
    """A valid call of gather."""

    caches: Caches
    layouts: dict[str, Layout]
    """By the names of the public function; its results are k and v."""
    starts: dict[str, int]
    output: Output
    """k, and v: (B, max_seqlen_k, G, D)."""
    overlaps: Overlaps

    @property
    def capacity(self) -> int:
        """Tokens that a row of the table has room for."""
        return self.layouts["block_table"].shape[1] * self.caches.block_size


def gather_problem(
    operands: Operands, max_seqlen_k: int | None, dtype: np.dtype | None
) -> GatherProblem:
    """Check a call; its description, unless that was checked before, and its values.

    Raises
    ------
    TypeError, ValueError
        As `gather` documents.
    """
    problem = _checked(operands.description, max_seqlen_k, dtype)
    problem.overlaps.check(operands)
    if checks_values(operands):
        _check_values(problem, operands.arrays)
    return problem


@lru_cache(maxsize=4096)
def _checked(
    description: Description, max_seqlen_k: int | None, dtype: np.dtype | None
) -> GatherProblem:
    layouts = layouts_of(description)
    caches = require_caches(layouts)
    require_arrays(layouts, ("block_table", "seqlens_k"))
    table, seqlens = layouts["block_table"], layouts["seqlens_k"]
    require_dtype("block_table", table, ("int32",))
    require_rank("block_table", table, "B max_blocks")
    require_dtype("seqlens_k", seqlens, INTEGERS)
    require_shape("seqlens_k", seqlens, table.shape[:1], "(B,) with block_table's B")
    for name in ("block_table", "seqlens_k"):
        require_whole_item_strides(name, layouts[name])
    if max_seqlen_k is not None and max_seqlen_k < 0:
        raise error(
            ValueError,
            f"max_seqlen_k = {max_seqlen_k}",
            "it is 0 or more: the tokens that the results have room for",
            "pass the longest length, or leave it out",
        )
    length = table.shape[1] * caches.block_size if max_seqlen_k is None else max_seqlen_k
    shape = (table.shape[0], length, caches.kv_heads, caches.head_dim)
    output = Output(shape, _result_dtype(caches, layouts, dtype))
    for name in RESULTS:
        if name in layouts:
            require_output(SHOWN_AS[name], layouts[name], *output)
    overlaps = Overlaps.of(layouts, RESULTS, SHOWN_AS)
    return GatherProblem(caches, layouts, starts_of(description), output, overlaps)


def _result_dtype(caches: Caches, layouts: dict[str, Layout], dtype: np.dtype | None) -> np.dtype:
    if caches.quantised:
        given = layouts["k"].dtype if "k" in layouts else None
        return dtype or given or np.dtype(np.float16)
    if dtype not in (None, caches.dtype):
        raise error(
            ValueError,
            f"dtype = {dtype} with caches of {caches.dtype.name}",
            "results have the caches' dtype, but for quantised ones",
            "leave it out, and convert the results",
        )
    return caches.dtype


def _check_values(problem: GatherProblem, arrays: dict[str, Array]) -> None:
    """Check lengths and the block ids that are read."""
    lengths = on_host(arrays["seqlens_k"]).astype(np.int64)
    most = min(problem.capacity, problem.output.shape[1])
    at = first_where((lengths < 0) | (lengths > most))
    if at is not None:
        raise error(
            ValueError,
            f"seqlens_k[{at[0]}] = {lengths[at]}",
            f"each is at least 0 and at most {most}: block_table has room for {problem.capacity} "
            f"tokens, the results for {problem.output.shape[1]}",
            "pass a block_table with more columns or a larger max_seqlen_k, or shorter sequences",
        )
    table, num_blocks = on_host(arrays["block_table"]), problem.caches.num_blocks
    columns = np.arange(table.shape[1])
    read = columns < -(-lengths // problem.caches.block_size)[:, None]
    at = first_where(read & ((table < -1) | (table >= num_blocks)))
    if at is not None:
        raise error(
            ValueError,
            f"block_table[{at[0]}, {at[1]}] = {table[at]}",
            f"the caches have blocks 0 to {num_blocks - 1}, -1 stands for one that is gone, and "
            f"sequence {at[0]} of {lengths[at[0]]} tokens reads this entry",
            "pass the ids of blocks that hold the tokens",
        )
