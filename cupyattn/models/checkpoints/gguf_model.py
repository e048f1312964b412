"""A model in a GGUF file, as llama.cpp's converter writes it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn import LinearScaling, Llama3Scaling, YarnScaling
from cupyattn.errors import error, shown
from cupyattn.models.checkpoints.checkpoint import Checkpoint, Tensor, damaged
from cupyattn.models.checkpoints.gguf_format import GGUFFile, read_gguf
from cupyattn.models.checkpoints.names import GGUF, Naming
from cupyattn.models.config import Config, RopeScaling, checked, unknown_architecture
from cupyattn.models.tokenizer import tokenizer_of_gguf

_FORWARDS = {"gpt2": "gpt2", "llama": "llama", "qwen2": "llama", "phi2": "phi"}
_SCALINGS = ("none", "linear", "yarn")


def open_gguf(path: Path) -> Checkpoint:
    """Read the config of a file and the names in it; of the weights nothing yet."""
    file = read_gguf(path)
    kind = file.metadata.get("general.architecture")
    if kind not in _FORWARDS:
        raise unknown_architecture(kind)
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
    metadata, tensors = file.metadata, file.tensors

    def value(name: str, default: Any = None, of: Any = int) -> Any:
        found: Any = metadata.get(f"{kind}.{name}", default)
        if isinstance(found, bool) or not isinstance(found, of) or not found > 0:
            raise damaged(where, f"{kind}.{name} is {shown(found)}")
        return found

    def has(name: str) -> bool:
        return f"{naming.layer.format(0)}{name}.bias" in tensors

    if metadata.get(f"{kind}.expert_count"):
        raise error(
            NotImplementedError,
            f"{where}: a mixture of experts",
            "there is code for models with one MLP a layer",
            "load another model",
        )
    embedding = tensors.get(f"{naming.embedding}.weight")
    if embedding is None:
        raise damaged(where, f"tensors are missing: {naming.embedding}.weight")
    rms = "_rms" if _FORWARDS[kind] == "llama" else ""
    heads, width = value("attention.head_count"), value("embedding_length")
    head_dim = value("attention.key_length", width // heads)
    if naming.paired and head_dim % 2:
        raise damaged(where, f"heads of {head_dim}, which has no pairs")
    positions, rotates = value("context_length"), kind != "gpt2"
    base = float(value("rope.freq_base", 10000.0, (int, float)))
    rotary_dim = value("rope.dimension_count", head_dim) if rotates else 0
    window = metadata.get(f"{kind}.attention.sliding_window")
    config = Config(
        _FORWARDS[kind],
        vocab_size=embedding.shape[0],
        num_layers=value("block_count"),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=value("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=value("feed_forward_length"),
        max_positions=positions,
        norm_eps=float(value(f"attention.layer_norm{rms}_epsilon", of=float)),
        activation="swiglu" if rms else "gelu_tanh",
        rotary_dim=rotary_dim,
        rope_base=base,
        rope_scaling=_scaling(file, kind, base, rotary_dim, positions, where) if rotates else None,
        tied=f"{naming.head}.weight" not in tensors,
        window_size=(window - 1, 0) if isinstance(window, int) and window > 0 else None,
        qkv_bias=has(naming.qkv[0]),
        output_bias=has(naming.output),
        mlp_bias=has(naming.up[0]),
        head_bias=f"{naming.head}.bias" in tensors,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=tuple(
            dict.fromkeys(
                metadata[f"tokenizer.ggml.{name}_token_id"]
                for name in ("eos", "eot", "eom")
                if f"tokenizer.ggml.{name}_token_id" in metadata
            )
        ),
    )
    try:
        return checked(config)
    except ValueError as failure:
        raise damaged(where, str(failure)) from failure


def _scaling(
    file: GGUFFile, kind: str, base: float, rotary_dim: int, positions: int, where: str
) -> RopeScaling | None:
    metadata = file.metadata
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file.tensors["rope_freqs.weight"], base, rotary_dim, where)
    name = metadata.get(f"{kind}.rope.scaling.type", "none")
    factor = metadata.get(f"{kind}.rope.scaling.factor", metadata.get(f"{kind}.rope.scale_linear"))
    if name not in _SCALINGS:
        raise error(
            NotImplementedError,
            f"{where}: rotary embedding of the type {shown(name)}",
            f"types are {', '.join(map(repr, _SCALINGS))}, and Llama 3's",
            "load a model of one of these",
        )
    if name == "yarn":
        trained = metadata.get(f"{kind}.rope.scaling.original_context_length", positions)
        return YarnScaling(float(factor or 1.0), trained)
    return LinearScaling(float(factor)) if factor not in (None, 0.0, 1.0) else None


def _llama3(factors: Tensor, base: float, rotary_dim: int, where: str) -> RopeScaling:
    """Recognise what each frequency is divided by: the file has it in place of its parameters."""
    found = factors.read(0, factors.shape[0])
    plain = base ** (-np.arange(rotary_dim // 2) / (rotary_dim // 2))
    scaling = Llama3Scaling(float(found.max(initial=1.0)), 1.0, 4.0, 8192)
    if found.shape == plain.shape and np.allclose(
        plain / scaling.frequencies(plain, base), found, rtol=1e-4
    ):
        return scaling
    raise error(
        NotImplementedError,
        f"{where}: rope_freqs.weight of factors {shown(found.tolist())}",
        "they are those of Llama 3.1 and later models",
        "load a model of these, or the folder that the file was made from",
    )
