"""The weights of a model: named arrays, the same names in every architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cupyattn import QuantizedWeight, RMSNorm, dequantize, layer_norm, linear, rms_norm
from cupyattn.models.config import ELEMENTWISE, GATED, Config
from cupyattn.ops.linear.cpu import HugePages
from cupyattn.ops.linear.weight_formats import ROTATION, Blocks, rows_apart
from cupyattn.ops.linear.weight_formats import empty as empty_weight
from cupyattn.runtime.arrays import Array, dtype_of
from cupyattn.runtime.cupy_library import load_cupy

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
        Of the products, before the norms of their heads.
    attended : float
        Of the result of attention: `v`, unless the heads of v have a norm.
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
    attended: float = 1.0
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
        To ((H + 2 G) D): the heads of q, then those of k, then those of v; to ((H + G) D) if keys
        are the values too.
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
    v_eps : float, or None
        Added to the mean square in the RMS norm, without a weight, of each head of v (Gemma 4).
    scalar : array (1,), or None
        Multiplies the hidden states after the layer (Gemma 4).
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
    v_eps: float | None = None
    scalar: Array | None = None

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
    width, inner, kind = config.hidden_size, config.intermediate_size, dtype_of(dtype)
    offset, is_gemma4 = float(config.architecture == "gemma"), config.architecture == "gemma4"
    sandwich = is_gemma4 or config.architecture == "gemma"

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
        heads = config.heads_of(index)
        first, attended, dim = sum(heads.rows), heads.rows[0], heads.head_dim
        up_rows = inner * (2 if config.activation in GATED else 1)
        items = width * (first + up_rows + attended + inner)
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
                width, attended, config.output_bias, quantises(index, "output", attended)
            ),
            mlp_norm=None if parallel else norm(),
            up=up,
            down=matrix(width, inner, config.mlp_bias, quantises(index, "down", inner)),
            qkv_up=qkv_up,
            q_norm=norm(dim) if config.qk_norm else None,
            k_norm=norm(dim) if config.qk_norm else None,
            output_norm=norm() if sandwich else None,
            down_norm=norm() if sandwich else None,
            v_eps=config.norm_eps if is_gemma4 else None,
            scalar=xp.empty(1, kind) if is_gemma4 else None,
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


def is_learnt(name: str) -> bool:
    """Tell whether training changes a part: not the scalars of layers, as in transformers."""
    return not name.endswith(".scalar")


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


def like(array: Array, values: np.ndarray) -> Array:
    """Return values in float32 where an array is."""
    wide = values.astype(np.float32)
    if isinstance(array, np.ndarray):
        return wide
    return load_cupy().asarray(wide)


def factors_of(weights: Weights, config: Config) -> dict[str, Any]:
    """Return the factors of arrays compared with the checkpoint's, by name, except those of 1.

    A factor is a number, or an array with a factor for each row.
    """
    found: dict[str, Any] = {}

    def put(name: str, factor: Any) -> None:
        if np.any(factor != 1):
            found[name] = factor

    def put_norm(name: str, factor: float) -> None:
        put(f"{name}.weight", factor)
        put(f"{name}.bias", factor)

    for index, layer in enumerate(weights.layers):
        name, scales = f"layers.{index}", layer.scales
        put_norm(f"{name}.norm", scales.norm)
        put_norm(f"{name}.mlp_norm", scales.mlp_norm)
        if layer.output_norm is not None:
            put_norm(f"{name}.output_norm", scales.output_norm)
        if layer.down_norm is not None:
            put_norm(f"{name}.down_norm", scales.down_norm)
        for field in ("qkv", "output", "up", "down"):
            weight, bias = row_factors(layer, field, config, index)
            put(f"{name}.{field}.weight", weight[:, None])
            put(f"{name}.{field}.bias", bias)
    ends = weights.scales
    put("embedding", ends.embedding)
    put("positions", ends.positions)
    put_norm("norm", ends.norm)
    put("head.weight", ends.head / ends.norm)
    put("head.bias", ends.head)
    return found


def row_factors(
    layer: Layer, field: str, config: Config, index: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the factor of each row of the weight of a product of a layer, and of its bias."""
    scales = layer.scales
    if field == "qkv_up":
        both = [row_factors(layer, each, config, index) for each in ("qkv", "up")]
        weight, bias = (np.concatenate(each) for each in zip(*both, strict=True))
        return weight, bias
    inputs = {"qkv": "norm", "output": "attended", "up": "mlp_norm", "down": "up"}
    of_input = getattr(scales, inputs[field])
    if field == "qkv":
        rows = config.heads_of(index).rows
        results = np.repeat([scales.q, scales.k, scales.v][: len(rows)], rows)
    elif field == "up":
        gates = [1.0] if config.activation in GATED else []
        results = np.repeat([*gates, scales.up], config.intermediate_size)
    else:
        results = np.full(config.hidden_size, getattr(scales, field))
    return results / of_input, results


def unscaled(weights: Weights, config: Config) -> Weights:
    """Return the arrays of weights without their factors, to be written to files.

    Arrays are new where they have a factor, otherwise shared.
    """
    factors = factors_of(weights, config)
    if not factors:
        return weights

    def part(name: str, value: Any) -> Any:
        if hasattr(value, "_asdict"):
            fields = value._asdict().items()
            return type(value)(*(part(f"{name}.{field}", each) for field, each in fields))
        if isinstance(value, tuple):
            return tuple(part(f"{name}.{number}", each) for number, each in enumerate(value))
        factor = factors.get(name.removeprefix("."))
        if factor is None or value is None:
            return value
        return _divided(value, factor)

    found: Weights = part("", weights)
    return found._replace(
        layers=tuple([layer._replace(qkv_up=None, scales=Scales()) for layer in found.layers]),
        head=found.head._replace(weight=found.embedding) if config.tied else found.head,
        scales=EndScales(),
    )


def _divided(value: Array | QuantizedWeight, factor: Any) -> Array:
    """Return an array divided by a factor, or by one for each row; of quantised weights decoded."""
    wide = dequantize(value) if isinstance(value, QuantizedWeight) else value.astype(np.float32)
    wide *= 1 / factor if isinstance(factor, float) else like(wide, 1 / factor)
    kind = np.float16 if isinstance(value, QuantizedWeight) else value.dtype
    with np.errstate(over="ignore"):  # what float16 does not hold is refused where it is written
        return wide.astype(kind)
