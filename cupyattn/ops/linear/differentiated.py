"""Linear's backward as `vjp` calls it: with the gradients of everything that a call may have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from cupyattn.ops.linear.reference import LinearGrads
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error


def differentiated(
    backward: Callable[..., LinearGrads], *, residual: bool
) -> Callable[..., tuple[Any, ...]]:
    """Return a backward that gives a residual's gradient behind the others: dout itself.

    It takes dpreactivation too, which has to be None: what is saved for the backward is no result
    to be differentiated.
    """

    @wraps(backward)
    def full(dout: Array, /, *args: Any, dpreactivation: Any = None, **options: Any) -> Any:
        if dpreactivation is not None:
            raise error(
                TypeError,
                "the gradient of preactivation was given",
                "preactivation is returned for the backward, and has no gradient",
                "pass None for it, or compute it by a linear of its own without an activation",
            )
        grads = backward(dout, *args, **options)
        return (*grads, dout) if residual else grads

    signature = inspect.signature(backward)
    extra = inspect.Parameter("dpreactivation", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = [*signature.parameters.values(), extra]
    full.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return full
