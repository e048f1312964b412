"""Runs of the backward kernels, and their errors over the reference's derived bounds.

Kernels and reference are given the same out and lse, those of the reference's forward, rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from support import devices
from support.devices import KERNELS, dtype_of

import cupyattn
from cupyattn import AttentionGrads, reference
from cupyattn.runtime.outputs import round_into
from cupyattn.testing import AttentionCase

GRADIENTS = AttentionGrads._fields

Arrays = tuple[np.ndarray, ...]


def inputs(problem: AttentionCase) -> tuple[Arrays, dict[str, Any]]:
    """(dout, q, k, v, out, lse) and the options, dlse among them, as NumPy arrays."""
    dout, dlse = problem.gradients()
    options = problem.keywords()
    out, lse = reference.attention(*problem.arrays(), **options)
    results = (
        round_into(None, out, dtype_of(problem.dtype)),
        round_into(None, lse, np.dtype(np.float32)),
    )
    return (dout, *problem.arrays(), *results), {**options, "dlse": dlse}


def placed(options: dict[str, Any]) -> dict[str, Any]:
    return {name: devices.placed(KERNELS, value) for name, value in options.items()}


def fetched(grads: AttentionGrads) -> dict[str, np.ndarray]:
    return {name: KERNELS.get(x) for name, x in grads._asdict().items() if x is not None}


def run(
    arrays: Arrays, options: dict[str, Any], implementation: str, **more: Any
) -> dict[str, np.ndarray]:
    """Gradients by name, as NumPy arrays."""
    grads = cupyattn.attention_backward(
        *map(KERNELS.put, arrays), **placed(options), implementation=implementation, **more
    )
    return fetched(grads)


def error_ratios(
    grads: dict[str, np.ndarray],
    arrays: Arrays,
    options: dict[str, Any],
    *,
    float32_weights: bool = False,
    native: bool | None = None,
) -> dict[str, float]:
    """Largest error over bound, of each gradient; by default as the device's kernels round."""
    exact = reference.attention_backward(*arrays, **options)
    if native is None:
        native = KERNELS.device.traits.native
    bounds = reference.attention_backward_bound(
        *arrays, dtype=arrays[1].dtype, float32_weights=float32_weights, native=native, **options
    )
    expected = {name: x for name, x in exact._asdict().items() if x is not None}
    assert grads.keys() == expected.keys()
    return {
        name: reference.error_ratio(grads[name], expected[name], getattr(bounds, name))
        for name in grads
    }


def check(
    problem: AttentionCase, implementation: str, *, native: bool | None = None, **more: Any
) -> None:
    arrays, options = inputs(problem)
    grads = run(arrays, options, implementation, **more)
    weights = implementation == "naive"
    ratios = error_ratios(grads, arrays, options, float32_weights=weights, native=native)
    assert max(ratios.values()) <= 1, ratios


def check_accumulated(
    grads: dict[str, np.ndarray],
    before: dict[str, np.ndarray],
    arrays: Arrays,
    options: dict[str, Any],
) -> None:
    """Assert that gradients which were added to `before` are within the bounds of the sums."""
    exact = reference.attention_backward(*arrays, **options)
    native = KERNELS.device.traits.native
    bounds = reference.attention_backward_bound(
        *arrays, dtype=arrays[1].dtype, native=native, **options
    )
    for name, start in before.items():
        total = getattr(exact, name) + start
        unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(grads[name].dtype.name, 2.0**-24)
        # The sum rounds once to float32 and once to the dtype, the bound's own store comes on top.
        bound = getattr(bounds, name) + 2 * unit * (np.abs(total) + np.abs(start))
        assert reference.error_ratio(grads[name], total, bound) <= 1, name
