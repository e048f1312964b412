"""A device that records launches instead of starting them: what a call would run, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cupyattn.ops.attention.checks import checked_problem
from cupyattn.ops.attention.forward import attention_forward
from cupyattn.ops.attention.options import AttentionOptions, DropoutSeed
from cupyattn.ops.attention.problem import AttentionArrays
from cupyattn.runtime.arch import Arch
from cupyattn.runtime.arrays import Array, adopt
from cupyattn.runtime.device.simulated import SimulatedDevice
from cupyattn.runtime.spec import Specialisation


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
        self.arch = arch
        self.tensor_cores = tensor_cores
        self.launches: list[Launch] = []

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


def attention_launch(
    arch: Arch,
    q: Array,
    k: Array,
    v: Array,
    options: AttentionOptions,
    *,
    tensor_cores: bool = True,
) -> Launch:
    """Return the launch that ``attention(q, k, v, return_lse=True)`` makes on a GPU of `arch`.

    The arrays may be NumPy's: their memory is not read.
    """
    operands = adopt(AttentionArrays(q, k, v))
    problem = checked_problem(operands, options)
    recorder = LaunchRecorder(arch, tensor_cores=tensor_cores)
    attention_forward(recorder, problem, operands, seed=DropoutSeed(0), return_lse=True)
    (launch,) = recorder.launches
    return launch
