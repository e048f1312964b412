"""Tiles of products on tensor cores: how a CTA computes one, and how a product is divided."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from cupyattn.ops.linear.problem import (
    STRUCTS,
    BackwardProblem,
    ForwardDraft,
    ForwardProblem,
    Matrix,
)
from cupyattn.runtime.arch import WARP_SIZE
from cupyattn.runtime.device.traits import NATIVE_ARCH, DeviceTraits
from cupyattn.runtime.plan import Planner, Step
from cupyattn.runtime.spec import (
    Gates,
    KernelSpec,
    Pointer,
    Scalar,
    Specialisation,
    StructParameter,
    inputs,
)
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.structs import new_struct
from cupyattn.runtime.tables import cpp_bool

VECTOR = vector_items("float16")

# ProductParams in cuda_src/linear/tensor_core/params.cuh
PRODUCT_PARAMS = np.dtype(
    [
        *((f"{name}_stride", np.int64) for name in ("a", "b", "preactivation", "out", "addend")),
        *((field, np.int32) for field in ("rows", "columns", "inner", "split_inner")),
        *((field, np.int32) for field in ("group_log2", "splits_log2", "column_tiles")),
        ("column_tiles_reciprocal", np.uint32),
    ],
    align=True,
)
PRODUCT_STRUCT = StructParameter("params", PRODUCT_PARAMS, "ProductParams")

SPLIT_SUMS = KernelSpec(
    "linear_split_sums",
    "linear/tensor_core/split_sums.cu",
    (
        *inputs("partials"),
        *inputs("b", "addend", optional=True),
        Pointer("preactivation", optional=True),
        Pointer("result"),
        *(Scalar(name, np.dtype(np.int64)) for name in ("rows", "columns", "parts")),
        *(
            Scalar(f"{name}_stride", np.dtype(np.int64))
            for name in ("addend", "preactivation", "result")
        ),
    ),
)


class Moves(NamedTuple):
    """The slots in which a thread stores its part of the next k-tile and loads more.

    A slot of the loop over a k-tile is 8 tensor-core instructions.
    """

    slot: int
    """The slot of the first store."""
    step: int
    """Slots from store to store."""
    ring: int
    """Loads in flight at a time."""


class Lines(NamedTuple):
    """Whether the lines of the operands run along the sum, or across it."""

    a: bool
    b: bool


WIDE = (256, 192, 32, 64, 96, 1)
NARROW = (256, 128, 32, 64, 64, 1)
SMALL = (128, 128, 32, 64, 64, 2)
SHORT = (128, 192, 16, 64, 96, 2)
"""The first six fields of a `TileConfig`, by what the tile is for."""


@dataclass(frozen=True)
class TileConfig:
    """The tile of the result that a CTA computes, `tile_inner` items of the sum at a time."""

    tile_rows: int
    tile_columns: int
    tile_inner: int
    warp_rows: int
    warp_columns: int
    ctas_per_sm: int
    a_moves: Moves
    b_moves: Moves
    a_sets: int
    """Sets of registers for fragments of A: 2 if there are enough registers."""
    models: float
    """The tensor utilisation of the main loop on a T4, by which tiles are chosen: with a global
    latency of 330 cycles, because the choice counts bytes by itself. If native, an estimate."""
    loaded: float | None = None
    """The utilisation under the load of all multiprocessors, where it is less by more than 0.03."""
    mma_k: int = 8
    """Items of the sum of one tensor-core instruction."""
    stages: int = 2
    """K-tiles in shared memory."""
    native: bool = False
    """Whether cp.async copies k-tiles to shared memory, from sm_80 on, instead of registers."""
    why: str | None = None
    """Why newer devices have this tile; None for Turing's, whose utilisation is modelled."""

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        warps = self.tile_rows // self.warp_rows * (self.tile_columns // self.warp_columns)
        return warps * WARP_SIZE

    @property
    def reason(self) -> str:
        """Why this tile exists."""
        if self.why is None:
            return f"models {self.gate:.2f}; {_REASONS[self.tile_rows, self.tile_columns]}"
        if self.native:
            ahead = f"cp.async keeps {self.stages - 1} k-tiles of {self.tile_inner} in flight"
            return f"{ahead}; {self.why}"
        return self.why

    @property
    def gate(self) -> float:
        """The utilisation under load, to which the tests hold the tile."""
        return self.models if self.loaded is None else self.loaded

    @property
    def shared_bytes(self) -> int:
        """Bytes of all stages of both operands."""
        return self.stages * 2 * self.tile_inner * (self.tile_rows + self.tile_columns)

    @property
    def move_macros(self) -> dict[str, int]:
        """The macros of the main loop: sets of fragments, and the slots of moves by registers."""
        if self.native:
            return {"A_SETS": self.a_sets}
        return {
            "A_SETS": self.a_sets,
            "MMA_K": self.mma_k,
            "A_SLOT": self.a_moves.slot,
            "A_STEP": self.a_moves.step,
            "A_RING": self.a_moves.ring,
            "B_SLOT": self.b_moves.slot,
            "B_STEP": self.b_moves.step,
            "B_RING": self.b_moves.ring,
        }


_REASONS = {
    (256, 192): "the largest tile: shared memory is busy for 0.71 of the loop",
    (256, 128): "192 columns would be partly empty, or leave no registers to decode codes",
    (128, 128): "for small results; two CTAs alternate",
    (128, 192): "for short sums, whose stores overlap the products of another CTA",
    (64, 128): "for few rows; bound by shared memory",
    (64, 64): "for the smallest results; four CTAs hide each other's loads and stores",
    (32, 128): "for results of few rows, which the loads of B bound",
}
Shape = Literal["wide", "narrow", "small", "short", "few", "tiny", "skinny"]
"""Kinds of tiles.

"wide" is the fastest; "narrow" is for results that would leave many of its columns empty; "small"
is for small results; "short" is for short sums, whose stores overlap the products of another CTA;
"few" is for few rows of a product with a quantised weight; "tiny" and "skinny" are for batches of
products with the smallest results, or with few rows.
"""


def single_config(arch: int, turing: TileConfig, b_moves: Moves) -> TileConfig:
    """Return the configuration for arrays that are loaded by single items.

    cp.async does not copy these: newer devices have Turing's tile with two steps an instruction,
    in 6 slots of twice the length.
    """
    if arch < NATIVE_ARCH:
        return turing
    a_moves = Moves(0, 1, 4)
    return replace(
        turing,
        mma_k=16,
        a_sets=2,
        a_moves=a_moves,
        b_moves=b_moves,
        why="single items pass registers",
    )


def item_by_item(traits: DeviceTraits) -> str:
    """Return the reason for loads of single items."""
    found = "lines that are no whole aligned vectors are loaded item by item"
    return f"{found}, not by cp.async" if traits.native else found


def lines_macro(along: bool) -> str:
    """Return the name of a direction of lines in the sources."""
    return "kAlong" if along else "kAcross"


def specialise_tile(
    kernel: KernelSpec,
    config: TileConfig,
    vec: int,
    out_vec: int,
    *,
    scalar: float = 0.48,
    **macros: Any,
) -> Specialisation:
    """Specialise a kernel that includes config.cuh: the configuration's macros, and its own.

    `scalar` is the utilisation of a T4 with single loads.
    """
    return kernel.specialise(
        threads=config.threads,
        shared_bytes=config.shared_bytes,
        # ptxas schedules split sums and activations differently.
        gates=Gates(config.gate, scalar=scalar, options=min(config.models - 0.12, config.gate)),
        reason=config.reason,
        TILE_ROWS=config.tile_rows,
        TILE_COLUMNS=config.tile_columns,
        TILE_INNER=config.tile_inner,
        WARP_ROWS=config.warp_rows,
        WARP_COLUMNS=config.warp_columns,
        MIN_CTAS=config.ctas_per_sm,
        VEC=vec,
        OUT_VEC=out_vec,
        NATIVE=int(config.native),
        STAGES=config.stages,
        **config.move_macros,
        **macros,
    )


_SUMS_THREADS = 256
SPLIT_VEC = 4
"""Columns of a thread that adds splits: 16 bytes of each split."""


@cache
def split_sums(
    dtype: str, vec: int, activation: str | None = None, *, paired: bool = False
) -> Specialisation:
    """Specialise the kernel that adds the splits of a product; `vec` columns a thread, 4 or 1."""
    return SPLIT_SUMS.specialise(
        threads=_SUMS_THREADS,
        reason="adds the parts of split sums, always in the same order",
        DTYPE=dtype,
        ACTIVATION=STRUCTS[activation],
        PAIRED=cpp_bool(paired),
        VEC=vec,
    )


_GROUP_LOG2 = 3  # of the tiles of rows that neighbouring CTAs compute
_RECIPROCAL_REACH = 2**30  # groups of CTAs times tiles of columns squared (params.cuh)

# A CTA's work before and after its loop takes as long as about 100 items of the sum, by a count of
# its instructions. If two CTAs share a multiprocessor, half of it overlaps the other's loop.
_OUTSIDE_LOOP = 100
# Operands come from L2, which is busy for 51 (1/rows + 1/columns) of the products' time on a T4. A
# part of that is not hidden. This is an estimate, which no GPU has confirmed.
_FROM_L2 = 20
# Work outside the loop of a split sum: float32 sums are written and read at a T4's 240 GB/s.
_STORING_PARTS = 1000
_WORTH_TIMING = 1.5  # relative to the fastest by the model: tilings up to that are tuned
_LEAST_PART = 512  # items of the sum for a CTA
OFFSET_BYTES = 2**32
"""Bytes from the lowest item of a tile to its highest that 32-bit offsets do not reach."""
_MOST_TILE_LINES = 256
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class Tiling(NamedTuple):
    """The division of a product among CTAs."""

    shape: Shape
    splits: int
    """CTAs that share a tile of the result; each adds up a part of the sum."""

    @property
    def name(self) -> str:
        """The name by which it is tuned."""
        return f"{self.shape}/{self.splits}"


@dataclass(frozen=True)
class TensorCoreProduct(ABC):
    """The product result = A B on tensor cores; subclasses are for a kind of B."""

    kernel: KernelSpec
    a: Matrix
    b: Matrix
    halves: int = 1
    """2 if the columns are a gate's and up's, interleaved, otherwise 1."""
    out_vec: int = VECTOR
    """Items of an access to the result."""
    members: int = 1
    """Products of these sizes in one launch."""
    dtype: str = "float16"
    """The dtype of floats; it leaves the choice of a tile as it is."""

    unit: ClassVar[int] = VECTOR
    """Parts of the sum are multiples of `unit` items."""

    @abstractmethod
    def config(self, arch: int, shape: Shape) -> TileConfig:
        """Return the configuration of a tile."""

    @abstractmethod
    def shapes(self, arch: int) -> tuple[Shape, ...]:
        """Return the tiles to choose from."""

    @abstractmethod
    def specialise(self, arch: int, shape: Shape, out_vec: int, *, split: bool) -> Specialisation:
        """Specialise the product without an epilogue, or with `split` one part of its sum."""

    @abstractmethod
    def passed(self, params: np.ndarray) -> np.ndarray:
        """Return the C struct that the kernel takes, which contains ProductParams."""

    @property
    def key(self) -> tuple[object, ...]:
        """The problem of a tuned choice: sizes, halves, directions of lines, items of accesses."""
        a_lines, b_lines = ("along" if along else "across" for along in self.lines)
        sizes = self.a.rows, self.b.columns, self.a.columns
        return (*sizes, self.halves, a_lines, b_lines, self.vec, self.out_vec)

    @property
    def lines(self) -> Lines:
        """Whether each operand's lines run along the sum."""
        return Lines(self.a.along_columns, not self.b.along_columns)

    @property
    def vec(self) -> int:
        """Items of a load. If lines hold two halves, each half has to start at a whole vector."""
        half = VECTOR if self.lines.b else self.b.columns // self.halves
        return whole_vector(self.a.vector, self.b.vector, *([half] if self.halves > 1 else []))

    def tiles(self, arch: int, shape: Shape) -> tuple[int, int]:
        """Return how many tiles of rows and of columns there are."""
        config = self.config(arch, shape)
        return -(-self.a.rows // config.tile_rows), -(-self.b.columns // config.tile_columns)

    def chosen(self, traits: DeviceTraits, *, may_split: bool = False) -> Tiling:
        """Return the tiling tuned for the device, otherwise the fastest by the model."""
        usual = self.tiling(traits, may_split=may_split)
        near = self.near(traits, self.duration(traits, usual), may_split=may_split)
        among = {usual.name: usual, **near}
        problem = *self.key, "parts" if may_split else "whole"
        return traits.choices.pick(self.kernel.entry, problem, among, usual=usual.name)

    def tiling(self, traits: DeviceTraits, *, may_split: bool = False) -> Tiling:
        """Choose the tiling that takes the least time on a device by the model of Turing."""
        return min(
            self._tilings(traits.arch, may_split), key=lambda tiling: self.duration(traits, tiling)
        )

    def near(
        self, traits: DeviceTraits, least: float, *, may_split: bool = False
    ) -> dict[str, Tiling]:
        """Return by name the tilings that the model puts near a duration: those worth timing."""
        tilings = self._tilings(traits.arch, may_split)
        return {t.name: t for t in tilings if self.duration(traits, t) <= _WORTH_TIMING * least}

    def _tilings(self, arch: int, may_split: bool) -> list[Tiling]:
        inner = self.a.columns
        most = max(inner // _LEAST_PART, 1) if may_split else 1
        return [
            Tiling(shape, splits)
            for shape in self.shapes(arch)
            for splits in _SPLITS
            if splits <= most and self.part(splits) * (splits - 1) < max(inner, 1)
        ]

    def duration(self, traits: DeviceTraits, tiling: Tiling) -> float:
        """Return the time on a device, in items of the sum of an item of the result."""
        config = self.config(traits.arch, tiling.shape)
        down, across = self.tiles(traits.arch, tiling.shape)
        ctas = down * across * tiling.splits * self.members
        outside = _STORING_PARTS if tiling.splits > 1 else _OUTSIDE_LOOP
        item = 1 / config.models + _FROM_L2 * (1 / config.tile_rows + 1 / config.tile_columns)
        items = self.part(tiling.splits) * item + outside / config.ctas_per_sm
        resident = 1 if config.native else config.ctas_per_sm  # with cp.async one CTA is as fast
        wave = resident * config.tile_rows * config.tile_columns * items
        return -(-ctas // (traits.multiprocessors * resident)) * wave

    def geometry(self, arch: int, tiling: Tiling) -> tuple[int, np.ndarray]:
        """Return the number of CTAs, and the C struct ProductParams without the results.

        The CTAs of a tile are a power of two; some of them may have no part of the sum.
        """
        row_tiles, column_tiles = self.tiles(arch, tiling.shape)
        group_log2 = min((row_tiles - 1).bit_length(), _GROUP_LOG2)
        while (row_tiles >> group_log2) * column_tiles**2 >= _RECIPROCAL_REACH:
            group_log2 += 1
        groups = -(-row_tiles // (1 << group_log2))
        splits_log2 = (tiling.splits - 1).bit_length()
        params = new_struct(PRODUCT_PARAMS)
        params["a_stride"], params["b_stride"] = self.a.leading, self.b.leading
        params["rows"], params["columns"] = self.a.rows, self.b.columns // self.halves
        params["inner"], params["split_inner"] = self.a.columns, self.part(tiling.splits)
        params["group_log2"], params["splits_log2"] = group_log2, splits_log2
        params["column_tiles"] = column_tiles
        params["column_tiles_reciprocal"] = -(-(2**31) // column_tiles)
        return (groups << group_log2 + splits_log2) * column_tiles, params

    def part(self, splits: int) -> int:
        """Return how many items of the sum a CTA adds up: a multiple of `unit` if split."""
        part = -(-self.a.columns // splits)
        return -(-part // self.unit) * self.unit if splits > 1 else part


def forward_tiling(
    product: TensorCoreProduct, split_product: TensorCoreProduct, traits: DeviceTraits, worth: float
) -> Tiling:
    """Choose a forward's tiling: split only if that takes less than `worth` of the time."""
    usual, parts = product.tiling(traits), split_product.tiling(traits, may_split=True)
    least = product.duration(traits, usual)
    if parts.splits > 1 and split_product.duration(traits, parts) < worth * least:
        usual, least = parts, split_product.duration(traits, parts)
    among = {usual.name: usual, **product.near(traits, least)}
    split = split_product.near(traits, least, may_split=True)
    among |= {name: tiling for name, tiling in split.items() if tiling.splits > 1}
    return traits.choices.pick(product.kernel.entry, product.key, among, usual=usual.name)


def whole_vector(*items: int) -> int:
    """Return a vector's items if all of these are multiples of it, otherwise 1."""
    return VECTOR if all(each % VECTOR == 0 for each in items) else 1


Slot = int | None


def product_steps(
    product: TensorCoreProduct,
    tiling: Tiling,
    traits: DeviceTraits,
    planner: Planner[Any],
    operands: tuple[Slot, ...],
    *,
    result: tuple[Slot, Matrix],
    addend: Slot = None,
    added: Matrix | None = None,
) -> tuple[Step, ...]:
    """Plan result = A B + addend; `added` is the layout of the addend if it is not the result."""
    out, matrix = result
    added = added or matrix
    split, out_vec = tiling.splits > 1, whole_vector(matrix.vector, added.vector)
    _explain(traits, product, tiling)
    ctas, params = product.geometry(traits.arch, tiling)
    params["out_stride"], params["addend_stride"] = matrix.leading, added.leading
    specialisation = product.specialise(traits.arch, tiling.shape, out_vec, split=split)
    passed = product.passed(params)
    if not split:
        return (Step.of(specialisation, ctas, (*operands, addend, None, out), passed),)
    rows, columns, parts = product.a.rows, product.b.columns, tiling.splits
    partials = planner.scratch(rows * columns * parts)
    vec = SPLIT_VEC if out_vec > 1 else 1
    sums = split_sums(product.dtype, vec)
    threads = -(-rows * columns // vec)
    return (
        Step.of(specialisation, ctas, (*operands, None, partials, None), passed),
        Step.of(
            sums,
            -(-threads // sums.threads),
            (partials, None, addend, None, out),
            *(rows, columns, parts, added.leading, 0, matrix.leading),
        ),
    )


def split_forward(
    draft: ForwardDraft, product: TensorCoreProduct, tiling: Tiling, operands: tuple[Slot, ...]
) -> tuple[Step, ...]:
    """Plan a forward whose sum is split, perhaps in one part; the epilogue follows the sum."""
    problem, slots = draft.problem, draft.slots
    columns = problem.outer
    _explain(draft.traits, product, tiling)
    ctas, params = product.geometry(draft.traits.arch, tiling)
    vec = whole_vector(problem.weight_columns)
    specialisation = product.specialise(draft.traits.arch, tiling.shape, vec, split=True)
    partials = draft.planner.scratch(product.a.rows * product.b.columns * tiling.splits)
    results = (problem.residual, problem.preactivation, problem.out)
    items = math.gcd(columns, problem.vector(*results, problem.b))
    vec = SPLIT_VEC if items % SPLIT_VEC == 0 else 1
    sums = split_sums(product.dtype, vec, problem.scalar_activation, paired=problem.gated)
    threads = -(-problem.rows * columns // vec)
    return (
        Step.of(specialisation, ctas, (*operands, None, partials, None), product.passed(params)),
        Step.of(
            sums,
            -(-threads // sums.threads),
            (partials, slots.b, slots.residual, slots.preactivation, slots.out),
            *(problem.rows, columns, tiling.splits),
            *(0 if matrix is None else matrix.leading for matrix in results),
        ),
    )


def _explain(traits: DeviceTraits, product: TensorCoreProduct, tiling: Tiling) -> None:
    if product.vec == 1:
        traits.choices.because(item_by_item(traits))
    if tiling.splits > 1:
        traits.choices.because(
            f"tiles do not fill the GPU evenly: {tiling.splits} CTAs split the sum of each"
        )


def whole_forward(
    draft: ForwardDraft,
    product: TensorCoreProduct,
    tiling: Tiling,
    specialisation: Specialisation,
    operands: tuple[Slot, ...],
) -> tuple[Step, ...]:
    """Plan a forward whose kernel has the epilogue: one launch."""
    problem, slots = draft.problem, draft.slots
    _explain(draft.traits, product, tiling)
    ctas, params = product.geometry(draft.traits.arch, tiling)
    params["out_stride"] = problem.out.leading
    if problem.residual is not None:
        params["addend_stride"] = problem.residual.leading
    if problem.preactivation is not None:
        params["preactivation_stride"] = problem.preactivation.leading
    arrays = (*operands, slots.b, slots.residual, slots.preactivation, slots.out)
    return (Step.of(specialisation, ctas, arrays, product.passed(params)),)


def forward_vector(problem: ForwardProblem) -> int:
    """Return how many items the forward's epilogue loads and stores at once."""
    # The second half of a preactivation starts at a whole vector too.
    half = problem.outer if problem.gated else VECTOR
    results = (problem.out, problem.residual, problem.preactivation)
    return whole_vector(problem.vector(*results), half)


def takes(problem: ForwardProblem | BackwardProblem) -> bool:
    """Tell whether the kernels' 32-bit offsets reach all that one tile of each array spans."""
    return all(tile_bytes(each, problem.gated) < OFFSET_BYTES for each in problem.matrices)


def tile_bytes(matrix: Matrix, gated: bool) -> int:
    """Return the bytes between a tile's lines; with two halves, a tile may span all lines."""
    lines = matrix.rows if matrix.along_columns else matrix.columns
    reached = lines if gated else min(lines, _MOST_TILE_LINES)
    return reached * abs(matrix.leading) * matrix.itemsize
