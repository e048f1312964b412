"""Files that are quantised, also by bitsandbytes itself, and files that are quantised as read."""

from __future__ import annotations

import json
import tracemalloc
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.quantised_weights import (
    AWQ,
    BNB,
    EXACT,
    FLOAT32_SCALES,
    GPTQ,
    ROUNDED,
    awq,
    bitsandbytes,
    compressed,
    fp8,
    gptq,
)
from support.search import deep, examples, mostly_deep

pytest.importorskip("safetensors")
gguf = pytest.importorskip("gguf")

from models.test_quantised import CONFIGS, KINDS, dequantised  # noqa: E402
from models.write_checkpoints import PACKED, ROWS, SHAPES, packed_weights  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from support.gguf_files import tensors_of as gguf_tensors  # noqa: E402
from support.gguf_files import write_gguf  # noqa: E402
from support.tiny_models import tensors_of, write_folder  # noqa: E402

import cupyattn  # noqa: E402
from cupyattn import QuantizedWeight, models  # noqa: E402
from cupyattn.models import Config, Model  # noqa: E402
from cupyattn.models.checkpoints import copying  # noqa: E402
from cupyattn.models.checkpoints.bitsandbytes import unpacked_nf4  # noqa: E402
from cupyattn.models.checkpoints.compressed_tensors import unpacked_compressed  # noqa: E402
from cupyattn.models.checkpoints.contents import QuantisedTensor  # noqa: E402
from cupyattn.models.checkpoints.float_formats import E4M3, unpacked_fp8  # noqa: E402
from cupyattn.models.checkpoints.integer_groups import unpacked_gptq  # noqa: E402
from cupyattn.models.checkpoints.safetensors_files import Stored, read_safetensors  # noqa: E402
from cupyattn.models.checkpoints.writing import write_folder as write_model  # noqa: E402
from cupyattn.models.loading import opened, quantises_as_in  # noqa: E402
from cupyattn.models.training.budget import Training, budget_of  # noqa: E402
from cupyattn.models.training.lora_options import LoraOptions  # noqa: E402
from cupyattn.models.weights import PRODUCTS, named_arrays, named_parts  # noqa: E402
from cupyattn.ops.linear.weight_formats import blocks_for  # noqa: E402

TYPE = gguf.GGMLQuantizationType
TABLE = np.sort(np.random.default_rng(0).uniform(-1, 1, 256)).astype(np.float32)
PACKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bitsandbytes": (lambda *given: bitsandbytes(*given, nested=False), BNB),
    "nested": (lambda *given: bitsandbytes(*given, nested=True, table=TABLE), BNB),
    "tables": (lambda *given: bitsandbytes(*given, nested=True), BNB),
    "blocks of 32": (
        lambda *given: bitsandbytes(*given, nested=True, block_size=32, table=TABLE),
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "gptq": (gptq, GPTQ),
    "gptq_v2": (
        lambda *given: gptq(*given, less_one=False),
        {**GPTQ, "checkpoint_format": "gptq_v2"},
    ),
    "gptq of act-order": (gptq, {**GPTQ, "desc_act": True}),  # which g_idx denies
    "gptq of one group": (
        lambda *given: gptq(*given, group=None), {**GPTQ, "group_size": -1},
    ),
    "awq": (awq, AWQ),
    "awq of one group": (
        lambda *given: awq(*given, group=None), {**AWQ, "group_size": -1},
    ),
}  # fmt: skip
PACKERS |= {how: pack[:2] for how, pack in {**EXACT, **ROUNDED, **FLOAT32_SCALES}.items()}
OLDER = list(PACKERS)[: -len({**EXACT, **ROUNDED, **FLOAT32_SCALES})]

BLOCKS = {
    "bitsandbytes": 64, "nested": 64, "tables": 64, "awq of one group": 64, "gptq of one group": 64,
}  # fmt: skip
NESTED = ("nested", "blocks of 32")
"""Whose absmax are codes of one table in all tensors; "tables" has another in each."""
# Whose rows are whole blocks of 64 everywhere.
CONFIG = CONFIGS["llama"]._replace(intermediate_size=128)


def is_layer(name: str) -> bool:
    return "layers." in name and name.endswith("proj.weight")


def packed_folder(
    folder: Path, how: str, config: Config = CONFIG, **changed: Any
) -> tuple[Path, dict[str, np.ndarray]]:
    """A Llama whose layers are packed, and the tensors of the same in floats."""
    pack, quantization = PACKERS[how]
    rng = np.random.default_rng(7)
    plain = tensors_of(models.random(config, dtype="float32", xp=np, seed=2))
    stored = {}
    for name in list(plain):
        if is_layer(name):
            parts, plain[name] = pack(rng, *plain[name].shape)
            module = name.removesuffix("weight")
            stored |= {module + part: array for part, array in parts.items()}
        else:
            stored[name] = plain[name]
    return write_folder(folder, config, stored, {**quantization, **changed}), plain


def assert_same(model: Model, expected: Model) -> None:
    """Each array and each quantised weight has the same numbers."""
    parts = zip(named_parts(model.weights), named_parts(expected.weights), strict=True)
    for (name, part), (_, wanted) in parts:
        numbers = cupyattn.dequantize(part) if isinstance(part, QuantizedWeight) else part
        assert_array_equal(numbers, wanted, err_msg=name)


@pytest.mark.parametrize("how", OLDER)
def test_packed_weights_have_the_same_numbers(tmp_path, how):
    """Kept, and as floats; in pieces as well."""
    folder, plain = packed_folder(tmp_path / "packed", how)
    expected = models.load(write_folder(tmp_path / "plain", CONFIG, plain), dtype="float32", xp=np)
    kept = models.load(folder, dtype="float32", xp=np, quantize="file")
    assert_same(kept, expected)
    assert_same(models.load(folder, dtype="float32", xp=np), expected)
    for layer in kept.weights.layers:
        blocks = {getattr(layer, name).weight.blocks for name in PRODUCTS}
        kind = "nf4" if "4bit" in str(PACKERS[how][1]) else "int4"
        if how != "tables":
            formats = {getattr(layer, name).weight.format for name in PRODUCTS if name != "qkv"}
            assert formats == {"nf4_nested" if how in NESTED else kind}
        # In blocks of 64 the rows of k begin within a group of 64 blocks.
        assert layer.qkv.weight.format == ("nf4_nested" if how == "blocks of 32" else kind)
        assert {each.block_size for each in blocks} <= {BLOCKS.get(how, 32), 128}
    ids = [[1, 2, 3, 4]]
    np.testing.assert_allclose(kept.logits(ids), expected.logits(ids), atol=1e-5)
    assert kept.generate([[1, 2]], max_new_tokens=4) == expected.generate(
        [[1, 2]], max_new_tokens=4
    )


@pytest.mark.parametrize(
    ("how", "at_once"),
    mostly_deep(
        [(how, at_once) for how in OLDER for at_once in (1, 640, 3000)],
        [*(("nested", at_once) for at_once in (1, 3000)),
         *((how, 640) for how in ("bitsandbytes", "blocks of 32", "gptq", "awq of one group"))],
    ),
)  # fmt: skip
def test_packed_weights_are_read_in_pieces_of_any_size(tmp_path, monkeypatch, how, at_once):
    folder, _ = packed_folder(tmp_path, how)
    for quantize in (None, "file"):
        whole = models.load(folder, dtype="float32", xp=np, quantize=quantize)
        monkeypatch.setattr(copying, "_AT_ONCE", at_once)
        pieces = models.load(folder, dtype="float32", xp=np, quantize=quantize)
        monkeypatch.undo()
        arrays = zip(named_arrays(pieces.weights), named_arrays(whole.weights), strict=True)
        for (name, array), (_, wanted) in arrays:
            assert_array_equal(array, wanted, err_msg=name)


def both(tmp_path: Path, how: str) -> tuple[Path, Model]:
    """A packed folder, and the model of the same numbers in floats."""
    folder, plain = packed_folder(tmp_path / "packed", how)
    whole = write_folder(tmp_path / "plain", CONFIG, plain)
    return folder, models.load(whole, dtype="float32", xp=np)


@pytest.mark.parametrize("how", EXACT)
def test_blocks_have_the_numbers_of_the_file(tmp_path, monkeypatch, how):
    """Kept and as floats, whole and in pieces of three rows of 64."""
    folder, expected = both(tmp_path, how)
    kept = models.load(folder, dtype="float32", xp=np, quantize="file")
    assert_same(kept, expected)
    form, size = EXACT[how][2]
    for layer in kept.weights.layers:
        for name in PRODUCTS:
            weight = getattr(layer, name).weight
            wanted = weight.inner if size is None else min(size, weight.inner)
            if how == "of channels":
                wanted = blocks_for("int4", weight.inner).block_size
            assert weight.blocks == (form, wanted)
    np.testing.assert_allclose(kept.logits([[1, 2, 3]]), expected.logits([[1, 2, 3]]), atol=1e-5)
    monkeypatch.setattr(copying, "_AT_ONCE", 200)
    assert_same(models.load(folder, dtype="float32", xp=np), expected)
    assert_same(models.load(folder, dtype="float32", xp=np, quantize="file"), expected)


@pytest.mark.parametrize("how", ROUNDED)
def test_numbers_that_no_blocks_have_are_exact_as_floats_and_rounded_in_blocks(
    tmp_path, monkeypatch, how
):
    """In blocks within half a step of int8, which a warning says."""
    folder, expected = both(tmp_path, how)
    monkeypatch.setattr(copying, "_AT_ONCE", 200)
    assert_same(models.load(folder, dtype="float32", xp=np), expected)
    with pytest.warns(UserWarning, match=f"rounds 14 weights .*{ROUNDED[how][2]}.*1/254"):
        kept = models.load(folder, dtype="float32", xp=np, quantize="file")
    exact = dict(named_parts(expected.weights))
    for name, part in named_parts(kept.weights):
        if not isinstance(part, QuantizedWeight):
            assert_array_equal(part, exact[name])
            continue
        assert part.blocks == ("int8", min(128, part.inner))
        found, wanted = (
            array.reshape(part.outer, -1, part.block_size)
            for array in (cupyattn.dequantize(part), exact[name])
        )
        largest = np.abs(wanted).max(axis=-1, keepdims=True)
        assert (np.abs(found - wanted) <= largest / 254 * (1 + 1e-5)).all(), name
    ids = [[1, 2, 3]]
    spread = np.abs(expected.logits(ids)).max()
    np.testing.assert_allclose(kept.logits(ids), expected.logits(ids), atol=0.05 * spread)


def test_awq_with_scales_in_float32(tmp_path):
    """Exact as floats; kept, scales are rounded to float16 and codes are those of the file."""
    folder, expected = both(tmp_path, "awq with scales of float32")
    assert_same(models.load(folder, dtype="float32", xp=np), expected)
    with pytest.warns(UserWarning, match=r"14 weights \(float32 scales to float16, within 2"):
        kept = models.load(folder, dtype="float32", xp=np, quantize="file")
    for part, exact in zip(
        (each for _, each in named_parts(kept.weights)),
        (each for _, each in named_parts(expected.weights)),
        strict=True,
    ):
        if isinstance(part, QuantizedWeight):
            assert part.blocks == ("int4", 32)
            np.testing.assert_allclose(cupyattn.dequantize(part), exact, rtol=2**-11)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("labelled", ["gptq", "gptq_v2"])
def test_zeros_of_the_other_version_of_gptq(tmp_path, monkeypatch, bits, labelled):
    """Zeros of symmetric weights are half of the integers: 8 that are stored as such are no 9."""

    def pack(*given: Any) -> Any:
        return gptq(*given, bits=bits, zero=1 << (bits - 1), less_one=labelled == "gptq_v2")

    monkeypatch.setitem(
        PACKERS, "other", (pack, {**GPTQ, "bits": bits, "checkpoint_format": labelled})
    )
    folder, expected = both(tmp_path, "other")
    for quantize in (None, "file"):
        with pytest.warns(UserWarning, match=f"checkpoint_format '{labelled}'"):
            assert_same(models.load(folder, dtype="float32", xp=np, quantize=quantize), expected)


def in_memory(parts: dict[str, np.ndarray]) -> dict[str, Stored]:
    """The tensors of a module "a", without a file."""
    kinds = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
             "int32": "I32", "int8": "I8", "float8_e4m3fn": "F8_E4M3"}  # fmt: skip
    found = {}
    for name, array in parts.items():
        kind = kinds[array.dtype.name]
        items = array.view(np.uint8) if kind == "F8_E4M3" else array
        found[f"a.{name}"] = Stored(f"a.{name}", array.shape, kind, items.__getitem__)
    return found


@examples(25, deep=300)
@given(data=st.data())
def test_rows_of_any_integers(data):
    """Any rows of GPTQ and compressed-tensors have the numbers of their packers."""
    draw = data.draw
    outer, inner = 8 * draw(st.integers(1, 5)), 32 * draw(st.sampled_from([1, 2, 3, 4, 8]))
    group = draw(st.sampled_from([None, *(n for n in (32, 64, 128) if inner % n == 0)]))
    bits, order = draw(st.sampled_from([4, 8])), draw(st.sampled_from(["along K", "scattered"]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    if draw(st.booleans()):
        less_one = draw(st.booleans())
        zero = draw(st.sampled_from([None, 1 << (bits - 1)]))
        options = {"bits": bits, "group": group, "order": order, "zero": zero}
        parts, expected = gptq(rng, outer, inner, less_one=less_one, **options)
        tensors = unpacked_gptq(
            in_memory(parts), group, bits=bits, zeros_less_one=less_one, in_order=True
        )
    else:
        symmetric, packed = draw(st.booleans()), draw(st.booleans())
        options = {"bits": bits, "group": group, "order": order, "symmetric": symmetric}
        scales = draw(st.sampled_from(["float16", "bfloat16", "float32"]))
        parts, expected = compressed(rng, outer, inner, packed=packed, scales=scales, **options)
        tensors = unpacked_compressed(in_memory(parts), [], has_zeros=not symmetric)
    start = draw(st.integers(0, outer - 1))
    stop = draw(st.integers(start + 1, outer))
    tensor = tensors["a.weight"]
    assert isinstance(tensor, QuantisedTensor)
    if tensor.floats is not None:
        assert tensor.rounding
        assert_array_equal(tensor.floats(start, stop), expected[start:stop])
    else:
        assert tensor.read is not None
        assert_array_equal(cupyattn.dequantize(tensor.read(start, stop)), expected[start:stop])


def test_groups_that_compressed_tensors_has_not_set_are_consecutive():
    parts, expected = compressed(np.random.default_rng(0), 8, 64)
    parts["weight_g_idx"] = np.full(64, -1, np.int32)
    (tensor,) = unpacked_compressed(in_memory(parts), [], has_zeros=False).values()
    assert isinstance(tensor, QuantisedTensor)
    assert tensor.read is not None
    assert_array_equal(cupyattn.dequantize(tensor.read(0, 8)), expected)


@examples(15, deep=200)
@given(data=st.data())
def test_rows_of_any_fp8(data):
    draw = data.draw
    outer, inner = draw(st.integers(1, 40)), draw(st.integers(1, 70))
    block = draw(st.integers(1, 41)), draw(st.integers(1, 71))
    whole = -(-outer // block[0]), -(-inner // block[1])
    scales = draw(st.sampled_from([(), (1,), (outer, 1), whole]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    own = None if scales in ((), (1,)) or scales != whole else block
    parts, expected = fp8(rng, outer, inner, scales=scales, block=own)
    (tensor,) = unpacked_fp8(in_memory(parts), [] if own is None else [block]).values()
    start = draw(st.integers(0, outer - 1))
    stop = draw(st.integers(start + 1, outer))
    read = tensor.floats if isinstance(tensor, QuantisedTensor) else tensor.read
    assert read is not None
    assert_array_equal(read(start, stop), expected[start:stop])
    assert isinstance(tensor, QuantisedTensor) == (inner % 32 == 0)


def test_codes_of_e4m3():
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    assert_array_equal(E4M3, expected.astype(np.float32))
    assert_array_equal(np.signbit(E4M3), np.arange(256) >= 128)


@pytest.mark.parametrize("how", ["nested", "tables", "gptq", "fp8", "mxfp4"])
@pytest.mark.filterwarnings("ignore:.*rounds")
def test_a_budget_of_the_files_blocks_is_what_is_loaded(tmp_path, how):
    folder, _ = packed_folder(tmp_path, how)
    checkpoint = opened(folder)
    blocks = quantises_as_in(checkpoint)
    training = Training(
        checkpoint.config, "float32", "file", LoraOptions(), "float32", 64, blocks=blocks
    )
    weights = next(line for line in budget_of(training).lines if line.what == "weights")
    assert weights.size == models.load(folder, dtype="float32", xp=np, quantize="file").nbytes


def test_packed_weights_of_gpt2_are_turned_already(tmp_path):
    """Floats of it are (K, N) in files, and what bitsandbytes has quantised is (N, K)."""
    config, rng = CONFIGS["gpt2"]._replace(intermediate_size=128), np.random.default_rng(7)
    plain = tensors_of(models.random(config, dtype="float32", xp=np, seed=2))
    name = "transformer.h.1.mlp.c_proj"
    parts, weights = bitsandbytes(rng, 64, 128, nested=True)
    stored = {key: array for key, array in plain.items() if key != f"{name}.weight"}
    stored |= {f"{name}.{part}": array for part, array in parts.items()}
    model = models.load(
        write_folder(tmp_path, config, stored, BNB), dtype="float32", xp=np, quantize="file"
    )
    first, second = model.weights.layers
    assert_array_equal(cupyattn.dequantize(second.down.weight), weights)
    assert_array_equal(first.down.weight, plain[name.replace("1", "0") + ".weight"].T)


@pytest.mark.parametrize(
    ("name", "kind"),
    mostly_deep(
        product(("gpt2", "llama", "phi"), KINDS),
        [("gpt2", "nf4"), ("gpt2", "int8"), ("llama", "int4"), ("phi", "nf4")],
    ),
)
def test_floats_are_quantised_as_they_are_read(tmp_path, monkeypatch, name, kind):
    """The codes of the weights as a whole; gpt2 has them (K, N) in its files."""
    config = CONFIGS[name]
    plain = models.random(config, dtype="float32", xp=np, seed=2)
    folder = write_folder(tmp_path, config, tensors_of(plain))
    monkeypatch.setattr(copying, "_AT_ONCE", 1000)
    loaded = models.load(folder, dtype="float32", xp=np, quantize=kind)
    assert loaded.config.architecture == name
    wanted = dict(named_parts(plain.weights))
    for part_name, part in named_parts(loaded.weights):
        if not isinstance(part, QuantizedWeight):
            assert_array_equal(part, wanted[part_name])
            continue
        made = cupyattn.quantize(wanted[part_name].T, format=kind, block_size=part.block_size).T
        for own, array in part.arrays.items():
            assert_array_equal(array, made.arrays[own], err_msg=f"{part_name}.{own}")


def test_what_is_packed_is_quantised_anew(tmp_path):
    """To another format, or another block; in the same blocks it is kept."""
    folder, _ = packed_folder(tmp_path, "nested")
    plain = models.load(folder, dtype="float32", xp=np).weights.layers[0].down.weight
    kept = models.load(folder, xp=np, quantize="file").weights.layers[0].down.weight
    same = models.load(folder, xp=np, quantize="nf4").weights.layers[0].down.weight
    assert_array_equal(same.codes, kept.codes)
    other = models.load(folder, xp=np, quantize="int8").weights.layers[0].down.weight
    assert_array_equal(other.codes, cupyattn.quantize(plain.T, format="int8").codes)


@pytest.mark.parametrize(
    ("name", "kind"),
    mostly_deep(
        product(("llama", "phi", "gpt2", "qwen2"), ("Q4_0", "Q4_1", "Q8_0")),
        [
            ("llama", "Q4_0"),
            ("llama", "Q4_1"),
            ("phi", "Q8_0"),
            ("gpt2", "Q4_1"),
            ("qwen2", "Q4_0"),
        ],
    ),
)
def test_gguf_keeps_its_blocks(tmp_path, name, kind):
    """Files of Llama hold q and k in the order of rotary pairs."""
    architecture = {"phi": "phi2"}.get(name, name)
    model = models.random(CONFIGS[name], dtype="float32", xp=np, seed=3)
    path = write_gguf(tmp_path / "m.gguf", model, architecture, quantised=TYPE[kind])
    plain = models.load(path, dtype="float32", xp=np)
    kept = models.load(path, dtype="float32", xp=np, quantize="file")
    assert_same(kept, plain)
    form = {"Q4_0": "int4", "Q4_1": "q4_1", "Q8_0": "int8"}[kind]
    for layer in kept.weights.layers:
        assert {getattr(layer, product).weight.blocks for product in PRODUCTS} == {(form, 32)}
    np.testing.assert_allclose(kept.logits([[1, 2, 3]]), plain.logits([[1, 2, 3]]), atol=1e-5)


def test_gguf_keeps_super_blocks_and_what_differs_is_in_dtype(tmp_path):
    """As in files of Q4_K_M: down is Q6_K, and v, which is in one product with q and k."""
    config = CONFIGS["llama"]._replace(hidden_size=256, intermediate_size=256, head_dim=64)
    model = models.random(config, dtype="float32", xp=np)
    rng = np.random.default_rng(3)
    tensors = gguf_tensors(model, "llama")
    packed, expected = {}, {}
    for name, array in tensors.items():
        if not name.startswith("blk") or array.ndim != 2:
            continue
        blocks = rng.integers(0, 256, (len(array), array.shape[1] // 256, 144), np.uint8)
        blocks[..., :4] = (
            rng.uniform(1e-4, 1e-3, (*blocks.shape[:2], 2)).astype(np.float16).view(np.uint8)
        )
        packed[name] = blocks.reshape(len(array), -1)
        expected[name] = gguf.quants.dequantize(packed[name], TYPE.Q4_K)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", packed=packed, packed_as=TYPE.Q4_K)
    kept = models.load(path, dtype="float32", xp=np, quantize="file")
    for layer in kept.weights.layers:
        assert {getattr(layer, name).weight.blocks for name in PRODUCTS} == {("q4_k", 32)}
    found = gguf_tensors(dequantised(kept), "llama")
    for name, array in expected.items():
        assert_array_equal(found[name], array, err_msg=name)
    # v and down as floats: their products are floats, too.
    del packed["blk.0.attn_v.weight"], packed["blk.1.ffn_down.weight"]
    path = write_gguf(tmp_path / "n.gguf", model, "llama", packed=packed, packed_as=TYPE.Q4_K)
    first, second = models.load(path, dtype="float32", xp=np, quantize="file").weights.layers
    assert isinstance(first.qkv.weight, np.ndarray)
    assert isinstance(second.down.weight, np.ndarray)
    assert isinstance(second.qkv.weight, QuantizedWeight)
    assert_array_equal(first.qkv.weight[-2 * 64 :], model.weights.layers[0].qkv.weight[-2 * 64 :])


def test_biases_of_zeros_are_passed_over(tmp_path):
    """Older files of GPTQ have them for every weight; other biases are unknown tensors."""
    folder, _ = packed_folder(tmp_path, "gptq")
    file = folder / "model.safetensors"
    name = "model.layers.1.mlp.down_proj.bias"
    zeros = np.zeros(64, np.float16)
    save_file({**load_file(file), name: zeros}, file)
    assert models.load(folder, xp=np, quantize="file").weights.layers[1].down.bias is None
    zeros[-1] = 1
    save_file({**load_file(file), name: zeros}, file)
    with pytest.raises(ValueError, match=f"unknown: {name}"):
        models.load(folder, xp=np, quantize="file")


def test_blocks_of_the_embedding_alone_are_not_kept(tmp_path):
    model = models.random(CONFIG, dtype="float32", xp=np)
    name = "token_embd.weight"
    packed = {name: gguf.quants.quantize(gguf_tensors(model, "llama")[name], TYPE.Q8_0)}
    path = write_gguf(tmp_path / "m.gguf", model, "llama", packed=packed, packed_as=TYPE.Q8_0)
    with pytest.raises(ValueError, match="no weights of layers in blocks"):
        models.load(path, xp=np, quantize="file")


@pytest.mark.parametrize("how", ["nested", "gptq"])
def test_floats_of_a_packed_folder_are_written_without_a_word_of_its_blocks(tmp_path, how):
    folder, _ = packed_folder(tmp_path, how)
    model = models.load(folder, dtype="float32", xp=np)
    write_model(model.weights, model.config, folder, tmp_path / "new")
    assert "quantization_config" not in json.loads((tmp_path / "new/config.json").read_text())
    assert_same(models.load(tmp_path / "new", dtype="float32", xp=np), model)


def test_a_file_of_floats_has_no_blocks_to_keep(tmp_path):
    model = models.random(CONFIG, dtype="float32", xp=np)
    folder = write_folder(tmp_path, CONFIG, tensors_of(model))
    with pytest.raises(ValueError, match=r"no weights of layers in blocks .*leave quantize out"):
        models.load(folder, xp=np, quantize="file")
    with pytest.raises(ValueError, match="'int8', 'file'"):
        models.load(folder, xp=np, quantize="int2")


LARGE = CONFIGS["llama"]._replace(vocab_size=20, hidden_size=128, intermediate_size=4096)


def of_floats(folder):
    return write_folder(folder, LARGE, tensors_of(models.random(LARGE, dtype="float32", xp=np)))


def of_gguf(folder):
    model = models.random(LARGE, dtype="float32", xp=np)
    return write_gguf(folder / "m.gguf", model, "llama", quantised=TYPE.Q4_0)


def packed(how):
    return lambda folder: packed_folder(folder, how, LARGE)[0]


@pytest.mark.parametrize(
    ("write", "quantize"),
    [
        *((of_floats, "nf4"), (of_gguf, "file"), (packed("gptq"), "file")),
        *deep((of_floats, "int4"), (of_floats, "int8"), (packed("bitsandbytes"), "file"),
              (packed("awq"), "file")),
    ],
)  # fmt: skip
def test_loading_takes_the_memory_of_the_quantised_model(write, quantize, tmp_path, monkeypatch):
    """Loading reads pieces of a tensor, never a whole tensor of floats."""
    path = write(tmp_path)
    monkeypatch.setattr(copying, "_AT_ONCE", 1 << 14)
    tracemalloc.start()
    try:
        loaded = models.load(path, dtype="float32", xp=np, quantize=quantize)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(loaded.weights.layers[0].down.weight, QuantizedWeight)
    assert peak < 1.3 * loaded.nbytes


def read(name: str, *parts: tuple[int, int]) -> list[QuantizedWeight]:
    """Rows of the weight, as they are read from the file."""
    stored = read_safetensors(PACKED / f"{name}.safetensors")
    del stored["expected"]
    (tensor,) = unpacked_nf4(stored).values()
    assert isinstance(tensor, QuantisedTensor)
    assert (tensor.shape, tensor.blocks) == (SHAPES[name], ("nf4", 64))
    return [tensor.read(*part) for part in parts]


@pytest.mark.parametrize("name", SHAPES)
def test_numbers_are_those_of_bitsandbytes(name):
    """Also of rows in pieces, of which one begins within the second block of absmax."""
    expected = load_file(PACKED / f"{name}.safetensors")["expected"]
    outer = SHAPES[name][0]
    whole, *parts = read(name, (0, outer), (0, 5), (5, outer - 1), (outer - 1, outer))
    found = cupyattn.dequantize(whole)
    assert_array_equal(found[list(ROWS)], expected)
    assert_array_equal(np.concatenate([cupyattn.dequantize(part) for part in parts]), found)


def test_absmax_stay_in_eight_bits():
    """As they are in the file, and the very same numbers; from the first row of a group on."""
    stored = read_safetensors(PACKED / "nested.safetensors")
    file = {name: part.items(slice(None)) for name, part in stored.items()}
    expected = stored.pop("expected").items(slice(None))
    (tensor,) = unpacked_nf4(stored).values()
    assert isinstance(tensor, QuantisedTensor)
    assert tensor.nested is not None
    outer = SHAPES["nested"][0]
    whole, part = tensor.nested.read(0, outer), tensor.nested.read(16, outer)
    assert whole.format == "nf4_nested"
    found = cupyattn.dequantize(whole)
    assert_array_equal(found[list(ROWS)], expected)
    assert_array_equal(cupyattn.dequantize(part), found[16:])
    assert_array_equal(found, cupyattn.dequantize(tensor.read(0, outer)))
    assert_array_equal(whole.scales.reshape(-1), file["linear.weight.absmax"])
    assert_array_equal(whole.scale_table, file["linear.weight.nested_quant_map"])
    assert whole.super_scales is not None
    assert_array_equal(whole.super_scales[:4, 0], file["linear.weight.nested_absmax"][[0, 0, 0, 0]])


@pytest.mark.parametrize("name", SHAPES)
def test_codes_are_those_of_bitsandbytes(name):
    """And absmax, where they are not quantised themselves: then they are near."""
    (whole,) = read(name, (0, SHAPES[name][0]))
    ours = cupyattn.quantize(packed_weights(name).T, format="nf4", block_size=64).T
    assert_array_equal(ours.codes, whole.codes)
    if name == "plain":
        assert_array_equal(ours.scales, whole.scales)
    else:
        np.testing.assert_allclose(ours.scales, whole.scales, rtol=0.1)
        assert (ours.scales != whole.scales).any()
