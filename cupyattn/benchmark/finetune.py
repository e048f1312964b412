"""``python -m cupyattn.benchmark finetune``: a step of LoRA, with its budget, and PEFT's.

A row's memory and its budget count the weights.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyattn import models
from cupyattn.benchmark.cases import Harness, Row, row_of, without
from cupyattn.benchmark.command import Benchmark, Option
from cupyattn.benchmark.libraries import BASELINES, missing_library
from cupyattn.benchmark.other_models import transformers_config
from cupyattn.benchmark.timer import Timer
from cupyattn.cli.arguments import integer
from cupyattn.models import training
from cupyattn.models.training.budget import Training, budget_of
from cupyattn.models.training.lora_options import LoraOptions
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.progress import progress


class TrainingSize(NamedTuple):
    """A batch: so many samples of so many tokens."""

    samples: int
    length: int


OWN = "cupyattn"
PEFT = "peft"
_LR = 1e-4
_LOSS_SCALE = 2.0**10
Held = Callable[[], int]
"""Return the bytes in use."""


class FinetunePlan(NamedTuple):
    """The training that is timed, except the batch's size: a model, and adapters of a rank."""

    model: str
    quantize: str | None
    rank: int
    timer: Timer


def samples_of(vocabulary: int, size: TrainingSize) -> list[training.Sample]:
    """Return random tokens, all of which are learnt."""
    drawn = np.random.default_rng(0).integers(0, vocabulary, (size.samples, size.length))
    return [training.Sample.of(ids, [True] * size.length) for ids in drawn.tolist()]


def timed(step: Callable[[], object], plan: FinetunePlan) -> list[float]:
    """Return the seconds of each step by the host's clock: a step waits for the loss before it."""

    def once() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    once()
    return plan.timer.waited(once, once())


def own(plan: FinetunePlan, size: TrainingSize, xp: ModuleType, held: Held) -> Json:
    """Time this library's steps, and return their budget."""
    make = models.random if plan.model in models.PRESETS else models.load
    tokens = size.samples * size.length
    made = make(plan.model, quantize=plan.quantize, xp=xp)
    adapters = training.LoraAdapters(made, rank=plan.rank)
    steps = 2 + plan.timer.warm_up + plan.timer.calls
    trainer = training.Trainer(
        adapters,
        training.Packing(samples_of(made.config.vocab_size, size), batch_tokens=tokens),
        schedule=training.Schedule("constant", _LR, steps),
        loss_scale=training.LossScale() if made.dtype == "float16" else None,
    )
    seconds = timed(trainer.step, plan)
    lora = LoraOptions(rank=plan.rank)
    budget = budget_of(
        Training(made.config, made.dtype, plan.quantize, lora, "float32", tokens, size.samples)
    )
    return {
        "seconds": seconds,
        "held_bytes": held(),
        "budget_bytes": budget.total,
        "budget": {line.what: line.size for line in budget.lines},
    }


def baseline(plan: FinetunePlan, size: TrainingSize) -> Json:
    """Time PEFT's steps: gradient checkpointing, LoRA on all linear layers, fused AdamW.

    Raises RuntimeError if it is not installed, or cannot train this model.
    """
    try:
        torch = import_module("torch")
        transformers, peft = import_module("transformers"), import_module("peft")
    except ImportError as failure:
        raise missing_library(PEFT, failure) from failure
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    model = _adapted(plan, torch, transformers, peft)
    step = _baseline_step(model, samples_of(model.config.vocab_size, size), torch)
    seconds = timed(step, plan)
    held = torch.cuda.max_memory_reserved() - before
    del model, step
    torch.cuda.empty_cache()
    return {"seconds": seconds, "held_bytes": held}


def _adapted(plan: FinetunePlan, torch: ModuleType, transformers: ModuleType, peft: Any) -> Any:
    if plan.model in models.PRESETS:
        config = transformers_config(transformers, models.PRESETS[plan.model])
        with torch.device("cuda"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float16)
    model = model.to("cuda")
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    lora = peft.LoraConfig(
        r=plan.rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, lora).train()


def _baseline_step(model: Any, samples: list[Any], torch: ModuleType) -> Callable[[], float]:
    ids = torch.tensor([sample.ids.tolist() for sample in samples], device="cuda")
    learnt = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=_LR, fused=True)

    def step() -> float:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(input_ids=ids, labels=ids).loss
        (loss * _LOSS_SCALE).backward()
        for each in learnt:
            each.grad.div_(_LOSS_SCALE)
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _size(text: str) -> TrainingSize:
    samples, _, length = text.partition("x")
    return TrainingSize(integer(1)(samples), integer(2)(length))


def rows(arguments: argparse.Namespace, harness: Harness) -> Iterator[Row]:
    """Yield a row for each model, size and format of weights, and for each other library."""
    timer = Timer(arguments.calls, arguments.warm_up, arguments.budget)
    every = list(product(arguments.model, arguments.size))
    with progress("timing", len(every)) as step:
        for name, size in every:
            given = {"model": name, "samples": size.samples, "length": size.length,
                     "lora_rank": arguments.lora_rank}  # fmt: skip
            for kind in arguments.quantize:
                quantize = None if kind == "none" else kind
                plan = FinetunePlan(name, quantize, arguments.lora_rank, timer)
                found = _held_alone(partial(own, plan, size, harness.xp))
                yield _row({**given, "quantize": quantize}, OWN, found, harness)
            for who in harness.baselines:
                labels = {**given, "quantize": None}
                try:
                    harness.require_time_for(who)
                    found = baseline(FinetunePlan(name, None, arguments.lora_rank, timer), size)
                except Exception as failure:  # another library may raise anything
                    yield without(labels, BASELINES[who], failure)
                else:
                    yield _row(labels, BASELINES[who], found, harness)
            step(f"{name}, {size.samples}x{size.length}")


def _row(labels: Json, implementation: str, found: Json, harness: Harness) -> Row:
    """Return the row of steps; what is held counts weights too, and is no ``peak_bytes``."""
    tokens = labels["samples"] * labels["length"]
    also = {"held_mb": found["held_bytes"] / 1e6}
    if "budget" in found:
        also |= {"budget_mb": found["budget_bytes"] / 1e6, "budget": found["budget"]}
    row = row_of(labels, implementation, found["seconds"], also=also)
    row["also"]["tokens_per_s"] = tokens / row["times"]["p50_s"]
    return row


def _held_alone(work: Callable[[Held], Json]) -> Json:
    """Run work in a separate memory pool, which frees nothing before the work ends."""
    cupy = load_cupy()
    gc.collect()  # the model before, which may contain cycles
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        return work(pool.total_bytes)


BENCHMARK = Benchmark(
    name="finetune",
    title="Fine-tuning",
    help="a step of LoRA: time, memory and its budget",
    description="Time steps of LoRA on all linear layers as finetune takes them, AdamW and the "
    "reading of the loss among them, and what they hold of the GPU; then the same by transformers "
    "and PEFT, where they are installed.",
    note="Gradient checkpointing. held_mb is what the pool takes from the device, weights among "
    "it; of PyTorch what it reserves.",
    options=(
        Option("model", ["phi-2"], f"random weights of these shapes ({', '.join(models.PRESETS)}), "
               "or folders", str, metavar="MODEL"),
        Option("size", [TrainingSize(2, 1024), TrainingSize(4, 2048)],
               "samples and tokens of a batch (default: 2x1024 4x2048)", _size, metavar="BxS"),
        Option("quantize", ["none", "nf4"], "storage of frozen weights",
               choices=("none", "nf4", "int4", "int8")),
        Option("lora-rank", 16, "rank of the adapters"),
    ),
    rows=rows,
    baselines=(PEFT,),
    quick={"budget": 2.0, "limit": 30.0},
)  # fmt: skip
