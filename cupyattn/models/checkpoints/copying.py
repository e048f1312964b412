"""From the tensors of a checkpoint into the arrays of a model, a few million numbers at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cupyattn.arrays import Array
from cupyattn.errors import error
from cupyattn.models.checkpoints.checkpoint import Checkpoint, Tensor
from cupyattn.models.checkpoints.names import Place, Places, is_ignored, places
from cupyattn.models.weights import Weights, empty
from cupyattn.progress import progress

_AT_ONCE = 1 << 22
"""Numbers: what is read beside the model takes some 50 MB, on the host and on the device."""
_LARGEST = {"float16": 65504.0}


class _Shapes:
    """In the place of numpy or cupy: arrays that have a shape, and no memory."""

    @staticmethod
    def empty(shape: int | tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)


def filled(checkpoint: Checkpoint, dtype: str, xp: Any) -> Weights:
    """Read all weights, after a look at every name and shape, for which nothing is allocated.

    Raises
    ------
    ValueError
        For tensors that are missing, or of another shape, or that no model of this config has; and
        for weights that are not finite in the dtype of the model.
    """
    naming, config, tensors = checkpoint.naming, checkpoint.config, checkpoint.tensors
    _require_fit(checkpoint, places(naming, config, empty(config, dtype, _Shapes), tensors))
    weights = empty(config, dtype, xp)
    targets = places(naming, config, weights, tensors)
    total = len(targets.filled)
    with progress("loading tensors", total) as step:
        for name, place in targets.filled.items():
            _each_part(checkpoint, name, place, xp, _store)
            step()
        for name, place in targets.repeated.items():
            if name in checkpoint.tensors:
                _each_part(checkpoint, name, place, xp, _require_equal)
    return weights


def _require_fit(checkpoint: Checkpoint, targets: Places) -> None:
    tensors, known = checkpoint.tensors, {**targets.filled, **targets.repeated}
    missing = [name for name in targets.filled if name not in tensors]
    extra = [
        name for name in tensors if name not in known and not is_ignored(checkpoint.naming, name)
    ]
    wrong = [
        f"{name} is {tensors[name].shape}, not {place.shape}"
        for name, place in known.items()
        if name in tensors and tensors[name].shape != place.shape
    ]
    complaints = [
        f"{title}: {_listed(names)}"
        for title, names in (("missing", missing), ("unknown", extra), ("misshapen", wrong))
        if names
    ]
    if complaints:
        config = checkpoint.config
        raise error(
            ValueError,
            f"{checkpoint.where}: tensors do not fit its config; {'; '.join(complaints)}",
            f"a model {config.architecture} of {config.num_layers} layers has "
            f"{len(targets.filled)} tensors of fixed names and shapes",
            "load the files of one model, all of them, with their own config",
        )


def _listed(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _each_part(
    checkpoint: Checkpoint, name: str, place: Place, xp: Any, use: Callable[..., None]
) -> None:
    tensor: Tensor = checkpoint.tensors[name]
    target = place.target
    rows = tensor.shape[0] // len(target)  # of the file, for one of the target
    step = max(1, _AT_ONCE // math.prod(target.shape[1:]))
    for start in range(0, len(target), step):
        part = target[start : start + step]
        found = tensor.read(start * rows, (start + len(part)) * rows)
        use(f"{checkpoint.where}: {name}", part, _float32(found, xp).reshape(part.shape), xp)


def _float32(found: np.ndarray, xp: Any) -> Array:
    """Bring numbers to the device as they are in the file, and widen them there."""
    if found.dtype.name == "bfloat16":  # the upper half of a float32
        bits = xp.asarray(found.view(np.uint16)).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return xp.asarray(found).astype(np.float32, copy=False)


def _store(what: str, part: Array, found: Array, xp: Any) -> None:
    with np.errstate(over="ignore"):
        part[...] = found.astype(part.dtype, copy=False)
    largest = float(xp.abs(found).max())
    limit = _LARGEST.get(part.dtype.name, 3e38)
    if not largest <= limit:  # NaN is not
        raise error(
            ValueError,
            f"{what} holds {largest:g}",
            f"weights of {part.dtype.name} are finite, up to {limit:g}",
            "load with dtype='float32' or 'bfloat16' if the number is right, or download the file "
            "again",
        )


def _require_equal(what: str, part: Array, found: Array, xp: Any) -> None:
    if not bool((part == found.astype(part.dtype)).all()):
        raise error(
            ValueError,
            f"{what} differs from the embedding, and the config says that they are one",
            "a tied head holds the embedding",
            "set tie_word_embeddings to false in the config if they are two",
        )
