"""A product with a weight, and what a layer does to it."""

from __future__ import annotations

from typing import Any

from cupyattn.ops.linear import reference
from cupyattn.ops.linear.checks import forward_problem
from cupyattn.ops.linear.forward import linear_forward
from cupyattn.ops.linear.problem import ARRAY_FIXES, LinearProblem
from cupyattn.ops.linear.quantized_weight import QuantizedWeight
from cupyattn.ops.linear.weights import weight_arrays
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.by_name import Operands, adopt
from cupyattn.runtime.checks import fixes_of_results, require_bool
from cupyattn.runtime.errors import error
from cupyattn.runtime.rounding import round_into

_FIXES = {**ARRAY_FIXES, **fixes_of_results("out", "preactivation")}


def linear(
    x: Array,
    w: Array | QuantizedWeight,
    b: Array | None = None,
    /,
    *,
    activation: str | None = None,
    residual: Array | None = None,
    return_preactivation: bool = False,
    out: Array | tuple[Array, Array | None] | None = None,
    workspace: Array | None = None,
) -> Any:
    r"""Compute ``activation(x @ w + b) + residual`` in one pass.

    Parameters
    ----------
    x : array (..., K)
        float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside of the
        emulator. The last axis is contiguous; the axes before it lie evenly in memory, so that they
        are M rows: whole arrays, slices of rows or of columns, broadcast rows.
    w : array (K, N), dtype of x
        One of its axes is contiguous, the other may have any stride: ``w.T`` of an array (N, K) and
        slices work without a copy. (K, 2 N) where the activation is gated. Or a `QuantizedWeight`
        of that shape, either way round, whatever the dtype of x.
    b : array (N,), dtype of x, optional
        Added to every row; (2 N,) where the activation is gated. Contiguous.
    activation : {None, "gelu", "gelu_tanh", "silu", "relu", "swiglu", "geglu"}
        Of a number x: "gelu" is x Phi(x), exact, "gelu_tanh" its approximation
        0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, arXiv:1606.08415),
        "silu" x / (1 + exp(-x)), "relu" max(x, 0). The gated ones (Shazeer, arXiv:2002.05202) take
        a w of 2 N columns, those of the gate, then those of up: "swiglu" is silu(gate) * up,
        "geglu" gelu(gate) * up.
    residual : array (..., N), dtype of x, optional
        Added behind the activation; its last axis is contiguous, as x is otherwise.
    return_preactivation : bool
        Return ``x @ w + b`` too, rounded to the dtype, which `linear_backward` can take.
    out : array or tuple, optional
        Where to write the result; must overlap no other array. With return_preactivation a tuple
        (out, preactivation), with None for what is to be made.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes;
        otherwise it is allocated. Most shapes need none; an error says how many bytes.

    Returns
    -------
    out : array (..., N), dtype of x
    preactivation : array (..., N), dtype of x
        Only with return_preactivation: (..., 2 N) where the activation is gated, and None without
        an activation, where the backward needs none.

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, or dtypes that are not allowed
        or differ.
    ValueError
        For shapes that do not fit together, an activation that there is none of, strides that are
        not those above, and for an out or a workspace that does not fit or overlaps another array.
    RuntimeError
        As `attention`.

    Notes
    -----
    Products are added in float32, the activation is applied to that sum, and the result is rounded
    once. An activation nearer to 0 than 2**-118 may be 0, as `gelu` documents. float16 runs on
    tensor cores, where the GPU has any (`device_info`); float32, and bfloat16, which Turing's
    tensor cores do not take, run in float32 arithmetic. Few rows, of float16 up to 64 on tensor
    cores, run kernels that stream the weight once. On NumPy arrays of float32 the CPU computes in
    float32 too, by NumPy's BLAS, and otherwise in float64.

    A quantised weight is dequantised on its way to the products, and never stored: to float16 on
    tensor cores, where weights beyond 65504 overflow, to float32 otherwise.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((2, 5, 8), dtype=np.float32)
    >>> w = rng.standard_normal((12, 8), dtype=np.float32)
    >>> b = np.ones(12, np.float32)
    >>> out = cupyattn.linear(x, w.T, b, activation="relu")
    >>> np.allclose(out, np.maximum(x @ w.T + b, 0), atol=1e-5)
    True

    A gated activation multiplies two halves of the product:

    >>> packed = rng.standard_normal((8, 6), dtype=np.float32)
    >>> cupyattn.linear(x, packed, activation="swiglu").shape
    (2, 5, 3)
    """
    require_bool("return_preactivation", return_preactivation)
    given_out, given_preactivation = _split_out(out, return_preactivation, activation)
    arrays, weight = weight_arrays(w)
    operands = adopt(
        {"x": x, **arrays, "b": b, "residual": residual, "out": given_out,
         "preactivation": given_preactivation, "workspace": workspace},
        _FIXES,
    )  # fmt: skip
    problem = forward_problem(operands, activation, bool(return_preactivation), weight)
    device = device_of(operands)
    if device is None:
        results = _on_cpu(operands, problem, w)
    else:
        results = linear_forward(device, problem, operands)
    if return_preactivation:
        return results["out"], results.get("preactivation")
    return results["out"]


def _split_out(out: Any, return_preactivation: bool, activation: Any) -> tuple[Any, Any]:
    if not return_preactivation:
        if isinstance(out, tuple):
            raise error(
                TypeError,
                "out is a tuple without return_preactivation=True",
                "it is one array then",
                "pass return_preactivation=True to have it as well, or the array alone",
            )
        return out, None
    if out is None:
        return None, None
    if not isinstance(out, tuple) or len(out) != 2:
        raise error(
            TypeError,
            f"out is a {type(out).__name__} with return_preactivation=True",
            "it is a tuple (out, preactivation) of arrays or None then",
            "pass out=(out, preactivation)",
        )
    if activation is None and out[1] is not None:
        raise error(
            ValueError,
            "out has a preactivation, and there is no activation",
            "the second result is None then",
            "pass out=(out, None)",
        )
    return out


def _on_cpu(
    operands: Operands, problem: LinearProblem, w: Array | QuantizedWeight
) -> dict[str, Array]:
    arrays = {"w": w, **operands.arrays}
    inputs: Any = (arrays.get(name) for name in ("x", "w", "b", "residual"))
    exact = dict(
        zip(
            ("out", "preactivation"),
            reference.linear(*inputs, activation=problem.activation),
            strict=True,
        )
    )
    return {
        name: round_into(arrays.get(name), exact[name], output.dtype)
        for name, output in problem.outputs.items()
    }
