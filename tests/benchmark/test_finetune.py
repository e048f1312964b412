"""``python -m cupyattn.benchmark finetune``: what it times, counts and prints."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from support.tiny_models import TINY

from cupyattn import models
from cupyattn.benchmark import finetune as command
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.finetune import FinetunePlan, TrainingSize, own, samples_of, timed
from cupyattn.benchmark.timer import Timer

random = models.random


def tiny(name="llama"):
    return random(TINY[name], dtype="float32", xp=np, seed=3)


def test_steps_are_timed_behind_the_first_ones(monkeypatch):
    clock = iter([0, 5, 10, 11, 20, 22, 30, 31, 40, 49, 50, 53])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    calls = []
    plan = FinetunePlan("", None, 1, Timer(calls=3, warm_up=1, budget_s=100.0))
    assert timed(lambda: calls.append(1), plan) == [1, 9, 3]
    assert len(calls) == 2 + 1 + 3


def test_own_steps(monkeypatch):
    monkeypatch.setattr(models, "random", lambda name, **options: tiny())
    plan = FinetunePlan("gpt2", None, 4, Timer(2, 1, 1.0))
    row = own(plan, TrainingSize(2, 10), np, lambda: 12345)
    assert row["held_bytes"] == 12345 and min(row["seconds"]) > 0
    assert row["budget_bytes"] == sum(row["budget"].values())
    assert row["budget"]["weights"] == tiny().nbytes
    (one, other) = samples_of(50, TrainingSize(2, 10))
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
