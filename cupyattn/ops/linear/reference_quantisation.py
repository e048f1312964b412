"""Weights in four and eight bits, in float32 as kernels compute: the same codes, bit for bit.

Weights are rows (N, K) here, with blocks along K; `cupyattn.QuantizedWeight` says what arrays are.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from cupyattn.ops.linear.weight_formats import FORMATS, NF4_CODEBOOK, TABLE

NF4_THRESHOLDS = (NF4_CODEBOOK[1:] + NF4_CODEBOOK[:-1]) * np.float32(0.5)
"""A number above so many of them has that code: bitsandbytes compares with the same numbers."""

_TINY = np.float32(2.0**-126)


def quantize(w: np.ndarray, kind: str, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales of rows w (N, K): "nf4", "int8" or "int4".

    A block that is not finite has scale NaN, and stands for NaN, as does one of "int4" whose scale
    is beyond float16; subnormal numbers are 0.
    """
    rows, inner = w.shape
    x = _flushed(w.astype(np.float32, order="C")).reshape(rows, inner // block_size, block_size)
    with np.errstate(all="ignore"):
        codes, scales = _QUANTISERS[kind](x)
    return codes.reshape(rows, -1), scales


def nest_scales(absmax: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes of absmax, (span, offset) of each group of them, and what codes stand for.

    "nf4_nested" has 256 even steps within each group; one that is not finite has NaN.
    """
    size, half = FORMATS["nf4_nested"].group or 0, np.float32(127.5)
    flat = _flushed(absmax.reshape(-1))
    padded = np.pad(flat, (0, -len(flat) % size), mode="edge").reshape(-1, size)
    with np.errstate(all="ignore"):
        low, high = padded.min(axis=-1), padded.max(axis=-1)
        finite = np.isfinite(low) & np.isfinite(high)  # their sum may not be
        low, high = (np.where(finite, each, np.float32(np.nan)) for each in (low, high))
        offset = _flushed(low * np.float32(0.5)) + _flushed(high * np.float32(0.5))
        span = np.maximum(_flushed(high - offset), _flushed(offset - low))
        share = _quotient(_flushed(padded - offset[:, None]), span)
        codes = np.rint(_flushed(share * half) + half)
        codes = np.clip(np.where(np.isnan(codes), 0, codes), 0, 255).astype(np.uint8)
    table = np.arange(-255, 256, 2, dtype=np.float32) / np.float32(255)
    assert len(table) == TABLE
    return (
        codes.reshape(-1)[: len(flat)].reshape(absmax.shape),
        np.stack([span, offset], axis=-1),
        table,
    )


def expand_scales(
    scales: np.ndarray, super_scales: np.ndarray, scale_table: np.ndarray
) -> np.ndarray:
    """Return the absmax that codes of all rows stand for, in float32 as bitsandbytes rounds."""
    above = super_scales.repeat(FORMATS["nf4_nested"].group or 0, axis=0)[: scales.size]
    with np.errstate(all="ignore"):
        products = _flushed(_flushed(scale_table)[scales.reshape(-1)] * _flushed(above[:, 0]))
        return _flushed(products + _flushed(above[:, 1])).reshape(scales.shape)


def dequantize(
    kind: str,
    codes: np.ndarray,
    scales: np.ndarray,
    super_scales: np.ndarray | None,
    block_size: int,
) -> np.ndarray:
    """Return the rows (N, K) that a quantised weight stands for, in float32."""
    rows = len(codes)
    with np.errstate(all="ignore"):
        if kind == "int8":
            w = codes.reshape(rows, -1, block_size) * scales[..., None]
            return _flushed_like(w, scales).reshape(rows, -1)
        w = _pairs(kind == "nf4")[codes].view(np.float32).reshape(rows, -1, block_size)
        if kind == "nf4":
            w *= scales[..., None]
            w = _flushed_like(w, scales)
        elif kind == "int4":
            scale, zero = _columns(scales)
            w -= zero
            w *= scale
        elif kind == "q4_1":
            scale, offset = _columns(scales)
            w *= scale
            w += offset
        elif super_scales is not None:
            repeats = scales.shape[1] // super_scales.shape[1]
            own, above = _columns(scales), _columns(super_scales.repeat(repeats, axis=1))
            w *= above[0] * own[0]
            w -= above[1] * own[1]
        else:
            raise ValueError(f"{kind} has super_scales")
    return w.reshape(rows, -1)


def _nf4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    absmax = _absmax(x)
    normal, q = _quotient(x, absmax), np.zeros(x.shape, np.uint8)
    for threshold in NF4_THRESHOLDS:
        q += normal > threshold
    return q[..., ::2] << 4 | q[..., 1::2], absmax


def _int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = _flushed(_absmax(x) / np.float32(127))
    return np.rint(_quotient(x, scale)).astype(np.int8), scale


def _int4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = x.min(axis=-1, initial=0), x.max(axis=-1, initial=0)
    step = (high - low) / np.float32(15)
    stored = np.where(np.isfinite(_absmax(x)), step, np.float32(np.nan)).astype(np.float16)
    scale = stored.astype(np.float32)
    zero = np.minimum(np.rint(_quotient(np.float32(0) - low[..., None], scale)), np.float32(15))
    q = np.clip(np.rint(_quotient(x, scale)) + zero, 0, 15).astype(np.uint8)
    return q[..., ::2] | q[..., 1::2] << 4, np.stack([stored, zero[..., 0].astype(np.float16)], -1)


_QUANTISERS = {"nf4": _nf4, "int8": _int8, "int4": _int4}


def _absmax(x: np.ndarray) -> np.ndarray:
    absmax = np.abs(x).max(axis=-1)
    return np.where(np.isfinite(absmax), absmax, np.float32(np.nan))


def _quotient(x: np.ndarray, divisors: np.ndarray) -> np.ndarray:
    """Return x / divisors, a divisor for each row; 0 unless that is above 0."""
    usable = (divisors > 0)[..., None]
    return np.where(usable, x / np.where(usable, divisors[..., None], np.float32(1)), np.float32(0))


def _flushed_like(w: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return products of scales, of which those that are subnormal are 0."""
    tiny = (np.abs(scales) < _TINY * 16) & (scales != 0)
    return _flushed(w) if tiny.any() else w


def _columns(pair: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the two numbers of each block as float32, with an axis for its weights."""
    wide = pair.astype(np.float32)
    return wide[..., :1], wide[..., 1:]


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < _TINY, np.float32(0), x)


@cache
def _pairs(nf4: bool) -> np.ndarray:
    """Return the two numbers of each byte, (256,): their float32 as one item, in the order of k."""
    byte = np.arange(256)
    high, low = byte >> 4, byte & 15
    if nf4:
        both = NF4_CODEBOOK[np.stack([high, low], axis=1)]
    else:
        both = np.stack([low, high], axis=1).astype(np.float32)
    return both.view(np.uint64)[:, 0]
