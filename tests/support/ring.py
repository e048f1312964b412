"""Ring attention compared with one device: whole arrays, results of ranks, and derived bounds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from support.devices import KERNELS, dtype_of

import cupyattn
from cupyattn import (
    AttentionGrads,
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    reference,
)
from cupyattn.distributed import ring_attention, ring_attention_backward, run, shard, unshard
from cupyattn.distributed.placement import Placement
from cupyattn.ops.attention.bounds import ROTATION, pair_norms
from cupyattn.ops.rope.reference import pairs_of, rotate
from cupyattn.runtime.precision import U32, precision_of

CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # of float64: sums of up to 300 terms in other orders


class Case(NamedTuple):
    """Whole arrays, and how ranks hold them."""

    ranks: int
    placement: str
    arrays: dict[str, Any]
    options: dict[str, Any]
    cu_seqlens: Any = None

    def __repr__(self) -> str:
        shapes = {name: array.shape for name, array in self.arrays.items()}
        return f"Case({self.ranks}, {self.placement}, {shapes}, {self.options}, {self.cu_seqlens})"

    @property
    def packed(self) -> dict[str, Any]:
        return {} if self.cu_seqlens is None else {"cu_seqlens": self.cu_seqlens}

    def options_of(self, rank: int) -> dict[str, Any]:
        """Return the options of a rank: of masks and biases the rows of its queries."""
        cut = {
            name: shard(x, rank, self.ranks, placement=self.placement, axis=-2)
            for name, x in self.options.items()
            if name in ("mask", "bias") and x.ndim > 1 and x.shape[-2] > 1
        }
        return {**self.options, **cut}

    def shard(self, name: str, rank: int) -> Any:
        """A rank's part of an array."""
        axis = None
        if name in ("lse", "dlse"):
            axis = 2 if self.cu_seqlens is None else 1
        x = self.arrays[name]
        return shard(x, rank, self.ranks, placement=self.placement, axis=axis, **self.packed)

    def unshard(self, shards: Any, *, of_rows: bool = False) -> Any:
        axis = None
        if of_rows:
            axis = 2 if self.cu_seqlens is None else 1
        return unshard(list(shards), placement=self.placement, axis=axis, **self.packed)


def case(
    ranks: int,
    placement: str,
    size: int = 3,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 6),
    dtype: str = "float64",
    batch: int = 2,
    draw: int = 0,
    sizes: tuple[int, ...] | None = None,
    **options: Any,
) -> Case:
    """Draw the arrays: `size` tokens a piece, or packed sequences of `sizes` a piece."""
    rng = np.random.default_rng(draw)
    unit = Placement(placement, ranks).pieces * ranks
    h, g = heads
    d, dv = dims
    bounds = None
    if sizes is None:
        lead: tuple[int, ...] = (batch, size * unit)
    else:
        bounds = np.concatenate([[0], np.cumsum(np.array(sizes) * unit)])
        lead = (int(bounds[-1]),)
    shapes = {"q": (*lead, h, d), "k": (*lead, g, d), "v": (*lead, g, dv), "dout": (*lead, h, dv)}
    arrays = {
        name: rng.standard_normal(shape).astype(dtype_of(dtype)) for name, shape in shapes.items()
    }
    exact = "float64" if dtype == "float64" else "float32"
    arrays["dlse"] = rng.standard_normal((*lead[:-1], h, lead[-1])).astype(exact)
    return Case(ranks, placement, arrays, options, bounds)


def one_device(case: Case) -> tuple[Any, Any, AttentionGrads]:
    """The results of one call, on all tokens."""
    arrays, options = case.arrays, case.options
    inputs = [arrays[name] for name in "qkv"]
    options = {**options, "q_offset": 0}
    lengths: list[Any] = []
    forward, backward = attention, attention_backward
    if case.cu_seqlens is not None:
        longest = int(np.diff(case.cu_seqlens).max(initial=0))
        lengths = [case.cu_seqlens, case.cu_seqlens, longest, longest]
        forward, backward = attention_varlen, attention_varlen_backward
    out, lse = forward(*inputs, *lengths, return_lse=True, **options)
    grads = backward(arrays["dout"], *inputs, out, lse, *lengths, dlse=arrays["dlse"], **options)
    return out, lse, grads


def ring(case: Case, group: Any) -> tuple[Any, Any, AttentionGrads]:
    """Return the results of one rank."""
    q, k, v, dout, dlse = (case.shard(name, group.rank) for name in ("q", "k", "v", "dout", "dlse"))
    given = {"group": group, "placement": case.placement, **case.packed}
    given |= case.options_of(group.rank)
    out, lse = ring_attention(q, k, v, return_lse=True, **given)
    grads = ring_attention_backward(dout, q, k, v, out, lse, dlse=dlse, **given)
    return out, lse, grads


def on_ranks(case: Case) -> tuple[Any, Any, AttentionGrads]:
    """The results of all ranks, joined."""
    return whole(case, run(lambda group: ring(case, group), case.ranks, timeout=60))


def whole(case: Case, results: list[Any]) -> tuple[Any, Any, AttentionGrads]:
    """Join the results of ranks: out, lse and gradients of each."""
    outs, lses, grads = zip(*results, strict=True)
    of_tokens = {
        name: case.unshard([getattr(g, name) for g in grads]) for name in ("dq", "dk", "dv")
    }
    of_all = {"dsinks": grads[0].dsinks, "dbias": grads[0].dbias}
    for each in grads[1:]:  # the gradient of sinks is that of all ranks, on each
        np.testing.assert_array_equal(each.dsinks, grads[0].dsinks)
    bias = case.options.get("bias")
    if bias is not None and bias.ndim > 1 and bias.shape[-2] > 1:
        of_rows = [each.dbias for each in grads]
        of_all["dbias"] = unshard(of_rows, placement=case.placement, axis=-2)
    else:  # so is that of a bias that is the same for all queries
        for each in grads[1:]:
            np.testing.assert_array_equal(each.dbias, grads[0].dbias)
    return (
        case.unshard(outs),
        case.unshard(lses, of_rows=True),
        AttentionGrads(**of_tokens, **of_all),
    )


def assert_same(case: Case) -> None:
    """Everything is what one device gives."""
    out, lse, grads = on_ranks(case)
    expected_out, expected_lse, expected = one_device(case)
    np.testing.assert_allclose(out, expected_out, **CLOSE)
    np.testing.assert_allclose(lse, expected_lse, **CLOSE)
    for name in AttentionGrads._fields:
        if getattr(expected, name) is not None:
            np.testing.assert_allclose(
                getattr(grads, name), getattr(expected, name), **CLOSE, err_msg=name
            )


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
    """Return queries or keys as ranks rotate them."""
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
