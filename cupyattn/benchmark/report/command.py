"""``python -m cupyattn report``: everything measured on a GPU, beside the model if it is a Turing.

The model of Turing has been held against no Turing card: its authors have none. A report is what
an owner of one can send, and `.github/ISSUE_TEMPLATE` has the form for it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

from cupyattn.benchmark.attention import backward as attention_backward
from cupyattn.benchmark.attention import forward as attention
from cupyattn.benchmark.decode import command as decode
from cupyattn.benchmark.frame.ceilings import copy_rate
from cupyattn.benchmark.frame.gpu_command import add_json_file, run_on_gpu
from cupyattn.benchmark.frame.machine import measured_on
from cupyattn.benchmark.frame.rows import labels_of, median_of
from cupyattn.benchmark.frame.table import label_text
from cupyattn.benchmark.frame.turing_model import Model, machine_of, of_products, with_model
from cupyattn.benchmark.layers import command as layers
from cupyattn.benchmark.linear import command as linear
from cupyattn.benchmark.report.within import Clock, rows_within
from cupyattn.cli.arguments import positive
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.device.cuda import cuda_device
from cupyattn.turing import MARGIN, DisassemblerError, disassembler_version

_SELF_ATTENTION = (
    *("--head-dim", "64", "80", "128", "--seqlen", "512", "4096", "--tokens", "8192"),
    *("--dtype", "float16", "--implementation", "flash", "--options", "causal"),
)
_CALLS = ("--calls", "20", "--warm-up", "5")
_SIZES = ((8192, 16384, 4096), (8192, 3072, 768), (512, 16384, 4096))
_THIN = ((1, 16384, 4096), (16, 16384, 4096), (1, 2560, 10240), (16, 2560, 10240))
_LAYERS = (
    *("layer_norm", "rms_norm", "add + rms_norm", "softmax", "cross_entropy", "embedding", "rope"),
    *("gelu", "swiglu", "dropout", "adamw_step", "global_norm"),
)
PARTS = (
    (attention, "attention", _SELF_ATTENTION),
    (attention_backward, "attention_backward", _SELF_ATTENTION),
    (linear, "linear", ("--kind", "large", "backward", *(
        word for size in _SIZES for word in ("--size", *map(str, size))))),
    (linear, "linear", ("--kind", "thin", *(
        word for size in _THIN for word in ("--size", *map(str, size))))),
    (layers, "layers", ("--width", "2048", "--operation", *_LAYERS)),
    (decode, "decode", ("--batch", "1", "16", "--context", "4096", "--cache", "float", "int8")),
)  # fmt: skip
"""The benchmarks that a report is made of."""
MINUTES = 10.0
_MEASURING = 0.75
"""The share of a part's time that is for measuring; the model of its kernels has the rest."""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "report",
        help="measure everything on this GPU, beside the model of Turing: text for an issue",
        description="Measure attention, its gradients, products, layers and decoding on the first "
        "GPU, and print them as Markdown; on a Turing card beside what the model of Turing says "
        "of it (pip install 'cupyattn[turing]'). Needs a GPU.",
        epilog="To send it as an issue: python -m cupyattn report > report.md. Exit code 1 without "
        "a GPU.",
    )
    parser.add_argument(
        "--minutes", type=positive, default=MINUTES, metavar="N",
        help="of all of it; what does not fit is left out, and said to be (default: %(default)g)",
    )  # fmt: skip
    add_json_file(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    return run_on_gpu("report", arguments, measure, show)


def measure(arguments: argparse.Namespace, clock: Clock = time.monotonic) -> Result:
    """Measure every part on the first GPU, and model it if that is a Turing card.

    Each part has an equal share of the time that those before it have left.
    """
    print(
        f"report: {len(PARTS)} benchmarks in {arguments.minutes:g} minutes at the most; "
        "what does not fit is left out, and said to be (--minutes)",
        file=sys.stderr,
    )
    ends = clock() + 60 * arguments.minutes
    device = cuda_device(0)
    machine, without = machine_of(device), None
    if machine is None:
        without = (
            f"the model is for Turing, compute capability {TURING.number / 10}, and this GPU has "
            f"{device.capability / 10:.1f}"
        )
    else:
        try:
            disassembler_version()
        except DisassemblerError as missing:
            machine, without = None, str(missing)
    model = None if machine is None else Model(machine)
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
        "without_model": without,
        "minutes": arguments.minutes,
        "parts": parts,
    }


def _measured(
    part: Any, name: str, words: tuple[str, ...], model: Model | None, ends: float, clock: Clock
) -> dict[str, Any]:
    """Return the rows of a part, and whether time has cut them or their model."""
    begun = clock()
    rows, cut = rows_within(
        part.BENCHMARK, _parsed(part, name, words), begun + _MEASURING * (ends - begun), clock
    )
    modelled: list[dict[str, Any]] = []
    for row in rows:
        is_over = clock() >= ends
        cut = cut or (is_over and model is not None)
        modelled += with_model(name, [row], None if is_over else model)
    return {"command": name, "words": [*words, *_CALLS], "cut": cut, "rows": modelled}


def _parsed(part: Any, name: str, words: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    part.BENCHMARK.add_parser(parser.add_subparsers())
    return parser.parse_args([name, *words, *_CALLS])


def show(result: Result, terminal: Terminal) -> None:
    """Print it as Markdown."""
    terminal.verbatim("\n".join(markdown(result)))


def markdown(result: Result) -> Iterator[str]:
    """Yield the lines of a report."""
    yield f"# cupyattn {result['version']} on {result['device']}, {result['date']}"
    yield ""
    yield from _table(
        ("machine", ""),
        [
            ("compute capability", result["compute_capability"]),
            ("kernels", ", ".join(result["code"])),
            ("CUPYATTN_ARCH", result["arch_override"] or "not set"),
            ("float16", "tensor cores" if result["tensor_cores"] else "float32 arithmetic"),
            ("CUDA driver, CuPy, NVRTC", ", ".join(
                result[name] for name in ("cuda_driver", "cupy", "nvrtc"))),
            ("a copy", f"{result['copy_gb_per_s']:.0f} GB/s" + (
                "" if result["memory_gb_per_s"] is None
                else f" of {result['memory_gb_per_s']} specified")),
        ],
    )  # fmt: skip
    if result["without_model"]:
        yield f"Measured alone: {result['without_model']}."
    else:
        yield (
            f"Modelled as a {result['machine']}: products by a simulation of their kernels' main "
            f"loops, utilisation +-{MARGIN}, at the boost clock; the others by the bandwidth that "
            "is specified."
        )
    for part in result["parts"]:
        yield ""
        yield f"## `{' '.join(['python -m cupyattn.benchmark', part['command'], *part['words']])}`"
        yield ""
        if part["cut"]:
            yield f"Cut: its share of {result['minutes']:g} minutes was over (--minutes)."
            yield ""
        yield from _table(
            ("call", "time", "measured", "modelled", "share"),
            [_cells(part["command"], row) for row in part["rows"]],
        )


def _cells(command: str, row: dict[str, Any]) -> tuple[str, ...]:
    seconds = median_of(row)
    if seconds is None:
        return (_call(row), "", row["unavailable"], "", "")
    products = of_products(command, row)
    figure, unit = row["tflops" if products else "gb_per_s"], "TFLOP/s" if products else "GB/s"
    modelled = row["modelled"]
    return (
        _call(row),
        f"{seconds * 1e6:.1f} us",
        f"{figure:.1f} {unit}",
        "" if modelled is None else f"{modelled:.1f}",
        "" if modelled is None else f"{figure / modelled:.2f}",
    )


def _call(row: dict[str, Any]) -> str:
    """Return what tells a row from others."""
    labels = labels_of(row)
    return label_text({name: labels[name] for name in labels if name not in _LEFT_OUT})


_LEFT_OUT = ("window", "head_dim_v")


def _table(columns: tuple[str, ...], rows: Any) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""
