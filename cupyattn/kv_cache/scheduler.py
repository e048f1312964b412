"""Continuous batching: which sequences run in a step, which may begin, and which wait for blocks.

Moves of blocks, within the pool, to host memory and back, have one order.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from heapq import heappop, heappush
from threading import Lock
from typing import Literal

from cupyattn.kv_cache.allocator import BlockAllocator
from cupyattn.kv_cache.arguments import as_count, as_ends, as_tokens, uncopied
from cupyattn.kv_cache.pool import Copy, OutOfBlocksError
from cupyattn.kv_cache.requests import (
    Forward,
    Request,
    RequestRun,
    SchedulerCache,
    Taken,
    Work,
    as_ending,
    as_sampled,
    as_swaps,
    going,
    has_whole,
    require_between_steps,
    require_cache,
    require_forward,
)
from cupyattn.kv_cache.sequence import Sequence
from cupyattn.runtime.errors import error, shown


class Admission:
    """The blocks of sequences whose tokens see `left` tokens before their own; all, if None."""

    def __init__(self, allocator: BlockAllocator, left: int | None, max_tokens: int) -> None:
        self._allocator = allocator
        self._left = left
        self._max_tokens = max_tokens

    def most_blocks(self, tokens: int) -> int:
        """Return the most blocks that a sequence needs at once on its way to so many tokens."""
        if self._left is None:
            return self._blocks(tokens)
        # Blocks of a step's tokens and of the keys that the first sees; both ends within a block.
        seen = self._left + self._max_tokens
        return min(self._blocks(tokens), self._blocks(seen - 1) + 1)

    def require_possible(self, tokens: int, new_tokens: int) -> None:
        """Refuse a request that has no room even if it runs alone."""
        allocator = self._allocator
        # The last new token is not computed.
        blocks = self.most_blocks(tokens + new_tokens - 1) + allocator.watermark
        if blocks > allocator.num_blocks:
            raise error(
                ValueError,
                f"got {tokens} tokens and max_new_tokens = {new_tokens}, which need {blocks} "
                "blocks with the watermark",
                f"the cache has {allocator.num_blocks}",
                "make the cache larger or the request shorter",
            )

    def evict(self, runs: Iterable[RequestRun]) -> None:
        """Free the blocks that no later token of their sequences sees, except the last token's."""
        if self._left is None:
            return
        for run in runs:
            assert run.sequence is not None
            # The next token is at position len(sequence).
            run.sequence.evict_before(max(0, len(run.sequence) - max(self._left, 1)))

    def require_room(self, run: RequestRun, found: int = 0) -> None:
        """Refuse a run that has no room to go on to its end.

        Parts of a prompt come later, but are not begun without room for all of it; `found` of its
        tokens are cached.
        """
        allocator, tokens = self._allocator, len(run.tokens)
        blocks = min(self.most_blocks(tokens), self._blocks(tokens) - self._blocks(found))
        available = self._available()
        if blocks > available:
            raise error(
                OutOfBlocksError,
                f"the next sequence needs {blocks} blocks with a watermark of "
                f"{allocator.watermark}, and {available + allocator.watermark} are free or cached",
                "a sequence begins when all of its tokens have room",
                "free blocks that others took from the allocator",
            )

    def begin(self, run: RequestRun, budget: int, *, alone: bool) -> list[int]:
        """Give a run that has none a sequence, and return the tokens to compute in this step."""
        allocator = self._allocator
        done = allocator.find(run.tokens)
        self.require_room(run, done)
        tokens = run.tokens[done : done + budget]
        # A whole prompt counts, though parts come later, and once, though it may be recomputed.
        counted = 0 if run.request.counted else len(run.tokens)
        try:
            run.sequence = allocator.add(run.tokens[: done + len(tokens)], counted=counted)
        except OutOfBlocksError:
            if not alone or self._left is None:
                raise
            # Its cached prefix alone fills the pool: begin with less of it.
            room = self._available() * allocator.block_size
            done = allocator.find(run.tokens[:room])
            tokens = run.tokens[done:room][:budget]
            run.sequence = allocator.add(run.tokens[: done + len(tokens)], counted=counted)
        run.request.counted = True
        return tokens

    def _available(self) -> int:
        allocator = self._allocator
        return allocator.num_free + allocator.num_cached - allocator.watermark

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._allocator.block_size)


def as_left(window_size: object) -> int | None:
    """Return how far a window (left, right) reaches back; None means no end."""
    if window_size is None:
        return None
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise error(
            TypeError,
            f"got window_size = {shown(window_size)}",
            "it is a pair (left, right), as attention takes it, or None",
            "pass (left, 0): how many tokens before its own a token sees",
        )
    left, _ = (
        None if side is None else as_count(f"window_size's {name}", side, 0)
        for name, side in zip(("left", "right"), window_size, strict=True)
    )
    return left


class BlockMoves:
    """The copies that sequences call for: each is run after those that were called for before it.

    Parameters
    ----------
    cache : SchedulerCache
        Runs them.
    swaps : bool
        Whether blocks move to host memory to make room.
    """

    def __init__(self, cache: SchedulerCache, *, swaps: bool) -> None:
        self._cache = cache
        self._swaps = swaps
        self._waiting: list[Copy] = []
        # What a fault would leave undone: copies that an append has called for, a run's move.
        self._missing = False
        self._moving: RequestRun | None = None
        self._dropped: list[RequestRun] = []

    def append(self, sequence: Sequence, tokens: Iterable[int]) -> None:
        """Let a sequence append; its copies are run before anything is written."""
        before, self._missing = self._missing, True
        try:
            copies = sequence.append(tokens)
        except OutOfBlocksError:
            self._missing = before
            raise
        self._waiting += copies
        self._missing = bool(self._waiting)

    def run(self) -> None:
        """Run the copies so far."""
        if self._waiting:
            self._cache.copy(tuple(self._waiting))
        self._missing = False
        self._waiting = []

    def undo(self, running: Items[RequestRun], others: Items[RequestRun]) -> None:
        """Cut tokens that have no keys and values yet, and drop the copies that were not run.

        `running` are those that no forward should have freed, moved or cut.
        """
        self._stop_moving()
        for run in running:
            if run.sequence is not None and not has_whole(run.sequence, run.written):
                self._dropped.append(run)
        for run in (*running, *others):
            sequence = run.sequence
            if sequence is None or not has_whole(sequence, run.written):
                continue
            if len(sequence) == run.written:
                continue
            # One that has just begun may have found what another should have written.
            if self._missing or not run.written:
                self._dropped.append(run)
            sequence.truncate(run.written or sequence.num_cached_tokens)
        for run in self._dropped:  # after all are cut: nothing not written may stay cached
            run.drop()
        self._dropped, self._waiting = [], []
        self._missing = False

    def _stop_moving(self) -> None:
        """Let a run whose move was cut short be recomputed."""
        run = self._moving
        if run is None:
            return
        if run.runs:
            assert run.sequence is not None
            run.sequence.truncate(0)  # its blocks are found already, and may hold nothing
        run.drop()
        self._moving = None

    def swap_out(self, run: RequestRun) -> None:
        """Take the blocks of a run; their contents move to host memory, if that has room."""
        assert run.sequence is not None
        self._moving = run
        try:
            copies = run.sequence.swap_out() if self._swaps else None
        except OutOfBlocksError:  # host memory is full
            copies = None
        if copies is None:
            run.drop()
        else:
            self.run()
            self._cache.copy_to_host(copies)
        self._moving = None

    def swap_in(self, run: RequestRun, tokens: Iterable[int]) -> None:
        """Swap a run in, and append the tokens that it computes next."""
        assert run.sequence is not None
        self._moving = run
        try:
            copies = run.sequence.swap_in()
            self.run()
            self._cache.copy_from_host(copies)
            self.append(run.sequence, tokens)
        except OutOfBlocksError:
            self._stop_moving()
            raise
        self._moving = None


class Scheduler:
    """A loop of continuous batching, without a model in it.

    Each step runs every sequence that it can: those that generate by one token, prompts by as many
    as fit. Requests are submitted at any time and run in their order. If blocks run out, the last
    one frees its blocks and waits.

    Parameters
    ----------
    cache : PagedKVCache, or an object with the attributes of `cupyattn.kv_cache.SchedulerCache`
        An allocator, and the copies of its blocks.
    max_batch : int
        The most sequences in a step.
    max_tokens : int
        The most tokens in a step, at least `max_batch`. A longer prompt is computed in parts.
    preempt : {"recompute", "swap"}
        What becomes of the sequence that makes room: its blocks are given back, and later computed
        anew, or they move to host memory (the cache's ``num_host_blocks``) while that has room.
    window_size : (left, right), optional
        The window of the model's attention, if all of its layers have one (the largest): blocks
        that no later token of a sequence sees are given back after each step.

    Raises
    ------
    ValueError
        For a number out of range, another `preempt`, or "swap" of a cache without host blocks.
    TypeError
        If a number is no integer, window_size no pair, or the cache has no allocator or no copies.

    See Also
    --------
    cupyattn.kv_cache.Request : the result of `submit`.
    cupyattn.kv_cache.Work : a request's part of a step, of which `step` gives the model a list.
    cupyattn.kv_cache.StepTables : the tables of a step of a `PagedKVCache`.

    Notes
    -----
    The earliest request always continues, so each one ends. Batches are those of Orca (Yu et al.,
    OSDI 2022); preemption is that of Kwon et al. (arXiv:2309.06180).

    It is used by one thread at a time. From `forward` or a copy `submit` alone may be called.

    Examples
    --------
    A cache without memory, and a model whose next token is the sum of all before, modulo 100:

    >>> import cupyattn
    >>> class Blocks:
    ...     allocator = cupyattn.BlockAllocator(num_blocks=8, block_size=4)
    ...     def copy(self, copies): ...
    ...     copy_to_host = copy_from_host = copy
    >>> scheduler = cupyattn.Scheduler(Blocks(), max_batch=4, max_tokens=16)
    >>> request = scheduler.submit([1, 2, 3], max_new_tokens=4)
    >>> def forward(batch):
    ...     return [[sum((*w.request.tokens, *w.request.outputs[s])) % 100 for s in w.samples]
    ...             for w in batch]
    >>> while not scheduler.idle:
    ...     finished = scheduler.step(forward)
    >>> request.outputs
    ([6, 12, 24, 48],)
    """

    def __init__(
        self,
        cache: SchedulerCache,
        *,
        max_batch: int,
        max_tokens: int,
        preempt: Literal["recompute", "swap"] = "recompute",
        window_size: tuple[int | None, int | None] | None = None,
    ) -> None:
        swaps = as_swaps(preempt)
        require_cache(cache, swaps=swaps)
        self._moves = BlockMoves(cache, swaps=swaps)
        self._allocator = cache.allocator
        self._max_batch = as_count("max_batch", max_batch, 1)
        self._max_tokens = as_count("max_tokens", max_tokens, self._max_batch)
        self._admission = Admission(self._allocator, as_left(window_size), self._max_tokens)
        self._submitted = self._num_preempted = 0
        self._stepping = Lock()
        self._running: list[RequestRun] = []  # the earliest first
        self._waiting: list[RequestRun] = []  # a heap
        self._finished: list[Request] = []  # that no step has returned yet
        self._taken: Taken | None = None  # this and the next: what `_settle` brings to its end
        self._cancelled = False

    __reduce_ex__ = uncopied("two would free each other's sequences", "make another one")

    @property
    def num_running(self) -> int:
        """How many sequences took part in the last step and go on."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """How many sequences wait, those that were preempted among them."""
        self._forget_ended()
        return len(self._waiting)

    @property
    def num_preempted(self) -> int:
        """How often a sequence made room for another, so far."""
        return self._num_preempted

    @property
    def idle(self) -> bool:
        """Whether everything that was submitted has finished."""
        return not (self.num_waiting or self._running or self._finished or self._taken)

    def submit(
        self, tokens: Iterable[int], *, max_new_tokens: int, n: int = 1, stop: Iterable[int] = ()
    ) -> Request:
        """Ask for continuations of a prompt.

        Parameters
        ----------
        tokens : iterable of int
            The prompt, of at least one token.
        max_new_tokens : int
            The most tokens to add.
        n : int
            How many samples to draw; they share the prompt's blocks.
        stop : iterable of int
            Tokens that end a sample; it ends with the first of them.

        Returns
        -------
        Request
            Its ``outputs`` grow with each step.

        Raises
        ------
        ValueError
            If the prompt is empty, a number is out of range, n is more than `max_batch`, or the
            cache has too few blocks for the request even if it runs alone.
        TypeError
            If a token or a number is no integer.
        """
        prompt, ends = as_tokens(tokens), as_ends(stop)
        max_new_tokens = as_count("max_new_tokens", max_new_tokens, 1)
        n = as_count("n", n, 1, self._max_batch)
        if not prompt:
            raise error(
                ValueError, "got a prompt of no tokens", "the first new token follows from a token",
                "begin with the token that the model begins texts with",
            )  # fmt: skip
        self._admission.require_possible(len(prompt), max_new_tokens)
        request = Request(self._submitted, prompt, max_new_tokens, n, ends, self)
        self._submitted += 1
        heappush(self._waiting, RequestRun(request, tuple(range(n)), prompt))
        return request

    def cancel(self, request: Request, sample: int | None = None) -> None:
        """End a request with the outputs that it has; nothing happens if it has finished.

        Parameters
        ----------
        request : Request
            One of this scheduler's.
        sample : int, optional
            Which of its samples ends; all of them by default.

        Raises
        ------
        ValueError
            If the request is another scheduler's, or has no such sample.
        TypeError
            If it is no Request, or the sample no integer.
        RuntimeError
            Within a step.
        """
        require_between_steps("cancel", self._stepping.locked())
        ending = as_ending(request, sample, self)
        self._settle()
        self._cancelled = True
        request.end(*ending)
        # What has no blocks is left to a later pass, which is one for any number of requests.
        if request.counted and request in [run.request for run in self._waiting]:
            self._forget_ended()
        elif request.counted:
            self._running = going(self._running)

    def step(self, forward: Forward) -> tuple[Request, ...]:
        """Run the model once on the tokens that are to be computed now.

        Parameters
        ----------
        forward : callable
            Takes a tuple of `Work`, and returns for each a list of the next tokens of its samples,
            of none for a work without samples. It writes keys and values of the whole batch,
            layer by layer, before the layer attends: works may share blocks that this step fills.
            All copies have been run when it is called. It is not called if nothing is submitted.
            Of a work's only sample it may return several next tokens, as a list in the list, if it
            has appended all but the last to the work's sequence, and written them. It does nothing
            else to these sequences: the scheduler frees, moves and cuts them.

        Returns
        -------
        tuple of Request
            Those that finished with this step.

        Raises
        ------
        OutOfBlocksError
            If blocks that others took from the allocator leave no room for even one sequence.
        ValueError
            If `forward` returned other than as many tokens as were asked for, several for a sample
            whose sequence has not grown by all but the last; or if it freed, moved or cut one.
        TypeError
            If it is no function, or returned no list for each work, or what is no token.
        RuntimeError
            Within another step.
        Exception
            Whatever `forward` or a copy raises, a MemoryError or Ctrl-C anywhere. Nothing is lost
            then: a later step computes what this one should have, or returns what it has finished.
        """
        require_between_steps("step", self._stepping.locked())
        require_forward(forward)
        with self._stepping:
            self._settle()
            self._forget_ended()
            try:
                self._compute(forward)
            finally:
                self._settle()
            finished, self._finished = tuple(self._finished), []
            return finished

    def _compute(self, forward: Forward) -> None:
        """Compute a step; only `_settle` remains to be done."""
        self._taken = taken = Taken((*self._running, *self._waiting))
        preempted, batch = self._num_preempted, self._continue()
        if (
            self._num_preempted == preempted
        ):  # otherwise the preempted one would take the room again
            batch += self._admit(self._max_tokens - sum(len(work.tokens) for work in batch))
        self._moves.run()
        lengths = [len(work.sequence) for work in batch]
        sampled = as_sampled(batch, lengths, forward(tuple(batch))) if batch else []
        taken.prepare(self._running, batch, sampled)

    def _settle(self) -> None:
        """Finish or undo a step that has begun; each part of it can be repeated."""
        if (taken := self._taken) is not None and taken.ready:
            finished = taken.settle()
            self._running = taken.running
            self._admission.evict(self._running)
            self._finished = list(dict.fromkeys((*self._finished, *finished)))
        elif taken is not None:
            self._undo(taken)
        self._taken = None

    def _forget_ended(self) -> None:
        if self._cancelled:
            self._running, self._waiting = going(self._running), sorted(going(self._waiting))
            self._cancelled = False

    def _continue(self) -> list[Work]:
        """Let those that run append, the earliest first; for want of blocks the last makes room."""
        batch: list[Work] = []
        budget = self._max_tokens
        while len(batch) < len(self._running):
            run = self._running[len(batch)]
            assert run.sequence is not None
            later = len(self._running) - len(batch) - 1  # one token is theirs, each
            tokens = run.tokens[run.written : run.written + budget - later]
            try:
                self._moves.append(run.sequence, tokens)
            except OutOfBlocksError:
                if len(self._running) == 1:
                    raise
                self._preempt(self._running[-1])
            else:
                batch.append(run.work(tokens))
                budget -= len(tokens)
        return batch

    def _preempt(self, run: RequestRun) -> None:
        """Take the blocks of the last that runs."""
        self._num_preempted += 1
        self._moves.swap_out(run)
        heappush(self._waiting, self._running.pop())

    def _admit(self, budget: int) -> list[Work]:
        """Let those that wait run, in their order, as far as blocks, places and tokens reach."""
        batch: list[Work] = []
        places = self._max_batch - sum(len(run.samples) for run in self._running)
        while self._waiting and budget and len(self._waiting[0].samples) <= places:
            run = self._waiting[0]
            try:
                tokens = self._begin(run, budget)
            except OutOfBlocksError:
                if self._running:
                    break
                raise
            self._running.append(heappop(self._waiting))
            batch.append(run.work(tokens))
            budget, places = budget - len(tokens), places - len(run.samples)
        return batch

    def _begin(self, run: RequestRun, budget: int) -> list[int]:
        """Give a run its blocks, and return the tokens to compute in this step."""
        if run.sequence is None:
            return self._admission.begin(run, budget, alone=not self._running)
        self._admission.require_room(run)
        tokens = run.tokens[run.written : run.written + budget]
        self._moves.swap_in(run, tokens)
        return tokens

    def _undo(self, taken: Taken) -> None:
        """After a step that failed: cut what has no keys and values yet, in every sequence."""
        taken.give_back()
        known = dict.fromkeys((*taken.runs, *self._running, *self._waiting))
        self._moves.undo(self._running, [run for run in known if run not in self._running])
        self._waiting = sorted(run for run in known if not run.runs)  # which is a heap
        self._running = sorted(run for run in known if run.runs)
