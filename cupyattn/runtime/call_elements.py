"""What the element-wise functions have in common: arrays taken, call checked, CPU or kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cupyattn.runtime.arrays import adopt
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
from cupyattn.runtime.records import R
from cupyattn.runtime.rounding import round_into


def call_elements(
    kernel: ElementKernel,
    arrays: R,
    reference: Callable[..., np.ndarray | tuple[np.ndarray, ...]],
    *,
    parts: Mapping[str, Part] | None = None,
    accumulate: bool = False,
    decided: Mapping[str, str] | None = None,
    scalars: Mapping[str, Any] | None = None,
) -> R:
    """Run an operation on the arrays of its record; return them with the results.

    `reference` takes what the kernel reads in its order, None for what is absent, and returns the
    results in theirs, those that are updated first. `decided` has the kernel's macros.
    """
    require_bool("accumulate", accumulate)
    operands = adopt(arrays, array_fixes(kernel, arrays.SHOWN_AS.values()))
    problem = element_problem(
        kernel, operands, parts=parts, decided=decided, accumulate=bool(accumulate)
    )
    if accumulate and all(getattr(arrays, name) is None for name in problem.outputs):
        shown = (arrays.SHOWN_AS.get(name, name) for name in problem.outputs)
        require_grads(None, True, shown=", ".join(shown))
    device = device_of(operands)
    if device is not None:
        return run_elements(device, problem, operands, **(scalars or {}))
    return _on_cpu(problem, arrays, reference)


def _on_cpu(
    problem: ElementProblem,
    arrays: R,
    reference: Callable[..., np.ndarray | tuple[np.ndarray, ...]],
) -> R:
    kernel, parts = problem.kernel, problem.parts

    def view(name: str) -> Any:
        return parts[name].within(getattr(arrays, parts[name].array)) if name in parts else None

    exact = reference(*(view(name) for name in (*kernel.updated, *kernel.inputs)))
    for name, output in problem.outputs.items():
        if getattr(arrays, name) is None:
            setattr(arrays, name, np.zeros(*output))
    written = (*kernel.updated, *kernel.results)
    for name, result in zip(written, exact if isinstance(exact, tuple) else (exact,), strict=True):
        target = view(name)
        with np.errstate(invalid="ignore"):  # inf - inf is NaN, as on a GPU
            if problem.accumulate:
                result = result + target.astype(np.float64)
        round_into(target, np.asarray(result), target.dtype)
    return arrays
