"""Limits of one streaming multiprocessor (SM) for each GPU generation.

Sources: CUDA C++ Programming Guide, technical specifications per compute capability; Turing Tuning
Guide. Nothing here depends on a device being present.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupyattn.runtime.errors import error

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
