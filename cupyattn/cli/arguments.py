"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""The object that `argparse.ArgumentParser.add_subparsers` returns."""


class Parser(argparse.ArgumentParser):
    """One whose optional positionals may have options between them: MODEL --cpu PROMPT.

    argparse itself took the second for missing until Python 3.12.7.
    """

    _parts = False

    def parse_known_args(self, args: Any = None, namespace: object = None) -> Any:
        """Parse options first, and the remaining words as positionals."""
        if self._parts or not any(each.nargs == "?" for each in self._get_positional_actions()):
            return super().parse_known_args(args, namespace)
        self._parts = True  # by which the next call comes here
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._parts = False


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Give a command its ``--json``."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else on stdout"
    )


def print_help_of(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Return the function of a command without its subcommand: it prints the help."""

    def run(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    return run


def integer(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """Make a reader of integers from `lowest` to `highest`, for argparse's ``type=``.

    Examples
    --------
    >>> integer(1, 256)("64")
    64
    """

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if number < lowest or (highest is not None and number > highest):
            limits = f"{lowest} or more" if highest is None else f"{lowest} to {highest}"
            raise argparse.ArgumentTypeError(f"{number} is not {limits}")
        return number

    return read


def positive(text: str) -> float:
    """Read a finite number above 0, for argparse's ``type=``.

    Examples
    --------
    >>> positive("7.5")
    7.5
    """
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return number
