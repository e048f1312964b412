"""Attention over several GPUs: longer sequences than one card holds.

Each rank holds some tokens of every sequence. Keys and values go round a ring of ranks
(`ring_attention`) on what carries bytes already: NCCL, MPI, copies between the GPUs of one process,
or threads of NumPy arrays. `run` starts ranks in this process; `nccl_group` and `launched_group`
join those of several.

In a notebook with two GPUs:

    def of_rank(group):
        q, k, v = (cupy.asarray(shard(x, group.rank, group.size)) for x in (q_host, k_host, v_host))
        return cupy.asnumpy(ring_attention(q, k, v, group=group, causal=True))

    out = unshard(run(of_rank, devices=[0, 1]))

A process for each GPU, started by ``mpiexec -n 2 python program.py``:

    with launched_group("/a/folder/of/this/run") as group:
        out = ring_attention(q, k, v, group=group, causal=True)
"""

from cupyattn.distributed.communicators.protocol import Communicator
from cupyattn.distributed.failures import RankFailedError
from cupyattn.distributed.group import Group
from cupyattn.distributed.placement import positions, shard, unshard
from cupyattn.distributed.processes import launched_group, nccl_group, unique_id
from cupyattn.distributed.ring import ring_attention
from cupyattn.distributed.ring_backward import ring_attention_backward
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
