"""A product with a weight, then gelu: the first half of many a transformer's layer."""

from __future__ import annotations

from typing import Any

from cupyattn.ops.linear.api import linear
from cupyattn.ops.linear.api_backward import linear_backward
from cupyattn.ops.linear.quantized_weight import QuantizedWeight
from cupyattn.ops.linear.reference import LinearGrads
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error, shown

_ACTIVATIONS = {"tanh": "gelu_tanh", "none": "gelu"}


def linear_gelu(
    x: Array,
    w: Array | QuantizedWeight,
    b: Array | None = None,
    /,
    *,
    approximate: str = "tanh",
    return_preactivation: bool = False,
    out: Array | tuple[Array, Array | None] | None = None,
    workspace: Array | None = None,
) -> Any:
    r"""Compute ``gelu(x @ w + b)`` in one pass.

    Parameters
    ----------
    x, w, b : array
        As of `linear`.
    approximate : {"tanh", "none"}
        The tanh form of gelu, or the exact one: "gelu_tanh" and "gelu" of `linear`.
    return_preactivation, out, workspace : optional
        As of `linear`.

    Returns
    -------
    array or tuple
        As `linear` with that activation.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `linear`, and for another approximate.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x, w = np.array([[1.0, 2.0]]), np.array([[1.0, 0.0], [0.0, -1.0]])
    >>> cupyattn.linear_gelu(x, w, approximate="none")
    array([[ 0.84134475, -0.04550026]])
    """
    return linear(
        x,
        w,
        b,
        activation=_activation(approximate),
        return_preactivation=return_preactivation,
        out=out,
        workspace=workspace,
    )


def linear_gelu_backward(
    dout: Array,
    x: Array,
    w: Array | QuantizedWeight,
    b: Array | None = None,
    /,
    *,
    approximate: str = "tanh",
    preactivation: Array | None = None,
    grads: LinearGrads | None = None,
    accumulate: bool = False,
    workspace: Array | None = None,
) -> LinearGrads:
    r"""Gradients of `linear_gelu` with respect to x, w and b.

    Parameters
    ----------
    dout, x, w, b : array
        As of `linear_backward`.
    approximate : {"tanh", "none"}
        As given to `linear_gelu`.
    preactivation, grads, accumulate, workspace : optional
        As of `linear_backward`.

    Returns
    -------
    LinearGrads
        ``(dx, dw, db)``, as of `linear_backward`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `linear_backward`, and for another approximate.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x, w = np.zeros((1, 2)), np.eye(2)
    >>> cupyattn.linear_gelu_backward(np.ones((1, 2)), x, w).dx
    array([[0.5, 0.5]])
    """
    return linear_backward(
        dout,
        x,
        w,
        b,
        activation=_activation(approximate),
        preactivation=preactivation,
        grads=grads,
        accumulate=accumulate,
        workspace=workspace,
    )


def _activation(approximate: Any) -> str:
    if isinstance(approximate, str) and approximate in _ACTIVATIONS:
        return _ACTIVATIONS[approximate]
    raise error(
        ValueError if isinstance(approximate, str) else TypeError,
        f"approximate = {shown(approximate)}",
        'it is "tanh" or "none"',
        'pass approximate="none" for the exact gelu',
    )
