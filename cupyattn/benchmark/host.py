"""``python -m cupyattn.benchmark host``: what a call costs on the CPU, before the GPU works.

On tiny arrays a call of array code lasts as long as its host side: validation, allocation, choice
of the configuration, launch. This measures that time alone.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.cli.arguments import add_json_option, integer
from cupyattn.cli.recorder import attention_launch
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.cupy_library import load_cupy
from cupyattn.functional.device_info import device_count
from cupyattn.kernels.device.cuda import CudaDevice, cuda_device
from cupyattn.kernels.launch import start
from cupyattn.ops.attention.options import AttentionOptions

GOAL_WITH_OUT_US = 12.0
GOAL_US = 20.0
NO_GPU = 2

_SHAPE = (1, 16, 1, 64)  # (B, S, H, D): a kernel of a few microseconds


class Row(NamedTuple):
    """One thing to call, and the most microseconds that it should take."""

    name: str
    call: Callable[[], Any]
    goal_us: float | None


def add_parser(benchmarks: Any) -> None:
    """Add the benchmark to the command line."""
    parser = benchmarks.add_parser(
        "host",
        help="microseconds that a call spends on the CPU, on tiny arrays",
        description="Measure the host side of a call on tiny arrays: calls are made in batches, "
        "the GPU is waited for only between batches, outside the time. Needs a GPU.",
        epilog=f"Goals: {GOAL_WITH_OUT_US:g} us with out=, {GOAL_US:g} us without. "
        f"Exit code {NO_GPU} without a GPU.",
    )
    parser.add_argument(
        "--calls",
        type=integer(1),
        default=200,
        metavar="N",
        help="calls in a batch (default: %(default)s); a GPU's queue holds about a thousand",
    )
    parser.add_argument(
        "--batches",
        type=integer(1),
        default=50,
        metavar="N",
        help="batches, of which the median is shown (default: %(default)s)",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark."""
    if not device_count():
        fail(
            "host",
            RuntimeError(
                "there is no CUDA device, and this measures the host side of launches on one; run "
                "it on a machine with a GPU"
            ),
            as_json=arguments.json,
        )
        return NO_GPU
    try:
        result = measure(arguments.calls, arguments.batches)
    except (RuntimeError, ValueError) as failure:  # as in `demo`
        fail("host", failure, as_json=arguments.json)
        return 1
    emit(result, show, as_json=arguments.json)
    return 0


def measure(calls: int, batches: int) -> Result:
    """Measure every row on the first GPU."""
    cupy = load_cupy()

    device = cuda_device(0)
    with cupy.cuda.Device(device.ordinal):
        synchronize = cupy.cuda.get_current_stream().synchronize
        figures = [
            {
                "name": row.name,
                **_summary(microseconds_per_call(row.call, synchronize, calls, batches)),
                "goal_us": row.goal_us,
            }
            for row in _rows(device)
        ]
    return {
        "command": "host",
        "version": cupyattn.__version__,
        "device": device.name,
        "arch": device.arch.real,
        "cupy": cupy.__version__,
        "shape": list(_SHAPE),
        "dtype": "float16",
        "calls": calls,
        "batches": batches,
        "rows": figures,
    }


def _rows(device: CudaDevice) -> list[Row]:
    cupy = load_cupy()

    rng = np.random.default_rng(0)
    q, k, v = (cupy.asarray(rng.standard_normal(_SHAPE).astype(np.float16)) for _ in range(3))
    batch, length, heads, _ = _SHAPE
    out, lse = cupy.empty_like(q), cupy.empty((batch, heads, length), np.float32)

    logits = cupy.asarray(rng.standard_normal((batch, 1000)).astype(np.float16))
    ids, room = cupy.empty(batch, np.int32), cupy.empty(2**20, np.uint8)

    def attention(**options: Any) -> Callable[[], Any]:
        return lambda: cupyattn.attention(q, k, v, causal=True, implementation="tiled", **options)

    # The start of the same kernel with arguments that are ready, as a plan has them.
    recorded = attention_launch(
        device.arch, q, k, v, AttentionOptions(causal=True, implementation="tiled")
    )
    *others, params = recorded.arguments[5:]
    arrays, values = (*recorded.arguments[:3], out, lse, *others), (params,)
    return [
        Row("attention, out=", attention(out=out), GOAL_WITH_OUT_US),
        Row("attention", attention(), GOAL_US),
        Row(
            "attention, return_lse, out=(out, lse)",
            attention(return_lse=True, out=(out, lse)),
            GOAL_WITH_OUT_US,
        ),
        Row("attention, return_lse", attention(return_lse=True), GOAL_US),
        Row("softmax, out=", lambda: cupyattn.softmax(q, out=out), GOAL_WITH_OUT_US),
        Row("softmax", lambda: cupyattn.softmax(q), GOAL_US),
        Row(
            "sample, out=, workspace=",
            lambda: cupyattn.sample(logits, seed=1, out=ids, workspace=room),
            GOAL_WITH_OUT_US,
        ),
        Row(
            "sample, top_p=, out=, workspace=: three launches",
            lambda: cupyattn.sample(logits, seed=1, top_p=0.9, out=ids, workspace=room),
            None,
        ),
        Row(
            "the attention kernel's launch alone",
            lambda: start(device, recorded.specialisation, recorded.grid[0], arrays, values),
            None,
        ),
        Row("an empty array of CuPy", lambda: cupy.empty(_SHAPE, np.float16), None),
    ]


def microseconds_per_call(
    call: Callable[[], Any], synchronize: Callable[[], Any], calls: int, batches: int
) -> list[float]:
    """Time batches of calls, each on an idle GPU; one batch before them is not counted."""
    per_call = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(batches + 1):
            began = time.perf_counter_ns()
            for _ in range(calls):
                call()
            per_call.append((time.perf_counter_ns() - began) / 1e3 / calls)
            synchronize()
    finally:
        if collecting:
            gc.enable()
    return per_call[1:]


def _summary(per_call: list[float]) -> dict[str, float]:
    return {"median_us": statistics.median(per_call), "fastest_us": min(per_call)}


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    terminal.title(
        f"Host side of a call on {result['device']} ({result['arch']}), CuPy {result['cupy']}, "
        f"{result['dtype']} arrays of shape {tuple(result['shape'])}"
    )
    terminal.table(
        ("call", "median us", "fastest us", "goal us"),
        [
            (
                row["name"],
                f"{row['median_us']:.1f}",
                f"{row['fastest_us']:.1f}",
                "" if row["goal_us"] is None else f"{row['goal_us']:g}",
            )
            for row in result["rows"]
        ],
    )
    terminal.text(
        f"  per call; {result['batches']} batches of {result['calls']} calls, the GPU idle at the "
        "beginning of each"
    )
