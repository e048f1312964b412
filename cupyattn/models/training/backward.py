"""The backward of `cupyattn.models.forward`: the same names, from the last line to the first.

Of the forward only what goes into each layer is kept, L + 1 arrays (total, E). A layer is computed
again before its gradients are (Chen et al., "Training deep nets with sublinear memory cost",
arXiv:1604.06174), by the same calls, so with the same bits. What is called d<name> is the gradient
of the loss, times the loss scale, with respect to <name>. Gradients of frozen products are not
computed; those of a norm's weight come with its dx. All sums of hidden states' gradients are made
where a product or a norm's gradient is stored.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from cupyattn import (
    LinearGrads,
    cross_entropy,
    cross_entropy_backward,
    layer_norm_backward,
    linear,
    linear_backward,
    rms_norm_backward,
)
from cupyattn.models.activations import activated, activation_backward
from cupyattn.models.beside import Beside
from cupyattn.models.forward import hidden_states
from cupyattn.models.loss import logit_chunks, loss_dtype
from cupyattn.models.training.adapted_product import AdaptedProduct
from cupyattn.models.training.batch import Batch
from cupyattn.models.training.places import Gradients
from cupyattn.models.training.sample_attention import SampleAttention
from cupyattn.models.transformer import Model
from cupyattn.models.weights import Layer, Norm, Product
from cupyattn.runtime.arrays import Array

_ONE_AFTER_THE_OTHER = Beside(np)  # many rows fill a GPU, and memory is counted once


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

    Notes
    -----
    The working set, beside weights and gradients: the inputs of all layers, once more what one
    layer computes, with the gradients of that, and before it a chunk of logits.
    `cupyattn.models.training.memory.working_bytes` says how many bytes that is.
    """
    weights, xp = model.weights, model.xp
    attention = SampleAttention(model, batch)
    inputs = layer_inputs(model, batch, attention)
    x = inputs.pop()
    hidden, *statistics = weights.norm(x, return_stats=True)
    dloss = xp.full((), 1 / num_labels, loss_dtype(hidden.dtype)) * loss_scale
    loss, dhidden = head_backward(weights.head, hidden, batch.labels, dloss, gradients, xp)
    del hidden
    dx = norm_backward(weights.norm, dhidden, x, statistics, None, gradients)
    del dhidden
    for layer in reversed(weights.layers):
        x = inputs.pop()
        if layer.mlp_norm is None:
            dx = parallel_layer_backward(layer, x, dx, attention, gradients)
        else:
            dx = layer_backward(layer, x, dx, attention, gradients)
    gradients.add_rows(weights.embedding, batch.ids, dx)
    if weights.positions is not None:
        gradients.add_rows(weights.positions, batch.positions, dx)
    return loss / num_labels


def layer_inputs(model: Model, batch: Batch, attention: SampleAttention) -> list[Array]:
    """Return what goes into each layer, and at last what goes into the norm behind them."""
    states = hidden_states(
        model.config, model.weights, batch.ids, batch.positions, attention, _ONE_AFTER_THE_OTHER
    )
    return list(islice(states, model.config.num_layers + 1))


def layer_backward(
    layer: Layer, x: Array, dx: Array, attention: SampleAttention, gradients: Gradients
) -> Array:
    """Return the gradient of a layer's x from that of its result."""
    activation = attention.config.activation
    assert layer.mlp_norm is not None
    normed, *statistics = layer.norm(x, return_stats=True)
    qkv = layer.qkv(normed)
    attended, lse = attention.with_lse(qkv)
    middle = layer.output(attended, residual=x)
    mlp_normed, *mlp_statistics = layer.mlp_norm(middle, return_stats=True)
    inner, preactivation = layer.up(mlp_normed, activation=activation, return_preactivation=True)

    dinner = product_backward(layer.down, dx, inner, gradients)
    del inner
    dup = activation_backward(dinner, preactivation, activation, into=preactivation)
    del dinner, preactivation
    dnormed = product_backward(layer.up, dup, mlp_normed, gradients)
    del dup, mlp_normed
    dmiddle = norm_backward(layer.mlp_norm, dnormed, middle, mlp_statistics, dx, gradients)
    del dnormed, middle, dx
    dattended = product_backward(layer.output, dmiddle, attended, gradients)
    dqkv = attention.backward(dattended, qkv, attended, lse, into=attention.empty_like(qkv))
    del dattended, attended, lse, qkv
    dnormed = product_backward(layer.qkv, dqkv, normed, gradients)
    del dqkv, normed
    return norm_backward(layer.norm, dnormed, x, statistics, dmiddle, gradients)


def parallel_layer_backward(
    layer: Layer, x: Array, dx: Array, attention: SampleAttention, gradients: Gradients
) -> Array:
    """Return that of a layer whose attention and MLP read the same (Phi)."""
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

    dinner = product_backward(layer.down, dx, inner, gradients)
    del inner
    activation_backward(dinner, up, activation, into=dup)
    del dinner
    attended, lse = attention.with_lse(qkv)
    dattended = product_backward(layer.output, dx, attended, gradients)
    attention.backward(dattended, qkv, attended, lse, into=dqkv)
    del dattended, attended, lse
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
        return linear(dout, product.weight, residual=residual, out=out)
    dx, dw, db = linear_backward(dout, x, product.weight.T, product.bias, grads=LinearGrads(dx=out))
    gradients.add(product.weight, dw.T)
    if product.bias is not None:
        gradients.add(product.bias, db)
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
    """Return the gradient of a norm's x, plus the dx of those that read x beside it."""
    if norm.bias is None:
        of_rms = rms_norm_backward(dnormed, x, norm.weight, *statistics, dtotal=dx)
        gradients.add(norm.weight, of_rms.dweight)
        return of_rms.dx
    bias = norm.bias if gradients.wants(norm.bias) else None
    found = layer_norm_backward(dnormed, x, norm.weight, *statistics, bias=bias, dtotal=dx)
    gradients.add(norm.weight, found.dweight)
    gradients.add(norm.bias, found.dbias)
    return found.dx


def head_backward(
    head: Product, hidden: Array, labels: Array, dloss: Array, gradients: Gradients, xp: Any
) -> tuple[Array, Array]:
    """Return the sum of all losses, and dhidden, where each loss has the gradient dloss.

    The logits of a chunk become their gradient where they are: they are computed once.
    """
    total, dhidden = xp.zeros((), dloss.dtype), xp.empty_like(hidden)
    for rows, logits in logit_chunks(head, hidden, xp):
        loss, lse = cross_entropy(logits, labels[rows], reduction="sum", return_lse=True)
        total += loss
        dlogits = cross_entropy_backward(
            dloss, logits, labels[rows], lse, reduction="sum", dlogits=logits
        )
        product_backward(head, dlogits, hidden[rows], gradients, out=dhidden[rows])
    return total, dhidden
