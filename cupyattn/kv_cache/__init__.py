"""Paged KV cache: the blocks of sequences, who shares them, and which sequences run when."""

from cupyattn.kv_cache.allocator import BlockAllocator
from cupyattn.kv_cache.pool import Copy, OutOfBlocksError
from cupyattn.kv_cache.requests import Request, SchedulerCache, Work
from cupyattn.kv_cache.scheduler import Scheduler
from cupyattn.kv_cache.sequence import Sequence

__all__ = [
    "BlockAllocator",
    "Copy",
    "OutOfBlocksError",
    "Request",
    "Scheduler",
    "SchedulerCache",
    "Sequence",
    "Work",
]
