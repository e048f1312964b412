"""What the functions over rows have in common: arrays taken, call checked, CPU or kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from cupyattn.runtime.arrays import adopt
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.records import R
from cupyattn.runtime.rounding import round_into
from cupyattn.runtime.row_kernel import RowKernel
from cupyattn.runtime.rows import array_fixes, row_problem, run_rows
from cupyattn.runtime.value_checks import checks_values


def call_rows(
    kernel: RowKernel,
    arrays: R,
    reference: Callable[..., np.ndarray | tuple[np.ndarray | None, ...]],
    *,
    wanted: Iterable[str] = (),
    accumulate: bool = False,
    check_values: Callable[[R], None] | None = None,
    choices: Mapping[str, Any] = MappingProxyType({}),
    scalars: Mapping[str, Any] = MappingProxyType({}),
) -> R:
    """Run an operation on the arrays of its record; return them with the results.

    Parameters
    ----------
    kernel : RowKernel
        The operation.
    arrays : Record
        Its inputs, and the results that are given to be written; None for those not given.
    reference : callable
        Takes the inputs in their order, None for those not given, and the choices and scalars by
        name; returns the results in their order.
    wanted : iterable of str
        Optional results to make where none was given.
    accumulate : bool
        Add to the gradients given, instead of writing over them.
    check_values : callable, optional
        Takes the arrays, and raises for values that are not allowed; called where `backend` says
        that values are looked at.
    choices, scalars : mapping
        The kernel's.
    """
    operands = adopt(arrays, array_fixes(kernel))
    problem = row_problem(
        kernel, operands, wanted=wanted, choices=choices, scalars=scalars, accumulate=accumulate
    )
    if check_values is not None and checks_values(operands):
        check_values(operands.arrays)
    device = device_of(operands)
    if device is not None:
        return run_rows(device, problem, operands)
    inputs = [getattr(arrays, name) for name in kernel.inputs]
    exact = reference(*inputs, **choices, **scalars)
    # Results behind the reference's are between kernels, and none of a call on the CPU.
    values = exact if isinstance(exact, tuple) else (exact,)
    exacts = dict(zip(kernel.results, values, strict=False))
    for name, output in problem.outputs.items():
        target, result = getattr(arrays, name), exacts.get(name)
        assert result is not None, f"the reference gives no {name}"
        if accumulate and target is not None:
            with np.errstate(invalid="ignore"):  # inf - inf is NaN, as on a GPU
                result = target.astype(result.dtype) + result
        setattr(arrays, name, round_into(target, result, output.dtype))
    return arrays
