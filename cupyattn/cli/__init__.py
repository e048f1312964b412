"""``python -m cupyattn``: one module per command, and `terminal`, which they print with.

A command makes one dictionary, which ``--json`` prints as it is and `show` prints for people.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import cupyattn
from cupyattn.cli import chat, compile, demo, finetune, generate, info, merge, profile, turing
from cupyattn.cli.arguments import Parser, print_help_of

INTERRUPTED = 130  # what shells report for SIGINT


def main(argv: Sequence[str] | None = None, more: Iterable[object] = ()) -> int:
    """Run a command of the command line and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; by default those of the process.
    more : iterable of modules, optional
        Further commands: modules with an ``add_parser``.
    """
    return dispatch(_parser(more), argv)


def dispatch(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Parse the arguments and run the command that they name: its parser has it as ``run``."""
    with _three_streams():
        return _run(parser, argv)


@contextmanager
def _three_streams() -> Iterator[None]:
    """Give a process the streams that it lacks (pythonw, closed descriptors): empty ones."""
    with ExitStack() as opened:
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:
                stream = opened.enter_context(open(os.devnull, mode, encoding="utf-8"))
                opened.callback(setattr, sys, name, None)
                setattr(sys, name, stream)
        yield


def _run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    arguments = parser.parse_args(argv)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output (head, less) has ended
        _drop_output()
        return 1
    except OSError as failure:
        if failure.filename is not None or not _output_fails():
            raise
        print(f"{parser.prog}: the output cannot be written ({failure})", file=sys.stderr)
        _drop_output()
        return 1


def _output_fails() -> bool:
    """Tell whether stdout takes nothing more, not even an empty line: of a full disk."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """Point stdout at nowhere: otherwise Python writes its buffer again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser(more: Iterable[Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cupyattn",
        description="Exact attention for array code: try it, run a language model or fine-tune it, "
        "inspect, compile, profile and model its kernels.",
        epilog="The command benchmark measures the library: it is python -m cupyattn.benchmark.",
    )
    parser.add_argument("--version", action="version", version=f"cupyattn {cupyattn.__version__}")
    parser.set_defaults(run=print_help_of(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    for command in (demo, generate, chat, finetune, merge, info, compile, profile, turing, *more):
        command.add_parser(commands)
    return parser
