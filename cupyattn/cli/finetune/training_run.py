"""The steps of a fine-tuning: shown as they come, kept, and written at the end."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn import models
from cupyattn.cli.finetune.preparation import Prepared
from cupyattn.cli.models import device_name, memory_held
from cupyattn.cli.terminal import Result
from cupyattn.models import training
from cupyattn.models.checkpoints.writing import write_folder
from cupyattn.models.training import curve
from cupyattn.runtime.errors import explaining, size_text
from cupyattn.runtime.progress import progress

_ASKED = b"\nending behind this step, with a checkpoint; Ctrl-C again ends it at once\n"


def trained(made: Prepared, arguments: argparse.Namespace) -> Result:
    """Train, and write what is learnt; where Ctrl-C ends it before, a checkpoint.

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
                trainer.save(made.checkpoints)  # before what a second Ctrl-C may end
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
    """Write what is learnt, of which the last checkpoint has all."""
    model = made.model
    with explaining(
        "what was learnt could not be written",
        "all steps are taken, and the last checkpoint has what they learnt",
        "make room, and call it again with --resume: that writes it",
    ):
        if arguments.full:
            write_folder(model.weights, model.config, Path(arguments.model), arguments.out)
        else:
            made.trained.save(arguments.out, base_model=str(arguments.model))


def _generating(arguments: argparse.Namespace) -> list[str]:
    """Return the command that tries it."""
    command = ["python", "-m", "cupyattn", "generate"]
    if arguments.full:
        return [*command, str(arguments.out), "..."]
    command += [str(arguments.model), "...", "--adapters", str(arguments.out)]
    for name in ("dtype", "quantize"):
        given = getattr(arguments, name)
        command += [f"--{name}", given] if given else []
    return command


def _losses(rows: list[dict[str, Any]]) -> Result:
    steps = [row for row in rows if "loss" in row]
    return {
        "first_loss": steps[0]["loss"] if steps else None,
        "last_loss": steps[-1]["loss"] if steps else None,
        "eval_losses": [row["eval_loss"] for row in rows if "eval_loss" in row],
        "skipped": sum(row.get("skipped", False) for row in steps),
    }


def _row(step: training.TrainedStep) -> dict[str, Any]:
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
    """Let Ctrl-C end a training behind its step; a second one ends it at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(*_: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        os.write(2, _ASKED)  # as a handler may, which print's own lock would hold up

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _drawn(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> str | None:
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
