"""A call on the emulator, and what it asks of Turing cards: where there is no GPU to time it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cupyattn.benchmark.frame.rows import COPY, FLOAT32, PRODUCTS, READ, Row, products_of
from cupyattn.emulator import Checks, Report
from cupyattn.functional.backend import running_on
from cupyattn.kernels.device.emulated import EmulatedDevice
from cupyattn.turing import MACHINES, T4, Machine
from cupyattn.turing.memory import MemoryFigures, memory_figures

_DIGITS = 3
PEAK_FLOP_PER_CYCLE = 1024
"""float16 products of a Turing multiprocessor: 65 TFLOP/s of a T4."""
FLOAT32_FLOP_PER_CYCLE = 128
"""Of its 64 float32 units: 8.1 TFLOP/s of a T4."""


def ceilings_of(machine: Machine) -> dict[str, float | None]:
    """Return what a card can do at the most, by its data sheet, as a run on a GPU measures it.

    Examples
    --------
    >>> ceilings_of(T4)["copy_gb_per_s"], round(ceilings_of(T4)["mma_tflops"])
    (320.0, 65)
    """
    memory = float(machine.memory_gb_s)
    products = machine.tflops(PEAK_FLOP_PER_CYCLE) if machine.tensor_cores else None
    float32 = machine.tflops(FLOAT32_FLOP_PER_CYCLE)
    return {COPY: memory, READ: memory, PRODUCTS: products, FLOAT32: float32}


class ModelledCall(NamedTuple):
    """A call by name, and the bytes that it cannot do without."""

    name: str
    least_bytes: int
    prepare: Callable[[], Callable[[], Any]]
    """Makes its arrays, on NumPy, and returns what is called."""
    kernel: str | None = None
    """The one of the call's kernels that is meant; otherwise all are."""


def row_of(call: ModelledCall) -> dict[str, Any]:
    """Run a call on the emulator, and tell what it asks of each card.

    Cards without tensor cores run other kernels where it takes products of tensor cores.

    Returns
    -------
    dict
        ``call``, ``kernels`` (their entries), ``least_bytes``, ``sector_ratio``; ``bound``, what is
        busy for the longest on a T4; ``instruction_bytes``, bytes that move for each warp
        instruction that is issued; ``bandwidth_share`` by machine; and where they are others,
        ``without_tensor_cores``, the kernels that the shares of machines without them are of.
    """
    kernels, found = _counted(call)
    more: dict[str, Any] = {}
    shares = {name: found.bandwidth_share(machine) for name, machine in MACHINES.items()}
    if None in shares.values():
        others, without = _counted(call, tensor_cores=False)
        more["without_tensor_cores"] = others
        for name, share in shares.items():
            if share is None:
                shares[name] = without.bandwidth_share(MACHINES[name])
    rounded = {name: share and round(share, _DIGITS) for name, share in shares.items()}
    return {**_counts(call, kernels, found), "bandwidth_share": rounded, **more}


def counts_of(call: ModelledCall) -> dict[str, Any]:
    """Return what `row_of` does, of a card with tensor cores: ``share`` is a T4's."""
    kernels, found = _counted(call)
    return {**_counts(call, kernels, found), "share": found.bandwidth_share(T4)}


def _counted(call: ModelledCall, *, tensor_cores: bool = True) -> tuple[list[str], MemoryFigures]:
    """Return which kernels a call launches, and what they do."""
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


def memory_bound(labels: Mapping[str, Any], call: ModelledCall) -> Row:
    """Return the row of a call whose speed is that of its bytes, on a T4."""
    counts = counts_of(call)
    share = counts["share"]
    rate = None if share is None else share * T4.memory_gb_s
    seconds = None if rate is None else call.least_bytes / rate / 1e9
    counts = _chosen(counts, "kernels", "sector_ratio", "bound", "instruction_bytes")
    figures = {"bytes": call.least_bytes, "gb_per_s": rate, "of_ceiling": share}
    return _row(labels, "cupyattn", seconds, counts, figures)


def of_products(
    labels: Mapping[str, Any],
    contender: str,
    flops: float,
    tflops: float | None,
    call: ModelledCall,
    *,
    least_bytes: float | None = None,
) -> Row:
    """Return the row of products at the model's rate on a T4; `call` is a small one, counted.

    Of float16 the ceiling is the tensor cores' peak; of other dtypes that of float32 arithmetic.
    """
    peak = ceilings_of(T4)[products_of(labels["dtype"])]
    seconds = None if tflops is None else flops / tflops / 1e12
    counts = _chosen(counts_of(call), "kernels", "sector_ratio", "instruction_bytes")
    figures = {
        "flops": flops,
        "bytes": least_bytes,
        "tflops": tflops,
        "gb_per_s": least_bytes and seconds and least_bytes / seconds / 1e9,
        "of_ceiling": tflops and peak and tflops / peak,
    }
    return _row(labels, contender, seconds, counts, figures)


def _row(
    labels: Mapping[str, Any],
    contender: str,
    seconds: float | None,
    counts: Mapping[str, Any],
    figures: Mapping[str, Any],
) -> Row:
    """Return a row with the keys of a measured one; of its times there is one."""
    names = ("flops", "bytes", "tflops", "gb_per_s", "of_ceiling", "peak_bytes")
    return {
        **labels,
        "contender": contender,
        **({} if seconds is None else {"times": {"p50_s": seconds}}),
        **dict.fromkeys(names),
        **figures,
        "counts": counts,
    }


def _chosen(counts: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: counts[name] for name in names}
