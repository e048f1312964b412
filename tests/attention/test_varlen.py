"""Attention over packed sequences: results are those of dense calls, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from support.devices import KERNELS, SENTINEL
from support.search import deep, examples, wider
from support.strategies import EITHER_HALF, EVERY_OPTION, FRUGAL, RUN_TIME_OPTIONS
from support.varlen import VarlenProblem, varlen_problems

import cupyattn
from cupyattn.ops.attention.reference.varlen import sequences
from cupyattn.testing import AttentionCase

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

KINDS = {"option_views": FRUGAL["option_views"]}
HEAD_DIMS = wider(
    [(64, 64), (24, 40)],
    [(5, 8), (88, 80), (128, 128), (192, 72), (256, 256), (264, 500), (320, 64)],
)
RAGGED = VarlenProblem(
    AttentionCase(B=4, Sq=140, Sk=150, H=4, G=2, D=64, Dv=64, dtype="float16",
                     options=(("causal", True),)),
    queries=(5, 140, 0, 33),
    keys=(20, 150, 7, 33),
)  # fmt: skip


@given(
    problem=varlen_problems(
        head_dims=HEAD_DIMS, dtypes=("float16",), options=RUN_TIME_OPTIONS, **KINDS
    )
)
@examples(5, deep=20)
def test_each_sequence_is_within_the_dense_bounds(problem: VarlenProblem):
    assert problem.ratio(*problem.run()) <= 1


@given(
    problem=varlen_problems(
        head_dims=((64, 64),), dtypes=("float16",), options=RUN_TIME_OPTIONS,
        option_sets=wider(*EITHER_HALF[0]), **KINDS,
    )
)  # fmt: skip
@examples(4, deep=40)
def test_every_option(problem: VarlenProblem):
    assert problem.ratio(*problem.run()) <= 1


@given(
    problem=varlen_problems(
        head_dims=wider([(24, 40)], [(64, 64), (128, 128), (160, 33), (256, 8)]),
        dtypes=wider(["float32"], ["bfloat16"]), options=RUN_TIME_OPTIONS,
        option_sets=wider(*EITHER_HALF[1]), **KINDS,
    )
)  # fmt: skip
@examples(4, deep=20)
def test_float32(problem: VarlenProblem):
    assert problem.ratio(*problem.run()) <= 1


@pytest.mark.parametrize(
    ("dtype", "head_dim", "head_dim_v"),
    [
        ("float16", 64, 64),
        *deep(
            ("float32", 24, 40),
            ("float16", 32, 32),
            ("float16", 256, 256),
            ("bfloat16", 72, 72),
            ("float16", 512, 512),
        ),
    ],
)
def test_the_bits_are_those_of_a_loop_over_sequences(dtype, head_dim, head_dim_v):
    """Kernels and their order are equal: nothing but addresses differs.

    (But for tiles of 192 rows, which dense calls alone have, at head dims 33 to 40.)
    """
    dense = replace(RAGGED.dense, dtype=dtype, D=head_dim, Dv=head_dim_v)
    problem = replace(RAGGED, dense=dense)
    out, lse = problem.run()
    q, k, v, *_ = problem.arrays()
    for rows, keys, _ in problem.sequences():
        own = (KERNELS.put(x) for x in (q[None, rows], k[None, keys], v[None, keys]))
        results = cupyattn.attention(*own, causal=True, return_lse=True)
        alone, alone_lse = map(KERNELS.get, results)
        if rows.stop - rows.start > 16:  # fewer are another kernel's in a dense call
            assert np.array_equal(out[rows], alone[0])
            assert np.array_equal(lse[:, rows], alone_lse[0])


@pytest.mark.parametrize("lengths", [(130,) * 3, (300, 1, 0), (1,) * 70])
def test_every_row_has_its_cta(lengths):
    """Equal lengths, very different ones, and more sequences than a warp looks at together."""
    dense = replace(RAGGED.dense, B=len(lengths), Sq=max(lengths), Sk=max(lengths), H=2)
    problem = VarlenProblem(dense, lengths, lengths)
    assert problem.ratio(*problem.run()) <= 1


def test_rows_of_no_sequence_stay_as_they_are():
    """Longest lengths that are larger than any change nothing."""
    problem = replace(RAGGED, spare=70)
    arrays = [KERNELS.put(x) for x in problem.arrays()]
    total = len(arrays[0])
    out = KERNELS.put(np.full((total, 4, 64), SENTINEL, np.float16))
    lse = KERNELS.put(np.full((4, total), SENTINEL, np.float32))
    cupyattn.attention_varlen(*arrays, 1000, 2000, causal=True, return_lse=True, out=(out, lse))
    out, lse = KERNELS.get(out), KERNELS.get(lse)
    end = sum(problem.queries)
    assert (out[end:] == SENTINEL).all()
    assert (lse[:, end:] == SENTINEL).all()
    assert problem.ratio(out, lse) <= 1


def test_bounds_of_any_stride_and_of_64_bits():
    expected = RAGGED.run()
    *arrays, bounds_q, bounds_k = RAGGED.arrays()
    wide = np.full((2, 2 * len(bounds_q)), -7, np.int64)
    wide[0, ::2], wide[1, ::2] = bounds_q, bounds_k
    there = [KERNELS.put(x) for x in (*arrays, wide[0, ::2], wide[1, ::2])]
    found = cupyattn.attention_varlen(*there, 140, 150, causal=True, return_lse=True)
    for one, other in zip(map(KERNELS.get, found), expected, strict=True):
        assert np.array_equal(one, other)


def test_lengths_beyond_32_bits_are_the_nearest_that_there_are(values_unchecked):
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

    results = run(far, beyond), run(bounds_q, all_and_none)
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


def test_nan_stays_in_its_sequence():
    q, k, v, *bounds = RAGGED.arrays()
    v[RAGGED.bounds[1][1]] = np.nan  # the first key of the second sequence, which all its rows see
    out = cupyattn.attention_varlen(*map(KERNELS.put, (q, k, v, *bounds)), 140, 150, causal=True)
    own = np.isnan(KERNELS.get(out)).any(axis=(1, 2))
    assert own[5:145].all()
    assert not own[:5].any()
    assert not own[145:].any()


@pytest.mark.parametrize("name", EVERY_OPTION)
def test_the_reference_is_a_loop_of_dense_calls(name):
    """Options that count sequences, dropout's mask and mask_mod, count them from the first."""
    lengths_q, lengths_k = (5, 0, 3), (7, 4, 6)
    dense = AttentionCase(B=3, Sq=5, Sk=7, H=4, G=2, D=8, Dv=6)
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
def test_wild_bounds_touch_nothing_outside(bounds, values_unchecked):
    """The emulator's checks of addresses would say so; values are not looked at here."""
    q, k, v, *_ = map(KERNELS.put, RAGGED.arrays())
    wild = KERNELS.put(np.array(bounds, np.int32))
    cupyattn.attention_varlen(q, k, v, wild, wild, 140, 150, causal=True)


PROBLEM = VarlenProblem(
    AttentionCase(B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=6), queries=(5, 2), keys=(3, 7)
)
NAMES = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
RUNS = ("reference", "emulator")


def call(
    options: dict[str, Any] | None = None, longest: tuple[Any, Any] = (5, 7), **changed: Any
) -> Any:
    arrays = dict(zip(NAMES, PROBLEM.arrays(), strict=True))
    for name, change in changed.items():
        arrays[name] = change(arrays[name])
    return cupyattn.attention_varlen(*arrays.values(), *longest, **(options or {}))


def bounds(*items: int, dtype: str = "int32") -> Any:
    return lambda _: np.array(items, dtype)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"q": lambda x: None}, TypeError, "q is None"),
        ({"q": lambda x: x[None]}, ValueError, "q has shape (1, 7, 4, 8)"),
        ({"q": lambda x: x.astype("float16")}, TypeError, "q has float16"),
        ({"q": lambda x: x[:, :3]}, ValueError, "q has H = 3 heads, k and v have G = 2; H is a "
         "multiple of G (grouped-query attention), or equal to it; check the head axis: it is the "
         "last but one"),
        ({"q": lambda x: x[..., :4]}, ValueError, "k has shape (10, 2, 8)"),
        ({"q": lambda x: x[..., ::-1]}, ValueError, "q has strides"),
        ({"v": lambda x: x[1:]}, ValueError, "v has shape (9, 2, 6)"),
        ({"v": lambda x: x[:, :1]}, ValueError, "v has shape (10, 1, 6)"),
        ({"cu_seqlens_q": lambda x: None}, TypeError, "cu_seqlens_q is None"),
        ({"cu_seqlens_k": lambda x: x.tolist()}, TypeError, "cu_seqlens_k has type builtins.list"),
        ({"cu_seqlens_q": bounds(0, 5, 7, dtype="uint32")}, TypeError,
         "cu_seqlens_q has dtype uint32"),
        ({"cu_seqlens_k": bounds(0, 3, 10, dtype="float32")}, TypeError,
         "cu_seqlens_k has dtype float32"),
        ({"cu_seqlens_q": lambda x: x[None]}, ValueError, "cu_seqlens_q has shape (1, 3)"),
        ({"cu_seqlens_q": bounds()}, ValueError, "cu_seqlens_q has no items"),
        ({"cu_seqlens_k": bounds(0, 10)}, ValueError, "cu_seqlens_k has shape (2,)"),
        ({"cu_seqlens_q": bounds(1, 5, 7)}, ValueError, "cu_seqlens_q = [1, 5, 7]"),
        ({"cu_seqlens_q": bounds(0, 5, 4)}, ValueError, "cu_seqlens_q = [0, 5, 4]"),
        ({"cu_seqlens_q": bounds(0, 5, 8)}, ValueError, "cu_seqlens_q = [0, 5, 8]"),
        ({"cu_seqlens_k": bounds(0, -1, 7)}, ValueError, "cu_seqlens_k = [0, -1, 7]"),
        ({"cu_seqlens_q": bounds(0, 1, 7)}, ValueError, "sequence 1 of cu_seqlens_q has 6 rows"),
        ({"cu_seqlens_k": bounds(0, 8, 10)}, ValueError, "sequence 0 of cu_seqlens_k has 8 rows"),
    ],
)  # fmt: skip
def test_arrays_that_are_refused(changed, kind, message):
    with cupyattn.backend("emulator"), pytest.raises(kind, match=re.escape(message)):
        call(**changed)


@pytest.mark.parametrize("backend", RUNS)
@pytest.mark.parametrize("most", [2**31, 2**70])
def test_longest_lengths_may_be_any_larger_numbers(most, backend):
    with cupyattn.backend(backend):
        assert np.array_equal(call(longest=(most, most)), call())


def test_rows_that_lie_too_far_apart_have_no_other_implementation(monkeypatch):
    monkeypatch.setattr("cupyattn.ops.attention.params._TILE_BYTES", 64)
    halves = {name: lambda x: x.astype(np.float16) for name in "qkv"}
    with (
        cupyattn.backend("emulator"),
        pytest.raises(
            ValueError, match=r"k has .* here; pass a contiguous copy, ascontiguousarray\(k\)$"
        ),
    ):
        call(**halves)


@pytest.mark.parametrize(
    ("longest", "kind", "message"),
    [
        ((4, 7), ValueError, "sequence 0 of cu_seqlens_q has 5 rows"),
        ((5, 6), ValueError, "sequence 1 of cu_seqlens_k has 7 rows"),
        ((-1, 7), ValueError, "max_seqlen_q = -1"),
        ((5, -3), ValueError, "max_seqlen_k = -3"),
        ((5.0, 7), TypeError, "max_seqlen_q is 5.0 of type float"),
        ((5, None), TypeError, "max_seqlen_k is None"),
        ((5, [7]), TypeError, "max_seqlen_k is [7] of type list"),
        ((True, 7), TypeError, "max_seqlen_q is True"),
    ],
)
def test_longest_lengths_that_are_refused(longest, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        call(longest=longest)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"seqused_k": np.array([3, 8])}, ValueError, "seqused_k has values from 3 to 8"),
        ({"seqused_k": np.array([4, 7])}, ValueError, "seqused_k has values from 4 to 7"),
        ({"seqused_k": np.array([3])}, ValueError, "seqused_k has shape (1,)"),
        ({"q_offset": np.zeros(3, int)}, ValueError, "q_offset has shape (3,)"),
        ({"mask": np.ones((7, 10), bool)}, ValueError,
         "it broadcasts to the scores, (B, H, queries, keys) = (2, 4, 5, 7)"),
        ({"sinks": np.ones(3, "float32")}, ValueError, "sinks has shape (3,)"),
        ({"rotary": (np.ones((6, 4), "float32"),) * 2}, ValueError, "are at positions"),
        ({"score_mod": 3}, TypeError, "score_mod has type int"),
        ({"return_lse": 1}, TypeError, "return_lse = 1"),
        ({"out": np.zeros((2, 5, 4, 6), "float32")}, ValueError, "out is "),
        ({"out": np.zeros((8, 4, 6), "float32")}, ValueError, "out is float32 (8, 4, 6)"),
        ({"out": (np.zeros((7, 4, 6), "float32"), np.zeros((7, 4), "float32")),
          "return_lse": True}, ValueError, "lse is float32 (7, 4)"),
    ],
)  # fmt: skip
def test_options_that_are_refused(options, kind, message):
    with cupyattn.backend("reference"), pytest.raises(kind, match=re.escape(message)):
        call(options)


@pytest.mark.parametrize(
    ("name", "value"),
    [("mask_mod", lambda b, h, i, j: i >= j), ("score_mod", lambda s, b, h, i, j: 2 * s)],
)
def test_a_python_function_has_no_kernel(name, value):
    with (
        cupyattn.backend("emulator"),
        pytest.raises(NotImplementedError, match=f"{name} in attention_varlen"),
    ):
        call({name: value, "q_offset": 0})


def test_a_result_may_not_be_an_input():
    _, k, _, *bounds = PROBLEM.arrays()
    both = np.zeros((7, 4, 8), np.float32)
    values = np.zeros((10, 2, 8), np.float32)
    with pytest.raises(ValueError, match="out overlaps q"):
        cupyattn.attention_varlen(both, k, values, *bounds, 5, 7, out=both)


def test_no_sequence_and_no_heads():
    q, k, v, *_ = PROBLEM.arrays()
    none = np.zeros(1, np.int32)
    for backend in ("reference", "emulator"):
        with cupyattn.backend(backend):
            out = cupyattn.attention_varlen(q[:0], k[:0], v[:0], none, none, 0, 0)
            assert out.shape == (0, 4, 6)
            bounds = PROBLEM.bounds
            out = cupyattn.attention_varlen(q[:, :0], k[:, :0], v[:, :0], *bounds, 5, 7)
            assert out.shape == (7, 0, 6)
