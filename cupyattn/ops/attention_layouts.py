"""What a problem's layouts and options mean for kernels: what they reach, and load at once."""

from __future__ import annotations

from collections.abc import Iterable

from cupyattn.errors import error
from cupyattn.kernels.configs.attention import FlashOptions
from cupyattn.ops.attention_problem import AttentionProblem

_MAX_LENGTH = 2**30 - 2**10  # a row of the last tile stays below kFar (mask.cuh)
_TILE_BYTES = 2**32  # from one end of a tile to the other: 32-bit offsets


def require_lengths(problem: AttentionProblem) -> None:
    """Raise ValueError for lengths that the kernels' positions do not reach."""
    if max(problem.sq, problem.sk) > _MAX_LENGTH:
        raise error(
            ValueError,
            f"Sq = {problem.sq}, Sk = {problem.sk} on a GPU",
            f"lengths are at most {_MAX_LENGTH}",
            "split the sequence",
        )


def require_near_rows(
    problem: AttentionProblem, names: Iterable[str], tile_rows: int, alternative: str
) -> None:
    """Raise ValueError for arrays whose rows of one tile lie further apart than offsets reach."""
    for name in names:
        layout = problem.layouts[name]
        stride = layout.strides[1]
        if layout.shape[1] > 1 and abs(stride) * tile_rows >= _TILE_BYTES:
            raise error(
                ValueError,
                f"{name} has {stride} bytes from one row to the next",
                f"implementation='flash' takes less than {_TILE_BYTES // tile_rows} here",
                f"copy it with ascontiguousarray({name}), or pass implementation={alternative!r}",
            )


def whole_vectors(
    items: int, problem: AttentionProblem, rows: Iterable[tuple[int, tuple[int, ...]]]
) -> int:
    """Return `items` if every row starts at a multiple of that many items' bytes, else 1.

    `rows` are arrays of the problem's dtype: by how much the first item misses a vector's
    alignment, and the strides.
    """
    vector_bytes = items * problem.dtype.itemsize
    aligned = all(
        start % vector_bytes == 0 and all(stride % vector_bytes == 0 for stride in strides[:-1])
        for start, strides in rows
    )
    whole = problem.head_dim % items == 0 and problem.head_dim_v % items == 0
    return items if aligned and whole else 1


def score_options(problem: AttentionProblem) -> FlashOptions:
    """Return which options of the scores a problem has; bias and mask are read item by item."""
    layouts = problem.layouts

    def dtype(name: str) -> str:
        return layouts[name].dtype.name if name in layouts else "void"

    return FlashOptions(
        bias=dtype("bias"),
        mask="mask" in layouts,
        slopes=dtype("alibi_slopes"),
        softcap=problem.softcap is not None,
        sinks=dtype("sinks"),
        dropout=problem.dropout_p > 0,
    )
