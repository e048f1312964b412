"""The benchmarks' command line: one command per module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cupyattn.benchmark import (
    allocator,
    block_mask,
    emulator,
    host,
    kv_cache,
    prefill,
    ring,
    training_step,
    varlen,
)
from cupyattn.benchmark.attention import backward as attention_backward
from cupyattn.benchmark.attention import forward as attention
from cupyattn.benchmark.decode import command as decode
from cupyattn.benchmark.everything import Everything
from cupyattn.benchmark.finetune import command as finetune
from cupyattn.benchmark.generate import command as generate
from cupyattn.benchmark.layers import command as layers
from cupyattn.benchmark.linear import command as linear
from cupyattn.benchmark.plot import command as plot
from cupyattn.benchmark.profiles import command as profiles
from cupyattn.benchmark.readme import command as readme
from cupyattn.cli import dispatch

BENCHMARKS = tuple(
    module.BENCHMARK
    for module in (
        *(attention, attention_backward, training_step, linear, layers, decode, host),
        *(emulator, varlen, prefill, kv_cache, block_mask, finetune, generate, ring),
    )
)
"""In the order in which `all` runs them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m cupyattn.benchmark", description="Measure the library on this machine."
    )
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for benchmark in (Everything(BENCHMARKS), *BENCHMARKS, allocator, profiles, plot, readme):
        benchmark.add_parser(benchmarks)
    return dispatch(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
