"""The model of Turing next to published figures: ``python -m turing.calibration``.

Triton compiles its kernels for Turing without a GPU; their machine code goes through the model as
that of this library does. A published figure is TFLOP/s, and depends on a clock that nobody
recorded. One clock is therefore chosen for all figures of a device, and the model is judged by what
is left: the published utilisation at that clock, and the modelled one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, median
from typing import Any, NamedTuple

from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.turing import MACHINES, LoopFigures, Machine, analyse, row
from cupyattn.turing.analysis import code_figures, main_loop
from cupyattn.turing.sass import SassInstruction, disassemble, parse_listing

try:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import AttrsDescriptor
except ImportError as failure:
    raise ImportError(
        f'{failure}; the calibration needs Triton 3.2.0; pip install ".[calibration]"'
    ) from failure

_TARGET = GPUTarget("cuda", TURING.number, WARP_SIZE)
_DIVISIBLE = 16
_FLOATS = frozenset(("lse_", "delta_"))


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_forward(
    q_, k_, v_, out_, lse_, tokens, scale,
    head_dim: tl.constexpr, tile_rows: tl.constexpr, tile_keys: tl.constexpr,
    pipelined: tl.constexpr,
):  # fmt: skip
    """`tile_rows` queries of a head: scores, online softmax in base 2, and sums of values."""
    head = tl.program_id(1).to(tl.int64) * tokens * head_dim
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    keys, dims = tl.arange(0, tile_keys), tl.arange(0, head_dim)
    q = tl.load(q_ + head + rows[:, None] * head_dim + dims[None, :])
    k_at = k_ + head + keys[None, :] * head_dim + dims[:, None]
    v_at = v_ + head + keys[:, None] * head_dim + dims[None, :]
    highest = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    out = tl.zeros([tile_rows, head_dim], tl.float32)
    scale *= LOG2_E
    if pipelined:
        k = tl.load(k_at)
        v = tl.load(v_at)
    for _ in range(0, tokens, tile_keys):
        if pipelined:
            k_next = tl.load(k_at + tile_keys * head_dim)
            v_next = tl.load(v_at + tile_keys * head_dim)
        else:
            k = tl.load(k_at)
        scores = tl.dot(q, k)
        maximum = tl.maximum(highest, tl.max(scores, 1) * scale)
        p = tl.math.exp2(scores * scale - maximum[:, None])
        decay = tl.math.exp2(highest - maximum)
        sums = tl.sum(p, 1)
        out = out * decay[:, None]
        if not pipelined:
            v = tl.load(v_at)
        out = tl.dot(p.to(tl.float16), v, out)
        total = total * decay + sums
        highest = maximum
        k_at += tile_keys * head_dim
        v_at += tile_keys * head_dim
        if pipelined:
            k = k_next
            v = v_next
    tl.store(lse_ + tl.program_id(1) * tokens + rows, highest + tl.math.log2(total))
    out = out / total[:, None]
    tl.store(out_ + head + rows[:, None] * head_dim + dims[None, :], out.to(tl.float16))


@triton.jit
def attention_backward_dkdv(
    q_, k_, v_, dout_, dk_, dv_, lse_, delta_, tokens,
    head_dim: tl.constexpr, tile_rows: tl.constexpr, tile_keys: tl.constexpr,
):  # fmt: skip
    """dK and dV of `tile_keys` keys of a head; K is scaled beforehand, for exponents in base 2."""
    head = tl.program_id(1).to(tl.int64) * tokens * head_dim
    keys = tl.program_id(0) * tile_keys + tl.arange(0, tile_keys)
    rows, dims = tl.arange(0, tile_rows), tl.arange(0, head_dim)
    own = head + keys[:, None] * head_dim + dims[None, :]
    k = tl.load(k_ + own)
    v = tl.load(v_ + own)
    dk = tl.zeros([tile_keys, head_dim], tl.float32)
    dv = tl.zeros([tile_keys, head_dim], tl.float32)
    q_at = q_ + head + rows[None, :] * head_dim + dims[:, None]
    dout_at = dout_ + head + rows[:, None] * head_dim + dims[None, :]
    statistics = tl.program_id(1) * tokens + rows
    for _ in range(0, tokens, tile_rows):
        q = tl.load(q_at)
        lse = tl.load(lse_ + statistics)
        p = tl.math.exp2(tl.dot(k, q) - lse[None, :])
        dout = tl.load(dout_at)
        dv = tl.dot(p.to(tl.float16), dout, dv)
        delta = tl.load(delta_ + statistics)
        dp = tl.dot(v, tl.trans(dout))
        ds = (p * (dp - delta[None, :])).to(tl.float16)
        dk = tl.dot(ds, tl.trans(q), dk)
        q_at += tile_rows * head_dim
        dout_at += tile_rows * head_dim
        statistics += tile_rows
    tl.store(dk_ + own, dk.to(tl.float16))
    tl.store(dv_ + own, dv.to(tl.float16))


@triton.jit
def attention_backward_dq(
    q_, k_, v_, dout_, dq_, lse_, delta_, tokens,
    head_dim: tl.constexpr, tile_rows: tl.constexpr, tile_keys: tl.constexpr,
):  # fmt: skip
    """dQ of `tile_rows` queries of a head; K is scaled beforehand, as for dK and dV."""
    head = tl.program_id(1).to(tl.int64) * tokens * head_dim
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    keys, dims = tl.arange(0, tile_keys), tl.arange(0, head_dim)
    own = head + rows[:, None] * head_dim + dims[None, :]
    q = tl.load(q_ + own)
    dout = tl.load(dout_ + own)
    lse = tl.load(lse_ + tl.program_id(1) * tokens + rows)
    delta = tl.load(delta_ + tl.program_id(1) * tokens + rows)
    dq = tl.zeros([tile_rows, head_dim], tl.float32)
    k_at = k_ + head + keys[None, :] * head_dim + dims[:, None]
    v_at = v_ + head + keys[None, :] * head_dim + dims[:, None]
    for _ in range(0, tokens, tile_keys):
        k = tl.load(k_at)
        v = tl.load(v_at)
        p = tl.math.exp2(tl.dot(q, k) - lse[:, None])
        ds = (p * (tl.dot(dout, v) - delta[:, None])).to(tl.float16)
        dq = tl.dot(ds, tl.trans(k), dq)
        k_at += tile_keys * head_dim
        v_at += tile_keys * head_dim
    tl.store(dq_ + own, dq.to(tl.float16))


@triton.jit
def product(
    a_, b_, c_, m, n, k,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, tile_depth: tl.constexpr,
):  # fmt: skip
    """A tile of ``a @ b``."""
    across = n // tile_columns
    rows = tl.program_id(0) // across * tile_rows + tl.arange(0, tile_rows)
    columns = tl.program_id(0) % across * tile_columns + tl.arange(0, tile_columns)
    depth = tl.arange(0, tile_depth)
    a_at = a_ + rows[:, None] * k + depth[None, :]
    b_at = b_ + depth[:, None] * n + columns[None, :]
    sums = tl.zeros([tile_rows, tile_columns], tl.float32)
    for _ in range(0, k, tile_depth):
        sums = tl.dot(tl.load(a_at), tl.load(b_at), sums)
        a_at += tile_depth
        b_at += tile_depth * n
    tl.store(c_ + rows[:, None] * n + columns[None, :], sums.to(tl.float16))


_KERNELS = {
    each.__name__: each
    for each in (attention_forward, attention_backward_dkdv, attention_backward_dq, product)
}


class Compiled(NamedTuple):
    """A kernel's machine code, and how many threads and CTAs execute it on an SM."""

    code: Sequence[SassInstruction]
    threads: int
    ctas: int


@cache
def compiled(name: str, warps: int, **constants: int) -> Compiled | None:
    """Compile a kernel of this file for Turing; None if it does not fit on an SM."""
    function = _KERNELS[name]
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


class Prediction(NamedTuple):
    """The model of a kernel.

    Attributes
    ----------
    utilisation : float
    sustained : float
        TFLOP/s, of integers TOPS, at the clock that the power limit leaves.
    peak : float
        Operations of all SMs in a thousand cycles, if it had no other work: TFLOP/s at 1 GHz.
    """

    utilisation: float
    sustained: float
    peak: float


Modelled = Callable[[Machine], Prediction]


def prediction(loop: LoopFigures | None, machine: Machine) -> Prediction:
    """Return the model of a kernel from the figures of its main loop."""
    assert loop is not None and loop.utilisation is not None
    held = loop.sustained(machine)
    assert held is not None
    peak = machine.multiprocessors * loop.work_flop / loop.work_cycles / 1000
    used = loop.utilisation.mean
    return Prediction(used, peak * used * held.ghz, peak)


def _predicted(kernel: Compiled, machine: Machine) -> Prediction:
    figures = code_figures(kernel.code, kernel.threads, kernel.ctas, machine=machine)
    return prediction(main_loop(figures), machine)


def best(name: str, tiles: Iterable[Mapping[str, int]], **constants: int) -> Modelled:
    """Model the tile that an autotuner would choose."""

    def modelled(machine: Machine) -> Prediction:
        kernels = [compiled(name, **tile, **constants) for tile in tiles]
        return max(_predicted(each, machine) for each in kernels if each is not None)

    return modelled


def forward(head_dim: int, *, pipelined: bool = False) -> Modelled:
    """Model attention's forward pass: the largest tiles that fit, as published tuning has them."""
    sizes = {
        64: ((128, 64, 4), (128, 32, 4), (64, 64, 4), (64, 32, 4)),
        128: ((128, 64, 8), (128, 32, 8), (64, 32, 4)),
    }[head_dim]
    tiles = [{"tile_rows": m, "tile_keys": n, "warps": warps} for m, n, warps in sizes]
    return best("attention_forward", tiles, head_dim=head_dim, pipelined=int(pipelined))


def backward(head_dim: int, rows: int, keys: int) -> Modelled:
    """Model five products in two loops, one of which repeats two of them."""

    def modelled(machine: Machine) -> Prediction:
        dkdv = compiled(
            "attention_backward_dkdv", 4, head_dim=head_dim, tile_rows=rows, tile_keys=keys
        )
        dq = compiled("attention_backward_dq", 4, head_dim=head_dim, tile_rows=keys, tile_keys=rows)
        assert dkdv is not None and dq is not None
        first, second = (_predicted(each, machine) for each in (dkdv, dq))
        used, rate = (5 / (4 / first[k] + 3 / second[k]) for k in range(2))
        return Prediction(used, rate, first.peak)

    return modelled


def triton_product() -> Modelled:
    """Model a product with float32 sums."""
    sizes = ((128, 128, 32, 4), (128, 128, 64, 4), (128, 128, 32, 8), (128, 256, 32, 8))
    names = ("tile_rows", "tile_columns", "tile_depth", "warps")
    return best("product", [dict(zip(names, size, strict=True)) for size in sizes])


def own(entry: str, **macros: int | str) -> Modelled:
    """Model a product of this library: those that NVIDIA compiled cannot be modelled here."""

    def modelled(machine: Machine) -> Prediction:
        return prediction(analyse(row(entry, **macros), machine=machine).main, machine)

    return modelled


OWN_PRODUCT = own(
    "matmul", TILE_ROWS=256, TILE_COLUMNS=192, A_LINES="kAlong", B_LINES="kAcross"
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A published figure.

    Attributes
    ----------
    kernel, source : str
    tflops : float
    modelled : callable
        Returns its prediction.
    is_target : bool
        Whether the kernel that was measured is the one that is modelled. The device's clock is
        chosen by targets.
    has_its_clock : bool
        Whether it was measured at that clock: under a power limit each kernel has another one.
    """

    kernel: str
    tflops: float
    source: str
    modelled: Modelled
    is_target: bool = True
    has_its_clock: bool = True


_FORK = "Chennesxu/triton-turing"
_UNPIPELINED = f"{_FORK}, without its pipeline"
FIGURES = {
    "TITAN RTX": (
        Figure("product, cuBLAS", 88, f"{_FORK}: fp16-gemm.png", OWN_PRODUCT),
        Figure("product, Triton", 0.85 * 88, f"{_FORK}: 84 to 86 % of cuBLAS", triton_product()),
        Figure("forward D 64", 69.5 / 1.11, _UNPIPELINED, forward(64)),
        Figure("forward D 128", 57.3 / 1.48, _UNPIPELINED, forward(128)),
        Figure(
            "forward D 64, loads ahead", 69.5, f"{_FORK}: fa2-forward.png",
            forward(64, pipelined=True), is_target=False,
        ),
        Figure(
            "forward D 128, loads ahead", 57.3, f"{_FORK}: fa2-forward.png",
            forward(128, pipelined=True), is_target=False,
        ),
        Figure(
            "backward D 128", 27.6, f"{_FORK}: fa2-backward.png",
            backward(128, 32, 64), is_target=False,
        ),
        Figure(
            "backward D 64", 40.0, f"{_FORK}: fa2-backward.png",
            backward(64, 32, 128), is_target=False,
        ),
    ),
    "RTX 2080 Ti": (
        Figure("forward D 64", 51.8, "rationalism/flash-attn-triton, 16k tokens", forward(64)),
    ),
    "T4": (
        Figure("product, cuBLAS", 24, "forums.developer.nvidia.com 264462", OWN_PRODUCT),
        Figure(
            "int8 product, cublasLt", 42, "apache/tvm#4550", own("matmul_s8"),
            is_target=False, has_its_clock=False,
        ),
        Figure(
            "float32 product", 4.3, "zzc0721/torch-performance-test-data",
            own("linear_forward_f32", DTYPE="float32"), is_target=False, has_its_clock=False,
        ),
    ),
}  # fmt: skip
"""Figures of a device. triton-turing's pipeline and its transposed operands in shared memory are of
another code generator: no targets. Nor are integers and float32 on a T4, whose clock depends on the
kernel."""


class Comparison(NamedTuple):
    """A published figure and its prediction, at its device's clock."""

    device: str
    figure: Figure
    clock_ghz: float
    predicted: Prediction

    @property
    def published(self) -> float:
        """The published utilisation."""
        return self.figure.tflops / (self.clock_ghz * self.predicted.peak)

    @property
    def difference(self) -> float:
        """The modelled utilisation less the published one."""
        return self.predicted.utilisation - self.published


def compared(machines: Mapping[str, Machine] = MACHINES) -> Iterator[Comparison]:
    """Model each figure, and choose the clock of each device by the median of its targets."""
    for device, figures in FIGURES.items():
        predicted = [figure.modelled(machines[device]) for figure in figures]
        both = list(zip(figures, predicted, strict=True))
        clock = median(
            figure.tflops / (each.utilisation * each.peak)
            for figure, each in both
            if figure.is_target
        )
        for figure, each in both:
            yield Comparison(device, figure, clock, each)


_COLUMNS = (
    *("device", "kernel", "published", "sustained by the model"),
    *("utilisation", "modelled", "difference", "source"),
)


def table(comparisons: Sequence[Comparison]) -> str:
    """Return a table in reStructuredText, and what the targets' differences are."""
    rows = [_COLUMNS, *map(_cells, comparisons)]
    widths = [max(len(cells[k]) for cells in rows) for k in range(len(_COLUMNS))]
    rule = "  ".join("=" * width for width in widths)
    head, *body = (
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in rows
    )
    clocks = {each.device: f"{each.clock_ghz:.2f} GHz" for each in comparisons}
    left = [abs(each.difference) for each in judged(comparisons)]
    return "\n".join(
        (
            *(rule, head, rule, *body, rule, ""),
            "Clocks: " + ", ".join(f"{name} {clock}" for name, clock in clocks.items()) + ".",
            f"Targets: mean difference {mean(left):.3f}, largest {max(left):.3f}.",
        )
    )


def judged(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the targets of devices that have several: a single one only chooses its clock."""
    targets = [each for each in comparisons if each.figure.is_target]
    return [each for each in targets if sum(x.device == each.device for x in targets) > 1]


def _cells(each: Comparison) -> tuple[str, ...]:
    figure, predicted = each.figure, each.predicted
    difference = f"{each.difference:+.3f}" + ("" if figure.is_target else " (no target)")
    return (
        each.device,
        figure.kernel,
        f"{figure.tflops:.1f}",
        f"{predicted.sustained:.1f} ({predicted.sustained / figure.tflops - 1:+.0%})",
        f"{each.published:.3f}" if figure.has_its_clock else "",
        f"{predicted.utilisation:.3f}",
        difference if figure.has_its_clock else "another clock",
        figure.source,
    )


if __name__ == "__main__":
    print(table(list(compared())))
