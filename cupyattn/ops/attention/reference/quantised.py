"""Attention over keys and values that are kept as integers: what the kernel and the format cost.

`key_centres` and `quantize_keys` define `cupyattn.QuantizedKeys`; the rest is about a KV cache.
Three bounds. `stored_attention_bound` and `dequantised_attention_bound` are the kernels', those
that decode and those of prompts: how far they may be from the reference on the same integers,
beyond what `bounds` says of keys and values that are floats. `quantisation_error` is the format's:
how far exact attention over what was stored may be from that over what was given. Letters as in
`bounds`; s_j and t_j are the scales of key and value j, c is `BIAS`.

Decoding, for one row (with queries of other dtypes than float16 c is 0, and 2**-126 takes the place
of 2**-24 max_j t_j):

    ds  = (D + 4) u32 |softmax_scale| max_j s_j sum_d |q_d| (|K_jd| + 2 c)
    |out - ref| <= 4 ds (P |V|) + 4 u32 (P |V|) + 2**-24 max_j t_j sum_j |V_j / t_j|
                   + (2 c (n + 8 T) + 2**11) u32 sum_j P_j t_j, of 4 bits and float16 alone
    |lse - ref| <= 2 ds

- On float16 tensor cores an integer of K counts from -c on, and c sum_d q_d is taken off its
  product: two sums of D terms whose sizes add up to |q| (|K| + 2 c). Scaling them rounds twice
  more.
- A weight times t_j is kept in float16, in units of a power of two that is at most twice max t_j.
  The row's largest weight is at least 1. So what a weight loses below 2**-14 of the unit is 2**-25
  of it; then it meets an integer. Its other roundings are those of any weight, and 2 u32 of the
  scaling. In bfloat16 and float32 a weight times t_j is flushed below 2**-126 alone.
- bfloat16 tensor cores multiply integers as they are: they fit its 8 significant bits.
- An integer of V of 4 bits counts from -c on too, and c sum_j P_j t_j is taken off at the end: each
  of the two sums over n keys, in T tiles of 16, errs by that much.
- Such an integer is as many 2**-24, a subnormal. 2**11 is for tensor cores that align the products
  of a step as if each were 2**-14, and cut off what is below 2 u32 of that, or 2**10 units of the
  largest weight. That is inferred from one figure: on an H200 a value of 0 next to one whose scale
  is 5,000 times as large was 3.2e-5 off, for 6e-7 by float32 sums (tests/attention/test_paged.py,
  2026-11-26). K has shown nothing of it.

Prompts: K and V become floats of the kernel's dtype first, off by r |K| + t and r |V| + t at most.

    ds  = |softmax_scale| max_j sum_d |q_d| (r |K_jd| + t)
    |out - ref| <= (4 ds + r) (P |V|) + t
    |lse - ref| <= 2 ds

- In float32 an integer times its scale is rounded once: r = u32, t = 2**-126.
- In float16 the scale is rounded first, times 64 or 4 and the integer by as much less. So r is
  2 u16 and u16**2 more; and where the one or the other is subnormal, t = (2 + 1) 2**-25.
- In bfloat16 the product of float32 is rounded: r = 2**-8 (1 + u32) + u32, t = 2**-126. Devices
  before sm_80 keep it in float32.

The format: with e_j a bound of the error of score j, P exact and p = exp(s) / sum exp(s) of the
quantised scores, p_j / P_j lies within exp(-e_j) / up and exp(e_j) / down, where up and down are
sum_j P_j exp(+-e_j), a sink among them with e = 0. Both weights add up to 1, so that with V* the
quantised values and any vector w, out* - out = sum_j p_j (V*_j - V_j) + sum_j (p_j - P_j) (V_j -
w); w is out. e_j = |softmax_scale| sum_d |q_d| |K*_jd - K_jd|, since capping scores has a slope of
at most 1.

Int8 keys (`cupyattn.QuantizedKeys`): a score is softmax_scale (a_i s_j n_ij + q_i c), with a_i and
s_j the scales of the codes of query i and key j, n_ij the product of the codes, an integer that
kernels form exactly, and c the centre. It is the product of (q^_i, q_i) and (k^_j, c), of 2 D
items (`quantised_operands`), so `bounds.attention_bound` of these holds: ds = (2 D + 2) u32 reach.
s_j keeps 22 bits, which changes it by 4 u32; it and a_i round the score once each, the scale in
base 2 twice: 8 u32 of the reach of q^ and k^, for D = 2 too less than the 2 ds of every bound.
The part of the centre is a float32 sum of D terms. `int8_attention_estimate` estimates how far this
is from attention of the q and k that were given.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyattn.ops.attention.reference.cache_formats import dequantise, quantisation_bound
from cupyattn.ops.attention.reference.dense import attention
from cupyattn.ops.attention.reference.scores import ScoreBlocks, probabilities
from cupyattn.runtime.outputs import widened
from cupyattn.runtime.precision import TINY32, U32, Float32, Float64, flushed

BIAS = {"int8": 128, "uint8": 8}
"""The number that is added to an integer of K on tensor cores."""
_OF_FLOATS = {
    "float16": (2.001 * 2.0**-11, 3 * 2.0**-25),
    "bfloat16": (1.001 * 2.0**-8, TINY32),
    "float32": (U32, TINY32),
}
"""The errors r and t of integers that become floats, by the dtype of queries."""
_ALIGNED = 2.0**11
"""The part of products with subnormal values that is cut off, in units of u32."""


def stored_attention_bound(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    k_scales: NDArray[Any],
    v_scales: NDArray[Any],
    /,
    **options: Any,
) -> tuple[Float64, Float64]:
    """Bound what integers add to `attention_bound` of the dequantised k and v.

    Parameters
    ----------
    q : (B, Sq, H, D)
        The kernel's precision follows from its dtype.
    k, v : (B, Sk, G, D) int8 or (B, Sk, G, D / 2) uint8, k_scales, v_scales : (B, Sk, G)
        Zeros after a sequence's end.
    **options
        See `scores.ScoreBlocks`.

    Returns
    -------
    out_bound : (B, Sq, H, D), lse_bound : (B, H, Sq)
    """
    group = q.shape[2] // max(k.shape[2], 1)
    half = q.dtype == np.float16
    ones = np.ones(k_scales.shape)
    integers = [np.abs(dequantise(stored, ones)) for stored in (k, v)]
    head_dim = q.shape[-1]
    scale = options.get("softmax_scale") or head_dim**-0.5
    largest = integers[0] + (2 * BIAS[k.dtype.name] if half else 0)
    reach = np.einsum("bihd,bjhd->bhij", np.abs(q).astype(np.float64), _heads(largest, group))
    reach = reach * _heads(k_scales, group, -1).transpose(0, 2, 1)[:, :, None]
    ds = (head_dim + 4) * U32 * abs(scale) * np.max(reach, axis=-1, initial=0.0)

    weighted, _ = attention(
        q, dequantise(k, k_scales), integers[1] * v_scales[..., None], **options
    )
    out_bound = (4 * np.swapaxes(ds, 1, 2)[..., None] + 4 * U32) * weighted
    if half:
        unit = np.max(v_scales, axis=1, initial=0.0)[..., None]
        out_bound += _heads(2.0**-24 * unit * integers[1].sum(axis=1), group)[:, None]
    else:
        out_bound += _heads(TINY32 * integers[1].sum(axis=1), group)[:, None]
    if half and v.dtype == np.uint8:
        count = k.shape[1]
        shares, _ = attention(q, dequantise(k, k_scales), v_scales[..., None], **options)
        roundings = count + 8 * -(-count // 16)
        out_bound += (2 * BIAS["uint8"] * roundings + _ALIGNED) * U32 * shares
    return out_bound, 2 * ds


def dequantised_attention_bound(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    k_scales: NDArray[Any],
    v_scales: NDArray[Any],
    /,
    **options: Any,
) -> tuple[Float64, Float64]:
    """Bound what integers that become floats first add to `attention_bound`.

    Parameters and results are those of `stored_attention_bound`.
    """
    group = q.shape[2] // max(k.shape[2], 1)
    relative, least = _OF_FLOATS[q.dtype.name]
    keys, values = dequantise(k, k_scales), dequantise(v, v_scales)
    off = _heads(relative * np.abs(keys) + least, group)
    reach = np.einsum("bihd,bjhd->bhij", np.abs(q).astype(np.float64), off)
    scale = options.get("softmax_scale") or q.shape[-1] ** -0.5
    ds = abs(scale) * np.max(reach, axis=-1, initial=0.0)
    weighted, _ = attention(q, keys, np.abs(values), **options)
    return (4 * np.swapaxes(ds, 1, 2)[..., None] + relative) * weighted + least, 2 * ds


def _heads(x: NDArray[Any], group: int, axis: int = -2) -> Float64:
    """Repeat the axis of key-value heads for each query head."""
    return np.repeat(x.astype(np.float64), group, axis=axis)


def quantisation_error(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], bits: int, /, **options: Any
) -> tuple[Float64, Float64]:
    """Bound how far exact attention over quantised k and v is from that over k and v.

    Parameters
    ----------
    q : (B, Sq, H, D), k, v : (B, Sk, G, D) floats
        What was given.
    bits : int
        Of an item: 8 or 4.
    **options
        See `scores.ScoreBlocks`; without rotary and dropout.

    Returns
    -------
    out_bound : (B, Sq, H, D), lse_bound : (B, H, Sq)
        It grows as exp of the largest score's error does: of 4 bits it is often a multiple of what
        is measured.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 64, 1, 32)) / 2
    >>> bounds = [quantisation_error(q, k, v, bits)[0].max() for bits in (8, 4)]
    >>> f"{bounds[0]:.3f} {bounds[1]:.3f}"
    '0.017 0.412'
    """
    out, lse = attention(q, k, v, **options)
    off_k, off_v = (quantisation_bound(x, bits)[0] for x in (k, v))
    blocks = ScoreBlocks(q, k, v, **options)
    out_bound, lse_bound = np.zeros(out.shape), np.zeros(lse.shape)
    for block in blocks:
        p = probabilities(block.scores, lse[block.at])
        e = abs(blocks.scale) * np.abs(block.q) @ off_k[block.b, block.keys, block.g].T
        rest = 1 - p.sum(axis=-1, keepdims=True) if blocks.sinks is not None else 0.0
        up = (p * np.exp(e)).sum(axis=-1, keepdims=True) + rest
        down = (p * np.exp(-e)).sum(axis=-1, keepdims=True) + rest
        seen = np.isfinite(lse[block.at])[:, None]
        up, down = np.where(seen, up, 1.0), np.where(seen, down, 1.0)
        change = p * np.maximum(np.exp(e) / down - 1, 1 - np.exp(-e) / up)
        row = block.rows_of(out)
        bound = (p * np.exp(e) / down) @ off_v[block.b, block.keys, block.g]
        for i in range(len(row)):  # a row at a time: (keys, D)
            bound[i] += change[i] @ np.abs(block.v - row[i])
        if blocks.sinks is not None:
            bound += rest * np.maximum(1 / down - 1, 1 - 1 / up) * np.abs(row)
        out_bound[block.b, block.rows, block.h] = bound
        lse_bound[block.at] = np.maximum(np.log(up), -np.log(down))[:, 0]
    return out_bound, lse_bound


SAMPLES = 256
"""The most keys that a computed centre is the mean of (kSamples in key_centres.cu)."""
PARTS = 32
"""Sums of samples that are added up at the end (kParts in key_centres.cu)."""
_ADDED = 4  # neighbouring parts, which one warp has
_LEAST_ABSMAX = np.float32(2.0**-100)
_STEPS = np.float32(127)


def key_centres(
    k: NDArray[Any],
    cu_seqlens: NDArray[Any] | None = None,
    seqused_k: NDArray[Any] | None = None,
) -> Float32:
    """Return the centre of each sequence, as `cupyattn.quantize_keys` computes it, bit by bit.

    Parameters
    ----------
    k : (B, S, G, D), or (total, G, D) packed or of one sequence
    cu_seqlens : (sequences + 1,), optional
    seqused_k : (B,) or (sequences,), optional
        The keys in use of each sequence: its first ones.

    Returns
    -------
    (B, G, D), (sequences, G, D), or (G, D) of one sequence without a batch axis

    Examples
    --------
    >>> key_centres(np.float32([1, 2, 6, np.inf]).reshape(4, 1, 1))
    array([[2.25]], dtype=float32)
    """
    if k.ndim == 4:
        parts = [*k]
    elif cu_seqlens is None:
        parts = [k]
    else:
        bounds = np.clip(cu_seqlens, 0, len(k))
        parts = [k[begin:end] for begin, end in pairwise(bounds)]
    if seqused_k is not None:
        parts = [part[:used] for part, used in zip(parts, seqused_k.clip(0), strict=True)]
    if k.ndim == 3 and cu_seqlens is None:
        return _centre(parts[0])
    return np.array([_centre(part) for part in parts], np.float32).reshape(
        len(parts), *k.shape[-2:]
    )


def _centre(k: NDArray[Any]) -> Float32:
    """Return the mean of every n-th key of a sequence (S, G, D), in the kernel's order."""
    step = max(1, -(-len(k) // SAMPLES))
    samples = flushed(widened(k[::step]))
    samples = np.where(np.isfinite(samples), samples, np.float32(0))
    sums = np.zeros((PARTS, *k.shape[1:]), np.float32)
    with np.errstate(all="ignore"):
        for first in range(0, len(samples), PARTS):
            part = samples[first : first + PARTS]
            sums[: len(part)] = flushed(sums[: len(part)] + part)
        while len(sums) > PARTS // _ADDED:
            sums = flushed(sums[0::2] + sums[1::2])
        total = sums[0]
        for each in sums[1:]:
            total = flushed(total + each)
        mean = flushed(total / np.float32(max(len(samples), 1)))
        return np.where(np.isfinite(mean), mean, np.float32(0))


def _sequences(total: int, cu_seqlens: NDArray[Any]) -> NDArray[Any]:
    """Return the sequence of each packed row; rows of none belong to the nearest."""
    begins = np.clip(cu_seqlens[:-1], 0, total)
    return np.maximum(np.searchsorted(begins, np.arange(total), side="right") - 1, 0)


def key_positions(shape: tuple[int, ...], cu_seqlens: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return the place of each key in its sequence, (S,) or (total,).

    Examples
    --------
    >>> key_positions((5, 2, 8), np.array([0, 2, 5]))
    array([0, 1, 0, 1, 2])
    """
    places = np.arange(shape[-3])
    if cu_seqlens is None or not len(places):
        return places
    return places - np.clip(cu_seqlens, 0, len(places))[_sequences(len(places), cu_seqlens)]


def quantize_keys(
    k: NDArray[Any], centre: Float32, cu_seqlens: NDArray[Any] | None = None
) -> tuple[NDArray[np.int8], Float32]:
    """Return the codes and scales of keys, as `cupyattn.quantize_keys` defines them, bit by bit.

    Parameters
    ----------
    k : (B, S, G, D) or (total, G, D)
    centre : (G, D), (B, G, D), or (sequences, G, D) with cu_seqlens
    cu_seqlens : (sequences + 1,), optional

    Examples
    --------
    >>> codes, scales = quantize_keys(np.float32([[[3, 1.5, -1, 1]]]), np.float32([[1, 1, 1, 1]]))
    >>> codes.tolist(), scales * 127
    ([[[127, 32, -127, 0]]], array([[2.]], dtype=float32))
    """
    centre = _centres_of_keys(centre, k, cu_seqlens)
    with np.errstate(all="ignore"):
        v = flushed(flushed(widened(k)) - flushed(centre))
        absmax = np.abs(v).max(axis=-1, initial=0)
        finite, small = np.isfinite(absmax), absmax < _LEAST_ABSMAX
        coded = finite & ~small
        usable = np.where(coded, absmax, np.float32(1))
        least = np.where(finite, np.float32(TINY32), np.float32(np.nan))
        scales = np.where(coded, usable / _STEPS, least).astype(np.float32)
        codes = np.rint(flushed(v * (_STEPS / usable)[..., None]))
        return np.where(coded[..., None], codes, 0).astype(np.int8, order="C"), scales


def _centres_of_keys(
    centre: NDArray[Any], k: NDArray[Any], cu_seqlens: NDArray[Any] | None
) -> NDArray[Any]:
    """Return centres as they broadcast to keys."""
    if centre.ndim == 2:
        return centre
    if cu_seqlens is None or k.ndim == 4:
        return centre[:, None]
    return centre[_sequences(len(k), cu_seqlens)]


def quantised_operands(
    q: NDArray[Any],
    codes: NDArray[np.int8],
    scales: NDArray[Any],
    centre: NDArray[Any],
    cu_seqlens: NDArray[Any] | None = None,
    *,
    exact_q: bool = False,
) -> tuple[Float64, Float64]:
    """Return q and k whose products are those of attention over int8 keys, of twice the head dim.

    With q^ the quantised q, and k - centre = k^: q^ k^ + q centre is the product of (q^, q) and
    (k^, centre).

    Parameters
    ----------
    q : (B, Sq, H, D), or (total_q, H, D) packed
    codes, scales, centre
        Of `cupyattn.QuantizedKeys`.
    cu_seqlens : (sequences + 1,), optional
        Of packed keys with a centre of each sequence.
    exact_q : bool
        Take q in the place of q^, as decoding does.

    Returns
    -------
    q : (B, Sq, H, 2 D), k : (B, Sk, G, 2 D), or packed
    """
    q_codes, q_scales = quantize_keys(q, np.zeros(q.shape[-2:], np.float32))
    with np.errstate(invalid="ignore"):
        rows = q.astype(np.float64) if exact_q else q_codes * q_scales.astype(np.float64)[..., None]
        keys = codes * scales.astype(np.float64)[..., None]
    of_keys = _centres_of_keys(centre, codes, cu_seqlens)
    both = np.broadcast_to(of_keys, keys.shape).astype(np.float64)
    return np.concatenate([rows, q], axis=-1), np.concatenate([keys, both], axis=-1)


SIGMAS = 6
"""Standard deviations in `int8_attention_estimate`."""


def int8_attention_estimate(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], centre: NDArray[Any], /, **options: Any
) -> tuple[Float64, Float64]:
    """Estimate how far exact attention over int8 q and k is from that over q and k.

    An estimate, no bound: SIGMAS standard deviations, where the error of each code is independent
    of the others and uniform in a step, and where errors of scores are small against 1. With
    k'_j = k_j - centre, a_i and b_j the steps of q_i and k'_j (their largest absolute value / 127),
    and w_j = p_j (v_j - out) for out, p_j for lse, to first order

        variance = softmax_scale**2 / 12 (a_i**2 |sum_j w_j k'_j|**2 + |q_i|**2 sum_j (w_j b_j)**2)

    The error of a code of q is the same for all keys, so that it is summed before it is squared.
    Where scores are capped, p_j is times the slope. The worst that errors of codes can do together
    is a large part of the range of v, and happens only if they conspire.

    Parameters
    ----------
    q : (B, Sq, H, D), k : (B, Sk, G, D), v : (B, Sk, G, Dv) floats
        The arrays of the call, finite.
    centre : (G, D) or (B, G, D)
        Of `cupyattn.QuantizedKeys`.
    **options
        See `scores.ScoreBlocks`; without rotary and dropout.

    Returns
    -------
    out_estimate : (B, Sq, H, Dv), lse_estimate : (B, H, Sq)

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 64, 1, 32)).astype(np.float16)
    >>> centre = key_centres(k)
    >>> estimate, _ = int8_attention_estimate(q, k, v, centre)
    >>> keys = *quantize_keys(k, centre), centre
    >>> exact, _ = attention(q, k, v)
    >>> found, _ = attention(*quantised_operands(q, *keys), v, softmax_scale=32**-0.5)
    >>> bool((np.abs(found - exact) <= estimate).all()), f"{estimate.mean():.3f}"
    (True, '0.008')
    """
    blocks, (out, lse) = ScoreBlocks(q, k, v, **options), attention(q, k, v, **options)
    of_keys = centre if centre.ndim == 2 else centre[:, None]
    offsets = np.asarray(k, np.float64) - of_keys
    variances = np.zeros(out.shape), np.zeros(lse.shape)
    for block in blocks:
        p = probabilities(block.scores, lse[block.at])
        p = p if block.slope is None else p * block.slope
        keys = offsets[block.b, block.keys, block.g]
        steps = np.abs(keys).max(axis=-1, initial=0.0) / 127
        row = block.rows_of(out)
        own, length = np.abs(block.q).max(axis=-1) / 127, (block.q**2).sum(axis=-1)
        of_out, of_lse = np.zeros(row.shape), np.zeros(len(row))
        for i in range(len(row)):  # a row at a time: (keys, Dv)
            weights = np.column_stack([p[i, :, None] * (block.v - row[i]), p[i]])
            common = ((weights.T @ keys) ** 2).sum(axis=-1)
            both = own[i] ** 2 * common + length[i] * steps**2 @ weights**2
            of_out[i], of_lse[i] = both[:-1], both[-1]
        variances[0][block.b, block.rows, block.h] = of_out
        variances[1][block.at] = of_lse
    factor = SIGMAS * abs(blocks.scale) / np.sqrt(12)
    return factor * np.sqrt(variances[0]), factor * np.sqrt(variances[1])


def quantized_keys_bound(k: NDArray[Any], scales: Float32) -> Float64:
    """Bound how far ``codes * scales + centre`` is from finite keys (..., D).

    The difference of key and centre, 127 / max, its product with a difference and the scale are
    rounded once each: 4 u32 of at most 127 scales. A code is off by half of one; a key whose
    differences are all below 2**-100 is off by as much.
    """
    size = np.asarray(scales, np.float64)[..., None]
    return np.broadcast_to(size * (0.5 + 4.01 * 127 * U32) + float(_LEAST_ABSMAX), k.shape)
