"""``python -m cupyattn finetune`` on full disks, in closed folders, with spoilt files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.finetuning import finetune, losses_of, model_and_data

from cupyattn.cli.finetune import preparation, training_run
from cupyattn.models.checkpoints import safetensors_writer
from cupyattn.models.training import curve, peft

pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")

folder = pytest.fixture(autouse=True)(model_and_data)


def test_a_full_disk_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(safetensors_writer, "store", no_room)
    finetune(code=1)
    error = " ".join(capsys.readouterr().err.split())
    assert "No space left on device" in error
    assert "make room, and begin anew: there is no checkpoint yet" in error


def no_room(*_, **__):
    raise OSError(28, "No space left on device")


def test_a_disk_without_room_for_the_lock_is_left_as_it_was(capsys, monkeypatch):
    monkeypatch.setattr(os, "getpid", no_room)
    finetune(code=1)
    message = " ".join(capsys.readouterr().err.split())
    assert "--out finetuned ([Errno 28] No space left on device); a training writes" in message
    assert not Path("finetuned").exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(b"\xff\xfe\n\n"), "line 1 of finetuned/losses.jsonl is b'"),
        (lambda path: (path.unlink(), path.mkdir()),
         "finetuned/losses.jsonl: it is a directory, not a regular file; a line is an object"),
    ],
)  # fmt: skip
def test_losses_that_cannot_be_gone_on_with(spoil, message, capsys):
    finetune("--steps", "2")
    spoil(Path("finetuned/losses.jsonl"))
    finetune("--steps", "2", "--resume", code=1)
    told = " ".join(capsys.readouterr().err.split())
    assert message in told and "losses then begin with the next step" in told


def test_losses_without_room_are_told(capsys, monkeypatch):
    finetune("--steps", "2")
    monkeypatch.setattr(curve, "write_whole", no_room)
    finetune("--steps", "2", "--resume", code=1)
    told = " ".join(capsys.readouterr().err.split())
    assert "no losses in finetuned/losses.jsonl ([Errno 28] No space left on device); " in told


def test_losses_that_were_edited_are_shown(capsys):
    finetune("--steps", "2")
    Path("finetuned/losses.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    finetune("--steps", "2", "--resume")
    assert "loss 2.000 at first, 2.000 at last" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
def test_a_full_disk_for_the_losses_says_so(capsys, monkeypatch):
    add = curve.StepLog.add

    def full(log, row):
        if row["step"] == 3:
            log.path = Path("/dev/full")
        add(log, row)

    with monkeypatch.context() as patch:
        patch.setattr(curve.StepLog, "add", full)
        finetune("--save-every", "2", code=1)
    error = " ".join(capsys.readouterr().err.split())
    assert "/dev/full of step 3 ([Errno 28] No space left on device)" in error
    assert "with --resume" in error
    finetune("--save-every", "2", "--resume")
    assert [step for step, *_ in losses_of("finetuned")] == [*range(1, 13)]


def test_a_disk_that_is_full_for_the_picture_loses_only_that(capsys, monkeypatch):
    monkeypatch.setattr(curve, "draw", no_room)
    finetune("--steps", "2")
    printed = capsys.readouterr()
    assert "No space left on device" in printed.err and "losses.png" not in printed.out
    assert Path("finetuned", "adapter_model.safetensors").exists()


@pytest.mark.parametrize("full", [[], ["--full"]])
def test_a_disk_that_is_full_at_the_end_loses_nothing(full, capsys, monkeypatch):
    """The last checkpoint has what was learnt: with room again it is written from there."""
    finetune("--out", "whole", *full)

    writer = "write_folder" if full else "write_whole"
    module = training_run if full else peft
    with monkeypatch.context() as patch:
        patch.setattr(module, writer, no_room)
        finetune(*full, code=1)
    told = " ".join(capsys.readouterr().err.split())
    assert "No space left on device" in told and "call it again with --resume" in told
    finetune(*full, "--resume")
    name = "model.safetensors" if full else "adapter_model.safetensors"
    assert Path("finetuned", name).read_bytes() == Path("whole", name).read_bytes()


def test_a_folder_that_cannot_be_written_is_found_at_once(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(preparation, "opened", None)
    (tmp_path / "a file").write_text("")
    finetune("--out", "a file/in it", code=1)
    error = " ".join(capsys.readouterr().err.split())
    assert "a file/in it" in error and "pass an --out that can be written" in error
