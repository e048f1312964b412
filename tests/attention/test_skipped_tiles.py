"""Tiles in which no query sees a key are neither loaded nor multiplied.

Results would be right without that too: the emulator's counts tell. Of what a call that sees
everything does, a call that sees less does at most the share that follows from the tiles in the
tables. What a call without keys does, the query rows and their statistics, is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.forward_runs import split
from support.search import mostly_deep

import cupyattn
from cupyattn import reference
from cupyattn.emulator import Checks, Report
from cupyattn.ops.attention.kernels.float32 import backward as backward_f32
from cupyattn.ops.attention.kernels.float32 import forward as forward_f32
from cupyattn.ops.attention.kernels.tensor_core import backward_dkdv, backward_dq
from cupyattn.ops.attention.kernels.tensor_core import forward as forward_rows

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("default_architecture")]

WIDE, NARROW = (64, 64), (24, 40)
# Square; fewer queries than keys and the other way round; ends within tiles. Halved for float32.
SHAPES = [(512, 512), (256, 640), (500, 333), (333, 500)]


@pytest.fixture(autouse=True)
def _whole_keys() -> Iterator[None]:
    """One CTA loops over all keys of a row: parts of them would each read Q again."""
    with split(1):
        yield


class Tiles(NamedTuple):
    """A kernel's CTAs own rows or keys, and loop over tiles of the other."""

    rows: int
    keys: int
    own_rows: bool
    products: int = 1
    """Matrix products for each tile of scores, relative to the other kernels of a call."""


def tiles_of(kind: str, dtype: str, dims: tuple[int, int]) -> list[Tiles]:
    """The kernels of a call with scores in them, by the tables."""
    half = dtype == "float16"
    if kind == "forward":
        row = (forward_rows if half else forward_f32).flash_row(75, *dims)
        return [Tiles(row.tile_q, row.tile_k, own_rows=True)]
    if half:
        half_dkdv = backward_dkdv.dkdv_row(75, *dims, kind == "one-pass")
        half_dq = backward_dq.dq_row(75, *dims)
        dkdv = Tiles(half_dkdv.tile_q, half_dkdv.tile_keys, own_rows=False, products=4)
        dq = Tiles(half_dq.tile_q, half_dq.tile_k, own_rows=True, products=3)
    else:
        float_dkdv = backward_f32.dkdv_row(75, *dims, forward_rows.PLAIN)
        float_dq = backward_f32.dq_row(75, *dims, forward_rows.PLAIN)
        dkdv = Tiles(float_dkdv.tile_q, float_dkdv.tile_k, own_rows=False, products=4)
        dq = Tiles(float_dq.tile_q, float_dq.tile_k, own_rows=True, products=3)
    return [dkdv] if kind == "one-pass" else [dkdv, dq]


def seen(sq: int, sk: int, options: dict[str, Any]) -> np.ndarray:
    """(queries, keys): who sees whom."""
    position, j = np.arange(sq)[:, None] + options["q_offset"], np.arange(sk)
    used = options["seqused_k"][0]
    left, right = options.get("window_size", (sq + sk, sq + sk))
    right = 0 if options.get("causal") else right
    return (position - left <= j) & (j <= position + right) & (j < used)


def visits(sees: np.ndarray, tiles: Tiles) -> np.ndarray:
    """(tiles of rows, tiles of keys): those in which some row sees a key."""
    short = [-extent % tile for extent, tile in zip(sees.shape, tiles[:2], strict=True)]
    whole = np.pad(sees, [(0, rest) for rest in short])
    rows, keys = whole.shape
    return whole.reshape(rows // tiles.rows, tiles.rows, keys // tiles.keys, tiles.keys).any((1, 3))


def rows_to_load(sees: np.ndarray, tiles: Tiles) -> int:
    """Rows that a kernel's CTAs load: their own, and the tiles that some row of theirs sees."""
    visited = visits(sees, tiles)
    if tiles.own_rows:
        return int(visited.sum()) * tiles.keys
    return int(visited.sum()) * tiles.rows + int(visited.any(0).sum()) * tiles.keys


def products(sees: np.ndarray, tiles: Tiles) -> int:
    """Multiplications of the tiles that some row sees."""
    return int(visits(sees, tiles).sum()) * tiles.rows * tiles.keys * tiles.products


def counts(kind: str, arrays: list[np.ndarray], options: dict[str, Any]) -> tuple[int, int]:
    """Bytes loaded from global memory, and products: of tensor cores in float16, otherwise FMAs."""
    dout, q, k, v = arrays
    exact = reference.attention(q, k, v, **options)
    out, lse = exact[0].astype(q.dtype), exact[1].astype(np.float32)
    report = Report()
    with cupyattn.backend("emulator", checks=Checks.none(), report=report):
        if kind == "forward":
            cupyattn.attention(q, k, v, **options)
        else:
            one_pass = kind == "one-pass"
            cupyattn.attention_backward(
                dout, q, k, v, out, lse, **options, deterministic=not one_pass
            )
    mix = report.instruction_mix
    return report.bytes_moved["global load"], mix.get("tensor" if q.dtype == "f2" else "fma", 0)


KINDS = ("forward", "one-pass", "deterministic")


@pytest.mark.parametrize(
    ("kind", "dtype", "dims", "shape"),
    mostly_deep(
        [
            *itertools.product(KINDS, ("float16",), [WIDE], SHAPES),
            *itertools.product(KINDS, ("float32",), [NARROW, WIDE], SHAPES[2:]),
        ],
        [
            *itertools.product(KINDS, ("float16",), [WIDE], [(256, 640)]),
            # It has the tile loops of both backwards.
            ("deterministic", "float32", NARROW, (500, 333)),
        ],
    ),
    ids=str,
)
def test_tiles_that_no_query_sees_are_skipped(kind, dtype, dims, shape):
    sq, sk = (extent if dtype == "float16" else extent // 2 + extent % 2 for extent in shape)
    rng = np.random.default_rng(0)
    head_dim, head_dim_v = dims
    sizes = (sq, head_dim_v), (sq, head_dim), (sk, head_dim), (sk, head_dim_v)
    arrays = [rng.standard_normal((1, n, 1, d)).astype(dtype) for n, d in sizes]

    ragged = any(extent % 64 for extent in (sq, sk))

    def used(number: int) -> dict[str, Any]:
        return {"seqused_k": np.array([number], np.int32), "q_offset": sk - sq}

    def expected(options: dict[str, Any]) -> list[int]:
        sees, kernels = seen(sq, sk, options), tiles_of(kind, dtype, dims)
        return [sum(count(sees, tiles) for tiles in kernels) for count in (rows_to_load, products)]

    def counted(options: dict[str, Any]) -> tuple[int, int]:
        """But for V, of which the backward in float16 looks at each row in use: how large it is."""
        loads, multiplied = counts(kind, arrays, options)
        if dtype == "float16" and kind != "forward":
            loads -= options["seqused_k"][0] * head_dim_v * arrays[-1].itemsize
        return loads, multiplied

    everything = used(sk)
    without_keys = counted(used(0))
    whole, all_expected = counted(everything), expected(everything)
    for options in (
        {**everything, "causal": True},
        {**everything, "window_size": (sq // 8, 0)},
        {**everything, "window_size": (0, sq // 8)},
        used(sk // 4),
    ):
        part = counted(options)
        for name, base, some, every, needed, of_all in zip(
            ("loads", "products"), without_keys, part, whole, expected(options), all_expected,
            strict=True,
        ):  # fmt: skip
            if name == "loads" and ragged:  # a tile's rows are not all there
                continue
            share = needed / of_all
            assert some - base <= (share + 0.01) * (every - base), (name, options, share)
