"""``python -m cupyattn.benchmark plot``: a chart of what the attention benchmarks wrote."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cupyattn.benchmark.plot.chart import write_charts
from cupyattn.benchmark.plot.figures import figures_of, results_in
from cupyattn.cli.terminal import fail


def add_parser(benchmarks: Any) -> None:
    """Add the command to the command line."""
    parser = benchmarks.add_parser(
        "plot",
        help="draw what attention and attention_backward wrote with --json",
        description="Draw TFLOP/s by head dim, forward and backward, plain and causal, with a bar "
        "for each contender in the files: for light and for dark pages, as SVG and as PNG. Of "
        "several lengths the longest is drawn. Needs matplotlib, but no GPU.",
        epilog="A file holds the object that attention or attention_backward writes with --json, "
        "or a list of such objects. A cross stands where a contender has no kernel.",
    )
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="FILE", help="written by a benchmark's --json"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="folder to write to (default: .)"
    )
    parser.add_argument(
        "--name", default="speed", help="how the names of the files begin (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw the charts, and print where they are."""
    try:
        figures = figures_of([result for file in arguments.results for result in results_in(file)])
        for path in write_charts(figures, arguments.out, arguments.name):
            print(path)
    except (RuntimeError, ValueError, OSError) as failure:
        fail("plot", failure, as_json=False)
        return 1
    return 0
