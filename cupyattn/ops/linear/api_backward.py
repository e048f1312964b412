"""Gradients of a product with a weight."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.ops.linear import backward as ops
from cupyattn.ops.linear import reference
from cupyattn.ops.linear.checks import backward_problem
from cupyattn.ops.linear.problem import ARRAY_FIXES, SHOWN_AS, LinearProblem
from cupyattn.ops.linear.quantized_weight import QuantizedWeight
from cupyattn.ops.linear.reference import LinearGrads
from cupyattn.ops.linear.weights import weight_arrays
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.by_name import Operands, adopt
from cupyattn.runtime.checks import require_bool
from cupyattn.runtime.outputs import named_grads
from cupyattn.runtime.rounding import round_into


def linear_backward(
    dout: Array,
    x: Array,
    w: Array | QuantizedWeight,
    b: Array | None = None,
    /,
    *,
    activation: str | None = None,
    preactivation: Array | None = None,
    grads: LinearGrads | None = None,
    accumulate: bool = False,
    workspace: Array | None = None,
) -> LinearGrads:
    r"""Gradients of `linear` with respect to x, w and b.

    Parameters
    ----------
    dout : array (..., N), dtype of x
        Gradient with respect to the result; it is that with respect to a residual as well.
    x, w, b : array
        As given to `linear`. Without b there is no db, and of a `QuantizedWeight` no dw.
    activation : optional
        As given to `linear`.
    preactivation : array (..., N), dtype of x, optional
        The second result of `linear` (``return_preactivation=True``): (..., 2 N) where the
        activation is gated. Without it x w + b is computed again, which costs a third of the rest
        and as much scratch memory; kernels round it to the dtype of x, as `linear` does.
    grads : LinearGrads, optional
        Arrays to write the gradients into, each of the shape and dtype of what it belongs to. dw
        may lie either way round; otherwise the last axis is contiguous. A field that is None makes
        a new array, as Returns says.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes;
        otherwise it is allocated. An error says how many bytes a call needs. With grads and
        workspace a call allocates nothing, and can be captured in a CUDA graph.

    Returns
    -------
    LinearGrads
        ``(dx, dw, db)``, each like its array, and dw None for a `QuantizedWeight`; dw and db are
        sums over all rows of x. The same bits
        from run to run. New arrays are in C order, but dw lies as w does: for ``w = weight.T``
        with a weight (N, K) in C order, ``dw.T`` is in C order too, so that `adamw_step` takes it
        with weight.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `linear`; for dout or a preactivation whose shape or dtype disagrees with x and w; for a
        preactivation without an activation; for grads that do not fit their arrays; and of
        kernels for a workspace that is too small.

    Notes
    -----
    With z = x w + b and dz = dout * activation'(z): dx = dz w^T, dw = x^T dz, and db the sum of dz
    over rows. Products in float32 arithmetic compute dz while they load their operands; for those
    on tensor cores it is formed once, rounded to float16, in scratch memory.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> rng = np.random.default_rng(0)
    >>> x, dout = rng.standard_normal((2, 5, 4))
    >>> w, b = rng.standard_normal((4, 4)), np.zeros(4)
    >>> grads = cupyattn.linear_backward(dout, x, w, b, activation="silu")

    Moving b along its gradient raises the sum of dout * out by the square of the gradient:

    >>> def total(b):
    ...     return (dout * cupyattn.linear(x, w, b, activation="silu")).sum()
    >>> step = 1e-6
    >>> raised = (total(b + step * grads.db) - total(b)) / step
    >>> np.allclose(raised, (grads.db**2).sum(), rtol=1e-4)
    True
    """
    require_bool("accumulate", accumulate)
    arrays, weight = weight_arrays(w)
    operands = adopt(
        {"dout": dout, "x": x, **arrays, "b": b, "preactivation": preactivation,
         "workspace": workspace, **named_grads(LinearGrads, grads, accumulate)},
        ARRAY_FIXES,
        SHOWN_AS,
    )  # fmt: skip
    problem = backward_problem(operands, activation, bool(accumulate), weight)
    device = device_of(operands)
    if device is None:
        return _on_cpu(operands, problem, w)
    return LinearGrads(**ops.linear_backward(device, problem, operands))


def _on_cpu(operands: Operands, problem: LinearProblem, w: Array | QuantizedWeight) -> LinearGrads:
    arrays = {"w": w, **operands.arrays}
    inputs: Any = (arrays.get(name) for name in ("dout", "x", "w", "b"))
    exact = reference.linear_backward(
        *inputs, activation=problem.activation, preactivation=arrays.get("preactivation")
    )._asdict()
    rounded = {}
    for name, output in problem.outputs.items():
        gradient, target = exact[name], arrays.get(name)
        if problem.accumulate and target is not None:
            with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is NaN, as on a GPU
                gradient = gradient + target.astype(np.float64)
        turned = name in problem.transposed
        rounded[name] = round_into(target, gradient, output.dtype, transposed=turned)
    return LinearGrads(**rounded)
