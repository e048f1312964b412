"""Steps of decoding that are captured once and replayed: CUDA graphs, where arrays are a GPU's.

A captured step has a largest batch, one new token of each sequence (or as many of each), and arrays
that stay where they are. The token that it draws is the one that it computes next, and it advances
its tables: so the step behind it is queued before the host has read what it drew, and the GPU does
not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cupyattn
from cupyattn import PagedKVCache
from cupyattn.models.generation.graph import Readback, capture
from cupyattn.models.generation.inputs import Draw, StepInputs, used_options
from cupyattn.models.generation.steps import paged_attend, require_drawn


class DecodeStep:
    """A step of at most `batch` sequences with `width` new tokens each, at the same place."""

    def __init__(
        self,
        model: Any,
        cache: PagedKVCache,
        batch: int,
        width: int,
        max_blocks: int,
        used: frozenset[str],
    ) -> None:
        self._model, self._cache, self._width = model, cache, width
        tokens = batch * width
        self._tables = cache.step_tables(max_batch=batch, max_blocks=max_blocks, max_tokens=tokens)
        self._inputs = StepInputs(
            model.xp, tokens, batch, used, model.config.vocab_size,
            max_blocks * cache.allocator.block_size,
        )  # fmt: skip
        self._attend = paged_attend(model, cache, self._tables, width)
        self._readback = Readback(model.xp, tokens)
        self._replay: Callable[[], None] | None = None

    def begin(self, ids: Sequence[int], draws: Sequence[Draw]) -> None:
        """Queue the step for these sequences."""

        def load() -> None:
            self._tables.update([draw.sequence for draw in draws], self._width)
            self._inputs.load(ids, draws)

        if self._replay is None:
            self._replay = capture(self._model.xp, load, self._compute)
        load()
        self._replay()

    def go_on(self) -> None:
        """Queue the step behind it, of the same sequences with the tokens that it draws."""
        assert self._replay is not None
        self._replay()

    def read(self) -> Callable[[], list[int]]:
        """Queue the way of the drawn tokens to the host; return what waits for them."""
        return self._readback.queue(self._inputs.ids)

    def _compute(self) -> None:
        tables, inputs = self._tables, self._inputs
        hidden = self._model.hidden(inputs.ids, tables.positions, self._attend)
        options = inputs.options(tables.seqlens_k)
        cupyattn.sample(self._model.head(hidden), **options, out=inputs.ids)
        if self._width == 1:
            tables.advance()


class _Ahead(NamedTuple):
    """A step that is queued already, if the next one is what was expected."""

    step: DecodeStep
    read: Callable[[], list[int]]
    expected: list[tuple[Any, int, Any, Any, int]]


class Decoding:
    """The captured steps of a generator: one for each size of the batch and of the tables."""

    def __init__(self, model: Any, cache: PagedKVCache, *, looks_ahead: bool = True) -> None:
        self._model, self._cache = model, cache
        self._steps: dict[Any, DecodeStep] = {}
        self._looks_ahead = looks_ahead
        self._ahead: _Ahead | None = None

    def forget(self) -> None:
        """Drop the step that is queued ahead: what it was for has ended."""
        self._ahead = None

    def run(self, ids: Sequence[Sequence[int]], draws: Sequence[Draw]) -> list[list[int]]:
        """Compute as many last tokens of each sequence; return what is drawn behind each token."""
        width = len(ids[0])
        ahead, self._ahead = self._ahead, None
        if width == 1 and ahead is not None and ahead.expected == _state(draws, 0):
            step, read = ahead.step, ahead.read
        else:
            step = self._step(draws, width)
            step.begin([token for tokens in ids for token in tokens], draws)
            read = step.read()
        if width == 1 and self._looks_ahead and self._may_go_on(draws):
            step.go_on()
            self._ahead = _Ahead(step, step.read(), _state(draws, 1))
        drawn = read()
        require_drawn(drawn[: len(draws) * width])
        return [drawn[at * width : (at + 1) * width] for at in range(len(draws))]

    def _step(self, draws: Sequence[Draw], width: int) -> DecodeStep:
        size = self._cache.allocator.block_size
        batch = _power_of_two(len(draws))
        blocks = _power_of_two(max(-(-(len(each.sequence) + each.left) // size) for each in draws))
        used = used_options(draws)
        key = batch, width, blocks, used
        if key not in self._steps:
            self._steps[key] = DecodeStep(self._model, self._cache, batch, width, blocks, used)
        return self._steps[key]

    def _may_go_on(self, draws: Sequence[Draw]) -> bool:
        """Tell whether the next step is known: none ends, or needs a block.

        No sequence shares its last block, in which its newest token has just been put.
        """
        size = self._cache.allocator.block_size
        return all(
            draw.left > 1
            and len(draw.sequence) % size
            and draw.sampling.repetition_penalty == 1.0  # which weakens what is not yet known
            for draw in draws
        )


def _state(draws: Sequence[Draw], more: int) -> list[tuple[Any, int, Any, Any, int]]:
    """Return all that a step depends on beside its tokens, if each sequence has `more` of them."""
    return [
        (
            draw.sequence,
            len(draw.sequence) + more,
            draw.sequence.block_ids,
            draw.sampling,
            draw.seed,
        )
        for draw in draws
    ]


def _power_of_two(count: int) -> int:
    """Return the least power of two that is not below a count.

    Examples
    --------
    >>> [_power_of_two(count) for count in (1, 2, 3, 8, 9)]
    [1, 2, 4, 8, 16]
    """
    return 1 << (count - 1).bit_length()
