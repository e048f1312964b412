"""From config.json, as transformers up to 4 and from 5 on write it, to a `Config`."""

from __future__ import annotations

from typing import NamedTuple

from cupyattn import LinearScaling, Llama3Scaling, YarnScaling
from cupyattn.models.checkpoints.contents import damaged
from cupyattn.models.checkpoints.fields import Fields
from cupyattn.models.config import Config, RopeScaling, checked, unknown_architecture

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
    """Return the config of a folder.

    Parameters
    ----------
    fields, generation : Fields
        What config.json holds, and generation_config.json if there is one.

    Raises
    ------
    NotImplementedError
        For an architecture, a kind of rotary embedding or another trait that there is no code for.
    ValueError
        For values that are missing, of another kind, or do not fit together.
    """
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
    try:
        return checked(config._replace(bos_id=begin, eos_ids=tuple(dict.fromkeys(ends))))
    except ValueError as failure:
        raise damaged(fields.where, str(failure)) from failure


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
    heads, head_dim = _heads(fields)
    rope = _rope(fields, head_dim)
    biased = fields.flag("attention_bias", False)
    return Config(
        "llama",
        vocab_size=fields.integer("vocab_size"),
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=fields.integer("hidden_size"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        max_positions=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_GATED[fields.choice("hidden_act", _GATED, "silu")],
        rotary_dim=rope.rotary_dim,
        rope_base=rope.base,
        rope_scaling=rope.scaling,
        tied=fields.flag("tie_word_embeddings", False),
        window_size=_window(fields, kind),
        qkv_bias=biased or kind == "qwen2",
        output_bias=biased and kind == "llama",
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _phi(fields: Fields) -> Config:
    heads, head_dim = _heads(fields)
    rope = _rope(fields, head_dim, partial=0.5)
    fields.refuse("qk_layernorm", False)
    return Config(
        "phi",
        vocab_size=fields.integer("vocab_size"),
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=fields.integer("hidden_size"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        max_positions=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        activation=_ACTIVATIONS[fields.choice("hidden_act", _ACTIVATIONS, "gelu_new")],
        rotary_dim=rope.rotary_dim,
        rope_base=rope.base,
        rope_scaling=rope.scaling,
        tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


def _heads(fields: Fields) -> tuple[int, int]:
    heads = fields.integer("num_attention_heads")
    return heads, fields.integer("head_dim", fields.integer("hidden_size") // heads)


def _window(fields: Fields, kind: str) -> tuple[int, int] | None:
    """Return the window: `sliding_window` counts a query's own key."""
    if kind == "qwen2":  # it has one in its last layers only, and no published model uses it
        fields.refuse("use_sliding_window", False)
    window = fields.integer("sliding_window", 0, least=0) if kind == "mistral" else 0
    return (window - 1, 0) if window else None


class _Rope(NamedTuple):
    rotary_dim: int
    base: float
    scaling: RopeScaling | None


def _rope(fields: Fields, head_dim: int, partial: float = 1.0) -> _Rope:
    """Read rope_parameters; before transformers 5 rope_theta, rope_scaling and the share apart."""
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
    rotary_dim = int(head_dim * rope.number("partial_rotary_factor", partial))
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
    return _Rope(rotary_dim, rope.number("rope_theta", 10000.0), scaling)
