"""``python -m cupyattn.benchmark host``: the CPU time of a call on tiny arrays.

It consists of validation, allocation, choice of the configuration and launch.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.benchmark.cases import Harness, Row, row_of
from cupyattn.benchmark.command import Benchmark, Option
from cupyattn.cli.configurations import attention_launch
from cupyattn.ops.attention.options import AttentionOptions
from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device.cuda import CudaDevice, cuda_device
from cupyattn.runtime.plan import start

GOAL_WITH_OUT_US = 12.0
GOAL_US = 20.0

_CALLS_OF_A_BATCH = 20  # as --calls counts them: 50 batches by default
_SHAPE = (1, 16, 1, 64)  # (B, S, H, D): a kernel of a few microseconds


class HostCall(NamedTuple):
    """A call, and the most microseconds that it should take."""

    name: str
    call: Callable[[], object]
    goal_us: float | None


def rows(arguments: argparse.Namespace, harness: Harness) -> Iterator[Row]:
    """Time every call on the current GPU."""
    synchronize = harness.xp.cuda.get_current_stream().synchronize
    batches = max(1, arguments.calls // _CALLS_OF_A_BATCH)
    for each in _timed(cuda_device(0)):
        times = microseconds_per_call(each.call, synchronize, arguments.batch, batches)
        seconds = [time / 1e6 for time in times]
        yield row_of(
            {"call": each.name}, "cupyattn", seconds, calls_per_sample=arguments.batch,
            also={"goal_us": each.goal_us},
        )  # fmt: skip


def _timed(device: CudaDevice) -> list[HostCall]:
    cupy, rng = load_cupy(), np.random.default_rng(0)
    q, k, v = (cupy.asarray(rng.standard_normal(_SHAPE).astype(np.float16)) for _ in range(3))
    batch, length, heads, _ = _SHAPE
    out, lse = cupy.empty_like(q), cupy.empty((batch, heads, length), np.float32)
    options: Keywords = {"causal": True, "implementation": "tiled"}
    attend = partial(cupyattn.attention, q, k, v, **options)
    # The start of the same kernel with arguments that are ready, as a plan has them.
    recorded = attention_launch(device.arch, q, k, v, AttentionOptions(**options))
    *others, params = recorded.arguments[5:]
    arrays = (*recorded.arguments[:3], out, lse, *others)
    passed = [device.null if x is None else device.argument(x) for x in arrays]
    launch = partial(start, device, recorded.specialisation, recorded.grid[0], passed, (params,))
    return [
        HostCall("attention, out=", partial(attend, out=out), GOAL_WITH_OUT_US),
        HostCall("attention", attend, GOAL_US),
        HostCall("attention, return_lse, out=(out, lse)",
                 partial(attend, return_lse=True, out=(out, lse)), GOAL_WITH_OUT_US),
        *_layers(q, out, k[0, :, 0], out[0, :, 0]),
        HostCall("the attention kernel's launch alone", launch, None),
        HostCall("an empty array of CuPy", partial(cupy.empty, _SHAPE, np.float16), None),
    ]  # fmt: skip


def _layers(q: Any, out: object, x: object, y: object) -> Iterator[HostCall]:
    """Yield layers of one launch, which put results of q into out, and those of rows x into y."""
    cupy = load_cupy()
    _, length, _, width = _SHAPE
    weight = cupy.ones(width, np.float16)
    cos, sin = map(cupy.asarray, cupyattn.rope_tables(length, width))
    calls = {
        "softmax": (partial(cupyattn.softmax, q), out),
        "rms_norm": (partial(cupyattn.rms_norm, q, weight), out),
        "rope": (partial(cupyattn.rope, q, cos, sin), out),
        "linear": (partial(cupyattn.linear, x, cupy.ones((width, width), np.float16)), y),
    }
    for name, (call, result) in calls.items():
        yield HostCall(f"{name}, out=", partial(call, out=result), GOAL_WITH_OUT_US)
        yield HostCall(name, call, GOAL_US)


def microseconds_per_call(
    call: Callable[[], object], synchronize: Callable[[], object], calls: int, batches: int
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


BENCHMARK = Benchmark(
    name="host",
    title="Host side of a call",
    help="microseconds that a call spends on the CPU, on tiny arrays",
    description="Measure the host side of a call on tiny arrays: calls are made in batches, the "
    "GPU is waited for only between batches, outside the time.",
    note=f"float16 arrays of shape {_SHAPE}. Goals: {GOAL_WITH_OUT_US:g} us with out=, {GOAL_US:g} "
    "us without.",
    options=(
        Option("batch", 200, "calls in a batch, whose mean is one time; a GPU's queue holds about "
               "a thousand"),
    ),
    rows=rows,
)  # fmt: skip
