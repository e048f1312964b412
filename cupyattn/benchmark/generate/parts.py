"""What a step of decoding consists of: its kernels in their order, their bytes and times."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.arrays import dtype_of
from cupyattn.models.activations import activated

T4_GB_PER_S = 320.0
"""The memory of a T4 by its data sheet."""
_STALL_BYTES = 2**30
"""Of each copy that keeps the GPU busy while a step is queued."""


class Part(NamedTuple):
    """A call of a step, and the least that it reads and writes."""

    name: str
    bytes: int
    call: Callable[[], Any]


def parts_of(model: Any, cache: Any, tables: Any, context: int) -> list[Part]:
    """Return the calls of a step in their order, on arrays of their own.

    The sequences of `tables` have one new token and `context` tokens each. Calls are those of
    `Model.hidden` and `Model.head`, one for one; what they compute is not passed on.
    """
    xp, config, weights = model.xp, model.config, model.weights
    rows, kind = tables.num_sequences, dtype_of(model.dtype)

    def drawn(*shape: int) -> Any:
        some = np.random.default_rng(0).standard_normal(shape, np.float32)
        return xp.asarray((0.1 * some).astype(kind))

    heads, groups, width = config.num_heads, config.num_kv_heads, config.head_dim
    x = drawn(rows, config.hidden_size)
    qkv = drawn(rows, heads + 2 * groups, width)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + groups], qkv[:, heads + groups :]
    seen, inner = drawn(rows, heads * width), drawn(rows, config.intermediate_size)
    ids = xp.zeros(rows, np.int32)
    logits = drawn(rows, config.vocab_size)
    rotary = {} if model.rotary is None else {"q": q, "rotary": model.rotary}
    cached = 2 * rows * groups * cache.nbytes // (2 * cache.k[..., 0].size)  # a token of a layer

    def product(name: str, of: Any, given: Any, residual: Any = None, **options: Any) -> Part:
        moved = _nbytes(of.weight, of.bias, given, residual)
        out = rows * len(of.weight) // (2 if "glu" in str(options.get("activation")) else 1)
        if residual is not None:
            options["residual"] = residual
        return Part(name, moved + out * kind.itemsize, partial(of, given, **options))

    def norm(name: str, of: Any) -> Part:
        return Part(name, _nbytes(of.weight, of.bias, x, x), partial(of, x))

    parts = [Part("embedding", 2 * x.nbytes, partial(cupyattn.embedding, weights.embedding, ids))]
    if weights.positions is not None:
        found = partial(cupyattn.embedding, weights.positions, tables.positions[:rows])
        parts.append(Part("embedding", 2 * x.nbytes, found))
        parts.append(Part("sum of embeddings", 3 * x.nbytes, partial(xp.add, x, x, out=x.copy())))
    for index, layer in enumerate(weights.layers):
        attention = [
            Part("rotary + append", 2 * qkv.nbytes,
                 partial(cache.append, index, k, v, tables, **rotary)),
            Part("attention", cached * context + 2 * q.nbytes,
                 partial(cache.attend, index, q[:, None], tables, causal=True,
                         window_size=config.window_size)),
        ]  # fmt: skip
        output = product("output + residual", layer.output, seen, x)
        down = product("down + residual", layer.down, inner, x)
        parts.append(norm("norm", layer.norm))
        if layer.qkv_up is not None:
            both = drawn(rows, len(layer.qkv_up.weight))[:, len(layer.qkv.weight) :]
            activation = partial(activated, both, config.activation)
            parts += [
                product("qkv and up", layer.qkv_up, x),
                Part("activation", both.nbytes + inner.nbytes, activation),
                *(down, *attention, output),
            ]
            continue
        parts.append(product("qkv", layer.qkv, x))
        up = product("up + activation", layer.up, x, activation=config.activation)
        if layer.mlp_norm is None:
            parts += [up, down, *attention, output]
        else:
            parts += [*attention, output, norm("norm", layer.mlp_norm), up, down]
    draw = partial(cupyattn.sample, logits, seed=None, temperature=0, out=ids)
    return [
        *parts,
        norm("norm", weights.norm),
        product("head", weights.head, x),
        Part("sample", logits.nbytes, draw),
    ]


def time_parts(parts: list[Part], xp: Any, runs: int) -> list[list[float]]:
    """Return the seconds of each part, in each of the runs of all of them in their order.

    The GPU is kept busy by copies while a run is queued: so its calls follow one another as in a
    graph, and nothing is in a cache that the step itself does not leave there. The events between
    them take about a microsecond each, which is part of a part's time.
    """
    source = xp.zeros(_STALL_BYTES, np.uint8)
    target = xp.empty_like(source)
    found = []
    for _ in range(runs + 1):
        events = [xp.cuda.Event() for _ in range(len(parts) + 1)]
        for _ in range(4 + len(parts) // 8):  # 0.5 ms or more each; a call is queued in 20 us
            target.data.copy_from_device_async(source.data, source.nbytes)
        events[0].record()
        results = []
        for part, event in zip(parts, events[1:], strict=True):
            results.append(part.call())
            event.record()
        events[-1].synchronize()
        del results
        found.append([xp.cuda.get_elapsed_time(*pair) / 1e3 for pair in pairwise(events)])
    return [list(times) for times in zip(*found[1:], strict=True)]


def summary(parts: list[Part], seconds: list[list[float]], gb_per_s: float) -> list[dict[str, Any]]:
    """Return a row for each name: calls and bytes of a step, seconds of each run; a T4's, modelled.

    On a T4 a call is taken to last what it lasts here beyond its bytes at this GPU's rate, and its
    bytes at 320 GB/s.
    """
    rows: dict[str, dict[str, Any]] = {}
    for part, runs in zip(parts, seconds, strict=True):
        row = rows.setdefault(
            part.name,
            {"part": part.name, "calls": 0, "bytes": 0, "seconds": [0.0] * len(runs), "t4_s": 0.0},
        )
        streaming = part.bytes / gb_per_s / 1e9
        row["calls"] += 1
        row["bytes"] += part.bytes
        row["seconds"] = [one + more for one, more in zip(row["seconds"], runs, strict=True)]
        beyond = max(0.0, statistics.median(runs) - streaming)
        row["t4_s"] += beyond + part.bytes / T4_GB_PER_S / 1e9
    return list(rows.values())


def _nbytes(*arrays: Any) -> int:
    return sum(array.nbytes for array in arrays if array is not None)
