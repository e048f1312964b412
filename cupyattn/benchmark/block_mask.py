"""``python -m cupyattn.benchmark block_mask``: documents in one sequence, by tiles, on a GPU.

Its measure is the share of tiles that a mask of documents leaves: with `block_mask` a call should
take that share of the plain call's time, and little more.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.arrays import Array, dtype_of
from cupyattn.benchmark.attention import peers
from cupyattn.benchmark.frame.arguments import add_numbers
from cupyattn.benchmark.frame.benchmark import Benchmark
from cupyattn.benchmark.frame.clock import Call, Round
from cupyattn.benchmark.frame.emulated import ModelledCall, of_products
from cupyattn.benchmark.frame.peers import PEERS
from cupyattn.benchmark.frame.rows import Row, products_of
from cupyattn.benchmark.frame.subjects import Contender, Gauge, Subject, measured
from cupyattn.benchmark.frame.torch_arrays import tensor_of
from cupyattn.benchmark.frame.turing_model import Model, rate_of_call
from cupyattn.cli.arguments import integer
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.progress import progress
from cupyattn.turing import T4

WAYS = ("plain", "mask_mod", "block_mask")
DIRECTIONS = ("forward", "backward", "deterministic backward")
FLEX = "triton"
"""The peer: flex_attention of PyTorch, with its own mask of blocks; not asked for a third mode."""
_TOLERANCE = 0.05
_COUNTED: dict[str, Any] = {"length": 256, "documents": 2, "heads": 1}
"""What the emulator runs."""
TILE = (128, 64)
"""Queries and keys of the tiles that are counted: those of the forward at head dim 64."""


class Case(NamedTuple):
    """One sequence of `length` tokens, of so many documents."""

    length: int
    documents: int
    heads: int
    head_dim: int
    dtype: str

    def document(self) -> np.ndarray:
        """Return which one each token is of: log-normal lengths (sigma 0.5)."""
        drawn = np.random.default_rng(1).lognormal(sigma=0.5, size=self.documents)
        ends = np.round(np.cumsum(drawn) / drawn.sum() * self.length)
        return np.searchsorted(ends, np.arange(self.length), side="right").astype(np.int32)

    def kept(self) -> float:
        """Return the share of tiles in which something is seen.

        Examples
        --------
        >>> Case(512, 1, 1, 64, "float16").kept()
        1.0
        """
        document = self.document()
        starts = [document[::tile][:, None] for tile in TILE]
        ends = [
            document[np.minimum(np.arange(tile, self.length + tile, tile), self.length) - 1][
                :, None
            ]
            for tile in TILE
        ]
        # Documents are numbered in order: a tile is seen where the two ranges of them meet.
        return float(((starts[0] <= ends[1].T) & (ends[0] >= starts[1].T)).mean())

    def flops(self, direction: str, way: str) -> float:
        """Return the work of all scores, or of the tiles that are kept."""
        share = self.kept() if way == "block_mask" else 1.0
        forwards = 1.0 if direction == "forward" else 2.5
        return 4 * forwards * share * self.heads * self.head_dim * self.length**2

    def mask(self, xp: Any) -> cupyattn.MaskMod:
        """Return what lets a token see those of its own document."""
        return cupyattn.MaskMod(
            "document[q_idx] == document[k_idx]",
            python=lambda b, h, i, j, document: document[i] == document[j],
            document=xp.asarray(self.document()),
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """That of q, k, v and dout."""
        return 1, self.length, self.heads, self.head_dim

    def bytes(self, direction: str) -> int:
        """Return those of q, k, v and out, and of the backward of their gradients too."""
        arrays = 4 if direction == "forward" else 8
        return arrays * math.prod(self.shape) * STORAGE[self.dtype]

    def arrays(self, xp: Any) -> list[Array]:
        """Return q, k, v and dout."""
        rng = np.random.default_rng(2)
        return [
            xp.asarray(rng.standard_normal(self.shape, np.float32).astype(dtype_of(self.dtype)))
            for _ in range(4)
        ]

    def unfilled(self) -> list[np.ndarray]:
        """Return them for calls whose kernels do not run."""
        return [np.empty(self.shape, dtype_of(self.dtype)) for _ in range(4)]


def calls_of(way: str, masks: Any, arrays: Any, direction: str) -> Any:
    """Return the call of a direction and a way, whose results are there already."""
    q, k, v, dout = arrays
    forward = partial(cupyattn.attention, q, k, v, mask_mod=masks[way], return_lse=True)
    results = forward()
    if direction == "forward":
        return partial(forward, out=results)
    backward = partial(
        cupyattn.attention_backward, dout, q, k, v, *results, mask_mod=masks[way],
        deterministic=direction.startswith("deterministic"),
    )  # fmt: skip
    return partial(backward, grads=backward())


def masks_of(case: Case, xp: Any) -> dict[str, Any]:
    """Return the mask_mod of each way."""
    same = case.mask(xp)
    masks = (None, same, cupyattn.block_mask(same, case.length, case.length))
    return dict(zip(WAYS, masks, strict=True))


def options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    numbers = (
        ("length", 16384, integer(1), "tokens of the sequence"),
        ("documents", 16, integer(1), "documents in it"),
        ("heads", 16, integer(1), "heads"),
    )
    add_numbers(parser, numbers)
    parser.add_argument(
        "--head-dim",
        nargs="+",
        type=integer(1, MAX_HEAD_DIM),
        default=[64, 128],
        metavar="D",
        help="head dims (default: 64 128)",
    )
    parser.add_argument(
        "--dtype", choices=STORAGE, default="float16", help="of the arrays (default: %(default)s)"
    )


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Return every head dim that was asked for."""
    return [
        Case(arguments.length, arguments.documents, arguments.heads, head_dim, arguments.dtype)
        for head_dim in arguments.head_dim
    ]


def subjects(arguments: argparse.Namespace, gauge: Gauge) -> Iterator[Subject]:
    """Yield each direction of each case."""
    for case in cases_of(arguments):
        masks, arrays = masks_of(case, gauge.xp), case.arrays(gauge.xp)
        for direction in DIRECTIONS:

            def prepare(
                way: str, masks: Any = masks, arrays: Any = arrays, to: str = direction
            ) -> Any:
                return [calls_of(way, masks, arrays, to)]

            of = {f"cupyattn {way}": case.flops(direction, way) for way in WAYS}
            of[PEERS[FLEX]] = case.flops(direction, "block_mask")
            flex = FLEX in gauge.peers and direction in DIRECTIONS[:2]
            # The plain call is the measure, and has other results.
            yield Subject(
                {**case._asdict(), "kept": case.kept(), "direction": direction},
                [
                    Contender(
                        f"cupyattn {way}",
                        partial(prepare, way),
                        comparable=_none if way == "plain" else _first_three,
                    )
                    for way in WAYS
                ]
                + [flex_attention(case, arrays, direction, gauge)] * flex,
                ceiling=products_of(case.dtype),
                tolerance=_TOLERANCE,
                own={name: {"flops": flops} for name, flops in of.items()},
            )


def flex_attention(case: Case, arrays: Any, direction: str, gauge: Gauge) -> Contender:
    """Return what PyTorch does with the same documents."""

    def prepare() -> Round:
        torch = gauge.torch
        document = tensor_of(torch, gauge.xp.asarray(case.document()))

        def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
            return document[i] == document[j]

        *tensors, dout = (peers.turned(tensor_of(torch, array)) for array in arrays)
        attend = peers.flex(torch, seen, case.length, case.length)
        if direction == "forward":
            return peers.forward_calls(torch, attend, tensors)
        return peers.backward_calls(torch, attend, tensors, dout=dout)

    if direction == "forward":
        return Contender.of_peer(FLEX, prepare, peers.turned)
    return Contender.of_peer(FLEX, prepare, lambda grads: tuple(map(peers.turned, grads)))


def _none(result: Any) -> None:
    del result


def _first_three(result: Any) -> Any:
    return result[:3]


def rows(arguments: argparse.Namespace, gauge: Gauge) -> Iterable[Row]:
    """Measure every row."""
    total = len(cases_of(arguments)) * len(DIRECTIONS)
    return measured(subjects(arguments, gauge), gauge, total)


def modelled(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield every row by its main loop; of a block_mask, that over the tiles that it keeps."""
    model = Model(T4)
    every = list(product(cases_of(arguments), DIRECTIONS, WAYS))
    with progress("modelling", len(every)) as step:
        for case, direction, way in every:
            small = case._replace(**_COUNTED)
            rate = rate_of_call(model, partial(_call, case, way, direction, unfilled=True))
            counted = partial(_call, small, way, direction)
            call = ModelledCall(way, small.bytes(direction), counted)
            labels = {**case._asdict(), "kept": case.kept(), "direction": direction}
            flops = case.flops(direction, way)
            yield of_products(labels, f"cupyattn {way}", flops, rate, call)
            step()


def _call(case: Case, way: str, direction: str, *, unfilled: bool = False) -> Call:
    arrays = case.unfilled() if unfilled else case.arrays(np)
    return calls_of(way, masks_of(case, np), arrays, direction)


BENCHMARK = Benchmark(
    name="block_mask",
    title="Documents in one sequence",
    help="a mask of documents whose empty tiles are skipped, beside the plain call, on a GPU",
    description="Time attention and its backward: plain, with a mask_mod of documents in one "
    "sequence, and with block_mask of it; beside flex_attention with a block mask of the same.",
    note=f"kept is the share of tiles of {TILE[0]} queries by {TILE[1]} keys in which something "
    "is seen: a perfect block_mask takes that share of the plain call's time. TFLOP/s count what "
    "is kept.",
    rows=rows,
    options=options,
    peers=(FLEX,),
    quick={"limit": 20.0},
    modelled=modelled,
)
