"""The emulator as a device: it runs the same kernels on NumPy arrays, without a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from cupyattn import emulator
from cupyattn.runtime import kernel_cache as cache
from cupyattn.runtime.arch import Arch, emulated_arch, tensor_cores_override
from cupyattn.runtime.compile import compile_ptx
from cupyattn.runtime.device.simulated import SimulatedDevice
from cupyattn.runtime.source import source_root, texts_named_in
from cupyattn.runtime.spec import Pointer, Specialisation, Value
from cupyattn.runtime.tuning import tuned_override


class EmulatedDevice(SimulatedDevice):
    """A device that executes the kernels' PTX on the emulator, with checks.

    Parameters
    ----------
    checks : emulator.Checks
        The faults to look for.
    report : emulator.Report, optional
        Filled with metrics of the launches.
    arch : Arch, optional
        The architecture that it emulates; `emulated_arch` without one.

    Attributes
    ----------
    tensor_cores : bool
        Whether it emulates a device with tensor cores. CUPYATTN_TENSOR_CORES=0 disables them.
    """

    multiprocessors = 2
    """Few, so that kernels loop over small problems as they do over large ones on a GPU."""

    def __init__(
        self,
        checks: emulator.Checks,
        report: emulator.Report | None = None,
        arch: Arch | None = None,
    ) -> None:
        self.arch = arch or emulated_arch()
        tuned_override()  # for GPUs, but an invalid value raises here too
        self.tensor_cores = tensor_cores_override() is not False
        self.checks = checks
        self.report = report

    @property
    def name(self) -> str:
        """The device's name in messages."""
        return f"emulated {self.arch.real}"

    def load(self, specialisation: Specialisation) -> EmulatedKernel:
        """Return the kernel; all emulated devices share parsed and translated modules."""
        return EmulatedKernel(self, specialisation, _module(specialisation, self.arch))


class _KeptTranslations:
    """The emulator's translations, in the cache of compiled kernels."""

    def find(self, key: str) -> bytes | None:
        """Return the translation of a key; None if it is missing or damaged."""
        found = cache.find(f"{key}.translation")
        return found and found.code

    def keep(self, key: str, translation: bytes) -> None:
        """Store a translation."""
        cache.keep_if_possible(f"{key}.translation", translation)


@lru_cache(maxsize=64)  # 2 MB each; reading one again takes about 10 ms
def _module(specialisation: Specialisation, arch: Arch) -> emulator.Module:
    source = source_root() / specialisation.spec.source
    ptx = compile_ptx(specialisation, arch).code.decode()
    return emulator.load(ptx, texts_named_in(ptx, source), translations=_KeptTranslations())


_turn = threading.RLock()  # reentrant: a signal handler may launch within a launch
"""The lock of the running launch: launches of several threads run one after the other.

NumPy releases the interpreter's lock in each larger operation, and waiting threads then switch. A
ring of eight ranks takes 2.5 seconds with this lock, 7.9 without it (2 CPU cores, 2026-11-26,
`pytest --deep -n 0 --durations 0 tests/distributed/test_ring_kernels.py -k
within_bounds_of_one_device`).
"""


def _free_turn() -> None:
    """Make a new lock in a forked child, where the thread that held the old one is gone."""
    global _turn
    _turn = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_free_turn)


class EmulatedKernel:
    """A kernel of an `EmulatedDevice`."""

    def __init__(
        self, device: EmulatedDevice, specialisation: Specialisation, module: emulator.Module
    ) -> None:
        self.specialisation = specialisation
        self._device = device
        self._module = module

    def start(
        self, grid: tuple[int, int, int], arrays: Sequence[Any], values: tuple[Value, ...]
    ) -> None:
        """Run the kernel to its end; it writes into the arrays themselves.

        An array without items is passed as null, as on a GPU.
        """
        spec = self.specialisation.spec
        arguments = [
            _pointer(parameter, argument) if isinstance(parameter, Pointer) else argument
            for parameter, argument in zip(spec.parameters, (*arrays, *values), strict=True)
        ]
        with _turn:
            emulator.launch(
                self._module,
                spec.entry,
                grid,
                self.specialisation.threads,
                arguments,
                shared_bytes=self.specialisation.shared_bytes,
                checks=self._device.checks,
                report=self._device.report,
            )


def _pointer(parameter: Pointer, array: np.ndarray | None) -> emulator.Argument | None:
    if array is None or not array.size:
        return None
    return emulator.Argument(array, parameter.name, parameter.const)
