"""Attention over several GPUs: longer sequences than one card holds.

Each rank holds some tokens of every sequence. Keys and values go round a ring of ranks
(`ring_attention`) on what carries bytes already: NCCL, MPI, copies between the GPUs of one process,
or threads of NumPy arrays. `run` starts ranks in this process; `nccl_group` and `launched_group`
join those of several.
"""

from cupyattn.distributed.communicators.protocol import Communicator
from cupyattn.distributed.failures import RankFailedError
from cupyattn.distributed.group import Group
from cupyattn.distributed.placement import positions, shard, unshard
from cupyattn.distributed.processes import launched_group, nccl_group, unique_id
from cupyattn.distributed.ring import ring_attention, ring_attention_backward
from cupyattn.distributed.threads import run

__all__ = [
    "Communicator",
    "Group",
    "RankFailedError",
    "launched_group",
    "nccl_group",
    "positions",
    "ring_attention",
    "ring_attention_backward",
    "run",
    "shard",
    "unique_id",
    "unshard",
]
