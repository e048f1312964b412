"""What a step of LoRA computes and moves, and what a T4 needs for that at the least."""

from __future__ import annotations

from typing import NamedTuple

from cupyattn.models import Model
from cupyattn.models.training.adapted_product import AdaptedProduct

T4_FLOPS, T4_BYTES_PER_S = 65e12, 320e9
"""float16 products and memory of a T4, by its data sheet."""
_PASSES = 3
"""Over a frozen weight: forward, the same again in the backward, and dx."""
_OF_A, _OF_B = 5, 4
"""Products with an adapter's matrices: those, dw, and u = x A^T once more for the dw of B."""
_ATTENTION = 2 + 2.5
"""Forwards' work: forward, the same again, and a backward of two and a half."""


class Size(NamedTuple):
    """A batch: so many samples of so many tokens."""

    samples: int
    length: int

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.samples * self.length


def flops_of(model: Model, size: Size) -> float:
    """Return the floating-point operations of a step's products, and of its attention.

    `model` has adapters. Causal attention has half of all scores; what leaves a layer is not
    computed again.
    """
    config = model.config
    per_token = 2 * 2 * config.vocab_size * config.hidden_size  # the head: forward and dx
    for layer in model.weights.layers:
        fields = ("qkv", "up") if layer.qkv_up is None else ("qkv_up",)
        for field in (*fields, "output", "down"):
            product, again = getattr(layer, field), int(field != "down")
            rows, columns = product.weight.shape
            per_token += 2 * (_PASSES - 1 + again) * rows * columns
            if isinstance(product, AdaptedProduct):
                per_token += 2 * (_OF_A - 1 + again) * product.a.size
                per_token += 2 * (_OF_B - 1 + again) * product.b.size
    scores = config.num_layers * config.num_heads * config.head_dim * size.length
    return size.tokens * (per_token + _ATTENTION * 4 * scores / 2)


def t4_seconds(flops: float, weights_bytes: int) -> float:
    """Return the least that a T4 takes: its products, or all weights three times from memory."""
    return max(flops / T4_FLOPS, _PASSES * weights_bytes / T4_BYTES_PER_S)
