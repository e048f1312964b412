"""How full a cache is."""

from __future__ import annotations

from typing import NamedTuple

from cupyattn.kv_cache.allocator import BlockAllocator


class CacheStatistics(NamedTuple):
    """How full a cache is.

    Attributes
    ----------
    used, free, cached : int
        Blocks that sequences use (or `BlockAllocator.allocate` gave), that hold nothing, and that
        no sequence uses but `BlockAllocator.add` may find. Together they are the pool.
    fragmentation : float
        The share of the slots in used blocks that hold no token, 0 if no block is used.
    prefix_hit_rate : float
        The share of the tokens of all sequences so far that `BlockAllocator.add` found cached, 0
        if there was none. A scheduler counts each prompt once and whole, in whatever parts it is
        computed.
    """

    used: int
    free: int
    cached: int
    fragmentation: float
    prefix_hit_rate: float


def statistics_of(allocator: BlockAllocator) -> CacheStatistics:
    """Count the blocks of a pool, and the slots in them."""
    used, added = allocator.num_used, allocator.num_added_tokens
    slots = used * allocator.block_size
    return CacheStatistics(
        used,
        allocator.num_free,
        allocator.num_cached,
        allocator.num_unused_slots / slots if slots else 0.0,
        allocator.num_found_tokens / added if added else 0.0,
    )
