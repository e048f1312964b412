"""Folders of tiny models as they are published: config.json and safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from cupyattn.models import Config, Model
from cupyattn.models.checkpoints.names import HUGGING_FACE, places

SHARED = {"gelu_tanh": "gelu_new", "swiglu": "silu"}


def config_of(config: Config) -> dict[str, Any]:
    """What config.json says of these numbers."""
    if config.architecture == "gpt2":
        return {
            "model_type": "gpt2", "vocab_size": config.vocab_size, "n_embd": config.hidden_size,
            "n_layer": config.num_layers, "n_head": config.num_heads,
            "n_inner": config.intermediate_size, "n_positions": config.max_positions,
            "layer_norm_epsilon": config.norm_eps,
        }  # fmt: skip
    return {
        "model_type": config.architecture, "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions, "hidden_act": SHARED[config.activation],
        "rms_norm_eps": config.norm_eps, "layer_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "partial_rotary_factor": config.rotary_dim / config.head_dim,
    }  # fmt: skip


def tensors_of(model: Model) -> dict[str, np.ndarray]:
    """The tensors of a model that is not quantised, as transformers calls them."""
    naming = HUGGING_FACE[model.config.architecture]
    found = places(naming, model.config, model.weights, {f"{naming.prefix}x": None})  # type: ignore[dict-item]
    return {
        name: np.ascontiguousarray(place.targets["all"].reshape(place.shape))
        for name, place in found.filled.items()
    }


def write_folder(
    folder: Path,
    config: Config,
    tensors: dict[str, np.ndarray],
    quantization: dict[str, Any] | None = None,
) -> Path:
    """Write a model's folder."""
    folder.mkdir(exist_ok=True)
    given = config_of(config)
    if quantization is not None:
        given["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(given))
    save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()},
        folder / "model.safetensors",
    )
    return folder
