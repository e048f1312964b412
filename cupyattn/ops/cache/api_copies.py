"""Copies of whole blocks of a paged cache."""

from __future__ import annotations

from collections.abc import Sequence

from cupyattn.ops.cache import reference
from cupyattn.ops.cache.copies import run_copies
from cupyattn.ops.cache.copies_problem import WRITTEN, copies_problem, pairs_of
from cupyattn.ops.cache.storage import WRITTEN_FIXES
from cupyattn.runtime.arrays import Array, exports_memory
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.by_name import adopt
from cupyattn.runtime.checks import require_given


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

    What a copy-on-write asks for: run what `Sequence.append` returns before the step writes.

    Parameters
    ----------
    k_cache, v_cache : array (num_blocks, block_size, G, D), or (num_layers, num_blocks, ...)
        As `append_kv` takes them, or all layers at once. Written in place.
    copies : sequence of Copy(src, dst), or int32 or int64 array (n, 2)
        Blocks to read and to write. The result is that of copying in this order, so that a source
        may be written by an earlier or a later copy. A row (-1, -1) of an array copies nothing.
    k_scales, v_scales : float32 array (num_blocks, block_size, G), optional
        Of quantised caches, which require them; with an axis of layers if the caches have one.

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
    Every thread owns one place within a block, and makes all copies of it in order: none waits for
    another. A call runs on the current stream of its arrays' device, does not synchronise, and
    allocates nothing. A CUDA graph that captures it keeps the pairs of a sequence, and reads those
    of an array at each replay.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> k_cache = np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1)
    >>> v_cache = -k_cache
    >>> cupyattn.copy_blocks(k_cache, v_cache, [cupyattn.Copy(0, 1), cupyattn.Copy(1, 3)])
    >>> k_cache.ravel()
    array([0., 0., 2., 0.], dtype=float32)
    """
    caches = {"k_cache": k_cache, "v_cache": v_cache, "k_scales": k_scales, "v_scales": v_scales}
    require_given("copies", copies)
    if exports_memory(copies):
        operands, pairs = adopt({**caches, "copies": copies}, WRITTEN_FIXES), None
    else:
        operands, pairs = adopt(caches, WRITTEN_FIXES), pairs_of(copies)
    problem = copies_problem(operands, pairs)
    device = device_of(operands)
    if device is not None:
        run_copies(device, problem, operands, pairs)
        return
    arrays = operands.arrays
    by_block = [
        arrays[name] if len(problem.layouts["k_cache"].shape) == 4 else arrays[name].swapaxes(0, 1)
        for name in WRITTEN
        if name in arrays
    ]
    reference.copy_blocks(by_block, arrays["copies"] if pairs is None else pairs)
