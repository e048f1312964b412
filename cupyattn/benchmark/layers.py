"""``python -m cupyattn.benchmark layers``: the memory-bound layers, forward and backward.

The measure is GB/s of the least traffic that an operation can have, compared with a copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.benchmark import libraries
from cupyattn.benchmark.cases import Arrays, Case, Harness, TimedImplementation, products_of
from cupyattn.benchmark.command import Benchmark, Option
from cupyattn.benchmark.libraries import tensor_of
from cupyattn.benchmark.timer import COPY, Call, Round, Tensor, torch_stream
from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.arrays import Array, dtype_of
from cupyattn.runtime.storage import STORAGE

HEAD_DIM = 128
_DROPOUT_P = 0.1
_VOCABULARY = (2048, 128_256)  # tokens, and classes of Llama 3
_FEATURES = 2048  # of a token whose classes a product gives
_TABLE_ROWS = 50_257  # tokens of GPT-2's vocabulary, for embedding
_POSITIONS = 2048  # tokens of a sequence, for rope

Values = tuple[Any, ...]


class RowSize(NamedTuple):
    """How large an operation's rows are: a token each."""

    rows: int
    width: int
    dtype: str

    @property
    def item_bytes(self) -> int:
        """The bytes of an item."""
        return dtype_of(self.dtype).itemsize

    @property
    def array_bytes(self) -> int:
        """The bytes of an array of rows."""
        return self.rows * self.width * self.item_bytes


@dataclass(frozen=True)
class LayerCall:
    """One operation, and the least memory traffic that it can have."""

    name: str
    function: str
    """Its name in `cupyattn`."""
    arrays: Callable[[RowSize, Arrays], Values]
    """Make its positional arguments."""
    torch: Callable[..., Tensor]
    """Compute it in PyTorch, from torch and the tensors."""
    forward_arrays: int
    """How many arrays of rows the forward reads and writes."""
    backward_arrays: int | None = None
    """How many the backward does, from the gradient of the result; None without a backward."""
    more_bytes: Callable[[RowSize], tuple[int, int]] = lambda size: (0, 0)
    """Bytes of other arrays that the forward, and the backward, read and write."""
    flops: Callable[[RowSize], tuple[int, int]] | None = None
    """Operations of forward and backward, if products take the time."""
    options: Mapping[str, object] = field(default_factory=dict)
    by_name: tuple[str, ...] = ()
    """Options that take the last of `arrays`."""
    tolerance: float = 0.02
    """How far results may differ from PyTorch's, relative to the largest."""
    shape: tuple[int, int] | None = None
    """Its own rows and width."""

    def size(self, size: RowSize) -> RowSize:
        """Return its own size, or the given one."""
        return size if self.shape is None else RowSize(*self.shape, size.dtype)

    def traffic(self, size: RowSize, direction: str) -> int:
        """Return the least bytes that a call moves."""
        backward = direction == "backward"
        rows = self.backward_arrays if backward else self.forward_arrays
        return (rows or 0) * size.array_bytes + self.more_bytes(size)[backward]

    def given(self, arrays: Values) -> tuple[Values, Keywords]:
        """Return the positional and the keyword arguments of a call."""
        cut = len(arrays) - len(self.by_name)
        named = dict(zip(self.by_name, arrays[cut:], strict=True))
        return arrays[:cut], {**self.options, **named}


# Arrays of operations


def _rows(size: RowSize, source: Arrays) -> Array:
    return source.normal(size.rows, size.width, dtype=size.dtype)


def _one(size: RowSize, source: Arrays) -> Values:
    return (_rows(size, source),)


def _norm(parameters: int, size: RowSize, source: Arrays, *, residual: bool = False) -> Values:
    columns = [source.normal(size.width, dtype=size.dtype) for _ in range(parameters)]
    return (_rows(size, source), *columns, *([_rows(size, source)] if residual else []))


def _packed(size: RowSize, source: Arrays) -> Values:
    return (source.normal(size.rows, 2 * size.width, dtype=size.dtype),)


def _labelled(size: RowSize, source: Arrays) -> Values:
    return _rows(size, source), source.integers(0, size.width, size.rows)


def _features(size: RowSize, source: Arrays) -> Values:
    x = source.normal(size.rows, _FEATURES, dtype=size.dtype)
    w = source.normal(size.width, _FEATURES, dtype=size.dtype)
    return x, w.T, source.integers(0, size.width, size.rows)


def _feature_bytes(size: RowSize) -> tuple[int, int]:
    """Return the bytes of x and w, and of these and their gradients."""
    read = (size.rows + size.width) * _FEATURES * size.item_bytes
    return read, 2 * read


def _feature_flops(size: RowSize) -> tuple[int, int]:
    """Return the operations of one product, and of two; recomputed logits do not count."""
    product = 2 * size.rows * size.width * _FEATURES
    return product, 2 * product


def _table(size: RowSize, source: Arrays) -> Values:
    table = source.normal(_TABLE_ROWS, size.width, dtype=size.dtype)
    return table, source.integers(0, _TABLE_ROWS, size.rows)


def _optimised(size: RowSize, source: Arrays) -> Values:
    param, grad = (_rows(size, source) for _ in range(2))
    m, v = (source.normal(size.rows, size.width, dtype="float32") for _ in range(2))
    return param, grad, m, v**2 + 1


def _heads(size: RowSize, source: Arrays) -> Values:
    positions = min(_POSITIONS, size.rows)
    width = min(HEAD_DIM, size.width)
    shape = (size.rows // positions, positions, max(size.width // HEAD_DIM, 1), width)
    tables = map(source.xp.asarray, cupyattn.rope_tables(positions, width))
    return source.normal(*shape, dtype=size.dtype), *tables


# The operations in PyTorch


def _torch_rope(torch: ModuleType, x: Tensor, cos: object, sin: object) -> object:
    """Rotate halves of x, with tables in its dtype, as models do."""
    cos, sin = (torch.cat((t, t), -1)[None, :, None].to(x.dtype) for t in (cos, sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _torch_gated(activation: str, torch: ModuleType, packed: Tensor) -> object:
    gate, up = packed.chunk(2, -1)
    return getattr(torch.nn.functional, activation)(gate) * up


def _torch_norm(name: str, eps: float, torch: ModuleType, x: Tensor, *parameters: object) -> Tensor:
    norm = getattr(torch.nn.functional, name)
    return norm(x, x.shape[-1:], *parameters, **({"eps": eps} if name == "rms_norm" else {}))


def _torch_add_norm(name: str, eps: float, torch: ModuleType, x: Tensor, *others: object) -> object:
    *parameters, residual = others
    total = x + residual
    return _torch_norm(name, eps, torch, total, *parameters), total


_ADAMW: Keywords = {
    **{"step": 1000, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
}


def _torch_adamw(torch: ModuleType, param: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> object:
    """Step in place with means in float32, which ``torch.optim`` keeps in the parameters' dtype."""
    beta1, beta2 = _ADAMW["betas"]
    grad = grad.float()
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    mean = m / (1 - beta1 ** _ADAMW["step"])
    root = (v / (1 - beta2 ** _ADAMW["step"])).sqrt() + _ADAMW["eps"]
    kept = param.float() * (1 - _ADAMW["lr"] * _ADAMW["weight_decay"])
    param.copy_(kept - _ADAMW["lr"] * mean / root)
    return param, m, v


def _functional(name: str, **options: object) -> Callable[..., object]:
    """Return a function of ``torch.nn.functional``."""
    return lambda torch, *tensors: getattr(torch.nn.functional, name)(*tensors, **options)


_LN, _RMS = ("layer_norm", 1e-5), ("rms_norm", 1e-6)
_RESIDUAL: Keywords = {"by_name": ("residual",)}
OPERATIONS = (
    LayerCall("layer_norm", "layer_norm", partial(_norm, 2), partial(_torch_norm, *_LN), 2, 3),
    LayerCall("rms_norm", "rms_norm", partial(_norm, 1), partial(_torch_norm, *_RMS), 2, 3),
    LayerCall("add + layer_norm", "layer_norm", partial(_norm, 2, residual=True),
              partial(_torch_add_norm, *_LN), 4, 4, **_RESIDUAL),
    LayerCall("add + rms_norm", "rms_norm", partial(_norm, 1, residual=True),
              partial(_torch_add_norm, *_RMS), 4, 4, **_RESIDUAL),
    LayerCall("softmax", "softmax", _one, lambda torch, x: torch.softmax(x, -1), 2, 3),
    LayerCall("log_softmax", "log_softmax", _one, lambda torch, x: torch.log_softmax(x, -1), 2, 3),
    LayerCall("logsumexp", "logsumexp", _one, lambda torch, x: torch.logsumexp(x, -1), 1, 2),
    LayerCall("cross_entropy", "cross_entropy", _labelled,
              lambda torch, x, labels: torch.nn.functional.cross_entropy(x.float(), labels), 1, 2,
              shape=_VOCABULARY),
    LayerCall("linear_cross_entropy", "linear_cross_entropy", _features,
              lambda torch, x, w, labels:
              torch.nn.functional.cross_entropy((x @ w).float(), labels), 0, 0,
              _feature_bytes, _feature_flops, shape=_VOCABULARY),
    LayerCall("embedding", "embedding", _table,
              lambda torch, table, ids: torch.nn.functional.embedding(ids, table), 2, 1,
              lambda size: (0, _TABLE_ROWS * size.width * size.item_bytes)),
    LayerCall("rope", "rope", _heads, _torch_rope, 2, 2),
    LayerCall("gelu", "gelu", _one, _functional("gelu", approximate="tanh"), 2, 3,
              options={"approximate": "tanh"}),
    LayerCall("silu", "silu", _one, _functional("silu"), 2, 3),
    LayerCall("swiglu", "swiglu", _packed, partial(_torch_gated, "silu"), 3, 5),
    LayerCall("geglu", "geglu", _packed, partial(_torch_gated, "gelu"), 3, 5),
    LayerCall("dropout", "dropout", lambda size, source: (_rows(size, source), _DROPOUT_P, 1),
              lambda torch, x, p, seed: torch.nn.functional.dropout(x, p), 2, 2,
              tolerance=np.inf),  # another generator
    LayerCall("dropout + add", "dropout",
              lambda size, source: (_rows(size, source), _DROPOUT_P, 1, _rows(size, source)),
              lambda torch, x, p, seed, residual: torch.nn.functional.dropout(x, p) + residual,
              3, 2, **_RESIDUAL, tolerance=np.inf),
    LayerCall("adamw_step", "adamw_step", _optimised, _torch_adamw, 3, None,
              lambda size: (4 * 4 * size.rows * size.width, 0),  # m and v, read and written
              options=_ADAMW, tolerance=np.inf),  # every call makes another step
    LayerCall("global_norm", "global_norm", _one,
              lambda torch, x: torch.linalg.vector_norm(x, dtype=torch.float32), 1),
)  # fmt: skip
"""All of them, in the order of the table."""


QUICK = [
    *("layer_norm", "rms_norm", "add + layer_norm", "add + rms_norm", "softmax", "log_softmax"),
    *("cross_entropy", "rope", "gelu", "silu", "swiglu", "geglu", "dropout", "embedding"),
    "global_norm",
]
_MOST_SETS = 16
_BACKWARD_TOLERANCE = 2.5  # times the forward's: gradients are sums of more


class LayerInputs:
    """Sets of arrays that calls alternate between, so that no cache holds them."""

    def __init__(self, operation: LayerCall, size: RowSize, harness: Harness) -> None:
        self.operation, self.size, self.harness = operation, size, harness

    @cached_property
    def sets(self) -> list[Values]:
        """The arrays."""
        traffic = self.operation.traffic(self.size, "forward")
        seeds = range(self.harness.sets(traffic, _MOST_SETS))
        return [self.operation.arrays(self.size, self.harness.arrays(seed)) for seed in seeds]

    def own(self, direction: str) -> Round:
        """Return a call for each set; a backward is the pullback with random gradients."""
        return [own_call(self.operation, direction, each, self.harness) for each in self.sets]

    def by_torch(self, name: str, direction: str) -> Round:
        """Return a call of PyTorch for each set, eager or compiled."""
        torch, compute = self.harness.torch, self.operation.torch

        def function(*tensors: object) -> Tensor:
            return compute(torch, *tensors)

        if name == "compile":
            function = self.harness.compiled(function)
        make = torch_forward if direction == "forward" else torch_backward
        return [make(torch, function, arrays, self.harness) for arrays in self.sets]


def own_call(operation: LayerCall, direction: str, arrays: Values, harness: Harness) -> Call:
    """Return this library's call."""
    function: Callable[..., object] = getattr(cupyattn, operation.function)
    positional, named = operation.given(arrays)
    if direction == "forward":
        return partial(function, *positional, **named)
    result, pullback = cupyattn.vjp(function, *positional, **named)
    normal = harness.arrays(1).normal
    if not isinstance(result, tuple):
        return partial(pullback, normal(*result.shape, dtype=result.dtype.name))
    return partial(pullback, tuple(normal(*out.shape, dtype=out.dtype.name) for out in result))


def torch_forward(
    torch: ModuleType, function: libraries.Attend, arrays: Values, harness: Harness
) -> Call:
    """Return a call of PyTorch's function that records no gradients."""
    return libraries.forward_calls(torch, function, _tensors(torch, arrays))[0]


def torch_backward(
    torch: ModuleType, function: libraries.Attend, arrays: Values, harness: Harness
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


def _tensors(torch: ModuleType, arrays: Values) -> list[Tensor]:
    return [tensor_of(torch, a).detach() if hasattr(a, "dtype") else a for a in arrays]


def sized(arguments: argparse.Namespace) -> Iterator[tuple[LayerCall, RowSize]]:
    """Yield every operation at every size; those with their own size once."""
    chosen = [each for each in OPERATIONS if each.name in arguments.operation]
    sizes = [RowSize(rows, w, arguments.dtype) for rows in arguments.rows for w in arguments.width]
    every = [(operation, operation.size(size)) for size in sizes for operation in chosen]
    yield from {(operation.name, size): (operation, size) for operation, size in every}.values()


def cases(arguments: argparse.Namespace, harness: Harness) -> Iterator[Case]:
    """Yield every operation at every size, forward and backward."""
    for operation, size in sized(arguments):
        inputs = LayerInputs(operation, size, harness)
        yield _case(inputs, "forward", harness)
        if operation.backward_arrays is not None:
            yield _case(inputs, "backward", harness)


def _case(inputs: LayerInputs, direction: str, harness: Harness) -> Case:
    operation, size, backward = inputs.operation, inputs.size, direction == "backward"
    flops = None if operation.flops is None else operation.flops(size)[backward]
    others = [
        TimedImplementation(name, partial(inputs.by_torch, name, direction))
        for name in harness.baselines
    ]
    return Case(
        {"operation": operation.name, **size._asdict(), "direction": direction},
        [TimedImplementation("cupyattn", partial(inputs.own, direction)), *others],
        flops=flops,
        bytes=operation.traffic(size, direction),
        ceiling=COPY if flops is None else products_of(size.dtype),
        tolerance=operation.tolerance * (_BACKWARD_TOLERANCE if backward else 1),
    )


_NAMES = [operation.name for operation in OPERATIONS]
BENCHMARK = Benchmark(
    name="layers",
    title="Layers",
    help="GB/s of norms, softmax, losses, embedding, rope, activations, dropout, AdamW",
    description="Time the memory-bound layers, forward and backward, by CUDA graphs of calls with "
    "arrays that no cache holds.",
    note="GB/s count each array once that has to be read or written; where products take the time, "
    "the ceiling is that of products.",
    options=(
        Option("operation", _NAMES, f"which (default: all of {', '.join(_NAMES)})", choices=_NAMES),
        Option("rows", [8192], "rows"),
        Option("width", [768, 2048, 4096], "items of a row"),
        Option("dtype", "float16", "dtype of the arrays", choices=tuple(STORAGE)),
    ),
    cases=cases,
    baselines=("eager", "compile"),
    quick={"operation": QUICK, "width": [2048, 768, 4096], "limit": 50.0},
)
