"""A device that records launches instead of starting them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cupyattn.runtime.arch import Arch
from cupyattn.runtime.device import Device
from cupyattn.runtime.device.simulated import SimulatedDevice
from cupyattn.runtime.spec import Specialisation, Value

if TYPE_CHECKING:
    from typing_extensions import Self


class Launch(NamedTuple):
    """One kernel launch: the kernel, the grid and the arguments."""

    specialisation: Specialisation
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class LaunchRecorder(SimulatedDevice):
    """A `Device` whose kernels only record their launches.

    Operations do everything that they do on a GPU (checks, choice of the configuration, strides).
    So the recorded launches are those of a GPU. Nothing is compiled.
    """

    multiprocessors = 40
    """The number of a T4."""

    def __init__(self, arch: Arch, *, tensor_cores: bool = True) -> None:
        """Record the launches for a GPU of this architecture with the size of a T4."""
        self.arch = arch
        self.tensor_cores = tensor_cores
        self.launches: list[Launch] = []

    @classmethod
    def like(cls, device: Device) -> Self:
        """Return a recorder with the properties of a device."""
        recorder = cls(device.arch, tensor_cores=device.tensor_cores)
        recorder.multiprocessors = device.multiprocessors
        recorder.l2_bytes, recorder.choices = device.l2_bytes, device.choices
        return recorder

    @property
    def name(self) -> str:
        """The device's name in messages."""
        return f"launch recorder for {self.arch.real}"

    def load(self, specialisation: Specialisation) -> RecordedKernel:
        """Return a kernel that records its launches here."""
        return RecordedKernel(self, specialisation)


class RecordedKernel:
    """A `LoadedKernel` of a `LaunchRecorder`."""

    def __init__(self, recorder: LaunchRecorder, specialisation: Specialisation) -> None:
        self.specialisation = specialisation
        self._recorder = recorder

    def start(
        self, grid: tuple[int, int, int], arrays: Sequence[Any], values: tuple[Value, ...]
    ) -> None:
        """Record the launch."""
        self._recorder.launches.append(Launch(self.specialisation, grid, (*arrays, *values)))
