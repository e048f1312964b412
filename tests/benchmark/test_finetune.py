"""``python -m cupyattn.benchmark finetune``: what it times, counts and prints."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support.fake_gpu import CEILINGS
from support.tiny_models import TINY

from cupyattn import models
from cupyattn.benchmark import finetune as command
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.finetune import Plan, Size, flops_of, own, samples_of, timed
from cupyattn.benchmark.timer import Timer
from cupyattn.models.training import LoraAdapters

random = models.random


def tiny(name="llama"):
    return random(TINY[name], dtype="float32", xp=np, seed=3)


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi"])
def test_operations_are_those_of_the_products(name):
    """Counted by the shapes of a model: three passes over each weight, two where nothing leaves."""
    model = tiny(name)
    size = Size(2, 8)
    config = model.config
    adapters = LoraAdapters(model, rank=2, targets=".*(o_proj|dense|attn.c_proj)")
    plain = 2 * 2 * config.vocab_size * config.hidden_size
    for layer in model.weights.layers:
        for field, passes in (("qkv", 3), ("output", 3), ("up", 3), ("down", 2)):
            plain += 2 * passes * getattr(layer, field).weight.size
    attention = 4.5 * 4 * config.num_layers * config.num_heads * config.head_dim * 8 / 2
    rows, columns = model.weights.layers[0].output.weight.shape
    low = config.num_layers * 2 * 2 * (5 * columns + 4 * rows)
    found = flops_of(adapters.model, size)
    assert found == pytest.approx(16 * (plain + attention + low))


def test_steps_are_timed_behind_the_first_ones(monkeypatch):
    clock = iter([0, 5, 10, 11, 20, 22, 30, 31, 40, 49, 50, 53])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    calls = []
    plan = Plan("", None, 1, Timer(calls=3, warm_up=1, budget_s=100.0))
    assert timed(lambda: calls.append(1), plan) == [1, 9, 3]
    assert len(calls) == 2 + 1 + 3


def test_own_steps(monkeypatch):
    monkeypatch.setattr(models, "random", lambda name, **options: tiny())
    plan = Plan("gpt2", None, 4, Timer(2, 1, 1.0))
    row = own(plan, Size(2, 10), np, lambda: 12345)
    assert row["held_bytes"] == 12345 and min(row["seconds"]) > 0
    assert row["budget_bytes"] == sum(row["budget"].values())
    assert row["budget"]["weights"] == tiny().nbytes
    (one, other) = samples_of(50, Size(2, 10))
    assert len(one.ids) == 10 and one.num_labels == 9 and (one.ids != other.ids).any()


@pytest.fixture
def tuning(a_gpu, monkeypatch):
    """The command as on a GPU, but for the models and the memory pool."""
    monkeypatch.setattr(models, "random", lambda name, **options: tiny("phi"))
    monkeypatch.setattr(command, "_held_alone", lambda work: work(lambda: 3_000_000_000))
    return a_gpu


def test_text_and_json(tuning, capsys, tmp_path, monkeypatch):
    object.__setattr__(tuning, "baselines", ("peft",))
    monkeypatch.setitem(sys.modules, "torch", None)
    file = tmp_path / "finetune.json"
    call = ["finetune", "--size", "1x8", "2x4", "--quantize", "none", "--calls", "3"]
    assert main([*call, "--warm-up", "1", "--json", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Gradient checkpointing" in printed
    assert "peft: --peers peft, which did not import" in printed
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [(row["implementation"], row["length"]) for row in rows] == [
        ("cupyattn", 8), ("peft", 8), ("cupyattn", 4), ("peft", 4),
    ]  # fmt: skip
    row = rows[0]
    assert row["also"]["held_mb"] == 3000
    assert row["also"]["tokens_per_s"] == pytest.approx(8 / row["times"]["p50_s"])
    assert row["of_ceiling"] == pytest.approx(row["tflops"] / CEILINGS["mma_tflops"])


def test_a_peer_is_a_row(tuning, tmp_path, monkeypatch):
    object.__setattr__(tuning, "baselines", ("peft",))
    found = {"seconds": [0.5], "held_bytes": 7_000_000_000}
    monkeypatch.setattr(command, "baseline", lambda who, plan, size: found)
    file = tmp_path / "finetune.json"
    call = ["finetune", "--size", "1x8", "--quantize", "none", "--calls", "3", "--warm-up", "1"]
    assert main([*call, "--json", str(file)]) == 0
    row = json.loads(file.read_text())["rows"][1]
    assert (row["implementation"], row["times"]["p50_s"], row["flops"]) == ("peft", 0.5, None)
    assert row["also"] == {"held_mb": 7000, "tokens_per_s": 16}


@pytest.mark.parametrize("size", ["2", "x3", "0x4", "2x1"])
def test_sizes_that_are_none(size, capsys):
    with pytest.raises(SystemExit):
        main(["finetune", "--size", size])


def test_weights_of_four_bits_need_files(monkeypatch):

    names = ("torch", "transformers", "peft")
    found = {name: SimpleNamespace() for name in names}
    found["torch"].cuda = SimpleNamespace(
        memory_reserved=lambda: 0, reset_peak_memory_stats=lambda: None
    )
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(RuntimeError, match="bitsandbytes quantises models as they are read"):
        command.baseline("peft-nf4", Plan("phi-2", None, 4, Timer(1, 1, 1.0)), Size(1, 8))


def test_without_a_gpu_it_says_so(capsys, no_gpu):
    assert main(["finetune"]) == 1
    assert "there is no CUDA device" in capsys.readouterr().err
