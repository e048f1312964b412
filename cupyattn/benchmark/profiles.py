"""``python -m cupyattn.benchmark profiles``: measurements of every kernel by Nsight Compute.

With ``--take`` ncu runs a benchmark, and profiles the first launch of each kernel.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from cupyattn.benchmark.command import Option, invocation, run_and_show, run_on_gpu
from cupyattn.benchmark.results import results_of
from cupyattn.benchmark.table import show_machine
from cupyattn.cli.arguments import Commands
from cupyattn.cli.configurations import kernel_name
from cupyattn.cli.terminal import Cell, Result, Terminal
from cupyattn.registry import KERNELS
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.device.cuda import cuda_device
from cupyattn.runtime.errors import error

RECORD = Path(__file__).with_name("h200.json")
"""Profiles of the Turing code on an H200."""
BUSY = 0.6
"""The share of its peak from which a unit binds, as Nsight Compute sees it too."""
_COMMAND = "profiles"
_BENCHMARK = (sys.executable, "-m", "cupyattn.benchmark")
_ONCE = ("--calls", "1", "--warm-up", "0", "--budget", "0.001")
CEILING_KERNELS = {"fma_rate", "mma_rate", "read_weight"}
"""Kernels that every benchmark launches to measure the GPU."""
_NOT_PERMITTED = "ERR_NVGPUCTRPERM"


# The metrics: few, so that ncu repeats a kernel few times. Turing has all of them.

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
_CTAS = "launch__grid_size"
_TIME, _REGISTERS = "gpu__time_duration.sum", "launch__registers_per_thread"
_SHARED = ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic")
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
METRICS = (
    *(_CTAS, _TIME, _REGISTERS, *_SHARED, _CONFLICTS, _WAVEFRONTS),
    *_SHARES.values(),
    *_PIPES.values(),
    *map(_STALL.format, STALLS),
)
_SHOWN_STALL = 0.02  # of a warp's cycles: shorter ones are left out
Numbers = Mapping[str, float | None]


def parse(lines: Iterable[str]) -> list[Json]:
    """Return a row for each kernel that ``ncu --csv --page raw --print-units base`` printed."""
    table = csv.reader(line for line in lines if line.startswith('"'))
    header = next(table, [])
    if "Kernel Name" not in header:
        raise ValueError('no line of it begins with "ID" and has a "Kernel Name"')
    rows: dict[str, Json] = {}
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


def _figures(numbers: Numbers) -> Json:
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
        "microseconds": scaled(_TIME, 1e-3),
        "registers": whole(_REGISTERS),
        "shared_bytes": whole(*_SHARED),
        "bank_conflicts": None if conflicts is None or wavefronts is None
        else round(conflicts / wavefronts, 3) if wavefronts else 0.0,
        **{name: scaled(metric, 0.01) for name, metric in _SHARES.items()},
        "pipes": {name: scaled(metric, 0.01) for name, metric in _PIPES.items()},
        "stalls": {name: shares[name] for name in longest if shares[name] >= _SHOWN_STALL},
    }  # fmt: skip


_UNITS = {"l2": "the L2 cache", "l1": "L1 and shared memory", "issue": "issued instructions"}
_PIPE_NAMES = {"tensor": "tensor cores", "fma": "float32 products", "lsu": "loads and stores",
               "alu": "integers and comparisons", "xu": "special functions"}  # fmt: skip


def binding(row: Json, multiprocessors: int) -> tuple[str, float]:
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


# The command


def take(words: Sequence[str], kernels: Sequence[str], folder: Path) -> Json:
    """Profile the first launch of each kernel, or of some, that a benchmark launches.

    `words` are the benchmark's name and options. Raises RuntimeError if ncu is missing or may not
    read counters, and if the benchmark fails.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise error(
            RuntimeError,
            "there is no ncu, the command line of Nsight Compute, on the PATH",
            "profiles are taken by it alone",
            "install Nsight Compute, which is in the CUDA toolkit, and put its folder on the PATH",
        )
    table, machine = folder / "ncu.csv", folder / "machine.json"
    names = "|".join(kernels or KERNELS.keys() - CEILING_KERNELS)
    options = [  # the clocks of a call as users make it, with caches that are empty before
        *("--csv", "--page", "raw", "--print-units", "base", "--log-file", str(table)),
        *("--clock-control", "none", "--cache-control", "all"),
        *("--kernel-id", f"::regex:^({names})$:1"),  # the first launch of each
        *("--metrics", ",".join(METRICS)),
    ]
    process = subprocess.run(
        [ncu, *options, *_BENCHMARK, *words, *_ONCE, "--json", str(machine)],
        capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}, check=False,
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
            "it profiles a benchmark, and writes a table", "read its message",
        )  # fmt: skip
    version = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=False)
    last = version.stdout.strip().splitlines()[-1].removeprefix("Version ").partition(" ")[0]
    (ran,) = results_of(machine)
    return {
        **{name: value for name, value in ran.items() if name not in ("ceilings", "took_s")},
        "command": _COMMAND,
        "invocation": invocation(sys.argv),
        "ncu": last,
        "multiprocessors": cuda_device(0).multiprocessors,
        "rows": parse(printed.splitlines()),
    }


def add_parser(benchmarks: Commands) -> None:
    """Add the command to the command line."""
    parser = benchmarks.add_parser(
        _COMMAND,
        help="measurements of every kernel by Nsight Compute, and the limit of each",
        description="Show a profile of every kernel: time, registers, shared memory, occupancy, "
        "how busy memory, caches, issue slots and tensor cores are, bank conflicts, and its limit. "
        "The library's profiles are of an H200 that ran the Turing code. --take profiles a "
        "benchmark on this GPU with ncu, the command line of Nsight Compute.",
        epilog="Exit code 1 if ncu is missing or may not read the GPU's counters.",
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=RECORD, metavar="FILE",
        help="profiles that --take wrote (default: those of the library)",
    )  # fmt: skip
    Option("kernel", [], "only these kernels, by the names that `info` lists", kernel_name,
           metavar="NAME").add(parser)  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the new profiles to FILE")
    parser.add_argument(
        "--take", nargs=argparse.REMAINDER, metavar="BENCHMARK ...",
        help="profile the kernels of a benchmark on this GPU, by ncu; its name and options come "
        "last, as in --take linear --kind thin",
    )  # fmt: skip
    parser.set_defaults(run=run, kernel=[])


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.take is None:
        return run_and_show(_COMMAND, None, partial(_profiles_in, arguments), show)
    arguments.json = arguments.out
    return run_on_gpu(_COMMAND, arguments, _taken, show)


def _profiles_in(arguments: argparse.Namespace) -> Result:
    results = results_of(arguments.file)
    if [each["command"] for each in results] != [_COMMAND]:
        raise error(
            ValueError, f"{arguments.file} contains results of a benchmark",
            "profiles are what --out FILE --take BENCHMARK writes",
            "take some, or leave the file out: the library has its own",
        )  # fmt: skip
    (result,) = results
    if arguments.kernel:
        result["rows"] = [row for row in result["rows"] if row["kernel"] in arguments.kernel]
    return result


def _taken(arguments: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return take(arguments.take, arguments.kernel, Path(folder))


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
            "  Turing devices have fewer GB/s for each multiprocessor: more of these kernels wait "
            "for memory there."
        )
    counts = Counter(binding(row, multiprocessors)[0] for row in rows)
    for what, count in counts.most_common():
        terminal.text(f"  {count} of {len(rows)}: {what}")
    terminal.text(f"  {result['invocation']}, ncu {result['ncu']}")


def _cells(row: Json, multiprocessors: int) -> tuple[Cell, ...]:
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
