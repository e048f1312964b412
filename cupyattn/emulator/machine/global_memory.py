"""Global memory: the arguments' own arrays, at made-up addresses far apart.

Nothing is copied. Arrays whose bytes overlap (q, k and v as views of one packed array) form one
`Region`; a region is 64 GiB of addresses away from the next, so that even a wild overrun lands in
none. As on a GPU, an allocation (the array that owns the memory) starts at a multiple of 4096, so
that what a launch does and reports does not depend on where NumPy put it; alignments up to the 16
bytes that NumPy guarantees, which a host may base its choice of kernel on, are the real ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cupyattn.emulator.checks import Checks
from cupyattn.emulator.errors import ConstWriteError, LaunchError, OutOfBoundsError
from cupyattn.emulator.machine.lanes import Array, Lanes, Mask, over_lanes
from cupyattn.emulator.machine.memory import ELEMENT, MemoryPiece, MemorySpace, broadcast_active
from cupyattn.emulator.report import Report


def check_byte_order(dtype: np.dtype) -> None:
    """Refuse numbers that the kernel would read wrong."""
    if not dtype.isnative:
        raise LaunchError(
            f"got {dtype.str if dtype.names is None else dtype}, numbers in the other byte order; "
            "allowed: native byte order, which the kernel reads: "
            "x.astype(x.dtype.newbyteorder('='))"
        )


@dataclass
class Argument:
    """A pointer argument with what the checks should know about it.

    Attributes
    ----------
    array : numpy.ndarray
        Any strides; the kernel gets the address of element 0 and writes through to it.
    name : str
        For messages; the parameter's own name if empty.
    const : bool
        Stores to it are errors. Arrays that NumPy has marked read-only are const anyway.
    exact : bool
        Of a strided view, only the elements may be touched (default); False allows the whole range
        of bytes that the view spans.
    """

    array: np.ndarray
    name: str = ""
    const: bool = False
    exact: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.array, np.ndarray):
            raise LaunchError(
                f"Argument.array has type {type(self.array).__name__}; allowed: a NumPy array; the "
                "kernel gets its address"
            )
        if self.array.dtype.hasobject:
            raise LaunchError(
                "an array of Python objects; allowed: arrays of numbers (give it a dtype)"
            )
        check_byte_order(self.array.dtype)

    @property
    def covers_range(self) -> bool:
        """Whether every byte between the first and the last may be touched."""
        if not self.exact or self.array.flags.c_contiguous or self.array.flags.f_contiguous:
            return True
        # a transposed contiguous array has no gaps either
        axes = sorted(zip(self.array.strides, self.array.shape, strict=True))
        expected = self.array.itemsize
        for stride, extent in axes:
            if extent == 1:
                continue
            if stride != expected:
                return False
            expected *= extent
        return True


_SPACING = 1 << 36
_PAGE = 4096
_ALIGNMENT = 16


class _Bytes:
    """A range of memory that NumPy can read as bytes; it keeps the owner alive."""

    def __init__(self, start: int, size: int, owner: object, read_only: bool) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (start, read_only),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def _byte_bounds(array: np.ndarray) -> tuple[int, int]:
    low = high = array.ctypes.data
    for extent, stride in zip(array.shape, array.strides, strict=True):
        low += min(0, (extent - 1) * stride)
        high += max(0, (extent - 1) * stride)
    return low, high + array.itemsize


def _offset_in_page(low: int, array: np.ndarray) -> int:
    """Return the position of address `low` in a page if the owner of `array` starts one."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    start = _byte_bounds(owner)[0]
    if start % _ALIGNMENT:  # memory of another library, with another alignment
        return low % _PAGE
    return (low - start) % _PAGE


def _mark(covered: np.ndarray, array: np.ndarray) -> None:
    """Set the bytes that the elements of `array` occupy; `covered[0]` is its first byte."""
    run, axes = array.itemsize, array.ndim
    while axes and array.strides[axes - 1] == run:  # trailing axes without gaps: one long run
        axes -= 1
        run *= array.shape[axes]
    shape, strides = (*array.shape[:axes], run), (*array.strides[:axes], 1)
    np.lib.stride_tricks.as_strided(covered, shape, strides)[...] = True


def _all_bytes(covered: np.ndarray, skip: int, size: int) -> np.ndarray:
    """Return for every element of `size` bytes from `skip` on whether all its bytes are set."""
    count = max(0, covered.size - skip) // size
    width = min(size, 8)
    words = covered[skip : skip + count * size].view(f"u{width}")
    full = words == np.full(width, True).view(words.dtype)[0]
    return full[::2] & full[1::2] if size == 16 else full


@dataclass
class Region:
    """A range of memory that one or several overlapping arguments cover.

    Attributes
    ----------
    low, high : int
        Real addresses.
    base : int
        Address of `low` as the kernel sees it.
    """

    low: int
    high: int
    arguments: list[Argument]
    base: int = 0
    elements: dict[int, np.ndarray] = field(default_factory=dict)
    start: dict[int, np.ndarray] = field(default_factory=dict)  # address of elements[size][0]
    limit: dict[int, int] = field(default_factory=dict)  # largest valid offset from `start`

    def __post_init__(self) -> None:
        read_only = all(not a.array.flags.writeable for a in self.arguments)
        self._gaps: dict[tuple[int, bool], np.ndarray | None] = {}
        self.data = np.asarray(_Bytes(self.low, self.high - self.low, self.arguments, read_only))
        const = [a.const or not a.array.flags.writeable for a in self.arguments]
        self.all_const = all(const)
        whole = [a.covers_range for a in self.arguments]
        # True: one argument covers the region, every byte of it may be touched alike
        self.simple = len(self.arguments) == 1 and whole[0]

    def place(self, base: int) -> None:
        """Give the region its address."""
        self.base = base
        for size, dtype in ELEMENT.items():
            skip = -base % size
            count = max(0, self.high - self.low - skip) // size
            self.elements[size] = self.data[skip : skip + count * size].view(dtype)
            self.start[size] = np.asarray(base + skip, np.uint64)
            self.limit[size] = (count - 1) * size

    def allowed(self, size: int, write: bool) -> np.ndarray | None:
        """Return, per aligned element of `size` bytes, whether it may be touched; None for all."""
        if self.simple and not (write and self.all_const):
            return None
        key = (size, write)
        if key not in self._gaps:
            covered = np.zeros(self.high - self.low, bool)
            for argument in self.arguments:
                if write and (argument.const or not argument.array.flags.writeable):
                    continue
                array = argument.array
                if argument.covers_range:
                    low, high = _byte_bounds(array)
                    covered[low - self.low : high - self.low] = True
                    continue
                _mark(covered[array.ctypes.data - self.low :], array)
            per_element = _all_bytes(covered, -self.base % size, size)
            self._gaps[key] = None if per_element.all() else per_element
        return self._gaps[key]


class DeviceMemory:
    """The regions of one launch."""

    def __init__(self, arguments: list[Argument]) -> None:
        bounds = sorted(
            ((*_byte_bounds(a.array), i) for i, a in enumerate(arguments) if a.array.size),
        )
        self.regions: list[Region] = []
        self.arguments = arguments
        start, end, members = 0, 0, []  # type: int, int, list[Argument]
        for low, high, i in bounds:
            if members and low < end:
                end = max(end, high)
                members.append(arguments[i])
                continue
            if members:
                self.regions.append(Region(start, end, members))
            start, end, members = low, high, [arguments[i]]
        if members:
            self.regions.append(Region(start, end, members))
        for number, region in enumerate(self.regions):
            offset = _offset_in_page(region.low, region.arguments[0].array)
            region.place((number + 1) * _SPACING + offset)

    def address(self, array: np.ndarray) -> int:
        """Return the address of the first element, as the kernel sees it."""
        real = array.ctypes.data
        if array.size:
            for region in self.regions:
                if region.low <= real < region.high:
                    return region.base + real - region.low
        return (len(self.regions) + 2) * _SPACING + real % _PAGE  # empty: nothing to touch

    def nearest(self, address: int, size: int) -> str:
        """Say where `address` lies relative to the closest argument."""
        best: tuple[int, str] | None = None
        for argument in self.arguments:
            low = high = self.address(argument.array)
            if argument.array.size:
                shift = low - argument.array.ctypes.data
                low, high = (bound + shift for bound in _byte_bounds(argument.array))
            if address < low:
                distance, text = low - address, f"{low - address} bytes before the start of"
            elif address >= high:
                distance, text = address - high + 1, f"{address - high} bytes past the end of"
            elif address + size > high:
                distance, text = 0, f"its last {address + size - high} bytes past the end of"
            else:
                distance, text = (
                    0,
                    f"between the elements of the strided view, byte {address - low} of",
                )
            array = argument.array
            what = f"`{argument.name}` ({array.dtype} {array.shape}, {high - low} bytes)"
            if best is None or distance < best[0]:
                best = distance, f"{text} {what}"
        if address < _PAGE:
            return "a null pointer"
        if best is None or best[0] > _SPACING // 2:
            return "near no argument: not a pointer that the kernel was given"
        return best[1]


class GlobalMemory(MemorySpace):
    """Global memory as a batch sees it."""

    name = "global"
    flushes_sums = True

    def __init__(
        self,
        lanes: Lanes,
        checks: Checks,
        device: DeviceMemory,
        recent: list[Region | None],
        report: Report | None,
    ) -> None:
        super().__init__(lanes, checks)
        self.device = device
        self.recent = recent  # by instruction: where it went last time
        self.report = report

    def locate(
        self, address: Array, size: int, mask: Mask, site: int, write: bool
    ) -> list[MemoryPiece]:
        """Translate addresses; see `MemorySpace.locate`."""
        if self.report is not None:
            self.report.global_access(site, address, size, mask, self.lanes)
        address = broadcast_active(address, mask, self.shape)
        if address.size == 0:
            return []
        if self.checks.alignment and size > 1:
            self._check_alignment(address, size, mask, site)
        recent = self.recent[site]
        for region in self.device.regions if recent is None else (recent,):
            offset = address - region.start[size]
            if offset.max() <= region.limit[size]:  # addresses below the start wrap around
                self.recent[site] = region
                return [self._piece(region, offset, address, size, mask, site, write, None)]
        return self._locate_anywhere(address, size, mask, site, write)

    def _piece(
        self,
        region: Region,
        offset: Array,
        address: Array,
        size: int,
        mask: Mask,
        site: int,
        write: bool,
        lanes: np.ndarray | None,
    ) -> MemoryPiece:
        index = (offset >> (size.bit_length() - 1)).view(np.int64)
        check = self.checks.const_writes if write else self.checks.bounds
        if check or write:
            allowed = region.allowed(size, write)
            if allowed is not None and not allowed.take(index).all():
                self._refuse(region, index, address, size, mask, site, write, lanes, allowed)
        return MemoryPiece(region.elements[size], index, lanes)

    def _refuse(
        self,
        region: Region,
        index: Array,
        address: Array,
        size: int,
        mask: Mask,
        site: int,
        write: bool,
        lanes: np.ndarray | None,
        allowed: np.ndarray,
    ) -> None:
        bad = ~allowed.take(index)
        if lanes is not None:
            whole = np.zeros(address.shape, bool)
            whole[lanes] = bad
            bad = whole
        readable = region.allowed(size, False)
        first = int(np.asarray(address)[np.broadcast_to(bad, np.shape(address))][0])
        if write and (readable is None or readable[(first - int(region.start[size])) // size]):
            if not self.checks.const_writes and any(
                a.array.flags.writeable for a in region.arguments
            ):
                return
            names = ", ".join(f"`{a.name}`" for a in region.arguments if a.const) or "read-only"
            raise self.lanes.fault(
                ConstWriteError,
                f"{size}-byte store to a const argument ({names}) at {first:#x}",
                site,
                self.lanes.numbers(bad, mask),
            )
        if self.checks.bounds:
            self._out_of_bounds(bad, address, size, mask, site, write)

    def _locate_anywhere(
        self, address: Array, size: int, mask: Mask, site: int, write: bool
    ) -> list[MemoryPiece]:
        """Translate addresses that may lie in several regions, or in none."""
        if mask is None:
            address = over_lanes(address, self.shape)
            exists = self.lanes.exists
        else:
            exists = None
        remaining = np.ones(address.shape, bool) if exists is None else exists.copy()
        pieces = []
        for region in self.device.regions:
            offset = address - region.start[size]
            inside = remaining & (offset <= np.uint64(max(region.limit[size], 0)))
            if region.limit[size] < 0 or not inside.any():
                continue
            remaining &= ~inside
            self.recent[site] = region
            if inside.all():
                return [self._piece(region, offset, address, size, mask, site, write, None)]
            pieces.append(
                self._piece(region, offset[inside], address, size, mask, site, write, inside)
            )
        if remaining.any():
            self._out_of_bounds(remaining, address, size, mask, site, write)
        return pieces

    def _out_of_bounds(
        self, bad: Array, address: Array, size: int, mask: Mask, site: int, write: bool
    ) -> None:
        address = np.asarray(address)
        first = int(address[np.broadcast_to(bad, address.shape)][0])
        near = self.device.nearest(first, size)
        raise self.lanes.fault(
            OutOfBoundsError,
            f"out-of-bounds {size}-byte {'store to' if write else 'load from'} global memory at "
            f"{first:#x}, {near}",
            site,
            self.lanes.numbers(bad, mask),
        )
