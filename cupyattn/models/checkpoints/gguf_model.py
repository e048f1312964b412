"""A model in a GGUF file, as llama.cpp's converter writes it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn import LinearScaling, Llama3Scaling, YarnScaling
from cupyattn.models.checkpoints.contents import Checkpoint, damaged
from cupyattn.models.checkpoints.fields import Fields
from cupyattn.models.checkpoints.gguf_format import GGUFFile, read_gguf
from cupyattn.models.checkpoints.names import GGUF, Naming
from cupyattn.models.checkpoints.tensors import QuantisedTensor, Tensor
from cupyattn.models.config import Config, RopeScaling, checked, unknown_architecture
from cupyattn.models.tokenizer import tokenizer_of_gguf
from cupyattn.runtime.errors import error, shown

_FORWARDS = {"gpt2": "gpt2", "llama": "llama", "qwen2": "llama", "phi2": "phi"}
_SCALINGS = ("none", "linear", "yarn")
_UNSUPPORTED: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": None,
    "attn_logit_softcapping": None,
    "embedding_scale": None,
    "expert_count": 0,
    "final_logit_softcapping": None,
    "logit_scale": None,
    "residual_scale": None,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
"""Traits that there is no code for, and the value of each that changes nothing."""


def open_gguf(path: Path) -> Checkpoint:
    """Read the config of a file and the names in it; of the weights nothing yet."""
    file = read_gguf(path)
    kind = file.metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in _FORWARDS:
        raise unknown_architecture(kind, str(path))
    parts = file.metadata.get("split.count", 1)
    if parts != 1:
        raise error(
            NotImplementedError,
            f"{path}: one of {shown(parts)} files",
            "a GGUF file is read that holds all of a model",
            "join them: llama-gguf-split --merge FIRST_FILE NEW_FILE",
        )
    naming = GGUF[kind]
    return Checkpoint(
        str(path),
        _config(file, kind, naming, str(path)),
        naming,
        file.tensors,
        partial(tokenizer_of_gguf, file.metadata, str(path)),
    )


def _config(file: GGUFFile, kind: str, naming: Naming, where: str) -> Config:
    tensors = file.tensors
    fields, tokens = (
        Fields(file.metadata, where, prefix) for prefix in (f"{kind}.", "tokenizer.ggml.")
    )

    def has(name: str) -> bool:
        return f"{naming.layer.format(0)}{name}.bias" in tensors

    for trait, neutral in _UNSUPPORTED.items():
        fields.refuse(trait, neutral)
    embedding = tensors.get(f"{naming.embedding}.weight")
    if embedding is None:
        raise damaged(where, f"tensors are missing: {naming.embedding}.weight")
    rms = "_rms" if _FORWARDS[kind] == "llama" else ""
    heads, width = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", width // heads)
    if naming.paired and head_dim % 2:
        raise damaged(where, f"heads of {head_dim}, which has no pairs")
    positions, rotates = fields.integer("context_length"), kind != "gpt2"
    base = fields.number("rope.freq_base", 10000.0)
    rotary_dim = fields.integer("rope.dimension_count", head_dim) if rotates else 0
    window = fields.integer("attention.sliding_window", 0, least=0)
    config = Config(
        _FORWARDS[kind],
        vocab_size=embedding.shape[0],
        num_layers=fields.integer("block_count"),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        max_positions=positions,
        norm_eps=fields.number(f"attention.layer_norm{rms}_epsilon"),
        activation="swiglu" if rms else "gelu_tanh",
        rotary_dim=rotary_dim,
        rope_base=base,
        rope_scaling=_scaling(file, fields, base, rotary_dim, positions) if rotates else None,
        tied=f"{naming.head}.weight" not in tensors,
        window_size=(window - 1, 0) if window else None,
        qkv_bias=has(naming.qkv[0]),
        output_bias=has(naming.output),
        mlp_bias=has(naming.up[0]),
        head_bias=f"{naming.head}.bias" in tensors,
        bos_id=(*tokens.ids("bos_token_id"), None)[0],
        eos_ids=tuple(
            dict.fromkeys(
                number
                for name in ("eos", "eot", "eom")
                for number in tokens.ids(f"{name}_token_id")
            )
        ),
    )
    try:
        return checked(config)
    except ValueError as failure:
        raise damaged(where, str(failure)) from failure


def _scaling(
    file: GGUFFile, fields: Fields, base: float, rotary_dim: int, positions: int
) -> RopeScaling | None:
    factors = file.tensors.get("rope_freqs.weight")
    if isinstance(factors, QuantisedTensor):
        raise damaged(fields.where, "rope_freqs.weight is quantised, a list of factors")
    if factors is not None:
        return _llama3(factors, base, rotary_dim, fields.where)
    kind = fields.choice("rope.scaling.type", _SCALINGS, default="linear")
    older = fields.number("rope.scale_linear", 1.0, zero_allowed=True)
    factor = fields.number("rope.scaling.factor", older, zero_allowed=True) or 1.0
    if kind == "yarn":
        return YarnScaling(
            factor,
            fields.integer("rope.scaling.original_context_length", positions),
            fields.number("rope.scaling.yarn_beta_fast", 32.0),
            fields.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    return LinearScaling(factor) if kind == "linear" and factor != 1 else None


def _llama3(factors: Tensor, base: float, rotary_dim: int, where: str) -> RopeScaling:
    """Recognise what each frequency is divided by: the file has it in place of its parameters."""
    if factors.shape != (rotary_dim // 2,):
        raise damaged(where, f"rope_freqs.weight is {factors.shape}, not {(rotary_dim // 2,)}")
    found = factors.read(0, factors.shape[0])
    plain = base ** (-np.arange(rotary_dim // 2) / (rotary_dim // 2))
    scaling = Llama3Scaling(float(found.max(initial=1.0)), 1.0, 4.0, 8192)
    if np.allclose(plain / scaling.frequencies(plain, base), found, rtol=1e-4):
        return scaling
    raise error(
        NotImplementedError,
        f"{where}: rope_freqs.weight of factors {shown(found.tolist())}",
        "they are those of Llama 3.1 and later models",
        "load a model of these, or the folder that the file was made from",
    )
