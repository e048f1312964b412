"""The command line of the benchmark, and its rows."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from cupyattn import models
from cupyattn.benchmark.finetune.peers import PEERS as OF_TRAINING
from cupyattn.benchmark.finetune.peers import peer
from cupyattn.benchmark.finetune.steps import Plan, own
from cupyattn.benchmark.finetune.work import Size
from cupyattn.benchmark.frame.benchmark import Benchmark
from cupyattn.benchmark.frame.clock import Clock
from cupyattn.benchmark.frame.peers import PEERS
from cupyattn.benchmark.frame.rows import PRODUCTS, Row, row_of, without
from cupyattn.benchmark.frame.subjects import Gauge
from cupyattn.cli.arguments import integer
from cupyattn.cupy_library import load_cupy
from cupyattn.progress import progress

OWN = "cupyattn"
Held = Callable[[], int]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
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


def _size(text: str) -> Size:
    samples, _, length = text.partition("x")
    return Size(integer(1)(samples), integer(2)(length))


def rows(arguments: argparse.Namespace, gauge: Gauge) -> Iterator[Row]:
    """Yield a row for each model, size and format of weights, and for each peer."""
    clock = Clock(arguments.calls, arguments.warm_up, arguments.budget)
    total = len(arguments.model) * len(arguments.size)
    with progress("timing", total) as step:
        for name in arguments.model:
            for size in arguments.size:
                given = {"model": name, "samples": size.samples, "length": size.length,
                         "lora_rank": arguments.lora_rank}  # fmt: skip
                for kind in arguments.quantize:
                    quantize = None if kind == "none" else kind
                    plan = Plan(name, quantize, arguments.lora_rank, clock)
                    found = _held_alone(partial(own, plan, size, gauge.xp))
                    yield _row({**given, "quantize": quantize}, OWN, found, gauge)
                for who in gauge.peers:
                    labels = {**given, "quantize": "nf4" if who == "peft-nf4" else None}
                    try:
                        gauge.require_time_for(who)
                        found = peer(who, Plan(name, None, arguments.lora_rank, clock), size)
                    except Exception as failure:  # whatever another library raises
                        yield without(labels, PEERS[who], failure)
                    else:
                        yield _row(labels, PEERS[who], found, gauge)
                step(f"{name}, {size.samples}x{size.length}")


def _row(labels: dict[str, Any], contender: str, found: dict[str, Any], gauge: Gauge) -> Row:
    """Return the row of steps; what is held counts weights too, and is no ``peak_bytes``."""
    tokens = labels["samples"] * labels["length"]
    also = {"held_mb": found["held_bytes"] / 1e6}
    if "budget" in found:
        also |= {"budget_mb": found["budget_bytes"] / 1e6, "budget": found["budget"],
                 "t4_s": found["t4_seconds"]}  # fmt: skip
    row = row_of(
        labels, contender, found["seconds"], flops=found.get("flops"), ceiling=PRODUCTS,
        ceilings=gauge.ceilings, also=also,
    )  # fmt: skip
    row["also"]["tokens_per_s"] = tokens / row["times"]["p50_s"]
    return row


def _held_alone(work: Callable[[Held], dict[str, Any]]) -> dict[str, Any]:
    """Run work in a memory pool of its own, which gives nothing back before it ends."""
    cupy = load_cupy()
    gc.collect()  # the model before it, if something in it knows itself
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        return work(pool.total_bytes)


BENCHMARK = Benchmark(
    name="finetune",
    title="Fine-tuning",
    help="a step of LoRA: time, share of the products' rate, memory beside its budget",
    description="Time steps of LoRA on all linear layers as finetune takes them, AdamW and the "
    "reading of the loss among them, and what they hold of the GPU; then the same by transformers "
    "and PEFT, where they are installed.",
    note="Gradient checkpointing. held_mb is what the pool takes from the device, weights among "
    "it; of PyTorch what it reserves. t4_s is MODELLED, and the least that it can be: products at "
    "65 TFLOP/s, or all weights three times at 320 GB/s.",
    rows=rows,
    options=options,
    peers=OF_TRAINING,
    quick={"budget": 2.0, "limit": 30.0},
)
