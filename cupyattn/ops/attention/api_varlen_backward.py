"""Exact attention over packed sequences, backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cupyattn.ops.attention import reference
from cupyattn.ops.attention.api_backward import rounded_gradients
from cupyattn.ops.attention.api_block_mask import BlockMask
from cupyattn.ops.attention.api_modifiers import MaskMod, ScoreMod, python_gradient
from cupyattn.ops.attention.call import attention_call, reference_options
from cupyattn.ops.attention.options import DropoutSeed
from cupyattn.ops.attention.packed import PackedProblem
from cupyattn.ops.attention.reference.dense import AttentionGrads
from cupyattn.ops.attention.varlen import varlen_backward
from cupyattn.ops.attention.varlen_problem import backward_problem
from cupyattn.ops.rope.api import Rotary
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import require_bool
from cupyattn.runtime.outputs import named_grads


def attention_varlen_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    /,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    q_offset: int | Array | None = None,
    seqused_k: Array | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | DropoutSeed | None = None,
    rotary: tuple[Array, Array] | Rotary | None = None,
    score_mod: ScoreMod | Callable[..., Any] | None = None,
    mask_mod: MaskMod | BlockMask | Callable[..., Any] | None = None,
    dlse: Array | None = None,
    deterministic: bool = False,
    grads: AttentionGrads | None = None,
    accumulate: bool = False,
    workspace: Array | None = None,
) -> AttentionGrads:
    r"""Gradients of `attention_varlen` with respect to its arrays.

    Parameters
    ----------
    dout : array (total_q, H, Dv), dtype of q
        Gradient with respect to out.
    q, k, v : array
        As given to `attention_varlen`, with the same lengths and options.
    out : array (total_q, H, Dv), dtype of q
        The result of `attention_varlen`.
    lse : array (H, total_q), float32 (float64 beside float64 arrays)
        Its second result (``return_lse=True``).
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As given to `attention_varlen`.
    causal, softmax_scale, window_size, q_offset, seqused_k : optional
        As given to `attention_varlen`.
    mask, bias, alibi_slopes, softcap, sinks : optional
        As given to `attention_varlen`.
    dropout_p, seed, rotary, score_mod, mask_mod : optional
        As given to `attention_varlen`; with rotary dq and dk are those of the arrays before they
        were rotated.
    dlse : array (H, total_q), dtype of lse, optional
        Gradient with respect to lse, where it was used.
    deterministic : bool
        Bitwise the same result from run to run, as in `attention_backward`.
    grads : AttentionGrads, optional
        Arrays to write the gradients into, each with the shape and dtype of what it belongs to; the
        last axis is contiguous. A field that is None makes a new one.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes;
        otherwise it is allocated. For float16, with rows = H * (total_q + 64 * B) and D' rounded up
        to a multiple of 8, 8 * rows bytes, 8 for every 32 rows of q and of v (16 where Dv is above
        64, 8 above 128), and unless deterministic 4 * rows * D' more; otherwise 4 * H * total_q. A
        bias that broadcasts needs more: in float16 as in `attention_backward`, otherwise 4 bytes
        for each of B * H * max_seqlen_q * max_seqlen_k scores; rotary as much as q and k have, with
        accumulate twice that; a BlockMask 8 bytes a tile. An error says how many there have to be.

    Returns
    -------
    AttentionGrads
        ``(dq, dk, dv, dbias, dsinks)``, each like its array; dbias and dsinks are None without bias
        and sinks. Queries and keys that see nothing get zeros. Rows of no sequence stay as they are
        in grads, and mean nothing in new arrays.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RuntimeError
        As `attention_varlen` and `attention_backward`.

    Notes
    -----
    As `attention_backward` with ``implementation="flash"`` for each sequence.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 8, 2, 16), dtype=np.float32)
    >>> lengths = np.array([0, 3, 8], np.int32), np.array([0, 3, 8], np.int32), 5, 5
    >>> out, lse = cupyattn.attention_varlen(q, k, v, *lengths, causal=True, return_lse=True)
    >>> grads = cupyattn.attention_varlen_backward(
    ...     dout, q, k, v, out, lse, *lengths, causal=True
    ... )

    The gradients of the second sequence are those of a call of its own:

    >>> own = (x[None, 3:] for x in (dout, q, k, v, out))
    >>> alone = cupyattn.attention_backward(*own, lse[None, :, 3:], causal=True)
    >>> np.allclose(grads.dk[3:], alone.dk[0])
    True
    """
    require_bool("deterministic", deterministic)
    require_bool("accumulate", accumulate)
    given = named_grads(AttentionGrads, grads, accumulate, ("dq", "dk", "dv"))
    operands, problem, seed = attention_call(
        partial(backward_problem, longest=(max_seqlen_q, max_seqlen_k)),
        {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse,
         "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k,
         "mask": mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks,
         "workspace": workspace, **given},
        (causal, softmax_scale, window_size, softcap, dropout_p, seed is not None,
         "flash"),
        q_offset, seed, rotary, score_mod, mask_mod,
    )  # fmt: skip
    device = device_of(operands)
    if device is None:
        options = {
            "score_mod_gradient": python_gradient(score_mod, operands.arrays),
            **reference_options(problem, operands.arrays, seed, score_mod, mask_mod),
        }
        return _on_cpu(problem, operands.arrays, options, accumulate)
    results: dict[str, Any] = dict.fromkeys(AttentionGrads._fields)
    results |= varlen_backward(
        device,
        problem,
        operands,
        seed=seed,
        deterministic=bool(deterministic),
        accumulate=bool(accumulate),
    )
    return AttentionGrads(**results)


def _on_cpu(
    problem: PackedProblem,
    arrays: Mapping[str, Array],
    options: Mapping[str, Any],
    accumulate: bool,
) -> AttentionGrads:
    names = ("dout", "q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k")
    exact = reference.attention_varlen_backward(
        *(arrays[name] for name in names), dlse=arrays.get("dlse"), **options
    )
    if not accumulate:  # rows of no sequence stay as they are
        for name, rows in (("dq", "q"), ("dk", "k"), ("dv", "k")):
            if name in arrays:
                behind = int(arrays[f"cu_seqlens_{rows}"][-1])
                getattr(exact, name)[behind:] = arrays[name][behind:]
    return rounded_gradients(problem, arrays, exact, accumulate)
