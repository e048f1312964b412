"""Weights in files that bitsandbytes wrote itself (``write_packed.py``): the very same numbers."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

pytest.importorskip("safetensors")

from models.write_packed import FOLDER, ROWS, SHAPES, weights
from safetensors.numpy import load_file

import cupyattn
from cupyattn import QuantizedWeight
from cupyattn.models.checkpoints.bitsandbytes import unpacked_nf4
from cupyattn.models.checkpoints.safetensors_files import read_safetensors
from cupyattn.models.checkpoints.tensors import QuantisedTensor


def read(name: str, *parts: tuple[int, int]) -> list[QuantizedWeight]:
    """Rows of the weight, as they are read from the file."""
    stored = read_safetensors(FOLDER / f"{name}.safetensors")
    del stored["expected"]
    (tensor,) = unpacked_nf4(stored).values()
    assert isinstance(tensor, QuantisedTensor)
    assert (tensor.shape, tensor.blocks) == (SHAPES[name], ("nf4", 64))
    return [tensor.read(*part) for part in parts]


@pytest.mark.parametrize("name", SHAPES)
def test_numbers_are_those_of_bitsandbytes(name):
    """Also of rows in pieces, of which one begins within the second block of absmax."""
    expected = load_file(FOLDER / f"{name}.safetensors")["expected"]
    outer = SHAPES[name][0]
    whole, *parts = read(name, (0, outer), (0, 5), (5, outer - 1), (outer - 1, outer))
    found = cupyattn.dequantize(whole)
    assert_array_equal(found[list(ROWS)], expected)
    assert_array_equal(np.concatenate([cupyattn.dequantize(part) for part in parts]), found)


def test_absmax_stay_in_eight_bits():
    """As they are in the file, and the very same numbers; from the first row of a group on."""
    stored = read_safetensors(FOLDER / "nested.safetensors")
    file = {name: part.items(slice(None)) for name, part in stored.items()}
    expected = stored.pop("expected").items(slice(None))
    (tensor,) = unpacked_nf4(stored).values()
    assert isinstance(tensor, QuantisedTensor)
    assert tensor.nested is not None
    outer = SHAPES["nested"][0]
    whole, part = tensor.nested.read(0, outer), tensor.nested.read(16, outer)
    assert whole.format == "nf4_nested"
    found = cupyattn.dequantize(whole)
    assert_array_equal(found[list(ROWS)], expected)
    assert_array_equal(cupyattn.dequantize(part), found[16:])
    assert_array_equal(found, cupyattn.dequantize(tensor.read(0, outer)))
    assert_array_equal(whole.scales.reshape(-1), file["linear.weight.absmax"])
    assert_array_equal(whole.scale_table, file["linear.weight.nested_quant_map"])
    assert whole.super_scales is not None
    assert_array_equal(whole.super_scales[:4, 0], file["linear.weight.nested_absmax"][[0, 0, 0, 0]])


@pytest.mark.parametrize("name", SHAPES)
def test_codes_are_those_of_bitsandbytes(name):
    """And absmax, where they are not quantised themselves: then they are near."""
    (whole,) = read(name, (0, SHAPES[name][0]))
    ours = cupyattn.quantize(weights(name).T, format="nf4", block_size=64).T
    assert_array_equal(ours.codes, whole.codes)
    if name == "plain":
        assert_array_equal(ours.scales, whole.scales)
    else:
        np.testing.assert_allclose(ours.scales, whole.scales, rtol=0.1)
        assert (ours.scales != whole.scales).any()
