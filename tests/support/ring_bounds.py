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


def _shares(given: list[np.ndarray], piece: int, options: Any) -> dict[str, np.ndarray]:
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


def ring_ratios(
    arrays: dict[str, np.ndarray],
    results: list[np.ndarray],
    ranks: int,
    dtype: str,
    piece: int,
    **options: Any,
) -> dict[str, float]:
    """The errors of out, lse, dq, dk and dv over their bounds.

    `arrays` are whole q, k, v and dout; pieces have `piece` tokens.
    """
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
    shares = _shares(given, piece, options)
    for name, found in zip(("dq", "dk", "dv"), grads, strict=True):
        rounding = (u_out + parts * U32) * shares[name] + parts * tiny
        limit = getattr(bounds, name) + rounding
        ratios[name] = reference.error_ratio(found, getattr(expected, name), limit)
    return ratios
