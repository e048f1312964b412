"""The expected result and the error bound of each function, from the reference and its bounds."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

import cupyattn
from cupyattn import reference
from cupyattn.ops.activations import bounds as elements
from cupyattn.ops.attention.bounds import cpu_attention_bound
from cupyattn.ops.attention.choice import MAX_QUERIES
from cupyattn.ops.attention.modifiers import arrays_of, python_function
from cupyattn.ops.attention.reference.paged import gathered
from cupyattn.ops.attention.reference.quantised import (
    dequantised_attention_bound,
    stored_attention_bound,
)
from cupyattn.ops.attention.reference.varlen import score_index, sequences
from cupyattn.ops.linear import bounds as products
from cupyattn.ops.norms.reference import rounded_sum
from cupyattn.runtime.errors import error
from cupyattn.testing.arrays import BoundOf, ExpectedResult, NumpyArray, Rule, first_or_all

TILE_KEYS = 16
"""Keys of the shortest tile of any kernel, which gives a bound for all kernels."""
_TINY = float(np.finfo(np.float32).tiny)


def _score_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of attention as the reference takes them."""
    taken = {name: value for name, value in options.items() if value is not None}
    if "score_mod" in taken:
        raise error(
            NotImplementedError,
            "score_mod",
            "there are no bounds for scores that an expression changes",
            "compare with options that have the same effect, or derive a bound of your own",
        )
    mask_mod = taken.get("mask_mod")
    if mask_mod is not None:
        given: Any = SimpleNamespace(**arrays_of("mask_mod", mask_mod))
        taken["mask_mod"] = python_function("mask_mod", mask_mod, given)
    seed = taken.get("seed")
    if isinstance(seed, cupyattn.DropoutSeed):
        taken |= {"seed": seed.seed, "dropout_start": seed[1:]}
    return taken


def _kernels_attention(
    *arrays: NumpyArray, teaching: bool, **options: Any
) -> tuple[NumpyArray, NumpyArray]:
    how: Any = {"dtype": _dtype_of(*arrays), "tile_k": TILE_KEYS, "native": True}  # for every GPU
    return reference.attention_bound(*arrays, float32_weights=teaching, **how, **options)


def _numpys_attention(
    *arrays: NumpyArray, teaching: bool, **options: Any
) -> tuple[NumpyArray, NumpyArray]:
    return cpu_attention_bound(*arrays, dtype=_dtype_of(*arrays), **options)


def _dtype_of(q: NumpyArray, k: NumpyArray, v: NumpyArray) -> np.dtype[Any]:
    """Return the dtype of a call: with int8 keys q is in float64, from a cache of integers v is."""
    return v.dtype if q.dtype == np.float64 else q.dtype


def _attention(
    *arrays: NumpyArray,
    bound_of: BoundOf = _kernels_attention,
    return_lse: bool = False,
    implementation: str = "flash",
    **given: Any,
) -> ExpectedResult:
    options = _score_options(given)
    q, k, v = arrays
    if implementation == "int8" or isinstance(k, cupyattn.QuantizedKeys):
        options.setdefault("softmax_scale", q.shape[-1] ** -0.5)
        q, k = _int8_operands(q, k, seqused_k=options.get("seqused_k"))
        implementation = "flash"
    bounds = bound_of(q, k, v, teaching=implementation != "flash", **options)
    return first_or_all(reference.attention(q, k, v, **options), bounds, return_lse)


def _int8_operands(
    q: NumpyArray, k: Any, *bounds: NumpyArray, seqused_k: NumpyArray | None = None
) -> tuple[NumpyArray, NumpyArray]:
    """Return q and k of twice the head dim, whose products are those of int8 keys."""
    with cupyattn.backend("reference"):
        given = isinstance(k, cupyattn.QuantizedKeys)
        keys = k if given else cupyattn.quantize_keys(k, seqused_k=seqused_k)
    pieces: Any = keys.codes, keys.scales, keys.centre, *bounds
    return reference.quantised_operands(q, *pieces)


def _attention_backward(
    *arrays: NumpyArray, implementation: str = "flash", deterministic: bool = False, **given: Any
) -> ExpectedResult:
    options = _score_options(given)
    dout, q, k, v, out, lse = arrays
    bounds = reference.attention_backward_bound(
        *(dout, q, k, v, out, lse),
        dtype=q.dtype,
        float32_weights=implementation == "naive",
        native=True,
        **options,
    )
    return ExpectedResult(reference.attention_backward(dout, q, k, v, out, lse, **options), bounds)


def _attention_varlen(
    *arrays: Any,
    bound_of: BoundOf = _kernels_attention,
    return_lse: bool = False,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    **given: Any,
) -> ExpectedResult:
    options = _score_options(given)
    q, k, v, cu_seqlens_q, cu_seqlens_k = arrays[:5]
    if isinstance(k, cupyattn.QuantizedKeys):
        options.setdefault("softmax_scale", q.shape[-1] ** -0.5)
        q, k = _int8_operands(q, k, cu_seqlens_k)
    out, lse = reference.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    bounds = np.full(out.shape, np.inf), np.full(lse.shape, np.inf)
    for rows, keys, own in sequences(cu_seqlens_q, cu_seqlens_k, options):
        errors = bound_of(q[None, rows], k[None, keys], v[None, keys], teaching=False, **own)
        bounds[0][rows], bounds[1][:, rows] = errors[0][0], errors[1][0]
    others = _rows_of_no_sequence(cu_seqlens_q, len(out))
    out[others], lse[:, others] = np.nan, np.nan
    return first_or_all((out, lse), bounds, return_lse)


def _rows_of_no_sequence(cu_seqlens: NumpyArray, total: int) -> NumpyArray:
    rows = np.arange(total)
    return (rows < cu_seqlens[0]) | (rows >= cu_seqlens[-1])


def _attention_varlen_backward(
    *arrays: Any,
    dlse: NumpyArray | None = None,
    deterministic: bool = False,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    **given: Any,
) -> ExpectedResult:
    options = _score_options(given)
    dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = arrays[:8]
    exact = reference.attention_varlen_backward(*arrays[:8], dlse=dlse, **options)
    bounds = {
        name: np.full(gradient.shape, np.inf)
        if name in ("dq", "dk", "dv")
        else np.full(gradient.shape, _TINY)  # items that no sequence has are 0
        for name, gradient in exact._asdict().items()
        if gradient is not None
    }
    for b, (rows, keys, own) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k, options)):
        errors = reference.attention_backward_bound(
            *(dout[None, rows], q[None, rows], k[None, keys], v[None, keys], out[None, rows]),
            lse[None, :, rows],
            dtype=q.dtype,
            dlse=None if dlse is None else dlse[None, :, rows],
            native=True,
            **own,
        )
        for name, place in (("dq", rows), ("dk", keys), ("dv", keys)):
            bounds[name][place] = getattr(errors, name)[0]
        if "dbias" in bounds:
            lengths = rows.stop - rows.start, keys.stop - keys.start
            bounds["dbias"][score_index(bounds["dbias"].shape, b, *lengths)] += errors.dbias
        if "dsinks" in bounds:
            bounds["dsinks"] += errors.dsinks
    for name, cu_seqlens in (("dq", cu_seqlens_q), ("dk", cu_seqlens_k), ("dv", cu_seqlens_k)):
        gradient = getattr(exact, name)
        gradient[_rows_of_no_sequence(cu_seqlens, len(gradient))] = np.nan
    return ExpectedResult(exact, cupyattn.AttentionGrads(**bounds))


def _paged_attention(
    *arrays: NumpyArray,
    bound_of: BoundOf = _kernels_attention,
    return_lse: bool = False,
    cu_seqlens_q: NumpyArray | None = None,
    max_seqlen_q: int = 1,
    **given: Any,
) -> ExpectedResult:
    options = {name: value for name, value in given.items() if value is not None}
    of_cache = partial(_paged_bound, bound_of)
    results = reference.paged_attention(*arrays, cu_seqlens_q=cu_seqlens_q, **options)
    q, *cache = arrays
    if cu_seqlens_q is None:
        few = q.shape[1] <= MAX_QUERIES
        return first_or_all(results, of_cache(q, *cache, few=few, **options), return_lse)
    out, lse = results
    bounds = np.full(out.shape, np.inf), np.full(lse.shape, np.inf)
    k_cache, v_cache, table, lengths = cache
    slopes = options.get("alibi_slopes")
    for b, (begin, end) in enumerate(pairwise(cu_seqlens_q)):
        if begin == end:  # its table may have nothing
            continue
        own, rows = slice(b, b + 1), slice(begin, end)
        if slopes is not None and slopes.ndim == 2:
            options["alibi_slopes"] = slopes[own]
        errors = of_cache(
            q[None, rows], k_cache, v_cache, table[own], lengths[own], few=False, **options
        )
        bounds[0][rows], bounds[1][:, rows] = errors[0][0], errors[1][0]
    others = _rows_of_no_sequence(cu_seqlens_q, len(out))
    out[others], lse[:, others] = np.nan, np.nan
    return first_or_all(results, bounds, return_lse)


def _paged_bound(
    bound_of: BoundOf,
    q: NumpyArray,
    k_cache: NumpyArray,
    v_cache: NumpyArray,
    table: NumpyArray,
    lengths: NumpyArray,
    *,
    few: bool,
    k_scales: NumpyArray | None = None,
    v_scales: NumpyArray | None = None,
    **options: Any,
) -> tuple[NumpyArray, NumpyArray]:
    options["seqused_k"] = lengths
    k = gathered(k_cache, table, lengths, k_scales)
    v = gathered(v_cache, table, lengths, v_scales)
    bounds: tuple[NumpyArray, NumpyArray] = bound_of(q, k, v, teaching=False, **options)
    if k_scales is None or v_scales is None:
        return bounds
    stored = (gathered(each, table, lengths) for each in (k_cache, v_cache, k_scales, v_scales))
    bound_of = stored_attention_bound if few else dequantised_attention_bound
    more = bound_of(q, *stored, **options)
    return bounds[0] + more[0], bounds[1] + more[1]


def _merge_attention(*arrays: NumpyArray) -> ExpectedResult:
    out_a, lse_a, out_b, lse_b = arrays
    bounds = reference.merge_attention_bound(out_a, lse_a, out_b, lse_b)
    return ExpectedResult(reference.merge_attention(out_a, lse_a, out_b, lse_b), bounds)


def _exact(array: Any) -> Any:
    """Return an array in float64; what is quantised as it is."""
    kept: Any = type(None) | cupyattn.QuantizedWeight | cupyattn.QuantizedRows
    return array if isinstance(array, kept) else array.astype(np.float64)


def _linear(
    x: NumpyArray,
    w: Any,
    b: NumpyArray | None = None,
    *,
    bound_of: BoundOf = reference.linear_bound,
    residual: NumpyArray | None = None,
    activation: str | None = None,
    activations: str | None = None,
    return_preactivation: bool = False,
) -> ExpectedResult:
    arrays = x, w, b, residual
    options: dict[str, Any] = {"activation": activation, "activations": activations}
    results = reference.linear(*map(_exact, arrays), **options)
    bounds = bound_of(*arrays, **options, dtype=x.dtype)
    if activations and not isinstance(x, cupyattn.QuantizedRows):  # a GPU may multiply floats
        floats = reference.linear(*map(_exact, arrays), activation=activation)
        others = bound_of(*arrays, activation=activation, dtype=x.dtype)
        for error, result, other, more in zip(bounds, results, floats, others, strict=True):
            error += abs(result - other) + more
    if activation is None:
        return first_or_all((results[0], None), (bounds[0], None), return_preactivation)
    return first_or_all(results, bounds, return_preactivation)


def _linear_backward(
    *arrays: Any,
    bound_of: BoundOf = reference.linear_backward_bound,
    preactivation: NumpyArray | None = None,
    **options: Any,
) -> ExpectedResult:
    exact = reference.linear_backward(
        *map(_exact, arrays), preactivation=_exact(preactivation), **options
    )
    bounds = bound_of(*arrays, preactivation=preactivation, dtype=arrays[1].dtype, **options)
    return ExpectedResult(exact, bounds)


def _matmul(a: Any, b: Any, bound_of: BoundOf = reference.matmul_bound) -> ExpectedResult:
    return ExpectedResult(reference.matmul(a, b), bound_of(a, b, dtype=a.dtype))


def _with_gelu(rule: Rule) -> Rule:
    def named(*arrays: Any, approximate: str = "tanh", **options: Any) -> ExpectedResult:
        return rule(*arrays, activation=_gelu_kind(approximate), **options)

    return named


def _gelu_kind(approximate: str) -> str:
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def _softmax_rule(name: str) -> Rule:
    def rule(x: NumpyArray, *, axis: int = -1, **options: Any) -> ExpectedResult:
        rows = np.moveaxis(x, axis, -1)
        limit = getattr(reference, f"{name}_bound")
        result = getattr(reference, name)(rows, **options)
        if name == "logsumexp":
            return ExpectedResult(result, limit(rows, **options))
        both = result, limit(rows, dtype=x.dtype, **options)
        return ExpectedResult(*(np.moveaxis(each, -1, axis) for each in both))

    return rule


def _softmax_backward_rule(name: str) -> Rule:
    gradient = getattr(reference, f"{name}_backward")
    limit = getattr(reference, f"{name}_backward_bound")

    def rule(
        dout: NumpyArray,
        out: NumpyArray,
        *,
        axis: int = -1,
        scale: float = 1.0,
        bias: NumpyArray | None = None,
    ) -> ExpectedResult:
        rows = np.moveaxis(dout, axis, -1), np.moveaxis(out, axis, -1)
        dx = np.moveaxis(gradient(*rows, scale=scale), -1, axis)
        dx_bound = np.moveaxis(limit(*rows, scale=scale, dtype=out.dtype), -1, axis)
        if bias is None:
            return ExpectedResult(dx, dx_bound)
        ds, terms = gradient(dout, out), limit(dout, out, dtype="float32")
        dbias = reference.broadcast_sums(ds, bias.shape)
        dbias_bound = reference.broadcast_sums_bound(ds, terms, bias.shape, dtype=bias.dtype)
        grads = cupyattn.SoftmaxGrads
        return ExpectedResult(grads(dx, dbias), grads(dx_bound, dbias_bound))

    return rule


def _logsumexp_backward(
    dout: NumpyArray, x: NumpyArray, out: NumpyArray, *, axis: int = -1, **options: Any
) -> ExpectedResult:
    arrays = dout, np.moveaxis(x, axis, -1), out
    dx = reference.logsumexp_backward(*arrays, **options)
    limit = reference.logsumexp_backward_bound(*arrays, dtype=x.dtype, **options)
    return ExpectedResult(np.moveaxis(dx, -1, axis), np.moveaxis(limit, -1, axis))


def _norm(
    x: NumpyArray,
    weight: NumpyArray | None,
    bias: NumpyArray | None,
    residual: NumpyArray | None,
    return_stats: bool,
    **options: Any,
) -> ExpectedResult:
    options["eps"] = float(np.float32(options["eps"]))  # kernels take a float32
    total = x if residual is None else rounded_sum(x, residual)
    out, _, mean, rstd = reference.norm(total, None, weight, bias, **options)
    limits = reference.norm_bound(total, weight, bias, dtype=x.dtype, **options)
    results, bounds = [out], [limits[0]]
    if residual is not None:
        results, bounds = [*results, total], [*bounds, np.zeros(total.shape)]
    if return_stats and options["centred"]:
        results, bounds = [*results, mean], [*bounds, limits[1]]
    if return_stats:
        results, bounds = [*results, rstd], [*bounds, limits[2]]
    return first_or_all(results, bounds, residual is not None or return_stats)


def _layer_norm(
    x: NumpyArray,
    weight: NumpyArray | None = None,
    bias: NumpyArray | None = None,
    *,
    residual: NumpyArray | None = None,
    eps: float = 1e-5,
    return_stats: bool = False,
) -> ExpectedResult:
    return _norm(x, weight, bias, residual, return_stats, centred=True, eps=eps)


def _rms_norm(
    x: NumpyArray,
    weight: NumpyArray | None = None,
    *,
    residual: NumpyArray | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    return_stats: bool = False,
) -> ExpectedResult:
    offset = {"weight_offset": weight_offset}
    return _norm(x, weight, None, residual, return_stats, centred=False, eps=eps, **offset)


def _layer_norm_backward(
    dout: NumpyArray,
    x: NumpyArray,
    weight: NumpyArray | None,
    mean: NumpyArray,
    rstd: NumpyArray,
    *,
    bias: NumpyArray | None = None,
    dtotal: NumpyArray | None = None,
) -> ExpectedResult:
    arrays = dout, x, dtotal, weight, bias, mean, rstd
    grads = cupyattn.LayerNormGrads
    limits = reference.norm_backward_bound(*arrays, dtype=x.dtype)
    return ExpectedResult(grads(*reference.norm_backward(*arrays)), grads(*limits))


def _rms_norm_backward(
    dout: NumpyArray,
    x: NumpyArray,
    weight: NumpyArray | None,
    rstd: NumpyArray,
    *,
    weight_offset: float = 0.0,
    dtotal: NumpyArray | None = None,
) -> ExpectedResult:
    arrays = dout, x, dtotal, weight, None, None, rstd
    exact = reference.norm_backward(*arrays, weight_offset=weight_offset)
    limits = reference.norm_backward_bound(*arrays, dtype=x.dtype, weight_offset=weight_offset)
    grads = cupyattn.RMSNormGrads
    return ExpectedResult(grads(*exact[:2]), grads(*limits[:2]))


def _activation_rule(kind: str | None, bound_of: BoundOf) -> Rule:
    def rule(x: NumpyArray, *, approximate: str = "none") -> ExpectedResult:
        chosen = kind or _gelu_kind(approximate)
        return ExpectedResult(reference.activation(x, chosen), bound_of(x, chosen, dtype=x.dtype))

    return rule


def _activation_backward_rule(kind: str | None, bound_of: BoundOf) -> Rule:
    def rule(dout: NumpyArray, x: NumpyArray, *, approximate: str = "none") -> ExpectedResult:
        arguments = dout, x, kind or _gelu_kind(approximate)
        exact = reference.activation_backward(*arguments)
        return ExpectedResult(exact, bound_of(*arguments, dtype=x.dtype))

    return rule


def _gated_rule(kind: str | None, bound_of: BoundOf) -> Rule:
    def rule(
        gate: NumpyArray, up: NumpyArray | None = None, *, approximate: str = "none"
    ) -> ExpectedResult:
        gate, up = np.split(gate, 2, axis=-1) if up is None else (gate, up)
        arguments = gate, up, kind or _gelu_kind(approximate)
        return ExpectedResult(reference.gated(*arguments), bound_of(*arguments, dtype=gate.dtype))

    return rule


def _gated_backward_rule(kind: str | None, bound_of: BoundOf) -> Rule:
    def rule(
        dout: NumpyArray,
        gate: NumpyArray,
        up: NumpyArray | None = None,
        *,
        approximate: str = "none",
    ) -> ExpectedResult:
        packed = up is None
        gate, up = np.split(gate, 2, axis=-1) if up is None else (gate, up)
        arguments = dout, gate, up, kind or _gelu_kind(approximate)
        both = reference.gated_backward(*arguments), bound_of(*arguments, dtype=gate.dtype)
        grads = cupyattn.GatedGrads
        return ExpectedResult(
            *(grads(np.concatenate(each, axis=-1)) if packed else grads(*each) for each in both)
        )

    return rule


def _dropout(
    x: NumpyArray, p: float, seed: int | None, *, residual: NumpyArray | None = None
) -> ExpectedResult:
    chosen = 0 if seed is None else seed  # p is 0 then
    limit = reference.dropout_bound(x, p, chosen, residual, dtype=x.dtype)
    return ExpectedResult(reference.dropout(x, p, chosen, residual), limit)


def _rope(
    x: Any,
    cos: NumpyArray,
    sin: NumpyArray,
    *,
    positions: NumpyArray | None = None,
    interleaved: bool = False,
    inverse: bool = False,
) -> ExpectedResult:
    if isinstance(x, tuple):
        options = {"positions": positions, "interleaved": interleaved, "inverse": inverse}
        each = [_rope(array, cos, sin, **options) for array in x]  # type: ignore[arg-type]
        return ExpectedResult(*map(tuple, zip(*each, strict=True)))
    at = np.arange(x.shape[1]) if positions is None else positions
    arrays = x, cos, -sin if inverse else sin, at
    limit = reference.rope_bound(*arrays, dtype=x.dtype, interleaved=interleaved)
    return ExpectedResult(reference.rope(*arrays, interleaved=interleaved), limit)


def _rope_backward(*arrays: Any, inverse: bool = False, **options: Any) -> ExpectedResult:
    return _rope(*arrays, inverse=not inverse, **options)


def _embedding(table: NumpyArray, ids: NumpyArray) -> ExpectedResult:
    result = reference.embedding(table, ids)
    return ExpectedResult(result, np.zeros(result.shape))


def _embedding_backward(dout: NumpyArray, table: NumpyArray, ids: NumpyArray) -> ExpectedResult:
    arrays = dout, len(table), ids
    limit = reference.embedding_backward_bound(*arrays, dtype=table.dtype)
    return ExpectedResult(reference.embedding_backward(*arrays), limit)


def _cross_entropy(
    logits: NumpyArray, labels: NumpyArray, *, return_lse: bool = False, **options: Any
) -> ExpectedResult:
    bounds = reference.cross_entropy_bound(logits, labels, **options)
    return first_or_all(reference.cross_entropy(logits, labels, **options), bounds, return_lse)


def _cross_entropy_backward(*arrays: NumpyArray, **options: Any) -> ExpectedResult:
    limit = reference.cross_entropy_backward_bound(*arrays, dtype=arrays[1].dtype, **options)
    return ExpectedResult(reference.cross_entropy_backward(*arrays, **options), limit)


RULES: dict[str, Rule] = {
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_varlen": _attention_varlen,
    "attention_varlen_backward": _attention_varlen_backward,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _cross_entropy_backward,
    "dropout": _dropout,
    "embedding": _embedding,
    "embedding_backward": _embedding_backward,
    "geglu": _gated_rule(None, reference.gated_bound),
    "geglu_backward": _gated_backward_rule(None, reference.gated_backward_bound),
    "gelu": _activation_rule(None, reference.activation_bound),
    "gelu_backward": _activation_backward_rule(None, reference.activation_backward_bound),
    "layer_norm": _layer_norm,
    "layer_norm_backward": _layer_norm_backward,
    "linear": _linear,
    "linear_backward": _linear_backward,
    "linear_gelu": _with_gelu(_linear),
    "linear_gelu_backward": _with_gelu(_linear_backward),
    "log_softmax": _softmax_rule("log_softmax"),
    "log_softmax_backward": _softmax_backward_rule("log_softmax"),
    "logsumexp": _softmax_rule("logsumexp"),
    "logsumexp_backward": _logsumexp_backward,
    "matmul": _matmul,
    "merge_attention": _merge_attention,
    "paged_attention": _paged_attention,
    "rms_norm": _rms_norm,
    "rms_norm_backward": _rms_norm_backward,
    "rope": _rope,
    "rope_backward": _rope_backward,
    "silu": _activation_rule("silu", reference.activation_bound),
    "silu_backward": _activation_backward_rule("silu", reference.activation_backward_bound),
    "softmax": _softmax_rule("softmax"),
    "softmax_backward": _softmax_backward_rule("softmax"),
    "swiglu": _gated_rule("silu", reference.gated_bound),
    "swiglu_backward": _gated_backward_rule("silu", reference.gated_backward_bound),
}
"""The rule of each function, by its name: the bounds of kernels."""
NUMPY_RULES: dict[str, Rule] = {
    "attention": partial(_attention, bound_of=_numpys_attention),
    "attention_varlen": partial(_attention_varlen, bound_of=_numpys_attention),
    "paged_attention": partial(_paged_attention, bound_of=_numpys_attention),
    "linear": partial(_linear, bound_of=products.cpu_linear_bound),
    "linear_backward": partial(_linear_backward, bound_of=products.cpu_linear_backward_bound),
    "linear_gelu": _with_gelu(partial(_linear, bound_of=products.cpu_linear_bound)),
    "linear_gelu_backward": _with_gelu(
        partial(_linear_backward, bound_of=products.cpu_linear_backward_bound)
    ),
    "matmul": partial(_matmul, bound_of=products.cpu_matmul_bound),
    "gelu": _activation_rule(None, elements.cpu_activation_bound),
    "gelu_backward": _activation_backward_rule(None, elements.cpu_activation_backward_bound),
    "silu": _activation_rule("silu", elements.cpu_activation_bound),
    "silu_backward": _activation_backward_rule("silu", elements.cpu_activation_backward_bound),
    "geglu": _gated_rule(None, elements.cpu_gated_bound),
    "geglu_backward": _gated_backward_rule(None, elements.cpu_gated_backward_bound),
    "swiglu": _gated_rule("silu", elements.cpu_gated_bound),
    "swiglu_backward": _gated_backward_rule("silu", elements.cpu_gated_backward_bound),
}
"""The rules of functions that NumPy computes in float32, where no kernel runs."""
