"""``python -m cupyattn.benchmark ring``: what it models, draws and prints."""

from __future__ import annotations

import argparse
import json
import re
import threading
import types

import numpy as np
import pytest
from support.fake_gpu import CEILINGS, harness

from cupyattn.benchmark import command as driver
from cupyattn.benchmark import ring
from cupyattn.benchmark import ring_cost as cost
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.ring_cost import H200, INFINIBAND, NVLINK, PCIE, Link, ring_cost
from cupyattn.benchmark.timer import Timer
from cupyattn.distributed import merged as merged_module
from cupyattn.distributed import ring_attention, ring_attention_backward, run
from cupyattn.distributed import ring_backward as backward_module

PROBLEM = {"heads": 16, "head_dim": 128}
SCORES = cost.T4._replace(gb_per_s=float("inf"), launch_us=0.0, slots=0)
"""A card that only computes scores."""
BYTES = cost.Card("a byte a second", float("inf"), float("inf"), 1e-9, 0.0)
FREE = Link("free", float("inf"), 0.0)


def test_one_card_is_the_ideal():
    alone = ring_cost(1, 4096, card=SCORES, **PROBLEM)
    assert alone.exposed == alone.transfer == 0
    assert alone.efficiency == 1
    flops = 4 * 16 * 128 * 4096 * 4097 / 2
    assert alone.compute == pytest.approx(flops / (cost.T4.forward * 1e12))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("placement", ["zigzag", "contiguous", "striped"])
def test_work_is_spread_and_none_is_lost(placement, backward):
    """As balance says; with a link that costs nothing, that is all."""
    for ranks in (2, 8, 64):
        given = {"placement": placement, "backward": backward, **PROBLEM}
        found = ring_cost(ranks, 65_536, card=SCORES, link=FREE, **given)
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


def test_passes_over_memory_in_bytes():
    """Of two ranks, causal zigzag, with as many keys as queries: the module says which passes."""
    items = 64 * 16 * 128  # of a rank
    forward = ring_cost(2, 128, card=BYTES, link=FREE, **PROBLEM)
    assert forward.memory == pytest.approx(6 * items)  # two pieces in 16 bits, once
    assert (forward.compute, forward.exposed, forward.host) == (0, 0, 0)
    backward = ring_cost(2, 128, card=BYTES, link=FREE, backward=True, **PROBLEM)
    sums = (0.5 + 2 * 0.5) + (0.5 + 2) + (0.5 + 2)  # of 10 bytes: first piece, other block, rest
    assert backward.memory == pytest.approx((4 * 3 + 10 * sums + 6 * 3) * items)
    assert ring_cost(1, 128, card=BYTES, link=FREE, **PROBLEM).memory == 0


@pytest.mark.parametrize("ranks", [2, 5])
def test_the_ring_makes_the_passes_that_are_counted(ranks, monkeypatch):
    """The last rank merges both of its pieces at every step, and others wait for it.

    Backward they wait for the first, whose last piece sees both pieces of each block.
    """
    merged, added = ([0] * ranks for _ in range(2))
    merge, add = merged_module.merge_attention, backward_module.add_to
    tokens, shape = 8 * ranks, (1, 8, 2, 4)
    heads = {"heads": 2, "head_dim": 4}

    def of_rank(group):
        def merges(a, _a, b, _b, *, out):
            merged[group.rank] += a.nbytes + b.nbytes + out[0].nbytes
            return merge(a, _a, b, _b, out=out)

        here.merge, here.rank = merges, group.rank
        x = np.ones(shape, np.float16)
        out, lse = ring_attention(x, x, x, group=group, causal=True, return_lse=True)
        ring_attention_backward(x, x, x, x, out, lse, group=group, causal=True)

    def adds(total, part):
        added[here.rank] += 2 * total.nbytes + part.nbytes
        return add(total, part)

    here = threading.local()
    monkeypatch.setattr(
        merged_module, "merge_attention", lambda *parts, out: here.merge(*parts, out=out)
    )
    monkeypatch.setattr(backward_module, "add_to", adds)
    run(of_rank, ranks, timeout=20)
    assert merged[-1] == max(merged)
    assert ring_cost(ranks, tokens, card=BYTES, link=FREE, **heads).memory == merged[-1]
    items = np.prod(shape)
    backward = ring_cost(ranks, tokens, card=BYTES, link=FREE, backward=True, **heads).memory
    of_sums = backward - (4 + 6) * 3 * items
    assert of_sums == added[0] == max(added)


def test_the_host_is_seen_where_it_is_slower_than_the_gpu():
    slow = SCORES._replace(launch_us=1000.0)
    checks, agreement, transfer = cost.CHECKS, cost.AGREEMENT, cost.TRANSFER
    hidden = ring_cost(2, 131_072, card=slow, link=FREE, **PROBLEM)
    assert hidden.host == pytest.approx(checks * 1e-3)  # before the first kernel
    seen = ring_cost(2, 128, card=slow, link=FREE, **PROBLEM)
    launches = (3 + agreement + transfer) + 3 + checks  # a step with a transfer, one without
    assert seen.total == pytest.approx(launches * 1e-3, rel=1e-3)
    assert ring_cost(2, 128, card=SCORES, link=FREE, **PROBLEM).host == 0
    alone = ring_cost(1, 128, card=slow, link=FREE, **PROBLEM)  # with nobody to compare calls with
    assert alone.total == pytest.approx((2 + checks) * 1e-3, rel=1e-3)


def test_calls_that_see_all_keys_have_a_rate_and_waves_of_their_own():
    """Of two ranks the other's block, which has half of the scores."""
    plain = ring_cost(2, 131_072, card=SCORES, link=FREE, **PROBLEM)
    slower = ring_cost(2, 131_072, card=SCORES._replace(whole_forward=0.5), link=FREE, **PROBLEM)
    assert slower.compute == pytest.approx(1.5 * plain.compute, rel=1e-3)
    waves = ring_cost(2, 131_072, card=SCORES._replace(slots=264), link=FREE, **PROBLEM)
    assert waves.compute == pytest.approx((1 + 32 / (8192 / 264)) / 2 * plain.compute, rel=1e-3)
    both = SCORES._replace(whole_backward=0.5, slots=264)
    backward = [
        ring_cost(2, 131_072, card=card, link=FREE, backward=True, **PROBLEM).compute
        for card in (SCORES, both)
    ]
    assert backward[1] == pytest.approx(1.5 * backward[0], rel=1e-3)
    # All keys: every call is such a one, also a rank's own block.
    full = ring_cost(2, 131_072, card=SCORES._replace(whole_forward=0.5), link=FREE, causal=False,
                     **PROBLEM)  # fmt: skip
    assert full.compute == pytest.approx(4 * plain.compute, rel=1e-3)
    assert full.efficiency > 0.99  # one card's calls are such too


def test_what_two_gpus_were_measured_at():
    """91.7 %, and 92.8 % of one GPU that computes all shares in turn: the module says of what."""
    forward = ring_cost(2, 131_072, card=H200, link=NVLINK, **PROBLEM)
    assert round(forward.efficiency, 3) == 0.935
    compared_first = cost.AGREEMENT * H200.launch_us / 1e6
    before = forward.single / (2 * (forward.total + compared_first))
    assert before == pytest.approx(0.928, abs=2e-3)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ranks": 0}, "ranks = 0; it is an integer, 1 or more"),
        ({"ranks": -1}, "ranks = -1"),
        ({"ranks": 2.0}, "ranks = 2.0"),
        ({"tokens": 0}, "tokens = 0"),
        ({"heads": 0}, "heads = 0"),
        ({"kv_heads": 5}, "16 heads, 5 key-value heads"),
        ({"tokens": 1001}, "a sequence of 1001 tokens over 2 ranks, zigzag"),
    ],
)
def test_what_is_no_problem_is_refused(given, says):
    problem = {"ranks": 2, "tokens": 4096, **PROBLEM, **given}
    with pytest.raises(ValueError, match=re.escape(says)):
        ring_cost(problem.pop("ranks"), problem.pop("tokens"), **problem)


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
    assert efficiencies[0] > 0.94 > 0.5 > efficiencies[-1]


def test_the_model_needs_no_gpu(capsys, tmp_path):
    file = tmp_path / "ring.json"
    assert main(["ring", "--modelled", "--json", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "heads 16, kv_heads 16, head_dim 128, zigzag, causal, tokens 131072" in printed
    assert f"{PCIE.name}, 12 GB/s each way" in printed
    assert "MODELLED and not measured" in printed
    rows = json.loads(file.read_text())["rows"]
    assert all(row["modelled"] for row in rows)
    assert {row["ranks"] for row in rows} >= {2, 8, 1024}


def rows_modelled(tmp_path, *arguments: str):
    file = tmp_path / "ring.json"
    assert main(["ring", "--modelled", "--json", str(file), *arguments]) == 0
    return json.loads(file.read_text())["rows"]


def test_a_number_of_gpus_is_modelled(tmp_path):
    assert {row["ranks"] for row in rows_modelled(tmp_path, "--gpus", "4")} == {4}
    few = rows_modelled(tmp_path, "--gpus", "32")
    assert {row["ranks"] for row in few} == {32}
    assert all("InfiniBand" in row["link"] for row in few)  # no other joins so many


def test_tokens_that_no_ranks_split_are_told(tmp_path, capsys):
    rows = rows_modelled(tmp_path, "--tokens", "1001")
    assert rows and all("a sequence of 1001 tokens over" in row["unavailable"] for row in rows)
    assert "a sequence of 1001 tokens over 2 ranks" in " ".join(capsys.readouterr().out.split())
    ranks = [row["ranks"] for row in rows_modelled(tmp_path, "--tokens", "1040") if "times" in row]
    assert set(ranks) == {2, 4, 8}  # 16 do not
    odd = rows_modelled(tmp_path, "--tokens", "1001", "--gpus", "7", "--placement", "striped")
    assert all("times" in row for row in odd)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kv-heads", "5"], "16 heads, 5 key-value heads"),
        (["--gpus", "2000"], "--gpus 2000; the model has links that join up to 1024"),
    ],
)
def test_what_is_not_modelled_says_why(arguments, says, capsys):
    assert main(["ring", "--modelled", *arguments]) == 1
    assert says in capsys.readouterr().err


def test_the_most_tokens_are_modelled_and_more_are_refused(capsys):
    assert main(["ring", "--modelled", "--tokens", str(2**31 - 1)]) == 0
    with pytest.raises(SystemExit):
        main(["ring", "--modelled", "--tokens", str(2**31)])
    assert "2147483648 is not 1 to 2147483647" in capsys.readouterr().err


def test_heads_are_checked_before_gpus_are_used():
    arguments = argparse.Namespace(gpus=2, tokens=128, heads=16, kv_heads=5)
    with pytest.raises(ValueError, match="5 key-value heads"):
        next(iter(ring.rows(arguments, harness())))


def test_one_gpu_is_no_ring(monkeypatch, capsys):
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    assert main(["ring"]) == 1
    assert "there are 1 CUDA devices, and this takes 2 or more" in capsys.readouterr().err


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setattr(ring, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match="a ring of 4 GPUs, of 2 that are here"):
        next(iter(ring.rows(argparse.Namespace(gpus=4, tokens=8, heads=2, kv_heads=2), harness())))


def test_arrays_of_every_head():
    arguments = argparse.Namespace(tokens=4, heads=3, kv_heads=1, head_dim=8)
    q, k, v, dout = ring.drawn(arguments, np)
    assert (q.shape, k.shape, v.shape, dout.shape) == ((1, 4, 3, 8), *[(1, 4, 1, 8)] * 2, q.shape)
    assert q.dtype == np.float16
    assert not np.array_equal(q[:, :, 0], q[:, :, 1])


def test_rows_are_those_of_the_slowest_rank():
    ranks = [
        {"forward": [0.1, 0.3], "hop_gb_per_s": 312.5},
        {"forward": [0.2, 0.2], "hop_gb_per_s": 300.0},
    ]
    labels = {"what": "forward", "gpus": 2, "tokens": 100, "heads": 4, "head_dim": 8,
              "causal": True}  # fmt: skip
    one, both = ring.compared(labels, [0.5, 0.5], ranks, 0.25, harness())
    assert (one["implementation"], both["implementation"]) == ("cupyattn one GPU", "cupyattn ring")
    assert one["flops"] == both["flops"] == 4 * 4 * 8 * 100**2 / 2
    assert (both["times"]["min_s"], both["times"]["max_s"]) == (0.2, 0.3)
    assert both["also"]["efficiency"] == pytest.approx(0.5 / (2 * 0.25))
    assert (both["also"]["largest_difference"], both["also"]["hop_gb_per_s"]) == (0.25, 312.5)
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
