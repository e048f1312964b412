"""The demo's attention on what is here: kernels on a GPU, kernels on the emulator, or NumPy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import cupyattn
from cupyattn.cli.accuracy import Expected, Problem
from cupyattn.cli.compiled_kernel import compiled_kernel
from cupyattn.cli.recorder import Launch, attention_launch
from cupyattn.cli.terminal import Result
from cupyattn.emulator import Checks, Report
from cupyattn.ops.attention.options import IMPLEMENTATIONS, AttentionOptions
from cupyattn.runtime.arch import TURING, Arch
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.compile import CompilationError
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device.cuda import CudaDevice, cuda_device
from cupyattn.runtime.target import tensor_cores_override

TIMED_CALLS = 20
"""Calls on a GPU, of which the median is shown."""

# naive is the textbook: on the emulator it is slow and no more
_ON_EMULATOR = tuple(name for name in IMPLEMENTATIONS if name != "naive")


def on_gpu(problem: Problem) -> Result:
    """Run each kernel on the first GPU."""
    cupy = load_cupy()

    device = cuda_device(0)
    host = problem.arrays()
    expected = Expected.of(device.arch, *host)
    runs = []
    with cupy.cuda.Device(device.ordinal):
        q, k, v = map(cupy.asarray, host)
        launches = kernels_of(
            device.arch, q, k, v, IMPLEMENTATIONS, tensor_cores=device.tensor_cores
        )
        for implementation, launch in launches.items():

            def call(implementation: str = implementation) -> Any:
                return _attention(q, k, v, implementation)

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


def without_gpu(problem: Problem) -> Result:
    """Run the kernels on the emulator, or NumPy if there is nothing to compile them with."""
    tensor_cores = tensor_cores_override() is not False
    launches = kernels_of(TURING, *problem.arrays(), _ON_EMULATOR, tensor_cores=tensor_cores)
    try:
        described = {name: _describe(launch, TURING) for name, launch in launches.items()}
    except CompilationError:
        raise
    except RuntimeError as failure:
        return _on_numpy(problem, str(failure))
    return _on_emulator(problem, described)


def kernels_of(
    arch: Arch,
    q: Array,
    k: Array,
    v: Array,
    implementations: tuple[str, ...],
    *,
    tensor_cores: bool,
) -> dict[str, Launch]:
    """Return what each of the implementations would launch; those not written yet are left out."""
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


def _on_emulator(problem: Problem, launches: dict[str, dict[str, Any]]) -> Result:
    q, k, v = problem.arrays()
    expected = Expected.of(TURING, q, k, v)
    checks = Checks.all()
    runs = []
    for implementation, launch in launches.items():
        report = Report()
        began = time.perf_counter()
        with cupyattn.backend("emulator", checks=checks, report=report):
            results = _attention(q, k, v, implementation)
        first_call_s = time.perf_counter() - began
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


def _on_numpy(problem: Problem, why: str) -> Result:
    q, k, v = problem.arrays()
    began = time.perf_counter()
    with cupyattn.backend("reference"):
        results = _attention(q, k, v, "tiled")  # whichever: it is the same there
    seconds = time.perf_counter() - began
    run = {
        "implementation": "NumPy reference",
        "launch": None,
        "first_call_s": seconds,
        "seconds": seconds,
        "errors": Expected.of(TURING, q, k, v).errors(*results),
    }
    return _result(problem, "numpy", [run], not_compiled_because=why)


def _attention(q: Array, k: Array, v: Array, implementation: str) -> Any:
    return cupyattn.attention(q, k, v, causal=True, implementation=implementation, return_lse=True)


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
