"""The same step by others, over dense keys: PyTorch's back-ends by name, and array functions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from cupyattn.benchmark.decode.cases import Case
from cupyattn.benchmark.frame.clock import Round
from cupyattn.benchmark.frame.peers import BACKENDS
from cupyattn.benchmark.frame.subjects import Contender, Gauge
from cupyattn.benchmark.frame.torch_arrays import tensor_of

NAMES = ("eager", *BACKENDS, "cupy")


def contenders(case: Case, layers: int, gauge: Gauge) -> list[Contender]:
    """Return those that are wanted; of paged caches and of ragged sequences none has kernels."""
    if case.block_size is not None or case.ragged:
        return []
    return [
        Contender.of_peer("cupy", partial(_step, case, layers, _composed, gauge))
        if name == "cupy"
        else Contender.of_peer(
            name, partial(_step, case, layers, partial(_torch, name), gauge), _turned
        )
        for name in gauge.peers
    ]


def _turned(tensor: Any) -> Any:
    return tensor.transpose(1, 2)


def _step(
    case: Case, layers: int, make: Callable[[Case, Gauge], Callable[[], Any]], gauge: Gauge
) -> Round:
    if case.queries > 1:  # which have a mask: PyTorch's first query stands at the first key
        raise NotImplementedError("peers are timed with one query token")
    return case.in_turn(layers, partial(make, case, gauge))


def _torch(name: str, case: Case, gauge: Gauge) -> Callable[[], Any]:
    torch = gauge.torch
    tensors = [tensor_of(torch, array).transpose(1, 2) for array in case.arrays(gauge.xp)[:3]]
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention,
        *tensors,
        enable_gqa=case.heads != case.kv_heads,
    )
    within: Callable[[], Any] = nullcontext
    if name in BACKENDS:
        backend = getattr(torch.nn.attention.SDPBackend, BACKENDS[name])
        within = partial(torch.nn.attention.sdpa_kernel, backend)

    def call() -> Any:
        with torch.no_grad(), within():
            return attend()

    return call


def _composed(case: Case, gauge: Gauge) -> Callable[[], Any]:
    """Two products of cuBLAS, and a softmax between them."""
    xp = gauge.xp
    q, k, v, _ = case.arrays(xp)
    grouped = q.reshape(case.batch, case.kv_heads, -1, case.head_dim)
    scale = np.float32(case.head_dim**-0.5)

    def call() -> Any:
        scores = xp.matmul(grouped, k.transpose(0, 2, 3, 1)).astype(np.float32) * scale
        scores = xp.exp(scores - scores.max(-1, keepdims=True))
        weights = (scores / scores.sum(-1, keepdims=True)).astype(v.dtype)
        return xp.matmul(weights, v.swapaxes(1, 2)).reshape(q.shape)

    return call
