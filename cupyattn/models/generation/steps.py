"""Steps of a model over a paged cache: their inputs, packed steps, and captured decoding steps.

A packed step computes any tokens of any sequences. A captured step has a largest batch, one new
token of each sequence (or as many of each), and arrays at fixed addresses. The token that it draws
is the one that it computes next, and it advances its tables. So the next step is queued before the
host has read what this one drew, and the GPU does not wait.

With CuPy arrays a captured step is a CUDA graph. With NumPy arrays a replay is the call itself, and
a copy is made at once.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np

import cupyattn
from cupyattn import PagedKVCache, Rotary
from cupyattn.kv_cache import Sequence as CachedSequence
from cupyattn.kv_cache import StepTables
from cupyattn.models.forward import NormingAttend
from cupyattn.models.generation.options import Sampling
from cupyattn.models.generation.text import TokenModel
from cupyattn.models.weights import Norm
from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.arrays import Array, CudaArray
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error

WARM_UPS = 2
"""The first loads kernels and constants, the second fills the pool for the capture."""


def device_of(array: Array) -> AbstractContextManager[object]:
    """Return the device of an array, for a with statement."""
    return nullcontext() if isinstance(array, np.ndarray) else cast("CudaArray", array).device


def capture(
    xp: ModuleType, prepare: Callable[[], None], work: Callable[[], None]
) -> Callable[[], None]:
    """Capture work on arrays at fixed addresses; return a function that runs it.

    `prepare` fills these arrays before each run. What the work allocates comes from its own pool,
    which lives as long as the graph, so that nobody else gets that memory.
    """
    if xp is np:
        return work
    xp.cuda.get_current_stream().synchronize()  # the stream below does not wait for this one
    stream, pool = xp.cuda.Stream(non_blocking=True), xp.cuda.MemoryPool()
    with stream, xp.cuda.using_allocator(pool.malloc):
        for _ in range(WARM_UPS):
            prepare()
            work()
        stream.synchronize()
        stream.begin_capture()
        try:
            work()
        except BaseException:
            with suppress(Exception):  # the capture is broken already
                stream.end_capture()
            raise
        graph = stream.end_capture()
    kept = graph, pool, stream  # the pool has the memory that the graph works in
    return lambda: kept[0].launch()


def _current_stream() -> Any:
    return load_cupy().cuda.get_current_stream()


class Readback:
    """Copies of an array of results to the host; at most two of them are pending."""

    def __init__(self, xp: ModuleType, items: int) -> None:
        self._turn = 0
        self._places: list[tuple[np.ndarray, Any]] = []
        if xp is not np:
            for _ in range(2):
                memory = xp.cuda.alloc_pinned_memory(items * 4)
                host = np.frombuffer(memory, np.int32, items)
                self._places.append((host, xp.cuda.Event(disable_timing=True)))

    def queue(self, array: Array) -> Callable[[], list[int]]:
        """Queue a copy; return a function that waits for it and reads it.

        Read before the next but one copy is queued. Work that is queued later runs meanwhile.
        """
        if isinstance(array, np.ndarray):
            copied = array.tolist()
            return lambda: copied
        host, event = self._places[self._turn]
        self._turn = 1 - self._turn
        stream = _current_stream()
        cast("CudaArray", array).get(out=host, stream=stream, blocking=False)
        event.record(stream)

        def read() -> list[int]:
            event.synchronize()
            return host.tolist()

        return read


_ALIGNMENT = 16
_KINDS = {"temperature": "f4", "top_p": "f4", "min_p": "f4", "repetition_penalty": "f4"}
_OFF = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


class TokenDraw(NamedTuple):
    """A next token to draw, from the logits after the last token of a sequence.

    `seed` is the sample's; with the position of the token it determines the draw. `previous` has
    all tokens so far if there is a repetition penalty. `left` is how many tokens the sample may
    still have, this one included.
    """

    sequence: CachedSequence
    sampling: Sampling
    seed: int
    previous: Sequence[int]
    left: int


def used_options(draws: Iterable[TokenDraw]) -> frozenset[str]:
    """Return the options of `cupyattn.sample` that any of these needs."""
    return frozenset().union(*(draw.sampling.used for draw in draws))


class StepInputs:
    """Arrays of a step in one allocation, uploaded together to fixed addresses."""

    def __init__(
        self,
        xp: ModuleType,
        tokens: int,
        draws: int,
        used: frozenset[str],
        vocab_size: int,
        width: int,
    ) -> None:
        self._off = {**_OFF, "top_k": vocab_size}
        fields: dict[str, tuple[tuple[int, ...], str]] = {"ids": ((tokens,), "i4")}
        if used:
            fields |= {"seed": ((draws,), "i8"), "step": ((draws,), "i4")}
            fields |= {name: ((draws,), _KINDS.get(name, "i4")) for name in sorted(used)}
        if "repetition_penalty" in used:
            fields["previous"] = ((draws, width), "i4")
        starts, end = {}, 0
        for name, (shape, kind) in fields.items():
            starts[name] = end
            size = math.prod(shape) * np.dtype(kind).itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._staged = np.zeros(end, np.uint8)
        self._buffer: Array = xp.zeros(end, np.uint8)

        def pieces(flat: Array) -> dict[str, Array]:
            return {
                name: flat[starts[name] :][: math.prod(shape) * np.dtype(kind).itemsize]
                .view(np.dtype(kind))
                .reshape(shape)
                for name, (shape, kind) in fields.items()
            }

        self._on_host, self._placed = pieces(self._staged), pieces(self._buffer)
        self.ids: Array = self._placed["ids"]

    def load(self, ids: Sequence[int], draws: Sequence[TokenDraw]) -> None:
        """Fill them for a step; what is unused is token 0, drawn greedily."""
        host = self._on_host
        host["ids"][: len(ids)] = ids
        host["ids"][len(ids) :] = 0
        for name, column in host.items():
            if name == "seed":
                _fill(column, [draw.seed for draw in draws], 0)
            elif name == "step":
                _fill(column, [len(draw.sequence) for draw in draws], 0)
            elif name == "previous":
                column.fill(-1)
                for row, draw in zip(column, draws, strict=False):
                    row[: len(draw.previous)] = draw.previous
            elif name != "ids":
                off = self._off[name]
                values = [getattr(draw.sampling, name) for draw in draws]
                _fill(column, [off if value is None else value for value in values], off)
        if isinstance(self._buffer, np.ndarray):
            self._buffer[...] = self._staged
        else:  # of memory that is not pinned the driver makes a copy before the call returns
            cast("CudaArray", self._buffer).set(self._staged, stream=_current_stream())

    def options(self, step: Array | None = None) -> Keywords:
        """Return the options of `cupyattn.sample`; `step` replaces the uploaded positions."""
        if len(self._placed) == 1:
            return {"seed": 0, "temperature": 0.0}
        given = {name: array for name, array in self._placed.items() if name != "ids"}
        return given if step is None else {**given, "step": step}


def _fill(column: Array, values: Sequence[float], rest: float) -> None:
    column[: len(values)] = values
    column[len(values) :] = rest


class PagedAttend(NormingAttend):
    """Attention over a paged cache, for `Model.hidden`.

    It writes the new keys and values of a layer, normalised and rotated, and then lets the new
    queries see all of them. `width` is the number of new queries of each sequence, None where that
    differs.
    """

    def __init__(
        self, model: TokenModel, cache: PagedKVCache, tables: StepTables, width: int | None = None
    ) -> None:
        self._model, self._cache, self._tables, self._width = model, cache, tables, width

    def attended(
        self, layer: int, q: Array, k: Array, v: Array, q_norm: Norm | None, k_norm: Norm | None
    ) -> Array:
        """Return attention; see `NormingAttend.attended`."""
        given = append_options(self._model.rotary_of(layer), q, q_norm, k_norm)
        self._cache.append(layer, k, v, self._tables, **given)
        queries = q if self._width is None else q.reshape(-1, self._width, *q.shape[1:])
        options = self._model.attention_options(layer)
        seen = self._cache.attend(layer, queries, self._tables, **options)
        return seen.reshape(q.shape)


def append_options(
    rotary: Rotary | None, q: Array, q_norm: Norm | None, k_norm: Norm | None
) -> Keywords:
    """Return the options of `PagedKVCache.append` in a layer with this rotation and norms."""
    options: Keywords = {} if rotary is None else {"q": q, "rotary": rotary}
    if q_norm is not None:
        options |= {"q": q, "q_norm": q_norm.rms}
    if k_norm is not None:
        options["k_norm"] = k_norm.rms
    return options


class StepSequence(NamedTuple):
    """A sequence in a step: the tokens to compute, and the draws after the last of them.

    With `every` there is one draw after each token instead.
    """

    sequence: CachedSequence
    tokens: Sequence[int]
    draws: Sequence[TokenDraw]
    every: bool = False


def packed_step(
    model: TokenModel, cache: PagedKVCache, parts: Sequence[StepSequence]
) -> list[list[int]]:
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
    hidden = model.hidden(inputs.ids, tables.positions, PagedAttend(model, cache, tables))
    drawn: list[int] = []
    if rows:
        if rows != list(range(len(ids))):
            hidden = hidden[model.xp.asarray(np.array(rows, np.int64))]
        drawn = cupyattn.sample(model.head(hidden), **inputs.options()).tolist()
    require_drawn(drawn)
    taken = iter(drawn)
    return [[next(taken) for _ in (part.tokens if part.every else part.draws)] for part in parts]


def require_drawn(tokens: Sequence[int]) -> None:
    """Raise for the result of `cupyattn.sample` for logits that are all NaN or -inf."""
    if min(tokens, default=0) < 0:
        raise error(
            FloatingPointError,
            "logits of a next token are all NaN or -inf",
            "one of them has to be a number",
            "check the weights; what overflows float16 does not overflow float32",
        )


class DecodeStep:
    """A captured step of at most `batch` sequences with `width` new tokens each."""

    def __init__(
        self,
        model: TokenModel,
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
        self._attend = PagedAttend(model, cache, self._tables, width)
        self._readback = Readback(model.xp, tokens)
        self._replay: Callable[[], None] | None = None

    def begin(self, ids: Sequence[int], draws: Sequence[TokenDraw]) -> None:
        """Queue the step for these sequences."""

        def load() -> None:
            self._tables.update([draw.sequence for draw in draws], self._width)
            self._inputs.load(ids, draws)

        if self._replay is None:
            self._replay = capture(self._model.xp, load, self._compute)
        load()
        self._replay()

    def go_on(self) -> None:
        """Queue the next step: the same sequences with the tokens that this one draws."""
        assert self._replay is not None
        self._replay()

    def read(self) -> Callable[[], list[int]]:
        """Queue the copy of the drawn tokens to the host; return a function that waits for it."""
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
    expected: list[tuple[CachedSequence, int, array[int], Sampling, int]]


class Decoding:
    """The captured steps of a generator: one for each size of the batch and of the tables."""

    def __init__(self, model: TokenModel, cache: PagedKVCache, *, looks_ahead: bool = True) -> None:
        self._model, self._cache = model, cache
        self._steps: dict[tuple[int, int, int, frozenset[str]], DecodeStep] = {}
        self._looks_ahead = looks_ahead
        self._ahead: _Ahead | None = None

    def forget(self) -> None:
        """Drop the step that is queued ahead: its sequences have ended."""
        self._ahead = None

    def run(self, ids: Sequence[Sequence[int]], draws: Sequence[TokenDraw]) -> list[list[int]]:
        """Compute the last tokens of each sequence; return what is drawn after each token."""
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

    def _step(self, draws: Sequence[TokenDraw], width: int) -> DecodeStep:
        size = self._cache.allocator.block_size
        batch = _power_of_two(len(draws))
        blocks = _power_of_two(max(-(-(len(each.sequence) + each.left) // size) for each in draws))
        used = used_options(draws)
        key = batch, width, blocks, used
        if key not in self._steps:
            self._steps[key] = DecodeStep(self._model, self._cache, batch, width, blocks, used)
        return self._steps[key]

    def _may_go_on(self, draws: Sequence[TokenDraw]) -> bool:
        """Tell whether the next step is known: no sequence ends, or needs a block."""
        size = self._cache.allocator.block_size
        return all(
            draw.left > 1
            and len(draw.sequence) % size
            and draw.sampling.repetition_penalty == 1.0  # which weakens what is not yet known
            for draw in draws
        )


def _state(
    draws: Sequence[TokenDraw], more: int
) -> list[tuple[CachedSequence, int, array[int], Sampling, int]]:
    """Return all that a step depends on except its tokens, if each sequence has `more` of them."""
    return [
        (
            each.sequence,
            len(each.sequence) + more,
            each.sequence.block_ids,
            each.sampling,
            each.seed,
        )
        for each in draws
    ]


def _power_of_two(count: int) -> int:
    """Return the least power of two that is not below a count."""
    return 1 << (count - 1).bit_length()
