"""explain: what a call would launch, without launching it. And kernels by name and macros."""

from __future__ import annotations

import re

import numpy as np
import pytest

import cupyattn
from cupyattn import explain, explanation, turing
from cupyattn.runtime.device.cuda import cuda_device
from cupyattn.turing import DisassemblerError

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("default_architecture")]

Q = ((1, 4096, 32, 128), "float16")


@pytest.fixture
def not_modelled(monkeypatch):
    """Leave out the model, which takes half a second a kernel."""

    def missing(*_):
        raise DisassemblerError("not here")

    monkeypatch.setattr(explanation, "analyse", missing)


def names(report: cupyattn.explanation.Explanation) -> list[str]:
    return [launch.kernel for launch in report.launches]


def test_attention_of_shapes_is_one_launch_with_its_resources():
    report = explain(cupyattn.attention, Q, Q, Q, causal=True)
    (launch,) = report.launches
    assert (report.function, report.device) == ("attention", "a T4 (sm_75)")
    assert (launch.kernel, launch.source) == (
        "attention_forward", "attention/tensor_core/forward.cu"
    )  # fmt: skip
    assert launch.ctas == 4096 // 128 * 32
    assert launch.configuration["HEAD_DIM"] == 128
    assert 0 < launch.registers <= 255
    assert launch.ctas_per_sm == launch.configuration["MIN_CTAS"]
    assert re.match(r"tensor cores busy at most 1\.00 of the time", launch.limit)
    text = str(report)
    assert text.startswith("attention on a T4 (sm_75): 1 launch\n  float16 runs on tensor cores\n")
    assert "\nattention_forward  (attention/" in text
    assert "grid           1024 CTAs of 128 threads" in text
    assert "MASK=" not in text.replace("MASK_VEC=", "")
    assert repr(report) == text


@pytest.mark.parametrize(
    ("queries", "keys", "options", "reasons"),
    [
        ((1, 4096, 32, 128), 4096, {}, ["float16 runs on tensor cores"]),
        ((1, 4096, 32, 128), 4096, {"causal": True}, ["tensor cores", "4 key-value heads"]),
        (
            (1, 4, 32, 128),
            4096,
            {},
            [
                "Sq = 4 is at most 16, with up to 4096 keys",
                "decoded on tensor cores",
            ],
        ),
        ((1, 512, 4, 128), 8192, {}, ["tensor cores", "keys are split 5 ways"]),
        ((1, 64, 4, 128), 64, {"implementation": "naive"}, ["implementation='naive'"]),
        (
            (1, 4096, 32, 128),
            4096,
            {"rotary": (((4096, 64), "float16"), ((4096, 64), "float16"))},
            ["tensor cores", "rotates queries as it loads them"],
        ),
    ],
)
def test_reasons_say_why_attention_runs_its_kernels(queries, keys, options, reasons, not_modelled):
    k = ((1, keys, queries[2], 128), "float16")
    for _ in range(2):  # a plan that was remembered says them again
        report = explain(cupyattn.attention, (queries, "float16"), k, k, **options)
        assert len(report.reasons) == len(reasons)
        for reason, expected in zip(report.reasons, reasons, strict=True):
            assert re.search(expected, reason)
        assert all(f"\n  {reason}\n" in str(report) for reason in report.reasons)


@pytest.mark.parametrize(
    ("dtype", "deterministic", "expected"),
    [
        ("float16", False, ["tensor cores", "adds to dq atomically"]),
        ("float16", True, ["tensor cores", "deterministic=True excludes atomic"]),
        ("float32", False, ["float32 arithmetic", "adds to dq atomically"]),
    ],
)
def test_reasons_of_a_backward(dtype, deterministic, expected, not_modelled):
    q, lse = ((1, 64, 2, 64), dtype), ((1, 2, 64), "float32")
    arrays = (*[q] * 5, lse)
    report = explain(cupyattn.attention_backward, *arrays, deterministic=deterministic)
    assert len(report.reasons) == len(expected)
    assert all(each in reason for each, reason in zip(expected, report.reasons, strict=True))


def test_reasons_of_paged_attention(not_modelled):
    cache = ((8, 16, 2, 64), "float16")
    table, lengths = np.zeros((1, 4), np.int32), np.full(1, 40, np.int32)
    for queries, expected in ((1, "are decoded"), (40, "run the kernels of a forward")):
        q = ((1, queries, 4, 64), "float16")
        report = explain(cupyattn.paged_attention, q, cache, cache, table, lengths, causal=True)
        why, arithmetic = report.reasons
        assert expected in why
        assert arithmetic.endswith("on tensor cores")


def test_configurations_of_attention_have_a_reason(not_modelled):
    report = explain(cupyattn.attention, Q, Q, Q)
    assert report.launches[0].reason.startswith("models 0.84")


def test_launches_are_in_the_order_of_the_call():
    lse = ((1, 32, 4096), "float32")
    report = explain(cupyattn.attention_backward, Q, Q, Q, Q, Q, lse, deterministic=True)
    assert names(report)[0] == "attention_backward_delta"
    assert {"attention_backward_dkdv", "attention_backward_dq"} < {*names(report)}
    assert report.launches[0].limit.startswith("memory bandwidth")


def test_few_queries_take_the_kernels_of_decoding(not_modelled):
    few = ((8, 1, 32, 128), "float16")
    keys = ((8, 4096, 8, 128), "float16")
    assert names(explain(cupyattn.attention, few, keys, keys))[0] == "attention_decode"


def test_lengths_are_given_as_arrays(not_modelled):
    tokens = ((300, 4, 64), "float16")
    bounds = np.array([0, 100, 300], np.int32)
    report = explain(
        cupyattn.attention_varlen, tokens, tokens, tokens, bounds, bounds, 200, 200, causal=True
    )
    assert names(report) == ["attention_forward_varlen"]


def test_nothing_is_written(not_modelled):
    x, out = np.ones((4, 8), np.float32), np.full((4, 8), 7, np.float32)
    report = explain(cupyattn.rms_norm, x, out=out)
    assert names(report) == ["norm_forward"]
    assert (out == 7).all()


def test_arrays_larger_than_memory_may_be_given_as_shapes(not_modelled):
    huge = ((64, 2**17, 32, 128), "float16")  # 69 GB
    assert explain(cupyattn.attention, huge, huge, huge).launches[0].ctas == 64 * 2**10 * 32


def test_options_and_tuples_may_have_shapes(not_modelled):
    table = ((4096, 64), "float32")
    assert names(explain(cupyattn.rope, (Q, Q), table, table)) == ["rope"]
    x = ((16, 64), "float32")
    assert names(explain(cupyattn.softmax, x, bias=((64,), "float32"))) == ["softmax_forward"]


def test_no_items_are_no_launch():
    empty = ((0, 8), "float32")
    assert str(explain(cupyattn.gelu, empty)) == "gelu on a T4 (sm_75): no launches"


def test_errors_are_those_of_the_function():
    with pytest.raises(ValueError, match=r"k is \(B, Sk, G, D\) with q's B and D"):
        explain(cupyattn.attention, Q, ((1, 4096, 32, 64), "float16"), Q)
    with pytest.raises(TypeError, match="function has type str; it must be a function"):
        explain("attention", Q)


@pytest.mark.parametrize(
    ("shape", "dtype", "kind", "message"),
    [
        (
            (2, -1),
            "float16",
            ValueError,
            r"the shape \(2, -1\) of float16; its extents are 0 or more",
        ),
        ((2**30, 2**30), "float32", ValueError, r"it has at most 2\*\*44 bytes"),
        ((2, 8), "flaot16", TypeError, r"dtype = 'flaot16' with the shape \(2, 8\)"),
        ((2, 8), list, TypeError, "it is a NumPy dtype without Python objects"),
    ],
)
def test_a_shape_that_no_array_has_is_refused(shape, dtype, kind, message):
    with pytest.raises(kind, match=message):
        explain(cupyattn.gelu, (shape, dtype))


def test_a_report_counts_one_cta_and_leaves_out_what_is_empty(not_modelled):
    mask_mod = cupyattn.MaskMod("q_idx >= k_idx")
    with cupyattn.backend("emulator"):
        blocks = cupyattn.block_mask(mask_mod, 16, 16)
    q = ((1, 16, 1, 64), "float16")
    text = str(explain(cupyattn.attention, q, q, q, mask_mod=blocks))
    assert "grid           1 CTA of 256 threads" in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    assert "1 key-value heads" not in text


def test_without_a_compiler_the_choice_is_reported(monkeypatch):
    def missing(*_):
        raise RuntimeError("no NVRTC")

    monkeypatch.setattr(explanation, "compile_cubin", missing)
    monkeypatch.setattr(explanation, "analyse", missing)
    (launch,) = explain(cupyattn.attention, Q, Q, Q).launches
    assert (launch.registers, launch.spill_bytes, launch.ctas_per_sm) == (None, None, None)
    assert "not known without NVRTC" in launch.limit
    assert "registers are not known without NVRTC" in str(launch)


def test_without_a_disassembler_the_limit_says_what_to_install(not_modelled):
    (launch,) = explain(cupyattn.attention, Q, Q, Q).launches
    assert launch.registers
    assert "cupyattn[turing]" in launch.limit


@pytest.mark.gpu
def test_arrays_on_a_gpu_are_explained_for_it():
    import cupy

    q = cupy.zeros((2, 64, 4, 72), cupy.float16)[..., 4:68]
    out = cupy.full((2, 64, 4, 64), 7, cupy.float16)
    report = explain(cupyattn.attention, q, q, q, out=out)
    assert report.device == cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    native = cuda_device(0).traits.native
    assert names(report) == ["attention_forward_native" if native else "attention_forward"]
    assert report.launches[0].configuration["VEC"] in (1, 4)
    assert (out == 7).all()


def test_shapes_in_dictionaries_are_arrays():
    tree = {"a": ((8, 64), "float32"), "block": {"c": ((5,), "float32")}}
    report = explain(cupyattn.adamw_step, tree, tree, tree, tree, step=1)
    assert len(report.launches) == 2 and tree["a"] == ((8, 64), "float32")


def test_the_row_has_the_macros():
    found = turing.row("attention_tiled", DTYPE="float32", HEAD_DIM=64)
    assert found.spec.entry == "attention_tiled"
    assert {"DTYPE": "float32", "HEAD_DIM": 64}.items() <= found.defines.items()


@pytest.mark.parametrize(
    ("entry", "macros", "message"),
    [
        ("attention_fwd", {}, "no kernel 'attention_fwd'; near it are .*attention"),
        ("x", {}, "no kernel 'x'; .*lists them"),
        ("attention_forward", {"HEAD_DIM": 63}, r"no row with \{'HEAD_DIM': 63\}; .*64"),
    ],
)
def test_what_is_not_there_is_told(entry, macros, message):
    with pytest.raises(ValueError, match=message):
        turing.row(entry, **macros)
