"""Requests to a scheduler, its work for a model and a cache, and the tokens that a step has drawn.

The tokens of a step are taken all or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Any, NamedTuple, Protocol
from weakref import ref

from cupyattn.kv_cache.allocator import BlockAllocator
from cupyattn.kv_cache.arguments import as_count, as_tokens, uncopied
from cupyattn.kv_cache.pool import Copy
from cupyattn.kv_cache.sequence import Sequence
from cupyattn.runtime.errors import error, shown


class SchedulerCache(Protocol):
    """The cache that `Scheduler` needs: an allocator, and the copies that the allocator calls for.

    Each method runs its copies in their order, before any work that is queued after the call.
    """

    @property
    def allocator(self) -> BlockAllocator:
        """The allocator of the cache's blocks."""

    def copy(self, copies: tuple[Copy, ...], /) -> None:
        """Copy blocks within the device's pool; a later dst may be an earlier src."""

    def copy_to_host(self, copies: tuple[Copy, ...], /) -> None:
        """Copy blocks of the device to blocks of host memory."""

    def copy_from_host(self, copies: tuple[Copy, ...], /) -> None:
        """Copy blocks of host memory to blocks of the device."""


def require_cache(cache: Any, *, swaps: bool) -> None:
    """Raise unless it has what `Scheduler` needs; blocks of the host and copies only to swap."""
    copies = ("copy", "copy_to_host", "copy_from_host") if swaps else ("copy",)
    allocator = getattr(cache, "allocator", None)
    missing = [] if isinstance(allocator, BlockAllocator) else ["allocator"]
    missing += [name for name in copies if not callable(getattr(cache, name, None))]
    if missing:
        raise error(
            TypeError,
            f"cache is {shown(cache)} of type {type(cache).__name__} without {', '.join(missing)}",
            "it has the BlockAllocator of its blocks as .allocator, and the methods copy, "
            "copy_to_host and copy_from_host that move their contents",
            "pass a PagedKVCache, or an object that owns the arrays of keys and values and has a "
            "BlockAllocator in it",
        )
    if swaps and not cache.allocator.num_host_blocks:
        raise error(
            ValueError,
            "preempt = 'swap' and a cache of no host blocks",
            "sequences move to host memory, and are recomputed only where that is full",
            "pass num_host_blocks= to it, or preempt='recompute'",
        )


class Request:
    """A prompt to continue, as `Scheduler.submit` returns it.

    Attributes
    ----------
    tokens : tuple of int
        The prompt.
    max_new_tokens : int
        When a sample ends at the latest.
    n : int
        How many samples there are.
    stop : frozenset of int
        Tokens with which a sample ends.
    outputs : tuple of list of int
        The new tokens of each sample so far, with the one that ended it.
    finished : bool
        Whether every sample has ended, or the request was cancelled.
    """

    __slots__ = (
        "_open",
        "_owner",
        "counted",
        "max_new_tokens",
        "n",
        "number",
        "outputs",
        "stop",
        "tokens",
    )

    def __init__(
        self,
        number: int,
        tokens: list[int],
        max_new_tokens: int,
        n: int,
        stop: Iterable[int],
        owner: object,
    ) -> None:
        self._owner = ref(owner)
        self.number = number
        self.tokens = tuple(tokens)
        self.max_new_tokens = max_new_tokens
        self.n = n
        self.stop = frozenset(stop)
        self.outputs: tuple[list[int], ...] = tuple([] for _ in range(n))
        self._open = set(range(n))
        self.counted = False  # whether the allocator has counted its prompt

    __reduce_ex__ = uncopied(
        "a scheduler would neither fill a copy nor cancel it", "copy its tokens and outputs"
    )

    def __repr__(self) -> str:
        lengths = ", ".join(str(len(output)) for output in self.outputs)
        state = "finished" if self.finished else "not finished"
        return f"<Request of {len(self.tokens)} tokens, {lengths} new ones, {state}>"

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return not self._open

    def until_end(self, length: int, tokens: list[int]) -> tuple[list[int], bool]:
        """Return the next tokens that are kept after so many new ones, and whether it ends."""
        room = self.max_new_tokens - length
        for count, token in enumerate(tokens, 1):
            if count == room or token in self.stop:
                return tokens[:count], True
        return tokens, False

    def belongs_to(self, owner: object) -> bool:
        """Tell whether it was submitted to this scheduler."""
        return self._owner() is owner

    def end(self, *samples: int) -> None:
        """Let samples be ended, those that are not."""
        self._open.difference_update(samples)

    def going(self, samples: Iterable[int]) -> tuple[int, ...]:
        """Return those of the samples that have not ended."""
        return tuple(sample for sample in samples if sample in self._open)


def as_ending(request: object, sample: int | None, owner: object) -> Iterable[int]:
    """Return the samples that a cancellation ends; refuse a request that is not the owner's."""
    if not isinstance(request, Request):
        raise error(
            TypeError,
            f"got {shown(request)} as a request",
            "it is a Request",
            "pass a request that this scheduler's submit returned",
        )
    if not request.belongs_to(owner):
        raise error(
            ValueError,
            f"got {request!r} of another scheduler",
            "a scheduler ends its own requests",
            "pass a request that this scheduler's submit returned",
        )
    return range(request.n) if sample is None else [as_count("sample", sample, 0, request.n - 1)]


def require_forward(forward: object) -> None:
    """Raise TypeError for a `forward` that is not callable, also without anything to compute."""
    if not callable(forward):
        raise error(
            TypeError,
            f"got {shown(forward)} as forward",
            "it is a function that takes a tuple of Work, and returns the next tokens of each",
            "pass the function that runs the model",
        )


def require_between_steps(call: str, within: bool) -> None:
    """Refuse a call from `forward` or a copy: it would change the running step."""
    if within:
        raise error(
            RuntimeError,
            f"{call} was called within a step",
            "forward and copies may call submit alone",
            f"call {call} when step has returned",
        )


class Work(NamedTuple):
    """A sequence's part in a step of the model.

    The model computes `tokens`, the last ones of `sequence`, and writes their keys and values
    into the sequence's blocks; the first of them has position ``len(sequence) - len(tokens)``.

    Attributes
    ----------
    request : Request
        What the work is for.
    samples : tuple of int
        The samples, by their numbers in the request, that need a next token: of the logits of the
        last token as many tokens are drawn. None while a prompt is computed in parts.
    sequence : Sequence
        All tokens up to those of this step.
    tokens : tuple of int
        The tokens to compute.
    """

    request: Request
    samples: tuple[int, ...]
    sequence: Sequence
    tokens: tuple[int, ...]


Forward = Callable[[tuple[Work, ...]], Items[Iterable[int]]]


class RequestRun:
    """A request's way through the scheduler: all of its samples, then one when each has its own.

    `tokens` are the prompt and the drawn tokens. The first `written` of them are in the cache, by
    steps that ended well: none yet for one that has just begun, whatever the cache had.
    """

    __slots__ = ("request", "samples", "sequence", "tokens", "written")

    def __init__(
        self,
        request: Request,
        samples: tuple[int, ...],
        tokens: list[int],
        sequence: Sequence | None = None,
    ) -> None:
        self.request = request
        self.samples = samples
        self.tokens = tokens
        self.sequence = sequence  # None before it runs, and when it has to be recomputed
        self.written = 0 if sequence is None else len(sequence)

    def __lt__(self, other: RequestRun) -> bool:
        """Compare by the order of requests, then of samples."""
        return (self.request.number, self.samples) < (other.request.number, other.samples)

    def work(self, tokens: list[int]) -> Work:
        """Return its part in a step that computes these tokens."""
        assert self.sequence is not None
        whole = len(self.sequence) == len(self.tokens)
        return Work(self.request, self.samples if whole else (), self.sequence, tuple(tokens))

    @property
    def runs(self) -> bool:
        """Whether its sequence is in the device's pool; otherwise it waits."""
        sequence = self.sequence
        return sequence is not None and not sequence.is_freed and not sequence.is_swapped

    def leave(self) -> None:
        """Drop the samples that were cancelled; free the blocks if none are left."""
        self.samples = self.request.going(self.samples)
        if not self.samples:
            self.drop()

    def drop(self) -> None:
        """Free its blocks: it has to be recomputed."""
        if self.sequence is not None and not self.sequence.is_freed:
            self.sequence.free()
        self.sequence, self.written = None, 0


def has_whole(sequence: Sequence, length: int) -> bool:
    """Tell whether the device's pool has at least so many tokens of a sequence."""
    return not sequence.is_freed and not sequence.is_swapped and len(sequence) >= length


def as_swaps(preempt: object) -> bool:
    """Read whether sequences that make room move to host memory."""
    if not isinstance(preempt, str) or preempt not in ("recompute", "swap"):
        raise error(
            ValueError,
            f"got preempt = {shown(preempt)}",
            "allowed are 'recompute' and 'swap'",
            "'recompute' needs no host memory",
        )
    return bool(preempt == "swap")


def as_sampled(
    batch: list[Work], lengths: list[int], returned: Iterable[Iterable[object]]
) -> list[list[list[int]]]:
    """Read the result of `forward`: for each work the next tokens of each sample.

    `lengths` are those of the works' sequences before; of several tokens all but the last stand
    behind them.
    """
    try:
        works = iter(returned)
    except TypeError:
        raise error(
            TypeError,
            f"forward returned {shown(returned)} of type {type(returned).__name__}",
            "it returns the next tokens of each work, in the works' order",
            "return a list for each work, of a token for each of its samples: [[7], [], [3]]",
        ) from None
    # Before the sequences are looked at: a generator may still work on them.
    sampled = [_of_samples(tokens) for tokens in works]
    for work, length in zip(batch, lengths, strict=True):
        if not has_whole(work.sequence, length):
            raise error(
                ValueError,
                f"forward has left {work.sequence!r} of a work that had {length} tokens",
                "its sequences are the scheduler's: forward may append to them, but not free, "
                "swap out or cut them",
                "end a request by cancel, between steps",
            )
    counts = [len(samples) for samples in sampled]
    wanted = [len(work.samples) for work in batch]
    if counts != wanted:
        raise error(
            ValueError,
            f"forward returned {shown(counts)} tokens for its works",
            f"their samples are {shown(wanted)}",
            "return a list for each work, of a token for each of its samples",
        )
    for work, length, samples in zip(batch, lengths, sampled, strict=True):
        grown = len(work.sequence) - length
        if any(len(tokens) != 1 + grown for tokens in samples) or (grown and len(samples) != 1):
            raise error(
                ValueError,
                f"forward returned {shown([len(tokens) for tokens in samples])} tokens for the "
                f"samples of a work whose sequence has grown by {grown}",
                "a sample has one next token; an only sample may have several, of which all but "
                "the last are appended to the sequence",
                "append them and write their keys and values, or return one token",
            )
    return sampled


def _of_samples(tokens: Iterable[object]) -> list[list[int]]:
    """Read a work's next tokens: one for each sample, or a list of several."""
    if isinstance(tokens, list) and any(isinstance(each, list) for each in tokens):
        return [as_tokens(each) if isinstance(each, list) else as_tokens([each]) for each in tokens]
    return [[token] for token in as_tokens(tokens)]


class Taken:
    """The end of a step, first made ready, then settled.

    Whatever cuts a step short, a MemoryError or Ctrl-C: until it is `ready` nothing of it can be
    seen, and forks are all that there is to give back. Then it only has to be settled: that says
    what things are, not how they change, so that it may be begun again.

    Parameters
    ----------
    runs : iterable of RequestRun
        All that the scheduler knows when the step begins.
    """

    def __init__(self, runs: Iterable[RequestRun]) -> None:
        self.runs = tuple(runs)
        self.ready = False
        self.running: list[RequestRun] = []
        """The runs that continue, the earliest first."""
        self._forks: list[RequestRun] = []
        self._ended: list[RequestRun] = []
        self._grown: list[
            tuple[list[int], int, list[int]]
        ] = []  # a list, its length before, and what follows
        self._going: list[
            tuple[RequestRun, tuple[int, ...], int]
        ] = []  # its samples, what is written
        self._finished_samples: list[tuple[Request, int]] = []

    def prepare(
        self, running: Items[RequestRun], batch: Items[Work], sampled: Items[list[list[int]]]
    ) -> None:
        """Apply the result: samples end, or continue, each with a separate sequence."""
        for run, work, drawn in zip(running, batch, sampled, strict=True):
            if work.samples:
                self._take(run, drawn)
            else:
                self._go_on(run, run.samples)
        self.ready = True

    def _take(self, run: RequestRun, drawn: list[list[int]]) -> None:
        request, going = run.request, []
        for sample, tokens in zip(run.samples, drawn, strict=True):
            output = request.outputs[sample]
            taken, ends = request.until_end(len(output), tokens)
            self._grown.append((output, len(output), taken))
            if ends:
                self._finished_samples.append((request, sample))
            else:
                going.append((sample, taken))
        if not going:
            self._ended.append(run)
            return
        (first, tokens), *others = going
        self._go_on(run, (first,))
        for sample, of_sample in others:
            fork = RequestRun(request, (sample,), [*run.tokens, *of_sample])
            self._forks.append(fork)
            self.running.append(fork)
            assert run.sequence is not None
            fork.sequence = run.sequence.fork()
            fork.written = len(fork.sequence)
        self._grown.append((run.tokens, len(run.tokens), tokens))

    def _go_on(self, run: RequestRun, samples: tuple[int, ...]) -> None:
        assert run.sequence is not None
        self.running.append(run)
        self._going.append((run, samples, len(run.sequence)))

    def settle(self) -> list[Request]:
        """Make all of it so; return the requests that have finished with it."""
        for tokens, length, more in self._grown:
            tokens[length:] = more
        for run, samples, written in self._going:
            run.samples, run.written = samples, written
        for request, sample in self._finished_samples:
            request.end(sample)
        for run in self._ended:
            run.drop()
        return [request for request in dict.fromkeys(run.request for run in self._ended)
                if request.finished]  # fmt: skip

    def give_back(self) -> None:
        """Give back the forks of one that was not ready."""
        for fork in self._forks:
            fork.drop()


def going(runs: Iterable[RequestRun]) -> list[RequestRun]:
    """Let go of the samples that were cancelled; return the runs that have others."""
    known = list(runs)
    for run in known:
        run.leave()
    return [run for run in known if run.samples]
