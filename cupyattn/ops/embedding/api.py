"""Embedding, forward and backward."""

from __future__ import annotations

import numpy as np

from cupyattn.ops.embedding import reference
from cupyattn.ops.embedding.plan import embedding_problem, run_embedding
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.by_name import adopt
from cupyattn.runtime.checks import fixes_of_results, require_bool
from cupyattn.runtime.outputs import require_grads
from cupyattn.runtime.rounding import round_into

_FIXES = fixes_of_results("out")


def embedding(table: Array, ids: Array, /, *, out: Array | None = None) -> Array:
    r"""Rows of a table by their numbers: ``table[ids]``.

    Parameters
    ----------
    table : array (V, N)
        float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside of the
        emulator. The last axis is contiguous.
    ids : array of any shape and strides, int32 or int64
        Numbers of rows, 0 to V - 1.
    out : array (..., N), optional
        Where to write the result; must not overlap table or ids.

    Returns
    -------
    array (..., N), dtype of table

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, or a dtype that is not allowed.
    ValueError
        For a table that has not two axes, or an out that does not fit. For an id that is no row, on
        the CPU and with ``backend(checks=True)``; otherwise its row is NaN, and nothing beyond the
        table is read. For kernels also if more than four axes of ids, or of the result's before its
        last, lie unevenly in memory.
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
    operands = adopt({"table": table, "ids": ids, "out": out}, _FIXES)
    problem = embedding_problem(operands)
    device = device_of(operands)
    if device is not None:
        return run_embedding(device, problem, operands)
    arrays = operands.arrays
    exact = reference.embedding(arrays["table"], arrays["ids"])
    return round_into(arrays.get("out"), exact, problem.output[1].dtype)


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
        Add to the contents of grads instead of replacing them, before the one rounding. Rows that
        no id names are not touched then: with few ids of a large table that is much less work.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes;
        otherwise it is allocated. For T ids it takes T * N / 4 + 12 * T bytes and up to N / 4 * 32
        + 5,000 more; an error says how many.

    Returns
    -------
    array (V, N), dtype of table

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `embedding`; for a dout or grads that do not fit; for accumulate without grads; and of
        kernels for a workspace that is too small.

    Notes
    -----
    Bitwise the same from run to run: ids are sorted, and each row's tokens are added in their
    order, in float32, in chunks of 32 sorted tokens. A row that comes very often, as a padding
    token does, is shared by many threads. An id that is no row is left out, where it is no error.

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
    operands = adopt(
        {"dout": dout, "table": table, "ids": ids, "grads": grads, "workspace": workspace}
    )
    problem = embedding_problem(operands, backward=True, accumulate=bool(accumulate))
    device = device_of(operands)
    if device is not None:
        return run_embedding(device, problem, operands)
    arrays = operands.arrays
    exact = reference.embedding_backward(arrays["dout"], len(arrays["table"]), arrays["ids"])
    if accumulate:
        exact = exact + arrays["grads"].astype(np.float64)
    return round_into(arrays.get("grads"), exact, problem.output[1].dtype)
