"""The gradient of a bias that broadcasts, beside a block mask: what its kernel leaves out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support import block_masks
from support.block_masks import Case, arrays, blocks_of, mask_of, masked_tiles
from support.devices import KERNELS, NUMPY
from support.modifiers import by_the_reference
from support.packed_modifiers import PackedBlocks, ragged
from support.search import deep, examples, wider
from support.strategies import AttentionProblem

import cupyattn
from cupyattn import attention_backward
from cupyattn.emulator import Checks, Report

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Lengths around the kernel's tiles; a mask and a bias of one or of all, and windows."""
    # A plain run reads one key of a bias at a time here; other tests here read four.
    lengths = wider([(1, 41), (33, 17), (130, 99), (200, 161)], [(1, 40), (33, 16), (130, 100)])
    sq, sk = draw(st.sampled_from(lengths))
    heads, kv_heads = draw(st.sampled_from([(4, 2), (2, 2)]))
    head_dim = draw(st.sampled_from(wider([8], [24, 128, 200])))
    problem = AttentionProblem(
        B=2, Sq=sq, Sk=sk, H=heads, G=kv_heads, D=head_dim, Dv=head_dim, dtype="float16",
        drawn=(), seed=draw(st.integers(0, 3)),
    )  # fmt: skip
    everywhere = (2, heads, sq, sk)
    of_mask = draw(st.tuples(st.booleans(), st.booleans()))
    batch, own = (1 if one else n for one, n in zip(of_mask, everywhere[:2], strict=True))
    tile, full = draw(st.sampled_from([16, 64, 128])), draw(st.sampled_from([0.0, 0.3, 1.0]))
    seen = masked_tiles((batch, own, sq, sk), tile, draw(st.integers(0, 5)), full=full)
    of_bias = draw(
        st.sampled_from(
            [(True, True, False, False), (False, True, False, False), (True, False, False, False),
             (True, True, True, False), (False, True, False, True)]
        )
    )  # fmt: skip
    shape = [1 if one else n for one, n in zip(of_bias, everywhere, strict=True)]
    bias = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    more = draw(st.sampled_from([{}, {"causal": True}, {"window_size": (70, 20)}]))
    return Case(problem, seen, (("bias", bias), *more.items()))


@given(case=cases())
@examples(8, deep=40)
def test_dbias_within_the_bounds_of_the_mask(case: Case):
    ratio = case.backward_ratios()["dbias"]
    assert ratio <= 1, ratio


@given(case=cases())
@examples(4, deep=16)
def test_dbias_has_the_bits_of_the_mask_alone(case: Case):
    """What is left out are zeros, and the order of the others is the same."""
    found = [
        KERNELS.get(case.run_backward(mask_mod=each(case.seen)).dbias)
        for each in (blocks_of, mask_of)
    ]
    assert_array_equal(*found)


@dataclass(frozen=True)
class Biased(PackedBlocks):
    """With a bias of all sequences and heads."""

    @property
    def bias(self) -> np.ndarray:
        return np.random.default_rng(3).standard_normal(self.longest).astype(np.float32)

    def given(self) -> dict[str, Any]:
        return {**super().given(), "bias": self.bias}

    def options(self) -> dict[str, Any]:
        return {**super().options(), "bias": self.bias}


@pytest.mark.parametrize("each", [False, *deep(True)], ids=["one mask", "a mask each"])
def test_packed_sequences(each: bool):
    shape = (3, 4, 150, 120) if each else (1, 1, 150, 120)
    problem = Biased(
        ragged("float16", 8, Sq=150, Sk=120), (150, 37, 0), (120, 55, 3),
        seen=masked_tiles(shape, 32, 2), causal=True,
    )  # fmt: skip
    ratio = problem.backward_ratios(problem.run_backward())["dbias"]
    assert ratio <= 1, ratio


def work(seen: np.ndarray, given_arrays: list[np.ndarray], **bias: np.ndarray) -> np.ndarray:
    """Products of a backward and the bytes that it loads, as the emulator counts them."""
    report, blocks = Report(), blocks_of(seen)
    out, lse, _ = by_the_reference(*given_arrays, mask=seen, **bias)
    dout, *inputs = given_arrays
    with cupyattn.backend("emulator", checks=Checks.none(), report=report):
        attention_backward(dout, *inputs, out, lse, mask_mod=blocks, **bias)
    return np.array([report.instruction_mix.get("tensor", 0), report.bytes_moved["global load"]])


@pytest.mark.deep  # as it is how much is done, not what comes of it
def test_work_is_the_share_of_the_tiles_that_are_left(monkeypatch: pytest.MonkeyPatch):
    """Two documents of whole tiles: half of the scores; and none of what nothing is seen of."""
    monkeypatch.setattr(block_masks, "KERNELS", NUMPY)
    given_arrays = arrays("float16", 256, 256)
    bias = np.zeros((256, 256), np.float32)
    half = (np.arange(256) < 128)[:, None] == (np.arange(256) < 128)
    counts = [
        work(seen[None, None], given_arrays, bias=bias) - work(seen[None, None], given_arrays)
        for seen in (half, np.ones_like(half), np.zeros_like(half))
    ]
    (products, loads), (all_products, all_loads), (no_products, no_loads) = counts
    assert products == all_products / 2 > 0
    assert no_products == 0
    assert loads - no_loads < 0.51 * (all_loads - no_loads)
    assert no_loads < 0.3 * all_loads  # what sums the parts reads as much of any


def test_full_tiles_do_not_ask_the_expression():
    """It would say otherwise by now."""
    dout, *given_arrays = arrays("float16", 128, 192)
    bias = np.random.default_rng(2).standard_normal((128, 192)).astype(np.float32)
    out, lse, expected = by_the_reference(dout, *given_arrays, bias=bias)
    blocks = blocks_of(np.ones((1, 1, 128, 192), bool))
    blocks.mask_mod.arrays["seen"][..., 48:100] = False
    found = attention_backward(
        *map(KERNELS.put, (dout, *given_arrays, out, lse)), bias=KERNELS.put(bias), mask_mod=blocks
    )
    assert_allclose(KERNELS.get(found.dbias), expected.dbias, rtol=1e-2, atol=3e-3)
