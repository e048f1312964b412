"""The C struct that attention kernels are passed, filled from a checked problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from cupyattn.ops.attention.kernels.options import FlashOptions
from cupyattn.ops.attention.options import MAX_OFFSET, DropoutSeed
from cupyattn.ops.attention.problem import (
    MAX_LENGTH,
    AttentionArrays,
    AttentionBackwardArrays,
    AttentionProblem,
)
from cupyattn.ops.attention.structs import (
    ATTENTION_PARAMS,
    BACKWARD_PARAMS,
    PACKED_BATCH,
    PAGED_PARAMS,
    QUANTIZED_KEYS_PARAMS,
    SCORE_PARAMS,
    SPLIT_PARAMS,
    UNBOUNDED,
    VARLEN_BACKWARD_PARAMS,
    VARLEN_PARAMS,
    filled,
)
from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.checks import contiguous_copy, require_item_alignment
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Plan, Planner, Step
from cupyattn.runtime.records import Record, given_of
from cupyattn.runtime.spec import Specialisation

_WITH_ATTENTION: dict[np.dtype, tuple[str, ...]] = {
    ATTENTION_PARAMS: (),
    SPLIT_PARAMS: ("attention",),
    VARLEN_PARAMS: ("attention",),
    PAGED_PARAMS: ("attention",),
    BACKWARD_PARAMS: ("attention",),
    VARLEN_BACKWARD_PARAMS: ("backward", "attention"),
}
"""The C structs that hold AttentionParams, and where."""


AttentionPlanner = Planner[Any]
"""A planner of one call: its record may have fields for arrays of the user's expressions."""


def step_of(
    kernel: Specialisation, ctas: int, slots: Record[int], *values: Any, **places: int | None
) -> Step:
    """Make a step whose kernel takes the arrays that its parameters name.

    They are fields of `slots`, but for those that `places` has; others are absent.
    """
    names = [pointer.name for pointer in kernel.spec.pointers]
    arrays = [places[name] if name in places else getattr(slots, name, None) for name in names]
    return Step.of(kernel, ctas, arrays, *values)


def attention_params(problem: AttentionProblem, laid: AttentionArrays[Layout]) -> Any:
    """Fill the C struct AttentionParams, all but the seed; `laid` has the results too."""
    assert laid.out is not None
    positions, offset, least, most = _query_positions(problem)
    left, right = (UNBOUNDED if keys is None else min(keys, UNBOUNDED) for keys in problem.window)
    return filled(
        ATTENTION_PARAMS,
        q=row_strides(laid.q),
        k=row_strides(laid.k),
        v=row_strides(laid.v),
        out=row_strides(laid.out),
        lse=sum_strides(laid.lse),
        q_offsets=batch_integers(positions),
        seqused_k=batch_integers(laid.seqused_k),
        q_offset=offset,
        offset_least=least,
        offset_most=most,
        left=left,
        right=right,
        heads=problem.heads,
        group=problem.heads // max(problem.kv_heads, 1),
        sq=problem.sq,
        sk=problem.sk,
        scale_log2=problem.softmax_scale * math.log2(math.e),
        softmax_scale=problem.softmax_scale,
        scores=_score_params(problem),
        together=1,
        kv_together=1,
        batches=1,
    )


def forward_params(problem: AttentionProblem, laid: AttentionArrays[Layout]) -> Any:
    """Fill the C struct of the forward kernels: AttentionParams, or VarlenParams."""
    attention = attention_params(problem, laid)
    if not problem.packed:
        return attention
    return filled(VARLEN_PARAMS, attention=attention, packed=_packed_batch(problem))


def quantized_keys_params(problem: AttentionProblem) -> Any:
    """Fill the C struct QuantizedKeysParams."""
    layouts: Any = problem.layouts
    *batch, head, _ = item_strides(layouts.k_centre)
    return filled(
        QUANTIZED_KEYS_PARAMS,
        scales=item_strides(layouts.k_scales),
        centre_batch=batch[0] if batch else 0,
        centre_head=head,
    )


def gradient_params(problem: AttentionProblem, backward: Any) -> Any:
    """Return the C struct of the backward kernels: BackwardParams, or VarlenBackwardParams."""
    if not problem.packed:
        return backward
    return filled(VARLEN_BACKWARD_PARAMS, backward=backward, packed=_packed_batch(problem))


def _packed_batch(problem: AttentionProblem) -> Any:
    layouts = problem.layouts
    return filled(
        PACKED_BATCH,
        cu_seqlens_q=batch_integers(layouts.cu_seqlens_q),
        cu_seqlens_k=batch_integers(layouts.cu_seqlens_k),
        batch=problem.batch,
        total_q=problem.total_q,
        total_k=problem.total_k,
        ends_with_keys=problem.q_offset is None and layouts.q_offset is None,
    )


def _query_positions(problem: AttentionProblem) -> tuple[Layout | None, int, int, int]:
    """Return an array of positions, what is added to its items, and the range these are kept in."""
    layouts, offset = problem.layouts, problem.q_offset
    if layouts.q_offset is not None:
        return layouts.q_offset, 0, -MAX_OFFSET, MAX_OFFSET
    if problem.ends_with_keys_in_use:
        return layouts.seqused_k, -problem.sq, 0, problem.sk
    return None, problem.sk - problem.sq if offset is None else offset, -MAX_OFFSET, MAX_OFFSET


def _score_params(problem: AttentionProblem) -> Any:
    layouts, options = problem.layouts, problem.options
    slopes, sinks, softcap = layouts.alibi_slopes, layouts.sinks, options.softcap
    *batch, head = item_strides(slopes) if slopes else (0,)
    keep_from = round(65536 * options.dropout_p)
    return filled(
        SCORE_PARAMS,
        bias=score_strides(layouts.bias, problem.scores_shape),
        mask=score_strides(layouts.mask, problem.scores_shape),
        slopes_batch=batch[0] if batch else 0,
        slopes_head=head,
        sinks_stride=item_strides(sinks)[0] if sinks else 0,
        keep_from=keep_from,
        # Of 65,536 a kernel may see only the lower 16 bits, and keep everything.
        keep_scale=1 / (1 - options.dropout_p) if keep_from < 65536 else 0,
        softcap_in=2 * math.log2(math.e) * problem.softmax_scale / softcap if softcap else 0,
        softcap=softcap or 0,
    )


def seeded(plan: Plan, seed: DropoutSeed) -> Plan:
    """Return a plan with a seed for dropout in the structs of its kernels."""

    def change(attention: Any) -> None:
        scores = attention["scores"]
        scores["seed"] = seed.seed
        scores["first_batch"], scores["first_query"] = seed.batch, seed.query
        scores["first_counter"] = seed.key // 8

    return _changed(plan, change)


def interleaved(plan: Plan, kv_together: int, batches: int) -> Plan:
    """Interleave the tiles of `kv_together` key-value heads, and of their query heads, in grids.

    With 0 not even the heads of one group are interleaved. Like heads of `batches` batch elements
    are neighbours.
    """
    if kv_together == 0:
        return plan

    def change(attention: Any) -> None:
        attention["together"] = kv_together * attention["group"]
        attention["kv_together"] = kv_together
        attention["batches"] = batches

    return _changed(plan, change)


def _changed(plan: Plan, change: Callable[[Any], None]) -> Plan:
    """Return a plan after a change to each C struct AttentionParams, and to those within others."""
    return plan._replace(
        steps=tuple(
            step._replace(values=tuple(_changed_params(value, change) for value in step.values))
            for step in plan.steps
        )
    )


def _changed_params(params: Any, change: Callable[[Any], None]) -> Any:
    if params.dtype not in _WITH_ATTENTION:
        return params
    # Its own copy() takes NumPy 36 us, field by field.
    part = changed = np.frombuffer(bytearray(params.tobytes()), params.dtype)[0]
    for name in _WITH_ATTENTION[params.dtype]:
        part = part[name]
    change(part)
    return changed


def item_strides(layout: Layout) -> tuple[int, ...]:
    """Return the strides of an array in items."""
    return tuple(stride // layout.dtype.itemsize for stride in layout.strides)


def score_strides(layout: Layout | None, scores_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in items, of an array broadcast to (B, H, Sq, Sk); 0 if it is absent.

    Examples
    --------
    >>> score_strides(Layout((3, 1, 5), (20, 20, 4), np.dtype(np.float32)), (2, 3, 7, 5))
    (0, 5, 0, 1)
    """
    if layout is None:
        return (0,) * len(scores_shape)
    pairs = zip(layout.shape, item_strides(layout), strict=True)
    strides = tuple(0 if extent == 1 else stride for extent, stride in pairs)
    return (0,) * (len(scores_shape) - len(strides)) + strides


def row_strides(layout: Layout) -> tuple[int, ...]:
    """Return the strides of (batch, seq, head), in items, of an array (batch, seq, head, dim)."""
    return item_strides(layout)[:3]


def sum_strides(layout: Layout | None) -> tuple[int, ...]:
    """Return the strides of (batch, seq, head), in items, of lse (batch, head, seq), if given."""
    if layout is None:
        return 0, 0, 0
    batch, head, seq = item_strides(layout)
    return batch, seq, head


def batch_integers(layout: Layout | None) -> tuple[int, int]:
    """Return the C struct BatchIntegers of an array, if it is given."""
    return (item_strides(layout)[0], int(layout.dtype.itemsize == 8)) if layout else (0, 0)


_QUAD_ROW_BYTES = 2**24  # between rows of a bias or mask read four keys at a time: 32-bit offsets
_TILE_BYTES = 2**32  # from one end of a tile to the other: 32-bit offsets


def require_lengths(problem: AttentionProblem) -> None:
    """Raise ValueError for lengths that the kernels' positions do not reach."""
    if max(problem.sq, problem.sk) > MAX_LENGTH:
        raise error(
            ValueError,
            f"Sq = {problem.sq}, Sk = {problem.sk} on a GPU",
            f"lengths are at most {MAX_LENGTH}",
            "split the sequence",
        )


def require_near_rows(problem: AttentionProblem, names: Iterable[str], tile_rows: int) -> None:
    """Raise ValueError for arrays whose rows of one tile lie further apart than offsets reach."""
    for name in names:
        layout: Layout = getattr(problem.layouts, name)
        stride = layout.strides[1]
        if layout.shape[1] > 1 and abs(stride) * tile_rows >= _TILE_BYTES:
            raise error(
                ValueError,
                f"{name} has {stride} bytes from one row to the next",
                f"kernels on tensor cores take less than {_TILE_BYTES // tile_rows} here",
                contiguous_copy(name),
            )


def rows_start_at(starts: Record[int], laid: Record[Layout], sizes: Mapping[str, int]) -> bool:
    """Tell whether every row of each array starts at a multiple of so many bytes."""
    return all(
        place % size == 0
        for name, size in sizes.items()
        for place in (getattr(starts, name) or 0, *getattr(laid, name).strides[:-1])
    )


def whole_vectors(
    items: int, problem: AttentionProblem, laid: Record[Layout], names: Iterable[str]
) -> int:
    """Return `items` if rows of the problem's dtype can be loaded that many at a time, or 1."""
    sizes = dict.fromkeys(names, items * problem.dtype.itemsize)
    whole = problem.head_dim % items == 0 and problem.head_dim_v % items == 0
    return items if whole and rows_start_at(problem.starts, laid, sizes) else 1


def score_options(problem: AttentionProblem) -> FlashOptions:
    """Return which options of the scores a problem has; bias and mask are read item by item."""
    layouts = problem.layouts
    return FlashOptions(
        bias=_dtype_of(layouts.bias),
        mask=layouts.mask is not None,
        slopes=_dtype_of(layouts.alibi_slopes),
        softcap=problem.options.softcap is not None,
        sinks=_dtype_of(layouts.sinks),
        dropout=problem.options.dropout_p > 0,
        modified=problem.modifiers,
    )


def _dtype_of(layout: Layout | None) -> str:
    return "void" if layout is None else layout.dtype.name


def flash_options(problem: AttentionProblem, together: int) -> FlashOptions:
    """Name the options for a kernel whose threads hold `together` neighbouring keys of a row."""
    layouts, starts = problem.layouts, problem.starts
    return score_options(problem)._replace(
        modified=problem.block_modifiers,
        bias_vec=_items_at_once(problem, layouts.bias, starts.bias, together),
        mask_vec=_items_at_once(problem, layouts.mask, starts.mask, together),
    )


def _items_at_once(
    problem: AttentionProblem, layout: Layout | None, start: int | None, together: int
) -> int:
    """Return how many neighbouring keys of a bias or mask can be read at once: 4, 2 or 1."""
    if layout is None or start is None:
        return 1
    *others, key = score_strides(layout, problem.scores_shape)
    near = 0 <= others[-1] * layout.dtype.itemsize < _QUAD_ROW_BYTES
    for items in (4, 2):
        rows_aligned = all(stride % items == 0 for stride in others)
        start_aligned = start % (items * layout.dtype.itemsize) == 0
        fits = items == 2 or (together == 4 and near)
        if key == 1 and rows_aligned and start_aligned and fits:
            return items
    return 1


def require_aligned_items(problem: AttentionProblem) -> None:
    """Raise ValueError if an array starts within an item."""
    layouts, starts = given_of(problem.layouts), given_of(problem.starts)
    require_item_alignment(layouts, starts, problem.layouts.SHOWN_AS)


def backward_params(
    problem: AttentionProblem,
    laid: AttentionBackwardArrays[Layout],
    *,
    accumulate: bool,
    dbias: Layout | None = None,
    zeroed: int = 0,
    rows_padded: int = 0,
) -> Any:
    """Fill the C struct BackwardParams; `dbias` is where kernels write the bias's gradient."""
    gradients: Any = laid
    sinks = laid.dsinks
    return filled(
        BACKWARD_PARAMS,
        attention=attention_params(problem, laid),
        dout=row_strides(gradients.dout),
        dlse=sum_strides(laid.dlse),
        dq=row_strides(gradients.dq),
        dk=row_strides(gradients.dk),
        dv=row_strides(gradients.dv),
        dbias=score_strides(dbias, problem.scores_shape),
        dsinks_stride=item_strides(sinks)[0] if sinks else 0,
        zeroed=zeroed,
        batch=1 if problem.packed else problem.batch,  # of scratch
        rows_padded=rows_padded,
        accumulate=accumulate,
        scale=problem.softmax_scale,
    )
