"""Layer norm and RMS norm with an optional residual addition, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, overload

from cupyattn.ops.norms import kernels as norms
from cupyattn.ops.norms import reference
from cupyattn.ops.norms.forward import is_stream, run_forward
from cupyattn.ops.norms.kernels import NormArrays, NormBackwardArrays
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.checks import checked_once, factor, require_bool, require_given
from cupyattn.runtime.differentiable import differentiable
from cupyattn.runtime.outputs import take_grads
from cupyattn.runtime.rows import RowOptions, call_rows


class LayerNormGrads(NamedTuple):
    """Gradients of `layer_norm`'s inputs, each of its input's shape.

    In ``grads=`` a field that is None, the default, makes a new array.

    Attributes
    ----------
    dx : array (..., N)
        Gradient with respect to x; with a residual, with respect to both terms of the sum.
    dweight : array (N,), or None
        Gradient with respect to the weight, summed over rows; None without weight.
    dbias : array (N,), or None
        Gradient with respect to the bias, summed over rows; None without bias.
    """

    dx: Array | None = None
    dweight: Array | None = None
    dbias: Array | None = None


class RMSNormGrads(NamedTuple):
    """Gradients of `rms_norm`'s inputs, each of its input's shape.

    In ``grads=`` a field that is None, the default, makes a new array.

    Attributes
    ----------
    dx : array (..., N)
        Gradient with respect to x; with a residual, with respect to both terms of the sum.
    dweight : array (N,), or None
        Gradient with respect to the weight, summed over rows; None without weight.
    """

    dx: Array | None = None
    dweight: Array | None = None


@overload
def layer_norm(
    x: Array,
    weight: Array | None = ...,
    bias: Array | None = ...,
    /,
    *,
    residual: None = ...,
    x_scale: Array | None = ...,
    eps: float = ...,
    return_stats: Literal[False] = ...,
    out: Array | None = ...,
) -> Array: ...


@overload
def layer_norm(
    x: Array,
    weight: Array | None = ...,
    bias: Array | None = ...,
    /,
    *,
    residual: Array,
    x_scale: Array | None = ...,
    eps: float = ...,
    return_stats: bool = ...,
    out: tuple[Array, ...] | None = ...,
) -> tuple[Array, ...]: ...


@overload
def layer_norm(
    x: Array,
    weight: Array | None = ...,
    bias: Array | None = ...,
    /,
    *,
    residual: Array | None = ...,
    x_scale: Array | None = ...,
    eps: float = ...,
    return_stats: Literal[True],
    out: tuple[Array, ...] | None = ...,
) -> tuple[Array, ...]: ...


@overload
def layer_norm(
    x: Array,
    weight: Array | None = ...,
    bias: Array | None = ...,
    /,
    *,
    residual: Array | None = ...,
    x_scale: Array | None = ...,
    eps: float = ...,
    return_stats: bool,
    out: Array | tuple[Array, ...] | None = ...,
) -> Array | tuple[Array, ...]: ...


@overload
def layer_norm(
    x: Array,
    weight: Array | None = ...,
    bias: Array | None = ...,
    /,
    *,
    residual: Array | None = ...,
    eps: float = ...,
    return_stats: bool = ...,
    quantize: str,
    rotation: int | None = ...,
    out: Any = ...,
) -> Any: ...


# The backward takes the rounded sum of x and residual, the second result, as its x. Its dx is the
# gradient with respect to both terms.
@differentiable(
    lambda: layer_norm_backward,
    results=("out", "total"),
    saved=("mean", "rstd"),
    saved_by="return_stats",
    gradients=LayerNormGrads._fields,
    taken_from={"x": "total"},
    same={"dresidual": "dx"},
)
def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    /,
    *,
    residual: Array | None = None,
    x_scale: Array | None = None,
    eps: float = 1e-5,
    return_stats: bool = False,
    quantize: str | None = None,
    rotation: int | None = None,
    out: Any = None,
) -> Any:
    r"""Layer norm over the last axis: ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``.

    Parameters
    ----------
    x : array (..., N)
        float16, float32 or bfloat16, CuPy or NumPy. NumPy arrays may be float64, except on the
        emulator. The last axis is contiguous; the others may have any stride.
    weight, bias : array (N,), dtype of x, optional
        Factor of the normalised rows, and the term that is added to the product. With a float32 x
        or residual they may be float16 or bfloat16, and out has their dtype.
    residual : array (..., N), dtype of x, optional
        Added to x first, in the same pass. The rounded sum is normalised. A float32 residual may
        have a float16 or bfloat16 x: then the sum is float32.
    x_scale : float32 array (N,), optional
        Factors of x in the sum with such a residual.
    eps : float
        Added to the variance; 0 or more.
    return_stats : bool
        Whether to return mean and rstd too, which `layer_norm_backward` takes.
    quantize : {None, "int8"}
        "int8" makes out `QuantizedRows`, for products with int8 weights: what `quantize_rows` makes
        of the rounded rows, in the same pass where the rows fit in registers. N is a multiple of
        32. Such a call has no gradient.
    rotation : {None, 64}
        The rotation of `quantize_rows`.
    out : array or tuple of arrays, optional
        Where to write the results: an array, or a tuple with an array for each result. The first
        may be x itself, and total may be residual itself; otherwise they overlap no input.

    Returns
    -------
    array (..., N), dtype of x or of the weight, or a tuple
        ``out``. With a residual ``(out, total)``, where total is x + residual, or x_scale * x +
        residual, in the dtype of the residual. With return_stats
        mean and ``rstd = 1 / sqrt(var + eps)`` of each row follow, arrays (...) of float32, or
        float64 for float64 arrays. A row with a NaN or an infinity gives NaN.

    Raises
    ------
    TypeError
        For something that is no array, a mixture of NumPy and CuPy arrays, dtypes that are not
        allowed or differ, and an out of another form than the results.
    ValueError
        For arrays whose shapes disagree, a last axis that is not contiguous, an eps that is
        negative or not finite, and an out that does not fit or overlaps an input. On kernels also
        if more than four axes before the last remain after merging those with even strides.
    RuntimeError
        As `attention`.

    Notes
    -----
    Ba, Kiros, Hinton, arXiv:1607.06450. Results are computed in float32 and rounded once. With a
    residual the statistics are those of total as it is returned. The variance is the mean square of
    differences (Chan, Golub, LeVeque, The American Statistician 37, 1983), so rows with a large
    mean lose no accuracy. On a GPU a row of up to 16,384 items is read once, a longer row twice.
    Squares are float32 there. A row whose squared differences sum to more than 3e38 (items of about
    1e19) gives zeros. Differences below 1.1e-19 count as 0: with eps = 0 this may divide by 0. If
    the items themselves sum to more than 3e38, neither the mean nor out has finite numbers.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x = np.array([[1.0, 3.0], [5.0, 5.0]], np.float32)
    >>> cupyattn.layer_norm(x, eps=3.0)
    array([[-0.5,  0.5],
           [ 0. ,  0. ]], dtype=float32)
    >>> weight, bias = np.ones(2, np.float32), np.zeros(2, np.float32)
    >>> out, total = cupyattn.layer_norm(x, weight, bias, residual=-x)
    >>> bool((total == 0).all() and (out == 0).all())
    True
    """
    arrays = NormArrays(x, residual, weight, bias)
    options = eps, 0.0, return_stats
    return run_forward(
        arrays, x_scale, *options, out, centred=True, quantize=quantize, rotation=rotation
    )


@overload
def rms_norm(
    x: Array,
    weight: Array | None = ...,
    /,
    *,
    residual: None = ...,
    x_scale: Array | None = ...,
    eps: float = ...,
    weight_offset: float = ...,
    return_stats: Literal[False] = ...,
    out: Array | None = ...,
) -> Array: ...


@overload
def rms_norm(
    x: Array,
    weight: Array | None = ...,
    /,
    *,
    residual: Array,
    x_scale: Array | None = ...,
    eps: float = ...,
    weight_offset: float = ...,
    return_stats: bool = ...,
    out: tuple[Array, ...] | None = ...,
) -> tuple[Array, ...]: ...


@overload
def rms_norm(
    x: Array,
    weight: Array | None = ...,
    /,
    *,
    residual: Array | None = ...,
    x_scale: Array | None = ...,
    eps: float = ...,
    weight_offset: float = ...,
    return_stats: Literal[True],
    out: tuple[Array, ...] | None = ...,
) -> tuple[Array, ...]: ...


@overload
def rms_norm(
    x: Array,
    weight: Array | None = ...,
    /,
    *,
    residual: Array | None = ...,
    x_scale: Array | None = ...,
    eps: float = ...,
    weight_offset: float = ...,
    return_stats: bool,
    out: Array | tuple[Array, ...] | None = ...,
) -> Array | tuple[Array, ...]: ...


@overload
def rms_norm(
    x: Array,
    weight: Array | None = ...,
    /,
    *,
    residual: Array | None = ...,
    eps: float = ...,
    weight_offset: float = ...,
    return_stats: bool = ...,
    quantize: str,
    rotation: int | None = ...,
    out: Any = ...,
) -> Any: ...


@differentiable(
    lambda: rms_norm_backward,
    results=("out", "total"),
    saved=("rstd",),
    saved_by="return_stats",
    gradients=RMSNormGrads._fields,
    taken_from={"x": "total"},
    same={"dresidual": "dx"},
)
def rms_norm(
    x: Array,
    weight: Array | None = None,
    /,
    *,
    residual: Array | None = None,
    x_scale: Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    return_stats: bool = False,
    quantize: str | None = None,
    rotation: int | None = None,
    out: Any = None,
) -> Any:
    r"""RMS norm over the last axis: ``x / sqrt(mean(x**2) + eps) * (weight_offset + weight)``.

    Parameters
    ----------
    x : array (..., N)
        As for `layer_norm`.
    weight : array (N,), dtype of x, optional
        Factor of the normalised rows. With a float32 x or residual it may be float16 or bfloat16,
        and out has its dtype.
    residual : array (..., N), dtype of x, optional
        Added to x first, in the same pass. The rounded sum is normalised. A float32 residual may
        have a float16 or bfloat16 x: then the sum is float32.
    x_scale : float32 array (N,), optional
        Factors of x in the sum with such a residual.
    eps : float
        Added to the mean square; 0 or more.
    weight_offset : float
        Added to the weight: 1.0 in Gemma's models, which store weights around 0.
    return_stats : bool
        Whether to return rstd too, which `rms_norm_backward` takes.
    quantize, rotation : optional
        As for `layer_norm`.
    out : array or tuple of arrays, optional
        As for `layer_norm`.

    Returns
    -------
    array (..., N), dtype of x or of the weight, or a tuple
        ``out``. With a residual ``(out, total)``, where total is x + residual, or x_scale * x +
        residual, in the dtype of the residual. With return_stats
        ``rstd = 1 / sqrt(mean(x**2) + eps)`` of each row follows, an array (...) of float32, or
        float64 for float64 arrays.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `layer_norm`.

    Notes
    -----
    Zhang and Sennrich, arXiv:1910.07467. Results are computed in float32 and rounded once. On a GPU
    a float32 row whose squares sum to more than 3e38 (items of about 1e19) gives zeros. Items below
    1.1e-19 count as 0 in the mean square: with eps = 0 this may divide by 0.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cupyattn.rms_norm(np.array([[1.0, 7.0]], np.float32), eps=0.0)
    array([[0.2, 1.4]], dtype=float32)
    """
    arrays = NormArrays(x, residual, weight)
    options = eps, weight_offset, return_stats
    return run_forward(
        arrays, x_scale, *options, out, centred=False, quantize=quantize, rotation=rotation
    )


def layer_norm_backward(
    dout: Array,
    x: Array,
    weight: Array | None,
    mean: Array,
    rstd: Array,
    /,
    *,
    bias: Array | None = None,
    dtotal: Array | None = None,
    grads: LayerNormGrads | None = None,
    accumulate: bool = False,
    workspace: Array | None = None,
) -> LayerNormGrads:
    r"""Gradients of `layer_norm` with respect to its arrays.

    Parameters
    ----------
    dout : array (..., N), dtype of out
        Gradient with respect to out.
    x : array (..., N)
        The array that was normalised: the x of `layer_norm`, or **with a residual the total that
        it returned**.
    weight : array (N,), dtype of out, or None
        The weight that `layer_norm` was given.
    mean, rstd : array (...), float32, or float64 for float64 arrays
        The statistics that it returned with ``return_stats=True``.
    bias : array (N,), dtype of x, optional
        The bias that `layer_norm` was given. With it there is a dbias; its items are not read.
    dtotal : array (..., N), dtype of x, optional
        With a residual, the gradient with respect to total, if total was used.
    grads : LayerNormGrads, optional
        Arrays to write the gradients into, each with its input's shape and dtype; the last axis is
        contiguous. A field that is None makes a new array. dx overlaps no input.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes. By
        default it is allocated. It holds partial sums of dweight and dbias, 4 * N bytes of each for
        each CTA; the error for a small one says how many bytes. With grads and workspace a call
        allocates nothing.

    Returns
    -------
    LayerNormGrads
        ``(dx, dweight, dbias)``. dweight is None without weight, dbias without bias. With a
        residual dx is the gradient with respect to x and also to the residual.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `layer_norm`; also for mean and rstd of another shape or dtype, for grads that do not
        fit their arrays or belong to an array that was not given, and on kernels for a workspace
        that is too small.

    Notes
    -----
    With n = (x - mean) * rstd and g = dout * weight: dx = rstd * (g - mean(g) - n * mean(g * n)) +
    dtotal. dweight = sum(dout * n) and dbias = sum(dout) over rows, in a fixed order, so that
    repeated calls give equal bits. The rounding of mean to float32, up to 5e-4 for a mean of 1e4,
    is corrected: n is centred again.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x, dout = np.random.default_rng(0).standard_normal((2, 4, 8), dtype=np.float32)
    >>> weight, bias = np.ones(8, np.float32), np.zeros(8, np.float32)
    >>> out, mean, rstd = cupyattn.layer_norm(x, weight, bias, return_stats=True)
    >>> grads = cupyattn.layer_norm_backward(dout, x, weight, mean, rstd, bias=bias)
    >>> np.allclose(grads.dx.sum(axis=-1), 0, atol=1e-5), np.allclose(grads.dbias, dout.sum(axis=0))
    (True, True)
    """
    require_given("mean", mean)
    arrays = NormBackwardArrays(dout, x, dtotal, weight, bias, mean, rstd, workspace=workspace)
    results = _backward(LayerNormGrads, arrays, grads, 0.0, accumulate)
    return LayerNormGrads(results.dx, results.dweight, results.dbias)


def rms_norm_backward(
    dout: Array,
    x: Array,
    weight: Array | None,
    rstd: Array,
    /,
    *,
    weight_offset: float = 0.0,
    dtotal: Array | None = None,
    grads: RMSNormGrads | None = None,
    accumulate: bool = False,
    workspace: Array | None = None,
) -> RMSNormGrads:
    r"""Gradients of `rms_norm` with respect to its arrays.

    Parameters
    ----------
    dout : array (..., N), dtype of out
        Gradient with respect to out.
    x : array (..., N)
        The array that was normalised: the x of `rms_norm`, or **with a residual the total that it
        returned**.
    weight : array (N,), dtype of out, or None
        The weight that `rms_norm` was given.
    rstd : array (...), float32, or float64 for float64 arrays
        The statistics that it returned with ``return_stats=True``.
    weight_offset : float
        The offset that `rms_norm` was given.
    dtotal : array (..., N), dtype of x, optional
        With a residual, the gradient with respect to total, if total was used.
    grads : RMSNormGrads, optional
        As for `layer_norm_backward`.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.
    workspace : array, optional
        As for `layer_norm_backward`.

    Returns
    -------
    RMSNormGrads
        ``(dx, dweight)``; dweight is None without weight. With a residual dx is the gradient with
        respect to x and also to the residual.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `layer_norm_backward`.

    Notes
    -----
    With n = x * rstd and g = dout * (weight_offset + weight): dx = rstd * (g - n * mean(g * n)) +
    dtotal. dweight = sum(dout * n) over rows, in a fixed order.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x, dout = np.random.default_rng(0).standard_normal((2, 4, 8), dtype=np.float32)
    >>> out, rstd = cupyattn.rms_norm(x, eps=0.0, return_stats=True)
    >>> dx, dweight = cupyattn.rms_norm_backward(dout, x, None, rstd)
    >>> np.allclose((dx * x).sum(axis=-1), 0, atol=1e-5), dweight  # longer rows give the same
    (True, None)
    """
    arrays = NormBackwardArrays(dout, x, dtotal, weight, rstd=rstd, workspace=workspace)
    results = _backward(RMSNormGrads, arrays, grads, weight_offset, accumulate)
    return RMSNormGrads(results.dx, results.dweight)


def _backward(
    kind: type[LayerNormGrads | RMSNormGrads],
    arrays: NormBackwardArrays[Array],
    grads: LayerNormGrads | RMSNormGrads | None,
    weight_offset: float,
    accumulate: bool,
) -> NormBackwardArrays[Array]:
    of_stream = is_stream(arrays.x, arrays.weight)
    options, exact = _backward_options(weight_offset, accumulate)
    take_grads(arrays, kind, grads, accumulate)
    return call_rows(norms.STREAM_BACKWARD if of_stream else norms.BACKWARD, arrays, exact, options)


@checked_once
def _backward_options(
    weight_offset: object, accumulate: object
) -> tuple[RowOptions, Callable[..., reference.Gradients]]:
    """Check options; return those of the kernel, and the reference."""
    offset = factor("weight_offset", weight_offset)
    require_bool("accumulate", accumulate)
    options = RowOptions.of(accumulate=bool(accumulate), weight_offset=offset)
    return options, partial(reference.norm_backward, weight_offset=offset)
