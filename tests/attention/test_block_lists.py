"""The lists of a block mask's tiles that kernels walk: what stands in them, and in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS
from support.grid_order import CARDS, causal_problem
from support.search import examples

from cupyattn.arrays import adopt, contiguous
from cupyattn.functional.backend import device_of
from cupyattn.kernels.configs.attention.block_mask import LIST_HEAD, TILE
from cupyattn.ops.attention.block_mask import block_lists
from cupyattn.ops.attention.grid_order import turns
from cupyattn.ops.attention.modifiers import BLOCK_MASK
from cupyattn.ops.plan import Output, Plan, run

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]


def find_lists(tiles: np.ndarray, group: int, sizes: dict[str, Any]) -> np.ndarray:
    """(matrices, owned tiles, items, 2), as the kernels write them."""
    layout = contiguous(tiles.shape, tiles.dtype)
    heads = tiles.shape[1] if tiles.shape[1] > 1 else 4 * group
    problem: Any = SimpleNamespace(
        layouts={BLOCK_MASK: layout}, heads=heads, kv_heads=heads // group
    )
    planned = block_lists(problem, "lists", **sizes)
    output = Output((planned.scratch["lists"],), np.dtype(np.uint32))
    operands = adopt({BLOCK_MASK: KERNELS.put(tiles)})
    device = device_of(operands)
    assert device is not None
    found = run(device, Plan(planned.steps, (("lists", output),)), operands)["lists"]
    spans = [sizes["rows"] // TILE, sizes["keys"] // TILE]
    own, walked = (-(-n // span) for n, span in zip(tiles.shape[2:], spans, strict=True))
    if sizes.get("of_keys"):
        own, walked = walked, own
    return KERNELS.get(found).reshape(-1, own, LIST_HEAD + walked, 2)


def lists_by_hand(tiles: np.ndarray, own: int, walked: int, part: int) -> list[list[Any]]:
    """Of each matrix and owned tile the partial and the full tiles, each with its parts' states."""
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


@given(
    batch=st.integers(1, 2), heads=st.integers(1, 4), group=st.sampled_from([1, 2]),
    extents=st.tuples(st.sampled_from([1, 7, 8, 9, 40]), st.sampled_from([1, 5, 32, 33, 300, 600])),
    spans=st.sampled_from([(8, 4, 2), (8, 1, 1), (1, 4, None), (4, 2, 1), (16, 2, 1)]),
    of_keys=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
@examples(17, deep=80)
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
def test_heads_with_lists_take_turns(window):
    problem = causal_problem(2048, 32, 128)
    problem.window, problem.layouts = window, {BLOCK_MASK: None}
    assert turns(problem, CARDS["T4"]).kv_heads == 8
