"""Attention over packed sequences: each sequence is a dense call of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupyattn.ops.attention.reference.dense import AttentionGrads, attention, attention_backward
from cupyattn.runtime.precision import Float64


class PackedSequence(NamedTuple):
    """One sequence of a packed batch, as a dense call of batch 1."""

    rows: slice
    keys: slice
    options: dict[str, Any]
    """Options of `scores.ScoreBlocks`, as this sequence has them."""


def sequences(
    cu_seqlens_q: NDArray[Any], cu_seqlens_k: NDArray[Any], options: dict[str, Any]
) -> Iterator[PackedSequence]:
    """Yield the sequences of a packed batch.

    `options` are those of `scores.ScoreBlocks` for the whole batch: arrays (B,) or (B, H), and mask
    and bias that broadcast to (B, H, longest of q, longest of k).
    """
    bounds = zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True)
    for b, ((first, end), (first_key, end_key)) in enumerate(bounds):
        own = {**options, "first_batch": b}
        for name in ("mask", "bias"):
            if (scores := options.get(name)) is not None:
                own[name] = scores[score_index(scores.shape, b, end - first, end_key - first_key)]
        for name in ("q_offset", "seqused_k", "alibi_slopes"):
            given = np.asarray(options.get(name))
            if given.ndim == (2 if name == "alibi_slopes" else 1):
                own[name] = given[b : b + 1]
        yield PackedSequence(slice(first, end), slice(first_key, end_key), own)


def score_index(shape: tuple[int, ...], b: int, rows: int, keys: int) -> tuple[slice, ...]:
    """Where an array that broadcasts to (B, H, rows, keys) has what belongs to sequence b.

    Examples
    --------
    >>> score_index((4, 1, 1, 9), 2, 5, 7)
    (slice(2, 3, None), slice(None, None, None), slice(None, None, None), slice(0, 7, None))
    """
    own = (slice(b, b + 1), slice(None), slice(0, rows), slice(0, keys))[4 - len(shape) :]
    return tuple(
        slice(None) if extent == 1 else part for extent, part in zip(shape, own, strict=True)
    )


def attention_varlen(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    cu_seqlens_q: NDArray[Any],
    cu_seqlens_k: NDArray[Any],
    /,
    *,
    attend: Callable[..., Any] = attention,
    **options: Any,
) -> tuple[Float64, Float64]:
    """Attention of each sequence's queries to its own keys.

    Parameters
    ----------
    q : (total_q, H, D), k : (total_k, G, D), v : (total_k, G, Dv) floats
    cu_seqlens_q, cu_seqlens_k : (B + 1,) ints
        Where the rows of each sequence begin, and where the last one's end; later rows give
        zeros.
    attend : callable
        Computes the dense attention of a sequence.
    **options
        See `sequences`.

    Returns
    -------
    out : (total_q, H, Dv) float64
    lse : (H, total_q) float64
    """
    out = np.zeros((*q.shape[:2], v.shape[2]))
    lse = np.zeros((q.shape[1], q.shape[0]))
    for rows, keys, own in sequences(cu_seqlens_q, cu_seqlens_k, options):
        results = attend(q[None, rows], k[None, keys], v[None, keys], **own)
        out[rows], lse[:, rows] = (result[0] for result in results)
    return out, lse


def attention_varlen_backward(
    dout: NDArray[Any],
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    out: NDArray[Any],
    lse: NDArray[Any],
    cu_seqlens_q: NDArray[Any],
    cu_seqlens_k: NDArray[Any],
    /,
    *,
    dlse: NDArray[Any] | None = None,
    **options: Any,
) -> AttentionGrads:
    """Gradients of sum(dout * out) + sum(dlse * lse), of all sequences.

    dbias and dsinks are summed over the sequences that share an item; dq, dk and dv are 0 in rows
    of no sequence.

    Parameters
    ----------
    dout, out : (total_q, H, Dv), lse, dlse : (H, total_q) floats
        As in `dense.attention_backward`.
    q, k, v, cu_seqlens_q, cu_seqlens_k
        As in `attention_varlen`.
    **options
        See `sequences`.
    """
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    bias, sinks = options.get("bias"), options.get("sinks")
    dbias = None if bias is None else np.zeros(np.shape(bias))
    dsinks = None if sinks is None else np.zeros(np.shape(sinks))
    for b, (rows, keys, own) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k, options)):
        grads = attention_backward(
            *(dout[None, rows], q[None, rows], k[None, keys], v[None, keys], out[None, rows]),
            lse[None, :, rows],
            dlse=None if dlse is None else dlse[None, :, rows],
            **own,
        )
        dq[rows], dk[keys], dv[keys] = grads.dq[0], grads.dk[0], grads.dv[0]
        if dbias is not None:
            lengths = rows.stop - rows.start, keys.stop - keys.start
            dbias[score_index(dbias.shape, b, *lengths)] += grads.dbias
        if dsinks is not None:
            dsinks += grads.dsinks
    return AttentionGrads(dq, dk, dv, dbias, dsinks)
