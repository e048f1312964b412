"""All that a fine-tuning needs, from its command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyattn import models
from cupyattn.errors import error
from cupyattn.models import training
from cupyattn.models.checkpoints.writing import require_source
from cupyattn.models.training import checkpoint

_LR = {"adapters": 2e-4, "full": 2e-5}


class Prepared(NamedTuple):
    """All that a training needs."""

    model: models.Model
    """What generates with what is learnt."""
    trained: Any
    trainer: training.Trainer
    held: list[training.Sample]
    checkpoints: Path


def prepared(arguments: argparse.Namespace) -> Prepared:
    """Load the model, read the data, and take over a checkpoint with --resume.

    Raises
    ------
    FileExistsError
        If there are checkpoints of another training where this one would write its own.
    """
    if arguments.full:
        require_source(Path(arguments.model))
    checkpoints = arguments.out / "checkpoints"
    if not arguments.resume and checkpoint.saved_in(checkpoints):
        raise error(
            FileExistsError,
            f"{checkpoints} has checkpoints of another training",
            "a new one begins in a folder of its own",
            "pass another --out, or --resume to go on with that one",
        )
    xp = np if arguments.cpu else None
    base = models.load(arguments.model, dtype=arguments.dtype, quantize=arguments.quantize, xp=xp)
    tokenizer = base.tokenizer
    if tokenizer is None:
        raise ValueError("there is no tokenizer among the model's files; text needs one")
    longest = min(arguments.max_length or arguments.batch_tokens, base.config.max_positions)
    ends = base.config.eos_ids
    reader = training.Reader(tokenizer, ends[0] if ends else None, longest)
    samples, held = training.split(
        reader.read(arguments.data), arguments.eval_fraction, arguments.seed
    )
    packing = training.Packing(samples, batch_tokens=arguments.batch_tokens, seed=arguments.seed)
    trained, model = _trainable(base, arguments)
    trainer = training.Trainer(
        trained,
        packing,
        schedule=_schedule(packing, arguments),
        optimizer=training.AdamWOptions(
            weight_decay=arguments.weight_decay, clip=arguments.clip,
            state=arguments.optimizer_state,
        ),
        accumulate=arguments.accumulate,
        loss_scale=training.LossScale() if base.dtype == "float16" else None,
        seed=arguments.seed,
        names=_names(base, arguments),
    )  # fmt: skip
    if arguments.resume:
        trainer.resume(checkpoints)
    return Prepared(model, trained, trainer, held, checkpoints)


def _trainable(base: models.Model, arguments: argparse.Namespace) -> tuple[Any, models.Model]:
    """Return what is trained, and the model that shows it."""
    if arguments.full:
        return training.FullWeights(base), base
    targets = arguments.lora_targets
    adapters = training.LoraAdapters(
        base,
        rank=arguments.lora_rank,
        alpha=arguments.lora_alpha,
        dropout=arguments.lora_dropout,
        targets=targets[0] if targets == ["all-linear"] else targets,
        seed=arguments.seed,
    )
    return adapters, adapters.model


def _schedule(packing: training.Packing, arguments: argparse.Namespace) -> training.Schedule:
    steps = arguments.steps
    if steps is None:
        steps = -(-packing.batches(arguments.epochs) // arguments.accumulate)
    warmup = steps // 20 if arguments.warmup is None else arguments.warmup
    lr = arguments.lr
    if lr is None:
        lr = _LR["full" if arguments.full else "adapters"]
    return training.Schedule(arguments.schedule, lr, steps, warmup)


def _names(base: models.Model, arguments: argparse.Namespace) -> dict[str, Any]:
    adapters = ("lora_rank", "lora_alpha", "lora_dropout")
    given = {} if arguments.full else {name: getattr(arguments, name) for name in adapters}
    return {
        **given,
        "model": repr(base.config),
        "dtype": base.dtype,
        "quantize": arguments.quantize,
        "full": arguments.full,
        "eval_fraction": arguments.eval_fraction,
    }
