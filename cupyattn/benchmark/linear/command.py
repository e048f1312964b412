"""``python -m cupyattn.benchmark linear``: products with a weight, many rows and few.

Of many rows the figure is TFLOP/s, of few the GB/s at which the weight is read, beside a kernel
that reads it and does nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cupyattn.benchmark.frame.benchmark import Benchmark
from cupyattn.benchmark.frame.clock import Call
from cupyattn.benchmark.frame.emulated import ModelledCall, memory_bound, of_products
from cupyattn.benchmark.frame.rows import READ, Row, products_of
from cupyattn.benchmark.frame.subjects import Contender, Gauge, Subject, measured
from cupyattn.benchmark.frame.turing_model import Model, rate_of
from cupyattn.benchmark.linear.calls import (
    COMPOSED,
    array_calls,
    finished,
    own_calls,
    reading_calls,
    torch_calls,
)
from cupyattn.benchmark.linear.cases import (
    LARGE,
    LAYOUTS,
    QUANTISED,
    THIN,
    THIN_ROWS,
    Arrays,
    Case,
    arrays_of,
)
from cupyattn.benchmark.memory.passes import product
from cupyattn.cli.arguments import integer
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.device.cuda import cuda_device
from cupyattn.ops.linear.problem import ACTIVATIONS
from cupyattn.turing import T4
from cupyattn.weight_formats import FORMATS

KINDS = ("large", "thin", "backward")
OWN, READING = "cupyattn", "read w"
PEERS = ("eager", "compile", "cublas", "cupy")
TOLERANCE = 0.02
_COUNTED: dict[str, Any] = {"M": 128, "N": 256, "K": 256}
"""What the emulator runs of many rows, which 64 are not yet; and of few:"""
_EMULATED_ROWS, _EMULATED_WEIGHT = {1, 16}, (1024, 2048)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument(
        "--kind", nargs="+", choices=KINDS, default=list(KINDS), help="default: all"
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=tuple(STORAGE), default=["float16"], help="default: float16"
    )
    parser.add_argument(
        "--size",
        nargs=3,
        type=integer(1),
        action="append",
        metavar=("M", "N", "K"),
        help="instead of the usual ones, of every kind; may be given several times",
    )
    parser.add_argument(
        "--few", nargs="+", type=integer(1), default=list(THIN_ROWS), metavar="M",
        help=f"rows of thin products (default: {' '.join(map(str, THIN_ROWS))})",
    )  # fmt: skip
    parser.add_argument(
        "--layout",
        nargs="+",
        choices=LAYOUTS,
        default=["nk"],
        help="how w lies: nk is w.T of an array (N, K) (default: nk)",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=tuple(FORMATS),
        default=[],
        help="quantised weights (N, K) of these formats beside those of the dtype: many rows, also "
        "of dx = dout w^T, and few; no backward, which has no dw then",
    )
    parser.add_argument(
        "--activation",
        choices=("none", *ACTIVATIONS),
        help="default: gelu_tanh of many rows, none of few",
    )


def cases_of(arguments: argparse.Namespace) -> Iterator[Case]:
    """Yield what the command line asks for."""
    kinds = [kind for kind in arguments.kind if kind != "backward" or not arguments.weights]
    for kind in kinds:
        usual: Sequence[tuple[int, int, int]] = QUANTISED if arguments.weights else LARGE
        if kind == "thin":
            usual = [(m, n, k) for n, k in THIN for m in arguments.few]
        plain = kind == "thin" or arguments.weights
        activation = arguments.activation or ("none" if plain else "gelu_tanh")
        after = None if activation == "none" else activation
        for dtype in arguments.dtype:
            for layout in arguments.layout:
                for weights in (None, *(arguments.weights if layout == "nk" else ())):
                    for m, n, k in arguments.size or usual:
                        yield Case(kind, m, n, k, dtype, layout, after, weights)
                    if kind == "large" and arguments.weights:
                        for m, n, k in arguments.size or usual:
                            yield Case("dx", m, n, k, dtype, layout, None, weights)


def subjects(arguments: argparse.Namespace, gauge: Gauge) -> Iterator[Subject]:
    """Yield every case."""
    for case in cases_of(arguments):
        arrays = arrays_of(case, gauge.xp)
        contenders = [Contender(OWN, partial(own_calls, case, arrays))]
        if case.kind == "thin":
            contenders.append(Contender(READING, partial(_reading, arrays, gauge)))
        thin = case.kind == "thin"
        yield Subject(
            case.labels,
            [*contenders, *_peers(case, arrays, gauge)],
            flops=case.flops,
            bytes=case.bytes,
            ceiling=READ if thin else products_of(case.dtype),
            tolerance=TOLERANCE * (2.5 if case.kind == "backward" else 1),
            own={READING: {"flops": None}},
        )


def _reading(arrays: Arrays, gauge: Gauge) -> list[Call]:
    device = cuda_device(0)
    return list(reading_calls(device, device.multiprocessors, arrays, gauge.xp))


def _peers(case: Case, arrays: Arrays, gauge: Gauge) -> Iterator[Contender]:
    if case.weights is not None or case.kind == "dx":
        return
    for name in gauge.peers:
        if name in ("eager", "compile"):
            calls = partial(torch_calls, gauge, case, arrays, compiled=name == "compile")
            yield Contender.of_peer(name, calls, _turned if case.kind == "backward" else _same)
        elif case.kind != "backward" and case.activation in COMPOSED:
            alone = name == "cublas"
            calls = partial(array_calls, case, arrays, gauge.xp, alone=alone)
            after = partial(finished, case, arrays, xp=gauge.xp) if alone else _same
            yield Contender.of_peer(name, calls, after)


def _same(result: Any) -> Any:
    return result


def _turned(grads: Any) -> Any:
    """Return the gradients with dw as (K, N)."""
    dx, dw, db = grads
    return dx, dw.T, db


def rows(arguments: argparse.Namespace, gauge: Gauge) -> Iterable[Row]:
    """Measure every row."""
    return measured(subjects(arguments, gauge), gauge, len(list(cases_of(arguments))))


def modelled(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield rows of many rows by the model's rate, of few by the bytes of a small weight."""
    model = Model(T4)
    for case in cases_of(arguments):
        if case.kind != "thin":
            small = replace(case, **_COUNTED)
            rate = rate_of(model, "linear", case.labels)
            call = ModelledCall(OWN, small.weight_bytes, product(small))
            yield of_products(case.labels, OWN, case.flops, rate, call, least_bytes=case.bytes)
    if "thin" in arguments.kind:
        for weights in (None, *arguments.weights):
            for m in sorted(set(arguments.few) & _EMULATED_ROWS):
                case = Case("large", m, *_EMULATED_WEIGHT, "float16", "nk", None, weights)
                call = ModelledCall(OWN, case.weight_bytes, product(case))
                yield memory_bound({**case.labels, "kind": "thin"}, call)


BENCHMARK = Benchmark(
    name="linear",
    title="linear",
    help="times of linear on a GPU: TFLOP/s of many rows, GB/s of few, and of the backward",
    description="Time linear(x, w, b, out=out) and linear_backward: many rows and the backward in "
    "TFLOP/s; few rows in GB/s of the weight, which is never in L2, beside a kernel that only "
    "reads it.",
    note="TFLOP/s count 2 * M * N * K for each product. Few rows are timed in a CUDA graph of "
    "calls with one weight after the other; their bytes are the weight's.",
    rows=rows,
    options=options,
    peers=PEERS,
    quick={"few": [1, 16]},
    modelled=modelled,
)
