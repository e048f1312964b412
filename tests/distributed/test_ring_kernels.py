"""Ring attention on the kernels, the GPU's or the emulator's, within derived bounds of one device.

Beside one device's error a ring rounds the results of its parts to their dtype, and merges them in
float32. With P the softmax weights, parts weigh w_p = exp(lse_p - lse), so sum_p w_p |out_p| is at
most P|V|, and a part's rounding costs u_out P|V| in all. A weight errs by both lse, twice the
bound L of one, to first order; twice that again pays for what is of second order. Each merge adds a
few roundings of float32. Shares of gradients are rounded likewise: u_out times the sum of their
absolute values, which the reference computes part by part.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.devices import KERNELS
from support.dtypes import dtype_of

from cupyattn import reference
from cupyattn.distributed import ring_attention, ring_attention_backward, run, shard, unshard
from cupyattn.reference.attention.bounds import U32, precision_of

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

TILE_K = 16  # the shortest of any kernel: a bound for all

CASES: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "causal": (2, "zigzag", "float16", {"causal": True}),
    "three ranks in float32": (3, "zigzag", "float32", {"causal": True}),
    "a window": (3, "contiguous", "float16", {"window_size": (20, 3)}),
    "striped": (2, "striped", "float16", {"causal": True, "softcap": 2.0}),
    "all keys": (2, "contiguous", "bfloat16", {"softmax_scale": 0.3}),
    "dropout": (2, "zigzag", "float16", {"causal": True, "dropout_p": 0.3, "seed": 7}),
}


def drawn(name: str) -> tuple[dict[str, np.ndarray], int, str, dict[str, Any]]:
    ranks, placement, dtype, options = CASES[name]
    rng = np.random.default_rng(len(name))
    tokens = 32 * ranks * (2 if placement == "zigzag" else 1)
    heads = {"q": 2, "k": 1, "v": 1, "dout": 2}
    arrays = {
        array: rng.standard_normal((1, tokens, count, 24)).astype(dtype_of(dtype))
        for array, count in heads.items()
    }
    return arrays, ranks, placement, {"dtype": dtype, **options}


def results(arrays: dict[str, np.ndarray], ranks: int, placement: str, **options: Any) -> Any:
    """out, lse, dq, dk and dv of all ranks, put together."""

    def of_rank(group: Any) -> Any:
        q, k, v, dout = (
            KERNELS.put(shard(x, group.rank, ranks, placement=placement)) for x in arrays.values()
        )
        given = {"group": group, "placement": placement, **options}
        out, lse = ring_attention(q, k, v, return_lse=True, **given)
        grads = ring_attention_backward(dout, q, k, v, out, lse, **given)
        return [KERNELS.get(x) for x in (out, lse, grads.dq, grads.dk, grads.dv)]

    parts = zip(*run(of_rank, ranks, timeout=120), strict=True)
    return [
        unshard(list(part), placement=placement, axis=2 if number == 1 else 1)
        for number, part in enumerate(parts)
    ]


def forward_bounds(arrays: dict[str, np.ndarray], ranks: int, dtype: str, options: Any) -> Any:
    q, k, v = (arrays[name] for name in "qkv")
    out, lse = reference.attention_bound(q, k, v, dtype=dtype, tile_k=TILE_K, **options)
    of_values, expected_lse = reference.attention(q, k, np.abs(v.astype(np.float64)), **options)
    u_out, tiny = precision_of(dtype).u_out, precision_of(dtype).tiny_out
    merges = 2 * ranks
    wide = np.swapaxes(lse, 1, 2)[..., None]
    out = out + (u_out + 4 * wide + 8 * merges * U32) * of_values + merges * tiny
    return out, lse + merges * U32 * (4 + np.abs(expected_lse))


def shares(given: list[np.ndarray], piece: int, options: Any) -> dict[str, np.ndarray]:
    """The sums of absolute values of all shares: dq by pieces of keys, dk and dv of queries."""
    dout, q, k, v, out, lse = given
    window = {name: options[name] for name in ("causal", "window_size") if name in options}
    others = {name: options[name] for name in options if name not in (*window, "dropout_p", "seed")}
    sums = {"dq": np.zeros(q.shape), "dk": np.zeros(k.shape), "dv": np.zeros(v.shape)}
    for start in range(0, q.shape[1], piece):
        rows = slice(start, start + piece)
        keep = {}
        if "dropout_p" in options:
            keep = {"dropout_p": options["dropout_p"], "seed": options["seed"]}
        by_keys = reference.attention_backward(
            dout, q, k[:, rows], v[:, rows], out, lse, q_offset=-start, **window, **others,
            **(keep and {**keep, "dropout_start": (0, 0, start)}),
        )  # fmt: skip
        sums["dq"] += np.abs(by_keys.dq)
        by_queries = reference.attention_backward(
            dout[:, rows], q[:, rows], k, v, out[:, rows], lse[:, :, rows], q_offset=start,
            **window, **others, **(keep and {**keep, "dropout_start": (0, start, 0)}),
        )  # fmt: skip
        sums["dk"] += np.abs(by_queries.dk)
        sums["dv"] += np.abs(by_queries.dv)
    return sums


@pytest.mark.parametrize("name", CASES)
def test_within_bounds_of_one_device(name):
    arrays, ranks, placement, options = drawn(name)
    dtype = options.pop("dtype")
    out, lse, *grads = results(arrays, ranks, placement, **options)
    q, k, v, dout = arrays.values()
    expected = reference.attention(q, k, v, **options)
    for found, exact, bound in zip(
        (out, lse), expected, forward_bounds(arrays, ranks, dtype, options), strict=True
    ):
        assert 0 < reference.error_ratio(found, exact, bound) <= 1

    given = [dout, q, k, v, out, lse]
    exact_grads = reference.attention_backward(*given, **options)
    bounds = reference.attention_backward_bound(*given, dtype=dtype, **options)
    u_out, tiny = precision_of(dtype).u_out, precision_of(dtype).tiny_out
    parts = 4 * ranks
    for field, found in zip(("dq", "dk", "dv"), grads, strict=True):
        rounding = (u_out + parts * U32) * shares(given, 32, options)[field] + parts * tiny
        ratio = reference.error_ratio(
            found, getattr(exact_grads, field), getattr(bounds, field) + rounding
        )
        assert ratio <= 1, field
