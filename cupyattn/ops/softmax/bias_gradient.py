"""Gradients of softmax and its logarithm with respect to x and a bias: two kernels of one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cupyattn.ops.softmax import reference
from cupyattn.ops.softmax.kernels import (
    BACKWARD,
    FORWARD,
    ROW_SUM_DTYPE,
    BiasSumArrays,
    SoftmaxBackwardArrays,
    bias_sum_bytes,
    sum_bias_gradient,
)
from cupyattn.runtime.arrays import Array, Layout, adopt, contiguous, is_contiguous, layouts_of
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import (
    checked_once,
    factor,
    integer,
    require_apart,
    require_bool,
    require_given,
    require_kernel_dtype,
)
from cupyattn.runtime.errors import error, made_beforehand
from cupyattn.runtime.outputs import round_into
from cupyattn.runtime.plan import Output, allot
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.rows import RowOptions, broadcast_layout, call_rows

_BYTES = np.dtype(np.uint8)

Reference = Callable[..., np.ndarray]


class SoftmaxGrads(NamedTuple):
    """Gradients of the inputs of `softmax` or `log_softmax`, each of its input's shape.

    In ``grads=`` a field that is None, the default, makes a new array.

    Attributes
    ----------
    dx : array (..., N)
        Gradient with respect to x.
    dbias : array of bias's shape
        Gradient with respect to the bias, summed over the axes that it broadcast along.
    """

    dx: Array | None = None
    dbias: Array | None = None


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


@checked_once
def backward_options(
    gradient: Reference, scale: object, accumulate: object, logarithm: bool
) -> tuple[Reference, RowOptions]:
    """Check the options of a backward; return the reference of dx with them, and the kernel's."""
    scale = factor("scale", scale)
    require_bool("accumulate", accumulate)
    choices = {"logarithm": logarithm}
    options = RowOptions.of(choices=choices, accumulate=bool(accumulate), scale=scale)
    return partial(gradient, scale=scale), options


def softmax_gradients(
    arrays: BiasGradientArrays[Array],
    axis: Any,
    gradient: Reference,
    exact: Reference,
    options: RowOptions,
) -> SoftmaxGrads:
    """Return dx and dbias, the gradient of the scores summed over the axes that bias lacks.

    Parameters
    ----------
    arrays : BiasGradientArrays
        All arrays of the call.
    axis : int
        The axis that softmax ran over: an error unless it is the last.
    gradient : callable
        The reference of the gradient of the scores.
    exact, options
        The reference of dx and the options of its kernel, from `backward_options`.
    """
    operands = adopt(arrays)
    layouts = layouts_of(BiasGradientArrays[Layout], operands.description)
    require_given("dout", layouts.dout)
    require_given("out", layouts.out)
    out, bias = layouts.out, layouts.bias
    assert bias is not None
    assert arrays.bias is not None
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
    device, accumulate = device_of(operands), options.accumulate
    if arrays.dx is None:
        options = options._replace(accumulate=False)
    if device is None:
        exact_dbias = reference.broadcast_sums(gradient(arrays.dout, arrays.out), bias.shape)
        if accumulate and arrays.dbias is not None:
            exact_dbias = exact_dbias + arrays.dbias.astype(exact_dbias.dtype)
        dx = call_rows(
            BACKWARD, SoftmaxBackwardArrays(arrays.dout, arrays.out, arrays.dx), exact, options
        ).dx
        return SoftmaxGrads(dx, round_into(arrays.dbias, exact_dbias, bias.dtype))

    require_kernel_dtype("dout", layouts.dout.dtype)
    statistics = Output(out.shape[:-1], ROW_SUM_DTYPE)
    dout, outs, biases = (operands.description[n] for n in range(3))
    row_sums = (*contiguous(*statistics)[:2], ROW_SUM_DTYPE, 0)
    needed = bias_sum_bytes(device, (dout, outs, biases, row_sums, None, None))
    row_sum, sums = allot(device, [statistics, Output((needed,), _BYTES)], arrays.workspace)
    each = SoftmaxBackwardArrays(arrays.dout, arrays.out, arrays.dx, row_sum)
    dx = call_rows(BACKWARD, each, exact, options).dx
    summed = BiasSumArrays(arrays.dout, arrays.out, arrays.bias, row_sum, arrays.dbias, sums)
    logarithm = dict(options.choices)["logarithm"]
    dbias = sum_bias_gradient(device, adopt(summed), logarithm=logarithm, accumulate=accumulate)
    return SoftmaxGrads(dx, dbias)


def require_bias_gradient(call: Mapping[str, Any]) -> None:
    """Raise ValueError if a recorded call of softmax has no gradient with respect to its bias."""
    _require_last(call["axis"], call["out"].ndim)


def _require_last(axis: Any, rank: int) -> None:
    if integer("axis", axis) not in (-1, rank - 1):
        raise error(
            ValueError,
            f"axis = {axis!r} with a bias",
            "the gradient of a bias is available only for softmax over the last axis",
            "pass transposed views, or sum the gradient with a scale of 1 over the bias's axes",
        )
