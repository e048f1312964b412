"""Exchanges between the lanes of a warp: shuffles, votes and matches, as functions of their values.

Who takes part, and who must wait for whom, is the business of `machine.warp_sync`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cupyattn.emulator.machine.lanes import over_lanes

__all__ = ["LANE", "Exchange", "exchange_of", "per_warp", "shuffle_sources", "warp_bits"]

Array = Any
Shape = tuple[int, int]
Result = tuple[Array, Array]  # the value (uint32) and the predicate that a lane gets

LANE = np.arange(32)


def warp_bits(mask: Array, shape: Shape) -> np.ndarray:
    """Pack a mask over lanes into one uint32 per warp, lane 0 the lowest bit."""
    lanes = np.broadcast_to(mask, shape).reshape(-1, 32)
    return np.packbits(lanes, axis=1, bitorder="little").view("<u4")[:, 0]


def per_warp(value: Array, shape: Shape) -> np.ndarray:
    """Return `value` as (warps, 32)."""
    lanes: np.ndarray = over_lanes(value, shape).reshape(-1, 32)
    return lanes


def _sources(mode: str, lane: Array, clamp: Array) -> tuple[np.ndarray, np.ndarray]:
    """Return from which lane every lane reads in a shuffle, and whether that was in range."""
    limit, segment = clamp & 31, clamp >> 8 & 31
    lane = lane & 31
    highest = (LANE & segment) | (limit & ~segment)
    if mode == "bfly":
        source = LANE ^ lane
        valid = source <= highest
    elif mode == "down":
        source = LANE + lane
        valid = source <= highest
    elif mode == "up":
        source = LANE - lane
        valid = source >= highest
    else:
        source = (LANE & segment) | (lane & ~segment & 31)
        valid = source <= highest
    return np.where(valid, source, LANE), valid


@lru_cache(maxsize=256)
def _same_sources(mode: str, lane: int, clamp: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `_sources` of operands that all lanes share: constants as a rule."""
    source, valid = _sources(mode, lane, clamp)
    source.setflags(write=False)
    valid.setflags(write=False)
    return source, valid


def shuffle_sources(
    mode: str, lane: Array, clamp: Array, shape: Shape
) -> tuple[np.ndarray, np.ndarray]:
    """Return `_sources` for operands of any shape: (32,) arrays, or (warps, 32)."""
    if np.ndim(lane) == np.ndim(clamp) == 0:
        return _same_sources(mode, int(lane), int(clamp))
    b = np.asarray(lane).astype(np.int64)
    c = np.asarray(clamp).astype(np.int64)
    return _sources(mode, per_warp(b, shape) if b.ndim else b, per_warp(c, shape) if c.ndim else c)


def _shuffle(
    mode: str, operands: tuple[Array, ...], named: Array, here: Array, shape: Shape
) -> Result:
    """Return the value of another lane, and whether that lane was in range (``shfl.sync``).

    The operands are the value, the lane, and what PTX packs: the segment mask (bits 8-12) and the
    clamp value (0-4).
    """
    value, lane, clamp = operands
    source, valid = shuffle_sources(mode, lane, clamp, shape)
    values = per_warp(value, shape)
    one = source.ndim == 1  # every warp alike
    result = values.take(source, 1) if one else np.take_along_axis(values, source, 1)
    return result.reshape(shape), np.broadcast_to(valid, values.shape).reshape(shape)


def _members(named: Array, here: Array, shape: Shape) -> np.ndarray:
    """Return, as bits, the lanes that each lane names and that are here: (warps, 1 or 32)."""
    bits = np.asarray(named).astype(np.uint32, copy=False)
    bits = per_warp(bits, shape) if bits.ndim else bits.reshape(1, 1)
    return bits if here is None else bits & warp_bits(here, shape)[:, None]


def _vote(
    mode: str, operands: tuple[Array, ...], named: Array, here: Array, shape: Shape
) -> Result:
    """Combine a predicate over the lanes that each lane names (``vote.sync``)."""
    members = _members(named, here, shape)
    yes = warp_bits(operands[0], shape)[:, None] & members
    if mode == "ballot":
        spread = np.broadcast_to(yes, (yes.shape[0], 32)).reshape(shape)
        return spread, np.False_
    if mode == "any":
        result = yes != 0
    elif mode == "all":
        result = yes == members
    else:  # uni
        result = (yes == 0) | (yes == members)
    return np.uint32(0), np.broadcast_to(result, (yes.shape[0], 32)).reshape(shape)


def _match(
    mode: str, operands: tuple[Array, ...], named: Array, here: Array, shape: Shape
) -> Result:
    """Return the lanes that hold the same value (``match.sync``), and whether all do."""
    values = per_warp(operands[0], shape)
    same = values[:, :, None] == values[:, None, :]
    members = _members(named, here, shape)
    bits = np.packbits(same, axis=2, bitorder="little").view("<u4")[..., 0] & members
    agree = bits == members
    if mode == "all":
        bits = np.where(agree, bits, np.uint32(0))
    return bits.reshape(shape), agree.reshape(shape)


@dataclass(frozen=True)
class Exchange:
    """One kind of ``.sync`` instruction.

    Attributes
    ----------
    name : str
        The opcode with its qualifiers; lanes that wait for each other must agree on it.
    mode : str
        ``"bfly"``, ``"ballot"``, ...; "" for ``bar.warp.sync``.
    dtypes : tuple of str
        What the operands are; their number.
    """

    name: str
    mode: str
    dtypes: tuple[str, ...]
    function: Callable[[str, tuple[Array, ...], Array, Array, Shape], Result] | None

    @property
    def is_shuffle(self) -> bool:
        """Whether lanes read from a lane of their choice."""
        return self.function is _shuffle

    def of(self, operands: tuple[Array, ...], named: Array, here: Array, shape: Shape) -> Result:
        """Return the value and the predicate that every lane of `here` (None: all) gets."""
        if self.function is None:
            return np.uint32(0), np.False_
        return self.function(self.mode, operands, named, here, shape)


@lru_cache(maxsize=64)
def exchange_of(opcode: str) -> Exchange:
    """Return what an opcode such as ``"shfl.sync.bfly.b32"`` exchanges."""
    parts = opcode.split(".")
    if parts[0] == "shfl":
        return Exchange(opcode, parts[2], ("u4", "u4", "u4"), _shuffle)
    if parts[0] == "vote":
        return Exchange(opcode, parts[2], ("?",), _vote)
    if parts[0] == "match":
        return Exchange(opcode, parts[1], ("u8" if parts[-1] == "b64" else "u4",), _match)
    return Exchange(opcode, "", (), None)
