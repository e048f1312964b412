"""The same attention by others: PyTorch's back-ends by name, compiled, and by array functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from cupyattn.benchmark.attention.cases import Inputs
from cupyattn.benchmark.frame.clock import Round
from cupyattn.benchmark.frame.peers import BACKENDS
from cupyattn.benchmark.frame.subjects import Contender, Gauge
from cupyattn.benchmark.frame.torch_arrays import tensor_of, torch_stream

FORWARD = ("eager", *BACKENDS, "compile", "triton", "cupy")
BACKWARD = ("eager", *BACKENDS, "compile", "triton")
TAKES = ("plain", "causal", "bias", "mask", "dropout")
"""The options that scaled_dot_product_attention has too."""
_SIMPLE = ("plain", "causal")
"""Those that flex_attention and array functions are given."""

Attend = Callable[..., Any]


def forward(inputs: Inputs, gauge: Gauge) -> list[Contender]:
    """Return the peers that have the option."""
    return [
        Contender.of_peer("cupy", partial(_composed, inputs, gauge.xp))
        if name == "cupy"
        else Contender.of_peer(name, partial(_forward, name, inputs, gauge), turned)
        for name in _having(inputs, gauge)
    ]


def backward(inputs: Inputs, gauge: Gauge) -> list[Contender]:
    """Return the peers that have the option, and gradients."""
    return [
        Contender.of_peer(
            name,
            partial(_backward, name, inputs, gauge),
            lambda grads: tuple(map(turned, grads[:3])),
        )
        for name in _having(inputs, gauge)
    ]


def _having(inputs: Inputs, gauge: Gauge) -> list[str]:
    case, causal = inputs.case, inputs.case.causal or inputs.option == "causal"
    if case.queries is not None and causal:  # PyTorch's first query stands at the first key
        return []
    return [
        name
        for name in gauge.peers
        if inputs.option in (_SIMPLE if name in ("triton", "cupy") else TAKES)
    ]


def turned(tensor: Any) -> Any:
    """Return (B, S, H, D) of (B, H, S, D), or the reverse."""
    return tensor.transpose(1, 2)


def _forward(name: str, inputs: Inputs, gauge: Gauge) -> Round:
    return forward_calls(gauge.torch, *_attention(name, inputs, gauge))


def _backward(name: str, inputs: Inputs, gauge: Gauge) -> Round:
    attention = _attention(name, inputs, gauge)
    dout = turned(tensor_of(gauge.torch, inputs.arrays.dout))
    return backward_calls(gauge.torch, *attention, dout=dout)


Within = Callable[[], AbstractContextManager[Any]]


def forward_calls(
    torch: Any, attend: Attend, tensors: Sequence[Any], within: Within = nullcontext
) -> Round:
    """Return a call of PyTorch's function without recording gradients."""

    def call() -> Any:
        with torch.no_grad(), within():
            return attend(*tensors)

    return [call]


def backward_calls(
    torch: Any, attend: Attend, tensors: Sequence[Any], within: Within = nullcontext, *, dout: Any
) -> Round:
    """Return a call that differentiates what PyTorch's function has returned."""
    for tensor in tensors:
        tensor.requires_grad_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch_stream(torch)), within():
        out = attend(*tensors)
    torch.cuda.synchronize()
    return [lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True)]


def _attention(name: str, inputs: Inputs, gauge: Gauge) -> tuple[Attend, list[Any], Within]:
    """Return a function of q, k and v (B, H, S, D) and a bias, these, and what it is called in."""
    torch, arguments = gauge.torch, inputs.arguments()
    tensors = [turned(tensor_of(torch, array)) for array in inputs.arrays[:3]]
    if name == "triton":
        seen = (lambda b, h, i, j: i >= j) if arguments.get("causal") else None
        sq, sk = inputs.arrays.q.shape[1], inputs.arrays.k.shape[1]
        return flex(torch, seen, sq, sk), tensors, nullcontext
    taken = {
        "is_causal": arguments.get("causal", False),
        "dropout_p": arguments.get("dropout_p", 0.0),
    }
    if "mask" in arguments:
        taken["attn_mask"] = tensor_of(torch, arguments["mask"])
    if "bias" in arguments:
        tensors.append(tensor_of(torch, arguments["bias"]))

    def attend(*tensors: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **taken)

    if name == "compile":
        return gauge.compiled(attend), tensors, nullcontext
    if name not in BACKENDS:
        return attend, tensors, nullcontext
    backend = getattr(torch.nn.attention.SDPBackend, BACKENDS[name])
    return attend, tensors, partial(torch.nn.attention.sdpa_kernel, backend)


def flex(torch: Any, seen: Callable[..., Any] | None, sq: int, sk: int) -> Attend:
    """Return flex_attention of q, k and v (B, H, S, D), which Inductor makes a Triton kernel of.

    `seen` tells whether batch b and head h let query i see key j; tiles in which nothing is seen
    are left out. None lets all see all.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    if seen is None:
        return lambda q, k, v: compiled(q, k, v)
    blocks = create_block_mask(seen, None, None, sq, sk)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)


def _composed(inputs: Inputs, xp: Any) -> Round:
    """Scores in memory: two products of cuBLAS and what stands between them."""
    q, k, v = (array.swapaxes(1, 2) for array in inputs.arrays[:3])
    arguments = inputs.arguments()
    scale = np.float32(q.shape[-1] ** -0.5)
    rows, keys = xp.arange(q.shape[2])[:, None], xp.arange(k.shape[2])
    kept = keys <= rows + k.shape[2] - q.shape[2]

    def call() -> Any:
        scores = xp.matmul(q, k.swapaxes(2, 3)).astype(np.float32)
        scores *= scale
        if arguments["causal"]:
            scores = xp.where(kept, scores, np.float32(-np.inf))
        scores -= scores.max(-1, keepdims=True)
        xp.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        return xp.matmul(scores.astype(v.dtype), v).swapaxes(1, 2)

    return [call]
