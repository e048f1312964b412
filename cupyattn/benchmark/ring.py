"""``python -m cupyattn.benchmark ring``: attention over several GPUs beside one.

One GPU computes the whole sequence; then all of them do, each with its shard. As fast as there are
GPUs is 100 %. Two more figures tell where the rest went: one GPU that computes the shards of all
ranks in turn has the ring's calls and no links, and GPUs that each compute the whole sequence at
once have the clocks of all. ``--modelled`` needs no GPU: it prints what the cost model says.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np

import cupyattn
from cupyattn import distributed
from cupyattn.benchmark.frame.arguments import add_numbers
from cupyattn.benchmark.frame.benchmark import Benchmark
from cupyattn.benchmark.frame.clock import Clock
from cupyattn.benchmark.frame.rows import PRODUCTS, Row, row_of, without
from cupyattn.benchmark.frame.subjects import Gauge
from cupyattn.cli.arguments import integer
from cupyattn.cupy_library import load_cupy
from cupyattn.distributed import cost
from cupyattn.distributed.placement import PLACEMENTS
from cupyattn.distributed.threads import TRANSPORTS
from cupyattn.functional.device_info import device_count
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM

GOALS = {"forward": 0.95, "forward + backward": 0.93}
SETUPS = (
    (cost.T4, cost.PCIE, 8),
    (cost.T4, cost.THROUGH_HOST, 8),
    (cost.H200, cost.NVLINK, 8),
    (cost.H200, cost.INFINIBAND, 1024),
)
"""What is modelled: a card, a link, and how many of them such a link joins."""


_FLOPS = {"forward": 4, "forward + backward": 14}
"""Of a score and feature."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    numbers = (
        ("tokens", 131_072, integer(1, 2**31 - 1), "tokens of the sequence"),
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


def rows(arguments: argparse.Namespace, gauge: Gauge) -> Iterator[Row]:
    """Time one GPU, then all of them.

    Raises
    ------
    RuntimeError
        With fewer GPUs than were asked for.
    ValueError
        For key-value heads that do not divide heads.
    """
    gpus = arguments.gpus or device_count()
    _require_heads(arguments)
    if not 2 <= gpus <= device_count():
        raise RuntimeError(
            f"a ring of {gpus} GPUs, of {device_count()} that are here; it takes two or more: "
            "run it where they are, or print the model with --modelled"
        )
    xp, causal = gauge.xp, not arguments.full
    clock = Clock(arguments.calls, arguments.warm_up, arguments.budget)
    q, k, v, dout = whole = drawn(arguments, xp)
    forward = partial(cupyattn.attention, q, k, v, causal=causal, return_lse=True)
    cut = partial(distributed.shard, placement=arguments.placement)
    expected = cut(forward()[0], 0, gpus).get().astype(np.float32)
    both = partial(_both, forward, cupyattn.attention_backward, (dout, q, k, v), {"causal": causal})
    alone = {
        name: timed(call, clock, xp, lambda: None)
        for name, call in zip(GOALS, (forward, both), strict=True)
    }
    shards = [[cut(x, rank, gpus).get() for x in whole] for rank in range(gpus)]
    del q, k, v, dout, whole, forward, both
    gauge.free()
    share = partial(time_rank, arguments, clock, shards)
    in_turn = distributed.run(share, gpus)
    gauge.free()
    on_gpus: dict[str, Any] = {"devices": range(gpus), "transport": arguments.transport}
    at_once = distributed.run(partial(time_whole, arguments, clock), **on_gpus)
    ranks = distributed.run(share, **on_gpus)
    difference = float(np.abs(ranks[0]["out"].astype(np.float32) - expected).max())
    names = ("tokens", "heads", "kv_heads", "head_dim", "placement")
    labels = {
        **{name: getattr(arguments, name) for name in names}, "causal": causal, "gpus": gpus,
        "transport": ranks[0]["transport"],
    }  # fmt: skip
    for name, seconds in alone.items():
        besides = {
            "in_turn_s": _slowest(in_turn, name), "at_once_s": _slowest(at_once, name),
            "largest_difference": difference,
        }  # fmt: skip
        yield from _rows_of({**labels, "what": name}, seconds, ranks, besides, gauge)


def _slowest(ranks: list[Any], name: str) -> float:
    """Return the median of calls that are as slow as their slowest rank."""
    return median(_together(ranks, name))


def _together(ranks: list[Any], name: str) -> list[float]:
    return [max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)]


def _rows_of(
    labels: dict[str, Any],
    alone: list[float],
    ranks: list[Any],
    besides: dict[str, float],
    gauge: Gauge,
) -> Iterator[Row]:
    """Yield the rows of one GPU and of all: a call is as slow as its slowest rank."""
    name, gpus = labels["what"], labels["gpus"]
    together = _together(ranks, name)
    scores = labels["tokens"] ** 2 * (0.5 if labels["causal"] else 1.0)
    of = {
        "flops": _FLOPS[name] * scores * labels["heads"] * labels["head_dim"],
        "ceiling": PRODUCTS,
    }
    one = row_of(labels, "cupyattn one GPU", alone, ceilings=gauge.ceilings, **of)
    limits = {name: rate and gpus * rate for name, rate in gauge.ceilings.items()}
    ring = row_of(labels, "cupyattn ring", together, ceilings=limits, **of)
    single, of_ring = one["times"]["p50_s"], ring["times"]["p50_s"]
    ring["also"] = {
        "efficiency": single / (gpus * of_ring), "goal": GOALS[name],
        "in_turn": single / besides["in_turn_s"],
        "at_once": besides["at_once_s"] / (gpus * of_ring),
        "largest_difference": besides["largest_difference"],
        "hop_gb_per_s": ranks[0]["hop_gb_per_s"],
    }  # fmt: skip
    yield from (one, ring)


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
    arguments: argparse.Namespace, clock: Clock, shards: list[list[Any]], group: distributed.Group
) -> dict[str, Any]:
    """Time one rank's calls, all ranks at once; and a hop of its block."""
    cupy = load_cupy()
    q, k, v, dout = (cupy.asarray(x) for x in shards[group.rank])
    options = {"group": group, "placement": arguments.placement, "causal": not arguments.full}
    forward = partial(distributed.ring_attention, q, k, v, return_lse=True, **options)
    both = partial(_both, forward, distributed.ring_attention_backward, (dout, q, k, v), options)
    together = partial(_meet, group)
    found: dict[str, Any] = {"out": forward()[0].get()}
    for name, call in {"forward": forward, "forward + backward": both}.items():
        found[name] = timed(call, clock, cupy, together, group)
    spare = cupy.empty_like(k), cupy.empty_like(v)
    stream = cupy.cuda.get_current_stream()
    to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    hop = partial(group.exchange, (k, v), to, spare, source, stream)
    seconds = median(timed(hop, clock, cupy, together, group))
    found["hop_gb_per_s"] = (k.nbytes + v.nbytes) / seconds / 1e9
    found["transport"] = group.transport
    return found


def time_whole(
    arguments: argparse.Namespace, clock: Clock, group: distributed.Group
) -> dict[str, list[float]]:
    """Time calls of the whole sequence on this rank's GPU, while the others do the same."""
    cupy, causal = load_cupy(), not arguments.full
    q, k, v, dout = drawn(arguments, cupy)
    forward = partial(cupyattn.attention, q, k, v, causal=causal, return_lse=True)
    both = partial(_both, forward, cupyattn.attention_backward, (dout, q, k, v), {"causal": causal})
    together = partial(_meet, group)
    return {
        name: timed(call, clock, cupy, together, group)
        for name, call in zip(GOALS, (forward, both), strict=True)
    }


def _meet(group: distributed.Group) -> None:
    cupy = load_cupy()
    group.all_gather(cupy.zeros(1))
    cupy.cuda.get_current_stream().synchronize()


def _both(forward: Callable[[], Any], backward: Any, arrays: Any, options: Any) -> Any:
    out, lse = forward()
    return backward(*arrays, out, lse, **options)


def timed(
    call: Callable[[], Any],
    clock: Clock,
    cupy: Any,
    together: Callable[[], None],
    group: distributed.Group | None = None,
) -> list[float]:
    """Return the seconds of each call, from when all ranks begin to when this one's GPU is done.

    How many are made follows from the second call; ranks make as many as the first.
    """

    def once() -> float:
        together()
        cupy.cuda.Device().synchronize()
        begun = time.perf_counter()
        call()
        cupy.cuda.Device().synchronize()
        return time.perf_counter() - begun

    once()
    took = once()
    if group is not None:
        took = float(group.all_gather(cupy.array([took]))[0].get()[0])
    for _ in range(clock.within(clock.warm_up, took, 0.2, 1)):
        once()
    return [once() for _ in range(clock.within(clock.calls, took))]


def modelled(arguments: argparse.Namespace) -> Iterator[Row]:
    """Model the problem on every card and link, with as many ranks as --gpus says or 2, 4, 8 ...

    Raises
    ------
    ValueError
        For numbers of which there is no problem, and more GPUs than any link joins.
    """
    _require_heads(arguments)
    most_of_all = max(most for _, _, most in SETUPS)
    if arguments.gpus > most_of_all:
        raise ValueError(
            f"--gpus {arguments.gpus}; the model has links that join up to {most_of_all}; "
            "ask for fewer"
        )
    for card, link, most in SETUPS:
        for ranks in _ring_sizes(arguments.gpus, most):
            given: dict[str, Any] = {
                "heads": arguments.heads, "kv_heads": arguments.kv_heads,
                "head_dim": arguments.head_dim, "causal": not arguments.full,
                "placement": arguments.placement,
            }  # fmt: skip
            labels = {
                **given, "tokens": arguments.tokens, "card": card.name, "ranks": ranks,
                "link": f"{link.name}, {link.gb_per_s:g} GB/s each way",
            }  # fmt: skip
            try:
                both = [
                    cost.ring_cost(
                        ranks, arguments.tokens, backward=backward, card=card, link=link, **given
                    )
                    for backward in (False, True)
                ]
            except ValueError as reason:  # tokens that more ranks do not split either
                yield without(labels, "cupyattn ring", str(reason))
                break
            for what, found in zip(("forward", "backward"), both, strict=True):
                yield {
                    **labels,
                    "what": what,
                    "contender": "cupyattn ring",
                    "times": {"p50_s": found.total},
                    "also": {
                        "compute_s": found.compute, "memory_s": found.memory,
                        "transfer_s": found.transfer, "exposed_s": found.exposed,
                        "host_s": found.host, "efficiency": found.efficiency,
                        "balance": found.balance,
                    },
                }  # fmt: skip


def _ring_sizes(gpus: int, most: int) -> Iterator[int]:
    """Yield how many ranks are modelled on a link that joins so many."""
    ranks = gpus or (2 if most <= 8 else 16)
    while ranks <= most:
        yield ranks
        ranks = most + 1 if gpus else 2 * ranks


def _require_heads(arguments: argparse.Namespace) -> None:
    cost.require_counts(tokens=arguments.tokens, heads=arguments.heads, kv_heads=arguments.kv_heads)


BENCHMARK = Benchmark(
    name="ring",
    title="Ring attention",
    help="attention over several GPUs beside one",
    description="Time ring attention, forward and forward with backward, beside attention of the "
    "whole sequence on one GPU. Each rank is a thread of this process. Needs two GPUs.",
    note="Times are of the slowest rank, by the host's clock; efficiency is one GPU's time over "
    "the ring's times the number of GPUs. in_turn: the same of one GPU that computes all shares in "
    "turn, without links; at_once: efficiency by the slowest of GPUs that compute the whole "
    "sequence each, at once. Goals on two GPUs of one host: "
    + ", ".join(f"{goal:.0%} {name}" for name, goal in GOALS.items())
    + " of as fast as there are GPUs.",
    rows=rows,
    options=options,
    modelled=modelled,
    machine="card and link of each row (help('cupyattn.distributed.cost') says what is assumed)",
    gpus=2,
)
