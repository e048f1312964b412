"""``python -m cupyattn.benchmark decode``: what it calls, counts and prints."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_gpu import FakeTorch, harness

import cupyattn
from cupyattn.benchmark import decode
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.cases import COLD_BYTES, Harness, rows_of

CASE = decode.DecodingStep(3, 300, True, 4, 2, 8, 2, 16, "float16")


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_a_case_is_a_valid_call(dtype):
    case = CASE._replace(dtype=dtype)
    arrays = case.arrays(np)
    assert cupyattn.paged_attention(*arrays, causal=True).shape == (3, 2, 4, 8)
    assert 256 <= arrays[4].min() <= arrays[4].max() <= 300
    assert len(set(arrays[3].ravel())) == arrays[3].size


@pytest.mark.parametrize("cache", ["int8", "int4"])
def test_a_case_of_integers_is_a_valid_call(cache):
    case = CASE._replace(cache=cache)
    _, k, _, _, _, *scales = case.arrays(np)
    assert all(each.strides[1] == 4 for each in scales)
    assert k.strides[1] < k.strides[2]
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
    found = rows_beside_peers(case, "eager", "flash", torch=torch)
    assert [row["implementation"] for row in found] == ["cupyattn", "torch eager", "torch flash"]
    assert all("times" in row for row in found), "results agree"
    assert torch.backends == ["flash"] * len(torch.backends) and torch.backends
    assert torch.asked[0] == ((3, 4, 1, 8), (3, kv_heads, 300, 8), False, 0.0, None)


def test_peers_have_neither_blocks_nor_lengths_nor_several_tokens():
    for case in (CASE._replace(ragged=False), DENSE._replace(ragged=True)):
        assert [row["implementation"] for row in rows_beside_peers(case, "eager")] == ["cupyattn"]
    of_two = rows_beside_peers(DENSE._replace(queries=2), "eager", torch=FakeTorch())
    assert ["one query token" in row.get("unavailable", "") for row in of_two] == [False, True]


def test_layers_take_caches_in_turn_until_no_cache_holds_them():
    made = []

    def make():
        made.append(len(made))
        return made[-1]

    large = DENSE._replace(batch=32, context=4096, heads=32, kv_heads=8, head_dim=64)
    assert COLD_BYTES / 2 < large.bytes < COLD_BYTES
    assert large.round(Harness(np), 5, make) == [0, 1, 0, 1, 0]
    assert DENSE.round(Harness(np), 3, list) == [[], [], []], "no more than there are layers"


# --- --prefill


def test_a_chunk_counts_causal_products():
    chunk = decode.DecodingStep(2, 70, False, 4, 2, 8, 20, 16, "float32")
    assert chunk.flops == 4 * 2 * 4 * 8 * sum(range(51, 71))
    assert np.allclose(chunk.packed_call(np)(), chunk.call(np)().reshape(40, 4, 8))


def test_more_queries_than_a_step_has_are_refused(a_gpu, capsys):
    assert main(["decode", "--queries", "2048"]) == 1
    assert "with --prefill" in capsys.readouterr().err


# --- decode --cache-operations

BLOCKS_OF_A_CACHE = decode.CacheOperation("append", "float", 37, 4, 2, 8, 16, "float16")


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("cache", decode.CACHES)
@pytest.mark.parametrize("operation", decode.OPERATIONS)
def test_a_cache_operation_is_a_valid_call(operation, cache, dtype):
    case = BLOCKS_OF_A_CACHE._replace(operation=operation, cache=cache, dtype=dtype)
    case.round(np)[0]()


def test_bytes_of_cache_operations_count_scales_and_rotated_queries():
    token, stored = 2 * 2 * 8 * 2, 2 * 2 * (4 + 4)
    assert BLOCKS_OF_A_CACHE.bytes == 37 * (2 * 4 * 8 * 2 + 2 * token)
    assert BLOCKS_OF_A_CACHE._replace(operation="copy", cache="int4").bytes == 2 * 8 * 16 * stored
    gathered = BLOCKS_OF_A_CACHE._replace(operation="gather", cache="int4")
    assert gathered.bytes == 37 * (stored + token)
