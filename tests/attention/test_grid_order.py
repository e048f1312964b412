"""The order in which CTAs start, what it is worth, and the lists of a block mask's tiles."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.backward_runs import check as check_backward
from support.devices import KERNELS, Probe
from support.forward_runs import check
from support.grid_order import DEVICES, HEAD_DIMS, Grid, causal_problem
from support.paged import PackedProblem as PackedPrompts
from support.paged import multiprocessors
from support.recording_device import device_array
from support.search import deep, examples
from support.varlen import VarlenProblem

import cupyattn
from cupyattn.ops.attention.block_mask import block_lists
from cupyattn.ops.attention.choice import interleaving
from cupyattn.ops.attention.kernels.block_mask import LIST_HEAD, TILE
from cupyattn.ops.attention.problem import WholeAttentionArrays
from cupyattn.ops.attention.structs import ATTENTION_PARAMS, BACKWARD_PARAMS, BACKWARD_STRUCT
from cupyattn.runtime.arrays import adopt, contiguous
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.plan import Planner, run
from cupyattn.runtime.spec import Pointer, Scalar
from cupyattn.testing import AttentionCase

LEAST_OF_PLAIN = 0.88  # of the TFLOP/s of a plain call, which has twice the scores
T4 = DeviceTraits(75, 40)


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("traits", DEVICES)
def test_a_small_causal_call_is_nearly_twice_as_fast(traits, head_dim, kind):
    """By simulation, of 2,048 tokens and 32 heads."""
    grid = Grid.of(DEVICES[traits], head_dim, 2048, 32, kind)
    problem = causal_problem(2048, 32, head_dim)
    together = interleaving(problem, DEVICES[traits], backward=kind == "backward").kv_heads
    plain = grid.seconds(1, causal=False)
    assert plain / grid.seconds(together, causal=True) >= 2 * LEAST_OF_PLAIN
    # Never worse than one head after the other, which on many multiprocessors wastes nearly half.
    before = plain / grid.seconds(1, causal=True)
    assert plain / grid.seconds(together, causal=True) >= before
    if traits == "H200" and kind == "forward":
        assert before < 1.5


@pytest.mark.parametrize(
    ("changed", "traits", "together"),
    [
        ({}, T4, 8),  # K and V of a head have 1 MiB
        ({"length": 8192}, T4, 2),
        ({"length": 65_536}, T4, 1),
        ({"head_dim": 64}, T4, 16),
        ({"head_dim": 64, "length": 512}, T4, 16),  # half as many as there are multiprocessors
        ({}, DEVICES["H200"], 32),
        ({"batch": 8}, DEVICES["H200"], 64),
        ({"heads": 25, "kv_heads": 25}, T4, 5),
        ({"heads": 23, "kv_heads": 23}, T4, 1),  # whose only divisors are 1 and 23
        # Whole groups: they share their keys.
        ({"kv_heads": 8}, T4, 4),
        ({"kv_heads": 1}, T4, 1),
        ({"kv_heads": 8}, DeviceTraits(75, 2), 1),
        ({"batch": 0}, T4, 0),
        ({"heads": 0, "kv_heads": 0}, T4, 0),
    ],
)
def test_how_many_heads_are_interleaved(changed, traits, together):
    sizes = {"length": 2048, "heads": 32, "head_dim": 128}
    named = {name: changed.get(name, size) for name, size in sizes.items()}
    others = {name: size for name, size in changed.items() if name not in sizes}
    problem = causal_problem(*named.values(), **others)
    assert interleaving(problem, traits).kv_heads == together
    if together:
        assert problem.batch * problem.kv_heads % together == 0


@pytest.mark.parametrize("window", [(None, None), (100, 0), (100, None), (0, 0)])
def test_tiles_that_are_alike_stay_in_their_heads(window):
    problem = causal_problem(2048, 32, 128)
    problem.window = window
    assert interleaving(problem, T4) == (0, 1)


BIASED = {"B": 8, "Sq": 512, "Sk": 512, "H": 12, "G": 12}


@pytest.mark.parametrize(
    ("shape", "changed", "expected"),
    [
        ((1, 12, 512, 512), {}, (8, 8)),
        ((512, 512), {}, (8, 8)),
        ((1, 1, 1, 512), {"B": 50}, (10, 10)),  # the largest divisor of 50 within 20 at a time
        ((12, 512, 512), {"Sk": 16_384, "Sq": 512}, (2, 2)),  # within L2
        ((12, 512, 512), {"B": 23}, (0, 1)),
        ((8, 12, 512, 512), {}, (0, 1)),
        ((8, 1, 512, 512), {}, (0, 1)),
        ((1, 12, 512, 512), {"B": 1}, (0, 1)),
        ((1, 12, 512, 512), {"G": 3}, (4, 4)),  # with each four query heads
        ((1, 12, 512, 512), {"causal": True}, (16, 8)),
        ((1, 12, 512, 512), {"causal": True, "B": 1}, (12, 1)),
    ],
)
def test_batch_elements_with_one_bias_are_interleaved(shape, changed, expected, recorder):
    sizes = {**BIASED, **changed}
    q, k = (
        device_array((sizes["B"], sizes[rows], sizes[heads], 64))
        for rows, heads in (("Sq", "H"), ("Sk", "G"))
    )
    shape = (*shape[:-2], sizes["Sq"] if shape[-2] != 1 else 1, sizes["Sk"])
    bias = device_array(shape)
    cupyattn.attention(q, k, k, bias=bias, causal=sizes.get("causal", False), q_offset=0)
    (launch,) = recorder.started
    params = launch.arguments[-1]
    assert (int(params["kv_together"]), int(params["batches"])) == (expected[0] or 1, expected[1])
    assert int(params["together"]) == (expected[0] or 1) * (
        sizes["H"] // sizes["G"] if expected[0] else 1
    )


def test_the_backward_counts_queries_and_their_gradients():
    problem = causal_problem(2048, 32, 128, kv_heads=8)
    assert [interleaving(problem, T4, backward=way).kv_heads for way in (False, True)] == [4, 2]


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@given(
    batch=st.integers(1, 4),
    kv_heads=st.integers(1, 6),
    group=st.integers(1, 3),
    tiles=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    data=st.data(),
)
@examples(10, deep=28)
def test_every_tile_is_had_once_and_longest_ones_first(batch, kv_heads, group, tiles, data):
    together = data.draw(st.sampled_from(divisors(batch * kv_heads)))
    batches = data.draw(st.sampled_from(divisors(batch)))
    params = np.zeros((), BACKWARD_PARAMS)
    params["batch"] = batch
    attention = params["attention"]
    attention["heads"], attention["group"] = kv_heads * group, group
    attention["sq"], attention["sk"] = (16 * count - 5 for count in tiles)
    attention["together"], attention["kv_together"] = together * group, together
    attention["batches"] = batches
    probe = Probe(
        "grid_order", Pointer("rows"), Pointer("keys"), BACKWARD_STRUCT, threads=1, TILE=16
    )
    heads = (batch * kv_heads * group, batch * kv_heads)
    empty = [
        np.full((number * count, 2), -1, np.int32)
        for number, count in zip(heads, tiles, strict=True)
    ]
    found = probe.run(max(map(len, empty)), *empty, params)
    for order, number, count, at_once, last_first in zip(
        found, heads, tiles, (together * group, together), (True, False), strict=True
    ):
        firsts = [16 * tile for tile in range(count)][:: -1 if last_first else 1]
        of_batch = number // batch
        neighbours = [
            of_batch * (begin + element) + head
            for begin in range(0, batch, batches)
            for head in range(of_batch)
            for element in range(batches)
        ]
        expected = [
            [head, first]
            for some in batched(neighbours, at_once)
            for first in firsts
            for head in some
        ]
        assert order.tolist() == expected


CAUSAL = AttentionCase(
    B=2, Sq=140, Sk=140, H=4, G=2, D=64, Dv=64, dtype="float16", options=(("causal", True),)
)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(
    "problem",
    [
        CAUSAL,
        *deep(
            replace(CAUSAL, dtype="float32"),
            replace(CAUSAL, H=6, D=192, Dv=192, options=(*CAUSAL.options, ("sinks", "float32"))),
        ),
    ],
    ids=str,
)
def test_results_of_interleaved_heads(problem):
    with multiprocessors(40):
        check(problem, "flash")
        for deterministic in (False, True):
            check_backward(problem, "flash", deterministic=deterministic)


LENGTHS = (140, 0, 40, 150)
PACKED = VarlenProblem(
    replace(CAUSAL, B=4, Sq=max(LENGTHS), Sk=max(LENGTHS)), queries=LENGTHS, keys=LENGTHS
)
PAGED = PackedPrompts(
    lengths=LENGTHS, Sq=max(LENGTHS), queries=(130, 0, 40, 150), G=2, group=2, D=64,
    dtype="float16", options=(("causal", True),),
)  # fmt: skip


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_results_of_interleaved_heads_of_packed_sequences(dtype):
    problem = replace(PACKED, dense=replace(PACKED.dense, dtype=dtype))
    with multiprocessors(40):
        assert problem.ratio(*problem.run()) <= 1
        for deterministic in (False, True):
            grads = problem.run_backward(deterministic=deterministic)
            assert max(problem.backward_ratios(grads).values()) <= 1


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_results_of_packed_prompts_with_interleaved_heads(dtype):
    problem = replace(PAGED, dtype=dtype)
    arrays = problem.arrays()
    with multiprocessors(40):
        assert problem.ratio(*problem.call(arrays), arrays) <= 1


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@given(
    lengths=st.lists(st.integers(0, 70) | st.sampled_from([16, 33, 511, 527, 528]), max_size=40),
    heads=st.integers(1, 3),
    together=st.integers(1, 9),
)
@example(lengths=[16] * 31 + [0, 48] + [16] * 3, heads=2, together=4)
@example(lengths=[3, 520, 512, 497, 500], heads=2, together=3)
@example(lengths=[1040, 1008, 1009, 0, 1025], heads=1, together=1)  # of seven bits, and of 13
@example(lengths=[1009, 65_600, 1, 65_536], heads=1, together=1)
@examples(10, deep=40)
def test_packed_tiles_are_had_once_and_the_longest_sequences_first(lengths, heads, together):
    lengths = [*lengths, 1]
    tiles = [-(-length // 16) for length in lengths]
    order = [
        [batch, head, tile, count]
        for count in sorted(set(tiles) - {0}, reverse=True)
        for alike in [[b for b, x in enumerate(tiles) if x == count]]
        for some in batched([(b, head) for b in alike for head in range(heads)], together)
        for tile in range(count)
        for batch, head in some
    ]
    beyond = heads * 3
    found = np.full((len(order) + beyond, 4), -1, np.int32)
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    sizes = (len(lengths), int(ends[-1]), max(lengths), heads, together)
    probe = Probe(
        "packed_order",
        Pointer("cu_seqlens", const=True),
        Pointer("found"),
        *(
            Scalar(name, np.dtype(np.int32))
            for name in ("batch", "total", "longest", "heads", "together")
        ),
        threads=32,
        TILE=16,
        ATTENTION_PARAMS_BYTES=ATTENTION_PARAMS.itemsize,
    )
    (found,) = probe.run(len(found), ends, found, *sizes)
    assert found.tolist() == order + [[0] * 4] * beyond


def divisors(number):
    return [count for count in range(1, number + 1) if number % count == 0]


def batched(items, size):
    return [items[first : first + size] for first in range(0, len(items), size)]


def test_heads_of_one_packed_prompt_are_interleaved():
    problem = causal_problem(2048, 6, 128, batch=8)
    assert interleaving(problem, DEVICES["H200"]).kv_heads == 48
    assert interleaving(problem, DEVICES["H200"], prompts=True).kv_heads == 6


def test_kernels_get_the_interleaving(recorder):
    """Forward, both kernels of the backward, packed too, and a prompt over a paged cache."""
    q = device_array((1, 2048, 32, 128))
    out, lse = cupyattn.attention(q, q, q, causal=True, return_lse=True)
    cupyattn.attention_backward(q, q, q, q, out, lse, causal=True, deterministic=True)
    cupyattn.attention(q, q, q)
    cache, table = device_array((256, 16, 8, 128)), device_array((2, 128), "int32")
    lengths, chunk = device_array((2,), "int32"), device_array((2, 1024, 32, 128))
    cupyattn.paged_attention(chunk, cache, cache, table, lengths, causal=True)
    packed, bounds = device_array((2048, 32, 128)), device_array((3,), "int32")
    out, lse = cupyattn.attention_varlen(
        *(packed,) * 3, bounds, bounds, 1024, 1024, causal=True, return_lse=True
    )
    cupyattn.attention_varlen_backward(
        *(packed,) * 4, out, lse, bounds, bounds, 1024, 1024, causal=True, deterministic=True
    )
    found = {}
    for launch in recorder.started:
        params = launch.arguments[-1]
        while "together" not in params.dtype.names:  # AttentionParams comes first in each
            params = params[params.dtype.names[0]]
        found.setdefault(launch.specialisation.spec.entry, []).append(int(params["together"]))
    assert found["attention_forward"] == [8, 1]
    assert found["attention_forward_paged"] == [4 * 4]
    assert found["attention_backward_dkdv"] == found["attention_backward_dq"] == [8]
    assert found["attention_forward_varlen"] == [16]
    assert found["attention_backward_dkdv_varlen"] == found["attention_backward_dq_varlen"] == [16]


def find_lists(tiles: np.ndarray, group: int, sizes: dict[str, Any]) -> np.ndarray:
    """(matrices, owned tiles, items, 2), as the kernels write them."""
    layout = contiguous(tiles.shape, tiles.dtype)
    heads = tiles.shape[1] if tiles.shape[1] > 1 else 4 * group
    layouts: Any = WholeAttentionArrays(None, None, None, block_mask=layout)
    problem: Any = SimpleNamespace(layouts=layouts, heads=heads, kv_heads=heads // group)
    planner = Planner(WholeAttentionArrays, layouts, {})
    plan = planner.plan(*block_lists(problem, planner, **sizes).steps)
    workspace = KERNELS.put(np.zeros(plan.workspace_bytes // 4, np.uint32))
    given = WholeAttentionArrays(
        None, None, None, workspace=workspace, block_mask=KERNELS.put(tiles)
    )
    operands = adopt(given)
    device = device_of(operands)
    assert device is not None
    found = run(device, plan, operands).workspace
    spans = [sizes["rows"] // TILE, sizes["keys"] // TILE]
    own, walked = (-(-n // span) for n, span in zip(tiles.shape[2:], spans, strict=True))
    if sizes.get("of_keys"):
        own, walked = walked, own
    return KERNELS.get(found).reshape(-1, own, LIST_HEAD + walked, 2)


def lists_by_hand(tiles: np.ndarray, own: int, walked: int, part: int) -> list[list[Any]]:
    """List partial and full tiles of each matrix and owned tile, with the states of their parts."""
    found = []
    for matrix in tiles.reshape(-1, *tiles.shape[2:]):
        rows = []
        for first in range(0, matrix.shape[0], own):
            owned = matrix[first : first + own]
            partial, full = [], []
            for at in range(0, matrix.shape[1], walked):
                tile = owned[:, at : at + walked]
                parts = [tile[n : n + part] for n in range(0, len(tile), part)]
                states = [2 if (each == 2).all() else int(each.any()) for each in parts]
                word = sum(state << 2 * n for n, state in enumerate(states))
                if tile.any():
                    (full if (tile == 2).all() else partial).append((at // walked, word))
            rows.append([partial, full])
        found.append(rows)
    return found


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@given(
    batch=st.integers(1, 2), heads=st.integers(1, 4), group=st.sampled_from([1, 2]),
    extents=st.tuples(st.sampled_from([1, 7, 8, 9, 40]), st.sampled_from([1, 5, 32, 33, 300, 600])),
    spans=st.sampled_from([(8, 4, 2), (8, 1, 1), (1, 4, None), (4, 2, 1), (16, 2, 1)]),
    of_keys=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
@examples(10, deep=80)
def test_lists_are_what_the_tiles_say(batch, heads, group, extents, spans, of_keys, seed):
    rng = np.random.default_rng(seed)
    heads *= group
    own, walked, part = spans
    tiles = rng.choice([0, 1, 2], (batch, heads, *extents), p=[0.3, 0.1, 0.6]).astype(np.uint8)
    uniform = rng.random((batch, heads, -(-extents[0] // own), -(-extents[1] // walked)))
    uniform = np.repeat(np.repeat(uniform, own, 2), walked, 3)[..., : extents[0], : extents[1]]
    tiles[uniform < 0.5] = 2
    tiles[uniform < 0.25] = 0
    sizes = {"rows": own * TILE, "keys": walked * TILE, "part": part and part * TILE}
    given = tiles
    if of_keys:
        given = np.ascontiguousarray(tiles.swapaxes(2, 3))
        sizes |= {"rows": walked * TILE, "keys": own * TILE, "of_keys": True}
    found = find_lists(given, group, sizes)

    expected = lists_by_hand(tiles, own, walked, part or own)
    for matrix, rows in zip(found, expected, strict=True):
        for row, (partial, full) in zip(matrix, rows, strict=True):
            assert_array_equal(row[0], [len(partial), len(full)])
            items = row[LIST_HEAD:].tolist()
            assert items[: len(partial)] == list(map(list, partial))
            assert items[::-1][: len(full)] == list(map(list, full))

    # With masks of their own the heads of a group share an order; without, each has its own.
    shared = group if of_keys and heads > 1 else 1
    work = [[2 * len(partial) + len(full) for partial, full in rows] for rows in expected]
    of_groups = np.reshape(work, (batch * heads // shared, shared, -1)).sum(1)
    orders = found[::shared, :, 1, 0].astype(int)
    for order, works in zip(orders, of_groups, strict=True):
        assert_array_equal(order, np.argsort(-works, kind="stable"))


@pytest.mark.parametrize("window", [(None, None), (100, 0), (None, 0)])
def test_heads_with_lists_are_interleaved(window):
    problem = causal_problem(2048, 32, 128)
    problem.window, problem.layouts.block_mask = window, True
    assert interleaving(problem, DEVICES["T4"]).kv_heads == 8
