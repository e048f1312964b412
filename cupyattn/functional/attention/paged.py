"""Attention over a paged key-value cache."""

from __future__ import annotations

from typing import Any

from cupyattn import reference
from cupyattn.arrays import Array, Operands, adopt
from cupyattn.errors import error
from cupyattn.functional.backend import device_of
from cupyattn.functional.outputs import named_out
from cupyattn.functional.rounding import round_into
from cupyattn.ops.attention.decode import decode_attention
from cupyattn.ops.attention.decode_problem import DecodeProblem, decode_problem
from cupyattn.ops.attention.problem import ARRAY_FIXES
from cupyattn.ops.checks import require_bool


def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seqlens_k: Array,
    /,
    *,
    cu_seqlens_q: Array | None = None,
    max_seqlen_q: int = 1,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    return_lse: bool = False,
    out: Array | tuple[Array, Array] | None = None,
    workspace: Array | None = None,
) -> Any:
    r"""Attend from the last tokens of each sequence to all of its tokens, which lie in blocks.

    The step of decoding: 1 to 16 query tokens a sequence, whose own keys and values are in the
    cache already. Letters: B batch, Sq query tokens, H query heads, G key-value heads (H a multiple
    of G), D head dim (1 to 256).

    Parameters
    ----------
    q : array (B, Sq, H, D)
        Queries. All arrays of a call are CuPy or all are NumPy. q and the caches share one dtype:
        float16, float32 or bfloat16; NumPy arrays outside of the emulator may be float64. Their
        last axis is contiguous, the others may have any stride.
    k_cache, v_cache : array (num_blocks, block_size, G, D)
        The pools of blocks. block_size is any multiple of 16. Slots that hold no token of a
        sequence may hold anything, NaN too.
    block_table : int32 array (B, max_blocks)
        The blocks of each sequence: token j is in slot ``j % block_size`` of block
        ``block_table[b, j // block_size]``. Entries behind a sequence's last block are not read,
        and neither are those of blocks that window_size hides from all of its queries: they may
        be -1.
    seqlens_k : int32 or int64 array (B,)
        Tokens of each sequence, those of q included: query i stands at position
        ``seqlens_k - Sq + i``. A sequence of 0 gives zeros and a lse of -inf.
    cu_seqlens_q, max_seqlen_q : optional
        Not available yet, but for their defaults: sequences with different numbers of queries.
    causal : bool
        Keep only keys up to the query's own position; with one query token that is all.
    softmax_scale : float, optional
        Factor of the scores; ``D ** -0.5`` by default.
    window_size : (left, right), optional
        Keep only keys from ``left`` before a query's position to ``right`` behind it; None on a
        side is unbounded. Blocks that all queries have left behind are not read.
    softcap, sinks, alibi_slopes : optional
        As in `attention`.
    k_scales, v_scales : optional
        Not available yet: caches of integers.
    return_lse : bool
        Return the log-sum-exp of the scores too.
    out : array, or (out, lse) with return_lse, optional
        Where to write the result: the last axis of each array is contiguous, the others may have
        any stride, and they overlap no input.
    workspace : array, optional
        Scratch memory for the parts of sequences that several CTAs share: of any dtype, from a
        multiple of 16 bytes on. If it is too small the error says how many bytes there have to be.
        Allocated if not given.

    Returns
    -------
    out : array (B, Sq, H, D), dtype of q
    lse : array (B, H, Sq), float32 (float64 for float64 arrays)
        Only with return_lse: natural log of the softmax denominator.

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, or a dtype that is not allowed.
    ValueError
        For shapes, strides or options that do not fit, or an out that overlaps an input; and where
        values are checked (`backend`; NumPy arrays always) for lengths beyond what the table can
        hold and for ids of blocks that do not exist. A GPU takes such a length as the nearest that
        is allowed, and reads wherever a wrong id says.
    NotImplementedError
        For more than 16 query tokens a sequence, and for what is not available yet.
    RuntimeError
        On a GPU, as `attention`.

    Notes
    -----
    PagedAttention (Kwon et al., arXiv:2309.06180) with the keys split over all multiprocessors as
    in Flash-Decoding, in equal shares that the device works out from seqlens_k: no length is read
    by the host, and a call runs on the current stream without synchronising. Within a block that
    a window hides in part, tokens are read and get a weight of 0, so they may not hold NaN.

    Examples
    --------
    Two sequences, of 3 and 20 tokens, in blocks of 16:

    >>> import numpy as np, cupyattn
    >>> rng = np.random.default_rng(0)
    >>> k_cache, v_cache = rng.standard_normal((2, 4, 16, 2, 8), dtype=np.float32)
    >>> table = np.array([[2, -1], [3, 0]], np.int32)
    >>> q = rng.standard_normal((2, 1, 4, 8), dtype=np.float32)
    >>> out = cupyattn.paged_attention(q, k_cache, v_cache, table, np.array([3, 20], np.int32))

    The first one's tokens are in block 2:

    >>> dense = cupyattn.attention(q[:1], k_cache[2:3, :3], v_cache[2:3, :3])
    >>> np.allclose(out[:1], dense)
    True
    """
    _refuse("cu_seqlens_q", cu_seqlens_q, "sequences with different numbers of queries are")
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        _refuse(name, scales, "caches of integers are")
    if cu_seqlens_q is None and max_seqlen_q != 1:
        raise error(
            ValueError,
            f"max_seqlen_q = {max_seqlen_q} without cu_seqlens_q",
            "it belongs to packed queries (total, H, D); of q (B, Sq, H, D) Sq says the same",
            "leave it out",
        )
    require_bool("return_lse", return_lse)
    operands = adopt(
        {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table,
         "seqlens_k": seqlens_k, "alibi_slopes": alibi_slopes, "sinks": sinks,
         "workspace": workspace}
        | named_out(out, ("out", "lse") if return_lse else ("out",)),
        ARRAY_FIXES,
    )  # fmt: skip
    problem = decode_problem(operands, (causal, softmax_scale, window_size, softcap))
    device = device_of(operands)
    if device is None:
        results = _on_cpu(problem, operands)
    else:
        results = decode_attention(device, problem, operands, return_lse=return_lse)
    return (results["out"], results["lse"]) if return_lse else results["out"]


def _refuse(name: str, given: Any, what: str) -> None:
    if given is not None:
        raise error(
            NotImplementedError,
            f"{name} was given",
            f"{what} not there yet, neither on a GPU nor on the CPU",
            "leave it out",
        )


def _on_cpu(problem: DecodeProblem, operands: Operands) -> dict[str, Array]:
    arrays, attention = operands.arrays, problem.attention
    names = ("q", "k_cache", "v_cache", "block_table", "seqlens_k")
    exact, lse = reference.paged_attention(
        *(arrays[name] for name in names),
        softmax_scale=attention.softmax_scale,
        window_size=attention.window,
        softcap=attention.softcap,
        alibi_slopes=arrays.get("alibi_slopes"),
        sinks=arrays.get("sinks"),
    )
    return {
        "out": round_into(arrays.get("out"), exact, attention.dtype),
        "lse": round_into(arrays.get("lse"), lse, attention.lse_dtype),
    }
