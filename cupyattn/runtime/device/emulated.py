"""The emulator as a device: the same kernels, on NumPy arrays, without a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from cupyattn import emulator
from cupyattn.runtime import kernel_cache as cache
from cupyattn.runtime.arch import TURING, Arch
from cupyattn.runtime.compile import compile_ptx
from cupyattn.runtime.device.simulated import SimulatedDevice
from cupyattn.runtime.source import source_root, texts_named_in
from cupyattn.runtime.spec import Pointer, Specialisation
from cupyattn.runtime.target import arch_override, tensor_cores_override
from cupyattn.runtime.tuning import tuned_override


class EmulatedDevice(SimulatedDevice):
    """Executes the PTX that a Turing GPU would get, under checks.

    Parameters
    ----------
    checks : emulator.Checks
        Which faults to look for.
    report : emulator.Report, optional
        Filled with what the launches did.

    Attributes
    ----------
    tensor_cores : bool
        Whether it plays a card that has any. CUPYATTN_TENSOR_CORES=0 makes it one without.
    """

    arch: Arch = TURING
    multiprocessors = 2
    """Few: kernels walk over small problems here as they do over large ones on a GPU."""

    def __init__(self, checks: emulator.Checks, report: emulator.Report | None = None) -> None:
        # These are for GPUs; one that is wrong is not passed over here either.
        arch_override()
        tuned_override()
        self.tensor_cores = tensor_cores_override() is not False
        self.checks = checks
        self.report = report

    @property
    def name(self) -> str:
        """What it is, for people."""
        return f"emulated {self.arch.real}"

    def load(self, specialisation: Specialisation) -> EmulatedKernel:
        """Return the kernel; all emulated devices share what has been parsed and translated."""
        return EmulatedKernel(self, specialisation, _module(specialisation))


class _KeptTranslations:
    """Translations beside the compiled kernels, in the same cache."""

    def find(self, key: str) -> bytes | None:
        """Return what is kept under a key, None if that is nothing, or damaged."""
        found = cache.find(f"{key}.translation")
        return found and found.code

    def keep(self, key: str, translation: bytes) -> None:
        """Keep a translation."""
        cache.keep_if_possible(f"{key}.translation", translation)


@lru_cache(maxsize=64)  # of 2 MB each; to read one again takes about a hundredth of a second
def _module(specialisation: Specialisation) -> emulator.Module:
    source = source_root() / specialisation.spec.source
    ptx = compile_ptx(specialisation, EmulatedDevice.arch).code.decode()
    return emulator.load(ptx, texts_named_in(ptx, source), translations=_KeptTranslations())


_turn = threading.RLock()  # a signal's handler may launch within a launch
"""Held by the launch that runs: ranks in threads take turns.

NumPy lets go of the interpreter's lock in each larger operation, and threads that wait for it
change places each time. With turns the ring of eight ranks takes 2.5 seconds, without them 7.9 (2
cores, 2026-11-26, `pytest --deep -n 0 --durations 0 tests/distributed/test_ring_kernels.py -k
within_bounds_of_one_device`).
"""


def _free_turn() -> None:
    """Make another lock: in a forked child, the thread that held it is gone."""
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
        self, grid: tuple[int, int, int], arrays: Sequence[Any], values: tuple[Any, ...]
    ) -> None:
        """Run it to its end, writing into the arrays themselves.

        An array without items has no address here, as it has none on a GPU.
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
