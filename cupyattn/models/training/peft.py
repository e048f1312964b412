"""Adapters in files as PEFT writes them: adapter_config.json, adapter_model.safetensors."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from cupyattn.models.checkpoints.contents import HUGGING_FACE, damaged, mismatch
from cupyattn.models.checkpoints.fields import Fields
from cupyattn.models.checkpoints.hugging_face import read_object
from cupyattn.models.checkpoints.safetensors_files import Stored, read_metadata, read_safetensors
from cupyattn.models.checkpoints.writing import require_finite, store, write_whole
from cupyattn.models.training.lora_options import LoraOptions
from cupyattn.models.training.trainable import config_fingerprint, fingerprint, kept_in
from cupyattn.models.transformer import Model
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error, explaining, shown

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FIRST_MATRICES = {True, False, "gaussian", "eva", "orthogonal"}
"""Initialisations that do not change the model's weights."""
_READ = {
    "r", "lora_alpha", "lora_dropout", "target_modules", "rank_pattern", "alpha_pattern",
    "use_rslora", "init_lora_weights", "peft_type", "task_type", "bias", "layers_to_transform",
    "layers_pattern", "modules_to_save", "use_dora",
}  # fmt: skip
_WITHOUT_EFFECT = {
    "fan_in_fan_out", "base_model_name_or_path", "inference_mode", "peft_version", "auto_mapping",
    "revision", "megatron_core", "runtime_config", "qalora_group_size",
}  # fmt: skip
"""The layout of the model's files, the origin of adapters, and options of unused features."""


class Extras(NamedTuple):
    """Options of adapters besides those of linear layers."""

    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False

    def written(self) -> dict[str, object]:
        """Return them as PEFT writes them."""
        saved = list(self.modules_to_save) or None
        return {"modules_to_save": saved, "use_dora": self.use_dora}


def write(
    folder: str | os.PathLike[str],
    options: LoraOptions,
    tensors: Mapping[str, Array],
    *,
    model: Model,
    base_model: str | None,
    more: Mapping[str, object] | None = None,
) -> None:
    """Write both files for adapters of this model; on an OSError older files are as they were."""
    require_finite(tensors)
    targets = options.targets
    if targets == "all-linear":
        targets = tuple(dict.fromkeys(name.split(".")[-3] for name in tensors))
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
        "rank_pattern": dict(options.rank_pattern),
        "alpha_pattern": dict(options.alpha_pattern),
        "use_rslora": options.use_rslora,
        "fan_in_fan_out": HUGGING_FACE[model.config.architecture].transposed,
        "bias": "none",
        "inference_mode": True,
        **_layers_written(options),
        **(more or {}),
    }
    named = {f"{_PREFIX}{name}": array for name, array in tensors.items()}
    text = (json.dumps(written, indent=2) + "\n").encode()
    weights = {"kept_in": kept_in(model.weights), "weights": fingerprint(model.weights)}
    metadata = {"format": "pt", **_shape_of(model), **weights}
    writers: dict[str, Callable[[BinaryIO], object]] = {
        _TENSORS: partial(store, arrays=named, metadata=metadata),
        _CONFIG: lambda file: file.write(text),
    }
    with explaining(
        f"no adapters in {folder}",
        "they are written to temporary files, which replace older ones when they are complete",
        "make room, or pass a folder that can be written; older adapters are as they were",
    ):
        write_whole({Path(folder) / name: write for name, write in writers.items()})


def _layers_written(options: LoraOptions) -> dict[str, object]:
    if options.layers_to_transform is None:
        return {}
    return {
        "layers_to_transform": list(options.layers_to_transform),
        "layers_pattern": list(options.layers_pattern) or None,
    }


def read(
    folder: str | os.PathLike[str], model: Model, base_model: str | None
) -> tuple[LoraOptions, Extras, dict[str, Stored]]:
    """Return the options of adapters for `model`, and their tensors by `LoraAdapters`' names."""
    path = Path(folder)
    for name in (_CONFIG, _TENSORS):
        if not (path / name).is_file():
            raise error(
                FileNotFoundError,
                f"{folder} has no {name}",
                f"adapters are {_CONFIG} and {_TENSORS} in one folder, as PEFT writes them; "
                "adapter_model.bin, a pickle that can run any program, is never opened",
                "pass the folder of adapters",
            )
    where = str(path / _CONFIG)
    given = read_object(path / _CONFIG)
    fields = Fields(given, where)
    options, extras = _options(fields), _extras(fields)
    try:
        options = options.checked()
    except (TypeError, ValueError) as failure:
        raise damaged(where, str(failure)) from failure
    metadata, ours = read_metadata(path / _TENSORS), _shape_of(model)
    if "config" in metadata and {name: metadata.get(name) for name in ours} != ours:
        raise unfit(
            folder,
            f"they are of another {metadata.get('architecture')} (config {metadata['config']}, and "
            f"the model's is {ours['config']}, {ours['architecture']})",
        )
    _warn_of_another(folder, given.get("base_model_name_or_path"), base_model, metadata, model)
    tensors = {}
    for name, tensor in read_safetensors(path / _TENSORS).items():
        if not name.startswith(_PREFIX):
            raise damaged(str(path / _TENSORS), f"{shown(name)} does not begin with {_PREFIX}")
        tensors[name.removeprefix(_PREFIX)] = tensor
    modules = {name.rpartition(".lora_")[0] for name in tensors} - {""}
    try:
        return options.effective(modules), extras, tensors  # PEFT ignores patterns without a module
    except ValueError as failure:
        raise damaged(where, str(failure).partition("; ")[0]) from failure


def _warn_of_another(
    folder: str | os.PathLike[str],
    theirs: object,
    base_model: str | None,
    metadata: Mapping[str, str],
    model: Model,
) -> None:
    """Warn if the adapters were trained with other weights.

    The same model has other bits in another dtype or quantised. Then, and in files of PEFT, only
    the names of the models are compared. Paths differ from place to place.
    """
    if metadata.get("kept_in") == kept_in(model.weights):
        another, how = metadata.get("weights") != fingerprint(model.weights), ", of other weights"
    elif isinstance(theirs, str) and theirs and base_model:
        names = Path(theirs).name.lower(), Path(base_model).name.lower().removesuffix(".gguf")
        another, how = names[0] not in base_model.lower() and names[1] not in theirs.lower(), ""
    else:
        return
    if another:
        of, beside = (shown(name) if name else "a model" for name in (theirs, base_model))
        warnings.warn(
            f"{folder}: adapters of {of} beside {beside}{how}; they add to the weights that they "
            "were trained with; load that model, if this is not the same",
            stacklevel=4,
        )


def _shape_of(model: Model) -> dict[str, str]:
    return {"architecture": model.config.architecture, "config": config_fingerprint(model.config)}


def _options(fields: Fields) -> LoraOptions:
    fields.choice("peft_type", ("LORA",))
    fields.choice("task_type", ("CAUSAL_LM",), "CAUSAL_LM")
    fields.choice("bias", ("none",), "none")
    begun = fields.given.get("init_lora_weights", True)
    if not isinstance(begun, bool | str) or begun not in _FIRST_MATRICES:
        fields.refuse("init_lora_weights")
    for name, value in fields.given.items():
        unset = value is None or value is False or value in ([], {}, "")  # 0 may be a layer
        if name not in _READ | _WITHOUT_EFFECT and not unset:
            fields.refuse(name)
    targets = fields.given.get("target_modules")
    layers = fields.given.get("layers_to_transform")
    return LoraOptions(
        rank=fields.integer("r"),
        alpha=fields.number("lora_alpha"),
        dropout=fields.number("lora_dropout", 0.0, zero_allowed=True),
        targets=tuple(targets) if isinstance(targets, list) else targets,  # type: ignore[arg-type]
        rank_pattern=fields.object("rank_pattern"),
        alpha_pattern=fields.object("alpha_pattern"),
        use_rslora=fields.flag("use_rslora", False),
        layers_to_transform=None if layers in (None, []) else layers,
        layers_pattern=fields.given.get("layers_pattern") or (),
    )


def _extras(fields: Fields) -> Extras:
    saved = fields.given.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(each, str) for each in saved):
        raise damaged(fields.where, f"modules_to_save is {shown(saved)}, not a list of names")
    return Extras(tuple(saved), fields.flag("use_dora", False))


def require_ranks(
    folder: str | os.PathLike[str], options: LoraOptions, tensors: Mapping[str, Stored]
) -> None:
    """Raise ValueError for tensors of another rank, before any adapter of that rank is made."""
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".lora_")
        rank = options.rank_of(module)
        if part in ("A.weight", "embedding_A") and tensor.shape[:1] != (rank,):
            raise unfit(folder, f"misshapen: {name} is {tensor.shape}, and its rank {rank}")


def fitting(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, Stored],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, np.ndarray]:
    """Return the tensors of adapters in float32, or raise ValueError for other shapes."""
    if differing := mismatch(tensors, shapes):
        raise unfit(folder, differing)
    found = {}
    for name, shape in shapes.items():
        array = found[name] = tensors[name].as_floats().read(0, shape[0]).astype(np.float32)
        if not np.isfinite(array).all():
            raise damaged(str(Path(folder) / _TENSORS), f"{name} is not finite")
    return found


def unfit(folder: str | os.PathLike[str], why: str) -> ValueError:
    """Make the error for adapters of another model."""
    return error(
        ValueError,
        f"{folder}: adapters do not fit the model: {why}",
        f"the modules in {_CONFIG} must be modules of the model, and the tensors must have the "
        "shapes for its weights",
        "load them with the model that they were trained with",
    )
