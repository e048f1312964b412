"""The command line of the benchmark, and its table."""

from __future__ import annotations

import argparse
from typing import Any

import cupyattn
from cupyattn import models
from cupyattn.benchmark.cuda_events import event_timer, measured_on
from cupyattn.benchmark.finetune.peers import PEERS, peer
from cupyattn.benchmark.finetune.steps import Plan, own
from cupyattn.benchmark.finetune.work import Size
from cupyattn.benchmark.gpu_command import add_timing_options, run_on_gpu, show_machine
from cupyattn.cli.arguments import integer
from cupyattn.cli.models import size_text
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.cupy_library import load_cupy
from cupyattn.kernels.device.cuda import cuda_device

OWN = "cupyattn"
_RATE_SIZE = 4096


def add_parser(benchmarks: Any) -> None:
    """Add the benchmark to the command line."""
    parser = benchmarks.add_parser(
        "finetune",
        help="a step of LoRA: time, share of the products' rate, memory beside its budget",
        description="Time steps of LoRA on all linear layers as finetune takes them, AdamW and the "
        "reading of the loss among them, and what they hold of the GPU; then the same by "
        "transformers and PEFT, where they are installed. Needs a GPU; CUPYATTN_ARCH=75 times the "
        "Turing code on a newer one.",
        epilog="Exit code 1 without a GPU.",
    )
    parser.add_argument(
        "--model", nargs="+", default=["phi-2"], metavar="MODEL",
        help=f"random weights of these shapes ({', '.join(models.PRESETS)}), or folders "
        "(default: phi-2)",
    )  # fmt: skip
    parser.add_argument(
        "--size", nargs="+", type=_size, default=[Size(2, 1024), Size(4, 2048)], metavar="BxS",
        help="samples of a batch and their tokens (default: 2x1024 4x2048)",
    )  # fmt: skip
    parser.add_argument(
        "--quantize", nargs="+", choices=("none", "nf4", "int4", "int8"), default=["none", "nf4"],
        metavar="KIND", help="what frozen weights are kept in (default: none nf4)",
    )  # fmt: skip
    parser.add_argument(
        "--lora-rank", type=integer(1), default=16, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=[], help="who else")
    add_timing_options(parser, calls=10, warm_up=3)
    parser.set_defaults(run=run)


def _size(text: str) -> Size:
    samples, _, length = text.partition("x")
    return Size(integer(1)(samples), integer(2)(length))


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark."""
    return run_on_gpu("finetune", arguments, measure, show)


def measure(arguments: argparse.Namespace) -> Result:
    """Measure everything on the first GPU."""
    cupy = load_cupy()
    device = cuda_device(0)
    with cupy.cuda.Device(device.ordinal):
        rate = _product_rate(cupy)
        rows = rows_of(arguments, cupy, _held_alone)
    return {
        "command": "finetune",
        **measured_on(device),
        "product_tflops": rate / 1e12,
        "lora_rank": arguments.lora_rank,
        "calls": arguments.calls,
        "warm_up": arguments.warm_up,
        "rows": rows,
    }


def rows_of(arguments: argparse.Namespace, xp: Any, alone: Any) -> list[dict[str, Any]]:
    """Return a row for each model, size and format of weights, and for each peer.

    `alone` runs something that takes what says how much memory is held, in a pool of its own.
    """
    rows: list[dict[str, Any]] = []
    for model in arguments.model:
        for size in arguments.size:
            for quantize in arguments.quantize:
                plan = Plan(
                    model, None if quantize == "none" else quantize, arguments.lora_rank,
                    arguments.warm_up, arguments.calls,
                )  # fmt: skip
                named = {"model": model, **size._asdict(), "by": OWN, "quantize": plan.quantize}
                rows.append({**named, **alone(lambda held, p=plan, s=size: own(p, s, xp, held))})
            for who in arguments.peer:
                named = {"model": model, **size._asdict(), "by": who, "quantize": None}
                try:
                    rows.append({**named, **peer(who, plan, size)})
                except Exception as failure:  # whatever another library raises
                    rows.append({**named, "refused": f"{type(failure).__name__}: {failure}"})
    return rows


def _held_alone(work: Any) -> dict[str, Any]:
    """Run work in a memory pool of its own, which gives nothing back before it ends."""
    cupy = load_cupy()
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        return work(pool.total_bytes)


def _product_rate(cupy: Any) -> float:
    """Return the operations a second of a square product of this library."""
    x, w = (cupy.ones((_RATE_SIZE, _RATE_SIZE), "float16") for _ in range(2))
    seconds = event_timer(20, 5)(lambda: cupyattn.linear(x, w))
    return 2 * _RATE_SIZE**3 / min(seconds)


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    show_machine("Fine-tuning", result, terminal)
    rate = result["product_tflops"]
    terminal.facts({"products": f"{rate:.1f} TFLOP/s (float16, {_RATE_SIZE} cubed)"})
    terminal.table(
        ("model", "batch", "by", "weights", "ms a step", "tokens/s", "TFLOP/s", "of products'",
         "memory", "budget", "ms on a T4"),
        [_cells(row, rate) for row in result["rows"]],
    )  # fmt: skip
    for row in result["rows"]:
        if "refused" in row:
            terminal.text(f"  {row['by']}: {row['refused']}")
    terminal.text(
        f"  Median of {result['calls']} steps after {result['warm_up']}, LoRA of rank "
        f"{result['lora_rank']} on all linear layers, gradient checkpointing. Memory is what the "
        "pool takes from the device, weights among it; of PyTorch what it reserves. The time on a "
        "T4 is MODELLED, and the least that it can be: products at 65 TFLOP/s, or all weights "
        "three times at 320 GB/s."
    )


def _cells(row: dict[str, Any], rate: float) -> tuple[str, ...]:
    named = (row["model"], f"{row['samples']}x{row['length']}", row["by"])
    if "refused" in row:
        return (*named, "none", *[""] * 7)
    seconds, tokens = row["seconds"], row["samples"] * row["length"]
    cells = (row["quantize"] or row["dtype"], f"{seconds * 1e3:.1f}", f"{tokens / seconds:,.0f}")
    held = size_text(row["held_bytes"])
    if "flops" not in row:
        return (*named, *cells, "", "", held, "", "")
    tflops = row["flops"] / seconds / 1e12
    return (
        *named,
        *cells,
        f"{tflops:.1f}",
        f"{tflops / rate:.0%}",
        held,
        size_text(row["budget_bytes"]),
        f"{row['t4_seconds'] * 1e3:.0f}",
    )
