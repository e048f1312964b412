"""Attention on tensor cores, forward and backward, with every check on, against float64."""

import re
from typing import Any

import numpy as np
import pytest
from support.ptx import compile_module, compile_text
from support.search import mostly_deep

from cupyattn import emulator
from cupyattn.emulator import Argument, Report, Struct

pytestmark = pytest.mark.nvrtc

D, TILE = 64, 64
TILE_BYTES = TILE * (D + 8) * 2
PARAMS = np.dtype(
    [(name, "u8") for name in ("q", "k", "v", "out", "dout", "lse", "delta", "dq", "o", "dk", "dv")]
    + [("queries", "i4"), ("keys", "i4"), ("scale", "f4"), ("causal", "i4")],
    align=True,
)


def reference(q: Any, k: Any, v: Any, causal: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return output, log-sum-exp and probabilities in float64."""
    q, k, v = (x.astype("f8") for x in (q, k, v))
    queries, keys = q.shape[1], k.shape[1]
    scores = q @ k.swapaxes(1, 2) * D**-0.5
    if causal:
        seen = np.arange(keys) <= np.arange(queries)[:, None] + keys - queries
        scores = np.where(seen, scores, -np.inf)
    lse = np.logaddexp.reduce(scores, axis=2)
    p = np.exp(scores - lse[..., None])
    return p @ v, lse, p


def problem(
    heads: int, queries: int, keys: int, seed: int = 5
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [(heads, queries, D), (heads, keys, D), (heads, keys, D), (heads, queries, D)]
    q, k, v, dout = (rng.standard_normal(shape).astype("f2") for shape in shapes)
    return q, k, v, dout


def launch(
    kernel: str, grid: tuple[int, int], tiles: int, fields: dict[str, Any], **options: Any
) -> None:
    emulator.launch(
        compile_module("attention.cu"), kernel, grid, 128, [Struct(PARAMS, fields)],
        shared_bytes=tiles * TILE_BYTES, **options,
    )  # fmt: skip


def const(**arrays: np.ndarray) -> dict[str, Any]:
    return {name: Argument(array, name, const=True) for name, array in arrays.items()}


SHAPES = [(2, 1, 1), (1, 70, 131), (3, 65, 65), (1, 64, 64), (2, 128, 128), (70, 17, 33)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "queries", "keys"), mostly_deep(SHAPES, SHAPES[:3]))
def test_forward_and_backward(heads: int, queries: int, keys: int, causal: bool) -> None:
    q, k, v, dout = problem(heads, queries, keys)
    common = {"queries": queries, "keys": keys, "scale": D**-0.5, "causal": causal}
    out, lse = np.zeros_like(q), np.zeros((heads, queries), "f4")
    query_tiles, key_tiles = -(-queries // TILE), -(-keys // TILE)
    launch("attention_forward", (query_tiles, heads), 4,
           {**const(q=q, k=k, v=v), "o": out, "lse": lse, **common})  # fmt: skip
    want, want_lse, p = reference(q, k, v, causal)
    np.testing.assert_allclose(lse, want_lse, atol=2e-6, rtol=2e-6)
    np.testing.assert_allclose(out, want, atol=2e-3, rtol=2e-3)

    delta = np.zeros((heads, queries), "f4")
    dq, dk, dv = np.zeros(q.shape, "f4"), np.zeros_like(k), np.zeros_like(v)
    launch("attention_delta", (-(-queries // 4), heads), 0,
           {**const(out=out, dout=dout), "delta": delta, **common})  # fmt: skip
    launch("attention_backward", (key_tiles, heads), 6,
           {**const(q=q, k=k, v=v, dout=dout, lse=lse, delta=delta),
            "dq": dq, "dk": dk, "dv": dv, **common})  # fmt: skip
    do = dout.astype("f8")
    ds = p * (do @ v.astype("f8").swapaxes(1, 2) - (do * want).sum(2, keepdims=True))
    gradients = {
        "dq": (dq, ds @ k.astype("f8") * D**-0.5),
        "dk": (dk, ds.swapaxes(1, 2) @ q.astype("f8") * D**-0.5),
        "dv": (dv, p.swapaxes(1, 2) @ do),
    }
    for name, (got, exact) in gradients.items():
        error = np.abs(got - exact).max()
        assert error <= 2e-3 * max(1.0, np.abs(exact).max()), (name, error)


def test_padded_tiles_have_no_bank_conflicts() -> None:
    q, k, v, _ = problem(2, 128, 128)
    report = Report()
    launch("attention_forward", (2, 2), 4,
           {"q": q, "k": k, "v": v, "o": np.zeros_like(q), "lse": np.zeros((2, 128), "f4"),
            "queries": 128, "keys": 128, "scale": 0.125}, report=report)  # fmt: skip
    ldmatrix = [a for a in report.accesses if a.instruction.root == "ldmatrix"]
    assert ldmatrix and all(a.ways == 1 for a in ldmatrix)
    tile_products = 2 * 2 * 2 * 4 * 2  # heads, query tiles, key tiles, warps, QK and PV
    assert report.instruction_mix["tensor"] == tile_products * 8 * 8
    loads = [a for a in report.accesses if a.space == "global" and not a.write]
    assert all(a.efficiency == 1 for a in loads)


@pytest.mark.parametrize("barrier", [0, 1, 2])
def test_every_barrier_of_the_forward_is_needed(barrier: int) -> None:
    """Take one __syncthreads out of the PTX: the race check must notice."""
    module = _without_barrier(barrier)
    q, k, v, _ = problem(1, 64, 192)
    fields = {"q": q, "k": k, "v": v, "o": np.zeros_like(q), "lse": np.zeros((1, 64), "f4"),
              "queries": 64, "keys": 192, "scale": 0.125}  # fmt: skip
    args = [Struct(PARAMS, fields)]
    with pytest.raises((emulator.SharedMemoryRaceError, emulator.UninitializedReadError)):
        emulator.launch(module, "attention_forward", (1, 1), 128, args, shared_bytes=4 * TILE_BYTES)


def _without_barrier(number: int) -> emulator.Module:
    text = compile_text("attention.cu")
    start = text.index(".entry attention_forward")
    barriers = list(re.finditer(r"bar\.(?:warp\.)?sync\s+-?\d+;", text[start:]))
    first, last = (start + at for at in barriers[number].span())
    return emulator.load(text[:first] + text[last:])
