"""What the element-wise functions have in common: arrays taken, call checked, CPU or kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cupyattn.runtime.arrays import Array, adopt
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import require_bool
from cupyattn.runtime.element_kernel import ElementKernel
from cupyattn.runtime.elements import (
    ElementProblem,
    Part,
    array_fixes,
    element_problem,
    run_elements,
)
from cupyattn.runtime.outputs import require_grads
from cupyattn.runtime.rounding import round_into


def call_elements(
    kernel: ElementKernel,
    arrays: dict[str, Any],
    reference: Callable[..., np.ndarray | tuple[np.ndarray, ...]],
    *,
    parts: Mapping[str, Part] | None = None,
    accumulate: bool = False,
    decided: Mapping[str, str] | None = None,
    scalars: Mapping[str, Any] | None = None,
) -> dict[str, Array]:
    """Run an operation on arrays by name, None for those not given; return its results by name.

    `reference` takes what the kernel reads in its order, None for what is absent, and returns the
    results in theirs, those that are updated first. `decided` has the kernel's macros.
    """
    require_bool("accumulate", accumulate)
    operands = adopt(arrays, array_fixes(kernel))
    problem = element_problem(
        kernel, operands, parts=parts, decided=decided, accumulate=bool(accumulate)
    )
    if accumulate and not any(name in operands.arrays for name in problem.outputs):
        require_grads(None, True, shown=", ".join(problem.outputs))
    device = device_of(operands)
    if device is not None:
        return run_elements(device, problem, operands, **(scalars or {}))
    return _on_cpu(problem, operands.arrays, reference)


def _on_cpu(
    problem: ElementProblem,
    given: dict[str, Any],
    reference: Callable[..., np.ndarray | tuple[np.ndarray, ...]],
) -> dict[str, Array]:
    kernel, parts = problem.kernel, problem.parts

    def view(name: str, arrays: Mapping[str, Any]) -> Any:
        return parts[name].within(arrays[parts[name].array]) if name in parts else None

    exact = reference(*(view(name, given) for name in (*kernel.updated, *kernel.inputs)))
    results = {
        name: given[name] if name in given else np.zeros(*output)
        for name, output in problem.outputs.items()
    }
    places = {**given, **results}
    written = (*kernel.updated, *kernel.results)
    for name, result in zip(written, exact if isinstance(exact, tuple) else (exact,), strict=True):
        target = view(name, places)
        with np.errstate(invalid="ignore"):  # inf - inf is NaN, as on a GPU
            if problem.accumulate:
                result = result + target.astype(np.float64)
        round_into(target, np.asarray(result), target.dtype)
    return results
