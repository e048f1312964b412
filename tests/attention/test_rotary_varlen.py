"""Rotary embedding of packed sequences: positions begin anew in each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, placed
from support.rotary import RotaryProblem, rotary_problems
from support.search import deep, examples, wider
from support.varlen import VarlenProblem

import cupyattn
from cupyattn import AttentionGrads

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

# Sequences without queries, without keys, and rows of no sequence.
PACKED = VarlenProblem(
    RotaryProblem(
        B=4, Sq=40, Sk=70, H=4, G=2, D=24, Dv=40, dtype="float16",
        drawn=(("causal", True), ("q_offset", (30, 5, 0, 0)), ("seqused_k", (70, 20, 33, 0)),
               ("rotary", (70, 8))),
    ),
    queries=(40, 0, 13, 7), keys=(70, 31, 33, 0), spare=3,
)  # fmt: skip
# Phi-2 turns 32 of its 80 features.
PHI = replace(
    PACKED,
    dense=replace(PACKED.dense, D=80, Dv=80, drawn=(*PACKED.dense.drawn[:3], ("rotary", (70, 16)))),
)
each_packed = pytest.mark.parametrize("packed", [PACKED, *deep(PHI)], ids=["narrow", "of 80"])


@st.composite
def packed_problems(draw: st.DrawFn, dtypes: tuple[str, ...]) -> VarlenProblem:
    dense = draw(rotary_problems(
        always=("q_offset",), tables=("float32",),
        head_dims=wider([(24, 40)], [(64, 64), (80, 80)]),
        dtypes=dtypes, views=("contiguous",), option_views=("strided",),
    ))  # fmt: skip
    counts = [
        tuple(draw(st.integers(0, most)) for _ in range(dense.B)) for most in (dense.Sq, dense.Sk)
    ]
    return VarlenProblem(dense, *counts, spare=draw(st.sampled_from((0, 3))))


def run(problem: VarlenProblem, **more: object) -> tuple[np.ndarray, np.ndarray]:
    arrays = map(KERNELS.put, problem.arrays())
    options = {name: placed(KERNELS, value) for name, value in problem.options().items()}
    out, lse = cupyattn.attention_varlen(
        *arrays, *problem.longest, return_lse=True, **options, **more
    )
    return KERNELS.get(out), KERNELS.get(lse)


@examples(6)
@given(packed_problems(wider(("float16",), ("float32", "bfloat16"))))
def test_each_sequence_is_a_dense_call(problem):
    assert problem.ratio(*run(problem)) <= 1


@examples(4)
@given(packed_problems(wider(("float16",), ("float32", "bfloat16"))))
def test_gradients_of_each_sequence_are_those_of_a_dense_call(problem):
    ratios = problem.backward_ratios(problem.run_backward())
    assert max(ratios.values()) <= 1, ratios


@each_packed
@pytest.mark.parametrize("interleaved", [*deep(False), True])
@pytest.mark.parametrize("dtype", ["float16", *deep("float32", "bfloat16")])
def test_sequences_without_queries_or_keys(packed, dtype, interleaved):
    problem = replace(packed, dense=replace(packed.dense, dtype=dtype, interleaved=interleaved))
    assert problem.ratio(*run(problem)) <= 1
    ratios = problem.backward_ratios(problem.run_backward(deterministic=True))
    assert max(ratios.values()) <= 1, ratios


@each_packed
def test_the_last_query_stands_at_the_last_key(packed):
    """By default, in each sequence for itself."""
    drawn = packed.dense.drawn[::3]  # without q_offset and seqused_k
    problem = replace(packed, dense=replace(packed.dense, drawn=drawn), queries=(40, 31, 13, 0))
    assert problem.ratio(*run(problem)) <= 1


@pytest.mark.parametrize("dtype", ["float16", *deep("float32", "bfloat16")])
def test_queries_that_see_no_key_need_no_position(dtype):
    """By default the first of more queries than keys stand before position 0."""
    dense = replace(PACKED.dense, dtype=dtype, drawn=PACKED.dense.drawn[::3])
    problem = replace(PACKED, dense=dense, queries=(40, 31, 13, 7), keys=(30, 31, 5, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cupyattn.ops.attention.checks.checks_values", lambda _: False)
        assert problem.ratio(*run(problem)) <= 1
        ratios = problem.backward_ratios(problem.run_backward())
    assert max(ratios.values()) <= 1, ratios


def test_the_last_query_of_a_second_tile_stands_at_the_last_key():
    drawn = (("causal", True), ("rotary", (150, 8)))
    dense = replace(PACKED.dense, Sq=140, Sk=150, H=2, G=1, drawn=drawn)
    problem = replace(PACKED, dense=dense, queries=(140, 31, 13, 0), keys=(150, 31, 33, 0))
    assert problem.ratio(*run(problem)) <= 1


@each_packed
def test_gradients_are_added_and_rows_of_no_sequence_stay(packed):
    (_, q, k, v, *_), bounds, _ = packed.backward_inputs()
    before = {
        name: packed.dense.normal(name, x.shape)
        for name, x in zip(("dq", "dk", "dv"), (q, k, v), strict=True)
    }
    plain = packed.run_backward()
    grads = AttentionGrads(**{name: KERNELS.put(x) for name, x in before.items()})
    found = packed.run_backward(grads=grads, accumulate=True)
    for name, start in before.items():
        end = bounds[0 if name == "dq" else 1][-1]
        np.testing.assert_allclose(
            found[name][:end], start[:end] + plain[name][:end].astype("f4"), rtol=2e-3, atol=2e-3
        )
        assert_array_equal(found[name][end:], start[end:])


@each_packed
def test_a_workspace_is_all_the_memory_that_it_takes(packed):
    """Of k, and of q where the forward does not rotate it: pairs of 3 features are no chunk."""
    few = replace(packed.dense, drawn=(*packed.dense.drawn[:3], ("rotary", (70, 3))))
    for problem, of_q in ((packed, 0), (replace(packed, dense=few), 1)):
        q, k, *_ = problem.arrays()
        size = 2 * (of_q * q.size + k.size)
        with pytest.raises(ValueError, match="this call needs"):
            run(problem, workspace=KERNELS.put(np.zeros(size - 256, np.uint8)))
        room = KERNELS.put(np.zeros(size + 256, np.uint8))
        (out, lse), (wanted, wanted_lse) = run(problem, workspace=room), run(problem)
        end = problem.bounds[0][-1]  # a GPU finds behind it what was there before
        assert_array_equal(out[:end], wanted[:end])
        assert_array_equal(lse[:, :end], wanted_lse[:, :end])


def test_no_sequence():
    q, k, v, *_ = map(KERNELS.put, PACKED.arrays())
    none = KERNELS.put(np.zeros(1, np.int32))
    options = {name: placed(KERNELS, PACKED.options()[name]) for name in ("causal", "rotary")}
    grads = cupyattn.attention_varlen(q[:0], k[:0], v[:0], none, none, 0, 0, **options)
    assert grads.shape == (0, 4, 40)


@each_packed
@pytest.mark.parametrize("bounds", [[0, 900, -5, 178, 2**31 - 1], [7, 3, 3, 3, 3], [-9] * 5])
def test_wild_bounds_touch_nothing_outside(packed, bounds):
    """The emulator's checks of addresses would say so; values are not looked at here."""
    q, k, v, *_ = map(KERNELS.put, packed.arrays())
    wild = KERNELS.put(np.array(bounds, np.int32))
    options = {name: placed(KERNELS, value) for name, value in packed.options().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cupyattn.ops.attention.checks.checks_values", lambda _: False)
        cupyattn.attention_varlen(q, k, v, wild, wild, 40, 70, **options)
