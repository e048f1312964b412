"""Which sequences may begin: how many blocks each needs, with a sliding window and without."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cupyattn.kv_cache.allocator import BlockAllocator
from cupyattn.kv_cache.arguments import as_count
from cupyattn.kv_cache.pool import OutOfBlocksError
from cupyattn.kv_cache.requests import Run
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
        # Those of a step's tokens, and of what the first of them sees; both ends within a block.
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

    def evict(self, runs: Iterable[Run]) -> None:
        """Give back what no later token of their sequences sees; each one's last token stays."""
        if self._left is None:
            return
        for run in runs:
            assert run.sequence is not None
            # The next token stands at position len(sequence).
            run.sequence.evict_before(max(0, len(run.sequence) - max(self._left, 1)))

    def require_room(self, run: Run, found: int = 0) -> None:
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
                f"the next sequence needs {blocks} blocks beside a watermark of "
                f"{allocator.watermark}, and {available + allocator.watermark} are free or cached",
                "a sequence begins when all of its tokens have room",
                "give back blocks that others took from the allocator",
            )

    def begin(self, run: Run, budget: int, *, alone: bool) -> list[int]:
        """Give a run that has none a sequence, and return the tokens to compute in this step."""
        allocator = self._allocator
        done = allocator.find(run.tokens)
        self.require_room(run, done)
        tokens = run.tokens[done : done + budget]
        # A prompt counts whole, though parts of it come later, and once, though it may begin anew.
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


def as_left(window_size: Any) -> int | None:
    """Read how far a window (left, right) reaches back; None stands for no end."""
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
