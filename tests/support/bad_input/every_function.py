"""A valid call of every public function that takes arrays, results and scratch memory given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from support.bad_input.call import Call, backward, forward, full, normal, softmax, softmax_backward

import cupyattn

X, Y, ROW, ONES = normal(3, 8), normal(3, 8), normal(8), np.ones(3, np.float32)
IDS = np.array([1, 0, 2], np.int32)
HEADS, KEYS = normal(3, 4, 8), normal(3, 2, 8)
COS, SIN = cupyattn.rope_tables(9, 8)


def scratch() -> dict[str, np.ndarray]:
    return {"workspace": np.empty(2**16, np.uint8)}


def zeros(dtype: str, *shape: int) -> np.ndarray:
    return np.zeros(shape or (3, 8), dtype)


def attention() -> Iterator[Call]:
    yield from (forward(), backward())
    call = cupyattn.attention_varlen
    bounds = {name: np.array([0, 3], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    bounds |= {"max_seqlen_q": 3, "max_seqlen_k": 3}
    packed = {"q": HEADS, "k": KEYS, "v": KEYS}
    results = {"out": (full(3, 4, 8), full(4, 3)), **scratch()}
    yield Call(call, {**packed, **bounds}, return_lse=True, **results)
    call = cupyattn.attention_varlen_backward
    packed = {"dout": HEADS, **packed, "out": HEADS, "lse": normal(4, 3), **bounds}
    grads = cupyattn.AttentionGrads(full(3, 4, 8), full(3, 2, 8), full(3, 2, 8))
    yield Call(call, packed, grads=grads, **scratch())
    parts = {"out_a": HEADS[None], "lse_a": normal(1, 4, 3)}
    parts |= {"out_b": parts["out_a"], "lse_b": parts["lse_a"]}
    yield Call(cupyattn.merge_attention, parts, out=(full(1, 3, 4, 8), full(1, 4, 3)))
    codes, scales = zeros("int8", 1, 3, 2, 8), zeros("float32", 1, 3, 2)
    keys = cupyattn.QuantizedKeys(codes, scales, full(1, 2, 8))
    yield Call(cupyattn.quantize_keys, {"k": KEYS[None]}, seqused_k=np.array([3]), out=keys)


def kv_cache() -> Iterator[Call]:
    caches = {name: zeros("float32", 5, 16, 2, 8) for name in ("k_cache", "v_cache")}
    table = {"block_table": zeros("int32", 1, 2), "seqlens_k": np.array([3])}
    query = {"q": normal(1, 1, 4, 8), **caches, **table}
    results = {"out": (full(1, 1, 4, 8), full(1, 4, 1)), **scratch()}
    yield Call(cupyattn.paged_attention, query, return_lse=True, **results)
    yield Call(cupyattn.gather, {**caches, **table}, out=(full(1, 32, 2, 8), full(1, 32, 2, 8)))
    stored = {name: zeros("int8", 5, 4, 2, 8) for name in caches}
    scales = {name: zeros("float32", 5, 4, 2) for name in ("k_scales", "v_scales")}
    tokens = {"k": KEYS, "v": KEYS, "slot_mapping": IDS}
    turned = {"q": HEADS.copy(), "rotary": (COS, SIN), "positions": IDS}
    turned |= {name: cupyattn.RMSNorm(normal(8)) for name in ("q_norm", "k_norm")}
    yield Call(cupyattn.append_kv, {**stored, **tokens}, **scales, **turned)
    yield Call(cupyattn.copy_blocks, {**stored, "copies": [(0, 1)]}, **scales)


def softmaxes() -> Iterator[Call]:
    yield from (softmax(), softmax_backward())
    yield Call(cupyattn.log_softmax, {"x": X}, out=full(3, 8))
    yield Call(cupyattn.log_softmax_backward, {"dout": X, "out": Y}, grads=full(3, 8))
    grads = cupyattn.SoftmaxGrads(full(3, 8), full(1, 8))
    of = {"dout": X, "out": Y}
    yield Call(cupyattn.softmax_backward, of, bias=normal(1, 8), grads=grads, **scratch())
    yield Call(cupyattn.logsumexp, {"x": normal(8, 1)}, axis=0, out=full(1))
    of = {"dout": ONES, "x": X, "out": ONES}
    yield Call(cupyattn.logsumexp_backward, of, grads=full(3, 8))


def losses() -> Iterator[Call]:
    logits, lse = {"logits": X, "labels": IDS}, {"lse": ONES}
    results = {"out": (full(), full(3)), **scratch()}
    yield Call(cupyattn.cross_entropy, logits, return_lse=True, **results)
    dloss, dlogits = {"dloss": np.ones((), np.float32)}, {"dlogits": full(3, 8)}
    call = cupyattn.cross_entropy_backward
    yield Call(call, {**dloss, **logits, **lse}, **dlogits, **scratch())
    products = {"x": X, "w": normal(8, 6), "labels": IDS}
    results = {"out": (full(), full(3)), **scratch()}
    yield Call(cupyattn.linear_cross_entropy, products, return_lse=True, **results)
    call = cupyattn.linear_cross_entropy_backward
    grads = cupyattn.LinearCrossEntropyGrads(full(3, 8), full(8, 6))
    yield Call(call, {**dloss, **products, **lse}, grads=grads, **scratch())


def rows_and_elements() -> Iterator[Call]:
    weights = {"x": X, "weight": ROW, "bias": ROW}
    results = [full(3, 8), full(3, 8), full(3), full(3)]
    given = {"residual": Y, "return_stats": True}
    yield Call(cupyattn.layer_norm, weights, **given, out=tuple(results))
    norms = {"dout": Y, "x": X, "weight": ROW, "mean": ONES, "rstd": ONES}
    grads: Any = cupyattn.LayerNormGrads(full(3, 8), full(8), full(8))
    yield Call(cupyattn.layer_norm_backward, norms, bias=ROW, grads=grads, **scratch())
    weights, norms = dict(weights), dict(norms)  # of the calls above they stay as they are
    del weights["bias"], norms["mean"]
    results = [full(3, 8), full(3, 8), full(3)]
    yield Call(cupyattn.rms_norm, weights, **given, out=tuple(results))
    grads = cupyattn.RMSNormGrads(full(3, 8), full(8))
    yield Call(cupyattn.rms_norm_backward, norms, grads=grads, **scratch())
    for name in ("gelu", "silu"):
        yield Call(getattr(cupyattn, name), {"x": X}, out=full(3, 8))
        backward = getattr(cupyattn, f"{name}_backward")
        yield Call(backward, {"dout": Y, "x": X}, grads=full(3, 8))
    for name in ("geglu", "swiglu"):
        yield Call(getattr(cupyattn, name), {"gate": X, "up": Y}, out=full(3, 8))
        backward = getattr(cupyattn, f"{name}_backward")
        grads = cupyattn.GatedGrads(full(3, 8), full(3, 8))
        yield Call(backward, {"dout": X, "gate": X, "up": Y}, grads=grads)
    draw = {"p": 0.5, "seed": 1}
    yield Call(cupyattn.dropout, {"x": X, **draw}, residual=Y, out=full(3, 8))
    grads = cupyattn.DropoutGrads(full(3, 8), None)
    yield Call(cupyattn.dropout_backward, {"dout": X, **draw}, grads=grads)
    yield Call(cupyattn.add_to, {"total": full(3, 8), "x": X})


def tokens() -> Iterator[Call]:
    tables = {"cos": COS, "sin": SIN}
    yield Call(cupyattn.rope, {"x": HEADS[None], **tables}, positions=IDS, out=full(1, 3, 4, 8))
    pair, out = (HEADS[None], KEYS[None]), (full(1, 3, 4, 8), full(1, 3, 2, 8))
    yield Call(cupyattn.rope, {"x": pair, **tables}, out=out)
    call, grads = cupyattn.rope_backward, full(1, 3, 4, 8)
    yield Call(call, {"dout": HEADS[None], **tables}, positions=IDS, grads=grads)
    yield Call(cupyattn.embedding, {"table": X, "ids": IDS}, out=full(3, 8))
    of = {"dout": Y, "table": X, "ids": IDS}
    yield Call(cupyattn.embedding_backward, of, grads=full(3, 8), **scratch())
    options = {
        "seed": IDS.astype(int),
        "temperature": ONES,
        "top_k": IDS + 1,
        "previous": zeros("int32", 3, 2),
    }
    yield Call(cupyattn.sample, {"logits": X}, **options, out=zeros("int32", 3), **scratch())


def products() -> Iterator[Call]:
    w, bias = normal(8, 6), normal(6)
    given: dict[str, Any] = {"activation": "silu", "return_preactivation": True}
    results = {"out": (full(3, 6), full(3, 6)), **scratch()}
    of = {"x": X, "w": w, "b": bias}
    yield Call(cupyattn.linear, of, residual=normal(3, 6), **given, **results)
    grads = cupyattn.LinearGrads(full(3, 8), full(8, 6), full(6))
    given = {"activation": "silu", "preactivation": normal(3, 6), **scratch()}
    dout = {"dout": normal(3, 6)}
    yield Call(cupyattn.linear_backward, {**dout, **of}, **given, grads=grads)
    yield Call(cupyattn.linear_gelu, of, out=full(3, 6), **scratch())
    yield Call(cupyattn.linear_gelu_backward, {**dout, **of}, grads=grads, **scratch())
    yield Call(cupyattn.matmul, {"a": X, "b": w}, out=full(3, 6))
    weight = cupyattn.quantize(normal(64, 6))
    yield Call(cupyattn.quantize, {"w": normal(64, 6)}, out=weight, **scratch())
    rows = cupyattn.quantize_rows(normal(6, 64))
    yield Call(cupyattn.quantize_rows, {"x": normal(6, 64)}, out=rows)
    yield Call(cupyattn.dequantize, {"weight": weight}, out=full(64, 6), **scratch())


def training() -> Iterator[Call]:
    step = {"step": 1, "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    floats = {name: zeros("float32") for name in ("param", "grad", "m", "v")}
    yield Call(cupyattn.adamw_step, floats, **step)
    codes = {"m": zeros("int8"), "v": zeros("uint8")}
    scales = {name: zeros("float32", 1) for name in ("m_scales", "v_scales")}
    yield Call(cupyattn.adamw_step_8bit, {**floats, **codes, **scales}, **step)
    yield Call(cupyattn.global_norm, {"arrays[0]": X, "arrays[1]": Y}, out=full(), **scratch())


def every_function() -> Iterator[Call]:
    """Some functions more than once, where an option takes another way."""
    for family in (
        attention, kv_cache, softmaxes, losses, rows_and_elements, tokens, products, training,
    ):  # fmt: skip
        yield from family()
