"""The frame of a command that works on a GPU and has rows of its own kind: tune, report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from cupyattn.benchmark.frame.results import require_writable
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.functional.device_info import device_count

NO_GPU = (
    "there is no CUDA device, and this times kernels on one; run it on a machine with a GPU "
    "(without one, python -m cupyattn turing models the products of a Turing GPU, and python -m "
    "cupyattn memory what moves bytes)"
)
FAILURES = (RuntimeError, ValueError, MemoryError, OSError)
"""A GPU that is too old, a CUPYATTN_ARCH that is wrong, no room for the arrays."""


def add_json_file(parser: argparse.ArgumentParser) -> None:
    """Give a command ``--json FILE``."""
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
            raise RuntimeError(NO_GPU)
        if arguments.json is not None:
            require_writable(arguments.json)
        result = measure(arguments)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except FAILURES as failure:
        fail(command, failure, as_json=False)
        return 1
    emit(result, show, as_json=False)
    return 0
