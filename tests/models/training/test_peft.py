"""Adapters that PEFT wrote, with torch's gradients of them; and those that are written here."""

from __future__ import annotations

import errno
import json
import re
import shutil
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
from support.archives import unpacked
from support.tiny_models import TINY, config_of, expected_of
from support.training import adapters_of, batch_of, converted, gradients_of, model_of

from cupyattn import QuantizedWeight, dequantize, models
from cupyattn.models.checkpoints.contents import HUGGING_FACE, modules_of
from cupyattn.models.checkpoints.writing import write_folder
from cupyattn.models.training import peft
from cupyattn.models.training.batches import Batch, Packing, Sample
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.training.optimizer import Schedule
from cupyattn.models.training.trainable import config_fingerprint
from cupyattn.models.training.trainer import Trainer

FOLDER = unpacked(Path(__file__).parent / "adapters.zip")
EXPECTED = Path(__file__).parent / "expected.npz"
CHECKPOINTS = unpacked(Path(__file__).parents[1] / "checkpoints.zip")
NAMES = sorted(path.name for path in FOLDER.iterdir())
PREFIX = "base_model.model."

pytest.importorskip("safetensors")
from safetensors.numpy import load_file, save_file  # noqa: E402


def dense(weight):
    return dequantize(weight) if isinstance(weight, QuantizedWeight) else weight


def packed(ids):
    batch, length = ids.shape
    labels = np.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    positions = np.tile(np.arange(length, dtype=np.int32), batch)
    bounds = np.arange(0, ids.size + 1, length, np.int32)
    return Batch(ids.reshape(-1), labels.reshape(-1), positions, bounds, length)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_torch(name):
    """Norms of transformers are float32 also in a model of float64."""
    expected = expected_of(EXPECTED, name)
    ids, losses = expected.pop("ids"), expected.pop("losses")
    model = converted(models.load(CHECKPOINTS / name, dtype="float32", xp=np))
    adapters = LoraAdapters.load(model, FOLDER / name, dropout=0.0)
    for row, loss in zip(ids, losses, strict=True):
        assert abs(adapters.model.loss(row[None]) - loss) < 1e-6
    loss, gradients = gradients_of(adapters, packed(ids))
    assert loss == pytest.approx(losses.mean(), abs=1e-6)
    assert expected.keys() == {PREFIX + name for name in gradients}
    for key, gradient in gradients.items():
        wanted = expected[PREFIX + key]
        assert np.abs(gradient - wanted).max() <= 1e-4 * np.abs(wanted).max(), key
        assert np.abs(wanted).max() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read(name, tmp_path):
    model = models.load(CHECKPOINTS / name, dtype="float32", xp=np)
    adapters = LoraAdapters.load(model, FOLDER / name)
    adapters.save(tmp_path / "new" / "folder", base_model=name)
    again = LoraAdapters.load(model, tmp_path / "new" / "folder")
    assert again.options == adapters.options
    assert again.arrays.keys() == adapters.arrays.keys()
    for key, array in adapters.arrays.items():
        np.testing.assert_array_equal(array, again.arrays[key])
    ours, theirs = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (tmp_path / "new" / "folder", FOLDER / name)
    )
    differing = {key for key, value in ours.items() if value != theirs[key]}
    assert differing <= {"lora_dropout"}
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@pytest.mark.parametrize("name", TINY)
def test_all_linear_is_written_by_its_names(name, tmp_path):
    adapters = LoraAdapters(model_of(TINY[name], "float32"), rank=2)
    adapters.save(tmp_path)
    targets = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert targets == {
        "gpt2": ["c_attn", "c_fc", "c_proj"],
        "phi": ["dense", "fc1", "fc2", "k_proj", "q_proj", "v_proj"],
        "phi3": ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"],
    }.get(name, ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"])
    again = LoraAdapters.load(model_of(TINY[name], "float32"), tmp_path)
    assert again.arrays.keys() == adapters.arrays.keys()


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(FOLDER / "llama3", tmp_path / "adapters")


@pytest.fixture(scope="module")
def llama():
    return models.load(CHECKPOINTS / "llama3", dtype="float32", xp=np)


def change(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"use_dora": True}, ValueError, "they have 0 magnitudes, and use_dora is True"),
        ({"use_dora": 1}, ValueError, "use_dora is 1, which is not true or false"),
        ({"bias": "all"}, NotImplementedError, "bias is 'all'"),
        ({"modules_to_save": ["norm"]}, NotImplementedError, "modules_to_save has norm; there is "),
        ({"modules_to_save": ["lm_head"]}, ValueError, "missing: lm_head.weight of modules_to_sa"),
        ({"modules_to_save": "lm_head"}, ValueError, "modules_to_save is 'lm_head', not a list"),
        ({"trainable_token_indices": [1]}, NotImplementedError, "trainable_token_indices is"),
        ({"peft_type": "IA3"}, NotImplementedError, "peft_type is 'IA3'"),
        ({"task_type": "SEQ_CLS"}, NotImplementedError, "task_type is 'SEQ_CLS'"),
        ({"init_lora_weights": "pissa"}, NotImplementedError, "init_lora_weights is 'pissa'"),
        ({"layers_to_transform": [0]}, ValueError, r"unknown: model.layers.1"),
        ({"layers_to_transform": 0}, ValueError, r"unknown: model.layers.1"),
        ({"layers_to_transform": 7}, ValueError, "name no module of this model in the layers 7"),
        ({"layers_to_transform": ["0"]}, ValueError, r"layers_to_transform = \['0'\]"),
        ({"layers_to_transform": [0], "target_modules": ".*proj"}, ValueError, "layers are chosen"),
        ({"layers_to_transform": [0, 1], "layers_pattern": ["h"]}, ValueError, "name no module"),
        ({"layers_pattern": "l.*"}, NotImplementedError, "layers_pattern = 'l"),
        ({"layers_pattern": 5}, NotImplementedError, "layers_pattern = 5; .*pass names without a"),
        ({"of_tomorrow": 3}, NotImplementedError, "of_tomorrow is 3"),
        ({"lora_bias": True}, NotImplementedError, "lora_bias is True"),
        ({"r": 0}, ValueError, "r is 0"),
        ({"r": None}, ValueError, "it has no r"),
        ({"lora_alpha": "8"}, ValueError, "lora_alpha is '8'"),
        ({"lora_dropout": 1.5}, ValueError, "dropout = 1.5"),
        ({"rank_pattern": {"q_proj": "2"}}, ValueError, "q_proj = '2'"),
        ({"rank_pattern": {"q_proj": 3}}, ValueError, r"misshapen: .*q_proj.lora_A"),
        ({"alpha_pattern": {"(": 2}}, ValueError, r"the pattern '\('"),
        ({"target_modules": 3}, ValueError, "targets = 3"),
        ({"target_modules": ["w_proj", "x_proj"]}, ValueError, "'w_proj', 'x_proj' name no module"),
        ({"target_modules": ["q_proj"]}, ValueError, r"unknown: .*down_proj.* and 5 more"),
        ({"target_modules": "all-linear"}, ValueError, r"missing: .*k_proj.*"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(llama, folder, fields, kind, message):
    change(folder, **fields)
    with pytest.raises(kind, match=message):
        LoraAdapters.load(llama, folder)


def test_patterns_without_a_module_are_passed_over(llama, folder):
    """As PEFT does: they change nothing, and are no sign of another model."""
    before = LoraAdapters.load(llama, folder)
    idle = {"lm_head": 7, "o_proj|k_proj": 3}
    change(folder, rank_pattern=idle, alpha_pattern=idle)
    again = LoraAdapters.load(llama, folder)
    assert again.options == before.options
    for name, array in before.arrays.items():
        np.testing.assert_array_equal(array, again.arrays[name])


def test_adapters_of_another_model(folder, llama):
    other = models.random(llama.config._replace(hidden_size=24), dtype="float32", xp=np)
    with pytest.raises(ValueError, match=r"do not fit the model: misshapen: .*\(2, 16\), not \(2"):
        LoraAdapters.load(other, folder)
    with pytest.raises(ValueError, match="'q_proj', 'v_proj' name no module"):
        LoraAdapters.load(models.load(CHECKPOINTS / "gpt2", dtype="float32", xp=np), folder)
    fewer = models.random(llama.config._replace(num_layers=1), dtype="float32", xp=np)
    with pytest.raises(ValueError, match=r"unknown: model.layers.1"):
        LoraAdapters.load(fewer, folder)


def test_adapters_of_a_model_of_the_same_shapes(folder, llama, tmp_path):
    """Files of `save` identify their model; files of PEFT have at most its name."""
    other = models.load(CHECKPOINTS / "qwen2", dtype="float32", xp=np)
    with pytest.warns(UserWarning, match=r"adapters of 'llama3' beside '.*qwen2'; they add to"):
        theirs = LoraAdapters.load(other, folder, base_model=str(CHECKPOINTS / "qwen2"))
    for named in (CHECKPOINTS / "llama3", "Meta/Llama3/snapshots/1", "llama3.gguf", None):
        LoraAdapters.load(llama, folder, base_model=named and str(named))
    theirs.save(tmp_path / "ours")
    LoraAdapters.load(other, tmp_path / "ours", base_model="anywhere")
    with pytest.raises(ValueError, match=r"do not fit the model: they are of another llama \("):
        LoraAdapters.load(llama, tmp_path / "ours")


def made_of(config, *, seed, dtype="float32", quantize=None):
    return models.random(config, dtype=dtype, quantize=quantize, xp=np, seed=seed)


BESIDE = ({}, {"dtype": "float16"}, {"quantize": "int8"})


@pytest.mark.parametrize("kept", BESIDE)
@pytest.mark.parametrize("name", ["one", None])
def test_adapters_of_other_weights_of_the_same_shapes(kept, name, tmp_path):
    """Whatever the model is called; the same weights pass in another dtype, or quantised."""
    config = TINY["llama"]._replace(intermediate_size=64)
    LoraAdapters(made_of(config, seed=1, **kept), rank=2).save(tmp_path, base_model=name)
    for as_well in BESIDE:
        LoraAdapters.load(made_of(config, seed=1, **as_well), tmp_path, base_model=name)
    of = re.escape(repr(name) if name else "a model")
    for other in ("two", "one", None):
        shown = repr(other) if other else "a model"
        message = f"adapters of {of} beside {shown}, of other weights; they add to the weights that"
        with pytest.warns(UserWarning, match=message) as caught:
            LoraAdapters.load(made_of(config, seed=2, **kept), tmp_path, base_model=other)
        assert [each.filename for each in caught] == [__file__]


def test_adapters_of_another_model_in_another_dtype(tmp_path):
    """Only the names are compared."""
    config = TINY["llama"]
    LoraAdapters(made_of(config, seed=1), rank=2).save(tmp_path, base_model="a/one")
    other = made_of(config, seed=2, dtype="float16")
    with pytest.warns(UserWarning, match=r"adapters of 'a/one' beside 'b/two'; they add to the"):
        LoraAdapters.load(other, tmp_path, base_model="b/two")


def test_files_of_the_same_model_have_one_fingerprint(llama):
    """A GGUF file of a model has float32 numbers, other ends and no window."""
    config = llama.config
    same = config._replace(
        norm_eps=float(np.float32(config.norm_eps)), rope_base=float(np.float32(config.rope_base)),
        eos_ids=(7,), bos_id=None, max_positions=9, vocab_size=99, tied=not config.tied,
    )  # fmt: skip
    assert config_fingerprint(same) == config_fingerprint(config)
    others = (
        {"num_heads": 2},
        {"rope_base": 1e4},
        {"norm_eps": 1e-5},
        {"qkv_bias": True},
        {"activation": "geglu"},
        {"architecture": "phi"},
    )
    found = {config_fingerprint(config._replace(**other)) for other in (*others, {})}
    assert len(found) == len(others) + 1


def test_files_that_are_missing_or_damaged(folder, llama):
    tensors = folder / "adapter_model.safetensors"
    whole = tensors.read_bytes()
    for cut in (0, 7, 300, len(whole) - 1):
        tensors.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="no safetensors"):
            LoraAdapters.load(llama, folder)
    nan = bytearray(whole)
    nan[-2:] = b"\xff\x7f"
    tensors.write_bytes(nan)
    with pytest.raises(ValueError, match="is not finite"):
        LoraAdapters.load(llama, folder)
    tensors.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no adapter_model.safetensors"):
        LoraAdapters.load(llama, folder)
    (folder / "adapter_config.json").write_text("{")
    tensors.write_bytes(whole)
    with pytest.raises(ValueError, match="no JSON"):
        LoraAdapters.load(llama, folder)


def test_a_rank_that_the_tensors_have_not_takes_no_memory(folder, llama):
    """Matrices of that rank would take 100 MB here, and 100 GB of a larger model."""
    change(folder, r=1 << 16)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"misshapen: .*lora_A.weight is .*, and its rank 655"):
            LoraAdapters.load(llama, folder)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_config_that_is_nested_too_deeply_is_named(folder, llama):
    (folder / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"adapter_config\.json: no JSON that is read: it is nes"):
        LoraAdapters.load(llama, folder)


def test_a_full_disk_leaves_the_old_files(folder, llama, monkeypatch):
    adapters = LoraAdapters.load(llama, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for array in adapters.arrays.values():
        array += 1

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(peft, "store", full)
    with pytest.raises(OSError, match="No space left") as raised:
        adapters.save(folder)
    assert "older adapters are as they were" in str(raised.value)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    adapters.save(folder)
    again = LoraAdapters.load(llama, folder)
    for key, array in adapters.arrays.items():
        np.testing.assert_array_equal(array, again.arrays[key])


def test_gradients_and_masters_are_float32(llama):
    adapters = LoraAdapters(models.random(llama.config, dtype="float16", xp=np), rank=2)
    _, gradients = gradients_of(adapters, batch_of(llama.config))
    assert {array.dtype.name for array in (*gradients.values(), *adapters.arrays.values())} == {
        "float32"
    }


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_peft_reads_what_is_written(name, tmp_path):
    theirs = pytest.importorskip("peft", reason="no peft: it read such files when its were made")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = models.load(CHECKPOINTS / name, dtype="float32", xp=np)
    adapters = LoraAdapters.load(model, FOLDER / name)
    adapters.save(tmp_path)
    ids = expected_of(EXPECTED, name)["ids"]
    base = transformers.AutoModelForCausalLM.from_pretrained(
        CHECKPOINTS / name, dtype=torch.float32
    )
    with torch.no_grad():
        adapted = theirs.PeftModel.from_pretrained(base, tmp_path)
        expected = adapted(torch.from_numpy(ids).long()).logits.numpy()
    np.testing.assert_allclose(adapters.model.logits(ids), expected, atol=2e-5)


LLAMA_NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_targets_that_a_model_lacks_are_passed_over(tmp_path):
    """The seven names of Llama with Phi, which has three of them: PEFT trains and loads these."""
    model = model_of(TINY["phi"], "float32")
    with pytest.warns(
        UserWarning, match="targets 'o_proj', 'gate_proj', 'up_proj', 'down_proj' ar"
    ):
        adapters = LoraAdapters(model, rank=2, targets=LLAMA_NAMES)
    assert {name.split(".")[-3] for name in adapters.arrays} == set(LLAMA_NAMES[:3])
    adapters.save(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == sorted(
        LLAMA_NAMES
    )
    again = LoraAdapters.load(model, tmp_path)  # and no warning, which would be an error
    assert again.arrays.keys() == adapters.arrays.keys()
    assert again.options.targets == ("k_proj", "q_proj", "v_proj")


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"layers_to_transform": [1]}, {"1"}),
        ({"layers_to_transform": 0}, {"0"}),
        ({"layers_to_transform": [0, 7], "layers_pattern": "layers"}, {"0"}),
        ({"layers_to_transform": (1,), "targets": "all-linear"}, {"1"}),
        ({"layers_to_transform": 0, "targets": ["model.layers.1.mlp.up_proj", "q_proj"]},
         {"0", "1"}),
        ({"layers_to_transform": []}, {"0", "1"}),
    ],
)  # fmt: skip
def test_layers_with_adapters_are_chosen(options, layers, tmp_path):
    model = model_of(TINY["llama"], "float32")
    adapters = LoraAdapters(model, **{"rank": 2, "targets": ["q_proj"], **options})
    assert {name.split(".")[2] for name in adapters.arrays} == layers
    adapters.save(tmp_path)
    again = LoraAdapters.load(model, tmp_path)
    assert again.arrays.keys() == adapters.arrays.keys()
    adapters.save(tmp_path / "again")
    config = "adapter_config.json"
    assert (tmp_path / config).read_text() == (tmp_path / "again" / config).read_text()


def add_tensors(folder, tensors):
    """Write a file of adapters, as PEFT does, that has these tensors too."""
    path = folder / "adapter_model.safetensors"
    old = load_file(path)
    save_file({**old, **{PREFIX + name: array for name, array in tensors.items()}}, path)


def normal(*shape):
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape, np.float32)


ENDS = {"llama": ("lm_head", "model.embed_tokens"), "gpt2": ("lm_head", "transformer.wte")}


@pytest.fixture(params=ENDS)
def with_ends(request, tmp_path):
    """A model, a folder of its adapters, and the names of its head and its embedding."""
    model = model_of(TINY[request.param], "float32")
    adapters_of(model, targets=["q_proj" if request.param == "llama" else "c_attn"]).save(tmp_path)
    return model, tmp_path, *ENDS[request.param]


def expected_logits(folder, model, embedding, head):
    """Those of the adapters alone, with another embedding and another head."""
    weights = model.weights._replace(
        embedding=embedding, head=model.weights.head._replace(weight=head)
    )
    plain = {name: a for name, a in load_file(folder / "adapter_model.safetensors").items()
             if "layers" in name or ".h." in name}  # fmt: skip
    adapters = adapters_of(
        model.with_weights(weights), targets=sorted({n.split(".")[-3] for n in plain})
    )
    for name, array in adapters.arrays.items():
        array[...] = plain[PREFIX + name]
    adapters.updated()
    return adapters.model.logits([[3, 1, 4, 1, 5]])


def test_adapters_of_head_and_embedding_are_merged(with_ends, tmp_path):
    """Also where one array is both: each has its own afterwards, as in PEFT."""
    model, folder, head, embedding = with_ends
    (rows, width), table, weight = (
        model.weights.embedding.shape, model.weights.embedding, model.weights.head.weight
    )  # fmt: skip
    given = {
        f"{head}.lora_A.weight": normal(3, width), f"{head}.lora_B.weight": normal(rows, 3),
        f"{embedding}.lora_embedding_A": normal(3, rows),
        f"{embedding}.lora_embedding_B": normal(width, 3),
        f"{head}.base_layer.weight": weight, f"{embedding}.base_layer.weight": table,
    }  # fmt: skip
    add_tensors(folder, given)
    targets = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    change(folder, target_modules=[*targets, "lm_head", embedding.split(".")[1]])
    adapters = LoraAdapters.load(model, folder)
    added = [
        given[f"{head}.lora_B.weight"] @ given[f"{head}.lora_A.weight"],
        (given[f"{embedding}.lora_embedding_B"] @ given[f"{embedding}.lora_embedding_A"]).T,
    ]
    expected = expected_logits(folder, model, table + 4 / 3 * added[1], weight + 4 / 3 * added[0])
    for found in (adapters.model, adapters.merged()):
        np.testing.assert_allclose(found.logits([[3, 1, 4, 1, 5]]), expected, atol=1e-4, rtol=1e-5)
    assert not adapters.model.config.tied
    assert all("layers" in name or ".h." in name for name in adapters.arrays)  # these are trained
    adapters.save(tmp_path / "again")
    again = LoraAdapters.load(model, tmp_path / "again").model.logits([[3, 1, 4, 1, 5]])
    np.testing.assert_array_equal(again, adapters.model.logits([[3, 1, 4, 1, 5]]))


@pytest.mark.parametrize("saved", [["lm_head"], ["embed"], ["lm_head", "embed"]])
def test_whole_weights_replace_those_of_the_model(saved, with_ends, tmp_path):
    model, folder, head, embedding = with_ends
    rows, width = model.weights.embedding.shape
    names = [head if each == "lm_head" else embedding for each in saved]
    given = {f"{name}.weight": normal(rows, width) + i for i, name in enumerate(names)}
    add_tensors(folder, given)
    change(folder, modules_to_save=[name.split(".")[-1] for name in names])
    adapters = LoraAdapters.load(model, folder)
    expected = expected_logits(
        folder, model, given.get(f"{embedding}.weight", model.weights.embedding),
        given.get(f"{head}.weight", model.weights.head.weight),
    )  # fmt: skip
    np.testing.assert_array_equal(adapters.model.logits([[3, 1, 4, 1, 5]]), expected)
    merged, source = adapters.merged(), tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config_of(model.config)))
    write_folder(merged.weights, merged.config, source, tmp_path / "merged")
    loaded = models.load(tmp_path / "merged", dtype="float32", xp=np)
    np.testing.assert_array_equal(
        loaded.logits([[3, 1, 4, 1, 5]]), merged.logits([[3, 1, 4, 1, 5]])
    )
    other = model_of(model.config._replace(vocab_size=rows + 1), "float32")
    with pytest.raises(ValueError, match=r"misshapen: .*weight is"):
        LoraAdapters.load(other, folder)


def test_one_array_that_is_saved_twice_is_one_array(tmp_path):
    """PEFT writes both where the vocabulary might have changed."""
    model = model_of(TINY["gpt2"], "float32")
    adapters_of(model, targets=["c_attn"]).save(tmp_path)
    table = normal(*model.weights.embedding.shape)
    add_tensors(tmp_path, {"transformer.wte.weight": table, "lm_head.weight": table})
    found = LoraAdapters.load(model, tmp_path).model
    assert found.config.tied and found.weights.head.weight is found.weights.embedding
    np.testing.assert_array_equal(found.weights.embedding, table)


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi"])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_dora_is_merged(name, quantize, tmp_path):
    """Each row of W + s B A has the length of the magnitude vector (PEFT's forward, by modules)."""
    config = TINY[name]._replace(intermediate_size=64)
    model = models.random(config, dtype="float32", quantize=quantize, xp=np, seed=4)
    targets = ["c_attn", "c_fc"] if name == "gpt2" else ["k_proj", "v_proj", "fc1", "up_proj"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora = adapters_of(model, targets=targets)
    lora.save(tmp_path)
    modules = {
        each.rpartition(".lora_")[0]: len(a) for each, a in lora.arrays.items() if "_B" in each
    }
    lengths = {each: 1 + np.abs(normal(rows)) for each, rows in modules.items()}
    add_tensors(tmp_path, {f"{each}.lora_magnitude_vector": a for each, a in lengths.items()})
    change(tmp_path, use_dora=True)
    dora = LoraAdapters.load(model, tmp_path)
    naming, changed = HUGGING_FACE[config.architecture], 0
    for index, (plain, found) in enumerate(
        zip(lora.merged().weights.layers, dora.model.weights.layers, strict=True)
    ):
        for field, parts in modules_of(naming, config, index, plain).items():
            for module, rows in parts:
                wanted = dense(getattr(plain, field).weight)[rows]
                if module in lengths:
                    norms = np.linalg.norm(wanted.astype(np.float64), axis=1)
                    wanted = wanted * (lengths[module] / norms)[:, None]
                    changed += 1
                np.testing.assert_allclose(
                    dense(getattr(found, field).weight)[rows], wanted, rtol=1e-5
                )
    assert changed == len(lengths)
    ids = [[3, 1, 4, 1, 5]]
    expected = dora.model.logits(ids)
    assert np.abs(expected - lora.model.logits(ids)).max() > 0.1
    np.testing.assert_array_equal(dora.merged().logits(ids), expected)
    dora.save(tmp_path / "again")
    again = LoraAdapters.load(model, tmp_path / "again")
    np.testing.assert_array_equal(again.model.logits(ids), expected)
    assert "and" in repr(dora) and not dora.arrays
    packing = Packing([Sample.of([1, 2], [True] * 2)], batch_tokens=9)
    with pytest.raises(
        NotImplementedError, match="merged when they were loaded, and are not train"
    ):
        Trainer(dora, packing, schedule=Schedule("constant", 1e-3, 2, 0))


def test_dora_of_the_head_alone(tmp_path):
    llama = models.load(CHECKPOINTS / "llama3", dtype="float32", xp=np)
    rows, width = llama.weights.head.weight.shape
    given = {"lora_A.weight": normal(2, width), "lora_B.weight": normal(rows, 2)}
    llama.weights.head.weight[-1], given["lora_B.weight"][-1] = 0, 0  # as padding is: it stays 0
    LoraAdapters(llama, rank=2, alpha=4, targets=["q_proj"]).save(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    save_file({f"{PREFIX}lm_head.{name}": array for name, array in given.items()}
              | {f"{PREFIX}lm_head.lora_magnitude_vector": 1 + np.abs(normal(rows))},
              tmp_path / "adapter_model.safetensors")  # fmt: skip
    change(tmp_path, use_dora=True, target_modules=["lm_head"])
    found = LoraAdapters.load(llama, tmp_path).model.weights.head.weight
    whole = llama.weights.head.weight + 2 * given["lora_B.weight"] @ given["lora_A.weight"]
    lengths = (1 + np.abs(normal(rows))) / np.maximum(np.linalg.norm(whole, axis=1), 1e-30)
    np.testing.assert_allclose(found, whole * lengths[:, None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("tensors", "fields", "message"),
    [
        ({"lm_head.lora_A.weight": (2, 16)}, {}, "missing: lm_head has only one of .lora_A and"),
        ({"lm_head.lora_A.weight": (2, 15), "lm_head.lora_B.weight": (61, 2)}, {}, "misshapen: lm"),
        ({"lm_head.lora_A.weight": (9, 16), "lm_head.lora_B.weight": (61, 9)}, {}, "its rank 2"),
        ({"lm_head.weight": (99, 16)}, {}, r"misshapen: lm_head.weight is \(99, 16\), not"),
        ({"model.norm.weight": (16,)}, {}, "unknown: model.norm.weight"),
        ({"lm_head.of_tomorrow": (1,)}, {}, "misshapen: lm_head.of_tomorrow is"),
        ({"lm_head.lora_magnitude_vector": (61,)}, {}, "1 magnitudes, and use_dora is False"),
        ({"model.embed_tokens.lora_magnitude_vector": (16,)}, {"use_dora": True}, "1 magnitudes"),
        ({"model.layers.0.self_attn.q_proj.lora_magnitude_vector": (16,)}, {"use_dora": True},
         "some of their modules have magnitudes"),
        ({"model.layers.7.self_attn.q_proj.lora_magnitude_vector": (16,)}, {"use_dora": True},
         "unknown: model.layers.7"),
        ({"model.layers.0.self_attn.q_proj.lora_magnitude_vector": (1,)}, {"use_dora": True},
         r"misshapen: .*q_proj.lora_magnitude_vector is \(1,\), not \(16,\)"),
        ({"lm_head.lora_magnitude_vector": (40,)}, {"use_dora": True}, "missing: lm_head.lora_A,"),
        ({"lm_head.weight": np.nan}, {}, "is not finite"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_named(tensors, fields, message, folder, llama):
    shape = llama.weights.head.weight.shape
    given = {
        name: np.full(shape, wanted, np.float32) if wanted is np.nan else normal(*wanted)
        for name, wanted in tensors.items()
    }
    add_tensors(folder, given)
    change(folder, **fields)
    with pytest.raises(ValueError, match=message):
        LoraAdapters.load(llama, folder)
