"""Exact attention, backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cupyattn.ops.attention import backward as ops
from cupyattn.ops.attention import reference
from cupyattn.ops.attention.api_block_mask import BlockMask
from cupyattn.ops.attention.api_modifiers import MaskMod, ScoreMod, python_gradient
from cupyattn.ops.attention.call import attention_call, reference_options
from cupyattn.ops.attention.checks import backward_problem
from cupyattn.ops.attention.options import DropoutSeed
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.ops.attention.reference.dense import AttentionGrads
from cupyattn.ops.rope.api import Rotary
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import require_bool
from cupyattn.runtime.outputs import named_grads
from cupyattn.runtime.rounding import round_into


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    /,
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
    implementation: str = "flash",
    grads: AttentionGrads | None = None,
    accumulate: bool = False,
    workspace: Array | None = None,
) -> AttentionGrads:
    r"""Gradients of `attention` with respect to its arrays.

    Parameters
    ----------
    dout : array (B, Sq, H, Dv), dtype of q
        Gradient with respect to out.
    q, k, v : array
        As given to `attention`, with the same options.
    out : array (B, Sq, H, Dv), dtype of q
        The result of `attention`, or of a merge of it with other keys: given the merged out and
        lse, the gradients are this call's share of the whole.
    lse : array (B, H, Sq), float32 (float64 beside float64 arrays)
        Its second result (``return_lse=True``).
    causal, softmax_scale, window_size, q_offset, seqused_k : optional
        As given to `attention`.
    mask, bias, alibi_slopes, softcap, sinks : optional
        As given to `attention`.
    dropout_p, seed, rotary, score_mod, mask_mod : optional
        As given to `attention`. Dropout draws the same mask again from the seed; a score_mod needs
        its gradient, and its arrays get none. With rotary dq and dk are those of the arrays that
        were given, before they were rotated.
    dlse : array (B, H, Sq), dtype of lse, optional
        Gradient with respect to lse, where it was used.
    deterministic : bool
        Bitwise the same result from run to run. On a GPU "flash" then adds nothing atomically,
        which takes longer. Everything else is deterministic as it is.
    implementation : {"flash", "naive"}
        Which kernels run on a GPU or the emulator. "flash" runs float16 on tensor cores, where the
        GPU has any (`device_info`), and other dtypes in float32 arithmetic. "naive" (the textbook)
        is there to be read and compared; of the options it has causal, softmax_scale, dlse, grads
        and accumulate. On the reference the implementation makes no difference.
    grads : AttentionGrads, optional
        Arrays to write the gradients into, each with the shape and dtype of what it belongs to; the
        last axis is contiguous. A field that is None makes a new one.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes;
        otherwise it is allocated. "naive" needs none. 4 * B * H * Sq bytes suffice for float32 and
        where deterministic; "flash" in float32 arithmetic takes 4 * D times as many more for other
        dtypes. On tensor cores, with rows = B * H * Sq' and Sq' and D' rounded up to multiples of
        64 and 8, it needs 8 * rows bytes, and 8 for every 32 rows of q and of v (16 where Dv is
        above 64, 8 above 128); unless deterministic, 4 * rows * D' more; and for a bias
        that broadcasts up to 2**24, or where it does so along Sq or Sk a quarter of a byte for each
        score of its batch elements and heads, with Sq rounded up to 128; each rounded
        up to 256. A BlockMask takes 8 bytes for each tile of each kernel. With rotary it needs as
        much as q and k more, with accumulate twice that. An error says how many.
        With grads and workspace a call allocates nothing, and can be captured in a CUDA graph.

    Returns
    -------
    AttentionGrads
        ``(dq, dk, dv, dbias, dsinks)``, each like its array; dbias is summed over the axes that
        bias broadcast along; dbias and dsinks are None without bias and sinks. The result has all
        five fields in any case; `vjp` gives three gradients for q, k and v. Queries and keys that
        see nothing get zeros, where dout is finite: its NaN and infinities may reach dv of every
        key of their head.

    Raises
    ------
    TypeError, ValueError
        As `attention`; for out, lse, dout or dlse whose shapes or dtypes disagree with q, k, v; for
        grads that do not fit their arrays; and of kernels for a workspace that is too small (the
        reference for NumPy arrays needs none, and takes any).
    NotImplementedError
        On a GPU or the emulator, for an implementation that has no backward kernel ("tiled"), and
        for options that "naive" does not have: "flash" has every option, and so have NumPy arrays
        on the reference.
    RuntimeError
        As `attention`.

    Notes
    -----
    With P = exp(s - lse) and delta = rowsum(dout * out) - dlse: dv = P^T dout,
    ds = P * (dout v^T - delta), dq = softmax_scale * ds k, dk = softmax_scale * ds^T q (Dao et al.,
    arXiv:2205.14135, appendix B). `vjp` keeps out and lse for this function and passes them on.
    Since lse is float32, the rounding of lse changes P by up to 2.4e-7 ``abs(lse)`` of itself: by
    1 % at scores of 4e4, and by 24 % at 1e6. Of scores beyond 1e7 no digit of P is right. P is
    between 0 and 1 in any case, and gradients that fit their dtype are finite. To hide keys, pass a
    mask or a bias of -inf: a finite bias of that size on all keys of a query makes its gradients
    meaningless.
    On tensor cores "flash" keeps ds in float16 for its products, times a power of two for each
    key-value head that brings ``max |dout_i| max |v_j| / (1 - dropout_p) + max |delta_i|``, if it
    is larger, to 32768: ds may be as large as 2**30, while dq, dk and dv fit float16. Queries that
    see no key do not count; keys in use that a mask hides do. What lies below 6e-8, times that
    power where there is one, is lost, of ds, v and dout: scale the loss accordingly, as for dout
    itself, or use bfloat16 or float32 arrays. A gradient of score_mod that makes more of ``grad``
    than there is has to leave it below 65504, or that power times it.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 6, 2, 8), dtype=np.float32)
    >>> out, lse = cupyattn.attention(q, k, v, causal=True, return_lse=True)
    >>> grads = cupyattn.attention_backward(dout, q, k, v, out, lse, causal=True)
    >>> grads.dq.shape, grads.dbias
    ((1, 6, 2, 8), None)

    Moving v along its gradient raises the sum of dout * out by the square of the gradient:

    >>> step = 1e-2
    >>> moved = cupyattn.attention(q, k, v + step * grads.dv, causal=True)
    >>> np.allclose((dout * (moved - out)).sum() / step, (grads.dv**2).sum(), rtol=1e-3)
    True
    """
    require_bool("deterministic", deterministic)
    require_bool("accumulate", accumulate)
    given = named_grads(AttentionGrads, grads, accumulate, ("dq", "dk", "dv"))
    operands, problem, seed = attention_call(
        backward_problem,
        {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse,
         "seqused_k": seqused_k, "mask": mask, "bias": bias, "alibi_slopes": alibi_slopes,
         "sinks": sinks, "workspace": workspace, **given},
        (causal, softmax_scale, window_size, softcap, dropout_p, seed is not None, implementation),
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
    results |= ops.attention_backward(
        device,
        problem,
        operands,
        seed=seed,
        deterministic=bool(deterministic),
        accumulate=bool(accumulate),
    )
    return AttentionGrads(**results)


def _on_cpu(
    problem: AttentionProblem,
    arrays: Mapping[str, Array],
    options: Mapping[str, Any],
    accumulate: bool,
) -> AttentionGrads:
    positional = (arrays[name] for name in ("dout", "q", "k", "v", "out", "lse"))
    exact = reference.attention_backward(*positional, dlse=arrays.get("dlse"), **options)
    return rounded_gradients(problem, arrays, exact, accumulate)


def rounded_gradients(
    problem: AttentionProblem, arrays: Mapping[str, Array], exact: AttentionGrads, accumulate: bool
) -> AttentionGrads:
    """Round the reference's gradients into what the call was given, or into new arrays."""
    rounded: dict[str, Any] = {}
    for name, gradient in exact._asdict().items():
        target = arrays.get(name)
        if gradient is not None and accumulate and target is not None:
            with np.errstate(invalid="ignore"):  # inf - inf is NaN, as on a GPU
                gradient = gradient + target.astype(np.float64)
        of = problem.layouts.get(name[1:])
        rounded[name] = None if of is None else round_into(target, gradient, of.dtype)
    return AttentionGrads(**rounded)
