"""score_mod and mask_mod: what a problem knows of them, their checks, and what kernels take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from cupyattn.ops.attention.kernels.block_mask import TILE
from cupyattn.ops.attention.kernels.modifiers import (
    ARRAYS,
    BLOCK_LISTS,
    BLOCK_STATES,
    END,
    GRADIENT_NAMES,
    ITEMS,
    MASK_NAMES,
    RESULT,
    SCORE_NAMES,
    SHOWN_AS,
    BlockArray,
    Modifier,
    ModifierArray,
    Modifiers,
    modified_strides,
    parameter_name,
)
from cupyattn.runtime.arrays import Array, Layout
from cupyattn.runtime.by_name import Operands, Plan, run
from cupyattn.runtime.checks import require_dtype, require_whole_item_strides
from cupyattn.runtime.compile import CompilationError
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.source import NAMED
from cupyattn.runtime.structs import new_struct

BLOCK_MASK = BLOCK_STATES.name
"""The name of a block mask's tiles among the arrays of a call."""
_MOST_AXES = 4


class Blocks(NamedTuple):
    """What a block mask was made for."""

    shape: tuple[int, int, int, int]
    """(B, H, Sq, Sk); B and H may be 1 for any."""
    q_offset: int | None
    """None for any."""


class UserFunction(NamedTuple):
    """A score_mod or mask_mod apart from its arrays and its Python functions."""

    expression: str | None
    """None of a Python function alone, which no kernel runs."""
    gradient: str | None = None
    arrays: tuple[str, ...] = ()
    """Their names, as the expressions have them."""
    blocks: Blocks | None = None
    """Of a mask_mod that comes with its tiles."""


def shown_names(functions: Mapping[str, UserFunction | None]) -> dict[str, str]:
    """Return what errors call the arrays of expressions, by their names among a call's arrays.

    Examples
    --------
    >>> shown_names({"score_mod": UserFunction("score * t[h]", arrays=("t",)), "mask_mod": None})
    {'score_mod_t': "score_mod's t"}
    """
    given = {option: function for option, function in functions.items() if function is not None}
    tiles = {BLOCK_MASK: "mask_mod's tiles"} if any(each.blocks for each in given.values()) else {}
    return tiles | {
        parameter_name(option, array): f"{option}'s {array}"
        for option, function in given.items()
        for array in function.arrays
    }


def require_valid_arrays(
    functions: Mapping[str, UserFunction | None], layouts: Mapping[str, Layout], *, on_cpu: bool
) -> None:
    """Raise unless kernels, or the CPU, can read the arrays of the expressions."""
    for name, shown in shown_names(functions).items():
        if name == BLOCK_MASK:  # made by block_mask
            continue
        require_dtype(shown, layouts[name], (*ITEMS, *(("float64",) if on_cpu else ())))
        require_whole_item_strides(shown, layouts[name])
        if len(layouts[name].shape) > _MOST_AXES:
            raise error(
                ValueError,
                f"{shown} has {len(layouts[name].shape)} axes",
                f"arrays of expressions have at most {_MOST_AXES}",
                "merge axes by reshape, and index the result",
            )


def without_expression(functions: Mapping[str, UserFunction | None]) -> list[str]:
    """Return the options that are Python functions alone, of which no kernel can be compiled."""
    return [name for name, each in functions.items() if each is not None and not each.expression]


def require_gradient(functions: Mapping[str, UserFunction | None]) -> None:
    """Raise ValueError for a score_mod that a kernel cannot differentiate."""
    score_mod = functions.get("score_mod")
    if score_mod is not None and score_mod.gradient is None:
        raise error(
            ValueError,
            "score_mod has no gradient",
            "the backward needs the expression of its derivative",
            "give ScoreMod gradient=, an expression of grad and score: 'grad' where a term is "
            "added to the score",
        )


_PLACES = {RESULT: "its result", END: "its end"}
_COMPLAINT = re.compile(
    rf"^{NAMED}({'|'.join(SHOWN_AS.values())})"
    rf"({'|'.join(map(re.escape, (ARRAYS, *_PLACES)))})?\((\d+)\): "
    r"(?:catastrophic )?error: (.*(?:\n {9,}.*)*)\n(.*)\n(\s*)\^",
    re.MULTILINE,
)
_INDENT = 2  # NVRTC's, of the line that it quotes


def _expression_error(
    failure: CompilationError, functions: Mapping[str, UserFunction | None]
) -> Exception:
    """Return what to raise where kernels did not compile: of an expression, where it is wrong."""
    found = _COMPLAINT.search(failure.log)
    if found is None:
        return failure
    name, around, line, complaint, text, margin = found.groups()
    complaint = " ".join(complaint.split())
    function = functions["mask_mod" if name == "mask_mod" else "score_mod"]
    if around == ARRAYS and function is not None:  # a line for each, which declares its name alone
        return error(
            ValueError,
            f"{name} does not compile: it has an array named {function.arrays[int(line) - 1]!r}",
            "that is a macro of the kernel's, or of the compiler's",
            "give it another name, in the expression too",
        )
    known = {"score_mod": SCORE_NAMES, "mask_mod": MASK_NAMES}.get(name, GRADIENT_NAMES)
    names = ", ".join((*known, *(function.arrays if function else ())))
    before = text.encode()[: len(margin)].decode(errors="ignore")  # the compiler counts bytes
    place = _PLACES.get(around, f"line {line}, column {len(before) - _INDENT + 1}")
    mark = "" if around in _PLACES else f":\n{text}\n{margin[: len(before)]}^"
    return error(
        ValueError,
        f"{name} does not compile: {place}: {complaint}",
        f"it is an expression in CUDA C++, of {names}",
        f"mend it there{mark}",
    )


def run_compiled(
    device: Device, plan: Plan, operands: Operands, functions: Mapping[str, UserFunction | None]
) -> dict[str, Array]:
    """Run a plan of these functions; an expression that does not compile is shown where it is."""
    try:
        return run(device, plan, operands)
    except CompilationError as failure:
        raise _expression_error(failure, functions) from failure


def modifiers_of(
    functions: Mapping[str, UserFunction | None],
    layouts: Mapping[str, Layout],
    *,
    blocks: BlockArray | None = None,
) -> Modifiers | None:
    """Return what kernels compile of a call's expressions; None without any.

    `blocks`: what they read of a block mask, if there is one.
    """
    given = {
        option: _modifier(option, function, layouts)
        for option, function in functions.items()
        if function is not None
    }
    if not given:
        return None
    blocks = blocks if BLOCK_MASK in layouts else None
    return Modifiers(given.get("score_mod"), given.get("mask_mod"), blocks)


def _modifier(option: str, function: UserFunction, layouts: Mapping[str, Layout]) -> Modifier:
    of = {name: layouts[parameter_name(option, name)] for name in function.arrays}
    arrays = (ModifierArray(name, x.dtype.name, len(x.shape)) for name, x in of.items())
    return Modifier(str(function.expression), function.gradient, tuple(arrays))


def strides_of(modifiers: Modifiers | None, layouts: Mapping[str, Layout]) -> tuple[Any, ...]:
    """Return the C struct of the arrays' strides in items, for kernels that take one."""
    struct = None if modifiers is None else modified_strides(modifiers)
    if struct is None:
        return ()
    strides = new_struct(struct.dtype)
    for name in struct.dtype.names or ():
        if name in (BLOCK_LISTS.name, BLOCK_STATES.name):
            batch, heads, rows, columns = layouts[BLOCK_MASK].shape
            strides[name] = heads if batch > 1 else 0, int(heads > 1), rows * TILE, columns * TILE
            continue
        layout = layouts[name]
        strides[name] = [stride // layout.dtype.itemsize for stride in layout.strides]
    return (strides[()],)
