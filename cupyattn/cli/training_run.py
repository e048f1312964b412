"""A fine-tuning from its command line: prepared, run step by step, shown and written."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyattn import models
from cupyattn.cli.models import device_name, memory_held, say_size
from cupyattn.cli.terminal import Result
from cupyattn.models import training
from cupyattn.models.checkpoints.writing import source_of, write_folder
from cupyattn.models.loading import OF_THE_FILE, model_library, opened, quantises_as_in
from cupyattn.models.training import checkpoint, curve
from cupyattn.models.training.batches import digest
from cupyattn.models.training.budget import Training, budget_of, require_room
from cupyattn.models.training.checkpoint import MOMENT
from cupyattn.models.training.lora_options import LoraOptions
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.errors import error, explaining, size_text
from cupyattn.runtime.progress import progress
from cupyattn.runtime.reading import open_regular

_LR = {"adapters": 2e-4, "full": 2e-5}
_CALLED = {
    "the model's weights": "MODEL",
    "the samples": "DATA, or --max-length",
    "alpha": "--lora-alpha",
    "dropout": "--lora-dropout",
    "Packing.batch_tokens": "--batch-tokens",
    "Packing.seed": "--seed",
    "accumulate": "--accumulate",
    "Schedule.kind": "--schedule",
    "Schedule.lr": "--lr",
    "Schedule.steps": "--steps, or by --epochs,",
    "Schedule.warmup": "--warmup",
    "AdamWOptions.weight_decay": "--weight-decay",
    "AdamWOptions.clip": "--clip",
    "AdamWOptions.state": "--optimizer-state",
}
"""Options that must not change when a training is resumed, by their command line names."""


class Prepared(NamedTuple):
    """All that a training needs."""

    model: models.Model
    """The model that generates with the trained arrays."""
    trained: Any
    trainer: training.Trainer
    held: list[training.Sample]
    checkpoints: Path
    data: training.Data
    source: Path | None = None
    """The folder whose config and tokenizer are copied with all weights; None for a GGUF file."""


def planned(arguments: argparse.Namespace) -> Result:
    """Return the budget of a training's memory, for ``--dry-run``; nothing is loaded.

    ``fits`` is None if the free memory is unknown; ``would`` is what fits otherwise.
    """
    _require_sound(arguments)
    plan, free = _plan(arguments), _free_bytes(arguments)
    budget, fits, would = budget_of(plan), None, None
    if free is not None:
        try:
            require_room(plan, free)
            fits = True
        except MemoryError as failure:
            fits, would = False, str(failure)
    return {
        "command": "finetune",
        "model": arguments.random or arguments.model,
        "batch_tokens": plan.batch_tokens,
        "lines": [{"what": line.what, "bytes": line.size} for line in budget.lines],
        "total_bytes": budget.total,
        "needed_bytes": budget.needed,
        "logits_bytes": budget.logits,
        "free_bytes": free,
        "fits": fits,
        "would": would,
    }


def _plan(arguments: argparse.Namespace) -> Training:
    checkpoint = None if arguments.random else opened(arguments.model)
    config = checkpoint.config if checkpoint else models.PRESETS[arguments.random]
    of_file = checkpoint if arguments.quantize == OF_THE_FILE else None
    tokens = arguments.batch_tokens
    longest = min(arguments.max_length or tokens, config.max_positions, tokens)
    return Training(
        config,
        arguments.dtype or "float16",
        arguments.quantize,
        None if arguments.full else _lora_options(arguments),
        arguments.optimizer_state,
        tokens,
        -(-tokens // longest),
        quantises_as_in(of_file) if of_file else None,
        arguments.activations,
    )


def _lora_options(arguments: argparse.Namespace) -> LoraOptions:
    return LoraOptions(
        arguments.lora_rank, arguments.lora_alpha, arguments.lora_dropout, arguments.lora_targets
    ).checked()


def _free_bytes(arguments: argparse.Namespace) -> int | None:
    """Return the free memory of the GPU, as given or from the driver; None without a GPU."""
    if arguments.memory_gb is not None:
        return int(1e9 * arguments.memory_gb)
    xp = np if arguments.cpu else model_library(None)
    return None if xp is np else int(xp.cuda.runtime.memGetInfo()[0])


def prepared(arguments: argparse.Namespace) -> Prepared:
    """Read the data, load the model, and take over a checkpoint with --resume.

    What can be found wrong without the model's weights is found before they are loaded.

    Raises FileExistsError if there are checkpoints of another training where this one would write
    its own, or the model itself; MemoryError if there is no room for it on the GPU.
    """
    _require_sound(arguments)
    source = None
    if arguments.full:
        source = source_of(opened(arguments.model))
        _require_another_folder(arguments)
    checkpoints = arguments.out / "checkpoints"
    if not arguments.resume and checkpoint.saved_in(checkpoints):
        raise error(
            FileExistsError,
            f"{checkpoints} has checkpoints of another training",
            "a new training begins in a separate folder",
            "pass another --out, or --resume to go on with that one",
        )
    moment = _moment(arguments, checkpoints)
    data = _data(arguments, moment)
    samples, held = _split(data.samples, arguments)
    packing = training.Packing(samples, batch_tokens=arguments.batch_tokens, seed=arguments.seed)
    schedule = _schedule(packing, arguments)
    free = _free_bytes(arguments)
    if free is not None:
        require_room(_plan(arguments), free)
    xp = np if arguments.cpu else None
    kept = {"quantize": arguments.quantize, "activations": arguments.activations}
    base = models.load(arguments.model, dtype=arguments.dtype, **kept, xp=xp)
    trained, model = _trainable(base, arguments)
    trainer = training.Trainer(
        trained,
        packing,
        schedule=schedule,
        optimizer=_optimizer(arguments),
        accumulate=arguments.accumulate,
        loss_scale=training.LossScale() if base.dtype == "float16" else None,
        seed=arguments.seed,
        names={**_names(base, held, arguments), **({MOMENT: moment.isoformat()} if moment else {})},
    )  # fmt: skip
    if arguments.resume:
        trainer.resume(checkpoints, called=_CALLED)
    return Prepared(model, trained, trainer, held, checkpoints, data, source)


def _require_sound(arguments: argparse.Namespace) -> None:
    """Raise for numbers that no training takes, before anything is read."""
    steps, warmup = arguments.steps, arguments.warmup or 0
    training.Schedule.checked(arguments.schedule, _rate(arguments), steps or warmup + 1, warmup)
    _optimizer(arguments)
    training.split([training.Sample.of([0], [True])], arguments.eval_fraction, arguments.seed)
    if not arguments.full:
        _lora_options(arguments)


def _no_data(where: str, what: str) -> ValueError:
    return error(
        ValueError,
        f"no data in {where} ({what})",
        "DATA is a file of JSON lines",
        "pass the path of one",
    )


def _moment(arguments: argparse.Namespace, checkpoints: Path) -> datetime | None:
    """Return the date and time that chat templates print: a resumed training's are its first ones.

    None for checkpoints without a moment: their templates printed the date of each call.
    """
    if arguments.resume and (saved := checkpoint.saved_in(checkpoints)):
        return checkpoint.moment_of(saved[-1])
    return datetime.now().replace(microsecond=0)


def _data(arguments: argparse.Namespace, moment: datetime | None) -> training.Data:
    """Read the data, and print which forms they have."""
    with (
        explaining(
            f"no data in {arguments.data}", "DATA is a file of JSON lines", "pass the path of one"
        ),
        open_regular(Path(arguments.data), _no_data),  # before the model's files
    ):
        pass
    checkpoint = opened(arguments.model)
    tokenizer = checkpoint.read_tokenizer()
    if tokenizer is None:
        raise error(
            ValueError,
            f"{checkpoint.where} has no tokenizer",
            "the text of DATA is learnt as the model's tokens",
            "put tokenizer.json next to the model's files",
        )
    config = checkpoint.config
    longest = min(arguments.max_length or arguments.batch_tokens, config.max_positions)
    ends = (*config.eos_ids, *getattr(tokenizer, "end_ids", ()))
    end = ends[0] if ends else None
    if end is not None and end >= config.vocab_size:
        raise error(
            ValueError,
            f"{checkpoint.where}: texts end with the token {end}",
            f"the model knows those up to {config.vocab_size - 1}",
            "take eos_token_id from the config that the model was published with",
        )
    reader = training.Reader(tokenizer, end, longest, config.vocab_size, moment)
    data = reader.read_data(arguments.data)
    print(f"{arguments.data}: {forms_text(data.forms)}", file=sys.stderr)
    for note, count in data.notes.items():
        print(f"{arguments.data}: of {count:,} samples: {note}", file=sys.stderr)
    return data


def forms_text(forms: Mapping[str, int]) -> str:
    """Return how many samples have which form.

    >>> forms_text({"Alpaca": 1200, "texts": 3})
    '1,200 of Alpaca, 3 of texts'
    """
    return ", ".join(f"{count:,} of {form}" for form, count in forms.items())


def _split(
    samples: list[training.Sample], arguments: argparse.Namespace
) -> tuple[list[training.Sample], list[training.Sample]]:
    """Return the samples to learn, and those for evaluation."""
    learnt, held = training.split(samples, arguments.eval_fraction, arguments.seed)
    if arguments.eval_fraction and not held:
        raise error(
            ValueError,
            f"--eval-fraction {arguments.eval_fraction:g} of {len(samples)} samples is none",
            "at least one sample is for evaluation, and at least one is learnt",
            "pass a larger one, more lines, or none of it",
        )
    return learnt, held


def _optimizer(arguments: argparse.Namespace) -> training.AdamWOptions:
    return training.AdamWOptions(
        weight_decay=arguments.weight_decay, clip=arguments.clip, state=arguments.optimizer_state
    ).checked()


def _require_another_folder(arguments: argparse.Namespace) -> None:
    if arguments.out.resolve() == Path(arguments.model).resolve():
        raise error(
            FileExistsError,
            f"--out {arguments.out} is the model's own folder",
            "a fully trained model is written to another folder than the original",
            "pass another --out",
        )


def _trainable(base: models.Model, arguments: argparse.Namespace) -> tuple[Any, models.Model]:
    """Return the trained object, and the model that uses it."""
    if arguments.full:
        return training.FullWeights(base), base
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        adapters = training.LoraAdapters(
            base, **_lora_options(arguments)._asdict(), seed=arguments.seed
        )
    for each in noted:
        print(f"finetune: {each.message}", file=sys.stderr)
    return adapters, adapters.model


def _schedule(packing: training.Packing, arguments: argparse.Namespace) -> training.Schedule:
    steps = arguments.steps
    if steps is None:
        steps = -(-packing.batches(arguments.epochs) // arguments.accumulate)
    warmup = steps // 20 if arguments.warmup is None else arguments.warmup
    return training.Schedule.checked(arguments.schedule, _rate(arguments), steps, warmup)


def _rate(arguments: argparse.Namespace) -> float:
    if arguments.lr is not None:
        return float(arguments.lr)
    return _LR["full" if arguments.full else "adapters"]


def _names(base: models.Model, held: list[training.Sample], arguments: argparse.Namespace) -> Json:
    adapters = {
        "--lora-rank": arguments.lora_rank,
        "--lora-targets": sorted(arguments.lora_targets),
    }
    return {
        "MODEL": repr(base.config),
        "--full": arguments.full,
        **({} if arguments.full else adapters),
        "--dtype": base.dtype,
        "--quantize": arguments.quantize,
        **({"--activations": arguments.activations} if arguments.activations else {}),
        "--eval-fraction": arguments.eval_fraction,
        "what DATA has held back": digest(held),
    }


_ASKED = b"\nending after this step, with a checkpoint; Ctrl-C again ends it at once\n"


def trained(made: Prepared, arguments: argparse.Namespace) -> Result:
    """Train, and write the result, or a checkpoint if Ctrl-C ends it before.

    Returns
    -------
    dict
        What ``--json`` prints.
    """
    trainer, model = made.trainer, made.model
    first, tokens = trainer.number, 0
    log = curve.StepLog(arguments.out / "losses.jsonl", first, made.checkpoints)
    with _interruptible() as asked, progress("training", trainer.schedule.steps, first) as advance:
        if made.held and first not in _looked_at(log):
            log.add({"step": first, "eval_loss": _held_loss(made)})
        began = time.perf_counter()
        for step in trainer:
            tokens += step.tokens
            rate = tokens / (time.perf_counter() - began)
            log.add({"step": step.number, **_row(step), "tokens_per_s": rate})
            advance(_told(step, rate, model))
            ends = step.number == trainer.schedule.steps or asked.is_set()
            if ends or step.number % arguments.save_every == 0:
                trainer.save(made.checkpoints)  # before work that a second Ctrl-C may end
                if made.held:
                    log.add({"step": step.number, "eval_loss": _held_loss(made)})
            if asked.is_set():
                break
    rows = curve.read(log.path)
    finished = trainer.number == trainer.schedule.steps
    if finished:
        _write(made, arguments)
    return {
        "command": "finetune",
        "model": arguments.model,
        "device": device_name(model),
        "data": dict(made.data.forms),
        "notes": dict(made.data.notes),
        "finished": finished,
        "steps": trainer.number,
        "of_steps": trainer.schedule.steps,
        "learnt": sum(array.size for array in made.trained.arrays.values()),
        **_losses(rows),
        "tokens_per_s": tokens / (time.perf_counter() - began) if tokens else None,
        "memory_bytes": memory_held(model),
        "losses": str(log.path),
        "curve": _drawn(rows, arguments),
        "adapters": not arguments.full,
        "out": str(arguments.out),
        "generate": shlex.join(_generating(arguments)),
    }


def _write(made: Prepared, arguments: argparse.Namespace) -> None:
    """Write the result, which the last checkpoint contains too."""
    model = made.model
    with explaining(
        "the result could not be written",
        "all steps are done, and the last checkpoint contains their result",
        "make room, and call it again with --resume: that writes it",
    ):
        if arguments.full:
            say_size(model, arguments.out)
            write_folder(model.weights, model.config, made.source, arguments.out, model.tokenizer)
        else:
            made.trained.save(arguments.out, base_model=str(arguments.model))


def _generating(arguments: argparse.Namespace) -> list[str]:
    """Return the command that tries it."""
    command = ["python", "-m", "cupyattn", "generate"]
    if arguments.full:
        return [*command, str(arguments.out), "..."]
    command += [str(arguments.model), "...", "--adapters", str(arguments.out)]
    for name in ("dtype", "quantize", "activations"):
        given = getattr(arguments, name)
        command += [f"--{name}", given] if given else []
    return command


def _losses(rows: list[Json]) -> Result:
    steps = [row for row in rows if "loss" in row]
    return {
        "first_loss": steps[0]["loss"] if steps else None,
        "last_loss": steps[-1]["loss"] if steps else None,
        "eval_losses": [row["eval_loss"] for row in rows if "eval_loss" in row],
        "skipped": sum(row.get("skipped", False) for row in steps),
    }


def _row(step: training.TrainedStep) -> Json:
    """Return a step as JSON has it, which knows no NaN."""
    fields = {name: value for name, value in step._asdict().items() if name != "number"}
    return {
        name: None if isinstance(value, float) and not np.isfinite(value) else value
        for name, value in fields.items()
    }


def _told(step: training.TrainedStep, rate: float, model: models.Model) -> str:
    held = memory_held(model)
    memory = "" if held is None else f", {size_text(held)}"
    return f"loss {step.loss:.3f}, {rate:,.0f} tok/s{memory}"


def _held_loss(made: Prepared) -> float:
    return training.loss_of(made.model, made.held, batch_tokens=made.trainer.packing.batch_tokens)


def _looked_at(log: curve.StepLog) -> set[int]:
    """Return the steps of evaluations: one may have ended between a checkpoint and its own."""
    return {row["step"] for row in curve.read(log.path) if "eval_loss" in row}


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Let Ctrl-C end a training after its step; a second one ends it at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        os.write(2, _ASKED)  # as a handler may, which print's own lock would hold up

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _drawn(rows: list[Json], arguments: argparse.Namespace) -> str | None:
    path = arguments.out / "losses.png"
    try:
        curve.draw(rows, path, f"fine-tuning {Path(arguments.model).name}")
    except (
        RuntimeError,
        OSError,
    ) as failure:  # all else is done, and not lost for want of a picture
        print(f"finetune: {failure}", file=sys.stderr)
        return None
    return str(path)
