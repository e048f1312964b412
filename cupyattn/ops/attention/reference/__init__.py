"""Attention in NumPy float64."""

from cupyattn.ops.attention.reference.block_mask import block_mask
from cupyattn.ops.attention.reference.dense import attention, attention_backward
from cupyattn.ops.attention.reference.paged import merge_attention, paged_attention
from cupyattn.ops.attention.reference.varlen import attention_varlen, attention_varlen_backward

__all__ = [
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "block_mask",
    "merge_attention",
    "paged_attention",
]
