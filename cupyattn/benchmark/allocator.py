"""``python -m cupyattn.benchmark allocator``: CPU time of the block ids of a paged KV cache.

There are no arrays and no model. The trace is a small day of a server: many requests that begin
with a few system prompts, run by `cupyattn.Scheduler`.
"""

from __future__ import annotations

import argparse
import random
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cupyattn.benchmark.command import Option, run_and_show
from cupyattn.benchmark.results import this_host
from cupyattn.cli.arguments import Commands, integer
from cupyattn.cli.terminal import Result, Terminal, emit
from cupyattn.kv_cache import BlockAllocator, Copy, PagedKVCache, Scheduler, Work
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.progress import Advance, progress

PAIRS_GOAL = 1_000_000  # allocate and free, a second
TABLE_GOAL_MS = 1.0
WASTE_GOAL = 0.04

POOL_TOKENS = 131_072
MAX_BATCH = 256
WATERMARK = 16  # blocks
VOCABULARY = 32_000
SYSTEM_PROMPTS = (120, 300, 700, 1500)  # tokens
# Medians and sigmas of log-normal lengths: means near 160 and 340, as of conversations.
PROMPT = (100.0, 1.0)
OUTPUT = (250.0, 0.8)
LONGEST = 4096


class NoMemory:
    """A cache of block ids alone."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.num_copies = 0

    def copy(self, copies: tuple[Copy, ...]) -> None:
        """Count the copies."""
        self.num_copies += len(copies)

    copy_to_host = copy_from_host = copy


class Trace(NamedTuple):
    """The outcome of a trace; `waste` is the share of slots in used blocks without a token."""

    block_size: int
    requests: int
    steps: int
    computed_tokens: int
    found_tokens: int
    preempted: int
    copies: int
    waste: float
    worst_waste: float
    leaked_blocks: int
    seconds: float


def add_parser(benchmarks: Commands) -> None:
    """Add the benchmark to the command line."""
    parser = benchmarks.add_parser(
        "allocator",
        help="block ids of a paged KV cache: pairs a second, a step's tables, a trace of requests",
        description="Measure the block allocator on one thread: blocks allocated and freed, "
        f"tables of {MAX_BATCH} sequences, and a trace of requests with log-normal "
        "lengths after shared system prompts. Needs no GPU.",
        epilog=f"Goals: {PAIRS_GOAL:,} pairs a second, tables in {TABLE_GOAL_MS:g} ms, "
        f"under {WASTE_GOAL:.0%} of the used pool wasted at block size 16, and no block leaked.",
    )
    Option("requests", 10_000, "requests of the trace").add(parser)
    Option("block-size", [16], "a trace for each block size", integer(1, 256)).add(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the trace (default: %(default)s)")
    parser.add_argument(
        "--json", nargs="?", const=True, default=False, metavar="FILE",
        help="print one JSON object and nothing else on stdout, or write it to FILE",
    )  # fmt: skip
    parser.set_defaults(run=run, requests=10_000, block_size=[16])


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark."""
    if isinstance(arguments.json, str):
        file = Path(arguments.json)
        return run_and_show("allocator", file, partial(measure, arguments), show)
    emit(measure(arguments), show, as_json=arguments.json)
    return 0


def measure(arguments: argparse.Namespace) -> Result:
    """Measure pairs, tables and traces."""
    with progress("requests", arguments.requests * len(arguments.block_size)) as step:
        traces = [
            run_trace(block_size, arguments.requests, arguments.seed, step)._asdict()
            for block_size in arguments.block_size
        ]
    return {
        "command": "allocator",
        **this_host(),
        "pool_tokens": POOL_TOKENS,
        "pairs_per_second": pairs_per_second(),
        "table_ms": table_milliseconds(),
        "traces": traces,
    }


def pairs_per_second(pairs: int = 100_000) -> float:
    """Time `BlockAllocator.allocate` and `free`."""
    allocator = BlockAllocator(1024, 16)
    allocate, free = allocator.allocate, allocator.free
    return pairs / fastest(lambda: [free(allocate()) for _ in range(pairs)])


def table_milliseconds(sequences: int = MAX_BATCH, length: int = 4096) -> float:
    """Time the tables of a step with one new token for each sequence, without their upload."""
    cache = PagedKVCache(1, sequences * (length // 16), 16, 1, 1, dtype="float16", xp=np)
    every = [cache.allocator.add(range(length)) for _ in range(sequences)]
    tables = cache.step_tables(every)
    return fastest(lambda: tables.update(every)) * 1e3


def fastest(call: Callable[[], object], calls: int = 7) -> float:
    """Return the least CPU seconds of a call, without the garbage collector, as timeit does."""
    return min(timeit.repeat(call, timer=time.process_time, repeat=calls, number=1))


def run_trace(
    block_size: int, requests: int, seed: int = 0, done: Advance = lambda text="", /: None
) -> Trace:
    """Run requests that are submitted at the start, and record the pool in each step.

    `done` is called for each finished request.
    """
    rng = random.Random(seed)
    allocator = BlockAllocator(
        -(-POOL_TOKENS // block_size), block_size, prefix_caching=True, watermark=WATERMARK
    )
    cache = NoMemory(allocator)
    scheduler = Scheduler(cache, max_batch=MAX_BATCH, max_tokens=2048)
    systems = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in SYSTEM_PROMPTS]
    for _ in range(requests):
        prompt = rng.choice(systems) + [
            rng.randrange(VOCABULARY) for _ in range(_length(rng, PROMPT))
        ]
        scheduler.submit(prompt, max_new_tokens=_length(rng, OUTPUT))

    steps = computed = found = unused = used = 0
    worst = 0.0

    def forward(batch: tuple[Work, ...]) -> list[list[int]]:
        nonlocal steps, computed, found, unused, used, worst
        steps += 1
        empty, slots = allocator.num_unused_slots, allocator.num_used * block_size
        unused += empty
        used += slots
        if scheduler.num_waiting:
            worst = max(worst, empty / slots)
        for work in batch:
            computed += len(work.tokens)
            if len(work.sequence) - len(work.tokens) == work.sequence.num_cached_tokens:
                found += work.sequence.num_cached_tokens
        return [[rng.randrange(VOCABULARY) for _ in work.samples] for work in batch]

    began = time.process_time()
    while not scheduler.idle:
        for _ in scheduler.step(forward):
            done()
    seconds = time.process_time() - began
    allocator.check()
    return Trace(
        block_size, requests, steps, computed, found, scheduler.num_preempted, cache.num_copies,
        unused / used, worst, allocator.num_used, seconds,
    )  # fmt: skip


def _length(rng: random.Random, shape: tuple[float, float]) -> int:
    median, sigma = shape
    return min(max(round(median * rng.lognormvariate(0.0, sigma)), 1), LONGEST)


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    terminal.title(f"Block ids of a paged KV cache, one thread of Python {result['python']}")
    pairs, table = result["pairs_per_second"] / 1e6, result["table_ms"]
    terminal.table(
        ("what", "measured", "goal"),
        [
            ("allocate and free a block", f"{pairs:.2f} million/s", f"{PAIRS_GOAL:,}/s"),
            (f"tables of {MAX_BATCH} sequences", f"{table:.2f} ms", f"{TABLE_GOAL_MS:g} ms"),
        ],
    )
    terminal.title(
        f"Requests after {len(SYSTEM_PROMPTS)} system prompts, log-normal lengths, a pool of "
        f"{result['pool_tokens']:,} tokens"
    )
    columns = ("block size", "requests", "steps", "computed", "found", "preempted", "copies",
               "waste", "worst", "leaked", "us a token")  # fmt: skip
    spare = ("steps", "copies", "computed", "found", "preempted")
    terminal.left_out(terminal.table(columns, list(map(_cells, result["traces"])), spare=spare))
    terminal.text(
        f"  CPU time. waste: share of slots in used blocks that hold no token, over all steps; "
        "worst: the same in the worst step while requests waited. The goal at block size 16 is "
        f"waste under {WASTE_GOAL:.0%} and no leaked block. found: tokens of prompts that were in "
        "the cache."
    )


def _cells(trace: Json) -> tuple[str, ...]:
    return (
        *(f"{trace[name]:,}" for name in Trace._fields[:7]),
        *(f"{trace[name]:.2%}" for name in ("waste", "worst_waste")),
        f"{trace['leaked_blocks']}",
        f"{trace['seconds'] / trace['computed_tokens'] * 1e6:.1f}",
    )
