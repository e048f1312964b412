"""Which kernels an implementation has for a dtype, and which options they have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from cupyattn.ops.attention.modifiers import without_expression
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.runtime.by_name import Plan
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
