"""The C struct that attention kernels are passed, filled from a checked problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from cupyattn.ops.attention.kernels.options import FlashOptions
from cupyattn.ops.attention.options import MAX_OFFSET, DropoutSeed
from cupyattn.ops.attention.problem import (
    LSE_DTYPE,
    MAX_LENGTH,
    AttentionArrays,
    AttentionBackwardArrays,
    AttentionProblem,
)
from cupyattn.ops.attention.structs import (
    ATTENTION_PARAMS,
    BACKWARD_PARAMS,
    PAGED_PARAMS,
    SPLIT_PARAMS,
    UNBOUNDED,
    VARLEN_BACKWARD_PARAMS,
    VARLEN_PARAMS,
)
from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.checks import require_item_alignment
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Plan, Planner, Step
from cupyattn.runtime.records import Record, given_of
from cupyattn.runtime.spec import Specialisation
from cupyattn.runtime.structs import new_struct

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
    params = new_struct(ATTENTION_PARAMS)
    for name, layout in (("q", laid.q), ("k", laid.k), ("v", laid.v)):
        params[name] = row_strides(layout.strides, layout.dtype.itemsize)
    assert laid.out is not None
    params["out"] = row_strides(laid.out.strides, problem.dtype.itemsize)
    if laid.lse is not None:
        params["lse"] = sum_strides(laid.lse.strides)
    if laid.seqused_k is not None:
        params["seqused_k"] = batch_integers(laid.seqused_k)
    _fill_offsets(params, problem)
    params["heads"] = problem.heads
    params["group"] = problem.heads // max(problem.kv_heads, 1)
    params["sq"], params["sk"] = problem.sq, problem.sk
    params["together"] = params["kv_together"] = params["batches"] = 1
    for side, keys in zip(("left", "right"), problem.window, strict=True):
        params[side] = UNBOUNDED if keys is None else min(keys, UNBOUNDED)
    params["scale_log2"] = problem.softmax_scale * math.log2(math.e)
    params["softmax_scale"] = problem.softmax_scale
    _fill_scores(params["scores"], problem)
    return params[()]


def forward_params(problem: AttentionProblem, laid: AttentionArrays[Layout]) -> Any:
    """Fill the C struct of the forward kernels: AttentionParams, or VarlenParams."""
    attention = attention_params(problem, laid)
    if not problem.packed:
        return attention
    params = new_struct(VARLEN_PARAMS)
    params["attention"] = attention
    _fill_packed(params["packed"], problem)
    return params[()]


def gradient_params(problem: AttentionProblem, backward: Any) -> Any:
    """Return the C struct of the backward kernels: BackwardParams, or VarlenBackwardParams."""
    if not problem.packed:
        return backward
    params = new_struct(VARLEN_BACKWARD_PARAMS)
    params["backward"] = backward
    _fill_packed(params["packed"], problem)
    return params[()]


def _fill_packed(packed: Any, problem: AttentionProblem) -> None:
    """Fill the C struct PackedBatch."""
    layouts = problem.layouts
    assert layouts.cu_seqlens_q is not None
    assert layouts.cu_seqlens_k is not None
    packed["cu_seqlens_q"] = batch_integers(layouts.cu_seqlens_q)
    packed["cu_seqlens_k"] = batch_integers(layouts.cu_seqlens_k)
    packed["batch"] = problem.batch
    packed["total_q"], packed["total_k"] = problem.total_q, problem.total_k
    packed["ends_with_keys"] = problem.q_offset is None and layouts.q_offset is None


def _fill_offsets(params: Any, problem: AttentionProblem) -> None:
    """Fill in the positions of queries: a number, and an array's value for each sequence."""
    params["offset_least"], params["offset_most"] = -MAX_OFFSET, MAX_OFFSET
    if problem.layouts.q_offset is not None:
        params["q_offsets"] = batch_integers(problem.layouts.q_offset)
    elif problem.ends_with_keys_in_use:
        params["q_offsets"] = params["seqused_k"]
        params["offset_least"], params["offset_most"] = 0, problem.sk
        params["q_offset"] = -problem.sq
    elif problem.q_offset is None:
        params["q_offset"] = problem.sk - problem.sq
    else:
        params["q_offset"] = problem.q_offset


def _fill_scores(scores: Any, problem: AttentionProblem) -> None:
    """Fill the C struct ScoreParams."""
    layouts, options = problem.layouts, problem.options
    for name, layout in (("bias", layouts.bias), ("mask", layouts.mask)):
        if layout is not None:
            scores[name] = score_strides(layout, problem.scores_shape)
    if (slopes := layouts.alibi_slopes) is not None:
        *batch, head = (stride // slopes.dtype.itemsize for stride in slopes.strides)
        scores["slopes_batch"], scores["slopes_head"] = (*batch, head) if batch else (0, head)
    if (sinks := layouts.sinks) is not None:
        scores["sinks_stride"] = sinks.strides[0] // sinks.dtype.itemsize
    if options.softcap is not None:
        scores["softcap_in"] = 2 * math.log2(math.e) * problem.softmax_scale / options.softcap
        scores["softcap"] = options.softcap
    keep_from = round(65536 * options.dropout_p)
    scores["keep_from"] = keep_from
    # Of 65,536 a kernel may see only the lower 16 bits, and keep everything.
    scores["keep_scale"] = 1 / (1 - options.dropout_p) if keep_from < 65536 else 0


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


def score_strides(layout: Layout, scores_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in items, of an array broadcast to (B, H, Sq, Sk).

    Examples
    --------
    >>> score_strides(Layout((3, 1, 5), (20, 20, 4), np.dtype(np.float32)), (2, 3, 7, 5))
    (0, 5, 0, 1)
    """
    missing = len(scores_shape) - len(layout.shape)
    strides = [
        0 if extent == 1 else stride // layout.dtype.itemsize
        for extent, stride in zip(layout.shape, layout.strides, strict=True)
    ]
    return (0,) * missing + tuple(strides)


def row_strides(strides: tuple[int, ...], itemsize: int) -> tuple[int, int, int]:
    """Bytes of (batch, seq, head, dim) to the struct's items of (batch, seq, head)."""
    batch, seq, head, _ = strides
    return batch // itemsize, seq // itemsize, head // itemsize


def sum_strides(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Bytes of lse (batch, head, seq), or of its gradient, to items of (batch, seq, head)."""
    batch, head, seq = (stride // LSE_DTYPE.itemsize for stride in strides)
    return batch, seq, head


def batch_integers(layout: Layout) -> tuple[int, int]:
    """Return what the C struct BatchIntegers says of an array."""
    return layout.strides[0] // layout.dtype.itemsize, int(layout.dtype.itemsize == 8)


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
                f"copy it with ascontiguousarray({name})",
            )


def whole_vectors(
    items: int, problem: AttentionProblem, laid: Record[Layout], names: Iterable[str]
) -> int:
    """Return `items` if every row starts at a multiple of that many items' bytes, else 1.

    `names` are arrays of the problem's dtype, which lie as `laid` says.
    """
    vector_bytes = items * problem.dtype.itemsize
    places = (
        place
        for name in names
        for place in (getattr(problem.starts, name) or 0, *getattr(laid, name).strides[:-1])
    )
    whole = problem.head_dim % items == 0 and problem.head_dim_v % items == 0
    return items if whole and all(place % vector_bytes == 0 for place in places) else 1


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
    """Fill the C struct BackwardParams.

    Parameters
    ----------
    problem : AttentionProblem
        A backward call's.
    laid : AttentionBackwardArrays
        Its layouts, with those of the results.
    accumulate : bool
        Whether results are added to.
    dbias : Layout, optional
        Of what the kernels write the bias's gradient to.
    zeroed, rows_padded : int
        See the struct.
    """
    params = new_struct(BACKWARD_PARAMS)
    params["attention"] = attention_params(problem, laid)
    for name in ("dout", "dq", "dk", "dv"):
        params[name] = row_strides(getattr(laid, name).strides, problem.dtype.itemsize)
    if laid.dlse is not None:
        params["dlse"] = sum_strides(laid.dlse.strides)
    if dbias is not None:
        params["dbias"] = score_strides(dbias, problem.scores_shape)
    if laid.dsinks is not None:
        params["dsinks_stride"] = laid.dsinks.strides[0] // laid.dsinks.dtype.itemsize
    params["zeroed"], params["rows_padded"] = zeroed, rows_padded
    params["batch"] = 1 if problem.packed else problem.batch  # of scratch
    params["accumulate"] = accumulate
    params["scale"] = problem.softmax_scale
    return params[()]
