"""Configs of a few thousand weights: every architecture, and what may differ within one."""

from __future__ import annotations

from cupyattn.models import Config

GPT2 = Config(
    "gpt2", 61, 2, 32, 4, 4, 8, 64, 24, 1e-5, "gelu_tanh",
    tied=True, qkv_bias=True, output_bias=True, mlp_bias=True,
)  # fmt: skip
LLAMA = Config("llama", 67, 2, 32, 4, 2, 16, 48, 40, 1e-6, "swiglu", rotary_dim=16)
PHI = Config(
    "phi", 59, 2, 32, 2, 2, 16, 80, 32, 1e-5, "gelu_tanh", rotary_dim=6,
    qkv_bias=True, output_bias=True, mlp_bias=True, head_bias=True,
)  # fmt: skip

TINY = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "phi": PHI,
    "mistral": LLAMA._replace(window_size=(3, 0), rope_base=1e6),
    "qwen2": LLAMA._replace(qkv_bias=True, tied=True, num_kv_heads=1),
    "geglu": LLAMA._replace(activation="geglu", mlp_bias=True, output_bias=True),
}
