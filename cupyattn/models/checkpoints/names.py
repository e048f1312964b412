"""What files call the weights of a model: a table a format and architecture, and the places."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from cupyattn.arrays import Array
from cupyattn.models.config import Config
from cupyattn.models.weights import Layer, Norm, Product, Weights


class Naming(NamedTuple):
    """Names without ``.weight`` and ``.bias``; those of a layer without its prefix.

    Several names of one product are its rows one behind the other, as q, k and v.
    """

    embedding: str
    layer: str
    norm: str
    qkv: tuple[str, ...]
    output: str
    mlp_norm: str | None
    up: tuple[str, ...]
    down: str
    last_norm: str
    head: str
    positions: str | None = None
    prefix: str = ""
    """Before all names but the head's; files of a model without its head may lack it."""
    turned: bool = False
    """Whether weights of layers are (K, N)."""
    paired: bool = False
    """Whether rows of q and k are in the order of interleaved rotary pairs."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that are no weights."""


_OF_LLAMA = Naming(
    embedding="embed_tokens",
    layer="layers.{}.",
    norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    last_norm="norm",
    head="lm_head",
    prefix="model.",
    ignored=(r"rotary_emb\.inv_freq$",),
)

HUGGING_FACE = {
    "llama": _OF_LLAMA,
    "phi": _OF_LLAMA._replace(
        output="self_attn.dense",
        mlp_norm=None,
        up=("mlp.fc1",),
        down="mlp.fc2",
        last_norm="final_layernorm",
    ),
    # Its weights are those of Conv1D, (K, N); attn.bias and attn.masked_bias are a causal mask.
    "gpt2": Naming(
        embedding="wte",
        positions="wpe",
        layer="h.{}.",
        norm="ln_1",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        mlp_norm="ln_2",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        last_norm="ln_f",
        head="lm_head",
        prefix="transformer.",
        turned=True,
        ignored=(r"h\.\d+\.attn\.(masked_)?bias$",),
    ),
}
"""Of each architecture in safetensors files."""

_OF_GGUF = Naming(
    embedding="token_embd",
    layer="blk.{}.",
    norm="attn_norm",
    qkv=("attn_qkv",),
    output="attn_output",
    mlp_norm="ffn_norm",
    up=("ffn_up",),
    down="ffn_down",
    last_norm="output_norm",
    head="output",
)
_GGUF_QWEN2 = _OF_GGUF._replace(qkv=("attn_q", "attn_k", "attn_v"), up=("ffn_gate", "ffn_up"))

GGUF = {
    "gpt2": _OF_GGUF._replace(positions="position_embd"),
    "llama": _GGUF_QWEN2._replace(paired=True, ignored=(r"^rope_freqs\.weight$",)),
    "qwen2": _GGUF_QWEN2,
    "phi2": _OF_GGUF._replace(mlp_norm=None),
}
"""Of each architecture, as GGUF calls them."""


class Place(NamedTuple):
    """Where a tensor goes: a view of an array, which its items fill in their order."""

    target: Array
    shape: tuple[int, ...]
    """That of the tensor in the file."""


class Places(NamedTuple):
    """Where the tensors of a checkpoint go.

    Attributes
    ----------
    filled : dict from str to Place
        Tensors that have to be there.
    repeated : dict from str to Place
        Tensors that may be there, and then hold what is at that place already.
    """

    filled: dict[str, Place]
    repeated: dict[str, Place]


def places(naming: Naming, config: Config, weights: Weights, present: Collection[str]) -> Places:
    """Return the place of each tensor of a checkpoint, whose names are `present`."""
    prefix = naming.prefix
    if not any(name.startswith(prefix) for name in present):
        prefix = ""
    filled: dict[str, Place] = {}

    def put(name: str, target: Array, shape: tuple[int, ...] | None = None) -> None:
        filled[name] = Place(target, target.shape if shape is None else shape)

    def put_norm(name: str, norm: Norm) -> None:
        put(f"{name}.weight", norm.weight)
        if norm.bias is not None:
            put(f"{name}.bias", norm.bias)

    def put_product(
        before: str,
        names: tuple[str, ...],
        product: Product,
        heads: tuple[int, ...] = (),
        paired: bool = False,
    ) -> None:
        for number, (name, rows) in enumerate(_rows_by_name(names, product, heads)):
            for kind, array in (("weight", product.weight), ("bias", product.bias)):
                if array is None:
                    continue
                part = array[rows]
                if paired and number < 2:  # q and k, and not v
                    put(f"{before}{name}.{kind}", _as_pairs(part, heads[number]), part.shape)
                else:
                    put(f"{before}{name}.{kind}", part.T if naming.turned else part)

    put(f"{prefix}{naming.embedding}.weight", weights.embedding)
    if naming.positions is not None:
        put(f"{prefix}{naming.positions}.weight", weights.positions)
    for index, layer in enumerate(weights.layers):
        before = prefix + naming.layer.format(index)
        put_norm(before + naming.norm, layer.norm)
        if naming.mlp_norm is not None and layer.mlp_norm is not None:
            put_norm(before + naming.mlp_norm, layer.mlp_norm)
        heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
        put_product(before, naming.qkv, layer.qkv, heads, naming.paired)
        put_product(before, (naming.output,), layer.output)
        put_product(before, naming.up, layer.up)
        put_product(before, (naming.down,), layer.down)
    put_norm(prefix + naming.last_norm, weights.norm)
    head = {f"{naming.head}.weight": Place(weights.head.weight, weights.head.weight.shape)}
    if not config.tied:
        filled |= head
    if weights.head.bias is not None:
        put(f"{naming.head}.bias", weights.head.bias)
    return Places(filled, head if config.tied else {})


def _rows_by_name(
    names: tuple[str, ...], product: Product, heads: tuple[int, ...] = ()
) -> Iterator[tuple[str, slice]]:
    """Return which rows of a product each name has: as many as its heads, otherwise equal parts."""
    shares = heads if len(names) > 1 and heads else (1,) * len(names)
    unit, start = len(product.weight) // sum(shares), 0
    for name, share in zip(names, shares, strict=True):
        yield name, slice(start, start + unit * share)
        start += unit * share


class Module(NamedTuple):
    """A linear layer as a model was published: some rows of a product."""

    name: str
    """Without ``.weight``, with the prefix and the number of its layer."""
    rows: slice


def modules_of(naming: Naming, config: Config, index: int, layer: Layer) -> dict[str, list[Module]]:
    """Return the modules of each product of a layer, by the name of its field."""
    before = naming.prefix + naming.layer.format(index)
    heads = config.num_heads, config.num_kv_heads, config.num_kv_heads

    def modules(names: tuple[str, ...], product: Product, first: int = 0) -> list[Module]:
        return [
            Module(before + name, slice(first + rows.start, first + rows.stop))
            for name, rows in _rows_by_name(names, product, heads if product is layer.qkv else ())
        ]

    ends = {
        "output": modules((naming.output,), layer.output),
        "down": modules((naming.down,), layer.down),
    }
    qkv = modules(naming.qkv, layer.qkv)
    if layer.qkv_up is None:
        return {"qkv": qkv, "up": modules(naming.up, layer.up), **ends}
    return {"qkv_up": qkv + modules(naming.up, layer.up, len(layer.qkv.weight)), **ends}


def _as_pairs(rows: Array, heads: int) -> Array:
    """View rows (heads D, ...) as (heads, D/2, 2, ...): row m of a head, then row m + D/2.

    In that order the files hold q and k, for a rotation of neighbours; the library's rotation turns
    the halves of a head, as the model was trained.
    """
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2)


def is_ignored(naming: Naming, name: str) -> bool:
    """Tell whether a tensor is no weight."""
    return any(re.search(pattern, name) for pattern in naming.ignored)
