"""The benchmarks' command line: one command per module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cupyattn.benchmark import (
    allocator,
    attention,
    decode,
    finetune,
    generate,
    host,
    layers,
    linear,
    plot,
    profiles,
    ring,
    varlen,
)
from cupyattn.benchmark.everything import Everything
from cupyattn.cli import dispatch

BENCHMARKS = (
    attention.FORWARD,
    attention.BACKWARD,
    linear.BENCHMARK,
    linear.MATMUL,
    *(each.BENCHMARK for each in (layers, decode, host, varlen, finetune, generate, ring)),
)
"""The benchmarks, in the order in which `all` runs them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m cupyattn.benchmark", description="Measure the library on this machine."
    )
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for benchmark in (Everything(BENCHMARKS), *BENCHMARKS, allocator, profiles, plot):
        benchmark.add_parser(benchmarks)
    return dispatch(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
