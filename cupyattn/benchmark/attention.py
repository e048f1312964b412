"""``python -m cupyattn.benchmark attention``: times and TFLOP/s of attention on a GPU.

The work counted is that of the two products, over all scores, over half of them for causal
attention, and over those that a window keeps: 4 * B * H * S * S * D where D = Dv.
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from cupyattn.benchmark.attention_cases import FEWER_SCORES, OPTIONS, PLAIN, Case
from cupyattn.benchmark.attention_times import time_cases
from cupyattn.benchmark.cuda_events import event_timer, measured_on
from cupyattn.benchmark.torch_peer import TORCH, load_torch
from cupyattn.cli.arguments import integer
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.functional.device_info import device_count
from cupyattn.kernels.configs.attention import MAX_HEAD_DIM
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.cuda_device import cuda_device
from cupyattn.ops.attention_options import IMPLEMENTATIONS


def add_parser(benchmarks: Any) -> None:
    """Add the benchmark to the command line."""
    parser = benchmarks.add_parser(
        "attention",
        help="times and TFLOP/s of attention forward on a GPU, with and without options",
        description="Time attention(q, k, v, out=out) by CUDA events: by head dim and length, "
        "plain and with each option, whose time is set beside the plain call's. Needs a GPU; "
        "CUPYATTN_ARCH=75 times the Turing code on a newer one.",
        epilog="TFLOP/s count 4 * B * H * S * S * D (2 * (D + Dv) where they differ) over the "
        "median of the calls: half of that for causal calls, and the kept scores for a window. "
        "Exit code 1 without a GPU.",
    )
    _add_sizes(parser)
    _add_choices(parser)
    parser.add_argument(
        "--calls",
        type=integer(1),
        default=50,
        metavar="N",
        help="calls that are timed, of which the median is shown (default: %(default)s)",
    )
    parser.add_argument(
        "--warm-up",
        type=integer(1),
        default=10,
        metavar="N",
        help="calls before them (default: %(default)s)",
    )
    parser.add_argument(
        "--peer", choices=(TORCH,), help="time PyTorch's scaled_dot_product_attention beside it"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything to FILE too, as one JSON object"
    )
    parser.set_defaults(run=run)


def _add_sizes(parser: Any) -> None:
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


def _add_choices(parser: Any) -> None:
    parser.add_argument("--causal", action="store_true", help="make every call causal")
    parser.add_argument(
        "--dtype", choices=tuple(STORAGE), default="float16", help="default: %(default)s"
    )
    parser.add_argument(
        "--implementation",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=["flash"],
        help="kernels to time (default: flash)",
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


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark."""
    try:
        if not device_count():
            raise RuntimeError(
                "there is no CUDA device, and this times kernels on one; run it on a machine with "
                "a GPU (python -m cupyattn turing models a Turing GPU without one)"
            )
        result = measure(arguments)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    # A GPU that is too old, a CUPYATTN_ARCH that is wrong, no PyTorch, no room for the arrays.
    except (RuntimeError, ValueError, MemoryError, OSError) as failure:
        fail("attention", failure, as_json=False)
        return 1
    emit(result, show, as_json=False)
    return 0


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Return every head dim at every length."""
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
        )
        for head_dim in arguments.head_dim
        for seqlen in arguments.seqlen
    ]


def measure(arguments: argparse.Namespace) -> Result:
    """Measure every row on the first GPU."""
    import cupy

    device = cuda_device(0)
    torch = load_torch() if arguments.peer == TORCH else None
    with cupy.cuda.Device(device.ordinal):
        rows = time_cases(
            cases_of(arguments),
            arguments.implementation,
            arguments.options,
            cupy,
            event_timer(arguments.calls, arguments.warm_up),
            torch,
        )
    return {
        "command": "attention",
        **measured_on(device),
        "torch": None if torch is None else torch.__version__,
        "calls": arguments.calls,
        "warm_up": arguments.warm_up,
        "rows": rows,
    }


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    terminal.title(f"Attention forward on {result['device']}, {result['date']}")
    terminal.facts(
        {
            "compute capability": result["compute_capability"],
            "kernels": ", ".join(map(_code_text, result["code"])) or "none ran",
            "CUPYATTN_ARCH": result["arch_override"] or "not set",
            "CUDA driver": result["cuda_driver"],
            "versions": f"cupyattn {result['version']}, CuPy {result['cupy']}, NVRTC "
            f"{result['nvrtc']}" + (f", PyTorch {result['torch']}" if result["torch"] else ""),
        }
    )
    for title, rows in groupby(result["rows"], key=_title):
        terminal.title(title)
        terminal.table(
            ("call", "ran", "median", "TFLOP/s", "beside the plain call"), list(map(_cells, rows))
        )
    terminal.text(
        f"  Median of {result['calls']} calls after {result['warm_up']}, with out=; TFLOP/s of the "
        "two products,\n  for causal calls of half the scores, for a window of those it keeps."
    )


def _code_text(target: str) -> str:
    if target.startswith("compute_"):
        return f"{target} PTX, translated by the driver"
    return f"{target} machine code"


def _title(row: dict[str, Any]) -> str:
    dims = f"D {row['head_dim']}"
    if row["head_dim_v"] != row["head_dim"]:
        dims += f", Dv {row['head_dim_v']}"
    every = ", every call causal" if row["causal"] else ""
    return (
        f"{dims}, {row['batch']} x {row['seqlen']} tokens, {row['heads']} heads, {row['dtype']}"
        f"{every}"
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    option = row["option"]
    name = f"window {row['window']}" if option == "window" else option
    if "unavailable" in row:
        return name, row["implementation"], "-", "-", row["unavailable"]
    ratio = ""
    if option != PLAIN and row["time_ratio"] is not None:
        faster = f"{1 / row['time_ratio']:.2f} x faster"
        ratio = faster if option in FEWER_SCORES else f"{row['time_ratio']:.2f} x the time"
    return (
        name,
        row["implementation"],
        f"{row['seconds'] * 1e3:.3f} ms",
        f"{row['tflops']:.1f}",
        ratio,
    )
