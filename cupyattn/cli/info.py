"""``python -m cupyattn info``: devices, compiler, kernels, cache."""

from __future__ import annotations

import argparse
from pathlib import Path

import cupyattn
from cupyattn.cli.arguments import Commands, add_json_option
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.runtime.annotations import Json

_ABSENT = "not found"


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "info",
        help="GPUs, CUDA, CuPy, NVRTC and compiled kernels on this computer",
        description="Show the GPUs, the versions of CUDA, CuPy, NVRTC, NumPy and Python, the "
        "library's kernels and how many specialisations of each are in the cache.",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    try:
        result = describe()
    except (RuntimeError, ValueError) as failure:  # a GPU too old, a CUPYATTN_ARCH that is wrong
        fail("info", failure, as_json=arguments.json)
        return 1
    emit(result, show, as_json=arguments.json)
    return 0


def describe() -> Result:
    """Return `cupyattn.device_info` with the cached specialisations of each kernel counted."""
    info = cupyattn.device_info()
    folder = info["cache"]["folder"]
    files = [] if folder is None else [*Path(folder).iterdir()]
    cached = [path.name.rpartition("-")[0] for path in files if path.suffix in CODE]
    info["kernels"] = {entry: cached.count(entry) for entry in info["kernels"]}
    return {"command": "info", "version": cupyattn.__version__, **info}


CODE = (".cubin", ".ptx")


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    terminal.title(f"cupyattn {result['version']}")
    if result["devices"]:
        terminal.table(
            ("device", "compute capability", "memory", "kernels compiled for"),
            [_device_row(device) for device in result["devices"]],
        )
        for device in result["devices"]:
            if not device["arch"]:
                terminal.text(f"  {device['name']}: {device['unusable_because']}")
            if device["tensor_cores"] is not None:
                terminal.text(f"  {device['name']}: {_float16(device)}")
                terminal.text(f"  {device['name']}: {_tuned(device, result['uses_tuned'])}")
    else:
        terminal.text("  no GPU: NumPy arrays run on the CPU")
    terminal.facts(
        {
            "CUDA driver": _cuda_version(result["cuda_driver"]),
            "CUDA runtime": _cuda_version(result["cuda_runtime"]),
            "CuPy": result["cupy"] or _ABSENT,
            "NVRTC": result["nvrtc"] or _ABSENT,
            "NumPy": result["numpy"],
            "Python": result["python"],
            "CUPYATTN_ARCH": result["arch_override"] or "not set",
            "CUPYATTN_TENSOR_CORES": result["tensor_cores_override"] or "not set",
            "CUPYATTN_TUNED": "1" if result["uses_tuned"] else "not set",
        }
    )
    cache = result["cache"]
    terminal.title("Kernels")
    terminal.table(("kernel", "in the cache"), list(result["kernels"].items()))
    if cache["folder"] is None:
        terminal.text("  cache: none, compiled kernels stay in memory")
        return
    terminal.text(
        f"  cache: {cache['folder']}, {cache['files']} files, {cache['bytes'] / 2**20:.1f} MiB"
    )


def _device_row(device: Json) -> tuple[str, ...]:
    memory = f"{device['memory_bytes'] / 2**30:.1f} GiB"
    target = f"sm_{device['arch']}" if device["arch"] else "none"
    return device["name"], device["compute_capability"], memory, target


def _float16(device: Json) -> str:
    """Describe what float16 runs on, and why."""
    where = "on tensor cores" if device["tensor_cores"] else "in float32 arithmetic"
    native = "; bfloat16 too, by kernels for sm_80 and later" if device["native"] else ""
    return f"float16 runs {where} ({device['tensor_cores_because']}){native}"


def _tuned(device: Json, used: bool) -> str:
    """Describe what was tuned for a device, and whether calls use it."""
    if device["tuned"] is None:
        return "no configuration was tuned (python -m cupyattn tune does it)"
    so = "calls use them" if used else "not used: CUPYATTN_TUNED=1 makes calls use them"
    return f"{device['tuned']} configurations were chosen by timing; {so}"


def _cuda_version(number: int | None) -> str:
    """Write 12090 as 12.9."""
    return _ABSENT if number is None else f"{number // 1000}.{number % 1000 // 10}"
