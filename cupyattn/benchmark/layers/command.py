"""``python -m cupyattn.benchmark layers``: the memory-bound layers, forward and backward, on a GPU.

Their measure is the memory's speed: GB/s of the least traffic that an operation can have, beside
those of a copy on the same device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from cupyattn.benchmark.frame.benchmark import Benchmark
from cupyattn.benchmark.frame.clock import COLD_BYTES, Round
from cupyattn.benchmark.frame.emulated import memory_bound
from cupyattn.benchmark.frame.rows import COPY, Row, products_of
from cupyattn.benchmark.frame.subjects import Contender, Gauge, Subject, measured
from cupyattn.benchmark.layers.calls import (
    our_backward,
    our_forward,
    torch_backward,
    torch_forward,
)
from cupyattn.benchmark.layers.operation import Arrays, Operation, Size, Source
from cupyattn.benchmark.layers.operations import OPERATIONS
from cupyattn.benchmark.memory.calls import layer_calls
from cupyattn.cli.arguments import integer
from cupyattn.kernels.configs.dtypes import STORAGE

PEERS = ("eager", "compile", "cupy")
IN_README = (
    *("layer_norm", "rms_norm", "add + layer_norm", "add + rms_norm", "softmax", "log_softmax"),
    *("cross_entropy", "rope", "gelu", "silu", "swiglu", "geglu", "dropout", "embedding"),
    "global_norm",
)
_MOST_SETS = 16
_BACKWARD_TOLERANCE = 2.5
"""Times the forward's: gradients are sums of more."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    names = [operation.name for operation in OPERATIONS]
    parser.add_argument(
        "--operation",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"which (default: all of {', '.join(names)})",
    )
    for name, default, what in (("rows", [8192], "rows"), ("width", [768, 2048, 4096], "items")):
        parser.add_argument(
            f"--{name}",
            nargs="+",
            type=integer(1),
            default=default,
            metavar="N",
            help=f"{what}{' of a row' if name == 'width' else ''} "
            f"(default: {' '.join(map(str, default))})",
        )
    parser.add_argument(
        "--dtype", choices=STORAGE, default="float16", help="of the arrays (default: %(default)s)"
    )


def sets_of(traffic: int) -> int:
    """Return how many sets of arrays of so many bytes are larger than any cache together.

    Examples
    --------
    >>> sets_of(3 * Size(8192, 4096, "float16").array_bytes)
    2
    """
    return max(1, min(_MOST_SETS, -(-COLD_BYTES // traffic)))


def cases_of(arguments: argparse.Namespace) -> list[tuple[Operation, Size]]:
    """Return every operation at every size; those that have a size of their own once."""
    chosen = [operation for operation in OPERATIONS if operation.name in arguments.operation]
    sizes = [
        Size(rows, width, arguments.dtype) for rows in arguments.rows for width in arguments.width
    ]
    every = [(operation, operation.size(size)) for size in sizes for operation in chosen]
    return list({(operation.name, size): (operation, size) for operation, size in every}.values())


def subjects(arguments: argparse.Namespace, gauge: Gauge) -> Iterator[Subject]:
    """Yield every operation at every size, forward and backward."""
    for operation, size in cases_of(arguments):
        count = sets_of(operation.traffic(size, "forward"))
        sets = [operation.arrays(size, Source(gauge.xp, seed)) for seed in range(count)]
        yield _subject(operation, size, "forward", sets, gauge)
        if operation.backward_arrays is not None:
            yield _subject(operation, size, "backward", sets, gauge)


def _subject(
    operation: Operation, size: Size, direction: str, sets: Sequence[Arrays], gauge: Gauge
) -> Subject:
    backward = direction == "backward"
    flops = None if operation.flops is None else operation.flops(size)[backward]
    ours = partial(our_backward, xp=gauge.xp) if backward else our_forward
    theirs: Callable[..., Any] = torch_forward
    if backward:
        theirs = partial(torch_backward, xp=gauge.xp)

    def peer(name: str) -> Round:
        if name == "cupy" and operation.composed is not None:
            return [partial(operation.composed, gauge.xp, *arrays) for arrays in sets]

        def function(*tensors: Any) -> Any:
            return operation.torch(gauge.torch, *tensors)

        compiled = gauge.compiled(function) if name == "compile" else function
        return theirs(gauge.torch, compiled, sets)

    changed = [sets[0][index] for index in operation.changes]
    before = [array.copy() for array in changed]

    def reset() -> None:
        for array, contents in zip(changed, before, strict=True):
            array[...] = contents

    return Subject(
        {"operation": operation.name, **size._asdict(), "direction": direction},
        [
            Contender("cupyattn", partial(ours, operation, sets)),
            *(
                Contender.of_peer(name, partial(peer, name))
                for name in gauge.peers
                if name != "cupy" or (operation.composed is not None and not backward)
            ),
        ],
        flops=flops,
        bytes=operation.traffic(size, direction),
        ceiling=COPY if flops is None else products_of(size.dtype),
        tolerance=operation.tolerance * (_BACKWARD_TOLERANCE if backward else 1),
        reset=reset,
    )


def rows(arguments: argparse.Namespace, gauge: Gauge) -> Iterable[Row]:
    """Measure every row."""
    cases = cases_of(arguments)
    backwards = sum(operation.backward_arrays is not None for operation, _ in cases)
    return measured(subjects(arguments, gauge), gauge, len(cases) + backwards)


def modelled(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of small calls by the emulator: what they reach hardly depends on the rows."""
    for operation in OPERATIONS:
        if operation.name in arguments.operation:
            for direction, size, call in layer_calls(operation):
                labels = {"operation": operation.name, **size._asdict(), "direction": direction}
                yield memory_bound(labels, call)


BENCHMARK = Benchmark(
    name="layers",
    title="Layers",
    help="GB/s of norms, softmax, losses, embedding, rope, activations, dropout, AdamW, sampling",
    description="Time the memory-bound layers, forward and backward, by CUDA graphs of calls with "
    "arrays that no cache holds. Compositions of array functions have no backward.",
    note="GB/s count each array once that has to be read or written; where products take the time, "
    "the ceiling is that of products.",
    rows=rows,
    options=options,
    peers=PEERS,
    quick={"operation": IN_README, "width": [2048, 768, 4096], "limit": 50.0},
    modelled=modelled,
)
