"""The figures of a kernel on Turing, whether it computes or moves bytes, and the library's kernels.

A kernel that computes is compiled, disassembled, counted and simulated. For a kernel that moves
bytes the emulator counts instructions and sectors, which become times on a device here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import NamedTuple

from cupyattn.emulator import Report
from cupyattn.registry import KERNELS, catalogue
from cupyattn.runtime.arch import SUB_PARTITIONS, TURING, WARP_SIZE
from cupyattn.runtime.backend import running_on
from cupyattn.runtime.compile import compile_cubin
from cupyattn.runtime.device.recorder import LaunchRecorder
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.spec import Specialisation
from cupyattn.turing.counts import LoopFigures, loop_figures
from cupyattn.turing.machine import MACHINES, T4, Machine
from cupyattn.turing.sass import SassInstruction, disassemble, parse_listing
from cupyattn.turing.simulation import MATRIX, steady_path, utilisation, working_loops


@dataclass(frozen=True)
class KernelFigures:
    """Resources of a Turing SM that a kernel takes, and the utilisation that its loops reach.

    Attributes
    ----------
    registers : int
        Of a thread.
    shared_bytes : int
        Of a CTA, static and dynamic.
    ctas_per_sm : int
        How many are resident.
    loops : tuple of LoopFigures
        The innermost loops that do the work, in the order of the code.
    """

    registers: int
    shared_bytes: int
    ctas_per_sm: int
    loops: tuple[LoopFigures, ...]

    @property
    def main(self) -> LoopFigures | None:
        """The loop with the most work; None for a kernel without products.

        Of several with as much, as over masked and over full tiles, the one with the fewest
        instructions: masks are for the few tiles at the edges.
        """
        return main_loop(self.loops)


def main_loop(loops: Sequence[LoopFigures]) -> LoopFigures | None:
    """Return the loop with the most work, of several the one with the fewest instructions."""
    return max(loops, key=_importance, default=None)


def _importance(loop: LoopFigures) -> tuple[int, int]:
    return loop.work, -loop.instructions


def analyse(
    specialisation: Specialisation, *, simulate: bool = True, machine: Machine = T4
) -> KernelFigures:
    """Compile a kernel for sm_75, and return its figures there.

    Parameters
    ----------
    specialisation : Specialisation
        One of the library's (`row`), or that of a `cupyattn.Kernel`.
    simulate : bool
        Simulate the main loop too: some tenths of a second.
    machine : Machine
        The GPU to model: ``Machine(shared_rate=128)`` shows what a newer GPU would make of the
        same code, ``Machine(hmma_f32=16)`` is a GeForce device.

    Raises
    ------
    RuntimeError
        If NVRTC is missing, or (DisassemblerError) nvdisasm.
    TypeError
        If names are passed instead of a specialisation or a machine.
    """
    if not isinstance(specialisation, Specialisation):
        raise error(
            TypeError,
            f"analyse({shown(specialisation)})",
            "it takes a specialisation",
            'pass row("attention_forward", HEAD_DIM=64), or the specialisation of a Kernel',
        )
    if not isinstance(machine, Machine):
        raise error(
            TypeError,
            f"analyse(machine={shown(machine)})",
            "it is a Machine",
            f"pass one of MACHINES ({', '.join(MACHINES)}) or a Machine of your own",
        )
    artifact = compile_cubin(specialisation, TURING)
    assert artifact.resources is not None  # machine code always has them
    code = _code(artifact.code, specialisation.spec.entry)
    shared_bytes = specialisation.shared_bytes + artifact.resources.static_shared_bytes
    ctas = TURING.resident_ctas(specialisation.threads, artifact.resources.registers, shared_bytes)
    return KernelFigures(
        registers=artifact.resources.registers,
        shared_bytes=shared_bytes,
        ctas_per_sm=ctas,
        loops=code_figures(code, specialisation.threads, ctas, simulate=simulate, machine=machine),
    )


@lru_cache(
    maxsize=1
)  # for a row on one device after the other: to list it takes as long as to play
def _code(cubin: bytes, entry: str) -> Sequence[SassInstruction]:
    return parse_listing(disassemble(cubin))[entry]


def code_figures(
    code: Sequence[SassInstruction],
    threads: int,
    ctas: int,
    *,
    simulate: bool = True,
    machine: Machine = T4,
) -> tuple[LoopFigures, ...]:
    """Count each working loop; with `simulate`, run the main one on a model of an SM.

    Products on tensor cores that the GPU lacks are not simulated: they are always the limit.
    """
    warps = -(-threads // WARP_SIZE)
    work, bodies = working_loops(code)
    figures = [loop_figures(body, work, warps, ctas, machine) for body in bodies]
    main = max(range(len(figures)), key=lambda number: _importance(figures[number]), default=None)
    simulate = simulate and (machine.tensor_cores or work is not MATRIX)
    if simulate and ctas and main is not None:
        path = steady_path(bodies[main], work)
        simulated = utilisation(path, work, warps, ctas, machine)
        figures[main] = replace(figures[main], utilisation=simulated)
    return tuple(figures)


_SECTOR_BYTES = 32
_WAVEFRONT_BYTES = 128
_REMOVED = "move"
"""Instructions that the assembler mostly removes."""


@dataclass(frozen=True)
class MemoryFigures:
    """A call on Turing: the bytes it has to move, those it requests, and its busy pipes.

    Attributes
    ----------
    least_bytes : int
        Of the arrays that it cannot do without, each read or written once.
    sector_bytes : int
        Of the 32-byte sectors that its warps touch, each access on its own: what L1 and L2 deliver
        and take, with what a row of weights costs in every CTA.
    instructions : dict
        Warp instructions by the pipe that they occupy (`cupyattn.emulator.Report`): those of the
        PTX, of which the assembler fuses some.
    wavefronts : int
        Passes of shared memory, bank conflicts included.
    """

    least_bytes: int
    sector_bytes: int
    instructions: Mapping[str, int]
    wavefronts: int

    @property
    def sector_ratio(self) -> float:
        """Bytes of touched sectors for each that has to move: 1 is the best."""
        return self.sector_bytes / self.least_bytes

    def cycles(self, machine: Machine = T4) -> dict[str, float]:
        """Return for how many cycles of one SM the call keeps each pipe busy; "issue" too."""
        counts = Counter(self.instructions)
        of_a_partition = {
            "fma": counts["fma"] * machine.fma,
            "alu": counts["alu"] * machine.alu,
            "fp16": counts["half"] * machine.fp16,
            "xu": counts["xu"] * machine.xu,
            "tensor": counts["tensor"] * machine.hmma_f32 + counts["integer_tensor"] * machine.imma,
            "issue": sum(counts.values()) - counts[_REMOVED],
        }
        passes = self.wavefronts * _WAVEFRONT_BYTES + self.sector_bytes
        return {
            **{pipe: cycles / SUB_PARTITIONS for pipe, cycles in of_a_partition.items()},
            "lsu": passes / machine.shared_rate + counts["shuffle"] * machine.shuffle,
        }

    def seconds(self, machine: Machine = T4) -> dict[str, float]:
        """Return how long the call keeps each pipe of all SMs busy, and the "memory"."""
        clock = machine.multiprocessors * machine.clock_mhz * 1e6
        busy = {pipe: cycles / clock for pipe, cycles in self.cycles(machine).items()}
        return {"memory": self.least_bytes / (machine.memory_gb_s * 1e9), **busy}

    def bound(self, machine: Machine = T4) -> str:
        """Return the pipe or memory that is busy for the longest."""
        seconds = self.seconds(machine)
        return max(seconds, key=seconds.__getitem__)

    def bandwidth_share(self, machine: Machine = T4) -> float | None:
        """Return the share of the device's bandwidth that no schedule of these kernels exceeds.

        None for products on tensor cores of a device that has none: other kernels run there.
        """
        products = sum(self.instructions.get(name, 0) for name in ("tensor", "integer_tensor"))
        if products and not machine.tensor_cores:
            return None
        seconds = self.seconds(machine)
        return seconds["memory"] / max(seconds.values())


def memory_figures(report: Report, least_bytes: int) -> MemoryFigures:
    """Return the figures of a call on a Turing device from the emulator's counts.

    Parameters
    ----------
    report : cupyattn.emulator.Report
        Of one call, all its kernels or one of them (`Report.kernels`).
    least_bytes : int
        What it has to move: the arrays that it cannot do without, each once.

    Raises
    ------
    ValueError
        If `least_bytes` is not positive.

    Examples
    --------
    >>> figures = MemoryFigures(320_000, 320_000, {"ldg": 2500, "fma": 5000}, wavefronts=0)
    >>> figures.bound(), figures.sector_ratio, figures.bandwidth_share()
    ('memory', 1.0, 1.0)
    """
    if least_bytes <= 0:
        raise error(
            ValueError,
            f"least_bytes={least_bytes}",
            "a call moves at least one byte",
            "pass the bytes of the arrays that it cannot do without",
        )
    accesses = report.accesses
    return MemoryFigures(
        least_bytes=least_bytes,
        sector_bytes=_SECTOR_BYTES * sum(access.sectors for access in accesses),
        instructions=report.instruction_mix,
        wavefronts=sum(access.wavefronts for access in accesses),
    )


def row(entry: str, /, **macros: int | str) -> Specialisation:
    """Return a kernel of the library as compiled for Turing, for `analyse`.

    Parameters
    ----------
    entry : str
        The name of the kernel, one of ``cupyattn.device_info()["kernels"]``.
    **macros : int or str
        Values that its macros have to have, such as ``DTYPE="float16", HEAD_DIM=64``.

    Returns
    -------
    Specialisation
        The first row of its table with these values. All of its macros are in ``defines``, a CTA's
        threads in ``threads``, its dynamic shared memory in ``shared_bytes``.

    Raises
    ------
    ValueError
        If there is no such kernel, or no such row.

    Examples
    --------
    >>> from cupyattn import turing
    >>> turing.row("attention_forward", HEAD_DIM=64).threads
    128
    """
    if not isinstance(entry, str) or entry not in KERNELS:
        near = get_close_matches(str(entry), KERNELS)
        raise error(
            ValueError,
            f"there is no kernel {shown(entry)}",
            f"near it are {', '.join(near)}" if near else "python -m cupyattn info lists them",
            "pass one of their names",
        )
    rows = [each for each in catalogue() if each.spec.entry == entry]
    for each in rows:
        if macros.items() <= dict(each.macros).items():
            return each
    named = {name for each in rows for name, _ in each.macros}
    unknown = sorted(macros.keys() - named)
    values = {
        name: sorted(
            {dict(each.macros)[name] for each in rows if name in dict(each.macros)},
            key=lambda value: (isinstance(value, str), value),
        )
        for name in macros
    }
    raise error(
        ValueError,
        f"{entry} has no row with {macros}",
        f"it has no macro {', '.join(unknown)}" if unknown else f"its rows have {values}",
        f"its macros are {', '.join(sorted(named))}" if unknown else "pass values that one row has",
    )


_EXECUTED = {
    **{"attention_forward": 2, "_dq": 3},
    **{"linear_forward": 1, "linear_product": 1, "linear_dx": 1, "linear_dw": 1, "matmul": 1},
}
"""Products of a kernel, by a part of its entry; "_dkdv" has the rest of the backward's five."""


class TuringModel:
    """The model of a GPU; a kernel that several calls launch is analysed once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._rates: dict[Specialisation, _Rates | None] = {}

    def rate(
        self, prepare: Callable[[], Callable[[], object]], *, sustained: bool = False
    ) -> float | None:
        """Return the TFLOP/s of the products of a call on NumPy arrays.

        No kernel runs. Each takes the time of its main loop, at the boost clock or with `sustained`
        at the one that the power limit leaves; if it leaves none, the result is None. Products
        that a kernel repeats take time, and are not counted.
        """
        launched = launches_of(prepare, self.machine)
        useful, executed = _products([each.spec.entry for each in launched])
        time = 0.0
        for specialisation, products in zip(launched, executed, strict=True):
            rates = self._rates_of(specialisation) if products else None
            if rates is not None:
                rate = rates.sustained if sustained else rates.boost
                if rate == 0:
                    return None
                time += products / rate
        return useful / time if time else None

    def _rates_of(self, specialisation: Specialisation) -> _Rates | None:
        if specialisation not in self._rates:
            main = analyse(specialisation, machine=self.machine).main
            per_cycle = None if main is None else main.flop_per_cycle
            held = None if main is None else main.sustained(self.machine)
            rates = None
            if per_cycle is not None and held is not None:
                boost = self.machine.tflops(per_cycle)
                rates = _Rates(boost, boost * held.ghz * 1000 / self.machine.clock_mhz)
            self._rates[specialisation] = rates
        return self._rates[specialisation]


class _Rates(NamedTuple):
    """TFLOP/s of a kernel's main loop at the boost clock, and under the power limit."""

    boost: float
    sustained: float


def launches_of(
    prepare: Callable[[], Callable[[], object]], machine: Machine = T4
) -> list[Specialisation]:
    """Return the kernels that a call launches on a Turing GPU; the arrays are not read."""
    recorder = LaunchRecorder(TURING, tensor_cores=machine.tensor_cores)
    recorder.multiprocessors = machine.multiprocessors
    with running_on(recorder):
        call = prepare()
        recorder.launches.clear()
        call()
    return [each.specialisation for each in recorder.launches]


def _products(entries: Sequence[str]) -> tuple[int, list[int]]:
    """Return how many products kernels compute, and how many each executes.

    The backward of attention in two passes computes two of its five products a second time. Kernels
    that only move bytes execute none.

    Examples
    --------
    >>> _products(["attention_forward"]), _products(["attention_backward_dkdv"])
    ((2, [2]), (5, [5]))
    >>> _products(["attention_backward_delta", "attention_backward_dkdv", "attention_backward_dq"])
    (5, [0, 4, 3])
    """
    two_passes = any("_dq" in entry for entry in entries)
    executed = {**_EXECUTED, "_dkdv": 4 if two_passes else 5}
    of_each = [
        next((count for part, count in executed.items() if part in entry), 0) for entry in entries
    ]
    return sum(of_each) - 2 * two_passes, of_each
