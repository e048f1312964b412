"""``python -m cupyattn report``: everything measured on a GPU, beside the model if it is a Turing.

The model of Turing has been held against no Turing card: its authors have none. A report is what
an owner of one can send, and `.github/ISSUE_TEMPLATE` has the form for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cupyattn.benchmark import decode
from cupyattn.benchmark.attention import backward as attention_backward
from cupyattn.benchmark.attention import forward as attention
from cupyattn.benchmark.cuda_events import copy_rate, measured_on
from cupyattn.benchmark.gpu_command import run_on_gpu
from cupyattn.benchmark.layers import command as layers
from cupyattn.benchmark.linear import command as linear
from cupyattn.benchmark.report.modelled import Model, machine_of, with_model
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.device.cuda import cuda_device
from cupyattn.turing import MARGIN, DisassemblerError, disassembler_version

_SELF_ATTENTION = ("--head-dim", "64", "80", "128", "--seqlen", "512", "4096", "--tokens", "8192")
_CALLS = ("--calls", "20", "--warm-up", "5")
_SIZES = ((8192, 16384, 4096), (8192, 3072, 768), (512, 16384, 4096))
_THIN = ((1, 16384, 4096), (16, 16384, 4096), (1, 2560, 10240), (16, 2560, 10240))
_LAYERS = (
    *("layer_norm", "rms_norm", "add + rms_norm", "softmax", "cross_entropy", "embedding", "rope"),
    *("gelu", "swiglu", "dropout", "adamw_step", "global_norm"),
)
PARTS = (
    (attention, "attention", (*_SELF_ATTENTION, "--options", "causal")),
    (attention_backward, "attention_backward", (*_SELF_ATTENTION, "--options", "causal")),
    (linear, "linear", ("--kind", "large", "backward", *(
        word for size in _SIZES for word in ("--size", *map(str, size))))),
    (linear, "linear", ("--kind", "thin", *(
        word for size in _THIN for word in ("--size", *map(str, size))))),
    (layers, "layers", ("--width", "2048", "--operation", *_LAYERS)),
    (decode, "decode", ("--batch", "1", "16", "--context", "4096", "--cache", "float", "int8")),
)  # fmt: skip
"""The benchmarks that a report is made of: some minutes on a T4, most of them for the compiler."""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "report",
        help="measure everything on this GPU, beside the model of Turing: text for an issue",
        description="Measure attention, its gradients, products, layers and decoding on the first "
        "GPU, and print them as Markdown; on a Turing card beside what the model of Turing says "
        "of it (pip install 'cupyattn[turing]'). It takes some minutes. Needs a GPU.",
        epilog="To send it as an issue: python -m cupyattn report > report.md. Exit code 1 without "
        "a GPU.",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything to FILE too, as one JSON object"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    return run_on_gpu("report", arguments, measure, show)


def measure(arguments: argparse.Namespace) -> Result:
    """Measure every part on the first GPU, and model it if that is a Turing card."""
    del arguments
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
    copied = copy_rate(20, 5)
    parts = [
        {"command": name, "words": [*words, *_CALLS],
         "rows": with_model(name, part.measure(_parsed(part, name, words))["rows"], model)}
        for part, name, words in PARTS
    ]  # fmt: skip
    return {
        "command": "report",
        **measured_on(device),
        "copy_gb_per_s": copied,
        "memory_gb_per_s": None if machine is None else machine.memory_gb_s,
        "machine": None if machine is None else machine.name,
        "without_model": without,
        "parts": parts,
    }


def _parsed(part: Any, name: str, words: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    part.add_parser(parser.add_subparsers())
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
        yield from _table(
            ("call", "time", "measured", "modelled", "share"), map(_cells, part["rows"])
        )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row.get("seconds") is None:
        return (_call(row), "", row["unavailable"], "", "")
    unit = "TFLOP/s" if row.get("gb_per_s") is None else "GB/s"
    figure = row["tflops" if unit == "TFLOP/s" else "gb_per_s"]
    modelled = row["modelled"]
    return (
        _call(row),
        f"{row['seconds'] * 1e6:.1f} us",
        f"{figure:.1f} {unit}",
        "" if modelled is None else f"{modelled:.1f}",
        "" if modelled is None else f"{figure / modelled:.2f}",
    )


_LEFT_OUT = (
    *("seconds", "fastest", "fastest_s", "tflops", "gb_per_s", "modelled", "bytes", "unavailable"),
    *("time_ratio", "tokens_per_s", "window", "head_dim_v"),
)


def _call(row: dict[str, Any]) -> str:
    """Return what tells a row from others: all but figures, and what it has not."""
    return ", ".join(
        str(value) if isinstance(value, str) else f"{name} {value}"
        for name, value in row.items()
        if name not in _LEFT_OUT and value is not None and value is not False
    )


def _table(columns: tuple[str, ...], rows: Any) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""
