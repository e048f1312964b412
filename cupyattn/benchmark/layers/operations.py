"""What the benchmark of layers times: each operation by this library and by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cupyattn.benchmark.layers import array_code
from cupyattn.benchmark.layers.operation import Arrays, Operation, Size, Source
from cupyattn.benchmark.layers.sampling import SAMPLING

HEAD_DIM = 128
_DROPOUT_P = 0.1
_VOCABULARY = (2048, 128_256)  # tokens, and classes of Llama 3
_FEATURES = 2048  # of a token whose classes a product gives
_TABLE_ROWS = 50_257  # tokens of GPT-2's vocabulary, for embedding
_POSITIONS = 2048  # tokens of a sequence, for rope


def _rows(count: int) -> Callable[[Size, Source], Arrays]:
    """Make so many arrays of rows."""
    return lambda size, source: tuple(
        source.normal(size.rows, size.width, dtype=size.dtype) for _ in range(count)
    )


def _norm(parameters: int, *, residual: bool = False) -> Callable[[Size, Source], Arrays]:
    def arrays(size: Size, source: Source) -> Arrays:
        columns = (source.normal(size.width, dtype=size.dtype) for _ in range(parameters))
        x, other = (source.normal(size.rows, size.width, dtype=size.dtype) for _ in range(2))
        return (x, *columns, other) if residual else (x, *columns)

    return arrays


def _packed(size: Size, source: Source) -> Arrays:
    return (source.normal(size.rows, 2 * size.width, dtype=size.dtype),)


def _logits(size: Size, source: Source) -> Arrays:
    logits = source.normal(size.rows, size.width, dtype=size.dtype)
    return logits, source.labels(size.rows, size.width)


def _features(size: Size, source: Source) -> Arrays:
    x = source.normal(size.rows, _FEATURES, dtype=size.dtype)
    w = source.normal(size.width, _FEATURES, dtype=size.dtype)
    return x, w.T, source.labels(size.rows, size.width)


def _feature_bytes(size: Size) -> tuple[int, int]:
    """Return the bytes of x and w, and of these and their gradients."""
    read = (size.rows + size.width) * _FEATURES * size.item_bytes
    return read, 2 * read


def _feature_flops(size: Size) -> tuple[int, int]:
    """Return those of one product, and of two; to compute the logits again counts as nothing."""
    product = 2 * size.rows * size.width * _FEATURES
    return product, 2 * product


def _embedding(size: Size, source: Source) -> Arrays:
    table = source.normal(_TABLE_ROWS, size.width, dtype=size.dtype)
    return table, source.labels(size.rows, _TABLE_ROWS)


def _adamw(size: Size, source: Source) -> Arrays:
    param, grad = _rows(2)(size, source)
    m, v = (source.normal(size.rows, size.width, dtype="float32") for _ in range(2))
    return param, grad, m, v**2 + 1


def _rope(size: Size, source: Source) -> Arrays:
    positions = min(_POSITIONS, size.rows)
    heads = max(size.width // HEAD_DIM, 1)
    shape = (size.rows // positions, positions, heads, min(HEAD_DIM, size.width))
    return (
        source.normal(*shape, dtype=size.dtype),
        *source.angles(positions, shape[-1] // 2),
    )


def _torch_rope(torch: Any, x: Any, cos: Any, sin: Any) -> Any:
    """Turn halves of x against each other, with tables in its dtype, as models do."""
    cos, sin = (torch.cat((t, t), -1)[None, :, None].to(x.dtype) for t in (cos, sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _torch_gated(activation: str) -> Callable[..., Any]:
    def gated(torch: Any, packed: Any) -> Any:
        gate, up = packed.chunk(2, -1)
        return getattr(torch.nn.functional, activation)(gate) * up

    return gated


def _torch_add_layer_norm(torch: Any, x: Any, weight: Any, bias: Any, residual: Any) -> Any:
    total = x + residual
    return torch.nn.functional.layer_norm(total, total.shape[-1:], weight, bias), total


def _torch_add_rms_norm(torch: Any, x: Any, weight: Any, residual: Any) -> Any:
    total = x + residual
    return torch.nn.functional.rms_norm(total, total.shape[-1:], weight, 1e-6), total


_ADAMW: dict[str, Any] = {
    "step": 1000,
    "lr": 1.0,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
}
"""A step so large that it shows beside the parameters."""


def _torch_adamw(torch: Any, param: Any, grad: Any, m: Any, v: Any) -> Any:
    """Step in place with means in float32, which ``torch.optim`` has in the parameters' dtype."""
    beta1, beta2 = _ADAMW["betas"]
    grad = grad.float()
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    mean = m / (1 - beta1 ** _ADAMW["step"])
    root = (v / (1 - beta2 ** _ADAMW["step"])).sqrt() + _ADAMW["eps"]
    kept = param.float() * (1 - _ADAMW["lr"] * _ADAMW["weight_decay"])
    param.copy_(kept - _ADAMW["lr"] * mean / root)
    return param, m, v


OPERATIONS = (
    Operation(
        "layer_norm",
        "layer_norm",
        _norm(2),
        lambda torch, x, w, b: torch.nn.functional.layer_norm(x, x.shape[-1:], w, b),
        2,
        3,
        composed=array_code.layer_norm,
    ),
    Operation(
        "rms_norm",
        "rms_norm",
        _norm(1),
        lambda torch, x, w: torch.nn.functional.rms_norm(x, x.shape[-1:], w, 1e-6),
        2,
        3,
        composed=array_code.rms_norm,
    ),
    Operation(
        "add + layer_norm",
        "layer_norm",
        _norm(2, residual=True),
        _torch_add_layer_norm,
        4,
        4,
        composed=array_code.add_layer_norm,
        by_name=("residual",),
    ),
    Operation(
        "add + rms_norm",
        "rms_norm",
        _norm(1, residual=True),
        _torch_add_rms_norm,
        4,
        4,
        composed=array_code.add_rms_norm,
        by_name=("residual",),
    ),
    Operation(
        "softmax",
        "softmax",
        _rows(1),
        lambda torch, x: torch.softmax(x, -1),
        2,
        3,
        composed=array_code.softmax,
    ),
    Operation(
        "log_softmax",
        "log_softmax",
        _rows(1),
        lambda torch, x: torch.log_softmax(x, -1),
        2,
        3,
        composed=array_code.log_softmax,
    ),
    Operation(
        "logsumexp",
        "logsumexp",
        _rows(1),
        lambda torch, x: torch.logsumexp(x, -1),
        1,
        2,
        composed=array_code.logsumexp,
    ),
    Operation(
        "cross_entropy",
        "cross_entropy",
        _logits,
        lambda torch, x, labels: torch.nn.functional.cross_entropy(x.float(), labels),
        1,
        2,
        composed=array_code.cross_entropy,
        shape=_VOCABULARY,
    ),
    Operation(
        "linear_cross_entropy",
        "linear_cross_entropy",
        _features,
        lambda torch, x, w, labels: torch.nn.functional.cross_entropy((x @ w).float(), labels),
        0,
        0,
        more_bytes=_feature_bytes,
        flops=_feature_flops,
        composed=array_code.linear_cross_entropy,
        shape=_VOCABULARY,
    ),
    Operation(
        "embedding",
        "embedding",
        _embedding,
        lambda torch, table, ids: torch.nn.functional.embedding(ids, table),
        2,
        1,
        composed=array_code.embedding,
        more_bytes=lambda size: (0, _TABLE_ROWS * size.width * size.item_bytes),
    ),
    Operation("rope", "rope", _rope, _torch_rope, 2, 2, composed=array_code.rope),
    Operation(
        "gelu",
        "gelu",
        _rows(1),
        lambda torch, x: torch.nn.functional.gelu(x, approximate="tanh"),
        2,
        3,
        options={"approximate": "tanh"},
        composed=array_code.gelu,
    ),
    Operation(
        "silu",
        "silu",
        _rows(1),
        lambda torch, x: torch.nn.functional.silu(x),
        2,
        3,
        composed=array_code.silu,
    ),
    Operation("swiglu", "swiglu", _packed, _torch_gated("silu"), 3, 5, composed=array_code.swiglu),
    Operation("geglu", "geglu", _packed, _torch_gated("gelu"), 3, 5),
    Operation(
        "dropout",
        "dropout",
        lambda size, source: (*_rows(1)(size, source), _DROPOUT_P, 1),
        lambda torch, x, p, seed: torch.nn.functional.dropout(x, p),
        2,
        2,
        tolerance=np.inf,  # another generator
    ),
    Operation(
        "dropout + add",
        "dropout",
        lambda size, source: (*_rows(1)(size, source), _DROPOUT_P, 1, *_rows(1)(size, source)),
        lambda torch, x, p, seed, residual: torch.nn.functional.dropout(x, p) + residual,
        3,
        2,
        by_name=("residual",),
        tolerance=np.inf,
    ),
    Operation(
        "adamw_step",
        "adamw_step",
        _adamw,
        _torch_adamw,
        3,
        None,
        more_bytes=lambda size: (4 * 4 * size.rows * size.width, 0),  # m and v, read and written
        changes=(0, 2, 3),
        options=_ADAMW,
        composed=partial(array_code.adamw_step, **_ADAMW),
    ),
    Operation(
        "global_norm",
        "global_norm",
        _rows(1),
        lambda torch, x: torch.linalg.vector_norm(x, dtype=torch.float32),
        1,
        None,
        composed=array_code.global_norm,
    ),
    *SAMPLING,
)
"""By name in the order of the tables."""
