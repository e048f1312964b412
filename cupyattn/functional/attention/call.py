"""What attention and its backward have in common: arrays taken, call checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyattn.arrays import Operands, adopt, exports_memory
from cupyattn.errors import error
from cupyattn.ops.attention.options import checked_seed
from cupyattn.ops.attention.problem import ARRAY_FIXES, SHOWN_AS, AttentionProblem

AttentionCall = tuple[Operands, AttentionProblem, int]
"""A checked call: its arrays, what it asks for, and the seed of dropout, 0 where there is none.

A training step has another seed, and the same problem.
"""


def attention_call(
    check: Callable[[Operands, tuple[Any, ...]], AttentionProblem],
    arrays: dict[str, Any],
    options: tuple[Any, ...],
    q_offset: Any,
    seed: Any,
    rotary: Any,
    score_mod: Any,
) -> AttentionCall:
    """Take the arrays (None for those not given) and `check` the call, forward or backward.

    `options` are those of `AttentionOptions` before q_offset, in that order.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As the public functions document.
    """
    if score_mod is not None:
        raise error(
            NotImplementedError,
            "score_mod was given",
            "neither a kernel nor the CPU path has it yet",
            "use bias=, softcap= or mask_mod= where they can say the same",
        )
    if q_offset is not None and exports_memory(q_offset):
        arrays["q_offset"] = q_offset
        q_offset = None
    if rotary is not None:
        arrays["cos"], arrays["sin"] = _rotary_tables(rotary)
    operands = adopt(arrays, ARRAY_FIXES, SHOWN_AS)
    seed = 0 if seed is None else checked_seed(seed)
    return operands, check(operands, (*options, q_offset)), seed


def _rotary_tables(rotary: Any) -> tuple[Any, Any]:
    if isinstance(rotary, tuple) and len(rotary) == 2 and not any(t is None for t in rotary):
        return rotary
    raise error(
        TypeError,
        f"rotary is a {type(rotary).__name__}",
        "it is a tuple (cos, sin) of tables (positions, R/2)",
        "pass rotary=(cos, sin)",
    )


def reference_options(call: AttentionCall) -> dict[str, Any]:
    """Return the call's options in the words of `cupyattn.reference`."""
    operands, problem, seed = call
    arrays = operands.arrays
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
        "seed": seed,
        "rotary": (arrays["cos"], arrays["sin"]) if "cos" in arrays else None,
        "mask_mod": problem.mask_mod and _checked(problem.mask_mod),
    }


def _checked(mask_mod: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """Wrap mask_mod so that what it returns is checked."""

    def checked(b: np.ndarray, h: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        result = np.asarray(mask_mod(b, h, i, j))
        if result.dtype != np.bool_:
            raise error(
                TypeError,
                f"mask_mod returned {result.dtype.name}",
                "it returns bool, True to attend",
                "return a comparison, for example i >= j",
            )
        block = np.broadcast_shapes(i.shape, j.shape)
        try:
            return np.broadcast_to(result, block)
        except ValueError:
            raise error(
                ValueError,
                f"mask_mod returned shape {result.shape} for i {i.shape} and j {j.shape}",
                f"what it returns broadcasts to {block}",
                "compute it from i and j by elementwise operations",
            ) from None

    return checked
