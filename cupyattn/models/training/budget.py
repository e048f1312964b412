"""An estimate of a training's GPU memory, line by line, before any of it is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from cupyattn.models.checkpoints.names import HUGGING_FACE, modules_of
from cupyattn.models.config import Config
from cupyattn.models.loss import rows_at_once
from cupyattn.models.quantised import quantises_to
from cupyattn.models.training.flat import ALIGNMENT
from cupyattn.models.training.lora_options import LoraOptions
from cupyattn.models.training.memory import working_bytes
from cupyattn.models.training.optimizer import state_bytes
from cupyattn.models.weights import Quantises, Weights, empty, named_arrays
from cupyattn.runtime.arrays import dtype_of
from cupyattn.runtime.errors import error

_MASTER_BYTES = 4
_SPARE = 0.125
"""The batch, and the memory that the pool keeps unused, as a fraction of all lines. Gradients of
Phi-2's adapters, in NF4, left the pool with 9 % more than was in use at the most (2 x 1,024 tokens)
and with 12 % (4 x 2,048; an H200 as compute_75 code, 2026-11-23)."""
_FEWEST_TOKENS = 128


class Training(NamedTuple):
    """A description of a training: the model, its adapters, the optimizer and the batches.

    Attributes
    ----------
    config : Config
    dtype : str
        Of weights and hidden states.
    quantize : str, or None
        What frozen weights are kept in; "file" with `blocks`.
    lora : LoraOptions, or None
        Of the adapters; None trains all weights.
    state : {"float32", "8bit"}
        Of the optimizer.
    batch_tokens, samples : int
        Tokens of a batch, and how many samples they are of at the least.
    blocks : Quantises, optional
        The blocks of each weight in its file.
    """

    config: Config
    dtype: str
    quantize: str | None
    lora: LoraOptions | None
    state: str
    batch_tokens: int
    samples: int = 1
    blocks: Quantises | None = None


class Line(NamedTuple):
    """One line of a budget."""

    what: str
    size: int
    """In bytes."""


class Budget(NamedTuple):
    """The contents of memory at the moment when they are largest.

    Attributes
    ----------
    lines : tuple of Line
    logits : int
        Bytes of the logits that cross-entropy has at a time. They lie where the working set is
        otherwise; its line is what it takes beyond that.
    """

    lines: tuple[Line, ...]
    logits: int

    @property
    def total(self) -> int:
        """All lines, in bytes."""
        return sum(line.size for line in self.lines)

    @property
    def needed(self) -> int:
        """The memory that must be free for the training, in bytes."""
        return math.ceil(self.total * (1 + _SPARE))


def budget_of(training: Training) -> Budget:
    """Return what a training takes.

    Raises
    ------
    ValueError
        For targets that are no modules of the model, or weights that are no whole blocks.

    Examples
    --------
    Phi-2 in four bits, with batches of 2 x 1,024 tokens, in MB:

    >>> from cupyattn import models
    >>> phi = Training(models.PRESETS["phi-2"], "float16", "nf4", LoraOptions(), "float32", 2048)
    >>> budget = budget_of(phi._replace(samples=2))
    >>> [(line.what, line.size >> 20) for line in budget.lines[:2]]
    [('weights', 1851), ('adapters', 187)]
    """
    config, lora = training.config, training.lora
    # Memory that is asked for and not touched is none.
    quantises = training.blocks or quantises_to(training.quantize)
    weights = empty(config, training.dtype, np, quantises)
    size = dtype_of(training.dtype).itemsize
    if lora is None:
        learnt, rounded = _items(array.size for _, array in named_arrays(weights)), 0
    else:
        learnt, rounded = _adapter_items(weights, config, lora)
    tokens = training.batch_tokens
    kept, layer, head = working_bytes(
        config, tokens, samples=training.samples, dtype=training.dtype, full=lora is None,
        rank=lora.rank if lora else 16, dropout=bool(lora and lora.dropout),
    )  # fmt: skip
    learnt_what = "adapters" if lora else "weights in float32"
    return Budget(
        (
            Line("weights", sum(array.nbytes for _, array in named_arrays(weights))),
            Line(learnt_what, _MASTER_BYTES * learnt + rounded * size),
            Line("gradients", _MASTER_BYTES * learnt),
            Line("optimizer", state_bytes(training.state, learnt)),
            Line("inputs of all layers", kept),
            Line("working set", layer - kept),
            Line("cross entropy", max(head - layer, 0)),
        ),
        min(rows_at_once(config.vocab_size, size), tokens) * config.vocab_size * size,
    )


def require_room(training: Training, free: int) -> Budget:
    """Return the budget of a training if it fits.

    Raises
    ------
    MemoryError
        If it does not: what would.
    """
    budget = budget_of(training)
    if budget.needed <= free:
        return budget
    least = next((what for what, other in _smaller(training) if _fits(other, free)), None)
    raise error(
        MemoryError,
        f"this training needs {budget.needed / 1e9:.2f} GB, of which the largest part is "
        f"{max(budget.lines, key=lambda line: line.size).what}",
        f"{free / 1e9:.2f} GB are free",
        f"with {least} it fits" if least else "take a smaller model, or a larger card",
    )


def _fits(training: Training, free: int) -> bool:
    """Tell whether it does; what the model cannot have, such as blocks of its rows, does not."""
    try:
        return budget_of(training).needed <= free
    except ValueError:
        return False


def _smaller(training: Training) -> Iterator[tuple[str, Training]]:
    """Yield trainings that take less, those that change the least first, each with its options."""
    changes: list[tuple[str, dict[str, Any]]] = []
    if training.state == "float32":
        changes.append(("--optimizer-state 8bit", {"state": "8bit"}))
    if training.lora is None:
        changes.append(("adapters (without --full)", {"lora": LoraOptions()}))
    if training.quantize is None:
        changes.append(("--quantize nf4", {"quantize": "nf4"}))
    for lora in _of_smaller_rank(training.lora):
        changes.append((f"--lora-rank {lora.rank}", {"lora": lora}))
    for count in range(len(changes) + 1):
        for chosen in combinations(changes, count):
            if sum("lora" in change for _, change in chosen) > 1:
                continue
            smaller = training
            for _, change in chosen:
                smaller = smaller._replace(**change)
            if smaller.quantize and smaller.lora is None:
                continue
            told = [what for what, _ in chosen]
            times = 1
            while smaller.batch_tokens // times >= _FEWEST_TOKENS:
                tokens = training.batch_tokens // times
                fewer = [f"--batch-tokens {tokens} --accumulate {times}"] if times > 1 else []
                samples = -(-training.samples // times)
                yield (
                    " and ".join([*told, *fewer]),
                    smaller._replace(batch_tokens=tokens, samples=samples),
                )
                times *= 2


def _of_smaller_rank(lora: LoraOptions | None) -> Iterator[LoraOptions]:
    while lora is not None and lora.rank > 1:
        lora = lora._replace(rank=lora.rank // 2)
        yield lora


def _items(sizes: Iterable[int]) -> int:
    """Return the items of arrays that lie in one, each beginning at a multiple of `ALIGNMENT`."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def _adapter_items(weights: Weights, config: Config, lora: LoraOptions) -> tuple[int, int]:
    """Return how many numbers are learnt, and how many the products read of them."""
    sizes: list[int] = []
    names: list[str] = []
    rounded = 0
    for index, layer in enumerate(weights.layers):
        naming = HUGGING_FACE[config.architecture]
        for field, modules in modules_of(naming, config, index, layer).items():
            names += (module.name for module in modules)
            height, width = getattr(layer, field).weight.shape
            chosen = [module for module in modules if lora.targeted(module.name)]
            ranks = [lora.rank_of(module.name) for module in chosen]
            for rank, module in zip(ranks, chosen, strict=True):
                sizes += [rank * width, rank * (module.rows.stop - module.rows.start)]
            rounded += sum(ranks) * (height + width)
    lora.require_found(names)
    return _items(sizes), rounded
