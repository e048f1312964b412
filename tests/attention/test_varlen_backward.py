"""Gradients of attention over packed sequences: each one's are those of a dense call of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.attention_options import EITHER_HALF, OPTION_SETS, RUN_TIME_OPTIONS
from support.devices import KERNELS, SENTINEL, placed
from support.search import Search, deep, examples, wider
from support.strategies import FRUGAL, AttentionProblem
from support.varlen import VarlenProblem, varlen_problems

import cupyattn
from cupyattn import AttentionGrads

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

KINDS = {"option_views": FRUGAL["option_views"], "spreads": (1.0,)}
RAGGED = VarlenProblem(
    AttentionProblem(B=4, Sq=140, Sk=150, H=4, G=2, D=64, Dv=64, dtype="float16",
                     drawn=(("causal", True),)),
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
    replace(FLOAT.dense, B=2, Sq=9, Sk=20, H=1, G=1, drawn=()), queries=(9, 5), keys=(20, 0)
)


@given(
    problem=varlen_problems(
        head_dims=wider([(64, 64)], [(24, 40), (88, 80), (128, 128), (256, 256)]),
        dtypes=("float16",), options=RUN_TIME_OPTIONS,
        option_sets=wider(*EITHER_HALF[0]), **KINDS,
    ),
    otherwise=st.booleans() if Search.deep else st.just(False),
)  # fmt: skip
@examples(7, deep=20)
def test_each_sequence_is_within_the_dense_bounds(problem: VarlenProblem, otherwise: bool):
    """A plain run has one set of options by two kernels of scores, the other by one."""
    deterministic = ("dropout_p" in dict(problem.dense.drawn)) != otherwise
    ratios = problem.backward_ratios(problem.run_backward(deterministic=deterministic))
    assert max(ratios.values()) <= 1, ratios


@given(
    problem=varlen_problems(
        head_dims=wider([(24, 40)], [(64, 64), (128, 128), (256, 8)]),
        dtypes=wider(["float32"], ["bfloat16"]), options=RUN_TIME_OPTIONS,
        option_sets=wider(OPTION_SETS[:2], OPTION_SETS[2:]), **KINDS,
    ),
    otherwise=st.booleans() if Search.deep else st.just(False),
)  # fmt: skip
@example(SHORT, False)  # a CTA without work adds nothing to dq
@examples(4, deep=16)
def test_float32(problem: VarlenProblem, otherwise: bool):
    """A plain run has the calls with options by two kernels of scores, the others by one."""
    deterministic = ("dropout_p" in dict(problem.dense.drawn)) != otherwise
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
        with KERNELS.running():
            alone = cupyattn.attention_backward(
                *map(KERNELS.put, (*own, lse[None, :, rows])), causal=True, deterministic=True,
                dlse=KERNELS.put(np.ascontiguousarray(options["dlse"][None, :, rows])),
            )  # fmt: skip
        for name, place in (("dq", rows), ("dk", keys), ("dv", keys)):
            assert np.array_equal(grads[name][place], KERNELS.get(getattr(alone, name))[0]), name


@pytest.mark.parametrize(
    ("problem", "deterministic"),
    [(RAGGED, False), *deep((FLOAT, True), (RAGGED, True), (FLOAT, False))],
)
def test_gradients_are_added_to_what_is_there(problem, deterministic):
    """In float32, before the one rounding; rows of no sequence aside."""
    dense = problem.dense
    dense = replace(dense, drawn=(("bias", ((dense.H, dense.Sq, dense.Sk), dense.dtype)),))
    problem = replace(problem, dense=dense)
    plain = problem.run_backward(deterministic=deterministic)
    there = {name: np.full(x.shape, 0.5, x.dtype) for name, x in plain.items()}
    grads = AttentionGrads(**{name: KERNELS.put(x) for name, x in there.items()})
    (dout, q, k, v, out, lse), bounds, options = problem.backward_inputs()
    with KERNELS.running():
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
        (RAGGED, {}), (FLOAT, {"deterministic": True}),
        (FLOAT, {"rotary": cupyattn.rope_tables(80, 24), "q_offset": 0}),
        *deep((FLOAT, {}), (RAGGED, {"deterministic": True})),
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


def test_vjp():
    """One entry for each argument by position: lengths have no gradient."""
    q, k, v, *bounds = map(KERNELS.put, FLOAT.arrays())
    dout = KERNELS.put(FLOAT.backward_inputs()[0][0])
    with KERNELS.running():
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


@pytest.mark.parametrize("bounds", [[0, 900, -5, 178, 2**31 - 1], [7, 3, 3, 3, 3], [-9] * 5])
@pytest.mark.parametrize("problem", [RAGGED, FLOAT], ids=["float16", "float32"])
def test_wild_bounds_touch_nothing_outside(problem, bounds):
    """The emulator's checks of addresses would say so; values are not looked at here."""
    arrays, _, _ = problem.backward_inputs()
    wild = np.array(bounds, np.int32)
    with KERNELS.running(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("cupyattn.ops.attention.checks.checks_values", lambda _: False)
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
