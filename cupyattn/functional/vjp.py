"""Reverse-mode differentiation of the library's functions, in the manner of jax.vjp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyattn.arrays import Array, adopt
from cupyattn.errors import error
from cupyattn.functional.attention import attention
from cupyattn.functional.attention_backward import attention_backward
from cupyattn.functional.backend import device_of
from cupyattn.functional.softmax import softmax, softmax_backward
from cupyattn.gradients import AttentionGrads
from cupyattn.ops.checks import require_bool


class Pullback:
    """The second result of `vjp`: from gradients of a call's results to those of its arrays.

    It keeps the arrays of the call and its results themselves, no copies: they must not be written
    to before it is called. It may be called any number of times.

    Attributes
    ----------
    backward : callable
        ``backward(*result_gradients, **backward_options)``: the function's own backward, already
        given the call's arrays, results and options. Returns all that it returns: of
        `cupyattn.attention` an `AttentionGrads`, whose dbias and dsinks are the gradients of the
        arrays among the options.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), dtype=np.float32)
    >>> bias = np.zeros((2, 1, 5), np.float32)
    >>> out, pullback = cupyattn.vjp(cupyattn.attention, q, k, v, bias=bias)
    >>> dq, dk, dv = pullback(np.ones_like(out))
    >>> pullback.backward(np.ones_like(out)).dbias.shape
    (2, 1, 5)
    """

    def __init__(self, backward: Callable[..., Any], *, gradients: int, results: int) -> None:
        self.backward = backward
        self._gradients = gradients
        self._results = results

    def __call__(self, *result_gradients: Array | None, **backward_options: Any) -> tuple[Any, ...]:
        """Return the gradients of the arrays given by position, in their order."""
        if not 1 <= len(result_gradients) <= self._results:
            raise error(
                TypeError,
                f"the pullback was given {len(result_gradients)} gradients",
                f"the call had {self._results} result{'s' if self._results > 1 else ''}",
                "pass one for each; a second result is lse, with return_lse=True",
            )
        gradients = self.backward(*result_gradients, **backward_options)
        return tuple(gradients[: self._gradients]) if self._gradients > 1 else (gradients,)


def vjp(function: Callable[..., Any], /, *arrays: Array, **options: Any) -> tuple[Any, Pullback]:
    r"""Call a function and return, with its result, the function that differentiates it.

    Parameters
    ----------
    function : callable
        `cupyattn.attention` or `cupyattn.softmax`.
    arrays : arrays
        What the function takes by position.
    options : optional
        What it takes by name.

    Returns
    -------
    result : array or tuple
        What ``function(*arrays, **options)`` returns.
    pullback : Pullback
        ``pullback(dout)`` takes the gradient of a scalar with respect to the result and returns a
        tuple of its gradients with respect to `arrays`, one for each, with their shapes and dtypes:
        the product of dout with the function's Jacobian. For attention with ``return_lse=True`` it
        is ``pullback(dout, dlse)``; a gradient of None, or dlse left out, stands for a result that
        was not used. Options by name go to the backward: ``pullback(dout, deterministic=True)``, or
        ``grads=`` and ``accumulate=True``.

    Raises
    ------
    TypeError
        If the function is none of the library's that have a backward; for ``out=``, which could be
        overwritten before the pullback is called; and from the pullback, for another number of
        gradients than there are results.
    TypeError, ValueError, NotImplementedError, RuntimeError
        Those of the function, and from the pullback those of its backward.

    Notes
    -----
    As with `jax.vjp`, what is given by name counts as constant for ``pullback(...)``. Gradients of
    attention's bias and sinks come from ``pullback.backward(dout)``, which returns the whole
    `AttentionGrads` (dq, dk, dv, dbias, dsinks). The pullback calls `attention_backward` or
    `softmax_backward` with what the call was given, dropout's seed and `implementation` included;
    "tiled" has no backward on a GPU: there pass ``pullback(dout, implementation="naive")``.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = rng.standard_normal((4, 1, 5, 2, 8), dtype=np.float32)
    >>> out, pullback = cupyattn.vjp(cupyattn.attention, q, k, v, causal=True)
    >>> dq, dk, dv = pullback(dout)
    >>> dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape
    True

    With the log-sum-exp as second result, which may be used too:

    >>> (out, lse), pullback = cupyattn.vjp(cupyattn.attention, q, k, v, return_lse=True)
    >>> dq, dk, dv = pullback(dout, np.ones_like(lse))

    One array in, one gradient out, in a tuple all the same:

    >>> y, pullback = cupyattn.vjp(cupyattn.softmax, np.zeros((1, 2), np.float32))
    >>> (dx,) = pullback(np.array([[1.0, 0.0]], np.float32))
    >>> dx
    array([[ 0.25, -0.25]], dtype=float32)
    """
    for differentiable, rule in _RULES.items():
        if function is differentiable:
            return rule(*arrays, **options)
    raise error(
        TypeError,
        f"vjp of {getattr(function, '__name__', repr(function))}",
        f"functions with a backward are {', '.join(f.__name__ for f in _RULES)}",
        "pass one of those, itself and not wrapped in another function",
    )


def _attention(q: Array, k: Array, v: Array, /, **options: Any) -> tuple[Any, Pullback]:
    _refuse_out(options)
    return_lse = options.pop("return_lse", False)
    require_bool("return_lse", return_lse)
    out, lse = attention(q, k, v, **options, return_lse=True)
    options.pop("workspace", None)  # the forward's; the backward's is another size

    def backward(dout: Array | None, dlse: Array | None = None, **more: Any) -> AttentionGrads:
        if dout is None and return_lse:
            dout = _zeros_like(out)
        return attention_backward(dout, q, k, v, out, lse, dlse=dlse, **{**options, **more})

    result = (out, lse) if return_lse else out
    return result, Pullback(backward, gradients=3, results=2 if return_lse else 1)


def _softmax(x: Array, /, **options: Any) -> tuple[Any, Pullback]:
    _refuse_out(options)
    out = softmax(x, **options)

    def backward(dout: Array, **more: Any) -> Array:
        return softmax_backward(dout, out, **more)

    return out, Pullback(backward, gradients=1, results=1)


def _zeros_like(out: Array) -> Array:
    """Return zeros where out is: CuPy's zeros_like takes the current device's memory."""
    device = device_of(adopt({"out": out}))
    if device is None:
        return np.zeros_like(out)
    zeros = device.empty(out.shape, out.dtype)
    zeros.fill(0)
    return zeros


def _refuse_out(options: dict[str, Any]) -> None:
    """Take out=None, the default, out of the options: no backward has it."""
    if options.pop("out", None) is not None:
        raise error(
            TypeError,
            "vjp with out=",
            "the pullback keeps the result, which must stay as it is",
            "leave out out=, or call the function and its backward yourself",
        )


_RULES: dict[Callable[..., Any], Callable[..., tuple[Any, Pullback]]] = {
    attention: _attention,
    softmax: _softmax,
}
