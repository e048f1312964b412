"""The numbers that describe a model, and the shapes of three well-known ones."""

from __future__ import annotations

from typing import NamedTuple

from cupyattn import LinearScaling, Llama3Scaling, NTKScaling, YarnScaling, rope_tables
from cupyattn.runtime.errors import error, shown

RopeScaling = LinearScaling | NTKScaling | YarnScaling | Llama3Scaling

_MOST = {"num_layers": 10_000, "head_dim": 256, "max_positions": 10_000_000}
_MOST_OTHERS = 10_000_000
"""No model is larger: such numbers are in damaged files."""

ARCHITECTURES = ("gpt2", "llama", "phi")
GATED = ("swiglu", "geglu")
"""Activations of an MLP whose first product computes gate and up."""
ELEMENTWISE = ("gelu", "gelu_tanh", "silu")
"""Activations that are also separate functions, not only epilogues of `cupyattn.linear`."""


class Config(NamedTuple):
    """The numbers of a model.

    Attributes
    ----------
    architecture : {"gpt2", "llama", "phi"}
        Which forward; "llama" also runs Mistral, Qwen2 and SmolLM2.
    vocab_size : int
        V, the rows of the embedding; a tokenizer may know fewer.
    num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size : int
        Layers; E; H; G, which divides H; D; and F, the width of the MLP.
    max_positions : int
        The longest sequence.
    norm_eps : float
        Added to the variance, or mean square, in the norms.
    activation : str
        The MLP's, by its name in `cupyattn.linear`; gated ones are "swiglu" and "geglu".
    rotary_dim : int
        How many features of a head are rotated; 0 if positions have an embedding ("gpt2").
    rope_base, rope_scaling : float, and a scaling or None
        Options of `cupyattn.rope_tables`.
    tied : bool
        Whether the embedding is the head's weight too.
    window_size : (left, 0), optional
        How many earlier keys a query sees; see `cupyattn.attention`.
    qkv_bias, output_bias, mlp_bias, head_bias : bool
        Which products have a bias.
    bos_id, eos_ids : int or None, and tuple of int
        Tokens that begin, and end, a text.
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
}  # fmt: skip
"""GPT-2 of 124 million weights, Llama-3.2-1B and Phi-2, as their authors published them."""


def checked(config: Config) -> Config:
    """Return the config if its numbers fit together, or raise ValueError."""
    architecture, heads, groups = config.architecture, config.num_heads, config.num_kv_heads
    if architecture not in ARCHITECTURES:
        raise unknown_architecture(architecture)
    sizes = ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim",
             "intermediate_size", "max_positions")  # fmt: skip
    for name in sizes:
        size, most = getattr(config, name), _MOST.get(name, _MOST_OTHERS)
        _require(
            isinstance(size, int) and 1 <= size <= most,
            f"{name} = {shown(size)}",
            f"it must be an int, 1 to {most:,}",
        )
    _require(
        heads % groups == 0,
        f"num_heads = {heads}, num_kv_heads = {groups}",
        "num_heads must be a multiple of num_kv_heads",
    )
    rotary_dim, base = config.rotary_dim, config.rope_base
    _require(1 < base < float("inf"), f"rope_base = {base}", "it must be above 1 and finite")
    _require(
        rotary_dim % 2 == 0 and 0 <= rotary_dim <= config.head_dim,
        f"rotary_dim = {rotary_dim}, head_dim = {config.head_dim}",
        "rotary_dim must be even, and at most head_dim",
    )
    rope_tables(1, rotary_dim, base=base, scaling=config.rope_scaling)  # checks both
    return config


_LONGEST_GUESS = 1 << 17


def extended(config: Config, original: int | None = None) -> Config:
    """Return the config of a file with all positions that its rotary scaling reaches.

    Many files with YaRN or linear scaling give the length before it: such a model reads factor
    times that length. `original` is the length before linear scaling, if the file gives it.
    Otherwise its `max_positions` may be the length before or after, and are extended to at most
    131,072: longer ones, such as Gemma 3's, are the length after.
    """
    scaling, positions = config.rope_scaling, config.max_positions
    if isinstance(scaling, YarnScaling):
        longest = scaling.factor * scaling.original_length
    elif isinstance(scaling, LinearScaling):
        longest = scaling.factor * (original or positions)
        longest = longest if original else min(longest, _LONGEST_GUESS)
    else:
        return config
    return config._replace(max_positions=max(positions, int(longest)))


def unknown_architecture(name: object, where: str = "") -> Exception:
    """Make the error for an architecture that has no forward."""
    return error(
        NotImplementedError,
        f"{where}{': ' if where else ''}the architecture {shown(name)}",
        "forwards exist for GPT-2, for Llama and what shares its layers (Mistral, Qwen2, SmolLM2), "
        "and for Phi-2",
        "load a model of one of these",
    )


def _require(holds: bool, passed: str, allowed: str) -> None:
    if not holds:
        raise error(ValueError, passed, allowed, "pass the config of the model")
