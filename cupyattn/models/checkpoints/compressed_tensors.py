"""Weights that compressed-tensors has packed, as llm-compressor writes them.

The formats (compressed-tensors' compressors, by the names of their modules):

- pack-quantized: ``NAME.weight_packed``, int32 (N, K bits / 32), has signed integers of 4 or 8
  bits, plus half of their number, along K, the first in the lowest bits. ``weight_shape`` is
  (N, K).
- int-quantized: ``NAME.weight`` is int8 (N, K).
- float-quantized: ``NAME.weight`` is FP8 (e4m3).
- mxfp4-pack-quantized: ``NAME.weight_packed``, uint8 (N, K / 2), is MXFP4.

``weight_scale`` is one number, (N, 1) or (N, groups); of FP8 also one for each block. Integers may
have a ``weight_zero_point``, packed along N as weights are, or int8 as scales are, and a
``weight_g_idx``, the group of each k. A number is (integer - zero point) scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cupyattn.models.checkpoints.contents import AnyTensor, damaged
from cupyattn.models.checkpoints.float_formats import (
    FP8,
    fp8_tensor,
    mxfp4_tensor,
    without_activations,
)
from cupyattn.models.checkpoints.integer_groups import (
    SCALES,
    Integers,
    Rows,
    bytes_of,
    group_of,
    integers_of,
    tensor_of,
    words_around,
)
from cupyattn.models.checkpoints.safetensors_files import Stored
from cupyattn.ops.linear.weight_formats import UNIT
from cupyattn.runtime.errors import error

_PACKED = ".weight_packed"
_WORD = 32  # bits


class _Parts(NamedTuple):
    """The tensors of a weight."""

    codes: Stored
    scale: Stored | None
    zero_point: Stored | None
    g_idx: Stored | None
    shape: Stored | None
    global_scale: Stored | None


_NAMES = _Parts._fields[1:]


def unpacked_compressed(
    stored: dict[str, Stored], blocks: Sequence[tuple[int, int]], *, has_zeros: bool
) -> dict[str, AnyTensor]:
    """Return the tensors of a model.

    `blocks` are the sizes of FP8's blocks. `has_zeros` says that all integers have zero points.
    """
    rest = dict(stored)
    found: dict[str, AnyTensor] = {}
    for name, tensor in stored.items():
        packed, plain = name.endswith(_PACKED), name.endswith(".weight")
        if packed or (plain and tensor.kind in ("I8", FP8)):
            stem = name.removesuffix("_packed")
            named = [rest.pop(f"{stem}_{part}", None) for part in _NAMES]
            parts = _Parts(rest.pop(name), *named)
            found[stem] = _tensor(stem, parts, packed, blocks, has_zeros)
    return {**found, **without_activations(rest)}


def _tensor(
    name: str, parts: _Parts, packed: bool, blocks: Sequence[tuple[int, int]], has_zeros: bool
) -> AnyTensor:
    codes = parts.codes
    if parts.scale is None:
        raise damaged(codes.what, f"there is no {name}_scale")
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise damaged(codes.what, f"it is {codes.shape}, and a weight has rows and columns")
    if codes.kind == FP8:
        zeros = parts.zero_point
        if zeros is not None and (zeros.require((FP8,)).items(...) & 127).any():
            raise damaged(zeros.what, "zero points of FP8 must be 0")
        return fp8_tensor(codes, parts.scale, blocks)
    if packed and codes.kind == "U8":
        if parts.global_scale is not None or parts.scale.kind == FP8:
            raise error(
                NotImplementedError,
                f"{codes.what}: NVFP4",
                "of four-bit floats only MXFP4 can be read",
                "load the model from before it was quantised",
            )
        return mxfp4_tensor(codes, parts.scale)
    if has_zeros and parts.zero_point is None:
        raise damaged(codes.what, f"symmetric is false, but there is no {name}_zero_point")
    return tensor_of(_integers(name, parts, parts.scale, packed))


def _integers(name: str, parts: _Parts, scale: Stored, packed: bool) -> Integers:
    codes = parts.codes.require(("I32",) if packed else ("I8",))
    outer, inner = _shape(name, parts) if packed else codes.shape
    bits = codes.shape[1] * _WORD // inner if packed else 8
    if packed and (bits not in (4, 8) or codes.shape != (outer, inner * bits // _WORD)):
        raise damaged(codes.what, f"it is {codes.shape}, which is not ({outer}, {inner}) in 4 or 8 "
                      "bits")  # fmt: skip
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    if scale.require(SCALES).shape not in ((), (1,), (1, 1), (outer, groups)) or not groups:
        raise damaged(scale.what, f"it is {scale.shape}, not ({outer}, groups)")
    size = inner // groups
    whole = groups == 1 or (size >= UNIT and size & (size - 1) == 0)
    if inner % UNIT or inner % groups or not whole:
        raise error(
            NotImplementedError,
            f"{codes.what}: K = {inner} in {groups} groups",
            f"K must be a multiple of {UNIT}, and a group a power of two from {UNIT} on, or K",
            "load the model from before it was quantised",
        )

    def read_codes(start: int, stop: int) -> np.ndarray:
        rows = codes.items(slice(start, stop))
        return bytes_of(rows) if packed else rows.view(np.uint8) ^ np.uint8(128)

    def read_scales(start: int, stop: int) -> np.ndarray:
        return _rows(scale, outer, groups, start, stop)

    found = Integers(
        codes.what,
        (outer, inner),
        bits,
        size,
        read_codes,
        read_scales,
        _zeros(parts.zero_point, outer, groups, bits),
        scale.kind == "F16",
    )
    order = parts.g_idx
    if order is None or (order.require(("I32", "I64"), (inner,)).items(...) == -1).any():
        return found  # -1 is what groups that have not been set contain
    return found._replace(group_of=group_of(order, found))


def _shape(name: str, parts: _Parts) -> tuple[int, int]:
    if parts.shape is None:
        raise damaged(parts.codes.what, f"there is no {name}_shape")
    outer, inner = map(int, parts.shape.require(("I64", "I32"), (2,)).items(...))
    if outer != parts.codes.shape[0] or inner < 1:
        raise damaged(
            parts.shape.what, f"it is ({outer}, {inner}), but there are {parts.codes.shape[0]} rows"
        )
    return outer, inner


def _rows(given: Stored, outer: int, groups: int, start: int, stop: int) -> np.ndarray:
    """Return rows (rows, groups) of a tensor that may be one number for all of them."""
    if given.shape == (outer, groups):
        return given.items(slice(start, stop))
    return np.broadcast_to(given.items(...).reshape(1, 1), (stop - start, groups))


def _zeros(given: Stored | None, outer: int, groups: int, bits: int) -> Rows:
    """Return how to read zeros as unsigned integers, which are half of their number without any."""
    half, per_word = 1 << (bits - 1), _WORD // bits
    if given is None:
        return lambda start, stop: np.full((stop - start, groups), half, np.uint8)
    if given.kind == "I32":
        given.require(("I32",), (-(-outer // per_word), groups))

        def packed(start: int, stop: int) -> np.ndarray:
            words, own = words_around(start, stop, per_word)
            return integers_of(given.items(words).T, bits)[:, own].T

        return packed
    if given.require(("I8",)).shape not in ((), (1,), (1, 1), (outer, groups)):
        raise damaged(given.what, f"it is {given.shape}, not ({outer}, {groups})")

    def plain(start: int, stop: int) -> np.ndarray:
        return (_rows(given, outer, groups, start, stop).astype(np.int16) + half).astype(np.uint8)

    return plain
