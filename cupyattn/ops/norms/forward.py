"""Forward calls of both norms: of rows, of a float32 stream, and with a quantised result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cupyattn.ops.linear.api_quantised import quantize_rows
from cupyattn.ops.linear.row_formats import (
    QuantizedRows,
    quantized_rows,
    require_row_format,
    require_row_length,
    require_rows_out,
)
from cupyattn.ops.linear.weight_formats import ROTATION
from cupyattn.ops.norms import reference
from cupyattn.ops.norms.kernels import (
    ADDED_FORWARD,
    FORWARD,
    STREAM_FORWARD,
    AddedArrays,
    NormArrays,
    StreamArrays,
)
from cupyattn.ops.norms.reference import Results
from cupyattn.runtime.arrays import Array, adopt
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import FLOATS, checked_once, factor, require_bool, require_dtype
from cupyattn.runtime.differentiable import recorder
from cupyattn.runtime.errors import error
from cupyattn.runtime.outputs import named_out, take_out
from cupyattn.runtime.rows import RowOptions, RowProblem, call_rows, row_problem, run_rows

_FLOAT32 = np.dtype(np.float32)


def emits_codes(problem: RowProblem, arch: int) -> bool:
    """Tell whether FORWARD can write codes of these rows in the same pass.

    A row is in registers, by vectors, and a rotated block is in the lanes of one row.
    """
    config, vec = FORWARD.config(arch, problem.length), problem.vector
    return bool(config.items) and vec > 1 and config.lanes * vec >= ROTATION


def quantised_forward(
    arrays: NormArrays[Any],
    out: Any,
    names: tuple[str, ...],
    exact: Callable[..., Results],
    options: RowOptions,
    rotation: int | None,
) -> Any:
    """Run a norm whose out is quantised: in one pass, or in two where its kernel cannot."""
    given = named_out(out, names)
    rows = given.pop("out", None)
    for name, array in given.items():
        setattr(arrays, name, array)
    if isinstance(rows, QuantizedRows):
        arrays.codes, arrays.scales = rows.codes, rows.scales
    operands = adopt(arrays, FORWARD.fixes)
    choices = {**dict(options.choices), "rotated": rotation is not None}
    wanted = (*options.wanted, "codes")
    with_codes = options._replace(choices=(*choices.items(),), wanted=wanted)
    problem = row_problem(FORWARD, operands, with_codes)
    require_dtype("x", problem.layouts["x"], FLOATS)
    require_row_length(problem.shape, rotation)
    if rows is not None:
        require_rows_out(rows, problem.shape, rotation, problem.dtype)
    device = device_of(operands)
    if device is not None and emits_codes(problem, device.arch.number):
        arrays = run_rows(device, problem, operands)
        codes: Any = arrays.codes
        scales: Any = arrays.scales
        made = quantized_rows(codes, scales, rotation, problem.dtype) if rows is None else rows
    else:
        arrays.codes = arrays.scales = None
        arrays = call_rows(FORWARD, arrays, exact, options)
        normalised: Any = arrays.out
        made = quantize_rows(normalised, rotation=rotation, out=rows)
    if len(names) == 1:
        return made
    return (made, *(getattr(arrays, name) for name in names[1:]))


def run_forward(
    arrays: NormArrays[Array],
    x_scale: Array | None,
    eps: float,
    weight_offset: float,
    return_stats: bool,
    out: Any,
    *,
    centred: bool,
    quantize: Any,
    rotation: Any,
) -> Any:
    """Check the options of a norm, run it, and return its results."""
    added = arrays.residual is not None
    options, names, exact = _forward_options(return_stats, eps, weight_offset, centred, added)
    stream = x_scale is not None or is_stream(arrays.residual if added else arrays.x, arrays.weight)
    coded = quantize is not None or rotation is not None
    if coded:
        rotation = require_row_format(quantize, rotation)
        if not stream:
            return quantised_forward(arrays, out, names, exact, options, rotation)
        given = named_out(out, names)
        rows = given.pop("out", None)
        for name, array in given.items():
            setattr(arrays, name, array)
    elif out is not None:
        take_out(arrays, out, names)
    results: NormArrays[Array] | StreamArrays[Array]
    if stream:
        results = _of_stream_forward(arrays, x_scale, exact, options)
    else:
        results = call_rows(FORWARD, arrays, exact, options)
    if coded:
        assert results.out is not None
        made = quantize_rows(results.out, rotation=rotation, out=rows)
        return made if len(names) == 1 else (made, *(getattr(results, n) for n in names[1:]))
    if len(names) == 1:
        assert results.out is not None
        return results.out
    return tuple([getattr(results, name) for name in names])


def _of_stream_forward(
    arrays: NormArrays[Array],
    x_scale: Array | None,
    exact: Callable[..., reference.Results],
    options: RowOptions,
) -> StreamArrays[Array]:
    """Run the forward of a float32 stream, which may be the residual of 16-bit rows."""
    x, stream = arrays.x, arrays.residual
    weight, bias = arrays.weight, arrays.bias
    results = arrays.out, arrays.total, arrays.mean, arrays.rstd
    if stream is None and x_scale is None:
        alone = StreamArrays(x, None, weight, bias, None, *results)
        return call_rows(STREAM_FORWARD, alone, exact, options)
    if not is_stream(stream, arrays.weight):
        raise error(
            ValueError,
            "x_scale without a float32 residual of a float16 or bfloat16 x",
            "x is scaled only where it is added to a residual of more precision",
            "leave x_scale out, or scale x before the call",
        )
    if recorder.get() is not None:
        raise error(
            NotImplementedError,
            "vjp of a norm of x in 16 bits and a float32 residual",
            "one array would be the gradient of both, in two dtypes",
            "add them before the norm, or call the backward of the norm yourself",
        )
    assert stream is not None
    of_sum = AddedArrays(stream, x, weight, bias, x_scale, *results)
    return call_rows(ADDED_FORWARD, of_sum, exact, options)


def is_stream(rows: object, weight: object) -> bool:
    """Tell whether rows are a float32 residual stream, of a model in a 16-bit dtype."""
    kind = getattr(weight, "dtype", None)
    return getattr(rows, "dtype", None) is _FLOAT32 and getattr(kind, "itemsize", 0) == 2


@checked_once
def _forward_options(
    return_stats: object, eps: object, weight_offset: object, centred: bool, added: bool
) -> tuple[RowOptions, tuple[str, ...], Callable[..., reference.Results]]:
    """Check options; return those of the kernel, the names of the results, and the reference."""
    require_bool("return_stats", return_stats)
    added_to_square = factor("eps", eps, least=0.0)
    offset = factor("weight_offset", weight_offset)
    wanted: tuple[str, ...] = ()
    if return_stats:
        wanted = ("mean", "rstd") if centred else ("rstd",)
    options = RowOptions.of(
        choices={"centred": centred, "rotated": False},
        wanted=wanted,
        eps=added_to_square,
        weight_offset=offset,
    )
    names = ("out", *(("total",) if added else ()), *wanted)
    exact = partial(reference.norm, centred=centred, eps=added_to_square, weight_offset=offset)
    return options, names, exact
