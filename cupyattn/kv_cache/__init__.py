"""Paged KV cache: the blocks of sequences, prefix sharing, and the scheduling of requests."""

from cupyattn.kv_cache.allocator import BlockAllocator
from cupyattn.kv_cache.paged import CacheStatistics, PagedKVCache
from cupyattn.kv_cache.pool import Copy, OutOfBlocksError
from cupyattn.kv_cache.requests import Request, SchedulerCache, Work
from cupyattn.kv_cache.scheduler import Scheduler
from cupyattn.kv_cache.sequence import Sequence
from cupyattn.kv_cache.tables import StepTables

__all__ = [
    "BlockAllocator",
    "CacheStatistics",
    "Copy",
    "OutOfBlocksError",
    "PagedKVCache",
    "Request",
    "Scheduler",
    "SchedulerCache",
    "Sequence",
    "StepTables",
    "Work",
]
