"""``python -m cupyattn.benchmark ring``: what it models, draws and prints."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
from support.fake_gpu import HEADER

from cupyattn.benchmark import gpu_command, ring
from cupyattn.benchmark.__main__ import main
from cupyattn.distributed import cost
from cupyattn.distributed.cost import H200, INFINIBAND, NVLINK, PCIE, Link, ring_cost

PROBLEM = {"heads": 16, "head_dim": 128}


def test_one_card_is_the_ideal():
    alone = ring_cost(1, 4096, **PROBLEM)
    assert alone.exposed == alone.transfer == 0
    assert alone.efficiency == 1
    flops = 4 * 16 * 128 * 4096 * 4097 / 2
    assert alone.compute == pytest.approx(flops / (cost.T4.forward * 1e12))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("placement", ["zigzag", "contiguous", "striped"])
def test_work_is_spread_and_none_is_lost(placement, backward):
    """As balance says; with a link that costs nothing, that is all."""
    free = Link("free", float("inf"), 0.0)
    for ranks in (2, 8, 64):
        found = ring_cost(
            ranks, 65_536, placement=placement, link=free, backward=backward, **PROBLEM
        )
        assert found.efficiency == pytest.approx(found.balance, rel=1e-3)
        assert (found.balance > 0.99) is (placement != "contiguous")


def test_what_goes_round_in_bytes():
    """Two ranks: k and v once; backward their gradients besides, there and home in float32."""
    slow = Link("a byte a second", 1e-9, 0.0)
    block = 2 * 64 * 16 * 128
    assert ring_cost(2, 128, link=slow, **PROBLEM).transfer == pytest.approx(2 * block)
    backward = ring_cost(2, 128, link=slow, backward=True, **PROBLEM)
    assert backward.transfer == pytest.approx((2 + 4 + 4) * block)
    grouped = ring_cost(2, 128, link=slow, kv_heads=4, **PROBLEM)
    assert grouped.transfer == pytest.approx(2 * block / 4)


def test_a_window_sends_less():
    far = ring_cost(64, 131_072, card=H200, link=NVLINK, **PROBLEM)
    near = ring_cost(
        64,
        131_072,
        card=H200,
        link=NVLINK,
        window_size=(1024, 0),
        placement="contiguous",
        **PROBLEM,
    )
    assert near.steps == 2
    assert near.transfer < far.transfer / 30


def test_more_ranks_than_the_link_can_feed():
    costs = [
        ring_cost(2**power, 2**20, card=H200, link=INFINIBAND, **PROBLEM) for power in range(1, 11)
    ]
    assert costs[-1].ranks == 1024
    efficiencies = [found.efficiency for found in costs]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert efficiencies[0] > 0.99 > 0.5 > efficiencies[-1]


def test_the_model_needs_no_gpu(capsys):
    assert main(["ring", "--modelled"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "131,072 tokens, 16/16 heads, D 128, causal, zigzag" in printed
    assert f"T4 (modelled), {PCIE.name}: 12 GB/s each way" in printed
    assert "1,024 backward" in printed
    assert "No measurements" in printed


def test_one_gpu_is_no_ring(monkeypatch, capsys):
    monkeypatch.setattr(gpu_command, "device_count", lambda: 1)
    monkeypatch.setattr(ring, "device_count", lambda: 1)
    assert main(["ring"]) == 1
    assert "a ring of 1 GPUs, of 1 that are here" in capsys.readouterr().err
    assert main(["ring", "--gpus", "4"]) == 1


def test_arrays_of_every_head():
    arguments = argparse.Namespace(tokens=4, heads=3, kv_heads=1, head_dim=8)
    q, k, v, dout = ring.drawn(arguments, np)
    assert (q.shape, k.shape, v.shape, dout.shape) == ((1, 4, 3, 8), *[(1, 4, 1, 8)] * 2, q.shape)
    assert q.dtype == np.float16
    assert not np.array_equal(q[:, :, 0], q[:, :, 1])


def test_text_and_json(monkeypatch, capsys, tmp_path):
    times = {"one_gpu": 0.2, "ring": 0.104, "efficiency": 0.2 / 0.208}
    rows = [{"what": "forward", **times, "goal": 0.95}]
    result = {
        "command": "ring", **HEADER, "tokens": 131_072, "heads": 16, "kv_heads": 8,
        "head_dim": 128, "causal": True, "placement": "zigzag", "gpus": 2,
        "transport": "NCCLCommunicator", "hop_gb_per_s": 312.5, "largest_difference": 0.0005,
        "calls": 5, "warm_up": 2, "rows": rows,
    }  # fmt: skip
    monkeypatch.setattr(gpu_command, "device_count", lambda: 2)
    monkeypatch.setattr(ring, "measure", lambda arguments: result)
    file = tmp_path / "ring.json"
    assert main(["ring", "--json", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "131,072 tokens, 16/8 heads, D 128, float16, causal, zigzag" in printed
    assert "forward 200.0 ms 104.0 ms 96.2% 95%" in printed
    assert "NCCLCommunicator, a hop at 312.5 GB/s" in printed
    assert json.loads(file.read_text(encoding="utf-8"))["rows"] == rows
