"""One Turing SM: rates and latencies, each with its source; and the cards that have such SMs."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Machine:
    """The rates of an SM, and how many a card has. By default those of a T4.

    An *interval* is the number of cycles for which one instruction of a warp occupies its pipe of
    a sub-partition. Sources, all public: [1] Jia, Maggioni, Smith and Scarpazza, "Dissecting the
    NVidia Turing T4 GPU via microbenchmarking", arXiv:1903.07486; [2] NVIDIA Turing architecture
    whitepaper; [3] the configuration of an RTX 2060 in accel-sim (Khairy et al., ISCA 2020); [4]
    CUDA C++ Programming Guide; [5] Yan, Wang and Chu, "Demystifying tensor cores to optimize
    half-precision matrix multiply", IPDPS 2020; [6] NVIDIA's specifications of each card, of the
    reference model: makers and laptops differ by some per cent; [7] LeelaChessZero/lc0#849, a
    network's float16 and float32 speeds on a GTX 1650. What has no source is assumed, and says so.

    Attributes
    ----------
    name : str
        Of the card.
    multiprocessors, clock_mhz : int
        SMs, and their boost clock [6], which a card may not hold under load: a T4 has 70 W.
    memory_gb_s : int
        Of its DRAM [6]; the model of loops does not use it.
    tensor_cores : bool
        Whether it has any; without, HMMA is executed, but slowly.
    shared_rate : float
        Bytes a cycle of shared memory and L1 together [1].
    hmma_f32, hmma_f16, imma : int
        Intervals of HMMA.1688 with float32 and with float16 accumulators, and of IMMA.8816: 65
        TFLOP/s of a T4 are 512 multiply-adds a cycle and SM; integers twice that [2]. The assembler
        spaces HMMAs of a warp by the same 8 cycles. GeForce cards have 16 for hmma_f32 [2] [3];
        without tensor cores a product takes 4.3 times as long as in FFMA, 275 [7], whatever its
        accumulators (assumed, and of IMMA too).
    fma, alu : int
        Intervals of FFMA, FADD, FMUL and IMAD, and of integers, logic and selections: 64 lanes an
        SM [3]. That FMNMX and PRMT are like the others of alu is assumed.
    fp16 : int
        Interval of HFMA2 and its kin [2]; that they keep the tensor cores busy is assumed.
    xu : int
        Interval of MUFU and conversions: 16 lanes an SM [3]; that F2F is one of them is assumed.
    shuffle : int
        Cycles of the load/store unit for a SHFL: 32 lanes a cycle [4].
    hmma_latency : int
        Cycles until an HMMA's scoreboard is free: 14 to 18 for its results [5], and the release.
    xu_latency, other_latency : int
        The same for the special-function unit [3], and for what else has a scoreboard (assumed).
    shared_latency, l1_latency, global_latency : int
        Cycles from the service of a load until its scoreboard is free: shared memory, local memory
        that hits L1, and global memory, between L2 and DRAM [1].
    store_latency : int
        The same for stores; assumed.
    barrier, branch : int
        Cycles from the last arrival at a BAR, and from a branch, to the next instruction; assumed.
    queue : int
        Memory instructions that wait in a sub-partition; assumed, 4 or 16 move results by 0.04.
    """

    name: str = "T4"
    multiprocessors: int = 40
    clock_mhz: int = 1590
    memory_gb_s: int = 320
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
    xu_latency: int = 20
    other_latency: int = 14
    shared_latency: int = 19
    l1_latency: int = 28
    global_latency: int = 330
    store_latency: int = 8
    barrier: int = 22
    branch: int = 10
    queue: int = 8

    def tflops(self, flop_per_cycle: float) -> float:
        """Return the TFLOP/s of all SMs at so many operations in a cycle of one.

        Examples
        --------
        A T4's tensor cores, 512 multiply-adds in a cycle of an SM, and its float32 units:

        >>> round(T4.tflops(2 * 512)), round(T4.tflops(2 * 64), 1)
        (65, 8.1)
        """
        return self.multiprocessors * self.clock_mhz * 1e6 * flop_per_cycle / 1e12


T4 = Machine()
_GEFORCE = Machine(hmma_f32=16)
_EMULATED = Machine(tensor_cores=False, hmma_f32=275, hmma_f16=275, imma=275)
MACHINES = {
    machine.name: machine
    for machine in (
        T4,
        replace(
            _GEFORCE, name="RTX 2060 Super", multiprocessors=34, clock_mhz=1650, memory_gb_s=448
        ),
        replace(_GEFORCE, name="RTX 2080 Ti", multiprocessors=68, clock_mhz=1545, memory_gb_s=616),
        replace(_EMULATED, name="GTX 1650 Ti", multiprocessors=16, clock_mhz=1485, memory_gb_s=192),
    )
}
"""Cards by name."""
