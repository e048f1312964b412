"""The lines of a training's losses, their picture, and the loss of samples held back."""

from __future__ import annotations

import numpy as np
import pytest
from support.tiny_models import LLAMA

from cupyattn import models
from cupyattn.models.training import curve
from cupyattn.models.training.batch import Sample
from cupyattn.models.training.evaluation import loss_of


def test_lines_go_on_behind_a_step(tmp_path):
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
