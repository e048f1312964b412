"""``python -m cupyattn finetune``: what it refuses, and when."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.finetuning import AS_JSON, CONFIG, finetune, losses_of, model_and_data
from support.search import deep

import cupyattn
from cupyattn import models
from cupyattn.cli import main, training_run
from cupyattn.cli.finetune import claimed
from cupyattn.models.checkpoints.writing import write_folder
from cupyattn.models.training import LoraAdapters, split

pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")

folder = pytest.fixture(autouse=True)(model_and_data)


def test_a_loss_that_is_no_number_ends_it(capsys):
    """Behind the last checkpoint, which is good; the losses are JSON to the end."""
    finetune("--lr", "1e30", "--clip", "1e30", "--save-every", "1", code=1)
    error = " ".join(capsys.readouterr().err.split())
    assert "not finite" in error and "take a smaller learning rate" in error
    assert len(list(Path("finetuned/checkpoints").iterdir())) == 1
    assert all(np.isfinite(loss) for _, loss, _ in losses_of("finetuned"))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (["--full", "--dtype", "float16", "--lr", "1e6"], "model.embed_tokens.weight"),
        (["--full", "--weight-decay", "1e38", "--lr", "1e38"], "model.embed_tokens.weight"),
        (["--weight-decay", "1e38", "--lr", "1e38"], "self_attn.q_proj.lora_A.weight"),
    ],
)
def test_what_is_not_finite_is_not_written(given, name, capsys):
    """The last step is that which breaks it: no loss shows that."""
    finetune(*given, "--steps", "1", code=1)
    message = " ".join(capsys.readouterr().err.split())
    assert f"{name} has numbers that" in message and "train anew with" in message
    assert not list(Path("finetuned").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--lora-targets", "other"], "targets 'other' name no module of this model"),
        (
            ["--lora-targets", "all-linear", "q_proj"],
            "targets = ['all-linear', 'q_proj']; "
            "'all-linear' is all linear layers, and stands alone; leave it out, or all other names",
        ),
        (["--warmup", "12"], "warmup = 12 of 12 steps"),
        (["--lr", "-1"], "lr = -1.0"),
        (["--eval-fraction", "1"], "a fraction of 1.0"),
        (["--max-length", "8"], "line 1 of data.jsonl has 26 tokens; a sample has at most 8"),
        (["--resume"], "there is no checkpoint"),
        (["--clip", "0"], "clip = 0.0"),
        (["--clip", "inf"], "clip = inf; it is a positive number"),
    ],
)
def test_what_is_refused(given, message, capsys):
    finetune(*given, code=1)
    assert message in " ".join(capsys.readouterr().err.split())


def test_what_cannot_fit_is_not_begun(capsys):
    finetune("--memory-gb", "0.0001", code=1)
    assert "this training needs " in capsys.readouterr().err
    assert not Path("finetuned").exists()


@pytest.mark.parametrize(
    "given", [[], ["model"], ["--random", "gpt2"], ["--dry-run"],
              ["model", "data.jsonl", "--random", "gpt2"]]
)  # fmt: skip
def test_model_and_data_are_needed(given, capsys):
    with pytest.raises(SystemExit):
        main(["finetune", *given])
    printed = capsys.readouterr().err
    assert "pass MODEL and DATA" in printed or "--random has no text to learn" in printed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["data.jsonl"], "a dry run reads no DATA: leave out data.jsonl"),
        (["--quantize", "file"], "--random has no file"),
        (["--memory-gb", "nan"], "nan is not a finite number above 0"),
        (["--memory-gb", "-1"], "-1 is not a finite number above 0"),
        (["--memory-gb", "8GB"], "'8GB' is not a number"),
    ],
)
def test_a_dry_run_refuses(given, message, capsys):
    with pytest.raises(SystemExit):
        main(["finetune", "--dry-run", "--random", "phi-2", *given])
    assert message in " ".join(capsys.readouterr().err.split())


def test_missing_data_is_found_before_the_model_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr(models, "load", None)
    assert main(["finetune", "model", "other.jsonl"]) == 1
    assert "other.jsonl" in capsys.readouterr().err
    assert not Path("finetuned").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--lr", "0"], "lr = 0.0"),
        (["--lr", "nan"], "lr = nan"),
        (["--lr", "1e40"], "lr = 1e+40"),
        (["--weight-decay", "-1"], "weight_decay = -1.0; it is 0 or more"),
        (["--weight-decay", "nan"], "weight_decay"),
        (["--clip", "0"], "clip = 0.0"),
        (["--lora-dropout", "1"], "dropout = 1.0"),
        (["--lora-alpha", "0"], "alpha = 0.0"),
        (["--eval-fraction", "1"], "a fraction of 1.0"),
        (["--warmup", "12"], "warmup = 12 of 12 steps"),
    ],
)
def test_numbers_are_looked_at_before_anything_is_read(given, message, capsys, monkeypatch):
    monkeypatch.setattr(training_run, "opened", None)
    finetune(*given, code=1)
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("finetuned").exists()


@pytest.mark.parametrize(
    ("lines", "given", "message"),
    [
        ('{"text": "a"}\n{"text": "a", "prompt": "b"}\n', [], "line 2 of data.jsonl"),
        ('{"text": "a"}\n', ["--epochs", "3", "--warmup", "9"], "warmup = 9 of 3 steps"),
        ("", [], "data.jsonl has no samples"),
    ],
)
def test_data_are_read_before_the_model_is_loaded(lines, given, message, capsys, monkeypatch):
    monkeypatch.setattr(models, "load", None)
    Path("data.jsonl").write_text(lines)
    assert main(["finetune", "model", "data.jsonl", *given]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 100}, "line 1 of data.jsonl has the token 256, as <"),
        ({"eos_token_id": 900}, "model: texts end with the token 900; the model knows those up to"),
    ],
)
def test_a_tokenizer_of_another_model_is_found_first(change, message, capsys, monkeypatch):
    monkeypatch.setattr(models, "load", None)
    Path("model/config.json").write_text(json.dumps({**AS_JSON, "eos_token_id": None, **change}))
    finetune(code=1)
    assert message in " ".join(capsys.readouterr().err.split())


def test_two_trainings_do_not_share_a_folder(capsys):
    """The second is refused, and the first continues; a dead process has no lock."""
    Path("finetuned").mkdir()
    Path("finetuned/.training").write_text("12345")  # of a process that has died
    with claimed(Path("finetuned")):
        finetune(code=1)
        message = " ".join(capsys.readouterr().err.split())
        assert f"another training writes to finetuned (process {os.getpid()})" in message
        assert "pass another --out" in message
    finetune("--steps", "1")
    assert not Path("finetuned/.training").exists()


def test_a_process_that_was_killed_leaves_a_folder_free():
    """Its lock ends with it, though its file does not."""
    holder = (
        "import sys; from pathlib import Path; from cupyattn.cli.finetune import "
        "claimed\nwith claimed(Path('shared')): print('has it', flush=True); sys.stdin.read()"
    )
    where = {**os.environ, "PYTHONPATH": str(Path(cupyattn.__file__).parents[1])}
    command, pipe = [sys.executable, "-c", holder], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=where) as process:
        assert process.stdout.readline() == "has it\n"
        with pytest.raises(FileExistsError, match=f"process {process.pid}"):
            claimed(Path("shared")).__enter__()
        process.kill()
        process.wait()
    assert Path("shared/.training").exists()
    with claimed(Path("shared")):
        pass
    assert not list(Path("shared").iterdir())


def test_a_resumed_training_has_the_same_model(capsys, folder):
    """A model of the same shape has other weights; the options of adapters are compared too."""
    finetune("--steps", "1")
    finetune("--steps", "1", "--lora-alpha", "8", "--resume", code=1)
    assert "--lora-alpha is 8, and was 32 in the checkpoint" in capsys.readouterr().err
    other = models.random(CONFIG, dtype="float32", xp=np, seed=4)
    write_folder(other.weights, CONFIG, folder, folder)
    finetune("--steps", "1", "--resume", code=1)
    message = " ".join(capsys.readouterr().err.split())
    assert "MODEL: other than in the checkpoint; a training is resumed" in message


def test_a_resumed_training_holds_the_same_lines_back(capsys):
    """One that is not learnt is no part of what is; its loss would be another's all the same."""
    given = ["--steps", "1", "--eval-fraction", "0.25"]
    finetune(*given)
    lines = Path("data.jsonl").read_text().splitlines()
    *_, held = sorted(split(range(len(lines)), 0.25, 0)[1])
    lines[held] = '{"text": "Another line altogether."}'
    Path("data.jsonl").write_text("\n".join(lines))
    capsys.readouterr()
    finetune(*given, "--resume", code=1)
    assert "what DATA has held back: other than in the" in " ".join(capsys.readouterr().err.split())


def test_what_was_told_is_what_is_compared_first(capsys):
    finetune("--steps", "1")
    capsys.readouterr()
    finetune("--steps", "1", "--lora-rank", "2", "--resume", code=1)
    assert "--lora-rank is 2, and was 4 in the checkpoint" in capsys.readouterr().err


CHANGES = [
    (["--schedule", "linear"], "--schedule is 'linear', and was 'cosine'"),
    (["--lr", "0.02"], "--lr is 0.02, and was 0.01"),
    (
        ["--steps", "5"],
        "--steps, or by --epochs, is 5, and was 4 in the checkpoint; a training "
        "is resumed with the model, the data, the options and the number of steps that it",
    ),
    (["--warmup", "1"], "--warmup is 1, and was 0"),
    (["--weight-decay", "0.1"], "--weight-decay is 0.1, and was 0.0"),
    (["--clip", "2"], "--clip is 2.0, and was 1.0"),
    (["--optimizer-state", "8bit"], "--optimizer-state is '8bit', and was 'float32'"),
    (["--accumulate", "2"], "--accumulate is 2, and was 1"),
    (["--batch-tokens", "70"], "--batch-tokens is 70, and was 64"),
    (["--seed", "1"], "--seed is 1, and was 0"),
    (["--lora-dropout", "0.1"], "--lora-dropout is 0.1, and was 0.0"),
    (["--lora-targets", "q_proj"], "--lora-targets is ['q_proj'], and was ['all-linear']"),
    (["--dtype", "bfloat16"], "--dtype is 'bfloat16', and was 'float32'"),
    (["--quantize", "int8"], "--quantize is 'int8', and was None"),
    (["--eval-fraction", "0.2"], "--eval-fraction is 0.2, and was 0.0"),
    (["--full"], "--full is True, and was False"),
]


@pytest.mark.parametrize(("given", "name"), [*CHANGES[:3], *deep(*CHANGES[3:])])
def test_what_differs_is_called_as_it_was_told(given, name, capsys):
    finetune("--steps", "4")
    capsys.readouterr()
    finetune("--steps", "4", *given, "--resume", code=1)
    assert name in " ".join(capsys.readouterr().err.split())


def test_data_that_differ_are_told_without_their_digest(capsys):
    finetune("--steps", "1")
    Path("data.jsonl").write_text('{"text": "Another line."}')
    capsys.readouterr()
    finetune("--steps", "1", "--resume", code=1)
    told = " ".join(capsys.readouterr().err.split())
    assert "DATA, or --max-length: other than in the checkpoint; " in told


def test_a_fraction_that_holds_nothing_back_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(models, "load", None)
    Path("data.jsonl").write_text('{"text": "a line"}\n' * 9)
    finetune("--eval-fraction", "0.1", code=1)
    told = " ".join(capsys.readouterr().err.split())
    assert "--eval-fraction 0.1 of 9 samples is none; at least one sample is for evaluation" in told


@pytest.mark.parametrize("data", ["model", "nowhere.jsonl"])
def test_data_that_are_no_file_are_told(data, capsys):
    assert main(["finetune", "model", data]) == 1
    told = " ".join(capsys.readouterr().err.split())
    why = "it is a directory, not a regular file" if data == "model" else "[Errno "
    assert f"no data in {data} ({why}" in told and "pass the path of one" in told


def test_a_model_without_a_tokenizer_is_told(capsys, monkeypatch):
    opened = training_run.opened
    without = {"read_tokenizer": lambda: None}
    monkeypatch.setattr(training_run, "opened", lambda path: opened(path)._replace(**without))
    finetune(code=1)
    assert "model has no tokenizer; " in " ".join(capsys.readouterr().err.split())


def test_full_weights_are_not_quantised(capsys):
    with pytest.raises(SystemExit):
        finetune("--full", "--quantize", "nf4")
    assert "leave one" in capsys.readouterr().err


def test_adapters_of_another_model_are_refused(capsys, folder):
    finetune("--steps", "1")
    base = models.load("model")
    small = LoraAdapters(base, rank=2, targets=["q_proj"])
    small.save("small")
    found = LoraAdapters.load(base, "small")
    assert found.options.rank == 2
    capsys.readouterr()
    assert main(["generate", "model", "x", "--adapters", "nowhere"]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_targets_that_partly_fit_are_trained_and_told(capsys):
    finetune("--steps", "1", "--lora-targets", "q_proj", "fc1", "dense")
    printed = " ".join(capsys.readouterr().err.split())
    assert "finetune: the targets 'fc1', 'dense' are no modules of this model" in printed
    finetune("--out", "other", "--lora-targets", "fc1", code=1)
    assert "targets 'fc1' name no module of this model" in " ".join(capsys.readouterr().err.split())
