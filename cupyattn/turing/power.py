"""The clock that a Turing GPU holds under its power limit while it executes a loop.

A GPU lowers its clock until it takes no more than its limit. Its power is that of the board, which
is constant; that of idle transistors, which falls with the square of the voltage; and the energy of
each instruction and byte, times the clock, which does as well.

Sources: [1] AccelWattch (Kandiah et al., MICRO 2021), in accel-sim's gpgpu-sim: its file for an RTX
2060 Super has the values that were fitted to a Volta GV100 of 250 W and 80 SMs, and its artifact
says that Turing's constant power was corrected by hand, not by how much. They are assumed for
Turing, the constant one as the same share of the limit. [2] Horowitz, "Computing's energy problem",
ISSCC 2014; [3] Dally, keynote of MLSys 2021: both estimate a process of 45 nm, and both were read
in texts that quote them. [4] TechPowerUp's review of an RTX 2060 Founders Edition: 0.718 V at 300
MHz, and under load 1,620 to 1,920 MHz at 0.862 to 1.068 V; the line through the last two crosses
the lowest voltage at 1.41 GHz. A GTX 1660 Ti has 0.656 V there, and 0.85 to 1.05 V. [5] products of
PyTorch on two T4s: 4.17 and 4.43 TFLOP/s in float32 (zzc0721/torch-performance-test-data); 42 TOPS
of int8 (apache/tvm#4550).

Three values are fitted. One factor scales all energies so that this library's product of 256 x 192
tiles sustains the 88 TFLOP/s of cuBLAS on a TITAN RTX (a chart of Chennesxu/triton-turing). What an
instruction takes beyond its arithmetic is 8 pJ for each thread, for [3]'s 30, which would leave
float32 products 1.7 TFLOP/s on a T4, and the operations of an int8 product of [3] are so many that
both figures of [5] are at least as near as a T4's 24 TFLOP/s in cuBLAS float16
(forums.developer.nvidia.com 264462), which did not enter, as nothing of an RTX 2080 Ti did. With 30
pJ, and the factor fitted again, that product sustains the same 19.6 TFLOP/s. A T4 depends on the
lowest voltage's clock: at 1.2 GHz it sustains a fifth more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cupyattn.runtime.arch import WARP_SIZE
from cupyattn.turing.machine import GLOBAL, MEMORY, Machine, access_bytes, pipe_of
from cupyattn.turing.sass import SassInstruction

ANCHOR_TFLOPS = 88.0
SCALE = 2.039
"""The factor of all energies, from that anchor."""
UNCERTAINTY = 0.2
"""Relative error of a sustained rate: a T4's float16 product, which set no value, is within it."""

# Energies in picojoules, before `SCALE`.
_INSTRUCTION = 8 * WARP_SIZE  # fetched, decoded and its registers read, for all threads (fitted)
_HMMA = 16 * 110  # 128 operations (assumed) take 110 [3]
_IMMA = 4 * 160  # 512 operations of 8-bit integers (fitted) take 160 [3]
_ARITHMETIC = 1.5 * WARP_SIZE  # a multiply-add [3]
_SHARED_BYTE = 20 / 8  # of a memory of 32 KB [2]
_L2_BYTE = 100 / 8  # of a memory of 1 MB [2]

_BOARD_SHARE = 32.3 / 250  # of the limit: constant power [1]
_IDLE_WATTS = 48.9 / 80  # of an SM, at `_HIGHEST_VOLTS` (assumed) [1]
_LOWEST_VOLTS, _LOWEST_VOLTS_GHZ = 0.718, 1.41  # [4], as are the next
_HIGHEST_VOLTS, _HIGHEST_VOLTS_GHZ = 1.068, 1.92
_BISECTIONS = 40


def energy(path: Iterable[SassInstruction]) -> float:
    """Return the picojoules of a warp that executes instructions once, at the lowest voltage.

    Examples
    --------
    A product on tensor cores costs as much as six other instructions and more:

    >>> product, sum = (energy([SassInstruction(0, each)]) for each in ("HMMA.1688.F32", "FADD"))
    >>> 6 < product / sum < 7
    True
    """
    return SCALE * sum(_INSTRUCTION + _work(each) for each in path)


def _work(instruction: SassInstruction) -> float:
    pipe = pipe_of(instruction)
    if pipe == "tensor":
        return _IMMA if instruction.name == "IMMA" else _HMMA
    if pipe in MEMORY:
        per_byte = _SHARED_BYTE + (_L2_BYTE if pipe in GLOBAL else 0)
        return WARP_SIZE * access_bytes(instruction) * per_byte
    return _ARITHMETIC


def volts(ghz: float) -> float:
    """Return the voltage that a clock needs; it does not fall below the lowest one."""
    slope = (_HIGHEST_VOLTS - _LOWEST_VOLTS) / (_HIGHEST_VOLTS_GHZ - _LOWEST_VOLTS_GHZ)
    return _LOWEST_VOLTS + slope * max(0.0, ghz - _LOWEST_VOLTS_GHZ)


def watts(picojoules_per_cycle: float, ghz: float, machine: Machine) -> float:
    """Return the power of a GPU of which each SM takes so much energy in a cycle."""
    voltage = volts(ghz)
    idle = _IDLE_WATTS * (voltage / _HIGHEST_VOLTS) ** 2
    dynamic = picojoules_per_cycle * ghz / 1000 * (voltage / _LOWEST_VOLTS) ** 2
    return _BOARD_SHARE * machine.watts + machine.multiprocessors * (idle + dynamic)


class Sustained(NamedTuple):
    """The clock that a GPU sustains, and its power.

    Attributes
    ----------
    ghz : float
        Its clock: the boost clock, or less where its power limit is reached.
    watts : float
        Its power at that clock.
    """

    ghz: float
    watts: float


def sustained(picojoules_per_cycle: float, machine: Machine) -> Sustained:
    """Return the highest clock at which a GPU stays within its power limit.

    Examples
    --------
    A loop that takes nothing runs at the boost clock:

    >>> from cupyattn.turing import T4
    >>> sustained(0, T4).ghz
    1.59
    """
    low, high = 0.0, machine.clock_mhz / 1000
    if watts(picojoules_per_cycle, high, machine) > machine.watts:
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if watts(picojoules_per_cycle, middle, machine) > machine.watts:
                high = middle
            else:
                low = middle
        high = low
    return Sustained(high, watts(picojoules_per_cycle, high, machine))
