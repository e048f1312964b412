"""What a kernel will do on Turing, from its machine code: no GPU, no run.

Turing's shared memory and L1 deliver 64 bytes a cycle and SM, half of what later GPUs do, so that
newer GPUs rank tile shapes in another order. This package reads the sm_75 code of a kernel instead:

``disassembler`` has nvdisasm list it, ``sass`` reads the listing, ``pipes`` says what executes an
instruction and for how long on the SM that ``machine`` describes, ``loops`` finds the loops that do
the work, ``counts`` adds up what an iteration asks of each pipe, ``simulation`` plays it on one SM,
and ``analysis`` puts the figures of a kernel together.

How far to trust them
---------------------
Counts, bytes, spills, ratios and bounds are exact for one compiler; another version of NVRTC moves
spills by tens of bytes and utilisations by 0.01. The simulated utilisation is a model: +-0.05, to
rank variants by differences of that size and as an upper limit. Its rates and latencies come from
public micro-benchmarks of a T4 (`machine` names them) and were not fitted; no Turing card has been
measured with this library's kernels. Not modelled: bank conflicts (the emulator counts those),
conflicts of register banks, the instruction cache, contention for L2 and DRAM, atomics' own rate,
clocks that fall under power limits, what comes before and after the loop, and CTAs with less to do
than others (causal attention).
"""

from cupyattn.turing.analysis import KernelFigures, analyse
from cupyattn.turing.counts import LoopFigures
from cupyattn.turing.disassembler import DisassemblerError, disassembler_version
from cupyattn.turing.machine import T4, Machine
from cupyattn.turing.simulation import MARGIN, Utilisation

__all__ = [
    "MARGIN",
    "T4",
    "DisassemblerError",
    "KernelFigures",
    "LoopFigures",
    "Machine",
    "Utilisation",
    "analyse",
    "disassembler_version",
]
