"""Products with a weight and their epilogues: `linear`, `linear_gelu` and their gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, overload

import numpy as np

from cupyattn.ops.linear import cpu, reference
from cupyattn.ops.linear.plan import backward_call, backward_plan, forward_call, forward_plan
from cupyattn.ops.linear.problem import (
    BackwardCall,
    ForwardCall,
    LinearArrays,
    LinearBackwardArrays,
    RowFormat,
    WeightFormat,
    weight_fields,
)
from cupyattn.ops.linear.reference import LinearGrads
from cupyattn.ops.linear.row_formats import QuantizedRows, quantized_rows
from cupyattn.ops.linear.weight_formats import QuantizedWeight
from cupyattn.runtime.arrays import Array, adopt
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import fixes_of_results, require_bool
from cupyattn.runtime.differentiable import differentiable
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.outputs import round_into, take_grads
from cupyattn.runtime.plan import run

_FIXES = {
    "b": "pass an array of shape (N,), an item for each column of w",
    "residual": "pass an array of the result's shape",
}
"""Fixes in errors about a number in place of an array."""
_FORWARD_FIXES = {**_FIXES, **fixes_of_results("out", "preactivation")}


def _differentiated(
    backward: Callable[..., LinearGrads], *, residual: bool
) -> Callable[..., tuple[Array | None, ...]]:
    """Return a backward for `vjp`, with dout as the gradient of a residual after the others.

    It takes dpreactivation too, which has to be None: the preactivation is saved for the backward,
    and is no result to be differentiated.
    """

    @wraps(backward)
    def full(
        dout: Array, /, *args: Any, dpreactivation: Array | None = None, **options: Any
    ) -> tuple[Array | None, ...]:
        if dpreactivation is not None:
            raise error(
                TypeError,
                "the gradient of preactivation was given",
                "preactivation is returned for the backward, and has no gradient",
                "pass None for it, or compute it by a linear of its own without an activation",
            )
        grads = backward(dout, *args, **options)
        return (*grads, dout) if residual else grads

    signature = inspect.signature(backward)
    extra = inspect.Parameter("dpreactivation", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = [*signature.parameters.values(), extra]
    full.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return full


@overload
def linear(
    x: Array | QuantizedRows,
    w: Array | QuantizedWeight,
    b: Array | None = ...,
    /,
    *,
    activation: str | None = ...,
    residual: Array | None = ...,
    activations: str | None = ...,
    return_preactivation: Literal[False] = ...,
    out: Array | None = ...,
    workspace: Array | None = ...,
) -> Array: ...


@overload
def linear(
    x: Array | QuantizedRows,
    w: Array | QuantizedWeight,
    b: Array | None = ...,
    /,
    *,
    activation: str | None = ...,
    residual: Array | None = ...,
    activations: str | None = ...,
    return_preactivation: Literal[True],
    out: tuple[Array | None, Array | None] | None = ...,
    workspace: Array | None = ...,
) -> tuple[Array, Array | None]: ...


@overload
def linear(
    x: Array | QuantizedRows,
    w: Array | QuantizedWeight,
    b: Array | None = ...,
    /,
    *,
    activation: str | None = ...,
    residual: Array | None = ...,
    activations: str | None = ...,
    return_preactivation: bool,
    out: Array | tuple[Array | None, Array | None] | None = ...,
    workspace: Array | None = ...,
) -> Array | tuple[Array, Array | None]: ...


@differentiable(
    lambda: _differentiated(linear_backward, residual=True),
    saved=("preactivation",),
    saved_by="return_preactivation",
    gradients=(*LinearGrads._fields, "dresidual"),
)
def linear(
    x: Array | QuantizedRows,
    w: Array | QuantizedWeight,
    b: Array | None = None,
    /,
    *,
    activation: str | None = None,
    residual: Array | None = None,
    activations: str | None = None,
    return_preactivation: bool = False,
    out: Array | tuple[Array | None, Array | None] | None = None,
    workspace: Array | None = None,
) -> Any:
    r"""Compute ``activation(x @ w + b) + residual`` in one pass.

    Parameters
    ----------
    x : array (..., K)
        float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside of the
        emulator. The last axis is contiguous. The axes before it are evenly spaced in memory, so
        that they are M rows: whole arrays, slices of rows or of columns, broadcast rows. Or
        `QuantizedRows`, for a w in int8 of the same rotation; "dtype of x" is then their dtype.
    w : array (K, N), dtype of x
        One of its axes is contiguous, the other may have any stride: ``w.T`` of an array (N, K) and
        slices work without a copy. (K, 2 N) with a gated activation. Or a `QuantizedWeight` of that
        shape, transposed or not, for any dtype of x.
    b : array (N,), dtype of x, optional
        Added to every row; (2 N,) with a gated activation. Contiguous.
    activation : {None, "gelu", "gelu_tanh", "silu", "relu", "swiglu", "geglu", "geglu_tanh"}
        For a number x: "gelu" is x Phi(x), exact; "gelu_tanh" is its approximation
        0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, arXiv:1606.08415);
        "silu" is x / (1 + exp(-x)); "relu" is max(x, 0). The gated activations (Shazeer,
        arXiv:2002.05202) take a w of 2 N columns, those of the gate, then those of up: "swiglu" is
        silu(gate) * up, "geglu" is gelu(gate) * up, "geglu_tanh" is gelu_tanh(gate) * up.
    residual : array (..., N), dtype of x, optional
        Added after the activation. Its strides are restricted as those of x are.
    activations : {None, "int8"}
        "int8" multiplies int8 by int8: x is quantised as `quantize_rows` does, and rotated if w is.
        w is a `QuantizedWeight` of "int8" with a scale for each column, of a K up to 133,000. See
        Notes for when x stays in its dtype.
    return_preactivation : bool
        Return ``x @ w + b`` too, rounded to the dtype, which `linear_backward` can take.
    out : array or tuple, optional
        Where to write the result; must overlap no other array. With return_preactivation a tuple
        (out, preactivation), in which None asks for a new array.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes;
        otherwise it is allocated. Most shapes need none; an error reports how many bytes.

    Returns
    -------
    out : array (..., N), dtype of x
    preactivation : array (..., N), dtype of x
        Only with return_preactivation: (..., 2 N) with a gated activation, and None without an
        activation, because the backward then needs none.

    Raises
    ------
    TypeError
        For anything that is not an array, NumPy and CuPy arrays mixed, or dtypes that are not
        allowed or differ.
    ValueError
        For shapes that do not fit together, an unknown activation, strides that are not allowed,
        and for an out or a workspace that does not fit or overlaps another array.
    RuntimeError
        As `attention`.

    Notes
    -----
    Products are accumulated in float32, the activation is applied to that sum, and the result is
    rounded once. An activation nearer to 0 than 2**-118 may be 0, as `gelu` documents. float16 runs
    on tensor cores if the GPU has them (`device_info`), bfloat16 from compute capability 8.0 on,
    and all else in float32 arithmetic. Skinny products (on tensor cores up to 64 rows, but not of
    bfloat16 and a quantised weight) read the weight once. On NumPy arrays a float32 BLAS computes
    the products, and for float64 arrays a float64 BLAS.

    A quantised weight is dequantised inside the products, and never stored: on tensor cores to x's
    dtype, otherwise to float32. In float16, weights above 65000 may give NaN and those below 1e-7
    are 0, except in skinny products. A rotated weight takes a rotated x: blocks of 64 items are
    summed in float32 and rounded to the dtype, where 64 equal items become one of 8 times the size.

    With ``activations="int8"`` the sums are exact in int32, on tensor cores for every dtype of x.
    A GPU without tensor cores, and every GPU for a few rows (below 112, on GeForce below 48),
    multiplies x as it is instead, because it waits for the weight then: **a row's result can change
    with the number of rows in the call** at that threshold. `QuantizedRows` are multiplied as int8
    whatever their number. NumPy arrays always have the product of the codes. The gradient of x is
    that of a product with the numbers of w.

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

    A product in int8, whose operands are rotated:

    >>> x, w = rng.standard_normal((2, 64, 64), dtype=np.float32)
    >>> weight = cupyattn.quantize(w, format="int8", rotation=64)
    >>> rows = cupyattn.quantize_rows(x, rotation=64)
    >>> out = cupyattn.linear(rows, weight)
    >>> np.array_equal(out, cupyattn.linear(x, weight, activations="int8"))
    True
    >>> bool(np.abs(out - x @ w).max() < 0.5)
    True
    """
    require_bool("return_preactivation", return_preactivation)
    given_out, given_preactivation = _split_out(out, return_preactivation, activation)
    weight, form = weight_fields(w)
    rows, codes_x, scales_x = None, x, None
    if activations is not None or isinstance(x, QuantizedRows):
        rows, codes_x, scales_x = _int8_rows(x, form, activations)
    arrays = LinearArrays(
        codes_x, *weight, b, residual, given_out, given_preactivation, workspace, scales_x
    )
    operands = adopt(arrays, _FORWARD_FIXES)
    call = forward_call(operands, activation, bool(return_preactivation), form, rows)
    device = device_of(operands)
    if device is None:
        _on_cpu(arrays, call, w)
    else:
        run(device, forward_plan(call, device.traits), operands)
    return (arrays.out, arrays.preactivation) if return_preactivation else arrays.out


def _int8_rows(x: Any, form: WeightFormat | None, activations: Any) -> tuple[RowFormat, Any, Any]:
    """Check `activations`; return the format of x, its codes (or x itself) and their scales."""
    if activations is not None and not (isinstance(activations, str) and activations == "int8"):
        raise error(
            ValueError if isinstance(activations, str) else TypeError,
            f"activations = {shown(activations)}",
            'it is None, or "int8" for a product of int8 rows and an int8 weight',
            "pass one of these",
        )
    if isinstance(x, QuantizedRows):
        return RowFormat(x.rotation, x.dtype), x.codes, x.scales
    return RowFormat(None if form is None else form.rotation), x, None


def _split_out(out: Any, return_preactivation: bool, activation: Any) -> tuple[Any, Any]:
    if not return_preactivation:
        if isinstance(out, tuple):
            raise error(
                TypeError,
                "out is a tuple without return_preactivation=True",
                "it is one array then",
                "pass return_preactivation=True to get both results, or the array alone",
            )
        return out, None
    if out is None:
        return None, None
    if not isinstance(out, tuple) or len(out) != 2:
        raise error(
            TypeError,
            f"out has type {type(out).__name__} with return_preactivation=True",
            "it must be a tuple (out, preactivation) of arrays or None then",
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


def _on_cpu(arrays: LinearArrays[Any], call: ForwardCall, w: Any) -> None:
    """Compute the results, and store them in their fields."""
    w = w if arrays.w is None else arrays.w
    x: Any = arrays.x
    rows = call.problem.row_format
    if rows is not None:
        scales: Any = arrays.x_scales
        if rows.dtype is None:
            x, scales = reference.quantize_rows(x, rows.rotation)
        x = quantized_rows(x, scales, rows.rotation, call.problem.dtype)
    inputs = (x, w, arrays.b, arrays.residual)
    activation = call.problem.activation
    if call.problem.dtype == np.float64:
        results = reference.linear(*inputs, activation=activation)
        for (name, output), exact in zip(call.outputs.items(), results, strict=False):
            setattr(arrays, name, round_into(getattr(arrays, name), exact, output.dtype))
        return
    for name, output in call.outputs.items():
        if getattr(arrays, name) is None:
            setattr(arrays, name, np.empty(*output))
    assert arrays.out is not None
    cpu.linear(*inputs, arrays.out, arrays.preactivation, activation=activation)


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
    r"""Compute the gradients of `linear` with respect to x, w and b.

    Parameters
    ----------
    dout : array (..., N), dtype of x
        Gradient with respect to the result. It is also the gradient of a residual.
    x, w, b : array
        The arguments of `linear`. Without b there is no db, and for a `QuantizedWeight` no dw.
    activation : optional
        The activation given to `linear`.
    preactivation : array (..., N), dtype of x, optional
        The second result of `linear` (``return_preactivation=True``): (..., 2 N) with a gated
        activation. Without it, x w + b is recomputed into scratch memory: three products instead of
        two. Kernels round it to the dtype of x, as `linear` does.
    grads : LinearGrads, optional
        Arrays to write the gradients into, each with the shape and dtype of its input. dw may be
        contiguous along either axis; otherwise the last axis is contiguous. A field that is None
        makes a new array, as Returns says.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes;
        otherwise it is allocated. An error reports how many bytes a call needs. With grads and
        workspace a call allocates nothing, and can be captured in a CUDA graph.

    Returns
    -------
    LinearGrads
        ``(dx, dw, db)``, each like its array. dw is None for a `QuantizedWeight`, db without b.
        dw and db are sums over all rows of x. Results are reproducible, bit by bit. New arrays are
        in C order, with one exception: dw has the order of w. For ``w = weight.T`` with a weight
        (N, K) in C order, ``dw.T`` is in C order too, so that `adamw_step` takes it with weight.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `linear`; for dout or a preactivation whose shape or dtype disagrees with x and w; for a
        preactivation without an activation; for grads that do not fit their arrays; and on kernels
        for a workspace that is too small.

    Notes
    -----
    With z = x w + b and dz = dout * activation'(z): dx = dz w^T, dw = x^T dz, and db is the sum of
    dz over rows. Products in float32 arithmetic compute dz while they load their operands. For
    products on tensor cores, dz is computed once, rounded to x's dtype, in scratch memory.

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
    weight, form = weight_fields(w)
    arrays = LinearBackwardArrays(dout, x, *weight, b, preactivation, workspace)
    operands = adopt(take_grads(arrays, LinearGrads, grads, accumulate), _FIXES)
    call = backward_call(operands, activation, bool(accumulate), form)
    device = device_of(operands)
    if device is None:
        _backward_on_cpu(arrays, call, w)
    else:
        run(device, backward_plan(call, device.traits), operands)
    return LinearGrads(arrays.dx, arrays.dw, arrays.db)


def _backward_on_cpu(arrays: LinearBackwardArrays[Any], call: BackwardCall, w: Any) -> None:
    """Compute the gradients, and store them in their fields."""
    w = w if arrays.w is None else arrays.w
    problem = call.problem
    backward = reference.linear_backward if problem.dtype == np.float64 else cpu.linear_backward
    exact = backward(
        *(arrays.dout, arrays.x, w, arrays.b),
        activation=problem.activation,
        preactivation=arrays.preactivation,
    )
    for name, output in call.outputs.items():
        gradient, target = getattr(exact, name), getattr(arrays, name)
        if problem.accumulate and target is not None:
            with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is NaN, as on a GPU
                gradient = gradient + target.astype(np.float64)
        turned = name == "dw" and call.turns_dw
        setattr(arrays, name, round_into(target, gradient, output.dtype, transposed=turned))


_unrecorded_linear = inspect.unwrap(linear)  # linear_gelu is recorded itself
_GELU = {"tanh": "gelu_tanh", "none": "gelu"}


@overload
def linear_gelu(
    x: Array,
    w: Array | QuantizedWeight,
    b: Array | None = ...,
    /,
    *,
    approximate: str = ...,
    return_preactivation: Literal[False] = ...,
    out: Array | None = ...,
    workspace: Array | None = ...,
) -> Array: ...


@overload
def linear_gelu(
    x: Array,
    w: Array | QuantizedWeight,
    b: Array | None = ...,
    /,
    *,
    approximate: str = ...,
    return_preactivation: Literal[True],
    out: tuple[Array | None, Array | None] | None = ...,
    workspace: Array | None = ...,
) -> tuple[Array, Array | None]: ...


@overload
def linear_gelu(
    x: Array,
    w: Array | QuantizedWeight,
    b: Array | None = ...,
    /,
    *,
    approximate: str = ...,
    return_preactivation: bool,
    out: Array | tuple[Array | None, Array | None] | None = ...,
    workspace: Array | None = ...,
) -> Array | tuple[Array, Array | None]: ...


@differentiable(
    lambda: _differentiated(linear_gelu_backward, residual=False),
    saved=("preactivation",),
    saved_by="return_preactivation",
    gradients=LinearGrads._fields,
)
def linear_gelu(
    x: Array,
    w: Array | QuantizedWeight,
    b: Array | None = None,
    /,
    *,
    approximate: str = "tanh",
    return_preactivation: bool = False,
    out: Array | tuple[Array | None, Array | None] | None = None,
    workspace: Array | None = None,
) -> Any:
    r"""Compute ``gelu(x @ w + b)`` in one pass.

    Parameters
    ----------
    x, w, b : array
        The arguments of `linear`.
    approximate : {"tanh", "none"}
        The tanh form of gelu, or the exact one: "gelu_tanh" and "gelu" of `linear`.
    return_preactivation, out, workspace : optional
        The options of `linear`.

    Returns
    -------
    array or tuple
        The results of `linear` with that activation.

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
    return _unrecorded_linear(
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
    r"""Compute the gradients of `linear_gelu` with respect to x, w and b.

    Parameters
    ----------
    dout, x, w, b : array
        The arguments of `linear_backward`.
    approximate : {"tanh", "none"}
        The option given to `linear_gelu`.
    preactivation, grads, accumulate, workspace : optional
        The options of `linear_backward`.

    Returns
    -------
    LinearGrads
        ``(dx, dw, db)``, the results of `linear_backward`.

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
    if isinstance(approximate, str) and approximate in _GELU:
        return _GELU[approximate]
    raise error(
        ValueError if isinstance(approximate, str) else TypeError,
        f"approximate = {shown(approximate)}",
        'it is "tanh" or "none"',
        'pass approximate="none" for the exact gelu',
    )
