"""``python -m cupyattn.benchmark ring``: attention over several GPUs, compared with one.

One GPU computes the whole sequence; then all of them do, each with its shard.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn
from cupyattn import distributed
from cupyattn.benchmark.cases import Harness, Row, row_of
from cupyattn.benchmark.command import Benchmark, Option
from cupyattn.benchmark.timer import PRODUCTS, Timer
from cupyattn.cli.arguments import integer
from cupyattn.distributed.placement import PLACEMENTS
from cupyattn.distributed.threads import TRANSPORTS
from cupyattn.runtime.annotations import Json, Keywords, Undescribed
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device.cuda import device_count
from cupyattn.runtime.errors import error
from cupyattn.runtime.tables import MAX_HEAD_DIM
from cupyattn.runtime.value_checks import on_host

GOALS = {"forward": 0.95, "forward + backward": 0.93}
_FLOPS = {"forward": 4, "forward + backward": 14}
"""Operations of a score and feature."""
_LABELS = ("tokens", "heads", "kv_heads", "head_dim", "placement")


def rows(arguments: argparse.Namespace, harness: Harness) -> Iterator[Row]:
    """Time one GPU, then all of them."""
    gpus = arguments.gpus or device_count()
    if arguments.heads % arguments.kv_heads:
        raise error(
            ValueError,
            f"{arguments.heads} heads, {arguments.kv_heads} key-value heads",
            "each key-value head serves the same number of heads",
            "pass a number of key-value heads that divides that of heads",
        )
    if not 2 <= gpus <= device_count():
        raise RuntimeError(
            f"a ring of {gpus} GPUs, but there are {device_count()}; a ring needs two or more"
        )
    xp, causal = harness.xp, not arguments.full
    timer = Timer(arguments.calls, arguments.warm_up, arguments.budget)
    q, k, v, dout = whole = drawn(arguments, xp)
    forward = partial(cupyattn.attention, q, k, v, causal=causal, return_lse=True)
    cut = partial(distributed.shard, placement=arguments.placement)
    expected = on_host(cut(forward()[0], 0, gpus)).astype(np.float32)
    both = partial(_both, forward, cupyattn.attention_backward, (dout, q, k, v), {"causal": causal})
    calls = zip(GOALS, (forward, both), strict=True)
    alone = {name: timed(call, timer, xp, lambda: None) for name, call in calls}
    shards = [[on_host(cut(x, rank, gpus)) for x in whole] for rank in range(gpus)]
    del q, k, v, dout, whole, forward, both
    harness.free()
    ranks = distributed.run(
        partial(time_rank, arguments, timer, shards),
        devices=range(gpus),
        transport=arguments.transport,
    )
    difference = float(np.abs(ranks[0]["out"].astype(np.float32) - expected).max())
    labels = {name: getattr(arguments, name) for name in _LABELS}
    labels |= {"causal": causal, "gpus": gpus, "transport": ranks[0]["transport"]}
    for name, seconds in alone.items():
        yield from compared({**labels, "what": name}, seconds, ranks, difference, harness)


def compared(
    labels: Json, alone: list[float], ranks: list[Any], difference: float, harness: Harness
) -> Iterator[Row]:
    """Yield the rows of one GPU and of all: a call is as slow as its slowest rank."""
    name, gpus = labels["what"], labels["gpus"]
    together = [max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)]
    scores = labels["tokens"] ** 2 * (0.5 if labels["causal"] else 1.0)
    flops = _FLOPS[name] * scores * labels["heads"] * labels["head_dim"]
    given: Keywords = {"flops": flops, "ceiling": PRODUCTS}
    one = row_of(labels, "cupyattn one GPU", alone, ceilings=harness.ceilings, **given)
    limits = {name: rate and gpus * rate for name, rate in harness.ceilings.items()}
    ring = row_of(labels, "cupyattn ring", together, ceilings=limits, **given)
    ring["also"] = {
        "efficiency": one["times"]["p50_s"] / (gpus * ring["times"]["p50_s"]),
        "goal": GOALS[name],
        "largest_difference": difference,
    }
    yield from (one, ring)


def drawn(arguments: argparse.Namespace, xp: ModuleType) -> list[Array]:
    """Return q, k, v and dout: one head's numbers, scaled differently for each other head."""
    rng = np.random.default_rng(0)
    arrays = []
    for heads in (arguments.heads, arguments.kv_heads, arguments.kv_heads, arguments.heads):
        one = rng.standard_normal((1, arguments.tokens, 1, arguments.head_dim), dtype=np.float32)
        scales = xp.linspace(0.8, 1.2, heads, dtype=np.float32)[:, None]
        arrays.append((xp.asarray(one) * scales).astype(np.float16))
    return arrays


def time_rank(
    arguments: argparse.Namespace,
    timer: Timer,
    shards: list[list[np.ndarray]],
    group: distributed.Group,
) -> Json:
    """Time one rank's calls, all ranks at once."""
    cupy = load_cupy()
    q, k, v, dout = (cupy.asarray(x) for x in shards[group.rank])
    options = {"group": group, "placement": arguments.placement, "causal": not arguments.full}
    forward = partial(distributed.ring_attention, q, k, v, return_lse=True, **options)
    both = partial(_both, forward, distributed.ring_attention_backward, (dout, q, k, v), options)

    def meet() -> None:
        group.all_gather(cupy.zeros(1))
        cupy.cuda.get_current_stream().synchronize()

    found: Json = {"out": forward()[0].get(), "transport": group.transport}
    for name, call in zip(GOALS, (forward, both), strict=True):
        found[name] = timed(call, timer, cupy, meet, group)
    return found


def _both(
    forward: Callable[[], Undescribed],
    backward: Callable[..., object],
    arrays: Sequence[Array],
    options: Keywords,
) -> Undescribed:
    out, lse = forward()
    return backward(*arrays, out, lse, **options)


def timed(
    call: Callable[[], object],
    timer: Timer,
    cupy: ModuleType,
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
        took = float(on_host(group.all_gather(cupy.array([took]))[0])[0])
    return timer.waited(once, took)


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
    gpus=2,
)  # fmt: skip
