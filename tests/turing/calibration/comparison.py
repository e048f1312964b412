"""The model of Turing next to published figures: ``python -m turing.calibration.comparison``.

Triton compiles its kernels for Turing without a GPU; their machine code goes through the model as
that of this library does. A published figure is TFLOP/s, and depends on a clock that nobody
recorded. One clock is therefore chosen for all figures of a device, and the model is judged by what
is left: the published utilisation at that clock, and the modelled one.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, median
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import AttrsDescriptor
from turing.calibration import triton_kernels

from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.turing import MACHINES, Machine, analyse, row
from cupyattn.turing.analysis import code_figures, main_loop
from cupyattn.turing.sass import SassInstruction, disassemble, parse_listing

TRITON = "3.2.0"
"""The last release that uses Turing's tensor cores."""
_TARGET = GPUTarget("cuda", TURING.number, WARP_SIZE)
_DIVISIBLE = 16
_FLOATS = frozenset(("lse_", "delta_"))


class Compiled(NamedTuple):
    """A kernel's machine code, and how many threads and CTAs execute it on an SM."""

    code: Sequence[SassInstruction]
    threads: int
    ctas: int


@cache
def compiled(name: str, warps: int, **constants: int) -> Compiled | None:
    """Compile a kernel of `triton_kernels` for Turing; None if it does not fit on an SM."""
    function = getattr(triton_kernels, name)
    names = [each for each in function.arg_names if each not in constants]
    kinds = {each: _kind(each) for each in names}
    aligned = {k: _DIVISIBLE for k, each in enumerate(names) if kinds[each] != "fp32"}
    source = ASTSource(
        fn=function,
        signature=kinds,
        constants=constants,
        attrs=AttrsDescriptor.from_hints(aligned),
    )
    kernel: Any = triton.compile(
        source, target=_TARGET, options={"num_warps": warps, "num_stages": 1}
    )
    cubin = kernel.asm["cubin"]
    (code,) = parse_listing(disassemble(cubin)).values()
    threads = warps * WARP_SIZE
    ctas = TURING.resident_ctas(threads, _registers(cubin), kernel.metadata.shared)
    return Compiled(code, threads, ctas) if ctas else None


def _kind(argument: str) -> str:
    if argument.endswith("_"):
        return "*fp32" if argument in _FLOATS else "*fp16"
    return "fp32" if argument == "scale" else "i32"


_SECTION_TABLE, _SECTION_COUNT, _SECTION_BYTES = 0x28, 0x3C, 64
_PROGRAM, _EXECUTABLE = 1, 4
_REGISTERS_SHIFT = 24


def _registers(cubin: bytes) -> int:
    """Read a thread's registers from the one section of the ELF file that is code."""
    (start,) = struct.unpack_from("<Q", cubin, _SECTION_TABLE)
    (count,) = struct.unpack_from("<H", cubin, _SECTION_COUNT)
    for at in range(start, start + count * _SECTION_BYTES, _SECTION_BYTES):
        _, kind, flags = struct.unpack_from("<IIQ", cubin, at)
        (info,) = struct.unpack_from("<I", cubin, at + 0x2C)
        if kind == _PROGRAM and flags & _EXECUTABLE:
            return info >> _REGISTERS_SHIFT
    raise ValueError("the file has no code")


def utilisation_of(kernel: Compiled, machine: Machine) -> float:
    """Simulate the main loop of a kernel."""
    loop = main_loop(code_figures(kernel.code, kernel.threads, kernel.ctas, machine=machine))
    assert loop is not None and loop.utilisation is not None
    return loop.utilisation.mean


class Tile(NamedTuple):
    """The constants of a kernel, and its warps."""

    first: int
    second: int
    warps: int


def best(name: str, tiles: Sequence[Tile], names: tuple[str, str], **constants: int) -> Modelled:
    """Model the tile that an autotuner would choose."""

    def modelled(machine: Machine) -> float:
        kernels = (
            compiled(name, tile.warps, **dict(zip(names, tile[:2], strict=True)), **constants)
            for tile in tiles
        )
        return max(utilisation_of(each, machine) for each in kernels if each is not None)

    return modelled


Modelled = Callable[[Machine], float]


def forward(head_dim: int, *, pipelined: bool = False) -> Modelled:
    """Model attention's forward pass: the largest tiles that fit, as published tuning has them."""
    tiles = {
        64: (Tile(128, 64, 4), Tile(128, 32, 4), Tile(64, 64, 4), Tile(64, 32, 4)),
        128: (Tile(128, 64, 8), Tile(128, 32, 8), Tile(64, 32, 4)),
    }[head_dim]
    names = ("tile_rows", "tile_keys")
    return best("attention_forward", tiles, names, head_dim=head_dim, pipelined=int(pipelined))


def backward(head_dim: int, rows: int, keys: int) -> Modelled:
    """Model five products in two loops, one of which repeats two of them."""

    def modelled(machine: Machine) -> float:
        dkdv = compiled(
            "attention_backward_dkdv", 4, head_dim=head_dim, tile_rows=rows, tile_keys=keys
        )
        dq = compiled("attention_backward_dq", 4, head_dim=head_dim, tile_rows=keys, tile_keys=rows)
        assert dkdv is not None and dq is not None
        return 5 / (4 / utilisation_of(dkdv, machine) + 3 / utilisation_of(dq, machine))

    return modelled


def product() -> Modelled:
    """Model a product with float32 sums."""
    tiles = (Tile(128, 128, 4), Tile(128, 128, 8), Tile(128, 256, 8))
    return best("product", tiles, ("tile_rows", "tile_columns"), tile_depth=32)


def own_product(machine: Machine) -> float:
    """Model this library's product: the library that NVIDIA compiled cannot be modelled here."""
    kernel = row("matmul", TILE_ROWS=256, TILE_COLUMNS=192, A_LINES="kAlong", B_LINES="kAcross")
    loop = analyse(kernel, machine=machine).main
    assert loop is not None and loop.utilisation is not None
    return loop.utilisation.mean


@dataclass(frozen=True)
class Figure:
    """A published figure.

    Attributes
    ----------
    kernel, source : str
    tflops : float
    modelled : callable
        Returns its utilisation.
    is_target : bool
        Whether the kernel that was measured is the one that is modelled. The device's clock is
        chosen by targets.
    """

    kernel: str
    tflops: float
    source: str
    modelled: Modelled
    is_target: bool = True


_FORK = "Chennesxu/triton-turing"
_UNPIPELINED = f"{_FORK}, without its pipeline"
FIGURES = {
    "TITAN RTX": (
        Figure("product, cuBLAS", 88, f"{_FORK}: fp16-gemm.png", own_product),
        Figure("product, Triton", 0.85 * 88, f"{_FORK}: 84 to 86 % of cuBLAS", product()),
        Figure("forward D 64", 69.5 / 1.11, _UNPIPELINED, forward(64)),
        Figure("forward D 128", 57.3 / 1.48, _UNPIPELINED, forward(128)),
        Figure("backward D 128", 27.6, f"{_FORK}: fa2-backward.png", backward(128, 32, 64)),
        Figure(
            "forward D 64, loads ahead", 69.5, f"{_FORK}: fa2-forward.png",
            forward(64, pipelined=True), is_target=False,
        ),
        Figure(
            "forward D 128, loads ahead", 57.3, f"{_FORK}: fa2-forward.png",
            forward(128, pipelined=True), is_target=False,
        ),
        Figure(
            "backward D 64", 40.0, f"{_FORK}: fa2-backward.png",
            backward(64, 32, 128), is_target=False,
        ),
    ),
    "RTX 2080 Ti": (
        Figure("forward D 64", 51.8, "rationalism/flash-attn-triton, 16k tokens", forward(64)),
    ),
}  # fmt: skip
"""Figures of a device. triton-turing's own pipeline is another code generator: not a target."""


class Comparison(NamedTuple):
    """A published figure, as utilisation at its device's clock, and the modelled utilisation."""

    device: str
    figure: Figure
    clock_ghz: float
    published: float
    modelled: float

    @property
    def difference(self) -> float:
        return self.modelled - self.published


def compared(machines: dict[str, Machine] = MACHINES) -> Iterator[Comparison]:
    """Model each figure, and choose the clock of each device by the median of its targets."""
    for device, figures in FIGURES.items():
        machine = machines[device]
        modelled = [figure.modelled(machine) for figure in figures]
        per_ghz = machine.tflops(machine.peak_flop_per_cycle) / machine.clock_mhz * 1000
        clock = median(
            figure.tflops / (used * per_ghz)
            for figure, used in zip(figures, modelled, strict=True)
            if figure.is_target
        )
        for figure, used in zip(figures, modelled, strict=True):
            yield Comparison(device, figure, clock, figure.tflops / (clock * per_ghz), used)


_COLUMNS = ("device", "clock", "kernel", "published", "modelled", "difference", "source")


def table(comparisons: Sequence[Comparison]) -> str:
    """Return a table in reStructuredText, and what the targets' differences are."""
    rows = [_COLUMNS, *map(_cells, comparisons)]
    widths = [max(len(cells[k]) for cells in rows) for k in range(len(_COLUMNS))]
    rule = "  ".join("=" * width for width in widths)
    head, *body = (
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in rows
    )
    left = [abs(each.difference) for each in judged(comparisons)]
    summary = f"Targets: mean difference {mean(left):.3f}, largest {max(left):.3f}."
    return "\n".join((rule, head, rule, *body, rule, "", summary))


def judged(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the targets of devices that have several: a single one only chooses its clock."""
    targets = [each for each in comparisons if each.figure.is_target]
    return [each for each in targets if sum(x.device == each.device for x in targets) > 1]


def _cells(each: Comparison) -> tuple[str, ...]:
    figure = each.figure
    return (
        each.device,
        f"{each.clock_ghz:.2f} GHz",
        figure.kernel,
        f"{figure.tflops:.1f}: {each.published:.3f}",
        f"{each.modelled:.3f}",
        f"{each.difference:+.3f}" + ("" if figure.is_target else ", no target"),
        figure.source,
    )


def version() -> str:
    """Return the version of Triton that is installed."""
    found = re.match(r"[\d.]+", triton.__version__)
    assert found is not None
    return found[0]


if __name__ == "__main__":
    print(table(list(compared())))
