"""The config.json of a model, as transformers before and from version 5 reads it."""

from __future__ import annotations

from cupyattn import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from cupyattn.models.checkpoints.fields import Fields
from cupyattn.models.checkpoints.hugging_face import config_of
from cupyattn.models.config import Config, RopeScaling
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.errors import error


def config_json(config: Config, where: str) -> Json:
    """Return the config.json of a model: what `config_of` reads as this config.

    Options of rotary embeddings have the names that transformers before and from version 5 read.
    Raises NotImplementedError if no config.json describes the model of the file `where`.
    """
    written = _gpt2_json(config) if config.architecture == "gpt2" else _other_json(config)
    ends = config.eos_ids
    written |= {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(ends) if len(ends) > 1 else (*ends, None)[0],
    }
    if isinstance(config.rope_scaling, LinearScaling):  # which `extended` must not extend again
        original = max(1, int(config.max_positions / config.rope_scaling.factor))
        written["rope_scaling"].setdefault("original_max_position_embeddings", original)
    try:
        same = config_of(Fields(written, where), Fields({}, where)) == config
    except (ValueError, NotImplementedError):
        same = False
    if same:
        return written
    raise error(
        NotImplementedError,
        f"{where}: no config.json of transformers describes {config}",
        "a model is written as a folder of one of the architectures that are read",
        "keep the adapters next to the file: generate FILE ... --adapters DIR needs no merging",
    )


def _gpt2_json(config: Config) -> Json:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": config.hidden_size,
        "n_head": config.num_heads,
        "n_layer": config.num_layers,
        "n_inner": config.intermediate_size,
        "n_positions": config.max_positions,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": _NAMED.get(config.activation),
    }


_NAMED = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_new",
    "relu": "relu",
    "silu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_pytorch_tanh",
    "swiglu": "silu",
}
"""The name of an activation in config.json."""
_CLASSES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def _kind(config: Config) -> str:
    """Return the model type of a config that is not GPT-2's."""
    if config.architecture == "gemma":
        return "gemma3_text" if config.qk_norm else "gemma2"
    if config.architecture == "gemma4":
        return "gemma4_text"
    if config.architecture != "llama":
        return config.architecture
    if config.qk_norm:
        return "qwen3"
    if config.unrotated_layers:
        return "smollm3"
    if config.query_growth is not None:
        return "ministral3"
    if config.window_size is not None:
        return "ministral" if config.global_layers else "mistral"
    return "qwen2" if config.qkv_bias and not config.output_bias else "llama"


def _other_json(config: Config) -> Json:
    kind = _kind(config)
    written: Json = {
        "model_type": kind,
        "architectures": [_CLASSES[kind]],
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "hidden_act": _NAMED.get(config.activation),
        "rope_theta": config.rope_base,
        "layer_norm_eps" if kind == "phi" else "rms_norm_eps": config.norm_eps,
    }
    scaling = {} if config.rope_scaling is None else _scaling_json(config.rope_scaling)
    if config.query_growth is not None:
        rate, length = config.query_growth
        scaling |= {"llama_4_scaling_beta": rate, "original_max_position_embeddings": length}
    if scaling:
        written["rope_scaling"] = {"rope_type": "default", **scaling}
    if isinstance(config.rope_scaling, LongRopeScaling):
        length = config.rope_scaling.original_length
        written["original_max_position_embeddings"] = length
    if config.rotary_dim != config.head_dim or kind == "phi":
        written["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    if kind not in ("phi", "phi3"):
        written["attention_bias"] = config.qkv_bias and kind != "qwen2"
    if kind in ("llama", "smollm3"):
        written["mlp_bias"] = config.mlp_bias
    if kind == "smollm3":
        layers = range(config.num_layers)
        written["no_rope_layers"] = [int(i not in config.unrotated_layers) for i in layers]
    if config.architecture == "gemma":
        written |= _gemma_json(config, kind)
    if kind == "gemma4_text":
        written |= _gemma4_json(config)
    return {**written, **_windows_json(config, kind)}


def _gemma_json(config: Config, kind: str) -> Json:
    scale = None if config.softmax_scale is None else round(config.softmax_scale**-2, 6)
    found: Json = {
        "hidden_activation": _NAMED.get(config.activation),
        "query_pre_attn_scalar": int(scale) if scale and scale.is_integer() else scale,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }
    if kind == "gemma3_text":
        found["rope_local_base_freq"] = config.local_rope_base
    return found


def _gemma4_json(config: Config) -> Json:
    dim, part = config.global_head_dim or config.head_dim, config.global_rotary_dim or 0
    share = part / dim
    if 2 * int(share * dim / 2) != part:  # it was rounded down, and readers truncate the product
        share = (part + 0.5) / dim
    return {
        "hidden_activation": _NAMED.get(config.activation),
        "final_logit_softcapping": config.logit_softcap,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": config.keys_as_values,
        "global_head_dim": config.global_head_dim,
        "num_global_key_value_heads": config.global_kv_heads,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": config.rope_base,
                "partial_rotary_factor": share,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": config.local_rope_base},
        },
    }


def _windows_json(config: Config, kind: str) -> Json:
    if kind in ("llama", "phi"):
        return {}
    if config.window_size is None:
        return {"sliding_window": None}
    local = [layer not in config.global_layers for layer in range(config.num_layers)]
    found: Json = {"sliding_window": config.window_size[0] + 1}
    if kind in ("qwen2", "qwen3", "smollm3"):
        found["use_sliding_window"] = True
    if not all(local) or config.architecture in ("gemma", "gemma4"):
        found["layer_types"] = [f"{('full', 'sliding')[each]}_attention" for each in local]
    return found


def _scaling_json(scaling: RopeScaling) -> Json:
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, Llama3Scaling):
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    if isinstance(scaling, LongRopeScaling):
        return {
            "rope_type": "longrope",
            "short_factor": list(scaling.short_factors),
            "long_factor": list(scaling.long_factors),
            "attention_factor": scaling.attention_factor,
        }
    if isinstance(scaling, YarnScaling):
        found = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_length,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
        }
        if scaling.attention_factor is not None:
            found["attention_factor"] = scaling.attention_factor
        return found
    return {}
