"""Runs of the forward kernels, with split keys too, and their errors over the derived bounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from support.devices import KERNELS, placed

import cupyattn
from cupyattn import reference
from cupyattn.ops.attention import choice
from cupyattn.ops.attention import forward as attention_forward
from cupyattn.ops.attention.kernels.float32.forward import flash_row as flash_f32_row
from cupyattn.ops.attention.kernels.options import FlashOptions
from cupyattn.ops.attention.kernels.teaching.forward import TILED_TILE_K
from cupyattn.ops.attention.kernels.tensor_core.forward import (
    FlashConfig,
    flash_row,
    half_sums_row,
)
from cupyattn.runtime.arch import ARCH_VARIABLE
from cupyattn.runtime.device.cuda import device_count
from cupyattn.testing import AttentionCase

TEACHING = ("naive", "tiled")


def in_float32(dtype: str, native: bool) -> bool:
    """Tell whether the flash forward keeps P of a dtype in float32."""
    return dtype == "float32" or (dtype == "bfloat16" and not native)


def run(problem: AttentionCase, implementation: str, **more: str) -> tuple[np.ndarray, np.ndarray]:
    """Run one problem on the device; returns out and lse as NumPy arrays."""
    arrays = [KERNELS.put(array) for array in problem.arrays()]
    options = {name: placed(KERNELS, value) for name, value in problem.keywords().items()}
    out, lse = cupyattn.attention(
        *arrays, **options, return_lse=True, implementation=implementation, **more
    )
    return KERNELS.get(out), KERNELS.get(lse)


def check(problem: AttentionCase, implementation: str, native: bool | None = None) -> None:
    """Run one problem: out and lse are within their bounds."""
    ratios = ratios_of(problem, run(problem, implementation), implementation, native)
    assert max(ratios.values()) <= 1, ratios


def check_half_sums(problem: AttentionCase) -> None:
    """Run one problem with float16 accumulators: out and lse are within their bounds."""
    found = run(problem, "flash", accumulator="float16")
    keys = max(row.tile_k for row in half_sums_rows(problem.D, problem.Dv))
    ratios = ratios_of(problem, found, "flash", native=False, half_sums=keys)
    assert max(ratios.values()) <= 1, ratios


def half_sums_rows(head_dim: int, head_dim_v: int) -> list[FlashConfig]:
    """The configurations with float16 accumulators for these head dims, with any options."""
    of_options = (FlashOptions(), FlashOptions(dropout=True), FlashOptions(softcap=True))
    return [half_sums_row(75, head_dim, head_dim_v, options) for options in of_options]


def ratios_of(
    problem: AttentionCase,
    found: tuple[np.ndarray, np.ndarray],
    implementation: str,
    native: bool | None = None,
    half_sums: int = 0,
) -> dict[str, float]:
    """The errors of out and lse over their bounds; by default as the device's kernels round."""
    if native is None:
        native = KERNELS.device.traits.native
    arrays, options = problem.arrays(), problem.keywords()
    tile_k = min(TILED_TILE_K, flash_row(75, problem.D, problem.Dv).tile_k)
    assert tile_k <= flash_f32_row(75, problem.D, problem.Dv).tile_k
    exact = reference.attention(*arrays, **options)
    bounds = reference.attention_bound(
        *arrays,
        dtype=problem.dtype,
        tile_k=tile_k,
        float32_weights=implementation in TEACHING or in_float32(problem.dtype, native),
        native=native,
        half_sums=half_sums,
        **options,
    )
    return {
        name: reference.error_ratio(*each)
        for name, *each in zip(("out", "lse"), found, exact, bounds, strict=True)
    }


@contextmanager
def natively(arch: int = 80) -> Iterator[None]:
    """Run the public functions by the kernels of an emulated `arch`, or by those of the GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if not device_count():
            patch.setenv(ARCH_VARIABLE, str(arch))
        elif not KERNELS.device.traits.native:
            pytest.skip("this GPU is older than sm_80")
        with KERNELS.running():
            yield


@contextmanager
def split(into: int, least_keys: int = 1) -> Iterator[None]:
    """Let every dense forward split its keys; parts are whole tiles, of so many keys at least."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "num_splits", lambda *_: into)
        for module in (choice, attention_forward):
            patch.setattr(module, "LEAST_KEYS", least_keys)
        patch.setattr(choice, "_decodes_faster", lambda *_: False)
        attention_forward._plan.cache_clear()  # a plan is remembered for its problem
        yield
    attention_forward._plan.cache_clear()
