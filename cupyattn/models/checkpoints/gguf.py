"""GGUF files as llama.cpp's converter writes them: the format, its blocks, and a model's config.

The specification is ggml's docs/gguf.md. The package gguf has a reader too, but it takes seconds
for the tokens of a vocabulary. It is used only to dequantise.

Blocks of Q4_0, Q4_1, Q8_0 and Q4_K (ggml's ggml-common.h) are kept. A row is a sequence of blocks,
each with its scales before its integers. In a block of 32 four-bit weights, byte j has weight j in
its low half and weight j + 16 in its high half. Q4_K has eight blocks of 32 in a super-block, and
pairs of them in the halves of 32 bytes.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyattn import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    QuantizedWeight,
    YarnScaling,
)
from cupyattn.models.checkpoints.contents import (
    GGUF,
    AnyTensor,
    Checkpoint,
    Naming,
    QuantisedTensor,
    Tensor,
    damaged,
)
from cupyattn.models.checkpoints.fields import Fields
from cupyattn.models.checkpoints.gguf_parts import part_paths
from cupyattn.models.config import Config, RopeScaling, checked, extended, unknown_architecture
from cupyattn.models.extras import extra
from cupyattn.models.tokenizer import require_known_tokenizer, tokenizer_of_gguf
from cupyattn.models.weights import LAYER_NORMS
from cupyattn.ops.linear.weight_formats import Blocks
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.errors import error, shown, size_text
from cupyattn.runtime.reading import open_regular

_BLOCK = 32
_Arrays = dict[str, np.ndarray]


def kept_blocks(kind: str, stored: np.ndarray, inner: int) -> QuantisedTensor | None:
    """Return bytes (N, bytes of a row) as a tensor (N, K); None if such blocks are not kept."""
    if kind not in _KINDS:
        return None
    found = _KINDS[kind]
    read = partial(_block_rows, found, stored)
    return QuantisedTensor((len(stored), inner), Blocks(found.format, _BLOCK), read)


class _BlockKind(NamedTuple):
    """The format of blocks in GGUF, and how to unpack them."""

    format: str
    size: int
    """Bytes."""
    unpack: Callable[[np.ndarray], _Arrays]
    """From blocks (rows, blocks, bytes) to arrays whose first axis is that of rows."""


def _block_rows(kind: _BlockKind, stored: np.ndarray, start: int, stop: int) -> QuantizedWeight:
    blocks = np.asarray(stored[start:stop]).reshape(stop - start, -1, kind.size)
    arrays = kind.unpack(blocks)
    codes = np.ascontiguousarray(arrays.pop("codes")).reshape(stop - start, -1)
    rest: dict[str, Any] = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return QuantizedWeight(kind.format, codes, **rest, block_size=_BLOCK, transposed=True)


def _q4_0(blocks: np.ndarray) -> _Arrays:
    scale = _halves(blocks[..., :2])[..., 0]
    zero = np.full_like(scale, 8)
    return {"codes": _by_pairs(blocks[..., 2:]), "scales": np.stack([scale, zero], axis=-1)}


def _q4_1(blocks: np.ndarray) -> _Arrays:
    return {"codes": _by_pairs(blocks[..., 4:]), "scales": _halves(blocks[..., :4])}


def _q8_0(blocks: np.ndarray) -> _Arrays:
    scale = _halves(blocks[..., :2])[..., 0].astype(np.float32)
    return {"codes": blocks[..., 2:].view(np.int8), "scales": scale}


def _q4_k(blocks: np.ndarray) -> _Arrays:
    """Unpack (d, dmin), eight (sc, m) of 6 bits in 12 bytes, and 256 integers.

    The first four sc, then m, have a byte each, of which they leave two bits; the others' low
    halves share bytes 8 to 11, and their high bits are those left.
    """
    rows, supers = blocks.shape[:2]
    sc, m, halves = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([sc & 63, halves & 15 | sc >> 6 << 4], axis=-1)
    minima = np.concatenate([m & 63, halves >> 4 | m >> 6 << 4], axis=-1)
    integers = blocks[..., 16:].reshape(rows, supers, 4, _BLOCK)
    pairs = [integers & 15, integers >> 4]
    own = np.stack([each[..., ::2] | each[..., 1::2] << 4 for each in pairs], axis=-2)
    return {
        "codes": own,
        "scales": np.stack([scales, minima], axis=-1).reshape(rows, -1, 2),
        "super_scales": _halves(blocks[..., :4]),
    }


def _by_pairs(integers: np.ndarray) -> np.ndarray:
    """Turn 16 bytes with weights j and j + 16 into 16 with 2 j and 2 j + 1."""
    even, odd = integers[..., ::2], integers[..., 1::2]
    return np.concatenate([even & 15 | odd << 4, even >> 4 | odd & 240], axis=-1)


def _halves(stored: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(stored).view("<f2").astype(np.float16, copy=False)


_KINDS = {
    "Q4_0": _BlockKind("int4", 18, _q4_0),
    "Q4_1": _BlockKind("q4_1", 20, _q4_1),
    "Q8_0": _BlockKind("int8", 34, _q8_0),
    "Q4_K": _BlockKind("q4_k", 144, _q4_k),
}


_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
_PLAIN = ("F32", "F16")
_LEAST_STRING = 8  # bytes: its length
_MOST_METADATA = 64 << 20
"""Bytes before the tensors: with 260,000 tokens and their merges there are some 16 MB."""


class GGUFFile(NamedTuple):
    """The metadata of a GGUF file, and its tensors by name.

    Shapes are in the order of NumPy: the contiguous axis comes last.
    """

    metadata: Json
    tensors: dict[str, AnyTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Read the metadata of a file, and where its tensors are; it stays mapped into memory."""
    with open_regular(path, damaged) as file:
        is_empty = not os.fstat(file.fileno()).st_size
        content = np.empty(0, np.uint8) if is_empty else np.memmap(file, np.uint8, mode="r")
    cursor = _Cursor(str(path), content)
    if cursor.take(4) != _MAGIC:
        raise damaged(str(path), "not a GGUF file: it does not begin with these letters")
    (version,) = cursor.numbers("I", 1)
    if version not in _VERSIONS:
        raise error(
            NotImplementedError,
            f"{path}: GGUF of version {version}",
            f"the version must be {' or '.join(map(str, _VERSIONS))}, in little-endian order",
            "convert the model again",
        )
    count, keys = cursor.numbers("Q", 2)
    metadata: Json = {}
    for _ in range(keys):
        key = cursor.string()
        if key in metadata:
            raise damaged(str(path), f"{shown(key)} occurs a second time at byte {cursor.at}")
        metadata[key] = cursor.value(*cursor.numbers("I", 1))
    infos = [_Info.read(cursor) for _ in range(count)]
    alignment = Fields(metadata, str(path)).integer("general.alignment", 32)
    begin = -(-cursor.at // alignment) * alignment
    tensors: dict[str, AnyTensor] = {}
    end, before = begin, "the list of tensors"
    for info in sorted(infos, key=lambda each: each.offset):
        start = begin + info.offset
        if info.offset % alignment or start < end or info.name in tensors:
            raise damaged(
                str(path), f"{info.name} begins at byte {start}, but {before} ends at {end}"
            )
        tensors[info.name], size = info.tensor(path, content, start)
        end, before = start + size, info.name
    return GGUFFile(metadata, tensors)


def _with_its_parts(path: Path, file: GGUFFile) -> GGUFFile:
    """Return the metadata of the first part of a split file, and the tensors of all parts."""
    count = Fields(file.metadata, str(path)).integer("split.count", 1, least=0)
    if count <= 1:  # 0 is what a merged file has
        return file
    paths = part_paths(path, count)
    parts = [file if each == path else read_gguf(each) for each in paths]
    tensors: dict[str, AnyTensor] = {}
    for number, (each, part) in enumerate(zip(paths, parts, strict=True)):
        fields = Fields(part.metadata, str(each))
        if fields.integer("split.count") != count or fields.integer("split.no", least=0) != number:
            raise damaged(str(each), f"it is not part {number + 1} of {count} by its metadata")
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise damaged(str(each), f"{min(twice)} is in an earlier part too")
        tensors |= part.tensors
    metadata = parts[0].metadata
    total = Fields(metadata, str(paths[0])).integer("split.tensors.count", len(tensors), least=0)
    if total != len(tensors):
        raise damaged(str(paths[0]), f"its parts have {len(tensors)} tensors, not {total}")
    return GGUFFile(metadata, tensors)


class _Cursor:
    """A position in a file, from which values are read one after the other."""

    def __init__(self, where: str, content: np.ndarray) -> None:
        self.where = where
        self.at = 0
        self._content = content.data

    def take(self, size: int) -> bytes:
        self._require(size)
        self.at += size
        return bytes(self._content[self.at - size : self.at])

    def _require(self, size: int) -> None:
        if not 0 <= size <= len(self._content) - self.at:
            have = len(self._content)
            raise damaged(self.where, f"cut short: {size} bytes at {self.at} of {have}")
        if self.at + size > _MOST_METADATA:
            limit = size_text(_MOST_METADATA)
            raise damaged(
                self.where,
                f"{size} bytes at {self.at} before the tensors, of which at most {limit} are read",
            )

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{kind}", self.take(struct.calcsize(f"<{kind}") * count))

    def string(self) -> str:
        (size,) = self.numbers("Q", 1)
        return self.take(size).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], 1)[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise damaged(self.where, f"a value of the unknown type {kind} at byte {self.at}")
        (inner,) = self.numbers("I", 1)
        (count,) = self.numbers("Q", 1)
        if inner in _SCALARS:
            return list(self.numbers(_SCALARS[inner], count))
        if inner == _ARRAY:  # models have none, and empty ones take memory out of proportion
            raise damaged(self.where, f"a list of lists at byte {self.at}")
        self._require(_LEAST_STRING * count)
        return [self.value(inner) for _ in range(count)]


class _Info(NamedTuple):
    """A tensor as the file lists it."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @classmethod
    def read(cls, cursor: _Cursor) -> _Info:
        name = cursor.string()
        (axes,) = cursor.numbers("I", 1)
        if not 1 <= axes <= 4:
            raise damaged(cursor.where, f"the tensor {name} has {axes} axes")
        shape = cursor.numbers("Q", axes)[::-1]
        return cls(name, shape, *cursor.numbers("I", 1), *cursor.numbers("Q", 1))

    def tensor(self, path: Path, content: np.ndarray, start: int) -> tuple[AnyTensor, int]:
        """Return the tensor, whose bytes begin at `start` in the file, and their number."""
        quants = extra("gguf.quants", "dequantises weights")
        types = extra("gguf.constants", "dequantises weights")
        try:
            kind = types.GGMLQuantizationType(self.kind)
            block, size = types.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            kind, block, size = None, 1, 0
        if kind is None or (kind.name not in _PLAIN and kind not in quants._type_traits):
            known = (*_PLAIN, *sorted(each.name for each in quants._type_traits))
            raise error(
                NotImplementedError,
                f"{path}: {self.name} is of {kind.name if kind else f'type {self.kind}'}",
                f"the package gguf dequantises {', '.join(known)}",
                "load a file of one of these types, or install a newer gguf",
            )
        *rows, columns = self.shape
        width = columns // block * size
        total = math.prod(rows) * width
        if columns % block or min(self.shape) < 1 or start + total > len(content):
            raise damaged(
                str(path),
                f"{self.name} {self.shape} of {kind.name} exceeds the file's {len(content)} bytes",
            )
        stored = content[start : start + total].reshape(*rows, width)
        if len(rows) == 1 and (kept := kept_blocks(kind.name, stored, columns)) is not None:
            return kept, total

        def read_rows(start: int, stop: int) -> np.ndarray:
            return quants.dequantize(stored[start:stop], kind)

        def read_items(start: int, stop: int) -> np.ndarray:
            first, end = start // block, -(-stop // block)
            found = quants.dequantize(stored[first * size : end * size], kind)
            return found[start - first * block : stop - first * block]

        return Tensor(self.shape, read_rows if rows else read_items), total


_FORWARDS = {
    "gpt2": "gpt2",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "llama": "llama",
    "mistral3": "llama",
    "phi2": "phi",
    "phi3": "phi3",
    "qwen2": "llama",
    "qwen3": "llama",
    "smollm3": "llama",
}
_READ_TRAITS = {
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3": ("final_logit_softcapping",),
    "mistral3": ("rope.scaling.yarn_log_multiplier",),
    "phi3": ("rope.scaling.attn_factor",),
}
"""Those of `_UNSUPPORTED` that some architectures have."""
_READ_SOFTCAPS = {
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}
_GEMMA2_SOFTCAPS = {"attention_softcap": 50.0, "logit_softcap": 30.0}
_UNROTATED_STEP = 4
"""Every how many layers SmolLM3 has one without rotary positions: llama.cpp has no key for it."""
_PATTERNS = {"gemma2": 2, "gemma3": 6}
"""Every how many layers one sees all keys, by default."""
_OLDER_WINDOWS = {"gemma2": 4096}
"""Windows of files that were made before there was a key."""
_LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27 billion weights, whose scores have another scale in llama.cpp."""
_SCALINGS = ("none", "linear", "yarn")
_UNSUPPORTED: Json = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": None,
    "attn_logit_softcapping": None,
    "embedding_scale": None,
    "expert_count": 0,
    "final_logit_softcapping": None,
    "logit_scale": None,
    "residual_scale": None,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
"""Traits without code, and the value of each that changes nothing."""


def open_gguf(path: Path) -> Checkpoint:
    """Read the config of a file, or of all parts of a split one, and the names, but no weights."""
    file = _with_its_parts(path, read_gguf(path))
    kind = file.metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in _FORWARDS:
        raise unknown_architecture(kind, str(path))
    naming = GGUF[kind]
    require_known_tokenizer(file.metadata, str(path))
    return Checkpoint(
        str(path),
        _config(file, kind, naming, str(path)),
        naming,
        _less_one(file.tensors) if _FORWARDS[kind] == "gemma" else file.tensors,
        partial(tokenizer_of_gguf, file.metadata, str(path)),
    )


def _less_one(tensors: dict[str, AnyTensor]) -> dict[str, AnyTensor]:
    """Return Gemma's tensors with the weights of norms as published: the file has 1 + w."""

    def lessened(tensor: Tensor) -> Tensor:
        return Tensor(tensor.shape, lambda start, stop: tensor.read(start, stop) - 1)

    return {
        name: lessened(tensor)
        if name.endswith("norm.weight") and isinstance(tensor, Tensor)
        else tensor
        for name, tensor in tensors.items()
    }


def _config(file: GGUFFile, kind: str, naming: Naming, where: str) -> Config:
    tensors = file.tensors
    fields, tokens = (
        Fields(file.metadata, where, prefix) for prefix in (f"{kind}.", "tokenizer.ggml.")
    )

    def has(name: str) -> bool:
        return f"{naming.layer.format(0)}{name}.bias" in tensors

    for trait, neutral in _UNSUPPORTED.items():
        if trait not in _READ_TRAITS.get(kind, ()):
            fields.refuse(trait, neutral)
    embedding = tensors.get(f"{naming.embedding}.weight")
    if embedding is None:
        raise damaged(where, f"tensors are missing: {naming.embedding}.weight")
    rms = "" if _FORWARDS[kind] in LAYER_NORMS else "_rms"
    heads, width = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", width // heads)
    if naming.paired and head_dim % 2:
        raise damaged(where, f"heads of {head_dim} features, which are not pairs")
    positions, rotates = fields.integer("context_length"), kind != "gpt2"
    base = fields.number("rope.freq_base", 10000.0)
    rotary_dim = fields.integer("rope.dimension_count", head_dim) if rotates else 0
    config = Config(
        _FORWARDS[kind],
        vocab_size=embedding.shape[0],
        num_layers=fields.integer("block_count"),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        max_positions=positions,
        norm_eps=fields.number(f"attention.layer_norm{rms}_epsilon"),
        activation="swiglu" if rms else "gelu_tanh",
        rotary_dim=rotary_dim,
        rope_base=base,
        rope_scaling=_scaling(file, fields, base, rotary_dim, positions) if rotates else None,
        tied=f"{naming.head}.weight" not in tensors,
        qkv_bias=has(naming.qkv[0]),
        output_bias=has(naming.output),
        mlp_bias=has(naming.up[0]),
        head_bias=f"{naming.head}.bias" in tensors,
        bos_id=(*tokens.ids("bos_token_id"), None)[0],
        eos_ids=tuple(
            dict.fromkeys(
                number
                for name in ("eos", "eot", "eom")
                for number in tokens.ids(f"{name}_token_id")
            )
        ),
    )
    original = fields.integer("rope.scaling.original_context_length", 0, least=0)
    try:
        config = extended(config._replace(**_traits(fields, kind, config)), original or None)
        return checked(config)
    except ValueError as failure:
        raise damaged(where, str(failure)) from failure


def _traits(fields: Fields, kind: str, config: Config) -> Json:
    """Return the traits that only some architectures have."""
    found = _windows(fields, kind, config.num_layers)
    if kind in ("qwen3", "gemma3"):
        found["qk_norm"] = True
    if kind == "smollm3":
        layers = range(_UNROTATED_STEP - 1, config.num_layers, _UNROTATED_STEP)
        found["unrotated_layers"] = tuple(layers)
    if kind == "mistral3" and fields.number("attention.temperature_scale", 0.0, zero_allowed=True):
        trained = fields.integer("rope.scaling.original_context_length", config.max_positions)
        length = fields.integer("attention.temperature_length", trained)
        found["query_growth"] = fields.number("attention.temperature_scale"), length
    if _FORWARDS[kind] != "gemma":
        return found
    width = config.head_dim
    if config.num_layers == _LARGEST_GEMMAS[kind]:
        width = config.hidden_size // config.num_heads
    if kind == "gemma3":
        found["local_rope_base"] = fields.number("rope.freq_base_swa", 10000.0)
    for name, key in _READ_SOFTCAPS.items():
        if key in _READ_TRAITS[kind]:
            default = {"gemma2": _GEMMA2_SOFTCAPS[name]}.get(kind, 0.0)
            found[name] = fields.number(key, default, zero_allowed=True) or None
    return {
        **found,
        "activation": "geglu_tanh",
        "softmax_scale": width**-0.5,
        "embedding_scale": config.hidden_size**0.5,
    }


def _windows(fields: Fields, kind: str, layers: int) -> Json:
    """Return the window, and the layers that see all keys."""
    window = fields.integer("attention.sliding_window", _OLDER_WINDOWS.get(kind, 0), least=0)
    if not window:
        return {}
    pattern = fields.given.get(f"{kind}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        local = [*pattern, *[False] * layers]
        everywhere = tuple(layer for layer in range(layers) if not local[layer])
    else:
        step = fields.integer("attention.sliding_window_pattern", _PATTERNS.get(kind, layers + 1))
        everywhere = tuple(range(step - 1, layers, step))
    if len(everywhere) == layers:
        return {}
    return {"window_size": (window - 1, 0), "global_layers": everywhere}


def _scaling(
    file: GGUFFile, fields: Fields, base: float, rotary_dim: int, positions: int
) -> RopeScaling | None:
    if "rope_factors_long.weight" in file.tensors:
        return _longrope(file, fields, rotary_dim // 2, positions)
    factors = file.tensors.get("rope_freqs.weight")
    if isinstance(factors, QuantisedTensor):
        raise damaged(fields.where, "rope_freqs.weight, a list of factors, is quantised")
    if factors is not None:
        return _llama3(factors, base, rotary_dim, fields.where)
    kind = fields.choice("rope.scaling.type", _SCALINGS, default="linear")
    older = fields.number("rope.scale_linear", 1.0, zero_allowed=True)
    factor = fields.number("rope.scaling.factor", older, zero_allowed=True) or 1.0
    if kind == "yarn":
        logs = fields.number("rope.scaling.yarn_log_multiplier", 0.0, zero_allowed=True)
        growth = 0.1 * math.log(max(factor, 1.0))
        return YarnScaling(
            factor,
            fields.integer("rope.scaling.original_context_length", positions),
            fields.number("rope.scaling.yarn_beta_fast", 32.0),
            fields.number("rope.scaling.yarn_beta_slow", 1.0),
            (growth + 1) / (logs * growth + 1) if logs else None,
        )
    return LinearScaling(factor) if kind == "linear" and factor != 1 else None


def _longrope(file: GGUFFile, fields: Fields, pairs: int, positions: int) -> RopeScaling:
    """Read the two lists of factors."""

    def factors(name: str) -> tuple[float, ...]:
        tensor = file.tensors.get(name)
        if not isinstance(tensor, Tensor) or tensor.shape != (pairs,):
            raise damaged(fields.where, f"{name} is not a list of {pairs} factors")
        return tuple(tensor.read(0, pairs).astype(np.float64).tolist())

    return LongRopeScaling(
        factors("rope_factors_short.weight"),
        factors("rope_factors_long.weight"),
        fields.integer("rope.scaling.original_context_length", positions),
        fields.number("rope.scaling.attn_factor", 1.0),
    )


def _llama3(factors: Tensor, base: float, rotary_dim: int, where: str) -> RopeScaling:
    """Recognise the factors of Llama 3, which the file has instead of the parameters."""
    if factors.shape != (rotary_dim // 2,):
        raise damaged(where, f"rope_freqs.weight is {factors.shape}, not {(rotary_dim // 2,)}")
    found = factors.read(0, factors.shape[0])
    plain = base ** (-np.arange(rotary_dim // 2) / (rotary_dim // 2))
    scaling = Llama3Scaling(float(found.max(initial=1.0)), 1.0, 4.0, 8192)
    if np.allclose(plain / scaling.frequencies(plain, base), found, rtol=1e-4):
        return scaling
    raise error(
        NotImplementedError,
        f"{where}: rope_freqs.weight of factors {shown(found.tolist())}",
        "only the factors of Llama 3.1 and later Llama 3 models are supported",
        "load the folder that the file was made from",
    )
