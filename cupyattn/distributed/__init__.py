"""Attention over several GPUs: longer sequences than one device holds.

Each rank holds some tokens of every sequence. Keys and values go round a ring of ranks
(`ring_attention`) on what carries bytes already: NCCL, MPI, copies between the GPUs of one process,
or threads of NumPy arrays. `run` starts ranks in this process; `nccl_group` and `launched_group`
join those of several. `column_linear` and `row_linear` spread the weights of a layer, and sum its
results (`all_reduce`).

In a notebook with two GPUs, such as Kaggle's with two T4s; ``pip install 'cupyattn[distributed]'``
brings NCCL, and without it GPUs copy from one to the other:

    def of_rank(group):
        q, k, v = (cupy.asarray(shard(x, group.rank, group.size)) for x in (q_host, k_host, v_host))
        return cupy.asnumpy(ring_attention(q, k, v, group=group, causal=True))

    out = unshard(run(of_rank, devices=[0, 1]))

A process for each GPU, started by ``mpiexec -n 2 python program.py``:

    with launched_group("/a/folder/of/this/run") as group:
        out = ring_attention(q, k, v, group=group, causal=True)
"""

from cupyattn.distributed.communicators import Communicator
from cupyattn.distributed.failures import RankFailedError
from cupyattn.distributed.group import Group
from cupyattn.distributed.processes import launched_group, nccl_group, unique_id
from cupyattn.distributed.ring import ring_attention, ring_attention_backward
from cupyattn.distributed.shards import positions, shard, unshard
from cupyattn.distributed.tensor_parallel import (
    all_reduce,
    column_linear,
    column_linear_backward,
    row_linear,
)
from cupyattn.distributed.threads import run

__all__ = [
    "Communicator",
    "Group",
    "RankFailedError",
    "all_reduce",
    "column_linear",
    "column_linear_backward",
    "launched_group",
    "nccl_group",
    "positions",
    "ring_attention",
    "ring_attention_backward",
    "row_linear",
    "run",
    "shard",
    "unique_id",
    "unshard",
]
