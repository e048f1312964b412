"""``python -m cupyattn.benchmark plot``: pictures of what the benchmarks wrote."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from cupyattn.benchmark.frame.results import results_of
from cupyattn.benchmark.plot import (
    head_dims,
    latency,
    memory,
    percentiles,
    roofline,
    scaling,
    speed_up,
    style,
    throughput,
)
from cupyattn.benchmark.plot.results import Result, by_dtype, measured
from cupyattn.cli.terminal import fail
from cupyattn.errors import error

_PICTURES = (latency, throughput, speed_up, scaling, memory, roofline, percentiles)
"""A module each, whose `pictures` draws one command's figures."""
_BY_HEAD_DIM = "by-head-dim"
PICTURES = (
    *("latency", "tflops", "bandwidth", "speed-up", "speed-up-peers", "scaling", "memory"),
    *("roofline", "percentiles", _BY_HEAD_DIM),
)
"""What their names end in."""
FORMATS = ("svg", "png")


def add_parser(benchmarks: Any) -> None:
    """Add the command to the command line."""
    parser = benchmarks.add_parser(
        "plot",
        help="draw what the benchmarks wrote with --json",
        description="Draw, of each benchmark in the files: the time of a call, TFLOP/s and GB/s, "
        "the speed-up over naive kernels and over peers, how the time grows with the length, the "
        "memory, the roofline of the card beside a T4's, and how even the times are; and TFLOP/s "
        "of attention by head dim. Each for light and for dark pages, as SVG and as PNG. Needs "
        "matplotlib, but no GPU.",
        epilog="A file holds what a benchmark writes with --json, or a list of such objects, as "
        "all writes it. What the figures do not say is not drawn. A cross stands where a "
        "contender has no kernel, or no room.",
    )
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="FILE", help="written by a benchmark's --json"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="folder to write to (default: .)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=PICTURES, default=PICTURES, metavar="PICTURE",
        help=f"some of them: of {', '.join(PICTURES)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--format", nargs="+", choices=FORMATS, default=FORMATS, help="default: both"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw the pictures, and print where they are."""
    try:
        results = [result for file in arguments.results for result in results_of(file)]
        style.require_matplotlib()
        paths = write(results, arguments.out, arguments.only, arguments.format)
        first = next(paths, None)
        if first is None:
            raise error(
                ValueError,
                f"no figures in {', '.join(map(str, arguments.results))}"
                + ("" if arguments.only == PICTURES else f" for {', '.join(arguments.only)}"),
                "pictures are of rows that were measured or modelled",
                "see what the benchmark that wrote them said",
            )
        for path in (first, *paths):
            print(path)
    except (RuntimeError, ValueError, OSError) as failure:
        fail("plot", failure, as_json=False)
        return 1
    return 0


def write(
    results: Sequence[Result],
    folder: Path,
    only: Collection[str] = PICTURES,
    suffixes: Sequence[str] = FORMATS,
) -> Iterator[Path]:
    """Write every picture of some names that the results have figures for."""
    every = measured(results)
    for one in every:
        for begins, of_dtype in by_dtype(one).items():
            for picture in _PICTURES:
                for name, pages in picture.pictures(of_dtype).items():
                    if name in only:
                        yield from style.write(pages, folder, f"{begins}-{name}", suffixes)
    if _BY_HEAD_DIM in only:
        yield from head_dims.write(every, folder, suffixes=suffixes)
