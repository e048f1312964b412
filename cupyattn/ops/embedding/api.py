"""Embedding, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.ops.embedding import reference
from cupyattn.ops.embedding.kernels import (
    EmbeddingArrays,
    EmbeddingBackwardArrays,
    EmbeddingProblem,
    embedding_backward_problem,
    embedding_problem,
    run_embedding,
)
from cupyattn.runtime.arrays import Array, adopt
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import factor, fixes_of_results, require_bool
from cupyattn.runtime.differentiable import differentiable, recorder
from cupyattn.runtime.errors import error
from cupyattn.runtime.outputs import require_grads, round_into

_FIXES = fixes_of_results("out")


@differentiable(lambda: embedding_backward, gradients=("dtable",))
def embedding(
    table: Array, ids: Array, /, *, scale: float | None = None, out: Array | None = None
) -> Array:
    r"""Select rows of a table by their numbers: ``table[ids]``.

    Parameters
    ----------
    table : array (V, N)
        float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside of the
        emulator. The last axis is contiguous.
    ids : array of any shape and strides, int32 or int64
        Numbers of rows, 0 to V - 1.
    scale : float, optional
        Return scale times the rows in float32 (float64 for float64): the first state of a model
        whose residual stream is float32, and Gemma's factor.
    out : array (..., N), optional
        Where to write the result; must not overlap table or ids.

    Returns
    -------
    array (..., N), dtype of table, or float32 with a scale

    Raises
    ------
    TypeError
        For an argument that is not an array, NumPy and CuPy arrays mixed, or a dtype that is not
        allowed.
    ValueError
        For a table that does not have two axes, or an out of another shape or dtype. On the CPU and
        with ``backend(checks=True)`` also for an id that is not a row; otherwise its row is NaN,
        and nothing outside the table is read. Kernels also refuse ids, or results without their
        last axis, that leave more than four axes after merging.
    RuntimeError
        As `attention`.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> table = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    >>> cupyattn.embedding(table, np.array([1, 0, 1]))
    array([[3., 4.],
           [1., 2.],
           [3., 4.]], dtype=float32)
    """
    if scale is not None:
        scale = factor("scale", scale)
        if recorder.get() is not None:
            raise error(
                NotImplementedError,
                "vjp of embedding with a scale",
                "embedding_backward has the gradient of the rows as they are",
                "scale the result of embedding without scale",
            )
    operands = adopt(EmbeddingArrays(table, ids, out), _FIXES)
    problem = embedding_problem(operands, scale)
    device = device_of(operands)
    if device is None:
        return _looked_up(operands.arrays, problem)
    result = run_embedding(device, problem, operands).out
    assert result is not None
    return result


def _looked_up(arrays: EmbeddingArrays[Any], problem: EmbeddingProblem) -> Array:
    exact = reference.embedding(arrays.table, arrays.ids)
    if problem.scale is not None:
        exact = problem.scale * exact
    return round_into(arrays.out, exact, problem.output.dtype)


def embedding_backward(
    dout: Array,
    table: Array,
    ids: Array,
    /,
    *,
    grads: Array | None = None,
    accumulate: bool = False,
    workspace: Array | None = None,
) -> Array:
    r"""Gradient of `embedding` with respect to its table: a row is the sum of dout at its ids.

    Parameters
    ----------
    dout : array (..., N), dtype of table
        Gradient with respect to the result. The last axis is contiguous.
    table : array (V, N)
        As given to `embedding`. Only its shape and dtype matter.
    ids : array of integers
        As given to `embedding`.
    grads : array (V, N), optional
        Where to write the gradient; must not overlap the others.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding. Rows
        without an id are then not touched, which is much less work if few rows have one.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes;
        otherwise it is allocated. T ids need T * N / 4 + 12 * T bytes and up to N / 4 * 32 + 5,000
        more; the error for a smaller one reports the size.

    Returns
    -------
    array (V, N), dtype of table

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `embedding`; for a dout or grads of another shape or dtype; for accumulate without grads;
        and, for kernels, for a workspace that is too small.

    Notes
    -----
    Bitwise the same from run to run: ids are sorted, and each row's tokens are added in their
    order, in float32, in chunks of 32 sorted tokens. The tokens of a very frequent row, such as
    padding, are added by many threads. An id that is not a row is left out, unless it is an error.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> table, dout = np.zeros((3, 1), np.float32), np.array([[1.0], [2.0], [4.0]], np.float32)
    >>> cupyattn.embedding_backward(dout, table, np.array([2, 0, 2]))
    array([[2.],
           [0.],
           [5.]], dtype=float32)
    """
    require_bool("accumulate", accumulate)
    require_grads(grads, accumulate)
    operands = adopt(EmbeddingBackwardArrays(dout, table, ids, grads, workspace))
    problem = embedding_backward_problem(operands, bool(accumulate))
    device = device_of(operands)
    if device is None:
        return _summed(operands.arrays, problem)
    result = run_embedding(device, problem, operands).dtable
    assert result is not None
    return result


def _summed(arrays: EmbeddingBackwardArrays[Any], problem: EmbeddingProblem) -> Array:
    exact = reference.embedding_backward(arrays.dout, len(arrays.table), arrays.ids)
    if problem.accumulate:
        assert arrays.dtable is not None
        exact = exact + arrays.dtable.astype(np.float64)
    return round_into(arrays.dtable, exact, problem.output.dtype)
