"""Limits of one streaming multiprocessor (SM) for each GPU generation.

Sources: CUDA C++ Programming Guide, technical specifications per compute capability; Turing Tuning
Guide. Nothing here depends on a device being present. The architecture that kernels are compiled
for may be set by environment variables.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass

from cupyattn.runtime.errors import error, shown

WARP_SIZE = 32
SUB_PARTITIONS = 4
"""Parts of an SM. Each has its own scheduler, arithmetic pipes and a quarter of the registers."""


@dataclass(frozen=True)
class Arch:
    """The limits of one compute capability that decide whether a kernel fits, and how often.

    Attributes
    ----------
    number : int
        Compute capability without its dot: 75 for Turing.
    threads_per_sm, ctas_per_sm, registers_per_sm : int
        Per SM.
    shared_bytes_per_sm, shared_bytes_per_cta : int
        Shared memory per SM, and the most that one CTA can ask for.
    reserved_shared_bytes : int
        Shared memory of every CTA that the system uses (none on Turing, 1 KiB from sm_80 on).
    """

    number: int
    threads_per_sm: int
    ctas_per_sm: int
    shared_bytes_per_sm: int
    shared_bytes_per_cta: int
    reserved_shared_bytes: int
    registers_per_sm: int = 65_536
    registers_per_thread: int = 255
    register_unit: int = 256
    """Registers are allocated to a warp in units of this many."""
    shared_unit: int = 256
    """Shared memory is allocated to a CTA in units of this many bytes."""

    @property
    def real(self) -> str:
        """The compiler's name for machine code of this architecture."""
        return f"sm_{self.number}"

    @property
    def virtual(self) -> str:
        """The compiler's name for PTX of this architecture."""
        return f"compute_{self.number}"

    def resident_ctas(self, threads: int, registers: int, shared_bytes: int) -> int:
        """Return how many CTAs of this size one SM holds at a time; 0 if not even one fits.

        Examples
        --------
        Two CTAs of 32 KiB fill a Turing SM exactly. With one byte more, only one fits:

        >>> arch_of(75).resident_ctas(threads=128, registers=255, shared_bytes=32_768)
        2
        >>> arch_of(75).resident_ctas(threads=128, registers=255, shared_bytes=32_769)
        1
        """
        if shared_bytes > self.shared_bytes_per_cta or registers > self.registers_per_thread:
            return 0
        warps = -(-threads // WARP_SIZE)
        registers_per_warp = _round_up(max(registers, 1) * WARP_SIZE, self.register_unit)
        shared_per_cta = _round_up(shared_bytes + self.reserved_shared_bytes, self.shared_unit)
        return min(
            self.ctas_per_sm,
            self.threads_per_sm // (warps * WARP_SIZE),
            # A warp's registers come from one sub-partition.
            self.registers_per_sm // SUB_PARTITIONS // registers_per_warp * SUB_PARTITIONS // warps,
            self.shared_bytes_per_sm // shared_per_cta if shared_per_cta else self.ctas_per_sm,
        )


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _newer(number: int, threads: int, ctas: int, shared_kib: int) -> Arch:
    """Describe sm_80 or later: the system uses 1 KiB of each CTA's shared memory."""
    return Arch(
        number=number,
        threads_per_sm=threads,
        ctas_per_sm=ctas,
        shared_bytes_per_sm=shared_kib * 1024,
        shared_bytes_per_cta=(shared_kib - 1) * 1024,
        reserved_shared_bytes=1024,
        shared_unit=128,
    )


TURING = Arch(
    number=75,
    threads_per_sm=1024,
    ctas_per_sm=16,
    shared_bytes_per_sm=65_536,
    shared_bytes_per_cta=65_536,
    reserved_shared_bytes=0,
)

ARCHS = {
    arch.number: arch
    for arch in (
        TURING,
        _newer(80, threads=2048, ctas=32, shared_kib=164),
        _newer(86, threads=1536, ctas=16, shared_kib=100),
        _newer(87, threads=1536, ctas=16, shared_kib=164),
        _newer(89, threads=1536, ctas=24, shared_kib=100),
        _newer(90, threads=2048, ctas=32, shared_kib=228),
        _newer(100, threads=2048, ctas=32, shared_kib=228),
        _newer(103, threads=2048, ctas=32, shared_kib=228),
        _newer(120, threads=1536, ctas=24, shared_kib=100),
        _newer(121, threads=1536, ctas=24, shared_kib=100),
    )
}


def arch_of(number: int) -> Arch:
    """Return the limits of compute capability `number` (75 for 7.5).

    Raises
    ------
    ValueError
        If the library does not know this compute capability.
    """
    try:
        return ARCHS[number]
    except KeyError:
        known = ", ".join(str(known) for known in ARCHS)
        raise error(
            ValueError,
            f"compute capability {number / 10:.1f} (sm_{number})",
            f"known are {known}",
            "on a newer GPU set CUPYATTN_ARCH=75 to run the Turing code",
        ) from None


ARCH_VARIABLE = "CUPYATTN_ARCH"
TENSOR_CORES_VARIABLE = "CUPYATTN_TENSOR_CORES"

_PTX_TARGET = re.compile(rb"^\.target\s+sm_(\d+)", re.MULTILINE)
_ELF = b"\x7fELF"
_ABI_VERSION, _FLAGS = 8, 48  # offsets in the header of a 64-bit ELF file
_NEWER_ABI = 8  # from here on the architecture is the second byte of the flags, not the first


def arch_override() -> Arch | None:
    """Return the architecture that CUPYATTN_ARCH names; None if it is not set.

    Raises
    ------
    ValueError
        If the library does not know the architecture.
    """
    text = os.environ.get(ARCH_VARIABLE, "").strip()
    if not text:
        return None
    known = {str(number): arch for number, arch in ARCHS.items()}
    if text not in known:
        raise error(
            ValueError,
            f"{ARCH_VARIABLE}={shown(text)}",
            f"it is a compute capability without its dot; known are {', '.join(known)}",
            f"set {ARCH_VARIABLE}=75 to run the Turing code, or unset it",
        )
    return known[text]


def emulated_arch() -> Arch:
    """Return the architecture that the emulator has: that of CUPYATTN_ARCH, Turing without it.

    Raises
    ------
    ValueError
        If the library does not know the architecture.
    """
    return arch_override() or TURING


def tensor_cores_override() -> bool | None:
    """Return CUPYATTN_TENSOR_CORES as a bool; None if it is not set.

    Raises
    ------
    ValueError
        If it is neither 0 nor 1.
    """
    off = "compute in float32 arithmetic"
    return flag(TENSOR_CORES_VARIABLE, on="use tensor cores", off=off)


def flag(variable: str, *, on: str, off: str) -> bool | None:
    """Return an environment variable of 0 or 1 as a bool; None if it is not set.

    Raises
    ------
    ValueError
        If it is neither. The message explains 1 by `on` and 0 by `off`.
    """
    text = os.environ.get(variable, "").strip()
    if text not in ("", "0", "1"):
        raise error(
            ValueError,
            f"{variable}={shown(text)}",
            f"it is 1 to {on}, 0 to {off}",
            f"set {variable}=0 or 1, or unset it",
        )
    return text == "1" if text else None


def target_of(code: bytes) -> str:
    """Return "sm_90" for machine code of compute capability 9.0, "compute_90" for its PTX.

    Raises
    ------
    ValueError
        If it is neither.
    """
    if code.startswith(_ELF):
        (flags,) = struct.unpack_from("<I", code, _FLAGS)
        return f"sm_{flags >> (8 if code[_ABI_VERSION] >= _NEWER_ABI else 0) & 0xFF}"
    target = _PTX_TARGET.search(code)
    if target is None:
        raise ValueError(f"neither a cubin nor PTX: it begins with {code[:16]!r}")
    return f"compute_{target[1].decode()}"
