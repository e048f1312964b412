"""Norms whose result is quantised to int8 rows in the same pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupyattn.ops.linear.api_quantised import quantize_rows
from cupyattn.ops.linear.row_formats import (
    QuantizedRows,
    quantized_rows,
    require_row_length,
    require_rows_out,
)
from cupyattn.ops.linear.weight_formats import ROTATION
from cupyattn.ops.norms.kernels import CODED_FORWARD, FORWARD, CodedArrays, NormArrays
from cupyattn.ops.norms.reference import Results
from cupyattn.runtime.arrays import adopt
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import FLOATS, require_dtype
from cupyattn.runtime.outputs import named_out
from cupyattn.runtime.records import values_of
from cupyattn.runtime.rows import RowOptions, RowProblem, call_rows, row_problem, run_rows


def emits_codes(problem: RowProblem, arch: int) -> bool:
    """Tell whether CODED_FORWARD can write codes of these rows in the same pass.

    A row is in registers, by vectors, and a rotated block is in the lanes of one row.
    """
    config, vec = CODED_FORWARD.config(arch, problem.length), problem.vector
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
    coded: CodedArrays[Any] = CodedArrays(*values_of(arrays))
    if isinstance(rows, QuantizedRows):
        coded.codes, coded.scales = rows.codes, rows.scales
    operands = adopt(coded, CODED_FORWARD.fixes)
    choices = {**dict(options.choices), "rotated": rotation is not None}
    wanted = (*options.wanted, "codes")
    with_codes = options._replace(choices=(*choices.items(),), wanted=wanted)
    problem = row_problem(CODED_FORWARD, operands, with_codes)
    require_dtype("x", problem.layouts["x"], FLOATS)
    require_row_length(problem.shape, rotation)
    if rows is not None:
        require_rows_out(rows, problem.shape, rotation, problem.dtype)
    device = device_of(operands)
    if device is not None and emits_codes(problem, device.arch.number):
        arrays = coded = run_rows(device, problem, operands)
        codes: Any = coded.codes
        scales: Any = coded.scales
        made = quantized_rows(codes, scales, rotation, problem.dtype) if rows is None else rows
    else:
        arrays = call_rows(FORWARD, arrays, exact, options)
        normalised: Any = arrays.out
        made = quantize_rows(normalised, rotation=rotation, out=rows)
    if len(names) == 1:
        return made
    return (made, *(getattr(arrays, name) for name in names[1:]))
