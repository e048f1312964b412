"""The forward of GPT-2, Llama and Phi-2: what they share, and the two places where they differ.

With x the hidden states of all tokens, a row each, a layer of GPT-2 and of Llama is

    x = x + output(attention(norm(x)))
    x = x + down(activation(up(mlp_norm(x))))

and a layer of Phi-2, where attention and the MLP stand side by side, as in GPT-J,

    h = norm(x)
    x = x + down(activation(up(h))) + output(attention(h))

GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019) adds a learned
row for each position to the embedding, its norms are layer norms, its activation is gelu. Llama
(Touvron et al., arXiv:2302.13971) has rotary positions, RMS norms and silu(gate) * up, which is the
activation "swiglu" of one product. Phi-2 (Javaheripi and Bubeck, "Phi-2: the surprising power of
small language models", 2023) rotates the first features of a head only, and has layer norms. All
of that is in the weights and the config: a norm with a bias is a layer norm.

Each line below is one kernel, and the sums are made where a product is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cupyattn import embedding
from cupyattn.arrays import Array
from cupyattn.models.config import Config
from cupyattn.models.weights import Layer, Weights

Attend = Callable[[int, Array, Array, Array], Array]
"""``attend(layer, q, k, v)``: attention of q (total, H, D) to k and v (total, G, D), as q is.

They are not rotated: rotary positions, a cache and which keys a query sees are its business.
"""


def hidden_states(
    config: Config, weights: Weights, ids: Array, positions: Array, attend: Attend
) -> Iterator[Array]:
    """Yield the hidden states (total, E): embedded, behind each layer, and behind the last norm."""
    x = embedding(weights.embedding, ids)
    if weights.positions is not None:
        x += embedding(weights.positions, positions)
    yield x
    for index, layer in enumerate(weights.layers):
        normed = layer.norm(x)
        q, k, v = heads_of(config, layer.qkv(normed))
        attended = attend(index, q, k, v).reshape(len(x), -1)
        if layer.mlp_norm is None:
            x = layer.output(attended, residual=mlp(config, layer, normed, residual=x))
        else:
            x = layer.output(attended, residual=x)
            x = mlp(config, layer, layer.mlp_norm(x), residual=x)
        yield x
    yield weights.norm(x)


def heads_of(config: Config, qkv: Array) -> tuple[Array, Array, Array]:
    """Return the heads of q, k and v, as views of the rows of their one product."""
    queries, keys = config.num_heads, config.num_kv_heads
    heads = qkv.reshape(len(qkv), queries + 2 * keys, config.head_dim)
    return heads[:, :queries], heads[:, queries : queries + keys], heads[:, queries + keys :]


def mlp(config: Config, layer: Layer, x: Array, *, residual: Array) -> Array:
    """Return the MLP of a layer, added to the residual."""
    return layer.down(layer.up(x, activation=config.activation), residual=residual)
