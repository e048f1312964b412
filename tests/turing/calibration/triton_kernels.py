"""Attention and a product in Triton's language, for its compiler to make Turing code of.

The algorithms are FlashAttention-2 (Dao, arXiv:2307.08691) and a tiled product. Loads are either
written where their values are used, or one tile ahead (`pipelined`): Triton 3.2 pipelines loads
itself only for GPUs with asynchronous copies.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_forward(
    q_, k_, v_, out_, lse_, tokens, scale,
    head_dim: tl.constexpr, tile_rows: tl.constexpr, tile_keys: tl.constexpr,
    pipelined: tl.constexpr,
):  # fmt: skip
    """`tile_rows` queries of a head: scores, online softmax in base 2, and sums of values."""
    head = tl.program_id(1).to(tl.int64) * tokens * head_dim
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    keys, dims = tl.arange(0, tile_keys), tl.arange(0, head_dim)
    q = tl.load(q_ + head + rows[:, None] * head_dim + dims[None, :])
    k_at = k_ + head + keys[None, :] * head_dim + dims[:, None]
    v_at = v_ + head + keys[:, None] * head_dim + dims[None, :]
    highest = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    out = tl.zeros([tile_rows, head_dim], tl.float32)
    scale *= LOG2_E
    if pipelined:
        k = tl.load(k_at)
        v = tl.load(v_at)
    for _ in range(0, tokens, tile_keys):
        if pipelined:
            k_next = tl.load(k_at + tile_keys * head_dim)
            v_next = tl.load(v_at + tile_keys * head_dim)
        else:
            k = tl.load(k_at)
        scores = tl.dot(q, k)
        maximum = tl.maximum(highest, tl.max(scores, 1) * scale)
        p = tl.math.exp2(scores * scale - maximum[:, None])
        decay = tl.math.exp2(highest - maximum)
        sums = tl.sum(p, 1)
        out = out * decay[:, None]
        if not pipelined:
            v = tl.load(v_at)
        out = tl.dot(p.to(tl.float16), v, out)
        total = total * decay + sums
        highest = maximum
        k_at += tile_keys * head_dim
        v_at += tile_keys * head_dim
        if pipelined:
            k = k_next
            v = v_next
    tl.store(lse_ + tl.program_id(1) * tokens + rows, highest + tl.math.log2(total))
    out = out / total[:, None]
    tl.store(out_ + head + rows[:, None] * head_dim + dims[None, :], out.to(tl.float16))


@triton.jit
def attention_backward_dkdv(
    q_, k_, v_, dout_, dk_, dv_, lse_, delta_, tokens,
    head_dim: tl.constexpr, tile_rows: tl.constexpr, tile_keys: tl.constexpr,
):  # fmt: skip
    """dK and dV of `tile_keys` keys of a head; K is scaled beforehand, for exponents in base 2."""
    head = tl.program_id(1).to(tl.int64) * tokens * head_dim
    keys = tl.program_id(0) * tile_keys + tl.arange(0, tile_keys)
    rows, dims = tl.arange(0, tile_rows), tl.arange(0, head_dim)
    own = head + keys[:, None] * head_dim + dims[None, :]
    k = tl.load(k_ + own)
    v = tl.load(v_ + own)
    dk = tl.zeros([tile_keys, head_dim], tl.float32)
    dv = tl.zeros([tile_keys, head_dim], tl.float32)
    q_at = q_ + head + rows[None, :] * head_dim + dims[:, None]
    dout_at = dout_ + head + rows[:, None] * head_dim + dims[None, :]
    statistics = tl.program_id(1) * tokens + rows
    for _ in range(0, tokens, tile_rows):
        q = tl.load(q_at)
        lse = tl.load(lse_ + statistics)
        p = tl.math.exp2(tl.dot(k, q) - lse[None, :])
        dout = tl.load(dout_at)
        dv = tl.dot(p.to(tl.float16), dout, dv)
        delta = tl.load(delta_ + statistics)
        dp = tl.dot(v, tl.trans(dout))
        ds = (p * (dp - delta[None, :])).to(tl.float16)
        dk = tl.dot(ds, tl.trans(q), dk)
        q_at += tile_rows * head_dim
        dout_at += tile_rows * head_dim
        statistics += tile_rows
    tl.store(dk_ + own, dk.to(tl.float16))
    tl.store(dv_ + own, dv.to(tl.float16))


@triton.jit
def attention_backward_dq(
    q_, k_, v_, dout_, dq_, lse_, delta_, tokens,
    head_dim: tl.constexpr, tile_rows: tl.constexpr, tile_keys: tl.constexpr,
):  # fmt: skip
    """dQ of `tile_rows` queries of a head; K is scaled beforehand, as for dK and dV."""
    head = tl.program_id(1).to(tl.int64) * tokens * head_dim
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    keys, dims = tl.arange(0, tile_keys), tl.arange(0, head_dim)
    own = head + rows[:, None] * head_dim + dims[None, :]
    q = tl.load(q_ + own)
    dout = tl.load(dout_ + own)
    lse = tl.load(lse_ + tl.program_id(1) * tokens + rows)
    delta = tl.load(delta_ + tl.program_id(1) * tokens + rows)
    dq = tl.zeros([tile_rows, head_dim], tl.float32)
    k_at = k_ + head + keys[None, :] * head_dim + dims[:, None]
    v_at = v_ + head + keys[None, :] * head_dim + dims[:, None]
    for _ in range(0, tokens, tile_keys):
        k = tl.load(k_at)
        v = tl.load(v_at)
        p = tl.math.exp2(tl.dot(q, k) - lse[:, None])
        ds = (p * (tl.dot(dout, v) - delta[:, None])).to(tl.float16)
        dq = tl.dot(ds, tl.trans(k), dq)
        k_at += tile_keys * head_dim
        v_at += tile_keys * head_dim
    tl.store(dq_ + own, dq.to(tl.float16))


@triton.jit
def product(
    a_, b_, c_, m, n, k,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, tile_depth: tl.constexpr,
):  # fmt: skip
    """A tile of ``a @ b``."""
    across = n // tile_columns
    rows = tl.program_id(0) // across * tile_rows + tl.arange(0, tile_rows)
    columns = tl.program_id(0) % across * tile_columns + tl.arange(0, tile_columns)
    depth = tl.arange(0, tile_depth)
    a_at = a_ + rows[:, None] * k + depth[None, :]
    b_at = b_ + depth[:, None] * n + columns[None, :]
    sums = tl.zeros([tile_rows, tile_columns], tl.float32)
    for _ in range(0, k, tile_depth):
        sums = tl.dot(tl.load(a_at), tl.load(b_at), sums)
        a_at += tile_depth
        b_at += tile_depth * n
    tl.store(c_ + rows[:, None] * n + columns[None, :], sums.to(tl.float16))
