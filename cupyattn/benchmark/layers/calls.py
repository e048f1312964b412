"""The calls of an operation that are timed: forward and backward, this library's and PyTorch's.

Each takes several sets of arrays in turn, so that none is still in the cache from the call before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cupyattn
from cupyattn.arrays import Array
from cupyattn.benchmark.frame.clock import Round
from cupyattn.benchmark.frame.torch_arrays import tensor_of, torch_stream
from cupyattn.benchmark.layers.operation import Arrays, Operation, Source


def our_forward(operation: Operation, sets: Sequence[Arrays]) -> Round:
    """Return a call for each set of arrays."""
    function = getattr(cupyattn, operation.function)

    def call(arrays: Arrays) -> Any:
        result = function(*operation.positional(arrays), **operation.named(arrays))
        return tuple([arrays[i] for i in operation.changes]) if operation.changes else result

    return [partial(call, arrays) for arrays in sets]


def our_backward(operation: Operation, sets: Sequence[Arrays], xp: Any) -> Round:
    """Return, for each set, a call of the pullback with random gradients."""
    function = getattr(cupyattn, operation.function)
    calls = []
    for arrays in sets:
        result, pullback = cupyattn.vjp(
            function, *operation.positional(arrays), **operation.named(arrays)
        )
        calls.append(partial(pullback, _each(lambda out: _gradient(out, xp), result)))
    return calls


def torch_forward(torch: Any, function: Callable[..., Any], sets: Sequence[Arrays]) -> Round:
    """Return a call of PyTorch's function for each set, without recording gradients."""

    def call(tensors: Sequence[Any]) -> Any:
        with torch.no_grad():
            return function(*tensors)

    return [partial(call, _tensors(torch, arrays)) for arrays in sets]


def torch_backward(
    torch: Any, function: Callable[..., Any], sets: Sequence[Arrays], xp: Any
) -> Round:
    """Return, for each set, a call of ``torch.autograd.grad`` with the same gradients."""
    calls = []
    for arrays in sets:
        tensors = _tensors(torch, arrays)
        of = [t for t in tensors if torch.is_tensor(t) and t.is_floating_point()]
        for tensor in of:
            tensor.requires_grad_()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch_stream(torch)):
            result = function(*tensors)
        torch.cuda.synchronize()
        results = result if isinstance(result, tuple) else (result,)
        gradients = [tensor_of(torch, _gradient(_like(out, xp), xp)) for out in results]
        calls.append(
            partial(
                torch.autograd.grad, results, of, gradients, retain_graph=True, allow_unused=True
            )
        )
    return calls


def _gradient(out: Array, xp: Any) -> Array:
    return Source(xp, 1).normal(*out.shape, dtype=out.dtype.name)


def _like(tensor: Any, xp: Any) -> Array:
    """Return an array of a tensor's shape and dtype."""
    return xp.empty(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _tensors(torch: Any, arrays: Arrays) -> list[Any]:
    return [tensor_of(torch, a).detach() if hasattr(a, "dtype") else a for a in arrays]


def _each(function: Callable[[Any], Any], result: Any) -> Any:
    return tuple(map(function, result)) if isinstance(result, tuple) else function(result)
