"""Attention over a paged key-value cache, and the exact merge of two results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast, overload

from numpy.typing import NDArray

from cupyattn.ops.attention import cpu, reference
from cupyattn.ops.attention.api import rounded_results
from cupyattn.ops.attention.merge import MergeArrays, merge_problem, run_merge
from cupyattn.ops.attention.paged import (
    TABLE_FIXES,
    PagedProblem,
    decodes_int8_keys,
    paged_forward,
    paged_problem,
)
from cupyattn.ops.attention.problem import FORWARD_FIXES, PagedArrays, QuantizedPagedArrays
from cupyattn.ops.attention.quantized_keys import QuantizedKeys
from cupyattn.runtime.arrays import Array, adopt
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import fixes_of_results, integer, require_bool
from cupyattn.runtime.errors import error
from cupyattn.runtime.outputs import named_out, round_into, take_out

if TYPE_CHECKING:
    from typing_extensions import Unpack

_FIXES = {**FORWARD_FIXES, **TABLE_FIXES}


class PagedKeywords(TypedDict, total=False):
    """The options of paged attention that do not decide the type of the result."""

    cu_seqlens_q: Array | None
    max_seqlen_q: int
    causal: bool
    softmax_scale: float | None
    window_size: tuple[int | None, int | None] | None
    softcap: float | None
    sinks: Array | None
    alibi_slopes: Array | None
    k_scales: Array | None
    v_scales: Array | None
    accumulator: str
    workspace: Array | None


@overload
def paged_attention(
    q: Array,
    k_cache: Array | QuantizedKeys,
    v_cache: Array,
    block_table: Array,
    seqlens_k: Array,
    /,
    *,
    return_lse: Literal[False] = ...,
    out: Array | None = ...,
    **options: Unpack[PagedKeywords],
) -> Array: ...


@overload
def paged_attention(
    q: Array,
    k_cache: Array | QuantizedKeys,
    v_cache: Array,
    block_table: Array,
    seqlens_k: Array,
    /,
    *,
    return_lse: Literal[True],
    out: tuple[Array, Array] | None = ...,
    **options: Unpack[PagedKeywords],
) -> tuple[Array, Array]: ...


@overload
def paged_attention(
    q: Array,
    k_cache: Array | QuantizedKeys,
    v_cache: Array,
    block_table: Array,
    seqlens_k: Array,
    /,
    *,
    return_lse: bool,
    out: Array | tuple[Array, Array] | None = ...,
    **options: Unpack[PagedKeywords],
) -> Array | tuple[Array, Array]: ...


def paged_attention(
    q: Array,
    k_cache: Array | QuantizedKeys,
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
    accumulator: str = "float32",
    out: Array | tuple[Array, Array] | None = None,
    workspace: Array | None = None,
) -> Any:
    r"""Attend from the last tokens of each sequence to all of its tokens, which lie in blocks.

    A step of decoding, a prompt, or a chunk of one: any number of query tokens a sequence, whose
    own keys and values are in the cache already. Letters: B batch, Sq query tokens, H query heads,
    G key-value heads (H a multiple of G), D head dim (1 to 512).

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
        the low nibble of byte i, and 8 is added to each. k_cache may be QuantizedKeys too, with a
        centre (G, D), as in `attention` with ``implementation="int8"``: q and v_cache are then
        float16. Up to 16 queries a sequence, unless packed, are decoded without being quantised.
    block_table : int32 array (B, max_blocks)
        The blocks of each sequence: token j is in slot ``j % block_size`` of block
        ``block_table[b, j // block_size]``. Entries after a sequence's last block are not read,
        and neither are those of blocks that window_size hides from all of its queries: they may
        be -1.
    seqlens_k : int32 or int64 array (B,)
        Tokens of each sequence, those of q included: query i has position
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
        Factor of the scores, at most 1e26; ``D ** -0.5`` by default.
    window_size : (left, right), optional
        Keep only keys from ``left`` before a query's position to ``right`` after it; None on a
        side is unbounded. Blocks that are outside of all queries' windows are not read.
    softcap, sinks, alibi_slopes : optional
        As in `attention`.
    k_scales, v_scales : float32 array (num_blocks, block_size, G)
        What an integer 1 of each token and head is worth. They come with caches of integers, and
        only with these. Any strides; where slots of one head lie side by side in memory, as in
        ``zeros((num_blocks, G, block_size)).swapaxes(1, 2)``, no more is read than is wanted.
    return_lse : bool
        Return the log-sum-exp of the scores too.
    accumulator : {"float32", "float16"}
        The type of the sums of weights times v, as in `attention`, of calls that are not decoded
        and have caches of float16.
    out : array, or (out, lse) with return_lse, optional
        Where to write the result: the last axis of each array is contiguous, the others may have
        any stride, and they overlap no input.
    workspace : array, optional
        Scratch memory for the parts of sequences that several CTAs share: of any dtype, from a
        multiple of 16 bytes on. If it is too small, the error has the number of bytes. By default
        it is allocated.

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
        hold, for ids of blocks that do not exist and for a cu_seqlens_q that does not fit. On a GPU
        such lengths are clamped, and a wrong id is read wherever it points.
    NotImplementedError
        On a GPU or the emulator, for ``accumulator="float16"`` where `attention` refuses it.
    RuntimeError
        On a GPU, as `attention`.

    Notes
    -----
    PagedAttention (Kwon et al., arXiv:2309.06180). Up to 16 query tokens a sequence are decoded:
    the keys are split over all multiprocessors as in Flash-Decoding, in equal parts that the
    device works out from seqlens_k. Others, and packed ones, are computed by the forward of
    `attention`, with keys that come from blocks. No length is read by the host, and a call runs on
    the current stream without synchronising. Within a block that a window hides in part, tokens are
    read and get a weight of 0, so they may not hold NaN.

    On a GPU packed queries need caches whose strides are equal, and so those of scales; other calls
    are decoded where they are not, which is slower for many query tokens.

    Tensor cores take float16 queries, and from compute capability 8.0 on bfloat16 ones.

    Decoding multiplies integers as they are, and scales scores and weights by the token's scale.
    With float16 queries it keeps weights times scales in float16, relative to the largest scale of
    V that a warp has met. The forward makes floats of q's dtype of integers first: a float16 holds
    numbers up to 65,504. In float32 arithmetic, which bfloat16 has before compute capability 8.0,
    it makes float32 numbers. What that does to the result is derived in
    ``cupyattn/ops/attention/reference/quantised.py``.

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
    given = named_out(out, ("out", "lse") if return_lse else ("out",))
    kind: Any = PagedArrays
    pieces: tuple[Array, ...] = ()
    if isinstance(k_cache, QuantizedKeys):
        _require_no_scales(k_scales, v_scales)
        kind, pieces, k_scales = QuantizedPagedArrays, (k_cache.centre,), k_cache.scales
        k_cache = k_cache.codes
    arrays: PagedArrays[Any] = kind(  # by position: names take twice the time
        *(q, k_cache, v_cache, seqlens_k, None, None, alibi_slopes, sinks),  # no mask, no bias
        *(given.get("out"), given.get("lse"), workspace, cu_seqlens_q),
        *(None, None, None, None, None),  # no cu_seqlens_k, offsets, rotary tables or tiles
        *(block_table, k_scales, v_scales, *pieces),
    )
    operands = adopt(arrays, _FIXES)
    options = (causal, softmax_scale, window_size, softcap)
    problem = paged_problem(operands, options, max_seqlen_q, accumulator)
    device = device_of(operands)
    if device is None:
        rounded = _on_cpu(problem, cast("PagedArrays[NDArray[Any]]", operands.arrays))
        return rounded if return_lse else rounded[0]
    arrays = paged_forward(device, problem, operands, return_lse=return_lse)
    return (arrays.out, arrays.lse) if return_lse else arrays.out


def _require_no_scales(k_scales: Any, v_scales: Any) -> None:
    if k_scales is not None or v_scales is not None:
        raise error(
            ValueError,
            f"{'v_scales' if k_scales is None else 'k_scales'} was given with QuantizedKeys",
            "they have their own scales, and v_cache is float16",
            "leave it out",
        )


def _on_cpu(problem: PagedProblem, arrays: PagedArrays[NDArray[Any]]) -> tuple[Array, Array]:
    bounds, options = arrays.cu_seqlens_q, problem.options
    assert arrays.block_table is not None
    assert arrays.seqused_k is not None
    quantised = isinstance(arrays, QuantizedPagedArrays)
    out, lse = reference.paged_attention(
        *(
            *cpu.operands(arrays, exact_q=decodes_int8_keys(problem)),
            arrays.block_table,
            arrays.seqused_k,
        ),
        cu_seqlens_q=bounds,
        softmax_scale=options.softmax_scale,
        window_size=options.window_size,
        softcap=options.softcap,
        alibi_slopes=arrays.alibi_slopes,
        sinks=arrays.sinks,
        k_scales=None if quantised else arrays.k_scales,
        v_scales=arrays.v_scales,
        attend=cpu.attention,
    )
    if bounds is not None:  # rows of no sequence stay as they are
        for others in (slice(0, int(bounds[0])), slice(int(bounds[-1]), None)):
            if arrays.out is not None:
                out[others] = arrays.out[others]
            if arrays.lse is not None:
                lse[:, others] = arrays.lse[:, others]
    return rounded_results(problem, arrays, out, lse)


_MERGE_FIXES = fixes_of_results("out", "lse")


def merge_attention(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    /,
    *,
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    r"""Merge two results of attention of the same queries to different keys, exactly.

    The result is what one attention to the keys of both parts gives: sequences that share a prefix
    attend to it once, together, and to the rest each for itself. Of sinks one part alone may have
    them.

    Parameters
    ----------
    out_a : array (B, S, H, D)
        Result of one part; float16, float32 or bfloat16, on NumPy arrays outside of the emulator
        float64 too. Its last axis is contiguous, the others may have any stride. A sum of parts may
        be in float32 where others are in 16 bits.
    lse_a : array (B, H, S), float32 (float64 for float64 arrays)
        The log-sum-exp that belongs to it, as ``return_lse=True`` gives it. Where it is -inf the
        part saw no key, and out_a is not read. Where it is +inf or NaN both results are NaN.
    out_b, lse_b : array
        Result and log-sum-exp of the other part.
    out : (out, lse), optional
        Where to write the results: the last axis of each is contiguous. out_a and lse_a themselves,
        or what overlaps no input. out has the dtype of a part, or is float32. Float16 parts never
        overflow; of float32 parts a float16 out has infinity where it is too narrow.

    Returns
    -------
    out : array (B, S, H, D), the wider dtype of out_a and out_b
    lse : array (B, H, S)

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, or a dtype that is not allowed.
    ValueError
        For shapes or strides that do not fit, or an out that overlaps an input.
    RuntimeError
        On a GPU, as `attention`.

    Notes
    -----
    With lse = log(exp(lse_a) + exp(lse_b)) the weights of the parts are exp(lse_a - lse) and
    exp(lse_b - lse) (Rabe and Staats, arXiv:2112.05682, section 3). A call runs on the current
    stream of its arrays' device and does not synchronise.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 2, 4, 8), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 1, 9, 4, 8), dtype=np.float32)
    >>> head = cupyattn.attention(q, k[:, :5], v[:, :5], return_lse=True)
    >>> tail = cupyattn.attention(q, k[:, 5:], v[:, 5:], return_lse=True)
    >>> out, lse = cupyattn.merge_attention(*head, *tail)
    >>> np.allclose(out, cupyattn.attention(q, k, v), atol=1e-6)
    True

    Three continuations of a prompt of 32 tokens, whose two blocks they share (cascade attention):

    >>> cache = cupyattn.PagedKVCache(1, 8, 16, 4, 8, dtype="float32", xp=np)
    >>> prompt = cache.allocator.add(range(32))
    >>> keys, values = rng.standard_normal((2, 32, 4, 8), dtype=np.float32)
    >>> cache.append(0, keys, values, cache.step_tables([prompt], 32))
    >>> sequences = [prompt, prompt.fork(), prompt.fork()]
    >>> for token, sequence in enumerate(sequences):
    ...     cache.copy(sequence.append([token]))
    >>> step = cache.step_tables(sequences)
    >>> q, k, v = rng.standard_normal((3, 3, 1, 4, 8), dtype=np.float32)
    >>> cache.append(0, k, v, step)

    Their queries attend to the prompt as those of one sequence, which reads it once, and each to
    its own tail:

    >>> k_cache, v_cache = cache.k[0], cache.v[0]
    >>> out, lse = cupyattn.paged_attention(
    ...     q.reshape(1, 3, 4, 8), k_cache, v_cache, step.block_table[:1, :2],
    ...     np.array([32], np.int32), return_lse=True,
    ... )
    >>> prefix = out.reshape(3, 1, 4, 8), lse.T  # (1, H, 3) to (3, H, 1)
    >>> tails = cupyattn.paged_attention(
    ...     q, k_cache, v_cache, step.block_table[:, 2:], step.seqlens_k - 32, return_lse=True
    ... )
    >>> out, lse = cupyattn.merge_attention(*prefix, *tails)
    >>> np.allclose(out, cache.attend(0, q, step), atol=1e-6)
    True
    """
    arrays = take_out(MergeArrays(out_a, lse_a, out_b, lse_b), out, ("out", "lse"))
    operands = adopt(arrays, _MERGE_FIXES)
    problem = merge_problem(operands)
    device = device_of(operands)
    if device is not None:
        made: Any = run_merge(device, problem, operands)
        return made.out, made.lse
    on_cpu = cast("MergeArrays[NDArray[Any]]", operands.arrays)
    parts = on_cpu.out_a, on_cpu.lse_a, on_cpu.out_b, on_cpu.lse_b
    merged, lse = reference.merge_attention(*parts)
    return (
        round_into(arrays.out, merged, problem.out.dtype),
        round_into(arrays.lse, lse, problem.lse.dtype),
    )
