"""Exact merge of two results of attention."""

from __future__ import annotations

from typing import Any

from cupyattn.ops.attention import reference
from cupyattn.ops.attention.merge import merge_problem, run_merge
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.by_name import adopt
from cupyattn.runtime.checks import fixes_of_results
from cupyattn.runtime.outputs import named_out
from cupyattn.runtime.rounding import round_into

_FIXES = fixes_of_results("out", "lse")


def merge_attention(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    /,
    *,
    out: tuple[Array, Array] | None = None,
) -> Any:
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
        The same of the other part.
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
    operands = adopt(
        {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
        | named_out(out, ("out", "lse")),
        _FIXES,
    )
    problem = merge_problem(operands)
    device = device_of(operands)
    if device is not None:
        results = run_merge(device, problem, operands)
        return results["out"], results["lse"]
    arrays = operands.arrays
    merged, lse = reference.merge_attention(
        *(arrays[name] for name in ("out_a", "lse_a", "out_b", "lse_b"))
    )
    return (
        round_into(arrays.get("out"), merged, problem.out.dtype),
        round_into(arrays.get("lse"), lse, problem.lse.dtype),
    )
