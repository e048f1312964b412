"""The numbers that describe a model, and the shapes of well-known ones."""

from __future__ import annotations

import math
from typing import NamedTuple

from cupyattn import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    YarnScaling,
    rope_tables,
)
from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.errors import error, shown

RopeScaling = LinearScaling | NTKScaling | YarnScaling | Llama3Scaling | LongRopeScaling

_MOST = {
    "num_layers": 10_000, "head_dim": 512, "global_head_dim": 512, "max_positions": 10_000_000,
}  # fmt: skip
_MOST_OTHERS = 10_000_000
"""No model is larger: such numbers are in damaged files."""
_OF_GLOBAL_LAYERS = ("global_head_dim", "global_kv_heads")

ARCHITECTURES = ("gpt2", "llama", "phi", "phi3", "gemma", "gemma4")
GATED = ("swiglu", "geglu", "geglu_tanh")
"""Activations of an MLP whose first product computes gate and up."""
ELEMENTWISE = ("gelu", "gelu_tanh", "silu")
"""Activations that are also separate functions, not only epilogues of `cupyattn.linear`."""


class Heads(NamedTuple):
    """The heads of a layer: H query heads and G key-value heads of D features."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    keys_as_values: bool = False

    @property
    def counts(self) -> tuple[int, ...]:
        """The heads of q, of k and, unless keys are the values, of v."""
        return (self.num_heads, *(self.num_kv_heads,) * (1 if self.keys_as_values else 2))

    @property
    def rows(self) -> tuple[int, ...]:
        """The features of q, of k and, unless keys are the values, of v."""
        return tuple([count * self.head_dim for count in self.counts])


class Config(NamedTuple):
    """The numbers of a model.

    Attributes
    ----------
    architecture : {"gpt2", "llama", "phi", "phi3", "gemma", "gemma4"}
        Which weights a layer has. "llama" is also Mistral, Ministral 3, Qwen2, Qwen3, SmolLM2 and
        SmolLM3; "phi" is Phi-2; "phi3" is Phi-3 and Phi-4; "gemma" is Gemma 2 and Gemma 3, and
        "gemma4" dense Gemma 4.
    vocab_size : int
        V, the rows of the embedding; a tokenizer may know fewer.
    num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size : int
        Layers; E; H; G, which divides H; D; and F, the width of the MLP.
    max_positions : int
        The longest sequence.
    norm_eps : float
        Added to the variance, or mean square, in the norms.
    activation : str
        The MLP's, by its name in `cupyattn.linear`; gated ones are "swiglu", "geglu" and
        "geglu_tanh".
    rotary_dim : int
        How many features of a head are rotated; 0 if positions have an embedding ("gpt2").
    rope_base, rope_scaling : float, and a scaling or None
        Options of `cupyattn.rope_tables`.
    tied : bool
        Whether the embedding is the head's weight too.
    window_size : (left, 0), optional
        How many earlier keys a query sees, except in `global_layers`; see `cupyattn.attention`.
    qkv_bias, output_bias, mlp_bias, head_bias : bool
        Which products have a bias.
    bos_id, eos_ids : int or None, and tuple of int
        Tokens that begin, and end, a text.
    qk_norm : bool
        Whether each head of q and of k is normalised before it is rotated (Qwen3, Gemma 3, 4).
    global_layers : tuple of int
        Layers that see all earlier keys in a model with a window (Gemma).
    local_rope_base : float, optional
        The base, without scaling, of the layers with a window (Gemma 3); by default `rope_base`
        and `rope_scaling` are those of all layers.
    unrotated_layers : tuple of int
        Layers without rotary positions (SmolLM3).
    softmax_scale : float, optional
        The factor of scores; 1 / sqrt(D) by default.
    attention_softcap, logit_softcap : float, optional
        The c of c tanh(x / c), for scores and for logits (Gemma 2).
    embedding_scale : float, optional
        The factor of embedded tokens (Gemma), rounded to bfloat16 in a bfloat16 model.
    query_growth : (float, int), optional
        (b, L): at position p, rotated queries are multiplied by 1 + b log(1 + floor(p / L))
        (Ministral 3).
    global_head_dim, global_kv_heads : int, optional
        D and G of `global_layers` (Gemma 4); by default those of all layers.
    global_rotary_dim : int, optional
        How many features of the heads of `global_layers` are rotated, with the frequencies and the
        pairs of whole heads (Gemma 4); by default `rotary_dim`, with frequencies of their own.
    keys_as_values : bool
        Whether keys of `global_layers`, before norm and rotation, are their values too (Gemma 4).
    """

    architecture: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm_eps: float
    activation: str
    rotary_dim: int = 0
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False
    window_size: tuple[int, int] | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    qk_norm: bool = False
    global_layers: tuple[int, ...] = ()
    local_rope_base: float | None = None
    unrotated_layers: tuple[int, ...] = ()
    softmax_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    query_growth: tuple[float, int] | None = None
    global_head_dim: int | None = None
    global_kv_heads: int | None = None
    global_rotary_dim: int | None = None
    keys_as_values: bool = False

    def heads_of(self, layer: int) -> Heads:
        """Return the heads of a layer."""
        if layer not in self.global_layers:
            return Heads(self.num_heads, self.num_kv_heads, self.head_dim)
        groups, dim = self.global_kv_heads, self.global_head_dim
        sizes = groups or self.num_kv_heads, dim or self.head_dim
        return Heads(self.num_heads, *sizes, self.keys_as_values)

    @property
    def heads(self) -> tuple[Heads, ...]:
        """The heads of each layer."""
        return tuple([self.heads_of(layer) for layer in range(self.num_layers)])

    def window_of(self, layer: int) -> tuple[int, int] | None:
        """Return the window of a layer, None if a query sees all earlier keys."""
        return None if layer in self.global_layers else self.window_size

    def attention_options(self, layer: int) -> Keywords:
        """Return the options of `cupyattn.attention` in a layer, except its rotary positions."""
        return {
            "causal": True,
            "window_size": self.window_of(layer),
            "softmax_scale": self.softmax_scale,
            "softcap": self.attention_softcap,
        }


_QWEN3 = Config(
    "llama", 151936, 28, 1024, 16, 8, 128, 3072, 40960, 1e-6, "swiglu",
    rotary_dim=128, rope_base=1e6, tied=True, qk_norm=True, bos_id=151643, eos_ids=(151645,),
)  # fmt: skip
_PHI4_MINI_FACTORS = (
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
    2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845,
    5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158,
    11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105,
    25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71,
    32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
)  # fmt: skip
_PHI4_MINI_SCALE = (1 + math.log(32) / math.log(4096)) ** 0.5

PRESETS = {
    "gpt2": Config(
        "gpt2", 50257, 12, 768, 12, 12, 64, 3072, 1024, 1e-5, "gelu_tanh",
        tied=True, qkv_bias=True, output_bias=True, mlp_bias=True, bos_id=50256, eos_ids=(50256,),
    ),
    "llama-3.2-1b": Config(
        "llama", 128256, 16, 2048, 32, 8, 64, 8192, 131072, 1e-5, "swiglu",
        rotary_dim=64, rope_base=500000.0, rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192),
        tied=True, bos_id=128000, eos_ids=(128001,),
    ),
    "phi-2": Config(
        "phi", 51200, 32, 2560, 32, 32, 80, 10240, 2048, 1e-5, "gelu_tanh",
        rotary_dim=32, qkv_bias=True, output_bias=True, mlp_bias=True, head_bias=True, bos_id=50256,
        eos_ids=(50256,),
    ),
    "qwen3-0.6b": _QWEN3,
    "qwen3-1.7b": _QWEN3._replace(hidden_size=2048, intermediate_size=6144),
    "qwen3-4b": _QWEN3._replace(
        num_layers=36, hidden_size=2560, num_heads=32, intermediate_size=9728
    ),
    "gemma-3-1b": Config(
        "gemma", 262144, 26, 1152, 4, 1, 256, 6912, 32768, 1e-6, "geglu_tanh",
        rotary_dim=256, rope_base=1e6, local_rope_base=1e4, tied=True, qk_norm=True,
        window_size=(511, 0), global_layers=(5, 11, 17, 23), softmax_scale=256**-0.5,
        embedding_scale=1152**0.5, bos_id=2, eos_ids=(1, 106),
    ),
    "phi-4-mini": Config(
        "phi3", 200064, 32, 3072, 24, 8, 128, 8192, 131072, 1e-5, "swiglu",
        rotary_dim=96, tied=True, bos_id=199999, eos_ids=(199999, 200020),
        rope_scaling=LongRopeScaling((1.0,) * 48, _PHI4_MINI_FACTORS, 4096, _PHI4_MINI_SCALE),
    ),
}  # fmt: skip
"""GPT-2 of 124 million weights and the other models by their names, as their authors published
them; "gemma-3-1b" and "phi-4-mini" are the instructed ones."""


def checked(config: Config) -> Config:
    """Return the config if its numbers fit together, or raise ValueError."""
    architecture = config.architecture
    if architecture not in ARCHITECTURES:
        raise unknown_architecture(architecture)
    sizes = ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim",
             "intermediate_size", "max_positions")  # fmt: skip
    of_global = [name for name in _OF_GLOBAL_LAYERS if getattr(config, name) is not None]
    for name in (*sizes, *of_global):
        size, most = getattr(config, name), _MOST.get(name, _MOST_OTHERS)
        if name.endswith("head_dim") and isinstance(size, int) and most < size <= 2**16:
            raise error(
                NotImplementedError,
                f"{name} = {size}",
                f"attention has kernels for head dims up to {most}",
                "load a model with smaller heads",
            )
        _require(
            isinstance(size, int) and 1 <= size <= most,
            f"{name} = {shown(size)}",
            f"it must be an int, 1 to {most:,}",
        )
    for name in ("num_kv_heads", "global_kv_heads"):
        groups = getattr(config, name) or 1
        _require(
            config.num_heads % groups == 0,
            f"num_heads = {config.num_heads}, {name} = {groups}",
            f"num_heads must be a multiple of {name}",
        )
    rotary_dim, base = config.rotary_dim, config.rope_base
    for name in ("rope_base", "local_rope_base"):
        found = getattr(config, name)
        _require(
            found is None or 1 < found < float("inf"),
            f"{name} = {found}",
            "it must be above 1 and finite",
        )
    for name in ("softmax_scale", "attention_softcap", "logit_softcap", "embedding_scale"):
        found = getattr(config, name)
        _require(
            found is None or 0 < found < float("inf"),
            f"{name} = {found}",
            "it must be above 0 and finite, or None",
        )
    _require(
        rotary_dim % 2 == 0 and 0 <= rotary_dim <= config.head_dim,
        f"rotary_dim = {rotary_dim}, head_dim = {config.head_dim}",
        "rotary_dim must be even, and at most head_dim",
    )
    _require(
        all(isinstance(layer, int) and layer >= 0 for layer in config.global_layers),
        f"global_layers = {config.global_layers}",
        "layers are counted from 0",
    )
    whole, part = config.global_head_dim or config.head_dim, config.global_rotary_dim
    _require(
        part is None or type(part) is int, f"global_rotary_dim = {shown(part)}", "it must be an int"
    )
    _require(
        rotary_dim <= whole if part is None else (part % 2 == whole % 2 == 0 <= part <= whole),
        f"rotary_dim = {rotary_dim}, global_rotary_dim = {part}, head dim {whole} in global layers",
        "the head dim and global_rotary_dim must be even, and what is rotated at most the head dim",
    )
    _require(
        part is None or config.rope_scaling is None,
        f"global_rotary_dim = {part} with {config.rope_scaling}",
        "rotary positions of a part of whole heads have no scaling",
    )
    _require(
        not config.keys_as_values or architecture == "gemma4",
        f"keys_as_values in a model of {architecture}",
        "only gemma4 normalises values apart from keys",
    )
    rope_tables(1, rotary_dim, base=base, scaling=config.rope_scaling)  # checks both
    return config


_LONGEST_GUESS = 1 << 17


def extended(config: Config, original: int | None = None) -> Config:
    """Return the config of a file with all positions that its rotary scaling reaches.

    Many files with YaRN or linear scaling give the length before it: such a model reads factor
    times that length. `original` is the length before linear scaling, if the file gives it.
    Otherwise its `max_positions` may be the length before or after, and are extended to at most
    131,072: longer ones, such as Gemma 3's, are the length after. A window of all positions is
    none, unless its layers have another rotary base.
    """
    scaling, positions = config.rope_scaling, config.max_positions
    if isinstance(scaling, YarnScaling):
        longest = scaling.factor * scaling.original_length
    elif isinstance(scaling, LinearScaling):
        longest = scaling.factor * (original or positions)
        longest = longest if original else min(longest, _LONGEST_GUESS)
    else:
        longest = positions
    config = config._replace(max_positions=max(positions, int(longest)))
    if config.window_size is None or config.local_rope_base is not None:
        return config
    is_short = config.window_size[0] + 1 < config.max_positions
    return config if is_short else config._replace(window_size=None, global_layers=())


_EXPERTS = ("mixtral", "gpt_oss", "gpt-oss", "deepseek", "llama4", "dbrx", "grok", "glm4_moe")
"""How names of models with experts begin, if they do not contain "moe"."""


def unknown_architecture(name: object, where: str = "") -> Exception:
    """Make the error for an architecture that has no forward."""
    experts = isinstance(name, str) and ("moe" in name.lower() or name.startswith(_EXPERTS))
    return error(
        NotImplementedError,
        f"{where}{': ' if where else ''}the architecture {shown(name)}"
        f"{', a mixture of experts' if experts else ''}",
        "forwards exist for GPT-2, for Llama and what shares its layers (Mistral, Ministral, "
        "Qwen2, Qwen3, SmolLM2, SmolLM3), for the text of Gemma 2, 3 and, from folders, 4, and for "
        "Phi-2, 3 and 4",
        "load a dense model of one of these",
    )


def _require(holds: bool, passed: str, allowed: str) -> None:
    if not holds:
        raise error(ValueError, passed, allowed, "pass the config of the model")
