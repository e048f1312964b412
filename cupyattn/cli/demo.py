"""``python -m cupyattn demo``: attention on what is here, beside the reference and its bound."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import cupyattn
from cupyattn.cli.accuracy import Expected, Problem
from cupyattn.cli.arguments import add_json_option, integer
from cupyattn.cli.compiled_kernel import compiled_kernel, macros_text, spill_bytes
from cupyattn.cli.recorder import Launch, attention_launch
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.functional.device_info import device_count
from cupyattn.kernels.arch import TURING, Arch
from cupyattn.kernels.configs.attention import MAX_HEAD_DIM
from cupyattn.kernels.cuda_device import CudaDevice, cuda_device
from cupyattn.ops.attention_problem import AttentionOptions

GPU_IMPLEMENTATIONS = ("tiled", "naive")
_TIMED_CALLS = 20


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    default = Problem()
    parser = commands.add_parser(
        "demo",
        help="run attention on this machine's GPU, or its CPU, and check it against the reference",
        description="Run causal attention on this machine: on a GPU by each kernel, on a machine "
        "without one by NumPy. Show the kernel and its launch configuration, the time, and the "
        "error against the float64 reference beside its bound.",
        epilog="Exit code 1 if an error is outside its bound.",
    )
    parser.add_argument(
        "--seqlen",
        type=integer(1),
        default=default.seqlen,
        metavar="S",
        help=f"queries and keys per sequence, of which there are {default.batch} "
        "(default: %(default)s); the reference takes S * S time",
    )
    parser.add_argument(
        "--head-dim",
        type=integer(1, MAX_HEAD_DIM),
        default=default.head_dim,
        metavar="D",
        help=f"head dim of q, k and v, 1 to {MAX_HEAD_DIM} (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float16", "float32"),
        default=default.dtype,
        help="dtype of q, k and v (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=integer(0),
        default=default.seed,
        metavar="N",
        help="seed of the random q, k and v (default: %(default)s)",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    problem = Problem(
        seqlen=arguments.seqlen,
        head_dim=arguments.head_dim,
        dtype=arguments.dtype,
        seed=arguments.seed,
    )
    try:
        result = on_gpu(problem) if device_count() else on_cpu(problem)
    # No compiler, a GPU that is too old, a CUPYATTN_ARCH that is wrong.
    except (RuntimeError, ValueError) as failure:
        fail("demo", failure, as_json=arguments.json)
        return 1
    emit(result, show, as_json=arguments.json)
    return 0 if result["within_bound"] else 1


def on_gpu(problem: Problem) -> Result:
    """Run each kernel on the first GPU."""
    import cupy

    device = cuda_device(0)
    host = problem.arrays()
    expected = Expected.of(*host)
    runs = []
    with cupy.cuda.Device(device.ordinal):
        q, k, v = map(cupy.asarray, host)
        for implementation in GPU_IMPLEMENTATIONS:

            def call(implementation: str = implementation) -> Any:
                return cupyattn.attention(
                    q, k, v, causal=True, implementation=implementation, return_lse=True
                )

            began = time.perf_counter()
            results = [cupy.asnumpy(result) for result in call()]
            first_call_s = time.perf_counter() - began
            launch = attention_launch(device.arch, q, k, v, _options(implementation))
            _require_loaded(device, launch)
            runs.append(
                {
                    "implementation": implementation,
                    "launch": _describe(launch, device.arch),
                    "first_call_s": first_call_s,
                    "seconds": _median_gpu_seconds(call),
                    "errors": expected.errors(*results),
                }
            )
    return _result(problem, "gpu", runs, device=device.name, capability=device.capability)


def on_cpu(problem: Problem) -> Result:
    """Run NumPy arrays, and show what a Turing GPU would run."""
    q, k, v = problem.arrays()
    began = time.perf_counter()
    results = cupyattn.attention(q, k, v, causal=True, return_lse=True)
    seconds = time.perf_counter() - began
    run = {
        "implementation": "NumPy reference",
        "launch": None,
        "first_call_s": seconds,
        "seconds": seconds,
        "errors": Expected.of(q, k, v).errors(*results),
    }
    not_run, why = [], None
    try:
        for implementation in GPU_IMPLEMENTATIONS:
            launch = attention_launch(TURING, q, k, v, _options(implementation))
            not_run.append(_describe(launch, TURING))
    except RuntimeError as failure:
        why = str(failure)
    return _result(problem, "cpu", [run], compiled_but_not_run=not_run, not_compiled_because=why)


def _options(implementation: str) -> AttentionOptions:
    return AttentionOptions(causal=True, implementation=implementation)


def _result(problem: Problem, place: str, runs: list[dict[str, Any]], **more: Any) -> Result:
    within = all(error["within_bound"] for run in runs for error in run["errors"].values())
    return {
        "command": "demo",
        "version": cupyattn.__version__,
        "ran_on": place,
        "problem": asdict(problem),
        "runs": runs,
        "within_bound": within,
        **more,
    }


def _describe(launch: Launch, arch: Arch) -> dict[str, Any]:
    return {"grid": list(launch.grid), **compiled_kernel(launch.specialisation, arch)}


def _require_loaded(device: CudaDevice, launch: Launch) -> None:
    """Make sure that what is reported is what ran."""
    if launch.specialisation not in device.loaded:
        raise AssertionError(f"{launch.specialisation.label} was recorded but did not run")


def _median_gpu_seconds(call: Callable[[], Any]) -> float:
    """Time calls by CUDA events on the current stream."""
    import cupy

    seconds = []
    for _ in range(_TIMED_CALLS):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        seconds.append(cupy.cuda.get_elapsed_time(start, stop) / 1e3)
    return statistics.median(seconds)


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    p = result["problem"]
    terminal.title(
        f"Causal attention of {p['batch']} x {p['seqlen']} tokens, {p['heads']} query heads on "
        f"{p['kv_heads']} key-value heads, head dim {p['head_dim']}, {p['dtype']}"
    )
    if result["ran_on"] == "gpu":
        _show_gpu(result, terminal)
    else:
        _show_cpu(result, terminal)
    rows = [
        (run["implementation"], name, *(_text(error[key]) for key in _ERROR_COLUMNS))
        for run in result["runs"]
        for name, error in run["errors"].items()
    ]
    terminal.title("Error against the float64 reference")
    terminal.table(("ran", "result", "largest error", "its bound", "largest error / bound"), rows)
    if result["within_bound"]:
        terminal.verdict(True, "  every element is within its bound")
    else:
        terminal.verdict(False, "  OUTSIDE THE BOUND: this result is wrong")


_ERROR_COLUMNS = ("max_error", "bound", "max_ratio")


def _show_gpu(result: Result, terminal: Terminal) -> None:
    runs = result["runs"]
    terminal.text(f"  ran on {result['device']}, compute capability {result['capability'] / 10}")
    if runs[0]["launch"]["arch"] != f"sm_{result['capability']}":
        arch = runs[0]["launch"]["arch"]
        terminal.text(f"  CUPYATTN_ARCH: the kernels are PTX for {arch}, translated by the driver;")
        terminal.text(f"  the resources below are those of machine code for {arch} itself")
    _show_launches([run["launch"] for run in runs], terminal)
    terminal.title("Time of a call")
    terminal.table(
        ("ran", f"median of {_TIMED_CALLS}", "the first, which compiles or loads the kernel"),
        [
            (
                run["implementation"],
                f"{run['seconds'] * 1e3:.3f} ms",
                f"{run['first_call_s'] * 1e3:.1f} ms",
            )
            for run in runs
        ],
    )


def _show_cpu(result: Result, terminal: Terminal) -> None:
    run = result["runs"][0]
    terminal.text(f"  no GPU here: ran in NumPy, {run['seconds'] * 1e3:.0f} ms")
    terminal.text(
        f"  That path is the float64 reference, rounded once to {result['problem']['dtype']}: its\n"
        "  error is that rounding alone, and the bound is the one that a kernel has to keep."
    )
    if result["compiled_but_not_run"]:
        terminal.text("  What follows is what a Turing GPU would run: compiled here, not run.")
        _show_launches(result["compiled_but_not_run"], terminal)
    else:
        terminal.text(f"  no kernel was compiled: {result['not_compiled_because']}")


def _show_launches(launches: list[dict[str, Any]], terminal: Terminal) -> None:
    for launch in launches:
        terminal.title(f"{launch['kernel']} for {launch['arch']}")
        terminal.facts(
            {
                "specialisation": macros_text(launch["macros"]),
                "launch": f"{launch['grid'][0]} CTAs of {launch['threads']} threads",
                "registers": f"{launch['registers']} a thread",
                "spills": f"{spill_bytes(launch)} bytes a thread",
                "shared memory": f"{launch['shared_bytes']} bytes a CTA",
                "resident": f"{launch['ctas_per_sm']} CTAs on an SM",
            }
        )


def _text(number: float | None) -> str:
    return "not finite" if number is None else f"{number:.2e}"
