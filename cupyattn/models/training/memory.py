"""How much memory gradients take, before any of it is taken."""

from __future__ import annotations

from typing import NamedTuple

from cupyattn.models.config import GATED, Config
from cupyattn.models.loss import rows_at_once
from cupyattn.runtime.arrays import dtype_of

_LSE_BYTES = 4
_MOST_PARTS_BYTES = 1 << 26
_MOST_PARTS = 32
"""Sums of float32 of a product of few rows and a long sum, the head's dx: at most these."""
_QUERIES_OF_A_TILE = 64  # what a sample's last tile of queries may be beyond it


class Working(NamedTuple):
    """The working memory of `gradients` on a GPU, in bytes, at its two ends.

    Attributes
    ----------
    kept : int
        The inputs of all layers, which are there at both.
    layer : int
        With these what the backward of a layer takes, of its MLP or of its attention.
    head : int
        With these what cross-entropy takes.
    """

    kept: int
    layer: int
    head: int


def working_bytes(
    config: Config,
    tokens: int,
    /,
    *,
    samples: int = 1,
    dtype: str = "float16",
    full: bool = False,
    rank: int = 16,
    dropout: bool = False,
) -> Working:
    """Return what `gradients` takes on a GPU while it runs, beside all that was there before.

    That is beside weights, what is learnt, its gradients and the batch: a step of so many tokens
    needs the larger of the two free.

    Parameters
    ----------
    config : Config
        Of the model.
    tokens, samples : int
        Of a batch: all its tokens, and how many samples they are of.
    dtype : str
        Of the model.
    full : bool
        Of `FullWeights`; otherwise of `LoraAdapters` with adapters of all linear layers.
    rank : int
        Of these.
    dropout : bool
        Whether they have any.

    Notes
    -----
    Of three moments: at the head the inputs of all layers and a chunk of logits, which
    become their own gradient; in the backward of the last layer's MLP, and of its attention, the
    inputs of all layers and what one layer computed, with its gradients so far. For float16 and
    batches of some thousand tokens that is what is asked of the memory pool to a hundredth (a test
    counts); where the head takes most, up to 64 MiB more, which its product may need on some GPU.
    The pool itself may keep more than it is asked for.

    Examples
    --------
    Of Llama-3.2-1B, with batches of 4,096 tokens:

    >>> from cupyattn import models
    >>> max(working_bytes(models.PRESETS["llama-3.2-1b"], 4096)) >> 20
    617
    """
    size = dtype_of(dtype).itemsize
    width, inner = config.hidden_size, config.intermediate_size
    up = inner * (2 if config.activation in GATED else 1)
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    qkv, low = queries + 2 * keys, 0 if full else 6 * rank
    adapted = 0 if full else up
    fused = inner if dropout and not full else 0  # dropped, and the gradient of that
    lse = _LSE_BYTES * config.num_heads
    per_row = 2 * lse * (tokens + _QUERIES_OF_A_TILE * samples)  # of float16, deterministic
    rotated = queries + keys if config.rotary_dim else 0

    kept = (config.num_layers + 1) * width  # with the dx of the layer
    if config.architecture == "phi":
        known = kept + width + 2 * (qkv + up) + low
        mlp = known + 2 * inner + 2 * fused
        attention = known + 2 * queries + rotated
        weight = max(up + qkv, queries) * width
    else:
        known = kept + width + qkv + queries + low
        mlp = known + 2 * width + max(up + adapted, up + 2 * inner + 2 * fused)
        attention = known + width + queries + qkv + rotated
        weight = max(up, qkv) * width
    rows = min(rows_at_once(config.vocab_size, size), tokens)
    parts = min(4 * _MOST_PARTS * rows * width, _MOST_PARTS_BYTES)
    head = rows * config.vocab_size * size + (0 if full else parts)
    return Working(
        tokens * kept * size,
        max(
            tokens * (mlp * size + lse) + full * weight * size,
            tokens * (attention * size + lse) + per_row,
        ),
        tokens * (kept + 2 * width) * size + head + full * config.vocab_size * width * size,
    )
