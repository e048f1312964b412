"""Runs of the forward kernels, and their errors over the reference's derived bounds."""

from __future__ import annotations

import numpy as np
from support.devices import FLOAT_DTYPES, KERNELS, placed
from support.strategies import AttentionProblem

import cupyattn
from cupyattn import reference
from cupyattn.ops.attention.kernels.float32.forward import flash_row as flash_f32_row
from cupyattn.ops.attention.kernels.teaching.forward import TILED_TILE_K
from cupyattn.ops.attention.kernels.tensor_core.forward import flash_row

TEACHING = ("naive", "tiled")


def run(problem: AttentionProblem, implementation: str) -> tuple[np.ndarray, np.ndarray]:
    """Run one problem on the device; returns out and lse as NumPy arrays."""
    arrays = [KERNELS.put(array) for array in problem.arrays()]
    options = {name: placed(KERNELS, value) for name, value in problem.options().items()}
    out, lse = cupyattn.attention(
        *arrays, **options, return_lse=True, implementation=implementation
    )
    return KERNELS.get(out), KERNELS.get(lse)


def check(problem: AttentionProblem, implementation: str) -> None:
    """Run one problem: out and lse are within their bounds."""
    ratios = ratios_of(problem, run(problem, implementation), implementation)
    assert max(ratios.values()) <= 1, ratios


def ratios_of(
    problem: AttentionProblem, found: tuple[np.ndarray, np.ndarray], implementation: str
) -> dict[str, float]:
    """The errors of out and lse over their bounds."""
    arrays, options = problem.arrays(), problem.options()
    tile_k = min(TILED_TILE_K, flash_row(75, problem.D, problem.Dv).tile_k)
    assert tile_k <= flash_f32_row(75, problem.D, problem.Dv).tile_k
    exact = reference.attention(*arrays, **options)
    bounds = reference.attention_bound(
        *arrays,
        dtype=problem.dtype,
        tile_k=tile_k,
        float32_weights=implementation in TEACHING or problem.dtype in FLOAT_DTYPES,
        **options,
    )
    return {
        name: reference.error_ratio(*each)
        for name, *each in zip(("out", "lse"), found, exact, bounds, strict=True)
    }
