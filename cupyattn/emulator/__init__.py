"""A GPU without a GPU: runs compute_75 PTX on NumPy, and checks what it does.

`load` PTX (from NVRTC or ``nvcc -ptx``), then `launch` its kernels on NumPy arrays; or do both with
`run`. `Checks` says which faults to look for, `Report` collects what a launch did. It needs NumPy
alone.

How it works: ``ptx`` reads the text, ``codegen`` turns a kernel into one Python function over NumPy
arrays with an element per thread, ``machine`` is what that function calls.
"""

from cupyattn.emulator.arguments import Argument, Struct
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
from cupyattn.emulator.launch import launch, run
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
