"""Which kernels an implementation has for a dtype, and which options they have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from cupyattn.ops.attention.modifiers import BLOCK_MASK, without_expression
from cupyattn.ops.attention.params import score_strides
from cupyattn.ops.attention.problem import AttentionProblem, PackedProblem
from cupyattn.runtime.by_name import Plan
from cupyattn.runtime.card import Card
from cupyattn.runtime.checks import require_kernel_dtype
from cupyattn.runtime.errors import error

_CPU = "pass NumPy arrays, for example cupy.asnumpy(q), or leave backend('emulator')"


class Implementation(NamedTuple):
    """The kernels of one implementation for one dtype."""

    plan: Callable[..., Plan]
    """From a problem to the `Plan` that runs it."""
    options: frozenset[str]
    """The options of attention that its kernels have."""


Implementations = Mapping[tuple[str, str], Implementation]
"""By the name of the implementation and that of the dtype."""


def register(
    *entries: tuple[str, Iterable[str], Callable[..., Plan], frozenset[str]],
) -> Implementations:
    """Make a table of (implementation, dtypes, plan function, options)."""
    return {
        (name, dtype): Implementation(plan, options)
        for name, dtypes, plan, options in entries
        for dtype in dtypes
    }


def implementation_of(
    problem: AttentionProblem, table: Implementations, function: str
) -> Implementation:
    """Return the kernels for a problem.

    Raises
    ------
    NotImplementedError
        If there are none, or they lack an option of the problem.
    """
    require_kernel_dtype("q", problem.dtype)
    chosen = table.get((problem.implementation, problem.dtype.name))
    if chosen is None:
        others = [name for name, dtype in table if dtype == problem.dtype.name]
        raise error(
            NotImplementedError,
            f"{function} with implementation={problem.implementation!r} on a GPU or the emulator",
            f"kernels are {' and '.join(map(repr, others))}; the CPU path has every implementation",
            f"pass implementation={others[0]!r}, or {_CPU}",
        )
    missing = sorted(problem.refusable_options - chosen.options)
    if missing:
        having = [
            name
            for (name, dtype), each in table.items()
            if dtype == problem.dtype.name and problem.refusable_options <= each.options
        ]
        instead = f"pass implementation={having[0]!r}, or " if having else ""
        raise error(
            NotImplementedError,
            f"{', '.join(missing)} in {function} on a GPU or the emulator with "
            f"implementation={problem.implementation!r}",
            "its kernels do not have it; the CPU path has every option",
            instead + _CPU,
        )
    for option in without_expression(problem.functions):
        kind = "ScoreMod" if option == "score_mod" else "MaskMod"
        raise error(
            NotImplementedError,
            f"{option} in {function} on a GPU or the emulator, a Python function",
            f"kernels are compiled of a {kind}; the CPU path has every option",
            f"pass {option}=cupyattn.{kind}(...), an expression in CUDA C++, or {_CPU}",
        )
    return chosen


_TIMES_L2 = 2
"""So many times the bytes of L2 may K and V of the heads have. A CTA of 128 rows alone does 128
operations for each byte of them, of which a T4 wants 170 at 0.85 of its tensor cores: one reading
in two may miss."""

# Causal over plain calls by `python -m support.grid_order` (a simulation, 2026-11-22), forward of
# 1 x 2,048 tokens of 32 heads, at head dims 64, 80, 128, 192, 256: with one head behind the other
# 1.72, 1.71, 1.72, 1.74, 1.74 on a T4's 40 multiprocessors and 1.18, 1.16, 1.18, 1.47, 1.47 on an
# H200's 132; in this order 1.97, 1.96, 1.97, 1.85, 1.85 and 1.83, 1.82, 1.83, 1.83, 1.83. The
# backward of head dim 128 gains from 1.74 to 1.85, and from 1.47 to 1.83.


class Turns(NamedTuple):
    """What takes turns in a grid: the first tiles of all come before their second ones."""

    kv_heads: int
    """Key-value heads, each with the query heads of its group; 0: query heads do not either."""
    batches: int
    """Batch elements among them, whose like heads are neighbours."""


def turns(
    problem: AttentionProblem, card: Card, *, backward: bool = False, prompts: bool = False
) -> Turns:
    """Return how many key-value heads take turns in the grid, and of how many batch elements.

    Heads do where their tiles differ: under causal order, and with a block mask, whose lists say
    which come first. With each come all query heads of its group, which share its keys. It is as
    many as leave each query head some CTAs at a time, and as L2 has room for: for keys and values,
    in the backward for queries and their gradients too. It divides B * G; or G of packed prompts,
    whose order is that of their sequences. (Of packed sequences those with equally many tiles take
    turns, and the last heads of these may be fewer.)

    Batch elements do where a bias or mask broadcasts over them: its tiles are read from memory once
    then, and by the others from L2. (With all heads of all elements taking turns, a forward of 4 x
    2,048 tokens of 16 heads of 64 on an H200 read 306 MB for 576: ncu on a patched tree that is not
    kept, CUPYATTN_ARCH=75, 2026-11-24. This rule has not been measured.)
    """
    left, right = problem.window
    sequences = problem.kv_heads if prompts else problem.batch * problem.kv_heads
    uneven = (left is None and right is not None) or BLOCK_MASK in problem.layouts
    sharing = 1 if prompts else _batches_alike(problem)
    if not (uneven or sharing > 1) or not sequences * problem.heads:
        return Turns(0, 1)
    group = problem.heads // problem.kv_heads
    rows = max(problem.sk, group * problem.sq if backward else 0)
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    room = card.multiprocessors // 2 // group
    most = max(1, min(room, _TIMES_L2 * card.l2_bytes // max(rows * row_bytes, 1)))
    batches = _largest_divisor(sharing, most)
    if not uneven:
        return Turns(batches if batches > 1 else 0, batches)
    return Turns(batches * _largest_divisor(sequences // batches, most // batches), batches)


def _batches_alike(problem: AttentionProblem) -> int:
    """Return how many batch elements have one bias or mask; 1 of packed sequences."""
    given = [problem.layouts[name] for name in ("bias", "mask") if name in problem.layouts]
    if isinstance(problem, PackedProblem) or not given:
        return 1
    one = any(score_strides(layout, problem.scores_shape)[0] == 0 for layout in given)
    return max(problem.batch, 1) if one else 1


def _largest_divisor(number: int, most: int) -> int:
    return max(count for count in range(1, max(most, 1) + 1) if number % count == 0)
