"""What a call of copy_blocks asks for, and its checks: of layouts once, of values each time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cupyattn.ops.cache.storage import CACHES, SCALES, Caches, require_caches
from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.by_name import Description, Operands, Overlaps, layouts_of, starts_of
from cupyattn.runtime.checks import INTEGERS, require_dtype, require_whole_item_strides
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.numbers import integer
from cupyattn.runtime.value_checks import checks_values, on_host

WRITTEN = (*CACHES, *SCALES)
Pairs = tuple[tuple[int, int], ...]
"""(src, dst) of each copy."""


@dataclass(frozen=True, eq=False)
class CopiesProblem:
    """A valid call of copy_blocks."""

    caches: Caches
    layouts: dict[str, Layout]
    """By the names of the public function; copies only where they are an array."""
    starts: dict[str, int]
    overlaps: Overlaps


def copies_problem(operands: Operands, pairs: Pairs | None) -> CopiesProblem:
    """Check a call; its description, unless that was checked before, and its values.

    `pairs` are the copies, None where they are an array.

    Raises
    ------
    TypeError, ValueError
        As `copy_blocks` documents.
    """
    problem = _checked(operands.description)
    problem.overlaps.check(operands)
    num_blocks = problem.caches.num_blocks
    if pairs is not None:
        _require_blocks(pairs, num_blocks, padded=False)
    elif checks_values(operands):
        _require_blocks(on_host(operands.arrays["copies"]).tolist(), num_blocks, padded=True)
    return problem


@lru_cache(maxsize=4096)
def _checked(description: Description) -> CopiesProblem:
    layouts = layouts_of(description)
    caches = require_caches(layouts, written=True, pools=True)
    if "copies" in layouts:
        copies = layouts["copies"]
        require_dtype("copies", copies, INTEGERS)
        require_whole_item_strides("copies", copies)
        if len(copies.shape) != 2 or copies.shape[1] != 2:
            raise error(
                ValueError,
                f"copies has shape {copies.shape}",
                "it is (n, 2), a row (src, dst) for each copy",
                "pass such an array, or a sequence of Copy(src, dst)",
            )
    return CopiesProblem(caches, layouts, starts_of(description), Overlaps.of(layouts, WRITTEN))


def pairs_of(copies: Any) -> Pairs:
    """Return the copies of a sequence.

    Raises
    ------
    TypeError
        If it is none, or one of its items is no pair of integers.
    """
    try:
        items = tuple(copies)
    except TypeError as failure:
        raise error(
            TypeError,
            f"copies is a {type(copies).__name__}",
            "it is a sequence of Copy(src, dst), or an array (n, 2) of integers",
            "pass what Sequence.append has returned",
        ) from failure
    return tuple([_pair(f"copies[{i}]", copy) for i, copy in enumerate(items)])


def _pair(name: str, copy: Any) -> tuple[int, int]:
    if not isinstance(copy, tuple | list) or len(copy) != 2:
        raise error(
            TypeError,
            f"{name} is {shown(copy)}",
            "each copy is a pair (src, dst)",
            "pass Copy(src, dst) of two block ids",
        )
    src, dst = copy
    return integer(f"{name}'s src", src), integer(f"{name}'s dst", dst)


def _require_blocks(pairs: Iterable[Any], num_blocks: int, *, padded: bool) -> None:
    for i, (src, dst) in enumerate(pairs):
        if padded and src == dst == -1:
            continue
        if not (0 <= src < num_blocks and 0 <= dst < num_blocks):
            raise error(
                ValueError,
                f"copies[{i}] is ({src}, {dst})",
                f"the caches have blocks 0 to {num_blocks - 1}"
                + (", and a row (-1, -1) copies nothing" if padded else ""),
                "pass the ids of blocks of these caches",
            )
