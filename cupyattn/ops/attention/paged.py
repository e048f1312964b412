"""Paged attention on a device: few query tokens are decoded, many are a forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from cupyattn.ops.attention.decode import decode_attention
from cupyattn.ops.attention.decode_problem import MAX_QUERIES, DecodeProblem
from cupyattn.ops.attention.prefill import has_prefill, prefill_attention
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.by_name import Operands
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error

TABLE_FIXES = {
    "block_table": "pass an int32 array of shape (B, max_blocks)",
    "seqlens_k": "pass an int32 array of shape (B,), for example numpy.full(B, length, 'int32')",
}


def paged_forward(
    device: Device, problem: DecodeProblem, operands: Operands, *, return_lse: bool
) -> dict[str, Array]:
    """Run paged attention, into `out` and `lse` where they are given."""
    return _way(problem)(device, problem, operands, return_lse=return_lse)


@lru_cache(maxsize=4096)
def _way(problem: DecodeProblem) -> Callable[..., dict[str, Array]]:
    """Return what runs it.

    A forward has a CTA for every 64 to 128 query rows of a head, and computes those rows whole;
    decoding takes the rows of a group of heads together, in passes of 4 to 16, and cuts the keys.
    It also has what the forward has not: caches whose strides are different.

    Raises
    ------
    ValueError
        For caches of such strides with packed queries.
    """
    layouts = problem.layouts
    few, has = problem.attention.sq <= MAX_QUERIES, has_prefill(problem)
    if problem.packed and not has:
        arrays = [
            name for name in ("k_cache", "v_cache", "k_scales", "v_scales") if name in layouts
        ]
        raise error(
            ValueError,
            ", ".join(f"{name} has strides {layouts[name].strides}" for name in arrays),
            "with cu_seqlens_q a GPU takes caches of equal strides, those of tokens less than "
            "64 MiB, and so their scales",
            "make both alike, for example as halves of one array",
        )
    return decode_attention if (few or not has) and not problem.packed else prefill_attention
