"""The attention kernels against the float64 reference, within its derived bounds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.attention_options import EITHER_HALF, RUN_TIME_OPTIONS
from support.devices import KERNELS, SENTINEL, GpuArrays
from support.dtypes import DTYPES, FLOAT_DTYPES, dtype_of
from support.forward_runs import check, run
from support.search import deep, examples, mostly_deep, wider
from support.strategies import FRUGAL, LONGEST, AttentionProblem, attention_problems

import cupyattn
from cupyattn import reference
from cupyattn.kernels.configs.attention.float32.forward import FLASH as FLASH_F32
from cupyattn.kernels.configs.attention.tensor_core.forward_rows import FLASH

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

# Steps of 8 columns with tails of 1, 2 and 3 chunks, odd dims, D != Dv, every row of the table.
FLASH_HEAD_DIMS = wider([(5, 8), (24, 40), (64, 64)], [(88, 80), (128, 128), (192, 72), (256, 256)])
# Slices of 16 columns with tails of 1, 2 and 3 chunks; output columns in quads with 1, 2 or 3 more;
# odd dims, D != Dv, every row of the table.
FLASH_F32_HEAD_DIMS = wider(
    [(5, 8), (24, 40)], [(64, 64), (72, 96), (128, 128), (160, 33), (76, 256)]
)
# float32 where the emulator takes half as long, and the kernel is there; --deep has both.
DIMS_OF_DTYPES = {
    **dict.fromkeys(DTYPES, ((64, 64),)), "float32": wider([(24, 40)], [(64, 64)]),
}  # fmt: skip
PLAIN_DTYPES = wider(["float16", "float32"], ["bfloat16"])


def of_plain_dtypes(**sizes: Any) -> st.SearchStrategy[AttentionProblem]:
    return st.one_of(
        *(
            attention_problems(head_dims=DIMS_OF_DTYPES[dtype], dtypes=(dtype,), **sizes)
            for dtype in PLAIN_DTYPES
        )
    )


@examples(8)
@given(
    problem=attention_problems(
        head_dims=FLASH_HEAD_DIMS,
        dtypes=("float16",),
        options=RUN_TIME_OPTIONS,
        largest=LONGEST,
        **FRUGAL,
    )
)
def test_flash_within_bounds_of_the_reference(problem: AttentionProblem):
    check(problem, "flash")


@examples(8, deep=36)
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
def test_flash_options_within_bounds_of_the_reference(problem: AttentionProblem):
    check(problem, "flash")


@examples(8)
@given(
    problem=attention_problems(
        head_dims=FLASH_F32_HEAD_DIMS,
        dtypes=wider(["float32"], ["bfloat16"]),
        options=RUN_TIME_OPTIONS,
        **FRUGAL,
    )
)
def test_float32_flash_within_bounds_of_the_reference(problem: AttentionProblem):
    check(problem, "flash")


@examples(8, deep=28)
@given(
    problem=attention_problems(
        head_dims=wider([(24, 40)], [(64, 64), (128, 96), (256, 8)]),
        dtypes=wider(["float32"], ["bfloat16"]),
        options=RUN_TIME_OPTIONS,
        option_sets=wider(*EITHER_HALF[1]),
        **FRUGAL,
    )
)
def test_float32_flash_options_within_bounds_of_the_reference(problem: AttentionProblem):
    check(problem, "flash")


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    mostly_deep(
        [
            *((head_dim, "float16") for head_dim in FLASH[75]),
            *itertools.product(FLASH_F32[75], FLOAT_DTYPES),
        ],
        [(160, "float16"), (256, "float32")],
    ),
)
@pytest.mark.parametrize("causal", [True, *deep(False)])
def test_every_row_of_the_flash_tables(head_dim: int, dtype: str, causal: bool):
    """Several tiles of queries and of keys; on the emulator fewer."""
    sq, sk = (300, 430) if isinstance(KERNELS, GpuArrays) else (130, 200)
    problem = AttentionProblem(
        B=1, Sq=sq, Sk=sk, H=2, G=1, D=head_dim, Dv=head_dim, dtype=dtype,
        drawn=(("causal", True),) if causal else (),
    )  # fmt: skip
    check(problem, "flash")


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    mostly_deep(
        [
            *itertools.product(FLASH[75], ["float16"]),
            *itertools.product(FLASH_F32[75], ["float32"]),
        ],
        [(256, "float32")],
    ),
)
def test_dropout_in_every_row_of_the_flash_tables(head_dim: int, dtype: str):
    """A row's tiles say which words of the generator its threads' keys get."""
    problem = AttentionProblem(
        B=1, Sq=20, Sk=70, H=2, G=1, D=head_dim, Dv=head_dim, dtype=dtype,
        drawn=(("dropout_p", 0.5),),
    )  # fmt: skip
    check(problem, "flash")


@pytest.mark.parametrize("dtype", ["float32", *deep("float16")])
@pytest.mark.parametrize(("dropout_p", "dropped"), [(1e-6, False), (1 - 1e-6, True)])
def test_dropout_of_less_than_a_bit(dropout_p: float, dropped: bool, dtype: str):
    """Probabilities that round to 0 and to 1 in the 16 bits that are compared."""
    ones = np.ones((1, 40, 1, 256), dtype)  # which take a kernel of the test above
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
    """As by -inf: of scores of -1e10 the maximum is rounded by hundreds, which P must not feel."""
    problem = AttentionProblem(1, 40, 100, 1, 1, *dims, dtype=dtype)
    arrays = problem.arrays()
    hidden = np.where(np.arange(100) < 60, 0, -np.inf).astype(np.float32)
    exact, _ = reference.attention(*arrays, bias=hidden)
    float32_weights = dtype in FLOAT_DTYPES
    bound, _ = reference.attention_bound(
        *arrays, dtype=dtype, tile_k=32, float32_weights=float32_weights, bias=hidden
    )
    for large in (1e4, 1e8, 1e9, 5e9, 1e10, 1e20, 1e30, 1e35, np.finfo(np.float32).max):
        bias = np.maximum(hidden, -large).astype(np.float32)
        out = cupyattn.attention(*map(KERNELS.put, arrays), bias=KERNELS.put(bias))
        assert reference.error_ratio(KERNELS.get(out), exact, bound) <= 1, large


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("head_dim", [255, *deep(1, 16, 63, 65, 127, 129)])
def test_head_dims(dtype: str, head_dim: int):
    problem = AttentionProblem(
        B=1, Sq=33, Sk=41, H=2, G=1, D=head_dim, Dv=257 - head_dim, dtype=dtype
    )
    check(problem, "flash")


@pytest.mark.parametrize("dtype", ["float16", "float32", *deep("bfloat16")])
def test_long_sequences(dtype: str):
    """Thousands of keys (hundreds on the emulator): many tiles, sums of many terms."""
    sq, sk = (129, 5000) if isinstance(KERNELS, GpuArrays) else (17, 700)
    for dims in DIMS_OF_DTYPES[dtype]:
        problem = AttentionProblem(1, sq, sk, 2, 1, *dims, dtype, drawn=(("causal", True),))
        check(problem, "flash")


@pytest.mark.gpu
def test_more_heads_than_the_grid_has_rows():
    """B * H beyond 65,535, the limit of a grid's second axis."""
    problem = AttentionProblem(B=2, Sq=2, Sk=3, H=40_000, G=40_000, D=2, Dv=2, dtype="float16")
    check(problem, "flash")


@examples(4, deep=24)
@given(
    problem=of_plain_dtypes(options=("causal",), views=("contiguous",), crowd=FRUGAL["crowd"]),
    integer_dtype=st.sampled_from((np.int32, np.int64)),
    stride=st.sampled_from((1, 2, -1)),
)
def test_batch_integers_of_any_width_and_stride(
    problem: AttentionProblem, integer_dtype: Any, stride: int
):
    """Both arrays of integers, as views: the same result as the same numbers one by one."""
    rng = np.random.default_rng(problem.seed)
    used = np.zeros(problem.B * abs(stride), integer_dtype)[::stride]
    used[:] = rng.integers(0, problem.Sk + 1, problem.B)
    offsets = np.zeros(problem.B * abs(stride), integer_dtype)[::stride]
    offsets[:] = rng.integers(-3, problem.Sk + 3, problem.B)
    q, k, v = (KERNELS.put(array) for array in problem.arrays())
    options = problem.options()
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


@examples(6, deep=30)
@given(problem=of_plain_dtypes(options=RUN_TIME_OPTIONS, crowd=FRUGAL["crowd"]))
def test_views_equal_copies_bit_for_bit(problem: AttentionProblem):
    """Vector and scalar loads bring the same numbers."""
    out, lse = run(problem, "flash")
    copies = [KERNELS.put(np.ascontiguousarray(array)) for array in problem.arrays()]
    options = {
        name: KERNELS.put(value) if isinstance(value, np.ndarray) else value
        for name, value in problem.options().items()
    }
    copied_out, copied_lse = cupyattn.attention(*copies, **options, return_lse=True)
    assert_array_equal(out, KERNELS.get(copied_out))
    assert_array_equal(lse, KERNELS.get(copied_lse))


@examples(4, deep=30)
@given(problem=of_plain_dtypes(options=RUN_TIME_OPTIONS, **FRUGAL))
def test_results_are_written_into_any_strides(problem: AttentionProblem):
    """out= and lse as views: every item written, nothing beside them."""
    arrays = [KERNELS.put(array) for array in problem.arrays()]
    options = {
        name: KERNELS.put(value) if isinstance(value, np.ndarray) else value
        for name, value in problem.options().items()
    }
    options |= {"return_lse": True}
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
