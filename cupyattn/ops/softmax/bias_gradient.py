"""The gradients of softmax and its logarithm: of x, and of a bias beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from cupyattn.ops.softmax import reference
from cupyattn.ops.softmax.dbias import ROW_SUM_DTYPE, scratch_bytes, softmax_dbias
from cupyattn.ops.softmax.kernels import BACKWARD, FORWARD, SoftmaxBackwardArrays
from cupyattn.ops.softmax.kernels_dbias import BiasSumArrays
from cupyattn.ops.softmax.scores import SoftmaxGrads, call_along
from cupyattn.runtime.arrays import Array, Layout, adopt, contiguous, is_contiguous, layouts_of
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.broadcast import broadcast_layout
from cupyattn.runtime.checks import require_bool, require_given, require_kernel_dtype
from cupyattn.runtime.errors import error, made_beforehand
from cupyattn.runtime.numbers import factor, integer
from cupyattn.runtime.outputs import take_grads
from cupyattn.runtime.overlaps import require_apart
from cupyattn.runtime.plan import Output, allot
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.rounding import round_into

_BYTES = np.dtype(np.uint8)


@dataclass(slots=True)
class BiasGradientArrays(Record[T]):
    """Arrays of a backward of softmax whose bias has a gradient."""

    SHOWN_AS: ClassVar = MappingProxyType({"dx": "grads.dx", "dbias": "grads.dbias"})

    dout: T
    out: T
    bias: T | None = None
    workspace: T | None = None
    dx: T | None = None
    dbias: T | None = None


def softmax_gradients(
    exact: Callable[..., np.ndarray],
    arrays: BiasGradientArrays[Array],
    grads: Any,
    axis: Any,
    scale: Any,
    accumulate: Any,
    *,
    logarithm: bool,
) -> Any:
    """Return dx; with a bias both, dbias being the sum over the axes that bias has not.

    Parameters
    ----------
    exact : callable
        The reference of the gradient without a bias.
    arrays : BiasGradientArrays
        dout and out, and perhaps bias and workspace.
    logarithm : bool
        Whether it is the gradient of log_softmax.
    """
    if arrays.bias is None:
        if isinstance(grads, tuple):
            raise error(
                TypeError,
                f"grads is a {type(grads).__name__}, and bias is None",
                "without a bias it is one array, that of dx",
                "pass grads=dx, or the bias of the call",
            )
        alone = SoftmaxBackwardArrays(arrays.dout, arrays.out, grads)
        return call_along(
            axis, BACKWARD, alone, exact, scale=scale, accumulate=accumulate, logarithm=logarithm
        )
    scale = factor("scale", scale)
    require_bool("accumulate", accumulate)
    operands = adopt(take_grads(arrays, SoftmaxGrads, grads, accumulate))
    layouts = layouts_of(BiasGradientArrays[Layout], operands.description)
    require_given("dout", layouts.dout)
    require_given("out", layouts.out)
    out, bias = layouts.out, layouts.bias
    assert bias is not None
    _require_last(axis, len(out.shape))
    broadcast_layout(FORWARD, "bias", bias, out)
    results = {"dx": Output(out.shape, out.dtype), "dbias": Output(bias.shape, bias.dtype)}
    require_apart(operands, results)
    if layouts.dbias is not None and not is_contiguous(layouts.dbias):
        raise error(
            ValueError,
            f"grads.dbias has strides {layouts.dbias.strides}",
            "it is contiguous in C order",
            made_beforehand("grads.dbias"),
        )
    device = device_of(operands)

    def gradient(row_sum: Array | None = None) -> Array:
        return call_along(
            -1,
            BACKWARD,
            SoftmaxBackwardArrays(arrays.dout, arrays.out, arrays.dx, row_sum),
            exact,
            scale=scale,
            accumulate=accumulate and arrays.dx is not None,
            logarithm=logarithm,
        )

    if device is None:
        sums = reference.broadcast_sums(exact(arrays.dout, arrays.out), bias.shape)
        if accumulate and arrays.dbias is not None:
            sums = sums + arrays.dbias.astype(sums.dtype)
        return SoftmaxGrads(gradient(), round_into(arrays.dbias, sums, bias.dtype))

    require_kernel_dtype("dout", layouts.dout.dtype)
    statistics = Output(out.shape[:-1], ROW_SUM_DTYPE)
    dout, outs, biases = (operands.description[n] for n in range(3))
    row_sums = (*contiguous(*statistics)[:2], ROW_SUM_DTYPE, 0)
    needed = scratch_bytes(device, (dout, outs, biases, row_sums, None, None))
    row_sum, sums = allot(device, [statistics, Output((needed,), _BYTES)], arrays.workspace)
    dx = gradient(row_sum)
    summed = BiasSumArrays(arrays.dout, arrays.out, arrays.bias, row_sum, arrays.dbias, sums)
    dbias = softmax_dbias(device, adopt(summed), logarithm=logarithm, accumulate=bool(accumulate))
    return SoftmaxGrads(dx, dbias)


def require_bias_gradient(call: Mapping[str, Any]) -> None:
    """Raise ValueError if a call of softmax, by names, has no gradient of its bias."""
    _require_last(call["axis"], call["out"].ndim)


def _require_last(axis: Any, rank: int) -> None:
    if integer("axis", axis) not in (-1, rank - 1):
        raise error(
            ValueError,
            f"axis = {axis!r} with a bias",
            "the gradient of a bias is that of scores along the last axis",
            "pass transposed views, or sum the gradient with a scale of 1 over the bias's axes",
        )
