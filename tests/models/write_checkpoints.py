"""Write checkpoints.zip, and the results of transformers and bitsandbytes for its models.

    PYTHONPATH=tests python tests/models/write_checkpoints.py [newer]

needs torch, transformers and bitsandbytes (these were written by torch 2.13.0, transformers 5.23.0
and bitsandbytes 0.50.2 on a CPU, 2026-11-23). Each folder is a model of a few thousand random
weights as it would be published, with the config of transformers since version 5, or an older one.
For each model expected.npz has token ids, their logits and hidden states in float32, and the error
of the logits in float16. A file of ``packed`` has "linear.weight" of `packed_weights` in NF4, with
absmax in float32 or quantised too, and as "expected" some of its rows, dequantised.

With "newer" it writes newer.zip (by torch 2.13.0, transformers 5.24.0 and peft 0.21.2 on a CPU,
2026-11-28): a folder for each of `NEWER`, in some also the config of transformers before 5 as
older.json, adapters of PEFT, and expected.npz of all of them with, besides the above, greedy tokens
and the gradients that ``training/write_gradients.py`` describes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from support.archives import pack

HERE = Path(__file__).parent
PACKED = HERE / "packed"
SHAPES = {"plain": (24, 128), "nested": (72, 256)}
"""(N, K) of the packed weights; the second has more than 256 blocks."""
ROWS = (0, 11, -1)
SMALL = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16,
    "n_inner": 32, "layer_norm_epsilon": 1e-3, **ENDS,
}  # fmt: skip
PHI = {
    **SMALL, "hidden_size": 20, "num_attention_heads": 2, "num_key_value_heads": 2, **ENDS,
    "layer_norm_eps": 1e-2,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4,
    },
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", GPT2),
    "gpt2_older": ("GPT2Config", {**GPT2, "tie_word_embeddings": False}),
    "llama3": (
        "LlamaConfig",
        {**SMALL, "rope_parameters": LLAMA3, "tie_word_embeddings": True, "bos_token_id": 1,
         "eos_token_id": [2, 3]},
    ),
    "llama_older": (
        "LlamaConfig",
        {**SMALL, **ENDS, "num_key_value_heads": 4, "head_dim": 6, "attention_bias": True,
         "mlp_bias": True, "rms_norm_eps": 1e-2,
         "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    ),
    "llama_yarn": ("LlamaConfig", {**SMALL, **ENDS, "rope_parameters": YARN}),
    "mistral_older": ("MistralConfig", {**SMALL, **ENDS, "head_dim": 8, "sliding_window": 5}),
    "qwen2": ("Qwen2Config", {**SMALL, **ENDS, "tie_word_embeddings": True}),
    "phi": ("PhiConfig", PHI),
    "phi_older": ("PhiConfig", PHI),
}  # fmt: skip


GEMMA = {
    **SMALL, **ENDS, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 4, "rms_norm_eps": 1e-3,
    "pad_token_id": 0,
}  # fmt: skip
LOCAL, GLOBAL = "sliding_attention", "full_attention"
GEMMA3 = {
    **GEMMA, "layer_types": [LOCAL, LOCAL, GLOBAL],
    "rope_parameters": {
        GLOBAL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        LOCAL: {"rope_type": "default", "rope_theta": 1e3},
    },
}  # fmt: skip
GEMMA4 = {
    **SMALL, **ENDS, "num_hidden_layers": 3, "head_dim": 8, "global_head_dim": 12,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
    "sliding_window": 4, "layer_types": [LOCAL, GLOBAL, GLOBAL], "final_logit_softcapping": 3.0,
    "rms_norm_eps": 1e-3, "use_bidirectional_attention": "vision", "pad_token_id": 0,
    "rope_parameters": {
        GLOBAL: {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        LOCAL: {"rope_type": "default", "rope_theta": 1e3},
    },
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.25, 1.5], "long_factor": [1.0, 3.0, 9.0],
    "original_max_position_embeddings": 8,
}  # fmt: skip
PHI3 = {**SMALL, **ENDS, "hidden_size": 32, "original_max_position_embeddings": 8,
        "rope_parameters": LONGROPE, "pad_token_id": 0}  # fmt: skip
NEWER: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {**SMALL, **ENDS, "head_dim": 8, "tie_word_embeddings": True,
                              "rms_norm_eps": 1e-3}),
    "qwen3_sliding": ("Qwen3Config", {
        **SMALL, **ENDS, "head_dim": 6, "attention_bias": True, "use_sliding_window": True,
        "sliding_window": 4, "max_window_layers": 1}),
    "gemma3": ("Gemma3TextConfig", GEMMA3),
    "gemma4": ("Gemma4TextConfig", GEMMA4),
    "gemma4_unified": ("Gemma4UnifiedTextConfig", {
        name: value for name, value in {**GEMMA4, "attention_k_eq_v": False}.items()
        if name != "hidden_size_per_layer_input"}),
    "gemma2": ("Gemma2Config", {
        **GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "phi3": ("Phi3Config", {**SMALL, **ENDS, "sliding_window": 5, "pad_token_id": 0}),
    "phi4_mini": ("Phi3Config", {**PHI3, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3Config", {**SMALL, **ENDS, "num_hidden_layers": 4, "pad_token_id": 0}),
    "mistral": ("MistralConfig", {**SMALL, **ENDS, "head_dim": 6, "sliding_window": None}),
    "ministral": ("MinistralConfig", {
        **SMALL, **ENDS, "head_dim": 6, "sliding_window": 4, "layer_types": [LOCAL, GLOBAL]}),
    "ministral3": ("Ministral3Config", {
        **SMALL, **ENDS, "head_dim": 8,
        "rope_parameters": {
            **YARN, "original_max_position_embeddings": 4, "mscale": 1.0, "mscale_all_dim": 0.5,
            "llama_4_scaling_beta": 0.2}}),
}  # fmt: skip
ADAPTED = ("qwen3", "gemma3", "gemma2", "phi4_mini", "smollm3", "ministral3")
PROMPT, NEW_TOKENS, SHORT = 9, 7, 7


def write(name: str, kind: str, numbers: dict[str, Any], parent: Path) -> dict[str, np.ndarray]:
    """Write a model's folder, and return what is expected of the model."""
    import torch
    import transformers

    folder = parent / name
    config = getattr(transformers, kind)(**numbers)
    torch.manual_seed(sum(name.encode()))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            spread = 0.1 if weight.ndim == 1 else weight.shape[-1] ** -0.5
            weight.copy_(spread * torch.randn_like(weight) + (weight.ndim == 1) * weight)
        for key, buffer in model.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand_like(buffer))
    model.tie_weights()
    if name in ("llama3", "phi"):
        model = model.bfloat16()
    model.save_pretrained(folder, max_shard_size="8KB" if name == "llama3" else "1GB")
    found = {f"{name}/{key}": array for key, array in expected(folder).items()}
    if name in NEWER:
        found |= {f"{name}/{key}": array for key, array in continued(folder).items()}
    if name.endswith("older"):
        write_older(folder)
    return found


def expected(folder: Path) -> dict[str, np.ndarray]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    generator = np.random.default_rng(0)
    ids = generator.integers(0, model.config.vocab_size, (2, 11)).astype(np.int32)
    states = []

    def keep(module, arguments, result):
        states.append(result[0] if isinstance(result, tuple) else result)

    base = model.base_model
    layers = base.h if hasattr(base, "h") else base.layers
    layers[0].register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
    for layer in layers:
        layer.register_forward_hook(keep)
    last = next(part for part in base.children() if "norm" in type(part).__name__.lower())
    last = getattr(base, "final_layernorm", last)
    last.register_forward_hook(keep)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids).long()).logits
        found = torch.stack(states).numpy()
        half = model.half()(torch.from_numpy(ids).long()).logits.float()
    return {
        "ids": ids,
        "logits": logits.numpy(),
        "states": found,
        "float16_difference": (half - logits).abs().max().numpy(),
    }


def continued(folder: Path) -> dict[str, np.ndarray]:
    """Return greedy tokens, and the logits of sequences so short that LongRoPE is not long."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 11))
    tokens = torch.from_numpy(ids)
    with torch.no_grad():
        short = model(tokens[:, :SHORT]).logits.numpy()
        for _ in range(NEW_TOKENS):
            given = tokens[:, :PROMPT] if tokens.shape[1] == ids.shape[1] else tokens
            tokens = torch.cat([given, model(given).logits[:, -1:].argmax(-1)], 1)
    return {"short_logits": short, "greedy": tokens[:, PROMPT:].numpy().astype(np.int32)}


def write_newer() -> None:
    """Write newer.zip."""
    sys.path.insert(0, str(HERE / "training"))
    import write_gradients

    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        found: dict[str, np.ndarray] = {}
        for name, (kind, numbers) in NEWER.items():
            found |= write(name, kind, numbers, top)
            (top / name / "generation_config.json").unlink(missing_ok=True)
            older = older_config(json.loads((top / name / "config.json").read_text()))
            (top / name / "older.json").write_text(json.dumps(older, indent=2) + "\n")
            if name in ADAPTED:
                options = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
                kept = top / name / "adapters"
                of_gradients = write_gradients.write(name, options, top, kept)
                found |= {key.replace("/", "/lora/", 1): each for key, each in of_gradients.items()}
        np.savez_compressed(top / "expected.npz", **found)
        pack(top, HERE / "newer.zip")


def older_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the form that a config.json had before transformers 5, of Gemma 4 as published."""
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.51.0"
    if config["model_type"].startswith("gemma4"):
        del config["per_layer_config"]
        return config | {name: GEMMA4[name] for name in GEMMA4 if "global" in name}
    rope = config.pop("rope_parameters")
    if LOCAL in rope:
        config["rope_local_base_freq"] = rope[LOCAL]["rope_theta"]
        rope = rope[GLOBAL]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    if kind == "longrope":
        del config["rope_scaling"]["original_max_position_embeddings"]
    types = config.pop("layer_types", None)
    if config["model_type"] == "gemma3_text":
        config["sliding_window_pattern"] = 3
    elif config["model_type"] == "ministral":
        config["layer_types"] = types
    return config


def write_older(folder: Path) -> None:
    """Give config.json, and of GPT-2 the tensors, the form that they had before transformers 5."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.37.0"
    rope = config.pop("rope_parameters", None)
    if rope is not None:
        config["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        kind = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    path.write_text(json.dumps(config, indent=2) + "\n")
    if config["model_type"] == "gpt2":
        import torch
        from safetensors.torch import load_file, save_file

        file = folder / "model.safetensors"
        tensors = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
        mask = torch.ones(16, 16).tril().reshape(1, 1, 16, 16)
        for layer in range(2):
            tensors[f"h.{layer}.attn.bias"] = mask.clone()
        save_file(tensors, file, metadata={"format": "pt"})


def packed_weights(name: str) -> np.ndarray:
    """Return the weights before quantisation, in float16."""
    rng = np.random.default_rng(5)
    spread = rng.uniform(0.01, 0.1, (SHAPES[name][0], 1))
    return (spread * rng.standard_normal(SHAPES[name])).astype(np.float16)


def write_packed(name: str) -> None:
    import torch
    from bitsandbytes import functional
    from safetensors.torch import save_file

    codes, state = functional.quantize_4bit(
        torch.from_numpy(packed_weights(name)), blocksize=64, compress_statistics=name == "nested",
        quant_type="nf4",
    )  # fmt: skip
    parts = {f"linear.weight.{part}": array for part, array in state.as_dict(packed=True).items()}
    state.dtype = torch.float32  # which keeps what float16 would round
    expected = functional.dequantize_4bit(codes, state)[list(ROWS)].contiguous()
    tensors = {"linear.weight": codes, **parts, "expected": expected}
    save_file(tensors, PACKED / f"{name}.safetensors")


if __name__ == "__main__" and sys.argv[1:] == ["newer"]:
    write_newer()
elif __name__ == "__main__":
    found: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, (kind, numbers) in MODELS.items():
            found |= write(name, kind, numbers, Path(temporary))
        pack(Path(temporary), HERE / "checkpoints.zip")
    np.savez_compressed(HERE / "expected.npz", **found)
    PACKED.mkdir(exist_ok=True)
    for each in SHAPES:
        write_packed(each)
