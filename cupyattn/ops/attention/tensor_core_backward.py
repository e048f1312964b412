"""The plan of the tensor-core backward: one pass with atomic additions, or two without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from cupyattn.ops.attention.block_mask import BlockLists, block_lists
from cupyattn.ops.attention.dbias import SummedDbias, four_axes, shared_out, sum_step
from cupyattn.ops.attention.kernels.modifiers import BLOCK_STATES
from cupyattn.ops.attention.kernels.options import PLAIN_BACKWARD, BackwardOptions
from cupyattn.ops.attention.kernels.tensor_core import (
    backward_dkdv,
    backward_dq,
    backward_summed_dbias,
    passes,
)
from cupyattn.ops.attention.modifiers import modifiers_of, strides_of
from cupyattn.ops.attention.params import (
    Starts,
    backward_params,
    gradient_params,
    require_near_rows,
    score_options,
    score_strides,
    whole_vectors,
)
from cupyattn.ops.attention.problem import (
    AttentionProblem,
    PackedProblem,
    gradient_outputs,
    result_layouts,
)
from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.by_name import Plan, Step, lay_out_scratch, spanning
from cupyattn.runtime.errors import error
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.tables import round_up

_MAX_ROWS = 2**32 - 1  # scratch rows are counted in 32 bits (scratch_row in backward_params.cuh)
_QUAD = 4  # neighbouring keys that are read together
_MOST_TILE_ROWS = 64  # the most rows of q, k, v or dout that one tile has
_VECTOR_ARRAYS = ("q", "k", "v", "out", "dout")


class _Options(NamedTuple):
    """Of the kernels of a call; of that of dbias where a bias broadcasts."""

    dkdv: BackwardOptions
    dq: BackwardOptions
    summed_dbias: BackwardOptions = PLAIN_BACKWARD


def backward_plan(
    problem: AttentionProblem,
    start_of: Starts,
    arch: int,
    *,
    deterministic: bool,
    accumulate: bool,
) -> Plan:
    """Plan the backward."""
    require_near_rows(problem, ("q", "k", "v", "dout"), _MOST_TILE_ROWS)
    outputs = gradient_outputs(problem)
    results = result_layouts(problem, outputs)
    rows = _countable_rows(problem)
    dbias = results.get("dbias")
    score_vec = _score_items(problem, _score_arrays(problem, start_of, dbias))
    summed = _summed_dbias(problem, arch, dbias, score_vec, accumulate)

    to_zero = {} if deterministic else {"dq_acc": rows * round_up(problem.head_dim, 8)}
    options = _options(problem, start_of, dbias, score_vec, summed, accumulate)
    lists = _lists(problem, arch, options, deterministic)
    kept = {
        "stats": 2 * rows,
        "sizes": 2 * _ctas_of_delta(problem, rows),
        "scales": 2 * problem.batch * problem.heads,
        "cta_scales": max(_gradient_ctas(problem, arch, options, deterministic)),
        **{n: x for each in lists for n, x in each.scratch.items()},
        **({"scratch": math.prod(summed.target.shape)} if summed and summed.scratch else {}),
    }
    scratch = lay_out_scratch({**kept, **to_zero})
    zeroed = spanning("zeroed", scratch[len(kept) :])

    params = backward_params(
        problem,
        results,
        accumulate=accumulate,
        dbias=dbias if summed is None else summed.target,
        zeroed=sum(piece.items for piece in zeroed),
        rows_padded=_scratch_rows(problem)[1],
    )
    rows_of = [(start_of[name], problem.layouts[name].strides) for name in _VECTOR_ARRAYS]
    rows_of += [(start_of.get(name, 0), results[name].strides) for name in ("dq", "dk", "dv")]
    vec = whole_vectors(vector_items(problem.dtype.name), problem, rows_of)
    sinks = results["dsinks"].dtype.name if "dsinks" in results else None
    steps = [
        *_row_steps(problem, vec, rows, params, sinks),
        *_gradient_steps(problem, arch, vec, options, lists, rows, params),
    ]
    if dbias is not None and summed is not None:
        steps += _dbias_steps(problem, arch, vec, options, dbias, summed, params, accumulate)
    # Tiles that no query sees are skipped, and with them their part of dbias.
    skipped = dbias is not None and summed is None and not accumulate
    return Plan(
        tuple(steps),
        outputs,
        (*scratch, *zeroed),
        zero_first=("dbias",) if skipped else (),
        zero_new=accumulate,
    )


def _scratch_rows(problem: AttentionProblem) -> tuple[int, int]:
    """Return the batch elements of scratch memory, and the rows that each has of a head.

    Whole CTAs of the first kernel. The rows of packed sequences stand in one element, those of each
    from a multiple of ROW_PAD on (scratch_begin in varlen_backward_params.cuh).
    """
    if isinstance(problem, PackedProblem):
        return 1, (problem.total_q // passes.ROW_PAD + problem.batch) * passes.ROW_PAD
    return problem.batch, round_up(max(problem.sq, 1), passes.ROW_PAD)


def _ctas_of_delta(problem: AttentionProblem, rows: int) -> int:
    """Return the CTAs of the first kernel: for the rows of all heads, then for those of v."""
    if isinstance(problem, PackedProblem):
        keys = (problem.total_k // passes.ROW_PAD + problem.batch) * passes.ROW_PAD
    else:
        keys = problem.batch * round_up(problem.sk, passes.ROW_PAD)
    return -(-(rows + problem.kv_heads * keys) // passes.delta_rows(problem.head_dim_v))


def _countable_rows(problem: AttentionProblem) -> int:
    """Return the rows of all heads in scratch memory, or raise if kernels do not count so far."""
    batch, rows_padded = _scratch_rows(problem)
    rows = batch * problem.heads * rows_padded
    if rows > _MAX_ROWS:
        raise error(
            ValueError,
            f"B = {problem.batch}, H = {problem.heads}, Sq = {problem.sq}",
            f"implementation='flash' takes B * H sequences of up to {_MAX_ROWS} rows together, "
            f"each rounded up to {passes.ROW_PAD}",
            "split the batch over several calls",
        )
    return rows


def _row_steps(
    problem: AttentionProblem, vec: int, rows: int, params: Any, sinks: str | None
) -> list[Step]:
    """Return the launches for the row statistics, for dsinks, and for the range of ds.

    The last one scales the statistics, so dsinks takes them before.
    """
    packed = isinstance(problem, PackedProblem)
    gradient = gradient_params(problem, params)
    delta = passes.delta(problem.head_dim_v, vec, packed)
    steps = [Step.of(delta, _ctas_of_delta(problem, rows), gradient)]
    if sinks is not None:
        steps.append(Step.of(passes.dsinks(sinks), problem.heads, params))
    scales = passes.scales(problem.head_dim_v, packed)
    return [*steps, Step.of(scales, problem.batch * problem.kv_heads, gradient)]


def _gradient_steps(
    problem: AttentionProblem,
    arch: int,
    vec: int,
    options: _Options,
    lists: tuple[BlockLists, ...],
    rows: int,
    params: Any,
) -> list[Step]:
    """Return the launches for dk, dv and dq."""
    dims = problem.head_dim, problem.head_dim_v
    one_pass = len(lists) == 1
    packed = isinstance(problem, PackedProblem)
    strides = problem.block_modifier_strides
    key_ctas, *row_ctas = _gradient_ctas(problem, arch, options, not one_pass)
    gradient = gradient_params(problem, params)
    steps = [
        *lists[0].steps,
        Step.of(
            backward_dkdv.dkdv(arch, *dims, vec, one_pass, options.dkdv, packed),
            key_ctas,
            gradient,
            *strides,
            renamed=lists[0].renamed,
        ),
    ]
    if one_pass:
        convert_ctas = -(-rows // passes.ROW_PAD)
        convert = passes.convert(problem.head_dim, vec, packed)
        return [*steps, Step.of(convert, convert_ctas, gradient)]
    dq = backward_dq.dq(arch, *dims, vec, options.dq, packed)
    last = Step.of(dq, *row_ctas, gradient, *strides, renamed=lists[1].renamed)
    return [*steps, *lists[1].steps, last]


def _gradient_ctas(
    problem: AttentionProblem, arch: int, options: _Options, deterministic: bool
) -> list[int]:
    """Return the CTAs of the kernel of dk and dv, and of that of dq if there is one."""
    dims = problem.head_dim, problem.head_dim_v
    keys = backward_dkdv.dkdv_row(arch, *dims, not deterministic).tile_keys
    ctas = [problem.kv_heads * problem.key_tiles(keys)]
    if deterministic:
        rows = backward_dq.dq_row(arch, *dims, options.dq).tile_rows
        ctas.append(problem.heads * problem.query_tiles(rows))
    return ctas


def _lists(
    problem: AttentionProblem, arch: int, options: _Options, deterministic: bool
) -> tuple[BlockLists, ...]:
    """Plan a block mask's lists for the kernel of dk and dv, and for that of dq if there is one."""
    dims = problem.head_dim, problem.head_dim_v
    row = backward_dkdv.dkdv_row(arch, *dims, not deterministic)
    lists = block_lists(
        problem, "key_lists", rows=row.tile_q, keys=row.tile_keys, part=row.warp_keys, of_keys=True
    )
    if not deterministic:
        return (lists,)
    dq = backward_dq.dq_row(arch, *dims, options.dq)
    return lists, block_lists(
        problem, "row_lists", rows=dq.tile_rows, keys=dq.tile_k, part=dq.warp_rows
    )


def _options(
    problem: AttentionProblem,
    start_of: Starts,
    dbias: Layout | None,
    score_vec: int,
    summed: SummedDbias | None,
    accumulate: bool,
) -> _Options:
    """Name the options of a call's kernels; those that write dbias take `score_vec` at a time."""
    scores = score_options(problem)
    dq = BackwardOptions(
        bias=scores.bias,
        mask=scores.mask,
        score_vec=_score_items(problem, _score_arrays(problem, start_of, None)),
        slopes=scores.slopes,
        softcap=scores.softcap,
        dropout=scores.dropout,
        modified=problem.block_modifiers,
    )
    if dbias is None:
        return _Options(dq, dq)
    target = dbias if summed is None else summed.target
    writing = dq._replace(score_vec=score_vec, dbias=target.dtype.name)
    if summed is not None:
        modifiers = modifiers_of(problem.functions, problem.layouts, blocks=BLOCK_STATES)
        return _Options(dq, dq, writing._replace(modified=modifiers))
    return _Options(writing._replace(dbias_accumulate=accumulate), dq)


def _score_arrays(
    problem: AttentionProblem, start_of: Starts, dbias: Layout | None
) -> list[tuple[Layout, int]]:
    """Return what has an item for each score: the layout, and what its start misses."""
    names = ("bias", "mask")
    given: dict[str, Layout] = {n: problem.layouts[n] for n in names if n in problem.layouts}
    if dbias is not None:
        given["dbias"] = dbias
    return [(layout, start_of.get(name, 0)) for name, layout in given.items()]


def _score_items(problem: AttentionProblem, arrays: Sequence[tuple[Layout, int]]) -> int:
    """Return how many neighbouring keys of these arrays can be read or written at once: 4 or 1.

    Each array comes with what it misses of a vector's alignment.
    """
    if not arrays or problem.dropout_p or problem.sk % _QUAD:  # Philox calls serve pairs of keys
        return 1
    for layout, start in arrays:
        *others, key = score_strides(layout, problem.scores_shape)
        rows_aligned = all(stride % _QUAD == 0 for stride in others)
        if key != 1 or not rows_aligned or start % (_QUAD * layout.dtype.itemsize):
            return 1
    return _QUAD


def _summed_dbias(
    problem: AttentionProblem,
    arch: int,
    dbias: Layout | None,
    score_vec: int,
    accumulate: bool,
) -> SummedDbias | None:
    """Share out the gradient of a bias that broadcasts; None for any other.

    That of every score has one term: the kernel of dk and dv writes it.
    """
    if dbias is None or four_axes(dbias.shape) == problem.scores_shape:
        return None
    dims = problem.head_dim, problem.head_dim_v
    row = backward_summed_dbias.summed_dbias_row(arch, *dims, score_vec)
    return shared_out(problem, dbias, row, accumulate)


def _dbias_steps(
    problem: AttentionProblem,
    arch: int,
    vec: int,
    options: _Options,
    dbias: Layout,
    summed: SummedDbias,
    params: Any,
    accumulate: bool,
) -> list[Step]:
    """Return the launches for the gradient of a bias that broadcasts."""
    kernel = backward_summed_dbias.summed_dbias(
        arch,
        *(problem.head_dim, problem.head_dim_v),
        vec,
        options.summed_dbias,
        isinstance(problem, PackedProblem),
    )
    strides = strides_of(options.summed_dbias.modified, problem.layouts)
    values = gradient_params(problem, params), *summed.shares, *strides
    renamed = {"dbias": "scratch"} if summed.scratch else {}
    steps = [Step.of(kernel, summed.ctas, *values, renamed=renamed)]
    if summed.scratch:
        steps.append(sum_step(problem, dbias, summed.target, accumulate))
    return steps
