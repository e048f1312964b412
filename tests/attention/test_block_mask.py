"""block_mask: its tiles, kernels that skip empty ones and leave full ones unmasked, refusals."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support import modifiers
from support.devices import KERNELS, NUMPY
from support.modifiers import (
    PackedBlocks,
    arrays,
    blocks_of,
    by_the_reference,
    mask_of,
    masked_tiles,
    ragged,
)
from support.search import deep, examples, mostly_deep, wider

import cupyattn
from cupyattn import AttentionGrads, MaskMod, attention, attention_backward, block_mask, reference
from cupyattn.emulator import Checks, Report
from cupyattn.runtime.outputs import round_into
from cupyattn.testing import AttentionCase

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]


@dataclass(frozen=True)
class TileMask:
    """A problem with options, and bools that hide scores of it."""

    problem: AttentionCase
    seen: np.ndarray
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def own(self) -> dict[str, Any]:
        """The options of the call, with a block mask."""
        placed = {n: KERNELS.put(x) if isinstance(x, np.ndarray) else x for n, x in self.options}
        return {"mask_mod": blocks_of(self.seen), **placed}

    @property
    def alike(self) -> dict[str, Any]:
        """The options of the reference, with a mask."""
        return {"mask": self.seen, **dict(self.options)}

    def forward_ratios(self) -> dict[str, float]:
        """Errors over bounds of out and lse."""
        arrays = self.problem.arrays()
        found = cupyattn.attention(*map(KERNELS.put, arrays), **self.own, return_lse=True)
        native = KERNELS.device.traits.native
        bounds = reference.attention_bound(
            *arrays, dtype=self.problem.dtype, tile_k=16, native=native, **self.alike
        )
        exact = reference.attention(*arrays, **self.alike)
        return {
            name: reference.error_ratio(KERNELS.get(each), *expected)
            for name, each, *expected in zip(("out", "lse"), found, exact, bounds, strict=True)
        }

    def backward_inputs(self) -> tuple[np.ndarray, ...]:
        """dout, q, k, v, and the reference's out and lse."""
        dout, _ = self.problem.gradients()
        arrays = self.problem.arrays()
        out, lse = reference.attention(*arrays, **self.alike)
        return (dout, *arrays, round_into(None, out, dout.dtype), lse.astype(np.float32))

    def run_backward(self, **more: Any) -> AttentionGrads:
        """With other options too, or others in place of its own."""
        given = map(KERNELS.put, self.backward_inputs())
        return cupyattn.attention_backward(*given, **{**self.own, **more})

    def backward_ratios(self, **more: Any) -> dict[str, float]:
        """Errors over bounds of all gradients."""
        grads, given = self.run_backward(**more), self.backward_inputs()
        exact = reference.attention_backward(*given, **self.alike)
        bounds = reference.attention_backward_bound(
            *given,
            dtype=self.problem.dtype,
            native=KERNELS.device.traits.native,
            **self.alike,
        )
        return {
            name: reference.error_ratio(
                KERNELS.get(grad), getattr(exact, name), getattr(bounds, name)
            )
            for name, grad in grads._asdict().items()
            if grad is not None
        }


HALF, FLOAT = ("float16", 8), ("float32", 8)
KINDS_DEEP = [HALF, FLOAT, ("float16", 24), ("float32", 24), ("float16", 136), ("bfloat16", 8),
              ("float32", 264)]  # fmt: skip
KINDS = [HALF, FLOAT, *deep(*((kind,) for kind in KINDS_DEEP[2:]), (("float16", 264),))]


def tiles_by_hand(seen: np.ndarray) -> np.ndarray:
    """0, 1 or 2 for each tile of 16 by 16, the scores beyond the ends left out."""
    batch, heads, sq, sk = seen.shape
    tiles = np.zeros((batch, heads, -(-sq // 16), -(-sk // 16)), np.uint8)
    for b, h, i, j in np.ndindex(*tiles.shape):
        tile = seen[b, h, 16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
        tiles[b, h, i, j] = 2 if tile.all() else tile.any()
    return tiles


SIZES = st.sampled_from([0, 1, 15, 16, 17, 33, 64, 100])


@examples(10, deep=100)
@given(
    batch=st.integers(1, 2), heads=st.integers(1, 2), sq=SIZES, sk=SIZES,
    tile=st.sampled_from([16, 32]), seed=st.integers(0, 9),
)  # fmt: skip
def test_tiles_are_what_the_mask_leaves(batch, heads, sq, sk, tile, seed):
    seen = masked_tiles((batch, heads, sq, sk), tile, seed)
    found = blocks_of(seen)
    expected = tiles_by_hand(seen)
    assert_array_equal(KERNELS.get(found.tiles), expected)
    assert found.shape == (batch, heads, sq, sk)
    assert found.sparsity == ((expected == 0).mean() if expected.size else 0)
    with cupyattn.backend("reference"):
        on_cpu = block_mask(lambda b, h, i, j: seen[b, h, i, j], sq, sk, B=batch, H=heads)
    assert_array_equal(on_cpu.tiles, expected)


@st.composite
def cases(draw, dtype: str, head_dim: int) -> TileMask:
    """Lengths around tiles; masks of 16, of kernels' tiles and of more; options that cut more."""
    lengths = [(1, 40), (130, 70), (33, 16), (16, 200)]
    longer = [(97, 260), (200, 200), (16, 330)] if dtype == "float16" else [(97, 160)]
    sq, sk = draw(st.sampled_from(lengths + longer))
    group, kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (1, 2)]))
    problem = AttentionCase(
        B=draw(st.integers(1, 2)), Sq=sq, Sk=sk, H=group * kv_heads, G=kv_heads, D=head_dim,
        Dv=head_dim, dtype=dtype, options=(), seed=draw(st.integers(0, 3)),
    )  # fmt: skip
    broadcast = draw(st.tuples(st.booleans(), st.booleans()))
    batch, heads = (1 if b else n for b, n in zip(broadcast, (problem.B, problem.H), strict=True))
    tile, full = draw(st.sampled_from([16, 64, 128])), draw(st.sampled_from([0.0, 0.3, 1.0]))
    seen = masked_tiles((batch, heads, sq, sk), tile, draw(st.integers(0, 5)), full=full)
    used = np.full(problem.B, max(sk - 9, 0), np.int32)
    options: dict[str, Any] = draw(
        st.sampled_from(
            [{}, {"causal": True}, {"window_size": (70, 20)}, {"seqused_k": used},
             {"q_offset": 5, "causal": True}]
        )
    )  # fmt: skip
    return TileMask(problem, seen, tuple(options.items()))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(data=st.data())
@examples(4, deep=16)
def test_forward_within_the_bounds_of_the_mask(kind, data):
    ratios = data.draw(cases(*kind)).forward_ratios()
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize(
    ("kind", "deterministic"),
    mostly_deep(
        list(itertools.product(KINDS_DEEP, (False, True))),
        [(HALF, False), (HALF, True), (FLOAT, False)],
    ),
    ids=str,
)
@given(data=st.data())
@examples(4, deep=12)
def test_gradients_within_the_bounds_of_the_mask(kind, deterministic, data):
    ratios = data.draw(cases(*kind)).backward_ratios(deterministic=deterministic)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("deterministic", [False, *deep(True)])
def test_gradients_of_heads_whose_columns_several_warps_share(deterministic):
    problem = AttentionCase(
        B=1, Sq=70, Sk=75, H=2, G=1, D=264, Dv=320, dtype="float16", options=()
    )  # fmt: skip
    case = TileMask(problem, masked_tiles((1, 2, 70, 75), 16, 1))
    ratios = case.backward_ratios(deterministic=deterministic)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("kind", [HALF, *deep((FLOAT,))], ids=str)
def test_gradients_where_heads_of_a_group_have_masks_of_their_own(kind):
    dtype, head_dim = kind
    problem = AttentionCase(
        B=1, Sq=130, Sk=70, H=4, G=2, D=head_dim, Dv=head_dim, dtype=dtype, options=()
    )
    ratios = TileMask(problem, masked_tiles((1, 4, 130, 70), 64, 1)).backward_ratios()
    assert max(ratios.values()) <= 1, ratios


def test_a_window_cuts_tiles_that_the_mask_leaves_whole():
    """Whole tiles of a list lie before the window's edge, at it and after it."""
    problem = AttentionCase(B=1, Sq=290, Sk=310, H=2, G=1, D=8, Dv=8, dtype="float16", seed=2)
    seen = masked_tiles((1, 2, 290, 310), 128, 3, full=0.4)
    seen[:, 0, :128, :128], seen[:, 0, 128:256, 128:], seen[:, 0, 256:] = True, True, True
    seen[:, 0, 128:256, :128] = np.arange(128) % 2 == 0
    ratios = TileMask(problem, seen, (("window_size", (200, 90)),)).forward_ratios()
    assert max(ratios.values()) <= 1, ratios


def two_documents(length: int, border: int) -> np.ndarray:
    document = np.arange(length) >= border
    return (document[:, None] == document)[None, None]


WHOLE_TILES = {"float16": 384, "float32": 128}
"""Rows that are a multiple of every kernel's tiles."""


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_empty_tiles_are_not_read(dtype):
    """NaN in the second document's rows would reach the first's: 0 times NaN is NaN."""
    border = WHOLE_TILES[dtype]
    length = border + 70
    given_arrays = arrays(dtype, length, length)
    for x in given_arrays:
        x[:, border:] = np.nan
    dout, q, k, v = map(KERNELS.put, given_arrays)
    seen = two_documents(length, border)
    alone, _, expected = by_the_reference(*(x[:, :border] for x in given_arrays))
    out, lse = attention(q, k, v, mask_mod=blocks_of(seen), return_lse=True)
    assert_allclose(KERNELS.get(out)[:, :border], alone, rtol=1e-2, atol=1e-3)
    masked = KERNELS.get(attention(q, k, v, mask_mod=mask_of(seen)))
    assert np.isnan(masked[:, :border]).any()  # what a mask_mod alone reads
    for deterministic in (False, True):
        grads = attention_backward(
            dout, q, k, v, out, lse, mask_mod=blocks_of(seen), deterministic=deterministic
        )
        for name in ("dq", "dk", "dv"):
            found = KERNELS.get(getattr(grads, name))[:, :border]
            assert_allclose(found, getattr(expected, name), rtol=1e-2, atol=3e-3)


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float16", 8), *deep(("float16", 64), ("float32", 64))]
)
def test_work_is_the_share_of_the_tiles_that_are_left(monkeypatch, dtype, head_dim):
    """Two documents of whole tiles: half of the scores, on the emulator's count."""
    monkeypatch.setattr(modifiers, "KERNELS", NUMPY)
    border = WHOLE_TILES[dtype]
    dout, q, k, v = arrays(dtype, 2 * border, 2 * border, head_dim, heads=1)
    seen = two_documents(2 * border, border)
    counts = []
    for each in (seen, np.ones_like(seen), np.zeros_like(seen)):
        report = Report()
        with cupyattn.backend("emulator", checks=Checks.none()):
            blocks = blocks_of(each)
            with cupyattn.backend(report=report):
                out, lse = attention(q, k, v, mask_mod=blocks, return_lse=True)
                attention_backward(dout, q, k, v, out, lse, mask_mod=blocks, deterministic=True)
        products = report.instruction_mix.get("tensor" if dtype == "float16" else "fma", 0)
        counts.append((products, report.bytes_moved["global load"]))
    # A CTA's own rows, too, are loaded as soon as it has a tile.
    for most, (half, whole, none) in zip((0.501, 0.53), zip(*counts, strict=True), strict=True):
        assert half - none <= most * (whole - none), (half, none, whole)


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_full_tiles_do_not_ask_the_expression(dtype):
    """It would say otherwise by now; the forward asks for the first tile, and where keys end."""
    given_arrays = arrays(dtype, 128, 512)
    expected, _, expected_grads = by_the_reference(*given_arrays)
    dout, q, k, v = map(KERNELS.put, given_arrays)
    blocks = blocks_of(np.ones((1, 1, 128, 512), bool))
    blocks.mask_mod.arrays["seen"][..., 256:448] = False
    out, lse = attention(q, k, v, mask_mod=blocks, return_lse=True)
    assert_allclose(KERNELS.get(out), expected, rtol=1e-2, atol=1e-3)
    for deterministic in (False, True):
        grads = attention_backward(
            dout, q, k, v, out, lse, mask_mod=blocks, deterministic=deterministic
        )
        for name in ("dq", "dk", "dv"):
            found = KERNELS.get(getattr(grads, name))
            assert_allclose(found, getattr(expected_grads, name), rtol=1e-2, atol=3e-3)


LONG = 1024 * 64 + 300
"""So many tiles that a list is made in several steps."""


def few_tiles(sq: int, sk: int) -> np.ndarray:
    """Seen are tiles at the beginning, in the second step, and at the end, of both kinds."""
    seen = np.zeros((1, 1, sq, sk), bool)
    both = seen if sk > sq else seen.swapaxes(2, 3)
    for first, last in ((10, 40), (64, 192), (LONG - 400, LONG - 50)):
        both[..., first:last] = True
    return seen


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_lists_that_are_made_in_steps(dtype):
    keys = TileMask(AttentionCase(1, 16, LONG, 1, 1, 8, 8, dtype), few_tiles(16, LONG))
    ratios = keys.forward_ratios()
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("dtype", deep("float16", "float32"))
def test_gradients_of_lists_that_are_made_in_steps(dtype):
    for sq, sk in ((16, LONG), (LONG, 16)):
        case = TileMask(AttentionCase(1, sq, sk, 1, 1, 8, 8, dtype), few_tiles(sq, sk))
        ratios = case.backward_ratios(deterministic=True)
        assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_nothing_is_seen_at_all(dtype):
    dout, q, k, v = map(KERNELS.put, arrays(dtype, 40, 70))
    blocks = blocks_of(np.zeros((1, 1, 40, 70), bool))
    assert blocks.sparsity == 1
    out, lse = attention(q, k, v, mask_mod=blocks, return_lse=True)
    assert not KERNELS.get(out).any()
    assert np.isneginf(KERNELS.get(lse)).all()
    for gradient in attention_backward(dout, q, k, v, out, lse, mask_mod=blocks)[:3]:
        assert not KERNELS.get(gradient).any()


@pytest.mark.parametrize(("sq", "sk"), [(0, 40), (40, 0)])
def test_no_scores(sq, sk):
    dout, q, k, v = map(KERNELS.put, arrays("float16", sq, sk))
    blocks = blocks_of(np.ones((1, 1, sq, sk), bool))
    out, lse = attention(q, k, v, mask_mod=blocks, return_lse=True)
    assert out.shape == q.shape
    assert not KERNELS.get(out).any()
    grads = attention_backward(dout, q, k, v, out, lse, mask_mod=blocks)
    assert not KERNELS.get(grads.dk).any()


@pytest.mark.parametrize("shape", [(1, 2, 150, 201), *deep(((1, 1, 1, 201),))], ids=str)
def test_bias_gets_zeros_where_tiles_are_skipped(shape):
    dout, *given_arrays = arrays("float16", 150, 201)
    seen = masked_tiles((1, 1, 150, 201), 64, 3)
    bias = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    out, lse, expected = by_the_reference(dout, *given_arrays, bias=bias, mask=seen)
    found = attention_backward(
        *map(KERNELS.put, (dout, *given_arrays, out, lse)),
        bias=KERNELS.put(bias), mask_mod=blocks_of(seen),
    )  # fmt: skip
    assert_allclose(KERNELS.get(found.dbias), expected.dbias, rtol=1e-2, atol=2e-3)


def test_beside_score_mod_and_alibi():
    given_arrays = arrays("float16", 70, 200)
    seen = masked_tiles((1, 2, 70, 200), 32, 4)
    slopes = np.float32([0.1, 0.2])
    more = {"alibi_slopes": KERNELS.put(slopes), "score_mod": cupyattn.ScoreMod("0.5f * score")}
    found = attention(*map(KERNELS.put, given_arrays[1:]), mask_mod=blocks_of(seen), **more)
    halved = {"alibi_slopes": 0.5 * slopes, "softmax_scale": 0.5 * 8**-0.5}
    expected, *_ = by_the_reference(*given_arrays, mask=seen, **halved)
    assert_allclose(KERNELS.get(found), expected, rtol=1e-2, atol=1e-3)


def test_lists_come_from_a_workspace():
    _, q, k, v = map(KERNELS.put, arrays("float16", 40, 70))
    blocks = blocks_of(masked_tiles((1, 1, 40, 70), 16, 2))
    with pytest.raises(ValueError, match=r"workspace has 0 bytes.* needs ") as refusal:
        attention(q, k, v, mask_mod=blocks, workspace=KERNELS.put(np.zeros(0, np.uint8)))
    needed = int(str(refusal.value).split("needs ")[1].split(",")[0])
    space = KERNELS.put(np.zeros(needed, np.uint8))
    out = attention(q, k, v, mask_mod=blocks, workspace=space)
    assert_array_equal(KERNELS.get(out), KERNELS.get(attention(q, k, v, mask_mod=blocks)))


def test_q_offset_is_that_of_the_call():
    _, q, k, v = map(KERNELS.put, arrays("float16", 40, 70))
    seen = np.ones((1, 1, 40, 70), bool)
    default = attention(q, k, v, causal=True)
    for q_offset in (30, None):
        found = attention(q, k, v, causal=True, mask_mod=blocks_of(seen, q_offset=q_offset))
        assert_allclose(KERNELS.get(found), KERNELS.get(default), rtol=1e-2, atol=1e-3)
    where = KERNELS.put(np.int32([30]))
    with pytest.raises(ValueError, match="q_offset = 30, and the call's is another"):
        attention(q, k, v, q_offset=where, mask_mod=blocks_of(seen, q_offset=30))


@st.composite
def biased_cases(draw: st.DrawFn) -> TileMask:
    """Lengths around the kernel's tiles; a mask and a bias of one or of all, and windows."""
    # A plain run reads one key of a bias at a time here; other tests here read four.
    lengths = wider([(1, 41), (33, 17), (130, 99), (200, 161)], [(1, 40), (33, 16), (130, 100)])
    sq, sk = draw(st.sampled_from(lengths))
    heads, kv_heads = draw(st.sampled_from([(4, 2), (2, 2)]))
    head_dim = draw(st.sampled_from(wider([8], [24, 128, 200])))
    problem = AttentionCase(
        B=2, Sq=sq, Sk=sk, H=heads, G=kv_heads, D=head_dim, Dv=head_dim, dtype="float16",
        options=(), seed=draw(st.integers(0, 3)),
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
    return TileMask(problem, seen, (("bias", bias), *more.items()))


@given(case=biased_cases())
@examples(3, deep=40)
def test_dbias_within_the_bounds_of_the_mask(case: TileMask):
    ratio = case.backward_ratios()["dbias"]
    assert ratio <= 1, ratio


@pytest.mark.deep
@given(case=biased_cases())
@examples(8, deep=16)
def test_dbias_has_the_bits_of_the_mask_alone(case: TileMask):
    """Skipped terms are zeros, and the other terms are added in the same order."""
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

    def keywords(self) -> dict[str, Any]:
        return {**super().keywords(), "bias": self.bias}


@pytest.mark.parametrize("each", [False, *deep(True)], ids=["one mask", "a mask each"])
def test_dbias_of_packed_sequences(each: bool):
    shape = (3, 4, 150, 120) if each else (1, 1, 150, 120)
    problem = Biased(
        ragged("float16", 8, Sq=150, Sk=120), (150, 37, 0), (120, 55, 3),
        seen=masked_tiles(shape, 32, 2), causal=True,
    )  # fmt: skip
    ratio = problem.backward_ratios(problem.run_backward())["dbias"]
    assert ratio <= 1, ratio


def test_dbias_of_full_tiles_does_not_ask_the_expression():
    """It would say otherwise by now."""
    dout, *given_arrays = arrays("float16", 128, 193)
    bias = np.random.default_rng(2).standard_normal((128, 193)).astype(np.float32)
    out, lse, expected = by_the_reference(dout, *given_arrays, bias=bias)
    blocks = blocks_of(np.ones((1, 1, 128, 193), bool))
    blocks.mask_mod.arrays["seen"][..., 48:100] = False
    found = attention_backward(
        *map(KERNELS.put, (dout, *given_arrays, out, lse)), bias=KERNELS.put(bias), mask_mod=blocks
    )
    assert_allclose(KERNELS.get(found.dbias), expected.dbias, rtol=1e-2, atol=3e-3)


SQUARE = (1, 2, 40, 70)
MISFITS = {
    "B": ((3, 2, 40, 70), {}, "B = 3, and the call has B = 1"),
    "H": ((1, 3, 40, 70), {}, "H = 3, and the call has H = 2.*broadcasts"),
    "Sq": ((1, 2, 41, 70), {}, "Sq = 41, and the call has Sq = 40"),
    "Sk": ((1, 1, 40, 1), {}, "Sk = 1, and the call has Sk = 70"),
    "q_offset": (SQUARE, {"q_offset": 3}, "q_offset = 3, and the call's is 30"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_of_other_sizes_is_refused(name):
    shape, options, message = MISFITS[name]
    _, q, k, v = map(KERNELS.put, arrays("float16", 40, 70))
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, mask_mod=blocks_of(np.ones(shape, bool), **options))
    _, q, k, v = arrays("float16", 40, 70)
    with cupyattn.backend("reference"):
        blocks = block_mask(CAUSAL, *shape[2:], B=shape[0], H=shape[1], **options)
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, mask_mod=blocks)


CAUSAL = MaskMod("q_idx >= k_idx")

WRONG = {
    "none": ((None, 8, 8), {}, TypeError, "mask_mod is None"),
    "number": ((3, 8, 8), {}, TypeError, "mask_mod has type int"),
    "score_mod": ((cupyattn.ScoreMod("score"), 8, 8), {}, TypeError, "mask_mod has type ScoreMod"),
    "twice": ((block_mask(CAUSAL, 8, 8), 8, 8), {}, TypeError, "BlockMask already"),
    "float": ((CAUSAL, 8.0, 8), {}, TypeError, "Sq is 8.0"),
    "negative": ((CAUSAL, 8, -1), {}, ValueError, "Sk = -1.*it is 0 to"),
    "heads": ((CAUSAL, 8, 8), {"H": "2"}, TypeError, "H is '2'"),
    "q_offset": ((CAUSAL, 8, 8), {"q_offset": 1.5}, TypeError, "q_offset is 1.5"),
    "dtype": ((MaskMod("t[h]", t=np.zeros(2, complex)), 8, 8), {}, TypeError, "mask_mod's t has"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_block_mask_refuses_what_is_no_mask_or_length(name):
    given_arguments, options, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        block_mask(*given_arguments, **options)


def test_functions_and_expressions_where_they_do_not_run(monkeypatch):
    monkeypatch.setattr("cupyattn.ops.attention.block_mask.device_count", lambda: 0)
    with cupyattn.backend("reference"), pytest.raises(NotImplementedError, match="python="):
        block_mask(MaskMod("__popc(q_idx) == 1"), 8, 8)
    with cupyattn.backend("emulator"):
        with pytest.raises(NotImplementedError, match="pass a MaskMod"):
            block_mask(lambda b, h, i, j: i >= j, 8, 8)
        with pytest.raises(ValueError, match="mask_mod does not compile: line 1, column 10"):
            block_mask(MaskMod("q_idx >= kidx"), 8, 8)


def test_out_may_not_overlap_its_tiles():
    _, q, k, v = arrays("float16", 16, 16, head_dim=8)
    with cupyattn.backend("emulator"):
        blocks = block_mask(CAUSAL, 16, 16)
        blocks.tiles = q.view(np.uint8).reshape(-1)[:1].reshape(1, 1, 1, 1)
        with pytest.raises(ValueError, match="out overlaps mask_mod's tiles"):
            attention(q.copy(), k, v, mask_mod=blocks, out=q)


def test_repr_names_the_mask_and_the_sizes():
    text = repr(block_mask(CAUSAL, 8, 9, H=2))
    assert text == "BlockMask(MaskMod('q_idx >= k_idx'), B=1, H=2, Sq=8, Sk=9)"
