"""The checks of attention over packed sequences, forward and backward."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cupyattn.ops.attention.block_mask import require_fitting_blocks
from cupyattn.ops.attention.checks import checked_problem, described_problem, require_gradients
from cupyattn.ops.attention.options import AttentionOptions
from cupyattn.ops.attention.problem import (
    BACKWARD_RESULTS,
    FORWARD_RESULTS,
    SHOWN_AS,
    PackedProblem,
    checked_longest,
    counts_of,
    require_bounds,
    unpacked,
)
from cupyattn.ops.attention.values import check_values
from cupyattn.runtime.arrays import Array, Layout
from cupyattn.runtime.by_name import Description, Operands, Overlaps, layouts_of, starts_of
from cupyattn.runtime.checks import (
    require_arrays,
    require_contiguous_rows,
    require_output,
    require_rank,
    require_shape,
)

_OF_QUERIES = frozenset({"q", "out", "lse", "dout", "dlse", "dq"})
_OF_KEYS = frozenset({"k", "v", "dk", "dv"})
_SUMS = frozenset({"lse", "dlse"})


def forward_problem(
    operands: Operands, options: tuple[Any, ...], *, longest: tuple[Any, Any]
) -> PackedProblem:
    """Check a forward call; its description, unless that was checked before, and its values.

    `options` are those of `AttentionOptions`, in that order; `longest` are max_seqlen_q and
    max_seqlen_k.

    Raises
    ------
    TypeError, ValueError
        As the public functions document.
    """
    problem: PackedProblem = checked_problem(
        _cached_forward_problem, operands, (*options, *longest), _check_values
    )
    return problem


@lru_cache(maxsize=4096, typed=True)
def _cached_forward_problem(description: Description, _: Any, *options: Any) -> PackedProblem:
    problem = _problem(description, options, FORWARD_RESULTS)
    results = {
        "out": (problem.out_shape, problem.dtype),
        "lse": (problem.lse_shape, problem.lse_dtype),
    }
    for name in FORWARD_RESULTS:
        if name in problem.packed:
            require_output(name, problem.packed[name], *results[name])
    return problem


def backward_problem(
    operands: Operands, options: tuple[Any, ...], *, longest: tuple[Any, Any]
) -> PackedProblem:
    """Check a backward call, as `forward_problem` does a forward one.

    Raises
    ------
    TypeError, ValueError
        As the public functions document.
    """
    problem: PackedProblem = checked_problem(
        _cached_backward_problem, operands, (*options, *longest), _check_values
    )
    return problem


@lru_cache(maxsize=4096, typed=True)
def _cached_backward_problem(description: Description, _: Any, *options: Any) -> PackedProblem:
    require_arrays(layouts_of(description), ("dout", "q", "k", "v", "out", "lse"))
    problem = _problem(description, options, BACKWARD_RESULTS)
    require_gradients(problem, problem.packed, "(total_q, H, Dv)", "(H, total_q)")
    return problem


def _problem(
    description: Description, options: tuple[Any, ...], results: tuple[str, ...]
) -> PackedProblem:
    *of_scores, max_seqlen_q, max_seqlen_k = options
    layouts = layouts_of(description)
    require_arrays(layouts, ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"))
    _require_packed(layouts)
    batch = require_bounds("cu_seqlens_q", layouts["cu_seqlens_q"])
    require_bounds("cu_seqlens_k", layouts["cu_seqlens_k"], "k and v")
    require_shape("cu_seqlens_k", layouts["cu_seqlens_k"], (batch + 1,), "(B + 1,) as cu_seqlens_q")
    queries = checked_longest("max_seqlen_q", max_seqlen_q, layouts["q"])
    keys = checked_longest("max_seqlen_k", max_seqlen_k, layouts["k"])
    of_a_batch = []
    starts = starts_of(description)
    for name, layout in layouts.items():
        if name in _OF_QUERIES or name in _OF_KEYS:
            layout = unpacked(name, layout, batch, queries if name in _OF_QUERIES else keys)
        of_a_batch.append((name, *layout, starts[name]))
    problem = described_problem(tuple(of_a_batch), AttentionOptions(*of_scores), results)
    overlaps = Overlaps.of(layouts, (*results, "workspace"), problem.overlaps.shown_as)
    packed = PackedProblem(**{**vars(problem), "overlaps": overlaps}, packed=layouts)
    require_fitting_blocks(packed)
    return packed


def _require_packed(layouts: dict[str, Layout]) -> None:
    q, k, v = layouts["q"], layouts["k"], layouts["v"]
    for name, axes in (("q", "total_q H D"), ("k", "total_k G D"), ("v", "total_k G Dv")):
        require_rank(name, layouts[name], axes)
        require_contiguous_rows(name, layouts[name])
    total, kv_heads, _ = k.shape
    require_shape("k", k, (total, kv_heads, q.shape[2]), "(total_k, G, D) with q's D")
    require_shape("v", v, (total, kv_heads, v.shape[2]), "(total_k, G, Dv) with k's total_k and G")
    for name in sorted((_OF_QUERIES | _OF_KEYS) & layouts.keys()):
        rows, heads = ("total_q", "H") if name in _OF_QUERIES else ("total_k", "G")
        shown = SHOWN_AS.get(name, name)
        require_rank(shown, layouts[name], f"H {rows}" if name in _SUMS else f"{rows} {heads} D")


def _check_values(problem: PackedProblem, arrays: dict[str, Array]) -> None:
    queries = counts_of("cu_seqlens_q", arrays["cu_seqlens_q"], problem.total_q, problem.sq)
    keys = counts_of("cu_seqlens_k", arrays["cu_seqlens_k"], problem.total_k, problem.sk, "k and v")
    check_values(problem, arrays, (queries, keys))
