"""Which weights of a model are quantised, and how: those of the products in its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyattn.models.checkpoints.contents import Checkpoint
from cupyattn.models.checkpoints.names import product_names
from cupyattn.models.checkpoints.tensors import QuantisedTensor
from cupyattn.models.weights import PRODUCTS, Quantises, in_dtype
from cupyattn.ops.linear.weight_formats import UNIT, Blocks, blocks_for, rows_apart
from cupyattn.runtime.errors import error, shown

MADE = ("nf4", "int4", "int8")
OF_THE_FILE = "file"
_NESTED = "nf4_nested"
QUANTIZE = (*MADE, OF_THE_FILE)
"""The values of `quantize` that `load` takes."""


def quantises_to(quantize: Any, *, files: bool = False) -> Quantises:
    """Return how weights are kept in a format, or for None in the model's dtype.

    Raises
    ------
    TypeError, ValueError
        For anything else; `files` says whether the caller takes `OF_THE_FILE`.
    """
    if quantize is None:
        return in_dtype
    if isinstance(quantize, str) and quantize == _NESTED:
        # Of a product as q, k and v, whose tensors are read one by one, some would begin within a
        # group, and some might come with a table of their own.
        raise error(
            ValueError,
            f"quantize = {quantize!r}",
            "models have it of bitsandbytes' files alone, by 'file': tensors of one product share "
            "its table and its groups of scales",
            "pass 'nf4', which has the same codes and scales in float32",
        )
    if not isinstance(quantize, str) or quantize not in MADE:
        known = QUANTIZE if files else MADE
        raise error(
            ValueError if isinstance(quantize, str) else TypeError,
            f"quantize = {shown(quantize)}",
            f"weights are quantised to {', '.join(map(repr, known))}",
            "pass one of these, or leave quantize out for the model's dtype",
        )

    def chosen(layer: int, product: str, inner: int) -> Blocks:
        if inner % UNIT:
            raise error(
                ValueError,
                f"{product} of layer {layer} has K = {inner}, with quantize = {quantize!r}",
                f"blocks are made of {UNIT} weights along K or more",
                "load the model with quantize=None",
            )
        return blocks_for(quantize, inner)

    return chosen


def quantises_as_in(checkpoint: Checkpoint) -> Quantises:
    """Return how weights are kept in the blocks of their file, as far as there is code for them.

    A product of several tensors, as q, k and v, has blocks of one kind: where they differ it is in
    the model's dtype, and so are weights of other kinds. Scales that are codes stay codes where all
    tensors of a product have one table, and each begins with a group of its own; otherwise they
    become the float32 that they stand for.

    Raises
    ------
    ValueError
        If there are no such blocks in the file.
    """
    tensors, kept = checkpoint.tensors, dict[tuple[int, str], Blocks]()
    quantised = [each for each in tensors.values() if isinstance(each, QuantisedTensor)]
    table = next((each.nested.table for each in quantised if each.nested is not None), None)
    for layer in range(checkpoint.config.num_layers):
        for product in PRODUCTS:
            names = product_names(checkpoint.naming, tensors, layer, product)
            parts = [part for part in map(tensors.get, names) if isinstance(part, QuantisedTensor)]
            blocks = _common_blocks(parts, table) if len(parts) == len(names) else None
            if blocks is not None:
                kept[layer, product] = blocks
    if not kept:
        raise error(
            ValueError,
            f"{checkpoint.where}: no weights of layers in blocks of four or eight bits that are "
            f"kept, with quantize = {OF_THE_FILE!r}",
            "blocks are kept of GGUF's Q4_0, Q4_1, Q8_0 and Q4_K, of bitsandbytes' NF4, and of "
            "GPTQ and AWQ in four bits",
            f"leave quantize out, or have them quantised: {', '.join(map(repr, MADE))}",
        )
    return lambda layer, product, inner: kept.get((layer, product))


def _common_blocks(
    parts: Sequence[QuantisedTensor], table: tuple[float, ...] | None
) -> Blocks | None:
    """Return how the tensors of a product are kept, one behind the other."""
    found = {part.blocks for part in parts}
    if len(found) != 1:
        return None
    (blocks,) = found
    nested = blocks._replace(format=_NESTED)
    together = all(part.nested is not None and part.nested.table == table for part in parts)
    if together and all(
        part.shape[0] % rows_apart(nested, part.shape[1]) == 0 for part in parts[:-1]
    ):
        return nested
    return blocks
