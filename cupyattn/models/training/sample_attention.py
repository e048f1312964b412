"""Causal attention within each sample of a batch, forward and backward."""

from __future__ import annotations

from typing import Any

from cupyattn import AttentionGrads, attention_varlen, attention_varlen_backward
from cupyattn.models.forward import heads_of
from cupyattn.models.training.batch import Batch
from cupyattn.models.transformer import Model
from cupyattn.runtime.arrays import Array


class SampleAttention:
    """Attention of samples that are packed, q and k rotated on the way; an `Attend`.

    Parameters
    ----------
    model : Model
        Whose window and rotary tables it has.
    batch : Batch
        Whose samples.
    """

    def __init__(self, model: Model, batch: Batch) -> None:
        self.config, self._xp = model.config, model.xp
        bounds, longest = batch.cu_seqlens, batch.max_seqlen
        self._lengths = bounds, bounds, longest, longest
        self._options: dict[str, Any] = {
            "causal": True,
            "window_size": model.config.window_size,
            "rotary": model.rotary,
        }

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Return attention as `cupyattn.models.forward.hidden_states` asks for it."""
        return attention_varlen(q, k, v, *self._lengths, **self._options)

    def with_lse(self, qkv: Array) -> tuple[Array, Array]:
        """Return attention (total, H D) and its log-sum-exp, of the rows of one product."""
        heads = heads_of(self.config, qkv)
        out, lse = attention_varlen(*heads, *self._lengths, **self._options, return_lse=True)
        return out.reshape(len(qkv), -1), lse

    def backward(self, dout: Array, qkv: Array, out: Array, lse: Array, *, into: Array) -> Array:
        """Write the gradient of qkv, bit for bit the same in every run."""
        grads = AttentionGrads(*heads_of(self.config, into))
        shape = len(qkv), self.config.num_heads, self.config.head_dim
        attention_varlen_backward(
            dout.reshape(shape), *heads_of(self.config, qkv), out.reshape(shape), lse,
            *self._lengths, **self._options, deterministic=True, grads=grads,
        )  # fmt: skip
        return into

    def empty_like(self, array: Array) -> Array:
        """Return an uninitialised array of the shape and dtype of another, in C order."""
        return self._xp.empty(array.shape, array.dtype)
