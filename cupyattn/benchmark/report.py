"""``python -m cupyattn report``: everything measured on a GPU, with the model if it is a Turing.

The model of Turing has never been compared with a Turing GPU: its authors have none. A report is
what an owner of one can send, and `.github/ISSUE_TEMPLATE` has the form for it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from cupyattn.benchmark import attention, decode, layers, linear
from cupyattn.benchmark.cases import Case, Harness, Row, labels_of, median_of
from cupyattn.benchmark.command import Benchmark, add_json_file, run_on_gpu
from cupyattn.benchmark.results import measured_on
from cupyattn.benchmark.table import label_text
from cupyattn.benchmark.timer import FLOAT32, PRODUCTS, Call, copy_rate
from cupyattn.cli.arguments import Commands, positive
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.backend import running_on
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device.cuda import CudaDevice, cuda_device
from cupyattn.runtime.device.recorder import LaunchRecorder
from cupyattn.runtime.spec import Specialisation
from cupyattn.turing import (
    MACHINES,
    MARGIN,
    T4,
    DisassemblerError,
    Machine,
    analyse,
    disassembler_version,
)

Clock = Callable[[], float]
"""Return seconds, as `time.monotonic` does."""
_ATTENTION = (
    *("--head-dim", "64", "80", "128", "--seqlen", "512", "4096", "--tokens", "8192"),
    *("--dtype", "float16", "--implementation", "flash", "--options", "causal"),
)
_SIZES = ((8192, 16384, 4096), (8192, 3072, 768), (512, 16384, 4096))
_THIN = ((1, 16384, 4096), (16, 16384, 4096), (1, 2560, 10240), (16, 2560, 10240))
_LAYERS = (
    *("layer_norm", "rms_norm", "add + rms_norm", "softmax", "cross_entropy", "embedding", "rope"),
    *("gelu", "swiglu", "dropout", "adamw_step", "global_norm"),
)


def _sizes(sizes: tuple[tuple[int, int, int], ...]) -> tuple[str, ...]:
    return tuple(word for size in sizes for word in ("--size", *map(str, size)))


PARTS: tuple[tuple[Benchmark, tuple[str, ...]], ...] = (
    (attention.FORWARD, _ATTENTION),
    (attention.BACKWARD, _ATTENTION),
    (linear.BENCHMARK, ("--kind", "large", "backward", *_sizes(_SIZES))),
    (linear.BENCHMARK, ("--kind", "thin", *_sizes(_THIN))),
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
        "GPU, and print them as Markdown; on a Turing GPU next to what the model of Turing says "
        "of it (pip install 'cupyattn[turing]'). Needs a GPU.",
        epilog="To send it as an issue: python -m cupyattn report > report.md. Exit code 1 without "
        "a GPU.",
    )
    parser.add_argument(
        "--minutes", type=positive, default=MINUTES, metavar="N",
        help="of all of it; what does not fit is left out, and reported (default: %(default)g)",
    )  # fmt: skip
    add_json_file(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    return run_on_gpu("report", arguments, measure, show)


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
        "parts": parts,
    }


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


# The model of Turing: the rate of a call is that of the main loops of its kernels

Prepare = Callable[[], Call]

UNFILLED = Harness(np, cold=False, filled=False)
"""The harness that prepares calls for the model, which reads no arrays."""
_GEFORCE_HMMA_F32 = 16
_EXECUTED = {
    **{"attention_forward": 2, "_dq": 3},
    **{"linear_forward": 1, "linear_product": 1, "linear_dx": 1, "linear_dw": 1},
}
"""Products of a kernel, by a part of its entry; "_dkdv" has the rest of the backward's five."""


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


class TuringModel:
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


def _products(entries: Sequence[str]) -> tuple[int, list[int]]:
    """Return how many products kernels are asked for, and how many each executes.

    The backward of attention in two passes computes two of its five products a second time. Kernels
    that only move bytes execute none.

    Examples
    --------
    >>> _products(["attention_forward"]), _products(["attention_backward_dkdv"])
    ((2, [2]), (5, [5]))
    >>> _products(["attention_backward_delta", "attention_backward_dkdv", "attention_backward_dq"])
    (5, [0, 4, 3])
    """
    two_passes = any("_dq" in entry for entry in entries)
    executed = {**_EXECUTED, "_dkdv": 4 if two_passes else 5}
    of_each = [
        next((count for part, count in executed.items() if part in entry), 0) for entry in entries
    ]
    return sum(of_each) - 2 * two_passes, of_each


def figure(row: Row, cases: dict[str, Case], model: TuringModel | None) -> float | None:
    """Return a row's figure by the model: TFLOP/s of products, or the specified GB/s."""
    if model is None or median_of(row) is None:
        return None
    if row["ceiling"] not in (PRODUCTS, FLOAT32):
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


def _cells(row: Json) -> tuple[str, ...]:
    labels = {k: v for k, v in labels_of(row).items() if k not in ("window", "head_dim_v")}
    seconds, call = median_of(row), label_text(labels)
    if seconds is None:
        return (call, "", row["unavailable"], "", "")
    products = row["ceiling"] in (PRODUCTS, FLOAT32)
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
