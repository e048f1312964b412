"""Lanes of a warp that wait for each other: every ``.sync`` instruction with a member mask.

From Volta on, the lanes of a warp run on their own. ``shfl.sync``, ``vote.sync``, ``match.sync``
and ``bar.warp.sync`` make a lane wait until every lane that its mask names, and that has not
ended, executes the same opcode with the same mask (PTX ISA, sections of these instructions): in a
loop with ``continue`` the others may still be on their way around. It need not be the same
instruction: lanes that come to several ones with one opcode and mask exchange with each other.

Compilers hold hardware to that. Where lanes may meet from several instructions, ptxas (13.0) has
them all call one routine on sm_75, with the exchange in it, and gathers them on sm_90 with
``WARPSYNC.COLLECTIVE``; at a lone instruction it writes a plain ``WARPSYNC``. The tests compare
random programs of both kinds with a GPU.

So a lane that has to wait for others is parked with its operands, like a lane at a barrier. A
complete group performs its exchange and goes on after the instruction, where ``sync_result`` reads
the result. If all living lanes are here with one mask, none of this is needed.

Ended lanes are not waited for. But a lane that was running when another came to wait for it, and
that ends without coming, is reported. In PTX the others go on, with one lane less than the mask
says; on a GPU they may hang, since the missing lane may first wait for them where branches join.

What shuffles, votes and matches exchange are functions of the lanes' values (`exchange_of`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cupyattn.emulator.checks import Checks
from cupyattn.emulator.errors import BarrierError, KernelFault, WarpSyncError
from cupyattn.emulator.machine.lanes import Array, Lanes, Positions, Step, over_lanes
from cupyattn.emulator.machine.races import SharedMemoryTracker

Shape = tuple[int, int]
Result = tuple[
    Array | np.uint32, Array | np.bool_
]  # the value (uint32) and the predicate that a lane gets

LANE = np.arange(32)


def warp_bits(mask: Array | bool, shape: Shape) -> np.ndarray:
    """Pack a mask over lanes into one uint32 per warp, lane 0 the lowest bit."""
    lanes = np.broadcast_to(mask, shape).reshape(-1, 32)
    return np.packbits(lanes, axis=1, bitorder="little").view("<u4")[:, 0]


def per_warp(value: Array, shape: Shape) -> np.ndarray:
    """Return `value` as (warps, 32)."""
    lanes: np.ndarray = over_lanes(value, shape).reshape(-1, 32)
    return lanes


def _sources(mode: str, lane: Array | int, clamp: Array | int) -> tuple[np.ndarray, np.ndarray]:
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
    """Return the exchange of an opcode such as ``"shfl.sync.bfly.b32"``."""
    parts = opcode.split(".")
    if parts[0] == "shfl":
        return Exchange(opcode, parts[2], ("u4", "u4", "u4"), _shuffle)
    if parts[0] == "vote":
        return Exchange(opcode, parts[2], ("?",), _vote)
    if parts[0] == "match":
        return Exchange(opcode, parts[1], ("u8" if parts[-1] == "b64" else "u4",), _match)
    return Exchange(opcode, "", (), None)


_EVERYONE = 0xFFFFFFFF
_BIT = np.uint32(1) << LANE.astype(np.uint32)


def _listed(bits: int) -> list[int]:
    return [lane for lane in range(32) if bits >> lane & 1]


class WarpSync:
    """Meetings of lanes, and what they got there.

    Attributes
    ----------
    value, flag : array
        The result of the last exchange of every lane: a uint32 and a predicate.
    """

    def __init__(
        self,
        lanes: Lanes,
        checks: Checks,
        positions: Positions,
        tracker: SharedMemoryTracker | None,
    ) -> None:
        self.lanes = lanes
        self.shape = lanes.shape
        self.positions = positions
        self.tracker = tracker
        self.check = checks.warp_sync
        self.value: Array = np.zeros((), np.uint32)
        self.flag: Array = np.zeros((), bool)
        self.kinds: list[str] = []  # opcodes that lanes have waited at
        self.allocated = False

    def _allocate(self) -> None:
        if self.allocated:
            return
        self.allocated = True
        self.kind = np.full(self.shape, -1, np.int8)  # index into `kinds`, -1: not waiting here
        self.named = np.zeros(self.shape, np.uint32)
        self.living = np.zeros(self.shape, np.uint32)  # lanes of the warp that lived on arrival
        self.resume = np.zeros(self.shape, np.int32)  # block to run after the instruction
        self.site = np.zeros(self.shape, np.int32)
        self.operands = np.zeros((3, *self.shape), np.uint64)

    # ------------------------------------------------------------------ arriving
    def meet(
        self,
        opcode: str,
        operands: tuple[Array, ...],
        named: Array,
        target: int,
        mask: Array,
        merge: Array,
        site: int,
    ) -> Step | None:
        """Exchange `operands` with the lanes that `named` lists, and go on at block `target`.

        Returns
        -------
        Step or None
            How the running lanes go on, None if another step must be picked.
        """
        exchange = exchange_of(opcode)
        if merge is None and named.ndim == 0:  # all that live, with one mask
            if self.check and (mask is not None or int(named) != _EVERYONE):
                self._check_members(exchange, operands, named, mask, site)
            self.value, self.flag = exchange.of(operands, named, mask, self.shape)
            if exchange.function is None and self.tracker:
                self.tracker.clocks.sync_warps(mask, named)
            return target, mask, None
        here = np.ones(self.shape, bool) if mask is None else mask
        if self.check:
            self._check_own(exchange, named, here, site)
        if self._all_here(named, here):
            self._perform(exchange, operands, named, here, np.int32(site))
            return target, mask, merge
        self._park(exchange, operands, named, target, here, site)
        self.release()
        return None

    def _all_here(self, named: Array, here: np.ndarray) -> bool:
        """Tell whether all the running lanes can exchange without waiting for others."""
        members = per_warp(np.asarray(named, np.uint32), self.shape)
        running = here.reshape(-1, 32)
        absent = members & (self._living() & ~warp_bits(here, self.shape))[:, None]
        if (absent[running] != 0).any():
            return False
        if np.ndim(named) == 0 or (np.shape(named)[1] == 1):
            return True
        agree = self._groups(members, running, None)
        return not (members & ~agree & self._living()[:, None])[running].any()

    def _living(self) -> np.ndarray:
        """Return the lanes that have not ended, as bits of every warp."""
        alive = self.positions.alive
        return warp_bits(True if alive is None else alive, self.shape)

    @staticmethod
    def _groups(members: np.ndarray, waiting: np.ndarray, kind: np.ndarray | None) -> np.ndarray:
        """Return for every lane, as bits, the waiting lanes with the same mask (and kind)."""
        same = (members[:, :, None] == members[:, None, :]) & waiting[:, None, :]
        if kind is not None:
            same &= kind[:, :, None] == kind[:, None, :]
        bits: np.ndarray = np.packbits(same, axis=2, bitorder="little").view("<u4")[..., 0]
        return bits

    def _park(
        self,
        exchange: Exchange,
        operands: tuple[Array, ...],
        named: Array,
        target: int,
        here: np.ndarray,
        site: int,
    ) -> None:
        self._allocate()
        self.living[here] = np.repeat(self._living(), 32).reshape(self.shape)[here]
        self.positions.wait(here, here)
        if exchange.name not in self.kinds:
            self.kinds.append(exchange.name)
        self.kind[here] = self.kinds.index(exchange.name)
        self.named[here] = np.broadcast_to(named, self.shape)[here]
        self.resume[here] = target
        self.site[here] = site
        for kept, operand in zip(self.operands, operands, strict=False):
            kept[here] = np.broadcast_to(operand, self.shape)[here]

    # ------------------------------------------------------------------ leaving
    def release(self) -> bool:
        """Let the groups go on of which every living lane is here; tell whether there were any."""
        if not self.allocated:
            return False
        waiting = self.kind >= 0
        if not waiting.any():
            return False
        members, running = self.named.reshape(-1, 32), waiting.reshape(-1, 32)
        warps = np.flatnonzero(running.any(1))
        group = self._groups(members[warps], running[warps], self.kind.reshape(-1, 32)[warps])
        missing = members[warps] & ~group & self._living()[warps, None]
        complete = np.zeros(running.shape, bool)
        complete[warps] = missing == 0
        opened = waiting & complete.reshape(self.shape)
        if not opened.any():
            return False
        if self.check:
            self._check_ended(opened)
        for number in np.unique(self.kind[opened]):
            lanes = opened & (self.kind == number)
            exchange = exchange_of(self.kinds[number])
            operands = tuple(
                kept.astype(dtype)
                for kept, dtype in zip(self.operands, exchange.dtypes, strict=False)
            )
            self._perform(exchange, operands, self.named, lanes, self.site)
        self.positions.each[opened] = self.resume[opened]
        self.kind[opened] = -1
        return True

    def _perform(
        self,
        exchange: Exchange,
        operands: tuple[Array, ...],
        named: Array,
        lanes: np.ndarray,
        site: Array,
    ) -> None:
        """Exchange between `lanes`, and keep what they got; other lanes may still need theirs."""
        if exchange.function is None:
            if self.tracker:
                self.tracker.clocks.sync_warps(lanes, named)
            return
        if self.check and exchange.is_shuffle:
            self._check_sources(exchange, operands, named, lanes, site)
        value, flag = exchange.of(operands, named, lanes, self.shape)
        self.value = np.where(lanes, value, self.value)
        self.flag = np.where(lanes, flag, self.flag)

    # ------------------------------------------------------------------ faults
    def _check_members(
        self, exchange: Exchange, operands: tuple[Array, ...], named: Array, mask: Array, site: int
    ) -> None:
        here = np.ones(self.shape, bool) if mask is None else mask
        self._check_own(exchange, named, here, site)
        if exchange.is_shuffle:
            self._check_sources(exchange, operands, named, here, np.int32(site))

    def _check_own(self, exchange: Exchange, named: Array, here: np.ndarray, site: int) -> None:
        """Refuse a mask without the lane that passes it."""
        if np.ndim(named) == 0 and int(named) == _EVERYONE:
            return
        members = per_warp(np.asarray(named, np.uint32), self.shape)
        bad = here.reshape(-1, 32) & (members & _BIT == 0)
        if bad.any():
            lanes = np.flatnonzero(bad)
            raise self.lanes.fault(
                WarpSyncError,
                f"{exchange.name} by lane {lanes[0] % 32} with the mask "
                f"{int(members.flat[lanes[0]]):#010x}, which does not name that lane itself: set "
                "the bit of every lane that executes it",
                site,
                lanes,
            )

    def _check_sources(
        self,
        exchange: Exchange,
        operands: tuple[Array, ...],
        named: Array,
        lanes: np.ndarray,
        site: Array,
    ) -> None:
        """Refuse shuffles that read from a lane that takes no part."""
        _, lane, clamp = operands
        source, _ = shuffle_sources(exchange.mode, lane, clamp, self.shape)
        running = lanes.reshape(-1, 32)
        source = np.broadcast_to(source, running.shape)
        members = per_warp(np.asarray(named, np.uint32), self.shape)
        there = np.take_along_axis(running, source, 1)
        listed = (members >> source.astype(np.uint32) & 1) != 0
        bad = running & ~(there & listed)
        if not bad.any():
            return
        first = np.flatnonzero(bad)[0]
        why = (
            f"which its mask {int(members.flat[first]):#010x} does not name"
            if there.flat[first]
            else "which is not here (it returned, or the block has fewer threads)"
        )
        raise self.lanes.fault(
            WarpSyncError,
            f"{exchange.name} by lane {first % 32} reads the value of lane "
            f"{int(source.flat[first])}, {why}",
            int(np.broadcast_to(site, self.shape).flat[first]),
            np.flatnonzero(bad),
        )

    def _check_ended(self, opened: np.ndarray) -> None:
        """Refuse lanes that ended while others waited for them, except at ``bar.warp.sync``."""
        ended = (self.named & self.living).reshape(-1, 32) & ~self._living()[:, None]
        bad = opened & (ended != 0).reshape(self.shape)
        if "bar.warp.sync" in self.kinds:
            bad &= self.kind != self.kinds.index("bar.warp.sync")
        if bad.any():
            lanes = np.flatnonzero(bad)
            first = int(lanes[0])
            name, named = self.kinds[self.kind.flat[first]], int(self.named.flat[first])
            raise self.lanes.fault(
                WarpSyncError,
                f"{name} whose mask {named:#010x} names lanes that never come (divergence; they "
                f"ended without reaching it): lanes {_listed(int(ended.flat[first]))}",
                int(self.site.flat[first]),
                lanes,
            )

    def stuck(self, site_of: Callable[[int], int]) -> KernelFault | None:
        """Return why the first lane that waits here waits forever, None if no lane does.

        `site_of` returns the instruction at which a lane waits that does not wait here.
        """
        if not self.allocated or not (self.kind >= 0).any():
            return None
        lanes = np.flatnonzero(self.kind >= 0)
        first = int(lanes[0])
        name, named = self.kinds[self.kind.flat[first]], int(self.named.flat[first])
        lanes = lanes[self.site.flat[lanes] == self.site.flat[first]]
        group = self._groups(
            self.named.reshape(-1, 32), (self.kind >= 0).reshape(-1, 32), self.kind.reshape(-1, 32)
        )
        missing = named & ~int(group.flat[first]) & int(self._living()[first // 32])
        other = first // 32 * 32 + _listed(missing)[0]
        return self.lanes.fault(
            BarrierError if name == "bar.warp.sync" else WarpSyncError,
            f"deadlock: {name} whose mask {named:#010x} names lanes that never come (divergence): "
            f"lanes {_listed(missing)}; {self._instead(other, name, site_of)}",
            int(self.site.flat[first]),
            lanes,
        )

    def _instead(self, other: int, name: str, site_of: Callable[[int], int]) -> str:
        """Describe what a lane does instead of coming to the instruction `name`."""
        lane = other % 32
        kind = int(self.kind.flat[other])
        if kind < 0:
            return f"lane {lane} waits at {self.lanes.describe(site_of(other))}"
        place = self.lanes.describe(int(self.site.flat[other]))
        if self.kinds[kind] == name:
            return (
                f"lane {lane} passes the mask {int(self.named.flat[other]):#010x} at {place}: all "
                "lanes that a mask names must pass the same mask"
            )
        return f"lane {lane} waits at {place}"
