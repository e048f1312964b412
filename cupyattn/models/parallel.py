"""A model over several ranks: each holds some heads of every layer, and some columns of every MLP.

The products into attention and into the MLP give each rank its own columns, the products out of
them take its own rows, and what comes of those is summed over ranks: two sums a layer (Shoeybi et
al., "Megatron-LM", arXiv:1909.08053). Embedding, norms and the head are the same on all ranks.

A rank's part of a weight (N, K) is some of its rows or of its columns, also of a quantised weight.
Scales that are codes ("nf4_nested") become the float32 numbers that they mean (4.5 bits a weight
instead of 4.14): they share super_scales across all rows, so a part has no whole groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyattn import QuantizedWeight
from cupyattn.distributed import Group, row_linear
from cupyattn.distributed.group import agree
from cupyattn.models.config import GATED, Config, Heads
from cupyattn.models.weights import Layer, Norm, Product, Weights
from cupyattn.ops.linear.weight_formats import FORMATS, UNIT
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error, shown


def rows_of(weight: Array | QuantizedWeight, parts: Sequence[slice], xp: ModuleType) -> Any:
    """Return rows of a weight on the host, the parts in order, in new arrays of `xp`."""

    def cut(array: Array) -> Array:
        return xp.concatenate([xp.asarray(array[part]) for part in parts])

    if not isinstance(weight, QuantizedWeight):
        return cut(weight)
    weight = _with_float_scales(weight)
    fields: dict[str, Any] = {name: cut(array) for name, array in weight.arrays.items()}
    fields |= {"block_size": weight.block_size, "rotation": weight.rotation}
    return QuantizedWeight(weight.format, **fields, transposed=True)


def columns_of(weight: Array | QuantizedWeight, part: slice, xp: ModuleType) -> Any:
    """Return columns of a weight on the host in new arrays of `xp`, or raise ValueError.

    A part that begins or ends within a block gets smaller blocks with the same scales.
    """
    if not isinstance(weight, QuantizedWeight):
        return xp.array(weight[:, part], order="C")
    weight = _with_float_scales(weight)
    form, inner = FORMATS[weight.format], part.stop - part.start
    block_size = math.gcd(weight.block_size, part.start, part.stop)
    unit = math.lcm(UNIT, form.super_block or UNIT, weight.rotation or UNIT)
    if not form.allows(block_size, inner) or part.start % unit or part.stop % unit:
        raise error(
            ValueError,
            f"columns {part.start} to {part.stop} of {weight!r}",
            f"a rank's columns must be whole blocks of the format, and multiples of {unit}",
            "choose another number of ranks, or load the model with quantize=None",
        )

    def cut(array: Array, columns: int, repeats: int = 1) -> Array:
        """Cut an array with an item for as many columns; each item stands for `repeats` blocks."""
        first, last = part.start // columns, -(-part.stop // columns)
        found = xp.array(array[:, first:last], order="C")
        if repeats == 1:
            return found
        begin = (part.start - first * columns) // block_size
        return xp.ascontiguousarray(
            xp.repeat(found, repeats, axis=1)[:, begin : begin + inner // block_size]
        )

    fields: dict[str, Any] = {
        "codes": cut(weight.codes, 8 // form.bits),
        "scales": cut(weight.scales, weight.block_size, weight.block_size // block_size),
    }
    if weight.super_scales is not None:
        fields["super_scales"] = cut(weight.super_scales, unit)
    fields |= {"block_size": block_size, "rotation": weight.rotation}
    return QuantizedWeight(weight.format, **fields, transposed=True)


def _with_float_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """Return the same weight, with float32 in place of scales that are codes."""
    if weight.super_scales is None or weight.scale_table is None:
        return weight
    group = FORMATS[weight.format].group or 1
    factor, offset = weight.super_scales.repeat(group, axis=0)[: weight.scales.size].T
    absmax = weight.scale_table[weight.scales.reshape(-1)] * factor + offset
    return QuantizedWeight(
        "nf4",
        weight.codes,
        absmax.reshape(weight.scales.shape),
        block_size=weight.block_size,
        transposed=True,
    )


class Summed(NamedTuple):
    """A product with some columns of a weight (N, K), summed over ranks."""

    weight: Array | QuantizedWeight
    bias: Array | None
    group: Group
    activations: None = None

    def __call__(self, x: Array, /, *, residual: Array | None = None) -> Array:
        """Return the sum of all ranks' products, plus bias and residual."""
        return row_linear(x, self.weight.T, self.bias, group=self.group, residual=residual)


def share_of(config: Config, size: int) -> Config:
    """Return the config of one rank's share, or raise ValueError if it does not split evenly."""
    for what, number in (
        ("heads", config.num_heads),
        ("key-value heads", config.num_kv_heads),
        ("key-value heads of global layers", config.global_kv_heads or size),
        ("columns of the MLP", config.intermediate_size),
    ):
        if number % size:
            raise error(
                ValueError,
                f"a model of {number} {what} over {size} ranks",
                "each rank must hold the same number of them",
                "choose a number of ranks that divides them",
            )
    return config._replace(
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        global_kv_heads=config.global_kv_heads and config.global_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
    )


def split(config: Config, weights: Weights, group: Group, xp: ModuleType) -> tuple[Config, Weights]:
    """Return a rank's share of a model: its config and weights, as new arrays of `xp`."""
    size, rank = group.size, group.rank
    share = share_of(config, size)
    inner = config.intermediate_size

    def own(count: int, first: int = 0) -> slice:
        """Return this rank's of `count` rows from `first` on."""
        return slice(first + rank * count // size, first + (rank + 1) * count // size)

    def qkv(heads: Heads) -> list[slice]:
        """Return this rank's rows of q, of k and of v."""
        firsts = accumulate(heads.rows, initial=0)
        return [own(count, first) for count, first in zip(heads.rows, firsts, strict=False)]

    up = [own(inner), own(inner, inner)] if config.activation in GATED else [own(inner)]

    def moved(array: object) -> Any:
        return None if array is None else xp.array(array, order="C")

    def rows(product: Product, parts: Sequence[slice]) -> Product:
        bias = product.bias
        return Product(
            rows_of(product.weight, parts, xp), None if bias is None else rows_of(bias, parts, xp)
        )

    def columns(product: Product, part: slice) -> Any:
        return Summed(columns_of(product.weight, part, xp), moved(product.bias), group)

    def norm(given: Norm | None) -> Any:
        return given and given._replace(weight=moved(given.weight), bias=moved(given.bias))

    layers = tuple(
        Layer(
            norm=norm(layer.norm),
            qkv=rows(layer.qkv, qkv(heads)),
            output=columns(layer.output, own(heads.rows[0])),
            mlp_norm=norm(layer.mlp_norm),
            up=rows(layer.up, up),
            down=columns(layer.down, own(inner)),
            q_norm=norm(layer.q_norm),
            k_norm=norm(layer.k_norm),
            output_norm=norm(layer.output_norm),
            down_norm=norm(layer.down_norm),
            scales=layer.scales._replace(
                after_output=moved(layer.scales.after_output),
                after_down=moved(layer.scales.after_down),
            ),
            v_eps=layer.v_eps,
            scalar=moved(layer.scalar),
        )
        for layer, heads in zip(weights.layers, config.heads, strict=True)
    )
    embedding = moved(weights.embedding)
    head = weights.head
    tied = head.weight is weights.embedding
    return share, Weights(
        embedding=embedding,
        positions=moved(weights.positions),
        layers=layers,
        norm=norm(weights.norm),
        head=Product(embedding if tied else moved(head.weight), moved(head.bias)),
        scales=weights.scales,
    )


def require_group(group: object, xp: ModuleType) -> None:
    """Raise unless ranks of a group can hold a model in arrays of `xp`."""
    if not isinstance(group, Group):
        raise error(
            TypeError,
            f"got group = {shown(group)}",
            "group must be a cupyattn.distributed.Group, or None for a model on one rank",
            "pass the group that distributed.run gives each rank, or launched_group returns",
        )
    if group.device is None:
        return
    if xp is np:
        raise error(
            ValueError,
            f"got xp=numpy on a rank of device {group.device}",
            "a rank's arrays must be on the device of its communicator",
            "leave xp out, or start the ranks without devices: distributed.run(function, 2)",
        )
    current = int(xp.cuda.Device().id)
    if current != group.device:
        raise error(
            ValueError,
            f"device {current} is the current one, on a rank of device {group.device}",
            "a model is loaded to the current device, which is that of its rank's communicator",
            f"load it inside 'with cupy.cuda.Device({group.device})'",
        )


def agreed(
    group: Group | None, alike: Mapping[str, object], xp: ModuleType, number: int = 0
) -> int:
    """Return the smallest `number` of all ranks, or `number` itself without a group.

    Raise ValueError on every rank unless the values of `alike` are the same on all of them.
    """
    if group is None:
        return number
    return min(
        agree(
            group, [f"{name} = {value}" for name, value in alike.items()], xp, number=number,
            allowed="ranks that hold a model together make the same calls",
            fix="pass the same on every rank",
        )
    )  # fmt: skip
