"""From config.json, as transformers up to 4 and from 5 on write it, to a `Config`."""

from __future__ import annotations

from typing import Any, NamedTuple

from cupyattn import LinearScaling, Llama3Scaling, YarnScaling
from cupyattn.errors import error, shown
from cupyattn.models.checkpoints.checkpoint import damaged
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


def config_of(given: dict[str, Any], generation: dict[str, Any], where: str) -> Config:
    """Return the config of a folder.

    Parameters
    ----------
    given, generation : dict
        What config.json holds, and generation_config.json if there is one.
    where : str
        The file, for errors.

    Raises
    ------
    NotImplementedError
        For an architecture, a kind of rotary embedding or another trait that there is no code for.
    ValueError
        For numbers that are missing or do not fit together.
    """
    fields = _Fields(given, where)
    kind = given.get("model_type")
    if given.get("quantization_config"):
        raise error(
            NotImplementedError,
            f"{where}: weights that are quantised in safetensors",
            "safetensors are read of float32, float16 and bfloat16",
            "take the model as it was before it was quantised, or a GGUF file of it",
        )
    if kind == "gpt2":
        config = _gpt2(fields)
    elif kind in _OF_LLAMA:
        config = _llama(fields, kind)
    elif kind == "phi":
        config = _phi(fields)
    else:
        raise unknown_architecture(kind)
    ends = [*_ids(given.get("eos_token_id")), *_ids(generation.get("eos_token_id"))]
    begin = (*_ids(given.get("bos_token_id")), None)[0]
    try:
        return checked(config._replace(bos_id=begin, eos_ids=tuple(dict.fromkeys(ends))))
    except ValueError as failure:
        raise damaged(where, str(failure)) from failure


def _gpt2(fields: _Fields) -> Config:
    width = fields.integer("n_embd")
    heads = fields.integer("n_head")
    fields.refuse("scale_attn_weights", True, (True,))
    fields.refuse("scale_attn_by_inverse_layer_idx", False, (False,))
    fields.refuse("add_cross_attention", False, (False,))
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
        activation=fields.choice("activation_function", _ACTIVATIONS, "gelu_new"),
        tied=fields.flag("tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def _llama(fields: _Fields, kind: str) -> Config:
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
        activation=fields.choice("hidden_act", _GATED, "silu"),
        rotary_dim=rope.rotary_dim,
        rope_base=rope.base,
        rope_scaling=rope.scaling,
        tied=fields.flag("tie_word_embeddings", False),
        window_size=_window(fields, kind),
        qkv_bias=biased or kind == "qwen2",
        output_bias=biased and kind == "llama",
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _phi(fields: _Fields) -> Config:
    heads, head_dim = _heads(fields)
    rope = _rope(fields, head_dim, partial=0.5)
    fields.refuse("qk_layernorm", False, (False,))
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
        activation=fields.choice("hidden_act", _ACTIVATIONS, "gelu_new"),
        rotary_dim=rope.rotary_dim,
        rope_base=rope.base,
        rope_scaling=rope.scaling,
        tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


def _heads(fields: _Fields) -> tuple[int, int]:
    heads = fields.integer("num_attention_heads")
    return heads, fields.integer("head_dim", fields.integer("hidden_size") // max(heads, 1))


def _window(fields: _Fields, kind: str) -> tuple[int, int] | None:
    """Return the window: `sliding_window` counts a query's own key."""
    if kind == "qwen2":  # it has one in its last layers only, and no published model uses it
        fields.refuse("use_sliding_window", False, (False,))
    window = fields.integer("sliding_window", 0) if kind == "mistral" else 0
    return (window - 1, 0) if window else None


class _Rope(NamedTuple):
    rotary_dim: int
    base: float
    scaling: RopeScaling | None


def _rope(fields: _Fields, head_dim: int, partial: float = 1.0) -> _Rope:
    """Read rope_parameters; before transformers 5 rope_theta, rope_scaling and the share apart."""
    given, where = fields.given, fields.where
    older = {
        "rope_theta": given.get("rope_theta", 10000.0),
        "partial_rotary_factor": given.get("partial_rotary_factor", partial),
        **(given.get("rope_scaling") or {}),
    }
    rope = _Fields({**older, **(given.get("rope_parameters") or {})}, f"{where}, rotary embedding")
    kind = rope.given.get("rope_type", rope.given.get("type", "default"))
    rotary_dim = int(head_dim * rope.number("partial_rotary_factor"))
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
        rope.refuse("mscale", None, (None,))
        rope.refuse("mscale_all_dim", None, (None,))
        rope.refuse("truncate", True, (True,))
        attention = rope.given.get("attention_factor")
        scaling = YarnScaling(
            rope.number("factor"),
            trained,
            rope.number("beta_fast", 32.0),
            rope.number("beta_slow", 1.0),
            None if attention is None else rope.number("attention_factor"),
        )
    elif kind not in _ROPE_TYPES:
        raise error(
            NotImplementedError,
            f"{where}: rotary embedding of the type {shown(kind)}",
            f"types are {', '.join(map(repr, _ROPE_TYPES))}",
            "load a model of one of these",
        )
    return _Rope(rotary_dim, rope.number("rope_theta"), scaling)


class _Fields(NamedTuple):
    """The values of a JSON object, read with errors that name them; null is as if absent."""

    given: dict[str, Any]
    where: str

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise damaged(self.where, f"{name} is {shown(value)}, which is no count")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise damaged(self.where, f"{name} is {shown(value)}, which is no number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise damaged(self.where, f"{name} is {shown(value)}, neither true nor false")
        return value

    def choice(self, name: str, allowed: dict[str, str], default: str) -> str:
        value = self._value(name, default)
        if value not in allowed:
            raise self._unsupported(name, value, tuple(allowed))
        return allowed[value]

    def refuse(self, name: str, default: Any, allowed: tuple[Any, ...]) -> None:
        value = self.given.get(name, default)
        if value not in allowed:
            raise self._unsupported(name, value, allowed)

    def _unsupported(self, name: str, value: Any, allowed: tuple[Any, ...]) -> Exception:
        return error(
            NotImplementedError,
            f"{self.where}: {name} is {shown(value)}",
            f"there is code for {', '.join(map(repr, allowed))}",
            "load a model of that kind",
        )

    def _value(self, name: str, default: Any) -> Any:
        value = self.given.get(name)
        if value is None:
            value = default
        if value is None:
            raise damaged(self.where, f"it has no {name}")
        return value


def _ids(given: Any) -> list[int]:
    several = given if isinstance(given, list) else [given]
    return [each for each in several if isinstance(each, int) and not isinstance(each, bool)]
