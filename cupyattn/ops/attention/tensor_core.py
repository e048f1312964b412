"""The plan of the tensor-core forward, which takes float16."""

from __future__ import annotations

from cupyattn.kernels.configs.attention.tensor_core import forward
from cupyattn.kernels.configs.dtypes import vector_items
from cupyattn.ops.attention.layouts import (
    Starts,
    flash_options,
    require_countable_items,
    require_near_rows,
    whole_vectors,
)
from cupyattn.ops.attention.packed import PackedProblem
from cupyattn.ops.attention.params import forward_params
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.ops.attention.results import forward_outputs, result_layouts
from cupyattn.ops.plan import Plan, Step


def forward_plan(
    problem: AttentionProblem, start_of: Starts, arch: int, *, return_lse: bool
) -> Plan:
    """Plan the forward."""
    dims = problem.head_dim, problem.head_dim_v
    require_near_rows(problem, ("k", "v"), forward.flash_longest_tile(arch, *dims), "tiled")
    if isinstance(problem, PackedProblem):
        require_countable_items(problem, ("k", "v"))
    outputs = forward_outputs(problem, return_lse)
    results = result_layouts(problem, outputs)
    rows = [(start_of[name], problem.layouts[name].strides) for name in ("q", "k", "v")]
    rows += [(start_of.get("out", 0), results["out"].strides)]
    vec = whole_vectors(vector_items(problem.dtype.name), problem, rows)
    together = 2 if problem.dropout_p else 4  # a Philox call serves pairs of keys
    options = flash_options(problem, start_of, together)
    specialise = forward.varlen if isinstance(problem, PackedProblem) else forward.flash
    tiles = problem.query_tiles(forward.flash_row(arch, *dims, options).tile_q)
    step = Step.of(
        specialise(arch, *dims, vec, options),
        problem.heads * tiles,
        forward_params(problem, results),
        *problem.modifier_strides,
    )
    return Plan((step,), outputs)
