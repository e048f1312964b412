"""A product on tensor cores: which tile, how many CTAs, which of them computes what."""

from __future__ import annotations

from typing import Any, NamedTuple

from cupyattn.ops.linear import kernels_quantised_tile as quantised_tile
from cupyattn.ops.linear import kernels_tensor_core as tensor_core
from cupyattn.ops.linear.kernels_tiles import Lines, ProductConfig, Shape, shapes_for
from cupyattn.ops.linear.problem import Matrix
from cupyattn.ops.linear.structs import PRODUCT_PARAMS, QUANTISED_TILE_PARAMS
from cupyattn.ops.linear.weight_formats import UNIT
from cupyattn.runtime.card import Card
from cupyattn.runtime.spec import KernelSpec, Specialisation
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.structs import new_struct

VECTOR = vector_items("float16")
_GROUP_LOG2 = 3  # tiles of rows that neighbouring CTAs go down
_RECIPROCAL_REACH = 2**30  # groups of CTAs times tiles of columns squared (params.cuh)

# What a CTA does before and behind its loop takes about as long as so many items of the sum, by a
# count of its instructions; where two CTAs share an SM, half of it passes under the other's loop.
_OUTSIDE_LOOP = 100
# Operands come from L2, which a T4 keeps busy for 51 (1/rows + 1/columns) of its products' time: a
# part of that shows: an estimate, which no GPU has confirmed.
_FROM_L2 = 20
_STORING_PARTS = 1000  # the same of float32 parts, written and read once more at a T4's 240 GB/s
_WORTH_TIMING = 1.5  # times the least that the model sees: which tilings are tuned
_LEAST_PART = 512  # items of the sum for a CTA
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class Tiling(NamedTuple):
    """How a product is shared out."""

    shape: Shape
    splits: int
    """CTAs that share a tile of the result, each a part of the sum."""

    @property
    def name(self) -> str:
        """What it is chosen by."""
        return f"{self.shape}/{self.splits}"


class Blocks(NamedTuple):
    """How B is quantised."""

    format: str
    blocks: int
    """In a row of codes."""
    block_log2: int
    """Weights of a block; 31 where a row is one."""


class Product(NamedTuple):
    """result = A B, whatever these are."""

    kernel: KernelSpec
    a: Matrix
    b: Matrix
    halves: int = 1
    """Of the columns, which lie in turn."""
    out_vec: int = VECTOR
    """Items of an access to the result."""
    quantised: Blocks | None = None
    """Of a B whose lines are rows of codes."""

    @property
    def lines(self) -> Lines:
        """Whether each operand's lines run along the sum."""
        return Lines(self.a.along_columns, not self.b.along_columns)

    @property
    def vec(self) -> int:
        """Items of a load. Where lines hold halves, each has to start at a whole vector."""
        half = VECTOR if self.lines.b else self.b.columns // self.halves
        return whole_vector(self.a.vector, self.b.vector, *([half] if self.halves > 1 else []))

    def row(self, arch: int, shape: Shape) -> ProductConfig:
        """Return the table row of a tile."""
        if self.quantised is not None:
            return quantised_tile.row_of(arch, self.quantised.format, shape, self.lines.b)
        return tensor_core.row_of(self.kernel, arch, shape, self.lines)

    def specialise(self, arch: int, shape: Shape, out_vec: int, *, split: bool) -> Specialisation:
        """Specialise the product without anything behind it, or with `split` a part of it."""
        if self.quantised is None:
            lines, vec = self.lines, self.vec
            return tensor_core.product(arch, shape, lines, vec, out_vec, split=split)
        name, along = self.quantised.format, self.lines.b
        return quantised_tile.product(
            arch, name, shape, self.vec, out_vec, along=along, split=split
        )

    def tiles(self, arch: int, shape: Shape) -> tuple[int, int]:
        """Return how many tiles of rows and of columns there are."""
        row = self.row(arch, shape)
        return -(-self.a.rows // row.tile_rows), -(-self.b.columns // row.tile_columns)

    def chosen(self, card: Card, *, may_split: bool = False) -> Tiling:
        """Return what was chosen for the card, otherwise what the model sees as fastest."""
        usual = self.tiling(card, may_split=may_split)
        near = self.near(card, self.duration(card, usual), may_split=may_split)
        among = {usual.name: usual, **near}
        problem = *self.key, "parts" if may_split else "whole"
        return card.choices.pick(self.kernel.entry, problem, among, usual=usual.name)

    def tiling(self, card: Card, *, may_split: bool = False) -> Tiling:
        """Choose what takes the least time on a card, as the model of Turing sees it."""
        return min(self._tilings(may_split), key=lambda tiling: self.duration(card, tiling))

    def near(self, card: Card, least: float, *, may_split: bool = False) -> dict[str, Tiling]:
        """Return by name what the model sees not far above a duration: what is worth timing."""
        tilings = self._tilings(may_split)
        return {t.name: t for t in tilings if self.duration(card, t) <= _WORTH_TIMING * least}

    def _tilings(self, may_split: bool) -> list[Tiling]:
        inner = self.a.columns
        most = max(inner // _LEAST_PART, 1) if may_split else 1
        if self.quantised is not None:
            shapes = quantised_tile.shapes_for(self.vec)
        else:
            shapes = shapes_for(self.vec, self.out_vec, self.lines)
        return [
            Tiling(shape, splits)
            for shape in shapes
            for splits in _SPLITS
            if splits <= most and self.part(splits) * (splits - 1) < max(inner, 1)
        ]

    @property
    def key(self) -> tuple[object, ...]:
        """What a choice is for: sizes, halves, how lines lie, items of accesses, the format."""
        a_lines, b_lines = ("along" if along else "across" for along in self.lines)
        sizes = self.a.rows, self.b.columns, self.a.columns
        how = self.halves, a_lines, b_lines, self.vec, self.out_vec
        return (*sizes, *how, *(() if self.quantised is None else (self.quantised.format,)))

    def duration(self, card: Card, tiling: Tiling) -> float:
        """Return the time on a card, in items of the sum of an item of the result."""
        row = self.row(card.arch, tiling.shape)
        down, across = self.tiles(card.arch, tiling.shape)
        ctas = down * across * tiling.splits
        outside = _STORING_PARTS if tiling.splits > 1 else _OUTSIDE_LOOP
        item = 1 / row.models + _FROM_L2 * (1 / row.tile_rows + 1 / row.tile_columns)
        items = self.part(tiling.splits) * item + outside / row.ctas_per_sm
        wave = row.ctas_per_sm * row.tile_rows * row.tile_columns * items
        return -(-ctas // (card.multiprocessors * row.ctas_per_sm)) * wave

    def geometry(self, arch: int, tiling: Tiling) -> tuple[int, Any]:
        """Return how many CTAs it takes, and the C struct ProductParams without the results.

        Those of a tile are a power of two, of which some may have no part of the sum.
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

    def passed(self, params: Any) -> Any:
        """Return the C struct that the kernel takes, of ProductParams."""
        if self.quantised is None:
            return params[()]
        own = new_struct(QUANTISED_TILE_PARAMS)
        own["product"] = params
        own["blocks"], own["block_log2"] = self.quantised.blocks, self.quantised.block_log2
        return own[()]

    def part(self, splits: int) -> int:
        """Return how many items of the sum a CTA adds up: whole vectors, or runs of blocks."""
        part = -(-self.a.columns // splits)
        unit = VECTOR if self.quantised is None else UNIT
        return -(-part // unit) * unit if splits > 1 else part


def forward_tiling(product: Product, in_parts: Product, card: Card, worth: float) -> Tiling:
    """Choose for a forward: whole, or in parts where these take less than `worth` of its time."""
    usual, parts = product.tiling(card), in_parts.tiling(card, may_split=True)
    least = product.duration(card, usual)
    if parts.splits > 1 and in_parts.duration(card, parts) < worth * least:
        usual, least = parts, in_parts.duration(card, parts)
    among = {usual.name: usual, **product.near(card, least)}
    split = in_parts.near(card, least, may_split=True)
    among |= {name: tiling for name, tiling in split.items() if tiling.splits > 1}
    return card.choices.pick(product.kernel.entry, product.key, among, usual=usual.name)


def whole_vector(*items: int) -> int:
    """Return a vector's items if all of these are multiples of it, otherwise 1."""
    return VECTOR if all(each % VECTOR == 0 for each in items) else 1
