"""By which method config.json says that weights were quantised, and who reads that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cupyattn.models.checkpoints.awq import unpacked_awq
from cupyattn.models.checkpoints.bitsandbytes import STATE, unpacked_nf4
from cupyattn.models.checkpoints.fields import Fields
from cupyattn.models.checkpoints.gptq import unpacked_gptq
from cupyattn.models.checkpoints.safetensors_files import Stored
from cupyattn.models.checkpoints.tensors import AnyTensor
from cupyattn.runtime.errors import error, shown

Unpacking = Callable[[dict[str, Stored]], dict[str, AnyTensor]]
"""From the tensors of files, by their names, to those that a model takes."""


_MARKS = {
    STATE: "bitsandbytes",
    ".qweight": "GPTQ or AWQ",
}
"""Parts of tensors' names that only quantised models have, each with its method."""


def plain(stored: dict[str, Stored], where: str) -> dict[str, AnyTensor]:
    """Return the tensors of a model that is not quantised.

    Raises
    ------
    ValueError
        If they are those of a quantised one, whose config does not say so.
    """
    for name, tensor in stored.items():
        for mark, method in _MARKS.items():
            if mark in name:
                raise error(
                    ValueError,
                    f"{where}: no quantization_config, and {tensor.what} is of {method}",
                    "quantised weights are read as quantization_config says",
                    "take the config.json that was published with these files",
                )
    return {name: tensor.as_floats() for name, tensor in stored.items()}


def unpacking_of(config: Fields) -> Unpacking:
    """Return how the tensors of a folder are read.

    Raises
    ------
    NotImplementedError
        For a method, or a variant of one, that there is no code for.
    """
    given = config.object("quantization_config")
    if not given:
        return partial(plain, where=config.where)
    fields = Fields(given, f"{config.where}, quantization_config")
    method = given.get("quant_method")
    if method is None and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        method = "bitsandbytes"  # which did not name itself at first
    readers = {"bitsandbytes": _bitsandbytes, "gptq": _gptq, "awq": _awq}
    if not isinstance(method, str) or method not in readers:
        raise _unsupported(fields, f"quant_method is {shown(method)}")
    return readers[method](fields)


def _bitsandbytes(fields: Fields) -> Unpacking:
    if not fields.flag("load_in_4bit", False):
        raise _unsupported(fields, "weights are LLM.int8() of bitsandbytes")
    kind = fields.given.get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        raise _unsupported(fields, f"bnb_4bit_quant_type is {shown(kind)}")
    storage = fields.given.get("bnb_4bit_quant_storage", "uint8")
    if storage != "uint8":
        raise _unsupported(fields, f"bnb_4bit_quant_storage is {shown(storage)}")
    return unpacked_nf4


def _gptq(fields: Fields) -> Unpacking:
    _require_four_bits(fields)
    form = fields.given.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise _unsupported(fields, f"checkpoint_format is {shown(form)}")
    return partial(
        unpacked_gptq,
        group_size=_group_size(fields),
        zeros_less_one=form == "gptq",
        in_order=not fields.flag("desc_act", False),
    )


def _awq(fields: Fields) -> Unpacking:
    _require_four_bits(fields)
    version = fields.given.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _unsupported(fields, f"version is {shown(version)}")
    if not fields.flag("zero_point", True):
        raise _unsupported(fields, "zero_point is False")
    size = _group_size(fields)
    return lambda stored: unpacked_awq(stored, size)


def _require_four_bits(fields: Fields) -> None:
    bits = fields.given.get("bits")
    if bits != 4 or isinstance(bits, bool):
        raise _unsupported(fields, f"bits is {shown(bits)}")


def _group_size(fields: Fields) -> int | None:
    """Return how many weights along K share a scale; None stands for all of them."""
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
        "quantised safetensors are read of bitsandbytes' NF4 in uint8, and of GPTQ and AWQ (gemm, "
        "with zero points) in 4 bits with groups of a power of two from 32 on, or one for all",
        "take such files, the model as it was before it was quantised, or a GGUF file of it",
    )
