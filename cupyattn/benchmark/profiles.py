"""``python -m cupyattn.benchmark profiles``: what Nsight Compute measured of every kernel.

With ``--take`` ncu runs this module, which makes the benchmarks' own calls, and profiles the first
launch of each kernel. ``python -m cupyattn.benchmark.profiles FILE`` is that process: it writes to
FILE what the calls ran on.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyattn.benchmark import attention, decode, layers, linear, varlen
from cupyattn.benchmark.cases import Harness
from cupyattn.benchmark.command import Benchmark, run_on_gpu
from cupyattn.benchmark.machine import measured_on
from cupyattn.benchmark.results import require_writable, write_json
from cupyattn.benchmark.table import show_machine
from cupyattn.benchmark.timer import Round
from cupyattn.cli.table_rows import kernel_name
from cupyattn.cli.terminal import Cell, Result, Terminal, emit, fail
from cupyattn.cupy_library import load_cupy
from cupyattn.errors import error, shown
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.device.cuda import cuda_device
from cupyattn.kernels.registry import KERNELS
from cupyattn.kernels.target import ARCH_VARIABLE, arch_override

RECORD = Path(__file__).with_name("h200.json")
"""Profiles of the Turing code on an H200."""
BUSY = 0.6
"""The share of its peak from which a unit binds, as Nsight Compute sees it too."""
_DENSE = "--batch 4 --seqlen 2048 --heads 16 --head-dim 64"
_PACKED = "--tokens 8192 --length 512 --heads 16 --kv-heads 16"
_READ = "--batch 1 --seqlen 1024 --heads 8 --head-dim 64 --dtype float16 --implementation"
CALLS: tuple[tuple[Benchmark, str], ...] = (
    (attention.FORWARD, f"{_DENSE} --implementation flash --options rotary"),
    (attention.FORWARD, "--batch 1 --seqlen 16384 --heads 8 --head-dim 128 --queries 256 "
     "--implementation flash --options none"),
    (attention.FORWARD, f"{_READ} tiled naive --options none"),
    (attention.FORWARD, "--block-mask --seqlen 8192 --head-dim 64"),
    (attention.BACKWARD, f"{_DENSE} --implementation flash --options bias,sinks"),
    (attention.BACKWARD, f"{_DENSE} --implementation flash --options none --dtype bfloat16"),
    (attention.BACKWARD, "--batch 2 --seqlen 2048 --heads 8 --head-dim 160 --options none "
     "--implementation flash --dtype float16"),
    (attention.BACKWARD, "--batch 16 --seqlen 256 --heads 4 --head-dim 64 --options bias "
     "--implementation flash --dtype float16"),
    (attention.BACKWARD, f"{_READ} naive --options none"),
    (attention.BACKWARD, "--batch 2 --seqlen 1024 --heads 8 --head-dim 64 --dtype float32 "
     "--implementation flash --options bias,sinks"),
    (varlen.BENCHMARK, f"{_PACKED} --options plain rotary bias sinks"),
    (varlen.BENCHMARK, f"{_PACKED} --head-dim 160"),
    (varlen.BENCHMARK, f"{_PACKED} --options plain sinks --deterministic"),
    (varlen.BENCHMARK, f"{_PACKED} --options plain sinks --dtype float32"),
    (varlen.BENCHMARK, f"{_PACKED} --options sinks --dtype float32 --deterministic"),
    (decode.BENCHMARK, "--batch 8 --context 8192 --block-size 16 --layers 1"),
    (decode.BENCHMARK, "--cache-operations --tokens 8192"),
    (decode.BENCHMARK, "--prefill --batch 4 --queries 1024 --dtype float16 float32"),
    (layers.BENCHMARK, "--width 4096"),
    (linear.BENCHMARK, "--kind thin --dtype float16 float32 --size 1 8192 4096 --size 16 8192 4096 "
     "--size 16 1024 16384 --weights nf4 nf4_nested"),
    (linear.BENCHMARK, "--kind large backward --dtype float16 float32 --size 4096 4096 4096 "
     "--size 512 1024 16384"),
    (linear.BENCHMARK, "--kind large --dtype float16 float32 --size 4096 4096 4096 --weights nf4"),
)  # fmt: skip
"""The benchmarks whose calls are profiled, with their options; sizes are those of models."""
_COMMAND = "profiles"
_DRIVER = (sys.executable, "-m", "cupyattn.benchmark.profiles")
_NOT_PERMITTED = "ERR_NVGPUCTRPERM"


def profiled_calls(xp: Any) -> Iterator[Callable[[], Round]]:
    """Yield what prepares every call."""
    harness = Harness(xp, cold=False)
    for benchmark, words in CALLS:
        chosen, arguments = benchmark.parse(*words.split())
        assert chosen.cases is not None
        for case in chosen.cases(arguments, harness):
            own = (each for each in case.implementations if each.name.startswith("cupyattn"))
            yield from (each.prepare for each in own)


# What ncu is asked for: few metrics, so that a kernel is repeated few times. Turing has them all.

_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = {
    "long_scoreboard": "global memory", "short_scoreboard": "shared memory",
    "barrier": "barriers", "math_pipe_throttle": "busy math pipes",
    "mio_throttle": "the queue of shared memory", "lg_throttle": "the queue of global memory",
    "tex_throttle": "the queue of textures", "wait": "fixed latencies",
    "branch_resolving": "branches", "dispatch_stall": "the dispatcher",
    "drain": "stores at the end", "imc_miss": "constants", "membar": "memory fences",
    "no_instruction": "instructions", "sleeping": "sleeping warps", "misc": "other reasons",
    "not_selected": "other warps", "selected": "nothing",
}  # fmt: skip
"""Why a warp issues no instruction in a cycle, and what it waits for."""
_PIPES = {
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    **{name: f"sm__inst_executed_pipe_{name}.avg.pct_of_peak_sustained_active"
       for name in ("fma", "alu", "xu", "lsu")},
}  # fmt: skip
_SHARES = {
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "occupancy_limit": "sm__maximum_warps_per_active_cycle_pct",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "compute": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
}
_CTAS, _THREADS = "launch__grid_size", "launch__block_size"
_TIME, _REGISTERS = "gpu__time_duration.sum", "launch__registers_per_thread"
_SHARED = ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic")
_DRAM_BYTES = "dram__bytes.sum"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
_LANES = "smsp__thread_inst_executed_per_inst_executed.ratio"
METRICS = (
    *(_CTAS, _THREADS, _TIME, _REGISTERS, *_SHARED, _DRAM_BYTES, _CONFLICTS, _WAVEFRONTS, _LANES),
    *_SHARES.values(),
    *_PIPES.values(),
    *map(_STALL.format, STALLS),
)
_SHOWN_STALL = 0.02  # of a warp's cycles: shorter ones are left out
Numbers = Mapping[str, float | None]


def parse(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return a row for each kernel that ``ncu --csv --page raw --print-units base`` printed."""
    table = csv.reader(line for line in lines if line.startswith('"'))
    header = next(table, [])
    if "Kernel Name" not in header:
        raise ValueError('no line of it begins with "ID" and has a "Kernel Name"')
    rows: dict[str, dict[str, Any]] = {}
    for cells in table:
        row = dict(zip(header, cells, strict=False))
        if row["ID"]:  # the line below the header only has units
            numbers = {name: _number(row[name]) for name in METRICS if name in row}
            kernel = row["Kernel Name"]
            rows.setdefault(kernel, {"kernel": kernel, **_figures(numbers)})
    return list(rows.values())


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:  # n/a: this GPU has no such counter
        return None


def _figures(numbers: Numbers) -> dict[str, Any]:
    def scaled(metric: str, by: float) -> float | None:
        number = numbers.get(metric)
        return None if number is None else round(number * by, 3)

    def whole(*metrics: str) -> int | None:
        found = [numbers.get(metric) for metric in metrics]
        return None if None in found else round(sum(filter(None, found)))

    conflicts, wavefronts = numbers.get(_CONFLICTS), numbers.get(_WAVEFRONTS)
    stalls = {name: count for name in STALLS if (count := numbers.get(_STALL.format(name)))}
    shares = {name: round(count / sum(stalls.values()), 3) for name, count in stalls.items()}
    longest = sorted(shares, key=shares.__getitem__, reverse=True)
    return {
        "ctas": whole(_CTAS),
        "threads": whole(_THREADS),
        "microseconds": scaled(_TIME, 1e-3),
        "registers": whole(_REGISTERS),
        "shared_bytes": whole(*_SHARED),
        "dram_bytes": whole(_DRAM_BYTES),
        "bank_conflicts": None if conflicts is None or wavefronts is None
        else round(conflicts / wavefronts, 3) if wavefronts else 0.0,
        "lanes": scaled(_LANES, 1 / 32),
        **{name: scaled(metric, 0.01) for name, metric in _SHARES.items()},
        "pipes": {name: scaled(metric, 0.01) for name, metric in _PIPES.items()},
        "stalls": {name: shares[name] for name in longest if shares[name] >= _SHOWN_STALL},
    }  # fmt: skip


_UNITS = {"l2": "the L2 cache", "l1": "L1 and shared memory", "issue": "issued instructions"}
_PIPE_NAMES = {"tensor": "tensor cores", "fma": "float32 products", "lsu": "loads and stores",
               "alu": "integers and comparisons", "xu": "special functions"}  # fmt: skip


def binding(row: Mapping[str, Any], multiprocessors: int) -> tuple[str, float]:
    """Return what binds a kernel, for people, and its share of its peak or of the warps' time.

    Busy memory binds: everything that it moves passes the caches too. Otherwise the busiest unit
    does. If none is busy, warps wait; with more of them, each would wait less.
    """
    if (row["dram"] or 0) >= BUSY:
        return "memory", row["dram"]
    shares = {text: row[name] or 0.0 for name, text in _UNITS.items()}
    shares |= {_PIPE_NAMES[name]: share or 0.0 for name, share in row["pipes"].items()}
    busiest = max(shares, key=shares.__getitem__)
    waits = [each for each in row["stalls"].items() if each[0] not in ("selected", "not_selected")]
    if shares[busiest] >= BUSY or not waits:
        return busiest, shares[busiest]
    name, share = waits[0]
    there, most = (row[name] or 0.0 for name in ("occupancy", "occupancy_limit"))
    few = row["ctas"] < multiprocessors or 2 * there < most
    return f"{'few CTAs, ' if few else ''}waits for {STALLS[name]}", share


def drive(file: str) -> None:
    """Make the calls on the first GPU, which ncu profiles."""
    cupy, device = load_cupy(), cuda_device(0)
    with cupy.cuda.Device(device.ordinal):
        for prepare in profiled_calls(cupy):
            prepare()[0]()
            cupy.get_default_memory_pool().free_all_blocks()
    machine = {**measured_on(device), "multiprocessors": device.multiprocessors}
    Path(file).write_text(json.dumps(machine), encoding="utf-8")


# The command


def take(kernels: Sequence[str], folder: Path) -> dict[str, Any]:
    """Profile kernels, or all; raise RuntimeError if ncu is missing or may not read counters."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise error(
            RuntimeError,
            "there is no ncu, the command line of Nsight Compute, on the PATH",
            "profiles are taken by it alone",
            "install Nsight Compute, which is in the CUDA toolkit, and put its folder on the PATH",
        )
    table, machine = folder / "ncu.csv", folder / "machine.json"
    names = "|".join(kernels or KERNELS)
    options = [  # the clocks of a call as users make it, with caches that are empty before
        *("--csv", "--page", "raw", "--print-units", "base", "--log-file", str(table)),
        *("--clock-control", "none", "--cache-control", "all"),
        *("--kernel-id", f"::regex:^({names})$:1"),  # the first launch of each
        *("--metrics", ",".join(METRICS)),
    ]
    process = subprocess.run(
        [ncu, *options, *_DRIVER, str(machine)], capture_output=True, text=True,
        env={**os.environ, "LC_ALL": "C"}, check=False,
    )  # fmt: skip
    printed = table.read_text(encoding="utf-8") if table.exists() else ""
    if _NOT_PERMITTED in printed + process.stdout + process.stderr:
        raise error(
            RuntimeError,
            f"the driver lets ncu read no counters ({_NOT_PERMITTED})",
            "counters are for administrators by default",
            "run it as root (in a container with --cap-add=SYS_ADMIN), or load the module nvidia "
            "with NVreg_RestrictProfilingToAdminUsers=0",
        )
    if process.returncode or not machine.exists():
        said = [*printed.splitlines(), *process.stdout.splitlines(), *process.stderr.splitlines()]
        end = "\n".join(line for line in said if not line.startswith('"'))[-2000:]
        raise error(
            RuntimeError, f"ncu ended with {process.returncode}: {end}",
            "it profiles every call, and writes a table", "read its message",
        )  # fmt: skip
    version = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=False)
    last = version.stdout.strip().splitlines()[-1].removeprefix("Version ").partition(" ")[0]
    driven = json.loads(machine.read_text(encoding="utf-8"))
    override = arch_override()
    arch = "" if override is None else f"{ARCH_VARIABLE}={override.number} "
    words = f"{arch}python -m cupyattn.benchmark profiles --take --out FILE"
    return {
        "command": _COMMAND,
        "invocation": words,
        "ncu": last,
        **driven,
        "rows": parse(printed.splitlines()),
    }


def add_parser(benchmarks: Any) -> None:
    """Add the command to the command line."""
    parser = benchmarks.add_parser(
        _COMMAND,
        help="what Nsight Compute measured of every kernel, and what binds each",
        description="Show a profile of every kernel: time, registers, shared memory, occupancy, "
        "how busy memory, caches, issue slots and tensor cores are, bank conflicts, and what binds "
        "it. The library's profiles are of an H200 that ran the Turing code. --take profiles the "
        "GPU at hand by ncu, the command line of Nsight Compute.",
        epilog="Exit code 1 if ncu is missing or may not read the GPU's counters.",
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=RECORD, metavar="FILE",
        help="profiles that --take wrote (default: those of the library)",
    )  # fmt: skip
    parser.add_argument(
        "--kernel", nargs="+", type=kernel_name, default=[], metavar="NAME",
        help="only these kernels, by the names that `info` lists",
    )  # fmt: skip
    parser.add_argument("--take", action="store_true", help="profile the GPU at hand, by ncu")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what was taken there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.take:
        arguments.json = None  # --out has another form
        return run_on_gpu(_COMMAND, arguments, _taken, show)
    try:
        result = _profiles_in(arguments.file)
    except (OSError, ValueError) as failure:
        fail(_COMMAND, failure, as_json=False)
        return 1
    if arguments.kernel:
        result["rows"] = [row for row in result["rows"] if row["kernel"] in arguments.kernel]
    emit(result, show, as_json=False)
    return 0


def _profiles_in(file: Path) -> Result:
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as failure:
        result = failure
    if not (isinstance(result, dict) and result.get("command") == _COMMAND):
        raise error(
            ValueError, f"{file} holds {shown(result)}",
            "profiles are what --take --out FILE writes",
            "take some, or leave the file out: the library has its own",
        )  # fmt: skip
    return result


def _taken(arguments: argparse.Namespace) -> Result:
    if arguments.out is not None:
        require_writable(arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        result = take(arguments.kernel, Path(folder))
    if arguments.out is not None:
        write_json(result, arguments.out)
    return result


_COLUMNS = (
    *("kernel", "us", "regs", "smem", "warps", "DRAM", "L2", "L1", "compute", "issue"),
    *("tensor", "conflicts", "bound by"),
)


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    show_machine("Every kernel", result, terminal)
    rows, multiprocessors = result["rows"], result["multiprocessors"]
    terminal.table(_COLUMNS, [_cells(row, multiprocessors) for row in rows])
    terminal.text(
        "  Microseconds of a launch with empty caches; a thread's registers, a CTA's shared memory "
        "in bytes; then percent: of the warps that a multiprocessor holds at most; of the peaks of "
        "memory, of the L2 cache, of L1 with shared memory, of a multiprocessor's busiest unit, of "
        "its issue slots and of its tensor cores; of shared memory's cycles, those that bank "
        f"conflicts take. What is busier than {100 * BUSY:.0f} % binds; otherwise what warps "
        "wait for longest, and how much of their time."
    )
    if result["compute_capability"] != f"{TURING.number / 10:.1f}":
        terminal.text(
            "  Turing cards have fewer GB/s for each multiprocessor: more of these kernels wait "
            "for memory there."
        )
    counts = Counter(binding(row, multiprocessors)[0] for row in rows)
    for what, count in counts.most_common():
        terminal.text(f"  {count} of {len(rows)}: {what}")
    terminal.text(f"  {result['invocation']}, ncu {result['ncu']}")


def _cells(row: dict[str, Any], multiprocessors: int) -> tuple[Cell, ...]:
    what, share = binding(row, multiprocessors)
    shares = ("occupancy", "dram", "l2", "l1", "compute", "issue")
    time = row["microseconds"]
    return (
        row["kernel"],
        "-" if time is None else f"{time:.1f}",
        *("-" if row[name] is None else row[name] for name in ("registers", "shared_bytes")),
        *map(_percent, (row[name] for name in shares)),
        _percent(row["pipes"]["tensor"]),
        _percent(row["bank_conflicts"]),
        f"{what}, {share * 100:.0f} %",
    )


def _percent(share: float | None) -> Cell:
    return "-" if share is None else round(100 * share)


if __name__ == "__main__":
    drive(sys.argv[1])
