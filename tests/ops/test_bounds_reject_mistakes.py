"""Each error bound of the reference can fail: results of small wrong kernels are beyond it.

A case has exact results, their bounds, and wrong results by the mistake that a kernel could make.
Exact results, rounded to what a kernel stores, are within the bounds. Other tests try the bounds of
attention (attention/test_reference_bounds.py) and linear (linear/test_reference.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import cupyattn
from cupyattn import reference
from cupyattn.ops.attention.reference.quantised import (
    dequantised_attention_bound,
    stored_attention_bound,
)
from cupyattn.ops.softmax.bounds import log_sum_bound
from cupyattn.reference import error_ratio

ELSEWHERE = {
    *("attention_backward_bound", "linear_bound", "linear_backward_bound"),
    *("softmax_bound", "softmax_backward_bound"),
}
Results = tuple[Any, ...]


class Case(NamedTuple):
    exact: Results
    bounds: Results
    wrong: dict[str, Results]
    stored: tuple[str, ...] = ()
    """Dtypes of the results, if they are not all the dtype of the inputs."""


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype).astype(np.float64)


def merge_attention(dtype: str) -> Case:
    out_a, out_b = normal(2, 1, 5, 3, 8, dtype=dtype)
    lse_a, lse_b = normal(2, 1, 3, 5, seed=1)
    parts = out_a, lse_a, out_b, lse_b
    exact = out, lse = reference.merge_attention(*parts)
    swapped, _ = reference.merge_attention(out_a, lse_b, out_b, lse_a)
    wrong = {
        "weights change places": (swapped, lse),
        "lse of the larger part alone": (out, np.maximum(lse_a, lse_b)),
    }
    bounds = reference.merge_attention_bound(*parts, dtype=dtype)
    return Case(exact, bounds, wrong, (dtype, "float32"))


def attention_of_integers(bits: int, of_integers: Callable[..., Results], dtype: str) -> Case:
    q, k, v = (normal(1, 6, 2, 16, seed=i, dtype=dtype).astype(dtype) for i in range(3))
    (k, k_scales), (v, v_scales) = (reference.quantise(x, bits) for x in (k, v))
    keys, values = reference.dequantise(k, k_scales), reference.dequantise(v, v_scales)
    rounded = reference.attention_bound(q, keys, values, dtype=dtype, tile_k=16)
    bounds = tuple(map(np.add, rounded, of_integers(q, k, v, k_scales, v_scales)))
    larger = keys + (np.arange(16) == 15) * k_scales[..., None]
    wrong = {"K's last integers are one too large": reference.attention(q, larger, values)}
    return Case(reference.attention(q, keys, values), bounds, wrong, (dtype, "float32"))


def append_kv(dtype: str) -> Case:
    x, tables = normal(7, 2, 12, dtype=dtype), reference.rope_tables(20, 8)
    positions = np.arange(7)[None] + 3
    exact = reference.rotated(x, *tables, positions)
    bound = reference.append_kv_bound(x, dtype, tables, positions)
    wrong = {"the next position": (reference.rotated(x, *tables, positions + 1),)}
    return Case((exact,), (bound,), wrong)


def normed_append_kv(dtype: str) -> Case:
    x, tables = normal(7, 2, 12, dtype=dtype), reference.rope_tables(20, 8)
    positions = np.arange(7)[None] + 3
    norm = cupyattn.RMSNorm(normal(12, seed=1, dtype=dtype), 1e-3, 1.0)
    bound = reference.append_kv_bound(x, dtype, tables, positions, norm=norm)

    def result(rows: np.ndarray, eps: float, weight_offset: float) -> np.ndarray:
        options = {"centred": False, "eps": eps, "weight_offset": weight_offset}
        normed = reference.norm(rows, None, norm.weight, **options)[0]
        return reference.rotated(normed, *tables, positions)

    rotated = reference.rotated(x, *tables, positions)
    options = {"centred": False, "eps": 1e-3, "weight_offset": 1.0}
    wrong = {
        "no offset": (result(x, 1e-3, 0.0),),
        "another eps": (result(x, 1e-1, 1.0),),
        "the norm after the rotation": (reference.norm(rotated, None, norm.weight, **options)[0],),
    }
    return Case((result(x, 1e-3, 1.0),), (bound,), wrong)


def normed_sum(_: str) -> Case:
    x, residual, weight = (
        normal(5, 24), normal(5, 24, seed=1, dtype="float16"), normal(24, seed=2, dtype="float16")
    )  # fmt: skip
    of_norm = {"eps": 1e-3, "weight_offset": 1.0}
    normed = reference.norm(residual, None, weight, centred=False, **of_norm)[0]
    bound = reference.normed_sum_bound(x, residual, weight=weight, **of_norm)
    wrong = {
        "a term that is not normalised": (x + residual.astype(float),),
        "a term that is rounded to float16": (x + normed.astype(np.float16).astype(float),),
    }
    return Case((x + normed,), (bound,), wrong, ("float32",))


def gather(dtype: str) -> Case:
    stored, scales = reference.quantise(normal(4, 6, 2, 16), 8)
    exact = reference.dequantise(stored, scales)
    signless = (stored.astype(np.int32) & 255) * scales.astype(np.float64)[..., None]
    wrong = {"bytes without a sign": (signless,)}
    return Case((exact,), (reference.gather_bound(exact, dtype),), wrong)


def quantisation(bits: int, _: str) -> Case:
    x, largest = normal(40, 64), {8: 127, 4: 7}[bits]
    scale = np.abs(x).max(axis=-1) / largest
    wrong = {
        "cut off instead of rounded": (np.floor(x / scale[:, None]) * scale[:, None], scale),
        "one step more": (x, scale * largest / (largest + 1)),
    }
    return Case((x, scale), reference.quantisation_bound(x, bits), wrong, ("float32", "float32"))


def add_to(_: str) -> Case:
    total, x = normal(5, 40), normal(5, 40, seed=1, dtype="float16")
    exact = reference.add_to(total, x)
    wrong = {"the sum is float16": (exact.astype(np.float16),)}
    return Case((exact,), (reference.add_to_bound(total, x),), wrong, ("float32",))


LABELS = np.array([3, 0, 22, 7, 11])
NUMBERS: dict[str, Any] = {"ignore_index": 7, "label_smoothing": 0.25, "z_loss": 0.125}
EACH: dict[str, Any] = {**NUMBERS, "reduction": "none"}


def cross_entropy(_: str) -> Case:
    logits = 3 * normal(5, 24)
    short = np.where(np.arange(24) == 23, -1e3, logits)
    exact = losses, lse = reference.cross_entropy(logits, LABELS, **EACH)
    wrong = {
        "lse is not squared": (losses + 0.125 * (lse - lse**2) * (LABELS != 7), lse),
        "the last logit is not summed": (losses, reference.logsumexp(short)),
    }
    bounds = reference.cross_entropy_bound(logits, LABELS, **EACH)
    return Case(exact, bounds, wrong, ("float32", "float32"))


def cross_entropy_backward(dtype: str) -> Case:
    logits, dloss, dlse = normal(5, 24, dtype=dtype), normal(5), normal(5, seed=1)
    given = dloss, logits, LABELS, reference.logsumexp(logits)

    def gradient(**changes: Any) -> Results:
        return (reference.cross_entropy_backward(*given, **{**EACH, "dlse": dlse, **changes}),)

    bound = reference.cross_entropy_backward_bound(*given, dtype=dtype, dlse=dlse, **EACH)
    wrong = {
        "half of the z loss": gradient(z_loss=0.0625),
        "no smoothing": gradient(label_smoothing=0.0),
    }
    return Case(gradient(), (bound,), wrong)


def linear_cross_entropy(dtype: str) -> Case:
    x, w = normal(5, 16, dtype=dtype), normal(16, 24, seed=1, dtype=dtype)
    exact = reference.linear_cross_entropy(x, w, LABELS, **EACH)
    bounds = reference.linear_cross_entropy_bound(x, w, LABELS, dtype=dtype, **NUMBERS)
    short = reference.linear_cross_entropy(x[:, :-1], w[:-1], LABELS, **EACH)
    wrong = {"the last feature is not multiplied": short}
    return Case(exact, bounds, wrong, ("float32", "float32"))


def linear_cross_entropy_backward(dtype: str) -> Case:
    x, w, dloss = normal(5, 16, dtype=dtype), normal(16, 24, seed=1, dtype=dtype), normal(5)
    lse = reference.logsumexp(x @ w)
    given = dloss, x, w, LABELS, lse
    exact = reference.linear_cross_entropy_backward(*given, **EACH)
    bounds = reference.linear_cross_entropy_backward_bound(*given, dtype=dtype, chunks=2, **NUMBERS)
    first = dloss[:3], x[:3], w, LABELS[:3], lse[:3]
    of_first = reference.linear_cross_entropy_backward(*first, **EACH)
    plain = reference.linear_cross_entropy_backward(*given, **{**EACH, "label_smoothing": 0.0})
    wrong = {
        "dw of the first chunk alone": (exact.dx, of_first.dw),
        "no smoothing": (plain.dx, exact.dw),
    }
    return Case(exact, bounds, wrong)


def log_softmax(dtype: str) -> Case:
    x = normal(6, 70, dtype=dtype)
    exact, bound = reference.log_softmax(x), reference.log_softmax_bound(x, dtype=dtype)
    wrong = {"the last column is not summed": (x - reference.logsumexp(x[:, :-1])[:, None],)}
    return Case((exact,), (bound,), wrong)


def logsumexp(_: str) -> Case:
    x = normal(6, 70)
    lse, largest = reference.logsumexp(x), x.max(axis=-1)
    short = reference.logsumexp(x[:, :-1])
    wrong = {"the last column is not summed": (short, short - largest)}
    bounds = reference.logsumexp_bound(x), log_sum_bound(x)
    return Case((lse, lse - largest), bounds, wrong, ("float32", "float32"))


def row_gradients(dtype: str) -> Case:
    """log_softmax and logsumexp backwards."""
    x, dout, of_row = normal(6, 70, dtype=dtype), normal(6, 70, seed=1, dtype=dtype), normal(6)
    out, lse = reference.log_softmax(x), reference.logsumexp(x)
    exact = reference.log_softmax_backward(dout, out), reference.logsumexp_backward(of_row, x, lse)
    bounds = (
        reference.log_softmax_backward_bound(dout, out, dtype=dtype),
        reference.logsumexp_backward_bound(of_row, x, lse, dtype=dtype),
    )
    total = dout[:, :-1].sum(axis=-1, keepdims=True)
    wrong = {
        "the last column is not summed": (dout - np.exp(out) * total, exact[1]),
        "the row's gradient is left out": (exact[0], exact[1] / of_row[:, None]),
    }
    return Case(exact, bounds, wrong)


def broadcast_sums(_: str) -> Case:
    terms, shape = normal(200, 2, 40), (1, 2, 40)
    bound = reference.broadcast_sums_bound(terms, 0 * terms, shape, dtype="float32")
    wrong = {"the last row": (reference.broadcast_sums(terms[:-1], shape),)}
    return Case((reference.broadcast_sums(terms, shape),), (bound,), wrong, ("float32",))


def adamw_step(dtype: str) -> Case:
    arrays = [normal(40, dtype=dtype), normal(40, seed=1, dtype=dtype), 0.1 * normal(40, seed=2)]
    arrays.append(normal(40, seed=3) ** 2)
    numbers = {"step": 3, "lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}
    exact = param, m, v = reference.adamw_step(*arrays, **numbers)
    bounds = reference.adamw_step_bound(*arrays, **numbers, dtype=dtype)
    other, *means = reference.adamw_step(*arrays, **{**numbers, "step": 4, "betas": (0.95, 0.8)})
    wrong = {
        "the correction of another step": (other, m, v),
        "betas change places": (param, *means),
    }
    return Case(exact, bounds, wrong, (dtype, "float32", "float32"))


def global_norm(_: str) -> Case:
    x = normal(4099)
    exact, bound = reference.global_norm(x), reference.global_norm_bound(x)
    wrong = {"the last item is not summed": (reference.global_norm(x[:-1]),)}
    return Case((exact,), (bound,), wrong, ("float32",))


def activation(kind: str, dtype: str) -> Case:
    x, dout = np.linspace(-6, 6, 301).astype(dtype), normal(301, dtype=dtype)
    other = {"gelu": "gelu_tanh", "gelu_tanh": "gelu", "silu": "gelu"}[kind]
    exact, of_other = (
        (reference.activation(x, name), reference.activation_backward(dout, x, name))
        for name in (kind, other)
    )
    bounds = (
        reference.activation_bound(x, kind, dtype=dtype),
        reference.activation_backward_bound(dout, x, kind, dtype=dtype),
    )
    wrong = {
        "another activation": (of_other[0], exact[1]),
        "another slope": (exact[0], of_other[1]),
    }
    return Case(exact, bounds, wrong)


def gated(dtype: str) -> Case:
    gate, up, dout = (normal(5, 24, seed=i, dtype=dtype) for i in range(3))
    out = reference.gated(gate, up, "silu")
    dgate, dup = reference.gated_backward(dout, gate, up, "silu")
    bounds = (
        reference.gated_bound(gate, up, "silu", dtype=dtype),
        *reference.gated_backward_bound(dout, gate, up, "silu", dtype=dtype),
    )
    wrong = {
        "gate and up change places": (reference.gated(up, gate, "silu"), dgate, dup),
        "the gradient of the gate without its slope": (out, dout * up, dup),
        "the gradient of up without the gate": (out, dgate, dout),
    }
    return Case((out, dgate, dup), bounds, wrong)


def norm(dtype: str) -> Case:
    x, weight, bias = normal(6, 40, dtype=dtype) + 1, normal(40, seed=1), normal(40, seed=2)
    options: dict[str, Any] = {"centred": True, "eps": 1e-2}
    out, _, mean, rstd = reference.norm(x, None, weight, bias, **options)
    neighbour = reference.norm(x, None, np.roll(weight, 1), bias, **options)[0]
    wrong = {
        "the weight of the neighbour": (neighbour, mean, rstd),
        "the last column is not summed": (out, x[:, :-1].sum(axis=-1) / 40, rstd),
        "the variance of n - 1": (out, mean, ((rstd**-2 - 1e-2) * 40 / 39 + 1e-2) ** -0.5),
    }
    bounds = reference.norm_bound(x, weight, bias, dtype=dtype, **options)
    return Case((out, mean, rstd), bounds, wrong, (dtype, "float32", "float32"))


def norm_backward(dtype: str) -> Case:
    x, dout = normal(6, 40, dtype=dtype), normal(6, 40, seed=1, dtype=dtype)
    weight, bias, dtotal = normal(40, seed=2), normal(40, seed=3), normal(6, 40, seed=4)
    _, _, mean, rstd = reference.norm(x, centred=True, eps=1e-5)
    given = dout, x, dtotal, weight, bias, mean, rstd
    dx, dweight, dbias = reference.norm_backward(*given)
    shift = rstd[:, None] * (dout * weight).mean(axis=-1, keepdims=True)
    last = dout[-1] * (x[-1] - mean[-1]) * rstd[-1]
    wrong = {
        "the gradient's mean is left out": (dx + shift, dweight, dbias),
        "dweight without the last row": (dx, dweight - last, dbias),
        "dbias without the last row": (dx, dweight, dbias - dout[-1]),
    }
    bounds = reference.norm_backward_bound(*given, dtype=dtype)
    return Case((dx, dweight, dbias), bounds, wrong)


def rope(dtype: str) -> Case:
    x, tables = normal(2, 5, 3, 17, dtype=dtype), reference.rope_tables(20, 12)
    cos, sin = (table.astype(np.float32) for table in tables)
    positions = np.arange(10).reshape(2, 5)
    exact = reference.rope(x, cos, sin, positions)
    wrong = {
        "backwards": (reference.rope(x, cos, -sin, positions),),
        "the next position": (reference.rope(x, cos, sin, positions + 1),),
    }
    return Case((exact,), (reference.rope_bound(x, cos, sin, positions, dtype=dtype),), wrong)


def embedding_backward(dtype: str) -> Case:
    dout, ids = normal(50, 8, dtype=dtype), np.arange(50) ** 2 % 7
    exact = reference.embedding_backward(dout, 7, ids)
    wrong = {"the last token": (reference.embedding_backward(dout[:-1], 7, ids[:-1]),)}
    return Case((exact,), (reference.embedding_backward_bound(dout, 7, ids, dtype=dtype),), wrong)


def matmul(dtype: str) -> Case:
    a, b = normal(2, 9, 24, dtype=dtype), normal(24, 7, dtype=dtype)
    exact = reference.matmul(a, b)
    wrong = {"without the last of K": (reference.matmul(a[..., :-1], b[:-1]),)}
    return Case((exact,), (reference.matmul_bound(a, b, dtype=dtype),), wrong)


def dropout(dtype: str) -> Case:
    x, residual = normal(9, 40, dtype=dtype), normal(9, 40, seed=1, dtype=dtype)
    exact = reference.dropout(x, 0.25, 5, residual)
    wrong = {"the scale is left out": (0.75 * (exact - residual) + residual,)}
    return Case((exact,), (reference.dropout_bound(x, 0.25, 5, residual, dtype=dtype),), wrong)


CASES: dict[str, Callable[[str], Case]] = {
    **{make.__name__: make for make in (
        merge_attention, append_kv, normed_append_kv, normed_sum, gather, add_to,
        cross_entropy, cross_entropy_backward,
        linear_cross_entropy, linear_cross_entropy_backward, log_softmax, logsumexp,
        row_gradients, broadcast_sums, adamw_step, global_norm, gated, norm, norm_backward, rope,
        embedding_backward, dropout, matmul,
    )},
    **{kind: partial(activation, kind) for kind in ("gelu", "gelu_tanh", "silu")},
    **{f"integers of {bits} bits": partial(quantisation, bits) for bits in (8, 4)},
    **{
        f"{bound.__name__} of {bits} bits": partial(attention_of_integers, bits, bound)
        for bits, bound in (
            (8, stored_attention_bound), (4, stored_attention_bound),
            (8, dequantised_attention_bound),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_rounded_results_are_within_and_mistakes_beyond(name: str, dtype: str):
    exact, bounds, wrong, stored = CASES[name](dtype)
    dtypes = stored or (dtype,) * len(exact)
    rounded = [np.asarray(x).astype(kind) for x, kind in zip(exact, dtypes, strict=True)]
    assert max(map(error_ratio, rounded, exact, bounds)) <= 1
    found = {
        mistake: max(map(error_ratio, results, exact, bounds)) for mistake, results in wrong.items()
    }
    assert all(ratio > 1 for ratio in found.values()), found


def test_every_bound_is_tried():
    text = Path(__file__).read_text(encoding="utf-8")
    bounds = {name for name in dir(reference) if name.endswith("_bound")}
    assert {name for name in bounds if f"reference.{name}(" not in text} <= ELSEWHERE
