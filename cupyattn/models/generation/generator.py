"""Generation with continuous batching: a model, a paged cache of the right size and a scheduler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from random import Random
from threading import Lock
from types import ModuleType
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from cupyattn import PagedKVCache, Scheduler
from cupyattn.distributed.group import fingerprint
from cupyattn.kv_cache import Work
from cupyattn.models.config import Config
from cupyattn.models.generation.continuations import Generation, appended, kept, padded
from cupyattn.models.generation.options import (
    MOST_SEQUENCES,
    SEED_BITS,
    Prompt,
    Sampling,
    as_cache_dtype,
    as_captured,
    as_count,
    as_ends,
    as_lengths,
    as_prompts,
    as_sampling,
    as_seed,
    require_positions,
)
from cupyattn.models.generation.steps import (
    Decoding,
    StepSequence,
    TokenDraw,
    device_of,
    packed_step,
)
from cupyattn.models.generation.text import TokenModel
from cupyattn.models.parallel import agreed
from cupyattn.ops.linear.cpu import KeptWeights, kept_weights
from cupyattn.runtime.errors import error, shown

Result = TypeVar("Result")


class SerialCalls:
    """Calls that run one at a time: a call that comes during another one waits for its end.

    A stream that nobody reads is cancelled when its iterator is collected. That can happen within a
    step, a submission or a cancellation, even while the lock of the allocator is held.
    """

    def __init__(self) -> None:
        self._within = Lock()
        self._left: list[Callable[[], None]] = []

    def make(self, call: Callable[..., Result], *given: object) -> Result:
        """Make a call, and then the calls that came during it."""
        if self._within.locked():  # in another call, which the scheduler allows or refuses
            return call(*given)
        try:
            with self._within:
                return call(*given)
        finally:
            self._make_left()

    def leave(self, call: Callable[..., None], *given: object) -> None:
        """Make a call now, or as soon as the current one has ended."""
        self._left.append(partial(call, *given))
        self._make_left()

    def _make_left(self) -> None:
        while self._left and not self._within.locked():
            with self._within:
                self._left.pop()()


SHARE = 0.9
"""The share of the free memory that a cache may take; steps use the rest."""
_MOST_BLOCK_SIZE = 2**31 - 16
"""A multiple of 16; a cache counts its slots in int32."""
_BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "int8": 8, "int4": 4}


def blocks_at_hand(
    model: TokenModel, dtype: DTypeLike, block_size: int, lengths: Sequence[int]
) -> int:
    """Return how many blocks sequences of these lengths fill, or the most that memory holds."""
    block_size = as_count("block_size", block_size, 16, _MOST_BLOCK_SIZE)
    needed = [-(-length // block_size) for length in lengths]
    room = int(SHARE * free_bytes(model.xp)) // block_bytes(model.config, dtype, block_size)
    if room < max(needed):
        raise error(
            MemoryError,
            f"a sequence of {max(lengths)} tokens needs {max(needed)} blocks of the cache",
            f"the free memory holds {room}",
            "generate fewer tokens, pass num_blocks, or keep the cache in cache_dtype='int8'",
        )
    return min(sum(needed), room)


def block_bytes(config: Config, dtype: DTypeLike, block_size: int) -> int:
    """Return the size of a block in all layers."""
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    scale = 32 if name.startswith("int") else 0
    bits = sum(
        heads.num_kv_heads * (heads.head_dim * _BITS.get(name, 32) + scale)
        for heads in config.heads
    )
    return 2 * block_size * bits // 8


def free_bytes(xp: ModuleType) -> int:
    """Return the free memory of the current GPU, or of the host for numpy."""
    if xp is not np:
        free, _ = xp.cuda.runtime.memGetInfo()
        return free + xp.get_default_memory_pool().free_bytes()
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not every system tells
        return 1 << 33


MAX_BATCH = 32
MOST_COPIES = 2**30
"""The most bytes of float32 copies of a model's 16-bit NumPy weights, while it generates."""
LONGEST = 2048
"""The default room for a sequence in a cache, in tokens, if the model has as many positions."""


class Generator:
    """A model that generates for many prompts at once, from one paged cache.

    `cupyattn.models.Model.generate` makes one for each call. A generator that you keep also keeps
    its cache, so that common beginnings of prompts are computed once, and takes prompts at any
    time.

    Parameters
    ----------
    model : Model
        A model that `cupyattn.models.load` or `random` returned.
    num_blocks, block_size : int, optional
        Blocks of the cache, and tokens in a block (a multiple of 16). By default there is room for
        `lengths`, or as much of it as 90 % of the free memory holds.
    lengths : sequence of int, optional
        Tokens of the expected sequences, of which `max_batch` run at once; 2,048 each by default.
    cache_dtype : {"int8", "int4"}, optional
        The format of keys and values; the model's dtype by default.
    max_batch, max_tokens : int
        The most sequences, and the most tokens, in a step: longer prompts are computed in parts.
    preempt : {"recompute", "swap"}
        What happens to a sequence that makes room for another; see `cupyattn.Scheduler`.
    num_host_blocks : int
        Blocks of host memory, for "swap", which needs at least one.
    lookup : int
        Speculative decoding: at most so many tokens that followed an earlier occurrence of the last
        tokens are computed in one step, and kept if the model chooses them. 0 is off. Only greedy
        tokens are predicted. The result is the same, unless two tokens are equally likely within
        the rounding of steps of one and of several tokens.
    captured : bool, optional
        Whether steps of decoding are captured once and replayed: by default on a GPU, as CUDA
        graphs. On NumPy arrays such a step is called directly.

    Attributes
    ----------
    cache : PagedKVCache
        ``cache.statistics()`` and ``cache.picture()`` show how full it is.
    scheduler : Scheduler
        The running and the waiting sequences.

    Raises
    ------
    TypeError, ValueError
        As `cupyattn.PagedKVCache` and `cupyattn.Scheduler`.

    Notes
    -----
    Use a generator from one thread at a time.

    On NumPy arrays, products of 16-bit weights compute in float32. While a generator is not `idle`,
    it keeps float32 copies of such weights, of at most 1 GiB and half of the free memory; other
    weights are converted in every step. Change weights only while it is idle.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import models
    >>> tiny = models.PRESETS["gpt2"]._replace(
    ...     num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=2, head_dim=8,
    ...     intermediate_size=32, vocab_size=50,
    ... )
    >>> model = models.random(tiny, dtype="float32", xp=np)
    >>> generator = models.Generator(model, num_blocks=8)
    >>> first = generator.submit([1, 2, 3], max_new_tokens=4)
    >>> second = generator.submit([5, 6], max_new_tokens=2, n=2, temperature=1.0, seed=7)
    >>> while not generator.idle:
    ...     finished = generator.step()
    >>> [len(output) for output in (*first.outputs, *second.outputs)]
    [4, 2, 2]
    """

    def __init__(
        self,
        model: Any,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        lengths: Sequence[int] | None = None,
        cache_dtype: object = None,
        max_batch: int = MAX_BATCH,
        max_tokens: int = 2048,
        preempt: Literal["recompute", "swap"] = "recompute",
        num_host_blocks: int = 0,
        lookup: int = 0,
        captured: bool | None = None,
    ) -> None:
        config, dtype = model.config, as_cache_dtype(cache_dtype, model.dtype)
        if lengths is not None:
            model = model.for_length(max(as_lengths(lengths), default=0))
        max_batch = as_count("max_batch", max_batch, 1, MOST_SEQUENCES)
        self._model, self._lookup = model, as_count("lookup", lookup, 0)
        alike = {
            "num_blocks": num_blocks, "block_size": block_size, "cache_dtype": dtype,
            "max_batch": max_batch, "max_tokens": max_tokens, "preempt": preempt,
            "num_host_blocks": num_host_blocks, "lookup": lookup,
        }  # fmt: skip
        with self._device():
            at_hand = 0
            if num_blocks is None:
                most = [min(config.max_positions, LONGEST)] * max_batch
                given = [] if lengths is None else as_lengths(lengths)
                running = sorted(given or most, reverse=True)[:max_batch]
                room = [length + self._lookup for length in running]
                at_hand = blocks_at_hand(model, dtype, block_size, room)
            at_hand = agreed(model.group, alike, model.xp, at_hand)
            num_blocks = at_hand if num_blocks is None else num_blocks
            self.cache = PagedKVCache(
                config.num_layers, num_blocks, block_size,
                [heads.num_kv_heads for heads in config.heads],
                [heads.head_dim for heads in config.heads],
                dtype=dtype, xp=model.xp, prefix_caching=True, num_host_blocks=num_host_blocks,
            )  # fmt: skip
        self.scheduler = Scheduler(
            self.cache, max_batch=max_batch,
            max_tokens=max(as_count("max_tokens", max_tokens, 1), max_batch),
            preempt=preempt,
            window_size=None if config.global_layers else config.window_size,
        )  # fmt: skip
        self._decoding = Decoding(model, self.cache) if as_captured(captured, model) else None
        self._copies = KeptWeights(min(MOST_COPIES, free_bytes(np) // 2) if model.xp is np else 0)
        self._running: dict[int, Generation] = {}
        self._calls = SerialCalls()

    @property
    def idle(self) -> bool:
        """Whether everything that was submitted has finished."""
        return self.scheduler.idle

    def submit(
        self,
        prompt: object,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: object = (),
        n: int = 1,
    ) -> Generation:
        """Request continuations of one prompt, which `step` computes.

        Parameters and errors are those of `Model.generate`.
        """
        sampling = as_sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        one = self._prompts(prompt, only_one=True)
        given = one, max_new_tokens, sampling, seed, stop, n
        (submitted,) = self._calls.make(self._submit, *given)
        return submitted

    def step(self) -> tuple[Generation, ...]:
        """Compute a step: one token of each sequence that generates, and as many of prompts as fit.

        Returns
        -------
        tuple of Generation
            The generations that this step finished.
        """
        return self._calls.make(self._step)

    def _step(self) -> tuple[Generation, ...]:
        with self._device(), kept_weights(self._copies):
            self.scheduler.step(self._forward)
        finished = []
        for number, generation in list(self._running.items()):
            for sample in generation.take():
                self.scheduler.cancel(generation.request, sample)
            if generation.finished:
                finished.append(generation)
                del self._running[number]
        if self.idle:
            self._copies.forget()
            if self._decoding is not None:
                self._decoding.forget()
        return tuple(finished)

    def cancel(self, generation: Generation) -> None:
        """End a generation early, and free its blocks."""
        self._calls.make(self._cancel, generation)

    def _cancel(self, generation: Generation) -> None:
        self.scheduler.cancel(generation.request)
        self._running.pop(generation.request.number, None)
        generation.end()

    def generate(
        self,
        prompts: object,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: object = (),
        n: int = 1,
    ) -> list[Any]:
        """Generate for all prompts: as `Model.generate`, from this generator's cache."""
        sampling = as_sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        given = self._prompts(prompts), max_new_tokens, sampling, seed, stop, n
        submitted = self._calls.make(self._submit, *given)
        try:
            while not all(generation.finished for generation in submitted):
                self.step()
        except BaseException:
            for generation in reversed(submitted):  # first those that wait and have no blocks
                self.cancel(generation)
            raise
        return [each.results if n > 1 else each.results[0] for each in submitted]

    def stream(self, prompt: Any, **options: Any) -> Iterator[Any]:
        """Generate for one prompt, piece by piece: as `Model.stream`, from this cache."""
        if options.get("n", 1) != 1:
            raise error(
                ValueError, f"got n = {shown(options['n'])}", "a stream has only one sample",
                "call generate with n, or stream once for each seed",
            )  # fmt: skip
        pieces = self._pieces(self.submit(prompt, **options))
        next(pieces)  # a begun iterator cancels its request when it is collected
        return pieces

    def _pieces(self, generation: Generation) -> Iterator[Any]:
        try:
            yield None
            while not generation.finished:
                yield from generation.news()  # another stream may have made steps for this one
                self.step()
            yield from generation.news()
        finally:
            self._calls.leave(self._cancel, generation)

    def _prompts(self, prompts: object, *, only_one: bool = False) -> list[Prompt]:
        read = as_prompts(prompts, self._model)
        if only_one and len(read) != 1:
            raise error(
                ValueError, f"got {len(read)} prompts", "submit and stream continue one prompt",
                "pass them to generate, or make one call for each",
            )  # fmt: skip
        return read

    def _submit(
        self,
        prompts: list[Prompt],
        max_new_tokens: int,
        sampling: Sampling,
        seed: int | None,
        stop: Any,
        n: int,
    ) -> list[Generation]:
        """Check everything, then submit everything."""
        own = as_ends(stop, self._model)
        ends = [own.of(prompt, self._model) for prompt in prompts]
        new = as_count("max_new_tokens", max_new_tokens, 1)
        for prompt in prompts:
            self._require_positions(len(prompt.ids), new)
        ids = [prompt.ids for prompt in prompts]
        alike = {
            "prompts": f"{shown(ids)} ({fingerprint(repr(ids).encode())})",
            "max_new_tokens": new, **sampling._asdict(), "n": n, "seed": seed,
            "stop": [sorted(each.ids) for each in ends], "stop strings": own.strings,
        }  # fmt: skip
        first = agreed(self._model.group, alike, self._model.xp, as_seed(seed))
        seeds = Random(first)
        submitted: list[Generation] = []
        try:
            for prompt, end in zip(prompts, ends, strict=True):
                drawn = first if seed is not None else seeds.getrandbits(SEED_BITS)
                request = self.scheduler.submit(prompt.ids, max_new_tokens=new, n=n, stop=end.ids)
                tokenizer = self._model.tokenizer if prompt.is_text or end.strings else None
                submitted.append(Generation(prompt, request, sampling, drawn, end, tokenizer))
        except BaseException:
            for generation in submitted:
                self.scheduler.cancel(generation.request)
            raise
        self._running |= {each.request.number: each for each in submitted}
        return submitted

    def _require_positions(self, tokens: int, new: int) -> None:
        require_positions(tokens, new, self._model.config.max_positions)
        if tokens + new - 1 > self._model.positions:
            raise error(
                ValueError,
                f"got a prompt of {tokens} tokens and max_new_tokens = {new}",
                f"this generator's rotary tables are for up to {self._model.positions} positions: "
                "longer sequences have other frequencies",
                f"pass Generator(model, lengths=[{tokens + new}])",
            )

    def _device(self) -> AbstractContextManager[object]:
        return device_of(self._model.weights.embedding)

    def _forward(self, batch: tuple[Work, ...]) -> list[list[Any]]:
        """Compute a step of the scheduler."""
        generations = [self._running[work.request.number] for work in batch]
        draws = [each.draws(work) for each, work in zip(generations, batch, strict=True)]
        decodes = all(len(work.tokens) == len(work.samples) == 1 for work in batch)
        if decodes and self._lookup and (drafts := self._drafts(batch, generations)):
            return self._verified(batch, [draw for (draw,) in draws], drafts)
        if decodes and self._decoding is not None:
            return self._decoding.run([work.tokens for work in batch], [each for (each,) in draws])
        pairs = zip(batch, draws, strict=True)
        parts = [StepSequence(work.sequence, work.tokens, drawn) for work, drawn in pairs]
        return packed_step(self._model, self.cache, parts)

    def _drafts(
        self, batch: tuple[Work, ...], generations: list[Generation]
    ) -> list[list[int]] | None:
        """Append drafts to the sequences; return them, None if there is nothing to verify."""
        if not all(generation.greedy for generation in generations):
            return None
        pairs = zip(batch, generations, strict=True)
        drafts = [generation.draft(work, self._lookup) for work, generation in pairs]
        longest = max(len(work.sequence) for work in batch) + self._lookup
        if self._decoding is not None and longest <= self._model.positions:
            # A captured step has as many tokens of each sequence.
            drafts = padded(drafts, self._lookup)
        return drafts if any(drafts) and appended(batch, drafts) else None

    def _verified(
        self, batch: tuple[Work, ...], draws: list[TokenDraw], drafts: list[list[int]]
    ) -> list[list[list[int]]]:
        """Compute the drafts after the last tokens; keep what the model chooses as well."""
        tokens = [[*work.tokens, *drafted] for work, drafted in zip(batch, drafts, strict=True)]
        if self._decoding is not None and len({len(each) for each in tokens}) == 1:
            chosen = self._decoding.run(tokens, draws)
        else:
            pairs = zip(batch, tokens, strict=True)
            parts = [StepSequence(work.sequence, each, (), every=True) for work, each in pairs]
            chosen = packed_step(self._model, self.cache, parts)
        return kept(batch, drafts, chosen)
