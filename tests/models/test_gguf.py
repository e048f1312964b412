"""GGUF files: their weights, their configs, and errors for damaged ones."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from support.gguf_files import tensors_of, write_gguf  # noqa: E402
from support.model_twin import twin_logits  # noqa: E402
from support.search import deep  # noqa: E402
from support.tiny_models import TINY  # noqa: E402

import cupyattn  # noqa: E402
from cupyattn import models  # noqa: E402
from cupyattn.cli import main  # noqa: E402
from cupyattn.models.checkpoints.writing import (  # noqa: E402
    source_of,
    write_folder,
    written_bytes,
)
from cupyattn.models.loading import opened  # noqa: E402
from cupyattn.models.weights import named_arrays  # noqa: E402

ARCHITECTURES = {
    "gpt2": "gpt2", "llama": "llama", "qwen2": "qwen2", "mistral": "llama", "phi": "phi2",
    "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3", "phi3": "phi3", "phi4": "phi3",
    "smollm3": "smollm3", "ministral3": "mistral3",
}  # fmt: skip
TYPE = gguf.GGMLQuantizationType
QUANTISABLE = [TYPE.F16, TYPE.BF16, TYPE.Q8_0, TYPE.Q4_0, TYPE.Q4_1, TYPE.Q5_0, TYPE.Q5_1]
IDS = np.random.default_rng(5).integers(0, 59, (2, 9))


def random(name, **changes):
    """Return a model as llama.cpp can describe it, with weights of norms that it rounds to 0."""
    config = TINY["phi3" if name == "phi4" else name]._replace(**changes)
    if config.architecture == "gemma":
        everywhere = (1, 3, 5) if name == "gemma2" else (5,)
        config = config._replace(
            num_layers=7, global_layers=everywhere, softmax_scale=config.head_dim**-0.5
        )
    if name == "phi4":
        pairs = config.rotary_dim // 2
        short, long = (tuple(np.linspace(1, end, pairs).tolist()) for end in (1.5, 4))
        scaling = cupyattn.LongRopeScaling(short, long, 4, 1.25)
        config = config._replace(rope_scaling=scaling)
    model = models.random(config, dtype="float32", xp=np, seed=7)
    for key, array in named_arrays(model.weights):
        if config.architecture == "gemma" and "norm" in key:
            array[...] = np.round(array * 256) / 256  # 1 + w is exact
    return model


def in_float32(value):
    """Round all numbers, as the metadata of a file does."""
    if isinstance(value, tuple):
        return tuple(in_float32(each) for each in value)
    return np.float32(value) if isinstance(value, float) else value


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_comes_back(tmp_path, name):
    model = random(name)
    path = write_gguf(tmp_path / "m.gguf", model, ARCHITECTURES[name])
    loaded = models.load(path, dtype="float32", xp=np)
    ours, theirs = in_float32(model.config), in_float32(loaded.config)
    assert theirs == ours
    for (key, array), (_, found) in zip(
        named_arrays(model.weights), named_arrays(loaded.weights), strict=True
    ):
        np.testing.assert_array_equal(found, array, err_msg=key)
    if name != "phi4":  # the twin has no scalings
        np.testing.assert_allclose(loaded.logits(IDS)[0], twin_logits(model, IDS[0]), atol=2e-5)
    np.testing.assert_allclose(loaded.logits(IDS), model.logits(IDS), atol=1e-5)
    assert loaded.tokenizer is None


@pytest.mark.parametrize("kind", [None, TYPE.Q4_0, *deep(TYPE.Q8_0, TYPE.Q5_1)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_file_is_written_as_a_folder_with_equal_logits(name, kind, tmp_path):
    """Weights, config and tokenizer; what is quantised is decoded, also if it was loaded so."""
    model = random(name, intermediate_size=64)
    more = {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 5}
    path = tmp_path / "m.gguf"
    write_gguf(path, model, ARCHITECTURES[name], metadata=more, quantised=kind)
    checkpoint = opened(path)
    loaded = models.load(path, dtype="float32", xp=np)
    kept = loaded
    if kind in (TYPE.Q4_0, TYPE.Q8_0):
        kept = models.load(path, dtype="float32", xp=np, quantize="file")
    write_folder(kept.weights, kept.config, source_of(checkpoint), tmp_path / "new")
    again = models.load(tmp_path / "new", dtype="float32", xp=np)
    assert again.config == loaded.config
    np.testing.assert_array_equal(again.logits(IDS), loaded.logits(IDS))
    size = written_bytes(loaded.config, "float32")
    assert (
        0
        < (tmp_path / "new" / "model.safetensors").stat().st_size - size
        < 4096 * model.config.num_layers
    )
    assert again.nbytes == size


def test_the_order_of_pairs_matters(tmp_path):
    """The logits would differ if q and k were not permuted."""
    model = random("llama")
    unpermuted = tensors_of(model, "qwen2")
    path = write_gguf(tmp_path / "m.gguf", model, "llama", tensors=unpermuted)
    loaded = models.load(path, dtype="float32", xp=np)
    assert np.abs(loaded.logits(IDS) - model.logits(IDS)).max() > 0.1


@pytest.mark.parametrize("kind", QUANTISABLE, ids=lambda kind: kind.name)
def test_types_are_dequantised(tmp_path, kind):
    """Each tensor as the package gguf dequantises it."""
    model = random("llama", intermediate_size=64, head_dim=16)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", quantised=kind)
    loaded = tensors_of(models.load(path, dtype="float32", xp=np), "llama")
    for name, array in tensors_of(model, "llama").items():
        expected = array
        if array.ndim == 2:
            packed = gguf.quants.quantize(np.ascontiguousarray(array), kind)
            expected = gguf.quants.dequantize(packed, kind)
        np.testing.assert_array_equal(loaded[name], expected, err_msg=name)


@pytest.mark.parametrize("kind", [TYPE.Q4_K, TYPE.Q6_K], ids=lambda kind: kind.name)
def test_types_of_super_blocks(tmp_path, kind):
    """The package gguf does not quantise to these: random blocks, of scales that are finite."""
    model = random("llama", hidden_size=256, intermediate_size=256)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator, scale = np.random.default_rng(3), np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
    scales = {TYPE.Q4_K: (0, 2), TYPE.Q6_K: (size - 2,)}[kind]
    packed = {}
    for name, array in tensors_of(model, "llama").items():
        if array.ndim == 2 and array.shape[1] == 256:
            blocks = generator.integers(0, 256, (len(array), 1, size), np.uint8)
            for at in scales:
                blocks[:, :, at : at + 2] = scale
            packed[name] = blocks.reshape(len(array), size)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", packed=packed, packed_as=kind)
    loaded = tensors_of(models.load(path, dtype="float32", xp=np), "llama")
    assert block == 256 and len(packed) > 8
    for name, blocks in packed.items():
        expected = gguf.quants.dequantize(blocks, kind)
        np.testing.assert_array_equal(loaded[name], expected, err_msg=name)


def test_ends_of_text(tmp_path):
    """Those of a text, of a turn and of a message, each once and in this order."""
    ids = {f"tokenizer.ggml.{name}_token_id": number
           for name, number in {"bos": 1, "eom": 9, "eot": 7, "eos": 5}.items()}  # fmt: skip
    path = write_gguf(tmp_path / "m.gguf", random("llama"), "llama", metadata=ids)
    config = models.load(path, xp=np).config
    assert (config.bos_id, config.eos_ids) == (1, (5, 7, 9))
    ids["tokenizer.ggml.eot_token_id"] = 5
    path = write_gguf(tmp_path / "m.gguf", random("llama"), "llama", metadata=ids)
    assert models.load(path, xp=np).config.eos_ids == (5, 9)


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_tensors_are_aligned_as_the_file_says(tmp_path, alignment):
    model = random("llama", hidden_size=20)  # 32 would suit some of these by chance
    path = write_gguf(tmp_path / "m.gguf", model, "llama", alignment=alignment)
    loaded = models.load(path, dtype="float32", xp=np)
    np.testing.assert_array_equal(loaded.logits(IDS), model.logits(IDS))


@pytest.mark.parametrize("at_once", [1, 1000])
def test_pieces_of_any_size(tmp_path, monkeypatch, at_once):
    """Rows of q and k are permuted in a file of Llama."""
    model = random("llama")
    path = write_gguf(tmp_path / "m.gguf", model, "llama")
    monkeypatch.setattr("cupyattn.models.checkpoints.copying._AT_ONCE", at_once)
    loaded = models.load(path, dtype="float32", xp=np)
    np.testing.assert_array_equal(loaded.logits(IDS), model.logits(IDS))


def test_frequencies_of_llama3(tmp_path):
    """The file has what each frequency is divided by: the scaling is recognised, or refused."""
    scaling = cupyattn.Llama3Scaling(32.0, 1.0, 4.0, 8192)
    model = random("llama", rope_base=500000.0, rope_scaling=scaling)
    plain = 500000.0 ** (-np.arange(8) / 8)
    factors = (plain / scaling.frequencies(plain, 500000.0)).astype(np.float32)
    assert factors.max() == 32 and factors.min() == 1 and len(set(factors)) > 2
    tensors = tensors_of(model, "llama")
    path = tmp_path / "m.gguf"
    write_gguf(path, model, "llama", tensors={**tensors, "rope_freqs.weight": factors})
    loaded = models.load(path, dtype="float32", xp=np)
    assert loaded.config.rope_scaling == scaling
    np.testing.assert_array_equal(loaded.logits(IDS), model.logits(IDS))
    write_gguf(path, model, "llama", tensors={**tensors, "rope_freqs.weight": factors**2})
    with pytest.raises(NotImplementedError, match=r"rope_freqs\.weight.*Llama 3"):
        models.load(path, xp=np)


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
         cupyattn.LinearScaling(4.0)),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0,
          "llama.rope.scaling.original_context_length": 16}, cupyattn.YarnScaling(2.0, 16)),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0,
          "llama.rope.scaling.yarn_beta_fast": 16.0, "llama.rope.scaling.yarn_beta_slow": 2.0},
         cupyattn.YarnScaling(2.0, 40, 16.0, 2.0)),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.factor": 4.0}, cupyattn.LinearScaling(4.0)),
        ({"llama.rope.scale_linear": 4.0}, cupyattn.LinearScaling(4.0)),
    ],
)  # fmt: skip
def test_scalings(tmp_path, metadata, scaling):
    path = write_gguf(tmp_path / "m.gguf", random("llama"), "llama", metadata=metadata)
    assert models.load(path, xp=np).config.rope_scaling == scaling


@pytest.mark.parametrize(
    ("name", "metadata", "traits"),
    [
        ("gemma3", {"final_logit_softcapping": 20.0, "rope.freq_base_swa": 5000.0},
         {"logit_softcap": 20.0, "local_rope_base": 5000.0}),
        ("gemma3", {"attention.sliding_window_pattern": 3}, {"global_layers": (2, 5)}),
        ("gemma3", {"attention.sliding_window_pattern": [True, False, True, True, True, False]},
         {"global_layers": (1, 5, 6)}),
        ("gemma3", {"attention.sliding_window": 4096},
         {"window_size": (4095, 0), "global_layers": (5,)}),
        ("gemma3", {"block_count": 62}, {"softmax_scale": 8**-0.5}),
        ("gemma2", {"block_count": 46}, {"softmax_scale": 8**-0.5}),
        ("gemma2", {"attention.sliding_window": 4096}, {"window_size": None}),
        ("ministral3", {"attention.temperature_length": 32}, {"query_growth": (0.25, 32)}),
        ("ministral3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                        "rope.scaling.yarn_log_multiplier": 1.0},
         {"rope_scaling": cupyattn.YarnScaling(4.0, 4, 32.0, 1.0, 1.0)}),
    ],
)  # fmt: skip
def test_traits_of_architectures(tmp_path, name, metadata, traits):
    """A config alone: a file of 62 layers has more tensors than this one."""
    kind = ARCHITECTURES[name]
    changes = {"query_growth": (0.25, 4)} if name == "ministral3" else {}
    given = {f"{kind}.{key}": value for key, value in metadata.items()}
    layers = given.pop(f"{kind}.block_count", None)
    path = write_gguf(tmp_path / "m.gguf", random(name, **changes), kind, metadata=given)
    if layers:
        at = path.read_bytes().index(b".block_count") + len(".block_count") + 4
        content = path.read_bytes()
        path.write_bytes(content[:at] + struct.pack("<I", layers) + content[at + 4 :])
    config = opened(path).config
    assert {trait: getattr(config, trait) for trait in traits} == traits


def test_older_files_of_gemma_2_have_a_window(tmp_path):
    model = random("gemma2", max_positions=8192, window_size=None)
    config = models.load(write_gguf(tmp_path / "m.gguf", model, "gemma2"), xp=np).config
    assert (config.window_size, config.global_layers) == ((4095, 0), (1, 3, 5))


@pytest.mark.parametrize("change", ["missing", "long"])
def test_lists_of_factors_that_do_not_fit(tmp_path, change):
    model = random("phi4")
    tensors = tensors_of(model, "phi3")
    if change == "missing":
        del tensors["rope_factors_short.weight"]
    else:
        tensors["rope_factors_short.weight"] = np.ones(9, np.float32)
    path = write_gguf(tmp_path / "m.gguf", model, "phi3", tensors=tensors)
    with pytest.raises(ValueError, match=r"rope_factors_short\.weight is not a list of 6 factors"):
        models.load(path, xp=np)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'.*'linear', 'yarn'"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8; there is code for 0"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale is 0.5; .*models without it"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale is 0.5; .*models without it"),
        ({"llama.rope.scaling.attn_factor": 0.5}, "attn_factor is 0.5; there is code for 1.0"),
        ({"llama.attention.sliding_window": [4, 0]}, r"sliding_window is \[4, 0\]; .*all layers"),
    ],
)
def test_traits_without_code(tmp_path, metadata, message):
    path = write_gguf(tmp_path / "m.gguf", random("llama"), "llama", metadata=metadata)
    with pytest.raises(NotImplementedError, match=message):
        models.load(path, xp=np)


def split(folder: Path, model, count: int = 3, **changed: object) -> list[Path]:
    """Split a model as llama-gguf-split does: all but the tensors is in the first file."""
    tensors = list(tensors_of(model, "llama").items())
    paths = []
    for number in range(count):
        own = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
        own |= changed if number == 1 else {}
        path = folder / f"m-{number + 1:05d}-of-{count:05d}.gguf"
        part = dict(tensors[number::count])
        if number == 0:
            write_gguf(path, model, "llama", tensors=part, metadata=own)
        else:
            writer = gguf.GGUFWriter(path, "llama")
            for key, value in own.items():
                writer.add_uint32(key, value)
            for name, array in part.items():
                writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        paths.append(path)
    return paths


@pytest.mark.parametrize("given", [0, 2])
def test_a_split_file_is_loaded_by_any_of_its_parts(tmp_path, given):
    model = random("llama")
    loaded = models.load(split(tmp_path, model)[given], dtype="float32", xp=np)
    for (name, array), (_, found) in zip(
        named_arrays(model.weights), named_arrays(loaded.weights), strict=True
    ):
        np.testing.assert_array_equal(found, array, err_msg=name)


def test_a_merged_file_counts_no_parts(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf", random("llama"), "llama", metadata={"split.count": 0, "split.no": 0}
    )
    assert models.load(path, xp=np).config.num_layers == 2


def test_split_files_that_do_not_fit_together(tmp_path):
    first, second, third = split(tmp_path, random("llama"))

    def refused(path, message, kind=ValueError):
        with pytest.raises(kind, match=message):
            models.load(path, xp=np)

    alone = first.rename(tmp_path / "m.gguf")
    refused(alone, r"one of 3 files.*NAME-00001-of-00003\.gguf")
    alone.rename(first)
    content = third.read_bytes()
    third.unlink()
    refused(first, "of which 1 are missing: m-00003-of-00003.gguf", FileNotFoundError)
    third.write_bytes(content[:-40])
    refused(first, "m-00003-of-00003.gguf.*exceeds the file")
    third.write_bytes(second.read_bytes())
    refused(first, "m-00003.*not part 3 of 3")
    split(tmp_path, random("llama"), **{"split.count": 4})
    refused(first, "m-00002.*not part 2 of 3")
    first, *_ = split(tmp_path, random("llama"), **{"split.no": 0})
    refused(first, "m-00002.*not part 2 of 3")
    whole = write_gguf(first, random("llama"), "llama", metadata={"split.count": 3, "split.no": 0})
    (tmp_path / "other").mkdir()
    for path in split(tmp_path / "other", random("llama"))[1:]:
        path.replace(tmp_path / path.name)
    refused(whole, "is in an earlier part too")


def test_a_split_file_without_one_of_its_tensors(tmp_path):
    first, *_ = split(tmp_path, random("llama"), count=2)
    path = write_gguf(
        first, random("llama"), "llama", tensors={"token_embd.weight": np.ones((4, 32))},
        metadata={"split.count": 2, "split.no": 0, "split.tensors.count": 99},
    )  # fmt: skip
    with pytest.raises(ValueError, match="tensors, not 99"):
        models.load(path, xp=np)


def test_heads_without_pairs(tmp_path):
    model = random("llama", head_dim=15, rotary_dim=14)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", tensors=tensors_of(model, "qwen2"))
    with pytest.raises(ValueError, match="heads of 15"):
        models.load(path, xp=np)


def test_an_architecture_without_a_forward(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", random("llama"), "qwen3moe")
    with pytest.raises(NotImplementedError, match=r"'qwen3moe', a mixture of.*GPT-2.*Llama.*Phi-2"):
        models.load(path, xp=np)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blk.1.ffn_down.weight"), r"missing: blk\.1\.ffn_down\.weight"),
        (lambda t: t.pop("token_embd.weight"), "token_embd"),
        (lambda t: t["blk.0.ffn_up.weight"].__setitem__((3, 4), np.nan), "ffn_up.weight holds nan"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(tmp_path, change, message):
    model = random("llama")
    tensors = {name: array.copy() for name, array in tensors_of(model, "llama").items()}
    change(tensors)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", tensors=tensors)
    with pytest.raises(ValueError, match=message):
        models.load(path, xp=np)


def test_a_file_that_is_cut_short(tmp_path):
    """At any length: an error that names the file, never a model."""
    tokens = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": [0.5, 1.5]}
    whole = write_gguf(tmp_path / "m.gguf", random("llama"), "llama", metadata=tokens)
    content = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    lengths = [*range(0, 2000, 37), *range(2000, len(content) - 64, 4999), len(content) - 64]
    for length in lengths:
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf") as caught:
            models.load(cut, xp=np)
        assert "download the file again" in str(caught.value)


def test_a_file_with_wrong_bytes(tmp_path):
    """Whatever a byte of the header becomes: a model, or an error of ours."""
    content = bytearray(write_gguf(tmp_path / "m.gguf", random("llama"), "llama").read_bytes())
    damaged = tmp_path / "damaged.gguf"
    for at in range(0, 1500, 13):
        for value in (0, 255):
            wrong = content.copy()
            wrong[at] = value
            damaged.write_bytes(wrong)
            try:
                models.load(damaged, xp=np)
            except (ValueError, NotImplementedError) as failure:
                assert "; " in str(failure)  # noqa: PT017


def test_tensors_that_lie_in_one_another(tmp_path):
    content = write_gguf(tmp_path / "m.gguf", random("llama"), "llama").read_bytes()

    def place(name):
        """The position of a tensor's offset: after its name, two axes and its type."""
        return content.index(name) + len(name) + 4 + 2 * 8 + 4

    at, other = place(b"blk.0.attn_v.weight"), place(b"blk.0.attn_k.weight")
    own, taken = (int.from_bytes(content[each : each + 8], "little") for each in (at, other))
    for offset in (taken, own + 4, own - 32):
        wrong = content[:at] + offset.to_bytes(8, "little") + content[at + 8 :]
        (tmp_path / "m.gguf").write_bytes(wrong)
        with pytest.raises(ValueError, match=r"at byte \d+, but .* ends at \d+"):
            models.load(tmp_path / "m.gguf", xp=np)


@pytest.mark.parametrize("depth", [1, 2, 100_000])
def test_lists_in_lists_are_refused(depth, tmp_path):
    path = tmp_path / "m.gguf"
    begin = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"x" + struct.pack("<I", 9)
    path.write_bytes(begin + depth * struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 4, 0))
    with pytest.raises(ValueError, match=r"m\.gguf.*a list of lists at byte"):
        models.load(path, xp=np)


def test_no_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(ValueError, match="does not begin with these letters"):
        models.load(path, xp=np)
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(NotImplementedError, match="GGUF of version 1"):
        models.load(path, xp=np)


def test_adapters_and_all_weights_of_a_file_are_written_as_a_folder(tmp_path, monkeypatch, capsys):
    """On the command line, with the tokenizer and the chat template of the file."""
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cupyattn.models.training.curve.draw", lambda *_: None)
    alphabet = [chr(each) for each in (*range(33, 127), *range(161, 173), *range(174, 256))]
    tokens = [*alphabet, *map(chr, range(256, 256 + 68)), "<end>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1] * 256 + [3], "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.chat_template": "{% for each in messages %}{{ each.content }}{% endfor %}",
    }  # fmt: skip
    tokens += ["ab"]
    metadata["tokenizer.ggml.token_type"] += [1]
    model = random("llama", vocab_size=258, hidden_size=64, intermediate_size=64)
    write_gguf(Path("m.gguf"), model, "llama", metadata=metadata, quantised=TYPE.Q4_0)
    Path("data.jsonl").write_text('{"text": "a fish ab swims"}\n' * 4)
    train = ["finetune", "m.gguf", "data.jsonl", "--batch-tokens", "64", "--steps", "2", "--cpu"]
    for options in (["--full"], ["--lora-targets", "q_proj", "--quantize", "file", "--out", "a"]):
        assert main([*train, *options]) == 0
    written = capsys.readouterr().err
    assert "of float32 weights to finetuned" in written
    given = ["--out", "merged", "--quantize", "file", "--cpu"]
    assert main(["merge", "m.gguf", "a", *given]) == 0
    assert "of float32 weights to merged" in capsys.readouterr().err
    base = models.load("m.gguf", xp=np)
    adapted = models.training.LoraAdapters.load(base, "a").model
    ids = base.tokenizer.encode("a fish ab swims<end>")
    assert 256 in ids and 257 in ids
    for folder in ("finetuned", "merged"):
        again = models.load(folder, xp=np)
        assert again.config == base.config
        assert again.tokenizer.encode("a fish ab swims<end>") == ids
        assert again.tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "x"
        assert np.abs(again.logits([ids]) - base.logits([ids])).max() > 0
    difference = np.abs(models.load("merged", xp=np).logits([ids]) - adapted.logits([ids]))
    assert difference.max() <= 1e-4
    assert json.loads(Path("merged/config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"type": "yarn", "factor": 4.0, "original_context_length": 40}, 160),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 10}, 40),
        ({"type": "linear", "factor": 2.0}, 80),
        ({"type": "linear", "factor": 2.0, "original_context_length": 20}, 40),
        ({"type": "none"}, 40),
    ],
)
def test_positions_reach_as_far_as_rotary_scaling(tmp_path, scaling, positions):
    """A window that is as long as these positions is none."""
    metadata = {f"llama.rope.scaling.{name}": value for name, value in scaling.items()}
    metadata["llama.attention.sliding_window"] = 40
    path = write_gguf(tmp_path / "m.gguf", random("llama"), "llama", metadata=metadata)
    found = opened(path).config
    assert found.max_positions == positions
    assert found.window_size == ((39, 0) if positions > 40 else None)


def test_an_unknown_tokenizer_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    model = models.random(TINY["llama"], dtype="float32", xp=np)
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "poro-chat",
        "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": ["a a"],
    }  # fmt: skip
    path = write_gguf(tmp_path / "m.gguf", model, "llama", metadata=metadata)
    monkeypatch.setattr(models.loading, "filled", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(NotImplementedError, match=r"m\.gguf: byte-level BPE .* 'poro-chat'; "):
        models.load(path, xp=np)


def test_a_chat_ends_with_a_token_that_the_template_alone_names(tmp_path, monkeypatch, capsys):
    """As <|eot_id|> in files of Llama 3, whose eos_token_id is <|end_of_text|>."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    prints = [chr(each) for each in (*range(33, 127), *range(161, 173), *range(174, 256))]
    tokens = [*prints, *map(chr, range(256, 256 + 68)), "<|end_of_text|>", "<|eot_id|>", "ab"]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 1], "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.chat_template": "{% for each in messages %}{{ each.content }}<|eot_id|>"
        "{% endfor %}",
    }  # fmt: skip
    model = random("llama", vocab_size=259)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", metadata=metadata)
    loaded = models.load(path, dtype="float32", xp=np)
    assert loaded.config.eos_ids == (256,) and loaded.tokenizer.end_ids == (256, 257)
    real = loaded.head
    steps = []

    def head(hidden):
        steps.append(len(hidden))
        logits = real(hidden)
        logits[:, 257 if len(steps) == 3 else 65] += 1e3
        return logits

    monkeypatch.setattr(loaded, "head", head)
    monkeypatch.setattr(models, "load", lambda *_, **__: loaded)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", str(path)]) == 0
    assert capsys.readouterr().out == "bb\n" and len(steps) == 3
