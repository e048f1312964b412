"""``python -m cupyattn.benchmark layers``: the memory-bound layers, forward and backward.

The measure is the memory's speed: GB/s of the least traffic that an operation can have, compared
with a copy on the same device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import cupyattn
from cupyattn.arrays import Array
from cupyattn.benchmark import libraries
from cupyattn.benchmark.cases import Case, Harness, Implementation, products_of
from cupyattn.benchmark.command import Benchmark, Option
from cupyattn.benchmark.layer_operations import OPERATIONS, Operation, Size, Values, small_table
from cupyattn.benchmark.libraries import tensor_of
from cupyattn.benchmark.timer import COPY, Call, Round, torch_stream
from cupyattn.kernels.configs.dtypes import STORAGE

QUICK = [
    *("layer_norm", "rms_norm", "add + layer_norm", "add + rms_norm", "softmax", "log_softmax"),
    *("cross_entropy", "rope", "gelu", "silu", "swiglu", "geglu", "dropout", "embedding"),
    "global_norm",
]
_MOST_SETS = 16
_BACKWARD_TOLERANCE = 2.5  # times the forward's: gradients are sums of more


class Inputs:
    """Sets of arrays that calls alternate between, so that no cache holds them."""

    def __init__(self, operation: Operation, size: Size, harness: Harness) -> None:
        self.operation, self.size, self.harness = operation, size, harness

    @cached_property
    def sets(self) -> list[Values]:
        """The arrays."""
        traffic = self.operation.traffic(self.size, "forward")
        seeds = range(self.harness.sets(traffic, _MOST_SETS))
        return [self.operation.arrays(self.size, self.harness.arrays(seed)) for seed in seeds]

    @cached_property
    def _before(self) -> list[Array]:
        return [self.sets[0][index].copy() for index in self.operation.changes]

    def reset(self) -> None:
        """Restore the arrays of the first set that calls change in place."""
        for index, contents in zip(self.operation.changes, self._before, strict=True):
            self.sets[0][index][...] = contents

    def own(self, direction: str) -> Round:
        """Return a call for each set; a backward is the pullback with random gradients."""
        return [own_call(self.operation, direction, each, self.harness) for each in self.sets]

    def composed(self) -> Round:
        """Return a call by array functions for each set."""
        assert self.operation.composed is not None
        return [partial(self.operation.composed, self.harness.xp, *each) for each in self.sets]

    def by_torch(self, name: str, direction: str) -> Round:
        """Return a call of PyTorch for each set, eager or compiled."""
        torch, compute = self.harness.torch, self.operation.torch
        assert compute is not None

        def function(*tensors: Any) -> Any:
            return compute(torch, *tensors)

        if name == "compile":
            function = self.harness.compiled(function)
        make = torch_forward if direction == "forward" else torch_backward
        return [make(torch, function, arrays, self.harness) for arrays in self.sets]


def own_call(operation: Operation, direction: str, arrays: Values, harness: Harness) -> Call:
    """Return this library's call; an operation in place returns what it changed."""
    function: Callable[..., Any] = getattr(cupyattn, operation.function)
    positional, named = operation.given(arrays)
    if direction == "backward":
        result, pullback = cupyattn.vjp(function, *positional, **named)
        several = isinstance(result, tuple)
        normal = harness.arrays(1).normal
        gradients = [
            normal(*out.shape, dtype=out.dtype.name) for out in (result if several else [result])
        ]
        return partial(pullback, tuple(gradients) if several else gradients[0])

    def call() -> Any:
        result = function(*positional, **named)
        return tuple(arrays[index] for index in operation.changes) or result

    return call


def torch_forward(
    torch: Any, function: Callable[..., Any], arrays: Values, harness: Harness
) -> Call:
    """Return a call of PyTorch's function that records no gradients."""
    return libraries.forward_calls(torch, function, _tensors(torch, arrays))[0]


def torch_backward(
    torch: Any, function: Callable[..., Any], arrays: Values, harness: Harness
) -> Call:
    """Return a call of ``torch.autograd.grad`` with the same gradients."""
    tensors = _tensors(torch, arrays)
    wanted = [t for t in tensors if torch.is_tensor(t) and t.is_floating_point()]
    for tensor in wanted:
        tensor.requires_grad_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch_stream(torch)):
        result = function(*tensors)
    torch.cuda.synchronize()
    results = result if isinstance(result, tuple) else (result,)
    names = (str(out.dtype).removeprefix("torch.") for out in results)
    gradients = [
        tensor_of(torch, harness.arrays(1).normal(*out.shape, dtype=name))
        for out, name in zip(results, names, strict=True)
    ]
    grad = torch.autograd.grad
    return partial(grad, results, wanted, gradients, retain_graph=True, allow_unused=True)


def _tensors(torch: Any, arrays: Values) -> list[Any]:
    return [tensor_of(torch, a).detach() if hasattr(a, "dtype") else a for a in arrays]


def sized(arguments: argparse.Namespace) -> Iterator[tuple[Operation, Size]]:
    """Yield every operation at every size; those with their own size once."""
    chosen = [each for each in OPERATIONS if each.name in arguments.operation]
    if getattr(arguments, "small", False):
        for operation in filter(lambda each: each.small is not None, chosen):
            assert operation.small is not None
            found = small_table(operation) if operation.name == "embedding" else operation
            yield found, Size(*operation.small, "float16")
        return
    sizes = [Size(rows, w, arguments.dtype) for rows in arguments.rows for w in arguments.width]
    every = [(operation, operation.size(size)) for size in sizes for operation in chosen]
    yield from {(operation.name, size): (operation, size) for operation, size in every}.values()


def cases(arguments: argparse.Namespace, harness: Harness) -> Iterator[Case]:
    """Yield every operation at every size, forward and backward."""
    for operation, size in sized(arguments):
        inputs = Inputs(operation, size, harness)
        yield _case(inputs, "forward", harness)
        if operation.backward_arrays is not None:
            yield _case(inputs, "backward", harness)


def _case(inputs: Inputs, direction: str, harness: Harness) -> Case:
    operation, size, backward = inputs.operation, inputs.size, direction == "backward"
    flops = None if operation.flops is None else operation.flops(size)[backward]
    others = [
        Implementation.of(
            name,
            inputs.composed if name == "cupy" else partial(inputs.by_torch, name, direction),
        )
        for name in harness.baselines
        if ((operation.composed and not backward) if name == "cupy" else operation.torch)
    ]
    return Case(
        {"operation": operation.name, **size._asdict(), "direction": direction},
        [Implementation("cupyattn", partial(inputs.own, direction)), *others],
        flops=flops,
        bytes=operation.traffic(size, direction),
        ceiling=COPY if flops is None else products_of(size.dtype),
        tolerance=operation.tolerance * (_BACKWARD_TOLERANCE if backward else 1),
        reset=inputs.reset,
    )


_NAMES = [operation.name for operation in OPERATIONS]
BENCHMARK = Benchmark(
    name="layers",
    title="Layers",
    help="GB/s of norms, softmax, losses, embedding, rope, activations, dropout, AdamW, sampling",
    description="Time the memory-bound layers, forward and backward, by CUDA graphs of calls with "
    "arrays that no cache holds. Compositions of array functions have no backward.",
    note="GB/s count each array once that has to be read or written; where products take the time, "
    "the ceiling is that of products.",
    options=(
        Option("operation", _NAMES, f"which (default: all of {', '.join(_NAMES)})", choices=_NAMES),
        Option("rows", [8192], "rows"),
        Option("width", [768, 2048, 4096], "items of a row"),
        Option("dtype", "float16", "dtype of the arrays", choices=tuple(STORAGE)),
    ),
    cases=cases,
    modelled=lambda arguments: {"small": True},
    baselines=("eager", "compile", "cupy"),
    quick={"operation": QUICK, "width": [2048, 768, 4096], "limit": 50.0},
)
