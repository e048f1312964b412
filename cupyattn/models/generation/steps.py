"""A step of a model over a paged cache, as it comes: any tokens of any sequences, packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import cupyattn
from cupyattn import PagedKVCache
from cupyattn.kv_cache import Sequence as CachedSequence
from cupyattn.kv_cache import StepTables
from cupyattn.models.forward import Attend
from cupyattn.models.generation.inputs import Draw, StepInputs, used_options
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error


def paged_attend(
    model: Any, cache: PagedKVCache, tables: StepTables, width: int | None = None
) -> Attend:
    """Return attention over a paged cache, for `Model.hidden`.

    Of each layer it writes the new keys and values, rotated, and then lets the new queries see all.
    `width` is how many of them each sequence has, None where that differs.
    """
    window = model.config.window_size

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        if model.rotary is None:
            cache.append(layer, k, v, tables)
        else:
            cache.append(layer, k, v, tables, q=q, rotary=model.rotary)
        queries = q if width is None else q.reshape(-1, width, *q.shape[1:])
        seen = cache.attend(layer, queries, tables, causal=True, window_size=window)
        return seen.reshape(q.shape)

    return attend


class Part:
    """A sequence in a step: the tokens to compute, and the draws behind its last ones.

    `draws` are all made behind the last token; with `every` there is one behind each token.
    """

    __slots__ = ("draws", "every", "sequence", "tokens")

    def __init__(
        self,
        sequence: CachedSequence,
        tokens: Sequence[int],
        draws: Sequence[Draw],
        every: bool = False,
    ) -> None:
        self.sequence = sequence
        self.tokens = tokens
        self.draws = draws
        self.every = every


def packed_step(model: Any, cache: PagedKVCache, parts: Sequence[Part]) -> list[list[int]]:
    """Compute the tokens of all parts at once; return the tokens drawn for each."""
    counts = [len(part.tokens) for part in parts]
    ids = [token for part in parts for token in part.tokens]
    draws = [draw for part in parts for draw in part.draws]
    tables = cache.step_tables([part.sequence for part in parts], counts)
    rows: list[int] = []
    end = 0
    for part, count in zip(parts, counts, strict=True):
        end += count
        rows += range(end - count, end) if part.every else [end - 1] * len(part.draws)
    width = max((len(draw.previous) for draw in draws), default=0)
    inputs = StepInputs(
        model.xp, len(ids), len(draws), used_options(draws), model.config.vocab_size, width
    )
    inputs.load(ids, draws)
    hidden = model.hidden(inputs.ids, tables.positions, paged_attend(model, cache, tables))
    drawn: list[int] = []
    if rows:
        if rows != list(range(len(ids))):
            hidden = hidden[model.xp.asarray(np.array(rows, np.int64))]
        drawn = cupyattn.sample(model.head(hidden), **inputs.options()).tolist()
    require_drawn(drawn)
    taken = iter(drawn)
    return [[next(taken) for _ in (part.tokens if part.every else part.draws)] for part in parts]


def require_drawn(tokens: Sequence[int]) -> None:
    """Refuse what `cupyattn.sample` returns for logits of which none can be drawn."""
    if min(tokens, default=0) < 0:
        raise error(
            FloatingPointError,
            "logits of a next token are all NaN or -inf",
            "one of them has to be a number",
            "check the weights; what overflows float16 does not overflow float32",
        )
