"""The kernels of ``emulator/kernels/faults.cu``: what runs them, and expects a fault at a line."""

from typing import Any

import numpy as np
import pytest
from support.ptx import compile_module, line_of

from cupyattn import emulator
from cupyattn.emulator import KernelFault

FILE = "faults.cu"
BITS = 0xFFFFFFFF


def run(kernel: str, *args: Any, block: int = 64, grid: int = 1, **options: Any) -> None:
    emulator.launch(compile_module(FILE), kernel, grid, block, args, **options)


def fault(
    kind: type[KernelFault], marker: str, kernel: str, *args: Any, **options: Any
) -> KernelFault:
    """Run a kernel that must fail with `kind` at the line with `marker`."""
    with pytest.raises(kind) as caught:
        run(kernel, *args, **options)
    error = caught.value
    assert type(error) is kind
    assert error.line == line_of(FILE, f"// {marker}"), error
    assert error.block is not None and error.thread is not None
    assert f"{FILE}:{error.line}" in str(error)
    return error


def zeros(count: int = 64, dtype: str = "f4") -> np.ndarray:
    return np.zeros(count, dtype)
