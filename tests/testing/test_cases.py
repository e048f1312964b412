"""`cupyattn.testing`: cases, expected results with bounds, the assertion, the fixture."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import CUPY, EMULATED, KERNELS, placed
from support.processes import environment
from support.readme import ROOT
from support.search import examples

import cupyattn
from cupyattn import reference, testing
from cupyattn.ops.activations.bounds import cpu_activation_bound
from cupyattn.runtime.backend import kernels_run_numpy_arrays
from cupyattn.testing import (
    AttentionCase,
    LinearCase,
    MatmulCase,
    NormCase,
    PackedCase,
    PagedCase,
    SoftmaxCase,
    assert_within_bounds,
    bound,
    emulated,  # noqa: F401
    expected,
    lay_out,
)
from cupyattn.testing.arrays import VIEWS
from cupyattn.testing.checks import RULES

STRATEGIES = {
    "attention": testing.attention_cases(largest=20),
    "packed": testing.packed_cases(largest=20, head_dims=[(8, 8)]),
    "paged": testing.paged_cases(
        head_dims=[8], bits=[None, 8, 4], options=["causal", "window_size", "sinks", "softcap"]
    ),
    "linear": testing.linear_cases(rows=[0, 1, 7]),
    "matmul": testing.matmul_cases(dtypes=["float16", "float32", "int8"], sizes=[0, 1, 7, 24]),
    "norm": testing.norm_cases(),
    "softmax": testing.softmax_cases(
        dtypes=["float16", "bfloat16"], views=VIEWS, options=["scale", "causal", "mask", "bias"]
    ),
}
FUNCTIONS = {
    AttentionCase: cupyattn.attention,
    PackedCase: cupyattn.attention_varlen,
    PagedCase: cupyattn.paged_attention,
    LinearCase: cupyattn.linear,
    MatmulCase: cupyattn.matmul,
    SoftmaxCase: cupyattn.log_softmax,
}


def within_bounds(case: Any) -> None:
    """Assert it of the call of a case, wherever calls run."""
    function = case.function if isinstance(case, NormCase) else FUNCTIONS[type(case)]
    arrays, options = case.arrays(), case.keywords()
    with np.errstate(all="ignore"):
        found = function(*arrays, **options)
        assert_within_bounds(found, *expected(function, *arrays, **options))


@pytest.mark.parametrize("name", STRATEGIES)
@given(data=st.data())
def test_numpy_results_of_drawn_cases_are_within_bounds(name, data):
    within_bounds(data.draw(STRATEGIES[name]))


@pytest.mark.parametrize("name", STRATEGIES)
@examples(10)
@given(data=st.data())
def test_a_printed_case_can_be_pasted(name, data):
    case = data.draw(STRATEGIES[name])
    pasted = eval(repr(case), vars(testing))
    assert pasted == case
    for array, other in zip(case.arrays(), pasted.arrays(), strict=True):
        assert array is other is None or (
            array.strides == other.strides and array.tobytes() == other.tobytes()
        )


def test_only_fields_that_are_not_defaults_are_printed():
    assert repr(SoftmaxCase((2, 3), masked=True)) == "SoftmaxCase(shape=(2, 3), masked=True)"


FEW = {
    "attention": testing.attention_cases(
        head_dims=[(64, 64)], dtypes=["float16"], options=["causal", "window_size"],
        views=["packed", "transposed"], largest=70, crowd=2,
    ),
    "packed": testing.packed_cases(
        head_dims=[(64, 64)], dtypes=["float16"], options=["causal"], largest=40, crowd=2
    ),
    "paged": testing.paged_cases(dtypes=["float16"], bits=[8], most_queries=2, most_group=4),
    "linear": testing.linear_cases(dtypes=["float32"], activations=["silu"], rows=[1, 7, 33]),
    "matmul": testing.matmul_cases(
        dtypes=["float32"], sizes=[0, 24, 72], views=["contiguous", "strided"]
    ),
    "norm": testing.norm_cases(row_lengths=[33], dtypes=["float32"], centred=[True]),
    "softmax": testing.softmax_cases(dtypes=["float32"], row_lengths=[33, 129]),
}  # fmt: skip


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", FEW)
@examples(3)
@given(data=st.data())
def test_kernels_are_within_bounds(name, emulated, data):  # noqa: F811
    assert kernels_run_numpy_arrays()
    within_bounds(data.draw(FEW[name]))


def f16(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float16)


Q, K, V = f16(2, 5, 4, 8), f16(2, 7, 2, 8), f16(2, 7, 2, 8, seed=1)
X, W, ROWS = f16(3, 6, 40), f16(40, 24), f16(40)
LABELS = np.random.default_rng(0).integers(0, 40, (3, 6))
CU_Q, CU_K = np.array([0, 3, 4], np.int32), np.array([0, 5, 5], np.int32)
PACKED = Q[0], K[0], V[0], CU_Q, CU_K, 3, 5
LAST = partial(np.moveaxis, source=-1, destination=1)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("attention", (Q, K, V), {"bias": f16(5, 7), "sinks": f16(4), "return_lse": True}),
    ("attention", (Q, K, V), {"dropout_p": 0.3, "seed": cupyattn.DropoutSeed(3, batch=1)}),
    ("attention", (Q, K, V), {"rotary": cupyattn.Rotary(*cupyattn.rope_tables(9, 8))}),
    ("attention", (Q, K, V), {"implementation": "naive", "causal": True}),
    ("attention_varlen", PACKED, {"alibi_slopes": f16(4), "return_lse": True}),
    ("merge_attention", (Q, f16(2, 4, 5).astype("f4"), Q, f16(2, 4, 5).astype("f4")), {}),
    ("linear", (X, W, f16(24)), {"activation": "gelu", "return_preactivation": True}),
    ("linear", (X, W), {"residual": f16(3, 6, 24), "return_preactivation": True}),
    ("linear", (f16(3, 32), cupyattn.quantize(f16(32, 24), format="int8")), {}),
    ("linear_backward", (f16(3, 6, 12), X, W), {"activation": "swiglu"}),
    ("matmul", (X, W), {}),
    ("linear_gelu", (X, W, f16(24)), {"approximate": "none"}),
    ("linear_gelu_backward", (f16(3, 6, 24), X, W, f16(24)), {}),
    ("softmax", (X,), {"bias": f16(6, 40), "scale": 0.5, "causal": True}),
    ("softmax", (LAST(X),), {"axis": 1}),
    ("softmax_backward", (X, abs(X)), {"bias": f16(6, 40), "scale": 0.5}),
    ("log_softmax", (X,), {"mask": X > -1}),
    ("log_softmax_backward", (LAST(X), LAST(-abs(X))), {"axis": 1}),
    ("logsumexp", (LAST(X),), {"axis": 1}),
    ("logsumexp_backward", (f16(3, 6).astype("f4"), X, f16(3, 6).astype("f4") + 4), {}),
    ("layer_norm", (X, ROWS, ROWS), {"return_stats": True, "residual": X}),
    ("layer_norm", (X,), {}),
    ("layer_norm_backward",
     (X, X, ROWS, X.mean(-1, "f4"), 1 / X.std(-1, "f4")), {"bias": ROWS, "dtotal": X}),
    ("rms_norm", (X, ROWS), {"return_stats": True, "weight_offset": 1.0}),
    ("rms_norm_backward", (X, X, ROWS, 1 / X.std(-1, "f4")), {"weight_offset": 1.0}),
    ("gelu", (X,), {"approximate": "tanh"}),
    ("gelu_backward", (X, X), {}),
    ("silu", (X,), {}),
    ("silu_backward", (X, X), {}),
    ("swiglu", (X, X), {}),
    ("swiglu_backward", (X, X, X), {}),
    ("geglu", (X,), {"approximate": "tanh"}),
    ("geglu_backward", (f16(3, 6, 20), X), {}),
    ("dropout", (X, 0.3, 7), {"residual": X}),
    ("rope", ((Q, Q[:, :, :2]), *cupyattn.rope_tables(9, 8)), {"interleaved": True}),
    ("rope_backward", (Q, *cupyattn.rope_tables(9, 8)), {}),
    ("embedding", (f16(9, 8), np.array([1, 2, 1])), {}),
    ("embedding_backward", (f16(3, 8), f16(9, 8), np.array([1, 2, 1])), {}),
    ("cross_entropy", (X, LABELS), {"return_lse": True, "z_loss": 0.1}),
    ("cross_entropy_backward",
     (np.ones((), "f4"), X, LABELS, np.log(np.exp(X.astype("f4")).sum(-1))), {}),
]  # fmt: skip


def with_backwards() -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """CALLS, and the backwards that take their forward's results."""
    out, lse = cupyattn.attention(Q, K, V, causal=True, return_lse=True)
    of_packed = {"bias": f16(3, 5), "sinks": f16(4)}
    packed_out, packed_lse = cupyattn.attention_varlen(*PACKED, **of_packed, return_lse=True)
    paged = PagedCase((5, 17), 1, 2, 2, 8, "float16", bits=8, options=(("sinks", True),))
    options = {**paged.keywords(), "cu_seqlens_q": np.array([0, 1, 1]), "max_seqlen_q": 1}
    q, *cache = paged.arrays()
    return [
        *CALLS,
        ("attention_backward", (Q, Q, K, V, out, lse), {"causal": True}),
        ("attention_varlen_backward",
         (Q[0], *PACKED[:3], packed_out, packed_lse, *PACKED[3:]), of_packed),
        ("paged_attention", (q, *cache), {**paged.keywords(), "return_lse": True}),
        ("paged_attention", (q[:, 0], *cache), options),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "arrays", "options"), with_backwards())
def test_numpy_results_are_within_bounds_and_wrong_ones_outside(name, arrays, options):
    function = getattr(cupyattn, name)
    found = function(*arrays, **options)
    want = expected(function, *arrays, **options)
    assert_within_bounds(found, *want)
    wrong = [1.05 * np.asarray(each, np.float64) for each in _parts(found)]
    limits, exact = _parts(want.bound), _parts(want.result)
    for each in zip(wrong, exact, limits, strict=True):
        with pytest.raises(AssertionError, match="outside of their bounds"):
            assert_within_bounds(*each)


def _parts(value: Any) -> list[np.ndarray]:
    if isinstance(value, tuple):
        return [each for each in value if each is not None]
    return [value]


def test_each_function_with_bounds_is_tried_and_documented():
    assert {name for name, *_ in with_backwards()} == set(RULES)
    backwards = {name for name in RULES if name.endswith("_backward")}
    said = re.findall(r"(?<!`)`cupyattn\.(\w+)`", expected.__doc__)
    assert set(said) == set(RULES) - backwards
    assert {name.removesuffix("_backward") for name in backwards} <= set(RULES)


def test_bounds_are_those_of_kernels_and_outside_of_the_emulator_of_numpy_too():
    x = np.linspace(-3, 3, 50, dtype=np.float32)
    larger = bound(cupyattn.silu, x)
    with cupyattn.backend("emulator"):
        of_kernels = bound(cupyattn.silu, x)
    assert np.array_equal(of_kernels, reference.activation_bound(x, "silu", dtype="float32"))
    of_numpy = cpu_activation_bound(x, "silu", dtype="float32")
    assert np.array_equal(larger, np.maximum(of_kernels, of_numpy))
    assert (larger > of_numpy).any()
    grads = bound(cupyattn.swiglu_backward, x, x, x)
    assert isinstance(grads, cupyattn.GatedGrads) and (grads.dup > 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "arrays", "options"), CALLS[:2])
def test_arrays_on_a_gpu(name, arrays, options):
    function = getattr(cupyattn, name)
    there = [placed(CUPY, array) for array in arrays]
    options = {key: placed(CUPY, value) for key, value in options.items()}
    assert_within_bounds(function(*there, **options), *expected(function, *there, **options))


@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_expressions_have_bounds(packed):
    mask = cupyattn.MaskMod(
        "(q_idx + k_idx) % 2 == t[h]",
        python=lambda b, h, i, j, t: (i + j) % 2 == t[h],
        t=np.array([0, 1, 0, 1]),
    )
    mask_mod = cupyattn.block_mask(mask, 5, 7, B=1, H=4) if packed else mask
    out = cupyattn.attention(Q, K, V, mask_mod=mask_mod)
    assert_within_bounds(out, *expected(cupyattn.attention, Q, K, V, mask_mod=mask_mod))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: expected(cupyattn.sample, X), NotImplementedError, "no bounds for 'sample'; "),
        (lambda: expected(abs, X), NotImplementedError, "no bounds for 'abs'"),
        (lambda: expected(cupyattn.gelu, 3), TypeError, "x has type builtins.int"),
        (lambda: expected(cupyattn.gelu, X.astype(float)), ValueError, "no error bounds for dtype"),
        (lambda: expected(cupyattn.attention, Q, K, V, casual=True), TypeError, "casual"),
        (
            lambda: expected(cupyattn.attention, Q, K, V, score_mod=lambda score, *_: score),
            NotImplementedError, "score_mod; .*no bounds",
        ),
        (
            lambda: expected(cupyattn.gelu_backward, X, X, grads=X.copy(), accumulate=True),
            NotImplementedError, "accumulate=True",
        ),
        (lambda: lay_out(X, "turned"), ValueError, "view is 'turned'; allowed are contiguous"),
        (lambda: testing.attention_cases(options=["causl"]).example(), ValueError, "causl"),
        (lambda: testing.paged_cases(options=["bias"]).example(), ValueError, "bias"),
        (lambda: testing.softmax_cases(options=["axis"]).example(), ValueError, "axis"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # of example()
def test_refusals(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_message_has_the_worst_element():
    exact = np.zeros((2, 3))
    wrong = exact.astype(np.float32)
    wrong[1, 2], wrong[0, 0] = 4, 1
    with pytest.raises(AssertionError) as caught:
        assert_within_bounds((wrong, None), (exact, None), 0.5)
    assert str(caught.value).splitlines() == [
        "2 of 6 elements of the result[0] are outside of their bounds. The worst one:",
        "  index     [1, 2]",
        "  actual    4",
        "  expected  0",
        "  error     4",
        "  bound     0.5",
        "  ratio     8",
    ]


def test_message_names_each_gradient_that_is_wrong():
    exact = cupyattn.LinearGrads(X, W, None)
    with pytest.raises(AssertionError) as caught:
        assert_within_bounds(cupyattn.LinearGrads(X + 1, W + 1, None), exact, 0.1)
    assert re.findall(r"elements of (\w+) are", str(caught.value)) == ["dx", "dw"]


NAN, INF = np.nan, np.inf
SIGNALLING_NAN = np.array(0x7FA00000, np.uint32).view(np.float32)


@pytest.mark.parametrize(
    ("actual", "exact", "limit", "inside"),
    [
        (NAN, NAN, NAN, True),
        (INF, INF, 0, True),
        (-INF, INF, 1, False),
        (NAN, 1.0, INF, False),
        (1.0, NAN, 1, False),
        (1.0, NAN, INF, True),  # of no sequence
        (SIGNALLING_NAN, NAN, INF, True),  # memory that was never written
        (1.0, 1.0, 0, True),
        (1.0, 1.5, 0, False),
        (1.0, 1.5, 0.5, True),
    ],
)
def test_numbers_that_are_not_finite(actual, exact, limit, inside):
    arrays = np.array([actual]), np.array([exact]), np.array([limit])
    if inside:
        assert_within_bounds(*arrays)
    else:
        with pytest.raises(AssertionError, match="1 of 1"):
            assert_within_bounds(*arrays)


@pytest.mark.parametrize(
    ("result", "exact", "message"),
    [
        ((X, X), X, "has shape"),
        (X, (X, X), "is one array, and the reference a tuple of 2"),
        ((X, X, X), (X, X), "is a tuple of 3"),
        ((X, None), (X, X), r"the result\[1\] is None"),
        (X[:1], X, r"has shape \(1, 6, 40\)"),
    ],
)
def test_another_structure_is_refused(result, exact, message):
    with pytest.raises(AssertionError, match=message):
        assert_within_bounds(result, exact, 1.0)


@pytest.mark.parametrize("view", [view for view in VIEWS if view != "broadcast"])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 3, 5, 4), (0, 3, 4), (2, 0, 4)])
def test_views_hold_the_numbers(view, shape):
    x = f16(*shape)
    laid = lay_out(x, view)
    assert np.array_equal(laid, x) and laid.dtype == x.dtype
    assert not x.size or laid.strides[-1] == x.itemsize
    if len(shape) == 4 and x.size:
        assert (laid.strides == x.strides) == (view == "contiguous")


def page() -> dict[str, str]:
    """The first block of code in each language of the reference page."""
    path = ROOT / ".github/reference/testing.rst"
    if not path.exists():
        pytest.skip("this is not a checkout: .github/reference is not here")
    blocks = re.findall(
        r"^\.\. code-block:: (\w+)\n((?:   .*\n|\n)+)", path.read_text("utf-8"), flags=re.MULTILINE
    )
    return {language: textwrap.dedent(code).strip() + "\n" for language, code in reversed(blocks)}


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("", "", "1 passed"),
        ("__syncthreads();", "", "SharedMemoryRaceError"),
        ("i < length; i += THREADS", "i < length - 1; i += THREADS", None),
    ],
)
def test_a_kernel_of_the_users(tmp_path: Path, right, wrong, said):
    """The page's example: at most 15 lines after the imports; planted bugs are found."""
    code = page()
    said = code["text"].strip() if said is None else said
    body = code["python"].partition("expected, softmax_cases\n")[2]
    assert len([line for line in body.splitlines() if line]) <= 15
    assert right in code["cuda"]
    (tmp_path / "row_lse.cu").write_text(code["cuda"].replace(right, wrong, 1))
    (tmp_path / "test_row_lse.py").write_text(code["python"])
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "test_row_lse.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=environment(), timeout=300
    )
    found = re.sub(r"^E? *", "", done.stdout, flags=re.MULTILINE)
    for line in said.splitlines():
        assert line.strip() in found, done.stdout


@pytest.mark.parametrize("missing", ["hypothesis", "pytest"])
def test_without_its_packages_the_import_says_what_to_install(missing):
    script = (
        "import sys, importlib.util as util; found = util.find_spec\n"
        f"util.find_spec = lambda name: None if name == {missing!r} else found(name)\n"
        "import cupyattn; assert 'testing' in dir(cupyattn)\n"
        "try: cupyattn.testing\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment()
    )
    assert done.stdout == (
        f"cupyattn.testing needs {missing}: pip install 'cupyattn[testing]'\n"
    ), done.stderr


def test_emulated_is_in_effect_for_one_test():
    assert not kernels_run_numpy_arrays()


def test_cases_go_where_kernels_run():
    """The strides of a case's arrays stay on the way to a device."""
    case = AttentionCase(1, 5, 7, 2, 1, 8, 8, view="packed")
    for array in case.arrays():
        assert KERNELS.put(array).strides == array.strides == EMULATED.put(array).strides
