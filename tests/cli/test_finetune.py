"""``python -m cupyattn finetune`` and ``merge``: what is trained and written, full disks."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from support.finetuning import CONFIG, DRAW, finetune, losses_of, model_and_data
from support.search import deep
from support.tiny_models import ByteTokenizer

from cupyattn import models
from cupyattn.cli import main, training_run
from cupyattn.models.checkpoints import writing
from cupyattn.models.checkpoints.writing import write_folder
from cupyattn.models.tokenizer.text import Rendered
from cupyattn.models.training import FullWeights, LoraAdapters, Trainer, checkpoint, curve, peft
from cupyattn.models.training.checkpoint import MOMENT

pytest.importorskip("safetensors")


pytest.importorskip("matplotlib")


folder = pytest.fixture(autouse=True)(model_and_data)


def test_adapters_learn_and_are_generated_with(capsys, monkeypatch):
    monkeypatch.setattr(curve, "draw", DRAW)
    finetune("--eval-fraction", "0.2", "--save-every", "5")
    printed = capsys.readouterr().out
    assert "model fine-tuned on the CPU" in printed
    assert "12 of 12" in printed
    assert "python -m cupyattn generate model ... --adapters finetuned" in printed
    out = Path("finetuned")
    names = sorted(path.name for path in out.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors", "checkpoints",
                     "losses.jsonl", "losses.png"]  # fmt: skip
    assert (out / "losses.png").read_bytes()[:4] == b"\x89PNG"
    rows = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 12 and losses[-1] < losses[0] - 1
    held = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert [row["step"] for row in rows if "eval_loss" in row] == [0, 5, 10, 12]
    assert held[-1] < held[0]
    assert main(["generate", "model", "Zorblax", "--max-new-tokens", "4"]) == 0
    plain = capsys.readouterr().out
    adapted = ["generate", "model", "Zorblax", "--max-new-tokens", "4", "--adapters", "finetuned"]
    assert main(adapted) == 0
    assert capsys.readouterr().out.split("\n")[0] != plain.split("\n")[0]


def test_adapters_beside_quantised_weights(capsys):
    finetune("--quantize", "int8")
    printed = capsys.readouterr().out
    assert "generate model ... --adapters finetuned --quantize int8" in " ".join(printed.split())
    losses = [loss for _, loss, _ in losses_of("finetuned")]
    assert losses[-1] < losses[0] - 1
    given = ["--max-new-tokens", "4", "--adapters", "finetuned", "--quantize", "int8"]
    assert main(["generate", "model", "Zorblax", *given]) == 0
    finetune("--quantize", "file", "--out", "other", code=1)
    assert "no weights of layers in blocks" in capsys.readouterr().err


def test_the_bar_says_loss_speed_and_memory(monkeypatch):
    told, shown = [], []

    @contextmanager
    def bar(what, total, done=0):
        shown.append((what, total, done))
        yield told.append

    monkeypatch.setattr(training_run, "progress", bar)
    monkeypatch.setattr(training_run, "memory_held", lambda model: 3_000_000_000)
    finetune("--steps", "2")
    assert shown == [("training", 2, 0)] and len(told) == 2
    for line, (_, loss, _) in zip(told, losses_of("finetuned"), strict=True):
        assert re.fullmatch(rf"loss {loss:.3f}, [\d,]+ tok/s, 3\.00 GB", line)


def test_the_printed_lines_are_narrow(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    finetune("--steps", "2")
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_ctrl_c_writes_a_checkpoint_and_it_goes_on(capfd, monkeypatch):
    """Losses are the same bit for bit, with one line for each step."""
    options = ["--steps", "6", "--lora-dropout", "0.1", "--accumulate", "2"]
    finetune("--out", "whole", *options)
    capfd.readouterr()
    step = Trainer.step

    def interrupted(trainer):
        if trainer.number == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step(trainer)

    given = ["--out", "parts", *options]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        before = signal.getsignal(signal.SIGINT)
        finetune(*given, code=130)
        assert signal.getsignal(signal.SIGINT) is before
    captured = capfd.readouterr()
    assert "5 of 6" in captured.out and "--resume" in captured.out
    assert "Ctrl-C again ends it at once" in captured.err
    assert not Path("parts", "adapter_model.safetensors").exists()
    finetune(*given, code=1)
    assert "--resume to go on with that one" in capfd.readouterr().err
    finetune(*given, "--resume")
    assert losses_of("parts") == losses_of("whole")
    written, expected = (Path(out, "adapter_model.safetensors") for out in ("parts", "whole"))
    assert written.read_bytes() == expected.read_bytes()
    assert "6 of 6" in capfd.readouterr().out
    finetune(*given, "--resume")  # nothing is left to do
    assert losses_of("parts") == losses_of("whole")


class DatedTokenizer(ByteTokenizer):
    """Its template prints the date, as that of Llama 3."""

    chat_template = "{{ strftime_now('%d %b %Y') }}..."

    def render_chat(self, messages, *, strftime_now, add_generation_prompt=False):
        text = "".join(f"{each['role'][0]}:{each['content']};" for each in messages)
        begin = "a:" if add_generation_prompt else ""
        return Rendered(f"{strftime_now('%d %b')} {text}{begin}", [])


@pytest.fixture
def dated(monkeypatch):
    """Alpaca's data, a tokenizer that prints the date, and a function that sets the day."""
    opening = training_run.opened
    monkeypatch.setattr(
        training_run, "opened",
        lambda path: opening(path)._replace(read_tokenizer=lambda: DatedTokenizer(begin=256)),
    )  # fmt: skip
    lines = [{"instruction": "hi", "output": answer} for answer in ("yo", "hey", "4")]
    Path("data.jsonl").write_text(json.dumps(lines))

    def on(day):
        class Clock(datetime):
            @classmethod
            def now(cls):
                return datetime(2026, 11, day, 12, 30, 15, 7)

        monkeypatch.setattr(training_run, "datetime", Clock)

    return on


def test_a_training_resumes_on_another_day(dated, capsys):
    dated(28)
    finetune("--save-every", "4", "--out", "whole")
    finetune("--save-every", "4")
    saved = checkpoint.saved_in(Path("finetuned", "checkpoints"))
    saved[-1].unlink()
    dated(29)
    finetune("--resume", "--save-every", "4")
    assert losses_of("finetuned") == losses_of("whole")
    finetune("--out", "other")
    assert losses_of("other") != losses_of("whole")
    assert "data.jsonl: 3 of Alpaca" in capsys.readouterr().err


@pytest.mark.parametrize("given", [3, "yesterday"])
def test_a_date_that_is_none_is_a_damaged_checkpoint(given, dated, capsys, monkeypatch):
    dated(28)
    monkeypatch.setattr(checkpoint, "parsed", lambda *_, **__: {"identity": {MOMENT: given}})
    finetune()
    finetune("--resume", code=1)
    assert "is no checkpoint of a training, or damaged (the date of" in capsys.readouterr().err


def test_an_evaluation_that_was_cut_off_is_made_up_for(monkeypatch):
    """A process that is killed after a checkpoint has not computed the evaluation loss."""
    given = ["--eval-fraction", "0.2", "--save-every", "5", "--steps", "7"]
    finetune(*given, "--out", "whole")
    look = training_run._held_loss

    def killed(made):
        if made.trainer.number == 5:
            raise KeyboardInterrupt
        return look(made)

    with monkeypatch.context() as patch:
        patch.setattr(training_run, "_held_loss", killed)
        finetune(*given, "--out", "parts", code=130)
    for _ in range(2):
        finetune(*given, "--out", "parts", "--resume")
    rows = [
        [
            {name: value for name, value in json.loads(line).items() if name != "tokens_per_s"}
            for line in Path(out, "losses.jsonl").read_text().splitlines()
        ]
        for out in ("whole", "parts")
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 7 + 3


def test_a_second_ctrl_c_ends_it_at_once(monkeypatch, capsys):
    def interrupted(trainer):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "step", interrupted)
    finetune(code=130)
    assert "interrupted" in capsys.readouterr().err


def test_all_weights(capsys):
    """The written folder is a complete model that has learnt."""
    finetune("--full", "--optimizer-state", "8bit", "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["last_loss"] < result["first_loss"] - 1
    assert result["generate"] == "python -m cupyattn generate finetuned ..."
    before, after = (models.load(name, dtype=None) for name in ("model", "finetuned"))
    ids = [[256, *b"Zorblax is a fish of the lakes.", 257]]
    assert float(after.loss(ids)) < float(before.loss(ids)) - 1
    assert result["learnt"] == sum(array.size for array in FullWeights(before).arrays.values())


def test_all_weights_are_written_beside_the_model_that_they_were(capsys, folder):
    before = (folder / "model.safetensors").read_bytes()
    finetune("--full", "--out", "../" + folder.parent.name + "/model", code=1)
    assert "is the model's own folder; " in capsys.readouterr().err
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_second_training_has_losses_of_its_own(capsys, folder):
    (folder / "losses.jsonl").write_text('{"step": 1, "loss": 9.0}\n')  # of the first one
    finetune("--full", "--steps", "2")
    assert [step for step, *_ in losses_of("finetuned")] == [1, 2]


def test_a_dry_run_prints_the_budget(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    call = ["finetune", "--random", "phi-2", "--dry-run", "--quantize", "nf4", "--cpu"]
    assert main(call) == 0
    printed = capsys.readouterr().out
    parts = "weights", "adapters", "gradients", "optimizer", "inputs of all", "working set"
    for what in (*parts, "cross entropy"):
        assert f"  {what} " in printed
    assert "pass the memory of one as --memory-gb" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 80
    assert main([*call, "--memory-gb", "15.8"]) == 0
    assert "it fits: 15.80 GB are free" in capsys.readouterr().out
    assert main([*call, "--memory-gb", "2.9", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["fits"] is False and "--batch-tokens" in result["would"]
    assert result["total_bytes"] == sum(line["bytes"] for line in result["lines"])
    assert main(["finetune", "model", "--dry-run", "--cpu", "--full"]) == 0  # of a folder's config
    assert not Path("finetuned").exists()


def test_a_dry_run_prints_the_budget_of_a_model_that_has_no_blocks(capsys, folder):
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 100}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["finetune", "model", "--dry-run", "--memory-gb", "0.00001", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["fits"] is False and "needs" in result["would"]
    assert result["total_bytes"] == sum(line["bytes"] for line in result["lines"])


def test_an_interrupted_training_prints_a_command_that_can_be_pasted(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    given = [
        "--out",
        "a folder",
        "--eval-fraction",
        "0.25",
        "--weight-decay",
        "0.01",
        "--seed",
        "4",
    ]
    step = Trainer.step

    def interrupted(trainer):
        os.kill(os.getpid(), signal.SIGINT)
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", interrupted)
    monkeypatch.setattr("sys.argv", ["cupyattn", "finetune", "model", "data.jsonl", *given])
    finetune(*given, code=130)
    lines = capsys.readouterr().out.split("To resume:\n")[1].splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 80
    assert all(line.endswith(" \\") for line in lines[:-1])
    words = shlex.split("\n".join(lines).replace("\\\n", ""))
    assert words[3:] == ["finetune", "model", "data.jsonl", *given, "--resume"]


def test_without_matplotlib_there_is_no_picture(capsys, monkeypatch):
    monkeypatch.setattr(curve, "draw", DRAW)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    finetune("--steps", "2")
    captured = capsys.readouterr()
    assert "pip install 'cupyattn[training]'" in " ".join(captured.err.split())
    assert not Path("finetuned", "losses.png").exists()
    assert Path("finetuned", "adapter_model.safetensors").exists()


pytest.importorskip("safetensors")


pytest.importorskip("matplotlib")


def test_a_full_disk_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(writing, "store", no_room)
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


@pytest.mark.parametrize("full", [[], *deep(["--full"])])
def test_a_disk_that_is_full_at_the_end_loses_nothing(full, capsys, monkeypatch):
    """The last checkpoint has what was learnt: with room again it is written from there."""
    full = ["--steps", "4", *full]
    finetune("--out", "whole", *full)
    writer = "write_folder" if "--full" in full else "write_whole"
    module = training_run if "--full" in full else peft
    with monkeypatch.context() as patch:
        patch.setattr(module, writer, no_room)
        finetune(*full, code=1)
    told = " ".join(capsys.readouterr().err.split())
    assert "No space left on device" in told and "call it again with --resume" in told
    finetune(*full, "--resume")
    name = "model.safetensors" if "--full" in full else "adapter_model.safetensors"
    assert Path("finetuned", name).read_bytes() == Path("whole", name).read_bytes()


def test_a_folder_that_cannot_be_written_is_found_at_once(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(training_run, "opened", None)
    (tmp_path / "a file").write_text("")
    finetune("--out", "a file/in it", code=1)
    error = " ".join(capsys.readouterr().err.split())
    assert "a file/in it" in error and "pass an --out that can be written" in error


pytest.importorskip("safetensors")


pytest.importorskip("matplotlib")


def told(capsys):
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("targets", [["all-linear"], *deep(["q_proj", "down_proj"])])
def test_a_merged_model_is_the_adapted_one(targets, quantize, capsys):
    """Weights without adapters are decoded too."""
    beside = ["--quantize", quantize] if quantize else []
    finetune("--lora-targets", *targets, *beside)
    capsys.readouterr()
    assert main(["merge", "model", "finetuned", "--out", "merged", *beside, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["generate"] == "python -m cupyattn generate merged ..."
    assert result["dtype"] == "float32"
    merged, base = models.load("merged"), models.load("model", quantize=quantize)
    ids = [[256, *b"Zorblax is a fish.", 257]]
    adapted = LoraAdapters.load(base, "finetuned").model.logits(ids)
    np.testing.assert_allclose(merged.logits(ids), adapted, rtol=0, atol=1e-4)
    assert np.abs(base.logits(ids) - adapted).max() > 0.1
    assert main(["generate", "merged", "Zorblax", "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize("kind", [[], ["--dtype", "float16"]])
def test_adapters_of_another_model_are_told(kind, folder, capsys):
    """Models of the same shapes differ by their weights, or in another dtype by their name."""
    finetune("--steps", "1")
    shutil.copytree("model", "other")
    weights = models.random(CONFIG, dtype="float32", xp=np, seed=4).weights
    write_folder(weights, CONFIG, folder, Path("other"))
    with pytest.warns(UserWarning, match="adapters of 'model' beside 'other'"):
        assert main(["merge", "other", "finetuned", "--out", "merged", *kind]) == 0
    generate = ["generate", "other", "x", "--adapters", "finetuned", "--max-new-tokens", "1"]
    with pytest.warns(UserWarning, match="adapters of 'model' beside 'other'"):
        assert main([*generate, *kind]) == 0


def test_another_dtype(capsys):
    finetune("--steps", "1")
    assert main(["merge", "model", "finetuned", "--out", "half", "--dtype", "float16"]) == 0
    assert "python -m cupyattn generate half ..." in capsys.readouterr().out
    assert json.loads(Path("half/config.json").read_text())["torch_dtype"] == "float16"
    assert models.load("half", dtype="float16").weights.embedding.dtype == np.float16


def test_weights_that_float16_does_not_hold_are_not_written(capsys):
    adapters = LoraAdapters(models.load("model"), rank=2)
    for name, array in adapters.arrays.items():
        array[...] = 3e5 if "1.mlp.up_proj.lora_B" in name else array
    adapters.save("large")
    capsys.readouterr()
    assert main(["merge", "model", "large", "--out", "merged", "--dtype", "float16"]) == 1
    message = told(capsys)
    assert "model.layers.1.mlp.up_proj.weight has numbers that float16 does not hold" in message
    assert "merge with --dtype float32 or bfloat16" in message
    assert not Path("merged").exists()
    assert main(["merge", "model", "large", "--out", "merged", "--dtype", "bfloat16"]) == 0


def test_a_folder_that_cannot_be_written(capsys, monkeypatch, tmp_path):
    def no_room(*_, **__):
        raise OSError(28, "No space left on device")

    finetune("--steps", "1")
    (tmp_path / "a file").write_text("")
    assert main(["merge", "model", "finetuned", "--out", "a file"]) == 1
    assert re.search(r"--out a file could not be written .*exists.*; .*pass another", told(capsys))
    with monkeypatch.context() as patch:
        patch.setattr(writing, "store", no_room)
        assert main(["merge", "model", "finetuned", "--out", "merged"]) == 1
    message = told(capsys)
    assert "--out merged could not be written ([Errno 28] No space left on device); " in message
    assert main(["merge", "model", "finetuned", "--out", "merged"]) == 0


def test_what_is_refused(capsys):
    finetune("--steps", "1")
    before = Path("model/model.safetensors").read_bytes()
    assert main(["merge", "model", "finetuned", "--out", "model"]) == 1
    assert "--out model has a config.json: it is a model already; " in told(capsys)
    assert Path("model/model.safetensors").read_bytes() == before
    assert main(["merge", "model", "nowhere", "--out", "merged"]) == 1
    assert "nowhere has no adapter_config.json" in told(capsys)
    assert main(["merge", "model.gguf", "finetuned", "--out", "merged"]) == 1
    assert "there is no 'model.gguf'" in told(capsys)
    assert not Path("merged").exists()
