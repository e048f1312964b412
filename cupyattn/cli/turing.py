"""``python -m cupyattn turing``: a model of the kernels on Turing, from their machine code."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter

import cupyattn
from cupyattn.cli.arguments import Commands, add_json_option
from cupyattn.cli.configurations import add_row_options, row_name, rows_of, without_rows
from cupyattn.cli.terminal import Cell, Result, Terminal, emit, fail
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.compile import nvrtc_version
from cupyattn.runtime.progress import progress
from cupyattn.runtime.spec import Specialisation
from cupyattn.turing import (
    MACHINES,
    MARGIN,
    T4,
    LoopFigures,
    Machine,
    analyse,
    disassembler_version,
)
from cupyattn.turing.power import UNCERTAINTY

TUNED = (
    *("attention_forward", "attention_forward_paged", "attention_forward_varlen"),
    "attention_forward_int8",
    *("attention_backward_dkdv", "attention_backward_dkdv_paired", "attention_backward_dkdv_wide"),
    *("attention_backward_dq", "attention_backward_dq_wide", "attention_backward_summed_dbias"),
    *("linear_forward", "linear_product"),
    *("linear_forward_quantised", "linear_product_quantised", "linear_forward_int8"),
    *("matmul", "matmul_s8"),
)
"""Kernels that are limited by their products; the model describes these."""
IN_FLOAT32 = (
    *("attention_forward_f32", "attention_forward_paged_f32", "attention_backward_f32_dkdv"),
    *("attention_backward_f32_dq", "linear_forward_f32", "linear_dx_f32", "linear_dw_f32"),
    *("linear_forward_quantised_f32", "linear_dx_quantised_f32", "matmul_f32"),
)
"""Kernels that a device without tensor cores runs instead."""

_DIGITS = 4  # of the ratios: the simulation is not that exact


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "turing",
        help="model the kernels on a Turing GPU from their machine code; needs no GPU",
        description="Compile each configuration of the kernels for sm_75, read its machine code, "
        "and show for its main loop: spills, whether the load/store unit limits it, how busy the "
        "tensor cores (or float32 units) are in a simulation of one SM, and the rate at the boost "
        "clock and under the power limit. Needs NVRTC and nvdisasm, but no GPU.",
        epilog="Counts and ratios are exact. The utilisation is the result of a model with an "
        f"error of up to +-{MARGIN}, the rate that the power limit sustains one of "
        f"+-{UNCERTAINTY:.0%}; no kernel of this library was measured on a Turing GPU. Exit code 1 "
        "without a compiler or disassembler.",
    )
    add_row_options(
        parser, default=f"{', '.join(TUNED)}; without tensor cores {', '.join(IN_FLOAT32)}"
    )
    parser.add_argument(
        "--machine",
        choices=tuple(MACHINES),
        default=T4.name,
        metavar="NAME",
        help=f"the GPU to model: {', '.join(MACHINES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--all-loops",
        action="store_true",
        help="show every loop with products, not only the main loop",
    )
    parser.add_argument(
        "--no-simulation",
        dest="simulate",
        action="store_false",
        help="leave out the simulated utilisation, which takes half a second a row",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    try:
        machine = MACHINES[arguments.machine]
        usual = TUNED if machine.tensor_cores else IN_FLOAT32
        rows = rows_of(arguments.kernel or usual, arguments.head_dim)
        result = describe(
            rows, simulate=arguments.simulate, all_loops=arguments.all_loops, machine=machine
        )
        result["without_rows"] = without_rows(rows, arguments.kernel, arguments.head_dim)
    except (RuntimeError, ValueError) as failure:  # no compiler, no disassembler; no such row
        fail("turing", failure, as_json=arguments.json)
        return 1
    emit(result, show, as_json=arguments.json)
    return 0


def describe(
    rows: list[Specialisation], *, simulate: bool, all_loops: bool, machine: Machine = T4
) -> Result:
    """Model configurations on a Turing GPU."""
    versions = {"nvrtc": ".".join(map(str, nvrtc_version())), "nvdisasm": disassembler_version()}
    described = []
    with progress("modelling", len(rows)) as step:
        for specialisation in rows:
            described.append(
                kernel_row(specialisation, simulate=simulate, all_loops=all_loops, machine=machine)
            )
            step()
    return {
        "command": "turing",
        "version": cupyattn.__version__,
        "arch": "sm_75",
        "machine": machine.name,
        **versions,
        "rows": described,
    }


def kernel_row(
    specialisation: Specialisation,
    *,
    simulate: bool = True,
    all_loops: bool = False,
    machine: Machine = T4,
) -> Json:
    """Return the resources that a specialisation takes on a Turing SM, and the model of its loops.

    Returns
    -------
    dict
        ``kernel``, ``row``, ``threads``, ``registers``, ``shared_bytes``, ``ctas_per_sm``; ``main``
        is its main loop, None for a kernel without products; with `all_loops` ``loops`` are all of
        them, with counts and cycles (`cupyattn.turing.LoopFigures` explains each).
    """
    figures = analyse(specialisation, simulate=simulate, machine=machine)
    return {
        "kernel": specialisation.spec.entry,
        "row": row_name(specialisation),
        "threads": specialisation.threads,
        "registers": figures.registers,
        "shared_bytes": figures.shared_bytes,
        "ctas_per_sm": figures.ctas_per_sm,
        "main": None if figures.main is None else _summary(figures.main, machine),
        **({"loops": [_everything(each, machine) for each in figures.loops]} if all_loops else {}),
    }


def _summary(loop: LoopFigures, machine: Machine) -> Json:
    utilisation = None
    if loop.utilisation is not None:
        utilisation = {name: round(x, _DIGITS) for name, x in asdict(loop.utilisation).items()}
    rate = loop.flop_per_cycle
    return {
        "work_pipe": loop.work_pipe,
        "instructions": loop.instructions,
        "spill_bytes": loop.spill_bytes,
        "lsu_ratio": _rounded(loop.lsu_ratio),
        "bound": _rounded(loop.bound),
        "binding_pipe": loop.binding_pipe,
        "utilisation": utilisation,
        "of_integers": loop.of_integers,
        "tflops": None if rate is None else round(machine.tflops(rate), 1),
        "sustained": _sustained(loop, machine),
    }


def _sustained(loop: LoopFigures, machine: Machine) -> Json | None:
    held, rate = loop.sustained(machine), loop.flop_per_cycle
    if held is None or rate is None:
        return None
    tflops = machine.tflops(rate) * held.ghz * 1000 / machine.clock_mhz
    return {
        "tflops": round(tflops, _DIGITS),  # it is rounded again where it is printed
        "uncertainty": round(tflops * UNCERTAINTY, _DIGITS),
        "clock_mhz": round(held.ghz * 1000),
        "watts": round(held.watts),
    }


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, _DIGITS)


def _everything(loop: LoopFigures, machine: Machine) -> Json:
    return {
        "start": loop.start,
        "end": loop.end,
        **_summary(loop, machine),
        "skipped": loop.skipped,
        "narrow_global": loop.narrow_global,
        "counts": dict(sorted(loop.counts.items())),
        "cycles": {pipe: round(count) for pipe, count in loop.cycles.items()},
    }


_COLUMNS = {
    "row": "",
    "regs": "registers of a thread",
    "smem": "bytes of shared memory of a CTA",
    "CTAs": "CTAs that an SM can hold",
    "length": "instructions of a warp in one iteration of the loop",
    "spills": "bytes that a thread loads from and stores to local memory in one iteration",
    "LSU": "cycles of the load/store unit for each cycle of the unit that computes the products; "
    "above 1 the load/store unit limits the loop",
    "bound": "the highest utilisation that any schedule can reach of the unit that computes the "
    "products (tensor cores, otherwise float32 units); the name of another unit means that this "
    "one is the limit",
    "used": f"the utilisation in a simulation of one SM, a model with an error of up to +-{MARGIN}",
    "range": "lowest and highest utilisation over the times at which the SM's CTAs can start",
    "TFLOP/s": "the rate of all SMs at that utilisation and the boost clock; of integer products "
    "it is TOPS",
    "sustained": "the rate at the clock that the GPU holds under its power limit, with the error "
    "of that model",
}
"""Columns and what they mean; the names are short, so that a row is one line of 80 columns."""
_COUNTED = 8  # columns; the others are simulated
_SPARE = (
    *("range", "length", "smem", "LSU", "spills", "CTAs", "regs", "bound"),
    *("TFLOP/s", "sustained"),
)
"""Columns that narrow terminals leave out, the first one first."""
_LONG = 40
"""Characters of a row's name that leave room for the other columns in a line of 80."""
_SHORTER = (
    (r"\b([A-Z])_LINES=k", r"\1 "),
    (r"\b([A-Z])_LOADER=Pair\w+", r"\1 Along"),
    (r"\b([A-Z])_LOADER=Transposing\w+", r"\1 Across"),
    (r"\b([A-Z])_LOADER=Item\w+", r"\1 Items"),
    (r"\b([A-Z])_ALONG=k", r"\1 "),
    (r"\b(ACTIVATION|FORMAT)=", ""),
    (r"float(?=\d)", "f"),
    (r"\bscalar (loads|stores)", "scalar"),
    (r"\bscores by ", "scores x"),
)
"""Patterns in long names and what is written instead."""


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    lines = [cells for row in result["rows"] for cells in _cells(row)]
    simulated = any(any(cells[_COUNTED:]) for cells in lines)
    columns = list(_COLUMNS)[: None if simulated else _COUNTED]
    left_out: list[str] = []
    for kernel, rows in groupby(result["rows"], key=itemgetter("kernel")):
        terminal.title(f"{kernel} on Turing ({result['machine']})")
        lines = [cells[: len(columns)] for row in rows for cells in _cells(row)]
        if any(len(str(cells[0])) > _LONG for cells in lines):
            lines = [(shorter(str(name)), *cells) for name, *cells in lines]
        left_out += terminal.table(columns, lines, spare=_SPARE)
    terminal.title(f"NVRTC {result['nvrtc']}, nvdisasm {result['nvdisasm']}")
    terminal.facts({name: _COLUMNS[name] for name in columns[1:]})
    terminal.left_out(left_out)
    for nothing in result["without_rows"]:
        terminal.verdict(False, f"  {nothing}")


def shorter(name: str) -> str:
    """Abbreviate the name of a configuration."""
    for pattern, text in _SHORTER:
        name = re.sub(pattern, text, name)
    return name


def _cells(row: Json) -> list[tuple[Cell, ...]]:
    resources = (row["row"], row["registers"], row["shared_bytes"], row["ctas_per_sm"])
    loops = row.get("loops", [row["main"]] if row["main"] else [])
    if not loops:
        return [(*resources, "", "", "", "no products", "", "", "", "")]
    return [(*resources, *_loop_cells(loop)) for loop in loops]


def _rate(loop: Json) -> str:
    return f"{loop['tflops']:.1f}{' TOPS' if loop['of_integers'] else ''}"


def _loop_cells(loop: Json) -> tuple[Cell, ...]:
    if loop["bound"] is None:
        return (loop["instructions"], loop["spill_bytes"], "", "no CTA fits", "", "", "", "")
    simulated, binds, held = loop["utilisation"], loop["binding_pipe"], loop["sustained"]
    return (
        loop["instructions"],
        loop["spill_bytes"],
        f"{loop['lsu_ratio']:.2f}",
        f"{loop['bound']:.2f}" + ("" if binds == loop["work_pipe"] else f" {binds}"),
        *(
            ("", "")
            if simulated is None
            else (f"{simulated['mean']:.3f}", f"{simulated['low']:.2f}-{simulated['high']:.2f}")
        ),
        "" if loop["tflops"] is None else _rate(loop),
        "" if held is None else f"{held['tflops']:.0f}+-{held['uncertainty']:.0f}",
    )
