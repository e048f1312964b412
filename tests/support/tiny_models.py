"""Models of a few thousand weights: every architecture, as a config and as a published folder.

A folder has config.json and safetensors. The tokenizer's tokens are bytes, most of which are parts
of characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from cupyattn.models import Config, Model
from cupyattn.models.checkpoints.contents import HUGGING_FACE, places
from cupyattn.models.tokenizer.text import Encoded

GPT2 = Config(
    "gpt2", 61, 2, 32, 4, 4, 8, 64, 24, 1e-5, "gelu_tanh",
    tied=True, qkv_bias=True, output_bias=True, mlp_bias=True,
)  # fmt: skip
LLAMA = Config("llama", 67, 2, 32, 4, 2, 16, 48, 40, 1e-6, "swiglu", rotary_dim=16)
PHI = Config(
    "phi", 59, 2, 32, 2, 2, 16, 80, 32, 1e-5, "gelu_tanh", rotary_dim=6,
    qkv_bias=True, output_bias=True, mlp_bias=True, head_bias=True,
)  # fmt: skip

GEMMA = LLAMA._replace(
    architecture="gemma", num_layers=3, activation="geglu_tanh", tied=True, rope_base=1e6,
    qk_norm=True, window_size=(3, 0), global_layers=(2,), local_rope_base=1e4, softmax_scale=0.2,
    embedding_scale=32**0.5,
)  # fmt: skip

TINY = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "phi": PHI,
    "mistral": LLAMA._replace(window_size=(3, 0), rope_base=1e6),
    "qwen2": LLAMA._replace(qkv_bias=True, tied=True, num_kv_heads=1),
    "qwen3": LLAMA._replace(qk_norm=True, head_dim=24, rotary_dim=24),
    "gemma3": GEMMA,
    "gemma2": GEMMA._replace(
        num_layers=2,
        qk_norm=False,
        global_layers=(1,),
        local_rope_base=None,
        attention_softcap=2.0,
        logit_softcap=3.0,
    ),
    "gemma4": GEMMA._replace(
        architecture="gemma4",
        head_dim=8,
        rotary_dim=8,
        global_head_dim=24,
        num_kv_heads=4,
        global_kv_heads=2,
        global_rotary_dim=6,
        keys_as_values=True,
        softmax_scale=1.0,
        logit_softcap=3.0,
    ),
    "smollm3": LLAMA._replace(num_layers=4, unrotated_layers=(3,), tied=True),
    "ministral3": LLAMA._replace(query_growth=(0.3, 4), head_dim=8, rotary_dim=8),
    "phi3": LLAMA._replace(architecture="phi3", rotary_dim=12),
    "geglu": LLAMA._replace(activation="geglu", mlp_bias=True, output_bias=True),
}


class ByteTokenizer:
    """Ids are the bytes of UTF-8; `begin`, if given, is put before each text and has no text."""

    def __init__(self, begin: int | None = None) -> None:
        self.begin = begin

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        first = [] if self.begin is None or not special_tokens else [self.begin]
        return [*first, *text.encode()]

    def encode_with_spans(self, text: str, *, special_tokens: bool = True) -> Encoded:
        ids = self.encode(text, special_tokens=special_tokens)
        own = [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]
        first = len(ids) - len(own)
        return Encoded(ids, [(0, 0)] * first + own, first)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(each for each in ids if each < 256).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(f"{each['role'][0]}:{each['content']}\n" for each in messages) + "a:"


SHARED = {"gelu_tanh": "gelu_new", "swiglu": "silu"}


def config_of(config: Config) -> dict[str, Any]:
    """Return these numbers as config.json has them."""
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


def expected_of(file: Path, name: str) -> dict[str, np.ndarray]:
    """The arrays of one model in a file that has those of several."""
    with np.load(file, allow_pickle=False) as found:
        keys = [key for key in found.files if key.startswith(f"{name}/")]
        return {key.partition("/")[2]: found[key] for key in keys}
