"""Which weights of a model are quantised, and how: those of the products in its layers."""

from __future__ import annotations

from typing import Any

from cupyattn.errors import error, shown
from cupyattn.models.checkpoints.checkpoint import Checkpoint
from cupyattn.models.checkpoints.names import product_names
from cupyattn.models.checkpoints.tensors import QuantisedTensor
from cupyattn.models.weights import PRODUCTS, Quantises, in_dtype
from cupyattn.weight_formats import UNIT, Blocks, blocks_for

MADE = ("nf4", "int4", "int8")
OF_THE_FILE = "file"
QUANTIZE = (*MADE, OF_THE_FILE)
"""What `load` takes."""


def quantises_to(quantize: Any, *, files: bool = False) -> Quantises:
    """Return how weights are kept in a format, or for None in the model's dtype.

    Raises
    ------
    TypeError, ValueError
        For anything else; `files` says whether the caller takes `OF_THE_FILE`.
    """
    if quantize is None:
        return in_dtype
    if not isinstance(quantize, str) or quantize not in MADE:
        known = QUANTIZE if files else MADE
        raise error(
            ValueError if isinstance(quantize, str) else TypeError,
            f"quantize = {shown(quantize)}",
            f"weights are quantised to {', '.join(map(repr, known))}",
            "pass one of these, or None for the model's dtype",
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
    the model's dtype, and so are weights of other kinds.

    Raises
    ------
    ValueError
        If there are no such blocks in the file.
    """
    tensors, kept = checkpoint.tensors, dict[tuple[int, str], Blocks]()
    for layer in range(checkpoint.config.num_layers):
        for product in PRODUCTS:
            names = product_names(checkpoint.naming, tensors, layer, product)
            found = {
                tensor.blocks if isinstance(tensor, QuantisedTensor) else None
                for tensor in map(tensors.get, names)
            }
            blocks = found.pop() if len(found) == 1 else None
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
