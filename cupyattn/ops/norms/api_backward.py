"""Gradients of layer norm and RMS norm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from cupyattn.ops.norms import kernels as norms
from cupyattn.ops.norms import reference
from cupyattn.ops.norms.kernels import NormBackwardArrays
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.checks import checked_once, factor, require_bool, require_given
from cupyattn.runtime.outputs import take_grads
from cupyattn.runtime.rows import RowOptions, call_rows, is_stream


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
