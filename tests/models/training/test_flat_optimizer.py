"""The optimizer over one flat array, the curve of losses, and fingerprints of weights."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.devices import everywhere
from support.tiny_models import LLAMA, TINY

import cupyattn
from cupyattn import models
from cupyattn.models.training import curve
from cupyattn.models.training.batches import Sample
from cupyattn.models.training.optimizer import AdamW, AdamWOptions, flatten
from cupyattn.models.training.trainable import fingerprint, loss_of
from cupyattn.models.weights import named_arrays
from cupyattn.runtime import plan

SHAPES = {"norm": (5,), "a": (3, 7), "b": (2, 130), "bias": (1,)}


def arrays(seed, put=np.asarray):
    rng = np.random.default_rng(seed)
    return {
        name: put(rng.standard_normal(shape, dtype=np.float32)) for name, shape in SHAPES.items()
    }


def test_views_are_the_arrays():
    given, copies = arrays(0), arrays(0)
    flat = flatten(given, np)
    for name, array in given.items():
        assert_array_equal(array, copies[name])
        assert array.base is flat.array
        assert (array.ctypes.data - flat.array.ctypes.data) % 1024 == 0
    assert list(given) == list(SHAPES)
    matrices = np.concatenate([copies[name].ravel() for name in ("a", "b")])
    assert_array_equal(flat.array[: flat.matrices][flat.array[: flat.matrices] != 0], matrices)
    assert [decays for _, decays in flat.parts] == [True, False]


def test_one_kind_alone_is_one_part():
    for names in (("a", "b"), ("norm",)):
        flat = flatten({name: arrays(0)[name] for name in names}, np)
        ((part, decays),) = flat.parts
        assert decays == (names == ("a", "b"))
        assert (part.start, part.stop) == (0, flat.array.size)


@everywhere
@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
def test_the_steps_of_each_array(side, clip):
    xp = getattr(side, "xp", np)
    options = AdamWOptions(weight_decay=0.25, clip=clip)
    given = arrays(0, side.put)
    alone = {name: side.get(array).copy() for name, array in given.items()}
    optimizer = AdamW(given, options, xp)
    means = {name: np.zeros((2, *array.shape), np.float32) for name, array in alone.items()}
    for step in (1, 2):
        gradients = arrays(step)
        for name, view in optimizer.gradients.items():
            view[...] = xp.asarray(8 * gradients[name])
        norm = float(side.get(optimizer.norm())) / 8
        optimizer.step(0.1 / step, norm, 8.0)
        exact = np.sqrt(sum(np.sum(each.astype(float) ** 2) for each in gradients.values()))
        assert norm == pytest.approx(exact, rel=1e-5)
        shrink = min(1.0, (clip or np.inf) / exact)
        for name, array in alone.items():
            cupyattn.adamw_step(
                array, gradients[name], *means[name], step=step, lr=0.1 / step, betas=(0.9, 0.999),
                eps=1e-8, weight_decay=0.25 if array.ndim > 1 else 0.0, grad_scale=shrink,
            )  # fmt: skip
            np.testing.assert_allclose(side.get(given[name]), array, rtol=2e-5, atol=1e-6)


@everywhere
def test_an_8_bit_state(side):
    """Blocks are of one array each: the steps of that array alone."""
    xp = getattr(side, "xp", np)
    given = arrays(0, side.put)
    alone = {name: side.get(array).copy() for name, array in given.items()}
    optimizer = AdamW(given, AdamWOptions(weight_decay=0.25, clip=None, state="8bit"), xp)
    means = {
        name: (
            np.zeros(array.shape, np.int8), np.zeros(array.shape, np.uint8),
            *np.zeros((2, -(-array.size // 256)), np.float32),
        )
        for name, array in alone.items()
    }  # fmt: skip
    for step in (1, 2):
        gradients = arrays(step)
        for name, view in optimizer.gradients.items():
            view[...] = xp.asarray(gradients[name])
        optimizer.step(0.1, 1.0, 1.0)
        for name, array in alone.items():
            cupyattn.adamw_step_8bit(
                array, gradients[name], *means[name], step=step, lr=0.1, betas=(0.9, 0.999),
                eps=1e-8, weight_decay=0.25 if array.ndim > 1 else 0.0,
            )  # fmt: skip
            assert_array_equal(side.get(given[name]), array)
    kept = optimizer.saved()
    assert {name: array.dtype.name for name, array in kept.items()} == {
        "parameters": "float32", "m": "int8", "v": "uint8", "m_scales": "float32",
        "v_scales": "float32",
    }  # fmt: skip
    float32 = AdamW(arrays(0, side.put), AdamWOptions(), xp).saved()
    sizes = [sum(array.nbytes for array in each.values()) for each in (kept, float32)]
    assert sizes[0] < sizes[1] * 6.1 / 12


@pytest.mark.nvrtc
def test_hundreds_of_arrays_are_a_few_launches(monkeypatch):
    given = {str(i): np.ones((2, 3) if i % 2 else (4,), np.float32) for i in range(100)}
    optimizer = AdamW(given, AdamWOptions(), np)
    started = []
    start = plan.start

    def noting(device, specialisation, *rest):
        started.append(specialisation.spec.entry)
        start(device, specialisation, *rest)

    monkeypatch.setattr(plan, "start", noting)
    with cupyattn.backend("emulator"):
        optimizer.norm()
        optimizer.step(0.1, 1.0, 1.0)
    assert started == ["norm_partials", "global_norm", "adamw", "adamw"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (AdamWOptions(clip=0.0), r"clip = 0.0; it is a positive number up to 1e\+38, or None"),
        (AdamWOptions(clip=float("inf")), "clip = inf"),
        (AdamWOptions(clip="1"), "clip = '1'"),  # type: ignore[arg-type]
        (AdamWOptions(clip=float("nan")), "clip = nan"),
        (AdamWOptions(state="4bit"), "state = '4bit'; it must be one of 'float32', '8bit'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW(arrays(0), options, np)


def test_lines_after_a_resumed_step_are_dropped(tmp_path):
    path = tmp_path / "new" / "losses.jsonl"
    log = curve.StepLog(path, 0, tmp_path)
    for step in (1, 2, 3):
        log.add({"step": step, "loss": 1 / step})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # the process ended here
    again = curve.StepLog(path, 2, tmp_path)
    again.add({"step": 3, "loss": 0.5})
    assert [(row["step"], row["loss"]) for row in curve.read(path)] == [
        (1, 1.0),
        (2, 0.5),
        (3, 0.5),
    ]
    curve.StepLog(path, 0, tmp_path)
    assert curve.read(path) == []
    assert curve.read(tmp_path / "none") == []


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe\x00garbage", b"[1]", b'{"step": "1", "loss": 2.0}', b'{"step": 1, "loss": "2"}',
     b'{"step": 1}', b'{"step": 4, "lo'],
)  # fmt: skip
def test_lines_that_no_training_wrote_are_named(line, tmp_path):
    """But for the last, which is cut off where a process ends."""
    path = tmp_path / "losses.jsonl"
    first = b'{"step": 1, "loss": 2.0}\n'
    path.write_bytes(first + line)
    assert curve.read(path) == [{"step": 1, "loss": 2.0}]
    before = first + line + b"\n" + first
    path.write_bytes(before)
    with pytest.raises(ValueError, match=r"line 2 of .*losses.jsonl is b'.*; a line is an obj"):
        curve.StepLog(path, 1, tmp_path)
    assert path.read_bytes() == before


def test_a_mean_of_equal_losses_is_theirs():
    assert curve.smoothed([2.0] * 30) == pytest.approx([2.0] * 30)
    assert curve.smoothed([]) == []
    fallen = curve.smoothed([4.0] * 20 + [1.0] * 60)
    assert fallen[-1] == pytest.approx(1.0, abs=0.01)


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"step": i, "loss": 5 / i, "skipped": False} for i in range(1, 60)]
    rows += [{"step": 60, "loss": None, "skipped": True}, {"step": 60, "eval_loss": 0.2}]
    curve.draw(rows, tmp_path / "losses.png", "a title")
    data = (tmp_path / "losses.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 5000
    curve.draw([], tmp_path / "none.png", "nothing yet")


def test_the_loss_of_samples_is_that_of_each_alone():
    """Packed with others, a sample has the loss that `Model.loss` gives it."""
    model = models.random(LLAMA, dtype="float32", xp=np, seed=2)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, LLAMA.vocab_size, length).tolist() for length in (5, 9, 2, 12)]
    samples = [Sample.of(ids, [True] * len(ids)) for ids in texts]
    losses = [float(model.loss([ids])) * (len(ids) - 1) for ids in texts]
    wanted = sum(losses) / sum(len(ids) - 1 for ids in texts)
    for batch_tokens in (12, 1000):
        assert loss_of(model, samples, batch_tokens=batch_tokens) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [("float16", None), ("bfloat16", None), ("float32", "nf4"), ("float32", "int8")],
)
def test_a_fingerprint_depends_on_each_bit(dtype, quantize):
    config = TINY["llama"]._replace(hidden_size=64, intermediate_size=128)
    weights = models.random(config, dtype=dtype, quantize=quantize, xp=np, seed=2).weights
    before = fingerprint(weights)
    assert before == fingerprint(weights)
    rng = np.random.default_rng(0)
    for name, array in named_arrays(weights):
        items = array.reshape(-1).view(np.uint8)
        at, bit = rng.integers(items.size), np.uint8(1 << rng.integers(8))
        items[at] ^= bit
        assert fingerprint(weights) != before, f"{name}, byte {at}"
        items[at] ^= bit
    assert fingerprint(weights) == before
