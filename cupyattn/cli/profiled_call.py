"""The calls that ``python -m cupyattn profile`` knows: their options, and their random arrays."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.cli.arguments import integer
from cupyattn.ops.attention.options import IMPLEMENTATIONS
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.tables import MAX_HEAD_DIM


class ProfiledCall(NamedTuple):
    """A call of the library, ready to be made."""

    description: str
    run: Callable[[], Any]


def add_attention_parser(calls: Any) -> argparse.ArgumentParser:
    """Add ``profile attention``."""
    parser: argparse.ArgumentParser = calls.add_parser(
        "attention",
        help="attention forward",
        description="Profile self-attention of random q, k and v.",
    )
    _add_problem(parser)
    parser.set_defaults(call=_attention)
    return parser


def add_attention_backward_parser(calls: Any) -> argparse.ArgumentParser:
    """Add ``profile attention_backward``."""
    parser: argparse.ArgumentParser = calls.add_parser(
        "attention_backward",
        help="attention backward, all its kernels",
        description="Profile the gradients of self-attention of random q, k and v; out and lse are "
        "the reference's.",
    )
    _add_problem(parser)
    parser.add_argument(
        "--deterministic", action="store_true", help="bitwise the same from run to run"
    )
    parser.set_defaults(call=_attention_backward)
    return parser


def _add_problem(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of q, k and v, the options, and which implementation."""
    _add_size(parser, "--batch", 1, "B", "sequences")
    _add_size(parser, "--seqlen", 128, "S", "queries and keys per sequence")
    _add_size(parser, "--heads", 2, "H", "query heads")
    parser.add_argument(
        "--kv-heads",
        type=integer(1),
        metavar="G",
        help="key-value heads, a divisor of the query heads (default: as many)",
    )
    _add_size(parser, "--head-dim", 64, "D", "head dim of q, k and v", MAX_HEAD_DIM)
    _add_dtype(parser)
    _add_attention_options(parser)
    parser.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        default=IMPLEMENTATIONS[0],
        metavar="NAME",
        help="which kernels: %(choices)s (default: %(default)s)",
    )


def _add_attention_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `cupyattn.attention`, by their names there; arrays are made at random."""
    parser.add_argument("--causal", action="store_true", help="hide later keys from a query")
    parser.add_argument(
        "--window-size",
        nargs=2,
        type=_window_side,
        metavar=("LEFT", "RIGHT"),
        help="keys that a query sees before and after its own; none for all of them",
    )
    parser.add_argument("--mask", action="store_true", help="hide a tenth of the scores, at random")
    parser.add_argument("--bias", action="store_true", help="add a bias per head to the scores")
    parser.add_argument(
        "--alibi-slopes", action="store_true", help="ALiBi with slopes 2^(-8/H), 2^(-16/H), ..."
    )
    parser.add_argument("--softcap", type=float, metavar="C", help="cap scores at C, by tanh")
    parser.add_argument("--sinks", action="store_true", help="one more logit per head")
    parser.add_argument(
        "--dropout-p",
        type=float,
        default=0.0,
        metavar="P",
        help="drop weights with this probability (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=integer(0), default=0, metavar="N", help="of dropout (default: %(default)s)"
    )


def _window_side(text: str) -> int | None:
    return None if text == "none" else integer(0)(text)


def add_softmax_parser(calls: Any) -> argparse.ArgumentParser:
    """Add ``profile softmax``."""
    parser: argparse.ArgumentParser = calls.add_parser(
        "softmax",
        help="softmax over rows, forward or backward",
        description="Profile the softmax of random rows.",
    )
    _add_size(parser, "--rows", 64, "R", "rows")
    _add_size(parser, "--length", 1024, "N", "items of a row")
    _add_dtype(parser)
    parser.add_argument("--backward", action="store_true", help="its gradient instead")
    parser.set_defaults(call=_softmax)
    return parser


def _add_size(
    parser: argparse.ArgumentParser,
    name: str,
    default: int,
    letter: str,
    what: str,
    highest: int | None = None,
) -> None:
    parser.add_argument(
        name,
        type=integer(1, highest),
        default=default,
        metavar=letter,
        help=f"{what} (default: %(default)s)",
    )


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=tuple(STORAGE), default="float16", help="dtype (default: %(default)s)"
    )


def _normal(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    import ml_dtypes  # noqa: F401 (gives NumPy the name bfloat16)

    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def _attention(arguments: argparse.Namespace) -> ProfiledCall:
    (q, k, v), options = _problem(arguments)
    return ProfiledCall(
        _description("attention", arguments, options),
        lambda: cupyattn.attention(
            q, k, v, implementation=arguments.implementation, return_lse=True, **options
        ),
    )


def _attention_backward(arguments: argparse.Namespace) -> ProfiledCall:
    (q, k, v), options = _problem(arguments)
    with cupyattn.backend("reference"):
        out, lse = cupyattn.attention(q, k, v, return_lse=True, **options)
    dout = _normal(out.shape, arguments.dtype, np.random.default_rng(1))
    if arguments.deterministic:
        options["deterministic"] = True
    return ProfiledCall(
        _description("attention backward", arguments, options),
        lambda: cupyattn.attention_backward(
            dout, q, k, v, out, lse, implementation=arguments.implementation, **options
        ),
    )


def _problem(arguments: argparse.Namespace) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """Return q, k and v, and the options."""
    a = arguments
    rng = np.random.default_rng(0)
    arrays = tuple(
        _normal((a.batch, a.seqlen, heads, a.head_dim), a.dtype, rng)
        for heads in (a.heads, a.kv_heads or a.heads, a.kv_heads or a.heads)
    )
    return arrays, _attention_options(a, rng)


def _description(what: str, arguments: argparse.Namespace, options: dict[str, Any]) -> str:
    a = arguments
    extra = [name for name in options if name != "causal"]
    return (
        f"{(f'causal {what}' if a.causal else what).capitalize()} ({a.implementation}) of "
        f"{a.batch} x {a.seqlen} tokens, {a.heads} query heads on {a.kv_heads or a.heads} "
        f"key-value heads, head dim {a.head_dim}, {a.dtype}{', with ' if extra else ''}"
        f"{', '.join(extra)}"
    )


def _attention_options(arguments: argparse.Namespace, rng: np.random.Generator) -> dict[str, Any]:
    """Return the options that were asked for, as `cupyattn.attention` takes them."""
    a = arguments
    scores = (a.heads, a.seqlen, a.seqlen)
    options: dict[str, Any] = {"causal": True} if a.causal else {}
    if a.window_size is not None:
        options["window_size"] = tuple(a.window_size)
    if a.mask:
        options["mask"] = rng.random((1, 1, *scores[1:])) < 0.9
    if a.bias:
        options["bias"] = _normal((1, *scores), a.dtype, rng)
    if a.alibi_slopes:
        options["alibi_slopes"] = 2.0 ** (
            -8.0 * np.arange(1, a.heads + 1, dtype=np.float32) / a.heads
        )
    if a.softcap is not None:
        options["softcap"] = a.softcap
    if a.sinks:
        options["sinks"] = _normal((a.heads,), "float32", rng)
    if a.dropout_p:
        options |= {"dropout_p": a.dropout_p, "seed": a.seed}
    return options


def _softmax(arguments: argparse.Namespace) -> ProfiledCall:
    shape, dtype = (arguments.rows, arguments.length), arguments.dtype
    rng = np.random.default_rng(0)
    x = _normal(shape, dtype, rng)
    what = f"of {shape[0]} rows of {shape[1]} {dtype} items"
    if not arguments.backward:
        return ProfiledCall(f"Softmax {what}", lambda: cupyattn.softmax(x))
    with cupyattn.backend("reference"):
        out = cupyattn.softmax(x)
    return ProfiledCall(f"Softmax backward {what}", lambda: cupyattn.softmax_backward(x, out))
