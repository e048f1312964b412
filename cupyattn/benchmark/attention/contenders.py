"""Who computes a case of attention, forward and backward: this library's kernels, and peers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import cupyattn
from cupyattn.benchmark.attention import peers
from cupyattn.benchmark.attention.cases import Inputs
from cupyattn.benchmark.frame.clock import Call, Round
from cupyattn.benchmark.frame.rows import NotAskedError
from cupyattn.benchmark.frame.subjects import Contender, Gauge
from cupyattn.gradients import AttentionGrads

TEACHING_FLOPS = 1e12
"""Of a call that "naive" and "tiled" are timed with: some seconds."""


def forward_contenders(
    implementations: Iterable[str], inputs: Inputs, gauge: Gauge
) -> list[Contender]:
    """Return `attention` by each implementation, and by the peers that have the option."""
    ours = [
        Contender(f"cupyattn {name}", partial(_forward, name, inputs)) for name in implementations
    ]
    return ours + peers.forward(inputs, gauge)


def _forward(implementation: str, inputs: Inputs) -> Round:
    _require_short(implementation, inputs.case.flops(inputs.option))
    q, k, v, out = inputs.arrays.q, inputs.arrays.k, inputs.arrays.v, inputs.arrays.out
    options = {"implementation": implementation, **inputs.arguments()}
    return [lambda: cupyattn.attention(q, k, v, out=out, **options)]


def backward_contenders(
    implementations: Iterable[str], deterministic: Sequence[bool], inputs: Inputs, gauge: Gauge
) -> list[Contender]:
    """Return `attention_backward` by each implementation, and by the peers.

    "flash" is there once for each item of `deterministic`. The others do the same either way, and
    are there once, with the first.
    """
    ours = [
        Contender(
            f"cupyattn {name}{' deterministic' if mode and name == 'flash' else ''}",
            partial(_backward, name, mode, inputs, gauge.xp),
            comparable=lambda grads: grads[:3],
        )
        for name in implementations
        for mode in (deterministic if name == "flash" else deterministic[:1])
    ]
    return ours + peers.backward(inputs, gauge)


def _backward(implementation: str, deterministic: bool, inputs: Inputs, xp: Any) -> Round:
    """Gradients into given arrays, of the results of flash attention."""
    _require_short(implementation, inputs.case.backward_flops(inputs.option))
    arguments = inputs.arguments()
    q, k, v, dout, out, lse = inputs.arrays
    cupyattn.attention(q, k, v, return_lse=True, out=(out, lse), **arguments)
    grads = AttentionGrads(*map(xp.empty_like, (q, k, v)), *(
        xp.empty_like(arguments[name]) if name in arguments else None for name in ("bias", "sinks")
    ))  # fmt: skip
    call: Call = partial(
        cupyattn.attention_backward, dout, q, k, v, out, lse, implementation=implementation,
        deterministic=deterministic, grads=grads, **arguments,
    )  # fmt: skip
    return [call]


def _require_short(implementation: str, flops: float) -> None:
    if implementation != "flash" and flops > TEACHING_FLOPS:
        raise NotAskedError(
            f'not timed: a kernel to be read, "{implementation}", and {flops / 1e12:.1f} TFLOP a '
            f"call; {TEACHING_FLOPS / 1e12:g} are the limit"
        )
