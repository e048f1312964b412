"""A checkpoint before any weight is read: its tensors, and the arrays of a model that they fill.

A `Naming` for each format and architecture maps the names of weights in files to views of arrays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from cupyattn import QuantizedWeight
from cupyattn.models.config import Config
from cupyattn.models.weights import Layer, Norm, Product, Weights
from cupyattn.ops.linear.weight_formats import UNIT, Blocks
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error


class Tensor(NamedTuple):
    """A tensor in a file.

    ``read(start, stop)`` returns these rows (first axis) as floats of any size. ``read_columns``
    does so for the second axis, in files whose weights are (K, N).
    """

    shape: tuple[int, ...]
    read: Callable[[int, int], np.ndarray]
    read_columns: Callable[[int, int], np.ndarray] | None = None


class NestedScales(NamedTuple):
    """How to read a weight in "nf4" as "nf4_nested", whose scales are codes of a table.

    ``read(start, stop)`` needs a start that is a multiple of `rows_apart`.
    """

    table: tuple[float, ...]
    read: Callable[[int, int], QuantizedWeight]


class QuantisedTensor(NamedTuple):
    """The weight (N, K) of a product that a file holds in four or eight bits.

    ``read(start, stop)`` returns these rows as NumPy arrays in the format of `blocks`. `nested` is
    set if the file has codes for scales.

    If `blocks` round the numbers of the file, `rounding` says by how much at most, and
    ``floats(start, stop)`` returns rows of the exact numbers. Then `read` is None where the exact
    numbers are quantised anew.
    """

    shape: tuple[int, ...]
    blocks: Blocks
    read: Callable[[int, int], QuantizedWeight] | None
    nested: NestedScales | None = None
    floats: Callable[[int, int], np.ndarray] | None = None
    rounding: str = ""


AnyTensor = Tensor | QuantisedTensor

_ROUNDED_BLOCK = 128


def rounded(
    shape: tuple[int, int], floats: Callable[[int, int], np.ndarray], why: str
) -> AnyTensor:
    """Return a weight (N, K) whose numbers no format has: kept blocks are int8, which rounds them.

    The scale of a block is its largest magnitude / 127, and codes are rounded to the nearest.
    """
    inner = shape[1]
    if inner % UNIT:
        return Tensor(shape, floats)
    size = next(each for each in (_ROUNDED_BLOCK, 64, UNIT) if inner % each == 0)
    rounding = f"{why} to int8, within 1/254 of the largest weight of {_ROUNDED_BLOCK} or fewer"
    return QuantisedTensor(shape, Blocks("int8", size), None, floats=floats, rounding=rounding)


class Naming(NamedTuple):
    """The names of weights, without ``.weight`` and ``.bias``; those of a layer without its prefix.

    Several names of one product are consecutive rows of it, such as q, k and v.
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
    """Before all names but the head's; files of a model without a head may lack it."""
    transposed: bool = False
    """Whether weights of layers are (K, N)."""
    paired: bool = False
    """Whether rows of q and k are in the order of interleaved rotary pairs."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that are no weights."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    scalar: str = "layer_scalar"
    output_norm: str = "post_attention_layernorm"
    down_norm: str = "post_feedforward_layernorm"
    """The names of norms that only some layers have."""


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
    ignored=(
        r"rotary_emb\.inv_freq$",
        r"^(model\.)?(vision_tower|vision_model|audio_tower|multi_modal_projector|embed_(vision|audio))\.",
    ),
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
    "phi3": _OF_LLAMA._replace(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    "gemma": _OF_LLAMA._replace(mlp_norm="pre_feedforward_layernorm"),
    "gemma4": _OF_LLAMA._replace(mlp_norm="pre_feedforward_layernorm"),
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
        transposed=True,
        ignored=(r"h\.\d+\.attn\.(masked_)?bias$",),
    ),
}
"""The names in safetensors files, by architecture."""

_OF_GGUF = Naming(
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    output_norm="post_attention_norm",
    down_norm="post_ffw_norm",
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
_GGUF_LLAMA = _GGUF_QWEN2._replace(paired=True, ignored=(r"^rope_freqs\.weight$",))

GGUF = {
    "gpt2": _OF_GGUF._replace(positions="position_embd"),
    "llama": _GGUF_LLAMA,
    "smollm3": _GGUF_LLAMA,
    "mistral3": _GGUF_LLAMA,
    "qwen2": _GGUF_QWEN2,
    "qwen3": _GGUF_QWEN2,
    "gemma2": _GGUF_QWEN2,
    "gemma3": _GGUF_QWEN2,
    "phi3": _OF_GGUF._replace(ignored=(r"^rope_factors_(long|short)\.weight$",)),
    "phi2": _OF_GGUF._replace(mlp_norm=None),
}
"""The names in GGUF files, by GGUF's name of the architecture."""


class TensorTarget(NamedTuple):
    """The arrays that a tensor of a file fills, in order.

    `targets` has one array ("all"), or the arrays of a quantised weight by name, whose first axes
    are equal. `shape` is the tensor's in the file. `transposed` says that the first axis of the
    targets is the second axis of the file.
    """

    targets: dict[str, Array]
    shape: tuple[int, ...]
    blocks: Blocks | None = None
    transposed: bool = False
    rotation: int | None = None


class TensorTargets(NamedTuple):
    """The targets of the tensors of a checkpoint, by name.

    Tensors of `filled` must be in the files. Those of `repeated` may be, and then must equal what
    their target already holds.
    """

    filled: dict[str, TensorTarget]
    repeated: dict[str, TensorTarget]


def product_names(
    naming: Naming, present: Collection[str], layer: int, product: str
) -> tuple[str, ...]:
    """Return the tensors that are the weight of a layer's product, by its name in `Layer`."""
    names = getattr(naming, product)
    before = _prefix(naming, present) + naming.layer.format(layer)
    return tuple(
        f"{before}{name}.weight" for name in ((names,) if isinstance(names, str) else names)
    )


def norm_name(naming: Naming, present: Collection[str], layer: int | None, field: str) -> str:
    """Return the tensor that is the weight of a norm or a table, by the field of its name."""
    before = "" if layer is None else naming.layer.format(layer)
    return f"{_prefix(naming, present)}{before}{getattr(naming, field)}.weight"


def scalar_name(naming: Naming, present: Collection[str], layer: int) -> str:
    """Return the tensor that multiplies what a layer computes."""
    return f"{_prefix(naming, present)}{naming.layer.format(layer)}{naming.scalar}"


_WITHIN = ("model.language_model.", "language_model.model.")
"""Prefixes of a text model in one of text and images, of transformers from 4.52 and before it."""


def _prefix(naming: Naming, present: Collection[str]) -> str:
    if naming.prefix == "model.":
        for prefix in _WITHIN:
            if any(name.startswith(prefix) for name in present):
                return prefix
    has_it = not present or any(name.startswith(naming.prefix) for name in present)
    return naming.prefix if has_it else ""


def places(
    naming: Naming, config: Config, weights: Weights, tensors: Mapping[str, AnyTensor]
) -> TensorTargets:
    """Return the target of each tensor of a checkpoint; no `tensors` for one to be written."""
    prefix = _prefix(naming, tensors)
    filled: dict[str, TensorTarget] = {}

    def put(name: str, target: Array) -> None:
        filled[name] = TensorTarget({"all": target}, target.shape)

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
        """Put parts of the product's rows, as large as their heads, otherwise equal ones."""
        for number, (name, rows, share) in enumerate(_shares(names, product, heads)):
            heads_of = share if paired and number < 2 else None  # q and k, and not v
            full = f"{before}{name}.weight"
            filled[full] = _place(product.weight[rows], heads_of, naming, tensors.get(full))
            if product.bias is not None:
                bias = product.bias[rows]
                filled[f"{before}{name}.bias"] = _place(bias, heads_of, naming, None)

    put(f"{prefix}{naming.embedding}.weight", weights.embedding)
    if naming.positions is not None:
        assert weights.positions is not None
        put(f"{prefix}{naming.positions}.weight", weights.positions)
    for index, layer in enumerate(weights.layers):
        before = prefix + naming.layer.format(index)
        put_norm(before + naming.norm, layer.norm)
        if naming.mlp_norm is not None and layer.mlp_norm is not None:
            put_norm(before + naming.mlp_norm, layer.mlp_norm)
        for field in ("q_norm", "k_norm", "output_norm", "down_norm"):
            norm = getattr(layer, field)
            if norm is not None:
                put_norm(before + getattr(naming, field), norm)
        if layer.scalar is not None:
            put(f"{before}{naming.scalar}", layer.scalar)
        heads = config.heads_of(index)
        names = naming.qkv[: len(heads.counts)]
        put_product(before, names, layer.qkv, heads.counts, naming.paired)
        put_product(before, (naming.output,), layer.output)
        put_product(before, naming.up, layer.up)
        put_product(before, (naming.down,), layer.down)
    put_norm(prefix + naming.last_norm, weights.norm)
    logits = weights.head.weight
    assert not isinstance(logits, QuantizedWeight)
    within = "language_model." if prefix == _WITHIN[1] else ""
    head = {f"{within}{naming.head}.weight": TensorTarget({"all": logits}, logits.shape)}
    if not config.tied:
        filled |= head
    if weights.head.bias is not None:
        put(f"{naming.head}.bias", weights.head.bias)
    return TensorTargets(filled, head if config.tied else {})


def _place(
    part: Array | QuantizedWeight, heads: int | None, naming: Naming, tensor: AnyTensor | None
) -> TensorTarget:
    """Return the target of rows of a product; rows of `heads` are in the order of pairs."""
    blocks = part.blocks if isinstance(part, QuantizedWeight) else None
    arrays = part.arrays if isinstance(part, QuantizedWeight) else {"all": part}
    rotation = part.rotation if isinstance(part, QuantizedWeight) else None
    if heads is not None:
        arrays = {name: _as_pairs(array, heads) for name, array in arrays.items()}
    # What is quantised is (N, K) in all files.
    transposed = naming.transposed and part.ndim == 2 and not isinstance(tensor, QuantisedTensor)
    if transposed and blocks is None:
        return TensorTarget({"all": arrays["all"].T}, part.shape[::-1])
    shape = part.shape[::-1] if transposed else part.shape
    return TensorTarget(arrays, shape, blocks, transposed, rotation)


def _shares(
    names: tuple[str, ...], product: Product, heads: tuple[int, ...] = ()
) -> Iterator[tuple[str, slice, int]]:
    """Yield the rows of a product that each name has, and how many heads they are."""
    shares = heads if len(names) > 1 and heads else (1,) * len(names)
    unit, start = len(product.weight) // sum(shares), 0
    for name, share in zip(names, shares, strict=True):
        yield name, slice(start, start + unit * share), share
        start += unit * share


class LinearModule(NamedTuple):
    """A linear layer as a model was published: some rows of a product."""

    name: str
    """Without ``.weight``, with the prefix and the number of its layer."""
    rows: slice


def modules_of(
    naming: Naming, config: Config, index: int, layer: Layer
) -> dict[str, list[LinearModule]]:
    """Return the modules of each product of a layer, by the name of its field."""
    before = naming.prefix + naming.layer.format(index)
    heads = config.heads_of(index).counts

    def modules(names: tuple[str, ...], product: Product, first: int = 0) -> list[LinearModule]:
        return [
            LinearModule(before + name, slice(first + rows.start, first + rows.stop))
            for name, rows, _ in _shares(names, product, heads if product is layer.qkv else ())
        ]

    ends = {
        "output": modules((naming.output,), layer.output),
        "down": modules((naming.down,), layer.down),
    }
    qkv = modules(naming.qkv[: len(heads)], layer.qkv)
    if layer.qkv_up is None:
        return {"qkv": qkv, "up": modules(naming.up, layer.up), **ends}
    return {"qkv_up": qkv + modules(naming.up, layer.up, len(layer.qkv.weight)), **ends}


def _as_pairs(rows: Array, heads: int) -> Array:
    """View rows (heads D, ...) as (heads, D/2, 2, ...): row m of a head, then row m + D/2.

    Files with interleaved rotary pairs hold q and k in this order; the library rotates halves.
    """
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2)


def mismatch(
    tensors: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    optional: Collection[str] = (),
    ignores: Callable[[str], bool] = lambda name: False,
) -> str:
    """Return how tensors differ from those of the given shapes by name, "" if they do not."""
    kinds = {
        "missing": [name for name in shapes if name not in tensors and name not in optional],
        "unknown": [name for name in tensors if name not in shapes and not ignores(name)],
        "misshapen": [
            f"{name} is {tensors[name].shape}, not {shape}"
            for name, shape in shapes.items()
            if name in tensors and tensors[name].shape != shape
        ],
    }
    return "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names)


def _listed(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def is_ignored(naming: Naming, name: str) -> bool:
    """Tell whether a tensor is no weight."""
    return any(re.search(pattern, name) for pattern in naming.ignored)


class Checkpoint(NamedTuple):
    """A model in files: its config, and its tensors by their names in the files.

    `where` is the file or folder, for errors. `read_tokenizer` returns a `Tokenizer` or None.
    """

    where: str
    config: Config
    naming: Naming
    tensors: dict[str, AnyTensor]
    read_tokenizer: Callable[[], Any]


def damaged(where: str, what: str) -> ValueError:
    """Make the error for a file that is not as it was published."""
    return error(
        ValueError,
        f"{where}: {what}",
        "a model is read from complete files as they were published",
        "download the file again, or convert the model again",
    )
