"""The operations of the benchmark of layers: this library's, PyTorch's, and array functions.

Compositions of array functions are written as one writes them in CuPy or NumPy. They compute in
float32, as models do, and forward only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.arrays import Array, dtype_of
from cupyattn.benchmark.cases import Arrays
from cupyattn.weight_formats import FORMATS, pieces

HEAD_DIM = 128
ITEMS_OF_A_SCALE = 256
"""Items of a block of the running means of AdamW in eight bits."""
_DROPOUT_P = 0.1
_VOCABULARY = (2048, 128_256)  # tokens, and classes of Llama 3
_FEATURES = 2048  # of a token whose classes a product gives
_TABLE_ROWS = 50_257  # tokens of GPT-2's vocabulary, for embedding
_POSITIONS = 2048  # tokens of a sequence, for rope
_TOP_K, _TOP_P = 50, 0.9

Values = tuple[Any, ...]


class Size(NamedTuple):
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
class Operation:
    """One operation, and the least memory traffic that it can have."""

    name: str
    function: str
    """Its name in `cupyattn`."""
    arrays: Callable[[Size, Arrays], Values]
    """Make its positional arguments."""
    torch: Callable[..., Any] | None
    """Compute it in PyTorch, from torch and the tensors; None if PyTorch has none."""
    forward_arrays: int
    """How many arrays of rows the forward reads and writes."""
    backward_arrays: int | None = None
    """How many the backward does, from the gradient of the result; None without a backward."""
    composed: Callable[..., Any] | None = None
    """Compute the forward by array functions, from the array library and the arrays."""
    more_bytes: Callable[[Size], tuple[int, int]] = lambda size: (0, 0)
    """Bytes of other arrays that the forward, and the backward, read and write."""
    flops: Callable[[Size], tuple[int, int]] | None = None
    """Operations of forward and backward, if products take the time."""
    changes: tuple[int, ...] = ()
    """Which of `arrays` are changed in place, and are the results."""
    options: Mapping[str, Any] = field(default_factory=dict)
    by_name: tuple[str, ...] = ()
    """Options that take the last of `arrays`."""
    tolerance: float = 0.02
    """How far results may differ from PyTorch's, relative to the largest."""
    shape: tuple[int, int] | None = None
    """Its own rows and width."""
    small: tuple[int, int] | None = (64, 2048)
    """Rows and width without a GPU; None without a model."""

    def size(self, size: Size) -> Size:
        """Return its own size, or the given one."""
        return size if self.shape is None else Size(*self.shape, size.dtype)

    def traffic(self, size: Size, direction: str) -> int:
        """Return the least bytes that a call moves."""
        backward = direction == "backward"
        rows = self.backward_arrays if backward else self.forward_arrays
        return (rows or 0) * size.array_bytes + self.more_bytes(size)[backward]

    def given(self, arrays: Values) -> tuple[Values, dict[str, Any]]:
        """Return the positional and the keyword arguments of a call."""
        cut = len(arrays) - len(self.by_name)
        named = dict(zip(self.by_name, arrays[cut:], strict=True))
        return arrays[:cut], {**self.options, **named}


# Arrays of operations


def _rows(size: Size, source: Arrays) -> Array:
    return source.normal(size.rows, size.width, dtype=size.dtype)


def _one(size: Size, source: Arrays) -> Values:
    return (_rows(size, source),)


def _norm(parameters: int, size: Size, source: Arrays, *, residual: bool = False) -> Values:
    columns = [source.normal(size.width, dtype=size.dtype) for _ in range(parameters)]
    return (_rows(size, source), *columns, *([_rows(size, source)] if residual else []))


def _packed(size: Size, source: Arrays) -> Values:
    return (source.normal(size.rows, 2 * size.width, dtype=size.dtype),)


def _labelled(size: Size, source: Arrays) -> Values:
    return _rows(size, source), source.integers(0, size.width, size.rows)


def _features(size: Size, source: Arrays) -> Values:
    x = source.normal(size.rows, _FEATURES, dtype=size.dtype)
    w = source.normal(size.width, _FEATURES, dtype=size.dtype)
    return x, w.T, source.integers(0, size.width, size.rows)


def _feature_bytes(size: Size) -> tuple[int, int]:
    """Return the bytes of x and w, and of these and their gradients."""
    read = (size.rows + size.width) * _FEATURES * size.item_bytes
    return read, 2 * read


def _feature_flops(size: Size) -> tuple[int, int]:
    """Return the operations of one product, and of two; recomputed logits do not count."""
    product = 2 * size.rows * size.width * _FEATURES
    return product, 2 * product


def _table(size: Size, source: Arrays, rows: int = _TABLE_ROWS) -> Values:
    table = source.normal(rows, size.width, dtype=size.dtype)
    return table, source.integers(0, rows, size.rows)


def _optimised(size: Size, source: Arrays) -> Values:
    param, grad = (_rows(size, source) for _ in range(2))
    m, v = (source.normal(size.rows, size.width, dtype="float32") for _ in range(2))
    return param, grad, m, v**2 + 1


def _eight_bits(size: Size, source: Arrays) -> Values:
    xp, items = source.xp, size.rows * size.width
    param, grad = (source.normal(items, dtype="float32") for _ in range(2))
    scales = [xp.zeros(-(-items // ITEMS_OF_A_SCALE), np.float32) for _ in range(2)]
    return param, grad, xp.zeros(items, np.int8), xp.zeros(items, np.uint8), *scales


def _eight_bit_bytes(size: Size) -> tuple[int, int]:
    """Return the bytes of param, m, v and scales, read and written, and of grad, read."""
    items = size.rows * size.width
    return 16 * items + 16 * -(-items // ITEMS_OF_A_SCALE), 0


def _heads(size: Size, source: Arrays) -> Values:
    positions = min(_POSITIONS, size.rows)
    width = min(HEAD_DIM, size.width)
    shape = (size.rows // positions, positions, max(size.width // HEAD_DIM, 1), width)
    tables = map(source.xp.asarray, cupyattn.rope_tables(positions, width))
    return source.normal(*shape, dtype=size.dtype), *tables


def _parts(size: Size, source: Arrays) -> Values:
    """Make two outputs and log-sum-exps of attention over parts of the keys."""
    heads = size.width // HEAD_DIM
    out = [source.normal(1, size.rows, heads, HEAD_DIM, dtype=size.dtype) for _ in range(2)]
    lse = [source.normal(1, heads, size.rows, dtype="float32") for _ in range(2)]
    return out[0], lse[0], out[1], lse[1]


def _nf4_bytes(size: Size) -> tuple[int, int]:
    block = FORMATS["nf4"].block_size
    assert block is not None
    found = pieces("nf4", size.rows, size.width, block).values()
    stored = sum(int(np.prod(shape)) * kind.itemsize for shape, kind in found)
    return stored + size.array_bytes, 0


def _logits(size: Size, source: Arrays) -> Values:
    """Make logits of which top-p keeps some hundred tokens, as a language model's."""
    return (source.normal(size.rows, size.width, dtype=size.dtype, scale=4),)


# The same in PyTorch


def _torch_rope(torch: Any, x: Any, cos: Any, sin: Any) -> Any:
    """Rotate halves of x, with tables in its dtype, as models do."""
    cos, sin = (torch.cat((t, t), -1)[None, :, None].to(x.dtype) for t in (cos, sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _torch_gated(activation: str, torch: Any, packed: Any) -> Any:
    gate, up = packed.chunk(2, -1)
    return getattr(torch.nn.functional, activation)(gate) * up


def _torch_norm(name: str, eps: float, torch: Any, x: Any, *parameters: Any) -> Any:
    norm = getattr(torch.nn.functional, name)
    return norm(x, x.shape[-1:], *parameters, **({"eps": eps} if name == "rms_norm" else {}))


def _torch_add_norm(name: str, eps: float, torch: Any, x: Any, *others: Any) -> Any:
    *parameters, residual = others
    total = x + residual
    return _torch_norm(name, eps, torch, total, *parameters), total


_ADAMW: dict[str, Any] = {
    "step": 1000,
    "lr": 1.0,  # so large that a step shows in the parameters
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
}


def _torch_adamw(torch: Any, param: Any, grad: Any, m: Any, v: Any) -> Any:
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


def _torch_draw(torch: Any, logits: Any) -> Any:
    return torch.multinomial(torch.softmax(logits.float(), -1), 1)[:, 0]


def _torch_top_k(torch: Any, logits: Any) -> Any:
    largest, tokens = torch.topk(logits, min(_TOP_K, logits.shape[-1]), -1)
    return tokens.gather(-1, _torch_draw(torch, largest)[:, None])[:, 0]


def _torch_top_p(torch: Any, logits: Any) -> Any:
    ordered, tokens = torch.sort(logits.float(), -1, descending=True)
    probabilities = torch.softmax(ordered, -1)
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.masked_fill(before >= _TOP_P, 0)
    return tokens.gather(-1, torch.multinomial(kept, 1))[:, 0]


# The same by array functions


def _wide(x: Array) -> Array:
    return x.astype(np.float32)


def _layer_norm(xp: Any, x: Array, w: Array, b: Array) -> Array:
    wide = _wide(x)
    wide -= wide.mean(-1, keepdims=True)
    wide /= xp.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return (wide * w + b).astype(x.dtype)


def _rms_norm(xp: Any, x: Array, w: Array) -> Array:
    wide = _wide(x)
    wide /= xp.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * w).astype(x.dtype)


def _add_norm(norm: Callable[..., Array], xp: Any, x: Array, *others: Array) -> Values:
    *parameters, residual = others
    total = x + residual
    return norm(xp, total, *parameters), total


def _softmax(xp: Any, x: Array) -> Array:
    wide = _wide(x)
    wide -= wide.max(-1, keepdims=True)
    xp.exp(wide, out=wide)
    wide /= wide.sum(-1, keepdims=True)
    return wide.astype(x.dtype)


def _logs(xp: Any, x: Array) -> tuple[Array, Array]:
    """Return x in float32, and the logarithm of the sum of exponentials of each row."""
    wide = _wide(x)
    largest = wide.max(-1, keepdims=True)
    return wide, largest + xp.log(xp.exp(wide - largest).sum(-1, keepdims=True))


def _log_softmax(xp: Any, x: Array) -> Array:
    wide, logs = _logs(xp, x)
    return (wide - logs).astype(x.dtype)


def _logsumexp(xp: Any, x: Array) -> Array:
    return _logs(xp, x)[1][..., 0].astype(x.dtype)


def _cross_entropy(xp: Any, logits: Array, labels: Array) -> Array:
    wide, logs = _logs(xp, logits)
    return (logs[:, 0] - wide[xp.arange(len(labels)), labels]).mean()


def _rope(xp: Any, x: Array, cos: Array, sin: Array) -> Array:
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = _wide(x[..., :half]), _wide(x[..., half:])
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return xp.concatenate(rotated, -1).astype(x.dtype)


def _gelu(xp: Any, x: Array) -> Array:
    wide = _wide(x)
    inner = (2 / np.pi) ** 0.5 * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + xp.tanh(inner))).astype(x.dtype)


def _silu(xp: Any, x: Array) -> Array:
    wide = _wide(x)
    return (wide / (1 + xp.exp(-wide))).astype(x.dtype)


def _swiglu(xp: Any, packed: Array) -> Array:
    half = packed.shape[-1] // 2
    return (_silu(xp, _wide(packed[..., :half])) * packed[..., half:]).astype(packed.dtype)


def _adamw(xp: Any, param: Array, grad: Array, m: Array, v: Array) -> Values:
    (beta1, beta2), lr = _ADAMW["betas"], _ADAMW["lr"]
    wide = _wide(grad)
    m *= beta1
    m += (1 - beta1) * wide
    v *= beta2
    v += (1 - beta2) * wide * wide
    mean, square = m / (1 - beta1 ** _ADAMW["step"]), v / (1 - beta2 ** _ADAMW["step"])
    moved = lr * mean / (xp.sqrt(square) + _ADAMW["eps"])
    param[...] = (_wide(param) * (1 - lr * _ADAMW["weight_decay"]) - moved).astype(param.dtype)
    return param, m, v


def _sampling(name: str, rows: int, torch: Callable[..., Any], **options: Any) -> Operation:
    """Sample one row, as in decoding, or a batch; PyTorch has argmax, multinomial, topk, sort."""
    return Operation(
        f"sample {name}, {rows} row{'s' if rows > 1 else ''}",
        "sample",
        _logits,
        torch,
        1,
        composed=(lambda xp, x: x.argmax(-1)) if name == "greedy" else None,
        options={"seed": 1, **options},
        tolerance=np.inf,  # another generator; and of equal logits PyTorch takes any
        shape=(rows, _VOCABULARY[1]),
        small=(1, 32_768) if rows == 1 else None,
    )


def _functional(name: str, **options: Any) -> Callable[..., Any]:
    """Return a function of ``torch.nn.functional``."""
    return lambda torch, *tensors: getattr(torch.nn.functional, name)(*tensors, **options)


_LN, _RMS = ("layer_norm", 1e-5), ("rms_norm", 1e-6)
_RESIDUAL: dict[str, Any] = {"by_name": ("residual",)}
_LOSS: dict[str, Any] = {"shape": _VOCABULARY}
_LONG: dict[str, Any] = {"small": (4, 32_768)}
OPERATIONS = (
    Operation("layer_norm", "layer_norm", partial(_norm, 2), partial(_torch_norm, *_LN), 2, 3,
              _layer_norm),
    Operation("rms_norm", "rms_norm", partial(_norm, 1), partial(_torch_norm, *_RMS), 2, 3,
              _rms_norm),
    Operation("add + layer_norm", "layer_norm", partial(_norm, 2, residual=True),
              partial(_torch_add_norm, *_LN), 4, 4, partial(_add_norm, _layer_norm), **_RESIDUAL),
    Operation("add + rms_norm", "rms_norm", partial(_norm, 1, residual=True),
              partial(_torch_add_norm, *_RMS), 4, 4, partial(_add_norm, _rms_norm), **_RESIDUAL),
    Operation("softmax", "softmax", _one, lambda torch, x: torch.softmax(x, -1), 2, 3, _softmax),
    Operation("log_softmax", "log_softmax", _one, lambda torch, x: torch.log_softmax(x, -1), 2, 3,
              _log_softmax),
    Operation("logsumexp", "logsumexp", _one, lambda torch, x: torch.logsumexp(x, -1), 1, 2,
              _logsumexp),
    Operation("cross_entropy", "cross_entropy", _labelled,
              lambda torch, x, labels: torch.nn.functional.cross_entropy(x.float(), labels), 1, 2,
              _cross_entropy, **_LOSS, **_LONG),
    Operation("linear_cross_entropy", "linear_cross_entropy", _features,
              lambda torch, x, w, labels:
              torch.nn.functional.cross_entropy((x @ w).float(), labels), 0, 0,
              lambda xp, x, w, labels: _cross_entropy(xp, xp.matmul(x, w), labels),
              _feature_bytes, _feature_flops, **_LOSS, small=None),
    Operation("embedding", "embedding", _table,
              lambda torch, table, ids: torch.nn.functional.embedding(ids, table), 2, 1,
              lambda xp, table, ids: table[ids],
              lambda size: (0, _TABLE_ROWS * size.width * size.item_bytes)),
    Operation("rope", "rope", _heads, _torch_rope, 2, 2, _rope),
    Operation("gelu", "gelu", _one, _functional("gelu", approximate="tanh"), 2, 3, _gelu,
              options={"approximate": "tanh"}),
    Operation("silu", "silu", _one, _functional("silu"), 2, 3, _silu),
    Operation("swiglu", "swiglu", _packed, partial(_torch_gated, "silu"), 3, 5, _swiglu),
    Operation("geglu", "geglu", _packed, partial(_torch_gated, "gelu"), 3, 5),
    Operation("dropout", "dropout", lambda size, source: (_rows(size, source), _DROPOUT_P, 1),
              lambda torch, x, p, seed: torch.nn.functional.dropout(x, p), 2, 2,
              tolerance=np.inf),  # another generator
    Operation("dropout + add", "dropout",
              lambda size, source: (_rows(size, source), _DROPOUT_P, 1, _rows(size, source)),
              lambda torch, x, p, seed, residual: torch.nn.functional.dropout(x, p) + residual,
              3, 2, **_RESIDUAL, tolerance=np.inf),
    Operation("adamw_step", "adamw_step", _optimised, _torch_adamw, 3, None, _adamw,
              lambda size: (4 * 4 * size.rows * size.width, 0),  # m and v, read and written
              changes=(0, 2, 3), options=_ADAMW),
    Operation("adamw_step_8bit", "adamw_step_8bit", _eight_bits, None, 0, None, None,
              _eight_bit_bytes, options={**_ADAMW, "step": 1, "lr": 1e-3}),
    Operation("global_norm", "global_norm", _one,
              lambda torch, x: torch.linalg.vector_norm(x, dtype=torch.float32), 1, None,
              lambda xp, x: xp.sqrt((_wide(x) ** 2).sum())),
    Operation("add_to", "add_to",
              lambda size, source: (source.normal(size.rows, size.width, dtype="float32"),
                                    _rows(size, source)),
              None, 1, None, None, lambda size: (2 * 4 * size.rows * size.width, 0),
              changes=(0,), small=None),
    Operation("merge_attention", "merge_attention", _parts, None, 3, None, None,
              lambda size: (3 * 4 * size.rows * (size.width // HEAD_DIM), 0)),
    Operation("quantize, nf4", "quantize", lambda size, source: (_rows(size, source).T,), None,
              0, None, None, _nf4_bytes, small=(1024, 2048)),
    Operation("dequantize, nf4", "dequantize",
              lambda size, source: (cupyattn.quantize(_rows(size, source).T),), None,
              0, None, None, _nf4_bytes, options={"dtype": "float16"}, small=(1024, 2048)),
    *(
        _sampling(name, rows, torch, **options)
        for rows in (1, 64)
        for name, torch, options in (
            ("greedy", lambda torch, logits: torch.argmax(logits, -1), {"temperature": 0}),
            ("all", _torch_draw, {}),
            ("top-k", _torch_top_k, {"top_k": _TOP_K}),
            ("top-p", _torch_top_p, {"top_p": _TOP_P}),
        )
    ),
)  # fmt: skip
"""All of them, in the order of the table."""


def small_table(operation: Operation) -> Operation:
    """Return embedding of a small table, for the emulator; no kernel zeroes its gradient."""
    return Operation(
        operation.name, operation.function, partial(_table, rows=512), None, 2, 2,
    )  # fmt: skip
