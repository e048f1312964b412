"""Weights to be quantised, what formats say of one, number by number, and weights of any format.

Packed weights are those of bitsandbytes, GPTQ, AWQ, compressed-tensors, FP8 and MXFP4: each
function returns the tensors by their names after that of the module, and the float32 weights (N, K)
that they mean.
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import ml_dtypes
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
        weight.format,
        **arrays,
        block_size=weight.block_size,
        transposed=weight.transposed,
        rotation=weight.rotation,
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

COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}

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
    bits: int = 4,
    zero: int | None = None,
    order: str = "along K",
) -> Packed:
    """Eight k in a word, and eight n of zeros, which are stored less one in the first version."""
    of_k = _order(rng, inner, group or inner, order)
    q, zeros, scales, weights = _integers(rng, outer, inner, group, bits, zero, of_k)
    count, many = 32 // bits, 1 << bits
    tensors = {
        "qweight": _words(q.T.reshape(outer, -1, count)).T,
        "qzeros": _words(((zeros - less_one) % many).reshape(len(zeros), -1, count)),
        "scales": scales,
        "g_idx": of_k.astype(np.int32),
    }
    return tensors, weights


def _order(rng: np.random.Generator, inner: int, size: int, order: str) -> np.ndarray:
    """The group of each k: along K, "scattered" over it, or in "blocks" of 32."""
    of_k = np.arange(inner) // size
    if order == "blocks":
        return of_k.reshape(-1, 32)[::-1].reshape(-1)
    return rng.permutation(of_k) if order == "scattered" else of_k


def compressed(
    rng: np.random.Generator,
    outer: int,
    inner: int,
    *,
    bits: int = 4,
    group: int | None = 32,
    symmetric: bool = True,
    order: str = "along K",
    packed: bool = True,
    scales: str = "bfloat16",
) -> Packed:
    """compressed-tensors' integers: signed, in words plus half of their number, or in int8."""
    of_k = _order(rng, inner, group or inner, order)
    half, count = 1 << (bits - 1), 32 // bits
    q, zeros, scale, _ = _integers(
        rng, outer, inner, group, bits, half if symmetric else None, of_k
    )
    scale = scale.astype(dtype_of(scales))
    tensors = {"weight_scale": scale.T, "weight_g_idx": of_k.astype(np.int32)}
    if order == "along K":
        del tensors["weight_g_idx"]
    if packed:
        tensors["weight_packed"] = _words(q.T.reshape(outer, -1, count))
        tensors["weight_shape"] = np.array([outer, inner])
        if not symmetric:
            rows = np.pad(zeros, ((0, 0), (0, -outer % count)))
            tensors["weight_zero_point"] = _words(rows.reshape(len(zeros), -1, count)).T
    else:
        tensors["weight"] = (q.T - half).astype(np.int8)
        if not symmetric:
            tensors["weight_zero_point"] = (zeros.T - half).astype(np.int8)
    weights = (q - zeros[of_k]).astype(np.float32) * scale[of_k].astype(np.float32)
    return tensors, np.ascontiguousarray(weights.T)


def fp8(
    rng: np.random.Generator,
    outer: int,
    inner: int,
    *,
    scales: tuple[int, ...],
    name: str = "weight_scale_inv",
    block: tuple[int, int] | None = None,
) -> Packed:
    """e4m3 with scales of that shape: one, one for each row, or one for each block."""
    codes = rng.integers(0, 256, (outer, inner)).astype(np.uint8)
    codes[codes & 127 == 127] = 8
    weight = codes.view(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(1e-4, 1e-3, scales).astype(np.float32)
    rows, columns = block or (1 if scale.size > 1 else outer, inner)
    wide = np.empty((outer, inner), np.float32)
    for n, k in np.ndindex(outer, inner):
        pair = (n // rows, k // columns)
        wide[n, k] = scale.reshape(-1)[0] if scale.size == 1 else scale[pair[: scale.ndim]]
    return {"weight": weight, name: scale}, weight.astype(np.float32) * wide


def mxfp4(
    rng: np.random.Generator, outer: int, inner: int, *, names: tuple[str, str], flat: bool = False
) -> Packed:
    """e2m1, the even k in the low half of a byte, and e8m0 of 32 neighbours."""
    codes = rng.integers(0, 16, (outer, inner)).astype(np.uint8)
    powers = rng.integers(118, 125, (outer, inner // 32)).astype(np.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    weights = np.where(codes < 8, values[codes & 7], -values[codes & 7])
    weights *= np.exp2(powers.astype(np.float32) - 127).repeat(32, axis=1)
    shape = (outer, inner // 2) if flat else (outer, inner // 32, 16)
    return {names[0]: packed.reshape(shape), names[1]: powers}, weights


def awq(
    rng: np.random.Generator,
    outer: int,
    inner: int,
    *,
    group: int | None = 32,
    spread: tuple[float, float] | None = None,
) -> Packed:
    """Eight n in a word, the even ones first; scales in float32 if their `spread` is given."""
    q, zeros, scales, weights = _integers(rng, outer, inner, group)
    if spread is not None:
        scales = rng.uniform(*spread, scales.shape).astype(np.float32)
        size = group or inner
        differences = (q - zeros.repeat(size, axis=0)).astype(np.float32)
        weights = np.ascontiguousarray((differences * scales.repeat(size, axis=0)).T)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        "qweight": _words(q.reshape(inner, -1, 8)[..., order]),
        "qzeros": _words(zeros.reshape(len(zeros), -1, 8)[..., order]),
        "scales": scales,
    }
    return tensors, weights


def _integers(
    rng: np.random.Generator,
    outer: int,
    inner: int,
    group: int | None,
    bits: int = 4,
    zero: int | None = None,
    of_k: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    size, many = group or inner, 1 << bits
    of_k = np.arange(inner) // size if of_k is None else of_k
    q = rng.integers(0, many, (inner, outer))
    zeros = rng.integers(0, many, (inner // size, outer))
    zeros = zeros if zero is None else np.full_like(zeros, zero)
    scales = (rng.uniform(0.08, 0.32, (inner // size, outer)) / many).astype(np.float16)
    weights = (q - zeros[of_k]).astype(np.float32) * scales[of_k].astype(np.float32)
    return q, zeros, scales, np.ascontiguousarray(weights.T)


def _words(integers: np.ndarray) -> np.ndarray:
    """Words of the last axis's integers, 8 or 4, the first in the lowest bits."""
    count = integers.shape[-1]
    shifts = 32 // count * np.arange(count)
    return (
        (integers.astype(np.uint64) << shifts.astype(np.uint64))
        .sum(axis=-1)
        .astype(np.uint32)
        .view(np.int32)
    )


def configured(weights: dict[str, Any], form: str) -> dict[str, Any]:
    """The quantization_config of compressed-tensors, with one group."""
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    return {**COMPRESSED, "format": form, "config_groups": {"group_0": group}, "ignore": []}


def ints(bits: int, *, symmetric: bool = True, packed: bool = True) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group"}
    return configured(weights, "pack-quantized" if packed else "int-quantized")


def in_blocks(rows: int, columns: int, **options: Any) -> Any:
    def pack(rng: np.random.Generator, outer: int, inner: int) -> Any:
        scales = -(-outer // rows), -(-inner // columns)
        return fp8(rng, outer, inner, scales=scales, block=(rows, columns), **options)

    return pack


def by_row(rng: np.random.Generator, outer: int, inner: int) -> Any:
    return fp8(rng, outer, inner, scales=(outer, 1), name="weight_scale")


def with_scale_of_activations(rng: np.random.Generator, outer: int, inner: int) -> Any:
    tensors, weights = fp8(rng, outer, inner, scales=(), name="weight_scale")
    return {**tensors, "input_scale": np.full(1, 0.5, np.float32)}, weights


def with_small_scales(rng: np.random.Generator, outer: int, inner: int) -> Any:
    return awq(rng, outer, inner, spread=(1e-6, 3e-5))


FLOATS8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
EXACT: dict[str, tuple[Any, dict[str, Any], tuple[str, int | None]]] = {
    "gptq of 8 bits": (
        lambda *given: gptq(*given, bits=8, zero=128), {**GPTQ, "bits": 8}, ("int8", 32),
    ),
    "gptq of 8 bits, one group": (
        lambda *given: gptq(*given, bits=8, zero=128, group=None, less_one=False),
        {**GPTQ, "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
        ("int8", None),
    ),
    "gptq of act-order in blocks": (
        lambda *given: gptq(*given, order="blocks"), {**GPTQ, "desc_act": True}, ("int4", 32),
    ),
    "awq with small scales": (with_small_scales, AWQ, ("int8", 32)),
    "compressed-tensors of 4 bits": (compressed, ints(4), ("int4", 32)),
    "with zeros": (
        lambda *given: compressed(*given, symmetric=False), ints(4, symmetric=False), ("int4", 32),
    ),
    "of channels": (
        lambda *given: compressed(*given, symmetric=False, group=None, scales="float16"),
        ints(4, symmetric=False),
        ("int4", 64),
    ),
    "of 8 bits": (lambda *given: compressed(*given, bits=8), ints(8), ("int8", 32)),
    "of 8 bits, channels": (
        lambda *given: compressed(*given, bits=8, group=None, scales="float32"), ints(8),
        ("int8", None),
    ),
    "int-quantized": (
        lambda *given: compressed(*given, bits=8, packed=False, group=None), ints(8, packed=False),
        ("int8", None),
    ),
    "mxfp4": (
        lambda *given: mxfp4(*given, names=("weight_blocks", "weight_scales")),
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        ("int8", 32),
    ),
    "mxfp4 of compressed-tensors": (
        lambda *given: mxfp4(*given, names=("weight_packed", "weight_scale"), flat=True),
        configured({"num_bits": 4, "type": "float", "group_size": 32}, "mxfp4-pack-quantized"),
        ("int8", 32),
    ),
}  # fmt: skip
"""Packers, configs, and the blocks that have the same numbers; None is a whole row."""

ROUNDED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "act-order": (
        lambda *given: gptq(*given, order="scattered"), {**GPTQ, "desc_act": True}, "act-order",
    ),
    "act-order of 8 bits": (
        lambda *given: gptq(*given, bits=8, zero=128, order="scattered"),
        {**GPTQ, "bits": 8, "desc_act": True},
        "act-order",
    ),
    "eight bits with zeros": (
        lambda *given: gptq(*given, bits=8), {**GPTQ, "bits": 8}, "zero points",
    ),
    "act-order of compressed-tensors": (
        lambda *given: compressed(*given, order="scattered", symmetric=False),
        ints(4, symmetric=False),
        "act-order",
    ),
    "zeros of compressed-tensors": (
        lambda *given: compressed(*given, bits=8, symmetric=False), ints(8, symmetric=False),
        "zero points",
    ),
    "zeros of int-quantized": (
        lambda *given: compressed(*given, bits=8, symmetric=False, packed=False, group=None),
        ints(8, symmetric=False, packed=False),
        "zero points",
    ),
    "fp8": (lambda *given: fp8(*given, scales=()), FP8, "FP8"),
    "fp8 in blocks": (in_blocks(24, 48), {**FP8, "weight_block_size": [24, 48]}, "FP8"),
    "static fp8": (with_scale_of_activations, {**FP8, "activation_scheme": "static"}, "FP8"),
    "fbgemm": (by_row, {"quant_method": "fbgemm_fp8"}, "FP8"),
    "float-quantized": (by_row, configured(FLOATS8, "float-quantized"), "FP8"),
    "blocks of float-quantized": (
        in_blocks(24, 48, name="weight_scale"),
        configured({**FLOATS8, "block_structure": [24, 48]}, "float-quantized"),
        "FP8",
    ),
}  # fmt: skip
"""Packers, configs, and the reason why no blocks have the same numbers."""
FLOAT32_SCALES = {
    "awq with scales of float32": (
        lambda *given: awq(*given, spread=(5e-3, 2e-2)), AWQ,
    ),
}  # fmt: skip
