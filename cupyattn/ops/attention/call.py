"""What attention and its backward have in common: arrays taken, call checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from cupyattn.ops.attention.api_block_mask import BlockMask
from cupyattn.ops.attention.api_modifiers import arrays_of, python_function, user_function
from cupyattn.ops.attention.modifiers import BLOCK_MASK, UserFunction, shown_names
from cupyattn.ops.attention.options import DropoutSeed, checked_seed
from cupyattn.ops.attention.problem import ARRAY_FIXES, FORWARD_FIXES, SHOWN_AS, AttentionProblem
from cupyattn.ops.rope.api import checked_rotary
from cupyattn.runtime.arrays import exports_memory
from cupyattn.runtime.by_name import Operands, adopt

_NO_SEED = DropoutSeed(0)
_Problem = TypeVar("_Problem", bound=AttentionProblem)


def attention_call(
    check: Callable[[Operands, tuple[Any, ...]], _Problem],
    arrays: dict[str, Any],
    options: tuple[Any, ...],
    q_offset: Any,
    seed: Any,
    rotary: Any,
    score_mod: Any,
    mask_mod: Any,
) -> tuple[Operands, _Problem, DropoutSeed]:
    """Take the arrays (None for those not given) and `check` the call, forward or backward.

    `options` are those of `AttentionOptions` before q_offset, in that order. The seed stands beside
    the problem, of which a training step has the same each time; it is 0 where there is none.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As the public functions document.
    """
    if q_offset is not None and exports_memory(q_offset):
        arrays["q_offset"] = q_offset
        q_offset = None
    interleaved = False
    if rotary is not None:
        arrays["cos"], arrays["sin"], interleaved = checked_rotary(rotary)
    shown_as = SHOWN_AS
    functions: tuple[UserFunction | None, ...] = (None, None)
    blocks = None
    if isinstance(mask_mod, BlockMask):
        arrays[BLOCK_MASK], blocks = mask_mod.tiles_beside(arrays["q"]), mask_mod.blocks
        mask_mod = mask_mod.mask_mod
    if score_mod is not None or mask_mod is not None:
        given = {"score_mod": score_mod, "mask_mod": mask_mod}
        described = {option: user_function(option, value) for option, value in given.items()}
        for option, value in given.items():
            arrays |= arrays_of(option, value)
        if described["mask_mod"] is not None:
            described["mask_mod"] = described["mask_mod"]._replace(blocks=blocks)
        shown_as = {**SHOWN_AS, **shown_names(described)}
        functions = (described["score_mod"], described["mask_mod"])
    fixes = ARRAY_FIXES if "dout" in arrays else FORWARD_FIXES
    operands = adopt(arrays, fixes, shown_as)
    checked = _NO_SEED if seed is None else checked_seed(seed)
    problem = check(operands, (*options, q_offset, interleaved, *functions))
    return operands, problem, checked


def reference_options(
    problem: AttentionProblem,
    arrays: Mapping[str, Any],
    seed: DropoutSeed,
    score_mod: Any,
    mask_mod: Any,
) -> dict[str, Any]:
    """Return a call's options in the words of `cupyattn.reference`."""
    if isinstance(mask_mod, BlockMask):
        mask_mod = mask_mod.mask_mod
    return {
        "softmax_scale": problem.softmax_scale,
        "window_size": problem.window,
        "q_offset": arrays.get("q_offset", problem.q_offset),
        "seqused_k": arrays.get("seqused_k"),
        "mask": arrays.get("mask"),
        "bias": arrays.get("bias"),
        "alibi_slopes": arrays.get("alibi_slopes"),
        "softcap": problem.softcap,
        "sinks": arrays.get("sinks"),
        "dropout_p": problem.dropout_p,
        "seed": seed.seed,
        "dropout_start": seed[1:],
        "rotary": (arrays["cos"], arrays["sin"], problem.interleaved) if "cos" in arrays else None,
        "score_mod": python_function("score_mod", score_mod, arrays),
        "mask_mod": python_function("mask_mod", mask_mod, arrays),
    }
