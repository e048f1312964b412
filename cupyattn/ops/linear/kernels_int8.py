"""Products of int8 rows with int8 weights on tensor cores: configurations and plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from cupyattn.ops.linear.kernels_quantised import dequantize_step
from cupyattn.ops.linear.kernels_rows import (
    RotatedSide,
    contiguous_rows,
    rotate_step,
    rows_step,
    scratch_items,
)
from cupyattn.ops.linear.native_tiles import NATIVE_TILES
from cupyattn.ops.linear.problem import STRUCTS, ForwardDraft, ForwardProblem
from cupyattn.ops.linear.tiles import (
    NARROW,
    PRODUCT_STRUCT,
    SHORT,
    SMALL,
    VECTOR,
    WIDE,
    Moves,
    Shape,
    TensorCoreProduct,
    TileConfig,
    forward_vector,
    specialise_tile,
    takes,
    whole_forward,
)
from cupyattn.ops.linear.weight_formats import UNIT
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.plan import Step
from cupyattn.runtime.spec import KernelSpec, Pointer, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.tables import cpp_bool, pairs, rows_for

FORWARD = KernelSpec(
    "linear_forward_int8",
    "linear/int8/forward.cu",
    (
        *inputs("x", "x_scales", "w", "w_scales"),
        *inputs("b", "residual", optional=True),
        Pointer("preactivation", optional=True),
        Pointer("out"),
        PRODUCT_STRUCT,
    ),
)
KERNELS = (FORWARD,)


_FEW = (64, 128, 32, 32, 64, 2)

# An item of the sum is a pair of codes: a tile takes the bytes, the registers and, on a T4, the
# cycles that float16's takes for as many items. `models` is by the static model of the machine code
# (NVRTC 12.9.86, 2026-11-28, +-0.05). Of 110 to 270 slots that were tried for "wide" and
# "short", these model 0.92 or more where global loads take 330 and 600 cycles, and spill in no
# epilogue: 0.954 and 0.931, 0.927 and 0.944. Slots that are better at 330 alone, 0.966 and 0.953,
# fall to 0.913 and 0.883 at 600. Shared memory bounds "few".
_TURING: Mapping[Shape, TileConfig] = MappingProxyType(
    {
        "wide": TileConfig(*WIDE, Moves(7, 2, 2), Moves(4, 4, 1), 1, 0.954, loaded=0.91),
        "narrow": TileConfig(*NARROW, Moves(1, 4, 3), Moves(8, 5, 2), 1, 0.919),
        "small": TileConfig(*SMALL, Moves(5, 2, 4), Moves(7, 2, 2), 2, 0.91, loaded=0.87),
        "short": TileConfig(*SHORT, Moves(3, 3, 2), Moves(3, 2, 2), 1, 0.927, loaded=0.9),
        "few": TileConfig(*_FEW, Moves(4, 0, 2), Moves(2, 1, 3), 2, 0.667),
    }
)


def _native(tiles: Mapping[Shape, TileConfig]) -> Mapping[Shape, TileConfig]:
    """Return configurations with cp.async for int8.

    The largest tile has k-tiles of 32 pairs, because with 64 a gated epilogue in float32 spills.
    """
    wide = tiles["wide"]
    halves = wide.tile_inner // 32
    wide = replace(wide, tile_inner=32, stages=wide.stages * halves)
    return {**tiles, "wide": wide}


FORWARDS: Mapping[int, Mapping[Shape, TileConfig]] = {
    75: _TURING,
    **{arch: _native(tiles) for arch, tiles in NATIVE_TILES.items()},
}
"""Configurations by architecture and tile. Newer devices multiply 16 x 8 x 32 items at a time."""

LEAST_ROWS = {False: 112, True: 48}
"""Fewest rows of x for int8 x int8, by whether the device is a GeForce.

With fewer, reading the weight takes longer than multiplying it in float16. The rooflines of both
cross at 112 rows on a T4, at 51 on an RTX 2080 Ti and at 37 on an RTX 2060 Super, whose float16
products with float32 sums run at half rate.
"""


def shapes_for(arch: int) -> tuple[Shape, ...]:
    """Return the tiles to choose from."""
    return tuple(rows_for(FORWARDS, arch))


@cache
def forward(
    arch: int,
    shape: Shape,
    dtype: str,
    out_vec: int,
    *,
    activation: str | None = None,
    paired: bool = False,
) -> Specialisation:
    """Specialise the product; `out_vec` is 8 for whole accesses to results, otherwise 1."""
    return specialise_tile(
        FORWARD,
        rows_for(FORWARDS, arch)[shape],
        VECTOR,
        out_vec,
        DTYPE=dtype,
        ACTIVATION=STRUCTS[activation],
        PAIRED=cpp_bool(paired),
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every tile, and activations, dtypes and accesses in pairs."""
    for shape in shapes_for(arch):
        yield forward(arch, shape, "float16", VECTOR)
    kinds = [(name, paired) for name in STRUCTS if name for paired in (False, True)]
    for (activation, paired), dtype, shape, out_vec in pairs(
        kinds, STORAGE, ("wide", "short"), (VECTOR, 1)
    ):
        yield forward(arch, shape, dtype, out_vec, activation=activation, paired=paired)


@dataclass(frozen=True)
class Int8Product(TensorCoreProduct):
    """A product of int8 rows and int8 columns, in pairs of neighbours along the sum."""

    unit: ClassVar[int] = UNIT // 2

    def config(self, arch: int, shape: Shape) -> TileConfig:
        """Return the configuration of a tile."""
        return rows_for(FORWARDS, arch)[shape]

    def shapes(self, arch: int) -> tuple[Shape, ...]:
        """Return the tiles to choose from."""
        return shapes_for(arch)

    def specialise(self, arch: int, shape: Shape, out_vec: int, *, split: bool) -> Specialisation:
        """Refuse: only the forward exists, which does not split sums."""
        raise NotImplementedError("an int8 product has its epilogue")

    def passed(self, params: np.ndarray) -> np.ndarray:
        """Return the C struct that the kernel takes."""
        return params[()]


def is_chosen(problem: ForwardProblem, traits: DeviceTraits) -> bool:
    """Tell whether a call multiplies int8 by int8 on a device, and report why."""
    rows = problem.row_format
    if rows is None:
        return False
    if not traits.tensor_cores:
        traits.choices.because("forward: without tensor cores x is multiplied as floats")
        return False
    least = LEAST_ROWS[traits.geforce]
    if rows.dtype is None and problem.rows < least:
        traits.choices.because(
            f"forward: M = {problem.rows} is below {least}, where reading the weight takes longer "
            "than multiplying it: x is multiplied as floats"
        )
        return False
    if not takes(problem):
        return False
    traits.choices.because("forward: int8 rows and int8 weights multiply on tensor cores")
    return True


def forward_steps(draft: ForwardDraft) -> tuple[Step, ...]:
    """Plan the forward of int8 rows: perhaps the launch that quantises x, then the product."""
    problem, slots, traits = draft.problem, draft.slots, draft.traits
    rows, inner = problem.rows, problem.inner
    row_format = problem.row_format
    assert row_format is not None
    before: tuple[Step, ...] = ()
    codes, scales = slots.x, slots.x_scales
    if row_format.dtype is None:
        codes, scales = (
            draft.planner.scratch(scratch_items(rows * inner, 1)),
            draft.planner.scratch(rows),
        )
        dtype = problem.dtype.name
        before = (rows_step(problem.x, dtype, row_format.rotation, slots.x, (codes, scales)),)
    pair = np.dtype(np.float16)
    x = contiguous_rows(rows, inner // 2, pair)
    w = contiguous_rows(problem.weight_columns, inner // 2, pair).transposed
    out_vec = _stores(problem)
    product = Int8Product(FORWARD, x, w, 2 if problem.gated else 1, out_vec)
    tiling = product.chosen(traits)
    specialisation = forward(
        traits.arch,
        tiling.shape,
        problem.dtype.name,
        out_vec,
        activation=problem.scalar_activation,
        paired=problem.gated,
    )
    operands = (codes, scales, slots.codes, slots.scales)
    return (*before, *whole_forward(draft, product, tiling, specialisation, operands))


def _stores(problem: ForwardProblem) -> int:
    """Return 8 if the epilogue's accesses are whole, otherwise 1."""
    if problem.dtype.itemsize < 4:
        return forward_vector(problem)
    results = (problem.out, problem.residual, problem.preactivation)
    half = problem.outer if problem.gated else 2
    return VECTOR if problem.vector(*results) % 2 == 0 and half % 2 == 0 else 1


def float_rows(draft: ForwardDraft) -> tuple[tuple[Step, ...], ForwardDraft]:
    """Return the launches that make floats of x for a weight-only product, and its draft.

    A rotated weight takes rotated rows.
    """
    problem, slots = draft.problem, draft.slots
    rows, inner, dtype = problem.rows, problem.inner, problem.dtype
    given = problem.row_format is not None and problem.row_format.dtype is not None
    if not given and problem.quantised.rotation is None:
        return (), draft
    out = contiguous_rows(rows, inner, dtype)
    slot = draft.planner.scratch(scratch_items(rows * inner, dtype.itemsize))
    if given:
        arrays = (slots.x, slots.x_scales, None, slot)  # a weight of one block a row has as many
        step = dequantize_step("int8", dtype.name, out, inner, arrays)
    else:
        name = dtype.name
        step = rotate_step(RotatedSide(problem.x, name, slots.x), RotatedSide(out, name, slot))
    return (step,), replace(
        draft, problem=replace(problem, x=out), slots=replace(slots, x=slot, x_scales=None)
    )
