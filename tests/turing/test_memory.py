"""The model of memory-bound calls: what it computes, prints, and that no call gets worse."""

from __future__ import annotations

import json

import pytest
from support.figures import MEMORY, MEMORY_RECORD, ON_MACHINES
from support.search import deep

from cupyattn.__main__ import main
from cupyattn.benchmark.frame import emulated
from cupyattn.benchmark.frame.emulated import ModelledCall, row_of
from cupyattn.benchmark.memory import command
from cupyattn.benchmark.memory.calls import modelled_calls
from cupyattn.emulator import Report
from cupyattn.kernels.compile import nvrtc_version
from cupyattn.kernels.registry import KERNELS
from cupyattn.turing import MACHINES, T4
from cupyattn.turing.memory import MemoryFigures, memory_figures

CALLS = {call.name: call for call in modelled_calls()}
FIRST = (
    *("rms_norm", "softmax, backward", "swiglu", "dropout", "embedding", "sample all, 1 row"),
    *("append_kv, int8", "decode, paged, float", "merge_attention", "linear, M=1"),
)
SECTOR_TOLERANCE = 0.005
SHARE_TOLERANCE = 0.02
INSTRUCTIONS_TOLERANCE = 0.03  # of their number

WITHOUT_FIGURES = {
    **dict.fromkeys(
        ("attention_combine_parts", "linear_split_sums", "linear_thin_merge"),
        "adds up parts, as many as a card makes of the work",
    ),
    "add_to": "a sum of two arrays, as others are that have a figure",
    **dict.fromkeys(
        (
            *("attention_backward_dsinks", "attention_backward_f32_dsinks"),
            "attention_backward_f32_dsinks_varlen",
        ),
        "reads two numbers a row and writes one a head",
    ),
    **dict.fromkeys(
        ("attention_block_mask", "attention_block_lists", "attention_block_order"),
        "moves next to nothing: it computes a mask, or looks at its tiles",
    ),
    **dict.fromkeys(
        ("attention_naive", "attention_tiled", "attention_backward_naive"),
        "there to be read, not to be fast",
    ),
    "attention_backward_f32_dbias": "computes scores: its products take its time",
    "nest_scales": "a pass over scales when a model is made",
    "expand_scales": "a pass over a part of a weight, behind which a product reads all of it",
    **dict.fromkeys(("mma_rate", "fma_rate", "read_weight"), "measures a card"),
}
"""Kernels that no gate of the model holds, and why."""


def test_every_kernel_has_a_figure_or_a_reason():
    modelled = {kernel for row in MEMORY.values() for kernel in row["kernels"]}
    modelled |= {kernel for _, kernel, _ in ON_MACHINES}
    assert modelled.isdisjoint(WITHOUT_FIGURES)
    assert modelled | set(WITHOUT_FIGURES) == set(KERNELS)


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


# --- the command


@pytest.fixture
def one_call(monkeypatch):
    """A command that knows one call, whose figures are ready."""
    calls = [ModelledCall("copying", 320_000, list), ModelledCall("adding", 320_000, list)]
    monkeypatch.setattr(command, "modelled_calls", lambda: iter(calls))
    monkeypatch.setattr(
        command,
        "row_of",
        lambda call: {
            **emulated._counts(call, [], figures(ldg=10)),
            "bandwidth_share": {name: 1 - 0.1 * at for at, name in enumerate(MACHINES)},
        },
    )


@pytest.mark.nvrtc
def test_text_and_json(one_call, capsys):
    assert main(["memory"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "call sectors bound T4 2060 Super 2080 Ti 1650 Ti" in printed
    assert "copying 1.00 memory 1.00 0.90 0.80 0.70" in printed
    assert main(["memory", "--call", "add", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["call"] == "adding"
    assert row["instruction_bytes"] == 32_000


def test_a_call_that_is_not_there(one_call, capsys):
    assert main(["memory", "--call", "nothing"]) == 1
    assert "no call has nothing in its name" in capsys.readouterr().err


# --- the gates


def test_a_card_without_tensor_cores_has_its_own_kernels():
    """None launches a product of tensor cores, and every card has its figure."""
    others = {name: row["without_tensor_cores"] for name, row in MEMORY.items()
              if "without_tensor_cores" in row}  # fmt: skip
    assert others["linear, M=1, nf4"] == ["linear_quantised_thin_f32"]
    assert all(share for row in MEMORY.values() for share in row["bandwidth_share"].values())


def test_every_call_is_recorded():
    assert set(MEMORY) == set(CALLS)
    assert set(FIRST) <= set(CALLS)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", [*FIRST, *deep(*(name for name in CALLS if name not in FIRST))])
def test_a_call_is_as_good_as_recorded(name):
    version = ".".join(map(str, nvrtc_version()))
    if version != MEMORY_RECORD["nvrtc"]:
        pytest.skip(f"figures are of NVRTC {MEMORY_RECORD['nvrtc']}, this is {version}")
    found, recorded = row_of(CALLS[name]), MEMORY[name]
    assert found["kernels"] == recorded["kernels"]
    assert found["least_bytes"] == recorded["least_bytes"]
    assert found["sector_ratio"] <= recorded["sector_ratio"] + SECTOR_TOLERANCE
    least = recorded["instruction_bytes"] * (1 - INSTRUCTIONS_TOLERANCE)
    assert found["instruction_bytes"] >= least
    for machine, share in recorded["bandwidth_share"].items():
        assert found["bandwidth_share"][machine] >= share - SHARE_TOLERANCE, machine
    assert found.get("without_tensor_cores") == recorded.get("without_tensor_cores")
