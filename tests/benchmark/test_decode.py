"""``python -m cupyattn.benchmark decode``: what it calls, counts and prints."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.fake_gpu import CEILINGS, FakeTorch, harness

import cupyattn
from cupyattn.benchmark import decode
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.cases import COLD_BYTES, Harness, rows_of

CASE = decode.Step(3, 300, True, 4, 2, 8, 2, 16, "float16")


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_a_case_is_a_valid_call(dtype):
    case = CASE._replace(dtype=dtype)
    arrays = case.arrays(np)
    assert cupyattn.paged_attention(*arrays, causal=True).shape == (3, 2, 4, 8)
    assert 256 <= arrays[4].min() <= arrays[4].max() <= 300
    assert len(set(arrays[3].ravel())) == arrays[3].size


@pytest.mark.parametrize("cache", ["int8", "int4"])
@pytest.mark.parametrize("heads_first", [False, True])
def test_a_case_of_integers_is_a_valid_call(cache, heads_first):
    case = CASE._replace(cache=cache, heads_first=heads_first)
    _, k, _, _, _, *scales = case.arrays(np)
    assert all(each.strides[1] == 4 for each in scales)
    assert (k.strides[1] < k.strides[2]) == heads_first
    assert np.isfinite(case.call(np)()).all()
    row = 8 + 4 if cache == "int8" else 4 + 4
    assert case._replace(batch=1, context=20, ragged=False).bytes == 20 * 2 * 2 * row


@pytest.mark.parametrize("ragged", [False, True])
def test_a_dense_case_is_the_same_step(ragged):
    case = CASE._replace(dtype="float32", ragged=ragged, block_size=None)
    q, k, v, lengths = case.arrays(np)
    assert k.shape == v.shape == (3, lengths.max(), 2, 8)
    assert np.array_equal(lengths, case._replace(block_size=16).arrays(np)[4])
    alone = cupyattn.attention(q[2:], k[2:, : lengths[2]], v[2:, : lengths[2]], causal=True)
    assert np.allclose(case.call(np)()[2:], alone)


def test_what_is_counted():
    assert CASE._replace(ragged=False).bytes == 3 * 300 * 2 * 2 * 8 * 2


DENSE = CASE._replace(ragged=False, block_size=None, queries=1)


def rows_beside_peers(case, *names, **more):
    measure = harness(baselines=names, **more)
    (subject,) = decode.BENCHMARK.cases(parsed(case), measure)
    return list(rows_of(subject, measure))


def parsed(case=None, *words):
    if case is not None:
        words = (
            *("--batch", case.batch, "--context", case.context, "--heads", case.heads),
            *("--kv-heads", case.kv_heads, "--head-dim", case.head_dim, "--dtype", case.dtype),
            *("--queries", case.queries, "--layers", 3),
            *(["--ragged"] if case.ragged else []),
            *(["--layout", "dense"] if case.block_size is None else
              ["--layout", "paged", "--block-size", case.block_size]),
        )  # fmt: skip
    return decode.BENCHMARK.parse(*map(str, words))[1]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_peers_compute_the_same_over_dense_keys(kv_heads, dtype):
    torch = FakeTorch()
    case = DENSE._replace(dtype=dtype, kv_heads=kv_heads)
    found = rows_beside_peers(case, "eager", "flash", "cupy", torch=torch)
    assert [row["implementation"] for row in found] == [
        *("cupyattn", "torch eager", "torch flash", "cupy")
    ]
    assert all("times" in row for row in found), "results agree"
    assert torch.backends == ["flash"] * len(torch.backends) and torch.backends
    assert torch.asked[0] == ((3, 4, 1, 8), (3, kv_heads, 300, 8), False, 0.0, None)


def test_a_peer_that_computes_something_else_is_told(monkeypatch):
    monkeypatch.setattr(decode, "swapped", lambda tensor: tensor.swapaxes(1, 2) * 1.1)
    ours, theirs = rows_beside_peers(DENSE, "eager", torch=FakeTorch())
    assert "times" in ours
    assert "one of them is wrong" in theirs["unavailable"]


def test_peers_have_neither_blocks_nor_lengths_nor_several_tokens():
    for case in (CASE._replace(ragged=False), DENSE._replace(ragged=True)):
        assert [row["implementation"] for row in rows_beside_peers(case, "eager", "cupy")] == [
            "cupyattn"
        ]
    of_two = rows_beside_peers(DENSE._replace(queries=2), "eager", "cupy", torch=FakeTorch())
    assert ["one query token" in row.get("unavailable", "") for row in of_two] == [
        *(False, True, True)
    ]


def test_layers_take_caches_in_turn_until_no_cache_holds_them():
    made = []

    def make():
        made.append(len(made))
        return made[-1]

    large = DENSE._replace(batch=32, context=4096, heads=32, kv_heads=8, head_dim=64)
    assert COLD_BYTES / 2 < large.bytes < COLD_BYTES
    assert large.round(Harness(np), 5, make) == [0, 1, 0, 1, 0]
    assert DENSE.round(Harness(np), 3, list) == [[], [], []], "no more than there are layers"


def test_text_and_json(a_gpu, capsys, tmp_path):
    file = tmp_path / "decode.json"
    call = ["decode", "--batch", "1", "2", "--context", "40", "--block-size", "16", "--heads", "4",
            "--kv-heads", "2", "--head-dim", "8", "--json", str(file)]  # fmt: skip
    assert main(call) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "heads 4, kv_heads 2, head_dim 8, queries 1, float16, float" in printed
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["bytes"] for row in rows] == [n * 2 * 2 * 8 * 2 for n in (40, 40, 80, 80)]
    assert [row["block_size"] for row in rows] == [16, None, 16, None]
    assert "1 16 cupyattn 2.0 us" in printed
    assert "2 - cupyattn 2.0 us" in printed
    assert rows[0]["of_ceiling"] == pytest.approx(rows[0]["gb_per_s"] / CEILINGS["read_gb_per_s"])


def test_integers_beside_floats(a_gpu, capsys, tmp_path):
    a_gpu.times.seconds += [2e-6, 4e-6, 2e-6]
    file = tmp_path / "decode.json"
    call = ["decode", "--batch", "2", "--context", "40", "--heads", "2", "--kv-heads", "1",
            "--head-dim", "8", "--block-size", "16", "--cache", "float", "int4",
            "--json", str(file)]  # fmt: skip
    assert main(call) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["cache"] for row in rows] == ["float", "int4", "float"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "16 int4 cupyattn 4.0 us" in printed
    assert "5.0 MB 2.00" in printed, "beside floats"


@pytest.mark.parametrize(("layout", "blocks"), [("paged", [16, 256]), ("dense", [None])])
def test_one_layout_alone(a_gpu, tmp_path, layout, blocks):
    file = tmp_path / "decode.json"
    call = ["decode", "--batch", "1", "--context", "40", "--heads", "2", "--kv-heads", "1",
            "--head-dim", "8", "--layout", layout, "--json", str(file)]  # fmt: skip
    assert main(call) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["block_size"] for row in rows] == blocks


def test_the_sweep_has_the_steps_of_serving():
    cases = decode.sweep()
    assert len(set(cases)) == len(cases)
    usual = decode.Step(64, 4096, False, 32, 8, 128, 1, 16, "float16", "float", True)
    for context in (4096, 16384, 32768):
        paged = usual._replace(context=context)
        dense = paged._replace(block_size=None, heads_first=False)
        others = (paged._replace(block_size=256), dense)
        assert {paged, *others, *(paged._replace(cache=of) for of in ("int8", "int4"))} <= {*cases}
    for case in (
        usual._replace(kv_heads=32, head_dim=64),
        usual._replace(batch=1, context=32768),
        usual._replace(batch=8, context=32768, ragged=True),
    ):
        assert {case, case._replace(block_size=None, heads_first=False)} <= {*cases}
    for dtype in ("float16", "float32", "bfloat16"):
        assert {usual._replace(head_dim=of, dtype=dtype) for of in (1, 64, 128, 256)} <= {*cases}


@pytest.mark.parametrize("quick", [[], ["--quick"]])
def test_the_sweep_is_one_command(a_gpu, monkeypatch, tmp_path, quick):
    lines = ("--batch 1 --context 40 --heads 4 --kv-heads 2 --head-dim 8 --block-size 16",
             "--batch 2 --context 40 --heads 2 --kv-heads 1 --head-dim 4 8 --layout paged",
             "--batch 1 --context 40 --heads 4 --kv-heads 2 --head-dim 8 --layout dense",
    )  # fmt: skip
    monkeypatch.setattr(decode, "SWEEP", lines)
    file = tmp_path / "decode.json"
    assert main(["decode", "--sweep", "--layers", "2", *quick, "--json", str(file)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    rows = result["rows"]
    assert [(row["batch"], row["head_dim"], row["block_size"]) for row in rows] == [
        *((1, 8, 16), (1, 8, None), (2, 4, 16), (2, 4, 256), (2, 8, 16), (2, 8, 256))
    ]
    assert [row["heads_first"] for row in rows] == [row["block_size"] is not None for row in rows]
    assert all(row["gb_per_s"] and row["of_ceiling"] for row in rows)
    assert result["layers"] == 2


@pytest.mark.parametrize("words", [["--batch", "7"], ["--heads-first"], ["--dtype", "float32"],
                                   ["--ragged", "--queries", "2"]])  # fmt: skip
def test_the_sweep_refuses_other_sizes(a_gpu, capsys, words):
    assert main(["decode", "--sweep", *words]) == 1
    given = [word for word in words if word.startswith("--")]
    said = capsys.readouterr().err
    assert "--sweep with" in said and all(word in said for word in given)
