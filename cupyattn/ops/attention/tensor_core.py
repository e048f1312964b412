"""The plan of the tensor-core forward, which takes float16."""

from __future__ import annotations

from typing import Any

from cupyattn.ops.attention.kernels.options import FlashOptions
from cupyattn.ops.attention.kernels.tensor_core import forward
from cupyattn.ops.attention.kernels.tensor_core.forward_rows import (
    TALL,
    FlashConfig,
    admissible_rows,
    flash_longest_tile,
    flash_row,
)
from cupyattn.ops.attention.modifiers import BLOCK_MASK
from cupyattn.ops.attention.params import (
    Starts,
    flash_options,
    require_near_rows,
    whole_vectors,
)
from cupyattn.ops.attention.problem import (
    AttentionProblem,
    PackedProblem,
    forward_outputs,
    result_layouts,
)
from cupyattn.ops.attention.split_keys import num_splits, split_plan, whole_plan
from cupyattn.ops.attention.structs import ROTARY_TABLES
from cupyattn.runtime.by_name import Plan
from cupyattn.runtime.card import Card
from cupyattn.runtime.storage import VECTOR_BYTES, vector_items
from cupyattn.runtime.structs import new_struct

_TALL_GAIN = 1.05
"""How many more rows tall tiles may compute: they model 1.12 of the others' speed."""


def forward_plan(
    problem: AttentionProblem, start_of: Starts, card: Card, *, return_lse: bool
) -> Plan:
    """Plan the forward."""
    arch, dims = card.arch, (problem.head_dim, problem.head_dim_v)
    require_near_rows(problem, ("k", "v"), flash_longest_tile(arch, *dims))
    packed = isinstance(problem, PackedProblem)
    outputs = forward_outputs(problem, return_lse)
    results = result_layouts(problem, outputs)
    rows = [(start_of[name], problem.layouts[name].strides) for name in ("q", "k", "v")]
    rows += [(start_of.get("out", 0), results["out"].strides)]
    vec = whole_vectors(vector_items(problem.dtype.name), problem, rows)
    together = 2 if problem.dropout_p else 4  # a Philox call serves pairs of keys
    options = flash_options(problem, start_of, together)
    row = _row(problem, card, options, vec)
    tables: tuple[Any, ...] = ()
    if "cos" in problem.layouts:
        table = problem.layouts["cos"].dtype.name
        kernel = forward.rotary(arch, *dims, vec, options, table, problem.interleaved, packed)
        tables = (_tables(problem),)
    elif (splits := num_splits(problem, row, card)) > 1:
        kernel = forward.split(arch, *dims, vec, options._replace(sinks="void"), row)
        return split_plan(problem, kernel, row, splits, outputs)
    elif packed:
        kernel = forward.varlen(arch, *dims, vec, options)
    else:
        kernel = forward.flash(arch, *dims, vec, options, row)
    return whole_plan(problem, kernel, row, outputs, *tables)


def _row(problem: AttentionProblem, card: Card, options: FlashOptions, vec: int) -> FlashConfig:
    """Return the row: of dense calls that take the plain table's, what was chosen for the card.

    Not under dropout, for whose random numbers tiles are whole or half of 32 keys.
    """
    dims = problem.head_dim, problem.head_dim_v
    among = admissible_rows(card.arch, *dims)
    (name, plain), *_ = among.items()
    usual = flash_row(card.arch, *dims, options)
    of_its_own = isinstance(problem, PackedProblem) or "cos" in problem.layouts
    if of_its_own or options.dropout or BLOCK_MASK in problem.layouts or usual is not plain:
        return usual
    tall = among.get(TALL)
    if tall and vec > 1 and _gains_from_tall_tiles(problem.sq, plain, tall, options):
        name = TALL
    return card.choices.pick(forward.KERNEL.entry, dims, among, usual=name)


def _gains_from_tall_tiles(
    sq: int, plain: FlashConfig, tall: FlashConfig, options: FlashOptions
) -> bool:
    """Tell whether they compute few rows that do not exist, and the options leave registers."""
    if options.bias != "void" or options.mask or options.softcap:
        return False
    computed, in_plain = (-(-sq // row.tile_q) * row.tile_q for row in (tall, plain))
    return computed <= _TALL_GAIN * in_plain


def rotates_queries(problem: AttentionProblem, card: Card) -> bool:
    """Tell whether the kernel rotates query rows as it loads them: whole chunks.

    Where keys are split several CTAs would rotate the same rows. With a block mask it does not.
    """
    if "cos" not in problem.layouts or BLOCK_MASK in problem.layouts:
        return False
    row = flash_row(card.arch, problem.head_dim, problem.head_dim_v)
    if num_splits(problem, row, card) > 1:
        return False
    rotated = problem.layouts["cos"].shape[1] * (2 if problem.interleaved else 1)
    aligned = all(
        problem.starts[name] == 0 and problem.layouts[name].strides[0] % VECTOR_BYTES == 0
        for name in ("cos", "sin")
    )
    return aligned and rotated % vector_items(problem.dtype.name) == 0


def _tables(problem: AttentionProblem) -> Any:
    """Fill the C struct RotaryTables."""
    tables = new_struct(ROTARY_TABLES)
    tables["length"], tables["half"] = problem.layouts["cos"].shape
    for name in ("cos", "sin"):
        layout = problem.layouts[name]
        tables[f"{name}_stride"] = layout.strides[0] // layout.dtype.itemsize
    return tables[()]
