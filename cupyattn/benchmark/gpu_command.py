"""The frame of a command that times kernels on a GPU: its options, its run, its first lines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from cupyattn.cli.arguments import integer
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.functional.device_info import device_count

Number = tuple[str, int, Callable[[str], int], str]
"""An option of a command: its name, default, kind and what it is."""


def add_numbers(parser: argparse.ArgumentParser, numbers: Iterable[Number]) -> None:
    """Give a command options that are a number each."""
    for name, default, kind, what in numbers:
        parser.add_argument(
            f"--{name}",
            type=kind,
            default=default,
            metavar="N",
            help=f"{what} (default: %(default)s)",
        )


def add_timing_options(parser: argparse.ArgumentParser, *, calls: int, warm_up: int) -> None:
    """Give a command ``--calls``, ``--warm-up`` and ``--json FILE``."""
    parser.add_argument(
        "--calls",
        type=integer(1),
        default=calls,
        metavar="N",
        help="calls that are timed, of which the median is shown (default: %(default)s)",
    )
    parser.add_argument(
        "--warm-up",
        type=integer(1),
        default=warm_up,
        metavar="N",
        help="calls before them (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything to FILE too, as one JSON object"
    )


def run_on_gpu(
    command: str,
    arguments: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Result],
    show: Callable[[Result, Terminal], None],
) -> int:
    """Measure, print and write the result, and return the exit code; 1 without a GPU."""
    try:
        if not device_count():
            raise RuntimeError(
                "there is no CUDA device, and this times kernels on one; run it on a machine with "
                "a GPU (python -m cupyattn turing models a Turing GPU without one)"
            )
        result = measure(arguments)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    # A GPU that is too old, a CUPYATTN_ARCH that is wrong, no PyTorch, no room for the arrays.
    except (RuntimeError, ValueError, MemoryError, OSError) as failure:
        fail(command, failure, as_json=False)
        return 1
    emit(result, show, as_json=False)
    return 0


def show_machine(what: str, result: Result, terminal: Terminal) -> None:
    """Print what belongs to every figure: GPU, date, architecture of the code, versions."""
    terminal.title(f"{what} on {result['device']}, {result['date']}")
    terminal.facts(
        {
            "compute capability": result["compute_capability"],
            "kernels": ", ".join(map(_code_text, result["code"])) or "none ran",
            "CUPYATTN_ARCH": result["arch_override"] or "not set",
            "float16": "on tensor cores" if result["tensor_cores"] else "in float32 arithmetic",
            "CUDA driver": result["cuda_driver"],
            "versions": f"cupyattn {result['version']}, CuPy {result['cupy']}, NVRTC "
            f"{result['nvrtc']}" + (f", PyTorch {result['torch']}" if result.get("torch") else ""),
        }
    )


def _code_text(target: str) -> str:
    if target.startswith("compute_"):
        return f"{target} PTX, translated by the driver"
    return f"{target} machine code"
