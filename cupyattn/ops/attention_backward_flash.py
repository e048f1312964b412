"""The launches of the tensor-core backward: one pass with atomic additions, or two without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import Layout
from cupyattn.errors import error
from cupyattn.kernels.configs import attention_backward as flash
from cupyattn.kernels.configs import attention_backward_passes as passes
from cupyattn.kernels.configs.dtypes import vector_items
from cupyattn.kernels.configs.tables import round_up
from cupyattn.kernels.structs import DBIAS_PARAMS
from cupyattn.ops.attention_backward_params import backward_params
from cupyattn.ops.attention_backward_steps import Plan, Step, lay_out_scratch, spanning
from cupyattn.ops.attention_layouts import score_options, whole_vectors
from cupyattn.ops.attention_params import score_strides
from cupyattn.ops.attention_problem import AttentionProblem

_FLOAT32 = np.dtype(np.float32)
_MAX_ROWS = 2**32 - 1  # scratch rows are counted in 32 bits (scratch_row in backward_params.cuh)
_QUAD = 4  # neighbouring keys that are read together
_VECTOR_ARRAYS = ("q", "k", "v", "out", "dout")


class _Dbias(NamedTuple):
    """What the kernel of dk and dv writes the bias's gradient to, and how."""

    target: Layout
    scratch: bool
    """Whether that is scratch, which another kernel sums up to dbias; else it is dbias."""
    adds: bool
    """Whether several CTAs add to one item, atomically."""


class _Options(NamedTuple):
    """Of the kernels of a call, and by what name that of dk and dv takes dbias."""

    dkdv: flash.BackwardOptions
    dq: flash.BackwardOptions
    renamed: tuple[tuple[str, str], ...] = ()


def require_countable_rows(problem: AttentionProblem) -> None:
    """Raise if a call has more rows in scratch memory than its kernels count."""
    if problem.batch * problem.heads * _rows_padded(problem) > _MAX_ROWS:
        raise error(
            ValueError,
            f"B = {problem.batch}, H = {problem.heads}, Sq = {problem.sq}",
            f"implementation='flash' takes B * H sequences of up to {_MAX_ROWS} rows together, "
            f"each rounded up to {passes.ROW_PAD}",
            "split the batch over several calls",
        )


def _rows_padded(problem: AttentionProblem) -> int:
    return round_up(max(problem.sq, 1), passes.ROW_PAD)  # whole CTAs of the first kernel


def flash_plan(
    problem: AttentionProblem,
    results: dict[str, Layout],
    start_of: dict[str, int],
    *,
    deterministic: bool,
    accumulate: bool,
) -> Plan:
    """Choose the kernels of a call and fill in their parameters."""
    rows_padded = _rows_padded(problem)
    rows = problem.batch * problem.heads * rows_padded
    dbias = _dbias(problem, results, deterministic) if "dbias" in results else None

    to_zero = {} if deterministic else {"dq_acc": rows * round_up(problem.head_dim, 8)}
    if dbias is not None and dbias.scratch:
        to_zero["scratch"] = math.prod(dbias.target.shape)
    stats, *others = lay_out_scratch({"stats": 2 * rows, **to_zero})
    zeroed = spanning("zeroed", tuple(others))

    params = backward_params(
        problem,
        results,
        accumulate=accumulate,
        dbias=None if dbias is None else dbias.target,
        zeroed=sum(piece.items for piece in zeroed),
        rows_padded=rows_padded,
    )
    rows_of = [(start_of[name], problem.layouts[name].strides) for name in _VECTOR_ARRAYS]
    rows_of += [(start_of.get(name, 0), results[name].strides) for name in ("dq", "dk", "dv")]
    vec = whole_vectors(vector_items(problem.dtype.name), problem, rows_of)
    options = _options(problem, start_of, dbias, accumulate)
    steps = _gradient_steps(problem, vec, options, deterministic, rows, params)
    if dbias is not None and dbias.scratch:
        steps.append(_dbias_step(problem, results["dbias"], dbias, accumulate))
    if "dsinks" in results:
        dsinks = passes.dsinks(results["dsinks"].dtype.name)
        steps.append(Step(dsinks, problem.heads, params))
    # Tiles that no query sees are skipped, and with them their part of dbias.
    skipped = dbias is not None and not dbias.scratch and not accumulate
    return Plan(tuple(steps), (stats, *others, *zeroed), ("dbias",) if skipped else ())


def _gradient_steps(
    problem: AttentionProblem,
    vec: int,
    options: _Options,
    deterministic: bool,
    rows: int,
    params: Any,
) -> list[Step]:
    """Return the launches for the row statistics, dk, dv and dq."""
    dims = problem.head_dim, problem.head_dim_v
    one_pass = not deterministic
    key_tiles = -(-problem.sk // flash.tile_keys(*dims, one_pass))
    steps = [
        Step(
            passes.delta(problem.head_dim_v, vec),
            -(-rows // passes.delta_rows(problem.head_dim_v)),
            params,
        ),
        Step(
            flash.dkdv(*dims, vec, one_pass, options.dkdv),
            problem.batch * problem.kv_heads * key_tiles,
            params,
            options.renamed,
        ),
    ]
    if one_pass:
        convert_ctas = -(-rows // passes.ROW_PAD)
        return [*steps, Step(passes.convert(problem.head_dim, vec), convert_ctas, params)]
    row_tiles = -(-problem.sq // flash.tile_rows(*dims, options.dq))
    dq_ctas = problem.batch * problem.heads * row_tiles
    return [*steps, Step(flash.dq(*dims, vec, options.dq), dq_ctas, params)]


def _options(
    problem: AttentionProblem, start_of: dict[str, int], dbias: _Dbias | None, accumulate: bool
) -> _Options:
    """Name the options of a call's kernels."""
    scores = score_options(problem)
    inputs = [(problem.layouts[n], start_of[n]) for n in ("bias", "mask") if n in problem.layouts]
    dq = flash.BackwardOptions(
        bias=scores.bias,
        mask=scores.mask,
        score_vec=_score_items(problem, inputs),
        slopes=scores.slopes,
        softcap=scores.softcap,
        dropout=scores.dropout,
    )
    if dbias is None:
        return _Options(dq, dq)
    start = 0 if dbias.scratch else start_of.get("dbias", 0)
    terms = [] if dbias.adds else [(dbias.target, start)]
    dkdv = dq._replace(
        score_vec=_score_items(problem, inputs + terms),
        dbias=dbias.target.dtype.name,
        dbias_add=dbias.adds,
        dbias_accumulate=accumulate and not dbias.scratch,
    )
    return _Options(dkdv, dq, (("dbias", "scratch"),) if dbias.scratch else ())


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


def _dbias(problem: AttentionProblem, results: dict[str, Layout], deterministic: bool) -> _Dbias:
    """Choose where the bias's gradient is gathered: by the axes that the bias broadcasts along."""
    shape = _four_axes(results["dbias"].shape)
    if shape == problem.scores_shape:
        return _Dbias(results["dbias"], scratch=False, adds=False)
    if deterministic:  # every score's, to be summed in a fixed order
        return _Dbias(_contiguous(problem.scores_shape), scratch=True, adds=False)
    return _Dbias(_contiguous(shape), scratch=True, adds=True)


def _dbias_step(
    problem: AttentionProblem, dbias: Layout, gathered: _Dbias, accumulate: bool
) -> Step:
    """Return the launch that sums the scratch to dbias."""
    shape = _four_axes(dbias.shape)
    params = np.zeros((), DBIAS_PARAMS)
    params["shape"] = shape
    params["repeats"] = [
        1 if items == extent else extent
        for items, extent in zip(shape, gathered.target.shape, strict=True)
    ]
    params["source"] = score_strides(gathered.target, problem.scores_shape)
    params["target"] = score_strides(dbias, problem.scores_shape)
    params["accumulate"] = accumulate
    ctas = passes.dbias_ctas(math.prod(shape), bool(params["repeats"][3] > 1))
    return Step(passes.dbias(dbias.dtype.name), ctas, params[()])


def _four_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * (4 - len(shape)) + shape


def _contiguous(shape: tuple[int, ...]) -> Layout:
    strides = [_FLOAT32.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return Layout(shape, tuple(strides), _FLOAT32)
