"""Benchmarks without a GPU: the emulator's counts and the model of Turing, and that they say so."""

from __future__ import annotations

import json
import types
from functools import partial

import pytest
from support.gates import require_gates_tools
from support.search import deep

from cupyattn import turing
from cupyattn.benchmark import linear, machine
from cupyattn.benchmark import model as turing_model
from cupyattn.benchmark.__main__ import BENCHMARKS, main
from cupyattn.benchmark.model import EMULATED, UNFILLED, Model, ModelledCall, row_of
from cupyattn.benchmark.results import results_of
from cupyattn.turing import T4, DisassemblerError

COUNTS = {"kernels": ["a"], "sector_ratio": 1.5, "bound": "lsu", "instruction_bytes": 4.0,
          "share": 0.5}  # fmt: skip


@pytest.fixture
def counted(monkeypatch, no_gpu):
    """Without the emulator; which calls it would have run."""
    calls = []

    def counts_of(call):
        calls.append(call)
        return COUNTS

    monkeypatch.setattr(turing_model, "counts_of", counts_of)
    return calls


def rows_of(tmp_path, *words):
    file = tmp_path / "modelled.json"
    assert main([*words, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert (result["modelled"], result["machine"]) == (True, "T4")
    assert all(result[name] for name in ("date", "cpu", "os", "python", "version"))
    assert {"nvrtc", "nvdisasm"} <= set(result)
    assert all(row["modelled"] for row in result["rows"])
    return result["rows"]


ATTENTION = ("--head-dim", "64", "--dtype", "float16", "--implementation", "flash")


def test_products_have_the_rate_of_the_model(counted, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Model, "rate", lambda self, prepare: 52.0)
    rows = rows_of(tmp_path, "attention", *ATTENTION)
    assert capsys.readouterr().out.startswith("Attention forward, MODELLED and not measured")
    assert [(row["option"], row["implementation"]) for row in rows] == [
        ("plain", "cupyattn flash"), ("causal", "cupyattn flash"),
    ]  # fmt: skip
    plain = rows[0]
    assert (plain["batch"], plain["seqlen"]) == (8, 4096), "the largest"
    assert plain["times"]["p50_s"] == pytest.approx(plain["flops"] / 52e12)
    assert plain["of_ceiling"] == pytest.approx(52 / T4.tflops(1024))
    assert plain["bytes"] == 4 * 8 * 4096 * plain["heads"] * 64 * 2, "q, k, v and out"
    assert plain["gb_per_s"] == pytest.approx(plain["bytes"] / plain["times"]["p50_s"] / 1e9)
    assert plain["counts"] == {"kernels": ["attention_forward"]}
    in_float32 = rows_of(tmp_path, "attention", *ATTENTION, "--dtype", "float32")
    for row in in_float32:
        assert row["of_ceiling"] == pytest.approx(52 / T4.tflops(128)), "not of tensor cores"
    backward = rows_of(tmp_path, "attention_backward", *ATTENTION)
    assert len(backward) == 4, "deterministic too"
    assert backward[0]["bytes"] == 2 * plain["bytes"]


def test_options_have_the_rate_of_their_own_kernels(counted, loops, tmp_path):
    """A call's, not the plain one's; but for those with an array of all scores."""
    options = "alibi,bias,score_mod,softcap"
    for direction, rate in (("attention", 500), ("attention_backward", 400)):
        rows = rows_of(tmp_path, direction, *ATTENTION, "--options", options)
        if direction == "attention_backward":
            rows = [row for row in rows if "deterministic" not in row["implementation"]]
        assert [row["option"] for row in rows] == ["plain", "alibi", "score_mod", "softcap"]
        assert [row["tflops"] for row in rows] == pytest.approx([T4.tflops(rate)] * 4)
        assert len({row["flops"] for row in rows}) == 1


@pytest.mark.nvrtc
@pytest.mark.deep
def test_alibi_as_an_expression_takes_at_most_5_percent_longer(counted, tmp_path):
    require_gates_tools()
    rows = rows_of(tmp_path, "attention", *ATTENTION, "--options", "alibi,score_mod")
    plain, slopes, expression = (row["tflops"] for row in rows)
    assert plain > slopes > expression >= 0.95 * slopes


def test_what_is_modelled_is_drawn_under_a_t4s_ceilings(counted, monkeypatch, tmp_path):
    monkeypatch.setattr(Model, "rate", lambda self, prepare: 52.0)
    file = tmp_path / "modelled.json"
    assert main(["attention", *ATTENTION, "--json", str(file)]) == 0
    (result,) = results_of(file)
    assert result["ceilings"] == {
        "copy_gb_per_s": 320, "read_gb_per_s": 320, "mma_tflops": pytest.approx(65.1, abs=0.1),
        "fma_tflops": pytest.approx(8.1, abs=0.1),
    }  # fmt: skip


def test_without_a_disassembler_there_are_counts_alone(counted, monkeypatch, tmp_path, capsys):
    def missing(*_):
        raise DisassemblerError("nvdisasm is not here")

    monkeypatch.setattr(Model, "rate", missing)
    monkeypatch.setattr(machine, "disassembler_version", missing)
    (row,) = rows_of(tmp_path, "linear", "--kind", "large", "--size", "512", "512", "512")
    said = "Products have no times: the model of Turing reads machine code that nvdisasm lists"
    assert said in " ".join(capsys.readouterr().out.split())
    assert "times" not in row
    assert (row["tflops"], row["counts"]["kernels"]) == (None, ["linear_forward"])


@pytest.mark.parametrize("words", [
    ("layers", "--operation", "softmax"), ("linear", "--kind", "thin"), ("decode", "--batch", "1"),
    ("decode", "--cache-operations", "--cache", "int8"),
])  # fmt: skip
def test_what_moves_bytes_has_a_share_of_the_bandwidth(words, counted, tmp_path):
    rows = rows_of(tmp_path, *words)
    assert len(rows) == len(counted)
    for row, call in zip(rows, counted, strict=True):
        assert row["bytes"] == call.least_bytes
        assert (row["gb_per_s"], row["of_ceiling"]) == (160.0, 0.5)
        assert row["times"]["p50_s"] == pytest.approx(call.least_bytes / 160e9)
    assert {row.get("direction") for row in rows} <= {None, "forward", "backward"}


@pytest.fixture
def loops(monkeypatch):
    """Rates of main loops in FLOP a cycle, by a part of an entry; and which were analysed."""
    seen, rates = [], {"forward": 500.0, "naive": 10.0, "dkdv": 400.0, "dq": 300.0}

    def analyse(specialisation, *, machine):
        entry = specialisation.spec.entry
        seen.append(entry)
        rate = next(rate for part, rate in rates.items() if part in entry)
        return types.SimpleNamespace(main=types.SimpleNamespace(flop_per_cycle=rate))

    monkeypatch.setattr(turing_model, "analyse", analyse)
    return seen


def test_a_training_step_takes_the_time_of_both_directions(counted, loops, tmp_path):
    flash, deterministic, naive = rows_of(tmp_path, "attention", "--training-step")
    forward, backward = 2 / T4.tflops(500), 5 / T4.tflops(400)
    assert flash["tflops"] == pytest.approx(7 / (forward + backward))
    assert flash["times"]["p50_s"] == pytest.approx(flash["flops"] / flash["tflops"] / 1e12)
    both = 4 / T4.tflops(400) + 3 / T4.tflops(300)
    assert deterministic["tflops"] == pytest.approx(7 / (forward + both))
    assert naive["tflops"] == pytest.approx(7 / (2 / T4.tflops(10) + 7 / T4.tflops(10)))
    assert [row["implementation"] for row in (flash, deterministic, naive)] == [
        "cupyattn flash", "cupyattn flash deterministic", "cupyattn naive"
    ]  # fmt: skip


def test_packed_sequences_have_the_rates_of_their_own_loops(counted, loops, tmp_path):
    rows = rows_of(tmp_path, "varlen", "--length", "512")
    assert [(row["direction"], row["implementation"]) for row in rows[:4]] == [
        (direction, f"cupyattn {way}") for direction in ("forward", "backward")
        for way in ("dense", "equal")
    ]  # fmt: skip
    assert [row["tflops"] for row in rows[:2]] == pytest.approx([T4.tflops(500)] * 2)
    assert [row["tflops"] for row in rows[2:4]] == pytest.approx([T4.tflops(400)] * 2)
    assert {"attention_forward", "attention_forward_varlen"} < set(loops)
    assert rows[1]["flops"] == 2 * rows[5]["flops"], "causal"


def test_a_block_mask_is_modelled_by_the_tiles_that_it_keeps(counted, loops, tmp_path):
    words = ("--block-mask", "--head-dim", "64", "--seqlen", "2048")
    plain, mask_mod, block_mask = rows_of(tmp_path, "attention", *words)
    assert plain["tflops"] == mask_mod["tflops"] == pytest.approx(T4.tflops(500))
    assert mask_mod["flops"] == plain["flops"]
    assert 0.1 < block_mask["flops"] / plain["flops"] < 0.3
    assert block_mask["times"]["p50_s"] < 0.3 * plain["times"]["p50_s"]


def test_a_step_of_generating_is_modelled_by_its_bytes(no_gpu, tmp_path):
    """As much as the weights, but for the embedding, and keys and values."""
    words = ("--model", "gpt2", "--batch", "2", "--prompt", "100", "--new-tokens", "56")
    rows = rows_of(tmp_path, "generate", *words)
    *parts, step = rows
    assert step["operation"] == "step: all parts"
    assert step["bytes"] == sum(row["bytes"] for row in parts)
    assert step["times"]["p50_s"] == pytest.approx(step["bytes"] / 320e9)
    assert step["also"]["tokens_per_s"] == pytest.approx(2 / step["times"]["p50_s"])
    weights = 2 * 124.4e6
    cache = 2 * 128 * 12 * 2 * 768 * 2
    assert step["bytes"] == pytest.approx(weights + cache, rel=0.02)


LINEAR = ("linear", "--size", "8192", "8192", "4096", "--weights", "nf4", "int4")


def test_quantised_weights_are_modelled_too(counted, monkeypatch, tmp_path):
    monkeypatch.setattr(Model, "rate", lambda self, prepare: 52.0)
    rows = rows_of(tmp_path, *LINEAR)
    found = [(row["kind"], row["M"], row["weights"]) for row in rows]
    weights = (None, "nf4", "int4")
    assert found == [
        *((kind, 8192, name) for name in weights for kind in ("large", "dx")),
        *(("thin", m, name) for name in weights for m in (1, 16)),
    ]
    thin = [row for row in rows if row["kind"] == "thin"]
    assert [row["bytes"] for row in thin] == [call.least_bytes for call in counted]
    nf4 = 1024 * 2048 * (1 / 2 + 4 / 64)
    assert thin[2]["bytes"] == nf4


def first(product, harness):
    return linear.Inputs(product, harness).own_calls()[0]


@pytest.mark.nvrtc
@pytest.mark.parametrize("weights", [*deep(None), "nf4", *deep("int4")])
def test_one_row_of_quantised_weights_is_bound_by_memory(weights):
    product = linear.Product("thin", 1, 1024, 2048, "float16", "nk", None, weights)
    call = ModelledCall("", product.weight_bytes, partial(first, product, EMULATED))
    assert row_of(call)["bound"] == "memory"


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("weights", "form"), [("nf4", "Nf4"), *deep(("int4", "Int4"), ("nf4_nested", "Nf4"))]
)
@pytest.mark.parametrize(
    ("kind", "kernel", "more"),
    [
        ("large", "linear_forward_quantised", {"ACTIVATION": "Identity"}),
        ("dx", "linear_product_quantised", {"B_LINES": "kAcross"}),
    ],
)
def test_the_rate_is_that_of_the_tables_row(weights, form, kind, kernel, more):
    product = linear.Product(kind, 8192, 8192, 4096, "float16", "nk", None, weights)
    require_gates_tools()
    rate = turing_model.rate_of(Model(T4), partial(first, product, UNFILLED))
    assert rate is not None
    gate = turing.row(kernel, TILE_ROWS=256, FORMAT=form, **more).gates.models
    assert rate / T4.tflops(1024) == pytest.approx(gate, abs=0.03)


@pytest.mark.nvrtc
def test_the_counts_are_the_emulators(no_gpu, tmp_path):
    forward, _ = rows_of(tmp_path, "layers", "--operation", "gelu")
    assert forward["bytes"] == 2 * 64 * 2048 * 2
    assert forward["counts"]["sector_ratio"] == 1
    assert 0 < forward["of_ceiling"] <= 1


@pytest.mark.parametrize(
    "name", [each.name for each in BENCHMARKS if each.gpus == 1 and not each.can_model]
)
def test_what_cannot_be_modelled_needs_a_gpu(name, no_gpu, capsys):
    assert main([name]) == 1
    said = capsys.readouterr().err
    assert f"{name}: there is no CUDA device" in said
    assert "python -m cupyattn turing" in said and "python -m cupyattn memory" in said
    assert main([name, "--modelled"]) == 1
    assert "there is no model of this" in capsys.readouterr().err
