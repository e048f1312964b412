"""What the functions over rows have in common: arrays taken, call checked, CPU or kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyattn.arrays import Array, adopt
from cupyattn.functional.backend import device_of
from cupyattn.functional.rounding import round_into
from cupyattn.kernels.configs.rows import RowKernel
from cupyattn.ops.rows import row_problem, run_rows


def call_rows(
    kernel: RowKernel,
    arrays: dict[str, Any],
    reference: Callable[..., np.ndarray | tuple[np.ndarray, ...]],
    **scalars: Any,
) -> dict[str, Array]:
    """Run an operation on arrays by name, None for those not given; return its results by name.

    `reference` takes the inputs in their order and the scalars by name, and returns the results in
    theirs.
    """
    operands = adopt(arrays)
    problem = row_problem(kernel, operands, **scalars)
    device = device_of(operands)
    if device is not None:
        return run_rows(device, problem, operands)
    exact = reference(
        *(operands.arrays[name] for name in (*kernel.rows, *kernel.columns)), **scalars
    )
    results = exact if isinstance(exact, tuple) else (exact,)
    return {
        name: round_into(operands.arrays.get(name), result, output.dtype)
        for (name, output), result in zip(problem.outputs.items(), results, strict=True)
    }
