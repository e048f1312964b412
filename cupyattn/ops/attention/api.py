"""Exact attention, forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cupyattn.ops.attention import reference
from cupyattn.ops.attention.api_block_mask import BlockMask
from cupyattn.ops.attention.api_modifiers import MaskMod, ScoreMod
from cupyattn.ops.attention.call import attention_call, reference_options
from cupyattn.ops.attention.checks import forward_problem
from cupyattn.ops.attention.forward import attention_forward
from cupyattn.ops.attention.options import DropoutSeed
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.ops.rope.api import Rotary
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import require_bool
from cupyattn.runtime.errors import error
from cupyattn.runtime.rounding import round_into


def attention(
    q: Array,
    k: Array,
    v: Array,
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
    return_lse: bool = False,
    implementation: str = "flash",
    out: Array | tuple[Array, Array] | None = None,
    workspace: Array | None = None,
) -> Any:
    r"""Attend: ``softmax(softmax_scale * q @ k.T) @ v`` for every head, without storing the scores.

    Letters: B batch, Sq and Sk query and key length, H query heads, G key-value heads (H a
    multiple of G), D head dim, Dv value head dim (each 1 to 256).

    Parameters
    ----------
    q : array (B, Sq, H, D)
        Queries. All arrays of a call are CuPy (or CUDA arrays of another library, taken by
        ``__cuda_array_interface__`` or DLPack without a copy) or all are NumPy. q, k and v share
        one dtype: float16, float32 or bfloat16; NumPy arrays outside of the emulator may be
        float64. Their last axis is contiguous, the others may have any stride, so slices of a
        packed array and transposes work without a copy.
    k : array (B, Sk, G, D)
        Keys; query head h attends to key-value head ``h // (H // G)``.
    v : array (B, Sk, G, Dv)
        Values.
    causal : bool
        Keep only keys ``j <= i + q_offset`` for query i.
    softmax_scale : float, optional
        Factor of the scores; ``D ** -0.5`` by default.
    window_size : (left, right), optional
        Keep only keys ``i + q_offset - left <= j <= i + q_offset + right``; None on a side is
        unbounded.
    q_offset : int, or int32 or int64 array (B,), optional
        Key position at which query 0 stands. By default the last query stands at the last key in
        use: ``Sk - Sq``, with seqused_k ``seqused_k - Sq`` of each batch element. 0 aligns the
        beginnings.
    seqused_k : int32 or int64 array (B,), optional
        Number of keys in use; what lies behind may be anything, NaN too.
    mask : bool array, optional
        True where a query may attend; broadcasts to (B, H, Sq, Sk) without being materialised.
    bias : float array, optional
        Added to the scores; broadcasts to (B, H, Sq, Sk) without being materialised. -inf masks.
    alibi_slopes : float array (H,) or (B, H), optional
        Adds ``-slope * abs(i + q_offset - j)`` (Press et al., arXiv:2108.12409). Kernels keep
        scores in float32: of one of 1e6 in size they have the first decimal. For the nearest key of
        a query, which weighs most (with a slope below 0 the furthest), it is at most 2**20; beyond
        that a GPU's result means nothing. On NumPy arrays, and where values are checked
        (`backend`), it is an error, for float64 arrays from 2**49 on. Keys that a mask hides count
        as seen.
    softcap : float, optional
        Replaces each scaled score by ``softcap * tanh(s / softcap)``, before bias and ALiBi. At
        most 10,000: kernels err by about softcap * 1e-7 in a score.
    sinks : float array (H,), optional
        One more logit per head that joins the softmax denominator, and so lse, but has no value.
        At most 2e38, or -inf for none. On a GPU larger ones give NaN; on NumPy arrays, and where
        values are checked (`backend`), they are an error.
    dropout_p : float
        Probability with which a softmax weight is dropped; kept ones are scaled by
        ``1 / (1 - dropout_p)``. lse is that of the weights before dropping.
    seed : int or DropoutSeed, optional
        0 to 2**64 - 1, required with dropout. The mask is a function of the seed and of
        (b, h, i, j) alone: Philox4x32-10 (Salmon et al., SC 2011). A `DropoutSeed` says besides
        where a call of a part stands in the whole.
    rotary : (cos, sin) or Rotary, optional
        Tables (positions, R/2) with R <= D: rotates the first R features of q (at position
        ``i + q_offset``) and k (at position j), feature d paired with d + R/2, or with
        ``Rotary(cos, sin, interleaved=True)`` 2d with 2d + 1 (Su et al., arXiv:2104.09864,
        equation 34). The tables are of one dtype, any that `rope` takes. The result is that of
        `rope` and then attention: rotated q and k are rounded to their dtype. Tables that are too
        short are an error. On a GPU, where positions come from arrays (q_offset, seqused_k), what
        stands outside of them has NaN for scores instead, unless values are checked (`backend`).
        Queries that causal order, the window and seqused_k leave no key need no position. Where
        queries are padded behind, as keys are (seqused_k below Sq), pass ``q_offset=0``: by default
        the last of the Sq queries stands at the last key in use, and the first ones before 0.
    score_mod : ScoreMod, optional
        The user's own expression of a score, after bias and ALiBi: see `ScoreMod`. On NumPy arrays
        also a function ``score_mod(score, b, h, q_idx, k_idx)`` of arrays that broadcast together.
    mask_mod : MaskMod or BlockMask, optional
        The user's own mask: see `MaskMod`, and `block_mask` for one whose empty tiles are skipped
        and whose full ones are not asked for. On NumPy arrays also a function
        ``mask_mod(b, h, q_idx, k_idx)`` of integer arrays that broadcast together, True to attend.
    return_lse : bool
        Return the log-sum-exp of the scores too.
    implementation : {"flash", "tiled", "naive"}
        Which kernel runs on a GPU or the emulator. "flash" runs on tensor cores for float16, where
        the GPU has any (`device_info`), and otherwise in float32 arithmetic; where up to 16
        queries see many keys it splits those over all multiprocessors, like `paged_attention` (see
        Notes). "naive" (the textbook) and "tiled" (shared-memory tiles with the online softmax) are
        there to be read and compared; of the options they have causal, softmax_scale, return_lse
        and out. On the reference the implementation makes no difference.
    out : array, or (out, lse) with return_lse, optional
        Where to write the result: the last axis of each array is contiguous, the others may have
        any stride, and they overlap no input.
    workspace : array, optional
        Scratch memory for the parts of the keys that "flash" splits (see Notes), for a BlockMask,
        and with rotary for rotated k and sometimes q; other calls need none. Of any dtype, from a
        multiple of 16 bytes on. If it is too small the error says how many bytes there have to be.
        Allocated if not given.

    Returns
    -------
    out : array (B, Sq, H, Dv), dtype of q
        Zeros for a query without keys.
    lse : array (B, H, Sq), float32 (float64 for float64 arrays)
        Only with return_lse: natural log of the softmax denominator; -inf for a query without keys
        (with sinks, the sink).

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, or a dtype that is not allowed.
    ValueError
        For shapes, strides or options that do not fit, dropout without a seed, arrays on different
        devices, or an out that overlaps an input. Nothing has been written then.
    NotImplementedError
        On a GPU or the emulator, for an option or a dtype that the implementation's kernel does not
        have: NumPy arrays on the reference have them all.
    RuntimeError
        On a GPU of a compute capability below 7.5; where NVRTC, which compiles the kernels, is not
        installed; and for a first call with these options inside a CUDA graph capture: call once
        first.

    Notes
    -----
    Vaswani et al., arXiv:1706.03762, equation 1; on a GPU computed tile by tile (Dao et al.,
    arXiv:2205.14135). Kernels accumulate in float32 and round once, at the store; on NumPy arrays
    the same is computed in float64. Within that rounding a row may differ by what the rows beside
    it see. Of keys that a query does not see, only those behind seqused_k may hold NaN or infinity:
    causal order, windows, masks and biases of -inf give the others a weight of 0, and 0 times NaN
    is NaN. To hide keys use a mask or a bias of -inf: with a finite bias beyond -1e7 on all keys of
    a query its row means nothing in float32 (kernels give zeros and a lse of -inf from about -1e10
    on, NumPy arrays the softmax of the bias). Of scores above 1e8 "flash" tells no differences, and
    may give such zeros too. A GPU takes a seqused_k outside of 0 to Sk as the nearer end; on NumPy
    arrays that is an error. A call runs on the current stream of its arrays' device and does not
    synchronise.

    "flash" splits the keys of calls with 1 to 16 queries, 256 keys or more that a window leaves
    them, D = Dv and none of mask, bias, dropout, score_mod and mask_mod, as Flash-Decoding does
    (Dao et al., 2023); but not where so many heads and sequences fill the GPU that this would be
    slower. With any options but a BlockMask it splits the keys of other calls too, into parts of
    256 or more, where query rows, heads and sequences are too few to fill the GPU. The result is as
    exact, and the same in every run. Its last bits depend on the number of multiprocessors.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 7, 4, 16), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 2, 9, 2, 16), dtype=np.float32)
    >>> out, lse = cupyattn.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((2, 7, 4, 16), (2, 4, 7))

    The last query sees every key, the first one all but the last six:

    >>> np.allclose(out[:, :1], cupyattn.attention(q[:, :1], k[:, :-6], v[:, :-6]))
    True

    Slices of one packed array, without a copy:

    >>> qkv = rng.standard_normal((1, 5, 3, 2, 8), dtype=np.float32)
    >>> cupyattn.attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]).shape
    (1, 5, 2, 8)
    """
    require_bool("return_lse", return_lse)
    given_out, given_lse = _split_out(out, return_lse)
    operands, problem, seed = attention_call(
        forward_problem,
        {"q": q, "k": k, "v": v, "seqused_k": seqused_k, "mask": mask, "bias": bias,
         "alibi_slopes": alibi_slopes, "sinks": sinks, "out": given_out, "lse": given_lse,
         "workspace": workspace},
        (causal, softmax_scale, window_size, softcap, dropout_p, seed is not None, implementation),
        q_offset, seed, rotary, score_mod, mask_mod,
    )  # fmt: skip
    device = device_of(operands)
    if device is None:
        options = reference_options(problem, operands.arrays, seed, score_mod, mask_mod)
        results = _on_cpu(problem, operands.arrays, options)
    else:
        results = attention_forward(device, problem, operands, seed=seed, return_lse=return_lse)
    return (results["out"], results["lse"]) if return_lse else results["out"]


def _split_out(out: Any, return_lse: bool) -> tuple[Any, Any]:
    if not return_lse:
        if isinstance(out, tuple):
            raise error(
                TypeError,
                "out is a tuple without return_lse=True",
                "it is one array then",
                "pass return_lse=True to have lse as well, or the array alone",
            )
        return out, None
    if out is None:
        return None, None
    if isinstance(out, tuple) and len(out) == 2 and out[0] is not None and out[1] is not None:
        return out
    raise error(
        TypeError,
        f"out is a {type(out).__name__} with return_lse=True",
        "it is a tuple (out, lse) of arrays then",
        "pass out=(out, lse)",
    )


def _on_cpu(
    problem: AttentionProblem, arrays: Mapping[str, Array], options: Mapping[str, Any]
) -> dict[str, Array]:
    out, lse = reference.attention(arrays["q"], arrays["k"], arrays["v"], **options)
    return {
        "out": round_into(arrays.get("out"), out, problem.dtype),
        "lse": round_into(arrays.get("lse"), lse, problem.lse_dtype),
    }
