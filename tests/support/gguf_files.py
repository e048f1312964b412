"""GGUF files of tiny models, written by the package gguf as llama.cpp's converter does it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from cupyattn import LongRopeScaling
from cupyattn.models import Config, Model
from cupyattn.models.weights import LAYER_NORMS

LAYERS = {
    "norm": "attn_norm", "output": "attn_output", "mlp_norm": "ffn_norm", "down": "ffn_down",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "output_norm": "post_attention_norm",
    "down_norm": "post_ffw_norm",
}  # fmt: skip
PAIRED = ("llama", "smollm3", "mistral3")


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Permute q or k as the converter for Llama does: halves of a head become neighbours."""
    size = len(rows) // heads
    split = rows.reshape(heads, 2, size // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def tensors_of(model: Model, architecture: str) -> dict[str, np.ndarray]:
    """The tensors of a model by their names in GGUF."""
    config, weights = model.config, model.weights
    found = {"token_embd.weight": weights.embedding}
    if weights.positions is not None:
        found["position_embd.weight"] = weights.positions
    queries, keys = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    for number, layer in enumerate(weights.layers):
        for name, file_name in LAYERS.items():
            part = getattr(layer, name)
            for kind in ("weight", "bias"):
                if part is not None and getattr(part, kind) is not None:
                    found[f"blk.{number}.{file_name}.{kind}"] = getattr(part, kind)
        for kind in ("weight", "bias"):
            qkv, up = getattr(layer.qkv, kind), getattr(layer.up, kind)
            if config.architecture in ("gpt2", "phi", "phi3"):
                if qkv is not None:
                    found[f"blk.{number}.attn_qkv.{kind}"] = qkv
                if up is not None:
                    found[f"blk.{number}.ffn_up.{kind}"] = up
                continue
            if qkv is not None:
                q, k, v = np.split(qkv, [queries, queries + keys])
                if architecture in PAIRED:
                    q, k = permuted(q, config.num_heads), permuted(k, config.num_kv_heads)
                for name, rows in zip("qkv", (q, k, v), strict=True):
                    found[f"blk.{number}.attn_{name}.{kind}"] = rows
            if up is not None:
                for name, rows in zip(("gate", "up"), np.split(up, 2), strict=True):
                    found[f"blk.{number}.ffn_{name}.{kind}"] = rows
    for name, part in (("output_norm", weights.norm), ("output", weights.head)):
        for kind in ("weight", "bias"):
            array = getattr(part, kind)
            if array is not None and array is not weights.embedding:
                found[f"{name}.{kind}"] = array
    scaling = config.rope_scaling
    if isinstance(scaling, LongRopeScaling):
        for kind in ("short", "long"):
            factors = np.array(getattr(scaling, f"{kind}_factors"), np.float32)
            found[f"rope_factors_{kind}.weight"] = factors
    if config.architecture == "gemma":
        norms = [name for name in found if name.endswith("norm.weight")]
        found |= {name: found[name] + np.float32(1) for name in norms}
    return found


def metadata_of(config: Config, architecture: str) -> dict[str, object]:
    """The keys that only some architectures have, as llama.cpp's converter writes them."""
    found: dict[str, object] = {}
    if config.window_size is not None:
        found["attention.sliding_window"] = config.window_size[0] + 1
    if architecture == "gemma2":
        found["attn_logit_softcapping"] = config.attention_softcap
        found["final_logit_softcapping"] = config.logit_softcap
    if isinstance(config.rope_scaling, LongRopeScaling):
        found["rope.scaling.original_context_length"] = config.rope_scaling.original_length
        found["rope.scaling.attn_factor"] = config.rope_scaling.attention_factor
    if config.query_growth is not None:
        found["attention.temperature_scale"] = config.query_growth[0]
        found["rope.scaling.original_context_length"] = config.query_growth[1]
    return {f"{architecture}.{key}": value for key, value in found.items()}


def write_gguf(
    path: Path,
    model: Model,
    architecture: str,
    *,
    quantised: gguf.GGMLQuantizationType | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    metadata: dict[str, object] | None = None,
    packed: dict[str, np.ndarray] | None = None,
    packed_as: gguf.GGMLQuantizationType | None = None,
    alignment: int | None = None,
) -> Path:
    """Write a model, its matrices quantised if the type is given, with more metadata.

    `packed` are tensors whose bytes are given, of the type `packed_as`.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    if config.architecture not in LAYER_NORMS:
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_key_length(config.head_dim)
    else:
        writer.add_layer_norm_eps(config.norm_eps)
    if config.rotary_dim:
        writer.add_rope_dimension_count(config.rotary_dim)
        writer.add_rope_freq_base(config.rope_base)
    for key, value in {**metadata_of(config, architecture), **(metadata or {})}.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            add.get(type(value), writer.add_string)(key, value)
    for name, array in (tensors or tensors_of(model, architecture)).items():
        if packed is not None and name in packed:
            writer.add_tensor(name, packed[name], raw_dtype=packed_as)
        elif quantised is None or array.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(array, np.float32), quantised)
            writer.add_tensor(name, packed, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
