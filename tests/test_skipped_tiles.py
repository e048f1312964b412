"""Tiles in which no query sees a key are neither loaded nor multiplied.

Results would be right without that too: the emulator's counts tell. Of what a call that sees
everything does, a call that sees less does at most the share that follows from the tiles in the
tables. What a call without keys does, the query rows and their statistics, is left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import cupyattn
from cupyattn import reference
from cupyattn.emulator import Checks, Report
from cupyattn.kernels.configs import attention as forward
from cupyattn.kernels.configs import attention_backward as backward
from cupyattn.kernels.configs import attention_backward_f32 as backward_f32

pytestmark = pytest.mark.nvrtc

DIM = 64


class Tiles(NamedTuple):
    """A kernel's CTAs own rows or keys, and walk tiles of the other."""

    rows: int
    keys: int
    own_rows: bool


def tiles_of(kind: str, dtype: str) -> list[Tiles]:
    """The kernels of a call with scores in them, by the tables."""
    half = dtype == "float16"
    if kind == "forward":
        config = forward.flash_config if half else forward.flash_f32_config
        return [Tiles(config(DIM, DIM).tile_q, config(DIM, DIM).tile_k, own_rows=True)]
    if half:
        half_dkdv = backward.dkdv_config(DIM, DIM, kind == "one-pass")
        half_dq = backward.dq_config(DIM, DIM)
        dkdv = Tiles(half_dkdv.tile_q, half_dkdv.tile_keys, own_rows=False)
        dq = Tiles(half_dq.tile_rows, half_dq.tile_k, own_rows=True)
    else:
        float_dkdv = backward_f32.dkdv_config(DIM, DIM, forward.PLAIN)
        float_dq = backward_f32.dq_config(DIM, DIM, forward.PLAIN)
        dkdv = Tiles(float_dkdv.tile_q, float_dkdv.tile_k, own_rows=False)
        dq = Tiles(float_dq.tile_q, float_dq.tile_k, own_rows=True)
    return [dkdv] if kind == "one-pass" else [dkdv, dq]


def seen(length: int, options: dict[str, Any]) -> np.ndarray:
    """(queries, keys): who sees whom."""
    i, j = np.arange(length)[:, None], np.arange(length)
    used = options["seqused_k"][0]
    left, right = options.get("window_size", (length, length))
    right = 0 if options.get("causal") else right
    return (i - left <= j) & (j <= i + right) & (j < used)


def rows_to_load(sees: np.ndarray, tiles: Tiles) -> int:
    """Rows that a kernel's CTAs load: their own, and the tiles that some row of theirs sees."""
    length = len(sees)
    grid = sees.reshape(length // tiles.rows, tiles.rows, length // tiles.keys, tiles.keys)
    visits = grid.any((1, 3))
    if tiles.own_rows:
        return int(visits.sum()) * tiles.keys
    return int(visits.sum()) * tiles.rows + int(visits.any(0).sum()) * tiles.keys


def counts(kind: str, arrays: list[np.ndarray], options: dict[str, Any]) -> tuple[int, int]:
    """Bytes loaded from global memory, and products of tensor cores, or else of the FMA pipe."""
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


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("forward", "float16"),
        ("one-pass", "float16"),
        ("deterministic", "float16"),
        ("forward", "float32"),
        ("one-pass", "float32"),
        ("deterministic", "float32"),
    ],
)
def test_tiles_that_no_query_sees_are_skipped(kind: str, dtype: str):
    length = 512 if dtype == "float16" else 256
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, length, 1, DIM)).astype(dtype) for _ in range(4)]

    def used(keys: int) -> dict[str, Any]:
        return {"seqused_k": np.array([keys], np.int32)}

    def to_load(options: dict[str, Any]) -> int:
        sees = seen(length, options)
        return sum(rows_to_load(sees, tiles) for tiles in tiles_of(kind, dtype))

    everything = used(length)
    without_keys = counts(kind, arrays, used(0))
    whole = counts(kind, arrays, everything)
    for options in (
        {**everything, "causal": True},
        {**everything, "window_size": (length // 8, 0)},
        used(length // 4),
    ):
        share = to_load(options) / to_load(everything)
        assert share < 0.85, "the problem is too small for the tiles"
        part = counts(kind, arrays, options)
        for name, base, some, every in zip(
            ("loads", "products"), without_keys, part, whole, strict=True
        ):
            assert some - base <= (share + 0.01) * (every - base), (name, options)
