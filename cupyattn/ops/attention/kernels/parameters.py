"""The parameters that attention kernels share."""

from __future__ import annotations

from cupyattn.ops.attention.structs import (
    ATTENTION_STRUCT,
    PAGED_STRUCT,
    QUANTIZED_KEYS_STRUCT,
    ROTARY_TABLES_STRUCT,
    SPLIT_STRUCT,
    VARLEN_BACKWARD_STRUCT,
    VARLEN_STRUCT,
)
from cupyattn.runtime.spec import Parameter, Pointer, inputs

POSITIONS = inputs("q_offset", "seqused_k", optional=True)
SCORE_INPUTS = inputs("bias", "mask", "alibi_slopes", optional=True)

FORWARD: tuple[Parameter, ...] = (
    *inputs("q", "k", "v"),
    Pointer("out"),
    Pointer("lse", optional=True),
    *POSITIONS,
)
"""Parameters of every forward kernel, before those of its options."""

FLASH: tuple[Parameter, ...] = (
    *FORWARD,
    *SCORE_INPUTS,
    *inputs("sinks", optional=True),
    ATTENTION_STRUCT,
)
"""Parameters of the forward kernels with every option."""

ROTARY: tuple[Parameter, ...] = (
    *FLASH[:-1],
    *inputs("cos", "sin"),
    *(ATTENTION_STRUCT, ROTARY_TABLES_STRUCT),
)
"""Parameters of the kernel that rotates queries."""
SPLIT: tuple[Parameter, ...] = (
    *inputs("q", "k", "v"),
    *(Pointer(name) for name in ("partial_out", "partial_sums")),
    *(*POSITIONS, *SCORE_INPUTS),
    SPLIT_STRUCT,
)
"""Parameters of the split-KV kernels, with every option but sinks."""

PAGED: tuple[Parameter, ...] = (
    *inputs("q", "k_cache", "v_cache", "block_table", "seqlens_k"),
    *inputs("cu_seqlens_q", "k_scales", "v_scales", "alibi_slopes", "sinks", optional=True),
    Pointer("out"),
    Pointer("lse", optional=True),
    PAGED_STRUCT,
)
"""Parameters of the forward kernels over a paged cache."""
PAGED_FLOATS: tuple[Parameter, ...] = tuple(
    each for each in PAGED if each.name not in ("k_scales", "v_scales")
)
"""Parameters of those that have no caches of integers."""

PACKED = inputs("cu_seqlens_q", "cu_seqlens_k")

VARLEN: tuple[Parameter, ...] = (
    *inputs("q", "k", "v"),
    Pointer("out"),
    Pointer("lse", optional=True),
    *(*PACKED, *POSITIONS, *SCORE_INPUTS),
    *inputs("sinks", optional=True),
    VARLEN_STRUCT,
)
"""Parameters of the forward kernels of packed sequences."""

ROTARY_VARLEN: tuple[Parameter, ...] = (
    *VARLEN[:-1],
    *inputs("cos", "sin"),
    *(VARLEN_STRUCT, ROTARY_TABLES_STRUCT),
)
"""Parameters of the kernel that rotates queries."""

QUANTIZED_KEYS = inputs("k_scales", "k_centre")


def _over_quantized_keys(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """Return the parameters of a forward kernel as that over int8 keys has them."""
    q, k, *others = parameters
    return (q, k, *QUANTIZED_KEYS, *others, QUANTIZED_KEYS_STRUCT)


INT8 = _over_quantized_keys(FLASH)
"""Parameters of the forward kernel over int8 keys."""
INT8_VARLEN = _over_quantized_keys(VARLEN)
"""Parameters of the kernel over int8 keys of packed sequences."""
INT8_PAGED: tuple[Parameter, ...] = (
    *inputs("q", "k_cache"),
    *QUANTIZED_KEYS,
    *inputs("v_cache", "block_table", "seqlens_k"),
    *inputs("cu_seqlens_q", "alibi_slopes", "sinks", optional=True),
    Pointer("out"),
    Pointer("lse", optional=True),
    *(PAGED_STRUCT, QUANTIZED_KEYS_STRUCT),
)
"""Parameters of the kernel over int8 keys of a paged cache."""


def of_packed(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """Return the parameters of a backward kernel as that of packed sequences has them."""
    at = parameters.index(POSITIONS[0])
    return (*parameters[:at], *PACKED, *parameters[at:-1], VARLEN_BACKWARD_STRUCT)


FLOAT_GRADIENT = inputs("dout", "q", "k", "v", "lse", "delta")
"""Inputs of the float32 backward kernels that come after delta."""
