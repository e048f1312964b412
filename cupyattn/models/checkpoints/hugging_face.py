"""A model's folder as transformers writes it: config.json, safetensors, tokenizer files.

config.json is read as transformers up to version 4 and from 5 on write it.
"""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path

from cupyattn import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from cupyattn.models.checkpoints.contents import HUGGING_FACE, Checkpoint, damaged
from cupyattn.models.checkpoints.fields import Fields
from cupyattn.models.checkpoints.quantization import unpacking_of
from cupyattn.models.checkpoints.safetensors_files import Stored, read_safetensors
from cupyattn.models.config import Config, RopeScaling, checked, extended, unknown_architecture
from cupyattn.models.tokenizer import tokenizer_of_folder
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.reading import read_json

_OF_LLAMA = ("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "smollm3")
_OF_GEMMA = ("gemma2", "gemma3_text")
_OF_GEMMA4 = ("gemma4_text", "gemma4_unified_text")
_WITH_TEXT = ("gemma3", "gemma4", "gemma4_unified", "mistral3")
"""Models of text and images, whose `text_config` may be of a kind above."""
_GEMMA3: Json = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
_DEFAULTS: dict[str, Json] = {
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA3 | {"vocab_size": 262_144},
    "gemma4_unified_text": _GEMMA3 | {"vocab_size": 262_144, "max_position_embeddings": 262_144},
}
"""The numbers that text_configs may leave out."""
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_GATED = {
    "gelu": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
    "silu": "swiglu",
    "swish": "swiglu",
}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def config_of(fields: Fields, generation: Fields) -> Config:
    """Return the config of a folder from config.json and generation_config.json."""
    kind = fields.given.get("model_type")
    if kind in _WITH_TEXT:
        fields, kind = _text_of(fields, kind)
    if kind == "gpt2":
        config = _gpt2(fields)
    elif kind in _OF_LLAMA:
        config = _llama(fields, kind)
    elif kind == "phi":
        config = _phi(fields)
    elif kind == "phi3":
        config = _phi3(fields)
    elif kind in _OF_GEMMA:
        config = _gemma(fields, kind)
    elif kind in _OF_GEMMA4:
        config = _gemma4(fields, kind)
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


def _text_of(fields: Fields, kind: str) -> tuple[Fields, str]:
    """Return the config of the text model in that of a model of text and images, and its kind."""
    text = fields.object("text_config")
    own = text.get("model_type", f"{kind}_text" if kind != "mistral3" else None)
    if own not in (*_OF_LLAMA, *_OF_GEMMA, *_OF_GEMMA4):
        raise unknown_architecture(own, f"{fields.where}, text_config")
    outer = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
    given = {name: fields.given[name] for name in outer if fields.given.get(name) is not None}
    return fields._replace(given={**_DEFAULTS.get(own, {}), **given, **text}), own


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
    head_dim = {"qwen3": 128, "ministral3": 128}.get(kind)
    bases = {"smollm3": 2e6, "ministral3": 1e6}
    sizes = _sizes(fields, head_dim)
    rope = _rope(fields, sizes["head_dim"], base=bases.get(kind, 10000.0))
    config = Config(
        "llama",
        **sizes,
        **rope,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_GATED[fields.choice("hidden_act", _GATED, "silu")],
        qkv_bias=biased or kind == "qwen2",
        output_bias=biased and kind in ("llama", "qwen3", "smollm3"),
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=kind == "qwen3",
    )
    if kind == "smollm3":
        config = config._replace(unrotated_layers=_unrotated(fields, config.num_layers))
    return config._replace(**_windows(fields, kind, config))


def _phi(fields: Fields) -> Config:
    fields.refuse("qk_layernorm", False)
    sizes = _sizes(fields)
    return Config(
        "phi",
        **sizes,
        **_rope(fields, sizes["head_dim"], 0.5),
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        activation=_ACTIVATIONS[fields.choice("hidden_act", _ACTIVATIONS, "gelu_new")],
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


def _phi3(fields: Fields) -> Config:
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.refuse(name, False)
    sizes = _sizes(fields)
    config = Config(
        "phi3",
        **sizes,
        **_rope(fields, sizes["head_dim"]),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        activation=_GATED[fields.choice("hidden_act", _GATED, "silu")],
    )
    return config._replace(**_windows(fields, "phi3", config))


def _gemma(fields: Fields, kind: str) -> Config:
    fields.refuse("use_bidirectional_attention", False)
    biased = fields.flag("attention_bias", False)
    sizes = _sizes(fields, 256)
    main, local = fields, None
    if kind == "gemma3_text":
        ropes = fields.object("rope_parameters")
        local = _local_base(fields, ropes)
        if ropes:
            main = fields._replace(given={**fields.given, "rope_parameters": ropes.get(_GLOBAL)})
    cap, last_cap = (50.0, 30.0) if kind == "gemma2" else (None, None)
    config = Config(
        "gemma",
        **{**sizes, "tied": fields.flag("tie_word_embeddings", True)},
        **_rope(main, sizes["head_dim"], base=10000.0 if kind == "gemma2" else 1e6),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_GATED[fields.choice("hidden_activation", _GATED, "gelu_pytorch_tanh")],
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=kind == "gemma3_text",
        local_rope_base=local,
        softmax_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=_cap(fields, "attn_logit_softcapping", cap),
        logit_softcap=_cap(fields, "final_logit_softcapping", last_cap),
        embedding_scale=sizes["hidden_size"] ** 0.5,
    )
    return config._replace(**_windows(fields, kind, config))


_NOT_DENSE = {
    "hidden_size_per_layer_input": (256, "an embedding for each layer"),
    "num_kv_shared_layers": (0, "layers that share keys and values"),
    "enable_moe_block": (False, "a mixture of experts"),
}
"""Fields that dense models of Gemma 4 have off: defaults of gemma4_text, and what they are."""
_GEMMA4_WINDOWS = {"gemma4_text": 512, "gemma4_unified_text": 1024}


def _gemma4(fields: Fields, kind: str) -> Config:
    found = [
        f"{what} ({name})"
        for name, (default, what) in _NOT_DENSE.items()
        if fields.given.get(name, default if kind == "gemma4_text" else 0)
    ]
    if found:
        raise error(
            NotImplementedError,
            f"{fields.where}: a model of Gemma 4 with {', '.join(found)}",
            "there is code for models of Gemma 4 without them, as those of 12B and 31B weights are",
            "load a model of that kind",
        )
    if fields.given.get("use_bidirectional_attention") != "vision":  # which text does not have
        fields.refuse("use_bidirectional_attention")
    sizes = _sizes(fields, 256)
    layers = range(sizes["num_layers"])
    types = fields.words("layer_types", (_LOCAL, _GLOBAL), len(layers))
    if types is None:
        types = tuple([_LOCAL if (layer + 1) % 6 else _GLOBAL for layer in layers])
    everywhere = tuple([i for i in layers if types[i] == _GLOBAL or i == layers[-1]])
    ropes = fields.object("rope_parameters")
    where = f"{fields.where}, rotary embedding of {_GLOBAL}"
    rope = Fields(Fields(ropes, fields.where).object(_GLOBAL), where)
    rope.choice("rope_type", ("proportional",), "proportional")
    rope.refuse("factor", 1.0)
    shares = fields.flag("attention_k_eq_v", False)
    dim, groups = _heads_of_global_layers(fields, sizes, everywhere, shares)
    part = rope.number("partial_rotary_factor", 0.25)
    biased = fields.flag("attention_bias", False)
    return Config(
        "gemma4",
        **{**sizes, "tied": fields.flag("tie_word_embeddings", True)},
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_GATED[fields.choice("hidden_activation", _GATED, "gelu_pytorch_tanh")],
        rotary_dim=sizes["head_dim"],
        rope_base=rope.number("rope_theta", 1e6),
        local_rope_base=_local_base(fields, ropes),
        window_size=(fields.integer("sliding_window", _GEMMA4_WINDOWS[kind]) - 1, 0),
        global_layers=everywhere,
        global_head_dim=dim,
        global_kv_heads=groups,
        global_rotary_dim=2 * int(part * dim / 2),
        keys_as_values=shares,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
        softmax_scale=1.0,
        logit_softcap=_cap(fields, "final_logit_softcapping", None),
        embedding_scale=sizes["hidden_size"] ** 0.5,
    )


def _heads_of_global_layers(
    fields: Fields, sizes: Json, everywhere: tuple[int, ...], shares: bool
) -> tuple[int, int]:
    """Return D and G of Gemma 4's global layers: two fields, or `per_layer_config` instead."""
    if fields.given.get("per_layer_config") is None:
        groups = sizes["num_kv_heads"]
        if shares:
            groups = fields.integer("num_global_key_value_heads", groups)
        return fields.integer("global_head_dim", 512), groups
    listed = fields.object("per_layer_config")
    own = listed.get(str(everywhere[0]), {})
    if listed != ({str(layer): own for layer in everywhere} if own else {}):
        raise damaged(fields.where, f"per_layer_config differs among layers: {shown(listed)}")
    if not isinstance(own, dict) or not own.keys() <= {"head_dim", "num_key_value_heads"}:
        raise damaged(fields.where, f"per_layer_config has more than head dims: {shown(listed)}")
    heads = Fields(own, f"{fields.where}, per_layer_config")
    return (
        heads.integer("head_dim", sizes["head_dim"]),
        heads.integer("num_key_value_heads", sizes["num_kv_heads"]),
    )


def _cap(fields: Fields, name: str, default: float | None) -> float | None:
    """Return a softcap; null means none, and what is absent the default."""
    if name not in fields.given:
        return default
    return None if fields.given[name] is None else fields.number(name)


def _local_base(fields: Fields, ropes: Json) -> float:
    """Return the base of rotary positions in Gemma 3's layers with a window."""
    where = f"{fields.where}, rotary embedding of {_LOCAL}"
    given = Fields(ropes, fields.where).object(_LOCAL)
    rope = Fields(given or {"rope_theta": fields.given.get("rope_local_base_freq")}, where)
    rope.choice("rope_type", ("default",), "default")
    return rope.number("rope_theta", 10000.0)


def _unrotated(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return SmolLM3's layers without rotary positions, the zeros of `no_rope_layers`."""
    given = fields.given.get("no_rope_layers")
    if given is None:
        step = fields.integer("no_rope_layer_interval", 4)
        return tuple(range(step - 1, layers, step))
    if not isinstance(given, list) or len(given) < layers or not {*given} <= {0, 1}:
        raise damaged(fields.where, f"no_rope_layers is {shown(given)}, not 0 or 1 for each layer")
    return tuple(layer for layer in range(layers) if not given[layer])


def _sizes(fields: Fields, head_dim: int | None = None) -> Json:
    """Read the sizes that all models but GPT-2 have."""
    heads, width = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": fields.integer("head_dim", head_dim or width // heads),
        "intermediate_size": fields.integer("intermediate_size"),
        "max_positions": fields.integer("max_position_embeddings"),
        "tied": fields.flag("tie_word_embeddings", False),
    }


_WINDOWS = {"mistral": 4096, "ministral": 4096, "gemma2": 4096, "gemma3_text": 4096}
"""The windows of configs that do not have the field; null is no window."""
_PATTERNS = {"gemma2": 2, "gemma3_text": 6}
"""Every how many layers one sees all keys, unless the config names the layers."""
_MAY_SLIDE = ("qwen2", "qwen3", "smollm3")
"""Models that have windows only with `use_sliding_window`."""


def _windows(fields: Fields, kind: str, config: Config) -> Json:
    """Return the window and the layers without it; `sliding_window` counts the query's own key."""
    window = 0
    if kind != "llama" and fields.flag("use_sliding_window", kind not in _MAY_SLIDE):
        has_one = fields.given.get("sliding_window", _WINDOWS.get(kind)) is not None
        window = fields.integer("sliding_window", _WINDOWS.get(kind), least=0) if has_one else 0
    if not window:
        return {}
    layers = range(config.num_layers)
    types = fields.words("layer_types", (_LOCAL, _GLOBAL), len(layers))
    if types is not None:
        everywhere = tuple(layer for layer in layers if types[layer] == _GLOBAL)
    elif kind in ("qwen2", "qwen3"):
        everywhere = tuple(layers[: fields.integer("max_window_layers", 28, least=0)])
    elif kind == "smollm3":
        everywhere = tuple(layer for layer in layers if layer not in config.unrotated_layers)
    else:
        step = fields.integer("sliding_window_pattern", _PATTERNS.get(kind, len(layers) + 1))
        everywhere = tuple(layers[step - 1 :: step])
    if len(everywhere) == len(layers):
        return {}
    return {"window_size": (window - 1, 0), "global_layers": everywhere}


def _rope(fields: Fields, head_dim: int, rotated: float = 1.0, base: float = 10000.0) -> Json:
    """Read rope_parameters, or the fields that transformers before 5 has instead.

    `rotated` is the part of a head, and `base` the base, of configs without these fields.
    """
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
    if "short_factor" in rope.given and rope.given.get(name) in ("su", "yarn"):
        rope.given[name] = "longrope"  # as it was first called
    kind = rope.choice(name, _ROPE_TYPES, default="default")
    rotary_dim = int(head_dim * rope.number("partial_rotary_factor", rotated))
    positions = fields.integer("max_position_embeddings")
    trained = rope.integer("original_max_position_embeddings", positions)
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
        scaling = _yarn(rope, trained)
    elif kind == "longrope":
        trained = fields.integer("original_max_position_embeddings", trained)
        scaling = _longrope(rope, trained, positions)
    found: Json = {
        "rotary_dim": rotary_dim,
        "rope_base": rope.number("rope_theta", base),
        "rope_scaling": scaling,
    }
    if rope.given.get("llama_4_scaling_beta") is not None:
        found["query_growth"] = rope.number("llama_4_scaling_beta"), trained
    return found


def _yarn(rope: Fields, trained: int) -> YarnScaling:
    rope.refuse("truncate", True)
    factor = rope.number("factor")
    attention = None
    if rope.given.get("attention_factor") is not None:
        attention = rope.number("attention_factor")
    elif rope.given.get("mscale") and rope.given.get("mscale_all_dim"):
        one, all_dim = (
            0.1 * rope.number(name) * math.log(max(factor, 1.0)) + 1
            for name in ("mscale", "mscale_all_dim")
        )
        attention = one / all_dim
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    return YarnScaling(factor, trained, fast, slow, attention)


def _longrope(rope: Fields, trained: int, positions: int) -> LongRopeScaling:
    """Read the two lists; the scale is that of arXiv:2402.13753, for the model's longest text."""
    factor = rope.number("factor", positions / trained)
    scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return LongRopeScaling(
        rope.numbers("short_factor"),
        rope.numbers("long_factor"),
        trained,
        rope.number("attention_factor", scale),
    )


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
