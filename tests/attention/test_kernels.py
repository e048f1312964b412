"""The flash forward within the reference's bounds, views, lengths, and causal order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.backward_runs import check as check_backward
from support.backward_runs import placed
from support.backward_runs import run as gradients_of
from support.devices import (
    DTYPES,
    FLOAT_DTYPES,
    KERNELS,
    SENTINEL,
    GpuArrays,
    dtype_of,
    emulated,
    without_tensor_cores,
)
from support.forward_runs import TEACHING, check, check_half_sums, in_float32, run
from support.search import Search, deep, examples, wider
from support.strategies import EITHER_HALF, FRUGAL, LONGEST, RUN_TIME_OPTIONS, attention_problems

import cupyattn
from cupyattn import reference
from cupyattn.ops.attention.kernels.float32.forward import FLASH as FLASH_F32
from cupyattn.ops.attention.kernels.teaching.forward import TILED_TILE_K
from cupyattn.ops.attention.kernels.tensor_core.forward import FLASH, half_sums_row
from cupyattn.ops.attention.options import MAX_HALF_SUM_VALUE
from cupyattn.testing import AttentionCase

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

# Steps of 8 columns with tails of 1, 2 and 3 chunks, odd dims, D != Dv, all configurations. A plain
# run needs one head dim with tails, or mistakes in the swizzle of common/swizzle.cuh go unnoticed.
FLASH_HEAD_DIMS = [
    *((24, 40), (64, 64)),
    *deep(*((pair,) for pair in ((5, 8), (88, 80), (128, 128), (192, 72), (256, 256)))),
]
# Slices of 16 columns with tails of 1, 2 and 3 chunks; output columns in quads with 1, 2 or 3 more;
# odd dims, D != Dv, all configurations.
FLASH_F32_HEAD_DIMS = wider(
    [(24, 40)], [(5, 8), (64, 64), (72, 96), (128, 128), (160, 33), (76, 256)]
)
# (D, Dv) of which one is above 256: odd, with tails of a slice and of a quad, and the largest.
WIDE_HEAD_DIMS = ((257, 264), (264, 500), (320, 64), (24, 384), (512, 512))
ANY_WIDE = st.one_of(
    st.tuples(st.integers(257, 512), st.integers(1, 512)),
    st.tuples(st.integers(1, 512), st.integers(257, 512)),
)
# float32 where the emulator takes half as long, and the kernel is there; --deep has both.
DIMS_OF_DTYPES = {
    **dict.fromkeys(DTYPES, ((64, 64),)), "float32": wider([(24, 40)], [(64, 64)]),
}  # fmt: skip
PLAIN_DTYPES = wider(["float16", "float32"], ["bfloat16"])


def of_plain_dtypes(**sizes: Any) -> st.SearchStrategy[AttentionCase]:
    return st.one_of(
        *(
            attention_problems(head_dims=DIMS_OF_DTYPES[dtype], dtypes=(dtype,), **sizes)
            for dtype in PLAIN_DTYPES
        )
    )


@pytest.mark.parametrize("head_dims", FLASH_HEAD_DIMS, ids=str)
@examples(4)
@given(data=st.data())
def test_flash_within_bounds_of_the_reference(head_dims: tuple[int, int], data: st.DataObject):
    problems = attention_problems(
        head_dims=(head_dims,), dtypes=("float16",), options=RUN_TIME_OPTIONS, largest=LONGEST,
        **FRUGAL,
    )  # fmt: skip
    check(data.draw(problems), "flash")


@examples(4, deep=36)
@given(
    problem=attention_problems(
        head_dims=wider([(64, 64)], [(128, 96)]),
        dtypes=("float16",),
        options=RUN_TIME_OPTIONS,
        option_sets=wider(*EITHER_HALF[0]),
        largest=LONGEST,
        **FRUGAL,
    )
)
def test_flash_options_within_bounds_of_the_reference(problem: AttentionCase):
    check(problem, "flash")


@examples(4, deep=16)
@given(
    problem=attention_problems(
        head_dims=FLASH_F32_HEAD_DIMS,
        dtypes=wider(["float32"], ["bfloat16"]),
        options=RUN_TIME_OPTIONS,
        **FRUGAL,
    )
)
def test_float32_flash_within_bounds_of_the_reference(problem: AttentionCase):
    check(problem, "flash")


@examples(4, deep=28)
@given(
    problem=attention_problems(
        head_dims=wider([(24, 40)], [(64, 64), (128, 96), (256, 8)]),
        dtypes=wider(["float32"], ["bfloat16"]),
        options=RUN_TIME_OPTIONS,
        option_sets=wider(*EITHER_HALF[1]),
        **FRUGAL,
    )
)
def test_float32_flash_options_within_bounds_of_the_reference(problem: AttentionCase):
    check(problem, "flash")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        *((head_dim, "float16") for head_dim in FLASH[75]),
        *itertools.product(FLASH_F32[75], FLOAT_DTYPES),
    ],
)
@pytest.mark.parametrize("drawn", [("causal", True), ("causal", False), ("dropout_p", 0.5)])
def test_every_configuration_of_flash(head_dim: int, dtype: str, drawn: tuple[str, Any]):
    """Several tiles of queries and of keys; a tile's size decides on the keys' random words."""
    sq, sk = (300, 430) if isinstance(KERNELS, GpuArrays) else (130, 200)
    problem = AttentionCase(
        B=1, Sq=sq, Sk=sk, H=2, G=1, D=head_dim, Dv=head_dim, dtype=dtype, options=(drawn,)
    )
    check(problem, "flash")


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
@pytest.mark.parametrize(("dropout_p", "dropped"), [(1e-6, False), (1 - 1e-6, True)])
def test_dropout_of_less_than_a_bit(dropout_p: float, dropped: bool, dtype: str):
    """Probabilities that round to 0 and to 1 in the 16 bits that are compared."""
    ones = np.ones((1, 40, 1, 24), dtype)
    q, k, v = (KERNELS.put(ones) for _ in range(3))
    out = KERNELS.get(cupyattn.attention(q, k, v, dropout_p=dropout_p, seed=1))
    np.testing.assert_allclose(out, 0 if dropped else 1, rtol=2e-3)


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        *(("float16", (64, 64)), ("float32", (24, 40))),
        *deep(("float32", (64, 64)), ("bfloat16", (64, 64))),
    ],
)
def test_padding_hidden_by_a_large_finite_bias(dtype: str, dims: tuple[int, int]):
    """A maximum of -1e10 is rounded by hundreds: P must be as right as with a bias of -inf."""
    problem = AttentionCase(1, 40, 101, 1, 1, *dims, dtype=dtype)
    arrays = problem.arrays()
    hidden = np.where(np.arange(101) < 60, 0, -np.inf).astype(np.float32)
    exact, _ = reference.attention(*arrays, bias=hidden)
    native = KERNELS.device.traits.native
    bound, _ = reference.attention_bound(
        *arrays,
        dtype=dtype,
        tile_k=32,
        float32_weights=in_float32(dtype, native),
        native=native,
        bias=hidden,
    )
    for large in (1e4, 1e8, 1e9, 5e9, 1e10, 1e20, 1e30, 1e35, np.finfo(np.float32).max):
        bias = np.maximum(hidden, -large).astype(np.float32)
        out = cupyattn.attention(*map(KERNELS.put, arrays), bias=KERNELS.put(bias))
        assert reference.error_ratio(KERNELS.get(out), exact, bound) <= 1, large


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        *(("float16", (264, 144)), ("float32", (264, 500))),
        *deep(
            *(("float16", dims) for dims in itertools.product((257, 384, 512), (264, 320, 512))),
            *(
                ("float16", dims)
                for dims in ((500, 500), (264, 500), (320, 64), (64, 512), (144, 512))
            ),
        ),
    ],
)
@pytest.mark.parametrize("causal", [True, *deep(False)])
def test_heads_of_more_than_256_items(dtype: str, dims: tuple[int, int], causal: bool):
    problem = AttentionCase(1, 19, 71, 2, 1, *dims, dtype=dtype, options=(("causal", causal),))
    check(problem, "flash")


@pytest.mark.parametrize("dims", [(257, 264), (320, 384), (500, 512)], ids=str)
def test_wide_heads_of_few_tokens(dims: tuple[int, int]):
    check(AttentionCase(1, 3, 5, 1, 1, *dims, dtype="float16"), "flash")


@pytest.mark.deep
@examples(12)
@given(
    problem=attention_problems(
        head_dims=WIDE_HEAD_DIMS,
        dtypes=DTYPES,
        options=RUN_TIME_OPTIONS,
        largest=80,
        **FRUGAL,
    )
)
def test_wide_heads_within_bounds_of_the_reference(problem: AttentionCase):
    check(problem, "flash")


@pytest.mark.parametrize("head_dim", [264, *deep(512)])
def test_scores_of_wide_heads_that_rise_after_the_first_tile(head_dim: int):
    """Far above the maximum of that tile: all warps that share a row rescale its output."""
    case = AttentionCase(1, 40, 90, 1, 1, head_dim, head_dim, "float16")
    q, k, v = case.arrays()
    for key, rise in ((40, 3.0), (60, 11.0)):
        k[:, key] = np.abs(k[:, key]) * 0.1 + rise
    out = cupyattn.attention(*map(KERNELS.put, (q := np.abs(q), k, v)), softmax_scale=0.125)
    exact, _ = reference.attention(q, k, v, softmax_scale=0.125)
    bound, _ = reference.attention_bound(
        q, k, v, dtype="float16", tile_k=16, native=KERNELS.device.traits.native,
        float32_weights=False, softmax_scale=0.125,
    )  # fmt: skip
    assert reference.error_ratio(KERNELS.get(out), exact, bound) <= 1


@pytest.mark.deep
@examples(16)
@given(
    dims=ANY_WIDE, lengths=st.tuples(st.integers(1, 70), st.integers(0, 70)), causal=st.booleans()
)
def test_any_wide_head_dims(dims: tuple[int, int], lengths: tuple[int, int], causal: bool):
    options = (("causal", causal),)
    check(AttentionCase(1, *lengths, 1, 1, *dims, dtype="float16", options=options), "flash")


@pytest.mark.deep
@examples(12)
@given(
    problem=attention_problems(
        head_dims=WIDE_HEAD_DIMS,
        dtypes=DTYPES,
        options=RUN_TIME_OPTIONS,
        option_sets=wider(*EITHER_HALF[1]),
        largest=80,
        **FRUGAL,
    )
)
def test_options_of_wide_heads_within_bounds_of_the_reference(problem: AttentionCase):
    check(problem, "flash")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("head_dim", [255, *deep(1, 16, 63, 65, 127, 129)])
def test_head_dims(dtype: str, head_dim: int):
    problem = AttentionCase(B=1, Sq=33, Sk=41, H=2, G=1, D=head_dim, Dv=257 - head_dim, dtype=dtype)
    check(problem, "flash")


@pytest.mark.parametrize("dtype", ["float16", "float32", *deep("bfloat16")])
def test_long_sequences(dtype: str):
    """Thousands of keys (hundreds on the emulator): many tiles, sums of many terms."""
    sq, sk = (129, 5000) if isinstance(KERNELS, GpuArrays) else (17, 700)
    for dims in DIMS_OF_DTYPES[dtype]:
        problem = AttentionCase(1, sq, sk, 2, 1, *dims, dtype, options=(("causal", True),))
        check(problem, "flash")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["flash", *TEACHING])
def test_more_heads_than_the_grid_has_rows(implementation: str):
    """B * H beyond 65,535, the limit of a grid's second axis."""
    problem = AttentionCase(B=2, Sq=2, Sk=3, H=40_000, G=40_000, D=2, Dv=2, dtype="float16")
    check(problem, implementation)
    if implementation != "tiled":
        check_backward(problem, implementation)


@examples(3, deep=24)
@given(
    problem=of_plain_dtypes(options=("causal",), views=("contiguous",), crowd=FRUGAL["crowd"]),
    integer_dtype=st.sampled_from((np.int32, np.int64)),
    stride=st.sampled_from((1, 2, -1)),
)
def test_batch_integers_of_any_width_and_stride(problem, integer_dtype, stride):
    """Both arrays of integers, as views: the same result as the same numbers one by one."""
    rng = np.random.default_rng(problem.seed)
    used = np.zeros(problem.B * abs(stride), integer_dtype)[::stride]
    used[:] = rng.integers(0, problem.Sk + 1, problem.B)
    offsets = np.zeros(problem.B * abs(stride), integer_dtype)[::stride]
    offsets[:] = rng.integers(-3, problem.Sk + 3, problem.B)
    q, k, v = (KERNELS.put(array) for array in problem.arrays())
    options = problem.keywords()
    together = cupyattn.attention(
        q, k, v, q_offset=KERNELS.put(offsets), seqused_k=KERNELS.put(used), **options
    )
    for b in range(problem.B):
        keys = slice(0, int(used[b]))
        alone = cupyattn.attention(
            q[b : b + 1],
            k[b : b + 1, keys],
            v[b : b + 1, keys],
            q_offset=int(offsets[b]),
            **options,
        )
        assert_array_equal(KERNELS.get(together[b : b + 1]), KERNELS.get(alone))


@examples(4, deep=30)
@given(problem=of_plain_dtypes(options=RUN_TIME_OPTIONS, crowd=FRUGAL["crowd"]))
def test_views_equal_copies_bit_for_bit(problem: AttentionCase):
    """Vector and scalar loads bring the same numbers."""
    out, lse = run(problem, "flash")
    copies = [KERNELS.put(np.ascontiguousarray(array)) for array in problem.arrays()]
    copied_out, copied_lse = cupyattn.attention(
        *copies, **placed(problem.keywords()), return_lse=True
    )
    assert_array_equal(out, KERNELS.get(copied_out))
    assert_array_equal(lse, KERNELS.get(copied_lse))


WRITTEN = {
    "flash": of_plain_dtypes(options=RUN_TIME_OPTIONS, **FRUGAL),
    **dict.fromkeys(
        TEACHING,
        attention_problems(
            head_dims=((24, 40),), dtypes=("float16",), options=("causal", "softmax_scale"),
            crowd=FRUGAL["crowd"],
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("implementation", WRITTEN)
@examples(3, deep=30)
@given(data=st.data())
def test_results_are_written_into_any_strides(implementation, data):
    """out= and lse as views: every item is written, and nothing next to it."""
    problem = data.draw(WRITTEN[implementation])
    arrays = [KERNELS.put(array) for array in problem.arrays()]
    options = {
        **placed(problem.keywords()), "return_lse": True, "implementation": implementation
    }  # fmt: skip
    expected_out, expected_lse = cupyattn.attention(*arrays, **options)

    memory = KERNELS.xp.full(
        (problem.B, problem.H, problem.Sq, problem.Dv + 5), SENTINEL, dtype_of(problem.dtype)
    )
    out = memory.transpose(0, 2, 1, 3)[..., 2:-3]
    lse_memory = KERNELS.xp.full((problem.H, 2, problem.B, problem.Sq + 1), SENTINEL, "float32")
    lse = lse_memory[:, 1, :, 1:].transpose(1, 0, 2)
    returned = cupyattn.attention(*arrays, **options, out=(out, lse))

    assert returned[0] is out
    assert returned[1] is lse
    assert_array_equal(KERNELS.get(out), KERNELS.get(expected_out))
    assert_array_equal(KERNELS.get(lse), KERNELS.get(expected_lse))
    out[...] = SENTINEL
    lse[...] = SENTINEL
    assert (memory == SENTINEL).all()
    assert (lse_memory == SENTINEL).all()


SQ, SK, GROUP = 70, 131, 2


def two_groups(dtype: str, **drawn: Any) -> AttentionCase:
    """Two query heads on each of two key-value heads, several tiles, ragged ends."""
    head_dim, head_dim_v = DIMS_OF_DTYPES[dtype][0]
    return AttentionCase(
        B=1, Sq=SQ, Sk=SK, H=2 * GROUP, G=2, D=head_dim, Dv=head_dim_v, dtype=dtype,
        options=tuple(drawn.items()),
    )  # fmt: skip


def forward(arrays: Sequence[np.ndarray], options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Out and lse of the flash kernel, as NumPy arrays."""
    out, lse = cupyattn.attention(*map(KERNELS.put, arrays), **placed(options), return_lse=True)
    return KERNELS.get(out), KERNELS.get(lse)


def forward_bounds(
    arrays: Sequence[np.ndarray], options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    dtype = arrays[0].dtype.name
    return reference.attention_bound(
        *arrays, dtype=dtype, tile_k=TILED_TILE_K, float32_weights=dtype == "float32", **options
    )


def backward_bounds(arrays: Sequence[np.ndarray], options: dict[str, Any]) -> dict[str, np.ndarray]:
    bounds = reference.attention_backward_bound(
        *arrays, dtype=arrays[1].dtype, native=KERNELS.device.traits.native, **options
    )
    return {name: bound for name, bound in bounds._asdict().items() if bound is not None}


def assert_within(actual: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> None:
    assert reference.error_ratio(actual, expected.astype(np.float64), bound) <= 1


@pytest.mark.parametrize(
    ("dtype", "q_offset"),
    [("float16", 0), ("float16", SK - SQ), ("float32", SK - SQ), *deep(("float32", 0))],
)
def test_causal_rows_ignore_later_keys(dtype: str, q_offset: int):
    """Later keys are large, and some share a tile with earlier ones.

    float32 results are equal to the bit. In float16 a warp raises the maxima of all its rows at
    once, and that moment changes how each row is rounded.
    """
    options = {"causal": True, "q_offset": q_offset}
    dout, _ = two_groups(dtype).gradients()
    q, k, v = two_groups(dtype).arrays()
    cut = q_offset + SQ // 2 + 3
    later_k, later_v = k.copy(), v.copy()
    later_k[:, cut:] += 1
    later_v[:, cut:] *= -1000
    before, after = forward((q, k, v), options), forward((q, later_k, later_v), options)
    dq, later_dq = (
        gradients_of((dout, q, *keys, *before), options, "flash", deterministic=True)["dq"]
        for keys in ((k, v), (later_k, later_v))
    )
    rows = cut - q_offset
    bounds = forward_bounds((q, k, v), options)
    for actual, expected, bound, seen in zip(
        after, before, bounds, (np.s_[:, :rows], np.s_[..., :rows]), strict=True
    ):
        if dtype == "float16":
            assert_within(actual[seen], expected[seen], 2 * bound[seen])
        else:
            assert_array_equal(actual[seen], expected[seen])
    if dtype == "float16":  # which scales gradients of scores by the largest row of V
        in_error = sum(
            backward_bounds((dout, q, *keys, *results), options)["dq"]
            for keys, results in (((k, v), before), ((later_k, later_v), after))
        )
        assert_within(later_dq[:, :rows], dq[:, :rows], in_error[:, :rows])
    else:
        assert_array_equal(later_dq[:, :rows], dq[:, :rows])
    assert (after[0][:, rows] != before[0][:, rows]).any(), "the keys were not changed"


of_turing = pytest.mark.skipif(
    KERNELS.device.traits.native,
    reason="float16 accumulators are those of kernels for 7.5: set CUPYATTN_ARCH=75",
)
HALF_SUM_HEAD_DIMS = [(24, 40), (64, 64), *deep(((128, 128),), ((96, 72),), ((256, 160),))]


@of_turing
@pytest.mark.parametrize("head_dims", HALF_SUM_HEAD_DIMS, ids=str)
@examples(3, deep=24)
@given(data=st.data())
def test_float16_accumulators_within_bounds(head_dims: tuple[int, int], data: st.DataObject):
    problems = attention_problems(
        head_dims=(head_dims,), dtypes=("float16",), options=RUN_TIME_OPTIONS, largest=LONGEST,
        option_sets=wider(*EITHER_HALF[0]) if Search.deep else ({},), **FRUGAL,
    )  # fmt: skip
    check_half_sums(data.draw(problems))


@of_turing
@pytest.mark.parametrize("head_dim", [64, *deep((40,), (80,), (128,), (256,))])
@pytest.mark.parametrize("scores", ["equal", "rising"])
def test_float16_accumulators_hold_the_largest_values(head_dim: int, scores: str):
    """All weights of a tile alike add up to the most; rising scores outgrow a stale maximum."""
    keys, rows = 200, 40
    q = np.ones((1, rows, 1, head_dim), np.float16)
    k = np.zeros((1, keys, 1, head_dim), np.float16)
    if scores == "rising":
        k[..., 0] = np.linspace(-60, 60, keys)[:, None]
    v = np.full((1, keys, 1, head_dim), MAX_HALF_SUM_VALUE, np.float16)
    v[..., ::2] *= -1
    put = [KERNELS.put(array) for array in (q, k, v)]
    out = KERNELS.get(cupyattn.attention(*put, softmax_scale=1.0, accumulator="float16"))
    tile_k = half_sums_row(75, head_dim, head_dim).tile_k
    bound, _ = reference.attention_bound(
        q, k, v, softmax_scale=1.0, dtype="float16", tile_k=tile_k, half_sums=tile_k
    )
    assert reference.error_ratio(out, np.broadcast_to(v[:, :1], out.shape), bound) <= 1


@of_turing
def test_float16_accumulators_are_refused_where_no_kernel_has_them():
    x = np.ones((1, 32, 1, 64), np.float16)
    wide = x.astype(np.float32)
    with pytest.raises(ValueError, match="accumulator = 'float64'"):
        cupyattn.attention(x, x, x, accumulator="float64")
    with pytest.raises(ValueError, match="q of float32 and v of float32"):
        cupyattn.attention(wide, wide, wide, accumulator="float16")
    assert_array_equal(cupyattn.attention(x, x, x, accumulator="float16"), x)
    long = np.ones((1, 512, 1, 64), np.float16)
    pool, table, lengths = long.reshape(32, 16, 1, 64), np.arange(32)[None], np.array([512])
    of_pool = pool, pool, table.astype(np.int32), lengths
    with emulated(80):  # few queries are decoded, and refused as well
        for call in (
            lambda: cupyattn.attention(x, x, x, accumulator="float16"),
            lambda: cupyattn.attention(x[:, :1], long, long, accumulator="float16"),
            lambda: cupyattn.paged_attention(x[:, :1], *of_pool, accumulator="float16"),
        ):
            with pytest.raises(NotImplementedError, match=r"capability 8\.0.*as fast"):
                call()
    with cupyattn.backend("emulator"):
        for decoded in (
            cupyattn.explain(cupyattn.attention, x[:, :1], long, long, accumulator="float16"),
            cupyattn.explain(cupyattn.paged_attention, x[:, :1], *of_pool, accumulator="float16"),
        ):
            assert "accumulator='float16' changes nothing" in str(decoded)
    put = KERNELS.put(x)
    with without_tensor_cores(), pytest.raises(NotImplementedError, match="without tensor cores"):
        cupyattn.attention(put, put, put, accumulator="float16")
    with cupyattn.backend("emulator"), pytest.raises(NotImplementedError, match="accumulator"):
        cupyattn.attention(x, x, x, accumulator="float16", implementation="tiled")
    with cupyattn.backend("emulator"):
        explained = str(cupyattn.explain(cupyattn.attention, x, x, x, accumulator="float16"))
    assert "sums of a tile of keys are float16" in explained


def test_inputs_are_untouched():
    packed = np.random.default_rng(0).standard_normal((2, 20, 3, 2, 24)).astype(np.float16)
    before = packed.copy()
    packed.flags.writeable = False
    with cupyattn.backend("emulator"):
        for implementation in ("flash", "tiled"):
            cupyattn.attention(*packed.transpose(2, 0, 1, 3, 4), implementation=implementation)
    assert_array_equal(packed, before)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [512, 1024, 4096])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_unit_normal_float16_errs_by_less_than_a_thousandth(head_dim, length, causal):
    import cupy

    rng = np.random.default_rng(head_dim + length)
    q, k, v = rng.standard_normal((3, 1, length, 2, head_dim)).astype(np.float16)
    out = cupyattn.attention(*map(cupy.asarray, (q, k, v)), causal=causal)
    expected, _ = reference.attention(q, k, v, causal=causal)
    assert abs(cupy.asnumpy(out) - expected).max() < 1e-3


@pytest.mark.alone
@pytest.mark.gpu
def test_131072_tokens_take_the_results_and_no_more():
    """The rows that are looked at see all keys, and only the first half of them."""
    import cupy

    length, head_dim = 131_072, 128
    q, k, v = (
        cupy.random.default_rng(seed).standard_normal((1, length, 1, head_dim)).astype(np.float16)
        for seed in range(3)
    )
    small = q[:, :64]
    cupyattn.attention(small, small, small, causal=True, return_lse=True)  # loads the kernel
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    out, lse = cupyattn.attention(q, k, v, causal=True, return_lse=True)
    assert pool.total_bytes() - before <= out.nbytes + lse.nbytes + 1024

    rows = [length // 2 - 1, length - 1]
    host_k, host_v = cupy.asnumpy(k), cupy.asnumpy(v)
    for row in rows:
        seen = slice(0, row + 1)
        expected, expected_lse = reference.attention(
            cupy.asnumpy(q[:, row : row + 1]), host_k[:, seen], host_v[:, seen]
        )
        np.testing.assert_allclose(cupy.asnumpy(out[:, row]), expected[:, 0], atol=1e-4)
        np.testing.assert_allclose(cupy.asnumpy(lse[..., row]), expected_lse[..., 0], atol=1e-4)
