"""``python -m cupyattn turing``: what kernels will do on Turing, from their machine code."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from typing import Any

import cupyattn
from cupyattn.cli.arguments import add_json_option, integer
from cupyattn.cli.terminal import Result, Terminal, emit, fail, progress
from cupyattn.errors import error
from cupyattn.kernels.compile import nvrtc_version
from cupyattn.kernels.configs import catalogue
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.kernels.registry import KERNELS
from cupyattn.kernels.spec import Specialisation
from cupyattn.turing import MARGIN, LoopFigures, analyse, disassembler_version

TUNED = (
    "attention_forward",
    "attention_backward_dkdv",
    "attention_backward_dkdv_paired",
    "attention_backward_dq",
)
"""Kernels whose speed is that of their products: those that the model is for."""

_DIGITS = 4  # of the ratios: the simulation is not that exact


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "turing",
        help="model the kernels on a Turing GPU from their machine code; needs no GPU",
        description="Compile rows of the launch-configuration tables for sm_75, read their machine "
        "code, and show for the main loop of each: spills, cycles of the load/store unit for each "
        "of the products (above 1 it binds), and the utilisation of the tensor cores or float32 "
        "units that a simulation of one SM of a T4 gives. Needs NVRTC and nvdisasm, but no GPU.",
        epilog=f"Counts and ratios are exact; the utilisation is a model, +-{MARGIN}, that no "
        "Turing GPU has confirmed. Exit code 1 without a compiler or disassembler.",
    )
    parser.add_argument(
        "--kernel",
        action="append",
        choices=tuple(KERNELS),
        metavar="NAME",
        help=f"a kernel; may be repeated (default: {', '.join(TUNED)})",
    )
    parser.add_argument(
        "--head-dim",
        type=integer(1, MAX_HEAD_DIM),
        metavar="D",
        help="only the rows of this head dim (default: all)",
    )
    parser.add_argument(
        "--all-loops", action="store_true", help="show every loop with products, not the main alone"
    )
    parser.add_argument(
        "--no-simulation",
        dest="simulate",
        action="store_false",
        help="leave out the utilisation, which takes half a second a row",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    kernels = arguments.kernel or TUNED
    try:
        rows = rows_of(kernels, arguments.head_dim)
        result = describe(rows, simulate=arguments.simulate, all_loops=arguments.all_loops)
    except (RuntimeError, ValueError) as failure:  # no compiler, no disassembler; no such row
        fail("turing", failure, as_json=arguments.json)
        return 1
    emit(result, show, as_json=arguments.json)
    return 0


def rows_of(kernels: Sequence[str], head_dim: int | None) -> list[Specialisation]:
    """Return the rows of the tables for these kernels, and if one is given for this head dim.

    Raises
    ------
    ValueError
        If there are none.
    """
    rows = [each for each in catalogue() if each.spec.entry in kernels]
    dims = [dict(each.macros).get("HEAD_DIM") for each in rows]
    if head_dim is not None and head_dim not in dims:
        raise error(
            ValueError,
            f"--head-dim {head_dim}",
            f"the tables of {', '.join(kernels)} have rows for "
            + (", ".join(map(str, sorted({dim for dim in dims if dim}))) or "no head dim"),
            "pass one of them, or leave --head-dim out",
        )
    return [row for row, dim in zip(rows, dims, strict=True) if head_dim in (None, dim)]


def describe(rows: list[Specialisation], *, simulate: bool, all_loops: bool) -> Result:
    """Model the rows, one after the other."""
    versions = {
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "nvdisasm": disassembler_version(),
    }
    described = []
    with progress("modelling", len(rows)) as step:
        for specialisation in rows:
            described.append(kernel_row(specialisation, simulate=simulate, all_loops=all_loops))
            step()
    return {
        "command": "turing",
        "version": cupyattn.__version__,
        "arch": "sm_75",
        **versions,
        "rows": described,
    }


def kernel_row(
    specialisation: Specialisation, *, simulate: bool = True, all_loops: bool = False
) -> dict[str, Any]:
    """Tell what a specialisation takes of a Turing SM, and what its loops make of it.

    Returns
    -------
    dict
        ``kernel``, ``row``, ``threads``, ``registers``, ``shared_bytes``, ``ctas_per_sm``; ``main``
        is its main loop, None for a kernel without products; with `all_loops` ``loops`` are all of
        them, with counts and cycles (`cupyattn.turing.LoopFigures` explains each).
    """
    figures = analyse(specialisation, simulate=simulate)
    return {
        "kernel": specialisation.spec.entry,
        "row": row_name(specialisation),
        "threads": specialisation.threads,
        "registers": figures.registers,
        "shared_bytes": figures.shared_bytes,
        "ctas_per_sm": figures.ctas_per_sm,
        "main": None if figures.main is None else _summary(figures.main),
        **({"loops": [_everything(each) for each in figures.loops]} if all_loops else {}),
    }


def _summary(loop: LoopFigures) -> dict[str, Any]:
    utilisation = None
    if loop.utilisation is not None:
        utilisation = {name: round(x, _DIGITS) for name, x in asdict(loop.utilisation).items()}
    return {
        "work_pipe": loop.work_pipe,
        "instructions": loop.instructions,
        "spill_bytes": loop.spill_bytes,
        "lsu_ratio": round(loop.lsu_ratio, _DIGITS),
        "bound": round(loop.bound, _DIGITS),
        "binding_pipe": loop.binding_pipe,
        "utilisation": utilisation,
    }


def _everything(loop: LoopFigures) -> dict[str, Any]:
    return {
        "start": loop.start,
        "end": loop.end,
        **_summary(loop),
        "skipped": loop.skipped,
        "narrow_global": loop.narrow_global,
        "counts": dict(sorted(loop.counts.items())),
        "cycles": {pipe: round(count) for pipe, count in loop.cycles.items()},
    }


def row_name(specialisation: Specialisation) -> str:
    """Name a row by what its caller chose: dtype, head dims, loads and options; not tile sizes.

    Examples
    --------
    >>> from cupyattn.kernels.configs import attention
    >>> row_name(attention.flash(64, 64, 1, attention.FlashOptions(mask=True, bias="float16")))
    'D 64, scalar loads, BIAS=float16, MASK'
    """
    macros = dict(specialisation.macros)
    head_dim, head_dim_v = macros.get("HEAD_DIM"), macros.get("HEAD_DIM_V")
    parts = [str(macros.pop("DTYPE"))] if "DTYPE" in macros else []
    if head_dim is not None or head_dim_v is not None:
        dims = {"D": head_dim, "Dv": None if head_dim_v == head_dim else head_dim_v}
        parts += [f"{letter} {dim}" for letter, dim in dims.items() if dim is not None]
    if "LANES" in macros:
        parts.append(f"{macros['LANES']} lanes")
    if macros.get("VEC") == 1:
        parts.append("scalar loads")
    options = {name: value for name, value in macros.items() if isinstance(value, str)}
    parts += [
        (name if value == "true" else f"{name}={value}") + _together(macros.get(f"{name}_VEC", 1))
        for name, value in options.items()
        if value not in ("false", "void")
    ]
    if together := _together(macros.get("SCORE_VEC", 1)):
        parts.append(f"scores{together}")
    return ", ".join(parts)


def _together(items: int | str) -> str:
    return "" if items == 1 else f" by {items}"


_COLUMNS = (
    "row",
    "registers",
    "shared B",
    "CTAs/SM",
    "length",
    "spills B",
    "LSU/work",
    "bound",
    "utilisation",
)


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    for kernel, rows in groupby(result["rows"], key=itemgetter("kernel")):
        terminal.title(f"{kernel} on Turing ({result['arch']}): the loop that does the work")
        terminal.table(_COLUMNS, [cells for row in rows for cells in _cells(row)])
    terminal.title(f"NVRTC {result['nvrtc']}, nvdisasm {result['nvdisasm']}")
    terminal.text(
        "  Of one iteration: instructions of a warp; bytes that a thread loads from and stores\n"
        "  to local memory; cycles of the load/store unit for each of the work's, which is\n"
        "  products on tensor cores, or in a kernel without them in float32; the utilisation of\n"
        "  their pipe that no schedule exceeds, and what binds if it is another; one simulated\n"
        f"  at the rates of a T4, and its range over CTAs' starts: a model, +-{MARGIN}."
    )


def _cells(row: dict[str, Any]) -> list[tuple[str | int, ...]]:
    resources = (row["row"], row["registers"], row["shared_bytes"], row["ctas_per_sm"])
    loops = row.get("loops", [row["main"]] if row["main"] else [])
    if not loops:
        return [(*resources, "no products", "", "", "", "")]
    return [(*resources, *_loop_cells(loop)) for loop in loops]


def _loop_cells(loop: dict[str, Any]) -> tuple[str | int, ...]:
    played, binds = loop["utilisation"], loop["binding_pipe"]
    return (
        loop["instructions"],
        loop["spill_bytes"],
        f"{loop['lsu_ratio']:.2f}",
        f"{loop['bound']:.2f}" + ("" if binds == loop["work_pipe"] else f" {binds}"),
        ""
        if played is None
        else f"{played['mean']:.3f} ({played['low']:.2f}-{played['high']:.2f})",
    )
