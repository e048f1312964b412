"""A device that records launches instead of starting them: what a call would run, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cupyattn.runtime.arch import Arch
from cupyattn.runtime.device import Device
from cupyattn.runtime.device.simulated import SimulatedDevice
from cupyattn.runtime.spec import Specialisation

if TYPE_CHECKING:
    from typing_extensions import Self


class Launch(NamedTuple):
    """One kernel launch: what, how many CTAs, with which arguments."""

    specialisation: Specialisation
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class LaunchRecorder(SimulatedDevice):
    """A `Device` whose kernels do nothing but note that they were started.

    The operations above it do all that they do on a GPU (checks, choice of the configuration,
    strides), so what is recorded is what would run. Nothing is compiled.
    """

    multiprocessors = 40
    """A T4's."""

    def __init__(self, arch: Arch, *, tensor_cores: bool = True) -> None:
        """Record the launches of a GPU of this architecture, of a T4's size."""
        self.arch = arch
        self.tensor_cores = tensor_cores
        self.launches: list[Launch] = []

    @classmethod
    def like(cls, device: Device) -> Self:
        """Return a recorder that plans take for another device."""
        recorder = cls(device.arch, tensor_cores=device.tensor_cores)
        recorder.multiprocessors = device.multiprocessors
        recorder.l2_bytes, recorder.choices = device.l2_bytes, device.choices
        return recorder

    @property
    def name(self) -> str:
        """The device's name for people."""
        return f"launch recorder for {self.arch.real}"

    def load(self, specialisation: Specialisation) -> RecordedKernel:
        """Return a kernel that records its starts here."""
        return RecordedKernel(self, specialisation)


class RecordedKernel:
    """A `Kernel` of a `LaunchRecorder`."""

    def __init__(self, recorder: LaunchRecorder, specialisation: Specialisation) -> None:
        self.specialisation = specialisation
        self._recorder = recorder

    def start(
        self, grid: tuple[int, int, int], arrays: Sequence[Any], values: tuple[Any, ...]
    ) -> None:
        """Note the launch."""
        self._recorder.launches.append(Launch(self.specialisation, grid, (*arrays, *values)))
