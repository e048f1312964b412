"""The benchmarks' command line: one command per module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cupyattn.benchmark import (
    allocator,
    block_mask,
    decode,
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
from cupyattn.benchmark.finetune import command as finetune
from cupyattn.benchmark.generate import command as generate
from cupyattn.benchmark.layers import command as layers
from cupyattn.benchmark.linear import command as linear
from cupyattn.benchmark.plot import command as plot
from cupyattn.cli import dispatch

_BENCHMARKS = (
    generate,
    finetune,
    attention,
    attention_backward,
    varlen,
    block_mask,
    layers,
    decode,
    prefill,
    kv_cache,
    linear,
    ring,
    training_step,
    allocator,
    host,
    emulator,
    plot,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m cupyattn.benchmark", description="Measure the library on this machine."
    )
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for benchmark in _BENCHMARKS:
        benchmark.add_parser(benchmarks)
    return dispatch(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
