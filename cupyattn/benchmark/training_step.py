"""``python -m cupyattn.benchmark training_step``: attention's part of a training step on a GPU.

By default that of a layer with Phi-2's heads: forward with lse, then backward, causal, float16. The
work counted is 3.5 forwards. The memory is what the step takes beside its inputs and outputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import cupyattn
from cupyattn.benchmark.attention.cases import PLAIN, Arrays, Case, arrays_of, unfilled
from cupyattn.benchmark.attention.modelled import COUNTED
from cupyattn.benchmark.frame.benchmark import Benchmark
from cupyattn.benchmark.frame.clock import Call, Round
from cupyattn.benchmark.frame.emulated import ModelledCall, of_products
from cupyattn.benchmark.frame.rows import PRODUCTS, Row
from cupyattn.benchmark.frame.subjects import Contender, Gauge, Subject, measured
from cupyattn.benchmark.frame.torch_arrays import tensor_of
from cupyattn.benchmark.frame.turing_model import Model, rate_of_call
from cupyattn.cli.arguments import integer
from cupyattn.gradients import AttentionGrads
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.turing import T4

PHI_2 = {"batch": 8, "seqlen": 2048, "heads": 32, "head_dim": 80}
GOAL_BYTES = 400_000_000
"""Of memory beyond inputs and outputs, for that shape."""
KERNELS: dict[str, dict[str, Any]] = {
    "flash": {"implementation": "flash", "deterministic": False},
    "deterministic": {"implementation": "flash", "deterministic": True},
    "naive": {"implementation": "naive", "deterministic": False},
}
_TOLERANCE = 0.05
_PASSES = 3
"""The forward's q, k, v and out move once more in the backward, and so do their gradients."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    for name, highest, what in (
        ("batch", None, "sequences"),
        ("seqlen", None, "tokens of a sequence"),
        ("heads", None, "heads"),
        ("head_dim", MAX_HEAD_DIM, "head dim of q, k and v"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=integer(1, highest),
            default=PHI_2[name],
            metavar="N",
            help=f"{what} (default: %(default)s)",
        )
    parser.add_argument(
        "--kernels",
        nargs="+",
        choices=tuple(KERNELS),
        default=list(KERNELS),
        help="which make the step (default: all)",
    )


def case_of(arguments: argparse.Namespace) -> Case:
    """Return the shape that the command line names."""
    return Case(
        batch=arguments.batch,
        heads=arguments.heads,
        seqlen=arguments.seqlen,
        head_dim=arguments.head_dim,
        head_dim_v=arguments.head_dim,
        dtype="float16",
        causal=True,
        window=0,
    )


def subjects(arguments: argparse.Namespace, gauge: Gauge) -> Iterator[Subject]:
    """Yield the step."""
    case = case_of(arguments)
    arrays = arrays_of(case, gauge.xp)
    grads = AttentionGrads(*map(gauge.xp.empty_like, arrays[:3]))
    ours = [
        Contender(
            _called(name),
            partial(training_step, arrays, grads, **KERNELS[name]),
            comparable=lambda grads: grads[:3],
        )
        for name in arguments.kernels
    ]
    peers = [
        Contender.of_peer(name, partial(_by_torch, arrays, gauge, name == "compile"), _turned)
        for name in gauge.peers
    ]
    yield Subject(
        case.labels,
        [*ours, *peers],
        flops=_flops(case),
        ceiling=PRODUCTS,
        tolerance=_TOLERANCE,
    )


def _called(name: str) -> str:
    return f"cupyattn {'flash ' if name == 'deterministic' else ''}{name}"


def _flops(case: Case) -> float:
    return case.flops(PLAIN) + case.backward_flops(PLAIN)


def training_step(
    arrays: Arrays, grads: AttentionGrads, *, implementation: str, deterministic: bool
) -> Round:
    """Return the step: results and gradients into given arrays, scratch from the memory pool."""
    q, k, v, dout, out, lse = arrays
    options: dict[str, Any] = {"causal": True, "implementation": implementation}

    def step() -> AttentionGrads:
        cupyattn.attention(q, k, v, return_lse=True, out=(out, lse), **options)
        return cupyattn.attention_backward(
            dout, q, k, v, out, lse, deterministic=deterministic, grads=grads, **options
        )

    return [step]


def _by_torch(arrays: Arrays, gauge: Gauge, compiled: bool) -> Round:
    torch = gauge.torch
    q, k, v, dout = (tensor_of(torch, array).transpose(1, 2) for array in arrays[:4])
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def attend(*tensors: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)

    function = gauge.compiled(attend) if compiled else attend
    return [lambda: torch.autograd.grad(function(q, k, v), (q, k, v), dout)]


def _turned(grads: Any) -> Any:
    return tuple(grad.transpose(1, 2) for grad in grads)


def rows(arguments: argparse.Namespace, gauge: Gauge) -> Iterable[Row]:
    """Measure every row."""
    return measured(subjects(arguments, gauge), gauge, 1)


def modelled(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each kind of kernels, by the main loops of forward and backward."""
    case, model = case_of(arguments), Model(T4)
    small = replace(case, **COUNTED)
    for name in arguments.kernels:
        rate = rate_of_call(model, partial(_step, unfilled, case, name))
        counted = partial(_step, partial(arrays_of, xp=np), small, name)
        call = ModelledCall(name, _PASSES * small.bytes, counted)
        yield of_products(case.labels, _called(name), _flops(case), rate, call)


def _step(arrays: Callable[[Case], Arrays], case: Case, name: str) -> Call:
    made = arrays(case)
    return training_step(made, AttentionGrads(*map(np.empty_like, made[:3])), **KERNELS[name])[0]


BENCHMARK = Benchmark(
    name="training_step",
    title="Attention's training step",
    help="time and memory of attention forward and backward together on a GPU",
    description="Time one training step of causal float16 attention, forward with lse and "
    "backward, with flash attention, with its deterministic backward, and with the naive kernels.",
    note="TFLOP/s count 3.5 forwards of half the scores. Memory is what the step takes beyond q, "
    "k, v, dout, and out, lse, dq, dk, dv; the goal for the default shape is under "
    f"{GOAL_BYTES / 1e6:.0f} MB.",
    rows=rows,
    options=options,
    peers=("eager", "compile"),
    modelled=modelled,
)
