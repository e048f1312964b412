"""The quantization_config of a config.json: the method by which the weights were quantised."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cupyattn.models.checkpoints.bitsandbytes import STATE, unpacked_nf4
from cupyattn.models.checkpoints.compressed_tensors import unpacked_compressed
from cupyattn.models.checkpoints.contents import AnyTensor, damaged
from cupyattn.models.checkpoints.fields import Fields
from cupyattn.models.checkpoints.float_formats import unpacked_fp8, unpacked_mxfp4
from cupyattn.models.checkpoints.integer_groups import unpacked_awq, unpacked_gptq
from cupyattn.models.checkpoints.safetensors_files import Stored
from cupyattn.runtime.errors import error, shown

Unpacking = Callable[[dict[str, Stored]], dict[str, AnyTensor]]
"""From the tensors of files, by their names, to those of a model."""

_MARKS = {
    STATE: "bitsandbytes",
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "FP8 or compressed-tensors",
    ".weight_blocks": "MXFP4",
}
"""Parts of tensors' names that only quantised models have, each with its method."""


def plain(stored: dict[str, Stored], where: str) -> dict[str, AnyTensor]:
    """Return the tensors of a model that is not quantised, or raise ValueError."""
    for name, tensor in stored.items():
        for mark, method in _MARKS.items():
            if mark in name:
                raise error(
                    ValueError,
                    f"{where}: no quantization_config, but {tensor.what} is quantised by {method}",
                    "quantised weights need a quantization_config",
                    "take the config.json that was published with these files",
                )
    return {name: tensor.as_floats() for name, tensor in stored.items()}


def unpacking_of(config: Fields) -> Unpacking:
    """Return how to read the tensors of a folder; raise for a method without code."""
    given = config.object("quantization_config")
    if not given:
        return partial(plain, where=config.where)
    fields = Fields(given, f"{config.where}, quantization_config")
    method = given.get("quant_method")
    if method is None and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        method = "bitsandbytes"  # whose first releases did not write their name
    readers = {
        "bitsandbytes": _unpacking_bitsandbytes,
        "gptq": _unpacking_gptq,
        "awq": _unpacking_awq,
        "compressed-tensors": _unpacking_compressed,
        "fp8": _unpacking_fp8,
        "fbgemm_fp8": _unpacking_fp8,
        "mxfp4": lambda _: unpacked_mxfp4,
    }
    if not isinstance(method, str) or method not in readers:
        raise _unsupported(fields, f"quant_method is {shown(method)}")
    return readers[method](fields)


def _unpacking_bitsandbytes(fields: Fields) -> Unpacking:
    if not fields.flag("load_in_4bit", False):
        raise _unsupported(fields, "weights are LLM.int8() of bitsandbytes")
    kind = fields.given.get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        raise _unsupported(fields, f"bnb_4bit_quant_type is {shown(kind)}")
    storage = fields.given.get("bnb_4bit_quant_storage", "uint8")
    if storage != "uint8":
        raise _unsupported(fields, f"bnb_4bit_quant_storage is {shown(storage)}")
    return unpacked_nf4


def _unpacking_gptq(fields: Fields) -> Unpacking:
    bits = _bits(fields, (4, 8))
    form = fields.given.get("checkpoint_format", fields.given.get("format", "gptq"))
    if form not in ("gptq", "gptq_v2"):
        raise _unsupported(fields, f"checkpoint_format is {shown(form)}")
    return partial(
        unpacked_gptq,
        group_size=_group_size(fields),
        bits=bits,
        zeros_less_one=form == "gptq",
        in_order=not fields.flag("desc_act", False),
    )


def _unpacking_awq(fields: Fields) -> Unpacking:
    _bits(fields, (4,))
    version = fields.given.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _unsupported(fields, f"version is {shown(version)}")
    if not fields.flag("zero_point", True):
        raise _unsupported(fields, "zero_point is False")
    size = _group_size(fields)
    return lambda stored: unpacked_awq(stored, size)


_COMPRESSED = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)


def _unpacking_compressed(fields: Fields) -> Unpacking:
    """Read the formats; sizes, bits and strategies follow from the shapes of tensors."""
    groups = [
        Fields(group, f"{fields.where}, {name}")
        for name, group in fields.object("config_groups").items()
        if isinstance(group, dict)
    ]
    for form in (fields.given.get("format"), *(group.given.get("format") for group in groups)):
        if form is not None and form not in _COMPRESSED:
            raise _unsupported(fields, f"format is {shown(form)}")
    if fields.object("sparsity_config").get("format", "dense") != "dense":
        raise _unsupported(fields, "weights are sparse (sparsity_config)")
    if fields.object("transform_config").get("config_groups"):
        raise _unsupported(fields, "activations are rotated (transform_config)")
    weights = [group.object("weights") for group in groups]
    return partial(
        unpacked_compressed,
        blocks=[_block(fields, each["block_structure"]) for each in weights
                if each.get("block_structure") is not None],
        has_zeros=bool(weights) and not any(each.get("symmetric", True) for each in weights),
    )  # fmt: skip


def _unpacking_fp8(fields: Fields) -> Unpacking:
    if fields.given.get("fmt", "e4m3") not in (None, "e4m3"):
        raise _unsupported(fields, f"fmt is {shown(fields.given['fmt'])}")
    size = fields.given.get("weight_block_size")
    return partial(unpacked_fp8, blocks=[] if size is None else [_block(fields, size)])


def _block(fields: Fields, size: object) -> tuple[int, int]:
    """Return the rows and columns of a block that shares a scale."""
    if isinstance(size, str):  # compressed-tensors also writes "128x128"
        size = [int(each) if each.isdecimal() else each for each in size.split("x")]
    if not isinstance(size, list) or len(size) != 2 or not all(
        type(each) is int and each > 0 for each in size
    ):  # fmt: skip
        raise damaged(fields.where, f"a block of weights is {shown(size)}, not two sizes")
    return size[0], size[1]


def _bits(fields: Fields, allowed: tuple[int, ...]) -> int:
    bits = fields.given.get("bits")
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in allowed:
        raise _unsupported(fields, f"bits is {shown(bits)}")
    return bits


def _group_size(fields: Fields) -> int | None:
    """Return how many weights along K share a scale; None means all of them."""
    size = fields.given.get("group_size", -1)
    if size in (None, -1):
        return None
    if not isinstance(size, int) or size < 32 or size & (size - 1):
        raise _unsupported(fields, f"group_size is {shown(size)}")
    return size


def _unsupported(fields: Fields, what: str) -> Exception:
    return error(
        NotImplementedError,
        f"{fields.where}: {what}",
        "quantised safetensors must be bitsandbytes' NF4 in uint8, GPTQ in 4 or 8 bits or AWQ "
        "(gemm, with zero points) in 4 bits with groups of a power of two from 32 on, or one group "
        "for all, compressed-tensors' integers of 4 or 8 bits, FP8 (e4m3) or MXFP4",
        "load such files, the model from before it was quantised, or a GGUF file of it",
    )
