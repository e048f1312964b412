"""Counts of a launch: bank conflicts, sectors, instruction mix, bytes, per source line.

What is counted, and how far to trust it:

- Bank conflicts, in *ways*: shared memory has 32 banks of 4 bytes, and different words
  of one bank need a pass each. 1 way is no conflict, 2 ways take twice as long. Exact.
- *Sectors* of global memory, 32 bytes each: how many a warp touches in one request, and how many of
  them would have held its data. Exact, without caches.
- Bytes that lanes asked for, and divergence (a warp that ran with only some of its live lanes).
  Exact.
- Instructions by *pipe*, the part of a multiprocessor that they keep busy (``pipe``; ``lds``,
  ``ldsm``, ``ldg`` and others share the load-store unit, LSU). They are those of the PTX, of which
  the assembler fuses and removes some.

Time it cannot know. ``python -m cupyattn profile`` orders the lines of a kernel by the cycles for
which they keep the pipes of a Turing multiprocessor busy, without latencies, caches or overlap.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

import numpy as np

from cupyattn.emulator.machine.lanes import Array, Lanes, Mask, Positions
from cupyattn.emulator.program import Program
from cupyattn.emulator.ptx.model import RECEIPT, Statement

_XU = frozenset(
    ["ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "popc", "brev", "bfind"]
)
_FMA = frozenset(["add", "sub", "mul", "fma", "mad", "div"])


def pipe(instruction: Statement) -> str:
    """Return the hardware pipe that a PTX instruction keeps busy, as far as PTX can tell.

    ``tensor`` (mma), ``integer_tensor`` (mma of integers), ``fma`` (float32 arithmetic, integer
    multiplication), ``half``, ``double``, ``alu`` (integer and logic), ``xu`` (special functions,
    conversions), ``lds`` (shared loads and stores), ``ldsm`` (ldmatrix), ``ldg`` (global),
    ``local``, ``atomic``, ``shuffle``, ``control``, and ``move``, most of which the assembler
    removes.
    """
    root, parts = instruction.root, instruction.parts
    kind = parts[-1]
    if root == "mma":
        return "integer_tensor" if kind == "s32" else "tensor"
    if root in ("ldmatrix", "movmatrix"):
        return "ldsm"
    if root in ("ld", "st", "ldu"):
        for space, name in (("shared", "lds"), ("local", "local"), ("param", "move")):
            if space in parts:
                return name
        return "ldg"
    if root == "cp":
        return "ldg" if "global" in parts else "control"
    if root in ("atom", "red"):
        return "atomic"
    if root in ("shfl", "vote", "match"):
        return "shuffle"
    if root in ("bra", "brx", "ret", "exit", "bar", "barrier", "membar", "fence", "trap"):
        return "control"
    if root in ("mov", "cvta", "activemask"):
        return "move"
    if kind == "f64":
        return "double"
    if root in _XU:
        return "xu"
    if root == "cvt" and parts[-2:] == ("f32", "f16"):
        return "half"  # the assembler makes an HADD2.F32 of it
    if root == "cvt":
        return "xu" if {"f16", "f32", "bf16"} & set(parts[-2:]) else "alu"
    if kind in ("f16", "f16x2"):
        return "half"
    if root in _FMA and (kind == "f32" or root in ("mul", "mad")):
        return "fma"
    return "alu"


SECTOR_BYTES = 32
_BANK_ROW = 128  # 32 banks of 4 bytes


def bank_wavefronts(
    offsets: np.ndarray, size: int, active: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Count the passes that shared memory needs for accesses of whole warps.

    Wide accesses go in phases of 32, 16 or 8 lanes (4, 8, 16 bytes each), 128 bytes a phase. In a
    phase, different words in one bank need a pass each; lanes that want the same word share it.

    Parameters
    ----------
    offsets : (..., lanes) array
        Byte offsets, the lanes of a warp (or of one ldmatrix) along the last axis.
    size : int
        Bytes per lane.
    active : array of bool or None
        Lanes that take part, None for all.

    Returns
    -------
    (wavefronts, phases) : per warp
        Without bank conflicts the two are equal.
    """
    unit = max(size, 4)
    banks = _BANK_ROW // unit
    lanes = offsets.shape[-1]
    rows = offsets.reshape(-1, min(banks, lanes)).astype(np.int64)
    word = rows // unit
    key = ((np.arange(len(rows))[:, None] * banks + word % banks) << 20) + word // banks
    if active is not None:
        key = key[np.broadcast_to(active, offsets.shape).reshape(rows.shape)]
    distinct = np.unique(key)
    ways = np.bincount(distinct >> 20, minlength=len(rows) * banks).reshape(-1, banks).max(1)
    per_warp = ways.reshape(-1, max(1, lanes // banks))
    return per_warp.sum(1), (per_warp > 0).sum(1)


def sector_counts(
    addresses: np.ndarray, size: int, active: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Count the 32-byte sectors that each warp touches, and the fewest that could hold its data.

    Parameters
    ----------
    addresses : (warps, 32) array
    size : int
        Bytes per lane.
    active : (warps, 32) array of bool or None

    Returns
    -------
    (sectors, ideal) : (warps,) arrays
        0 for warps without an active lane.
    """
    address = addresses.astype(np.int64)
    if active is not None:
        address = np.where(active, address, -1)
    ordered = np.sort(address, axis=1)
    valid = ordered >= 0

    def distinct(values: np.ndarray) -> np.ndarray:
        new = np.ones(values.shape, bool)
        new[:, 1:] = values[:, 1:] != values[:, :-1]
        return (new & valid).sum(1)

    ideal = -(-distinct(ordered) * size // SECTOR_BYTES)
    return distinct(ordered // SECTOR_BYTES), ideal


_RECEIPTS = frozenset(RECEIPT.values())


@dataclass
class Access:
    """Totals of one load, store or ldmatrix instruction.

    Attributes
    ----------
    requests : int
        Warps that executed it with at least one lane.
    wavefronts, phases : int
        Passes that shared memory needed, and the passes needed without bank conflicts.
    sectors, ideal_sectors : int
        32-byte sectors of global memory touched, and the fewest that could hold the data.
    bytes : int
        Bytes that the lanes asked for.
    """

    instruction: Statement
    space: str
    write: bool
    requests: int = 0
    wavefronts: int = 0
    phases: int = 0
    worst: float = 0.0
    sectors: int = 0
    ideal_sectors: int = 0
    bytes: int = 0

    @property
    def ways(self) -> float:
        """Bank-conflict ways: 1 is conflict-free."""
        return self.wavefronts / self.phases if self.phases else 1.0

    @property
    def efficiency(self) -> float:
        """Share of the touched sectors that was needed."""
        return self.ideal_sectors / self.sectors if self.sectors else 1.0

    @property
    def sectors_per_request(self) -> float:
        """Sectors that a warp touches on average."""
        return self.sectors / self.requests if self.requests else 0.0


@dataclass
class LineReport:
    """Everything that one source line did.

    Attributes
    ----------
    instructions : Counter
        Executed warp instructions by pipe (see ``pipe``).
    accesses : list of Access
        Its loads and stores.
    diverged_steps : int
        How often a warp came here with only some of its live lanes.
    """

    file: str
    line: int
    instructions: Counter[str]
    accesses: list[Access]
    diverged_steps: int = 0

    def access_totals(self) -> list[Access]:
        """Return one `Access` for each opcode and space: an unrolled loop has many of each."""
        return _by_opcode(self.accesses)


def _by_opcode(accesses: list[Access]) -> list[Access]:
    """Add up the accesses of the same instruction (an unrolled loop has many) to one space."""
    total: dict[tuple[str, str], Access] = {}
    for a in accesses:
        key = a.instruction.opcode, a.space
        t = total.setdefault(key, Access(a.instruction, a.space, a.write))
        t.requests += a.requests
        t.wavefronts += a.wavefronts
        t.phases += a.phases
        t.sectors += a.sectors
        t.ideal_sectors += a.ideal_sectors
        t.bytes += a.bytes
        t.worst = max(t.worst, a.worst)
    return list(total.values())


class _KernelData:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.executions = np.zeros(len(program.blocks), np.int64)
        self.accesses: dict[tuple[int, str], Access] = {}  # by instruction and space
        self.diverged = np.zeros(len(program.blocks), np.int64)
        self.atomic_updates = 0


class Report:
    """Collects what the launches that it is passed to did; totals over all of them.

    Examples
    --------
    >>> from cupyattn import emulator
    >>> report = emulator.Report()
    >>> report.bank_conflict_ways, report.instruction_mix
    (1.0, {})
    """

    def __init__(self) -> None:
        self._kernels: dict[int, _KernelData] = {}  # by id of the program
        self._current: _KernelData | None = None

    # ------------------------------------------------------------------ results
    @property
    def accesses(self) -> list[Access]:
        """Every memory instruction that ran."""
        return [
            access for data in self._kernels.values() for _, access in sorted(data.accesses.items())
        ]

    @property
    def bank_conflict_ways(self) -> float:
        """Shared-memory passes per conflict-free pass, over all accesses; 1 is the best."""
        shared = [a for a in self.accesses if a.space == "shared"]
        phases = sum(a.phases for a in shared)
        return sum(a.wavefronts for a in shared) / phases if phases else 1.0

    @property
    def sector_efficiency(self) -> float:
        """Needed sectors per touched sector of global memory, over all accesses; 1 is the best."""
        touched = sum(a.sectors for a in self.accesses)
        return sum(a.ideal_sectors for a in self.accesses) / touched if touched else 1.0

    @property
    def instruction_mix(self) -> dict[str, int]:
        """Executed warp instructions by pipe (see ``pipe``)."""
        return dict(sum((line.instructions for line in self.lines), Counter()))

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Bytes that lanes asked for, by kind (``"global load"``); broadcasts count per lane."""
        total: Counter[str] = Counter()
        for a in self.accesses:
            total[f"{a.space} {'store' if a.write else 'load'}"] += a.bytes
        return dict(total)

    @property
    def dram_sectors_bytes(self) -> int:
        """Bytes of all touched global sectors, each access on its own (no cache)."""
        return SECTOR_BYTES * sum(a.sectors for a in self.accesses)

    @property
    def diverged_steps(self) -> int:
        """Basic blocks that a warp ran with only some of its live lanes, over all warps."""
        return sum(
            int(count)
            for data in self._kernels.values()
            for block, count in zip(data.program.blocks, data.diverged, strict=True)
            if data.program.instructions[block[0]].root not in _RECEIPTS
        )

    @property
    def atomic_updates(self) -> int:
        """Lanes that did an atomic update."""
        return sum(data.atomic_updates for data in self._kernels.values())

    @property
    def lines(self) -> list[LineReport]:
        """The counts of each source line, in order of file and line."""
        found: dict[tuple[str, int], LineReport] = {}
        for data in self._kernels.values():
            instructions = data.program.instructions
            counts = zip(data.program.blocks, data.executions, data.diverged, strict=True)
            for block, count, diverged in counts:
                if not count:
                    continue
                for site in block:
                    x = instructions[site]
                    if x.root in _RECEIPTS:
                        continue
                    line = found.setdefault(x.location, LineReport(*x.location, Counter(), []))
                    line.instructions[pipe(x)] += int(count)
                if instructions[block[0]].root in _RECEIPTS:
                    continue  # the rest of a block: its warps are counted already
                for location in {instructions[site].location for site in block}:
                    found[location].diverged_steps += int(diverged)
            for _, access in sorted(data.accesses.items()):
                found[access.instruction.location].accesses.append(access)
        return [found[key] for key in sorted(found)]

    @property
    def kernels(self) -> dict[str, Report]:
        """A report of each kernel that ran, by its name, in the order of their first launches."""
        reports: dict[str, Report] = {}
        for key, data in self._kernels.items():
            reports.setdefault(data.program.name, Report())._kernels[key] = data
        return reports

    def __str__(self) -> str:
        mix = sorted(self.instruction_mix.items(), key=lambda item: -item[1])
        text = [
            "warp instructions: " + ", ".join(f"{name} {count}" for name, count in mix),
            "bytes: " + ", ".join(f"{name} {n}" for name, n in self.bytes_moved.items()),
            f"bank-conflict ways {self.bank_conflict_ways:.2f}, sector efficiency "
            f"{self.sector_efficiency:.0%}, diverged steps {self.diverged_steps}, atomic updates "
            f"{self.atomic_updates}",
        ]
        for line in self.lines:
            where = f"{os.path.basename(line.file)}:{line.line}"
            for a in line.access_totals():
                cost = (
                    f"{a.ways:5.2f} ways"
                    if a.space == "shared"
                    else f"{a.sectors_per_request:5.1f} sectors/request, {a.efficiency:.0%}"
                )
                text.append(f"{where:>24}  {a.instruction.opcode:<44} {a.requests:>7} x {cost}")
        return "\n".join(text)

    # ------------------------------------------------------------------ filled while running
    def begin(self, program: Program) -> None:
        """Start counting for `program`."""
        # not by name: the specialisations of a kernel all have one
        if id(program) not in self._kernels:
            self._kernels[id(program)] = _KernelData(program)
        self._current = self._kernels[id(program)]

    def _data(self) -> _KernelData:
        assert self._current is not None
        return self._current

    def enter(self, block: int, mask: Array, positions: Positions) -> None:
        """Count a run of a basic block by every warp with a lane in `mask`."""
        data = self._data()
        if mask is None:
            data.executions[block] += positions.lanes.blocks * positions.lanes.warps
            return
        running = mask.reshape(-1, 32)
        busy = running.any(1)
        data.executions[block] += int(np.count_nonzero(busy))
        alive = positions.alive
        if alive is not None:
            partial = (running != alive.reshape(-1, 32)).any(1)
            data.diverged[block] += int(np.count_nonzero(busy & partial))

    def _access(self, site: int, space: str) -> Access:
        data = self._data()
        key = site, space  # cp.async accesses two spaces
        if key not in data.accesses:
            x = data.program.instructions[site]
            write = x.root in ("st", "red", "atom") or (x.root == "cp" and space == "shared")
            data.accesses[key] = Access(x, space, write)
        return data.accesses[key]

    def shared_access(self, site: int, address: Array, size: int, mask: Mask, lanes: Lanes) -> None:
        """Count a shared access of `size` bytes per lane."""
        address = np.asarray(address)
        if mask is None and (address.ndim < 2 or address.shape[0] == 1):  # every block alike
            offsets = np.broadcast_to(address, (1, lanes.threads)).reshape(-1, 32)
            self._wavefronts(site, offsets, size, None, lanes.blocks)
            return
        offsets = np.broadcast_to(address, lanes.shape).reshape(-1, 32)
        active = None if mask is None else np.broadcast_to(mask, lanes.shape).reshape(-1, 32)
        self._wavefronts(site, offsets, size, active, 1)

    def matrix_load(
        self, site: int, rows: np.ndarray, active: np.ndarray | None, times: int
    ) -> None:
        """Count an ldmatrix; `rows` holds the addresses of the lanes in use.

        Each warp in `rows` counts `times` times.
        """
        count = rows.shape[-1]
        used = None
        if active is not None:
            used = active[..., :count].reshape(-1, count)
        self._wavefronts(site, rows.reshape(-1, count), 16, used, times)

    def _wavefronts(self, site: int, offsets: Array, size: int, active: Mask, times: int) -> None:
        """Add what warps with these `offsets` cost, each counted `times` times."""
        wavefronts, phases = bank_wavefronts(offsets, size, active)
        access = self._access(site, "shared")
        busy = phases > 0
        if not busy.any():
            return
        access.requests += times * int(np.count_nonzero(busy))
        access.wavefronts += times * int(wavefronts.sum())
        access.phases += times * int(phases.sum())
        access.worst = max(access.worst, float((wavefronts[busy] / phases[busy]).max()))
        count = offsets.size if active is None else int(np.count_nonzero(active))
        access.bytes += times * size * count

    def global_access(self, site: int, address: Array, size: int, mask: Mask, lanes: Lanes) -> None:
        """Count a global access of `size` bytes per lane."""
        addresses = np.broadcast_to(address, lanes.shape).reshape(-1, 32)
        active = None if mask is None else np.broadcast_to(mask, lanes.shape).reshape(-1, 32)
        sectors, ideal = sector_counts(addresses, size, active)
        access = self._access(site, "global")
        access.requests += int(np.count_nonzero(sectors))
        access.sectors += int(sectors.sum())
        access.ideal_sectors += int(ideal.sum())
        access.bytes += size * (addresses.size if active is None else int(np.count_nonzero(active)))

    def atomic_lanes(self, site: int, count: int) -> None:
        """Count the lanes of an atomic update."""
        self._data().atomic_updates += count
