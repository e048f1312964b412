"""Products on tensor cores for many rows of 16-bit floats: kernels, configurations and plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from cupyattn.ops.linear.native_tiles import NATIVE_TILES, native_rows
from cupyattn.ops.linear.problem import (
    HALVES,
    ON_TENSOR_CORES,
    STRUCTS,
    BackwardDraft,
    BackwardProblem,
    FormedGradient,
    ForwardDraft,
    LinearPlan,
    Matrix,
    Plans,
)
from cupyattn.ops.linear.tiles import (
    NARROW,
    PRODUCT_STRUCT,
    SHORT,
    SMALL,
    SPLIT_SUMS,
    SPLIT_VEC,
    VECTOR,
    WIDE,
    Lines,
    Moves,
    Shape,
    TensorCoreProduct,
    TileConfig,
    forward_tiling,
    forward_vector,
    lines_macro,
    product_steps,
    single_config,
    specialise_tile,
    split_forward,
    split_sums,
    takes,
    whole_forward,
    whole_vector,
)
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.device.traits import NATIVE_ARCH
from cupyattn.runtime.plan import SCRATCH_DTYPE, Step
from cupyattn.runtime.row_kernel import COLUMN_SUMS_COLUMNS, column_sums
from cupyattn.runtime.spec import (
    Gates,
    KernelSpec,
    Pointer,
    Specialisation,
    StructParameter,
    inputs,
)
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.structs import new_struct
from cupyattn.runtime.tables import FLOAT_BYTES, cpp_bool, pairs, rows_for

# PreactivationGradientParams in cuda_src/linear/tensor_core/preactivation_gradient.cu
PREACTIVATION_GRADIENT_PARAMS = np.dtype(
    [
        *((f"{name}_stride", np.int64) for name in ("dout", "preactivation")),
        *((field, np.int32) for field in ("rows", "columns", "block_rows", "column_blocks")),
    ],
    align=True,
)
PREACTIVATION_GRADIENT_STRUCT = StructParameter(
    "params", PREACTIVATION_GRADIENT_PARAMS, "PreactivationGradientParams"
)

FORWARD = KernelSpec(
    "linear_forward",
    "linear/tensor_core/forward.cu",
    (
        *inputs("x", "w"),
        *inputs("b", "residual", optional=True),
        Pointer("preactivation", optional=True),
        Pointer("out"),
        PRODUCT_STRUCT,
    ),
)
PRODUCT = KernelSpec(
    "linear_product",
    "linear/tensor_core/product.cu",
    (
        *inputs("a", "b"),
        *inputs("addend", optional=True),
        *(Pointer(name, optional=True) for name in ("partials", "result")),
        PRODUCT_STRUCT,
    ),
)
PREACTIVATION_GRADIENT = KernelSpec(
    "linear_preactivation_gradient",
    "linear/tensor_core/preactivation_gradient.cu",
    (
        *inputs("dout"),
        *inputs("preactivation", optional=True),
        *(Pointer(name, optional=True) for name in ("dz", "partials")),
        PREACTIVATION_GRADIENT_STRUCT,
    ),
)
KERNELS = (FORWARD, PRODUCT, SPLIT_SUMS, PREACTIVATION_GRADIENT)

ALONG, B_ACROSS, ACROSS = Lines(True, True), Lines(True, False), Lines(False, False)


_Table = Mapping[tuple[Shape, Lines], TileConfig]

# `models` is by a static model of the machine code (NVRTC 12.9.86, 2026-11-22, +-0.05), `loaded` by
# the same with loaded memory (2026-11-28): no Turing GPU has been measured. The slots are the best
# of some dozens that were tried: ptxas schedules loads and stores differently for each. Among those
# that model alike, these are the fastest on an H200 as compute_75 code (2026-11-22, `benchmark
# linear`), which waits longer for memory and needs all of a k-tile in flight: narrow, 291 TFLOP/s
# at 8192 x 2560 x 10240, and 275 with w across. Slots that model 0.87 and 0.83 reach 307 and 292
# there. The forward's wide slots are the best of 28 by `loaded`. Those that were the fastest on the
# H200, 336 and 341 TFLOP/s at 8192 x 16384 x 4096 for 325 and 321 with these (2026-11-28), model
# 0.82 and 0.80, and on a TITAN RTX 0.75 and 0.72, where these model 0.84 and 0.92.
_TURING_FORWARD: _Table = {
    ("wide", ALONG): TileConfig(*WIDE, Moves(8, 2, 2), Moves(9, 3, 2), 1, 0.942, loaded=0.91),
    ("wide", B_ACROSS): TileConfig(*WIDE, Moves(7, 2, 2), Moves(8, 2, 2), 1, 0.956, loaded=0.93),
    ("narrow", ALONG): TileConfig(*NARROW, Moves(3, 1, 4), Moves(2, 1, 2), 1, 0.917),
    ("narrow", B_ACROSS): TileConfig(
        *NARROW, Moves(2, 1, 3), Moves(1, 4, 2), 1, 0.915, loaded=0.88
    ),
    ("small", ALONG): TileConfig(*SMALL, Moves(4, 2, 4), Moves(5, 1, 4), 1, 0.932),
    ("small", B_ACROSS): TileConfig(*SMALL, Moves(10, 1, 4), Moves(1, 4, 2), 2, 0.891, loaded=0.81),
    ("short", ALONG): TileConfig(*SHORT, Moves(1, 3, 1), Moves(2, 2, 2), 1, 0.952, loaded=0.88),
    ("short", B_ACROSS): TileConfig(*SHORT, Moves(1, 5, 1), Moves(0, 1, 2), 1, 0.955, loaded=0.92),
}
_TURING_PRODUCT: _Table = {
    ("wide", ALONG): TileConfig(*WIDE, Moves(4, 1, 2), Moves(11, 2, 3), 1, 0.938),
    ("wide", B_ACROSS): TileConfig(*WIDE, Moves(4, 1, 2), Moves(11, 2, 3), 1, 0.915),
    ("wide", ACROSS): TileConfig(*WIDE, Moves(4, 1, 2), Moves(3, 3, 2), 1, 0.943),
    ("narrow", ALONG): TileConfig(*NARROW, Moves(7, 1, 4), Moves(2, 5, 1), 1, 0.87),
    ("narrow", B_ACROSS): TileConfig(*NARROW, Moves(5, 1, 4), Moves(10, 1, 2), 1, 0.88),
    ("narrow", ACROSS): TileConfig(*NARROW, Moves(7, 1, 4), Moves(2, 5, 1), 1, 0.917, loaded=0.88),
    ("small", ALONG): TileConfig(*SMALL, Moves(4, 2, 4), Moves(5, 1, 4), 1, 0.828),
    ("small", B_ACROSS): TileConfig(*SMALL, Moves(10, 1, 4), Moves(1, 4, 2), 2, 0.89, loaded=0.81),
    ("small", ACROSS): TileConfig(*SMALL, Moves(10, 1, 4), Moves(1, 4, 2), 2, 0.906, loaded=0.83),
    ("short", ALONG): TileConfig(*SHORT, Moves(1, 3, 1), Moves(2, 2, 2), 1, 0.867, loaded=0.84),
    ("short", B_ACROSS): TileConfig(*SHORT, Moves(1, 5, 1), Moves(0, 1, 2), 1, 0.936, loaded=0.86),
    ("short", ACROSS): TileConfig(*SHORT, Moves(1, 5, 1), Moves(0, 1, 2), 1, 0.939, loaded=0.86),
}


FORWARDS = native_rows(_TURING_FORWARD)
PRODUCTS = native_rows(_TURING_PRODUCT)
"""Configurations by architecture, then by the tile and the directions of the operands' lines."""


def shapes_for(arch: int, vec: int, out_vec: int, lines: Lines) -> tuple[Shape, ...]:
    """Return the tiles for arrays that are loaded `vec` and stored `out_vec` items at a time.

    Single items take more registers: the largest tiles would spill.
    """
    if vec == 1:
        return ("narrow",)
    if arch >= NATIVE_ARCH:
        return tuple(rows_for(NATIVE_TILES, arch))
    fitting: tuple[Shape, ...] = ("narrow", "small", "short")
    return fitting if out_vec == 1 and not lines.b else ("wide", *fitting)


def config_of(kernel: KernelSpec, arch: int, shape: Shape, lines: Lines, vec: int) -> TileConfig:
    """Return the configuration of the forward or of a product of the backward."""
    table = FORWARDS if kernel is FORWARD else PRODUCTS
    if vec == 1:
        return single_config(arch, table[TURING.number][shape, lines], Moves(2, 1, 2))
    return rows_for(table, arch)[shape, lines]


@cache
def forward(
    arch: int,
    shape: Shape,
    vec: int,
    out_vec: int,
    *,
    w_along: bool,
    dtype: str = "float16",
    activation: str | None = None,
    paired: bool = False,
) -> Specialisation:
    """Specialise the forward.

    `vec` are the items of a load of x and w, `out_vec` those of an access to results and residual:
    8, or 1. `w_along` tells whether the columns of w are contiguous; otherwise its rows are. With
    `paired`, w has the columns of a gate and of up.
    """
    return specialise_tile(
        FORWARD,
        config_of(FORWARD, arch, shape, Lines(True, w_along), vec),
        vec,
        out_vec,
        DTYPE=dtype,
        W_LINES=lines_macro(w_along),
        ACTIVATION=STRUCTS[activation],
        PAIRED=cpp_bool(paired),
    )


@cache
def product(
    arch: int,
    shape: Shape,
    lines: Lines,
    vec: int,
    out_vec: int,
    *,
    dtype: str = "float16",
    split: bool = False,
) -> Specialisation:
    """Specialise a product of the backward; with `split`, CTAs share tiles of the result."""
    return specialise_tile(
        PRODUCT,
        config_of(PRODUCT, arch, shape, lines, vec),
        vec,
        out_vec,
        scalar=0.35,
        DTYPE=dtype,
        A_LINES=lines_macro(lines.a),
        B_LINES=lines_macro(lines.b),
        SPLIT=cpp_bool(split),
    )


_GRADIENT_THREADS = 256
_GRADIENT_ROWS = 64
"""Rows of a CTA that computes dz."""


@cache
def preactivation_gradient(
    dtype: str, vec: int, activation: str | None, *, paired: bool
) -> Specialisation:
    """Specialise the kernel that computes dz and its sums; `vec` columns a thread."""
    halves = 2 if paired else 1
    stride = WARP_SIZE if vec == 1 else WARP_SIZE + WARP_SIZE // vec  # kSumStride
    return PREACTIVATION_GRADIENT.specialise(
        threads=_GRADIENT_THREADS,
        static_shared_bytes=_GRADIENT_THREADS // WARP_SIZE * halves * vec * stride * FLOAT_BYTES,
        gates=Gates(registers=80),
        reason="dz is computed once for dx and dw, instead of in every tile of both",
        DTYPE=dtype,
        ACTIVATION=STRUCTS[activation],
        PAIRED=cpp_bool(paired),
        VEC=vec,
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every configuration, with vector and scalar accesses, and activations in pairs."""
    vec = vector_items("float16")
    for shape, lines in rows_for(FORWARDS, arch):
        yield forward(arch, shape, vec, vec, w_along=lines.b)
    for activation, paired, w_along in pairs(STRUCTS, (False, True), (False, True)):
        if activation:
            yield forward(
                arch, "wide", vec, vec, w_along=w_along, activation=activation, paired=paired
            )
    for w_along in (False, True):
        yield forward(arch, "narrow", 1, 1, w_along=w_along)
    for shape, lines in rows_for(PRODUCTS, arch):
        yield product(arch, shape, lines, vec, vec)
    for lines in (ALONG, B_ACROSS, ACROSS):
        yield product(arch, "narrow", lines, 1, 1)
    yield product(arch, "wide", ACROSS, vec, vec, split=True)
    yield product(arch, "small", ALONG, vec, vec, split=True)
    if arch >= NATIVE_ARCH:
        yield from _bfloat16_catalogue(arch)
    for activation, paired in pairs(STRUCTS, (False, True)):
        if activation or not paired:
            for items in (1, SPLIT_VEC):
                yield split_sums("float16", items, activation, paired=paired)
            for items in (1, vec):
                yield preactivation_gradient("float16", items, activation, paired=paired)


def _bfloat16_catalogue(arch: int) -> Iterator[Specialisation]:
    """Yield what bfloat16 adds: tiles, directions of lines and accesses in pairs."""
    vec, dtype = vector_items("bfloat16"), "bfloat16"
    for (shape, lines), items in pairs(rows_for(PRODUCTS, arch), (vec, 1)):
        of_items = shape if items > 1 else "narrow"
        if lines.a:
            yield forward(arch, of_items, items, items, w_along=lines.b, dtype=dtype)
        yield product(arch, of_items, lines, items, items, dtype=dtype)
    yield product(arch, "small", ACROSS, vec, vec, dtype=dtype, split=True)
    yield split_sums(dtype, SPLIT_VEC, "silu", paired=True)
    for activation, items in pairs(STRUCTS, (1, vec)):
        yield preactivation_gradient(dtype, items, activation, paired=activation == "silu")


@dataclass(frozen=True)
class ArrayProduct(TensorCoreProduct):
    """A product of two arrays of 16-bit floats."""

    def config(self, arch: int, shape: Shape) -> TileConfig:
        """Return the configuration of a tile."""
        return config_of(self.kernel, arch, shape, self.lines, self.vec)

    def shapes(self, arch: int) -> tuple[Shape, ...]:
        """Return the tiles to choose from."""
        return shapes_for(arch, self.vec, self.out_vec, self.lines)

    def specialise(self, arch: int, shape: Shape, out_vec: int, *, split: bool) -> Specialisation:
        """Specialise the product without an epilogue, or with `split` one part of its sum."""
        return product(arch, shape, self.lines, self.vec, out_vec, dtype=self.dtype, split=split)

    def passed(self, params: np.ndarray) -> np.ndarray:
        """Return the C struct that the kernel takes."""
        return params[()]


_WORTH_SPLITTING = 0.9  # relative to the forward's time by the model


def _forward_steps(draft: ForwardDraft) -> tuple[Step, ...]:
    """Plan the forward."""
    problem, operands = draft.problem, (draft.slots.x, draft.slots.w)
    halves, out_vec = 2 if problem.gated else 1, forward_vector(problem)
    dtype = problem.dtype.name
    whole = ArrayProduct(FORWARD, problem.x, problem.w, halves, out_vec, dtype=dtype)
    split = ArrayProduct(PRODUCT, problem.x, problem.w, dtype=dtype)
    tiling = forward_tiling(whole, split, draft.traits, _WORTH_SPLITTING)
    if tiling.splits > 1:
        return split_forward(draft, split, tiling, operands)
    specialisation = forward(
        draft.traits.arch,
        tiling.shape,
        whole.vec,
        out_vec,
        w_along=whole.lines.b,
        dtype=dtype,
        activation=problem.scalar_activation,
        paired=problem.gated,
    )
    return whole_forward(draft, whole, tiling, specialisation, operands)


def _dx_steps(draft: BackwardDraft) -> tuple[Step, ...]:
    """Plan dx = dz w^T."""
    problem, slots = draft.problem, draft.slots
    dx = ArrayProduct(
        PRODUCT,
        dz(problem),
        problem.w.transposed,
        out_vec=whole_vector(problem.dx.vector),
        dtype=problem.dtype.name,
    )
    before, dz_slot = dz_for_dx(draft)
    steps = product_steps(
        dx,
        dx.chosen(draft.traits),
        draft.traits,
        draft.planner,
        (dz_slot, slots.w),
        result=(slots.dx, problem.dx),
        addend=slots.dx if problem.accumulate else None,
    )
    return (*before, *steps)


def _dw_steps(draft: BackwardDraft) -> tuple[Step, ...]:
    """Plan dw = x^T dz, and db."""
    problem, slots = draft.problem, draft.slots
    before = gradient(draft)
    result = problem.dw
    assert result is not None
    operands = (slots.x, slots.dout if before.dz is None else before.dz)
    dw = ArrayProduct(PRODUCT, problem.x.transposed, dz(problem), dtype=problem.dtype.name)
    if not result.along_columns:  # compute its transpose, which has contiguous rows
        result, operands = result.transposed, operands[::-1]
        dw = replace(dw, a=dw.b.transposed, b=dw.a.transposed)
    steps = product_steps(
        dw,
        dw.chosen(draft.traits, may_split=True),
        draft.traits,
        draft.planner,
        operands,
        result=(slots.dw, result),
        addend=slots.dw if problem.accumulate else None,
    )
    return (*before.steps, *steps, *_sums_of_dz(draft))


def db_steps(draft: BackwardDraft) -> tuple[Step, ...]:
    """Plan db without dw."""
    if not draft.problem.biased:
        return ()
    return (*gradient(draft).steps, *_sums_of_dz(draft))


def _sums_of_dz(draft: BackwardDraft) -> tuple[Step, ...]:
    """Return the launch that adds the partial sums of db, if there is a bias."""
    problem = draft.problem
    if not problem.biased:
        return ()
    width = problem.weight_columns
    return (
        Step.of(
            column_sums(problem.dtype.name),
            -(-width // COLUMN_SUMS_COLUMNS),
            (gradient(draft).partials, None, draft.slots.db, None),
            *(_gradient_blocks(problem), width, problem.accumulate),
        ),
    )


def dz(problem: BackwardProblem) -> Matrix:
    """Return the layout of dz: dout, or with an activation its product in scratch memory."""
    if problem.activation is None:
        return problem.dout
    width = problem.weight_columns
    return Matrix(problem.rows, width, width, 1, problem.dtype.itemsize, 0)


def dz_for_dx(draft: BackwardDraft) -> tuple[tuple[Step, ...], int | None]:
    """Return the launches before dx, and the slot of dz."""
    if draft.problem.activation is None:
        return (), draft.slots.dout
    formed = gradient(draft)
    return formed.steps, formed.dz


def _gradient_blocks(problem: BackwardProblem) -> int:
    return -(-problem.rows // _GRADIENT_ROWS)


def gradient(draft: BackwardDraft) -> FormedGradient:
    """Return the launch that computes dz and its sums over rows; a call's products share it."""
    if draft.formed is not None:
        return draft.formed
    problem, slots = draft.problem, draft.slots
    if problem.activation is None and not problem.biased:
        draft.formed = FormedGradient((), None, None)
        return draft.formed
    read = [problem.dout]
    params = new_struct(PREACTIVATION_GRADIENT_PARAMS)
    params["dout_stride"] = problem.dout.leading
    if problem.preactivation is not None:
        read.append(problem.preactivation)
        params["preactivation_stride"] = problem.preactivation.leading
    halves = problem.outer if problem.gated else VECTOR
    vec = whole_vector(*(matrix.vector for matrix in read), halves)
    params["rows"], params["columns"] = problem.rows, problem.outer
    params["block_rows"] = _GRADIENT_ROWS
    params["column_blocks"] = -(-problem.outer // (WARP_SIZE * vec))
    blocks = _gradient_blocks(problem)
    width, formed, partials = problem.weight_columns, None, None
    if problem.activation:
        size = problem.rows * width * problem.dtype.itemsize
        formed = draft.planner.scratch(-(-size // SCRATCH_DTYPE.itemsize))
    if problem.biased:
        partials = draft.planner.scratch(blocks * width)
    step = Step.of(
        preactivation_gradient(
            problem.dtype.name, vec, problem.scalar_activation, paired=problem.gated
        ),
        int(params["column_blocks"]) * blocks,
        (slots.dout, slots.preactivation, formed, partials),
        params[()],
    )
    draft.formed = FormedGradient((step,), formed, partials)
    return draft.formed


PLANS: Plans = (
    LinearPlan("forward", HALVES, _forward_steps, ON_TENSOR_CORES, takes, tensor_cores=True),
    LinearPlan("dx", HALVES, _dx_steps, ON_TENSOR_CORES, takes, tensor_cores=True),
    LinearPlan("dw", HALVES, _dw_steps, ON_TENSOR_CORES, takes, tensor_cores=True),
)
