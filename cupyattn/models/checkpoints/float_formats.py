"""Weights that are small floats: FP8 (e4m3) with scales, and MXFP4.

e4m3 (Micikevicius et al., arXiv:2209.05433, without infinities) has a sign, four bits of exponent
with bias 7 and three of fraction: a number has a sign and 8 bits, and its range is 2^-9 to 448. A
weight ``NAME.weight`` (N, K) has ``NAME.weight_scale`` or ``NAME.weight_scale_inv`` (both factors):
one number, one for each row (N, 1), or one for each block of rows and columns, mostly 128 x 128. No
format of products has such numbers. They are floats, or rounded to "int8".

MXFP4 (OCP Microscaling Formats 1.0) has a sign, two bits of exponent and one of fraction (e2m1):
0, 0.5, 1, 1.5, 2, 3, 4 or 6. 32 neighbours along K share a power of two (e8m0), stored plus 127.
Twice these numbers are integers up to 12, so "int8" in blocks of 32 has exactly these weights. As
gpt-oss has them, ``NAME_blocks`` is (N, K / 32, 16) with the even k in the low half of a byte, and
``NAME_scales`` (N, K / 32).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from cupyattn import QuantizedWeight
from cupyattn.models.checkpoints.contents import AnyTensor, QuantisedTensor, damaged, rounded
from cupyattn.models.checkpoints.integer_groups import SCALES
from cupyattn.models.checkpoints.safetensors_files import Stored
from cupyattn.ops.linear.weight_formats import Blocks
from cupyattn.runtime.errors import error

FP8 = "F8_E4M3"
_POWERS = ("U8", "F8_E8M0")
_MX_BLOCK = 32


def _e4m3() -> np.ndarray:
    """Return the number of each byte; the largest of both signs are NaN."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    normal = np.ldexp(8.0 + fraction, exponent - 10)
    magnitude = np.where(exponent == 0, np.ldexp(fraction.astype(float), -9), normal)
    magnitude[code & 127 == 127] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


E4M3 = _e4m3()
"""float32 numbers of the 256 codes."""
_E8M0 = np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan).astype(np.float32)
"""float32 numbers of the 256 codes of powers of two."""
_TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_PAIRS = np.stack(
    [_TWICE_E2M1[np.arange(256) & 15], _TWICE_E2M1[np.arange(256) >> 4]], axis=-1
).view(np.int16)[:, 0]  # fmt: skip
"""For each byte its two numbers, as a table that is read once for both."""
_OF_ACTIVATIONS = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale",
    ".activation_scale", ".activation_scale_ub", ".input_scale_ub",
    ".q_scale", ".k_scale", ".v_scale",
)  # fmt: skip
"""Names of scales that only quantised activations and caches need: here they stay in dtype."""


def without_activations(stored: dict[str, Stored]) -> dict[str, AnyTensor]:
    """Return the tensors that are not quantised, without the scales of activations."""
    return {
        name: tensor.as_floats()
        for name, tensor in stored.items()
        if not name.endswith(_OF_ACTIVATIONS)
    }


def unpacked_fp8(
    stored: dict[str, Stored], blocks: Sequence[tuple[int, int]]
) -> dict[str, AnyTensor]:
    """Return the tensors of a model; `blocks` are the sizes of blocks that share a scale."""
    rest = dict(stored)
    found = {}
    for name in [name for name, tensor in stored.items() if tensor.kind == FP8]:
        scale = rest.pop(f"{name}_scale_inv", None) or rest.pop(f"{name}_scale", None)
        found[name] = fp8_tensor(rest.pop(name), scale, blocks)
    return {**found, **without_activations(rest)}


def fp8_tensor(
    weight: Stored, scale: Stored | None, blocks: Sequence[tuple[int, int]]
) -> AnyTensor:
    """Return a weight (N, K) whose scale is of a tensor, of rows or of blocks."""
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise damaged(weight.what, f"it is {weight.shape}, and a weight is (N, K)")
    if scale is None:
        raise damaged(weight.what, "it is of F8_E4M3, but there is no scale of it")
    outer, inner = weight.shape
    factors = scales_of(scale, (*SCALES, "F8_E8M0"))
    sizes = [size for size in blocks if factors.shape == _whole(weight.shape, size)]
    if factors.size == 1:
        factors, size = factors.reshape(1, 1), (outer, inner)
    elif sizes:
        size = sizes[0]
    elif scale.shape in ((outer,), (outer, 1)):
        factors, size = factors.reshape(outer, 1), (1, inner)
    else:
        allowed = [(1,), (outer, 1), *(_whole(weight.shape, each) for each in blocks)]
        raise damaged(scale.what, f"it is {scale.shape}, not {' or '.join(map(str, allowed))}")

    def floats(start: int, stop: int) -> np.ndarray:
        weights = E4M3.take(weight.items(slice(start, stop)), mode="clip")
        of_rows = factors[np.arange(start, stop) // size[0]]
        for column in range(factors.shape[1]):
            begin = column * size[1]
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused
                weights[:, begin : begin + size[1]] *= of_rows[:, column, None]
        return weights

    return rounded((outer, inner), floats, "FP8")


def _whole(shape: tuple[int, ...], size: tuple[int, int]) -> tuple[int, ...]:
    return tuple([-(-length // each) for length, each in zip(shape, size, strict=True)])


def scales_of(scale: Stored, kinds: tuple[str, ...]) -> np.ndarray:
    """Return scales in float32; those of eight bits are powers of two."""
    found = scale.require(kinds).items(...)
    return _E8M0[found] if scale.kind in _POWERS else found.astype(np.float32)


def unpacked_mxfp4(stored: dict[str, Stored]) -> dict[str, AnyTensor]:
    """Return the tensors of a model; weights in MXFP4 are ``_blocks`` and ``_scales``."""
    rest = dict(stored)
    found: dict[str, AnyTensor] = {}
    for name in [name for name in stored if name.endswith("_blocks")]:
        stem, blocks = name.removesuffix("_blocks"), rest.pop(name)
        scales = rest.pop(f"{stem}_scales", None)
        if len(blocks.shape) != 3 or blocks.shape[2] != _MX_BLOCK // 2:
            raise error(
                NotImplementedError,
                f"{blocks.what}: it is {blocks.shape}",
                f"blocks of MXFP4 must be those of one weight, (N, K / 32, {_MX_BLOCK // 2})",
                "load a model without experts, or from before it was quantised",
            )
        own = stem if stem.endswith(".weight") else f"{stem}.weight"
        found[own] = mxfp4_tensor(blocks, scales)
    return {**found, **without_activations(rest)}


def mxfp4_tensor(codes: Stored, scales: Stored | None) -> QuantisedTensor:
    """Return a weight from bytes (N, K / 32, 16) or (N, K / 2)."""
    outer, groups = codes.require(("U8",)).shape[0], codes.shape[1]
    if len(codes.shape) == 2:
        groups = groups * 2 // _MX_BLOCK
    if scales is None:
        raise damaged(codes.what, "there are no scales of it")
    inner = groups * _MX_BLOCK
    if min(outer, inner) < 1 or codes.shape not in (
        (outer, groups, _MX_BLOCK // 2),
        (outer, inner // 2),
    ):
        raise damaged(codes.what, f"it is {codes.shape}, not rows of blocks of {_MX_BLOCK}")
    scales.require(_POWERS, (outer, groups))
    return QuantisedTensor(
        (outer, inner), Blocks("int8", _MX_BLOCK), partial(_mxfp4_rows, codes, scales)
    )


def _mxfp4_rows(codes: Stored, scales: Stored, start: int, stop: int) -> QuantizedWeight:
    packed = codes.items(slice(start, stop)).reshape(stop - start, -1)
    twice = _PAIRS.take(packed, mode="clip").view(np.int8)
    factors = _E8M0[scales.items(slice(start, stop))] / np.float32(2)
    return QuantizedWeight(
        "int8",
        twice,
        factors,
        block_size=_MX_BLOCK,
        transposed=True,
    )
