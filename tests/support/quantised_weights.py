"""Weights to be quantised, what formats say of one, number by number, and weights of any format.

Packed weights are those of bitsandbytes, GPTQ and AWQ: each function returns the tensors by their
names after that of the module, and the float32 weights (N, K) that they mean.
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
from support.devices import dtype_of

from cupyattn import QuantizedWeight
from cupyattn.ops.linear.weight_formats import FORMATS, pieces

MADE = ("nf4", "int4", "int8")
LARGE = {"int4": 1e3}
"""Factors of some weights, in a format that does not hold all of float32."""
PAIRED = ("int4", "q4_1", "q4_k")


def weights(
    inner: int,
    outer: int,
    dtype: str = "float32",
    *,
    along_k: bool = True,
    start: int = 0,
    padding: int = 0,
    step: int = 1,
    seed: int = 0,
    large: float = 1e36,
) -> np.ndarray:
    """w (K, N) within a larger array of NaN, with blocks of zeros, of -0 and of tiny numbers."""
    rng = np.random.default_rng(seed)
    shape = (outer, inner) if along_k else (inner, outer)
    memory = np.full((shape[0], start + shape[1] * step + padding), np.nan, dtype_of(dtype))
    view = memory[:, start : start + shape[1] * step : step]
    sizes = rng.choice([1e-3, 1.0, 30.0], (shape[0], 1))
    view[...] = rng.standard_normal(shape, np.float32) * sizes
    w = view.T if along_k else view
    w[:, ::5] = np.abs(w[:, ::5])
    w[:32, 1::7] = 0
    w[:64, 2::7] = -0.0
    w[3, 3::7] = 6e-8
    if dtype != "float16":
        w[:32, 4::7] *= 1e-38
        w[:32, 5::7] *= large
    return w


def made_up(
    kind: str, outer: int, inner: int, block_size: int, *, seed: int = 0
) -> QuantizedWeight:
    """A weight (K, N) of any codes and scales, of both signs."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    for name, (shape, dtype) in pieces(kind, outer, inner, block_size).items():
        if dtype.kind in "iu":
            most = 64 if name == "scales" else 256
            arrays[name] = rng.integers(0, most, shape).astype(np.uint8).view(dtype)
        else:
            arrays[name] = rng.standard_normal(shape).astype(dtype)
    if kind == "int4":
        arrays["scales"][..., 1] = rng.integers(0, 17, arrays["scales"].shape[:2])
    return QuantizedWeight(kind, **arrays, block_size=block_size)


def of_usual_size(
    kind: str, outer: int, inner: int, block_size: int, *, seed: int = 0
) -> QuantizedWeight:
    """Return weights around one, with some blocks tiny or zero, and zero points with fractions."""
    weight = made_up(kind, outer, inner, block_size, seed=seed)
    rng = np.random.default_rng(seed)
    sizes = rng.choice([1.0, 1.0, 1.0, 1e-3, 1e-6, 0.0], weight.scales.shape[:2])
    arrays = weight.arrays
    if kind == "nf4_nested":
        return weight
    if kind == "q4_k":
        assert weight.super_scales is not None
        arrays["super_scales"] = (weight.super_scales / 256).astype(np.float16)
    else:
        largest = {"int4": 8, "q4_1": 8, "int8": 128}.get(kind, 1)
        first = arrays["scales"][..., :1] if kind in PAIRED else arrays["scales"][..., None]
        first *= (sizes / largest)[..., None].astype(first.dtype)
    if kind == "int4":
        arrays["scales"][::2, :, 1] += np.float16(0.37)
    return QuantizedWeight(kind, **arrays, block_size=block_size)


def moved(weight: QuantizedWeight, put: Any) -> QuantizedWeight:
    """Return the weight with its arrays elsewhere."""
    arrays = {name: put(array) for name, array in weight.arrays.items()}
    return QuantizedWeight(
        weight.format, **arrays, block_size=weight.block_size, transposed=weight.transposed
    )


def number(weight: QuantizedWeight, k: int, n: int, codebook: np.ndarray) -> Fraction:
    """One weight of a (K, N), exactly."""
    form, block = FORMATS[weight.format], k // weight.block_size
    if form.bits == 8:
        q = int(weight.codes[n, k])
    else:
        byte = int(weight.codes[n, k // 2])
        high = (k % 2 == 0) == weight.format.startswith("nf4")
        q = byte >> 4 if high else byte & 15
    numbers = [Fraction(float(x)) for x in np.atleast_1d(weight.scales[n, block])]
    if weight.format == "nf4":
        return Fraction(float(codebook[q])) * numbers[0]
    if weight.format == "nf4_nested":
        assert weight.super_scales is not None
        assert weight.scale_table is not None
        span, offset = weight.super_scales[(n * weight.scales.shape[1] + block) // 64]
        absmax = weight.scale_table[weight.scales[n, block]] * span + offset  # which rounds twice
        return Fraction(float(codebook[q])) * Fraction(float(absmax))
    if weight.format == "int8":
        return q * numbers[0]
    scale, second = numbers
    if weight.format == "int4":
        return (q - second) * scale
    if weight.format == "q4_1":
        return q * scale + second
    assert weight.super_scales is not None
    d, dmin = (Fraction(float(x)) for x in weight.super_scales[n, k // 256])
    return q * d * scale - dmin * second


Packed = tuple[dict[str, np.ndarray], np.ndarray]

BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}

CODEBOOK = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0],
    np.float32,
)  # fmt: skip


def bitsandbytes(
    rng: np.random.Generator,
    outer: int,
    inner: int,
    *,
    nested: bool,
    block_size: int = 64,
    table: np.ndarray | None = None,
) -> Packed:
    """Random codes; with `nested` absmax are codes of a table, too: a random one, or that."""
    codes = rng.integers(0, 16, outer * inner)
    count = outer * inner // block_size
    state = {"quant_type": "nf4", "blocksize": block_size, "dtype": "bfloat16",
             "shape": [outer, inner]}  # fmt: skip
    tensors = {
        "weight": (codes[::2] * 16 + codes[1::2]).astype(np.uint8)[:, None],
        "weight.quant_map": CODEBOOK,
    }
    if nested:
        absmax_codes = rng.integers(0, 256, count).astype(np.uint8)
        table = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32) if table is None else table
        above = rng.uniform(0.01, 0.02, -(-count // 256)).astype(np.float32)
        offset = float(np.float32(rng.uniform(0.05, 0.1)))
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {
            "weight.absmax": absmax_codes,
            "weight.nested_absmax": above,
            "weight.nested_quant_map": table,
        }
        absmax = np.array(
            [table[code] * above[i // 256] + np.float32(offset)
             for i, code in enumerate(absmax_codes)],
            np.float32,
        )  # fmt: skip
    else:
        absmax = rng.uniform(0.05, 0.2, count).astype(np.float32)
        tensors["weight.absmax"] = absmax
    text = json.dumps(state).encode()
    tensors["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(text, np.uint8)
    weights = CODEBOOK[codes].reshape(count, block_size) * absmax[:, None]
    return tensors, weights.reshape(outer, inner)


def gptq(
    rng: np.random.Generator,
    outer: int,
    inner: int,
    *,
    group: int | None = 32,
    less_one: bool = True,
) -> Packed:
    """Eight k in a word, and eight n of zeros, which are stored less one in the first version."""
    q, zeros, scales, weights = _integers(rng, outer, inner, group)
    size = group or inner
    tensors = {
        "qweight": _words(q.T.reshape(outer, -1, 8)).T,
        "qzeros": _words(((zeros - less_one) % 16).reshape(len(zeros), -1, 8)),
        "scales": scales,
        "g_idx": (np.arange(inner) // size).astype(np.int32),
    }
    return tensors, weights


def awq(rng: np.random.Generator, outer: int, inner: int, *, group: int | None = 32) -> Packed:
    """Eight n in a word, the even ones first."""
    q, zeros, scales, weights = _integers(rng, outer, inner, group)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        "qweight": _words(q.reshape(inner, -1, 8)[..., order]),
        "qzeros": _words(zeros.reshape(len(zeros), -1, 8)[..., order]),
        "scales": scales,
    }
    return tensors, weights


def _integers(
    rng: np.random.Generator, outer: int, inner: int, group: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    size = group or inner
    q = rng.integers(0, 16, (inner, outer))
    zeros = rng.integers(0, 16, (inner // size, outer))
    scales = rng.uniform(0.005, 0.02, (inner // size, outer)).astype(np.float16)
    wide = scales.astype(np.float32).repeat(size, axis=0)
    weights = (q - zeros.repeat(size, axis=0)).astype(np.float32) * wide
    return q, zeros, scales, np.ascontiguousarray(weights.T)


def _words(integers: np.ndarray) -> np.ndarray:
    """Words of the last axis's eight integers, the first in the lowest bits."""
    shifts = 4 * np.arange(8)
    return (
        (integers.astype(np.uint64) << shifts.astype(np.uint64))
        .sum(axis=-1)
        .astype(np.uint32)
        .view(np.int32)
    )
