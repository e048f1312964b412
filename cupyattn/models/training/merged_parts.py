"""Parts of PEFT's adapters that are merged into a model when they are loaded, and stay as they are.

These are adapters of the head and of the embedding, whole weights of both (``modules_to_save``),
and the magnitudes of DoRA. Training goes on with the other adapters alone, and `LoraAdapters.save`
writes these parts as they were read.

With the scale s = alpha / rank, a linear layer has W + s B A, an embedding W + s (B A)^T. DoRA (Liu
et al., "DoRA: weight-decomposed low-rank adaptation", arXiv:2402.09353, equation 5) gives each row
of W + s B A a learnt length m: m (W + s B A) / |W + s B A|. All of it is computed in float32 and
rounded once, to the model's dtype.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupyattn import QuantizedWeight
from cupyattn.models.checkpoints.contents import HUGGING_FACE
from cupyattn.models.checkpoints.safetensors_files import Stored
from cupyattn.models.config import Config
from cupyattn.models.forward import loss_dtype
from cupyattn.models.training import peft
from cupyattn.models.training.backward import AdaptedProduct
from cupyattn.models.training.lora_options import LoraOptions
from cupyattn.models.transformer import Model
from cupyattn.models.weights import Product
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error

_MAGNITUDE = ".lora_magnitude_vector"


class MergedParts(NamedTuple):
    """The merged parts of a folder of adapters.

    Attributes
    ----------
    options : LoraOptions
        All options, of these parts too.
    written : mapping from str to object
        What adapter_config.json has of them.
    tensors : dict of NumPy arrays
        By their names in the file, without the prefix.
    magnitudes : dict of NumPy arrays
        Those of linear layers in `tensors`, by the name of the layer.
    """

    options: LoraOptions
    written: Mapping[str, object]
    tensors: dict[str, np.ndarray]
    magnitudes: dict[str, np.ndarray]


class _Names(NamedTuple):
    head: str
    embedding: str

    @classmethod
    def of(cls, config: Config) -> _Names:
        naming = HUGGING_FACE[config.architecture]
        return cls(naming.head, naming.prefix + naming.embedding)


def parted(
    folder: str | os.PathLike[str],
    model: Model,
    options: LoraOptions,
    extras: peft.Extras,
    tensors: Mapping[str, Stored],
    modules: Mapping[str, int],
) -> tuple[Model, dict[str, Stored], MergedParts | None]:
    """Merge parts of adapters; return the model with them, the other tensors, and the parts.

    `modules` has the number of rows of each linear layer. The magnitudes are not merged yet: their
    rows depend on the adapters. Raises ValueError for parts that do not fit the model, and
    NotImplementedError for whole weights of other modules.
    """
    names = _Names.of(model.config)
    ours = {name for name in tensors if _owner(name) in names or name.endswith(_MAGNITUDE)}
    ours |= {name for name in tensors if name.endswith(f"{_MAGNITUDE}.weight")}
    _require_known(folder, names, extras, ours)
    found = {name: _read(folder, tensors[name]) for name in ours}
    marks = {n.partition(_MAGNITUDE)[0]: a for n, a in found.items() if _MAGNITUDE in n}
    if bool(marks) != extras.use_dora or names.embedding in marks:
        raise peft.unfit(
            folder,
            f"they have {len(marks)} magnitudes, and use_dora is {extras.use_dora}; there is code "
            "for those of linear layers and the head",
        )
    if not ours:
        return model, dict(tensors), None
    weights = model.weights
    embedding = _embedding(folder, model, options, names.embedding, found)
    head = _head(folder, model, options, names.head, found, marks.pop(names.head, None))
    low = any(".lora_" in name and _owner(name) in names for name in found)
    both = [found[f"{name}.weight"] for name in names if f"{name}.weight" in found]
    if model.config.tied and not low and len(both) == 2 and np.array_equal(both[0], both[1]):
        head = head._replace(weight=embedding)
    merged = model.with_weights(weights._replace(embedding=embedding, head=head))
    merged.config = model.config._replace(tied=head.weight is embedding)
    if unknown := [name for name in marks if name not in modules]:
        raise peft.unfit(folder, f"unknown: {unknown[0]}{_MAGNITUDE}")
    for name, lengths in marks.items():
        if lengths.shape != (modules[name],):
            raise peft.unfit(
                folder,
                f"misshapen: {name}{_MAGNITUDE} is {lengths.shape}, not ({modules[name]},)",
            )
    rest = {name: tensor for name, tensor in tensors.items() if name not in ours}
    return merged, rest, MergedParts(options, extras.written(), found, marks)


def _owner(name: str) -> str:
    """Return the module of a tensor, whatever kind of tensor it is."""
    module = name.partition(".lora_")[0]
    if module == name:
        module = name.rpartition(".")[0]
    return module.removesuffix(".base_layer")


def _require_known(
    folder: str | os.PathLike[str], names: _Names, extras: peft.Extras, ours: set[str]
) -> None:
    for saved in extras.modules_to_save:
        owners = [each for each in names if each == saved or each.endswith(f".{saved}")]
        if not owners:
            raise error(
                NotImplementedError,
                f"{folder}: modules_to_save has {saved}",
                f"there is code for {names.head} and {names.embedding.rpartition('.')[2]}",
                "merge these adapters by PEFT, and load the merged model",
            )
        if not any(f"{owner}.weight" in ours for owner in owners):
            raise peft.unfit(folder, f"missing: {owners[0]}.weight of modules_to_save")


def _read(folder: str | os.PathLike[str], tensor: Stored) -> np.ndarray:
    array = tensor.as_floats().read(0, tensor.shape[0])
    if not np.isfinite(array.astype(np.float32)).all():
        raise peft.unfit(folder, f"{tensor.what} is not finite")
    return array


def _given(
    folder: str | os.PathLike[str],
    found: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    module: str,
) -> dict[str, np.ndarray]:
    """Return the tensors of a module by their last parts, whose shapes are checked."""
    given = {}
    for name, array in found.items():
        if _owner(name) == module:
            kind = name.removeprefix(module).removesuffix(".weight") or ".weight"
            if kind not in shapes or array.shape != shapes[kind]:
                raise peft.unfit(
                    folder, f"misshapen: {name} is {array.shape}, not {shapes.get(kind, 'known')}"
                )
            given[kind] = array
    if _MAGNITUDE in given and ".lora_A" not in given:
        raise peft.unfit(folder, f"missing: {module}.lora_A, whose magnitudes there are")
    pairs = (".lora_A", ".lora_B"), (".lora_embedding_A", ".lora_embedding_B")
    for pair in pairs:
        if len(given.keys() & pair) == 1:
            raise peft.unfit(folder, f"missing: {module} has only one of {' and '.join(pair)}")
    return given


def _embedding(
    folder: str | os.PathLike[str],
    model: Model,
    options: LoraOptions,
    module: str,
    found: Mapping[str, np.ndarray],
) -> Array:
    table = model.weights.embedding
    (rows, width), rank = table.shape, options.rank_of(module)
    shapes = {
        ".weight": table.shape,
        ".base_layer": table.shape,
        ".lora_embedding_A": (rank, rows),
        ".lora_embedding_B": (width, rank),
    }
    given = _given(folder, found, shapes, module)
    factor = model.weights.scales.embedding
    table = _replaced(model, table, given, factor)
    if ".lora_embedding_A" not in given:
        return table
    a, b = given[".lora_embedding_B"].T, given[".lora_embedding_A"].T
    return _added(model, table, a, b, factor * options.scale_of(module))


def _head(
    folder: str | os.PathLike[str],
    model: Model,
    options: LoraOptions,
    module: str,
    found: Mapping[str, np.ndarray],
    magnitude: np.ndarray | None,
) -> Product:
    head = model.weights.head
    assert not isinstance(head.weight, QuantizedWeight)
    (rows, width), rank = head.weight.shape, options.rank_of(module)
    shapes = {
        ".weight": head.weight.shape,
        ".base_layer": head.weight.shape,
        ".lora_A": (rank, width),
        ".lora_B": (rows, rank),
        _MAGNITUDE: (rows,),
    }
    given = _given(folder, found, shapes, module)
    ends = model.weights.scales
    factor = ends.head / ends.norm
    weight = _replaced(model, head.weight, given, factor)
    if ".lora_A" in given:
        low, scale = (given[".lora_A"], given[".lora_B"]), factor * options.scale_of(module)
        lengths = None if magnitude is None else factor * magnitude.astype(np.float32)
        weight = _added(model, weight, *low, scale, lengths)
    return head._replace(weight=weight)


def _replaced(model: Model, weight: Array, given: Mapping[str, np.ndarray], factor: float) -> Array:
    """Return the weight of a file in the model's dtype times a factor, or the model's own."""
    for kind in (".weight", ".base_layer"):
        if kind in given:
            with np.errstate(over="ignore"):
                scaled = given[kind] if factor == 1 else factor * given[kind].astype(np.float32)
                return model.xp.asarray(scaled.astype(weight.dtype))
    return weight


def _added(
    model: Model,
    weight: Array,
    a: np.ndarray,
    b: np.ndarray,
    scale: float,
    magnitude: np.ndarray | None = None,
) -> Array:
    wide, xp = loss_dtype(weight.dtype), model.xp
    both = a.astype(wide), scale * b.astype(wide)
    low = (xp.ascontiguousarray(xp.asarray(each)) for each in both)
    lengths = None if magnitude is None else xp.asarray(magnitude.astype(wide))
    whole = AdaptedProduct(weight, None, *low).merged(xp, dtype=weight.dtype, lengths=lengths)
    merged: Any = whole.weight  # an array: only products of layers are quantised
    return merged
