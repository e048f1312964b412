"""GPT-2, Llama and Phi-2 once more: plain NumPy in float64, a sequence at a time."""

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
}


def wide(array):
    return np.asarray(array, dtype=np.float64)


def product(x, product):
    y = x @ wide(product.weight).T
    return y if product.bias is None else y + wide(product.bias)


def norm(x, norm, eps):
    if norm.bias is None:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * wide(norm.weight)
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return scaled * wide(norm.weight) + wide(norm.bias)


def rotated(x, config: Config):
    """Rotate the heads (S, heads, D) by complex numbers, as the paper's equation 13."""
    half = config.rotary_dim // 2
    assert config.rope_scaling is None
    angles = np.outer(np.arange(len(x)), config.rope_base ** (-np.arange(half) / half))
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


def attended(config: Config, qkv):
    heads, groups, size = config.num_heads, config.num_kv_heads, config.head_dim
    every = qkv.reshape(len(qkv), -1, size)
    q, k, v = np.split(every, [heads, heads + groups], axis=1)
    if config.rotary_dim:
        q, k = rotated(q, config), rotated(k, config)
    rows = np.arange(len(qkv))
    distance = rows[:, None] - rows
    left = len(rows) if config.window_size is None else config.window_size[0]
    out = np.empty_like(q)
    for head in range(heads):
        group = head // (heads // groups)
        scores = q[:, head] @ k[:, group].T / np.sqrt(size)
        scores = np.where((distance >= 0) & (distance <= left), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, group]
    return out.reshape(len(qkv), -1)


def twin_states(model: Model, ids) -> list[np.ndarray]:
    """The hidden states of one sequence: embedded, after each layer, and after the last norm."""
    config, weights = model.config, model.weights
    x = wide(weights.embedding)[ids]
    if config.architecture == "gpt2":
        x = x + wide(weights.positions)[: len(ids)]
    states = [x]
    for layer in weights.layers:
        normed = norm(x, layer.norm, config.norm_eps)
        attention = product(attended(config, product(normed, layer.qkv)), layer.output)
        if config.architecture != "phi":
            x = x + attention
            normed = norm(x, layer.mlp_norm, config.norm_eps)
            attention = 0
        inner = ACTIVATIONS[config.activation](product(normed, layer.up))
        x = x + attention + product(inner, layer.down)
        states.append(x)
    return [*states, norm(x, weights.norm, config.norm_eps)]


def twin_logits(model: Model, ids) -> np.ndarray:
    """The logits (S, V) of one sequence."""
    return product(twin_states(model, ids)[-1], model.weights.head)
