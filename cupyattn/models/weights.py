"""The weights of a model: named arrays, the same names in every architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cupyattn import QuantizedWeight, RMSNorm, layer_norm, linear, rms_norm
from cupyattn.models.config import ELEMENTWISE, GATED, Config
from cupyattn.ops.linear.cpu import HugePages
from cupyattn.ops.linear.weight_formats import ROTATION, Blocks, rows_apart
from cupyattn.ops.linear.weight_formats import empty as empty_weight
from cupyattn.runtime.arrays import Array, dtype_of

LAYER_NORMS = ("gpt2", "phi")
"""Architectures whose norms are layer norms; the norms of the others are RMS norms."""
PRODUCTS = ("qkv", "output", "up", "down")
"""The products of a `Layer`."""

Quantises = Callable[[int, str, int], Blocks | None]
"""``quantises(layer, product, K)``: the blocks of a product's weight, by its name in `Layer`; None
for the model's dtype."""


class Norm(NamedTuple):
    """A layer norm, or an RMS norm if there is no bias, whose weight ``offset`` is added to."""

    weight: Array
    bias: Array | None
    eps: float
    offset: float = 0.0

    def __call__(self, x: Array, /, **options: Any) -> Any:
        """Return the rows of x, normalised."""
        if self.bias is None:
            return rms_norm(x, self.weight, eps=self.eps, weight_offset=self.offset, **options)
        return layer_norm(x, self.weight, self.bias, eps=self.eps, **options)

    @property
    def rms(self) -> RMSNorm:
        """An `RMSNorm` of the same numbers, for functions that normalise rows themselves."""
        return RMSNorm(self.weight, self.eps, self.offset)


class Product(NamedTuple):
    """A product with a weight (N, K), which skinny products read in order.

    The weight of a layer's product may be a `QuantizedWeight`. `activations` is the option of
    `cupyattn.linear`: with "int8" many rows of x are quantised too.
    """

    weight: Array | QuantizedWeight
    bias: Array | None
    activations: str | None = None

    def __call__(self, x: Array, /, **options: Any) -> Any:
        """Return x times the weight, plus the bias; options are those of `linear`."""
        return linear(x, self.weight.T, self.bias, activations=self.activations, **options)


class Scales(NamedTuple):
    """The powers of two by which arrays of a float16 model are scaled in a layer.

    Each is the factor of what a norm or a product computes, compared with the checkpoint's. A
    weight has the factor of its result, divided by that of its input; see
    `cupyattn.models.float16_range`. Gates are never scaled.

    Attributes
    ----------
    norm, mlp_norm : float
        Of the norms before qkv and up.
    q, k, v : float
        Of the products, before the norms of q and k.
    output, up, down : float, of output and down also array (E,)
        Of the products; `up` without its gate. An array has a factor for each row of the weight.
    output_norm, down_norm : float
        Of the norms of products.
    after_output, after_down : float32 array (E,), or None
        What the next norm multiplies by what attention and the MLP add to the hidden states; None
        for 1.
    """

    norm: float = 1.0
    q: float = 1.0
    k: float = 1.0
    v: float = 1.0
    output: float | np.ndarray = 1.0
    output_norm: float = 1.0
    mlp_norm: float = 1.0
    up: float = 1.0
    down: float | np.ndarray = 1.0
    down_norm: float = 1.0
    after_output: Array | None = None
    after_down: Array | None = None


class EndScales(NamedTuple):
    """The powers of two of a float16 model's arrays outside of its layers; see `Scales`.

    Attributes
    ----------
    embedding, positions : float
        Of the tables.
    norm, head : float
        Of the last norm, and of the logits.
    """

    embedding: float = 1.0
    positions: float = 1.0
    norm: float = 1.0
    head: float = 1.0


class Layer(NamedTuple):
    """One layer of a transformer.

    Attributes
    ----------
    norm : Norm
        Before attention.
    qkv : Product
        To ((H + 2 G) D): the heads of q, then those of k, then those of v.
    output : Product
        From (H D) to E.
    mlp_norm : Norm, or None
        Before the MLP; None if the MLP reads the same as attention (Phi).
    up : Product
        To F, or to (2 F) for gate and up of a gated activation.
    down : Product
        From F to E.
    qkv_up : Product, or None
        One product whose rows are qkv and up, if both read the same (Phi) and the activation of
        `up` is a separate function.
    q_norm, k_norm : Norm, or None
        Applied to each head of q and of k before it is rotated; weights (D,).
    output_norm, down_norm : Norm, or None
        Applied to the results of `output` and `down` before these are added to the hidden states
        (Gemma).
    scales : Scales
        Powers of two in the arrays of a float16 model.
    """

    norm: Norm
    qkv: Product
    output: Product
    mlp_norm: Norm | None
    up: Product
    down: Product
    qkv_up: Product | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    output_norm: Norm | None = None
    down_norm: Norm | None = None
    scales: Scales = Scales()

    @property
    def score_scale(self) -> float:
        """The power of two in products of q and k."""
        return 1.0 if self.q_norm is not None else self.scales.q * self.scales.k


class Weights(NamedTuple):
    """All weights of a model.

    Attributes
    ----------
    embedding : array (V, E)
        A row for each token.
    positions : array (P, E), or None
        A row for each position ("gpt2").
    layers : tuple of Layer
        In order.
    norm : Norm
        After the last layer.
    head : Product
        To V; its weight is the embedding if they are tied.
    scales : EndScales
        Powers of two in the arrays of a float16 model.
    """

    embedding: Array
    positions: Array | None
    layers: tuple[Layer, ...]
    norm: Norm
    head: Product
    scales: EndScales = EndScales()


def in_dtype(layer: int, product: str, inner: int) -> None:
    """Keep all weights in the model's dtype; one of `Quantises`."""


def empty(
    config: Config,
    dtype: str,
    xp: Any,
    quantises: Quantises = in_dtype,
    activations: str | None = None,
) -> Weights:
    """Return the weights of a model as uninitialised arrays.

    With activations "int8" weights of layers are rotated whose K is a multiple of `ROTATION`.
    """
    width, heads, groups = config.hidden_size, config.num_heads, config.num_kv_heads
    inner, kind = config.intermediate_size, dtype_of(dtype)

    offset, sandwich = float(config.architecture == "gemma"), config.architecture == "gemma"

    def norm(size: int = width) -> Norm:
        bias = xp.empty(size, kind) if config.architecture in LAYER_NORMS else None
        return Norm(xp.empty(size, kind), bias, config.norm_eps, offset)

    def product(
        columns: int, rows: int, biased: bool, blocks: Blocks | None = None, new: Any = xp.empty
    ) -> Product:
        bias = xp.empty(columns, kind) if biased else None
        if blocks is None:
            return Product(new((columns, rows), kind), bias)
        rotated = activations is not None and rows % ROTATION == 0
        weight = empty_weight(blocks, columns, rows, xp, ROTATION if rotated else None)
        return Product(weight, bias, activations)

    def layer(index: int) -> Layer:
        first = (heads + 2 * groups) * config.head_dim
        up_rows = inner * (2 if config.activation in GATED else 1)
        items = width * (first + up_rows + heads * config.head_dim + inner)
        new = HugePages(items * kind.itemsize + 2**10).empty if xp is np else xp.empty
        matrix = partial(product, new=new)
        of_qkv, of_up = (quantises(index, name, width) for name in ("qkv", "up"))
        parallel, qkv_up = config.architecture == "phi", None
        together = config.activation in ELEMENTWISE and config.qkv_bias == config.mlp_bias
        apart = 1 if of_qkv is None else rows_apart(of_qkv, width)
        if parallel and together and of_qkv == of_up and first % apart == 0:
            qkv_up = matrix(first + up_rows, width, config.qkv_bias, of_qkv)
            qkv, up = rows_of(qkv_up, slice(None, first)), rows_of(qkv_up, slice(first, None))
        else:
            qkv = matrix(first, width, config.qkv_bias, of_qkv)
            up = matrix(up_rows, width, config.mlp_bias, of_up)
        return Layer(
            norm=norm(),
            qkv=qkv,
            output=matrix(
                width,
                heads * config.head_dim,
                config.output_bias,
                quantises(index, "output", heads * config.head_dim),
            ),
            mlp_norm=None if parallel else norm(),
            up=up,
            down=matrix(width, inner, config.mlp_bias, quantises(index, "down", inner)),
            qkv_up=qkv_up,
            q_norm=norm(config.head_dim) if config.qk_norm else None,
            k_norm=norm(config.head_dim) if config.qk_norm else None,
            output_norm=norm() if sandwich else None,
            down_norm=norm() if sandwich else None,
        )

    embedding = xp.empty((config.vocab_size, width), kind)
    learned = config.architecture == "gpt2"
    head = product(config.vocab_size, width, config.head_bias) if not config.tied else None
    return Weights(
        embedding=embedding,
        positions=xp.empty((config.max_positions, width), kind) if learned else None,
        layers=tuple([layer(index) for index in range(config.num_layers)]),
        norm=norm(),
        head=head
        or Product(embedding, xp.empty(config.vocab_size, kind) if config.head_bias else None),
    )


def spread_of(weight: Array | QuantizedWeight) -> float:
    """Return how much larger than items of x those can be that a weight multiplies.

    Blocks of a rotated x are sums of 64 items, times 1 / 8.
    """
    return ROTATION**0.5 if getattr(weight, "rotation", None) else 1.0


def rows_of(whole: Product, rows: slice) -> Product:
    """Return some rows of a product."""
    bias = None if whole.bias is None else whole.bias[rows]
    return Product(whole.weight[rows], bias, whole.activations)


def named_arrays(weights: Weights) -> Iterator[tuple[str, Array]]:
    """Return each array once, with its name: ``layers.0.qkv.weight``, or ``....weight.codes``."""
    for name, part in named_parts(weights):
        if isinstance(part, QuantizedWeight):
            yield from ((f"{name}.{own}", array) for own, array in part.arrays.items())
        else:
            yield name, part


def named_parts(weights: Weights) -> Iterator[tuple[str, Array | QuantizedWeight]]:
    """Return each array and each quantised weight once, with its name."""
    seen = set()
    for name, part in _leaves("", weights):
        if id(part) not in seen:
            seen.add(id(part))
            yield name, part


def _leaves(name: str, part: object) -> Iterator[tuple[str, Any]]:
    if hasattr(part, "_asdict"):
        # The rows of qkv_up are qkv and up, which have names. Scales are no weights.
        fields = [each for each in part._asdict().items() if each[0] not in ("qkv_up", "scales")]
    elif isinstance(part, tuple):
        fields = [(str(number), each) for number, each in enumerate(part)]
    else:
        if hasattr(part, "shape"):
            yield name, part
        return
    for field, value in fields:
        yield from _leaves(f"{name}.{field}" if name else field, value)
