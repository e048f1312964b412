"""Layer norm and RMS norm with an optional residual addition."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, overload

from cupyattn.ops.linear.api_quantised import quantize_rows
from cupyattn.ops.linear.row_formats import require_row_format
from cupyattn.ops.norms import reference
from cupyattn.ops.norms.api_backward import (
    LayerNormGrads,
    RMSNormGrads,
    layer_norm_backward,
    rms_norm_backward,
)
from cupyattn.ops.norms.kernels import (
    ADDED_FORWARD,
    FORWARD,
    STREAM_FORWARD,
    AddedArrays,
    NormArrays,
    StreamArrays,
)
from cupyattn.ops.norms.quantised import quantised_forward
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.checks import checked_once, factor, require_bool
from cupyattn.runtime.differentiable import differentiable, recorder
from cupyattn.runtime.errors import error
from cupyattn.runtime.outputs import named_out, take_out
from cupyattn.runtime.rows import RowOptions, call_rows, is_stream


class RMSNorm(NamedTuple):
    """The weight and the numbers of an RMS norm, for functions that normalise rows themselves.

    A row x becomes ``x / sqrt(mean(x**2) + eps) * (weight_offset + weight)``.

    Attributes
    ----------
    weight : array (N,), dtype of x
        Factor of the normalised rows.
    eps : float
        Added to the mean square; 0 or more.
    weight_offset : float
        Added to the weight, as in `rms_norm`.
    """

    weight: Array
    eps: float = 1e-6
    weight_offset: float = 0.0


class NormNumbers(NamedTuple):
    """The checked numbers of an `RMSNorm`: hashable, a key for caches."""

    eps: float
    weight_offset: float


def norm_numbers(name: str, norm: Any) -> NormNumbers:
    """Return the numbers of the option `name` of a function, which must be an `RMSNorm`.

    Raises
    ------
    TypeError, ValueError
        If it is anything else, has no weight, or has numbers that `rms_norm` refuses.
    """
    if not isinstance(norm, RMSNorm) or norm.weight is None:
        raise error(
            TypeError,
            f"{name} has type {type(norm).__name__}"
            + (" and no weight" if isinstance(norm, RMSNorm) else ""),
            "it must be RMSNorm(weight, eps=1e-6, weight_offset=0.0)",
            f"pass {name}=cupyattn.RMSNorm(weight)",
        )
    return _checked(name, norm.eps, norm.weight_offset)


@checked_once
def _checked(name: str, eps: object, weight_offset: object) -> NormNumbers:
    return NormNumbers(
        factor(f"{name}'s eps", eps, least=0.0),
        factor(f"{name}'s weight_offset", weight_offset),
    )


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
    if quantize is None and rotation is None:
        return _forward(arrays, x_scale, eps, 0.0, return_stats, out, True)
    options = eps, 0.0, return_stats
    return _coded_forward(arrays, x_scale, *options, out, True, quantize, rotation)


@overload
def rms_norm(
    x: Array,
    weight: Array | None = ...,
    /,
    *,
    residual: None = ...,
    x_scale: Array | None = ...,
    x_norm: RMSNorm | None = ...,
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
    x_norm: RMSNorm | None = ...,
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
    x_norm: RMSNorm | None = ...,
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
    x_norm: RMSNorm | None = ...,
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
    x_scale: Array | None = ...,
    x_norm: RMSNorm | None = ...,
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
    x_norm: RMSNorm | None = None,
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
    x_norm : RMSNorm, optional
        A norm of x, with a weight (N,) in the dtype of x, before it is scaled and added to such a
        residual, as in Gemma's layers. Its result is not rounded.
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
    if quantize is None and rotation is None:
        return _forward(arrays, x_scale, eps, weight_offset, return_stats, out, False, x_norm)
    options = eps, weight_offset, return_stats
    return _coded_forward(arrays, x_scale, *options, out, False, quantize, rotation, x_norm)


def _forward(
    arrays: NormArrays[Array],
    x_scale: Array | None,
    eps: float,
    weight_offset: float,
    return_stats: bool,
    out: Any,
    centred: bool,
    x_norm: RMSNorm | None = None,
) -> Any:
    added = arrays.residual is not None
    inner = None if x_norm is None else norm_numbers("x_norm", x_norm)
    given = return_stats, eps, weight_offset, centred, added, inner
    options, names, exact = _forward_options(*given)
    if out is not None:
        take_out(arrays, out, names)
    results: NormArrays[Array] | StreamArrays[Array]
    plain = x_scale is None and x_norm is None
    if plain and not is_stream(arrays.residual if added else arrays.x, arrays.weight):
        results = call_rows(FORWARD, arrays, exact, options)
    else:
        results = _of_stream_forward(arrays, x_scale, x_norm, exact, options)
    if len(names) == 1:
        assert results.out is not None
        return results.out
    return tuple([getattr(results, name) for name in names])


def _coded_forward(
    arrays: NormArrays[Array],
    x_scale: Array | None,
    eps: float,
    weight_offset: float,
    return_stats: bool,
    out: Any,
    centred: bool,
    quantize: Any,
    rotation: Any,
    x_norm: RMSNorm | None = None,
) -> Any:
    """Run a norm whose out is quantised; a float32 stream's in a second launch."""
    added = arrays.residual is not None
    inner = None if x_norm is None else norm_numbers("x_norm", x_norm)
    given = return_stats, eps, weight_offset, centred, added, inner
    options, names, exact = _forward_options(*given)
    rotation = require_row_format(quantize, rotation)
    plain = x_scale is None and x_norm is None
    if plain and not is_stream(arrays.residual if added else arrays.x, arrays.weight):
        return quantised_forward(arrays, out, names, exact, options, rotation)
    results_given = named_out(out, names)
    rows = results_given.pop("out", None)
    for name, array in results_given.items():
        setattr(arrays, name, array)
    results = _of_stream_forward(arrays, x_scale, x_norm, exact, options)
    assert results.out is not None
    made = quantize_rows(results.out, rotation=rotation, out=rows)
    return made if len(names) == 1 else (made, *(getattr(results, name) for name in names[1:]))


def _of_stream_forward(
    arrays: NormArrays[Array],
    x_scale: Array | None,
    x_norm: RMSNorm | None,
    exact: Callable[..., reference.Results],
    options: RowOptions,
) -> StreamArrays[Array]:
    """Run the forward of a float32 stream, which may be the residual of 16-bit rows."""
    x, stream = arrays.x, arrays.residual
    weight, bias = arrays.weight, arrays.bias
    results = arrays.out, arrays.total, arrays.mean, arrays.rstd
    if stream is None and x_scale is None and x_norm is None:
        alone = StreamArrays(x, None, weight, bias, None, None, *results)
        return call_rows(STREAM_FORWARD, alone, exact, options)
    if not is_stream(stream, arrays.weight):
        option, verb = ("x_scale", "scaled") if x_norm is None else ("x_norm", "normalised")
        raise error(
            ValueError,
            f"{option} without a float32 residual of a float16 or bfloat16 x",
            f"x is {verb} only where it is added to a residual of more precision",
            f"leave {option} out, or have x {verb} before the call",
        )
    if recorder.get() is not None:
        raise error(
            NotImplementedError,
            "vjp of a norm of x in 16 bits and a float32 residual",
            "one array would be the gradient of both, in two dtypes",
            "add them before the norm, or call the backward of the norm yourself",
        )
    assert stream is not None
    inner = None if x_norm is None else x_norm.weight
    of_sum = AddedArrays(stream, x, weight, bias, x_scale, inner, *results)
    return call_rows(ADDED_FORWARD, of_sum, exact, options)


@checked_once
def _forward_options(
    return_stats: object,
    eps: object,
    weight_offset: object,
    centred: bool,
    added: bool,
    inner: NormNumbers | None,
) -> tuple[RowOptions, tuple[str, ...], Callable[..., reference.Results]]:
    """Check options; return those of the kernel, the names of the results, and the reference."""
    require_bool("return_stats", return_stats)
    added_to_square = factor("eps", eps, least=0.0)
    offset = factor("weight_offset", weight_offset)
    wanted: tuple[str, ...] = ()
    if return_stats:
        wanted = ("mean", "rstd") if centred else ("rstd",)
    inner = inner or NormNumbers(0.0, 0.0)
    options = RowOptions.of(
        choices={"centred": centred},
        wanted=wanted,
        eps=added_to_square,
        weight_offset=offset,
        inner_eps=inner.eps,
        inner_offset=inner.weight_offset,
    )
    names = ("out", *(("total",) if added else ()), *wanted)
    exact = partial(
        reference.norm,
        centred=centred,
        eps=added_to_square,
        weight_offset=offset,
        inner_eps=inner.eps,
        inner_offset=inner.weight_offset,
    )
    return options, names, exact
