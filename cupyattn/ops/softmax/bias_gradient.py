"""The gradients of softmax and its logarithm: of x, and of a bias beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cupyattn.ops.softmax import reference
from cupyattn.ops.softmax.dbias import ROW_SUM_DTYPE, scratch_bytes, softmax_dbias
from cupyattn.ops.softmax.kernels import BACKWARD, FORWARD
from cupyattn.ops.softmax.scores import SoftmaxGrads, call_along
from cupyattn.runtime.arrays import Array, adopt, is_contiguous, layouts_of
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.broadcast import broadcast_layout
from cupyattn.runtime.checks import require_arrays, require_bool, require_kernel_dtype
from cupyattn.runtime.errors import error, made_beforehand
from cupyattn.runtime.numbers import factor, integer
from cupyattn.runtime.outputs import named_grads
from cupyattn.runtime.overlaps import require_apart
from cupyattn.runtime.plan import Output, allot
from cupyattn.runtime.rounding import round_into

_SHOWN_AS = {name: f"grads.{name}" for name in SoftmaxGrads._fields}
_BYTES = np.dtype(np.uint8)


def softmax_gradients(
    exact: Callable[..., np.ndarray],
    arrays: dict[str, Any],
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
    arrays : dict
        dout and out, and bias and workspace or None.
    logarithm : bool
        Of the logarithm of softmax.
    """
    if arrays["bias"] is None:
        if isinstance(grads, tuple):
            raise error(
                TypeError,
                f"grads is a {type(grads).__name__}, and bias is None",
                "without a bias it is one array, that of dx",
                "pass grads=dx, or the bias of the call",
            )
        alone = {"dout": arrays["dout"], "out": arrays["out"], "dx": grads}
        return call_along(
            axis, BACKWARD, alone, exact, scale=scale, accumulate=accumulate, logarithm=logarithm
        )
    scale = factor("scale", scale)
    require_bool("accumulate", accumulate)
    into = named_grads(SoftmaxGrads, grads, accumulate)
    operands = adopt({**arrays, **into}, shown_as=_SHOWN_AS)
    layouts, given = layouts_of(operands.description), operands.arrays
    require_arrays(layouts, ("dout", "out", "bias"))
    out, bias = layouts["out"], layouts["bias"]
    _require_last(axis, len(out.shape))
    broadcast_layout(FORWARD, "bias", bias, out)
    results = {"dx": Output(out.shape, out.dtype), "dbias": Output(bias.shape, bias.dtype)}
    require_apart(operands, results, _SHOWN_AS)
    if "dbias" in layouts and not is_contiguous(layouts["dbias"]):
        raise error(
            ValueError,
            f"grads.dbias has strides {layouts['dbias'].strides}",
            "it is contiguous in C order",
            made_beforehand("grads.dbias"),
        )
    device = device_of(operands)
    read = {name: given[name] for name in ("dout", "out")}

    def gradient(**scratch: Array) -> Array:
        return call_along(
            -1,
            BACKWARD,
            {**read, "dx": given.get("dx"), **scratch},
            exact,
            scale=scale,
            accumulate=accumulate and "dx" in given,
            logarithm=logarithm,
        )

    if device is None:
        sums = reference.broadcast_sums(exact(given["dout"], given["out"]), bias.shape)
        if accumulate and "dbias" in given:
            sums = sums + given["dbias"].astype(sums.dtype)
        return SoftmaxGrads(gradient(), round_into(given.get("dbias"), sums, bias.dtype))

    require_kernel_dtype("dout", layouts["dout"].dtype)
    read_by_sums = {**read, "bias": given["bias"]}
    needed = scratch_bytes(device, adopt(read_by_sums).description)
    scratch = {
        "row_sum": Output(out.shape[:-1], ROW_SUM_DTYPE),
        "sums": Output((needed,), _BYTES),
    }
    memory = allot(device, scratch, given.get("workspace"))
    row_sum = memory["row_sum"]
    dx = gradient(row_sum=row_sum)
    summed = adopt(
        {
            **read_by_sums,
            "row_sum": row_sum,
            "dbias": given.get("dbias"),
            "workspace": memory["sums"],
        }
    )
    dbias = softmax_dbias(device, summed, logarithm=logarithm, accumulate=bool(accumulate))
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
