"""Rows without a GPU: the model of Turing for products, the emulator's counts for bytes.

The rate of products is that of the main loops of all kernels that a call launches. What memory
bounds is run small on the emulator, whose counts of sectors and instructions give the share of a
Turing GPU's bandwidth that no schedule exceeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cupyattn.benchmark.cases import Case, Harness, Row, rates_of
from cupyattn.benchmark.timer import COPY, FLOAT32, PRODUCTS, READ, Call
from cupyattn.cli.recorder import LaunchRecorder
from cupyattn.cupy_library import load_cupy
from cupyattn.emulator import Checks, Report
from cupyattn.functional.backend import running_on
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.device.cuda import CudaDevice
from cupyattn.kernels.device.emulated import EmulatedDevice
from cupyattn.kernels.spec import Specialisation
from cupyattn.progress import progress
from cupyattn.turing import MACHINES, T4, DisassemblerError, Machine, analyse
from cupyattn.turing.memory import MemoryFigures, memory_figures

Prepare = Callable[[], Call]

PEAK_FLOP_PER_CYCLE = 1024
"""float16 products of a Turing multiprocessor: 65 TFLOP/s on a T4."""
FLOAT32_FLOP_PER_CYCLE = 128
"""Operations of its 64 float32 units: 8.1 TFLOP/s on a T4."""
EMULATED, UNFILLED = Harness(np, cold=False), Harness(np, cold=False, filled=False)
"""The harnesses that prepare calls for the emulator, and for the model of main loops."""
_DIGITS = 3
_GEFORCE_HMMA_F32 = 16
_EXECUTED = {
    **{"attention_forward": 2, "attention_naive": 2, "attention_tiled": 2, "_dq": 3},
    "backward_naive": 7,
    "summed_dbias": 2,
    **{"linear_forward": 1, "linear_product": 1, "linear_dx": 1, "linear_dw": 1},
}
"""Products of a kernel, by a part of its entry; "_dkdv" has the rest of the backward's five."""


def ceilings_of(machine: Machine) -> dict[str, float | None]:
    """Return what a GPU can do at most, by its data sheet, with the keys of `measured_ceilings`."""
    memory = float(machine.memory_gb_s)
    products = machine.tflops(PEAK_FLOP_PER_CYCLE) if machine.tensor_cores else None
    float32 = machine.tflops(FLOAT32_FLOP_PER_CYCLE)
    return {COPY: memory, READ: memory, PRODUCTS: products, FLOAT32: float32}


def machine_of(device: CudaDevice) -> Machine | None:
    """Return the model's description of a Turing GPU; None for other architectures.

    A GPU that `MACHINES` does not name is described by its driver. GeForce GPUs have half the rate
    of products with float32 sums.
    """
    if device.capability != TURING.number:
        return None
    named = " ".join(device.name.upper().split())
    for name, machine in MACHINES.items():
        if named.endswith(name.upper()):
            return machine
    attributes = load_cupy().cuda.Device(device.ordinal).attributes
    like = MACHINES["T4" if device.tensor_cores else "GTX 1650 Ti"]
    geforce = device.tensor_cores and "GEFORCE" in named
    bits, kilohertz = (
        attributes.get(name, 0) for name in ("GlobalMemoryBusWidth", "MemoryClockRate")
    )
    return replace(
        like,
        name=device.name,
        multiprocessors=device.multiprocessors,
        clock_mhz=attributes.get("ClockRate", 0) // 1000 or like.clock_mhz,
        memory_gb_s=round(2 * kilohertz * bits / 8 / 1e6) or like.memory_gb_s,
        hmma_f32=_GEFORCE_HMMA_F32 if geforce else like.hmma_f32,
    )


class Model:
    """The model of a GPU; a kernel that several calls launch is analysed once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._rates: dict[Specialisation, float | None] = {}

    def rate(self, prepare: Prepare) -> float | None:
        """Return the TFLOP/s of the products of a call on NumPy arrays.

        No kernel runs. Each takes the time of its main loop. Products that a kernel repeats take
        time, and are not counted.
        """
        launched = launches_of(prepare, self.machine)
        asked, executed = _products([each.spec.entry for each in launched])
        time = 0.0
        for specialisation, products in zip(launched, executed, strict=True):
            rate = self._rate(specialisation) if products else None
            time += 0 if rate is None else products / rate
        return asked / time if time else None

    def _rate(self, specialisation: Specialisation) -> float | None:
        if specialisation not in self._rates:
            main = analyse(specialisation, machine=self.machine).main
            per_cycle = None if main is None else main.flop_per_cycle
            rate = None if per_cycle is None else self.machine.tflops(per_cycle)
            self._rates[specialisation] = rate
        return self._rates[specialisation]


def launches_of(prepare: Prepare, machine: Machine = T4) -> list[Specialisation]:
    """Return the kernels that a call launches on a Turing GPU; the arrays are not read."""
    recorder = LaunchRecorder(TURING, tensor_cores=machine.tensor_cores)
    recorder.multiprocessors = machine.multiprocessors
    with running_on(recorder):
        call = prepare()
        recorder.launches.clear()
        call()
    return [each.specialisation for each in recorder.launches]


_AGAIN = ("_dq", "summed_dbias", "backward_naive")
"""Parts of the entries of kernels that compute two products a second time."""


def _products(entries: Sequence[str]) -> tuple[int, list[int]]:
    """Return how many products kernels are asked for, and how many each executes.

    The backward of attention in two passes computes two of its five products a second time, and so
    does the kernel for a bias that broadcasts. The naive backward computes two of its own a second
    time. Kernels that only move bytes execute none.

    Examples
    --------
    >>> _products(["attention_forward"]), _products(["attention_backward_dkdv"])
    ((2, [2]), (5, [5]))
    >>> _products(["attention_backward_delta", "attention_backward_dkdv", "attention_backward_dq"])
    (5, [0, 4, 3])
    >>> _products(["attention_backward_dkdv", "attention_backward_summed_dbias"])
    (5, [5, 2])
    """
    two_passes = any("_dq" in entry for entry in entries)
    executed = {**_EXECUTED, "_dkdv": 4 if two_passes else 5}
    of_each = [
        next((count for part, count in executed.items() if part in entry), 0) for entry in entries
    ]
    again = [part for part in _AGAIN if any(part in entry for entry in entries)]
    return sum(of_each) - 2 * len(again), of_each


class ModelledCall(NamedTuple):
    """A call by name, and the bytes that it has to move."""

    name: str
    least_bytes: int
    prepare: Prepare
    """Make its arrays, on NumPy, and return the call."""
    kernel: str | None = None
    """Count only this kernel of the call; None counts all."""


def row_of(call: ModelledCall) -> dict[str, Any]:
    """Run a call on the emulator, and return what it asks of each Turing GPU.

    ``bound`` is busy for the longest on a T4, ``instruction_bytes`` move for each warp instruction
    that is issued, and ``bandwidth_share`` is by machine. GPUs without tensor cores run other
    kernels for the products of tensor cores: ``without_tensor_cores``.
    """
    kernels, found = _counted(call)
    more: dict[str, Any] = {}
    shares = {name: found.bandwidth_share(machine) for name, machine in MACHINES.items()}
    if None in shares.values():
        others, slower = _counted(call, tensor_cores=False)
        more["without_tensor_cores"] = others
        for name, share in shares.items():
            if share is None:
                shares[name] = slower.bandwidth_share(MACHINES[name])
    rounded = {name: share and round(share, _DIGITS) for name, share in shares.items()}
    return {**_counts(call, kernels, found), "bandwidth_share": rounded, **more}


def counts_of(call: ModelledCall) -> dict[str, Any]:
    """Return what `row_of` does for a GPU with tensor cores; ``share`` is a T4's."""
    kernels, found = _counted(call)
    return {**_counts(call, kernels, found), "share": found.bandwidth_share(T4)}


def _counted(call: ModelledCall, *, tensor_cores: bool = True) -> tuple[list[str], MemoryFigures]:
    device, report = EmulatedDevice(Checks.fast()), Report()
    device.tensor_cores = tensor_cores
    with running_on(device):
        run = call.prepare()
        device.report = report
        run()
    if call.kernel is not None:
        return [call.kernel], memory_figures(report.kernels[call.kernel], call.least_bytes)
    return list(report.kernels), memory_figures(report, call.least_bytes)


def _counts(call: ModelledCall, kernels: list[str], found: MemoryFigures) -> dict[str, Any]:
    issued = sum(n for pipe, n in found.instructions.items() if pipe != "move")
    return {
        "call": call.name,
        "kernels": kernels,
        "least_bytes": found.least_bytes,
        "sector_ratio": round(found.sector_ratio, _DIGITS),
        "bound": found.bound(T4),
        "instruction_bytes": round(found.least_bytes / issued, _DIGITS),
    }


def modelled_rows(
    cases: Callable[[Harness], Sequence[Case]], machine: Machine = T4
) -> Iterator[Row]:
    """Yield a row for each of this library's implementations of each case.

    `cases` makes the same list for two harnesses: calls of products need no contents, those that
    the emulator runs do.
    """
    model = Model(machine)
    pairs = list(zip(cases(UNFILLED), cases(EMULATED), strict=True))
    with progress("modelling", len(pairs)) as step:
        for pair in pairs:
            yield from _rows_of(pair, model)
            step(", ".join(map(str, pair[0].labels.values())))


def _rows_of(pair: tuple[Case, Case], model: Model) -> Iterator[Row]:
    unfilled, filled = pair
    products = filled.ceiling in (PRODUCTS, FLOAT32)
    for one in (unfilled if products else filled).implementations:
        if not one.modelled:
            continue

        def prepare(prepare: Callable[[], Sequence[Call]] = one.prepare) -> Call:
            return prepare()[0]

        work = filled.work_of(one.name)
        if products:
            kernels = launches_of(prepare, model.machine)
            counts: dict[str, Any] = {
                "kernels": list(dict.fromkeys(each.spec.entry for each in kernels))
            }
            rate = rate_of(model, prepare)
            seconds = rate and work["flops"] / rate / 1e12
        else:
            found = counts_of(ModelledCall(one.name, work["bytes"], prepare))
            share = found["share"]
            seconds = share and work["bytes"] / (share * model.machine.memory_gb_s * 1e9)
            names = ("kernels", "sector_ratio", "bound", "instruction_bytes")
            counts = {name: found[name] for name in names}
        rates = rates_of(seconds, **work, ceiling=filled.ceiling, ceilings=ceilings_of(T4))
        yield {
            **filled.labels,
            "implementation": one.name,
            **({"times": {"p50_s": seconds}} if seconds else {}),
            **rates,
            "peak_bytes": None,
            "counts": counts,
        }


def rate_of(model: Model, prepare: Prepare) -> float | None:
    """Return the rate of a call's products, None if there is no disassembler."""
    try:
        return model.rate(prepare)
    except DisassemblerError:
        return None
