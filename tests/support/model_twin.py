"""The models once more: plain NumPy in float64, a sequence at a time."""

from __future__ import annotations

import math

import numpy as np

from cupyattn.models import Config, Model

erf = np.vectorize(math.erf)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "gelu": lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
    "gelu_tanh": gelu_tanh,
    "silu": silu,
    "relu": lambda x: np.maximum(x, 0),
    "swiglu": lambda x: silu(np.split(x, 2, axis=-1)[0]) * np.split(x, 2, axis=-1)[1],
    "geglu": lambda x: ACTIVATIONS["gelu"](np.split(x, 2, -1)[0]) * np.split(x, 2, -1)[1],
    "geglu_tanh": lambda x: gelu_tanh(np.split(x, 2, -1)[0]) * np.split(x, 2, -1)[1],
}


def wide(array):
    return np.asarray(array, dtype=np.float64)


def product(x, product):
    y = x @ wide(product.weight).T
    return y if product.bias is None else y + wide(product.bias)


def norm(x, norm, eps):
    if norm.bias is None:
        weight = wide(norm.weight) + norm.offset
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return scaled * wide(norm.weight) + wide(norm.bias)


def rotated(x, config: Config, base: float, whole: bool = False):
    """Rotate the heads (S, heads, D) by complex numbers, as the paper's equation 13.

    With `whole` pairs are those of the whole head, of which the first are rotated.
    """
    half = x.shape[-1] // 2 if whole else config.rotary_dim // 2
    assert config.rope_scaling is None
    angles = np.outer(np.arange(len(x)), base ** (-np.arange(half) / half))
    if whole:
        angles[:, config.global_rotary_dim // 2 :] = 0
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


def capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def attended(config: Config, qkv, index, layer):
    heads, groups, size = config.num_heads, config.num_kv_heads, config.head_dim
    is_global = index in config.global_layers
    if is_global:
        groups, size = config.global_kv_heads or groups, config.global_head_dim or size
    every = qkv.reshape(len(qkv), -1, size)
    q, k, v = np.split(every, [heads, heads + groups], axis=1)
    if is_global and config.keys_as_values:
        v = k
    if config.architecture == "gemma4":
        v = v / np.sqrt((v**2).mean(-1, keepdims=True) + config.norm_eps)
    if layer.q_norm is not None:
        q, k = norm(q, layer.q_norm, config.norm_eps), norm(k, layer.k_norm, config.norm_eps)
    is_local = config.window_size is not None and index not in config.global_layers
    base = config.rope_base
    if is_local and config.local_rope_base is not None:
        base = config.local_rope_base
    if config.rotary_dim and index not in config.unrotated_layers:
        whole = is_global and config.global_rotary_dim is not None
        q, k = rotated(q, config, base, whole), rotated(k, config, base, whole)
    rows = np.arange(len(qkv))
    if config.query_growth is not None:
        rate, length = config.query_growth
        q = q * (1 + rate * np.log1p(rows // length))[:, None, None]
    distance = rows[:, None] - rows
    left = config.window_size[0] if is_local else len(rows)
    scale = size**-0.5 if config.softmax_scale is None else config.softmax_scale
    out = np.empty_like(q)
    for head in range(heads):
        group = head // (heads // groups)
        scores = capped(scale * (q[:, head] @ k[:, group].T), config.attention_softcap)
        scores = np.where((distance >= 0) & (distance <= left), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, group]
    return out.reshape(len(qkv), -1)


def twin_states(model: Model, ids) -> list[np.ndarray]:
    """The hidden states of one sequence: embedded, after each layer, and after the last norm."""
    config, weights = model.config, model.weights
    x = wide(weights.embedding)[ids] * (config.embedding_scale or 1)
    if config.architecture == "gpt2":
        x = x + wide(weights.positions)[: len(ids)]
    states = [x]
    for index, layer in enumerate(weights.layers):
        normed = norm(x, layer.norm, config.norm_eps)
        heads = attended(config, product(normed, layer.qkv), index, layer)
        attention = product(heads, layer.output)
        if layer.output_norm is not None:
            attention = norm(attention, layer.output_norm, config.norm_eps)
        if config.architecture != "phi":
            x = x + attention
            normed = norm(x, layer.mlp_norm, config.norm_eps)
            attention = 0
        inner = ACTIVATIONS[config.activation](product(normed, layer.up))
        down = product(inner, layer.down)
        if layer.down_norm is not None:
            down = norm(down, layer.down_norm, config.norm_eps)
        x = x + attention + down
        if layer.scalar is not None:
            x = x * wide(layer.scalar)
        states.append(x)
    return [*states, norm(x, weights.norm, config.norm_eps)]


def twin_logits(model: Model, ids) -> np.ndarray:
    """The logits (S, V) of one sequence."""
    logits = product(twin_states(model, ids)[-1], model.weights.head)
    return capped(logits, model.config.logit_softcap)
