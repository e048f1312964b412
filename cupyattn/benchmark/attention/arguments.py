"""What the attention benchmarks' command lines share: sizes, dtypes, options, kernels."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from cupyattn.benchmark.attention.cases import FEWER_SCORES, OPTIONS, PLAIN, Case
from cupyattn.cli.arguments import integer
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM

_LONGEST = 131_072


def add_case_options(
    parser: argparse.ArgumentParser, implementations: Sequence[str], default: Sequence[str]
) -> None:
    """Give a command what `cases_of` reads, and ``--implementation`` and ``--options``."""
    dtypes, head_dim, length = tuple(STORAGE), integer(1, MAX_HEAD_DIM), integer(1)
    lists: tuple[tuple[str, dict[str, Any], list[Any], str], ...] = (
        ("head-dim", {"type": head_dim}, [64, 80, 128], "head dims of q and k"),
        ("seqlen", {"type": length}, [128, 256, 512, 1024, 2048, 4096],
         f"queries and keys of a sequence, such as {_LONGEST}"),
        ("batch", {"type": length}, [1, 4, 8], "sequences of a call"),
        ("dtype", {"choices": dtypes}, ["float16", "float32"], "of the arrays"),
        ("implementation", {"choices": implementations}, list(default), "kernels to time; naive "
         "and tiled where a call takes them seconds at the most, plain and causal"),
    )  # fmt: skip
    for name, kind, usual, what in lists:
        shown = " ".join(map(str, usual))
        parser.add_argument(
            f"--{name}", nargs="+", default=usual, **kind, help=f"{what} (default: {shown})"
        )
    for name, kind_of, value, what in (
        ("head-dim-v", head_dim, None, "head dim of v (default: that of q)"),
        ("tokens", length, None, "tokens of a call, in as many sequences: instead of --batch"),
        ("width", length, 2048, "features of a token, in as many heads (default: %(default)s)"),
        ("window", integer(0), 512, "keys on each side of a query that the window keeps "
         "(default: %(default)s)"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind_of, default=value, metavar="N", help=what)
    parser.add_argument("--causal", action="store_true", help="make every call causal")
    parser.add_argument(
        "--options",
        type=option_names,
        default=list(FEWER_SCORES),
        metavar="NAMES",
        help=f"options to time beside the plain call, with commas between them: "
        f"{', '.join(OPTIONS)}; or all, or none (default: {','.join(FEWER_SCORES)})",
    )


def option_names(text: str) -> list[str]:
    """Read the names of options from the command line.

    Examples
    --------
    >>> option_names("softcap,bias"), option_names("none")
    (['softcap', 'bias'], [])
    """
    if text in ("all", "none"):
        return list(OPTIONS) if text == "all" else []
    names = text.split(",")
    unknown = [name for name in names if name not in OPTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(map(repr, unknown))} is no option; they are {', '.join(OPTIONS)}, "
            "all and none"
        )
    return names


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Return every dtype, head dim, length, batch, and number of queries where they are named.

    Examples
    --------
    >>> parser = argparse.ArgumentParser()
    >>> add_case_options(parser, ["flash"], ["flash"])
    >>> words = ["--tokens", "16384", "--seqlen", "4096", "--head-dim", "80", "--dtype", "float16"]
    >>> [(case.batch, case.heads) for case in cases_of(parser.parse_args(words))]
    [(4, 25)]
    """
    return [
        Case(
            batch=batch,
            heads=max(arguments.width // head_dim, 1),
            seqlen=seqlen,
            head_dim=head_dim,
            head_dim_v=arguments.head_dim_v or head_dim,
            dtype=dtype,
            causal=arguments.causal,
            window=arguments.window,
            queries=queries,
        )
        for dtype in arguments.dtype
        for head_dim in arguments.head_dim
        for seqlen in arguments.seqlen
        for batch in _batches(arguments, seqlen)
        for queries in getattr(arguments, "queries", None) or [None]
    ]


def _batches(arguments: argparse.Namespace, seqlen: int) -> list[int]:
    if arguments.tokens is None:
        return list(arguments.batch)
    return [max(arguments.tokens // seqlen, 1)]


def calls_of(arguments: argparse.Namespace) -> Iterator[tuple[Case, str]]:
    """Yield every case with every option, the plain call first."""
    for case in cases_of(arguments):
        for option in (PLAIN, *arguments.options):
            if not (option == "causal" and case.causal):
                yield case, option
