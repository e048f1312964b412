"""How far a ring may be from one device: derived bounds.

Beside one device's error a ring rounds the results of its parts to their dtype, and merges them in
float32. With P the softmax weights, parts weigh w_p = exp(lse_p - lse), so sum_p w_p |out_p| is at
most P|V|, and a part's rounding costs u_out P|V| in all. A weight errs by both lse, twice the
bound L of one, to first order; twice that again pays for what is of second order. Each merge adds a
few roundings of float32. Shares of gradients are rounded likewise: u_out times the sum of their
absolute values, which the reference computes part by part.

With rotary a rank computes with turned q and k, rounded, and turns gradients back in float32: a
pair's error becomes at most the norm of its errors. Expressions have no bounds: they say what
built-in options say, whose bounds they keep.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from support.devices import KERNELS
from support.ring import Case

import cupyattn
from cupyattn import AttentionGrads, reference
from cupyattn.distributed.placement import Placement
from cupyattn.ops.attention.bounds import ROTATION, pair_norms
from cupyattn.ops.rope.reference import pairs_of, rotate
from cupyattn.runtime.precision import U32, precision_of

TILE_K = 16  # the shortest of any kernel: a bound for all
Arrays = dict[str, np.ndarray]


class Held(NamedTuple):
    """A result, what it should be, and how far it may be from that."""

    found: np.ndarray
    expected: np.ndarray
    limit: np.ndarray

    @property
    def ratio(self) -> float:
        return reference.error_ratio(*self)


def ring_ratios(
    arrays: Arrays,
    results: list[np.ndarray],
    ranks: int,
    placement: str,
    dtype: str,
    **options: Any,
) -> dict[str, float]:
    """The errors of out, lse, dq, dk and dv over their bounds; `arrays` are q, k, v and dout."""
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), results, strict=True))
    held = _held(arrays, found, Placement(placement, ranks), dtype, options)
    return {name: each.ratio for name, each in held.items()}


def case_ratios(
    case: Case,
    out: np.ndarray,
    lse: np.ndarray,
    grads: AttentionGrads,
    dtype: str,
    *,
    side: Any = KERNELS,
    **options: Any,
) -> dict[str, float]:
    """The errors of all results of a case over their bounds; `options` in the place of its own.

    `side` is where it ran.
    """
    found = {"out": out, "lse": lse, **grads._asdict()}
    found = {name: x for name, x in found.items() if x is not None}
    options = options or case.options
    dealt = Placement(case.placement, case.ranks)
    held = []
    if case.cu_seqlens is None:
        held.append(_held(case.arrays, found, dealt, dtype, options, side))
    else:
        for b, (begin, end) in enumerate(pairwise(case.cu_seqlens.tolist())):
            if begin < end:
                parts = (_rows_of(x, slice(begin, end)) for x in (case.arrays, found))
                held.append(_held(*parts, dealt, dtype, _options_of(options, b, end - begin), side))
    ratios = {name: max(each[name].ratio for each in held) for name in held[0] if name != "dsinks"}
    if "dsinks" in held[0]:  # of all sequences
        expected = sum(each["dsinks"].expected for each in held)
        limit = sum(each["dsinks"].limit for each in held)
        ratios["dsinks"] = Held(grads.dsinks, expected, limit).ratio
    return ratios


def _rows_of(arrays: Arrays, rows: slice) -> Arrays:
    """Arrays of one packed sequence, as a batch of 1."""
    return {
        name: x
        if name == "dsinks"
        else x[None, :, rows]
        if name in ("lse", "dlse")
        else x[None, rows]
        for name, x in arrays.items()
    }


def _options_of(options: dict[str, Any], b: int, length: int) -> dict[str, Any]:
    """The options of one packed sequence."""
    of = dict(options)
    if "seqused_k" in of:
        of["seqused_k"] = of["seqused_k"][b : b + 1]
    if "mask" in of:
        of["mask"] = of["mask"][b : b + 1, :, :length, :length]
    if "dropout_p" in of:
        of["dropout_start"] = (b, 0, 0)
    return of


def _held(
    arrays: Arrays,
    found: Arrays,
    dealt: Placement,
    dtype: str,
    options: dict[str, Any],
    side: Any = KERNELS,
) -> dict[str, Held]:
    options = {**options, "q_offset": 0}
    rotary = options.pop("rotary", None)
    if rotary is not None:
        turned = {name: _turned(arrays[name], rotary, side) for name in "qk"}
        arrays = {**arrays, **turned}
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    exact = reference.attention(q, k, v, **options)
    limits = _forward_bounds(arrays, dealt.ranks, dtype, options)
    held = {
        name: Held(found[name], *each)
        for name, *each in zip(("out", "lse"), exact, limits, strict=True)
    }
    given = [dout, q, k, v, found["out"], found["lse"]]
    dlse = arrays.get("dlse")
    expected = reference.attention_backward(*given, dlse=dlse, **options)
    bounds = reference.attention_backward_bound(*given, dtype=dtype, dlse=dlse, **options)
    u_out, tiny = precision_of(dtype).u_out, precision_of(dtype).tiny_out
    parts = 4 * dealt.ranks
    pieces = [
        dealt.piece(number, q.shape[1])
        for rank in range(dealt.ranks)
        for number in dealt.numbers(rank)
    ]
    shares = _shares(given, dlse, pieces, options)
    for name, share in shares.items():
        of_dtype = U32 if name == "dsinks" else u_out
        limit = getattr(bounds, name) + (of_dtype + parts * U32) * share + parts * tiny
        held[name] = Held(found[name], getattr(expected, name), limit)
    if "bias" in options:  # each of its items is computed in one call
        held["dbias"] = Held(found["dbias"], expected.dbias, bounds.dbias)
    if rotary is not None:
        for name in ("dq", "dk"):
            held[name] = _turned_back(held[name], rotary, dtype)
    return held


def _turned(x: np.ndarray, rotary: Any, side: Any) -> np.ndarray:
    """Queries or keys as ranks turn them."""
    with side.running():
        cos, sin = (side.put(table) for table in rotary[:2])
        return side.get(cupyattn.rope(side.put(x), cos, sin, interleaved=rotary[2]))


def _turned_back(held: Held, rotary: Any, dtype: str) -> Held:
    cos, sin, interleaved = rotary
    c, s = (table[: held.found.shape[1], None] for table in (cos, sin))
    expected = rotate(held.expected, c, -s, interleaved=interleaved)
    pairs = pairs_of(cos.shape[1], interleaved=interleaved)
    store = precision_of(dtype).store(expected)
    limit = pair_norms(held.limit, pairs) + ROTATION * pair_norms(expected, pairs) + store
    return Held(held.found, expected, limit)


def _forward_bounds(arrays: Arrays, ranks: int, dtype: str, options: Any) -> Any:
    q, k, v = (arrays[name] for name in "qkv")
    out, lse = reference.attention_bound(q, k, v, dtype=dtype, tile_k=TILE_K, **options)
    of_values, expected_lse = reference.attention(q, k, np.abs(v.astype(np.float64)), **options)
    u_out, tiny = precision_of(dtype).u_out, precision_of(dtype).tiny_out
    merges = 2 * ranks
    wide = np.swapaxes(lse, 1, 2)[..., None]
    out = out + (u_out + 4 * wide + 8 * merges * U32) * of_values + merges * tiny
    size = np.where(np.isfinite(expected_lse), np.abs(expected_lse), 0.0)
    return out, lse + merges * U32 * (4 + size)


_PLACED = ("causal", "window_size", "mask", "seqused_k", "bias", "q_offset", "dropout_start")
"""The options of the whole that a part has otherwise."""


def _shares(
    given: list[np.ndarray], dlse: Any, pieces: list[range], options: dict[str, Any]
) -> Arrays:
    """The sums of absolute values of all shares: dq by pieces of keys, the others of queries."""
    dout, q, k, v, out, lse = given
    seen = _seen(q, k, options)
    bias = options.get("bias")
    bias = None if bias is None else np.broadcast_to(bias, seen.shape)
    others = {name: x for name, x in options.items() if name not in _PLACED}
    names = ["dq", "dk", "dv"] + ["dsinks"] * ("sinks" in options)
    like = {"dq": q, "dk": k, "dv": v, "dsinks": options.get("sinks")}
    b = options.get("dropout_start", (0,))[0]
    sums = {name: np.zeros(like[name].shape) for name in names}
    for piece in pieces:
        rows = np.asarray(piece)
        start = piece.start if piece.step == 1 else 0  # nothing else of striped has a place
        of_keys = reference.attention_backward(
            dout, q, k[:, rows], v[:, rows], out, lse, dlse=dlse, mask=seen[..., rows],
            bias=None if bias is None else bias[..., rows], q_offset=-start,
            dropout_start=(b, 0, start), **others,
        )  # fmt: skip
        sums["dq"] += np.abs(of_keys.dq)
        of_queries = reference.attention_backward(
            dout[:, rows], q[:, rows], k, v, out[:, rows], lse[:, :, rows],
            dlse=None if dlse is None else dlse[:, :, rows], mask=seen[..., rows, :],
            bias=None if bias is None else bias[..., rows, :], q_offset=start,
            dropout_start=(b, start, 0), **others,
        )  # fmt: skip
        for name in names[1:]:
            sums[name] += np.abs(getattr(of_queries, name))
    return sums


def _seen(q: np.ndarray, k: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """Which keys each query sees, (B, H, S, S)."""
    batch, tokens, heads, _ = q.shape
    left, right = options.get("window_size", (None, None))
    right = 0 if options.get("causal") else right
    places = np.arange(tokens)
    apart = places[None, :] - places[:, None]
    seen = np.ones((batch, heads, *apart.shape), bool)
    if left is not None:
        seen &= apart >= -left
    if right is not None:
        seen &= apart <= right
    if "mask" in options:
        seen &= options["mask"]
    if "seqused_k" in options:
        seen &= places < np.reshape(options["seqused_k"], (-1, 1, 1, 1))
    return seen
