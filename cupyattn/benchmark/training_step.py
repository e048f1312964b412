"""``python -m cupyattn.benchmark training_step``: attention's part of a training step on a GPU.

By default that of a layer with Phi-2's heads: forward with lse, then backward, causal, float16. The
work counted is 3.5 forwards. The memory is what the step takes beside its inputs and outputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import cupyattn
from cupyattn.benchmark.attention.cases import PLAIN, Arrays, Case, Pool, items
from cupyattn.benchmark.attention.table import case_title, contender_name
from cupyattn.benchmark.attention.times import figures_of
from cupyattn.benchmark.contenders import Call
from cupyattn.benchmark.cuda_events import Timer, event_timer, measured_on
from cupyattn.benchmark.gpu_command import add_timing_options, run_on_gpu, show_machine
from cupyattn.cli.arguments import integer
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.cupy_library import load_cupy
from cupyattn.gradients import AttentionGrads
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.kernels.device.cuda import cuda_device
from cupyattn.progress import progress

PHI_2 = {"batch": 8, "seqlen": 2048, "heads": 32, "head_dim": 80}
GOAL_BYTES = 400_000_000  # of scratch memory, for that shape
_NAIVE_WARM_UP = 1


class Kernels(NamedTuple):
    """Which kernels make the step, and the clock for them."""

    implementation: str
    deterministic: bool
    timer: Timer


def add_parser(benchmarks: Any) -> None:
    """Add the benchmark to the command line."""
    parser = benchmarks.add_parser(
        "training_step",
        help="time and memory of attention forward and backward together on a GPU",
        description="Time one training step of causal float16 attention by CUDA events, forward "
        "with lse and backward, with flash attention, with its deterministic backward, and with "
        "the naive kernels. Needs a GPU; CUPYATTN_ARCH=75 times the Turing code on a newer one.",
        epilog="TFLOP/s count 3.5 forwards of half the scores. Memory is what CuPy's memory pool "
        "takes from the device for a step whose inputs (q, k, v, dout) and outputs (out, lse, dq, "
        f"dk, dv) are there; the goal for the default shape is under {GOAL_BYTES / 1e6:.0f} MB. "
        "Exit code 1 without a GPU.",
    )
    for name, highest, what in (
        ("batch", None, "sequences"),
        ("seqlen", None, "tokens of a sequence"),
        ("heads", None, "heads"),
        ("head_dim", MAX_HEAD_DIM, "head dim of q, k and v"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=integer(1, highest),
            default=PHI_2[name],
            metavar="N",
            help=f"{what} (default: %(default)s)",
        )
    add_timing_options(parser, calls=20, warm_up=3)
    parser.add_argument(
        "--naive-calls",
        type=integer(0),
        default=3,
        metavar="N",
        help=f"steps with the naive kernels, which are slow, after {_NAIVE_WARM_UP}; 0 leaves "
        "them out (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark."""
    return run_on_gpu("training_step", arguments, measure, show)


def case_of(arguments: argparse.Namespace) -> Case:
    """Return the shape that the command line names."""
    return Case(
        batch=arguments.batch,
        heads=arguments.heads,
        seqlen=arguments.seqlen,
        head_dim=arguments.head_dim,
        head_dim_v=arguments.head_dim,
        dtype="float16",
        causal=True,
        window=0,
    )


def measure(arguments: argparse.Namespace) -> Result:
    """Measure every row on the first GPU."""
    cupy = load_cupy()

    device = cuda_device(0)
    timer = event_timer(arguments.calls, arguments.warm_up)
    kernels = [Kernels("flash", False, timer), Kernels("flash", True, timer)]
    if arguments.naive_calls:
        naive_timer = event_timer(arguments.naive_calls, _NAIVE_WARM_UP)
        kernels.append(Kernels("naive", False, naive_timer))
    with cupy.cuda.Device(device.ordinal):
        rows = time_steps(case_of(arguments), kernels, cupy, memory_taken)
    return {
        "command": "training_step",
        **measured_on(device),
        "calls": arguments.calls,
        "warm_up": arguments.warm_up,
        "naive_calls": arguments.naive_calls,
        "naive_warm_up": _NAIVE_WARM_UP,
        "rows": rows,
    }


def time_steps(
    case: Case, kernels: list[Kernels], xp: Any, taken: Callable[[Call], int]
) -> list[dict[str, Any]]:
    """Time the step with each of the kernels.

    Parameters
    ----------
    case : Case
        Causal, with D = Dv.
    kernels : list of Kernels
    xp : module
        The array library: CuPy.
    taken : callable
        See `memory_taken`.

    Returns
    -------
    list of dict
        A row for each: ``seconds`` (the median), ``fastest_s``, ``tflops``, ``speedup`` over the
        naive kernels (None without them), ``scratch_bytes`` and ``goal_bytes`` (None but for the
        default shape).
    """
    arrays = Pool(items(case), case.dtype, xp).arrays(case)
    dq, dk, dv = map(xp.empty_like, arrays[:3])
    grads = AttentionGrads(dq, dk, dv)
    flops = case.flops(PLAIN) + case.backward_flops(PLAIN)
    rows: list[dict[str, Any]] = []
    with progress("timing", len(kernels)) as done:
        for implementation, deterministic, timer in kernels:
            step = training_step(arrays, grads, implementation, deterministic)
            figures = figures_of(timer(step), flops)
            rows.append(
                {
                    **asdict(case),
                    "implementation": implementation,
                    "deterministic": deterministic,
                    **figures,
                    "scratch_bytes": taken(step),
                    "goal_bytes": GOAL_BYTES if _is_phi_2(case) else None,
                }
            )
            done()
    naive = next((row["seconds"] for row in rows if row["implementation"] == "naive"), None)
    for row in rows:
        row["speedup"] = None if naive is None else naive / row["seconds"]
    return rows


def training_step(
    arrays: Arrays, grads: AttentionGrads, implementation: str, deterministic: bool
) -> Call:
    """Return the step: results and gradients into given arrays, scratch from the memory pool."""
    q, k, v, dout, out, lse = arrays
    options: dict[str, Any] = {"causal": True, "implementation": implementation}

    def step() -> AttentionGrads:
        cupyattn.attention(q, k, v, return_lse=True, out=(out, lse), **options)
        return cupyattn.attention_backward(
            dout, q, k, v, out, lse, deterministic=deterministic, grads=grads, **options
        )

    return step


def memory_taken(call: Call) -> int:
    """Return how many bytes of the device CuPy's memory pool takes for a call.

    The pool is a new one: it holds no block from before, and gives none back before the call ends,
    so that what it holds then is the most that the call had at a time, in the pool's blocks.
    """
    cupy = load_cupy()

    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        call()
        cupy.cuda.get_current_stream().synchronize()
    return int(pool.total_bytes())


def _is_phi_2(case: Case) -> bool:
    return all(getattr(case, name) == value for name, value in PHI_2.items())


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    rows = result["rows"]
    show_machine("Attention's training step", result, terminal)
    terminal.title(case_title(rows[0]))
    terminal.table(
        ("ran", "median", "TFLOP/s", "beside naive", "memory beside in- and outputs", "goal"),
        list(map(_cells, rows)),
    )
    naive = f", naive {result['naive_calls']} after {result['naive_warm_up']}"
    terminal.text(
        f"  Median of {result['calls']} steps after {result['warm_up']}"
        f"{naive if result['naive_calls'] else ''}; forward with lse, and backward.\n"
        "  TFLOP/s of 3.5 forwards of half the scores."
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    speedup, goal = row["speedup"], row["goal_bytes"]
    return (
        contender_name(row),
        f"{row['seconds'] * 1e3:.3f} ms",
        f"{row['tflops']:.1f}",
        "" if speedup is None or row["implementation"] == "naive" else f"{speedup:.1f} x faster",
        f"{row['scratch_bytes'] / 1e6:.1f} MB",
        "" if goal is None else f"under {goal / 1e6:.0f} MB",
    )
