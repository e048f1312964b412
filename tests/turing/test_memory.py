"""The model of memory-bound calls: what it computes, and that no call gets worse."""

from __future__ import annotations

import pytest
from support.gates import require_gates_tools
from support.memory_calls import counted, every_call, instruction_bytes
from support.search import deep

from cupyattn.emulator import Report
from cupyattn.turing import MACHINES, T4
from cupyattn.turing.analysis import MemoryFigures, memory_figures

CALLS = {call.name: call for call in every_call()}
SECTOR_TOLERANCE = 0.005
SHARE_TOLERANCE = 0.02

# Of calls with a kernel each: bytes of the sectors that are touched for each byte that has to move,
# bytes that have to move for each instruction of a warp, and the share of a T4's bandwidth that its
# instructions leave possible.
GATES = {
    "rms_norm": (1.5, 9.4, 1.0),
    "softmax, backward": (1.0, 14.3, 1.0),
    "swiglu": (1.0, 7.6, 1.0),
    "dropout": (1.0, 5.2, 1.0),
    "embedding": (1.016, 21.4, 1.0),
    "sample greedy, 1 row": (1.009, 2.1, 1.0),
    "append_kv, int8": (1.756, 3.8, 1.0),
    "decode, paged, float": (1.023, 33.9, 1.0),
    "merge_attention": (1.108, 4.4, 1.0),
    "linear, M=1": (1.508, 6.6, 1.0),
}
MORE_GATES = {
    "layer_norm, backward": (1.156, 3.3, 1.0),
    "logsumexp, backward": (1.008, 8.5, 1.0),
    "cross_entropy, backward": (1.012, 8.8, 1.0),
    "embedding, backward": (1.035, 13.1, 1.0),
    "rope": (1.25, 11.8, 1.0),
    "gelu, backward": (1.0, 6.3, 1.0),
    "adamw_step": (1.0, 20.3, 1.0),
    "global_norm": (1.001, 8.3, 1.0),
    "sample all, 1 row": (2.018, 0.52, 0.419),
    "sample top-p, 1 row": (8.397, 0.29, 0.228),
    "attention backward delta": (1.031, 6.6, 1.0),
    "attention backward convert": (1.005, 15.7, 1.0),
    "attention rotary": (1.5, 11.2, 1.0),
    "linear db f32": (1.121, 30.6, 1.0),
    "softmax dbias": (1.046, 11.1, 1.0),
    "copy_blocks, float": (1.062, 5.5, 1.0),
    "gather, int4": (1.086, 6.6, 1.0),
    "decode, paged, int4": (1.147, 6.3, 1.0),
    "decode, dense, float": (1.05, 26.7, 1.0),
    "linear, M=16": (2.008, 18.2, 1.0),
    "linear, M=1, nf4": (2.792, 3.2, 1.0),
    "quantize, nf4": (1.805, 1.41, 0.876),
    "dequantize, nf4": (1.122, 4.9, 1.0),
}


# --- what follows from counts


def figures(sector_bytes=320_000, wavefronts=0, **instructions) -> MemoryFigures:
    return MemoryFigures(320_000, sector_bytes, instructions, wavefronts)


def test_memory_binds_where_little_else_is_done():
    found = figures(ldg=2500, fma=5000, move=10**9)
    assert found.seconds()["memory"] == 1e-6
    assert (found.bound(), found.bandwidth_share(), found.sector_ratio) == ("memory", 1, 1)


@pytest.mark.parametrize(
    ("found", "pipe", "cycles"),
    [
        (figures(fma=400_000), "fma", 200_000),
        (figures(alu=400_000), "alu", 200_000),
        (figures(half=400_000), "fp16", 200_000),
        (figures(xu=400_000), "xu", 800_000),
        (figures(tensor=400_000), "tensor", 800_000),
        (figures(lds=400_000, control=400_000), "issue", 200_000),
        (figures(shuffle=400_000), "lsu", 405_000),
        (figures(wavefronts=400_000), "lsu", 805_000),
        (figures(sector_bytes=64_000_000), "lsu", 1_000_000),
    ],
)
def test_the_busiest_pipe_binds(found, pipe, cycles):
    assert found.cycles()[pipe] == cycles
    assert found.bound() == pipe
    seconds = cycles / (T4.multiprocessors * T4.clock_mhz * 1e6)
    assert found.bandwidth_share() == pytest.approx(1e-6 / seconds)


def test_cards_differ_by_bandwidth_for_each_multiprocessor():
    found = figures(alu=400_000)
    assert found.bandwidth_share(MACHINES["RTX 2060 Super"]) < found.bandwidth_share(T4)
    products = figures(tensor=1)
    assert products.bandwidth_share(MACHINES["GTX 1650 Ti"]) is None
    assert products.bandwidth_share(MACHINES["RTX 2080 Ti"]) == 1


def test_an_empty_report_has_no_sectors():
    assert memory_figures(Report(), 64) == MemoryFigures(64, 0, {}, 0)


# --- the gates


@pytest.mark.parametrize("name", [*GATES, *deep(*MORE_GATES)])
def test_a_call_moves_no_more_than_its_gates_allow(name):
    require_gates_tools()
    sectors, least_bytes, share = {**GATES, **MORE_GATES}[name]
    _, found = counted(CALLS[name])
    assert found.sector_ratio <= sectors + SECTOR_TOLERANCE
    assert instruction_bytes(found) >= least_bytes
    assert found.bandwidth_share(T4) >= share - SHARE_TOLERANCE


@pytest.mark.nvrtc
def test_a_gpu_without_tensor_cores_has_its_own_kernels():
    call = CALLS["linear, M=1, nf4"]
    assert counted(call)[0] == ["linear_quantised_thin"]
    kernels, found = counted(call, tensor_cores=False)
    assert kernels == ["linear_quantised_thin_f32"]
    assert found.bandwidth_share(MACHINES["GTX 1650 Ti"]) > 0
