"""Small kernels that try one thing of the CUDA sources each (tests/runtime/probes)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from support.devices import KERNELS

from cupyattn.runtime.plan import launch
from cupyattn.runtime.spec import KernelSpec, Parameter, Pointer

PROBES = Path(__file__).resolve().parent.parent / "runtime" / "probes"


class Probe:
    """A probe kernel: `run` copies NumPy arguments to the device and those it writes back."""

    def __init__(self, name: str, *parameters: Parameter, threads: int = 128, **macros: Any):
        self.spec = KernelSpec(
            entry=f"probe_{name}",
            source=str(PROBES / f"{name}.cu"),
            parameters=parameters,
        )
        self.specialisation = self.spec.specialise(threads=threads, **macros)

    def run(self, ctas: int, *arguments: Any) -> list[np.ndarray]:
        pointers = [isinstance(parameter, Pointer) for parameter in self.spec.parameters]
        passed = [
            KERNELS.put(argument) if is_pointer and argument is not None else argument
            for argument, is_pointer in zip(arguments, pointers, strict=True)
        ]
        launch(KERNELS.device, self.specialisation, ctas, passed)
        return [
            KERNELS.get(argument)
            for argument, parameter in zip(passed, self.spec.parameters, strict=True)
            if isinstance(parameter, Pointer) and not parameter.const
        ]
