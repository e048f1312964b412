"""``python -m cupyattn.benchmark ring``: what it measures, compares and refuses."""

from __future__ import annotations

import argparse
import types

import pytest
from support.fake_gpu import CEILINGS, harness

from cupyattn.benchmark import command as driver
from cupyattn.benchmark import ring
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.timer import Timer


def test_heads_are_checked_before_gpus_are_used():
    arguments = argparse.Namespace(gpus=2, tokens=128, heads=16, kv_heads=5)
    with pytest.raises(ValueError, match="5 key-value heads"):
        next(iter(ring.rows(arguments, harness())))


def test_one_gpu_is_no_ring(monkeypatch, capsys):
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    assert main(["ring"]) == 1
    assert "there are 1 CUDA devices, and this takes 2 or more" in capsys.readouterr().err


def test_rows_are_those_of_the_slowest_rank():
    ranks = [{"forward": [0.1, 0.3]}, {"forward": [0.2, 0.2]}]
    labels = {"what": "forward", "gpus": 2, "tokens": 100, "heads": 4, "head_dim": 8,
              "causal": True}  # fmt: skip
    one, both = ring.compared(labels, [0.5, 0.5], ranks, 0.25, harness())
    assert (one["implementation"], both["implementation"]) == ("cupyattn one GPU", "cupyattn ring")
    assert one["flops"] == both["flops"] == 4 * 4 * 8 * 100**2 / 2
    assert (both["times"]["min_s"], both["times"]["max_s"]) == (0.2, 0.3)
    assert both["also"]["efficiency"] == pytest.approx(0.5 / (2 * 0.25))
    assert both["also"]["largest_difference"] == 0.25
    assert both["also"]["goal"] == ring.GOALS["forward"]
    assert both["of_ceiling"] == pytest.approx(both["tflops"] / 2 / CEILINGS["mma_tflops"])


def test_ranks_make_as_many_calls_as_the_first(monkeypatch):
    device = types.SimpleNamespace(synchronize=lambda: None)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(Device=lambda: device), array=None)
    calls = []
    clock = Timer(calls=100, warm_up=2, budget_s=1.0)
    assert len(ring.timed(lambda: calls.append(1), clock, cupy, lambda: None)) == 100
    calls.clear()
    first = types.SimpleNamespace(get=lambda: [0.1])
    cupy.array = lambda seconds: seconds
    group = types.SimpleNamespace(all_gather=lambda seconds: [first, None])
    found = ring.timed(lambda: calls.append(1), clock, cupy, lambda: None, group)
    assert (len(found), len(calls)) == (10, 2 + 2 + 10)
