"""The tensor-core backward of sm_80 and later: cp.async, and bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.backward_runs import check, error_ratios, inputs, run
from support.devices import KERNELS
from support.forward_runs import natively
from support.modifiers import blocks_of
from support.search import deep, examples, wider
from support.strategies import (
    EITHER_HALF,
    FRUGAL,
    LONGEST,
    RUN_TIME_OPTIONS,
    attention_problems,
    every_option,
)
from support.varlen import varlen_problems

import cupyattn
from cupyattn import reference
from cupyattn.ops.attention.kernels.tensor_core import (
    backward_dkdv,
    backward_dq,
)
from cupyattn.ops.attention.kernels.tensor_core.backward_dkdv import NATIVE_ONE_PASS
from cupyattn.runtime.arch import ARCH_VARIABLE, arch_of
from cupyattn.runtime.compile import compile_cubin
from cupyattn.testing import AttentionCase

pytestmark = pytest.mark.nvrtc

DTYPES = ("float16", "bfloat16")
ARCHS = (80, 86, 90)
HEAD_DIMS = tuple(NATIVE_ONE_PASS[80])
MODES = [False, *deep(True)]
# Steps of 8 columns with tails, odd head dims, whose rows are not aligned, pairs of warps, D != Dv.
SHAPES = ((24, 40), (64, 64), (5, 8), (88, 96), (128, 128), (136, 192), (256, 249), (8, 256),
          (320, 264), (257, 512))  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("dtype", "head_dims"),
    [("bfloat16", (24, 40)), *deep(*((dtype, dims) for dtype in DTYPES for dims in SHAPES))],
    ids=str,
)
@examples(2, deep=6)
@given(data=st.data())
def test_gradients_within_bounds(dtype: str, head_dims: Any, deterministic: bool, data: Any):
    problems = attention_problems(
        head_dims=(head_dims,), dtypes=(dtype,), options=RUN_TIME_OPTIONS, largest=LONGEST,
        **FRUGAL,
    )  # fmt: skip
    with natively(data.draw(st.sampled_from(wider([80], ARCHS)))):
        check(data.draw(problems), "flash", deterministic=deterministic, native=True)


@pytest.mark.parametrize("deterministic", MODES)
@examples(1, deep=24)
@given(
    problem=attention_problems(
        head_dims=wider([(24, 40)], [(64, 64), (128, 96), (256, 40), (264, 320)]),
        dtypes=wider(["bfloat16"], ["float16"]),
        options=RUN_TIME_OPTIONS,
        option_sets=wider(*EITHER_HALF[0]),
        largest=LONGEST,
        **FRUGAL,
    )
)
def test_options_within_bounds(deterministic: bool, problem: AttentionCase):
    with natively():
        check(problem, "flash", deterministic=deterministic, native=True)


@pytest.mark.deep
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_configuration(dtype: str, head_dim: int, arch: int, deterministic: bool):
    problem = AttentionCase(
        1, 150, 200, 2, 1, head_dim, head_dim, dtype, options=(("causal", True),)
    )
    with natively(arch):
        check(problem, "flash", deterministic=deterministic, native=True)


@pytest.mark.deep
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_mask_read_four_keys_at_a_time(dtype: str, head_dim: int):
    """Keys lie in another order in the tiles."""
    drawn = every_option(dtype, 2, 140, 264)
    for options in (drawn[:1], drawn[1:2], drawn[:-1]):
        problem = AttentionCase(1, 140, 264, 2, 1, head_dim, head_dim, dtype, options=options)
        for deterministic in (False, True):
            with natively():
                check(problem, "flash", deterministic=deterministic, native=True)


@pytest.mark.deep
@pytest.mark.parametrize("shape", [(140, 200), (2, 1, 200), (140, 1), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduced_dbias_within_bounds(dtype: str, shape: tuple[int, ...]):
    options = (("bias", (shape, dtype)), ("causal", True))
    problem = AttentionCase(2, 140, 200, 2, 1, 64, 64, dtype, options=options)
    with natively():
        check(problem, "flash", native=True)


@pytest.mark.parametrize(
    ("deterministic", "head_dim"), [(False, 24), *deep((True, 64), (False, 128), (False, 256))]
)
def test_gradients_beyond_the_range_of_float16(deterministic: bool, head_dim: int):
    """bfloat16 needs no scale: dS of 2^40, and P of 2^-40, keep their digits."""
    case = AttentionCase(1, 40, 70, 2, 1, head_dim, head_dim, "bfloat16")
    (dout, *rest), options = inputs(case)
    large = (dout.astype(np.float32) * 2.0**40).astype(dout.dtype)
    arrays = (large, *rest)
    with natively():
        grads = run(arrays, {**options, "dlse": None}, "flash", deterministic=deterministic)
    ratios = error_ratios(grads, arrays, {**options, "dlse": None}, native=True)
    assert max(ratios.values()) <= 1, ratios
    assert np.abs(grads["dq"].astype(np.float32)).max() > 2.0**30


@pytest.mark.deep
@examples(4, deep=16)
@given(
    problem=varlen_problems(
        head_dims=((64, 64), (128, 128), (5, 256), (320, 512)),
        dtypes=DTYPES,
        options=RUN_TIME_OPTIONS,
        option_sets=EITHER_HALF[0][1],
        option_views=("strided",),
        largest=LONGEST,
    ),
    deterministic=st.booleans(),
)
def test_packed_sequences_within_bounds(problem: Any, deterministic: bool):
    with natively():
        found = problem.run_backward(deterministic=deterministic)
        ratios = problem.backward_ratios(found)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.deep
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_masks_within_bounds(dtype: str, head_dim: int, deterministic: bool):
    """Empty, partial and full tiles of kernels, in random order."""
    rng = np.random.default_rng(head_dim)
    tiles = rng.integers(0, 3, (7, 5))
    seen = np.repeat(np.repeat(tiles, 32, 0), 64, 1)[:220, :300]
    seen = np.where(seen == 1, rng.random(seen.shape) < 0.5, seen == 2)
    problem = AttentionCase(
        1, *seen.shape, 2, 1, head_dim, head_dim, dtype, options=(("mask", seen.shape),)
    )
    (dout, q, k, v, *_), _ = inputs(problem)
    out, lse = reference.attention(q, k, v, mask=seen)
    arrays = dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32)
    with natively():
        grads = cupyattn.attention_backward(
            *map(KERNELS.put, arrays),
            mask_mod=blocks_of(seen[None, None]),
            deterministic=deterministic,
        )
    found = {name: KERNELS.get(getattr(grads, name)) for name in ("dq", "dk", "dv")}
    ratios = error_ratios(found, arrays, {"mask": seen}, native=True)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "expected"),
    [
        (80, "bfloat16", 64, "copied to shared memory asynchronously"),
        *deep(
            *(
                (75, "bfloat16", 64, "float32 arithmetic"),
                (86, "float16", 64, "copied to shared memory asynchronously"),
                (80, "float16", 65, "pass through registers"),
            )
        ),
    ],
)
def test_explain_says_which_path_a_call_takes(arch, dtype, head_dim, expected, monkeypatch):
    monkeypatch.setenv(ARCH_VARIABLE, str(arch))
    arrays, _ = inputs(AttentionCase(1, 40, 40, 1, 1, head_dim, head_dim, dtype))
    with cupyattn.backend("emulator"):
        explained = cupyattn.explain(cupyattn.attention_backward, *arrays)
    assert expected in str(explained)
    entries = [launch.kernel for launch in explained.launches]
    scaled = "attention_backward_scales" in entries
    assert scaled == (dtype == "float16")


KERNELS_OF = {
    "one pass": lambda *at, dtype: backward_dkdv.dkdv(*at, 8, True, dtype=dtype),
    "dk and dv": lambda *at, dtype: backward_dkdv.dkdv(*at, 8, False, dtype=dtype),
    "dq": lambda *at, dtype: backward_dq.dq(*at, 8, dtype=dtype),
}
MOST_SPILLS = {("dq", 256): 304, ("dq", 64): 80, ("one pass", 512): 80}
"""Bytes of the configurations that spill more than 64 (NVRTC 12.9)."""


@pytest.mark.parametrize(
    ("arch", "head_dim", "dtype", "kind"),
    [
        (90, 128, "bfloat16", "one pass"),
        *deep(*((a, d, t, kind) for a in (80, 86, 89, 90) for d in HEAD_DIMS for t in DTYPES
                for kind in KERNELS_OF)),
    ],
)  # fmt: skip
def test_configurations_fit(arch: int, head_dim: int, dtype: str, kind: str):
    """As many CTAs as the table says, and what spills is little."""
    kernel = KERNELS_OF[kind](arch, head_dim, head_dim, dtype=dtype)
    resources = compile_cubin(kernel, arch_of(arch)).resources
    ctas = arch_of(arch).resident_ctas(kernel.threads, resources.registers, kernel.shared_bytes)
    assert ctas >= dict(kernel.macros)["MIN_CTAS"]
    assert resources.spill_store_bytes <= MOST_SPILLS.get((kind, head_dim), 64)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("arch", [80, 86, 89, 90])
def test_tiles_fit_into_shared_memory(arch: int, head_dim: int):
    dims = head_dim, head_dim
    for kernel in (
        backward_dkdv.dkdv(arch, *dims, 8, True),
        backward_dkdv.dkdv(arch, *dims, 8, False),
        backward_dq.dq(arch, *dims, 8),
    ):
        resident = arch_of(arch).resident_ctas(kernel.threads, 255, kernel.shared_bytes)
        assert resident >= dict(kernel.macros)["MIN_CTAS"]
