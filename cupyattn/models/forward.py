"""The forward of GPT-2, Llama and Phi-2: what they share, and the two places where they differ.

With x the hidden states of all tokens, a row each, a layer of GPT-2 and of Llama is

    x = x + output(attention(norm(x)))
    x = x + down(activation(up(mlp_norm(x))))

and a layer of Phi-2, where attention and the MLP stand side by side, as in GPT-J,

    h = norm(x)
    x = x + down(activation(up(h))) + output(attention(h))

where one product makes qkv and up, and the MLP runs beside attention: neither waits for the other.

GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019) adds a learned
row for each position to the embedding, its norms are layer norms, its activation is gelu. Llama
(Touvron et al., arXiv:2302.13971) has rotary positions, RMS norms and silu(gate) * up, which is the
activation "swiglu" of one product. Phi-2 (Javaheripi and Bubeck, "Phi-2: the surprising power of
small language models", 2023) rotates the first features of a head only, and has layer norms. All
of that is in the weights and the config: a norm with a bias is a layer norm.

Each call below is one kernel, and the sum of two embeddings one more; all other sums are made where
a product is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cupyattn import embedding
from cupyattn.models.activations import activated
from cupyattn.models.beside import Beside
from cupyattn.models.config import Config
from cupyattn.models.weights import Layer, Weights
from cupyattn.runtime.arrays import Array

Attend = Callable[[int, Array, Array, Array], Array]
"""``attend(layer, q, k, v)``: attention of q (total, H, D) to k and v (total, G, D), as q is.

They are not rotated: rotary positions, a cache and which keys a query sees are its business.
"""


def hidden_states(
    config: Config,
    weights: Weights,
    ids: Array,
    positions: Array,
    attend: Attend,
    beside: Beside,
) -> Iterator[Array]:
    """Yield the hidden states (total, E): embedded, behind each layer, and behind the last norm."""
    width = config.num_heads * config.head_dim
    x = embedding(weights.embedding, ids)
    if weights.positions is not None:
        x += embedding(weights.positions, positions)
    yield x
    for index, layer in enumerate(weights.layers):
        normed = layer.norm(x)
        if layer.mlp_norm is None:
            qkv, inner = qkv_and_inner(config, layer, normed)
            with beside:
                y = layer.down(inner(), residual=x)
            attended = attend(index, *heads_of(config, qkv))
            beside.join()
            x = layer.output(attended.reshape(len(x), width), residual=y)
        else:
            attended = attend(index, *heads_of(config, layer.qkv(normed)))
            x = layer.output(attended.reshape(len(x), width), residual=x)
            # Without a name for what is inside, which would keep its memory through the next layer.
            x = layer.down(layer.up(layer.mlp_norm(x), activation=config.activation), residual=x)
        yield x
    yield weights.norm(x)


def qkv_and_inner(config: Config, layer: Layer, normed: Array) -> tuple[Array, Callable[[], Array]]:
    """Return q, k and v in one array, and what makes the inside of the MLP."""
    if layer.qkv_up is None:
        return layer.qkv(normed), lambda: layer.up(normed, activation=config.activation)
    both = layer.qkv_up(normed)
    columns = len(layer.qkv.weight)
    return both[:, :columns], lambda: activated(both[:, columns:], config.activation)


def heads_of(config: Config, qkv: Array) -> tuple[Array, Array, Array]:
    """Return the heads of q, k and v, as views of the rows of their one product."""
    queries, keys = config.num_heads, config.num_kv_heads
    heads = qkv.reshape(len(qkv), queries + 2 * keys, config.head_dim)
    return heads[:, :queries], heads[:, queries : queries + keys], heads[:, queries + keys :]
