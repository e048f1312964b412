"""Weights as bitsandbytes, GPTQ and AWQ pack them, item by item, and what they stand for.

Each gives the tensors by their names behind that of the module, and the weights (N, K) in float32.
"""

from __future__ import annotations

import json

import numpy as np

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
