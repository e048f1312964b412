"""What attention and its backward have in common: arrays taken, call checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import LayoutKey, Operands, adopt
from cupyattn.errors import error
from cupyattn.ops.attention_options import AttentionOptions, checked_seed
from cupyattn.ops.attention_problem import AttentionProblem
from cupyattn.ops.attention_values import check_values


class AttentionCall(NamedTuple):
    """A checked call: its arrays, and what it asks for."""

    operands: Operands
    problem: AttentionProblem
    seed: int
    """Of dropout; 0 where there is none. A training step has another one, and the same problem."""


def attention_call(
    check: Callable[[LayoutKey, AttentionOptions], AttentionProblem],
    arrays: dict[str, Any],
    options: AttentionOptions,
    q_offset: Any,
    rotary: Any,
    score_mod: Any,
    workspace: Any,
) -> AttentionCall:
    """Take the arrays (None for those not given) and `check` the call, forward or backward.

    The values in NumPy arrays are looked at too, whatever they run on: on a GPU that would
    synchronise.

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
    if hasattr(q_offset, "__dlpack__") or hasattr(q_offset, "__cuda_array_interface__"):
        arrays["q_offset"] = q_offset
    elif q_offset is not None:
        options = options._replace(q_offset=q_offset)
    if rotary is not None:
        arrays["cos"], arrays["sin"] = _rotary_tables(rotary)
    operands = adopt(arrays)
    if workspace is not None:
        _require_plain_bytes(adopt({**operands.arrays, "workspace": workspace}))
    seed = checked_seed(options.seed)
    if options.seed is not None:
        options = options._replace(seed=0)
    problem = check(operands.layout_key(), options)
    if operands.library == "numpy":
        check_values(problem, operands.arrays)
    return AttentionCall(operands, problem, seed)


def _require_plain_bytes(operands: Operands) -> None:
    dtype = operands.arrays["workspace"].dtype
    if dtype.hasobject:
        raise error(
            TypeError,
            f"workspace has dtype {dtype.name}",
            "it is memory to be written, of any dtype without Python objects",
            "pass an array of 'uint8', or none",
        )


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
    problem, arrays = call.problem, call.operands.arrays
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
        "seed": call.seed,
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
