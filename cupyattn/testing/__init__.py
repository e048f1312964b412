"""Property tests of array code and of CUDA kernels: test cases, error bounds and assertions.

Install it with ``pip install 'cupyattn[testing]'``, which brings hypothesis and pytest.

A test has three parts. A strategy draws a case: shapes, options and a seed, which determine the
arrays. `expected` computes what a public function of cupyattn must return: the result in float64,
and for each element how far a kernel in the arrays' dtype may be from it. `assert_within_bounds`
compares, and reports the worst element. The fixture `emulated` runs the test's kernels on the CPU,
where each access, race and barrier is checked::

    import cupyattn
    from cupyattn.testing import assert_within_bounds, attention_cases, emulated, expected
    from hypothesis import given, settings

    @settings(max_examples=20, deadline=None)  # a first example compiles a kernel
    @given(case=attention_cases(head_dims=[(64, 64)], dtypes=["float16"], options=["causal"]))
    def test_attention(emulated, case):
        arrays, options = case.arrays(), case.keywords()
        out = cupyattn.attention(*arrays, **options)
        assert_within_bounds(out, *expected(cupyattn.attention, *arrays, **options))

A case is a frozen dataclass. A failing example that hypothesis prints can be pasted into a test as
it is. Head dims, dtypes, sets of options and views are lists to draw from, because on the emulator
their combinations are kernels to compile. Lengths and data need no compilation.

The bounds are derived from the roundings of the kernels, not chosen: a result outside of its bound
is a bug. To test a kernel of your own, use a bound that follows from its own roundings. If it
computes what a function of this library computes, in float32 and with sums in any order, that
function's bound holds for it too.
"""

from importlib.util import find_spec

if missing := [name for name in ("hypothesis", "pytest") if find_spec(name) is None]:
    raise ImportError(
        f"cupyattn.testing needs {' and '.join(missing)}: pip install 'cupyattn[testing]'"
    )

from cupyattn.testing.arrays import ExpectedResult, lay_out, lengths
from cupyattn.testing.attention import AttentionCase, PackedCase, attention_cases, packed_cases
from cupyattn.testing.cache import PagedCase, paged_cases
from cupyattn.testing.checks import assert_within_bounds, bound, emulated, expected
from cupyattn.testing.layers import (
    LinearCase,
    MatmulCase,
    NormCase,
    SoftmaxCase,
    linear_cases,
    matmul_cases,
    norm_cases,
    softmax_cases,
)

__all__ = [
    "AttentionCase",
    "ExpectedResult",
    "LinearCase",
    "MatmulCase",
    "NormCase",
    "PackedCase",
    "PagedCase",
    "SoftmaxCase",
    "assert_within_bounds",
    "attention_cases",
    "bound",
    "emulated",
    "expected",
    "lay_out",
    "lengths",
    "linear_cases",
    "matmul_cases",
    "norm_cases",
    "packed_cases",
    "paged_cases",
    "softmax_cases",
]
