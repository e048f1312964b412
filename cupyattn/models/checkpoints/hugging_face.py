"""A model's folder as transformers writes it: config.json, safetensors, tokenizer files.

config.json is read as transformers up to version 4 and from 5 on write it.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from cupyattn import LinearScaling, Llama3Scaling, YarnScaling
from cupyattn.models.checkpoints.contents import HUGGING_FACE, Checkpoint, damaged
from cupyattn.models.checkpoints.fields import Fields
from cupyattn.models.checkpoints.quantization import unpacking_of
from cupyattn.models.checkpoints.safetensors_files import Stored, read_safetensors
from cupyattn.models.config import Config, RopeScaling, checked, extended, unknown_architecture
from cupyattn.models.tokenizer import tokenizer_of_folder
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.reading import read_json

_OF_LLAMA = ("llama", "mistral", "qwen2")
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_GATED = {"gelu": "geglu", "silu": "swiglu", "swish": "swiglu"}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def config_of(fields: Fields, generation: Fields) -> Config:
    """Return the config of a folder from config.json and generation_config.json."""
    kind = fields.given.get("model_type")
    if kind == "gpt2":
        config = _gpt2(fields)
    elif kind in _OF_LLAMA:
        config = _llama(fields, kind)
    elif kind == "phi":
        config = _phi(fields)
    else:
        raise unknown_architecture(kind, fields.where)
    begin = (*fields.ids("bos_token_id"), None)[0]
    ends = (*fields.ids("eos_token_id"), *generation.ids("eos_token_id"))
    config = extended(config, _original_length(fields))
    try:
        return checked(config._replace(bos_id=begin, eos_ids=tuple(dict.fromkeys(ends))))
    except ValueError as failure:
        raise damaged(fields.where, str(failure)) from failure


def _original_length(fields: Fields) -> int | None:
    """Return the length before the scaling of rotary embeddings, if the config has it."""
    rope = {**fields.object("rope_scaling"), **fields.object("rope_parameters")}
    where = f"{fields.where}, rotary embedding"
    return Fields(rope, where).integer("original_max_position_embeddings", 0, least=0) or None


def _gpt2(fields: Fields) -> Config:
    width = fields.integer("n_embd")
    heads = fields.integer("n_head")
    fields.refuse("scale_attn_weights", True)
    fields.refuse("scale_attn_by_inverse_layer_idx", False)
    fields.refuse("add_cross_attention", False)
    return Config(
        "gpt2",
        vocab_size=fields.integer("vocab_size"),
        num_layers=fields.integer("n_layer"),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        intermediate_size=fields.integer("n_inner", 4 * width),
        max_positions=fields.integer("n_positions"),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=_ACTIVATIONS[fields.choice("activation_function", _ACTIVATIONS, "gelu_new")],
        tied=fields.flag("tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def _llama(fields: Fields, kind: str) -> Config:
    biased = fields.flag("attention_bias", False)
    return Config(
        "llama",
        **_sizes_and_rope(fields),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_GATED[fields.choice("hidden_act", _GATED, "silu")],
        window_size=_window(fields, kind),
        qkv_bias=biased or kind == "qwen2",
        output_bias=biased and kind == "llama",
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _phi(fields: Fields) -> Config:
    fields.refuse("qk_layernorm", False)
    return Config(
        "phi",
        **_sizes_and_rope(fields, rotated=0.5),
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        activation=_ACTIVATIONS[fields.choice("hidden_act", _ACTIVATIONS, "gelu_new")],
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


def _sizes_and_rope(fields: Fields, rotated: float = 1.0) -> Json:
    """Read the options that all models but GPT-2 have; `rotated` is the part of a head."""
    heads, width = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", width // heads)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "intermediate_size": fields.integer("intermediate_size"),
        "max_positions": fields.integer("max_position_embeddings"),
        "tied": fields.flag("tie_word_embeddings", False),
        **_rope(fields, head_dim, rotated),
    }


_MISTRAL_WINDOW = 4096
"""The sliding_window of a Mistral config.json that does not mention it."""


def _window(fields: Fields, kind: str) -> tuple[int, int] | None:
    """Return the window: `sliding_window` includes the key of the query itself."""
    if kind == "qwen2":  # it has one in its last layers only, and no published model uses it
        fields.refuse("use_sliding_window", False)
    # transformers takes a field that is absent for its default, and null for no window.
    absent = 0 if "sliding_window" in fields.given else _MISTRAL_WINDOW
    window = fields.integer("sliding_window", absent, least=0) if kind == "mistral" else 0
    return (window - 1, 0) if window else None


def _rope(fields: Fields, head_dim: int, rotated: float) -> Json:
    """Read rope_parameters, or the fields that transformers before 5 has instead."""
    fields.refuse("rope_interleaved", False)
    older = ("rope_theta", "partial_rotary_factor")
    rope = Fields(
        {
            **{name: fields.given.get(name) for name in older},
            **fields.object("rope_scaling"),
            **fields.object("rope_parameters"),
        },
        f"{fields.where}, rotary embedding",
    )
    name = "type" if rope.given.get("rope_type") is None else "rope_type"
    kind = rope.choice(name, _ROPE_TYPES, default="default")
    rotary_dim = int(head_dim * rope.number("partial_rotary_factor", rotated))
    trained = rope.integer(
        "original_max_position_embeddings", fields.integer("max_position_embeddings")
    )
    scaling: RopeScaling | None = None
    if kind == "linear":
        scaling = LinearScaling(rope.number("factor"))
    elif kind == "llama3":
        scaling = Llama3Scaling(
            rope.number("factor"),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            trained,
        )
    elif kind == "yarn":
        rope.refuse("mscale")
        rope.refuse("mscale_all_dim")
        rope.refuse("truncate", True)
        absent = rope.given.get("attention_factor") is None
        scaling = YarnScaling(
            rope.number("factor"),
            trained,
            rope.number("beta_fast", 32.0),
            rope.number("beta_slow", 1.0),
            None if absent else rope.number("attention_factor"),
        )
    base = rope.number("rope_theta", 10000.0)
    return {"rotary_dim": rotary_dim, "rope_base": base, "rope_scaling": scaling}


def config_json(config: Config, where: str) -> Json:
    """Return the config.json of a model: what `config_of` reads as this config.

    Options of rotary embeddings have the names that transformers before and from version 5 read.
    Raises NotImplementedError if no config.json describes the model of the file `where`.
    """
    written = _gpt2_json(config) if config.architecture == "gpt2" else _llama_or_phi_json(config)
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
        "a model is written as a folder of GPT-2, Llama, Mistral, Qwen2 or Phi",
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
    "swiglu": "silu",
}
"""The name of an activation in config.json."""


def _llama_or_phi_json(config: Config) -> Json:
    written: Json = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "hidden_act": _NAMED.get(config.activation),
        "rope_theta": config.rope_base,
    }
    if config.rope_scaling is not None:
        written["rope_scaling"] = _scaling_json(config.rope_scaling)
    if config.rotary_dim != config.head_dim or config.architecture == "phi":
        written["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    if config.architecture == "phi":
        return {
            "model_type": "phi",
            "architectures": ["PhiForCausalLM"],
            "layer_norm_eps": config.norm_eps,
            **written,
        }
    kind, name = "llama", "LlamaForCausalLM"
    if config.window_size is not None:
        kind, name = "mistral", "MistralForCausalLM"
        written["sliding_window"] = config.window_size[0] + 1
    elif config.qkv_bias and not config.output_bias:
        kind, name = "qwen2", "Qwen2ForCausalLM"
    return {
        "model_type": kind,
        "architectures": [name],
        "rms_norm_eps": config.norm_eps,
        "attention_bias": config.qkv_bias and kind != "qwen2",
        "mlp_bias": config.mlp_bias,
        **written,
    }


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


_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_BYTES = 16 << 20
"""Largest JSON file: the index of a model of 671 billion weights has 9 MB."""


def open_folder(folder: Path) -> Checkpoint:
    """Read the config of a folder and the names in its files, but no weights."""
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise error(
            ValueError,
            f"{folder} has adapters (adapter_config.json), and no model",
            "adapters add to the weights of a model, which is loaded first",
            f"pass the model as MODEL, and the folder as --adapters {folder}, or call "
            "LoraAdapters.load(model, folder)",
        )
    files = _files(folder)
    generation = folder / "generation_config.json"
    fields = _fields(folder / "config.json")
    unpack = unpacking_of(fields)
    config = config_of(
        fields, _fields(generation) if generation.exists() else Fields({}, str(generation))
    )
    stored: dict[str, Stored] = {}
    for file in files:
        for name, tensor in read_safetensors(file).items():
            if name in stored:
                raise damaged(str(file), f"the tensor {name} is in another file of the folder too")
            stored[name] = tensor
    return Checkpoint(
        str(folder),
        config,
        HUGGING_FACE[config.architecture],
        unpack(stored),
        partial(tokenizer_of_folder, folder),
    )


def _fields(path: Path) -> Fields:
    return Fields(read_object(path), str(path))


def read_object(path: Path) -> Json:
    """Read a JSON object from a file of a model; raises as `read_json`."""
    try:
        given = read_json(path, _MOST_BYTES, damaged)
    except FileNotFoundError:
        raise error(
            FileNotFoundError,
            f"{path.parent} has no {path.name}",
            "a model's folder has config.json, safetensors and mostly tokenizer.json, as "
            "transformers writes them",
            f"run: hf download NAME --local-dir {path.parent}, or pass a GGUF file",
        ) from None
    if not isinstance(given, dict):
        raise damaged(str(path), "it is not a JSON object")
    return given


def _files(folder: Path) -> list[Path]:
    if (folder / _ONE).is_file():
        return [folder / _ONE]
    if (folder / _INDEX).is_file():
        shards = read_object(folder / _INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise damaged(str(folder / _INDEX), "it has no weight_map")
        names = sorted({str(name) for name in shards.values()})
        for name in names:
            if Path(name).name != name:
                raise damaged(str(folder / _INDEX), f"{shown(name)} is not a file of the folder")
            if not os.path.isfile(folder / name):  # False as well for a name that is too long
                raise damaged(str(folder), f"{name} is missing, which {_INDEX} names")
        return [folder / name for name in names]
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        raise error(
            ValueError,
            f"{folder} has {pickled[0]}, but no safetensors",
            "weights must be in safetensors: a pickle can run any program, and is never opened",
            "download the model's safetensors, or if you trust the file convert it with "
            "transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)",
        )
    raise error(
        FileNotFoundError,
        f"{folder} has neither {_ONE} nor {_INDEX}",
        "the weights of a model must be in safetensors with one of these names",
        f"run: hf download NAME --local-dir {folder}",
    )
