"""``python -m cupyattn.benchmark linear`` and ``matmul``: products with a weight, and of batches.

Many rows are measured in TFLOP/s, few rows in GB/s of the weight, compared with only reading it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.benchmark import libraries
from cupyattn.benchmark.cases import Case, Harness, TimedImplementation, products_of
from cupyattn.benchmark.ceiling_kernels import CTAS_PER_SM, read_weight
from cupyattn.benchmark.command import Benchmark, Option
from cupyattn.benchmark.libraries import tensor_of
from cupyattn.benchmark.timer import READ, Round, Tensor
from cupyattn.ops.linear.plan import backward_call, backward_plan
from cupyattn.ops.linear.problem import ACTIVATIONS, LinearBackwardArrays
from cupyattn.ops.linear.weight_formats import (
    FORMATS,
    ROTATION,
    QuantizedWeight,
    blocks_for,
    empty,
    pieces,
)
from cupyattn.runtime.arrays import Array, adopt, dtype_of
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.device import Device
from cupyattn.runtime.device.cuda import cuda_device
from cupyattn.runtime.plan import launch, run
from cupyattn.runtime.storage import STORAGE, VECTOR_BYTES

LARGE = ((8192, 16384, 4096), (8192, 2560, 10240), (8192, 3072, 768), (512, 16384, 4096))
"""(M, N, K) of products that arithmetic bounds."""
QUANTISED = (
    (8192, 8192, 4096),
    (8192, 16384, 4096),
    (8192, 2560, 10240),
    (2048, 10240, 2560),
    (512, 10240, 2560),
)
"""Products with quantised weights: with enough rows to fill tiles, and with few tiles."""
THIN = (
    (16384, 4096),
    (2560, 2560),
    (10240, 2560),
    (2560, 10240),
    (2048, 8192),
    (8192, 2048),
    (128256, 2048),
)
"""(N, K) of products that reading the weight bounds."""
THIN_ROWS = [1, 2, 4, 8, 16, 32, 64]
LAYOUTS = ("nk", "kn")
"""Whether w is stored as (N, K), of which linear gets the transpose, or as (K, N)."""
KINDS = ("large", "thin", "backward")
GRADIENTS = ("dx", "dw")
"""Products of the backward alone, without a bias and an activation."""
OWN, OWN_ROWS, READING = "cupyattn", "rows given", "read w"
TOLERANCE = 0.02
_MOST_WEIGHTS = 10**6


@dataclass(frozen=True)
class WeightProduct:
    """One product; letters as in the public API."""

    kind: str
    """"large", "thin" or "backward"; or "dx" or "dw", one product of the backward alone."""
    M: int
    N: int
    K: int
    dtype: str
    layout: str
    activation: str | None
    weights: str | None = None
    """The format of w, if it is quantised."""
    activations: str | None = None
    """"int8" for a product of int8 rows and an int8 weight."""

    @property
    def flops(self) -> float:
        """The operations of the product, or of the backward's two."""
        return (4 if self.kind == "backward" else 2) * float(self.M) * self.N * self.K

    @property
    def ceiling(self) -> str | None:
        """The ceiling of many rows: none of int8 products, whose rate is not measured."""
        return products_of(self.dtype) if self.activations is None else None

    @property
    def weight_bytes(self) -> int:
        """The bytes of w."""
        if self.weights is None:
            return self.N * self.K * dtype_of(self.dtype).itemsize
        size = FORMATS[self.weights].block_size or self.K
        found = pieces(self.weights, self.N, self.K, size)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in found.values())

    @property
    def bytes(self) -> int:
        """The bytes that have to move: of few rows w only, otherwise every array once."""
        if self.kind == "thin":
            return self.weight_bytes
        x, out = self.M * self.K, self.M * self.N
        item = dtype_of(self.dtype).itemsize
        if self.kind == "backward":  # x, w, b and their gradients; dout, and the preactivation
            more = 1 if self.activation is None else 2
            return 2 * self.weight_bytes + (2 * (x + self.N) + more * out) * item
        bias = 0 if self.kind in GRADIENTS else self.N
        return self.weight_bytes + (x + out + bias) * item


class ProductArrays(NamedTuple):
    """The arrays of a product: x, the weights as stored, b, dout, and memory for the result."""

    x: Array
    weights: list[Any]
    b: Array
    dout: Array
    out: Array


class LinearInputs:
    """The inputs of all implementations of a product, made when the first one is prepared."""

    def __init__(self, product: WeightProduct, harness: Harness) -> None:
        self.product, self.harness = product, harness

    @cached_property
    def arrays(self) -> ProductArrays:
        """The arrays; of few rows with so many weights that none is in L2 when it is read."""
        product, source = self.product, self.harness.arrays()
        m, n, k = product.M, product.N, product.K
        normal = partial(source.normal, dtype=product.dtype)

        def weight() -> Array | QuantizedWeight:
            if product.weights is not None:
                return self._quantised(product.weights)
            return normal(*((n, k) if product.layout == "nk" else (k, n)), scale=k**-0.5)

        thin = product.kind == "thin"
        copies = self.harness.sets(product.weight_bytes, _MOST_WEIGHTS) if thin else 1
        weights = [weight() for _ in range(max(copies, 1 + (thin and self.harness.cold)))]
        shape = (m, k if product.kind == "dx" else n)
        out = self.harness.xp.empty(shape, dtype_of(product.dtype))
        return ProductArrays(normal(m, k), weights, normal(n), normal(m, n), out)

    def _quantised(self, name: str) -> QuantizedWeight:
        product, source = self.product, self.harness.arrays()
        if not self.harness.filled:
            return empty(blocks_for(name, product.K), product.N, product.K, np)
        size = FORMATS[name].block_size or product.K
        arrays: dict[str, Any] = {}
        for piece, (shape, kind) in pieces(name, product.N, product.K, size).items():
            if kind.kind == "f":
                arrays[piece] = source.uniform(*shape, dtype=kind, scale=product.K**-0.5)
            else:
                most = 64 if piece == "scales" else 256
                arrays[piece] = source.integers(0, most, *shape, dtype=np.uint8).view(kind)
        rotated = product.activations is not None and product.K % ROTATION == 0
        form: Any = {"block_size": size, "rotation": ROTATION if rotated else None}
        return QuantizedWeight(name, **arrays, **form, transposed=True)

    def own_calls(self) -> Round:
        """Return calls with each of the weights, into arrays that are allocated."""
        product, (x, weights, b, dout, out) = self.product, self.arrays
        ws = [w.T if product.layout == "nk" else w for w in weights]
        if product.kind == "dx":
            return [partial(cupyattn.linear, dout, w.T, out=out) for w in ws]
        if product.kind == "dw":
            grads = cupyattn.linear_backward(dout, x, ws[0])
            return [partial(_dw_alone, dout, x, w, grads) for w in ws]
        activation = product.activation
        if product.kind != "backward":
            options: Any = {"activation": activation, "activations": product.activations}
            return [partial(cupyattn.linear, x, w, b, **options, out=out) for w in ws]
        z = None
        if activation is not None:
            _, z = cupyattn.linear(x, ws[0], b, activation=activation, return_preactivation=True)
        backward = partial(cupyattn.linear_backward, activation=activation, preactivation=z)
        grads = cupyattn.LinearGrads(*backward(dout, x, ws[0], b))
        return [partial(backward, dout, x, w, b, grads=grads) for w in ws]

    def row_calls(self) -> Round:
        """Return the products of rows that are quantised already."""
        x, weights, b, _, out = self.arrays
        rows = cupyattn.quantize_rows(x, rotation=weights[0].rotation)
        options: Any = {"activation": self.product.activation, "out": out}
        return [partial(cupyattn.linear, rows, w.T, b, **options) for w in weights]

    def int_mm_calls(self) -> Round:
        """Return PyTorch's products of the same codes, without scales."""
        torch, (x, weights, *_) = self.harness.torch, self.arrays
        rows = cupyattn.quantize_rows(x, rotation=weights[0].rotation)
        codes = tensor_of(torch, rows.codes)
        return [partial(torch._int_mm, codes, tensor_of(torch, w.codes).T) for w in weights]

    def reading_calls(self, device: Device | None = None) -> Round:
        """Return launches of a kernel that only reads each weight, or as many bytes."""
        xp, on = self.harness.xp, device or cuda_device(0)
        sink = xp.zeros(1, np.uint32)
        grid = getattr(on, "multiprocessors", 1) * CTAS_PER_SM

        def read(weight: Array) -> None:
            count = weight.nbytes // VECTOR_BYTES
            launch(on, read_weight(), grid, (weight, sink, count))

        return [
            partial(read, xp.zeros(w.nbytes, np.uint8) if isinstance(w, QuantizedWeight) else w)
            for w in self.arrays.weights
        ]

    def torch_calls(self, name: str) -> Round:
        """Return the calls of PyTorch, eager or compiled, on the same memory."""
        torch, product = self.harness.torch, self.product
        functional = torch.nn.functional
        after: dict[str | None, Callable[[Tensor], Tensor]] = {
            None: lambda z: z,
            "gelu": functional.gelu,
            "gelu_tanh": partial(functional.gelu, approximate="tanh"),
            "silu": functional.silu,
            "relu": functional.relu,
        }
        activation = after[product.activation]

        def linear(x: object, w: object, b: object) -> Tensor:
            return activation(functional.linear(x, w, b))

        function = self.harness.compiled(linear) if name == "compile" else linear
        x, weights, b, dout, _ = self.arrays
        x, b, dout = (tensor_of(torch, array) for array in (x, b, dout))
        ws = [tensor_of(torch, w if product.layout == "nk" else w.T) for w in weights]
        if product.kind == "backward":
            return libraries.backward_calls(torch, function, (x, ws[0], b), dout=dout)
        return [libraries.forward_calls(torch, function, (x, w, b))[0] for w in ws]

    def product_calls(self) -> Round:
        """Return the products alone, by cuBLAS as CuPy calls it."""
        xp, (x, weights, _, _, out) = self.harness.xp, self.arrays
        ws = [w.T if self.product.layout == "nk" else w for w in weights]
        return [partial(xp.matmul, x, w, out=xp.empty_like(out)) for w in ws]


def _dw_alone(dout: Array, x: Array, w: Array, grads: cupyattn.LinearGrads) -> Array | None:
    """Compute x^T dout by the launches of the backward without the first one, which computes dx."""
    operands = adopt(LinearBackwardArrays(dout, x, w, dx=grads.dx, dw=grads.dw))
    call = backward_call(operands, None, False, None)
    device = device_of(operands)
    if device is None:  # NumPy has one call for all gradients
        return cupyattn.linear_backward(dout, x, w, grads=grads).dw
    plan = backward_plan(call, device.traits)
    run(device, plan._replace(steps=plan.steps[1:]), operands)
    return grads.dw


def products(arguments: argparse.Namespace) -> Iterator[WeightProduct]:
    """Yield every kind, dtype, layout, format of weights and size."""
    for kind in arguments.kind:
        if kind in ("backward", "dw") and arguments.weights:  # a quantised weight has no dw
            continue
        usual: Sequence[tuple[int, int, int]] = QUANTISED if arguments.weights else LARGE
        if kind == "thin":
            usual = [(m, n, k) for n, k in THIN for m in arguments.few]
        sizes = arguments.size or usual
        plain = kind == "thin" or arguments.weights
        activation = arguments.activation or ("none" if plain else "gelu_tanh")
        activation = "none" if kind in GRADIENTS else activation
        after = None if activation == "none" else activation
        for dtype in arguments.dtype:
            for layout in arguments.layout:
                for weights in (None, *(arguments.weights if layout == "nk" else ())):
                    for m, n, k in sizes:
                        yield WeightProduct(kind, m, n, k, dtype, layout, after, weights)
                    if kind == "large" and weights is None and layout == "nk":
                        for form in arguments.activations:
                            for m, n, k in sizes:
                                options = (after, "int8", form)
                                yield WeightProduct(kind, m, n, k, dtype, layout, *options)
                    if kind == "large" and arguments.weights:
                        for m, n, k in sizes:
                            yield WeightProduct("dx", m, n, k, dtype, layout, None, weights)


def cases(arguments: argparse.Namespace, harness: Harness) -> Iterator[Case]:
    """Yield a case for each product."""
    for product in products(arguments):
        inputs, thin = LinearInputs(product, harness), product.kind == "thin"
        reading = TimedImplementation(READING, inputs.reading_calls)
        yield Case(
            asdict(product),
            [
                TimedImplementation(OWN, inputs.own_calls),
                *[reading] * thin,
                *_baselines(product, inputs, harness),
            ],
            flops=product.flops,
            bytes=product.bytes,
            ceiling=READ if thin else product.ceiling,
            tolerance=TOLERANCE * (2.5 if product.kind == "backward" else 1),
            own={READING: {"flops": None}},
        )


def _baselines(
    product: WeightProduct, inputs: LinearInputs, harness: Harness
) -> Iterator[TimedImplementation]:
    if product.activations is not None:
        yield TimedImplementation(OWN_ROWS, inputs.row_calls)
        if "eager" in harness.baselines:
            yield TimedImplementation("int_mm", inputs.int_mm_calls, lambda result: None)
    if product.weights is not None or product.kind in GRADIENTS:
        return
    for name in harness.baselines:
        if name in ("eager", "compile"):
            backward = product.kind == "backward"
            yield TimedImplementation(
                name,
                partial(inputs.torch_calls, name),
                (lambda grads: (grads[0], grads[1].T, grads[2])) if backward else lambda out: out,
            )
        elif product.kind != "backward":  # without bias and activation: another result
            yield TimedImplementation(name, inputs.product_calls, lambda result: None)


BENCHMARK = Benchmark(
    name="linear",
    title="linear",
    help="times of linear on a GPU: TFLOP/s of many rows, GB/s of few, and of the backward",
    description="Time linear(x, w, b, out=out) and linear_backward: many rows and the backward in "
    "TFLOP/s; few rows in GB/s of the weight, which is never in L2, compared with a kernel that "
    "only reads it.",
    note="TFLOP/s count 2 * M * N * K for each product. Few rows are timed in a CUDA graph of "
    "calls with one weight after the other; their bytes are the weight's.",
    options=(
        Option("kind", list(KINDS), "kinds of products; dx and dw are one product of the backward",
               choices=(*KINDS, *GRADIENTS)),
        Option("dtype", ["float16"], "dtype of the arrays", choices=tuple(STORAGE)),
        Option("size", [], "a size instead of the usual ones, for every kind; may be given several "
               "times", metavar=("M", "N", "K"), repeated=3),
        Option("few", THIN_ROWS, "rows of thin products", metavar="M"),
        Option("layout", ["nk"], "how w is stored: nk is w.T of an array (N, K)", choices=LAYOUTS),
        Option("weights", [], "quantised weights (N, K) of these formats besides those of the "
               "dtype: many rows, also of dx = dout w^T, and few; no backward, which has no dw "
               "then", choices=tuple(FORMATS)),
        Option("activations", [], "many rows that are quantised too: int8 by int8, with the rows "
               "quantised in the call and before it, compared with torch._int_mm of the codes",
               choices=("int8",)),
        Option("activation", None, "(default: gelu_tanh of many rows, none of few)",
               choices=("none", *ACTIVATIONS)),
    ),
    cases=cases,
    baselines=("eager", "compile", "cublas"),
    quick={"few": [1, 16]},
)  # fmt: skip


BATCHES = (
    (64, 512, 512, 512),
    (2048, 128, 128, 128),
    (512, 64, 64, 1024),
    (256, 8, 1024, 1024),
    (16, 1024, 1024, 1024),
    (1, 8192, 8192, 4096),
)
"""(members, M, N, K) of floats: small matrices, a long sum, few rows, and one large product."""
INTEGERS = tuple((1, size, size, size) for size in (1024, 2048, 4096, 8192))
"""(members, M, N, K) of int8."""
MATMUL_DTYPES = (*STORAGE, "int8")


@dataclass(frozen=True)
class MatrixProduct:
    """The products of a batch; letters as in the public API."""

    batch: int
    M: int
    N: int
    K: int
    dtype: str
    layout: str
    """"nk" if b is the transpose of an array (..., N, K), "kn" if it is in C order."""

    @property
    def flops(self) -> float:
        """The operations of the products."""
        return 2 * float(self.batch) * self.M * self.N * self.K

    @property
    def bytes(self) -> int:
        """The bytes of all arrays."""
        item = np.dtype(np.int8).itemsize if self.dtype == "int8" else STORAGE[self.dtype]
        result = 4 if self.dtype == "int8" else item
        inputs = (self.M + self.N) * self.K * item
        return self.batch * (inputs + self.M * self.N * result)


class MatmulInputs:
    """The inputs of all implementations of a product, made when the first one is prepared."""

    def __init__(self, product: MatrixProduct, harness: Harness) -> None:
        self.product, self.harness = product, harness

    @cached_property
    def arrays(self) -> tuple[Array, Array, Array]:
        """a, b and memory for the result. One product has no batch axis."""
        product, source = self.product, self.harness.arrays()
        batch = (product.batch,) if product.batch > 1 else ()

        def drawn(rows: int, columns: int) -> Array:
            if product.dtype == "int8":
                return source.integers(-128, 128, *batch, rows, columns, dtype=np.int8)
            scale = product.K**-0.25
            return source.normal(*batch, rows, columns, dtype=product.dtype, scale=scale)

        a = drawn(product.M, product.K)
        if product.layout == "nk":
            b = drawn(product.N, product.K).swapaxes(-1, -2)
        else:
            b = drawn(product.K, product.N)
        kind = "int32" if product.dtype == "int8" else product.dtype
        out = self.harness.xp.empty((*batch, product.M, product.N), dtype_of(kind))
        return a, b, out

    def own_calls(self) -> Round:
        """Return a call into an array that is allocated."""
        a, b, out = self.arrays
        return [partial(cupyattn.matmul, a, b, out=out)]

    def library_calls(self) -> Round:
        """Return a call of CuPy's matmul; its result of int8 is int8."""
        a, b, out = self.arrays
        own = self.harness.xp.empty(out.shape, a.dtype)
        return [partial(self.harness.xp.matmul, a, b, out=own)]

    def torch_calls(self) -> Round:
        """Return a call of PyTorch on the same memory; of int8 it is torch._int_mm."""
        torch = self.harness.torch
        a, b, _ = self.arrays
        turned = self.product.layout == "nk"
        memory = b.swapaxes(-1, -2) if turned else b
        x, y = tensor_of(torch, a), tensor_of(torch, memory)
        y = y.transpose(-1, -2) if turned else y
        function = torch._int_mm if self.product.dtype == "int8" else torch.matmul
        return [libraries.forward_calls(torch, function, (x, y))[0]]


def matrix_products(arguments: argparse.Namespace) -> Iterator[MatrixProduct]:
    """Yield every dtype, layout and size."""
    for dtype in arguments.dtype:
        usual = INTEGERS if dtype == "int8" else BATCHES
        for layout in arguments.layout:
            for batch, m, n, k in arguments.size or usual:
                yield MatrixProduct(batch, m, n, k, dtype, layout)


def matmul_cases(arguments: argparse.Namespace, harness: Harness) -> Iterator[Case]:
    """Yield a case for each product."""
    for product in matrix_products(arguments):
        inputs, integers = MatmulInputs(product, harness), product.dtype == "int8"
        baselines = {
            "eager": TimedImplementation("eager", inputs.torch_calls),
            "cublas": TimedImplementation("cublas", inputs.library_calls),
        }
        if integers:  # CuPy's wrap around: they are other numbers
            baselines["cublas"] = replace(baselines["cublas"], comparable=lambda result: None)
        yield Case(
            asdict(product),
            [
                TimedImplementation(OWN, inputs.own_calls),
                *(baselines[name] for name in harness.baselines),
            ],
            flops=product.flops,
            bytes=product.bytes,
            ceiling=None if integers else products_of(product.dtype),
            tolerance=TOLERANCE,
        )


MATMUL = Benchmark(
    name="matmul",
    title="matmul",
    help="times of matmul on a GPU: batches of small matrices, large ones, and int8",
    description="Time matmul(a, b, out=out) in TFLOP/s (of int8 in tera-operations a second), next "
    "to cp.matmul and torch.matmul.",
    note="TFLOP/s count 2 * M * N * K for each member of a batch. cp.matmul of int8 has results of "
    "int8, which wrap around; torch is torch._int_mm there.",
    options=(
        Option("dtype", ["float16", "bfloat16", "int8"], "dtype of the arrays",
               choices=MATMUL_DTYPES),
        Option("size", [], "a size instead of the usual ones, for every dtype; may be given "
               "several times", metavar=("BATCH", "M", "N", "K"), repeated=4),
        Option("layout", ["nk"], "how b is stored: nk is the transpose of an array (..., N, K)",
               choices=LAYOUTS),
    ),
    cases=matmul_cases,
    baselines=("eager", "cublas"),
    quick={"dtype": ["float16", "int8"]},
)  # fmt: skip
