"""Quantised files without code and damaged ones are refused with the file and the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.quantised_weights import AWQ, BNB, COMPRESSED, FP8, GPTQ

pytest.importorskip("safetensors")
pytest.importorskip("gguf")

from models.test_quantised_files import CONFIG, packed_folder
from safetensors.numpy import save_file

from cupyattn import models
from cupyattn.models.checkpoints.safetensors_files import read_safetensors

DOWN = "model.layers.1.mlp.down_proj"
STATE = "quant_state.bitsandbytes__nf4"

METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "eight bits of bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, r"LLM\.int8\(\)",
    ),
    "its fp4": ({**BNB, "bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type is 'fp4'"),
    "its storage": ({**BNB, "bnb_4bit_quant_storage": "bfloat16"}, "storage is 'bfloat16'"),
    "three bits": ({**GPTQ, "bits": 3}, "bits is 3"),
    "eight bits": ({**AWQ, "bits": 8}, "bits is 8"),
    "small groups": ({**GPTQ, "group_size": 16}, "group_size is 16"),
    "groups that are no power of two": ({**GPTQ, "group_size": 96}, "group_size is 96"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    "gemv": ({**AWQ, "version": "gemv"}, "version is 'gemv'"),
    "no zero points": ({**AWQ, "zero_point": False}, "zero_point is False"),
    "five bits": ({**GPTQ, "bits": 5}, "bits is 5"),
    "bits that are no number": ({**GPTQ, "bits": True}, "bits is True"),
    "nvfp4": ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
    "the format of a group": (
        {**COMPRESSED, "config_groups": {"group_0": {"format": "marlin-24"}}},
        "format is 'marlin-24'",
    ),
    "2:4": (
        {**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "weights are sparse",
    ),
    "rotations": (
        {**COMPRESSED, "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
        "activations are rotated",
    ),
    "e5m2": ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
    "hqq": ({"quant_method": "hqq"}, "quant_method is 'hqq'"),
    "a method that is no word": ({"quant_method": ["awq"]}, "quant_method is"),
    "no method": ({"bits": 4}, "quant_method is None"),
}  # fmt: skip


def configure(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


@pytest.mark.parametrize("quantize", [None, "file", "nf4"])
@pytest.mark.parametrize("name", METHODS)
def test_methods_without_code(tmp_path, name, quantize):
    quantization, message = METHODS[name]
    folder, _ = packed_folder(tmp_path, "gptq")
    configure(folder, quantization_config=quantization)
    with pytest.raises(NotImplementedError, match=message) as refused:
        models.load(folder, xp=np, quantize=quantize)
    assert "quantization_config" in str(refused.value)
    assert "NF4" in str(refused.value)


Change = Callable[[dict[str, np.ndarray]], object]


def state(tensors: dict[str, np.ndarray], **changed: Any) -> None:
    name = f"{DOWN}.weight.{STATE}"
    given = {**json.loads(tensors[name].tobytes()), **changed}
    tensors[name] = np.frombuffer(json.dumps(given).encode(), np.uint8)


def replaced(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    def make(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{DOWN}.{name}"] = change(tensors[f"{DOWN}.{name}"])

    return make


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(f"{DOWN}.{name}")


def state_of(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return replaced(f"weight.{STATE}", change)


def another_type(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{DOWN}.weight.{STATE[:-3]}fp4"] = tensors.pop(f"{DOWN}.weight.{STATE}")


def changed_to(name: str, index: Any, value: Any) -> Change:
    """Change items of a tensor; those of eight-bit floats by their bytes."""

    def change(array: np.ndarray) -> np.ndarray:
        found = array.copy()
        (found.view(np.uint8) if found.dtype.itemsize == 1 else found)[index] = value
        return found

    return replaced(name, change)


HALF = np.float32(0.5)
NAN = np.float16(np.nan)
PACKED4, ORDERED = "compressed-tensors of 4 bits", "act-order of compressed-tensors"
MXFP4 = "mxfp4 of compressed-tensors"
DAMAGED: list[tuple[str, Change, str]] = [
    ("nested", without("weight"), f"there is no {DOWN}.weight"),
    ("nested", without("weight.absmax"), "it has no absmax"),
    ("nested", without("weight.nested_quant_map"), "it has no nested_quant_map"),
    ("nested", without("weight.quant_map"), "it has no quant_map"),
    ("nested", replaced("weight", lambda a: a.astype(np.float16)), "of F16, not U8"),
    ("nested", replaced("weight", lambda a: a[:-1]), r"it is \(4095, 1\)"),
    ("bitsandbytes", replaced("weight.absmax", lambda a: a[:-1]), r"it is \(127,\)"),
    ("nested", state_of(lambda a: a[1:]), "no JSON"),
    ("nested", state_of(lambda a: np.frombuffer(b"[]", np.uint8)), "no JSON object"),
    ("nested", state_of(lambda a: a[:0]), "no JSON"),
    ("nested", state_of(lambda a: a[0].reshape(1, 1)), "no JSON"),
    ("nested", lambda t: state(t, shape=None), "shape is None, which"),
    ("nested", lambda t: state(t, shape=[128, 64]), r"is \(128, 64\), not \(64, 128\)"),
    ("nested", lambda t: state(t, blocksize=0), "blocksize is 0"),
    ("nested", lambda t: state(t, nested_offset="x"), "nested_offset is 'x', which"),
    (
        "bitsandbytes",
        replaced("weight.absmax", lambda a: a * np.float32(np.inf)),
        "scale holds inf",
    ),
    ("gptq", replaced("g_idx", lambda a: a[:-1]), r"it is \(127,\), not \(128,\)"),
    ("gptq of act-order", without("g_idx"), "desc_act is true, but there is no g_idx"),
    ("gptq", without("qzeros"), f"there is no {DOWN}.qzeros"),
    ("awq", without("scales"), f"there is no {DOWN}.scales"),
    ("awq", replaced("scales", lambda a: a[:-1]), r"it is \(3, 64\), not \(4, 64\)"),
    ("awq", replaced("qzeros", lambda a: a[:, :-1]), r"it is \(4, 7\), not \(4, 8\)"),
    ("awq", replaced("qweight", lambda a: a.astype(np.int16)), "of I16, not I32"),
    ("gptq", replaced("scales", lambda a: a * NAN), "holds nan"),
    ("act-order", changed_to("g_idx", 5, 4), "g_idx: it has the group 4, and there are 4"),
    ("act-order", changed_to("g_idx", 5, -1), "g_idx: it has the group -1"),
    ("act-order", replaced("g_idx", lambda a: a[::2]), r"it is \(64,\), not \(128,\)"),
    ("act-order", replaced("g_idx", lambda a: a.astype(np.float16)), "of F16, not I32 or I64"),
    ("gptq of 8 bits", replaced("qzeros", lambda a: a[:, ::2]), r"it is \(4, 8\), not \(4, 16\)"),
    (PACKED4, without("weight_scale"), f"there is no {DOWN}.weight_scale"),
    (PACKED4, without("weight_shape"), f"there is no {DOWN}.weight_shape"),
    (PACKED4, changed_to("weight_shape", 0, 63), r"it is \(63, 128\), but there are 64 rows"),
    (PACKED4, changed_to("weight_shape", 1, 0), r"it is \(64, 0\)"),
    (PACKED4, changed_to("weight_shape", 1, 96), r"which is not \(64, 96\) in 4 or 8 bits"),
    (PACKED4, changed_to("weight_shape", 1, 1 << 40), "in 4 or 8 bits"),
    (PACKED4, replaced("weight_scale", lambda a: a[1:]), r"it is \(63, 4\), not \(64, groups\)"),
    (PACKED4, replaced("weight_scale", lambda a: a[:, :0]), r"it is \(64, 0\), not \(64, groups\)"),
    (PACKED4, replaced("weight_packed", lambda a: a[0]), r"it is \(16,\), and a weight has"),
    (PACKED4, replaced("weight_packed", lambda a: a.astype(np.int64)), "of I64, not I32"),
    ("with zeros", without("weight_zero_point"), "symmetric is false, but there is no"),
    ("with zeros", replaced("weight_zero_point", lambda a: a[1:]), r"it is \(7, 4\), not \(8, 4\)"),
    (
        "zeros of int-quantized",
        replaced("weight_zero_point", lambda a: a[1:]),
        r"it is \(63, 1\), not \(64, 1\)",
    ),
    (ORDERED, changed_to("weight_g_idx", 0, 9), "weight_g_idx: it has the group 9"),
    (ORDERED, replaced("weight_g_idx", lambda a: a[1:]), r"it is \(127,\), not \(128,\)"),
    ("fp8", without("weight_scale_inv"), "it is of F8_E4M3, but there is no scale of it"),
    ("fp8", replaced("weight", lambda a: a[0]), r"it is \(128,\), and a weight is"),
    ("fp8", changed_to("weight", (3, 4), 127), "holds nan"),
    (
        "fp8 in blocks",
        replaced("weight_scale_inv", lambda a: a[:, 1:]),
        r"it is \(3, 2\), not \(1,\) or \(64, 1\) or \(3, 3\)",
    ),
    ("fp8", replaced("weight_scale_inv", lambda a: a.astype(np.int32)), "of I32, not F16"),
    ("mxfp4", without("weight_scales"), "there are no scales"),
    ("mxfp4", replaced("weight_scales", lambda a: a[:, 1:]), r"it is \(64, 3\), not \(64, 4\)"),
    ("mxfp4", replaced("weight_blocks", lambda a: a.astype(np.int8)), "of I8, not U8"),
    ("mxfp4", changed_to("weight_scales", (0, 0), 255), "holds nan"),
    (MXFP4, replaced("weight_packed", lambda a: a[:, 1:]), "not rows of blocks of 32"),
]
WITHOUT_CODE: list[tuple[str, Change, str]] = [
    ("nested", replaced("weight.quant_map", lambda a: a * HALF), "a quant_map"),
    ("nested", another_type, "the type fp4"),
    ("nested", lambda t: state(t, shape=[256, 32]), "rows of 32 weights"),
    ("gptq", replaced("qweight", lambda a: a.reshape(-1)), "N = 0, K = 0"),
    ("gptq", replaced("qweight", lambda a: a[:, :-4]), "N = 60, K = 128"),
    (PACKED4, replaced("weight_scale", lambda a: a.repeat(2, axis=1)), "K = 128 in 8 groups"),
    (PACKED4, replaced("weight_scale", lambda a: a[:, :3]), "K = 128 in 3 groups"),
    (MXFP4, lambda t: t.update({f"{DOWN}.weight_global_scale": np.ones(1, np.float32)}), "NVFP4"),
    ("mxfp4", replaced("weight_blocks", lambda a: a[None]), "load a model without experts"),
]


@pytest.mark.parametrize(
    ("kind", "how", "change", "message"),
    [
        *((ValueError, *case) for case in DAMAGED),
        *((NotImplementedError, *case) for case in WITHOUT_CODE),
    ],
)
@pytest.mark.filterwarnings("ignore:.* rounds")
def test_files_that_are_damaged_or_of_another_kind(tmp_path, kind, how, change, message):
    folder, _ = packed_folder(tmp_path, how)
    rewrite(folder, change)
    with pytest.raises(kind, match=message) as refused:
        models.load(folder, xp=np, quantize="file")
    assert str(folder) in str(refused.value)


def rewrite(folder: Path, change: Change) -> None:
    file = folder / "model.safetensors"
    tensors = {}
    for name, stored in read_safetensors(file).items():
        dtype = {"F8_E4M3": ml_dtypes.float8_e4m3fn}.get(stored.kind)
        found = stored.items(...)
        tensors[name] = found if dtype is None else found.view(dtype)
    change(tensors)
    kept = {name: np.array(array, order="C") for name, array in tensors.items()}
    del tensors  # which has views of the file that is written
    save_file(kept, file)


@pytest.mark.parametrize("quantize", [None, "file", "nf4"])
@pytest.mark.parametrize(
    ("how", "method"),
    [
        ("bitsandbytes", "bitsandbytes"),
        ("gptq", "GPTQ or AWQ"),
        ("awq", "AWQ"),
        (PACKED4, "compressed-tensors"),
        ("fp8", "FP8"),
        ("mxfp4", "MXFP4"),
    ],
)
def test_quantised_tensors_need_a_quantization_config(tmp_path, how, method, quantize):
    folder, _ = packed_folder(tmp_path, how)
    configure(folder, quantization_config=None)
    message = rf"config.json: no quantization_config, .*{method}.*; .*; take the config.json"
    with pytest.raises(ValueError, match=message):
        models.load(folder, xp=np, quantize=quantize)


@pytest.mark.parametrize("size", ["x", [128], [0, 128], [128, True], 128, "128x"])
def test_a_block_of_fp8_that_is_none(tmp_path, size):
    folder, _ = packed_folder(tmp_path, "fp8", weight_block_size=size)
    with pytest.raises(ValueError, match="not two sizes"):
        models.load(folder, xp=np)


def test_a_file_of_fp8_that_is_cut_short(tmp_path):
    folder, _ = packed_folder(tmp_path, "fp8")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="no safetensors"):
        models.load(folder, xp=np)


def test_a_model_of_other_shapes(tmp_path):
    folder, _ = packed_folder(tmp_path, "awq", CONFIG)
    configure(folder, intermediate_size=256)
    with pytest.raises(ValueError, match=r"is \(128, 64\), not \(256, 64\)"):
        models.load(folder, xp=np, quantize="file")


@pytest.mark.parametrize("quantize", ["file", None])
def test_a_scale_that_is_no_number_is_none_in_another_format(tmp_path, quantize):
    folder, _ = packed_folder(tmp_path, "gptq")
    rewrite(folder, replaced("scales", lambda a: a * np.float16(np.nan)))
    with pytest.raises(ValueError, match="holds nan") as refused:
        models.load(folder, xp=np, dtype="float32", quantize=quantize)
    assert "another format" not in str(refused.value)
    assert str(refused.value).endswith("; download the file again")


def test_an_infinite_scale_of_fp8_is_refused_without_a_warning(tmp_path, recwarn):
    folder, _ = packed_folder(tmp_path, "fp8")
    rewrite(folder, replaced("weight_scale_inv", lambda a: a * np.float32(np.inf)))
    with pytest.raises(ValueError, match="must be finite"):
        models.load(folder, xp=np)
    assert not recwarn.list
