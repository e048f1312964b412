"""Paged caches: new tokens into them, copies of their blocks, tokens of sequences out of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from cupyattn.ops.attention.paged import TABLE_FIXES
from cupyattn.ops.cache import reference
from cupyattn.ops.cache.kernels import AppendArrays, CopyArrays, GatherArrays
from cupyattn.ops.cache.plan import run_append, run_copies, run_gather
from cupyattn.ops.cache.problems import (
    RESULTS,
    WRITTEN_FIXES,
    AppendProblem,
    GatherProblem,
    append_problem,
    copies_problem,
    gather_problem,
    pairs_of,
)
from cupyattn.ops.norms.api import RMSNorm, norm_numbers
from cupyattn.ops.rope.api import Rotary, checked_rotary
from cupyattn.runtime.arrays import Array, adopt, exports_memory
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import fixes_of_results, integer, require_given
from cupyattn.runtime.outputs import float_dtype, round_into, take_out

_APPEND_FIXES = {
    "slot_mapping": "pass an int32 array with a slot for each token, of shape k.shape[:-2]",
    "positions": "pass an int32 array shaped like slot_mapping",
    **WRITTEN_FIXES,
    **fixes_of_results("q"),
}


def append_kv(
    k_cache: Array,
    v_cache: Array,
    k: Array,
    v: Array,
    slot_mapping: Array,
    /,
    *,
    q: Array | None = None,
    rotary: Rotary | tuple[Array, Array] | None = None,
    positions: Array | None = None,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    k_centre: Array | None = None,
) -> None:
    r"""Write the keys and values of new tokens to their slots of a paged cache, in place.

    The same launch normalises each head of k, and of q if it is given, applies the rotary position
    embedding to them, and quantises k and v for quantised caches. Letters: G key-value heads, H
    query heads, D head dim (1 to 512).

    Parameters
    ----------
    k_cache, v_cache : array (num_blocks, block_size, G, D)
        The pools of blocks, written in place. float16, float32 or bfloat16 (NumPy arrays outside of
        the emulator float64 too), int8, or uint8 of shape (num_blocks, block_size, G, D / 2): 4
        bits an item. They do not overlap each other. The last axis is contiguous; the others may
        have any stride, so that one layer of a pool ``(num_layers, num_blocks, ...)`` is a cache.
    k, v : array (total, G, D) or (B, S, G, D)
        The tokens: float16, float32 or bfloat16, and the caches' own dtype where those are not
        quantised. The last axis is contiguous; the others may have any stride, so that slices of
        packed q, k and v need no copy.
    slot_mapping : int32 or int64 array (total,) or (B, S)
        Where each token goes: ``block * block_size + offset``. -1 leaves a token out.
    q : array (total, H, D) or (B, S, H, D), dtype of k, optional
        Is normalised and rotated in place, also for tokens that are left out. Only with rotary or
        q_norm.
    rotary : Rotary or (cos, sin), optional
        Tables of cosines and sines (positions, R/2), as of `rope_tables`. The first R features of k
        are rotated before they are stored, as `rope` rotates them.
    positions : int32 or int64 array, shaped like slot_mapping, optional
        The position of each token: a row of the tables. Required with rotary.
    q_norm, k_norm : RMSNorm, optional
        Norms of the heads of q and of k, with weights (D,) in the dtype of k. They come before the
        rotation, as in Qwen3 and Gemma 3, without a rounding in between; k itself stays as it is.
    k_scales, v_scales : float32 array (num_blocks, block_size, G), optional
        The scale of each token and head, written in place. Required for quantised caches.
    k_centre : float32 array (G, D), optional
        With a k_cache of int8 and a v_cache in the dtype of v: keys are stored as `quantize_keys`
        does with this centre, after norm and rotation. ``QuantizedKeys(k_cache, k_scales,
        k_centre)`` are then keys of attention.

    Returns
    -------
    None

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, a dtype that is not allowed,
        quantised caches without scales, int8 keys with float values and no centre, and rotary
        without positions.
    ValueError
        For shapes or strides that do not fit, arrays that are written and overlap others, q without
        rotary, scales of caches that are not quantised, and a centre of other caches. Where values
        are checked (`backend`; NumPy arrays always) for slots that are not in the caches or are
        given twice, and for positions outside of the tables; without q those of tokens that are
        left out may be. Where values are not checked, a GPU skips such a slot, and stores NaN in
        the rotated features of such a token.
    RuntimeError
        On a GPU, as `attention`.

    Notes
    -----
    Slots of a call are distinct. If two tokens have one slot and values are not checked, a GPU
    writes both in any order: the slot may hold parts of each.

    A quantised item is ``q * scale`` with ``scale = max|x| / 127`` over the D items of a token and
    head and q an int8, or ``(nibble - 8) * scale`` with ``scale = max|x| / 7``, item 2 i in the low
    nibble of byte i and item 2 i + 1 in the high one. Both are of the rotated float32 numbers,
    rounded to nearest even, with scales below 2**-126 flushed to 0. Norms are those of `rms_norm`,
    with its limits. Items that are not all finite
    have a scale that is not, and are read back as NaN; float32's largest number, whose scale is
    rounded up, comes back from 8 bits as infinity. Such scales for rows are those of Dettmers
    et al., arXiv:2208.07339, section 3.1; rotary position embedding is that of `rope`.

    A call runs on the current stream of its arrays' device, does not synchronise, and allocates
    nothing: a CUDA graph can capture it, and the arrays' contents may differ between replays.

    Examples
    --------
    Three tokens in blocks of 2, the second of them left out:

    >>> import numpy as np, cupyattn
    >>> k_cache, v_cache = np.zeros((2, 4, 2, 1, 2), np.float32)
    >>> k, v = np.arange(12, dtype=np.float32).reshape(2, 3, 1, 2)
    >>> cupyattn.append_kv(k_cache, v_cache, k, v, np.array([5, -1, 0]))
    >>> k_cache[2, 1, 0], k_cache[0, 0, 0]
    (array([0., 1.], dtype=float32), array([4., 5.], dtype=float32))

    Rotated, and stored in 8 bits:

    >>> cos, sin = cupyattn.rope_tables(16, 2)
    >>> k_cache, v_cache = np.zeros((2, 4, 2, 1, 2), np.int8)
    >>> k_scales, v_scales = np.zeros((2, 4, 2, 1), np.float32)
    >>> cupyattn.append_kv(k_cache, v_cache, k, v, np.array([5, -1, 0]), rotary=(cos, sin),
    ...     positions=np.array([0, 1, 2]), k_scales=k_scales, v_scales=v_scales)
    >>> k_cache[2, 1, 0] * k_scales[2, 1]
    array([0., 1.], dtype=float32)
    """
    arrays = AppendArrays(k_cache, v_cache, k_scales, v_scales, q, k, v, slot_mapping)
    arrays.positions, arrays.k_centre = positions, k_centre
    interleaved, of_q, of_k = False, None, None
    if rotary is not None:
        arrays.cos, arrays.sin, interleaved = checked_rotary(rotary)
    if q_norm is not None:
        of_q, arrays.q_weight = norm_numbers("q_norm", q_norm), q_norm.weight
    if k_norm is not None:
        of_k, arrays.k_weight = norm_numbers("k_norm", k_norm), k_norm.weight
    operands = adopt(arrays, _APPEND_FIXES)
    problem = append_problem(operands, interleaved=interleaved, q_norm=of_q, k_norm=of_k)
    device = device_of(operands)
    if device is None:
        _append_on_cpu(problem, cast("AppendArrays[np.ndarray]", operands.arrays))
    else:
        run_append(device, problem, operands)


def _append_on_cpu(problem: AppendProblem, arrays: AppendArrays[np.ndarray]) -> None:
    k, q, slots = arrays.k, arrays.q, arrays.slot_mapping
    cos, sin, positions = arrays.cos, arrays.sin, arrays.positions
    rotates = cos is not None and sin is not None and positions is not None
    if rotates or problem.q_norm is not None or problem.k_norm is not None:
        heads = 0 if q is None else q.shape[-2]
        if problem.k_norm is not None:
            k = reference.normed(k, arrays.k_weight, *problem.k_norm)
        both = k
        if q is not None:
            normed = q
            if problem.q_norm is not None:
                normed = reference.normed(q, arrays.q_weight, *problem.q_norm)
            both = np.concatenate([normed, k], axis=-2)
        if cos is not None and sin is not None and positions is not None:
            both = reference.rotated(both, cos, sin, positions, interleaved=problem.interleaved)
        if q is not None:
            round_into(q, both[..., :heads, :], problem.dtype)
        k = both[..., heads:, :]
        if not problem.caches.quantised and not problem.caches.centred:
            k = round_into(None, k, problem.caches.dtype)
    reference.append_kv(arrays.k_cache, k, slots, arrays.k_scales, arrays.k_centre)
    reference.append_kv(arrays.v_cache, arrays.v, slots, arrays.v_scales)


def copy_blocks(
    k_cache: Array,
    v_cache: Array,
    copies: Sequence[tuple[int, int]] | Array,
    /,
    *,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
) -> None:
    r"""Copy blocks of a paged cache whole, one copy after the other, in place.

    Copy-on-write needs it: copy the blocks that `Sequence.append` returns before the step writes.

    Parameters
    ----------
    k_cache, v_cache : array (num_blocks, block_size, G, D), or (num_layers, num_blocks, ...)
        One layer's caches, as for `append_kv`, or those of all layers. Written in place.
    copies : sequence of Copy(src, dst), or int32 or int64 array (n, 2)
        Blocks to read and to write. The result is that of copying in this order, so that a source
        may be written by an earlier or a later copy. A row (-1, -1) of an array copies nothing.
    k_scales, v_scales : float32 array (num_blocks, block_size, G), optional
        Required for quantised caches; with an axis of layers if the caches have one.

    Returns
    -------
    None

    Raises
    ------
    TypeError
        For something that is no array or no pair of ids, NumPy and CuPy arrays mixed, a dtype that
        is not allowed, and quantised caches without scales.
    ValueError
        For shapes or strides that do not fit, and arrays that overlap. For a block that does not
        exist, where copies are a sequence or values are checked (`backend`; NumPy arrays always); a
        GPU skips such a row of an array.
    RuntimeError
        On a GPU, as `attention`.

    Notes
    -----
    Every thread owns one place within a block and makes all copies of it in order, so no thread
    waits for another. A call runs on the current stream of its arrays' device, does not
    synchronise, and allocates nothing. A CUDA graph that captures it keeps the pairs of a sequence,
    and reads those of an array at each replay.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> k_cache = np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1)
    >>> v_cache = -k_cache
    >>> cupyattn.copy_blocks(k_cache, v_cache, [cupyattn.Copy(0, 1), cupyattn.Copy(1, 3)])
    >>> k_cache.ravel()
    array([0., 0., 2., 0.], dtype=float32)
    """
    require_given("copies", copies)
    arrays = CopyArrays(k_cache, v_cache, k_scales, v_scales)
    if exports_memory(copies):
        arrays.copies = cast("Array", copies)
    operands = adopt(arrays, WRITTEN_FIXES)
    pairs = pairs_of(copies) if arrays.copies is None else None
    problem = copies_problem(operands, pairs)
    device = device_of(operands)
    if device is not None:
        run_copies(device, problem, operands, pairs)
        return
    host = cast("CopyArrays[np.ndarray]", arrays)
    pools = [p for p in (host.k_cache, host.v_cache, host.k_scales, host.v_scales) if p is not None]
    by_block = [pool.swapaxes(0, 1) if problem.pooled else pool for pool in pools]
    reference.copy_blocks(by_block, pairs or () if host.copies is None else host.copies)


_GATHER_FIXES = {**TABLE_FIXES, **fixes_of_results(*GatherArrays.SHOWN_AS.values())}


def gather(
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seqlens_k: Array,
    /,
    *,
    max_seqlen_k: int | None = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    dtype: object = None,
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    r"""Gather the keys and values of sequences from the blocks of a paged cache.

    `attention` takes the results, with ``seqused_k=seqlens_k``. Letters: B sequences, G key-value
    heads, D head dim (1 to 512).

    Parameters
    ----------
    k_cache, v_cache : array (num_blocks, block_size, G, D)
        The pools of blocks, as `append_kv` takes them.
    block_table : int32 array (B, max_blocks)
        The blocks of each sequence: token j is in slot ``j % block_size`` of block
        ``block_table[b, j // block_size]``. Entries after a sequence's last block are not read.
        The tokens of a block that is -1 are zeros: a window has passed it.
    seqlens_k : int32 or int64 array (B,)
        Number of tokens of each sequence.
    max_seqlen_k : int, optional
        Tokens that the results have room for; by default all that block_table has room for. The
        shape never depends on values in arrays.
    k_scales, v_scales : float32 array (num_blocks, block_size, G), optional
        Required for quantised caches.
    dtype : optional
        Dtype of the results for quantised caches: "float16" (the default), "float32" or "bfloat16",
        and "float64" for NumPy arrays outside of the emulator. Other caches give their own dtype.
    out : (k, v), optional
        Where to write the results: the last axis of each is contiguous, and they overlap no input.

    Returns
    -------
    k, v : array (B, max_seqlen_k, G, D)
        Zeros after each sequence's tokens.

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, a dtype that is not allowed,
        and quantised caches without scales.
    ValueError
        For shapes or strides that do not fit, an out that overlaps an input, and scales or another
        dtype where caches are not quantised. Where values are checked (`backend`; NumPy arrays
        always) for lengths beyond the table or the results, and for blocks that do not exist. A GPU
        takes such a length as the nearest that is allowed, and gives zeros for such a block.
    RuntimeError
        On a GPU, as `attention`.

    Notes
    -----
    A call runs on the current stream of its arrays' device and does not synchronise; with out it
    allocates nothing, and a CUDA graph can capture it.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> k_cache = np.arange(6, dtype=np.float32).reshape(3, 2, 1, 1)
    >>> table, lengths = np.array([[2, 0], [1, -1]], np.int32), np.array([3, 1])
    >>> k, v = cupyattn.gather(k_cache, -k_cache, table, lengths)
    >>> k[..., 0, 0]
    array([[4., 5., 0., 0.],
           [2., 0., 0., 0.]], dtype=float32)
    """
    arrays = GatherArrays(k_cache, v_cache, k_scales, v_scales, block_table, seqlens_k)
    operands = adopt(take_out(arrays, out, RESULTS), _GATHER_FIXES)
    most = None if max_seqlen_k is None else integer("max_seqlen_k", max_seqlen_k)
    kind = None if dtype is None else float_dtype(dtype)
    problem = gather_problem(operands, most, kind)
    device = device_of(operands)
    if device is not None:
        return run_gather(device, problem, operands)
    host = cast("GatherArrays[np.ndarray]", operands.arrays)
    k = _gather_on_cpu(problem, host, host.k_cache, host.k_scales, host.k)
    return k, _gather_on_cpu(problem, host, host.v_cache, host.v_scales, host.v)


def _gather_on_cpu(
    problem: GatherProblem,
    arrays: GatherArrays[np.ndarray],
    cache: np.ndarray,
    scales: np.ndarray | None,
    given: np.ndarray | None,
) -> Array:
    length = problem.output.shape[1]
    tokens = reference.gather(cache, arrays.block_table, arrays.seqlens_k, length, scales)
    if problem.caches.quantised:
        return round_into(given, tokens, problem.output.dtype)
    if given is None:
        return tokens
    given[...] = tokens
    return given
