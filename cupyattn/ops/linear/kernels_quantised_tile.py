"""Products of a quantised weight for many rows, by tiles: kernels and plans.

Float16 runs on tensor cores, bfloat16 on those of compute capability 8.0 and later. Other dtypes,
and devices without tensor cores, compute in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np

from cupyattn.ops.linear import kernels_float32 as float32
from cupyattn.ops.linear.kernels_float32 import FLOAT_PRODUCT_STRUCT
from cupyattn.ops.linear.kernels_quantised import (
    CODEBOOK_BYTES,
    FORMAT_STRUCTS,
    RowBlocks,
    row_blocks,
)
from cupyattn.ops.linear.kernels_tensor_core import db_steps, dz, dz_for_dx
from cupyattn.ops.linear.native_tiles import DECODING_TILES
from cupyattn.ops.linear.problem import (
    HALVES,
    IN_FLOAT32,
    ON_TENSOR_CORES,
    STRUCTS,
    BackwardDraft,
    ForwardDraft,
    LinearPlan,
    Plans,
)
from cupyattn.ops.linear.tiles import (
    PRODUCT_STRUCT,
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
    takes,
    whole_forward,
)
from cupyattn.ops.linear.weight_formats import UNIT
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.device.traits import NATIVE_ARCH
from cupyattn.runtime.plan import Step
from cupyattn.runtime.spec import KernelSpec, Pointer, Specialisation, StructParameter, inputs
from cupyattn.runtime.storage import STORAGE, vector_items
from cupyattn.runtime.structs import new_struct
from cupyattn.runtime.tables import cpp_bool, pairs, rows_for


def _with_blocks(product: StructParameter, c_name: str) -> StructParameter:
    """Return the C struct of a product, and of the blocks in a row of codes."""
    blocks = ((field, np.int32) for field in ("blocks", "block_log2"))
    dtype = np.dtype([("product", product.dtype), *blocks], align=True)
    return StructParameter("params", dtype, c_name, (product,))


# In cuda_src/linear/quantised: tile_loader.cuh and float_operand.cuh
QUANTISED_TILE = _with_blocks(PRODUCT_STRUCT, "QuantisedTileParams")
QUANTISED_FLOAT = _with_blocks(FLOAT_PRODUCT_STRUCT, "QuantisedFloatParams")

_WEIGHT = (*inputs("codes", "scales"), *inputs("super_scales", optional=True))

FORWARD = KernelSpec(
    "linear_forward_quantised",
    "linear/quantised/tile_forward.cu",
    (
        *inputs("x"),
        *_WEIGHT,
        *inputs("b", "residual", optional=True),
        Pointer("preactivation", optional=True),
        Pointer("out"),
        QUANTISED_TILE,
    ),
)
PRODUCT = KernelSpec(
    "linear_product_quantised",
    "linear/quantised/tile_product.cu",
    (
        *inputs("a"),
        *_WEIGHT,
        *inputs("addend", optional=True),
        *(Pointer(name, optional=True) for name in ("partials", "result")),
        QUANTISED_TILE,
    ),
)
FLOAT_FORWARD = KernelSpec(
    "linear_forward_quantised_f32",
    "linear/quantised/float_forward.cu",
    (
        *inputs("x"),
        *_WEIGHT,
        *inputs("b", "residual", optional=True),
        *(Pointer("out"), Pointer("preactivation", optional=True)),
        QUANTISED_FLOAT,
    ),
)
FLOAT_DX = KernelSpec(
    "linear_dx_quantised_f32",
    "linear/quantised/float_dx.cu",
    (
        *inputs("dout"),
        *_WEIGHT,
        *inputs("preactivation", optional=True),
        Pointer("dx"),
        QUANTISED_FLOAT,
    ),
)
KERNELS = (FORWARD, PRODUCT, FLOAT_FORWARD, FLOAT_DX)

_Table = Mapping[tuple[Shape, bool], TileConfig]
_MoveSlots = tuple[Moves, Moves, int, float]
"""Moves of A and of B, the sets of A's fragments, and the main loop's utilisation on a T4."""


def _configs(
    narrow: _MoveSlots,
    narrow_across: _MoveSlots,
    small: _MoveSlots,
    small_across: _MoveSlots,
    few: _MoveSlots,
    few_across: _MoveSlots,
) -> _Table:
    """Return a format's configurations by tile and by whether rows of codes lie along the sum."""
    of_256, of_128, of_64 = (
        (256, 128, 32, 64, 64, 1),
        (128, 128, 32, 64, 64, 2),
        (64, 128, 32, 32, 64, 2),
    )
    return {
        ("narrow", True): TileConfig(*of_256, *narrow),
        ("narrow", False): TileConfig(*of_256, *narrow_across, loaded=narrow_across[3] - _ACROSS),
        ("small", True): TileConfig(*of_128, *small),
        ("small", False): TileConfig(*of_128, *small_across, loaded=small_across[3] - _ACROSS),
        ("few", True): TileConfig(*of_64, *few),
        ("few", False): TileConfig(*of_64, *few_across, loaded=few_across[3] - _ACROSS),
    }


_ACROSS = 0.07  # of utilisation, at most: codes across the sum are loaded in more pieces

# The utilisation and the slots are by the static model, as in kernels_tensor_core.py (NVRTC
# 12.9.86, 2026-11-23, +-0.05). The slots are the best of 25 to 80 candidates each, which model 0.73
# to 0.94. Shared memory is busy for 0.84 of the loop in the first two configurations, and for 0.93
# in the next two. Codes are decoded between a load and a store of float16's loop. By the model this
# costs nothing: configurations of float16 with these tiles have 0.83 to 0.93. If rows of codes lie
# along the sum, the slots are the forward's. A split sum (PRODUCT, `split`), which ptxas schedules
# differently, has 0.75 to 0.87 with them, and 0.65 to 0.72 in the last two configurations. These
# two keep shared memory busy all the time; but with 64 rows, the tile of 128 would waste half of
# its products. No GPU has timed them.
#
# GeForce GPUs take twice as long for a product, and model 0.89 to 0.98 (`turing --machine "RTX 2060
# Super" --kernel linear_forward_quantised linear_product_quantised`). No configuration gains 0.05
# there with the slots of another one of its tile (2026-11-24).
_TURING: Mapping[str, _Table] = {
    "nf4": _configs(
        # The model's best, (3, 1, 4), (6, 6, 1) with 0.919, is 2 to 9 % slower on an H200 as
        # compute_75 code, except for one size (2026-11-23).
        (Moves(5, 1, 4), Moves(4, 4, 1), 1, 0.906),
        # dx on an H200 as compute_75 code (NVRTC 13.0, 2026-11-23, means of two medians of 8
        # calls): 281, 286 and 294 TFLOP/s at the forward's M x N x K of 8192 x 8192 x 4096,
        # 8192 x 16384 x 4096 and 8192 x 2560 x 10240. (7, 1, 3), (5, 8, 1) with one set of A's
        # fragments models 0.925 and reaches 249, 252 and 280: an H200 waits for the piece of A that
        # is loaded three slots before it is stored.
        (Moves(5, 1, 4), Moves(11, 1, 1), 2, 0.913),
        (Moves(8, 1, 4), Moves(0, 2, 2), 1, 0.905),
        (Moves(10, 1, 4), Moves(1, 2, 2), 1, 0.893),
        (Moves(5, 1, 2), Moves(6, 0, 2), 2, 0.713),
        (Moves(5, 1, 2), Moves(6, 0, 2), 2, 0.723),
    ),
    "int4": _configs(
        (Moves(4, 1, 4), Moves(11, 2, 1), 1, 0.932),
        # dx at these sizes: 288, 292 and 310 TFLOP/s. (8, 1, 3), (3, 10, 1) with one set models
        # 0.922 and reaches 239, 241 and 281.
        (Moves(2, 3, 4), Moves(3, 8, 1), 2, 0.912),
        (Moves(8, 1, 4), Moves(0, 3, 2), 1, 0.870),
        (Moves(10, 1, 3), Moves(3, 2, 2), 1, 0.856),
        (Moves(5, 1, 2), Moves(6, 0, 2), 2, 0.736),
        (Moves(5, 1, 2), Moves(3, 1, 2), 2, 0.698),
    ),
    "int8": _configs(
        (Moves(2, 3, 3), Moves(7, 2, 1), 1, 0.943),
        (Moves(8, 1, 3), Moves(2, 4, 1), 1, 0.903),
        (Moves(8, 1, 4), Moves(2, 2, 2), 1, 0.903),
        (Moves(10, 1, 3), Moves(1, 2, 2), 1, 0.880),
        (Moves(3, 1, 2), Moves(3, 1, 2), 2, 0.703),
        (Moves(5, 1, 2), Moves(3, 1, 2), 2, 0.677),
    ),
    "q4_1": _configs(
        (Moves(1, 1, 3), Moves(5, 6, 1), 1, 0.925),
        (Moves(8, 1, 3), Moves(2, 4, 1), 1, 0.907),
        (Moves(8, 1, 4), Moves(0, 2, 2), 1, 0.901),
        (Moves(6, 2, 4), Moves(4, 3, 2), 1, 0.864),
        (Moves(2, 1, 2), Moves(3, 1, 2), 2, 0.714),
        (Moves(5, 1, 2), Moves(3, 1, 2), 2, 0.730),
    ),
    "q4_k": _configs(
        (Moves(3, 1, 4), Moves(6, 6, 1), 1, 0.907),
        (Moves(8, 1, 3), Moves(3, 10, 1), 1, 0.916),
        (Moves(8, 1, 4), Moves(0, 3, 2), 1, 0.861),
        (Moves(10, 1, 4), Moves(1, 2, 2), 1, 0.862),
        (Moves(2, 1, 2), Moves(3, 1, 2), 2, 0.699),
        (Moves(5, 1, 2), Moves(3, 1, 2), 2, 0.711),
    ),
}


PRODUCTS = {
    75: _TURING,
    80: {
        name: {(tile, along): DECODING_TILES[tile] for tile, along in _TURING[name]}
        for name in _TURING
    },
}
"""Configurations by architecture and format, then by tile and direction of rows of codes."""


def config_of(arch: int, name: str, shape: Shape, along: bool, vec: int) -> TileConfig:
    """Return the configuration of a format and a tile, for an x loaded `vec` items at a time."""
    if vec == 1:
        return single_config(arch, _TURING[name][shape, along], Moves(1, 1, 1))
    return rows_for(PRODUCTS, arch)[name][shape, along]


def shapes_for(vec: int) -> tuple[Shape, ...]:
    """Return the tiles for an x that is loaded `vec` items at a time."""
    return ("narrow",) if vec == 1 else ("narrow", "small", "few")


@cache
def forward(
    arch: int,
    name: str,
    shape: Shape,
    vec: int,
    out_vec: int,
    *,
    dtype: str = "float16",
    activation: str | None = None,
    paired: bool = False,
) -> Specialisation:
    """Specialise the forward of a format whose rows of codes lie along the sum."""
    return specialise_tile(
        FORWARD,
        config_of(arch, name, shape, True, vec),
        vec,
        out_vec,
        DTYPE=dtype,
        FORMAT=FORMAT_STRUCTS[name],
        ACTIVATION=STRUCTS[activation],
        PAIRED=cpp_bool(paired),
    )


@cache
def product(
    arch: int,
    name: str,
    shape: Shape,
    vec: int,
    out_vec: int,
    *,
    along: bool,
    dtype: str = "float16",
    split: bool = False,
) -> Specialisation:
    """Specialise a product without an epilogue; with `split`, CTAs share its tiles."""
    return specialise_tile(
        PRODUCT,
        config_of(arch, name, shape, along, vec),
        vec,
        out_vec,
        DTYPE=dtype,
        FORMAT=FORMAT_STRUCTS[name],
        B_LINES=lines_macro(along),
        SPLIT=cpp_bool(split),
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every configuration, split sums, an activation for each format, scalar accesses."""
    vec = vector_items("float16")
    for name in FORMAT_STRUCTS:
        for shape, along in rows_for(PRODUCTS, arch)[name]:
            if along:
                yield forward(arch, name, shape, vec, vec)
            else:
                yield product(arch, name, shape, vec, vec, along=along)
    kinds = (("gelu", False), ("silu", True), ("relu", False), ("gelu_tanh", False), ("gelu", True))
    for name, (activation, paired) in zip(FORMAT_STRUCTS, kinds, strict=True):
        yield forward(arch, name, "narrow", vec, vec, activation=activation, paired=paired)
    for name, along in pairs(FORMAT_STRUCTS, (False, True)):
        yield product(arch, name, "small", vec, vec, along=along, split=True)
        yield product(arch, name, "few", vec, vec, along=along, split=True)
    if arch >= NATIVE_ARCH:
        for name, shape, items in pairs(FORMAT_STRUCTS, shapes_for(vec), (vec, 1)):
            of_items, dtype = shape if items > 1 else "narrow", "bfloat16"
            yield forward(arch, name, of_items, items, items, dtype=dtype)
            yield product(arch, name, of_items, items, items, along=False, dtype=dtype)
    yield forward(arch, "nf4", "narrow", 1, 1)
    for along in (False, True):
        yield product(arch, "nf4", "narrow", 1, 1, along=along)
    float_kinds = ((None, False), ("gelu", False), ("relu", False), ("silu", True))
    for name, dtype, size, lines, (activation, gated), whole in pairs(
        FORMAT_STRUCTS, float32.DTYPES, range(2), ("kDepth", "kLines"), float_kinds, (True, False)
    ):
        items, items_out = (vector_items(dtype), float32.OUT_VECTOR) if whole else (1, 1)
        options = (activation, gated, items, items_out, CODEBOOK_BYTES.get(name, 0))
        macros = {"FORMAT": FORMAT_STRUCTS[name], "W_ALONG": lines}
        tables = {FLOAT_FORWARD: float32.PRODUCTS, FLOAT_DX: float32.GRADIENT_PRODUCTS}
        for spec, table in tables.items():
            config = float32.nth_config(table, arch, size)
            yield float32.specialise_tile(spec, dtype, config, *options, **macros)


def _passed(struct: StructParameter, blocks: RowBlocks, params: np.ndarray) -> np.ndarray:
    own = new_struct(struct.dtype)
    own["product"], own["blocks"], own["block_log2"] = params, blocks.blocks, blocks.block_log2
    return own[()]


@dataclass(frozen=True)
class QuantisedProduct(TensorCoreProduct):
    """A product whose B is quantised: its lines are rows of codes."""

    blocks: RowBlocks = field(kw_only=True)

    unit: ClassVar[int] = UNIT

    def config(self, arch: int, shape: Shape) -> TileConfig:
        """Return the configuration of a tile."""
        return config_of(arch, self.blocks.format, shape, self.lines.b, self.vec)

    def shapes(self, arch: int) -> tuple[Shape, ...]:
        """Return the tiles to choose from."""
        return shapes_for(self.vec)

    def specialise(self, arch: int, shape: Shape, out_vec: int, *, split: bool) -> Specialisation:
        """Specialise the product without an epilogue, or with `split` one part of its sum."""
        name, along = self.blocks.format, self.lines.b
        return product(
            arch, name, shape, self.vec, out_vec, along=along, dtype=self.dtype, split=split
        )

    def passed(self, params: np.ndarray) -> np.ndarray:
        """Return the C struct QuantisedTileParams."""
        return _passed(QUANTISED_TILE, self.blocks, params)

    @property
    def key(self) -> tuple[object, ...]:
        """The problem of a tuned choice: that of the product, and the format."""
        return (*super().key, self.blocks.format)


# Relative to the forward's time; the loop of a split sum is slower than its configuration says.
_WORTH_SPLITTING = 0.8


def _forward_steps(draft: ForwardDraft) -> tuple[Step, ...]:
    """Plan the forward: usually one launch, if columns of w are rows of codes."""
    problem, slots, traits = draft.problem, draft.slots, draft.traits
    blocks, x, w = row_blocks(problem), problem.x, problem.w
    operands = (slots.x, slots.codes, slots.scales, slots.super_scales)
    dtype = problem.dtype.name
    plain = QuantisedProduct(PRODUCT, x, w, dtype=dtype, blocks=blocks)
    if w.along_columns and problem.activation is None and not problem.biased:
        return product_steps(
            plain,
            plain.chosen(traits, may_split=True),
            traits,
            draft.planner,
            operands,
            result=(slots.out, problem.out),
            addend=slots.residual,
            added=problem.residual,
        )
    halves, out_vec = 2 if problem.gated else 1, forward_vector(problem)
    whole = QuantisedProduct(FORWARD, x, w, halves, out_vec, dtype=dtype, blocks=blocks)
    if w.along_columns:
        tiling = plain.chosen(traits, may_split=True)
    else:
        tiling = forward_tiling(whole, plain, traits, _WORTH_SPLITTING)
    if w.along_columns or tiling.splits > 1:
        return split_forward(draft, plain, tiling, operands)
    specialisation = forward(
        traits.arch,
        blocks.format,
        tiling.shape,
        whole.vec,
        out_vec,
        dtype=dtype,
        activation=problem.scalar_activation,
        paired=problem.gated,
    )
    return whole_forward(draft, whole, tiling, specialisation, operands)


def _dx_steps(draft: BackwardDraft) -> tuple[Step, ...]:
    """Plan dx = dz w^T."""
    problem, slots = draft.problem, draft.slots
    dx = QuantisedProduct(
        PRODUCT,
        dz(problem),
        problem.w.transposed,
        dtype=problem.dtype.name,
        blocks=row_blocks(problem),
    )
    before, dz_slot = dz_for_dx(draft)
    steps = product_steps(
        dx,
        dx.chosen(draft.traits, may_split=True),
        draft.traits,
        draft.planner,
        (dz_slot, slots.codes, slots.scales, slots.super_scales),
        result=(slots.dx, problem.dx),
        addend=slots.dx if problem.accumulate else None,
    )
    return (*before, *steps)


def _float_weight(draft: ForwardDraft | BackwardDraft) -> dict[str, Any]:
    """Return the arguments of `float32.forward_step` and `dx_step` for a quantised weight."""
    problem, slots = draft.problem, draft.slots
    name = problem.quantised.format
    return {
        "weight": (slots.codes, slots.scales, slots.super_scales),
        "passed": partial(_passed, QUANTISED_FLOAT, row_blocks(problem)),
        "own_bytes": CODEBOOK_BYTES.get(name, 0),
        "FORMAT": FORMAT_STRUCTS[name],
    }


def _float_forward_steps(draft: ForwardDraft) -> tuple[Step, ...]:
    """Plan out and preactivation in float32 arithmetic: one launch."""
    vec = float32.whole(draft.problem, draft.problem.x)
    return (float32.forward_step(draft, FLOAT_FORWARD, vec=vec, **_float_weight(draft)),)


def _float_dx_steps(draft: BackwardDraft) -> tuple[Step, ...]:
    """Plan dx in float32 arithmetic: one launch."""
    problem = draft.problem
    vec = float32.whole(problem, problem.dout, problem.preactivation)
    return (float32.dx_step(draft, FLOAT_DX, vec=vec, **_float_weight(draft)),)


PLANS: Plans = (
    LinearPlan("forward", HALVES, _forward_steps, ON_TENSOR_CORES, takes, tensor_cores=True),
    LinearPlan("dx", HALVES, _dx_steps, ON_TENSOR_CORES, takes, tensor_cores=True),
    LinearPlan("db", HALVES, db_steps, ON_TENSOR_CORES, tensor_cores=True),
    LinearPlan("forward", tuple(STORAGE), _float_forward_steps, IN_FLOAT32),
    LinearPlan("dx", tuple(STORAGE), _float_dx_steps, IN_FLOAT32),
    LinearPlan("db", tuple(STORAGE), float32.db_steps, IN_FLOAT32),
)
