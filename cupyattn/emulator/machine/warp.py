"""Instructions in which the lanes of a warp exchange values: shuffle, vote, match."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyattn.emulator.errors import WarpSyncError
from cupyattn.emulator.machine.lanes import over_lanes

if TYPE_CHECKING:
    from cupyattn.emulator.machine.batch import Batch

__all__ = ["WarpOperations", "warp_bits"]

Array = Any

_LANE = np.arange(32)


def warp_bits(mask: Array, shape: tuple[int, int]) -> np.ndarray:
    """Pack a mask over lanes into one uint32 per warp, lane 0 the lowest bit."""
    lanes = np.broadcast_to(mask, shape).reshape(-1, 32)
    return np.packbits(lanes, axis=1, bitorder="little").view("<u4")[:, 0]


def _sources(mode: str, lane: Array, clamp: Array) -> tuple[np.ndarray, np.ndarray]:
    """Return from which lane every lane reads in a shuffle, and whether that was in range."""
    limit, segment = clamp & 31, clamp >> 8 & 31
    lane = lane & 31
    highest = (_LANE & segment) | (limit & ~segment)
    if mode == "bfly":
        source = _LANE ^ lane
        valid = source <= highest
    elif mode == "down":
        source = _LANE + lane
        valid = source <= highest
    elif mode == "up":
        source = _LANE - lane
        valid = source >= highest
    else:
        source = (_LANE & segment) | (lane & ~segment & 31)
        valid = source <= highest
    return np.where(valid, source, _LANE), valid


@lru_cache(maxsize=256)
def _same_sources(mode: str, lane: int, clamp: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `_sources` of operands that all lanes share: constants as a rule."""
    source, valid = _sources(mode, lane, clamp)
    source.setflags(write=False)
    valid.setflags(write=False)
    return source, valid


class WarpOperations:
    """Shuffles, votes and matches of a batch. `mask` is the lanes that run, None for all."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.shape = batch.shape
        self.check = batch.checks.warp_sync

    def _per_warp(self, value: Array) -> np.ndarray:
        return over_lanes(value, self.shape).reshape(-1, 32)

    def _check_members(self, named: Array, mask: Array, site: int, what: str) -> None:
        """Refuse masks that list lanes which do not run now, unless they have exited."""
        if mask is None or not self.check:
            return
        active = warp_bits(mask, self.shape)
        alive_mask = self.batch.scheduler.alive_lanes()
        alive = active if alive_mask is None else warp_bits(alive_mask, self.shape)
        if alive_mask is None:
            alive = np.full_like(active, 0xFFFFFFFF)
        absent = self._per_warp(named).astype(np.uint32) & (alive & ~active)[:, None]
        bad = (absent != 0) & self._per_warp(mask)
        if bad.any():
            lanes = np.flatnonzero(bad)
            missing = int(absent.flat[lanes[0]])
            listed = [i for i in range(32) if missing >> i & 1]
            raise self.batch.fault(
                WarpSyncError,
                f"{what} whose mask names lanes that are not here (divergence): lanes {listed}",
                site,
                lanes,
            )

    def converged(self, mask: Array, site: int, what: str) -> None:
        """Refuse an ``.aligned`` instruction that only some lanes of a warp execute."""
        if mask is None:
            return
        active = self._per_warp(mask)
        partial: Any = active.any(1) & ~active.all(1)
        if partial.any():
            raise self.batch.fault(
                WarpSyncError,
                f"{what} needs all 32 lanes of the warp, but only some are here (divergence, or "
                "threads that returned)",
                site,
                np.flatnonzero(active & partial[:, None]),
            )

    def shuffle(
        self,
        mode: str,
        value: Array,
        lane: Array,
        clamp: Array,
        named: Array,
        mask: Array,
        site: int,
    ) -> tuple[Array, Array]:
        """Return the value of another lane, and whether that lane was in range (``shfl.sync``).

        `clamp` packs, as PTX does, the segment mask (bits 8-12) and the clamp value (0-4).
        """
        self._check_members(named, mask, site, f"shfl.sync.{mode}")
        values = self._per_warp(value)
        if np.ndim(lane) == np.ndim(clamp) == 0:
            source, valid = _same_sources(mode, int(lane), int(clamp))
        else:
            b = np.asarray(lane).astype(np.int64)
            c = np.asarray(clamp).astype(np.int64)
            source, valid = _sources(
                mode, self._per_warp(b) if b.ndim else b, self._per_warp(c) if c.ndim else c
            )
        if mask is not None and self.check:
            running = self._per_warp(mask)
            there = np.take_along_axis(running, np.broadcast_to(source, running.shape), 1)
            bad = running & ~there
            if bad.any():
                raise self.batch.fault(
                    WarpSyncError,
                    f"shfl.sync.{mode} reads the value of a lane that is not here (it returned, "
                    "or the block has fewer threads)",
                    site,
                    np.flatnonzero(bad),
                )
        one = source.ndim == 1  # every warp alike
        result = values.take(source, 1) if one else np.take_along_axis(values, source, 1)
        return result.reshape(self.shape), np.broadcast_to(valid, values.shape).reshape(self.shape)

    def vote(self, mode: str, predicate: Array, named: Array, mask: Array, site: int) -> Array:
        """Combine a predicate over the named lanes (``vote.sync``)."""
        self._check_members(named, mask, site, f"vote.sync.{mode}")
        votes = self._per_warp(predicate)
        member = (self._per_warp(named).astype(np.uint32) >> _LANE.astype(np.uint32) & 1) != 0
        if mask is not None:
            member = member & self._per_warp(mask)
        if mode == "ballot":
            result: np.ndarray = warp_bits(votes & member, votes.shape)[:, None]
        elif mode == "any":
            result = (votes & member).any(1, keepdims=True)
        elif mode == "all":
            result = (votes | ~member).all(1, keepdims=True)
        else:  # uni
            first = (votes & member).any(1, keepdims=True)
            result = ~first | (votes | ~member).all(1, keepdims=True)
        return np.broadcast_to(result, votes.shape).reshape(self.shape)

    def active_mask(self, mask: Array) -> Array:
        """Return the lanes that run, one uint32 per warp (``activemask``)."""
        bits = warp_bits(True if mask is None else mask, self.shape)
        return np.repeat(bits, 32).reshape(self.shape)

    def match(
        self, mode: str, value: Array, named: Array, mask: Array, site: int
    ) -> tuple[Array, Array]:
        """Return the lanes that hold the same value (``match.sync``), and whether all do."""
        self._check_members(named, mask, site, f"match.{mode}.sync")
        values = self._per_warp(value)
        member = (self._per_warp(named).astype(np.uint32) >> _LANE.astype(np.uint32) & 1) != 0
        if mask is not None:
            member = member & self._per_warp(mask)
        same = (values[:, :, None] == values[:, None, :]) & member[:, None, :]
        bits = np.packbits(same, axis=2, bitorder="little").view("<u4")[..., 0]
        everyone = warp_bits(member, member.shape)[:, None]
        agree = bits == everyone
        if mode == "all":
            bits = np.where(agree, bits, np.uint32(0))
        return bits.reshape(self.shape), agree.reshape(self.shape)
