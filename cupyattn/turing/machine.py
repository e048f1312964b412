"""One Turing SM: its rates and latencies, each with its source, and the pipe of each instruction.

Also the devices that have such SMs.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from cupyattn.runtime.arch import SUB_PARTITIONS, TURING, WARP_SIZE
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device.cuda import CudaDevice
from cupyattn.runtime.errors import error, shown
from cupyattn.turing.sass import SassInstruction

_NOT_NUMBERS = ("name", "tensor_cores")
_RATES = ("shared_rate", "l2_rate")  # infinite ones limit nothing
_MAY_BE_0 = (
    *("hmma_latency", "imma_latency", "xu_latency", "other_latency", "shared_latency"),
    *("l1_latency", "global_latency", "global_spread", "store_latency", "barrier", "branch"),
    *("bank_conflict", "instruction_cache", "fetch"),
)


@dataclass(frozen=True)
class Machine:
    """The rates of an SM, and how many a device has. By default those of a T4.

    An *interval* is the number of cycles for which one instruction of a warp occupies its pipe of
    a sub-partition. Sources, all public: [1] Jia, Maggioni, Smith and Scarpazza, "Dissecting the
    NVidia Turing T4 GPU via microbenchmarking", arXiv:1903.07486; [2] NVIDIA Turing architecture
    whitepaper; [3] accel-sim's configuration of an RTX 2060 (SM75_RTX2060; Khairy et al., ISCA
    2020); [4] CUDA C++ Programming Guide, throughput of native arithmetic instructions, column 7.x;
    [5] Yan, Wang and Chu, "Demystifying tensor cores to optimize half-precision matrix multiply",
    IPDPS 2020, an RTX 2070 and a T4; [6] NVIDIA's specifications of each device, of the reference
    model: makers and laptops differ by some per cent; [7] LeelaChessZero/lc0#849, a network's
    float16 and float32 speeds on a GTX 1650; [8] mt4g's report of an RTX 2080 Ti (caps-tum/mt4g,
    Technical University of Munich); [9] PPT-GPU's description of a TITAN RTX (lanl/PPT); [10]
    sjfeng1999/gpu-arch-microbenchmark, an RTX 2070; [11] Jia et al., the Volta paper,
    arXiv:1804.06826. Of [1], [2], [4], [5], [6] and [11], quotations and translations by others
    were checked. Values without a source are marked as assumed.

    Attributes
    ----------
    name : str
        Of the device.
    multiprocessors, clock_mhz : int
        SMs, and their boost clock [6], which a device may not hold under load: a T4 has 70 W.
    memory_gb_s : int
        Of its DRAM [6]; the model of loops does not use it.
    watts : int
        Its power limit [6].
    tensor_cores : bool
        Whether it has any; without, HMMA is executed, but slowly.
    shared_rate : float
        Bytes a cycle of shared memory and L1 together: loads of 8 and 16 bytes a thread reach the
        64 of its banks [5]; [1] measured 58.8.
    hmma_f32, hmma_f16, imma : int
        Intervals of HMMA.1688 with float32 and with float16 accumulators, and of IMMA.8816 and
        IMMA.8832: 65 TFLOP/s of a T4 are 512 multiply-adds a cycle and SM; 8-bit integers twice
        that, 4-bit integers four times [2]. [5] measured 8.06 cycles with float16 accumulators.
        The assembler spaces HMMAs of a warp by at most these 8 cycles, IMMAs of both shapes by at
        most 4. GeForce devices have 16 for hmma_f32 [2] [3]; without tensor cores a product takes
        4.3 times as long as in FFMA, 275 [7], whatever its accumulators (assumed, and of IMMA too).
    fma, alu : int
        Intervals of FFMA, FADD, FMUL and IMAD, and of integers, logic, comparisons, minima and
        maxima: 64 lanes an SM [3] [4]. That PRMT and selections are like these is assumed.
    fp16 : int
        Interval of HFMA2 and its kin [2] [4]; that they keep the tensor cores busy is assumed.
    xu : int
        Interval of MUFU: 16 lanes an SM [3] [4]. So have conversions, POPC and FLO by [4]; [3] has
        64 lanes for them, which moves utilisations by at most 0.004.
    shuffle : int
        Cycles of the load/store unit for a SHFL: 32 lanes a cycle [4].
    hmma_latency, imma_latency : int
        Cycles until the scoreboard of an HMMA, and of an IMMA, is free. The assembler (NVRTC 12.9)
        spaces HMMAs that go on from each other by 14 cycles, which [5] measured with float16
        accumulators, and IMMAs by 10. The 6 cycles until a scoreboard's release are assumed.
    xu_latency, other_latency : int
        The same for the special-function unit [3], and for other pipes with a scoreboard (assumed).
    shared_latency, l1_latency : int
        Cycles from the service of a load until its scoreboard is free: shared memory, and local
        memory that hits L1. [10] measured 23 and 32 from the issue, which is 4 cycles earlier.
    global_latency, global_spread : int
        The same for global memory, and how much earlier or later single loads arrive. Without load
        L2 takes 176 cycles [8] or 236 [10], and DRAM 496 [8]. Under the load of all SMs there is no
        published figure: 500 with a spread of 150 is assumed.
    l2_rate : float
        Bytes a cycle that L2 delivers to all SMs together, and takes from them. An SM has its share
        of them. A T4 has 800: texts that use the bandwidths of [1] imply 1,268 to 1,301 GB/s.
        Published for TU102 are 844 [9] and 870 [8] at nominal clocks; it would have 1,200 if its 48
        slices were as good as a T4's 32. The 1,000 of a TITAN RTX is the one value that was fitted
        to published figures, and 920 for 44 slices follows from it. TU106 is assumed to be like a
        T4's TU104, TU117 to have half of it.
    store_latency : int
        The same for stores; assumed.
    barrier, branch : int
        Cycles from the last arrival at a BAR, and from a branch, to the next instruction; assumed.
    queue : int
        Memory instructions that wait in a sub-partition; assumed, 4 or 16 move results by 0.04.
    bank_conflict : int
        Cycles that an instruction's pipe is busy for longer if its three source registers are all
        in one of the register file's two banks, which deliver two registers a cycle each: Volta's
        [11]. That it is one cycle, on Turing too, is assumed.
    instruction_cache, fetch : int
        Instructions that a sub-partition's own cache holds, 16 KB [1], and the cycles from one to
        the next of a warp in a loop that is longer; the latter is assumed.

    Raises
    ------
    ValueError
        If a value is not positive or not finite. Latencies, `global_spread`, `barrier`, `branch`
        and the last three may be 0, `shared_rate` and `l2_rate` infinite.
    """

    name: str = "T4"
    multiprocessors: int = 40
    clock_mhz: int = 1590
    memory_gb_s: int = 320
    watts: int = 70
    tensor_cores: bool = True
    shared_rate: float = 64.0
    hmma_f32: int = 8
    hmma_f16: int = 8
    imma: int = 4
    fma: int = 2
    alu: int = 2
    fp16: int = 2
    xu: int = 8
    shuffle: int = 1
    hmma_latency: int = 20
    imma_latency: int = 16
    xu_latency: int = 21
    other_latency: int = 14
    shared_latency: int = 19
    l1_latency: int = 28
    global_latency: int = 500
    global_spread: int = 150
    l2_rate: float = 800.0
    store_latency: int = 8
    barrier: int = 22
    branch: int = 10
    queue: int = 8
    bank_conflict: int = 1
    instruction_cache: int = 1024
    fetch: int = 2

    def __post_init__(self) -> None:
        """Refuse values that no GPU has: a simulation with them divides by 0 or never ends."""
        for name in (each.name for each in fields(self) if each.name not in _NOT_NUMBERS):
            value = getattr(self, name)
            is_number = isinstance(value, numbers.Real) and float(value) >= 0
            is_zero, is_infinite = value == 0, value == math.inf
            refused = (is_zero and name not in _MAY_BE_0) or (is_infinite and name not in _RATES)
            if not is_number or refused:
                raise error(
                    ValueError,
                    f"Machine({name}={shown(value)})",
                    "it is a finite number " + ("at least 0" if name in _MAY_BE_0 else "above 0"),
                    f"leave it out for a T4's {getattr(type(self), name)}",
                )

    @property
    def peak_flop_per_cycle(self) -> float:
        """Operations in a cycle of an SM: float16 products with float32 sums on tensor cores."""
        return SUB_PARTITIONS * 2 * 16 * 8 * 8 / self.hmma_f32

    def tflops(self, flop_per_cycle: float) -> float:
        """Return the TFLOP/s of all SMs, of integers TOPS, at so many operations in a cycle of one.

        Examples
        --------
        A T4's tensor cores, 512 multiply-adds in a cycle of an SM, and its float32 units:

        >>> round(T4.tflops(2 * 512)), round(T4.tflops(2 * 64), 1)
        (65, 8.1)

        Its tensor cores on 8-bit and 4-bit integers, in TOPS:

        >>> round(T4.tflops(2 * 1024)), round(T4.tflops(2 * 2048))
        (130, 261)
        """
        return self.multiprocessors * self.clock_mhz * 1e6 * flop_per_cycle / 1e12


T4 = Machine()
_GEFORCE = Machine(hmma_f32=16)
_EMULATED = Machine(tensor_cores=False, hmma_f32=275, hmma_f16=275, imma=275, l2_rate=400.0)


def _device(
    like: Machine, name: str, multiprocessors: int, clock_mhz: int, memory_gb_s: int, watts: int
) -> Machine:
    return replace(
        like,
        name=name,
        multiprocessors=multiprocessors,
        clock_mhz=clock_mhz,
        memory_gb_s=memory_gb_s,
        watts=watts,
    )


MACHINES = {
    machine.name: machine
    for machine in (
        T4,
        _device(_GEFORCE, "RTX 2060 Super", 34, 1650, 448, 175),
        replace(_device(_GEFORCE, "RTX 2080 Ti", 68, 1545, 616, 250), l2_rate=920.0),
        replace(_device(T4, "TITAN RTX", 72, 1770, 672, 280), l2_rate=1000.0),
        _device(_EMULATED, "GTX 1650 Ti", 16, 1485, 192, 50),
    )
}
"""Devices by name."""


MEMORY = ("LDSM", "LDS", "STS", "LDG", "STG", "LDL", "STL", "SHFL")
"""Instructions that the load/store unit of the SM serves: one pipe, but counted by kind."""

ARITHMETIC = ("tensor", "fp16", "fma", "alu", "xu", "uniform")
"""Pipes that each sub-partition has for itself."""

GLOBAL = ("LDG", "STG")
SPILLS = ("LDL", "STL")
"""Local memory: registers that did not suffice, or arrays that are indexed as the kernel runs."""

_PIPE_OF = {
    name: pipe
    for pipe, names in {
        "tensor": "HMMA IMMA BMMA",
        "fp16": "HFMA2 HADD2 HMUL2 HSETP2 HSET2 HMNMX2",
        "fma": "FFMA FADD FMUL IMAD IMUL FFMA32I FADD32I FMUL32I",
        "xu": "MUFU F2F I2F F2I FRND POPC FLO BREV",
        "LDSM": "LDSM",
        "LDS": "LDS",
        "STS": "STS ATOMS",
        "LDG": "LDG LD",
        "STG": "STG ST RED ATOMG ATOM",
        "LDL": "LDL",
        "STL": "STL",
        "SHFL": "SHFL",
        "barrier": "BAR DEPBAR MEMBAR ERRBAR",
        "control": "BRA BRX BSSY BSYNC BREAK EXIT WARPSYNC CALL RET NOP YIELD",
        "uniform": "R2UR S2UR",
    }.items()
    for name in names.split()
}
_WORD = 4  # bytes: the load/store unit serves a narrower access no faster
_THREADS = re.compile(r",\s*0x([0-9a-f]+)\s*$")  # of a BAR
_BYTES_OF_MODIFIER = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


def pipe_of(instruction: SassInstruction) -> str:
    """Return the pipe of an instruction: one of ARITHMETIC or MEMORY, "barrier" or "control".

    What the table does not know is taken for an integer instruction, or if its name begins with U
    for one of the uniform datapath.
    """
    name = instruction.name
    return _PIPE_OF.get(name) or ("uniform" if name.startswith("U") else "alu")


def access_bytes(instruction: SassInstruction) -> int:
    """Return the bytes that each thread of a memory instruction moves.

    Examples
    --------
    An 8x8 matrix of float16 is 128 bytes, 4 of each thread:

    >>> [access_bytes(SassInstruction(0, opcode)) for opcode in ("LDSM.16.M88.4", "LDG.E.128.SYS")]
    [16, 16]
    """
    modifiers = instruction.modifiers
    if instruction.name == "LDSM":
        return _WORD * int(modifiers[-1]) if modifiers[-1] in ("2", "4") else _WORD
    sizes = [_BYTES_OF_MODIFIER[each] for each in modifiers if each in _BYTES_OF_MODIFIER]
    return max(sizes, default=_WORD)


def interval(instruction: SassInstruction, machine: Machine) -> int:
    """Return the cycles for which an instruction occupies its pipe of a sub-partition."""
    pipe = pipe_of(instruction)
    if pipe == "tensor":
        if instruction.name == "IMMA":
            return machine.imma
        return machine.hmma_f32 if "F32" in instruction.modifiers else machine.hmma_f16
    return {
        "fp16": machine.fp16,
        "fma": machine.fma,
        "alu": machine.alu,
        "xu": machine.xu,
        "uniform": machine.alu,
    }.get(pipe, 1)


_PRODUCTS = {  # multiply-adds of a warp, by the shape in the opcode
    "1688": 16 * 8 * 8,
    "8816": 8 * 8 * 16,
    "8832": 8 * 8 * 32,
}


def matrix_operations(instruction: SassInstruction) -> int:
    """Return the operations, two for each multiply-add, of a product on tensor cores.

    Examples
    --------
    >>> opcodes = ("HMMA.1688.F32", "IMMA.8816.S8.S8", "IMMA.8832.S4.S4.SAT")
    >>> [matrix_operations(SassInstruction(0, opcode)) for opcode in opcodes]
    [2048, 2048, 4096]
    """
    shapes = [_PRODUCTS[each] for each in instruction.modifiers if each in _PRODUCTS]
    return 2 * (shapes[0] if shapes else _PRODUCTS["1688"])


_REGISTER = re.compile(r"(?<![\w.])R(\d+)(\.reuse)?")
_PORTS = 2  # of a bank: registers that it delivers in a cycle
_READ_AT_ONCE = ("fma", "alu", "fp16")


def bank_conflicts(path: Sequence[SassInstruction]) -> Iterator[bool]:
    """Tell for each instruction whether all of its three source registers are in one bank.

    Banks hold the even and the odd registers. A register that the previous instruction keeps for
    the same operand is not read again.

    Examples
    --------
    >>> operands = ("R0, R1, R3, R5", "R0, R1.reuse, R3, R4", "R0, R1, R3, R5")
    >>> list(bank_conflicts([SassInstruction(0, "FFMA", each) for each in operands]))
    [True, False, False]
    """
    kept: set[tuple[int, str]] = set()
    for instruction in path:
        fields = instruction.operands.split(",")[1:]
        found = [(k, match) for k, field in enumerate(fields) if (match := _REGISTER.search(field))]
        read = {int(match[1]) for k, match in found if (k, match[1]) not in kept}
        at_once = pipe_of(instruction) in _READ_AT_ONCE and len(read) > _PORTS
        yield at_once and len({register % 2 for register in read}) == 1
        kept = {(k, match[1]) for k, match in found if match[2]}


def service(instruction: SassInstruction, machine: Machine) -> int:
    """Return the cycles of the SM's load/store unit, 0 for instructions of other pipes."""
    pipe = pipe_of(instruction)
    if pipe not in MEMORY:
        return 0
    if pipe == "SHFL":
        return machine.shuffle
    moved = WARP_SIZE * max(access_bytes(instruction), _WORD)
    return max(1, -int(-moved // machine.shared_rate))


def transfer(instruction: SassInstruction, machine: Machine) -> float:
    """Return for how many cycles the bytes of a global access occupy an SM's share of L2."""
    if pipe_of(instruction) not in GLOBAL:
        return 0.0
    return WARP_SIZE * access_bytes(instruction) * machine.multiprocessors / machine.l2_rate


def latency(instruction: SassInstruction, machine: Machine) -> int:
    """Return the cycles until the scoreboard is free that waits for an instruction's result.

    They count from the service of a memory instruction, and from the issue of any other.
    """
    pipe = pipe_of(instruction)
    if pipe in MEMORY:
        return {
            "LDSM": machine.shared_latency,
            "LDS": machine.shared_latency,
            "SHFL": machine.shared_latency,
            "LDL": machine.l1_latency,
            "LDG": machine.global_latency,
        }.get(pipe, machine.store_latency)
    if instruction.name == "IMMA":
        return machine.imma_latency
    return {"tensor": machine.hmma_latency, "xu": machine.xu_latency}.get(
        pipe, machine.other_latency
    )


def barrier_warps(instruction: SassInstruction, warps: int) -> int:
    """Return how many warps of a CTA of `warps` meet at an instruction; 0 if none wait there.

    A barrier of a part of the CTA has a number of threads, which are assumed to be neighbours.
    """
    if instruction.name != "BAR" or "ARV" in instruction.modifiers:
        return 0
    threads = _THREADS.search(instruction.operands)
    return (int(threads[1], 16) // WARP_SIZE if threads else 0) or warps


_GEFORCE_HMMA_F32 = 16


def machine_of(device: CudaDevice) -> Machine | None:
    """Return the description of a Turing GPU; None for other architectures.

    A GPU that `MACHINES` does not name is described by its driver. GeForce GPUs have half the rate
    of products with float32 sums.
    """
    if device.capability != TURING.number:
        return None
    named = " ".join(device.name.upper().split())
    for name, machine in MACHINES.items():
        if named.endswith(name.upper()):
            return machine
    attributes = load_cupy().cuda.Device(device.ordinal).attributes
    like = MACHINES["T4" if device.tensor_cores else "GTX 1650 Ti"]
    geforce = device.tensor_cores and "GEFORCE" in named
    bits, kilohertz = (
        attributes.get(name, 0) for name in ("GlobalMemoryBusWidth", "MemoryClockRate")
    )
    return replace(
        like,
        name=device.name,
        multiprocessors=device.multiprocessors,
        clock_mhz=attributes.get("ClockRate", 0) // 1000 or like.clock_mhz,
        memory_gb_s=round(2 * kilohertz * bits / 8 / 1e6) or like.memory_gb_s,
        hmma_f32=_GEFORCE_HMMA_F32 if geforce else like.hmma_f32,
    )
