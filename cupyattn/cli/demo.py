"""``python -m cupyattn demo``: attention on this device, compared with the reference.

It runs kernels on a GPU, otherwise kernels on the emulator, otherwise NumPy, and prints the error
next to its bound.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import cupyattn
from cupyattn import reference
from cupyattn.cli.arguments import Commands, add_json_option, integer
from cupyattn.cli.configurations import (
    attention_launch,
    compiled_kernel,
    configuration,
    spill_bytes,
)
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.emulator import Checks, Report
from cupyattn.ops.attention.kernels.teaching.forward import TILED_TILE_K
from cupyattn.ops.attention.kernels.tensor_core.forward import flash_row
from cupyattn.ops.attention.options import IMPLEMENTATIONS, AttentionOptions
from cupyattn.runtime.annotations import Json, Undescribed
from cupyattn.runtime.arch import TURING, Arch, emulated_arch, tensor_cores_override
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.compile import CompilationError, nvrtc_version
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device.cuda import CudaDevice, cuda_device, device_count
from cupyattn.runtime.device.recorder import Launch
from cupyattn.runtime.progress import stages
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.tables import MAX_HEAD_DIM


@dataclass(frozen=True)
class DemoProblem:
    """The demo's problem: causal self-attention of standard normal q, k and v."""

    batch: int = 2
    seqlen: int = 2048
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float16"
    seed: int = 0

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Make q, k and v."""
        import ml_dtypes  # noqa: F401 (gives NumPy the name bfloat16)

        rng = np.random.default_rng(self.seed)
        q, k, v = (
            rng.standard_normal((self.batch, self.seqlen, heads, self.head_dim), dtype=np.float32)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        return q.astype(self.dtype), k.astype(self.dtype), v.astype(self.dtype)


@dataclass(frozen=True)
class Expected:
    """The reference's results in float64 and how far a right kernel may be from them."""

    out: np.ndarray
    lse: np.ndarray
    out_bound: np.ndarray
    lse_bound: np.ndarray

    @classmethod
    def of(cls, arch: Arch, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Expected:
        """Compute them for causal attention by the kernels of an architecture."""
        tile_k = min(TILED_TILE_K, flash_row(arch.number, q.shape[-1], v.shape[-1]).tile_k)
        bounds = reference.attention_bound(q, k, v, dtype=q.dtype, tile_k=tile_k, causal=True)
        return cls(*reference.attention(q, k, v, causal=True), *bounds)

    def errors(self, out: np.ndarray, lse: np.ndarray) -> Json:
        """Compare a result with them."""
        return {
            "out": compare(out, self.out, self.out_bound),
            "lse": compare(lse, self.lse, self.lse_bound),
        }


def compare(actual: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> Json:
    """Find the largest error, the bound at its place, and the largest error / bound.

    Returns
    -------
    dict
        ``max_error``, ``bound`` and ``max_ratio``, None where they are not finite, and
        ``within_bound``.

    Examples
    --------
    >>> compare(np.array([1.0, 2.5]), np.array([1.25, 2.5]), np.array([0.5, 0.1]))
    {'max_error': 0.25, 'bound': 0.5, 'max_ratio': 0.5, 'within_bound': True}
    """
    with np.errstate(invalid="ignore"):
        errors = np.where(actual == exact, 0.0, np.abs(actual.astype(np.float64) - exact))
    worst = np.unravel_index(np.argmax(np.where(np.isnan(errors), np.inf, errors)), errors.shape)
    ratio = reference.error_ratio(actual, exact, bound)
    return {
        "max_error": _finite(errors[worst]),
        "bound": _finite(bound[worst]),
        "max_ratio": _finite(ratio),
        "within_bound": ratio <= 1.0,
    }


def _finite(number: Any) -> float | None:
    return float(number) if np.isfinite(number) else None


Say = Callable[[str], None]
"""A function that shows what is being done."""

TIMED_CALLS = 20
"""Calls on a GPU, of which the median is shown."""

# int8 takes other keys. naive is the textbook: on the emulator it is slow and no more.
_ON_GPU = tuple(name for name in IMPLEMENTATIONS if name != "int8")
_ON_EMULATOR = tuple(name for name in _ON_GPU if name != "naive")


def on_gpu(problem: DemoProblem, say: Say) -> Result:
    """Run each kernel on the first GPU."""
    cupy = load_cupy()

    device = cuda_device(0)
    host = problem.arrays()
    say("computing the float64 reference in NumPy")
    expected = Expected.of(device.arch, *host)
    runs = []
    with cupy.cuda.Device(device.ordinal):
        q, k, v = map(cupy.asarray, host)
        launches = kernels_of(device.arch, q, k, v, _ON_GPU, tensor_cores=device.tensor_cores)
        for implementation, launch in launches.items():

            def call(implementation: str = implementation) -> tuple[Array, Array]:
                return _attention(q, k, v, implementation)

            say(f"compiling {_entry(launch)}, unless it is in the cache, and running it")
            began = time.perf_counter()
            results = [cupy.asnumpy(result) for result in call()]
            first_call_s = time.perf_counter() - began
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


def without_gpu(problem: DemoProblem, say: Say) -> Result:
    """Run the kernels on the emulator, or NumPy if there is nothing to compile them with."""
    tensor_cores, arch = tensor_cores_override() is not False, emulated_arch()
    launches = kernels_of(arch, *problem.arrays(), _ON_EMULATOR, tensor_cores=tensor_cores)
    described = {}
    try:
        nvrtc_version()  # raises RuntimeError without a compiler
        for name, launch in launches.items():
            say(f"compiling {_entry(launch)} for {arch.real}, unless it is in the cache")
            described[name] = _describe(launch, arch)
    except CompilationError:
        raise
    except RuntimeError as failure:
        return _on_numpy(problem, str(failure), say)
    return _on_emulator(problem, described, say)


def kernels_of(
    arch: Arch,
    q: Array,
    k: Array,
    v: Array,
    implementations: tuple[str, ...],
    *,
    tensor_cores: bool,
) -> dict[str, Launch]:
    """Return the launches of each implementation."""
    launches = {}
    for implementation in implementations:
        options = AttentionOptions(causal=True, implementation=implementation)
        try:
            launches[implementation] = attention_launch(
                arch, q, k, v, options, tensor_cores=tensor_cores
            )
        except NotImplementedError:
            continue
    return launches


def _entry(launch: Launch) -> str:
    return launch.specialisation.spec.entry


def _on_emulator(problem: DemoProblem, launches: dict[str, Json], say: Say) -> Result:
    q, k, v = problem.arrays()
    say("computing the float64 reference in NumPy")
    expected = Expected.of(emulated_arch(), q, k, v)
    checks = Checks.all()
    runs = []
    for implementation, launch in launches.items():
        report = Report()
        say(f"running {launch['kernel']} on the emulator, with every check")
        began = time.perf_counter()
        with cupyattn.backend("emulator", checks=checks, report=report):
            results = _attention(q, k, v, implementation)
        first_call_s = time.perf_counter() - began
        say(f"timing a second call of {launch['kernel']} on the emulator")
        with cupyattn.backend("emulator", checks=checks):
            began = time.perf_counter()
            _attention(q, k, v, implementation)
            seconds = time.perf_counter() - began
        runs.append(
            {
                "implementation": implementation,
                "launch": launch,
                "first_call_s": first_call_s,
                "seconds": seconds,
                "errors": expected.errors(*results),
                "warp_instructions": sum(report.instruction_mix.values()),
                "bank_conflict_ways": report.bank_conflict_ways,
                "sector_efficiency": report.sector_efficiency,
            }
        )
    on = [name for name, value in asdict(checks).items() if value is True]
    return _result(problem, "emulator", runs, checks=on)


def _on_numpy(problem: DemoProblem, why: str, say: Say) -> Result:
    q, k, v = problem.arrays()
    say("running attention in NumPy")
    began = time.perf_counter()
    with cupyattn.backend("reference"):
        results = _attention(q, k, v, "tiled")  # whichever: it is the same there
    seconds = time.perf_counter() - began
    run = {
        "implementation": "NumPy",
        "launch": None,
        "first_call_s": seconds,
        "seconds": seconds,
        "errors": Expected.of(TURING, q, k, v).errors(*results),
    }
    return _result(problem, "numpy", [run], not_compiled_because=why)


def _attention(q: Array, k: Array, v: Array, implementation: str) -> Undescribed:
    return cupyattn.attention(q, k, v, causal=True, implementation=implementation, return_lse=True)


def _result(problem: DemoProblem, place: str, runs: list[Json], **more: object) -> Result:
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


def _describe(launch: Launch, arch: Arch) -> Json:
    return {"grid": list(launch.grid), **compiled_kernel(launch.specialisation, arch)}


def _require_loaded(device: CudaDevice, launch: Launch) -> None:
    """Raise unless the reported launch was the one that ran."""
    if launch.specialisation not in device.loaded:
        raise AssertionError(f"{launch.specialisation.label} was recorded but did not run")


def _median_gpu_seconds(call: Callable[[], object]) -> float:
    """Time calls by CUDA events on the current stream."""
    cupy = load_cupy()

    seconds = []
    for _ in range(TIMED_CALLS):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        seconds.append(cupy.cuda.get_elapsed_time(start, stop) / 1e3)
    return statistics.median(seconds)


GPU_SEQLEN = 2048
EMULATED_SEQLEN = 128  # about half a second for the tiled kernel

_ERROR_COLUMNS = ("max_error", "bound", "max_ratio")


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    default = DemoProblem()
    parser = commands.add_parser(
        "demo",
        help="run the attention kernels on this computer's GPU, or emulated on its CPU",
        description="Run causal attention by the library's kernels: on the GPU, or on a computer "
        "without one by the emulator, which executes the PTX for a Turing GPU on the CPU, under "
        "checks; without a compiler, by NumPy. Show each kernel and its launch configuration, the "
        "time, and the error against the float64 reference with its bound.",
        epilog="Exit code 1 if an error is outside its bound, or a check finds a fault.",
    )
    parser.add_argument(
        "--seqlen",
        type=integer(1),
        metavar="S",
        help=f"queries and keys per sequence, of which there are {default.batch} (default: "
        f"{GPU_SEQLEN} on a GPU, {EMULATED_SEQLEN} without); reference and emulator take S * S "
        "time",
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
        choices=tuple(STORAGE),
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
    try:
        has_gpu = device_count() > 0
        problem = DemoProblem(
            seqlen=arguments.seqlen or (GPU_SEQLEN if has_gpu else EMULATED_SEQLEN),
            head_dim=arguments.head_dim,
            dtype=arguments.dtype,
            seed=arguments.seed,
        )
        with stages(shown=not arguments.json) as say:
            result = (on_gpu if has_gpu else without_gpu)(problem, say)
    # No compiler, a GPU that is too old, a CUPYATTN_ARCH that is wrong, a fault in a kernel.
    except (RuntimeError, ValueError) as failure:
        fail("demo", failure, as_json=arguments.json)
        return 1
    emit(result, show, as_json=arguments.json)
    return 0 if result["within_bound"] else 1


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    p = result["problem"]
    terminal.title(
        f"Causal attention of {p['batch']} x {p['seqlen']} tokens, {p['heads']} query heads on "
        f"{p['kv_heads']} key-value heads, head dim {p['head_dim']}, {p['dtype']}"
    )
    {"gpu": _show_gpu, "emulator": _show_emulator, "numpy": _show_numpy}[result["ran_on"]](
        result, terminal
    )
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


def _show_gpu(result: Result, terminal: Terminal) -> None:
    runs = result["runs"]
    terminal.text(f"  ran on {result['device']}, compute capability {result['capability'] / 10}")
    if runs[0]["launch"]["arch"] != f"sm_{result['capability']}":
        arch = runs[0]["launch"]["arch"]
        terminal.text(
            f"  CUPYATTN_ARCH: the kernels are PTX for {arch}, translated by the driver; the "
            f"resources below are those of machine code for {arch} itself"
        )
    _show_launches([run["launch"] for run in runs], terminal)
    terminal.title("Time of a call")
    terminal.table(
        ("ran", f"median of {TIMED_CALLS}", "the first, which compiles or loads the kernel"),
        [
            (
                run["implementation"],
                f"{run['seconds'] * 1e3:.3f} ms",
                f"{run['first_call_s'] * 1e3:.1f} ms",
            )
            for run in runs
        ],
    )


def _show_emulator(result: Result, terminal: Terminal) -> None:
    runs = result["runs"]
    arch = runs[0]["launch"]["arch"]
    terminal.text(
        f"  no GPU here: EMULATED ON THE CPU, the kernels' PTX for {arch}, run by cupyattn.emulator"
    )
    terminal.text(f"  The resources below are those of machine code for {arch}, not run here.")
    _show_launches([run["launch"] for run in runs], terminal)
    terminal.title("On the emulator")
    terminal.table(
        ("ran", "time", "first call", "warp instructions", "bank conflicts", "sectors needed"),
        [
            (
                run["implementation"],
                f"{run['seconds'] * 1e3:.0f} ms",
                f"{run['first_call_s'] * 1e3:.0f} ms",
                run["warp_instructions"],
                f"{run['bank_conflict_ways']:.2f} ways",
                f"{run['sector_efficiency']:.0%}",
            )
            for run in runs
        ],
    )
    terminal.text("  The time is the CPU's with all checks, not that of a GPU.")
    terminal.verdict(True, f"  no check found a fault: {', '.join(result['checks'])}")
    terminal.text("  python -m cupyattn profile attention shows it per line of the source.")


_ADDED = {
    "cupyattn[cuda12]": "for an NVIDIA GPU: CuPy and the compiler. The same calls run on the GPU "
    "when they are given CuPy arrays. For CUDA 13 it is cupyattn[cuda13].",
    "cupyattn[emulator]": "without a GPU, on Linux or Windows: the compiler alone. The kernels run "
    "on the CPU, slowly and with every check, to test, learn and debug.",
}
"""The extras of the package, and what each adds."""


def _show_numpy(result: Result, terminal: Terminal) -> None:
    run = result["runs"][0]
    terminal.text(f"  no GPU here: ran in NumPy, {run['seconds'] * 1e3:.0f} ms")
    terminal.text(
        f"  NumPy computes in float32 and rounds once to {result['problem']['dtype']}; "
        "the errors are compared with the bounds for kernels."
    )
    why = result["not_compiled_because"]
    terminal.text(f"  No kernel ran: {why.rpartition('; ')[0] or why}.")
    terminal.title("To run the kernels themselves, install one of these")
    for package, what in _ADDED.items():
        terminal.text(f"  pip install '{package}'\n    {what}")


def _show_launches(launches: list[Json], terminal: Terminal) -> None:
    for launch in launches:
        terminal.title(f"{launch['kernel']} for {launch['arch']}")
        terminal.facts(
            {
                "specialisation": configuration(launch["macros"]),
                "launch": f"{launch['grid'][0]} CTAs of {launch['threads']} threads",
                "registers": f"{launch['registers']} a thread",
                "spills": f"{spill_bytes(launch)} bytes a thread",
                "shared memory": f"{launch['shared_bytes']} bytes a CTA",
                "resident": f"{launch['ctas_per_sm']} CTAs on an SM",
            }
        )


def _text(number: float | None) -> str:
    return "not finite" if number is None else f"{number:.2e}"
