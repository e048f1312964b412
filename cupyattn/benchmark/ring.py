"""``python -m cupyattn.benchmark ring``: attention over several GPUs, compared with one.

One GPU computes the whole sequence; then all of them do, each with its shard. Without GPUs, or with
``--modelled``, the rows are those of the cost model.
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
from cupyattn.benchmark import ring_cost as cost
from cupyattn.benchmark.cases import Harness, Row, row_of, without
from cupyattn.benchmark.command import Benchmark, Option
from cupyattn.benchmark.timer import PRODUCTS, Timer
from cupyattn.cli.arguments import integer
from cupyattn.cupy_library import load_cupy
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
"""What is modelled: a GPU, a link, and how many GPUs such a link joins."""
_FLOPS = {"forward": 4, "forward + backward": 14}
"""Operations of a score and feature."""
_LABELS = ("tokens", "heads", "kv_heads", "head_dim", "placement")


def rows(arguments: argparse.Namespace, harness: Harness) -> Iterator[Row]:
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
    xp, causal = harness.xp, not arguments.full
    timer = Timer(arguments.calls, arguments.warm_up, arguments.budget)
    q, k, v, dout = whole = drawn(arguments, xp)
    forward = partial(cupyattn.attention, q, k, v, causal=causal, return_lse=True)
    cut = partial(distributed.shard, placement=arguments.placement)
    expected = cut(forward()[0], 0, gpus).get().astype(np.float32)
    both = partial(_both, forward, cupyattn.attention_backward, (dout, q, k, v), {"causal": causal})
    calls = zip(GOALS, (forward, both), strict=True)
    alone = {name: timed(call, timer, xp, lambda: None) for name, call in calls}
    shards = [[cut(x, rank, gpus).get() for x in whole] for rank in range(gpus)]
    del q, k, v, dout, whole, forward, both
    harness.free()
    ranks = distributed.run(
        partial(time_rank, arguments, timer, shards),
        devices=range(gpus),
        transport=arguments.transport,
    )
    difference = float(np.abs(ranks[0]["out"].astype(np.float32) - expected).max())
    labels = {
        **{name: getattr(arguments, name) for name in _LABELS}, "causal": causal, "gpus": gpus,
        "transport": ranks[0]["transport"],
    }  # fmt: skip
    for name, seconds in alone.items():
        yield from compared({**labels, "what": name}, seconds, ranks, difference, harness)


def compared(
    labels: dict[str, Any], alone: list[float], ranks: list[Any], difference: float,
    harness: Harness,
) -> Iterator[Row]:  # fmt: skip
    """Yield the rows of one GPU and of all: a call is as slow as its slowest rank."""
    name, gpus = labels["what"], labels["gpus"]
    together = [max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)]
    scores = labels["tokens"] ** 2 * (0.5 if labels["causal"] else 1.0)
    flops = _FLOPS[name] * scores * labels["heads"] * labels["head_dim"]
    given: dict[str, Any] = {"flops": flops, "ceiling": PRODUCTS}
    one = row_of(labels, "cupyattn one GPU", alone, ceilings=harness.ceilings, **given)
    limits = {name: rate and gpus * rate for name, rate in harness.ceilings.items()}
    ring = row_of(labels, "cupyattn ring", together, ceilings=limits, **given)
    ring["also"] = {
        "efficiency": one["times"]["p50_s"] / (gpus * ring["times"]["p50_s"]),
        "goal": GOALS[name],
        "largest_difference": difference,
        "hop_gb_per_s": ranks[0]["hop_gb_per_s"],
    }
    yield from (one, ring)


def drawn(arguments: argparse.Namespace, xp: Any) -> list[Any]:
    """Return q, k, v and dout: one head's numbers, scaled differently for each other head."""
    rng = np.random.default_rng(0)
    arrays = []
    for heads in (arguments.heads, arguments.kv_heads, arguments.kv_heads, arguments.heads):
        one = rng.standard_normal((1, arguments.tokens, 1, arguments.head_dim), dtype=np.float32)
        scales = xp.linspace(0.8, 1.2, heads, dtype=np.float32)[:, None]
        arrays.append((xp.asarray(one) * scales).astype(np.float16))
    return arrays


def time_rank(
    arguments: argparse.Namespace, timer: Timer, shards: list[list[Any]], group: distributed.Group
) -> dict[str, Any]:
    """Time one rank's calls, all ranks at once; and a transfer of its block to the next rank."""
    cupy = load_cupy()
    q, k, v, dout = (cupy.asarray(x) for x in shards[group.rank])
    options = {"group": group, "placement": arguments.placement, "causal": not arguments.full}
    forward = partial(distributed.ring_attention, q, k, v, return_lse=True, **options)
    both = partial(_both, forward, distributed.ring_attention_backward, (dout, q, k, v), options)

    def meet() -> None:
        group.all_gather(cupy.zeros(1))
        cupy.cuda.get_current_stream().synchronize()

    found: dict[str, Any] = {"out": forward()[0].get(), "transport": group.transport}
    for name, call in zip(GOALS, (forward, both), strict=True):
        found[name] = timed(call, timer, cupy, meet, group)
    spare = cupy.empty_like(k), cupy.empty_like(v)
    stream = cupy.cuda.get_current_stream()
    to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    hop = partial(group.exchange, (k, v), to, spare, source, stream)
    seconds = median(timed(hop, timer, cupy, meet, group))
    found["hop_gb_per_s"] = (k.nbytes + v.nbytes) / seconds / 1e9
    return found


def _both(forward: Callable[[], Any], backward: Any, arrays: Any, options: Any) -> Any:
    out, lse = forward()
    return backward(*arrays, out, lse, **options)


def timed(
    call: Callable[[], Any],
    timer: Timer,
    cupy: Any,
    meet: Callable[[], None],
    group: distributed.Group | None = None,
) -> list[float]:
    """Return the seconds of each call, from when all ranks begin until this rank's GPU is done.

    The second call of the first rank decides how many calls all ranks make.
    """

    def once() -> float:
        meet()
        cupy.cuda.Device().synchronize()
        begun = time.perf_counter()
        call()
        cupy.cuda.Device().synchronize()
        return time.perf_counter() - begun

    once()
    took = once()
    if group is not None:
        took = float(group.all_gather(cupy.array([took]))[0].get()[0])
    return timer.waited(once, took)


def modelled(arguments: argparse.Namespace) -> Iterator[Row]:
    """Model every GPU and link, with as many ranks as --gpus says or with 2, 4, 8 and so on.

    Raises
    ------
    ValueError
        For numbers that are no problem, and more GPUs than any link joins.
    """
    _require_heads(arguments)
    most_of_all = max(most for _, _, most in SETUPS)
    if arguments.gpus > most_of_all:
        raise ValueError(
            f"--gpus {arguments.gpus}; the model has links that join up to {most_of_all}; "
            "ask for fewer"
        )
    names = ("heads", "kv_heads", "head_dim", "placement")
    given: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    given["causal"] = not arguments.full
    for card, link, most in SETUPS:
        for ranks in _ring_sizes(arguments.gpus, most):
            labels = {
                **given, "tokens": arguments.tokens, "card": card.name, "ranks": ranks,
                "link": f"{link.name}, {link.gb_per_s:g} GB/s each way",
            }  # fmt: skip
            of = partial(cost.ring_cost, ranks, arguments.tokens, card=card, link=link, **given)
            try:
                both = {"forward": of(backward=False), "backward": of(backward=True)}
            except ValueError as reason:  # more ranks do not split these tokens either
                yield without(labels, "cupyattn ring", str(reason))
                break
            for what, found in both.items():
                parts = ("compute", "memory", "transfer", "exposed", "host")
                yield {
                    **labels,
                    "what": what,
                    "implementation": "cupyattn ring",
                    "times": {"p50_s": found.total},
                    "also": {
                        **{f"{part}_s": getattr(found, part) for part in parts},
                        **{"efficiency": found.efficiency, "balance": found.balance},
                    },
                }


def _ring_sizes(gpus: int, most: int) -> Iterator[int]:
    """Yield the numbers of ranks that are modelled on a link that joins `most`."""
    ranks = gpus or (2 if most <= 8 else 16)
    while ranks <= most:
        yield ranks
        ranks = most + 1 if gpus else 2 * ranks


def _require_heads(arguments: argparse.Namespace) -> None:
    cost.require_counts(tokens=arguments.tokens, heads=arguments.heads, kv_heads=arguments.kv_heads)


BENCHMARK = Benchmark(
    name="ring",
    title="Ring attention",
    help="attention over several GPUs compared with one",
    description="Time ring attention, forward and forward with backward, and attention of the "
    "whole sequence on one GPU. Each rank is a thread of this process. Needs two GPUs.",
    note="Times are of the slowest rank, by the host's clock; efficiency is one GPU's time over "
    "the ring's times the number of GPUs. Goals on two GPUs of one host: "
    + ", ".join(f"{goal:.0%} {name}" for name, goal in GOALS.items()) + ".",
    options=(
        Option("tokens", 131_072, "tokens of the sequence", integer(1, 2**31 - 1)),
        Option("heads", 16, "query heads"),
        Option("kv-heads", 16, "key-value heads"),
        Option("head-dim", 128, "head dim", integer(1, MAX_HEAD_DIM)),
        Option("gpus", 0, "how many GPUs; 0 is all", integer(0)),
        Option("placement", "zigzag", "which tokens a rank holds", choices=tuple(PLACEMENTS)),
        Option("transport", None, "what carries bytes (default: NCCL if it is installed)",
               choices=tuple(TRANSPORTS)),
        Option("full", False, "all keys, not causal"),
    ),
    rows=rows,
    modelled_rows=modelled,
    machine="card and link of each row (help('cupyattn.benchmark.ring_cost') lists assumptions)",
    gpus=2,
)  # fmt: skip
