"""What Nsight Compute is asked for, and what a row of its table says of a kernel.

Few metrics, so that a kernel is run again few times; they exist on Turing and on what came later.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = {
    "long_scoreboard": "global memory",
    "short_scoreboard": "shared memory",
    "barrier": "barriers",
    "math_pipe_throttle": "busy math pipes",
    "mio_throttle": "the queue of shared memory",
    "lg_throttle": "the queue of global memory",
    "tex_throttle": "the queue of textures",
    "wait": "fixed latencies",
    "branch_resolving": "branches",
    "dispatch_stall": "the dispatcher",
    "drain": "stores at the end",
    "imc_miss": "constants",
    "membar": "memory fences",
    "no_instruction": "instructions",
    "sleeping": "sleeping warps",
    "misc": "other reasons",
    "not_selected": "other warps",
    "selected": "nothing",
}
"""Why a warp issues no instruction in a cycle, and what it waits for then."""

_PIPES = {
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "fma": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "alu": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "xu": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "lsu": "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active",
}
_SHARES = {
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "occupancy_limit": "sm__maximum_warps_per_active_cycle_pct",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "compute": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
}
_TIME = "gpu__time_duration.sum"
_REGISTERS = "launch__registers_per_thread"
_SHARED = ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic")
_DRAM_BYTES = "dram__bytes.sum"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
_LANES = "smsp__thread_inst_executed_per_inst_executed.ratio"

METRICS = (
    *(_TIME, _REGISTERS, *_SHARED, _DRAM_BYTES, _CONFLICTS, _WAVEFRONTS, _LANES),
    *_SHARES.values(),
    *_PIPES.values(),
    *map(_STALL.format, STALLS),
)

_DIGITS = 3
_WARP = 32
_SHOWN_STALL = 0.02  # of a warp's cycles: shorter ones are left out


class Measured(NamedTuple):
    """A launch in ncu's table: the kernel's name, and numbers by metric, None where it has none."""

    kernel: str
    numbers: Mapping[str, float | None]


def parse(lines: Iterable[str]) -> list[Measured]:
    """Read what ``ncu --csv --page raw --print-units base`` printed, in the order of the launches.

    Raises
    ------
    ValueError
        If there is no table in it.
    """
    table = csv.reader(line for line in lines if line.startswith('"'))
    header = next(table, [])
    if "Kernel Name" not in header:
        raise ValueError('no line of it begins with "ID" and has a "Kernel Name"')
    kernel = header.index("Kernel Name")
    wanted = {name: header.index(name) for name in METRICS if name in header}
    return [
        Measured(row[kernel], {name: _number(row[at]) for name, at in wanted.items()})
        for row in table
        if row[0]  # the line below the header has units alone
    ]


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:  # n/a: a counter that this GPU has not
        return None


def rows_of(
    measured: Sequence[Measured], launches: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield what was measured beside what was launched, in the order of both.

    Raises
    ------
    ValueError
        If they are not the same kernels.
    """
    kernels = [launch["kernel"] for launch in launches]
    if [each.kernel for each in measured] != kernels:
        raise ValueError(
            f"{len(kernels)} kernels were launched and {len(measured)} measured, or others than "
            "those: look into what ncu printed"
        )
    for each, launch in zip(measured, launches, strict=True):
        yield {**launch, **_figures(each.numbers)}


def _figures(numbers: Mapping[str, float | None]) -> dict[str, Any]:
    shared = [numbers.get(name) for name in _SHARED]
    return {
        "microseconds": _scaled(numbers.get(_TIME), 1e-3),
        "registers": _whole(numbers.get(_REGISTERS)),
        "shared_bytes": None if None in shared else round(sum(filter(None, shared))),
        "dram_bytes": _whole(numbers.get(_DRAM_BYTES)),
        "bank_conflicts": _ratio(numbers.get(_CONFLICTS), numbers.get(_WAVEFRONTS)),
        "lanes": _scaled(numbers.get(_LANES), 1 / _WARP),
        **{name: _scaled(numbers.get(metric), 0.01) for name, metric in _SHARES.items()},
        "pipes": {name: _scaled(numbers.get(metric), 0.01) for name, metric in _PIPES.items()},
        "stalls": _stalls({name: numbers.get(_STALL.format(name)) for name in STALLS}),
    }


def _stalls(cycles: Mapping[str, float | None]) -> dict[str, float]:
    """Return the share of each reason in the cycles of a warp, the longest first."""
    known = {name: count for name, count in cycles.items() if count}
    shares = {name: round(count / sum(known.values()), _DIGITS) for name, count in known.items()}
    ordered = sorted(shares, key=shares.__getitem__, reverse=True)
    return {name: shares[name] for name in ordered if shares[name] >= _SHOWN_STALL}


def _scaled(number: float | None, by: float) -> float | None:
    return None if number is None else round(number * by, _DIGITS)


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)


def _ratio(part: float | None, whole: float | None) -> float | None:
    if part is None or whole is None:
        return None
    return round(part / whole, _DIGITS) if whole else 0.0
