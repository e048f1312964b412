r"""Powers of two that keep the products of a float16 model in range, found from its weights.

float16 holds numbers up to 65,504. Models that were trained in bfloat16 exceed that in their hidden
states, which are float32 here (`cupyattn.models.forward`), and sometimes in what a layer computes.
A factor 2^-k in a weight makes the product 2^k times smaller, and what reads it makes up for that:

    v, output     attention is linear in v, so `output` has the inverse factor; a norm of the heads
                  of v has eps 4^-k instead
    up, down      of a gated MLP: the activation is linear in up, so `down` has the inverse factor
    output, down  the next norm multiplies them by 2^k when it adds them to the float32 stream; a
                  norm of the product itself (Gemma) has eps 4^-k
    q, k          before norms of their heads, which have eps 4^-k, or in the scale of scores
    norms         2^-k in weight and bias, inverted in the product that reads them
    embeddings    inverted when rows become float32; a tied head has the inverse in the last norm
    logits        inverted in float32

Bounds. A normalised row has a Euclidean norm of at most sqrt(E), so for weight w and bias b an item
of a norm is at most sqrt(E) |w_j| + |b_j|, and by Cauchy and Schwarz row i of a product that reads
it computes at most

    R_i = sqrt(E) |W_i w| + |W_i b + c_i|

Attention averages rows of v, so its items are at most R of v. |silu(g) u| and |gelu(g) u| are at
most |g| |u|, so an item of a gated MLP is at most R_gate R_up, and |gelu(u)| at most R_up. With B
for these, row i of `output` and of `down` computes at most sum_j |W_ij| B_j + |c_i|. Rotations of q
and k are longer than an item by sqrt(2). No input of the model exceeds such a bound, so no product
overflows. k is 0 unless a bound exceeds `LIMIT`. What a rotated weight reads counts 8 times there.

`output` and `down` have a factor for each row, so that a row of large weights leaves the others as
they are; all rows of v, of up and of a product before a norm share one.

Error. A power of two is exact while numbers are normal: from 6.1e-5 on. Below, a number has an
absolute error of 2^-25. For a product it becomes 2^(k - 25) in the term that is added to the
stream. That is the error of a float16 number of size 2^(k - 14), and rows with large k add large
numbers. For weights of size 0.02 it is the error of float16 itself up to k = 8, and doubles with
each further k. k of 8 is a product that may be 1.5e7. Random weights of Llama-3.2-1B's shapes
have bounds of 48 for q, v and up, 1,700 for output and 154,000 for down, so k is 2 there; those of
GPT-2's have 31, 680 and 1,300, and no k.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from cupyattn import QuantizedWeight, dequantize
from cupyattn.models.checkpoints.contents import Naming, norm_name, product_names, scalar_name
from cupyattn.models.config import GATED, Config
from cupyattn.models.weights import (
    EndScales,
    Layer,
    Norm,
    Product,
    Scales,
    Weights,
    like,
    spread_of,
)
from cupyattn.ops.linear.weight_formats import rows_apart
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error
from cupyattn.runtime.value_checks import on_host

LARGEST = 65504.0
LIMIT = 60_000.0
"""The bound that products keep: 8 % below the largest number, for the roundings of a product's
weight, input and sum, each below 0.1 %, and for adapters that are added later."""
_AT_ONCE = 1 << 22  # numbers of a weight that are widened at a time


@dataclass
class _ScaledRows:
    """Rows of a product that have one factor, and the name of their tensor."""

    tensor: str
    weight: Array | QuantizedWeight
    bias: Array | None
    stored: tuple[float, float]
    """The factors that weight and bias have already."""
    xp: Any
    """The library that computes bounds."""
    sizes: np.ndarray | None = None
    """The largest weight of each row, once they have been read."""

    def chunks(self) -> Iterator[tuple[slice, Array]]:
        """Yield rows and their weights in float32, without the factor."""
        rows, inner = self.weight.shape
        step = max(1, _AT_ONCE // inner)
        sizes = np.empty(rows)
        if isinstance(self.weight, QuantizedWeight):
            apart = rows_apart(self.weight.blocks, inner)
            step = -(-step // apart) * apart
        for start in range(0, rows, step):
            part = self.weight[start : start + step]
            if isinstance(part, QuantizedWeight):
                arrays = {name: self.xp.asarray(array) for name, array in part.arrays.items()}
                size = part.block_size
                part = QuantizedWeight(part.format, **arrays, block_size=size, transposed=True)
                wide = dequantize(part)
            else:
                wide = self.xp.asarray(part)
            wide = wide.astype(np.float32, copy=False)
            if self.stored[0] != 1:
                wide = wide * (1 / self.stored[0])
            here = slice(start, start + len(wide))
            yield here, wide
            sizes[here] = on_host(abs(wide).max(axis=1))
        self.sizes = sizes

    def true_bias(self) -> np.ndarray:
        """Return the bias in float64, zeros without one."""
        if self.bias is None:
            return np.zeros(self.weight.shape[0])
        return on_host(self.bias).astype(np.float64) / self.stored[1]

    def reach(self, norm: _NormRange) -> np.ndarray:
        """Return the bound R of each row."""
        found = np.empty(self.weight.shape[0])
        bias = self.true_bias()
        for rows, weight in self.chunks():
            scaled = weight * norm.weight
            length = on_host((scaled * scaled).sum(axis=1)).astype(np.float64) ** 0.5
            shift = bias[rows]
            if norm.bias is not None:
                shift = shift + on_host((weight * norm.bias).sum(axis=1))  # without cuBLAS
            found[rows] = norm.root * length + np.abs(shift)
        return _ROUNDING * found

    def sums(self, items: np.ndarray) -> np.ndarray:
        """Return the bound of each row for an input of items that have bounds."""
        found = np.abs(self.true_bias())
        for rows, weight in self.chunks():
            scale = max(float(items.max(initial=0.0)), 1e-30)
            relative = like(weight, items / scale)
            found[rows] += scale * on_host((abs(weight) * relative).sum(axis=1)).astype(np.float64)
        return _ROUNDING * found

    def largest(self) -> float:
        """Return the largest weight."""
        if self.sizes is None:
            deque(self.chunks(), maxlen=0)
        assert self.sizes is not None
        return float(self.sizes.max(initial=0.0))

    def most(self) -> float:
        """Return the largest factor with which float16 holds the weight."""
        return floor_power(LARGEST / max(self.largest(), 1e-30))

    def most_of_rows(self, of_input: float, bounds: np.ndarray) -> Any:
        """Return factors for the bounds of `sums`: one a row, or one if rows share scales."""
        assert self.sizes is not None
        held = of_input * LARGEST / np.maximum(self.sizes, 1e-30)
        factors = np.minimum(1.0, np.minimum(LIMIT / np.maximum(bounds, 1e-30), held))
        powers = np.ldexp(1.0, np.frexp(factors)[1] - 1)
        if isinstance(self.weight, QuantizedWeight) and self.weight.format == "nf4_nested":
            return float(powers.min())
        return powers

    def scale(self, factor: Any, of_result: Any) -> None:
        """Give the weight this factor, and the bias that of the result."""
        multiply(self.weight, factor / self.stored[0])
        if self.bias is not None:
            multiply(self.bias, of_result / self.stored[1])


_ROUNDING = 1 + 2.0**-10
"""Bounds are computed in float32, whose sums of up to 2^20 terms are within this."""


class _NormRange(NamedTuple):
    """A norm before products: its weight and bias in float32, and the length of a row."""

    weight: Array
    bias: Array | None
    root: float

    @property
    def largest(self) -> float:
        """The bound of all items."""
        items = self.root * abs(self.weight)
        return float((items if self.bias is None else items + abs(self.bias)).max())


def floor_power(number: float) -> float:
    """Return the largest power of two that is not above a number.

    >>> floor_power(1.0), floor_power(0.3), floor_power(9.0)
    (1.0, 0.25, 8.0)
    """
    mantissa, exponent = math.frexp(number)
    return math.ldexp(1.0, exponent - 1) if mantissa else 0.0


def power_for(bound: float) -> float:
    """Return the power of two, at most 1, that brings a bound to `LIMIT`.

    >>> power_for(60_000.0), power_for(1e6)
    (1.0, 0.03125)
    """
    return min(1.0, floor_power(LIMIT / bound)) if bound > LIMIT else 1.0


def multiply(array: Array | QuantizedWeight, factor: Any) -> None:
    """Multiply an array, or the numbers of a quantised weight, in place.

    The factor is a number, or an array with a factor for each row.
    """
    if np.all(factor == 1):
        return
    if not isinstance(array, QuantizedWeight):
        _multiply_rows(array, factor)
        return
    if array.super_scales is not None:
        scales = array.super_scales
    elif array.format == "int4":
        scales = array.scales[..., 0]  # the other is a code
    else:
        scales = array.scales
    _multiply_rows(scales, factor)


def _multiply_rows(array: Array, factor: Any) -> None:
    if isinstance(factor, np.ndarray):
        array *= like(array, factor.reshape(-1, *[1] * (array.ndim - 1))).astype(array.dtype)
    else:
        array *= array.dtype.type(factor)


def in_range(
    weights: Weights,
    config: Config,
    naming: Naming,
    present: Collection[str],
    stored: Mapping[str, float],
    xp: Any,
) -> Weights:
    """Scale the arrays of a float16 model in place, and return it with its scales.

    Parameters
    ----------
    weights : Weights
        As `cupyattn.models.checkpoints.copying.filled` returned them.
    config, naming, present
        The config, the names of tensors, and the tensors that the files have.
    stored : mapping from str to float
        Tensors that are not stored as they are, because float16 does not hold them, with factors.
    xp : module
        The library that computes bounds: weights on the host may have a GPU for them.

    Raises
    ------
    ValueError
        For a weight that no power of two brings into range, by its name.
    """
    fitting = _Fitting(config, naming, present, stored, xp)
    layers = tuple([fitting.layer(i, layer) for i, layer in enumerate(weights.layers)])
    return fitting.ends(weights._replace(layers=layers))


@dataclass
class _Fitting:
    """The scaling of one model, with the arguments of `in_range`."""

    config: Config
    naming: Naming
    present: Collection[str]
    stored: Mapping[str, float]
    xp: Any

    def layer(self, index: int, layer: Layer) -> Layer:
        """Scale a layer."""
        if layer.scalar is not None:
            name = scalar_name(self.naming, self.present, index)
            if name in self.stored:
                size = abs(float(layer.scalar[0])) / self.stored[name]
                raise _beyond(name, "the scalar of a layer", size)
        q, k, v, gate, up, output, down = self._parts(index, layer)
        norm = self._range(self._name(index, "norm"), layer.norm)
        before_mlp = norm
        if layer.mlp_norm is not None:
            before_mlp = self._range(self._name(index, "mlp_norm"), layer.mlp_norm)
        of_up = up.reach(before_mlp)
        of_gate = of_up if gate is None else gate.reach(before_mlp)
        own_gate = [up] if gate is None else [gate]
        n = spread_of(q.weight)  # and of up, whose K is the same
        a = self._norm_scale(norm, own_gate if layer.mlp_norm is None else [], n)
        a_mlp = a if layer.mlp_norm is None else self._norm_scale(before_mlp, own_gate, n)

        r_q, r_k = self._heads(q, norm, a, self._growth()), self._heads(k, norm, a)
        heads = self.config.heads_of(index)
        repeats = heads.num_heads // heads.num_kv_heads
        if layer.v_eps is None:
            of_v = v.reach(norm)
            r_v = min(power_for(spread_of(output.weight) * of_v.max()), floor_power(a * v.most()))
            r_attended = r_v
        else:  # v has a norm without a weight
            of_v = np.full(len(v.weight), math.sqrt(heads.head_dim))
            r_v = r_k if heads.keys_as_values else self._heads(v, norm, a)
            r_attended = 1.0
        attended = of_v.reshape(heads.num_kv_heads, -1).repeat(repeats, axis=0).reshape(-1)
        if gate is None:
            self._require(up, spread_of(down.weight) * float(of_up.max()))
            inner, r_up = of_up, 1.0
        else:
            self._require(gate, float(of_gate.max()))
            inner = of_gate * of_up
            bound = max(spread_of(down.weight) * float(inner.max()), float(of_up.max()))
            r_up = min(power_for(bound), floor_power(a_mlp * up.most()))

        of_output, of_down = output.sums(attended), down.sums(inner)
        if layer.mlp_norm is None:  # float16 adds the two
            both = of_output + of_down
            r_output = output.most_of_rows(r_attended, both)
            r_down = down.most_of_rows(r_up, both)
            shared = isinstance(r_output, float) or isinstance(r_down, float)
            least = np.minimum(r_output, r_down)
            r_output = r_down = float(least.min()) if shared else least
        else:
            r_output = output.most_of_rows(r_attended, of_output)
            r_down = down.most_of_rows(r_up, of_down)
        if layer.output_norm is not None:  # which mixes its rows
            r_output, r_down = float(np.min(r_output)), float(np.min(r_down))

        q.scale(r_q / a, r_q)
        k.scale(r_k / a, r_k)
        if v is not k:
            v.scale(r_v / a, r_v)
        output.scale(r_output / r_attended, r_output)
        up.scale(r_up / a_mlp, r_up)
        if gate is not None:
            gate.scale(1 / a_mlp, 1.0)
        down.scale(r_down / r_up, r_down)
        output_norm, of_output_norm = self._norm_of_product(
            index, "output_norm", layer.output_norm, r_output
        )
        down_norm, of_down_norm = self._norm_of_product(index, "down_norm", layer.down_norm, r_down)
        terms = (r_output, r_down) if output_norm is None else (of_output_norm, of_down_norm)
        after_output, after_down = (self._after(each, layer) for each in terms)
        return layer._replace(
            norm=self._scaled(index, "norm", layer.norm, a),
            mlp_norm=layer.mlp_norm and self._scaled(index, "mlp_norm", layer.mlp_norm, a_mlp),
            q_norm=layer.q_norm and self._of_heads(index, "q_norm", layer.q_norm, r_q),
            k_norm=layer.k_norm and self._of_heads(index, "k_norm", layer.k_norm, r_k),
            output_norm=output_norm,
            down_norm=down_norm,
            scales=Scales(
                norm=a, q=r_q, k=r_k, v=r_v, attended=r_attended, output=r_output,
                output_norm=of_output_norm, mlp_norm=a_mlp, up=r_up, down=r_down,
                down_norm=of_down_norm, after_output=after_output, after_down=after_down,
            ),
            v_eps=layer.v_eps and layer.v_eps * r_v**2,
        )  # fmt: skip

    def _after(self, scale: Any, layer: Layer) -> Array | None:
        """Return what a norm multiplies a term by that has a scale, or one for each item."""
        if np.all(scale == 1):
            return None
        return like(layer.norm.weight, np.full(self.config.hidden_size, 1 / scale))

    def ends(self, weights: Weights) -> Weights:
        """Scale the arrays outside of the layers."""
        name = self._name(None, "last_norm")
        norm = self._range(name, weights.norm)
        table = self._table("embedding", weights.embedding)
        r_embedding = min(1.0, table.most())
        table.scale(r_embedding, 1.0)
        r_positions = 1.0
        if weights.positions is not None:
            positions = self._table("positions", weights.positions)
            r_positions = min(1.0, positions.most())
            positions.scale(r_positions, 1.0)

        head = weights.head
        tied = head.weight is weights.embedding
        named = f"{self.naming.head}.weight"
        bias_stored = self.stored.get(f"{self.naming.head}.bias", 1.0)
        stored = r_embedding if tied else self.stored.get(named, 1.0)
        logits = _ScaledRows(named, head.weight, head.bias, (stored, bias_stored), self.xp)
        r_head = power_for(float(logits.reach(norm).max()))
        factor = r_embedding if tied else min(r_head, logits.most())
        r_head = min(r_head, floor_power(factor * LIMIT / max(norm.largest, 1e-30)))
        logits.scale(factor, r_head)
        scale = r_head / factor
        self._multiply_norm(name, weights.norm, scale)
        return weights._replace(
            norm=weights.norm._replace(offset=scale * weights.norm.offset),
            scales=EndScales(r_embedding, r_positions, scale, r_head),
        )

    def _parts(self, index: int, layer: Layer) -> tuple[Any, ...]:
        """Return q, k, v (k itself where keys are the values), gate or None, up, output, down."""
        config, heads = self.config, self.config.heads_of(index)
        inner = config.intermediate_size

        def rows(field: str, number: int, start: int, stop: int) -> _ScaledRows:
            product = getattr(layer, field)
            names = product_names(self.naming, self.present, index, field)
            return self._rows(names[min(number, len(names) - 1)], product, slice(start, stop))

        of_gate, of_up = None, rows("up", 0, 0, inner)
        if config.activation in GATED:
            of_gate, of_up = of_up, rows("up", 1, inner, 2 * inner)
        ends = (0, *accumulate(heads.rows))
        q, k, *v = (rows("qkv", n, *pair) for n, pair in enumerate(pairwise(ends)))
        return (
            q,
            k,
            *(v or [k]),
            of_gate,
            of_up,
            rows("output", 0, 0, config.hidden_size),
            rows("down", 0, 0, config.hidden_size),
        )

    def _name(self, index: int | None, field: str) -> str:
        return norm_name(self.naming, self.present, index, field)

    def _rows(self, name: str, product: Product, rows: slice) -> _ScaledRows:
        whole = rows == slice(0, product.weight.shape[0])
        weight = product.weight if whole else product.weight[rows]
        bias = None if product.bias is None else product.bias[rows]
        of_bias = f"{name.removesuffix('.weight')}.bias"
        stored = self.stored.get(name, 1.0), self.stored.get(of_bias, 1.0)
        return _ScaledRows(name, weight, bias, stored, self.xp)

    def _table(self, field: str, array: Array) -> _ScaledRows:
        name = self._name(None, field)
        return _ScaledRows(name, array, None, (self.stored.get(name, 1.0), 1.0), self.xp)

    def _range(self, name: str, norm: Norm) -> _NormRange:
        def true(array: Array, tensor: str) -> Array:
            wide = self.xp.asarray(array).astype(np.float32)
            wide *= 1 / self.stored.get(tensor, 1.0)
            return wide

        weight = true(norm.weight, name)
        weight += norm.offset
        of_bias = f"{name.removesuffix('.weight')}.bias"
        bias = None if norm.bias is None else true(norm.bias, of_bias)
        return _NormRange(weight, bias, math.sqrt(len(weight)))

    def _norm_scale(self, norm: _NormRange, unscaled: list[_ScaledRows], spread: float) -> float:
        """Return the scale of a norm, which brings the weights of these products into range."""
        most = floor_power(LIMIT / max(spread * norm.largest, 1e-30))
        scale = min(1.0, most)
        for rows in unscaled:
            while rows.largest() > LARGEST * scale:
                if scale >= most:
                    raise _beyond(rows.tensor, "a weight", rows.largest())
                scale *= 2
        return scale

    def _growth(self) -> float:
        """Return the largest factor of queries."""
        if self.config.query_growth is None:
            return 1.0
        rate, length = self.config.query_growth
        return 1 + abs(rate) * math.log1p(self.config.max_positions / length)

    def _rotation(self) -> float:
        """Return the largest factor of rotations, with the attention factor of YaRN or LongRoPE."""
        scale = getattr(self.config.rope_scaling, "attention_scale", 1.0)
        return math.sqrt(2) * max(1.0, scale) if self.config.rotary_dim else 1.0

    def _heads(self, rows: _ScaledRows, norm: _NormRange, a: float, growth: float = 1.0) -> float:
        """Return the scale of q or k."""
        bound = growth * self._rotation() * float(rows.reach(norm).max())
        return min(power_for(bound), floor_power(a * rows.most()))

    def _of_heads(self, index: int, field: str, norm: Norm, scale: float) -> Norm:
        """Return the norm of heads that are scaled."""
        name = self._name(index, field)
        found = self._range(name, norm)
        growth = self._growth() if field == "q_norm" else 1.0
        if (largest := growth * self._rotation() * found.largest) > LIMIT:
            raise _beyond(name, "a head", largest)
        self._multiply_norm(name, norm, 1.0)
        return norm._replace(eps=norm.eps * scale**2)

    def _norm_of_product(
        self, index: int, field: str, norm: Norm | None, scale: Any
    ) -> tuple[Norm | None, float]:
        """Return the norm of a scaled product, and the scale of what it computes."""
        if norm is None:
            return None, 1.0
        name = self._name(index, field)
        term = power_for(self._range(name, norm).largest)
        self._multiply_norm(name, norm, term)
        return norm._replace(eps=norm.eps * scale**2, offset=norm.offset * term), term

    def _scaled(self, index: int, field: str, norm: Norm, scale: float) -> Norm:
        self._multiply_norm(self._name(index, field), norm, scale)
        return norm._replace(offset=norm.offset * scale)

    def _multiply_norm(self, name: str, norm: Norm, scale: float) -> None:
        """Give weight and bias this factor."""
        multiply(norm.weight, scale / self.stored.get(name, 1.0))
        if norm.bias is not None:
            of_bias = f"{name.removesuffix('.weight')}.bias"
            multiply(norm.bias, scale / self.stored.get(of_bias, 1.0))

    def _require(self, rows: _ScaledRows, bound: float) -> None:
        if bound > LIMIT:
            raise _beyond(rows.tensor, "a product with it", bound)


def _beyond(tensor: str, what: str, size: float) -> ValueError:
    return error(
        ValueError,
        f"{tensor}: {what} may be {size:.3g}",
        f"float16 holds numbers up to {LARGEST:,.0f}, and no power of two in the weights of this "
        "layer brings it into range",
        "load the model in bfloat16 or float32: dtype='bfloat16'",
    )
