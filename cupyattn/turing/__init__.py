"""A model of a kernel's speed on Turing, from its machine code: it needs no GPU and no run.

Turing's shared memory and L1 deliver 64 bytes a cycle and SM (streaming multiprocessor), half of
what later GPUs do, so that timings on a newer GPU rank tile shapes in another order. This package
reads the sm_75 code of a kernel instead. It needs ``nvdisasm``, NVIDIA's disassembler, which
``pip install "cupyattn[turing]"`` installs::

    python -m cupyattn turing --head-dim 64     # or every configuration; --all-loops, --json

For the main loop of each kernel it returns the spilled bytes; the CTAs that fit on an SM; the
cycles of the load/store unit for each cycle of the tensor cores (above 1 it is the limit); the
utilisation of the tensor cores that no schedule can exceed; the utilisation in a simulation of one
SM: its four sub-partitions, the scoreboards and stalls of the code, one load/store unit, its share
of L2, barriers, and CTAs that started at different times; and the clock that the device sustains
under its power limit, with the rate at that clock.

`analyse` takes a kernel of the library by its `row`, or the ``specialisation`` of your own
`cupyattn.Kernel`. For another device than a T4 it takes one of `MACHINES`, as the command does
(``--machine "RTX 2080 Ti"``), or any `Machine`::

    kernel = row("attention_forward", HEAD_DIM=64)
    analyse(kernel, machine=MACHINES["RTX 2080 Ti"])  # a GeForce: half the tensor rate

Kernels that move bytes
-----------------------
Most kernels read and write memory: layers, elements, caches, decoding, products with few rows. From
the emulator's counts (`cupyattn.emulator.Report`), `memory_figures` returns the sectors of memory
that a call touches for each byte that has to move, and the share of a GPU's bandwidth that its
instructions leave possible. It needs no disassembler.

Accuracy
--------
All but the simulation is exact for one compiler; another version of NVRTC changes spills by tens of
bytes and utilisations by 0.01. The simulated utilisation is a model: +-0.05, to rank variants by
differences of that size. Its rates and latencies come from public micro-benchmarks (`Machine` names
them, and says what is assumed); one, the rate of L2, was fitted to figures that others published
for a TITAN RTX. No Turing device has been measured with this library's kernels; the reference page
"Calibration of the Turing model" compares published figures of other kernels. The sustained clock
is known to +-20 %: it comes from energies of instructions and bytes, three values of which are
fitted, to a TITAN RTX and a T4 (``cupyattn.turing.power``). Where it is below the boost clock, as
on a T4 for every product, the kernel that takes less energy is faster, whatever its utilisation.
Not modelled: bank conflicts of shared memory (the emulator counts those), DRAM, the rate of atomics
in L2, code before and after the loop, and CTAs with less work than others (causal attention).

Every configuration has gates, to which the tests hold it: the most registers and spilled bytes, and
the utilisation that it was chosen for. ``notebooks/12_roofline_and_profile.ipynb`` shows the model.
"""

from cupyattn.turing.analysis import KernelFigures, MemoryFigures, analyse, memory_figures, row
from cupyattn.turing.counts import LoopFigures
from cupyattn.turing.machine import MACHINES, T4, Machine
from cupyattn.turing.power import Sustained
from cupyattn.turing.sass import DisassemblerError, disassembler_version
from cupyattn.turing.simulation import MARGIN, Utilisation

__all__ = [
    "MACHINES",
    "MARGIN",
    "T4",
    "DisassemblerError",
    "KernelFigures",
    "LoopFigures",
    "Machine",
    "MemoryFigures",
    "Sustained",
    "Utilisation",
    "analyse",
    "disassembler_version",
    "memory_figures",
    "row",
]
