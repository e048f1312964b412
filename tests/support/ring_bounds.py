"""How far a ring may be from one device: derived bounds.

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

from cupyattn import AttentionGrads, reference
from cupyattn.distributed.placement import Placement
from cupyattn.reference.attention.bounds import U32, precision_of

TILE_K = 16  # the shortest of any kernel: a bound for all


def _forward_bounds(arrays: dict[str, np.ndarray], ranks: int, dtype: str, options: Any) -> Any:
    q, k, v = (arrays[name] for name in "qkv")
    out, lse = reference.attention_bound(q, k, v, dtype=dtype, tile_k=TILE_K, **options)
    of_values, expected_lse = reference.attention(q, k, np.abs(v.astype(np.float64)), **options)
    u_out, tiny = precision_of(dtype).u_out, precision_of(dtype).tiny_out
    merges = 2 * ranks
    wide = np.swapaxes(lse, 1, 2)[..., None]
    out = out + (u_out + 4 * wide + 8 * merges * U32) * of_values + merges * tiny
    return out, lse + merges * U32 * (4 + np.abs(expected_lse))


def _shares(
    given: list[np.ndarray], pieces: list[range], options: dict[str, Any]
) -> dict[str, np.ndarray]:
    """The sums of absolute values of all shares: dq by pieces of keys, dk and dv of queries."""
    dout, q, k, v, out, lse = given
    others = {name: x for name, x in options.items() if name not in ("causal", "window_size")}
    left, right = options.get("window_size", (None, None))
    right = 0 if options.get("causal") else right
    places = np.arange(q.shape[1])
    apart = places[None, :] - places[:, None]
    seen = np.ones(apart.shape, bool)
    if left is not None:
        seen &= apart >= -left
    if right is not None:
        seen &= apart <= right
    sums = {"dq": np.zeros(q.shape), "dk": np.zeros(k.shape), "dv": np.zeros(v.shape)}
    for piece in pieces:
        rows = np.asarray(piece)
        start = piece.start if "dropout_p" in options else 0
        of_keys = reference.attention_backward(
            dout, q, k[:, rows], v[:, rows], out, lse, mask=seen[:, rows],
            dropout_start=(0, 0, start), **others,
        )  # fmt: skip
        sums["dq"] += np.abs(of_keys.dq)
        of_queries = reference.attention_backward(
            dout[:, rows], q[:, rows], k, v, out[:, rows], lse[:, :, rows], mask=seen[rows],
            dropout_start=(0, start, 0), **others,
        )  # fmt: skip
        sums["dk"] += np.abs(of_queries.dk)
        sums["dv"] += np.abs(of_queries.dv)
    return sums


def ring_ratios(
    arrays: dict[str, np.ndarray],
    results: list[np.ndarray],
    ranks: int,
    placement: str,
    dtype: str,
    **options: Any,
) -> dict[str, float]:
    """The errors of out, lse, dq, dk and dv over their bounds; `arrays` are q, k, v and dout."""
    q, k, v, dout = arrays.values()
    out, lse, *grads = results
    exact = reference.attention(q, k, v, **options)
    limits = _forward_bounds(arrays, ranks, dtype, options)
    ratios = {
        name: reference.error_ratio(*each)
        for name, *each in zip(("out", "lse"), (out, lse), exact, limits, strict=True)
    }
    given = [dout, q, k, v, out, lse]
    expected: AttentionGrads = reference.attention_backward(*given, **options)
    bounds = reference.attention_backward_bound(*given, dtype=dtype, **options)
    u_out, tiny = precision_of(dtype).u_out, precision_of(dtype).tiny_out
    parts = 4 * ranks
    dealt = Placement(placement, ranks)
    pieces = [
        dealt.piece(number, q.shape[1]) for rank in range(ranks) for number in dealt.numbers(rank)
    ]
    shares = _shares(given, pieces, options)
    for name, found in zip(("dq", "dk", "dv"), grads, strict=True):
        rounding = (u_out + parts * U32) * shares[name] + parts * tiny
        limit = getattr(bounds, name) + rounding
        ratios[name] = reference.error_ratio(found, getattr(expected, name), limit)
    return ratios
