"""``python -m cupyattn.benchmark readme``: README's figures, from those that are committed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cupyattn.benchmark.frame.results import results_of
from cupyattn.benchmark.plot import head_dims, style
from cupyattn.benchmark.plot.results import measured
from cupyattn.benchmark.readme.figures import FOLDER, load, merge, require_new, store
from cupyattn.benchmark.readme.tables import with_tables
from cupyattn.cli.terminal import fail

PICTURE = "speed"


def add_parser(benchmarks: Any) -> None:
    """Add the command to the command line."""
    parser = benchmarks.add_parser(
        "readme",
        help="write README's tables of figures and its picture, with fresh results if there are",
        description=f"Write README's tables of figures and its picture from {FOLDER}. Results of "
        "the benchmarks first replace the rows there that they have measured again: those of the "
        "same command, labels and contender, on the same device running the same code. The others "
        "keep their figures and their date. Needs a checkout and matplotlib, but no GPU.",
    )
    parser.add_argument(
        "results", type=Path, nargs="*", metavar="FILE", help="written by a benchmark's --json"
    )
    parser.add_argument(
        "--checkout",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder of README.md (default: .)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write them, and tell how many rows are new."""
    checkout, readme = arguments.checkout, arguments.checkout / "README.md"
    try:
        style.require_matplotlib()
        results = [result for file in arguments.results for result in results_of(file)]
        committed = load(checkout)
        merged = merge(committed, results)
        if arguments.results:
            require_new(merged, results, committed)
        text = with_tables(readme.read_text(encoding="utf-8"), merged.figures)
        store(checkout, merged.figures)
        readme.write_text(text, encoding="utf-8")
        every = measured(merged.figures["attention"])
        pictures = list(head_dims.write(every, checkout / ".github", PICTURE, suffixes=("svg",)))
    except (RuntimeError, ValueError, OSError) as failure:
        fail("readme", failure, as_json=False)
        return 1
    print(f"{merged.replaced} rows have new figures, {merged.kept.total()} keep theirs")
    if arguments.results:
        for of, count in merged.kept.items():
            print(f"  kept: {of}: {count}")
    for path in (readme, *pictures):
        print(path)
    return 0
