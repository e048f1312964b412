"""The kernels to be read, "naive" and "tiled": forward and backward within the derived bounds."""

from __future__ import annotations

import inspect
import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support import backward_runs
from support.backward_runs import inputs
from support.devices import DTYPES, KERNELS, GpuArrays
from support.forward_runs import TEACHING, check, run
from support.search import deep, examples, mostly_deep, wider
from support.strategies import FRUGAL, VIEWS, attention_problems

import cupyattn
from cupyattn import AttentionGrads
from cupyattn.emulator import Report
from cupyattn.runtime.source import source_root
from cupyattn.testing import AttentionCase

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

OPTIONS = ("causal", "softmax_scale")
# Odd dims, D != Dv in both directions, more columns than lanes or threads, the largest.
HEAD_DIMS = wider([(24, 40)], [(7, 33), (64, 64), (1, 1), (40, 24), (80, 136), (256, 256)])


def problems(**sizes: Any) -> st.SearchStrategy[AttentionCase]:
    """Problems with every option of these kernels, in every kind of view."""
    drawn: dict[str, Any] = {
        "head_dims": HEAD_DIMS, "dtypes": wider(("float16", "float32"), ("bfloat16",)),
        "options": OPTIONS, "views": VIEWS, "crowd": FRUGAL["crowd"],
    }  # fmt: skip
    return attention_problems(**{**drawn, **sizes})


@pytest.mark.parametrize("implementation", TEACHING)
@examples(6, deep=40)
@given(problem=problems())
def test_forward_within_bounds_of_the_reference(implementation: str, problem: AttentionCase):
    check(problem, implementation)


@examples(6, deep=40)
@given(problem=problems())
def test_backward_within_bounds_of_the_reference(problem: AttentionCase):
    backward_runs.check(problem, "naive")


@pytest.mark.parametrize("implementation", TEACHING)
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    mostly_deep(
        itertools.product(DTYPES, (1, 16, 63, 65, 127, 129, 255)), [("float16", 255)]
    ),
)  # fmt: skip
def test_head_dims_within_bounds(implementation: str, dtype: str, head_dim: int):
    problem = AttentionCase(1, 33, 41, 2, 1, head_dim, 257 - head_dim, dtype)
    check(problem, implementation)
    if implementation == "naive":
        backward_runs.check(problem, "naive")


@pytest.mark.parametrize("implementation", TEACHING)
@pytest.mark.parametrize("dtype", ["float16", *deep("bfloat16", "float32")])
def test_long_sequences_within_bounds(implementation: str, dtype: str):
    """Many segments and tiles, sums of many terms."""
    on_gpu = isinstance(KERNELS, GpuArrays)
    sq, sk = (129, 5000) if on_gpu else (17, 300)
    check(
        AttentionCase(1, sq, sk, 2, 1, 24, 40, dtype, options=(("causal", True),)), implementation
    )
    if implementation == "naive":
        sq, sk = (1500, 2000) if on_gpu else (70, 100)
        problem = AttentionCase(1, sq, sk, 2, 1, 24, 40, dtype, options=(("causal", True),))
        backward_runs.check(problem, "naive")


@pytest.mark.parametrize("implementation", TEACHING)
def test_rows_without_keys_give_zeros_and_minus_infinity(implementation: str):
    """Causal, with more queries than keys: the first queries see nothing."""
    problem = AttentionCase(1, 40, 33, 2, 1, 24, 40, "float16", options=(("causal", True),))
    out, lse = run(problem, implementation)
    assert (out[:, :7] == 0).all()
    assert (lse[..., :7] == -np.inf).all()
    assert np.isfinite(lse[..., 7:]).all()


def test_rows_without_keys_have_no_gradient():
    """Whatever is in their dout."""
    problem = AttentionCase(1, 40, 33, 2, 1, 24, 40, "float16", options=(("causal", True),))
    (dout, *arrays), options = inputs(problem)
    dout[:, :7] = np.nan
    grads = backward_runs.run((dout, *arrays), options, "naive")
    assert (grads["dq"][:, :7] == 0).all()
    for gradient in grads.values():
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("implementation", TEACHING)
@pytest.mark.parametrize(
    "empty",
    [{"B": 0}, {"Sq": 0}, {"Sk": 0}, {"Sq": 0, "Sk": 0}, {"H": 0, "G": 0}, {"H": 0}],
    ids=str,
)
def test_empty_problems_have_empty_results_and_zero_gradients(implementation, empty):
    extents = {"B": 2, "Sq": 3, "Sk": 5, "H": 4, "G": 2, "D": 24, "Dv": 40, **empty}
    problem = AttentionCase(**extents, dtype="float16")
    out, lse = run(problem, implementation)
    assert (out == 0).all()
    assert (lse == -np.inf).all()
    if implementation == "naive":
        arrays, options = inputs(problem)
        for accumulate in (False, True):
            halves = [KERNELS.put(np.full_like(x, 0.5)) for x in arrays[1:4]]
            found = backward_runs.run(
                arrays, options, "naive", grads=AttentionGrads(*halves), accumulate=accumulate
            )
            for gradient in found.values():
                assert (gradient == (0.5 if accumulate else 0)).all()


@pytest.mark.parametrize("implementation", TEACHING)
def test_a_nan_reaches_the_rows_that_see_it_and_no_others(implementation: str):
    """A query's NaN reaches its row; a key's the rows from it on."""
    problem = AttentionCase(1, 70, 70, 1, 1, 24, 40, "float32", options=(("causal", True),))
    q, k, v = problem.arrays()
    for array, rows in ((q, np.arange(70) == 40), (k, np.arange(70) >= 40)):
        before = array[0, 40, 0, 3].copy()
        array[0, 40, 0, 3] = np.nan
        out = cupyattn.attention(
            *map(KERNELS.put, (q, k, v)), causal=True, implementation=implementation
        )
        array[0, 40, 0, 3] = before
        assert_array_equal(np.isnan(KERNELS.get(out)[0, :, 0]).any(axis=-1), rows)


def test_no_weight_exceeds_one_where_lse_has_no_digits():
    """Scores of 1e10: exp(s - lse) of a score that lse's rounding is below would overflow."""
    problem = AttentionCase(1, 40, 70, 1, 1, 24, 40, "float32", options=(("softmax_scale", 1e9),))
    (dout, *arrays), options = inputs(problem)
    arrays[4] = np.nextafter(arrays[4], np.float32(-np.inf))  # lse, one unit too small
    grads = backward_runs.run((dout, *arrays), options, "naive")
    for name, gradient in grads.items():
        assert np.isfinite(gradient).all(), name
    assert (np.abs(grads["dv"]) <= 1.0001 * np.abs(dout).sum(axis=1, keepdims=True)).all()


def test_every_gradient_has_one_writer_and_no_atomics():
    """Two CTAs would store the same, but add it twice to what is there."""
    arrays, options = inputs(AttentionCase(1, 9, 41, 4, 2, 24, 40, "float16"))
    report = Report()
    with cupyattn.backend("emulator", report=report):
        grads = cupyattn.attention_backward(*arrays, **options, implementation="naive")
    stored = sum(each.bytes for each in report.accesses if each.write and each.space == "global")
    assert stored == sum(gradient.nbytes for gradient in grads if gradient is not None)
    assert report.atomic_updates == 0


REFUSED: dict[str, Any] = {
    "window_size": (2, 3), "q_offset": 1, "seqused_k": np.array([3], np.int32),
    "mask": np.ones((4, 5), bool), "bias": np.zeros((4, 5), np.float16),
    "alibi_slopes": np.ones(2, np.float32), "softcap": 5.0, "sinks": np.zeros(2, np.float32),
    "dropout_p": 0.5, "rotary": (np.ones((9, 4), np.float16), np.zeros((9, 4), np.float16)),
    "score_mod": cupyattn.ScoreMod("score", gradient="grad"),
    "mask_mod": cupyattn.MaskMod("k_idx < 3"),
}  # fmt: skip


def refused(name: str) -> dict[str, Any]:
    value = REFUSED[name]
    if isinstance(value, np.ndarray):
        value = KERNELS.put(value)
    elif name == "rotary":
        value = tuple(map(KERNELS.put, value))
    return {name: value, **({"seed": 1} if name == "dropout_p" else {})}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("implementation", TEACHING)
def test_other_options_raise_and_name_flash(implementation: str, name: str):
    q, k, v = (KERNELS.put(np.ones((1, n, 2, 8), np.float16)) for n in (4, 5, 5))
    with pytest.raises(
        NotImplementedError, match=rf"^{name} in attention on .*pass implementation='flash'"
    ):
        cupyattn.attention(q, k, v, **refused(name), implementation=implementation)
    if implementation == "naive":
        out, lse = cupyattn.attention(q, k, v, return_lse=True)
        with pytest.raises(
            NotImplementedError,
            match=rf"^{name} in attention_backward on .*pass implementation='flash'",
        ):
            cupyattn.attention_backward(
                q, q, k, v, out, lse, **refused(name), implementation="naive"
            )


def test_every_option_of_attention_is_either_taken_or_refused():
    """A new option has to be in one of the lists."""
    taken = {"causal", "softmax_scale"}
    every = inspect.signature(cupyattn.attention).parameters.values()
    options = {each.name for each in every if each.kind is each.KEYWORD_ONLY}
    assert {*taken, *REFUSED} == options - {
        *("seed", "return_lse", "implementation", "out", "workspace"),
        "accumulator",  # of attention alone: test_kernels.py
    }


@pytest.mark.parametrize("implementation", TEACHING)
def test_a_window_that_is_causal_order_is_taken(implementation: str):
    q, k, v = map(KERNELS.put, AttentionCase(1, 9, 9, 1, 1, 24, 40, "float16").arrays())
    window = cupyattn.attention(q, k, v, window_size=(None, 0), implementation=implementation)
    causal = cupyattn.attention(q, k, v, causal=True, implementation=implementation)
    assert_array_equal(KERNELS.get(window), KERNELS.get(causal))


@pytest.mark.parametrize(
    ("name", "most_lines"), [("naive.cu", 150), ("tiled.cu", 150), ("naive_backward.cu", 200)]
)
def test_the_sources_are_short_and_include_no_project_file(name: str, most_lines: int):
    """They are read by those who learn: everything that they do is in one file."""
    text = (source_root() / "attention" / "teaching" / name).read_text(encoding="utf-8")
    assert text.count("\n") <= most_lines
    assert set(re.findall(r"#include (.*)", text)) == {"<cuda_fp16.h>", "<cuda_bf16.h>"}
