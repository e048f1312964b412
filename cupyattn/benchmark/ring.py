"""``python -m cupyattn.benchmark ring``: attention over several GPUs beside one.

One GPU computes the whole sequence; then all of them do, each with its shard. As fast as there are
GPUs is 100 %. ``--modelled`` needs no GPU: it prints what the cost model says.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import cupyattn
from cupyattn import distributed
from cupyattn.benchmark.cuda_events import measured_on
from cupyattn.benchmark.gpu_command import (
    add_numbers,
    add_timing_options,
    run_on_gpu,
    show_machine,
)
from cupyattn.cli.arguments import integer
from cupyattn.cli.terminal import Result, Terminal, emit
from cupyattn.cupy_library import load_cupy
from cupyattn.distributed import cost
from cupyattn.distributed.placement import PLACEMENTS
from cupyattn.distributed.threads import TRANSPORTS
from cupyattn.functional.device_info import device_count
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.kernels.device.cuda import cuda_device

GOALS = {"forward": 0.95, "forward + backward": 0.93}
SETUPS = (
    (cost.T4, cost.PCIE, 8),
    (cost.T4, cost.THROUGH_HOST, 8),
    (cost.H200, cost.NVLINK, 8),
    (cost.H200, cost.INFINIBAND, 1024),
)
"""What is modelled: a card, a link, and how many of them such a link joins."""


def add_parser(benchmarks: Any) -> None:
    """Add the benchmark to the command line."""
    parser = benchmarks.add_parser(
        "ring",
        help="attention over several GPUs beside one",
        description="Time ring attention, forward and forward with backward, beside attention of "
        "the whole sequence on one GPU. Each rank is a thread of this process. Needs two GPUs; "
        "CUPYATTN_ARCH=75 times the Turing code on newer ones.",
        epilog="Goals on two GPUs of one host: "
        + ", ".join(f"{goal:.0%} {name}" for name, goal in GOALS.items())
        + " of as fast as there are GPUs. Exit code 1 with fewer than two.",
    )
    numbers = (
        ("tokens", 131_072, integer(1), "tokens of the sequence"),
        ("heads", 16, integer(1), "query heads"),
        ("kv-heads", 16, integer(1), "key-value heads"),
        ("head-dim", 128, integer(1, MAX_HEAD_DIM), "head dim"),
        ("gpus", 0, integer(0), "how many GPUs; 0 is all"),
    )
    add_numbers(parser, numbers)
    parser.add_argument(
        "--placement",
        choices=PLACEMENTS,
        default="zigzag",
        help="which tokens a rank holds (default: %(default)s)",
    )
    parser.add_argument(
        "--transport", choices=TRANSPORTS, help="what carries bytes (default: NCCL where it is)"
    )
    parser.add_argument("--full", action="store_true", help="all keys, not causal")
    parser.add_argument(
        "--modelled", action="store_true", help="print the cost model's tables, without a GPU"
    )
    add_timing_options(parser, calls=5, warm_up=2)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark, or print the model."""
    if arguments.modelled:
        emit(modelled(arguments), show_model, as_json=False)
        return 0
    return run_on_gpu("ring", arguments, measure, show)


def measure(arguments: argparse.Namespace) -> Result:
    """Time one GPU, then all of them.

    Raises
    ------
    RuntimeError
        With fewer than two GPUs.
    """
    gpus = arguments.gpus or device_count()
    if not 2 <= gpus <= device_count():
        raise RuntimeError(
            f"a ring of {gpus} GPUs, of {device_count()} that are here; it takes two or more: "
            "run it where they are, or print the model with --modelled"
        )
    cupy = load_cupy()
    causal = not arguments.full
    with cupy.cuda.Device(0):
        q, k, v, dout = whole = drawn(arguments, cupy)
        alone: dict[str, Any] = {"causal": causal, "return_lse": True}
        forward = partial(cupyattn.attention, q, k, v, **alone)
        expected = forward()[0]
        expected = distributed.shard(expected, 0, gpus, placement=arguments.placement).get()
        both = partial(
            _both, forward, cupyattn.attention_backward, (dout, q, k, v), {"causal": causal}
        )
        single = {
            name: statistics.median(timed(call, arguments, cupy, lambda: None))
            for name, call in {"forward": forward, "forward + backward": both}.items()
        }
        shards = [
            [distributed.shard(x, rank, gpus, placement=arguments.placement).get() for x in whole]
            for rank in range(gpus)
        ]
        del q, k, v, dout, whole, forward, both
        cupy.get_default_memory_pool().free_all_blocks()
    ranks = distributed.run(
        partial(time_rank, arguments, shards), devices=range(gpus), transport=arguments.transport
    )
    difference = np.abs(ranks[0]["out"].astype(np.float32) - expected.astype(np.float32)).max()
    rows = []
    for name, alone_seconds in single.items():
        seconds = max(statistics.median(rank[name]) for rank in ranks)
        rows.append({
            "what": name, "one_gpu": alone_seconds, "ring": seconds,
            "efficiency": alone_seconds / (gpus * seconds), "goal": GOALS[name],
        })  # fmt: skip
    return {
        "command": "ring",
        **measured_on(cuda_device(0)),
        **{name: getattr(arguments, name) for name in ("tokens", "heads", "kv_heads", "head_dim")},
        "causal": causal,
        "placement": arguments.placement,
        "gpus": gpus,
        "transport": ranks[0]["transport"],
        "hop_gb_per_s": ranks[0]["hop_gb_per_s"],
        "largest_difference": float(difference),
        "calls": arguments.calls,
        "warm_up": arguments.warm_up,
        "rows": rows,
    }


def drawn(arguments: argparse.Namespace, xp: Any) -> list[Any]:
    """Return q, k, v and dout: one head's numbers, scaled a little for each of the others."""
    rng = np.random.default_rng(0)
    arrays = []
    for heads in (arguments.heads, arguments.kv_heads, arguments.kv_heads, arguments.heads):
        of_one = rng.standard_normal((1, arguments.tokens, 1, arguments.head_dim), dtype=np.float32)
        scales = xp.linspace(0.8, 1.2, heads, dtype=np.float32)[:, None]
        arrays.append((xp.asarray(of_one) * scales).astype(np.float16))
    return arrays


def time_rank(
    arguments: argparse.Namespace, shards: list[list[Any]], group: distributed.Group
) -> dict[str, Any]:
    """Time one rank's calls, all ranks at once; and a hop of its block."""
    cupy = load_cupy()
    q, k, v, dout = (cupy.asarray(x) for x in shards[group.rank])
    options = {"group": group, "placement": arguments.placement, "causal": not arguments.full}
    forward = partial(distributed.ring_attention, q, k, v, return_lse=True, **options)
    both = partial(_both, forward, distributed.ring_attention_backward, (dout, q, k, v), options)

    def together() -> None:
        group.all_gather(cupy.zeros(1))
        cupy.cuda.get_current_stream().synchronize()

    found: dict[str, Any] = {"out": forward()[0].get()}
    for name, call in {"forward": forward, "forward + backward": both}.items():
        found[name] = timed(call, arguments, cupy, together)
    spare = cupy.empty_like(k), cupy.empty_like(v)
    stream = cupy.cuda.get_current_stream()
    to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    hop = partial(group.exchange, (k, v), to, spare, source, stream)
    seconds = statistics.median(timed(hop, arguments, cupy, together))
    found["hop_gb_per_s"] = (k.nbytes + v.nbytes) / seconds / 1e9
    found["transport"] = group.transport
    return found


def _both(forward: Callable[[], Any], backward: Any, arrays: Any, options: Any) -> Any:
    out, lse = forward()
    return backward(*arrays, out, lse, **options)


def timed(
    call: Callable[[], Any], arguments: argparse.Namespace, cupy: Any, together: Callable[[], None]
) -> list[float]:
    """Return the seconds of each call, from when all ranks begin to when this one's GPU is done."""
    taken = []
    for number in range(arguments.warm_up + arguments.calls):
        together()
        cupy.cuda.Device().synchronize()
        begun = time.perf_counter()
        call()
        cupy.cuda.Device().synchronize()
        if number >= arguments.warm_up:
            taken.append(time.perf_counter() - begun)
    return taken


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    show_machine(f"Ring attention over {result['gpus']} GPUs", result, terminal)
    terminal.facts({
        "problem": f"{result['tokens']:,} tokens, {result['heads']}/{result['kv_heads']} heads, "
        f"D {result['head_dim']}, float16, {'causal' if result['causal'] else 'all keys'}, "
        f"{result['placement']}",
        "transport": f"{result['transport']}, a hop at {result['hop_gb_per_s']:.1f} GB/s",
        "largest difference from one GPU": f"{result['largest_difference']:.2g}",
    })  # fmt: skip
    terminal.table(
        ("", "one GPU", "ring", "of ideal", "goal"),
        [
            (
                row["what"],
                f"{row['one_gpu'] * 1e3:.1f} ms",
                f"{row['ring'] * 1e3:.1f} ms",
                f"{row['efficiency']:.1%}",
                f"{row['goal']:.0%}",
            )
            for row in result["rows"]
        ],
    )
    terminal.text(
        f"  Medians of {result['calls']} calls after {result['warm_up']}, of the slowest rank; "
        "of ideal: one GPU's time over the ring's times the number of GPUs."
    )


def modelled(arguments: argparse.Namespace) -> Result:
    """Model the problem on every card and link, with 2, 4, 8 ... ranks."""
    rows = []
    for card, link, most in SETUPS:
        ranks = 2 if most <= 8 else 16
        while ranks <= most and arguments.tokens % (2 * ranks) == 0:
            given: dict[str, Any] = {
                "heads": arguments.heads, "kv_heads": arguments.kv_heads,
                "head_dim": arguments.head_dim, "causal": not arguments.full,
                "placement": arguments.placement, "card": card, "link": link,
            }  # fmt: skip
            for backward in (False, True):
                found = cost.ring_cost(ranks, arguments.tokens, backward=backward, **given)
                rows.append({
                    "card": card.name, "link": link.name, "ranks": ranks,
                    "what": "backward" if backward else "forward",
                    "total": found.total, "compute": found.compute, "transfer": found.transfer,
                    "exposed": found.exposed, "efficiency": found.efficiency,
                    "balance": found.balance,
                })  # fmt: skip
            ranks *= 2
    return {
        "command": "ring", "tokens": arguments.tokens, "heads": arguments.heads,
        "kv_heads": arguments.kv_heads, "head_dim": arguments.head_dim,
        "causal": not arguments.full, "placement": arguments.placement, "rows": rows,
    }  # fmt: skip


def show_model(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    terminal.title(
        f"Ring attention, modelled: {result['tokens']:,} tokens, {result['heads']}/"
        f"{result['kv_heads']} heads, D {result['head_dim']}, "
        f"{'causal' if result['causal'] else 'all keys'}, {result['placement']}"
    )
    for card, link, _ in SETUPS:
        terminal.title(f"{card.name}, {link.name}: {link.gb_per_s:g} GB/s each way")
        terminal.table(
            ("GPUs", "", "time", "compute", "transfer", "exposed", "of ideal", "balance"),
            [
                (
                    f"{row['ranks']:,}",
                    row["what"],
                    *(f"{row[part] * 1e3:,.2f} ms" for part in _PARTS),
                    f"{row['efficiency']:.0%}",
                    f"{row['balance']:.3f}",
                )
                for row in result["rows"]
                if (row["card"], row["link"]) == (card.name, link.name)
            ],
        )
    terminal.text("  No measurements: help('cupyattn.distributed.cost') says what is assumed.")


_PARTS = ("total", "compute", "transfer", "exposed")
