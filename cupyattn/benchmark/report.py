"""``python -m cupyattn report``: everything measured on a GPU, with the model if it is a Turing.

The model of Turing was compared with figures of other kernels only: its authors have no Turing GPU.
A report is what an owner of one can send, and `.github/ISSUE_TEMPLATE` has the form for it. First
come the units whose rates the model takes from publications, so that one report calibrates it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from cupyattn.benchmark import attention, decode, layers, linear
from cupyattn.benchmark.cases import Case, Harness, Row, labels_of, median_of
from cupyattn.benchmark.ceiling_kernels import (
    LOADS,
    TENSOR_UNITS,
    UNIT_ROUNDS,
    UNIT_WORDS,
    UNITS,
    TimedUnit,
    unit_rates,
)
from cupyattn.benchmark.command import JSON, Benchmark, run_on_gpu
from cupyattn.benchmark.results import measured_on
from cupyattn.benchmark.table import label_text
from cupyattn.benchmark.timer import ARITHMETIC, copy_rate
from cupyattn.cli.arguments import Commands, positive
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arch import SUB_PARTITIONS, TURING, WARP_SIZE
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device.cuda import CudaDevice, cuda_device
from cupyattn.runtime.plan import launch
from cupyattn.runtime.storage import VECTOR_BYTES
from cupyattn.turing import MARGIN, DisassemblerError, Machine, disassembler_version
from cupyattn.turing.analysis import TuringModel
from cupyattn.turing.machine import interval, latency, machine_of, service
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
        description="Measure attention, its gradients, products, layers and decoding on the first "
        "GPU, and print them as Markdown; on a Turing GPU with the figures of the model of "
        "Turing (pip install 'cupyattn[turing]'). Needs a GPU.",
        epilog="To send it as an issue: python -m cupyattn report > report.md. Exit code 1 without "
        "a GPU.",
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
    model = None if machine is None else TuringModel(machine)
    copied = copy_rate()
    units = measured_units(device, machine)
    parts = [
        _measured(*part, model, clock() + (ends - clock()) / (len(PARTS) - number), clock)
        for number, part in enumerate(PARTS)
    ]
    return {
        "command": "report",
        **measured_on(device),
        "copy_gb_per_s": copied,
        "memory_gb_per_s": None if machine is None else machine.memory_gb_s,
        "machine": None if machine is None else machine.name,
        "without_model": missing,
        "minutes": arguments.minutes,
        "units": units,
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
    """Return the cycles of a unit's instruction by the model, without other load.

    Examples
    --------
    >>> from cupyattn.turing import T4
    >>> {unit.macro: modelled_cycles(unit, T4) for unit in UNITS[:4]}
    {'kConversions': 8, 'kExponentials': 8, 'kShuffles': 4, 'kReductions': 8}
    """
    instruction = SassInstruction(0, unit.opcode)
    if unit.macro == LOADS:
        return latency(instruction, machine)
    return max(interval(instruction, machine), SUB_PARTITIONS * service(instruction, machine))


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
    if clock() >= ends:
        return {"command": benchmark.name, "words": [*words, *CALLS], "cut": True, "rows": []}
    cut = False

    def rows_within(arguments: argparse.Namespace, harness: Harness) -> Iterator[Row]:
        nonlocal cut
        for row in benchmark.harness_rows(arguments, harness):
            yield {**row, "modelled": figure(row, cases, model)}
            if clock() >= ends:
                cut = True
                return

    rows = replace(benchmark, rows=rows_within).result(arguments)["rows"]
    return {"command": benchmark.name, "words": [*words, *CALLS], "cut": cut, "rows": rows}


UNFILLED = Harness(np, cold=False, filled=False)
"""The harness that prepares calls for the model, which reads no arrays."""


def figure(row: Row, cases: dict[str, Case], model: TuringModel | None) -> float | None:
    """Return a row's figure by the model: TFLOP/s of products, or the specified GB/s."""
    if model is None or median_of(row) is None:
        return None
    if row["ceiling"] not in ARITHMETIC:
        return None if row["gb_per_s"] is None else float(model.machine.memory_gb_s)
    labels = labels_of(row)
    name = labels.pop("implementation")
    case = cases.get(json.dumps(labels))
    found = [each for each in case.implementations if each.name == name] if case else []
    return model.rate(lambda: found[0].prepare()[0]) if found else None


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
        ],
    )  # fmt: skip
    if result["without_model"]:
        yield f"Measured alone: {result['without_model']}."
    else:
        yield (
            f"Modelled as a {result['machine']}: products by a simulation of their kernels' main "
            f"loops, utilisation +-{MARGIN}, at the boost clock; the others by the specified "
            "bandwidth."
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
    for part in result["parts"]:
        yield ""
        yield f"## `{' '.join(['python -m cupyattn.benchmark', part['command'], *part['words']])}`"
        yield ""
        if part["cut"]:
            yield f"Cut: its share of {result['minutes']:g} minutes was over (--minutes)."
            yield ""
        yield from _table(
            ("call", "time", "measured", "modelled", "share"), [_cells(row) for row in part["rows"]]
        )


def _unit_cells(unit: Json) -> tuple[str, ...]:
    cycles, moved, modelled = (unit[name] for name in ("cycles", "bytes_per_cycle", "modelled"))
    measured = f"{cycles:.1f}" + ("" if moved is None else f" ({moved} bytes a cycle)")
    return unit["unit"], measured, "" if modelled is None else f"{modelled:g}"


def _cells(row: Json) -> tuple[str, ...]:
    labels = {k: v for k, v in labels_of(row).items() if k not in ("window", "head_dim_v")}
    seconds, call = median_of(row), label_text(labels)
    if seconds is None:
        return (call, "", row["unavailable"], "", "")
    products = row["ceiling"] in ARITHMETIC
    figure, unit = row["tflops" if products else "gb_per_s"], "TFLOP/s" if products else "GB/s"
    modelled = row["modelled"]
    return (
        call,
        f"{seconds * 1e6:.1f} us",
        f"{figure:.1f} {unit}",
        "" if modelled is None else f"{modelled:.1f}",
        "" if modelled is None else f"{figure / modelled:.2f}",
    )


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""
