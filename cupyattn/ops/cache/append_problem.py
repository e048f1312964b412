"""What a call of append_kv asks for, and its checks: of layouts once, of values each time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cupyattn.ops.cache.storage import (
    CACHES,
    SCALES,
    Caches,
    require_caches,
    require_positions,
    require_slots,
)
from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.by_name import Description, Operands, Overlaps, layouts_of, starts_of
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    INTEGERS,
    require_arrays,
    require_contiguous_rows,
    require_dtype,
    require_output,
    require_rank,
    require_same_dtype,
    require_shape,
    require_whole_item_strides,
)
from cupyattn.runtime.errors import error
from cupyattn.runtime.value_checks import checks_values

WRITTEN = (*CACHES, *SCALES, "q")
"""What a call writes, all of it in place."""
TABLES = ("cos", "sin")


@dataclass(frozen=True, eq=False)
class AppendProblem:
    """A valid call of append_kv."""

    caches: Caches
    layouts: dict[str, Layout]
    """By the names of the public function; cos and sin are rotary's."""
    starts: dict[str, int]
    """By how many bytes each array misses a vector's alignment."""
    interleaved: bool
    overlaps: Overlaps

    @property
    def tokens(self) -> tuple[int, ...]:
        """(total,) or (B, S)."""
        return self.layouts["slot_mapping"].shape

    @property
    def dtype(self) -> np.dtype:
        """That of k, v and q."""
        return self.layouts["k"].dtype

    @property
    def half(self) -> int:
        """Pairs of features that are rotated."""
        return self.layouts["cos"].shape[1] if "cos" in self.layouts else 0


def append_problem(operands: Operands, *, interleaved: bool) -> AppendProblem:
    """Check a call; its description, unless that was checked before, and its values.

    Raises
    ------
    TypeError, ValueError
        As `append_kv` documents.
    """
    problem = _checked(operands.description, interleaved)
    problem.overlaps.check(operands)
    if checks_values(operands):
        arrays = operands.arrays
        require_slots(arrays["slot_mapping"], problem.caches)
        if "positions" in arrays:
            length = problem.layouts["cos"].shape[0]
            # q is rotated for tokens that are left out, too.
            stored = None if "q" in arrays else arrays["slot_mapping"]
            require_positions(arrays["positions"], stored, length)
    return problem


@lru_cache(maxsize=4096)
def _checked(description: Description, interleaved: bool) -> AppendProblem:
    layouts = layouts_of(description)
    caches = require_caches(layouts, written=True)
    require_arrays(layouts, ("k", "v", "slot_mapping"))
    k, slots = layouts["k"], layouts["slot_mapping"]
    require_dtype("slot_mapping", slots, INTEGERS)
    require_whole_item_strides("slot_mapping", slots)
    axes = "B S G D" if len(k.shape) == 4 else "total G D"
    for name in ("k", "v"):
        require_dtype(name, layouts[name], CPU_FLOATS)
        require_rank(name, layouts[name], axes)
        require_contiguous_rows(name, layouts[name])
    tokens = k.shape[:-2]
    heads = caches.kv_heads, caches.head_dim
    require_shape("k", k, (*tokens, *heads), f"({', '.join(axes.split())}) with the caches' G, D")
    require_shape("v", layouts["v"], k.shape, "shaped like k")
    require_shape("slot_mapping", slots, tokens, f"({', '.join(axes.split()[:-2])}) of k's tokens")
    _require_rotary(layouts, caches.head_dim)
    if "q" in layouts:
        _require_queries(layouts, tokens, axes.replace("G", "H"))
    require_same_dtype(layouts, ("q", "k", "v"))
    if not caches.quantised:
        require_same_dtype(layouts, ("k", "v", *CACHES))
    return AppendProblem(
        caches, layouts, starts_of(description), interleaved, Overlaps.of(layouts, WRITTEN)
    )


def _require_queries(layouts: dict[str, Layout], tokens: tuple[int, ...], axes: str) -> None:
    q = layouts["q"]
    if "cos" not in layouts:
        raise error(
            ValueError,
            "q was given without rotary",
            "q is there to be rotated",
            "pass rotary=(cos, sin) and positions, or leave q out",
        )
    require_dtype("q", q, CPU_FLOATS)
    require_rank("q", q, axes)
    head_dim = layouts["k"].shape[-1]
    expected = (*tokens, q.shape[-2], head_dim)
    require_shape("q", q, expected, f"({', '.join(axes.split())}) with k's tokens and D")
    require_output("q", q, q.shape, q.dtype)


def _require_rotary(layouts: dict[str, Layout], head_dim: int) -> None:
    given = {name: name in layouts for name in ("cos", "positions")}
    if given["cos"] != given["positions"]:
        there, absent = ("rotary", "positions")[:: 1 if given["cos"] else -1]
        raise error(
            TypeError,
            f"{there} was given without {absent}",
            "rotary needs the position of each token, and positions are for rotary",
            f"pass {absent}, or leave {there} out",
        )
    if not given["cos"]:
        return
    cos, positions = layouts["cos"], layouts["positions"]
    for table in TABLES:
        name = f"rotary's {table}"
        require_dtype(name, layouts[table], CPU_FLOATS)
        require_rank(name, layouts[table], "positions R/2")
        require_contiguous_rows(name, layouts[table])
    require_shape("rotary's sin", layouts["sin"], cos.shape, "(positions, R/2) like cos")
    require_same_dtype(layouts, TABLES)
    if 2 * cos.shape[1] > head_dim:
        raise error(
            ValueError,
            f"rotary's tables have {cos.shape[1]} columns, which rotate {2 * cos.shape[1]} "
            "features",
            f"there are D = {head_dim}",
            f"pass tables of at most {head_dim // 2} columns",
        )
    require_dtype("positions", positions, INTEGERS)
    tokens = layouts["slot_mapping"].shape
    require_shape("positions", positions, tokens, "shaped like slot_mapping")
    require_whole_item_strides("positions", positions)
