"""Options of benchmarks that are numbers, one or several."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

Number = tuple[str, int, Callable[[str], int], str]
"""An option of a command: its name, default, kind and what it is."""
Numbers = tuple[str, list[int], Callable[[str], int], str]
"""One that takes several."""


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


def add_lists(parser: argparse.ArgumentParser, lists: Iterable[Numbers]) -> None:
    """Give a command options that are several numbers each."""
    for name, default, kind, what in lists:
        parser.add_argument(
            f"--{name}",
            nargs="+",
            type=kind,
            default=default,
            metavar="N",
            help=f"{what} (default: {' '.join(map(str, default))})",
        )
