"""score_mod, mask_mod and block masks of packed sequences: each one is a dense call of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from support.block_masks import blocks_of, masked_tiles
from support.devices import KERNELS
from support.packed_modifiers import PackedBlocks, PackedExpressions, ragged
from support.search import deep, examples, wider

import cupyattn
from cupyattn import MaskMod, ScoreMod, attention_varlen, attention_varlen_backward

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

KINDS_DEEP = [("float32", 8), ("float16", 24), ("float32", 24), ("float16", 136)]
KINDS = [("float16", 8), *deep(*((kind,) for kind in (*KINDS_DEEP, ("bfloat16", 24))))]


@st.composite
def expressions(draw: st.DrawFn, dtype: str, head_dim: int) -> PackedExpressions:
    """Sequences of any lengths, none too; behind the last may lie rows of no sequence."""
    sq, sk = draw(st.sampled_from([(40, 70), (130, 33)]))
    dense = ragged(dtype, head_dim, draw(st.integers(0, 3)), Sq=sq, Sk=sk)
    queries, keys = (
        tuple(draw(st.sampled_from((0, 1, most)) | st.integers(0, most)) for _ in range(3))
        for most in (sq, sk)
    )
    return PackedExpressions(dense, queries, keys, spare=draw(st.sampled_from((0, 3))))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(data=st.data())
@examples(4)
def test_expressions_within_the_bounds_of_what_they_stand_for(kind, data):
    problem = data.draw(expressions(*kind))
    assert problem.ratio(*problem.run()) <= 1


@pytest.mark.parametrize(
    ("kind", "deterministic"),
    [
        (KINDS[0], False),
        *deep((KINDS[0], True), *((kind, False) for kind in KINDS_DEEP)),
        *deep(*((kind, True) for kind in KINDS_DEEP[:3])),
    ],
    ids=str,
)
@given(data=st.data())
@examples(4)
def test_gradients_within_the_bounds_of_what_they_stand_for(kind, deterministic, data):
    problem = data.draw(expressions(*kind))
    grads = problem.run_backward(deterministic=deterministic)
    ratios = problem.backward_ratios(grads)
    ratios = {name: ratios[name] for name in ("dq", "dk", "dv")}
    assert max(ratios.values()) <= 1, ratios


@st.composite
def blocks(draw: st.DrawFn, dtype: str) -> PackedBlocks:
    sq, sk = draw(st.sampled_from([(40, 300), (290, 70), (200, 200)]))
    head_dim = draw(st.sampled_from(wider([8], [24])))
    dense = ragged(dtype, head_dim, draw(st.integers(0, 3)), Sq=sq, Sk=sk)
    queries, keys = (
        tuple(draw(st.sampled_from((0, 1, most)) | st.integers(0, most)) for _ in range(3))
        for most in (sq, sk)
    )
    shape = (draw(st.sampled_from((1, 3))), draw(st.sampled_from((1, 4))), sq, sk)
    tile, full = draw(st.sampled_from([16, 64])), draw(st.sampled_from([0.0, 0.3, 1.0]))
    seen = masked_tiles(shape, tile, draw(st.integers(0, 5)), full=full)
    return PackedBlocks(dense, queries, keys, seen=seen, causal=draw(st.booleans()))


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
@given(data=st.data())
@examples(4)
def test_a_block_mask_is_that_of_the_longest_lengths(dtype, data):
    problem = data.draw(blocks(dtype))
    assert problem.ratio(*problem.run()) <= 1


@pytest.mark.parametrize(
    ("dtype", "deterministic"),
    [("float16", True), *deep(("float32", False), ("float16", False), ("float32", True))],
)
@given(data=st.data())
@examples(4)
def test_gradients_of_a_block_mask(dtype, deterministic, data):
    problem = data.draw(blocks(dtype))
    ratios = problem.backward_ratios(problem.run_backward(deterministic=deterministic))
    assert max(ratios.values()) <= 1, ratios


FEW = PackedExpressions(ragged("float16", 8, Sq=20, Sk=30), (20, 3, 0), (30, 9, 4))


def test_a_block_mask_of_other_lengths_is_refused():
    made = blocks_of(np.ones((1, 1, 20, 31), bool))
    with pytest.raises(ValueError, match=r"for Sk = 31, and the call has Sk = 30"):
        FEW.run(mask_mod=made)
    placed = cupyattn.block_mask(MaskMod("q_idx >= k_idx"), 20, 30, q_offset=0)
    with pytest.raises(ValueError, match=r"for q_offset = 0, and the call's is another in each"):
        FEW.run(mask_mod=placed)
    with pytest.raises(ValueError, match=r"for q_offset = 0, and the call's is another in each"):
        FEW.run(mask_mod=placed, q_offset=None)


@pytest.mark.parametrize("head_dim", [8, *deep(24)])
def test_empty_tiles_are_not_read(head_dim):
    """NaN in keys that a block mask hides reaches no query; 0 times NaN would be NaN."""
    border = 144  # a multiple of the kernel's tiles
    problem = PackedBlocks(
        ragged("float16", head_dim, Sq=64, Sk=256), (64, 40, 7), (256, 200, 150),
        seen=np.broadcast_to(np.arange(256) < border, (1, 1, 64, 256)),
    )  # fmt: skip
    q, k, v, *bounds = problem.arrays()
    for first, keys in zip(bounds[1], problem.keys, strict=False):
        k[first + border : first + keys] = np.nan
        v[first + border : first + keys] = np.nan
    placed = [KERNELS.put(x) for x in (q, k, v, *bounds)]
    out = KERNELS.get(attention_varlen(*placed, 64, 256, mask_mod=blocks_of(problem.seen)))
    assert np.isfinite(out).all()


@pytest.mark.parametrize(
    ("kind", "deterministic", "close"),
    [
        (("float16", 8), False, {"rtol": 1e-2, "atol": 1e-3}),
        *deep((("float32", 24), True, {"atol": 1e-5})),
    ],
)
def test_vjp_takes_them(kind, deterministic, close):
    few = replace(FEW, dense=ragged(*kind, Sq=20, Sk=30))
    q, k, v, *bounds = map(KERNELS.put, few.arrays())
    dout = KERNELS.put(few.backward_inputs()[0][0])
    options = few.given() | {"q_offset": KERNELS.put(few.offsets)}
    _, pullback = cupyattn.vjp(attention_varlen, q, k, v, *bounds, *few.longest, **options)
    found = pullback(dout, deterministic=deterministic)
    expected = few.run_backward(deterministic=deterministic, dlse=None)
    for name, each in zip(("dq", "dk", "dv"), found, strict=False):
        assert_allclose(KERNELS.get(each), expected[name], **close)


def test_an_expression_that_does_not_compile_is_shown_where_it_is_wrong():
    with pytest.raises(ValueError, match="mask_mod does not compile: line 1, column 9"):
        FEW.run(mask_mod=MaskMod("q_idx > nothing"))


def test_a_score_mod_without_gradient_has_no_backward():
    with pytest.raises(ValueError, match="give ScoreMod gradient="):
        FEW.run_backward(score_mod=ScoreMod("score + 1"))


def test_the_reference_takes_python_functions_that_name_sequences():
    """A loop of dense calls, of which each is told its number."""
    rng = np.random.default_rng(2)
    turn = rng.standard_normal((3, 4), np.float32)
    mods = {
        "score_mod": (
            ScoreMod(
                "score * turn[b][h]",
                python=(
                    lambda s, b, h, i, j, turn: s * turn[b, h] + i - j,
                    lambda s, grad, b, h, i, j, turn: grad * turn[b, h],
                ),
                turn=turn,
            )
        ),
        "mask_mod": MaskMod("true", python=lambda b, h, i, j: (i + b) % 3 != j % 2),
    }
    problem = replace(FEW, put=np.asarray)
    q, k, v, *bounds = problem.arrays()
    dout = rng.standard_normal(q.shape).astype(q.dtype)
    with cupyattn.backend("reference"):
        results = attention_varlen(q, k, v, *bounds, 20, 30, return_lse=True, **mods)
        grads = attention_varlen_backward(dout, q, k, v, *results, *bounds, 20, 30, **mods)
    for b, (rows, keys, _) in enumerate(problem.sequences()):
        own = (q[None, rows], k[None, keys], v[None, keys])
        alone = {
            "score_mod": lambda s, _, h, i, j, b=b: s * turn[b, h] + i - j,
            "mask_mod": lambda _, h, i, j, b=b: (i + b) % 3 != j % 2,
        }
        with cupyattn.backend("reference"):
            out, lse = cupyattn.attention(*own, return_lse=True, **alone)
            given = dout[None, rows], *own, out, lse
            alone["score_mod"] = ScoreMod(
                "score",
                python=(
                    lambda s, _, h, i, j, b=b: s * turn[b, h] + i - j,
                    lambda s, grad, _, h, i, j, b=b: grad * turn[b, h],
                ),
            )
            of_own = cupyattn.attention_backward(*given, **alone)
        assert_allclose(results[0][rows], out[0], atol=1e-6)
        assert_allclose(results[1][:, rows], lse[0], atol=1e-6)
        for name, place in (("dq", rows), ("dk", keys), ("dv", keys)):
            assert_allclose(getattr(grads, name)[place], getattr(of_own, name)[0], atol=1e-5)
