"""From the tensors of a checkpoint into the arrays of a model, a few million numbers at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from cupyattn import QuantizedWeight, dequantize, quantize
from cupyattn.models.checkpoints.contents import (
    AnyTensor,
    Checkpoint,
    QuantisedTensor,
    TensorTarget,
    TensorTargets,
    is_ignored,
    mismatch,
    norm_name,
    places,
)
from cupyattn.models.float16_range import LARGEST, floor_power, in_range
from cupyattn.models.weights import Quantises, Weights, empty, in_dtype
from cupyattn.ops.linear.weight_formats import (
    FORMATS,
    INT4_LARGEST,
    Blocks,
    rows_apart,
    rows_of_piece,
)
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error
from cupyattn.runtime.progress import progress
from cupyattn.runtime.value_checks import on_host

_AT_ONCE = 1 << 22
"""Numbers that are read at a time: they take some 50 MB, on the host and on the device."""
_LARGEST = {"float16": LARGEST, "int4": INT4_LARGEST}


_Form = tuple[Blocks | None, int | None]
"""The blocks of a target, None for the model's dtype, and its rotation."""


class _Shapes:
    """A stand-in for numpy or cupy whose arrays have a shape, and no memory."""

    @staticmethod
    def empty(shape: int | tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)


def filled(
    checkpoint: Checkpoint,
    dtype: str,
    xp: ModuleType,
    quantises: Quantises = in_dtype,
    *,
    by: Any = None,
    activations: str | None = None,
) -> Weights:
    """Read all weights, after a check of every name and shape that allocates nothing.

    Weights are converted and quantised by `xp`, or by the library `by`: a GPU can prepare weights
    for the memory of the host, which may be larger. Those of a float16 model are scaled by powers
    of two such that its products are in range.
    """
    scaled: dict[str, float] | None = {} if dtype == "float16" else None
    naming, config, tensors = checkpoint.naming, checkpoint.config, checkpoint.tensors
    _require_fit(checkpoint, places(naming, config, empty(config, dtype, _Shapes), tensors))
    weights = empty(config, dtype, xp, quantises, activations)
    targets = places(naming, config, weights, tensors)
    total = len(targets.filled)
    with progress("loading tensors", total) as step:
        for name, place in targets.filled.items():
            _each_part(checkpoint, name, place, dtype, by or xp, _store, scaled)
            step()
        for name, place in targets.repeated.items():
            if name in checkpoint.tensors:
                if scaled is not None and scaled:
                    table = norm_name(naming, tensors, None, "embedding")
                    scaled[name] = scaled.get(table, 1.0)
                _each_part(checkpoint, name, place, dtype, by or xp, _require_equal, scaled)
    if scaled is None:
        return weights
    return in_range(weights, config, naming, tensors, scaled, by or xp)


def _require_fit(checkpoint: Checkpoint, targets: TensorTargets) -> None:
    tensors, config = checkpoint.tensors, checkpoint.config
    found = mismatch(
        tensors,
        {name: target.shape for name, target in (targets.filled | targets.repeated).items()},
        optional=targets.repeated,
        ignores=lambda name: is_ignored(checkpoint.naming, name) or _adds_nothing(name, tensors),
    )
    if found:
        raise error(
            ValueError,
            f"{checkpoint.where}: tensors do not fit its config; {found}",
            f"a {config.architecture} model of {config.num_layers} layers has "
            f"{len(targets.filled)} tensors of fixed names and shapes",
            "load the files of one model, all of them, with their own config",
        )


def _adds_nothing(name: str, tensors: Mapping[str, AnyTensor]) -> bool:
    """Tell whether a tensor is a bias of zeros: files of GPTQ may have one for each weight."""
    stem, _, kind = name.rpartition(".")
    tensor, weight = tensors[name], tensors.get(f"{stem}.weight")
    if kind != "bias" or weight is None or isinstance(tensor, QuantisedTensor):
        return False
    if len(tensor.shape) != 1 or tensor.shape[0] not in weight.shape:  # the size is checked first
        return False
    return not tensor.read(0, tensor.shape[0]).any()


def _each_part(
    checkpoint: Checkpoint,
    name: str,
    place: TensorTarget,
    dtype: str,
    xp: ModuleType,
    use: Callable[..., None],
    scaled: dict[str, float] | None,
) -> None:
    tensor = checkpoint.tensors[name]
    length = len(next(iter(place.targets.values())))
    rows = (
        tensor.shape[1 if place.transposed else 0] // length
    )  # of the file, for one of the targets
    inner, blocks = tensor.shape[-1], place.blocks
    apart = 1 if blocks is None else rows_apart(blocks, inner)
    step = -(-max(1, _AT_ONCE // (math.prod(tensor.shape) // length)) // apart) * apart
    for start in range(0, length, step):
        stop = min(start + step, length)
        parts = {
            own: target[start:stop]
            if blocks is None
            else rows_of_piece(blocks, own, target, inner, start, stop)
            for own, target in place.targets.items()
        }
        found = _found(tensor, place, start * rows, stop * rows, xp)
        if scaled is not None and blocks is None and not isinstance(found, QuantizedWeight):
            factor = scaled.get(name, 1.0)
            size = float(xp.abs(found).max())
            if size < math.inf and size * factor > LARGEST:
                factor = floor_power(LARGEST / size)
                for target in place.targets.values():
                    target[:start] *= target.dtype.type(factor / scaled.get(name, 1.0))
                scaled[name] = factor
            if factor != 1:
                found = found * np.float32(factor)
        form = place.blocks, place.rotation
        use(f"{checkpoint.where}: {name}", parts, found, form, dtype, xp)


def _found(
    tensor: AnyTensor, place: TensorTarget, start: int, stop: int, xp: ModuleType
) -> Array | QuantizedWeight:
    """Return numbers as float32 on the device, or blocks that are kept."""
    if isinstance(tensor, QuantisedTensor):
        as_kept = tensor.read if tensor.floats is None or tensor.blocks == place.blocks else None
        if as_kept is None:
            assert tensor.floats is not None
            return _float32(tensor.floats(start, stop), xp)
        nested = place.blocks is not None and FORMATS[place.blocks.format].group is not None
        rows = tensor.nested.read if nested and tensor.nested is not None else as_kept
        read = rows(start, stop)
        arrays = {own: xp.asarray(array) for own, array in read.arrays.items()}
        weight = QuantizedWeight(read.format, **arrays, block_size=read.block_size, transposed=True)
        kept = weight.blocks == place.blocks and place.rotation is None
        return weight if kept else dequantize(weight)
    if place.transposed and tensor.read_columns is not None:
        return _float32(tensor.read_columns(start, stop), xp).T
    return _float32(tensor.read(start, stop), xp)


def _float32(found: np.ndarray, xp: ModuleType) -> Array:
    """Copy numbers to the device in the dtype of the file, and widen them there."""
    if found.dtype.name == "bfloat16":  # the upper half of a float32
        bits = xp.asarray(found.view(np.uint16)).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return xp.asarray(found).astype(np.float32, copy=False)


def _store(
    what: str,
    parts: dict[str, Array],
    found: Array | QuantizedWeight,
    form: _Form,
    dtype: str,
    xp: ModuleType,
) -> None:
    blocks, rotation = form
    if isinstance(found, QuantizedWeight):
        for array in found.arrays.values():
            if array.dtype.kind == "f":
                _require_finite(f"{what}, a scale", array, "float32", xp)
    else:
        _require_finite(what, found, dtype, xp)
        if blocks is None:
            part = parts["all"]
            part[...] = _where_target_is(part, found.astype(part.dtype, copy=False)).reshape(
                part.shape
            )
            return
        if blocks.format in _LARGEST:
            _require_finite(what, found, blocks.format, xp)
        size = blocks.block_size
        found = quantize(found.T, format=blocks.format, block_size=size, rotation=rotation)
    for own, array in found.arrays.items():
        parts[own][...] = _where_target_is(parts[own], array).reshape(parts[own].shape)


def _where_target_is(target: Array, array: Array) -> Array:
    """Bring an array to the host if its target is there."""
    return on_host(array) if isinstance(target, np.ndarray) else array


def _require_finite(what: str, found: Array, dtype: str, xp: ModuleType) -> None:
    largest = float(xp.abs(found).max())
    limit = _LARGEST.get(dtype, 3e38)
    if not largest <= limit:  # NaN is not
        fix = "download the file again"
        if limit < largest < math.inf and dtype in _LARGEST:
            fix = (
                "load in another format, such as dtype='float32' or quantize='nf4', if the number "
                f"is right, or {fix}"
            )
        raise error(
            ValueError,
            f"{what} holds {largest:g}",
            f"weights of {dtype} must be finite, up to {limit:g}",
            fix,
        )


def _require_equal(
    what: str, parts: dict[str, Array], found: Array, form: _Form, dtype: str, xp: ModuleType
) -> None:
    part = parts["all"]
    equal: Any = part == _where_target_is(part, found.astype(part.dtype))
    if not bool(equal.all()):
        raise error(
            ValueError,
            f"{what} differs from the embedding, but the config ties them",
            "the head of a tied model must equal the embedding",
            "set tie_word_embeddings to false in config.json if they are two weights",
        )
