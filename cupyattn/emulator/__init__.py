"""A GPU without a GPU: executes CUDA kernels on the CPU, and checks what they do.

It runs PTX, the assembly language that NVIDIA's compiler NVRTC makes of CUDA C++ before it makes
machine code: tensor cores, ``ldmatrix``, shuffles, barriers, shared memory. It is for trying,
testing and understanding kernels, not for speed. It needs NumPy alone.

Three ways to use it
--------------------
**Run the library on it.** NumPy arrays take the way that CuPy arrays take on a GPU: the same checks
of the call, the same configuration, the same launch, and results written in place. The kernels are
compiled by NVRTC, which needs no GPU either::

    from cupyattn.emulator import Report

    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 64, 2, 64)).astype(np.float16)
    report = Report()
    with cupyattn.backend("emulator", report=report):  # or set CUPYATTN_BACKEND=emulator
        out = cupyattn.attention(q, k, v, causal=True)
    print(report)  # bank conflicts, sectors, instructions, for each access

**Profile a kernel.** ``python -m cupyattn profile attention --head-dim 80 --causal`` (other options
by their names in Python: ``--window-size 128 0``, ``--sinks``, ``--bias``; or ``profile
softmax``) shows what the lines of the CUDA source cost; `report` says what its numbers mean.

**Run your own PTX.** `run` takes PTX for sm_75 (Turing, compute capability 7.5), or another target
from sm_70 on, from NVRTC or ``nvcc -ptx``. `load` and `launch` are its two steps. Here 4 threads
double 4 numbers:

>>> import numpy as np
>>> from cupyattn import emulator
>>> ptx = '''
... .version 8.0
... .target sm_75
... .address_size 64
... .visible .entry double_it(.param .u64 x)
... {
...   .reg .f32 %f; .reg .b32 %r; .reg .b64 %at; .reg .b64 %offset;
...   ld.param.u64 %at, [x];
...   mov.u32 %r, %tid.x;
...   mul.wide.u32 %offset, %r, 4;
...   add.s64 %at, %at, %offset;
...   ld.global.f32 %f, [%at];
...   add.f32 %f, %f, %f;
...   st.global.f32 [%at], %f;
...   ret;
... }'''
>>> x = np.arange(4, dtype=np.float32)
>>> emulator.run(ptx, "double_it", grid=1, block=4, args=[x])
>>> x
array([0., 2., 4., 6.], dtype=float32)

With more threads than numbers it stops at the first that goes too far:

>>> emulator.run(ptx, "double_it", grid=1, block=5, args=[x])
Traceback (most recent call last):
    ...
cupyattn.emulator.errors.OutOfBoundsError: out-of-bounds 4-byte load from global memory at ..., 0
bytes past the end of `argument 0` (float32 (4,), 16 bytes); block (0, 0, 0), thread (4, 0, 0); in
double_it, [ld.global.f32 %f, [%at];]

Every launch is checked; `checks` says what is found, what is not, and how to turn checks off.

How it behaves where a GPU leaves room
--------------------------------------
- A warp is the 32 threads that a GPU runs together; warps here are those of Volta and later. A lane
  (a thread of the warp) at a shuffle, vote, match or ``__syncwarp`` waits for the lanes that its
  mask names, and exchanges with them even if they come to another instruction with the same opcode
  and mask, as PTX has it (``tests/emulator/test_warp_sync.py`` asks a GPU).
- A block of threads (a CTA, cooperative thread array, in NVIDIA's papers) may wait for a block with
  a lower index through a flag in global memory, not for a later one: that ends as an endless loop
  does, with an error after `Checks.max_steps` steps.
- `run` keeps what it has loaded, ``__device__`` variables included: a second run of the same PTX
  finds their values. `load` starts from the initial ones.
- Shared memory begins at address 0, and from sm_80 on at 1,024: the system reserves the KiB before
  it. Offsets in messages count from the beginning.
- A copy of ``cp.async`` reads its source at once and arrives in shared memory as late as PTX
  allows, at the wait of its thread. `checks` has what may not happen in between. A thread may end
  without waiting for its copies.
- Sums of a float16 or bfloat16 matrix product are float32, in another order than hardware's; those
  of integers are exact. Approximate instructions (``ex2.approx``) have other errors. So hardware
  may differ in the last bits. Where scores of attention are about 1e7, for example, lse differs
  from an H200's by up to 3 units in the last place, which is 3 in the exponent of a probability:
  gradients then differ completely. The instructions are compared with vectors that an H200
  recorded, from PTX for compute capability 7.5 (8.0 for what is newer) through its driver: not from
  the machine code of a Turing device.

What it refuses
---------------
Instructions that the ``.target`` lacks are refused, as a GPU's assembler does. So is PTX that the
emulator does not run, by name and line and before anything has run: ``wmma``, ``mma`` other than
m16n8k8 and m16n8k16 of float16 and bfloat16, m8n8k16, m16n8k16 and m16n8k32 of 8-bit and m8n8k32 of
4-bit integers, atomics and ``set`` of packed bfloat16, ``cp.async.bulk``, ``mbarrier``, ``redux``,
``elect``, ``wgmma``, ``tcgen05``, clusters, textures and surfaces, video instructions (``vadd``),
carry flags (``add.cc``), ``.ftz`` of float16, directed rounding of float64, clocks (``%clock``),
calls through pointers, recursion, ``printf``, ``assert``, ``malloc``, 32-bit addresses, and a
variable whose initial value is an address, if a kernel uses it.

What it costs
-------------
CPU time of the tensor-core kernel of attention at head dim 64, float16, after compilation
(2-core x86 virtual machine, NumPy 2.5, 2026-11-21).
Bounds checks are `Checks.fast`, all checks those without an argument. B is the batch, H the heads,
N the length:

=========================  =============  ======  ==========
(B, H, N)                  bounds checks  budget  all checks
=========================  =============  ======  ==========
(1, 2, 64)                 3.4 ms         5 ms    6.3 ms
(1, 2, 128)                4.4 ms         12 ms   8.9 ms
(2, 4, 256)                20 ms          60 ms   47 ms
100 of up to 96 tokens     1.1 s          4 s     1.4 s
=========================  =============  ======  ==========

How it works
------------
``ptx`` reads the text. ``codegen`` turns a kernel into one Python function, in which a register is
a NumPy array with an element for each thread; ``codegen.reordering`` says how many instructions
become one NumPy operation. ``machine`` is what that function calls: memories, barriers, warps, the
scheduler of threads that took different branches. `launch` puts a launch together.
"""

from cupyattn.emulator.checks import Checks
from cupyattn.emulator.errors import (
    BarrierError,
    ConstWriteError,
    EmulatorError,
    KernelFault,
    KernelTrap,
    LaunchError,
    MisalignedAccessError,
    OutOfBoundsError,
    PTXSyntaxError,
    SharedMemoryRaceError,
    UninitializedReadError,
    UnsupportedPTXError,
    WarpSyncError,
)
from cupyattn.emulator.launch import Struct, launch, run
from cupyattn.emulator.machine.global_memory import Argument
from cupyattn.emulator.module import Entry, Module, load
from cupyattn.emulator.report import Report

__all__ = [
    "Argument",
    "BarrierError",
    "Checks",
    "ConstWriteError",
    "EmulatorError",
    "Entry",
    "KernelFault",
    "KernelTrap",
    "LaunchError",
    "MisalignedAccessError",
    "Module",
    "OutOfBoundsError",
    "PTXSyntaxError",
    "Report",
    "SharedMemoryRaceError",
    "Struct",
    "UninitializedReadError",
    "UnsupportedPTXError",
    "WarpSyncError",
    "launch",
    "load",
    "run",
]
