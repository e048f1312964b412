"""The GPU memory that a training will take, line by line, before any of it is taken."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

import numpy as np

from cupyattn.models.checkpoints.contents import HUGGING_FACE, modules_of
from cupyattn.models.config import GATED, Config
from cupyattn.models.forward import rows_at_once
from cupyattn.models.loading import quantises_to, require_activations
from cupyattn.models.training.lora_options import LoraOptions
from cupyattn.models.training.optimizer import ALIGNMENT, state_bytes
from cupyattn.models.weights import Quantises, Weights, empty, is_learnt, named_arrays
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arrays import dtype_of
from cupyattn.runtime.errors import error

_LSE_BYTES = 4
_MOST_PARTS_BYTES = 1 << 26
_MOST_PARTS = 32
"""Sums of float32 of a product of few rows and a long sum, the head's dx: at most these."""
_QUERIES_OF_A_TILE = 64  # what a sample's last tile of queries may be beyond it


class Working(NamedTuple):
    """The working memory of `gradients` on a GPU, in bytes.

    `kept` is the inputs of all layers. `layer` is these and the backward of a layer, of its MLP or
    its attention. `head` is these and cross-entropy.
    """

    kept: int
    layer: int
    head: int


def working_bytes(
    config: Config,
    tokens: int,
    /,
    *,
    samples: int = 1,
    dtype: str = "float16",
    full: bool = False,
    rank: int = 16,
    dropout: bool = False,
    activations: str | None = None,
) -> Working:
    """Return the memory that `gradients` takes on a GPU while it runs, beyond what it was given.

    A step of so many tokens, of so many samples, needs the larger of `layer` and `head`. `full` is
    for `FullWeights`; otherwise there are `LoraAdapters` of this rank for all linear layers, with
    dropout or without. With activations "int8" the gradient of a product's x is rotated back, from
    one array into another, which have more items than the codes of x have bytes.

    At the head there are the inputs of all layers and a chunk of logits, which become their own
    gradient; in the backward of the last layer there are the inputs of all layers, what one layer
    computed, and its gradients so far. For float16 and batches of some thousand tokens this is what
    is requested from the memory pool to 1 % (a test counts); if the head takes most, up to 64 MiB
    more, which its product may need on some GPUs. The pool itself may keep more than it is asked
    for.

    >>> from cupyattn import models
    >>> max(working_bytes(models.PRESETS["llama-3.2-1b"], 4096)) >> 20
    921
    """
    size = dtype_of(dtype).itemsize
    width, inner = config.hidden_size, config.intermediate_size
    up = inner * (2 if config.activation in GATED else 1)
    low, adapted = (0, 0) if full else (6 * rank, up)
    fused = inner if dropout and not full else 0  # dropped, and the gradient of that
    lse = _LSE_BYTES * config.num_heads
    per_row = 2 * lse * (tokens + _QUERIES_OF_A_TILE * samples)  # of float16, deterministic

    # A float16 model has float32 hidden states, and a gradient of each term in float16.
    stream, of_term = (2 * width, width) if dtype == "float16" else (width, 0)
    kept = (config.num_layers + 1) * stream  # with the dx of the layer
    layers: list[int] = []
    for heads in dict.fromkeys(config.heads):
        (queries, keys, *_), qkv = heads.rows, sum(heads.rows)
        rotated = queries + keys if config.rotary_dim else 0
        if config.architecture == "phi":
            known = kept + width + 2 * (qkv + up) + low
            mlp = known + 2 * inner + 2 * fused + of_term
            attention = known + 2 * queries + rotated
            weight = max(up + qkv, queries) * width
        else:
            normed = queries + keys if config.qk_norm else 0  # next to those of the product
            normed += keys if config.architecture == "gemma4" else 0  # v
            grown = queries if config.query_growth is not None else 0
            known = kept + width + qkv + normed + grown + queries + low
            ddown, again = of_term, 0
            if config.architecture in ("gemma", "gemma4"):
                ddown, again = width, 3 * width + of_term
            mlp = known + width + stream + up
            mlp += max(adapted, ddown + 2 * inner + 2 * fused, again + inner)
            dqkv = queries + 2 * keys
            attention = known + stream + max(ddown + queries, queries + dqkv + rotated, again)
            weight = max(up, qkv) * width
        if activations is not None:
            mlp, attention = mlp + max(inner, width), attention + max(queries, width)
        layers += (
            tokens * (mlp * size + lse) + full * weight * size,
            tokens * (attention * size + lse) + per_row,
        )
    rows = min(rows_at_once(config.vocab_size, size), tokens)
    parts = min(4 * _MOST_PARTS * rows * width, _MOST_PARTS_BYTES)
    head = rows * config.vocab_size * size + (0 if full else parts)
    if config.logit_softcap is not None:  # its slope, and what that is computed from
        head += 2 * rows * config.vocab_size * size
    return Working(
        tokens * kept * size,
        max(layers),
        tokens * (kept + 2 * width) * size + head + full * config.vocab_size * width * size,
    )


_MASTER_BYTES = 4
_SPARE = 0.125
"""The batch, and the memory that the pool keeps unused, as a fraction of all lines. Gradients of
Phi-2's adapters, in NF4, left the pool with 9 % more than was in use at the most (2 x 1,024 tokens)
and with 12 % (4 x 2,048; an H200 as compute_75 code, 2026-11-23)."""
_FEWEST_TOKENS = 128


class Training(NamedTuple):
    """A description of a training: the model, its adapters, the optimizer and the batches.

    `quantize` is the format of frozen weights, "file" with the `blocks` of the file. `lora` is None
    to train all weights. `state` is the optimizer's, "float32" or "8bit". A batch has
    `batch_tokens` tokens of at least `samples` samples. `activations` is the model's.
    """

    config: Config
    dtype: str
    quantize: str | None
    lora: LoraOptions | None
    state: str
    batch_tokens: int
    samples: int = 1
    blocks: Quantises | None = None
    activations: str | None = None


class Line(NamedTuple):
    """One line of a budget."""

    what: str
    size: int
    """In bytes."""


class Budget(NamedTuple):
    """The contents of memory when it is fullest.

    `logits` is the bytes of a chunk of logits. They share memory with the working set; the line of
    cross entropy is what they take beyond that.
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
    """Return the memory that a training takes, or raise ValueError for an invalid training.

    Phi-2 in four bits, with batches of 2 x 1,024 tokens, in MiB:

    >>> from cupyattn import models
    >>> phi = Training(models.PRESETS["phi-2"], "float16", "nf4", LoraOptions(), "float32", 2048)
    >>> budget = budget_of(phi._replace(samples=2))
    >>> [(line.what, line.size >> 20) for line in budget.lines[:2]]
    [('weights', 1851), ('adapters', 187)]
    """
    config, lora = training.config, training.lora
    # Memory that is asked for and not touched is none.
    quantises = training.blocks or quantises_to(training.quantize)
    activations = require_activations(training.activations, training.quantize)
    weights = empty(config, training.dtype, np, quantises, activations)
    size = dtype_of(training.dtype).itemsize
    if lora is None:
        sizes = [array.size for name, array in named_arrays(weights) if is_learnt(name)]
        learnt, rounded = _items(sizes), 0
    else:
        learnt, rounded = _adapter_items(weights, config, lora)
    tokens = training.batch_tokens
    kept, layer, head = working_bytes(
        config, tokens, samples=training.samples, dtype=training.dtype, full=lora is None,
        rank=lora.rank if lora else 16, dropout=bool(lora and lora.dropout),
        activations=activations,
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
    """Return the budget of a training, or raise MemoryError with options that would fit."""
    budget = budget_of(training)
    if budget.needed <= free:
        return budget
    least = next((what for what, other in _smaller(training) if _fits(other, free)), None)
    raise error(
        MemoryError,
        f"this training needs {budget.needed / 1e9:.2f} GB, of which the largest part is "
        f"{max(budget.lines, key=lambda line: line.size).what}",
        f"{free / 1e9:.2f} GB are free",
        f"with {least} it fits" if least else "take a smaller model, or a larger device",
    )


def _fits(training: Training, free: int) -> bool:
    """Tell whether a training fits; one that the model cannot have does not."""
    try:
        return budget_of(training).needed <= free
    except ValueError:
        return False


def _smaller(training: Training) -> Iterator[tuple[str, Training]]:
    """Yield trainings that take less memory, the smallest changes first, with their options."""
    changes: list[tuple[str, Json]] = []
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
            options = [what for what, _ in chosen]
            times = 1
            while smaller.batch_tokens // times >= _FEWEST_TOKENS:
                tokens = training.batch_tokens // times
                fewer = [f"--batch-tokens {tokens} --accumulate {times}"] if times > 1 else []
                samples = -(-training.samples // times)
                yield (
                    " and ".join([*options, *fewer]),
                    smaller._replace(batch_tokens=tokens, samples=samples),
                )
                times *= 2


def _of_smaller_rank(lora: LoraOptions | None) -> Iterator[LoraOptions]:
    while lora is not None and lora.rank > 1:
        lora = lora._replace(rank=lora.rank // 2)
        yield lora


def _items(sizes: Iterable[int]) -> int:
    """Return the items of arrays in one, each beginning at a multiple of `ALIGNMENT`."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def _adapter_items(weights: Weights, config: Config, lora: LoraOptions) -> tuple[int, int]:
    """Return how many numbers are learnt, and how many of them, padded, products read."""
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
