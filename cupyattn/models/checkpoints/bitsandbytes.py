"""NF4 as bitsandbytes writes it: codes in one column, and absmax of blocks, perhaps quantised too.

For ``NAME.weight``, uint8 (N K / 2, 1), a file has its ``.absmax``, its ``.quant_map`` (the
codebook), and a ``.quant_state.bitsandbytes__nf4``: JSON in bytes. With double quantisation
(Dettmers et al., arXiv:2305.14314, section 3) absmax are codes of a table ``.nested_quant_map``,
times ``.nested_absmax`` of each 256, plus an offset in the JSON.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np

from cupyattn import QuantizedWeight
from cupyattn.models.checkpoints.contents import AnyTensor, NestedScales, QuantisedTensor, damaged
from cupyattn.models.checkpoints.fields import Fields
from cupyattn.models.checkpoints.safetensors_files import Stored
from cupyattn.ops.linear.weight_formats import FORMATS, NF4_CODEBOOK, TABLE, Blocks
from cupyattn.runtime.errors import error, shown, size_text
from cupyattn.runtime.reading import parsed

STATE = ".quant_state.bitsandbytes__"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_NESTED = "nf4_nested"
_MOST_STATE = 1 << 16
"""Bytes of a quant_state, which has some 200."""
_GROUP = FORMATS[_NESTED].group or 0


def unpacked_nf4(stored: dict[str, Stored]) -> dict[str, AnyTensor]:
    """Return the tensors of a model; weights in NF4 stay quantised."""
    rest, found = dict(stored), {}
    for state_name in [name for name in stored if STATE in name]:
        name, _, kind = state_name.partition(STATE)
        state = _state(rest.pop(state_name), kind)
        codes = rest.pop(name, None)
        parts = {part: rest.pop(f"{name}.{part}", None) for part in _PARTS}
        if codes is None:
            raise damaged(stored[state_name].what, f"there is no {name}")
        found[name] = _tensor(codes, parts, state)
    return {**found, **{name: tensor.as_floats() for name, tensor in rest.items()}}


def _state(stored: Stored, kind: str) -> Fields:
    stored.require(("U8",))
    if kind != "nf4":
        raise error(
            NotImplementedError,
            f"{stored.what}: weights of the type {kind}",
            "of bitsandbytes' types only NF4 can be read",
            "load the model from before it was quantised",
        )
    if len(stored.shape) != 1 or not stored.shape[0]:
        raise damaged(stored.what, f"no JSON: its shape is {stored.shape}")
    if stored.shape[0] > _MOST_STATE:
        size = size_text(stored.shape[0])
        raise damaged(stored.what, f"it has {size}, and at most {size_text(_MOST_STATE)} are read")
    given = parsed(stored.items(slice(None)).tobytes(), stored.what, damaged)
    if not isinstance(given, dict):
        raise damaged(stored.what, "no JSON object")
    return Fields(given, stored.what)


def _tensor(codes: Stored, parts: dict[str, Stored | None], state: Fields) -> QuantisedTensor:
    shape = state.given.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int for n in shape):
        raise damaged(state.where, f"shape is {shown(shape)}, which is not two integers")
    rows, inner = shape
    block_size = state.integer("blocksize")
    if min(shape) < 1 or inner % block_size or not FORMATS["nf4"].allows(block_size, inner):
        raise error(
            NotImplementedError,
            f"{codes.what}: rows of {inner} weights in blocks of {block_size}",
            "rows must be whole blocks of a power of two from 32 to 4096 weights",
            "load the model from before it was quantised",
        )
    count = rows * inner // block_size
    codes.require(("U8",), (rows * inner // 2, 1))
    codebook = _part(parts, "quant_map", codes, ("F32",), (16,)).items(slice(None))
    _require_codebook(codebook, codes)
    if parts["nested_absmax"] is None and parts["nested_quant_map"] is None:
        scales = _Scales(_part(parts, "absmax", codes, ("F32",), (count,)))
    else:
        outer = state.integer("nested_blocksize")
        scales = _Scales(
            _part(parts, "absmax", codes, ("U8",), (count,)),
            _Nested(
                _part(parts, "nested_absmax", codes, ("F32",), (math.ceil(count / outer),)),
                _part(parts, "nested_quant_map", codes, ("F32",), (TABLE,)),
                outer,
                np.float32(_offset(state)),
            ),
        )
    read = partial(_rows, codes, scales, inner, block_size)
    nested = None
    if scales.nested is not None and scales.nested.block_size % _GROUP == 0:
        table = tuple(scales.nested.table.items(slice(None)).tolist())
        as_codes = partial(_nested_rows, codes, scales.absmax, scales.nested, inner, block_size)
        nested = NestedScales(table, as_codes)
    return QuantisedTensor((rows, inner), Blocks("nf4", block_size), read, nested)


def _part(
    parts: dict[str, Stored | None],
    name: str,
    codes: Stored,
    kinds: tuple[str, ...],
    shape: tuple[int, ...],
) -> Stored:
    part = parts[name]
    if part is None:
        raise damaged(codes.what, f"it has no {name}")
    return part.require(kinds, shape)


def _offset(state: Fields) -> float:
    offset = state.given.get("nested_offset")
    if not isinstance(offset, int | float) or isinstance(offset, bool) or not abs(offset) <= 3e38:
        raise damaged(
            state.where, f"nested_offset is {shown(offset)}, which is not a finite number"
        )
    return float(offset)


def _require_codebook(codebook: np.ndarray, codes: Stored) -> None:
    if not np.array_equal(codebook, NF4_CODEBOOK):
        raise error(
            NotImplementedError,
            f"{codes.what}: a quant_map {codebook.tolist()}",
            "only the quant_map of NF4, as bitsandbytes writes it, can be read",
            "load the model from before it was quantised",
        )


class _Nested(NamedTuple):
    """The quantised absmax of blocks."""

    absmax: Stored
    table: Stored
    block_size: int
    offset: np.float32


class _Scales(NamedTuple):
    """The absmax of blocks, in float32 or in codes of eight bits."""

    absmax: Stored
    nested: _Nested | None = None

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return a range of blocks' absmax, in float32 as bitsandbytes computes them."""
        found = self.absmax.items(slice(start, stop))
        if self.nested is None:
            return found
        size = self.nested.block_size
        first = start // size
        scales = self.nested.absmax.items(slice(first, -(-stop // size)))
        scales = scales[np.arange(start, stop) // size - first]
        return self.nested.table.items(slice(None))[found] * scales + self.nested.offset


def _rows(
    codes: Stored, scales: _Scales, inner: int, block_size: int, start: int, stop: int
) -> QuantizedWeight:
    blocks = inner // block_size
    own = _codes(codes, inner, start, stop)
    absmax = scales.read(start * blocks, stop * blocks).reshape(stop - start, blocks)
    return QuantizedWeight("nf4", own, absmax, block_size=block_size, transposed=True)


def _nested_rows(
    codes: Stored,
    absmax: Stored,
    nested: _Nested,
    inner: int,
    block_size: int,
    start: int,
    stop: int,
) -> QuantizedWeight:
    blocks = inner // block_size
    groups = np.arange(start * blocks // _GROUP, -(-stop * blocks // _GROUP))
    above = nested.absmax.items(slice(None))[groups * _GROUP // nested.block_size]
    return QuantizedWeight(
        _NESTED,
        _codes(codes, inner, start, stop),
        absmax.items(slice(start * blocks, stop * blocks)).reshape(-1, blocks).copy(),
        np.stack([above, np.full_like(above, nested.offset)], axis=-1),
        nested.table.items(slice(None)).copy(),
        block_size=block_size,
        transposed=True,
    )


def _codes(codes: Stored, inner: int, start: int, stop: int) -> np.ndarray:
    """Return rows as an aligned array, which bytes of a file may not be."""
    found = codes.items(slice(start * inner // 2, stop * inner // 2))
    return found.reshape(stop - start, inner // 2).copy()
