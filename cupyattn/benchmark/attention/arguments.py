"""What the attention benchmarks' command lines share: sizes, dtype, options, PyTorch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cupyattn.benchmark.attention.cases import FEWER_SCORES, OPTIONS, Case
from cupyattn.benchmark.torch_peer import TORCH
from cupyattn.cli.arguments import integer
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM


def add_case_options(
    parser: argparse.ArgumentParser, implementations: Sequence[str], peer: str
) -> None:
    """Give a command what `cases_of` reads, and ``--implementation``, ``--options``, ``--peer``."""
    _add_sizes(parser)
    _add_choices(parser)
    parser.add_argument(
        "--implementation",
        nargs="+",
        choices=implementations,
        default=["flash"],
        help="kernels to time (default: flash)",
    )
    parser.add_argument("--peer", choices=(TORCH,), help=f"time PyTorch's {peer} beside it")


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    head_dim, length = integer(1, MAX_HEAD_DIM), integer(1)
    parser.add_argument(
        "--head-dim",
        type=head_dim,
        nargs="+",
        default=[64, 128],
        metavar="D",
        help="head dims of q and k (default: 64 128)",
    )
    parser.add_argument(
        "--head-dim-v", type=head_dim, metavar="DV", help="head dim of v (default: that of q)"
    )
    parser.add_argument(
        "--seqlen",
        type=length,
        nargs="+",
        default=[1024, 4096],
        metavar="S",
        help="queries and keys of a sequence (default: 1024 4096)",
    )
    parser.add_argument(
        "--tokens",
        type=length,
        default=16384,
        metavar="N",
        help="tokens of a call, in as many sequences (default: %(default)s)",
    )
    parser.add_argument(
        "--width",
        type=length,
        default=2048,
        metavar="N",
        help="features of a token, in as many heads (default: %(default)s)",
    )


def _add_choices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--causal", action="store_true", help="make every call causal")
    parser.add_argument(
        "--dtype", choices=tuple(STORAGE), default="float16", help="default: %(default)s"
    )
    parser.add_argument(
        "--options",
        type=option_names,
        default=list(FEWER_SCORES),
        metavar="NAMES",
        help=f"options to time beside the plain call, with commas between them: "
        f"{', '.join(OPTIONS)}; or all, or none (default: {','.join(FEWER_SCORES)})",
    )
    parser.add_argument(
        "--window",
        type=integer(0),
        default=512,
        metavar="W",
        help="keys on each side of a query that the window keeps (default: %(default)s)",
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
    """Return every head dim at every length, with every number of queries where they are named."""
    return [
        Case.of_size(
            arguments.tokens,
            arguments.width,
            seqlen=seqlen,
            head_dim=head_dim,
            head_dim_v=arguments.head_dim_v,
            dtype=arguments.dtype,
            causal=arguments.causal,
            window=arguments.window,
            queries=queries,
        )
        for head_dim in arguments.head_dim
        for seqlen in arguments.seqlen
        for queries in getattr(arguments, "queries", None) or [None]
    ]
