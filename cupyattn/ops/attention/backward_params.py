"""The C struct that attention's backward kernels are passed, filled from a checked problem."""

from __future__ import annotations

from typing import Any

from cupyattn.ops.attention.packed import PackedProblem
from cupyattn.ops.attention.params import attention_params, row_strides, score_strides, sum_strides
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.ops.attention.structs import BACKWARD_PARAMS
from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.structs import new_struct


def backward_params(
    problem: AttentionProblem,
    results: dict[str, Layout],
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
    results : dict
        Layouts of dq, dk, dv, and of dsinks where there is one.
    accumulate : bool
        Whether results are added to.
    dbias : Layout, optional
        Of what the kernels write the bias's gradient to.
    zeroed, rows_padded : int
        See the struct.
    """
    layouts = problem.layouts
    params = new_struct(BACKWARD_PARAMS)
    params["attention"] = attention_params(problem, layouts)
    itemsize = problem.dtype.itemsize
    params["dout"] = row_strides(layouts["dout"].strides, itemsize)
    for name in ("dq", "dk", "dv"):
        params[name] = row_strides(results[name].strides, itemsize)
    if "dlse" in layouts:
        params["dlse"] = sum_strides(layouts["dlse"].strides)
    if dbias is not None:
        params["dbias"] = score_strides(dbias, problem.scores_shape)
    if "dsinks" in results:
        dsinks = results["dsinks"]
        params["dsinks_stride"] = dsinks.strides[0] // dsinks.dtype.itemsize
    params["zeroed"], params["rows_padded"] = zeroed, rows_padded
    params["batch"] = 1 if isinstance(problem, PackedProblem) else problem.batch  # of scratch
    params["accumulate"] = accumulate
    params["scale"] = problem.softmax_scale
    return params[()]
