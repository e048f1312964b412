"""Layer norm and RMS norm, forward and backward, with an addition before them."""

from __future__ import annotations

from typing import Any, NamedTuple

from cupyattn.ops.norms import kernels as norms
from cupyattn.ops.norms import reference
from cupyattn.ops.norms.kernels import NormArrays, NormBackwardArrays
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.call_rows import call_rows
from cupyattn.runtime.checks import require_bool, require_given
from cupyattn.runtime.numbers import factor
from cupyattn.runtime.outputs import take_grads, take_out


class LayerNormGrads(NamedTuple):
    """Gradients of `layer_norm`'s inputs, each of its input's shape.

    As ``grads=`` None, the default, stands for an array that is to be made.

    Attributes
    ----------
    dx : array (..., N)
        Of x; with a residual of both terms of the sum.
    dweight : array (N,), or None
        Of the weight, summed over rows; None without weight.
    dbias : array (N,), or None
        Of the bias, likewise.
    """

    dx: Array = None
    dweight: Array | None = None
    dbias: Array | None = None


class RMSNormGrads(NamedTuple):
    """Gradients of `rms_norm`'s inputs, each of its input's shape.

    As ``grads=`` None, the default, stands for an array that is to be made.

    Attributes
    ----------
    dx : array (..., N)
        Of x; with a residual of both terms of the sum.
    dweight : array (N,), or None
        Of the weight, summed over rows; None without weight.
    """

    dx: Array = None
    dweight: Array | None = None


def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    /,
    *,
    residual: Array | None = None,
    eps: float = 1e-5,
    return_stats: bool = False,
    out: Any = None,
) -> Any:
    r"""Layer norm over the last axis: ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``.

    Parameters
    ----------
    x : array (..., N)
        float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside of the
        emulator. The last axis is contiguous; the others may have any stride.
    weight, bias : array (N,), dtype of x, optional
        What the normalised rows are multiplied by, and what is added to that.
    residual : array (..., N), dtype of x, optional
        Added to x first, in the same pass; what is normalised is the rounded sum.
    eps : float
        Added to the variance; 0 or more.
    return_stats : bool
        Whether to return mean and rstd too, which `layer_norm_backward` takes.
    out : array or tuple of arrays, optional
        Where to write the results: an array, or a tuple of as many as are returned. The first may
        be x, and total may be residual, item for item; otherwise they overlap no input.

    Returns
    -------
    array (..., N), dtype of x, or a tuple
        ``out``; with a residual ``(out, total)``, total being x + residual; with return_stats mean
        and rstd behind them, float32 (...) (float64 of float64 arrays): of each row its mean, and
        ``1 / sqrt(var + eps)``. A row with a NaN or an infinity gives NaN.

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, dtypes that are not allowed or
        differ, and an out of another form than the results.
    ValueError
        For arrays whose shapes disagree, a last axis that is not contiguous, an eps that is
        negative or not finite, and an out that does not fit or overlaps an input; for kernels also
        if more than four axes before the last lie unevenly in memory.
    RuntimeError
        As `attention`.

    Notes
    -----
    Ba, Kiros, Hinton, arXiv:1607.06450. float32 inside, one rounding. Statistics are those of the
    values that are normalised: of total as it is returned. The variance is the mean square of
    differences (Chan, Golub, LeVeque, The American Statistician 37, 1983), so rows with a large
    mean lose nothing. On a GPU a row of up to 16,384 items is read once; a longer one twice.
    Squares are float32 there: a row whose squared differences sum to more than 3e38 (items of about
    1e19) gives zeros, and differences below 1.1e-19 count as 0, which with eps = 0 may divide by
    it. Of a row whose items themselves sum to more the mean is no number, nor is out.

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
    return _forward(arrays, ("mean", "rstd"), eps, return_stats, out, centred=True)


def rms_norm(
    x: Array,
    weight: Array | None = None,
    /,
    *,
    residual: Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    return_stats: bool = False,
    out: Any = None,
) -> Any:
    r"""RMS norm over the last axis: ``x / sqrt(mean(x**2) + eps) * (weight_offset + weight)``.

    Parameters
    ----------
    x : array (..., N)
        As for `layer_norm`.
    weight : array (N,), dtype of x, optional
        What the normalised rows are multiplied by.
    residual : array (..., N), dtype of x, optional
        Added to x first, in the same pass; what is normalised is the rounded sum.
    eps : float
        Added to the mean square; 0 or more.
    weight_offset : float
        Added to the weight: 1.0 in Gemma's models, whose weights are kept around 0.
    return_stats : bool
        Whether to return rstd too, which `rms_norm_backward` takes.
    out : array or tuple of arrays, optional
        As for `layer_norm`.

    Returns
    -------
    array (..., N), dtype of x, or a tuple
        ``out``; with a residual ``(out, total)`` as of `layer_norm`; with return_stats rstd behind
        them, float32 (...) (float64 of float64 arrays): ``1 / sqrt(mean(x**2) + eps)`` of each row.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `layer_norm`.

    Notes
    -----
    Zhang and Sennrich, arXiv:1910.07467. float32 inside, one rounding; on a GPU a float32 row
    whose squares sum to more than 3e38 (items of about 1e19) gives zeros, and items below 1.1e-19
    count as 0 in the mean square, which with eps = 0 may divide by it.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cupyattn.rms_norm(np.array([[1.0, 7.0]], np.float32), eps=0.0)
    array([[0.2, 1.4]], dtype=float32)
    """
    arrays = NormArrays(x, residual, weight)
    return _forward(
        arrays, ("rstd",), eps, return_stats, out, centred=False, weight_offset=weight_offset
    )


def _forward(
    arrays: NormArrays[Array],
    statistics: tuple[str, ...],
    eps: float,
    return_stats: bool,
    out: Any,
    *,
    centred: bool,
    weight_offset: float = 0.0,
) -> Any:
    require_bool("return_stats", return_stats)
    factor("eps", eps, least=0.0)
    factor("weight_offset", weight_offset)
    wanted = statistics if return_stats else ()
    names = ("out", *(("total",) if arrays.residual is not None else ()), *wanted)
    results = call_rows(
        norms.FORWARD,
        take_out(arrays, out, names),
        reference.norm,
        wanted=wanted,
        choices={"centred": centred},
        scalars={"eps": float(eps), "weight_offset": float(weight_offset)},
    )
    if len(names) == 1:
        return results.out
    return tuple([getattr(results, name) for name in names])


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
    dout : array (..., N), dtype of x
        Gradient with respect to out.
    x : array (..., N)
        What was normalised: the x of `layer_norm`, or **with a residual total, which it returned**.
    weight : array (N,), dtype of x, or None
        As given to `layer_norm`.
    mean, rstd : array (...), float32 (float64 beside float64 arrays)
        What it returned with ``return_stats=True``.
    bias : array (N,), dtype of x, optional
        As given to `layer_norm`: then there is a dbias. It is not read.
    dtotal : array (..., N), dtype of x, optional
        With a residual, the gradient with respect to total, where that was used.
    grads : LayerNormGrads, optional
        Arrays to write the gradients into, each with the shape and dtype of what it belongs to; the
        last axis is contiguous. A field that is None makes a new one. dx overlaps no input.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes;
        otherwise it is allocated: partial sums of dweight and dbias, 4 * N bytes of each for each
        CTA. An error says how many. With grads and workspace a call allocates nothing.

    Returns
    -------
    LayerNormGrads
        ``(dx, dweight, dbias)``; without weight and bias these are None. With a residual dx is the
        gradient of x and of the residual alike.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `layer_norm`; for mean and rstd of another shape or dtype; for grads that do not fit
        their arrays, or belong to one that was not given; of kernels for a workspace that is too
        small.

    Notes
    -----
    With n = (x - mean) * rstd and g = dout * weight: dx = rstd * (g - mean(g) - n * mean(g * n)) +
    dtotal, dweight = sum(dout * n) and dbias = sum(dout) over rows, in a fixed order: the same
    from run to run. What a mean lost when it was rounded to float32 is taken from n again: of 1e4
    it is up to 5e-4.

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
    results = _backward(LayerNormGrads, arrays, grads, accumulate)
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
    dout : array (..., N), dtype of x
        Gradient with respect to out.
    x : array (..., N)
        What was normalised: the x of `rms_norm`, or **with a residual total, which it returned**.
    weight : array (N,), dtype of x, or None
        As given to `rms_norm`.
    rstd : array (...), float32 (float64 beside float64 arrays)
        What it returned with ``return_stats=True``.
    weight_offset : float
        As given to `rms_norm`.
    dtotal : array (..., N), dtype of x, optional
        With a residual, the gradient with respect to total, where that was used.
    grads : RMSNormGrads, optional
        As for `layer_norm_backward`.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.
    workspace : array, optional
        As for `layer_norm_backward`.

    Returns
    -------
    RMSNormGrads
        ``(dx, dweight)``; without weight that is None. With a residual dx is the gradient of x and
        of the residual alike.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `layer_norm_backward`.

    Notes
    -----
    With n = x * rstd and g = dout * (weight_offset + weight): dx = rstd * (g - n * mean(g * n)) +
    dtotal, and dweight = sum(dout * n) over rows, in a fixed order.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x, dout = np.random.default_rng(0).standard_normal((2, 4, 8), dtype=np.float32)
    >>> out, rstd = cupyattn.rms_norm(x, eps=0.0, return_stats=True)
    >>> dx, dweight = cupyattn.rms_norm_backward(dout, x, None, rstd)
    >>> np.allclose((dx * x).sum(axis=-1), 0, atol=1e-5), dweight  # longer rows give the same
    (True, None)
    """
    factor("weight_offset", weight_offset)
    arrays = NormBackwardArrays(dout, x, dtotal, weight, rstd=rstd, workspace=workspace)
    results = _backward(RMSNormGrads, arrays, grads, accumulate, weight_offset=weight_offset)
    return RMSNormGrads(results.dx, results.dweight)


def _backward(
    kind: type[Any],
    arrays: NormBackwardArrays[Array],
    grads: Any,
    accumulate: bool,
    *,
    weight_offset: float = 0.0,
) -> NormBackwardArrays[Array]:
    require_bool("accumulate", accumulate)
    return call_rows(
        norms.BACKWARD,
        take_grads(arrays, kind, grads, accumulate),
        reference.norm_backward,
        accumulate=bool(accumulate),
        scalars={"weight_offset": float(weight_offset)},
    )
