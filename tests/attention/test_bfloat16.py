"""Caches on the tensor cores of sm_80 and later: steps in bfloat16, and prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention.test_paged import OPTIONS, paged_problems
from attention.test_prefill import CHUNK, EVERY_OPTION, LENGTHS, WINDOWS
from hypothesis import given
from hypothesis import strategies as st
from support.devices import dtype_of, emulated
from support.paged import PackedProblem, PagedProblem, scales_of
from support.search import deep, examples, wider

import cupyattn
from cupyattn import reference
from cupyattn.runtime.arch import arch_of
from cupyattn.runtime.backend import running_on
from cupyattn.runtime.device.recorder import LaunchRecorder

pytestmark = pytest.mark.nvrtc

BITS = [None, 8, 4]
# Head dims of rows on tensor cores, of 8 rows and of 16; and of other head dims, without.
DECODED = wider(
    (("bfloat16", 64, 16, 16),),
    (
        ("bfloat16", 128, 8, 2), ("bfloat16", 128, 16, 16), ("bfloat16", 256, 8, 3),
        ("bfloat16", 80, 4, 2), ("bfloat16", 512, 8, 2), ("bfloat16", 384, 4, 1),
        ("bfloat16", 264, 4, 1),
    ),
)  # fmt: skip
PROMPTS = wider((64,), (40, 80, 96, 128, 160, 192, 256, 34, 264, 512))
STEP = PagedProblem(
    lengths=(0, 300, 7, 64, 129), Sq=3, G=2, group=2, D=64, dtype="bfloat16",
    options=(("causal", True),),
)  # fmt: skip
PROMPT = replace(CHUNK, dtype="bfloat16")


def run(
    problem: PagedProblem, arrays: tuple[np.ndarray, ...], arch: int = 80, count: int = 2
) -> Any:
    """Run the kernels of an architecture on an emulated device of `count` multiprocessors."""
    with emulated(arch) as device:
        device.multiprocessors = count
        return cupyattn.paged_attention(
            *arrays[:5],
            **{**scales_of(arrays), **problem.keywords(), **problem.packed()},
            return_lse=True,
        )


def check(problem: PagedProblem, count: int = 2) -> None:
    """Run a call for sm_80: its results are within their bounds."""
    arrays = problem.arrays()
    assert problem.ratio(*run(problem, arrays, count=count), arrays) <= 1


@pytest.mark.parametrize("bits", BITS)
@given(data=st.data(), count=st.integers(1, 4))
@examples(2, deep=20)
def test_decoding_is_within_its_bounds(bits, data, count):
    """For any lengths, block table and split of the keys. Unused slots and scales hold NaN."""
    check(data.draw(paged_problems(DECODED, bits)), count)


@st.composite
def prompts(draw, bits=None):
    """Draw chunks of prompts: a batch of them, or packed ones of any number of queries."""
    options: list[Any] = [("causal", draw(st.booleans()))]
    if (window := draw(st.sampled_from(WINDOWS))) is not None:
        options.append(("window_size", window))
    problem = replace(
        PROMPT,
        lengths=tuple(draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3))),
        Sq=draw(st.sampled_from((17, 33, 130))),
        D=draw(st.sampled_from(PROMPTS)),
        dtype=draw(st.sampled_from(wider(("bfloat16",), () if bits else ("float16",)))),
        block_size=draw(st.sampled_from((16, 48, 128))),
        options=tuple(options),
        seed=draw(st.integers(0, 2**16)),
        bits=bits,
    )
    if draw(st.booleans()):
        return problem
    queries = tuple(draw(st.integers(0, min(problem.Sq, each))) for each in problem.lengths)
    return PackedProblem(**{**vars(problem), "queries": queries})


@pytest.mark.parametrize("bits", BITS)
@given(data=st.data())
@examples(2, deep=20)
def test_prompts_are_within_their_bounds(bits, data):
    problem = data.draw(prompts(bits))
    arrays = problem.arrays()
    out, lse = run(problem, arrays)
    assert problem.ratio(out, lse, arrays) <= 1


@pytest.mark.parametrize("bits", [*BITS[:1], *deep(*BITS[1:])])
@pytest.mark.parametrize("head_dim", [64, *deep(128, 256, 512)])
def test_every_option(head_dim, bits):
    options = (("causal", True), *OPTIONS["all"].items())
    check(replace(STEP, D=head_dim, bits=bits, options=options))
    check(replace(PROMPT, D=head_dim, bits=bits, options=EVERY_OPTION))


@pytest.mark.deep
@pytest.mark.parametrize("problem", [STEP, PROMPT], ids=["step", "prompt"])
def test_rows_that_are_not_aligned(problem):
    q, k, v, *others = problem.arrays()
    moved = [np.zeros(x.size + 1, x.dtype)[1:].reshape(x.shape) for x in (k, v)]
    for array, x in zip(moved, (k, v), strict=True):
        array[...] = x
    arrays = (q, *moved, *others)
    assert problem.ratio(*run(problem, arrays), arrays) <= 1


@pytest.mark.parametrize("queries", [1, 40])
def test_scores_that_rise_keep_sums_finite(queries):
    """Each tile's scores are almost 2^7 times the last ones, under the limit of stale maxima.

    So maxima lag as far behind as they may, and V is as large as sums then have room for.
    """
    problem = PagedProblem(
        lengths=(200,), Sq=queries, G=1, group=1, D=64, dtype="bfloat16", options=()
    )
    q, k, v, table, lengths = problem.arrays()
    q[...], k[...] = 0, 0
    q[..., 0] = 1
    rising = np.log(2) * 64**0.5 * 6.9 * (np.arange(208) // 16)
    k[table[0, :13], :, 0, 0] = rising.reshape(13, 16).astype(k.dtype)
    v[...] = 2.0**100
    v[table[0, 12], 8:] = np.nan  # slots after the end
    arrays = q, k, v, table, lengths
    assert problem.ratio(*run(problem, arrays), arrays) <= 1


def test_integers_are_exact():
    """One key: the output is its integers times a scale that is a power of two."""
    for bits in (8, 4):
        problem = replace(STEP, lengths=(1,), Sq=1, G=1, group=1, D=256, bits=bits)
        q, k, v, table, lengths, *scales = problem.arrays()
        v[...] = np.arange(256, dtype=np.uint8)[: v.shape[-1]].view(v.dtype)
        for each in scales:
            each[...] = 2.0**-100
        out, _ = run(problem, (q, k, v, table, lengths, *scales))
        bytes_ = np.arange(v.shape[-1])
        integers = bytes_.astype(np.int8) if bits == 8 else None
        if integers is None:
            integers = np.stack((bytes_ & 15, bytes_ >> 4), axis=-1).ravel() - 8
        assert np.array_equal(out[0, 0, 0].astype(float), integers * 2.0**-100)


@pytest.mark.parametrize(("queries", "head_dim"), [(1, 64), *deep((5, 128), (16, 256))])
def test_few_queries_over_dense_keys(queries, head_dim):
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((2, length, heads, head_dim)).astype(dtype_of("bfloat16"))
        for length, heads in ((queries, 4), (300, 2), (300, 2))
    )
    with emulated(80):
        found = cupyattn.attention(q, k, v, causal=True, return_lse=True)
    exact = reference.attention(q, k, v, causal=True)
    limits = {"dtype": "bfloat16", "tile_k": 16, "native": True}
    bounds = reference.attention_bound(q, k, v, **limits, causal=True)
    assert max(map(reference.error_ratio, found, exact, bounds)) <= 1


def launched(arch: int, problem: PagedProblem, *, tensor_cores: bool = True) -> Any:
    """Return the entry of the kernel of a call, its lanes for a row, and its dtype."""
    arrays = problem.arrays()
    recorder = LaunchRecorder(arch_of(arch), tensor_cores=tensor_cores)
    with running_on(recorder):
        cupyattn.paged_attention(*arrays[:5], **scales_of(arrays), **problem.keywords())
    specialisation = recorder.launches[0].specialisation
    macros = dict(specialisation.macros)
    return specialisation.spec.entry, macros.get("LANES"), macros["DTYPE"]


@pytest.mark.parametrize("bits", BITS)
def test_the_architecture_decides_the_kernels(bits):
    step, prompt = replace(STEP, bits=bits), replace(PROMPT, bits=bits)
    for arch in (80, 86, 89, 90, 120):
        assert launched(arch, step) == ("attention_decode", 0, "bfloat16")
        entry = "attention_forward_paged" if bits else "attention_forward_native_paged"
        assert launched(arch, prompt) == (entry, None, "bfloat16")
    for arch, tensor_cores in ((75, True), (90, False)):
        _, lanes, _ = launched(arch, step, tensor_cores=tensor_cores)
        assert lanes > 0
        entry, _, _ = launched(arch, prompt, tensor_cores=tensor_cores)
        assert entry == "attention_forward_paged_f32"
    _, lanes, _ = launched(80, replace(step, D=80))
    assert lanes > 0, "rows on tensor cores have 64, 128 or 256 items"


def test_explain_says_which_arithmetic_a_call_takes(monkeypatch):
    q, k = ((1, 1, 8, 64), "bfloat16"), ((100, 16, 2, 64), "bfloat16")
    arguments = q, k, k, ((1, 100), "int32"), ((1,), "int32")
    for arch, how in (("80", "on tensor cores"), ("75", "in float32 arithmetic")):
        monkeypatch.setenv("CUPYATTN_ARCH", arch)
        report = cupyattn.explain(cupyattn.paged_attention, *arguments)
        assert f"sm_{arch}" in report.device
        assert report.reasons[-1].endswith(how)
        assert all(launch.registers for launch in report.launches)
