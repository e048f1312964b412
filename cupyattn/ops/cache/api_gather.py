"""The tokens of sequences out of a paged cache."""

from __future__ import annotations

from typing import Any

from cupyattn.ops.attention.paged import TABLE_FIXES
from cupyattn.ops.cache import reference
from cupyattn.ops.cache.gather import run_gather
from cupyattn.ops.cache.gather_problem import RESULTS, SHOWN_AS, GatherProblem, gather_problem
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.by_name import adopt
from cupyattn.runtime.checks import fixes_of_results
from cupyattn.runtime.float_dtypes import float_dtype
from cupyattn.runtime.numbers import integer
from cupyattn.runtime.outputs import named_out
from cupyattn.runtime.rounding import round_into

_FIXES = {**TABLE_FIXES, **fixes_of_results(*SHOWN_AS.values())}


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
    dtype: Any = None,
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    r"""Gather the keys and values of sequences from the blocks of a paged cache.

    What `attention` takes, with ``seqused_k=seqlens_k``. Letters: B sequences, G key-value heads, D
    head dim (1 to 256).

    Parameters
    ----------
    k_cache, v_cache : array (num_blocks, block_size, G, D)
        The pools of blocks, as `append_kv` takes them.
    block_table : int32 array (B, max_blocks)
        The blocks of each sequence: token j is in slot ``j % block_size`` of block
        ``block_table[b, j // block_size]``. Entries behind a sequence's last block are not read. Of
        a block that is -1, as those are that a window has left behind, the tokens are zeros.
    seqlens_k : int32 or int64 array (B,)
        Tokens of each sequence.
    max_seqlen_k : int, optional
        Tokens that the results have room for; by default all that block_table has room for. The
        shape never depends on values in arrays.
    k_scales, v_scales : float32 array (num_blocks, block_size, G), optional
        Of quantised caches, which require them.
    dtype : optional
        Of the results for quantised caches: "float16" (the default), "float32" or "bfloat16", on
        NumPy arrays outside of the emulator "float64". Others have the caches' own.
    out : (k, v), optional
        Where to write the results: the last axis of each is contiguous, and they overlap no input.

    Returns
    -------
    k, v : array (B, max_seqlen_k, G, D)
        Zeros behind each sequence's tokens.

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
    operands = adopt(
        {"k_cache": k_cache, "v_cache": v_cache, "block_table": block_table,
         "seqlens_k": seqlens_k, "k_scales": k_scales, "v_scales": v_scales}
        | named_out(out, RESULTS),
        _FIXES,
        SHOWN_AS,
    )  # fmt: skip
    most = None if max_seqlen_k is None else integer("max_seqlen_k", max_seqlen_k)
    kind = None if dtype is None else float_dtype(dtype)
    problem = gather_problem(operands, most, kind)
    device = device_of(operands)
    if device is not None:
        results = run_gather(device, problem, operands)
        return results["k"], results["v"]
    k, v = (_on_cpu(problem, operands.arrays, name) for name in RESULTS)
    return k, v


def _on_cpu(problem: GatherProblem, arrays: dict[str, Array], name: str) -> Array:
    tokens = reference.gather(
        arrays[f"{name}_cache"],
        arrays["block_table"],
        arrays["seqlens_k"],
        problem.output.shape[1],
        arrays.get(f"{name}_scales"),
    )
    given = arrays.get(name)
    if problem.caches.quantised:
        return round_into(given, tokens, problem.output.dtype)
    if given is None:
        return tokens
    given[...] = tokens
    return given
