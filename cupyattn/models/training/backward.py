"""The backward of `cupyattn.models.forward`, with the same names, from the last line to the first.

Of the forward only the input of each layer is kept, L + 1 arrays (total, E). A layer is recomputed
before its gradients (Chen et al., "Training deep nets with sublinear memory cost",
arXiv:1604.06174) by the same calls, so with the same bits. d<name> is the gradient of the loss,
times the loss scale, with respect to <name>. Gradients of frozen products are not computed. The
gradient of a norm's weight is computed with its dx. All sums of gradients of hidden states are
computed where a product or the gradient of a norm is stored.

A product may have low-rank adapters. Attention is causal within each sample of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyattn import (
    AttentionGrads,
    DropoutGrads,
    LinearGrads,
    QuantizedWeight,
    attention_varlen,
    attention_varlen_backward,
    cross_entropy,
    cross_entropy_backward,
    dequantize,
    dropout,
    dropout_backward,
    embedding_backward,
    layer_norm_backward,
    linear,
    linear_backward,
    rms_norm,
    rms_norm_backward,
)
from cupyattn.models.forward import (
    SecondStream,
    activated,
    activation_backward,
    added,
    heads_of,
    heads_with_values,
    hidden_states,
    logit_chunks,
    loss_dtype,
    query_growth,
    rounded_to,
    sum_and_norm,
)
from cupyattn.models.training.batches import Batch
from cupyattn.models.transformer import Model
from cupyattn.models.weights import Layer, Norm, Product
from cupyattn.ops.linear.weight_formats import rows_apart
from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error


class ArrayPart(NamedTuple):
    """A part of one of the model's arrays: ``array[part] = scale * learnt``.

    `array` is the very array that the model's layers hold. `part` selects the shape of what is
    learnt. `scale` is a number, or an array with a factor for each row.
    """

    array: Array
    part: tuple[slice, ...]
    scale: float | Array = 1.0

    def fill(self, learnt: Array) -> None:
        """Write what was learnt there, rounded to the model's dtype."""
        with np.errstate(over="ignore"):
            scaled = learnt if self.is_whole else self.scale * learnt
            self.array[self.part] = scaled.astype(self.array.dtype, copy=False)

    @property
    def is_whole(self) -> bool:
        """Whether the scale is 1."""
        return isinstance(self.scale, float) and self.scale == 1


class Gradients:
    """Adds the gradients of a model's arrays to the gradients of the learnt arrays.

    A product rounds each to the model's dtype, and they are added in float32. An array without a
    part in `places` is not trained, and its gradient is ignored. `into` has the sums, which begin
    at 0 unless `accumulate` is set.
    """

    def __init__(
        self,
        places: Mapping[str, ArrayPart],
        learnt: Mapping[str, Array],
        into: Mapping[str, Array],
        accumulate: bool,
    ) -> None:
        self._parts: dict[int, list[tuple[ArrayPart, Array, Array]]] = {}
        for name, place in places.items():
            if not accumulate:
                into[name].fill(0)
            one = place, learnt[name], into[name]
            self._parts.setdefault(id(place.array), []).append(one)

    def wants(self, array: object) -> bool:
        """Tell whether an array of the model is trained."""
        return id(array) in self._parts

    def add(self, array: object, gradient: Array) -> None:
        """Add the gradient of one of the model's arrays: d array = scale * d learnt."""
        for place, _, into in self._parts.get(id(array), ()):
            found = gradient[place.part]
            if not place.is_whole or found.dtype.kind != "f":  # bfloat16 has another kind
                found = place.scale * found.astype(into.dtype)
            into += found

    def add_rows(self, table: Array, ids: Array, gradient: Array) -> None:
        """Add the gradient of ``embedding(table, ids)``, each row to the row of its id."""
        for _, learnt, into in self._parts.get(id(table), ()):
            dout = gradient.astype(into.dtype, copy=False)
            embedding_backward(dout, learnt, ids, grads=into, accumulate=True)


_AT_ONCE = 1 << 24  # numbers of a weight that are merged at a time, in float32


class AdaptedProduct(NamedTuple):
    """A `Product` with a frozen weight and LoRA adapters: ``x W^T + bias + D(x) A^T B^T``.

    Hu et al., "LoRA: low-rank adaptation of large language models", arXiv:2106.09685, equation 3,
    with dropout D before the adapters. Modules that are rows of one product, such as q, k and v,
    have their own adapters: `a` (R, K) has their matrices A one after the other, so that x is read
    once, and `b` (N, R) has their B, each times alpha / rank, as blocks, and 0 elsewhere. R is the
    sum of their ranks. They share a dropout mask. With activations "int8" only the product of the
    weight quantises x.
    """

    weight: Array | QuantizedWeight
    bias: Array | None
    a: Array
    b: Array
    dropout_p: float = 0.0
    seed: int | None = None
    activations: str | None = None

    def __call__(
        self,
        x: Array,
        /,
        *,
        activation: str | None = None,
        residual: Array | None = None,
        return_preactivation: bool = False,
    ) -> Any:
        """Return the product plus the adapters, with either an activation or a residual."""
        low = linear(self._dropped(x), self.a.T)
        added = linear(low, self.b.T, residual=residual)
        out = preactivation = linear(
            x, self.weight.T, self.bias, residual=added, activations=self.activations
        )
        del added
        if activation is not None:
            out = activated(preactivation, activation)
        return (out, preactivation) if return_preactivation else out

    def backward(
        self, dout: Array, x: Array, gradients: Gradients, residual: Array | None = None
    ) -> Array:
        """Return dx, plus a residual; the adapters' gradients are added to `gradients`.

        With u = D(x) A^T: du = dout B, dB = dout^T u, dA = du^T D(x), dx = dout W + D'(du A).
        """
        dropped = self._dropped(x)
        of_b = linear_backward(dout, linear(dropped, self.a.T), self.b.T)
        gradients.add(self.b, _present(of_b.dw).T)
        dx = frozen_backward(dout, x, self.weight, residual)
        if self.dropout_p:
            of_a = linear_backward(_present(of_b.dx), dropped, self.a.T)
            given = self.dropout_p, self.seed
            dropout_backward(_present(of_a.dx), *given, grads=DropoutGrads(dx), accumulate=True)
        else:
            grads = LinearGrads(dx=dx)
            of_a = linear_backward(_present(of_b.dx), x, self.a.T, grads=grads, accumulate=True)
        gradients.add(self.a, _present(of_a.dw).T)
        return dx

    def merged(
        self, xp: ModuleType, *, dtype: np.dtype | None = None, lengths: Array | None = None
    ) -> Product:
        """Return a product whose weight includes the adapters, rounded once.

        Its rows get these `lengths`, unless one is NaN. `dtype` is that of the adapters by default.
        """
        wide, kind = loss_dtype(self.a.dtype), self.a.dtype if dtype is None else dtype
        a, weight = self.a.astype(wide, copy=False), xp.empty(self.weight.shape, kind)
        step = max(1, _AT_ONCE // weight.shape[1])
        if isinstance(self.weight, QuantizedWeight):
            apart = rows_apart(self.weight.blocks, self.weight.inner)
            step = -(-step // apart) * apart
        for start in range(0, len(weight), step):
            rows = slice(start, start + step)
            old = self.weight[rows]
            old = dequantize(old) if isinstance(old, QuantizedWeight) else old
            added = linear(self.b[rows].astype(wide), a, residual=old.astype(wide, copy=False))
            if lengths is not None:
                norm = xp.sqrt((added * added).sum(axis=1))
                scale = lengths[rows] / xp.where(norm == 0, 1, norm)  # a row of zeros stays one
                added *= xp.where(xp.isnan(lengths[rows]), 1, scale)[:, None]
            with np.errstate(over="ignore"):
                weight[rows] = added.astype(weight.dtype, copy=False)
        return Product(weight, self.bias)

    def _dropped(self, x: Array) -> Array:
        return dropout(x, self.dropout_p, self.seed) if self.dropout_p else x


def adapted_already() -> NotImplementedError:
    """Make the error for a model that has adapters."""
    return error(
        NotImplementedError,
        "a model that has adapters",
        "only a model's own weights, or one LoraAdapters of it, can be trained",
        "pass the model without adapters, or the result of merged()",
    )


HeadArrays = tuple[Array, Array, Array]
"""The heads of q, k and v, as `cupyattn.models.forward.normed_heads` returns them."""


class SampleAttention:
    """Attention within the packed samples of a batch, with rotated q and k; an `Attend`."""

    def __init__(self, model: Model, batch: Batch) -> None:
        bounds, longest = batch.cu_seqlens, batch.max_seqlen
        self._model, self.config, self._xp = model.for_length(longest), model.config, model.xp
        self._lengths = bounds, bounds, longest, longest
        self._positions = batch.positions

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Return attention; see `cupyattn.models.forward.Attend`."""
        return attention_varlen(q, k, v, *self._lengths, **self._options(layer))

    def _options(self, layer: int) -> Keywords:
        rotary = self._model.rotary_of(layer)
        return {**self._model.attention_options(layer), "rotary": rotary}

    def growth(self, dtype: np.dtype) -> Array | None:
        """Return the factors of queries; see `cupyattn.models.forward.query_growth`."""
        return query_growth(self.config, self._positions, dtype)

    def with_lse(self, layer: int, heads: HeadArrays) -> tuple[Array, Array]:
        """Return attention (total, H D) and its log-sum-exp."""
        (q, k, v), options = heads, self._options(layer)
        out, lse = attention_varlen(q, k, v, *self._lengths, **options, return_lse=True)
        return out.reshape(len(out), -1), lse

    def backward(
        self, layer: int, dout: Array, heads: HeadArrays, out: Array, lse: Array, *, into: Array
    ) -> HeadArrays:
        """Return the gradients of the heads, with the same bits in every run.

        They are views of the gradient of qkv, `into`; where keys are the values too, that of v is a
        new array.
        """
        q, k, v = heads
        sizes = self.config.heads_of(layer)
        dq, dk, dv = heads_of(sizes, into)
        if sizes.keys_as_values:
            dv = self.empty_like(v)
        attention_varlen_backward(
            dout.reshape(q.shape), q, k, v, out.reshape(q.shape), lse,
            *self._lengths, **self._options(layer), deterministic=True,
            grads=AttentionGrads(dq, dk, dv),
        )  # fmt: skip
        return dq, dk, dv

    def empty_like(self, array: Array) -> Array:
        """Return an uninitialised array of the shape and dtype of another, in C order."""
        return self._xp.empty(array.shape, array.dtype)


_NO_OVERLAP = SecondStream(np)  # many rows fill a GPU, and memory is counted once


def loss_and_gradients(
    model: Model,
    batch: Batch,
    gradients: Gradients,
    /,
    *,
    num_labels: int,
    loss_scale: float | Array,
) -> Array:
    """Return the sum of the tokens' losses over `num_labels`, and add its gradients.

    `cupyattn.models.training.budget.working_bytes` computes the working set: the inputs of all
    layers, what one layer computes with its gradients, and before that a chunk of logits.
    """
    weights, xp = model.weights, model.xp
    attention = SampleAttention(model, batch)
    inputs = layer_inputs(model, batch, attention)
    x = inputs.pop()
    hidden, *statistics = weights.norm(x, return_stats=True)
    dloss = xp.full((), 1 / num_labels, loss_dtype(hidden.dtype)) * loss_scale
    given = batch.labels, dloss, gradients, xp, model.config.logit_softcap, weights.scales.head
    loss, dhidden = head_backward(weights.head, hidden, *given)
    del hidden
    dx = norm_backward(weights.norm, dhidden, x, statistics, None, gradients)
    del dhidden
    for index, layer in reversed(list(enumerate(weights.layers))):
        x = inputs.pop()
        backward = layer_backward if layer.mlp_norm is not None else parallel_layer_backward
        dx = backward(index, layer, x, dx, attention, gradients)
    if weights.positions is not None:
        gradients.add_rows(weights.positions, batch.positions, dx)
    if model.config.embedding_scale is not None:
        in_stream = weights.embedding.dtype != dx.dtype
        scale = model.config.embedding_scale
        dx *= scale if in_stream else rounded_to(dx.dtype, scale)
    gradients.add_rows(weights.embedding, batch.ids, dx)
    return loss / num_labels


def layer_inputs(model: Model, batch: Batch, attention: SampleAttention) -> list[Array]:
    """Return the input of each layer, and last the input of the norm after them."""
    states = hidden_states(
        model.config, model.weights, batch.ids, batch.positions, attention, _NO_OVERLAP
    )
    return list(islice(states, model.config.num_layers + 1))


def layer_backward(
    index: int,
    layer: Layer,
    x: Array,
    dx: Array,
    attention: SampleAttention,
    gradients: Gradients,
) -> Array:
    """Return the gradient of a layer's x from that of its result."""
    activation = attention.config.activation
    assert layer.mlp_norm is not None
    if layer.scalar is not None:
        dx *= layer.scalar
    normed, *statistics = layer.norm(x, return_stats=True)
    qkv = layer.qkv(normed)
    heads = kept_heads(attention, index, layer, qkv)
    attended, lse = attention.with_lse(index, heads)
    scales = layer.scales
    x_or_sum, term = added(layer.output, layer.output_norm, attended, x, scales.after_output)
    mlp_normed, middle, *mlp_statistics = sum_and_norm(
        layer.mlp_norm, x_or_sum, term, return_stats=True
    )
    del x_or_sum, term
    inner, preactivation = layer.up(mlp_normed, activation=activation, return_preactivation=True)

    ddown = added_backward(layer.down, layer.down_norm, dx, inner, scales.after_down, gradients)
    dinner = product_backward(layer.down, ddown, inner, gradients)
    del ddown, inner
    dup = activation_backward(dinner, preactivation, activation, into=preactivation)
    del dinner, preactivation
    dnormed = product_backward(layer.up, dup, mlp_normed, gradients)
    del dup, mlp_normed
    dmiddle = norm_backward(layer.mlp_norm, dnormed, middle, mlp_statistics, dx, gradients)
    del dnormed, middle, dx
    doutput = added_backward(
        layer.output, layer.output_norm, dmiddle, attended, scales.after_output, gradients
    )
    dattended = product_backward(layer.output, doutput, attended, gradients)
    del doutput
    dqkv = attention.empty_like(qkv)
    dheads = attention.backward(index, dattended, heads, attended, lse, into=dqkv)
    del dattended, attended, lse, heads
    heads_backward(attention, index, layer, dheads, qkv, gradients)
    del qkv, dheads
    dnormed = product_backward(layer.qkv, dqkv, normed, gradients)
    del dqkv, normed
    return norm_backward(layer.norm, dnormed, x, statistics, dmiddle, gradients)


def kept_heads(attention: SampleAttention, index: int, layer: Layer, qkv: Array) -> HeadArrays:
    """Return the result of `normed_heads`, in other arrays than qkv where it writes."""
    q, k, v = heads_with_values(attention.config.heads_of(index), layer, qkv)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    growth = attention.growth(q.dtype)
    return (q if growth is None else q * growth), k, v


def heads_backward(
    attention: SampleAttention,
    index: int,
    layer: Layer,
    dheads: HeadArrays,
    qkv: Array,
    gradients: Gradients,
) -> None:
    """Turn the gradients of the heads that attention saw into those of their rows of qkv.

    All are written in place, that of v into that of k where keys are the values too.
    """
    dq, dk, dv = dheads
    heads = attention.config.heads_of(index)
    q, k, v = heads_of(heads, qkv)
    growth = attention.growth(dq.dtype)
    if growth is not None:
        dq *= growth
    for norm, dnormed, x in ((layer.q_norm, dq, q), (layer.k_norm, dk, k)):
        if norm is not None:
            _, *statistics = norm(x, return_stats=True)
            dnormed[...] = norm_backward(norm, dnormed, x, statistics, None, gradients)
    if layer.v_eps is not None:
        _, rstd = rms_norm(v, eps=layer.v_eps, return_stats=True)
        dv[...] = _present(rms_norm_backward(dv, v, None, rstd).dx)
    if heads.keys_as_values:
        dk += dv


def added_backward(
    product: Product | AdaptedProduct,
    norm: Norm | None,
    dx: Array,
    given: Array,
    scale: Array | None,
    gradients: Gradients,
) -> Array:
    """Return the gradient of the product in `cupyattn.models.forward.added`."""
    dterm = term_backward(dx, scale, given.dtype)
    if norm is None:
        return dterm
    x = product(given)
    _, *statistics = norm(x, return_stats=True)
    return norm_backward(norm, dterm, x, statistics, None, gradients)


def term_backward(dx: Array, scale: float | Array | None, dtype: np.dtype) -> Array:
    """Return the gradient of a term of x, which `scale` multiplies, in its own dtype."""
    if dx.dtype == dtype:
        return dx
    with np.errstate(over="ignore"):  # infinite gradients lower the loss scale
        return (dx if scale is None else dx * scale).astype(dtype)


def parallel_layer_backward(
    index: int,
    layer: Layer,
    x: Array,
    dx: Array,
    attention: SampleAttention,
    gradients: Gradients,
) -> Array:
    """Return the gradient of x of a layer whose attention and MLP are parallel (Phi)."""
    activation, columns = attention.config.activation, len(layer.qkv.weight)
    normed, *statistics = layer.norm(x, return_stats=True)
    if layer.qkv_up is None:
        qkv = layer.qkv(normed)
        inner, up = layer.up(normed, activation=activation, return_preactivation=True)
        dqkv, dup = attention.empty_like(qkv), up
    else:
        both = layer.qkv_up(normed)
        qkv, up = both[:, :columns], both[:, columns:]
        inner = activated(up, activation)
        dboth = attention.empty_like(both)
        dqkv, dup = dboth[:, :columns], dboth[:, columns:]

    dterm = term_backward(dx, layer.scales.after_down, normed.dtype)
    dinner = product_backward(layer.down, dterm, inner, gradients)
    del inner
    activation_backward(dinner, up, activation, into=dup)
    del dinner
    heads = kept_heads(attention, index, layer, qkv)
    attended, lse = attention.with_lse(index, heads)
    dattended = product_backward(layer.output, dterm, attended, gradients)
    del dterm
    dheads = attention.backward(index, dattended, heads, attended, lse, into=dqkv)
    del dattended, attended, lse, heads
    heads_backward(attention, index, layer, dheads, qkv, gradients)
    del dheads
    if layer.qkv_up is None:
        dnormed = product_backward(layer.up, dup, normed, gradients)
        dnormed = product_backward(layer.qkv, dqkv, normed, gradients, residual=dnormed)
    else:
        dnormed = product_backward(layer.qkv_up, dboth, normed, gradients)
    return norm_backward(layer.norm, dnormed, x, statistics, dx, gradients)


def product_backward(
    product: Product | AdaptedProduct,
    dout: Array,
    x: Array,
    gradients: Gradients,
    *,
    residual: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Return the gradient of a product's x, plus a residual."""
    if isinstance(product, AdaptedProduct):
        return product.backward(dout, x, gradients, residual)
    if not gradients.wants(product.weight):
        return frozen_backward(dout, x, product.weight, residual, out)
    dx, dw, db = linear_backward(dout, x, product.weight.T, product.bias, grads=LinearGrads(dx=out))
    gradients.add(product.weight, _present(dw).T)
    if product.bias is not None:
        gradients.add(product.bias, _present(db))
    dx = _present(dx)
    if residual is not None:
        dx += residual
    return dx


def frozen_backward(
    dout: Array,
    x: Array,
    weight: Array | QuantizedWeight,
    residual: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Return the gradient of x for a weight (N, K) that is not trained, plus a residual."""
    if not isinstance(weight, QuantizedWeight) or weight.rotation is None:
        return linear(dout, weight, residual=residual, out=out)
    dx = _present(linear_backward(dout, x, weight.T, grads=LinearGrads(dx=out)).dx)
    if residual is not None:
        dx += residual
    return dx


def norm_backward(
    norm: Norm,
    dnormed: Array,
    x: Array,
    statistics: list[Array],
    dx: Array | None,
    gradients: Gradients,
) -> Array:
    """Return the gradient of a norm's x, plus `dx` from other readers of x."""
    if norm.bias is None:
        of_rms = rms_norm_backward(
            dnormed, x, norm.weight, *statistics, weight_offset=norm.offset, dtotal=dx
        )
        gradients.add(norm.weight, _present(of_rms.dweight))
        return _present(of_rms.dx)
    bias = norm.bias if gradients.wants(norm.bias) else None
    found = layer_norm_backward(dnormed, x, norm.weight, *statistics, bias=bias, dtotal=dx)
    gradients.add(norm.weight, _present(found.dweight))
    if found.dbias is not None:
        gradients.add(norm.bias, found.dbias)
    return _present(found.dx)


def _present(gradient: Array | None) -> Array:
    """Return a gradient that was requested."""
    assert gradient is not None
    return gradient


def head_backward(
    head: Product, hidden: Array, labels: Array, dloss: Array, gradients: Gradients, xp: ModuleType,
    softcap: float | None, scale: float,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the sum of all losses, and dhidden, for the gradient `dloss` of each loss.

    The gradient of a chunk of logits is written over them.
    """
    total, dhidden = xp.zeros((), dloss.dtype), xp.empty_like(hidden)
    for rows, logits in logit_chunks(head, hidden, xp, softcap, scale):
        loss, lse = cross_entropy(logits, labels[rows], reduction="sum", return_lse=True)
        total += loss
        slope = None if softcap is None else 1 - (logits / softcap) ** 2
        dlogits = cross_entropy_backward(
            dloss, logits, labels[rows], lse, reduction="sum", dlogits=logits
        )
        if slope is not None:
            dlogits *= slope
        dlogits = term_backward(dlogits, 1 / scale, hidden.dtype)
        product_backward(head, dlogits, hidden[rows], gradients, out=dhidden[rows])
    return total, dhidden
