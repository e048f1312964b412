"""Packed sequences: gradients, and score_mod, mask_mod and block masks, as in dense calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from support.devices import KERNELS, SENTINEL, placed
from support.modifiers import CAP, PackedBlocks, blocks_of, masked_tiles, ragged
from support.search import Search, deep, examples, wider
from support.strategies import (
    ALL_AT_ONCE,
    EITHER_HALF,
    FRUGAL,
    OPTION_SETS,
    RUN_TIME_OPTIONS,
    every_option,
)
from support.varlen import VarlenProblem, varlen_problems

import cupyattn
from cupyattn import AttentionGrads, MaskMod, ScoreMod, attention_varlen, attention_varlen_backward
from cupyattn.testing import AttentionCase

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]


@dataclass(frozen=True)
class PackedExpressions(VarlenProblem):
    """Expressions that name the sequence, positions within it, and rows of packed arrays.

    The arrays that they index by a row of q or k end with the last one.
    """

    put: Any = KERNELS.put

    @property
    def rng(self) -> np.random.Generator:
        """A new generator with the problem's seed."""
        return np.random.default_rng(self.dense.seed)

    @property
    def slopes(self) -> np.ndarray:
        """A slope of each sequence and head; a view."""
        return self.rng.random((self.dense.B, 2 * self.dense.H)).astype(np.float16)[:, ::2]

    @property
    def by_distance(self) -> np.ndarray:
        """A term for each head and distance."""
        return self.rng.standard_normal((self.dense.H, sum(self.longest)), np.float32)

    @property
    def offsets(self) -> np.ndarray:
        """Where the queries of each sequence stand."""
        return np.arange(self.dense.B) * 3 - 1

    def documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Return an entry for each row of q and of k, in packed order."""
        totals = (sum(self.queries), sum(self.keys))
        q, k = (self.rng.integers(0, 3, total) for total in totals)
        return q, k

    def expressions(self) -> dict[str, Any]:
        """Both, with their gradient."""
        rows, keys = self.bounds
        of_q, of_k = self.documents()
        arrays = {
            "cap": np.array(CAP, np.float32), "by_distance": self.by_distance,
            "keys": np.array([self.longest[1]]), "slopes": self.slopes, "offsets": self.offsets,
        }  # fmt: skip
        masks = {"rows": rows, "keys": keys, "of_q": of_q, "of_k": of_k}
        return {
            "score_mod": ScoreMod(
                "cap * tanhf(score / cap) + by_distance[h][q_idx - k_idx + keys[0] - 1]\n"
                "  - slopes[b][h] * abs(q_idx + offsets[b] - k_idx)",
                gradient="grad * (1 - tanhf(score / cap) * tanhf(score / cap))",
                **{name: self.put(x) for name, x in arrays.items()},
            ),
            "mask_mod": MaskMod(
                "of_q[rows[b] + q_idx] == of_k[keys[b] + k_idx]",
                **{name: self.put(x) for name, x in masks.items()},
            ),
        }

    def given(self) -> dict[str, Any]:
        return {**self.expressions(), "q_offset": self.offsets}

    def keywords(self) -> dict[str, Any]:
        i, j = np.arange(self.longest[0])[:, None], np.arange(self.longest[1])
        mask = np.zeros((self.dense.B, 1, *self.longest), bool)
        of_q, of_k = self.documents()
        for b, (rows, keys) in enumerate(zip(*self.bounds, strict=True)):
            if b < self.dense.B:
                own = of_q[rows : rows + self.queries[b]], of_k[keys : keys + self.keys[b]]
                mask[b, 0, : len(own[0]), : len(own[1])] = own[0][:, None] == own[1]
        return {
            "softcap": CAP,
            "bias": self.by_distance[:, i - j + self.longest[1] - 1],
            "alibi_slopes": self.slopes,
            "q_offset": self.offsets,
            "mask": mask,
        }


KINDS = {"option_views": FRUGAL["option_views"], "spreads": (1.0,)}
RAGGED = VarlenProblem(
    AttentionCase(B=4, Sq=140, Sk=150, H=4, G=2, D=64, Dv=64, dtype="float16",
                     options=(("causal", True),)),
    queries=(5, 140, 0, 33),
    keys=(20, 150, 7, 0),
    spare=3,
)  # fmt: skip
# Its tiles are smaller, and it takes the emulator longer; a second head of K with --deep.
H, G = (4, 2) if Search.deep else (2, 1)
FLOAT = VarlenProblem(
    replace(RAGGED.dense, Sq=70, Sk=80, H=H, G=G, D=24, Dv=40, dtype="float32"),
    queries=(5, 70, 0, 33),
    keys=(20, 80, 7, 0),
    spare=3,
)
SHORT = VarlenProblem(
    replace(FLOAT.dense, B=2, Sq=9, Sk=20, H=1, G=1, options=()), queries=(9, 5), keys=(20, 0)
)


@given(
    problem=varlen_problems(
        head_dims=wider([(64, 64)], [(24, 40), (88, 80), (128, 128), (256, 256), (264, 512)]),
        dtypes=("float16",), options=RUN_TIME_OPTIONS,
        option_sets=wider(*EITHER_HALF[0]), **KINDS,
    ),
    otherwise=st.booleans() if Search.deep else st.just(False),
)  # fmt: skip
@examples(4, deep=20)
def test_each_sequence_is_within_the_dense_bounds(problem: VarlenProblem, otherwise: bool):
    """Calls with dropout, here those with every option, take two kernels of scores."""
    deterministic = ("dropout_p" in dict(problem.dense.options)) != otherwise
    ratios = problem.backward_ratios(problem.run_backward(deterministic=deterministic))
    assert max(ratios.values()) <= 1, ratios


@given(
    problem=varlen_problems(
        head_dims=wider([(24, 40)], [(64, 64), (128, 128), (256, 8)]),
        dtypes=wider(["float32"], ["bfloat16"]), options=RUN_TIME_OPTIONS,
        option_sets=wider([{}, *ALL_AT_ONCE[1:]], OPTION_SETS), **KINDS,
    ),
    otherwise=st.booleans() if Search.deep else st.just(False),
)  # fmt: skip
@example(SHORT, False)  # a CTA without work adds nothing to dq
@examples(3, deep=16)
def test_float32(problem: VarlenProblem, otherwise: bool):
    """Calls with dropout take two kernels of scores, others one."""
    deterministic = ("dropout_p" in dict(problem.dense.options)) != otherwise
    ratios = problem.backward_ratios(problem.run_backward(deterministic=deterministic))
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize(
    ("lengths", "head_dim"), [(RAGGED, 64), *deep((FLOAT, 24), (RAGGED, 160))],
    ids=["float16", "float32", "float16 of 160"],
)  # fmt: skip
def test_deterministic_bits_are_those_of_a_loop_over_sequences(lengths, head_dim):
    problem = replace(lengths, dense=replace(lengths.dense, D=head_dim, Dv=head_dim))
    grads = problem.run_backward(deterministic=True)
    (dout, q, k, v, out, lse), _, options = problem.backward_inputs()
    for rows, keys, _ in problem.sequences():
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        own = (dout[None, rows], q[None, rows], k[None, keys], v[None, keys], out[None, rows])
        alone = cupyattn.attention_backward(
            *map(KERNELS.put, (*own, lse[None, :, rows])), causal=True, deterministic=True,
            dlse=KERNELS.put(np.ascontiguousarray(options["dlse"][None, :, rows])),
        )  # fmt: skip
        for name, place in (("dq", rows), ("dk", keys), ("dv", keys)):
            assert np.array_equal(grads[name][place], KERNELS.get(getattr(alone, name))[0]), name


@pytest.mark.parametrize(
    ("problem", "deterministic"),
    [(RAGGED, True), *deep((FLOAT, True), (RAGGED, False), (FLOAT, False))],
)
def test_gradients_are_added_to_what_is_there(problem, deterministic):
    """In float32, before the one rounding; rows of no sequence aside."""
    dense = problem.dense
    bias = (dense.H, dense.Sq, dense.Sk), dense.dtype
    drawn = every_option(dense.dtype, dense.H, dense.Sq, dense.Sk, bias)
    dense = replace(dense, options=drawn, option_view="strided")
    problem = replace(problem, dense=dense)
    plain = problem.run_backward(deterministic=deterministic)
    there = {name: np.full(x.shape, 0.5, x.dtype) for name, x in plain.items()}
    grads = AttentionGrads(**{name: KERNELS.put(x) for name, x in there.items()})
    (dout, q, k, v, out, lse), bounds, options = problem.backward_inputs()
    found = cupyattn.attention_varlen_backward(
        *map(KERNELS.put, (dout, q, k, v, out, lse, *bounds)), *problem.longest,
        **{name: placed(KERNELS, value) for name, value in options.items()},
        deterministic=deterministic, grads=grads, accumulate=True,
    )  # fmt: skip
    used = {"dq": bounds[0][-1], "dk": bounds[1][-1], "dv": bounds[1][-1]}
    for name, x in plain.items():
        rows = slice(used.get(name))
        added = KERNELS.get(getattr(found, name))[rows]
        assert np.allclose(added, x[rows].astype(np.float32) + 0.5, atol=4e-3), name


@pytest.mark.parametrize("backend", ["reference", "kernels"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("problem", "options"),
    [
        (RAGGED, {}),
        *deep((FLOAT, {"rotary": cupyattn.rope_tables(80, 24), "q_offset": 0})),
        *deep((FLOAT, {"deterministic": True}), (FLOAT, {}), (RAGGED, {"deterministic": True})),
        *deep((replace(RAGGED, queries=(0,) * 4), {})),
    ],
)  # fmt: skip
def test_rows_of_no_sequence_stay_as_they_are(problem, options, accumulate, backend):
    """The first ones are right: what was in theirs is gone, unless it is added to."""
    arrays, bounds, _ = problem.backward_inputs()
    kernels = backend == "kernels"
    placing = KERNELS.put if kernels else np.asarray
    twos = [np.full(x.shape, 2, x.dtype) for x in arrays[1:4]]
    if kernels:
        options = {name: placed(KERNELS, value) for name, value in options.items()}
    results = []
    for grads in (AttentionGrads(*map(placing, twos)), None):
        with KERNELS.running() if kernels else cupyattn.backend("reference"):
            found = cupyattn.attention_varlen_backward(
                *map(placing, (*arrays, *bounds)), *problem.longest, grads=grads,
                accumulate=accumulate and grads is not None, **options,
            )  # fmt: skip
        results.append([KERNELS.get(x) if kernels else x for x in found[:3]])
    for there, new, end in zip(*results, (bounds[0][-1], *[bounds[1][-1]] * 2), strict=True):
        assert (there[end:] == 2).all()
        added = there[:end].astype(np.float32) - 2 * accumulate
        assert np.allclose(added, new[:end].astype(np.float32), rtol=1e-3, atol=4e-3)


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_no_sequence_leaves_all_rows(backend):
    """Their kernels do not run at all."""
    arrays, _, _ = FLOAT.backward_inputs()
    none = np.zeros(1, np.int32)
    grads = AttentionGrads(*(np.full(x.shape, SENTINEL, x.dtype) for x in arrays[1:4]))
    with cupyattn.backend(backend):
        found = cupyattn.attention_varlen_backward(*arrays, none, none, 0, 0, grads=grads)
    assert all((x == SENTINEL).all() for x in found[:3])


def test_a_workspace_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="this call needs"):
        RAGGED.run_backward(workspace=np.zeros(64, np.uint8))


@pytest.mark.deep
def test_vjp():
    """One entry for each argument by position: lengths have no gradient."""
    q, k, v, *bounds = map(KERNELS.put, FLOAT.arrays())
    dout = KERNELS.put(FLOAT.backward_inputs()[0][0])
    out, pullback = cupyattn.vjp(
        cupyattn.attention_varlen, q, k, v, *bounds, *FLOAT.longest, causal=True
    )
    dq, dk, dv, *others = pullback(dout, deterministic=True)
    assert others == [None] * 4
    assert out.shape == dout.shape
    expected = replace(FLOAT).run_backward(deterministic=True, dlse=None)
    for name, found in (("dq", dq), ("dk", dk), ("dv", dv)):
        rows = slice(sum(FLOAT.queries if name == "dq" else FLOAT.keys))
        assert np.allclose(KERNELS.get(found)[rows], expected[name][rows], atol=1e-5)


@pytest.mark.parametrize(
    "bounds", [[0, 900, -5, 178, 2**31 - 1], *deep(([7, 3, 3, 3, 3],), ([-9] * 5,))]
)
@pytest.mark.parametrize("problem", [RAGGED, *deep(FLOAT)], ids=["float16", "float32"])
def test_wild_bounds_touch_nothing_outside(problem, bounds, values_unchecked):
    """The emulator's checks of addresses would say so; values are not looked at here."""
    arrays, _, _ = problem.backward_inputs()
    wild = np.array(bounds, np.int32)
    for deterministic in (False, True):
        cupyattn.attention_varlen_backward(
            *map(KERNELS.put, (*arrays, wild, wild)), *problem.longest, causal=True,
            deterministic=deterministic,
        )  # fmt: skip


def test_shapes_that_do_not_fit_are_refused():
    arrays, bounds, _ = FLOAT.backward_inputs()
    for at, message in ((0, "dout has shape"), (4, "out has shape"), (5, "lse has shape")):
        changed = [*arrays]
        changed[at] = changed[at][:-1]
        with pytest.raises(ValueError, match=message):
            cupyattn.attention_varlen_backward(*changed, *bounds, *FLOAT.longest)
    grads = AttentionGrads(dk=np.full((3, 2, 24), SENTINEL, np.float32))
    with pytest.raises(ValueError, match=r"grads\.dk is"):
        cupyattn.attention_varlen_backward(*arrays, *bounds, *FLOAT.longest, grads=grads)


KINDS_DEEP = [("float32", 8), ("float16", 24), ("float32", 24), ("float16", 136)]
KINDS_PLAIN = [("float16", 8), *deep(*((kind,) for kind in (*KINDS_DEEP, ("bfloat16", 24))))]


@st.composite
def expressions(draw: st.DrawFn, dtype: str, head_dim: int) -> PackedExpressions:
    """Sequences of any lengths, also none; rows of no sequence may follow the last."""
    sq, sk = draw(st.sampled_from([(40, 70), (130, 33)]))
    dense = ragged(dtype, head_dim, draw(st.integers(0, 3)), Sq=sq, Sk=sk)
    queries, keys = (
        tuple(draw(st.sampled_from((0, 1, most)) | st.integers(0, most)) for _ in range(3))
        for most in (sq, sk)
    )
    return PackedExpressions(dense, queries, keys, spare=draw(st.sampled_from((0, 3))))


@pytest.mark.parametrize("kind", KINDS_PLAIN, ids=str)
@given(data=st.data())
@examples(3, deep=8)
def test_expressions_within_the_bounds_of_what_they_stand_for(kind, data):
    problem = data.draw(expressions(*kind))
    assert problem.ratio(*problem.run()) <= 1


@pytest.mark.parametrize(
    ("kind", "deterministic"),
    [
        (KINDS_PLAIN[0], False),
        *deep((KINDS_PLAIN[0], True), *((kind, False) for kind in KINDS_DEEP)),
        *deep(*((kind, True) for kind in KINDS_DEEP[:3])),
    ],
    ids=str,
)
@given(data=st.data())
@examples(3, deep=8)
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
@examples(3, deep=8)
def test_a_block_mask_is_that_of_the_longest_lengths(dtype, data):
    problem = data.draw(blocks(dtype))
    assert problem.ratio(*problem.run()) <= 1


@pytest.mark.parametrize(
    ("dtype", "deterministic"),
    [("float16", True), *deep(("float32", False), ("float16", False), ("float32", True))],
)
@given(data=st.data())
@examples(3, deep=8)
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
    border = 192  # a multiple of every kernel's tiles
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


def test_an_expression_that_does_not_compile_is_shown_where_it_is_wrong():
    with pytest.raises(ValueError, match="mask_mod does not compile: line 1, column 9"):
        FEW.run(mask_mod=MaskMod("q_idx > nothing"))


def test_a_score_mod_without_gradient_has_no_backward():
    with pytest.raises(ValueError, match="give ScoreMod gradient="):
        FEW.run_backward(score_mod=ScoreMod("score + 1"))


def test_the_reference_takes_python_functions_that_name_sequences():
    """A loop of dense calls, each with its sequence's number."""
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
