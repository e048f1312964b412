"""Steps of LoRA as `finetune` takes them, and what they hold of the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupyattn import models
from cupyattn.benchmark.finetune.work import Size, flops_of, t4_seconds
from cupyattn.benchmark.frame.clock import Clock
from cupyattn.models import training
from cupyattn.models.training.budget import Training, budget_of
from cupyattn.models.training.lora_options import LoraOptions

_LR = 1e-4


class Plan(NamedTuple):
    """What is timed, but for the batch's size.

    Attributes
    ----------
    model : str
        Of `models.PRESETS`, or a folder or file.
    quantize : str, or None
    rank : int
        Of adapters of all linear layers.
    clock : Clock
        How many steps are timed.
    """

    model: str
    quantize: str | None
    rank: int
    clock: Clock


def samples_of(vocabulary: int, size: Size) -> list[training.Sample]:
    """Return random tokens, all of which are learnt."""
    drawn = np.random.default_rng(0).integers(0, vocabulary, (size.samples, size.length))
    return [training.Sample.of(ids, [True] * size.length) for ids in drawn.tolist()]


def timed(step: Callable[[], Any], plan: Plan) -> list[float]:
    """Return the seconds of each step; a step waits for its loss, so the host's clock does.

    It is waited for at the beginning of the next, where what it left behind is still under way.
    """

    def once() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    once()
    took = once()
    for _ in range(plan.clock.within(plan.clock.warm_up, took, 0.2, 1)):
        once()
    return [once() for _ in range(plan.clock.within(plan.clock.calls, took))]


def own(plan: Plan, size: Size, xp: Any, held: Callable[[], int]) -> dict[str, Any]:
    """Time this library's steps, beside their budget.

    `held` says what is held of the memory, at the end, by what was made since it was made.
    """
    made = (
        models.random(plan.model, quantize=plan.quantize, xp=xp)
        if plan.model in models.PRESETS
        else models.load(plan.model, quantize=plan.quantize, xp=xp)
    )
    adapters = training.LoraAdapters(made, rank=plan.rank)
    steps = 2 + plan.clock.warm_up + plan.clock.calls
    trainer = training.Trainer(
        adapters,
        training.Packing(samples_of(made.config.vocab_size, size), batch_tokens=size.tokens),
        schedule=training.Schedule("constant", _LR, steps),
        loss_scale=training.LossScale() if made.dtype == "float16" else None,
    )
    seconds = timed(trainer.step, plan)
    lora = LoraOptions(rank=plan.rank)
    budget = budget_of(
        Training(made.config, made.dtype, plan.quantize, lora, "float32", size.tokens, size.samples)
    )
    flops = flops_of(adapters.model, size)
    return {
        "dtype": made.dtype,
        "seconds": seconds,
        "flops": flops,
        "held_bytes": held(),
        "budget_bytes": budget.total,
        "budget": {line.what: line.size for line in budget.lines},
        "t4_seconds": t4_seconds(flops, made.nbytes),
    }
