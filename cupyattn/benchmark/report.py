"""``python -m cupyattn report``: everything measured on a GPU, with the model if it is a Turing.

The model of Turing was compared with figures of other kernels only: its authors have no Turing GPU.
A report is what an owner of one can send, and `.github/ISSUE_TEMPLATE` has the form for it. First
come the units whose rates the model takes from publications, and calls that go on until the power
limit acts, with the clock that it leaves: one report calibrates the model.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

import cupyattn
from cupyattn.benchmark import attention, decode, layers, linear
from cupyattn.benchmark.cases import Arrays, Case, Harness, Row, labels_of, median_of
from cupyattn.benchmark.ceiling_kernels import (
    LOADS,
    TENSOR_UNITS,
    UNIT_ROUNDS,
    UNIT_WORDS,
    UNITS,
    TimedUnit,
    unit_rates,
)
from cupyattn.benchmark.command import FAILURES, JSON, Benchmark, run_on_gpu
from cupyattn.benchmark.results import measured_on, queried
from cupyattn.benchmark.table import label_text
from cupyattn.benchmark.timer import ARITHMETIC, Call, Timer, copy_rate
from cupyattn.cli.arguments import Commands, positive
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arch import SUB_PARTITIONS, TURING, WARP_SIZE
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device.cuda import CudaDevice, cuda_device
from cupyattn.runtime.plan import launch
from cupyattn.runtime.storage import VECTOR_BYTES
from cupyattn.turing import MACHINES, MARGIN, DisassemblerError, Machine, disassembler_version
from cupyattn.turing.analysis import TuringModel
from cupyattn.turing.machine import interval, latency, machine_of, service, transfer
from cupyattn.turing.power import UNCERTAINTY
from cupyattn.turing.sass import SassInstruction

Clock = Callable[[], float]
"""Return seconds, as `time.monotonic` does."""
_ATTENTION = (
    *("--head-dim", "64", "80", "128", "--seqlen", "512", "4096", "--tokens", "8192"),
    *("--dtype", "float16", "--implementation", "flash", "--options", "causal"),
)
_SIZES = "--size 8192 16384 4096 --size 8192 3072 768 --size 512 16384 4096"
_FEW = "--size 1 16384 4096 --size 16 16384 4096 --size 1 2560 10240 --size 16 2560 10240"
_LAYERS = (
    *("layer_norm", "rms_norm", "add + rms_norm", "softmax", "cross_entropy", "embedding", "rope"),
    *("gelu", "swiglu", "dropout", "adamw_step", "global_norm"),
)


PARTS: tuple[tuple[Benchmark, tuple[str, ...]], ...] = (
    (attention.FORWARD, _ATTENTION),
    (attention.BACKWARD, _ATTENTION),
    (linear.BENCHMARK, ("--kind", "large", "backward", *_SIZES.split())),
    (linear.BENCHMARK, ("--kind", "thin", *_FEW.split())),
    (layers.BENCHMARK, ("--width", "2048", "--operation", *_LAYERS)),
    (decode.BENCHMARK, ("--batch", "1", "16", "--context", "4096", "--cache", "float", "int8")),
)
"""The benchmarks of a report, and their options."""
CALLS = ("--calls", "20", "--warm-up", "5")
MINUTES = 10.0


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "report",
        help="measure everything on this GPU, and model it if it is a Turing: text for an issue",
        description="Measure the units of the first GPU, its rate and clock under its power limit, "
        "attention, its gradients, products, layers and decoding, and print them as Markdown; on "
        "a Turing GPU with the figures of the model of Turing (pip install '.[turing]'). Needs a "
        "GPU.",
        epilog="To send it as an issue: python -m cupyattn report --json report.json > report.md. "
        "Exit code 1 without a GPU.",
    )
    parser.add_argument(
        "--minutes", type=positive, default=MINUTES, metavar="N",
        help="of all of it; what does not fit is left out, and reported (default: %(default)g)",
    )  # fmt: skip
    JSON.add(parser)
    parser.set_defaults(
        run=lambda arguments: run_on_gpu("report", arguments, measure, show), json=None
    )


def measure(arguments: argparse.Namespace, clock: Clock = time.monotonic) -> Result:
    """Measure every part on the first GPU, and model it if that is a Turing GPU.

    Each part has an equal share of the time that is left.
    """
    print(
        f"report: {len(PARTS)} benchmarks in {arguments.minutes:g} minutes at most; what does not "
        "fit is left out, and reported (--minutes)",
        file=sys.stderr,
    )
    ends = clock() + 60 * arguments.minutes
    device = cuda_device(0)
    machine, missing = machine_of(device), None
    if machine is None:
        missing = (
            f"the model is for Turing, compute capability {TURING.number / 10}, and this GPU has "
            f"{device.capability / 10:.1f}"
        )
    else:
        try:
            disassembler_version()
        except DisassemblerError as failure:
            machine, missing = None, str(failure)
    watts = power_limit(device)
    has_limit = machine is not None and (watts is not None or machine.name in MACHINES)
    if machine is not None and watts is not None:
        machine = replace(machine, watts=max(1, round(watts)))
    model = None if machine is None else TuringModel(machine)
    copied = copy_rate()
    units = measured_units(device, machine)
    sustained = [_attempted(device, call, model) for call in SUSTAINED]
    parts = [
        _measured(*part, model, clock() + (ends - clock()) / (len(PARTS) - number), clock)
        for number, part in enumerate(PARTS)
    ]
    if not has_limit:  # the machine's is another device's
        for row in (*sustained, *(row for part in parts for row in part["rows"])):
            row["sustained"] = None
    return {
        "command": "report",
        **measured_on(device),
        "copy_gb_per_s": copied,
        "memory_gb_per_s": None if machine is None else machine.memory_gb_s,
        "machine": None if machine is None else machine.name,
        "without_model": missing,
        "power_limit_watts": watts,
        "minutes": arguments.minutes,
        "units": units,
        "sustained": sustained,
        "parts": parts,
    }


def measured_units(device: CudaDevice, machine: Machine | None) -> list[Json]:
    """Time each unit with one CTA on each multiprocessor; return cycles of the slowest warp.

    An instruction's cycles are those for which it occupies its unit of a sub-partition. Loads are
    latencies: cycles from one load of a chain to the next.
    """
    cupy = load_cupy()
    words = cupy.zeros(UNIT_WORDS * VECTOR_BYTES, np.uint8)
    found = []
    for unit in UNITS:
        if unit.macro in TENSOR_UNITS and not device.tensor_cores:
            continue
        warps = unit.threads // WARP_SIZE
        cycles = cupy.empty(device.multiprocessors * warps, np.int64)
        for _ in range(2):  # the first fills L2
            launch(device, unit_rates(unit), device.multiprocessors, (cycles, words))
        slowest = float(cycles.max()) / UNIT_ROUNDS
        is_latency = unit.macro == LOADS
        at_once = 1 if is_latency else unit.in_flight * warps / SUB_PARTITIONS
        found.append(
            {
                "unit": unit.name,
                "cycles": round(slowest / at_once, 1),
                "modelled": None if machine is None else modelled_cycles(unit, machine),
                "bytes_per_cycle": round(
                    device.multiprocessors * unit.threads * unit.in_flight * VECTOR_BYTES / slowest
                ) if is_latency else None,
            }
        )  # fmt: skip
    return found


def modelled_cycles(unit: TimedUnit, machine: Machine) -> float:
    """Return the cycles of a unit's instruction by the model.

    Loads take the latency, or longer where all multiprocessors wait for the bytes of L2.

    Examples
    --------
    >>> from cupyattn.turing import T4
    >>> {unit.macro: modelled_cycles(unit, T4) for unit in UNITS[:4]}
    {'kConversions': 8, 'kExponentials': 8, 'kShuffles': 4, 'kReductions': 8}
    >>> [round(modelled_cycles(unit, T4)) for unit in UNITS[6:]]
    [500, 500, 819, 1638]
    """
    instruction = SassInstruction(0, unit.opcode)
    if unit.macro == LOADS:
        loads = unit.threads // WARP_SIZE * unit.in_flight
        return max(latency(instruction, machine), loads * transfer(instruction, machine))
    return max(interval(instruction, machine), SUB_PARTITIONS * service(instruction, machine))


class SustainedCall(NamedTuple):
    """A call that is repeated until the power limit acts; `prepare` makes it from arrays."""

    name: str
    flops: float
    prepare: Callable[[Arrays], Call]


_N = 4096
_TOKENS = 8192
_WIDTH = 1024


def _product(arrays: Arrays) -> Call:
    return partial(cupyattn.matmul, *(arrays.normal(_N, _N, dtype="float16") for _ in range(2)))


def _attention(head_dim: int, arrays: Arrays) -> Call:
    shape = (1, _TOKENS, _WIDTH // head_dim, head_dim)
    return partial(cupyattn.attention, *(arrays.normal(*shape, dtype="float16") for _ in range(3)))


SUSTAINED = (
    SustainedCall("product of 4096 x 4096 x 4096", 2.0 * _N**3, _product),
    *(
        SustainedCall(
            f"attention, head dim {head_dim}, 8192 tokens",
            4.0 * _TOKENS**2 * _WIDTH,
            partial(_attention, head_dim),
        )
        for head_dim in (64, 128)
    ),
)
SUSTAINED_S = 2.0
_SHORT = Timer(calls=3, warm_up=1, budget_s=1.0)
_LAST = 4  # the share of the calls whose rate is taken: a quarter


def power_limit(device: CudaDevice) -> float | None:
    """Return the watts of a GPU's power limit, None if nvidia-smi does not report it."""
    found = _numbers(queried("power.limit", gpu=_bus(device)))
    return found[0] if found else None


def measured_sustained(
    device: CudaDevice, call: SustainedCall, model: TuringModel | None, seconds: float = SUSTAINED_S
) -> Json:
    """Repeat a call for some seconds; return its rate at first and at the end, and the clock."""
    repeated = call.prepare(Arrays(load_cupy()))
    first = statistics.median(_SHORT.queued(repeated))
    count = max(_LAST, math.ceil(seconds / first))
    with _watched(device) as seen:
        took = Timer(count, 1, 4 * seconds + count * first).queued(repeated)
    last = statistics.median(took[-max(1, len(took) // _LAST) :])
    clock, watts = (
        (statistics.median(each) for each in zip(*seen, strict=True)) if seen else (None, None)
    )

    def modelled(*, sustained: bool) -> float | None:
        if model is None:
            return None
        return model.rate(lambda: call.prepare(Arrays(np, filled=False)), sustained=sustained)

    return {
        "call": call.name,
        "tflops_at_first": call.flops / first / 1e12,
        "tflops": call.flops / last / 1e12,
        "seconds": sum(took),
        "clock_mhz": clock,
        "watts": watts,
        "modelled": modelled(sustained=False),
        "sustained": modelled(sustained=True),
    }


def _attempted(device: CudaDevice, call: SustainedCall, model: TuringModel | None) -> Json:
    """Return what `measured_sustained` does; of a call that fails the name and the error alone."""
    try:
        return {**measured_sustained(device, call, model), "failed": None}
    except FAILURES as failure:  # the rest of the report is worth its time
        failed = f"{type(failure).__name__}: {failure}"
        return {**dict.fromkeys(_MEASURED), "call": call.name, "failed": failed}


_MEASURED = (
    *("tflops_at_first", "tflops", "seconds", "clock_mhz", "watts"),
    *("modelled", "sustained"),
)


@contextmanager
def _watched(device: CudaDevice) -> Iterator[list[tuple[float, ...]]]:
    """Collect the clock in MHz and the power in watts of a GPU from nvidia-smi, until the end."""
    seen: list[tuple[float, ...]] = []
    ended, bus = threading.Event(), _bus(device)

    def watch() -> None:
        while not ended.is_set():
            numbers = _numbers(queried("clocks.sm", "power.draw", gpu=bus))
            if numbers is None:
                return
            if not seen or not ended.is_set():  # after the end the clock rises again
                seen.append(numbers)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def _bus(device: CudaDevice) -> str:
    """Return the address by which nvidia-smi finds the GPU; its numbers may differ from CUDA's."""
    return str(load_cupy().cuda.Device(device.ordinal).pci_bus_id)


def _numbers(found: list[str] | None) -> tuple[float, ...] | None:
    """Read what nvidia-smi printed, None if it is not all positive numbers, such as [N/A]."""
    try:
        numbers = tuple(map(float, found or ()))
    except ValueError:
        return None
    return numbers if numbers and all(0 < each < math.inf for each in numbers) else None


def _measured(
    benchmark: Benchmark,
    words: tuple[str, ...],
    model: TuringModel | None,
    ends: float,
    clock: Clock,
) -> Json:
    """Return the rows of a part with the model's figures, and whether time ended them."""
    _, arguments = benchmark.parse(*words, *CALLS)
    cases: dict[str, Case] = {}
    if model is not None and benchmark.cases is not None:
        every = benchmark.cases(arguments, UNFILLED)
        cases = {json.dumps(dict(case.labels)): case for case in every}
    about = {"command": benchmark.name, "words": [*words, *CALLS]}
    if clock() >= ends:
        return {**about, "cut": True, "failed": None, "rows": []}
    cut = False

    def rows_within(arguments: argparse.Namespace, harness: Harness) -> Iterator[Row]:
        nonlocal cut
        for row in benchmark.harness_rows(arguments, harness):
            modelled, sustained = (figure(row, cases, model, sustained=x) for x in (False, True))
            yield {**row, "modelled": modelled, "sustained": sustained}
            if clock() >= ends:
                cut = True
                return

    try:
        result = replace(benchmark, rows=rows_within).result(arguments)
    except FAILURES as failure:  # of the first row: the other parts are worth their time
        result = {"rows": [], "failed": f"{type(failure).__name__}: {failure}"}
    return {**about, "cut": cut, "failed": result.get("failed"), "rows": result["rows"]}


UNFILLED = Harness(np, cold=False, filled=False)
"""The harness that prepares calls for the model, which reads no arrays."""


def figure(
    row: Row, cases: dict[str, Case], model: TuringModel | None, *, sustained: bool = False
) -> float | None:
    """Return a row's figure by the model: TFLOP/s of products, or the specified GB/s.

    Products have a `sustained` one too, under the power limit.
    """
    if model is None or median_of(row) is None:
        return None
    if row["ceiling"] not in ARITHMETIC:
        found = None if sustained else row["gb_per_s"]
        return None if found is None else float(model.machine.memory_gb_s)
    labels = labels_of(row)
    name = labels.pop("implementation")
    case = cases.get(json.dumps(labels))
    found = [each for each in case.implementations if each.name == name] if case else []
    if not found:
        return None
    return model.rate(lambda: found[0].prepare()[0], sustained=sustained)


def show(result: Result, terminal: Terminal) -> None:
    """Print it as Markdown."""
    terminal.verbatim("\n".join(markdown(result)))


def markdown(result: Result) -> Iterator[str]:
    """Yield the lines of a report."""
    yield f"# cupyattn {result['version']} on {result['device']}, {result['date']}"
    yield ""
    memory, versions = result["memory_gb_per_s"], ("cuda_driver", "cupy", "nvrtc")
    yield from _table(
        ("machine", ""),
        [
            ("compute capability", result["compute_capability"]),
            ("kernels", ", ".join(result["code"])),
            ("CUPYATTN_ARCH", result["arch_override"] or "not set"),
            ("float16", "tensor cores" if result["tensor_cores"] else "float32 arithmetic"),
            ("CUDA driver, CuPy, NVRTC", ", ".join(result[name] for name in versions)),
            ("a copy", f"{result['copy_gb_per_s']:.0f} GB/s"
             + ("" if memory is None else f" of {memory} specified")),
            ("power limit", _text(result["power_limit_watts"], "{:.0f} W") or "not reported"),
        ],
    )  # fmt: skip
    if result["without_model"]:
        yield f"Measured alone: {result['without_model']}."
    else:
        yield (
            f"Modelled as a {result['machine']}: products by a simulation of their kernels' main "
            f"loops, utilisation +-{MARGIN}, at the boost clock, and sustained under the power "
            f"limit, +-{UNCERTAINTY:.0%}; the others by the specified bandwidth."
        )
    yield ""
    yield "## Units"
    yield ""
    yield (
        "Cycles of one instruction of a warp in its unit of a sub-partition; of loads the latency, "
        "and the bytes a cycle of all multiprocessors."
    )
    yield ""
    yield from _table(("unit", "measured", "modelled"), [_unit_cells(x) for x in result["units"]])
    yield ""
    yield "## Under the power limit"
    yield ""
    yield "TFLOP/s of calls that are repeated for seconds. Clock and power are nvidia-smi's."
    yield ""
    yield from _table(
        ("call", "at first", "at the end", "clock", "power", "modelled", "sustained by the model"),
        [_sustained_cells(call) for call in result["sustained"]],
    )
    for call in result["sustained"]:
        if call["failed"]:
            yield f"Failed: {call['call']}: {call['failed']}"
    for part in result["parts"]:
        yield ""
        yield f"## `{' '.join(['python -m cupyattn.benchmark', part['command'], *part['words']])}`"
        yield ""
        if part["cut"]:
            yield f"Cut: its share of {result['minutes']:g} minutes was over (--minutes)."
            yield ""
        if part["failed"]:
            yield f"Failed: {part['failed']}"
            yield ""
        yield from _table(
            ("call", "time", "measured", "modelled", "share", "sustained by the model"),
            [_cells(row) for row in part["rows"]],
        )


def _unit_cells(unit: Json) -> tuple[str, ...]:
    cycles, moved, modelled = (unit[name] for name in ("cycles", "bytes_per_cycle", "modelled"))
    measured = f"{cycles:.1f}" + ("" if moved is None else f" ({moved} bytes a cycle)")
    return unit["unit"], measured, "" if modelled is None else f"{modelled:g}"


def _sustained_cells(call: Json) -> tuple[str, ...]:
    rates = (call[name] for name in ("tflops_at_first", "tflops", "modelled", "sustained"))
    first, last, modelled, sustained = (_text(rate, "{:.1f}") for rate in rates)
    clock, watts = _text(call["clock_mhz"], "{:.0f} MHz"), _text(call["watts"], "{:.0f} W")
    return call["call"], first, last, clock, watts, modelled, sustained


def _text(number: float | None, form: str) -> str:
    return "" if number is None else form.format(number)


def _cells(row: Json) -> tuple[str, ...]:
    labels = {k: v for k, v in labels_of(row).items() if k not in ("window", "head_dim_v")}
    seconds, call = median_of(row), label_text(labels)
    if seconds is None:
        return (call, "", row["unavailable"], "", "", "")
    products = row["ceiling"] in ARITHMETIC
    figure, unit = row["tflops" if products else "gb_per_s"], "TFLOP/s" if products else "GB/s"
    modelled = row["modelled"]
    return (
        call,
        f"{seconds * 1e6:.1f} us",
        f"{figure:.1f} {unit}",
        _text(modelled, "{:.1f}"),
        "" if modelled is None else f"{figure / modelled:.2f}",
        _text(row["sustained"], "{:.1f}"),
    )


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""
