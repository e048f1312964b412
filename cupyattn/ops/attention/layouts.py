"""What a problem's layouts and options mean for kernels: what they reach, and load at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cupyattn.ops.attention.kernels.options import FlashOptions
from cupyattn.ops.attention.params import score_strides
from cupyattn.ops.attention.problem import MAX_LENGTH, AttentionProblem
from cupyattn.runtime.errors import error

Starts = Mapping[str, int]
"""By how many bytes each array of a problem misses a vector's alignment."""

_QUAD_ROW_BYTES = 2**24  # between rows of a bias or mask read four keys at a time: 32-bit offsets
_TILE_BYTES = 2**32  # from one end of a tile to the other: 32-bit offsets


def require_lengths(problem: AttentionProblem) -> None:
    """Raise ValueError for lengths that the kernels' positions do not reach."""
    if max(problem.sq, problem.sk) > MAX_LENGTH:
        raise error(
            ValueError,
            f"Sq = {problem.sq}, Sk = {problem.sk} on a GPU",
            f"lengths are at most {MAX_LENGTH}",
            "split the sequence",
        )


def require_near_rows(problem: AttentionProblem, names: Iterable[str], tile_rows: int) -> None:
    """Raise ValueError for arrays whose rows of one tile lie further apart than offsets reach."""
    for name in names:
        layout = problem.layouts[name]
        stride = layout.strides[1]
        if layout.shape[1] > 1 and abs(stride) * tile_rows >= _TILE_BYTES:
            raise error(
                ValueError,
                f"{name} has {stride} bytes from one row to the next",
                f"kernels on tensor cores take less than {_TILE_BYTES // tile_rows} here",
                f"copy it with ascontiguousarray({name})",
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
        modified=problem.modifiers,
    )


def flash_options(problem: AttentionProblem, start_of: Starts, together: int) -> FlashOptions:
    """Name the options for a kernel whose threads hold `together` neighbouring keys of a row."""
    return score_options(problem)._replace(
        modified=problem.block_modifiers,
        bias_vec=_score_items("bias", problem, start_of, together),
        mask_vec=_score_items("mask", problem, start_of, together),
    )


def _score_items(name: str, problem: AttentionProblem, start_of: Starts, together: int) -> int:
    """Return how many neighbouring keys of a bias or mask can be read at once: 4, 2 or 1."""
    if name not in problem.layouts:
        return 1
    layout = problem.layouts[name]
    *others, key = score_strides(layout, problem.scores_shape)
    near = 0 <= others[-1] * layout.dtype.itemsize < _QUAD_ROW_BYTES
    for items in (4, 2):
        rows_aligned = all(stride % items == 0 for stride in others)
        start_aligned = start_of[name] % (items * layout.dtype.itemsize) == 0
        fits = items == 2 or (together == 4 and near)
        if key == 1 and rows_aligned and start_aligned and fits:
            return items
    return 1
