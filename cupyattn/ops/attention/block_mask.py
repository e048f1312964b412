"""Block masks: a mask_mod's tiles on a device, and what kernels that walk tiles take of them."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cupyattn.ops.attention.kernels import block_mask as configs
from cupyattn.ops.attention.kernels.block_mask import LIST_HEAD, TILE, WARPS
from cupyattn.ops.attention.kernels.modifiers import BLOCK_LISTS
from cupyattn.ops.attention.modifiers import (
    BLOCK_MASK,
    UserFunction,
    modifiers_of,
    require_valid_arrays,
    run_compiled,
    shown_names,
    strides_of,
)
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.by_name import Description, Operands, Plan, Step, layouts_of, starts_of
from cupyattn.runtime.checks import require_item_alignment
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Output

EMPTY, PARTIAL, FULL = range(3)
"""What a tile may be: no, some or all of its scores are seen."""

_PAIR = 2  # words


def tiles_shape(shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return the shape of the tiles of scores (B, H, Sq, Sk).

    Examples
    --------
    >>> tiles_shape((2, 1, 16, 17))
    (2, 1, 1, 2)
    """
    batch, heads, sq, sk = shape
    return batch, heads, -(-sq // TILE), -(-sk // TILE)


def require_block_mask(function: UserFunction, operands: Operands, *, on_cpu: bool) -> None:
    """Raise unless the arrays of a mask_mod can be read."""
    layouts = layouts_of(operands.description)
    require_valid_arrays({"mask_mod": function}, layouts, on_cpu=on_cpu)


def run_block_mask(
    device: Device, function: UserFunction, shape: tuple[int, int, int, int], operands: Operands
) -> Array:
    """Return the tiles of a mask_mod for scores of a shape."""
    plan = _tiles_plan(operands.description, function, shape)
    return run_compiled(device, plan, operands, {"mask_mod": function})["tiles"]


@lru_cache(maxsize=4096)
def _tiles_plan(
    description: Description, function: UserFunction, shape: tuple[int, int, int, int]
) -> Plan:
    functions: dict[str, UserFunction | None] = {"mask_mod": function}
    layouts = layouts_of(description)
    require_item_alignment(layouts, starts_of(description), shown_names(functions))
    modifiers = modifiers_of(functions, layouts)
    tiles = tiles_shape(shape)
    count = math.prod(tiles)
    values = count, *shape[1:], *strides_of(modifiers, layouts)
    step = Step.of(configs.tiles(modifiers), -(-count // WARPS), *values)
    return Plan((step,), (("tiles", Output(tiles, np.dtype(np.uint8))),))


def require_fitting_blocks(problem: AttentionProblem) -> None:
    """Raise ValueError for a block mask that was not made for scores like the problem's."""
    mask_mod = problem.functions["mask_mod"]
    if mask_mod is None or mask_mod.blocks is None:
        return
    blocks = mask_mod.blocks
    for letter, made, given, broadcasts in zip(
        ("B", "H", "Sq", "Sk"), blocks.shape, problem.scores_shape, (True, True, False, False),
        strict=True,
    ):  # fmt: skip
        if made == given or (broadcasts and made == 1):
            continue
        raise error(
            ValueError,
            f"mask_mod is a block mask for {letter} = {made}, and the call has {letter} = {given}",
            f"it is for the call's {letter}" + (", or for 1, which broadcasts" * broadcasts),
            f"make another one with block_mask(mask_mod, Sq, Sk), {letter} = {given}",
        )
    first = problem.first_position
    if blocks.q_offset is not None and first != blocks.q_offset:
        raise error(
            ValueError,
            f"mask_mod is a block mask for q_offset = {blocks.q_offset}, and the call's is "
            f"{'another in each sequence' if first is None else first}",
            "they are the same, or the block mask was made without q_offset",
            "make another one, or leave q_offset out: expressions are told the numbers of queries, "
            "whatever their positions",
        )


class BlockLists(NamedTuple):
    """The lists of a call's block mask for one kernel; nothing for a call without one."""

    steps: tuple[Step, ...]
    """What makes them."""
    scratch: dict[str, int]
    """The floats that they take the place of, by name."""
    renamed: dict[str, str]
    """By what name the kernel takes them."""


def block_lists(
    problem: AttentionProblem,
    name: str,
    *,
    rows: int,
    keys: int,
    part: int | None = None,
    of_keys: bool = False,
) -> BlockLists:
    """Plan the lists for a kernel whose tiles have so many rows and keys.

    Its CTAs own rows and walk keys; `of_keys` the other way round. `part` is how many of its own
    rows, or keys, a warp has; None where warps do not ask for theirs.
    """
    if BLOCK_MASK not in problem.layouts:
        return BlockLists((), {}, {})
    batch, heads, *counts = problem.layouts[BLOCK_MASK].shape
    spans = [rows // TILE, keys // TILE]
    own, walked = (-(-count // span) for count, span in zip(counts, spans, strict=True))
    if of_keys:
        own, walked = walked, own
        spans.reverse()
    part_span = spans[0] if part is None else part // TILE
    group = problem.heads // problem.kv_heads if of_keys and heads > 1 else 1
    lists, groups = batch * heads * own, batch * heads // group
    named = {"lists": name}
    steps = (
        Step.of(configs.lists(of_keys), lists, *counts, *spans, part_span, renamed=named),
        Step.of(configs.order(), -(-lists // WARPS), groups, group, own, walked, renamed=named),
    )
    return BlockLists(steps, {name: lists * (LIST_HEAD + walked) * _PAIR}, {BLOCK_LISTS.name: name})
