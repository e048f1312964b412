"""Attention over packed sequences: each one's results are those of a dense call of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from support.attention_options import EITHER_HALF, OPTION_SETS, RUN_TIME_OPTIONS
from support.base_problem import EVERY_OPTION
from support.devices import KERNELS, SENTINEL
from support.search import deep, examples, wider
from support.strategies import FRUGAL, AttentionProblem
from support.varlen import VarlenProblem, varlen_problems

import cupyattn
from cupyattn.reference.attention.varlen import sequences

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

KINDS = {"option_views": FRUGAL["option_views"]}
HEAD_DIMS = wider([(64, 64), (24, 40)], [(5, 8), (88, 80), (128, 128), (192, 72), (256, 256)])
RAGGED = VarlenProblem(
    AttentionProblem(B=4, Sq=140, Sk=150, H=4, G=2, D=64, Dv=64, dtype="float16",
                     drawn=(("causal", True),)),
    queries=(5, 140, 0, 33),
    keys=(20, 150, 7, 33),
)  # fmt: skip


@given(
    problem=varlen_problems(
        head_dims=HEAD_DIMS, dtypes=("float16",), options=RUN_TIME_OPTIONS, **KINDS
    )
)
@examples(10)
def test_each_sequence_is_within_the_dense_bounds(problem: VarlenProblem):
    assert problem.ratio(*problem.run()) <= 1


@given(
    problem=varlen_problems(
        head_dims=((64, 64),), dtypes=("float16",), options=RUN_TIME_OPTIONS,
        option_sets=wider(*EITHER_HALF[0]), **KINDS,
    )
)  # fmt: skip
@examples(10, deep=40)
def test_every_option(problem: VarlenProblem):
    assert problem.ratio(*problem.run()) <= 1


@given(
    problem=varlen_problems(
        head_dims=wider([(24, 40)], [(64, 64), (128, 128), (160, 33), (256, 8)]),
        dtypes=wider(["float32"], ["bfloat16"]), options=RUN_TIME_OPTIONS,
        option_sets=wider(OPTION_SETS[:2], OPTION_SETS[2:]), **KINDS,
    )
)  # fmt: skip
@examples(8, deep=20)
def test_float32(problem: VarlenProblem):
    assert problem.ratio(*problem.run()) <= 1


@pytest.mark.parametrize(
    ("dtype", "head_dim", "head_dim_v"),
    [
        ("float16", 64, 64),
        ("float32", 24, 40),
        *deep(("float16", 32, 32), ("float16", 256, 256), ("bfloat16", 72, 72)),
    ],
)
def test_the_bits_are_those_of_a_loop_over_sequences(dtype, head_dim, head_dim_v):
    """The same kernels in the same order: nothing but addresses differs.

    (But for tiles of 192 rows, which dense calls alone have, at head dims 33 to 40.)
    """
    dense = replace(RAGGED.dense, dtype=dtype, D=head_dim, Dv=head_dim_v)
    problem = replace(RAGGED, dense=dense)
    out, lse = problem.run()
    q, k, v, *_ = problem.arrays()
    for rows, keys, _ in problem.sequences():
        own = (KERNELS.put(x) for x in (q[None, rows], k[None, keys], v[None, keys]))
        with KERNELS.running():
            results = cupyattn.attention(*own, causal=True, return_lse=True)
        alone, alone_lse = map(KERNELS.get, results)
        if rows.stop - rows.start > 16:  # fewer are another kernel's in a dense call
            assert np.array_equal(out[rows], alone[0])
            assert np.array_equal(lse[:, rows], alone_lse[0])


@pytest.mark.parametrize("lengths", [(130,) * 3, (300, 1, 0), (1,) * 70, tuple(range(0, 140, 2))])
def test_every_row_has_its_cta(lengths):
    """Equal lengths, very different ones, and more sequences than a warp looks at together."""
    dense = replace(RAGGED.dense, B=len(lengths), Sq=max(lengths), Sk=max(lengths), H=2)
    problem = VarlenProblem(dense, lengths, lengths)
    assert problem.ratio(*problem.run()) <= 1


def test_rows_of_no_sequence_stay_as_they_are():
    """And longest lengths that are larger than any change nothing."""
    problem = replace(RAGGED, spare=70)
    arrays = [KERNELS.put(x) for x in problem.arrays()]
    total = len(arrays[0])
    out = KERNELS.put(np.full((total, 4, 64), SENTINEL, np.float16))
    lse = KERNELS.put(np.full((4, total), SENTINEL, np.float32))
    with KERNELS.running():
        cupyattn.attention_varlen(*arrays, 1000, 2000, causal=True, return_lse=True, out=(out, lse))
    out, lse = KERNELS.get(out), KERNELS.get(lse)
    behind = sum(problem.queries)
    assert (out[behind:] == SENTINEL).all()
    assert (lse[:, behind:] == SENTINEL).all()
    assert problem.ratio(out, lse) <= 1


def test_bounds_of_any_stride_and_of_64_bits():
    expected = RAGGED.run()
    *arrays, bounds_q, bounds_k = RAGGED.arrays()
    wide = np.full((2, 2 * len(bounds_q)), -7, np.int64)
    wide[0, ::2], wide[1, ::2] = bounds_q, bounds_k
    there = [KERNELS.put(x) for x in (*arrays, wide[0, ::2], wide[1, ::2])]
    with KERNELS.running():
        found = cupyattn.attention_varlen(*there, 140, 150, causal=True, return_lse=True)
    for one, other in zip(map(KERNELS.get, found), expected, strict=True):
        assert np.array_equal(one, other)


def test_lengths_beyond_32_bits_are_the_nearest_that_there_are():
    """Where nothing looks at values, as on a GPU."""
    q, k, v, bounds_q, bounds_k = RAGGED.arrays()
    far = bounds_q.astype(np.int64)
    far[0], far[-1] = -(2**32) + 1, 2**32 + 1
    all_and_none = bounds_k[[-1, 0, -1, 0]]
    beyond = np.array([2**32 + 3, -(2**32) + 5, 2**63 - 1, -(2**31) - 1])

    def run(bounds: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, ...]:
        arrays = map(KERNELS.put, (q, k, v, bounds, bounds_k))
        found = cupyattn.attention_varlen(
            *arrays, 140, 150, seqused_k=KERNELS.put(used), return_lse=True
        )
        return tuple(map(KERNELS.get, found))

    with pytest.MonkeyPatch.context() as patch, KERNELS.running():
        patch.setattr("cupyattn.ops.attention.checks.checks_values", lambda _: False)
        results = run(far, beyond), run(bounds_q, all_and_none)
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


def test_nan_stays_in_its_sequence():
    q, k, v, *bounds = RAGGED.arrays()
    v[RAGGED.bounds[1][1]] = np.nan  # the first key of the second sequence, which all its rows see
    with KERNELS.running():
        out = cupyattn.attention_varlen(
            *map(KERNELS.put, (q, k, v, *bounds)), 140, 150, causal=True
        )
    own = np.isnan(KERNELS.get(out)).any(axis=(1, 2))
    assert own[5:145].all()
    assert not own[:5].any()
    assert not own[145:].any()


@pytest.mark.parametrize("name", EVERY_OPTION)
def test_the_reference_is_a_loop_of_dense_calls(name):
    """Options that count sequences, dropout's mask and mask_mod, count them from the first."""
    lengths_q, lengths_k = (5, 0, 3), (7, 4, 6)
    dense = AttentionProblem(B=3, Sq=5, Sk=7, H=4, G=2, D=8, Dv=6)
    problem = VarlenProblem(dense, lengths_q, lengths_k)
    options = dict(EVERY_OPTION[name])
    if name == "bias":
        options["bias"] = dense.normal("bias", (3, 1, 5, 7))
    if name == "seqused_k":
        options["seqused_k"] = np.array([6, 4, 2])
    if name == "q_offset array":
        options["q_offset"] = np.array([0, 3, 2])
    if name == "rotary":
        options["q_offset"] = 1
    q, k, v, *bounds = problem.arrays()
    with cupyattn.backend("reference"):
        out, lse = cupyattn.attention_varlen(q, k, v, *bounds, 5, 7, return_lse=True, **options)
    padded = np.zeros((3, 5, 4, 8), np.float32), np.zeros((3, 7, 2, 8), np.float32)
    padded = *padded, np.zeros((3, 7, 2, 6), np.float32)
    parts = [(rows, keys) for rows, keys, _ in sequences(*bounds, {})]
    for b, (rows, keys) in enumerate(parts):
        padded[0][b, : lengths_q[b]] = q[rows]
        padded[1][b, : lengths_k[b]], padded[2][b, : lengths_k[b]] = k[keys], v[keys]
    used = options.pop("seqused_k", np.array(lengths_k))
    offset = options.pop("q_offset", used - np.array(lengths_q))
    with cupyattn.backend("reference"):
        whole, whole_lse = cupyattn.attention(
            *padded, seqused_k=used, q_offset=offset, return_lse=True, **options
        )
    for b, (rows, _) in enumerate(parts):
        assert np.allclose(out[rows], whole[b, : lengths_q[b]], atol=1e-6)
        assert np.allclose(lse[:, rows], whole_lse[b, :, : lengths_q[b]], atol=1e-6)


@pytest.mark.parametrize("bounds", [[0, 900, -5, 178, 2**31 - 1], [7, 3, 3, 3, 3], [-9] * 5])
def test_wild_bounds_touch_nothing_outside(bounds):
    """The emulator's checks of addresses would say so; values are not looked at here."""
    q, k, v, *_ = map(KERNELS.put, RAGGED.arrays())
    wild = KERNELS.put(np.array(bounds, np.int32))
    with KERNELS.running(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("cupyattn.ops.attention.checks.checks_values", lambda _: False)
        cupyattn.attention_varlen(q, k, v, wild, wild, 140, 150, causal=True)
