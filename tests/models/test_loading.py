"""Models are loaded from folders and files; any config gives a model or a clear error."""

from __future__ import annotations

import json
import shutil
import sys
import tracemalloc
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.archives import unpacked
from support.search import Search
from support.tiny_models import TINY

from cupyattn import models
from cupyattn.models.checkpoints import config_writing, copying, gguf, hugging_face
from cupyattn.models.checkpoints.fields import Fields
from cupyattn.models.tokenizer.byte_level import KINDS, byte_level
from cupyattn.models.tokenizer.text import rendered
from cupyattn.models.training.lora_options import LoraOptions
from cupyattn.models.weights import named_arrays

safetensors = pytest.importorskip("safetensors.numpy")

from support.tiny_models import tensors_of, write_folder  # noqa: E402

FOLDER = unpacked(Path(__file__).parent / "checkpoints.zip")


@pytest.fixture
def copy(tmp_path):
    """Copy a checkpoint, whose config may then be changed."""

    def copy(name: str, **config: object) -> Path:
        folder = shutil.copytree(FOLDER / name, tmp_path / name)
        path = folder / "config.json"
        given = {**json.loads(path.read_text()), **config}
        path.write_text(json.dumps({k: v for k, v in given.items() if v != "absent"}))
        return folder

    return copy


def rewrite(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.load_file(path)
    change(tensors)
    safetensors.save_file(tensors, path)


def refusal(folder, kind=ValueError, **options) -> str:
    with pytest.raises(kind) as caught:
        models.load(folder, xp=np, **options)
    assert str(caught.value).count("; ") >= 2  # what was passed, what is allowed, how to fix it
    return str(caught.value)


def test_by_default_numpy_arrays_are_float32():
    model = models.load(str(FOLDER / "phi"), xp=np)
    assert model.dtype == "float32" and model.xp is np
    assert model.weights.embedding.dtype == np.float32
    assert "phi: 2 layers" in repr(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
         "missing: model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"model.layers.1.self_attn.q_norm.weight": np.ones(8, np.float32)}),
         "unknown: model.layers.1.self_attn.q_norm.weight"),
        (lambda t: t.update({"model.norm.weight": np.ones((4, 4), np.float32)}),
         "misshapen: model.norm.weight is (4, 4), not (16,)"),
        (lambda t: t["lm_head.weight"].__setitem__(0, np.inf), "lm_head.weight holds inf"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(copy, change, message):
    folder = copy("mistral_older")
    rewrite(folder, change)
    assert message in refusal(folder)


def test_weights_of_a_wrong_type_or_size(copy):
    folder = copy("mistral_older")
    gate = "model.layers.1.mlp.gate_proj.weight"
    rewrite(folder, lambda t: t[gate].__setitem__(0, 1e6))
    assert f"{gate}: a product with it may be" in refusal(folder, dtype="float16")
    assert models.load(folder, dtype="bfloat16", xp=np).weights.layers[1].up.weight[0, 0] > 9e5
    rewrite(folder, lambda t: t.update({"model.norm.weight": np.ones(16, np.int8)}))
    assert "model.norm.weight is of I8" in refusal(folder, NotImplementedError)


def test_a_tied_head_in_the_file_must_equal_the_embedding(copy):
    folder = copy("qwen2")
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    models.load(folder, xp=np)
    rewrite(folder, lambda t: t["lm_head.weight"].__setitem__((3, 4), 0.5))
    assert "tie_word_embeddings" in refusal(folder)


def test_a_model_without_its_head_lacks_the_prefix(copy):
    folder = copy("qwen2")
    ids = [[1, 2, 3]]
    expected = models.load(folder, xp=np).logits(ids)

    def without_prefix(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(folder, without_prefix)
    np.testing.assert_array_equal(models.load(folder, xp=np).logits(ids), expected)


def test_buffers_in_the_file_are_no_weights(copy):
    folder = copy("llama_yarn")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda t: t.update({name: np.ones(2, np.float32)}))
    models.load(folder, xp=np)
    folder = copy("gpt2")
    rewrite(folder, lambda t: t.update({"transformer.h.0.attn.masked_bias": np.ones((), bool)}))
    models.load(folder, xp=np)


def index_of(text: str):
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


def copied_shard(folder: Path) -> None:
    shutil.copy(*sorted(folder.glob("*.safetensors")))


def renamed(name: str, new: str):
    return lambda folder: (folder / name).rename(folder / new)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed("model-00002-of-00002.safetensors", "other"), "00002.safetensors is missing"),
        (index_of('{"weight_map": {"a": "../phi/model.safetensors"}}'), "is not a file of the fol"),
        (index_of("{}"), "no weight_map"),
        (copied_shard, "is in another file of the folder too"),
        (renamed("model.safetensors.index.json", "pytorch_model.bin"),
         "pytorch_model.bin, but no safetensors"),
    ],
)  # fmt: skip
def test_shards_that_do_not_fit(copy, change, message):
    folder = copy("llama3")
    change(folder)
    assert message in refusal(folder)


def test_files_that_are_cut_short(copy):
    folder = copy("phi_older")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for length in (0, 5, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        assert "model.safetensors" in refusal(folder)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "\ud800", ".", ".."])
def test_an_index_names_a_file_that_cannot_be(copy, name):
    folder = copy("llama3")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    assert str(folder) in refusal(folder)


def test_a_model_is_loaded_without_stderr(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert models.load(FOLDER / "llama3", xp=np).config.num_layers


def test_folders_and_files_that_are_no_models(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert "there is no" in refusal(tmp_path / "nothing", FileNotFoundError)
    missing = refusal("some-org/Model-1.5", FileNotFoundError)
    assert missing.endswith(
        "; run: hf download some-org/Model-1.5, and pass 'some-org/Model-1.5' again"
    )
    assert str(tmp_path / "hub") in missing
    assert "hf download" not in refusal("model.ggu", FileNotFoundError)
    assert "neither model.safetensors nor" in refusal(tmp_path, FileNotFoundError)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "has no config.json" in refusal(tmp_path, FileNotFoundError)
    assert "with their folder" in refusal(tmp_path / "model.safetensors")
    assert "by its path" in refusal(3, TypeError)


HUB_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
COMMIT = "0f" * 20


def in_hub_cache(hub: Path, source: Path, name: str = "some-org/Model-1.5") -> Path:
    """Put a model into a cache as huggingface_hub does: links to blobs, and refs/main."""
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(source.iterdir()):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    return repository


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    for name in HUB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    return monkeypatch


@pytest.mark.parametrize(
    ("variable", "value", "hub"),
    [
        ("HF_HUB_CACHE", "cache", "cache"),
        ("HUGGINGFACE_HUB_CACHE", "cache", "cache"),
        ("HF_HOME", "home", "home/hub"),
        ("HF_HOME", "$PART/home", "part/home/hub"),
        ("XDG_CACHE_HOME", "xdg", "xdg/huggingface/hub"),
        (None, "", ".cache/huggingface/hub"),
    ],
)
def test_a_name_is_found_in_the_hub_cache(no_hub, tmp_path, variable, value, hub):
    no_hub.setenv("PART", "part")
    if variable is not None:
        no_hub.setenv(variable, f"{tmp_path}/{value}")
    in_hub_cache(tmp_path / hub, FOLDER / "phi")
    assert models.load("some-org/Model-1.5", xp=np).config.architecture == "phi"


def test_a_folder_wins_over_a_name_in_the_hub_cache(no_hub, tmp_path):
    in_hub_cache(tmp_path / ".cache/huggingface/hub", FOLDER / "phi")
    no_hub.chdir(tmp_path)
    (tmp_path / "some-org").mkdir()
    shutil.copytree(FOLDER / "gpt2", tmp_path / "some-org/Model-1.5")
    assert models.load("some-org/Model-1.5", xp=np).config.architecture == "gpt2"


def test_snapshots_of_the_hub_cache(no_hub, tmp_path):
    """The main revision counts; without one, the only one."""
    hub = tmp_path / "hub"
    no_hub.setenv("HF_HUB_CACHE", str(hub))
    repository = in_hub_cache(hub, FOLDER / "phi", "model")
    shutil.copytree(FOLDER / "gpt2", repository / "snapshots" / "1a")
    assert models.load("model", xp=np).config.architecture == "phi"
    (repository / "refs" / "main").unlink()
    assert "there is no 'model', nor" in refusal("model", FileNotFoundError)
    shutil.rmtree(repository / "snapshots" / COMMIT)
    assert models.load("model", xp=np).config.architecture == "gpt2"
    (repository / "snapshots" / "1a" / "model.safetensors").unlink()
    missing = refusal("model", FileNotFoundError)
    assert "not complete" in missing and missing.endswith(
        "run: hf download model, and pass 'model' again"
    )
    for commit in ("../../1a", "", "x" * 1000):
        (repository / "refs" / "main").write_text(commit)
        assert str(repository / "refs" / "main") in refusal("model")
    for name in ("../model", "a/b/c", "a\0b", "models--model/", "-model"):
        assert "there is no" in refusal(name, FileNotFoundError)


def test_a_snapshot_of_gguf_may_have_a_config(no_hub, tmp_path):
    pytest.importorskip("gguf")
    from support.gguf_files import write_gguf

    no_hub.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = in_hub_cache(tmp_path / "hub", FOLDER / "phi", "model")
    snapshot = repository / "snapshots" / COMMIT
    (snapshot / "model.safetensors").unlink()
    assert (snapshot / "config.json").exists()
    write_gguf(snapshot / "m.gguf", models.random(TINY["qwen2"], dtype="float32", xp=np), "qwen2")
    assert models.load("model", xp=np).config.qkv_bias


def test_adapters_are_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert f"--adapters {tmp_path}" in refusal(tmp_path)


def test_a_folder_named_smollm2_wins(copy, monkeypatch):
    folder = copy("phi")
    monkeypatch.chdir(folder.parent)
    folder.rename("smollm2")
    assert models.load("smollm2", xp=np).config.architecture == "phi"


def test_progress_is_a_counter_on_a_terminal_and_nothing_in_a_pipe(monkeypatch, capsys):
    """Both without rich; a short load in a pipe does not get as far as its first line."""
    monkeypatch.setattr("cupyattn.runtime.progress.has_rich", lambda: False)
    models.load(FOLDER / "phi", xp=np)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    models.load(FOLDER / "phi", xp=np)
    shown = capsys.readouterr()
    total = len(safetensors.load_file(FOLDER / "phi" / "model.safetensors"))
    assert shown.out == ""
    steps = [f"loading tensors {done}/{total}" for done in range(1, total + 1)]
    assert shown.err.strip().split("\r") == steps


@pytest.mark.parametrize("text", ["{", "[]", "\ufeff", "[" * 100_000])
def test_a_config_that_is_no_json(copy, text):
    folder = copy("gpt2")
    (folder / "config.json").write_text(text, encoding="utf-8")
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("llama3", {"model_type": "gemma"}, "'gemma'; forwards exist for GPT-2"),
        *(("llama3", {"model_type": kind}, f"{kind!r}, a mixture of experts; forwards exist")
          for kind in ("mixtral", "qwen3_moe", "gpt_oss", "phimoe", "deepseek_v3")),
        ("llama3", {"model_type": "gemma3", "text_config": {"model_type": "gemma3n_text"}},
         "text_config: the architecture 'gemma3n_text'; forwards exist"),
        ("llama3", {"model_type": "gemma4", "text_config": {"num_kv_shared_layers": 18}},
         "Gemma 4 with an embedding for each layer (hidden_size_per_layer_input), layers that "
         "share keys and values (num_kv_shared_layers); there is code"),
        ("llama3", {"model_type": "gemma4_unified_text", "enable_moe_block": True},
         "Gemma 4 with a mixture of experts (enable_moe_block); there is code"),
        ("llama3", {"model_type": "absent"}, "None; forwards exist for GPT-2"),
        ("llama3", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
         "'proportional'; there is code for 'default', 'linear', 'llama3', 'yarn', 'longrope'"),
        ("llama_older", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama_yarn", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0,
                                            "truncate": False}}, "truncate is False"),
        ("llama3", {"head_dim": 520}, "head_dim = 520; attention has kernels for head dims up to"),
        ("llama3", {"hidden_act": "relu"}, "hidden_act is 'relu'; there is code for 'gelu'"),
        ("llama3", {"quantization_config": {"bits": 4}}, "quant_method is None"),
        ("llama3", {"rope_interleaved": True}, "rope_interleaved is True; there is code for False"),
        ("gpt2", {"activation_function": "mish"}, "activation_function is 'mish'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8,
                   "layer_types": ["full_attention", "chunked_attention"]},
         "layer_types is 'chunked_attention'; there is code for 'sliding_attention', 'full"),
        ("llama3", {"model_type": "gemma2", "use_bidirectional_attention": True},
         "use_bidirectional_attention is True"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm is True"),
    ],
)  # fmt: skip
def test_traits_without_code(copy, name, config, message):
    assert message in refusal(copy(name, **config), NotImplementedError)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": "absent"}, "it has no hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 3}, "missing: model.layers.2."),
        ({"num_hidden_layers": 10**9}, "num_layers = 1000000000"),
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776"),
        ({"num_key_value_heads": 3}, "num_heads = 4, num_kv_heads = 3"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "it has no factor"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be(copy, config, message):
    assert message in refusal(copy("llama3", **config))


def test_ends_of_text_are_those_of_both_configs(copy):
    folder = copy("llama3")
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert models.load(folder, xp=np).config.eos_ids == (2, 3, 5)


@pytest.mark.parametrize(
    ("value", "ids"), [(-1, (3,)), ([-1], (3,)), ([5, -1], (5, 3)), (2**32 - 1, (3,))]
)
def test_minus_one_is_no_end_of_text(copy, value, ids):
    folder = copy("llama3", eos_token_id=value, bos_token_id=-1)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, -1]}')
    config = models.load(folder, xp=np).config
    assert (config.bos_id, config.eos_ids) == (None, ids)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("given", "scaling", "positions"),
    [
        (64, {**YARN, "original_max_position_embeddings": 64}, 256),
        (64, {**YARN, "original_max_position_embeddings": 16}, 64),
        (64, {**YARN, "original_max_position_embeddings": 32, "factor": 2.5}, 80),
        (64, YARN, 256),
        (64, {"type": "linear", "factor": 4.0}, 256),
        (64, {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        (4096, {"type": "linear", "factor": 64.0}, 131072),
        (200_000, {"type": "linear", "factor": 8.0}, 200_000),
        (64, {"rope_type": "default"}, 64),
        (64, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 16}, 64),
    ],
)  # fmt: skip
def test_positions_reach_as_far_as_rotary_scaling(copy, given, scaling, positions):
    """Configs may keep the length from before it: factor times that length is accepted."""
    folder = copy("llama_older", max_position_embeddings=given, rope_scaling=scaling)
    config = hugging_face.open_folder(folder).config
    assert config.max_positions == positions
    written = config_writing.config_json(config, "m")
    again = hugging_face.config_of(Fields(written, "m"), Fields({}, "m"))
    assert again == config
    if positions == 256:
        model = models.load(folder, xp=np)
        prompt = [1 + at % 30 for at in range(200)]
        assert len(model.generate(prompt, max_new_tokens=2)[0]) <= 2
        with pytest.raises(ValueError, match=r"the model has 256 positions"):
            model.generate([1] * 257, max_new_tokens=1)


@pytest.mark.parametrize("at_once", [1, 64, 1000])
def test_weights_are_read_in_pieces_of_any_size(monkeypatch, at_once):
    ids = [[1, 2, 3]]
    expected = {name: models.load(FOLDER / name, xp=np).logits(ids) for name in ("gpt2", "llama3")}
    monkeypatch.setattr(copying, "_AT_ONCE", at_once)
    for name, logits in expected.items():
        np.testing.assert_array_equal(models.load(FOLDER / name, xp=np).logits(ids), logits)


def test_loading_takes_the_memory_of_the_model(tmp_path, monkeypatch):
    """Loading reads pieces of a tensor, never a whole file or a whole model."""
    config = TINY["llama"]._replace(vocab_size=20_000, hidden_size=64, intermediate_size=4000)
    model = models.random(config, dtype="float16", xp=np)
    write_folder(tmp_path, config, tensors_of(model))
    monkeypatch.setattr(copying, "_AT_ONCE", 1 << 14)
    tracemalloc.start()
    try:
        loaded = models.load(tmp_path, dtype="float32", xp=np)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(loaded.logits([[5, 6]]), model_of(model, "float32", [[5, 6]]))
    assert peak < 1.1 * loaded.nbytes


def model_of(model, dtype, ids):
    """The logits of the same weights, wider."""
    twin = models.random(model.config, dtype=dtype, xp=np)
    arrays = zip(named_arrays(twin.weights), named_arrays(model.weights), strict=True)
    for (_, wide), (_, narrow) in arrays:
        wide[...] = narrow
    return twin.logits(ids)


@pytest.mark.parametrize("module", ["safetensors", "gguf", "tokenizers", "jinja2", "regex"])
def test_an_extra_that_is_not_installed_is_named(tmp_path, module, monkeypatch):
    for name in [each for each in sys.modules if each.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    # One tensor, so that the file gets as far as asking what dequantises it.
    info = b"\x01" + bytes(7) + b"t" + b"\x01\0\0\0" + b"\x01" + bytes(7) + bytes(12)
    counts = b"\x03\0\0\0\x01" + bytes(7) + bytes(8)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + counts + info + bytes(64))
    use = {
        "safetensors": lambda: models.load(FOLDER / "gpt2", xp=np),
        "gguf": lambda: models.load(tmp_path / "m.gguf", xp=np),
        "tokenizers": lambda: byte_level({"a": 0}, [], KINDS["gpt-2"]),
        "jinja2": lambda: rendered("a template"),
        "regex": lambda: LoraOptions(targets="no (module)? of .*this name").checked(),
    }[module]
    with pytest.raises(
        RuntimeError, match=rf"no {module}, which .*pip install 'cupyattn\[models\]'"
    ):
        use()


NAMES = sorted(path.name for path in FOLDER.iterdir())
BAD = [None, "", "x", [], {}, [[]], -1, 0, 1.5, True, float("inf"), float("nan"), 10**400]
GGUF = {"gpt2": "gpt2", "llama": "llama", "qwen2": "qwen2", "phi": "phi2"}
OF_ROPE = (
    "attention_factor", "beta_fast", "beta_slow", "mscale", "partial_rotary_factor", "truncate",
    "type",
)  # fmt: skip
STRIDE = 1 if Search.deep else 11  # no divisor of the number of values: each key has another one


class Recording(dict):
    """Notes which keys were asked for."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def paths_of(given: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in given.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in paths_of(value))


def with_value(given: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = inner = deepcopy(given)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def raw_error(load, path: Path) -> str | None:
    """Return what is wrong with an error, if one arises."""
    try:
        load()
    except Exception as failure:
        text = str(failure)
        ours = type(failure) in (ValueError, TypeError, NotImplementedError)
        if not (ours and text.count("; ") >= 2 and str(path) in text):
            return f"{type(failure).__name__}: {text}"
    return None


def raw_errors(given, asked, path: Path, load) -> list[str]:
    """Load with every value in the place of every key that there is, or that is asked for."""
    rope = [("rope_parameters", key) for key in OF_ROPE if "rope_parameters" in given]
    places = sorted({*paths_of(given), *((key,) for key in asked), *rope})
    assert len(places) > 15
    cases = [(place, value) for place in places for value in BAD][::STRIDE]
    found = []
    for place, value in cases:
        raw = raw_error(partial(load, with_value(given, place, value)), path)
        if raw is not None:
            found.append(f"{place} = {str(value)[:9]}: {raw}")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_values_of_config_json(monkeypatch, name):
    folder = FOLDER / name
    path = folder / "config.json"
    given = json.loads(path.read_text())
    real, asked = hugging_face.read_object, Recording(given)

    def load(config):
        monkeypatch.setattr(
            hugging_face, "read_object", lambda file: config if file == path else real(file)
        )
        return models.load(folder, xp=np)

    load(asked)
    assert raw_errors(given, asked.asked, folder, load) == []


@pytest.mark.parametrize("value", BAD, ids=lambda value: str(value)[:9])
def test_values_of_generation_config_json(monkeypatch, value):
    real = hugging_face.read_object
    path = FOLDER / "llama3" / "generation_config.json"
    given = {"eos_token_id": value}
    monkeypatch.setattr(
        hugging_face, "read_object", lambda file: given if file == path else real(file)
    )
    assert path.is_file()
    assert raw_error(lambda: models.load(path.parent, xp=np), path) is None


@pytest.mark.parametrize("name", GGUF)
def test_values_of_gguf_metadata(tmp_path, monkeypatch, name):
    pytest.importorskip("gguf")
    from support.gguf_files import write_gguf

    model = models.random(TINY[name], dtype="float32", xp=np)
    ids = {"tokenizer.ggml.eos_token_id": 2}
    path = write_gguf(tmp_path / "m.gguf", model, GGUF[name], metadata=ids)
    file = gguf.read_gguf(path)
    asked = Recording(file.metadata)

    def load(metadata):
        monkeypatch.setattr(gguf, "read_gguf", lambda path: file._replace(metadata=metadata))
        return models.load(path, xp=np)

    for scaling in ("yarn", "linear"):
        asked[f"{GGUF[name]}.rope.scaling.type"] = scaling
        load(asked)
    assert raw_errors(dict(asked), asked.asked, path, load) == []
