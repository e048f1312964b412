"""``python -m cupyattn.benchmark decode``: a step of decoding over a paged cache, on a GPU.

Its measure is the memory's speed: GB/s of the K and V in use, beside those of a copy.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.benchmark.cuda_events import RoundTimer, copy_rate, graph_timer, measured_on
from cupyattn.benchmark.gpu_command import add_timing_options, run_on_gpu, show_machine
from cupyattn.cli.arguments import integer
from cupyattn.cli.progress import progress
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.cupy_library import load_cupy
from cupyattn.kernels.configs.attention.decode import TILE_KEYS
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.kernels.device.cuda import cuda_device
from cupyattn.ops.attention.decode_problem import MAX_QUERIES

_SHORTEST = 256  # of ragged sequences


class Case(NamedTuple):
    """One step; `ragged` draws lengths from 256 to the context instead of taking that."""

    batch: int
    context: int
    ragged: bool
    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    block_size: int
    dtype: str

    def lengths(self) -> np.ndarray:
        """Tokens of each sequence."""
        if not self.ragged:
            return np.full(self.batch, self.context, np.int32)
        shortest = min(_SHORTEST, self.context)
        drawn = np.random.default_rng(0).integers(shortest, self.context + 1, self.batch)
        return drawn.astype(np.int32)

    def bytes_of(self, lengths: np.ndarray) -> int:
        """K and V of all tokens."""
        token = 2 * self.kv_heads * self.head_dim * STORAGE[self.dtype]
        return int(lengths.sum()) * token

    def arrays(self, xp: Any) -> tuple[Any, ...]:
        """Return q, the caches, the table and lengths; blocks lie anywhere in the pool."""
        lengths = self.lengths()
        columns = -(-int(lengths.max()) // self.block_size)
        num_blocks = self.batch * columns
        ids = np.random.default_rng(1).permutation(num_blocks).astype(np.int32)
        dtype = numpy_dtype(self.dtype)
        pool = (num_blocks, self.block_size, self.kv_heads, self.head_dim)
        rng = np.random.default_rng(2)
        some = rng.standard_normal((1, *pool[1:]), dtype=np.float32).astype(dtype)
        q = rng.standard_normal(
            (self.batch, self.queries, self.heads, self.head_dim), dtype=np.float32
        ).astype(dtype)
        caches = [xp.empty(pool, dtype) for _ in range(2)]
        for cache in caches:
            cache[...] = xp.asarray(some)
        return xp.asarray(q), *caches, xp.asarray(ids.reshape(self.batch, -1)), xp.asarray(lengths)


def numpy_dtype(name: str) -> np.dtype:
    """Return NumPy's dtype of that name, bfloat16 included."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def time_cases(cases: list[Case], xp: Any, timer: RoundTimer) -> list[dict[str, Any]]:
    """Return a row for each case: the median ``seconds`` of a step, ``bytes``, ``gb_per_s``."""
    rows = []
    with progress("timing", len(cases)) as step:
        for case in cases:
            arrays = case.arrays(xp)
            out = xp.empty(arrays[0].shape, arrays[0].dtype)

            def call(arrays: tuple[Any, ...] = arrays, out: Any = out) -> Any:
                return cupyattn.paged_attention(*arrays, causal=True, out=out)

            seconds = statistics.median(timer([call], None))
            traffic = case.bytes_of(case.lengths())
            rows.append(
                {
                    **case._asdict(),
                    "seconds": seconds,
                    "bytes": traffic,
                    "gb_per_s": traffic / seconds / 1e9,
                }
            )
            step()
    return rows


def add_parser(benchmarks: Any) -> None:
    """Add the benchmark to the command line."""
    parser = benchmarks.add_parser(
        "decode",
        help="GB/s of K and V in a step of decoding over a paged cache on a GPU",
        description="Time paged_attention by CUDA events around CUDA graphs of one call each, "
        "beside a copy on the same device. Needs a GPU; CUPYATTN_ARCH=75 times the Turing code on "
        "a newer one.",
        epilog="K and V of a case count once. Cases smaller than the cache of the GPU are read "
        "from there. Exit code 1 without a GPU.",
    )
    lists = (
        ("batch", [1, 8, 64], integer(1), "sequences"),
        ("context", [4096, 16384], integer(1), "tokens of each"),
        ("block-size", [16, 256], integer(TILE_KEYS), "tokens of a block"),
    )
    for name, default, kind, what in lists:
        parser.add_argument(
            f"--{name}",
            nargs="+",
            type=kind,
            default=default,
            metavar="N",
            help=f"{what} (default: {' '.join(map(str, default))})",
        )
    numbers = (
        ("heads", 32, integer(1), "query heads"),
        ("kv-heads", 8, integer(1), "key-value heads"),
        ("head-dim", 128, integer(1, MAX_HEAD_DIM), "head dim"),
        ("queries", 1, integer(1, MAX_QUERIES), "query tokens of each sequence"),
    )
    for name, default_number, kind, what in numbers:
        parser.add_argument(
            f"--{name}",
            type=kind,
            default=default_number,
            metavar="N",
            help=f"{what} (default: %(default)s)",
        )
    parser.add_argument(
        "--ragged",
        action="store_true",
        help=f"lengths from {_SHORTEST} to the context, drawn evenly",
    )
    parser.add_argument(
        "--dtype", choices=STORAGE, default="float16", help="of the arrays (default: %(default)s)"
    )
    add_timing_options(parser, calls=30, warm_up=5)
    parser.set_defaults(run=run)


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Return every combination that was asked for."""
    return [
        Case(
            batch,
            context,
            arguments.ragged,
            arguments.heads,
            arguments.kv_heads,
            arguments.head_dim,
            arguments.queries,
            block_size,
            arguments.dtype,
        )
        for context in arguments.context
        for batch in arguments.batch
        for block_size in arguments.block_size
    ]


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark."""
    return run_on_gpu("decode", arguments, measure, show)


def measure(arguments: argparse.Namespace) -> Result:
    """Measure every case on the first GPU."""
    cupy = load_cupy()
    device = cuda_device(0)
    with cupy.cuda.Device(device.ordinal):
        timer = graph_timer(arguments.calls, arguments.warm_up)
        copied = copy_rate(timer)
        rows = time_cases(cases_of(arguments), cupy, timer)
    return {
        "command": "decode",
        **measured_on(device),
        "calls": arguments.calls,
        "warm_up": arguments.warm_up,
        "copy_gb_per_s": copied,
        "rows": rows,
    }


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    show_machine("Decoding", result, terminal)
    copied = result["copy_gb_per_s"]
    terminal.facts({"a copy on the device": f"{copied:.0f} GB/s"})
    first = result["rows"][0]
    terminal.title(
        f"{first['heads']}/{first['kv_heads']} heads, D {first['head_dim']}, {first['dtype']}, "
        f"{first['queries']} query tokens{', ragged' if first['ragged'] else ''}"
    )
    terminal.table(
        ("batch", "context", "block", "median", "GB/s", "of a copy"),
        [
            (
                str(row["batch"]),
                str(row["context"]),
                str(row["block_size"]),
                f"{row['seconds'] * 1e6:.1f} us",
                f"{row['gb_per_s']:.0f}",
                f"{row['gb_per_s'] / copied:.2f}",
            )
            for row in result["rows"]
        ],
    )
    terminal.text(
        f"  Median of {result['calls']} calls after {result['warm_up']}; GB/s of the K and V in "
        "use, read once."
    )
