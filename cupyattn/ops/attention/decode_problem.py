"""What a call of paged attention asks for, and its checks: of layouts once, of values each time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cupyattn.ops.attention.decode_layouts import (
    require_caches,
    require_option_arrays,
    require_scale_shapes,
    require_scales,
)
from cupyattn.ops.attention.kernels.decode import INTEGER_BITS
from cupyattn.ops.attention.options import (
    checked_softcap,
    checked_softmax_scale,
    checked_window,
)
from cupyattn.ops.attention.packed import (
    checked_longest,
    counts_of,
    require_bounds,
    unpacked,
)
from cupyattn.ops.attention.problem import FORWARD_RESULTS, LSE_DTYPE, AttentionProblem
from cupyattn.ops.attention.results import Outputs, forward_outputs, result_layouts
from cupyattn.ops.attention.values import require_alibi, require_sinks
from cupyattn.runtime.arrays import Array, Layout, contiguous
from cupyattn.runtime.by_name import Description, Operands, Overlaps, layouts_of, starts_of
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    INTEGERS,
    require_arrays,
    require_contiguous_rows,
    require_dtype,
    require_output,
    require_rank,
    require_same_dtype,
    require_shape,
    require_whole_item_strides,
    require_workspace,
)
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Output
from cupyattn.runtime.value_checks import checks_values, on_host

MAX_QUERIES = 16
"""Query tokens of a sequence that are decoded although a forward has the keys, paged or dense.

Its tiles have at least four times as many rows.
"""


@dataclass(frozen=True, eq=False)
class DecodeProblem:
    """A valid call of paged attention."""

    attention: AttentionProblem
    """With the caches as k and v, seqlens_k as seqused_k, and what the table can hold as Sk.

    Packed queries stand there as (B, max_seqlen_q, H, D) with a batch stride of 0.
    """
    layouts: dict[str, Layout]
    """By the names of the public function."""
    num_blocks: int
    block_size: int

    @property
    def packed(self) -> bool:
        """Whether q is (total, H, D)."""
        return "cu_seqlens_q" in self.layouts

    def outputs(self, return_lse: bool) -> Outputs:
        """Return what a call writes."""
        q, attention = self.layouts["q"], self.attention
        if not self.packed:
            return forward_outputs(attention, return_lse)
        out = ("out", Output(q.shape, q.dtype))
        lse = ("lse", Output((attention.heads, q.shape[0]), LSE_DTYPE))
        return (out, lse) if return_lse else (out,)

    def result_layouts(self, outputs: Outputs) -> dict[str, Layout]:
        """Return how the results lie, packed ones as those of `attention` do."""
        if not self.packed:
            return result_layouts(self.attention, outputs)
        attention = self.attention
        return {
            name: unpacked(
                name,
                self.layouts.get(name) or contiguous(output.shape, output.dtype),
                attention.batch,
                attention.sq,
            )
            for name, output in outputs
        }

    @property
    def max_blocks(self) -> int:
        """Blocks that a row of the table has room for."""
        return self.layouts["block_table"].shape[1]


def decode_problem(operands: Operands, options: tuple[Any, ...]) -> DecodeProblem:
    """Check a call; its description, unless that was checked before, and its values.

    `options` are causal, softmax_scale, window_size, softcap and max_seqlen_q.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As the public function documents.
    """
    window = options[2]
    sides = (*map(type, window),) if isinstance(window, tuple) else None
    try:
        problem = _checked(operands.description, sides, *options)
    except TypeError:  # perhaps of an option without a hash, of which its check says more
        problem = _checked.__wrapped__(operands.description, sides, *options)
    if checks_values(operands):
        _check_values(problem, operands.arrays)
    problem.attention.overlaps.check(operands)
    return problem


@lru_cache(maxsize=4096, typed=True)
def _checked(
    description: Description,
    _: Any,
    causal: Any,
    softmax_scale: Any,
    window_size: Any,
    softcap: Any,
    max_seqlen_q: Any,
) -> DecodeProblem:
    layouts = layouts_of(description)
    require_arrays(layouts, ("q", "k_cache", "v_cache", "block_table", "seqlens_k"))
    q, k, v = layouts["q"], layouts["k_cache"], layouts["v_cache"]
    table, seqlens = layouts["block_table"], layouts["seqlens_k"]
    packed = "cu_seqlens_q" in layouts
    require_dtype("q", q, CPU_FLOATS)
    require_rank("q", q, "total H D" if packed else "B Sq H D")
    for name in ("k_cache", "v_cache"):
        require_dtype(name, layouts[name], (*CPU_FLOATS, *INTEGER_BITS))
        require_rank(name, layouts[name], "num_blocks block_size G D")
    for name in ("q", "k_cache", "v_cache"):
        require_contiguous_rows(name, layouts[name])
    require_same_dtype(layouts, ("k_cache", "v_cache"))
    if k.dtype.name not in INTEGER_BITS:
        require_same_dtype(layouts, ("q", "k_cache", "v_cache"))
    require_scales(layouts)
    *_, heads, head_dim = q.shape
    num_blocks, block_size, kv_heads, _ = k.shape
    batch, sq = _queries(layouts, max_seqlen_q)
    require_caches(q, k, v)
    of = "cu_seqlens_q" if packed else "q"
    require_scale_shapes(layouts)
    require_dtype("block_table", table, ("int32",))
    require_rank("block_table", table, "B max_blocks")
    require_shape("block_table", table, (batch, table.shape[1]), f"(B, max_blocks) with {of}'s B")
    require_dtype("seqlens_k", seqlens, INTEGERS)
    require_shape("seqlens_k", seqlens, (batch,), f"(B,) with {of}'s B")
    for name in ("block_table", "seqlens_k", "k_scales", "v_scales"):
        if name in layouts:
            require_whole_item_strides(name, layouts[name])
    scale = checked_softmax_scale(softmax_scale, head_dim)
    renamed = {"k_cache": "k", "v_cache": "v", "seqlens_k": "seqused_k"}
    placed = {
        name: unpacked(name, layout, batch, sq)
        if packed and name in ("q", *FORWARD_RESULTS)
        else layout
        for name, layout in layouts.items()
    }
    attention = AttentionProblem(
        batch=batch,
        sq=sq,
        sk=table.shape[1] * block_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=q.dtype,
        layouts={renamed.get(name, name): layout for name, layout in placed.items()},
        starts={renamed.get(name, name): start for name, start in starts_of(description).items()},
        softmax_scale=scale,
        q_offset=None,
        window=checked_window(window_size, causal),
        softcap=checked_softcap(softcap, scale),
        dropout_p=0.0,
        interleaved=False,
        functions={},
        implementation="flash",
        overlaps=Overlaps.of(layouts, (*FORWARD_RESULTS, "workspace")),
    )
    require_option_arrays(attention)
    lse_shape = (heads, q.shape[0]) if packed else attention.lse_shape
    results = {"out": (q.shape, attention.dtype), "lse": (lse_shape, attention.lse_dtype)}
    for name in FORWARD_RESULTS:
        if name in layouts:
            require_output(name, layouts[name], *results[name])
    if "workspace" in layouts:
        require_workspace(layouts["workspace"])
    return DecodeProblem(attention, layouts, num_blocks, block_size)


def _queries(layouts: dict[str, Layout], max_seqlen_q: Any) -> tuple[int, int]:
    """Return B, and the most query tokens of a sequence."""
    if "cu_seqlens_q" not in layouts:
        batch, sq, *_ = layouts["q"].shape
        return batch, sq
    batch = require_bounds("cu_seqlens_q", layouts["cu_seqlens_q"])
    return batch, checked_longest("max_seqlen_q", max_seqlen_q, layouts["q"])


def _check_values(problem: DecodeProblem, arrays: dict[str, Array]) -> None:
    """Check lengths and the block ids that will be read, sinks and slopes."""
    queries = _query_counts(problem, arrays)
    lengths = on_host(arrays["seqlens_k"]).astype(np.int64)
    capacity, size = problem.attention.sk, problem.block_size
    if ((lengths < 0) | (lengths > capacity)).any():
        at = int(np.argmax((lengths < 0) | (lengths > capacity)))
        raise error(
            ValueError,
            f"seqlens_k[{at}] = {lengths[at]}",
            f"each is at least 0 and at most {capacity}: {problem.max_blocks} blocks of {size}",
            "pass a block_table with more columns, or shorter sequences",
        )
    table = on_host(arrays["block_table"])
    left = problem.attention.window[0]
    first = np.zeros_like(lengths)
    if left is not None:  # of the first query's window
        first = np.clip(lengths - queries - left, 0, lengths) // size
    columns = np.arange(table.shape[1])
    read = (columns >= first[:, None]) & (columns < -(-lengths // size)[:, None])
    read &= (queries > 0)[:, None]
    wrong = read & ((table < 0) | (table >= problem.num_blocks))
    if wrong.any():
        b, column = (int(axis[0]) for axis in np.nonzero(wrong))
        raise error(
            ValueError,
            f"block_table[{b}, {column}] = {table[b, column]}",
            f"the caches have blocks 0 to {problem.num_blocks - 1}, and sequence {b} of "
            f"{lengths[b]} tokens reads this entry",
            "pass the ids of blocks that hold the tokens; -1 may stand only where a window hides "
            "all of a block",
        )
    if "sinks" in arrays:
        require_sinks(arrays["sinks"])
    if "alibi_slopes" in arrays:
        slopes = arrays["alibi_slopes"]
        require_alibi(problem.attention, slopes, lengths - queries, queries, lengths)


def _query_counts(problem: DecodeProblem, arrays: dict[str, Array]) -> np.ndarray:
    """Return the query tokens of each sequence."""
    attention = problem.attention
    if not problem.packed:
        return np.full(attention.batch, attention.sq, np.int64)
    total = problem.layouts["q"].shape[0]
    return counts_of("cu_seqlens_q", arrays["cu_seqlens_q"], total, attention.sq, whole=False)
