"""Attention over a paged key-value cache."""

from __future__ import annotations

from typing import Any

from cupyattn.ops.attention import reference
from cupyattn.ops.attention.decode_problem import DecodeProblem, decode_problem
from cupyattn.ops.attention.paged import TABLE_FIXES, paged_forward
from cupyattn.ops.attention.problem import FORWARD_FIXES
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.by_name import Operands, adopt
from cupyattn.runtime.checks import require_bool
from cupyattn.runtime.errors import error
from cupyattn.runtime.numbers import integer
from cupyattn.runtime.outputs import named_out
from cupyattn.runtime.rounding import round_into

_FIXES = {**FORWARD_FIXES, **TABLE_FIXES}


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

    A step of decoding, a prompt, or a chunk of one: any number of query tokens a sequence, whose
    own keys and values are in the cache already. Letters: B batch, Sq query tokens, H query heads,
    G key-value heads (H a multiple of G), D head dim (1 to 256).

    Parameters
    ----------
    q : array (B, Sq, H, D), or (total, H, D) with cu_seqlens_q
        Queries: float16, float32 or bfloat16; NumPy arrays outside of the emulator may be float64.
        All arrays of a call are CuPy or all are NumPy. The last axis of q and of the caches is
        contiguous, the others may have any stride.
    k_cache, v_cache : array (num_blocks, block_size, G, D)
        The pools of blocks. block_size is any multiple of 16. Slots that hold no token of a
        sequence may hold anything, NaN too. They have q's dtype, or are integers: int8, or uint8
        (num_blocks, block_size, G, D / 2) with two items of 4 bits in a byte, of which item 2 i is
        the low nibble of byte i, and 8 is added to each.
    block_table : int32 array (B, max_blocks)
        The blocks of each sequence: token j is in slot ``j % block_size`` of block
        ``block_table[b, j // block_size]``. Entries behind a sequence's last block are not read,
        and neither are those of blocks that window_size hides from all of its queries: they may
        be -1.
    seqlens_k : int32 or int64 array (B,)
        Tokens of each sequence, those of q included: query i stands at position
        ``seqlens_k - Sq + i``. A sequence of 0 gives zeros and a lse of -inf.
    cu_seqlens_q : int32 or int64 array (B + 1,), optional
        For sequences with different numbers of queries, none at all too: those of sequence b are
        rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q. Rows before its first item, which
        is most often 0, and from its last one on belong to no sequence: they are not read, and of
        results that are given theirs stay as they are (so arrays may keep their shape in a CUDA
        graph, and several calls may write to one). Of results that are not given they are
        undefined.
    max_seqlen_q : int
        With cu_seqlens_q: the most queries of a sequence, or a larger number. What runs is chosen
        by it, so it is cheaper the nearer it is.
    causal : bool
        Keep only keys up to the query's own position; with one query token that is all.
    softmax_scale : float, optional
        Factor of the scores; ``D ** -0.5`` by default.
    window_size : (left, right), optional
        Keep only keys from ``left`` before a query's position to ``right`` behind it; None on a
        side is unbounded. Blocks that all queries have left behind are not read.
    softcap, sinks, alibi_slopes : optional
        As in `attention`.
    k_scales, v_scales : float32 array (num_blocks, block_size, G)
        What an integer 1 of each token and head is worth. They come with caches of integers, and
        only with these. Any strides; where slots of one head lie side by side in memory, as in
        ``zeros((num_blocks, G, block_size)).swapaxes(1, 2)``, no more is read than is wanted.
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
    out : array, shape and dtype of q
    lse : array (B, H, Sq), or (H, total) with cu_seqlens_q; float32 (float64 for float64 arrays)
        Only with return_lse: natural log of the softmax denominator.

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, or a dtype that is not allowed.
    ValueError
        For shapes, strides or options that do not fit, scales that are missing or have no cache of
        integers, or an out that overlaps an input; and where
        values are checked (`backend`; NumPy arrays always) for lengths beyond what the table can
        hold, for ids of blocks that do not exist and for a cu_seqlens_q that does not fit. A GPU
        takes such a length as the nearest that is allowed, and reads wherever a wrong id says.
    RuntimeError
        On a GPU, as `attention`.

    Notes
    -----
    PagedAttention (Kwon et al., arXiv:2309.06180). Up to 16 query tokens a sequence are decoded:
    the keys are split over all multiprocessors as in Flash-Decoding, in equal shares that the
    device works out from seqlens_k. Others, and packed ones, are computed by the forward of
    `attention`, with keys that come from blocks. No length is read by the host, and a call runs on
    the current stream without synchronising. Within a block that a window hides in part, tokens are
    read and get a weight of 0, so they may not hold NaN.

    On a GPU packed queries need caches whose strides are equal, and so those of scales; other calls
    are decoded where they are not, which is slower for many query tokens.

    Decoding multiplies integers as they are, and scales scores and weights by the token's scale.
    With float16 queries it keeps weights times scales in float16, relative to the largest scale of
    V that a warp has met. The forward makes floats of q's dtype of integers first, in float32
    where q is bfloat16: a float16 holds numbers up to 65,504. What that does to the result is
    derived in ``cupyattn/ops/attention/reference/quantised.py``.

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

    Both in one call, the first with two query tokens, the second with one:

    >>> packed = rng.standard_normal((3, 4, 8), dtype=np.float32)
    >>> out = cupyattn.paged_attention(
    ...     packed, k_cache, v_cache, table, np.array([3, 20], np.int32), causal=True,
    ...     cu_seqlens_q=np.array([0, 2, 3], np.int32), max_seqlen_q=2,
    ... )
    >>> keys, values = k_cache[2:3, :3], v_cache[2:3, :3]
    >>> dense = cupyattn.attention(packed[None, :2], keys, values, causal=True)
    >>> np.allclose(out[:2], dense[0])
    True
    """
    if cu_seqlens_q is None and integer("max_seqlen_q", max_seqlen_q) != 1:
        raise error(
            ValueError,
            f"max_seqlen_q = {max_seqlen_q} without cu_seqlens_q",
            "it belongs to packed queries (total, H, D); of q (B, Sq, H, D) Sq says the same",
            "leave it out",
        )
    require_bool("return_lse", return_lse)
    operands = adopt(
        {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table,
         "seqlens_k": seqlens_k, "cu_seqlens_q": cu_seqlens_q, "k_scales": k_scales,
         "v_scales": v_scales, "alibi_slopes": alibi_slopes, "sinks": sinks,
         "workspace": workspace}
        | named_out(out, ("out", "lse") if return_lse else ("out",)),
        _FIXES,
    )  # fmt: skip
    options = (causal, softmax_scale, window_size, softcap, max_seqlen_q)
    problem = decode_problem(operands, options)
    device = device_of(operands)
    if device is None:
        results = _on_cpu(problem, operands)
    else:
        results = paged_forward(device, problem, operands, return_lse=return_lse)
    return (results["out"], results["lse"]) if return_lse else results["out"]


def _on_cpu(problem: DecodeProblem, operands: Operands) -> dict[str, Array]:
    arrays, attention = operands.arrays, problem.attention
    names = ("q", "k_cache", "v_cache", "block_table", "seqlens_k")
    exact, lse = reference.paged_attention(
        *(arrays[name] for name in names),
        cu_seqlens_q=arrays.get("cu_seqlens_q"),
        softmax_scale=attention.softmax_scale,
        window_size=attention.window,
        softcap=attention.softcap,
        alibi_slopes=arrays.get("alibi_slopes"),
        sinks=arrays.get("sinks"),
        k_scales=arrays.get("k_scales"),
        v_scales=arrays.get("v_scales"),
    )
    if problem.packed:  # rows of no sequence stay as they are
        bounds = arrays["cu_seqlens_q"]
        for others in (slice(0, int(bounds[0])), slice(int(bounds[-1]), None)):
            if "out" in arrays:
                exact[others] = arrays["out"][others]
            if "lse" in arrays:
                lse[:, others] = arrays["lse"][:, others]
    return {
        "out": round_into(arrays.get("out"), exact, attention.dtype),
        "lse": round_into(arrays.get("lse"), lse, attention.lse_dtype),
    }
