"""Exact attention, and its backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast, overload

import numpy as np
from numpy.typing import NDArray

from cupyattn.ops.attention import backward as ops
from cupyattn.ops.attention import cpu, reference
from cupyattn.ops.attention.block_mask import MaskModLike, ScoreModLike
from cupyattn.ops.attention.checks import attention_call, reference_options
from cupyattn.ops.attention.forward import attention_forward
from cupyattn.ops.attention.modifiers import python_function
from cupyattn.ops.attention.options import DropoutSeed
from cupyattn.ops.attention.problem import (
    AttentionArrays,
    AttentionBackwardArrays,
    AttentionProblem,
    QuantizedKeyArrays,
)
from cupyattn.ops.attention.quantized_keys import (
    QuantizedKeys,
    int8_keys,
    require_no_int8_keys,
)
from cupyattn.ops.attention.reference.dense import AttentionGrads
from cupyattn.ops.rope.api import Rotary
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import require_bool
from cupyattn.runtime.differentiable import differentiable
from cupyattn.runtime.errors import error
from cupyattn.runtime.outputs import named_grads, round_into

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AttentionKeywords(TypedDict, total=False):
    """The options of attention that do not decide the type of the result."""

    causal: bool
    softmax_scale: float | None
    window_size: tuple[int | None, int | None] | None
    q_offset: int | Array | None
    seqused_k: Array | None
    mask: Array | None
    bias: Array | None
    alibi_slopes: Array | None
    softcap: float | None
    sinks: Array | None
    dropout_p: float
    seed: int | DropoutSeed | None
    rotary: tuple[Array, Array] | Rotary | None
    score_mod: ScoreModLike | None
    mask_mod: MaskModLike | None
    accumulator: str
    workspace: Array | None


@overload
def attention(
    q: Array,
    k: Array | QuantizedKeys,
    v: Array,
    /,
    *,
    return_lse: Literal[False] = ...,
    implementation: str = ...,
    out: Array | None = ...,
    **options: Unpack[AttentionKeywords],
) -> Array: ...


@overload
def attention(
    q: Array,
    k: Array | QuantizedKeys,
    v: Array,
    /,
    *,
    return_lse: Literal[True],
    implementation: str = ...,
    out: tuple[Array, Array] | None = ...,
    **options: Unpack[AttentionKeywords],
) -> tuple[Array, Array]: ...


@overload
def attention(
    q: Array,
    k: Array | QuantizedKeys,
    v: Array,
    /,
    *,
    return_lse: bool,
    implementation: str = ...,
    out: Array | tuple[Array, Array] | None = ...,
    **options: Unpack[AttentionKeywords],
) -> Array | tuple[Array, Array]: ...


@differentiable(
    lambda: attention_backward,
    saved=("lse",),
    saved_by="return_lse",
    gradients=AttentionGrads._fields,
)
def attention(
    q: Array,
    k: Array | QuantizedKeys,
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
    score_mod: ScoreModLike | None = None,
    mask_mod: MaskModLike | None = None,
    return_lse: bool = False,
    implementation: str = "flash",
    accumulator: str = "float32",
    out: Array | tuple[Array, Array] | None = None,
    workspace: Array | None = None,
) -> Any:
    r"""Attend: ``softmax(softmax_scale * q @ k.T) @ v`` for every head, without storing the scores.

    Letters: B batch, Sq and Sk query and key length, H query heads, G key-value heads (H a
    multiple of G), D head dim, Dv value head dim (each 1 to 512). Kernels of "int8", of "tiled" and
    of float16 accumulators have head dims up to 256, those of "int8" only an even D.

    Parameters
    ----------
    q : array (B, Sq, H, D)
        Queries. All arrays of a call are CuPy (or CUDA arrays of another library, taken by
        ``__cuda_array_interface__`` or DLPack without a copy) or all are NumPy. q, k and v share
        one dtype: float16, float32 or bfloat16; NumPy arrays outside of the emulator may be
        float64. With int8 keys q and v are float16. The last axis of each is contiguous, the others
        may have any stride, so slices of a packed array and transposes work without a copy.
    k : array (B, Sk, G, D), or QuantizedKeys
        Keys; query head h attends to key-value head ``h // (H // G)``. `quantize_keys` makes keys
        in int8 (see implementation).
    v : array (B, Sk, G, Dv)
        Values.
    causal : bool
        Keep only keys ``j <= i + q_offset`` for query i.
    softmax_scale : float, optional
        Factor of the scores, at most 1e26; ``D ** -0.5`` by default.
    window_size : (left, right), optional
        Keep only keys ``i + q_offset - left <= j <= i + q_offset + right``; None on a side is
        unbounded.
    q_offset : int, or int32 or int64 array (B,), optional
        Key position of query 0. By default the last query has the position of the last key in
        use: ``Sk - Sq``, with seqused_k ``seqused_k - Sq`` of each batch element. 0 aligns the
        beginnings.
    seqused_k : int32 or int64 array (B,), optional
        Number of keys in use; the keys after them may hold anything, NaN too.
    mask : bool array, optional
        True where a query may attend; broadcasts to (B, H, Sq, Sk) without being materialised.
    bias : float array, optional
        Added to the scores; broadcasts to (B, H, Sq, Sk) without being materialised. -inf masks.
    alibi_slopes : float array (H,) or (B, H), optional
        Adds ``-slope * abs(i + q_offset - j)`` (Press et al., arXiv:2108.12409). Kernels keep
        scores in float32, which has one decimal at 1e6. So slope times distance is at most 2**20
        for the nearest key of each query (with a negative slope, for the furthest). On a GPU larger
        products give meaningless results; on NumPy arrays, and where values are checked
        (`backend`), they are an error (for float64 arrays from 2**49 on). Masked keys count too.
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
        (b, h, i, j) alone: Philox4x32-10 (Salmon et al., SC 2011). A `DropoutSeed` also has the
        position of the call within a larger one.
    rotary : (cos, sin) or Rotary, optional
        Tables (positions, R/2) with R <= D: rotates the first R features of q (at position
        ``i + q_offset``) and k (at position j), feature d paired with d + R/2, or with
        ``Rotary(cos, sin, interleaved=True)`` 2d with 2d + 1 (Su et al., arXiv:2104.09864,
        equation 34). The tables are of one dtype, any that `rope` takes. The result is that of
        `rope` and then attention: rotated q and k are rounded to their dtype. Tables that are too
        short are an error. If positions come from arrays (q_offset, seqused_k) on a GPU, positions
        outside of the tables give NaN scores instead, unless values are checked (`backend`).
        Queries without keys (by causal order, window_size and seqused_k) need no position. If
        queries are padded at the end, as keys are (seqused_k below Sq), pass ``q_offset=0``: by
        default the last of the Sq queries is at the last key in use, the first ones before 0.
    score_mod : ScoreMod, optional
        The user's own expression of a score, after bias and ALiBi: see `ScoreMod`. On NumPy arrays
        also a function ``score_mod(score, b, h, q_idx, k_idx)`` of arrays that broadcast together.
    mask_mod : MaskMod or BlockMask, optional
        The user's own mask: see `MaskMod`, and `block_mask` for one whose empty tiles are skipped
        and whose full ones are not evaluated. On NumPy arrays also a function
        ``mask_mod(b, h, q_idx, k_idx)`` of integer arrays that broadcast together, True to attend.
    return_lse : bool
        Return the log-sum-exp of the scores too.
    implementation : {"flash", "tiled", "naive", "int8"}
        Which kernel runs on a GPU or the emulator. "flash" runs on tensor cores for float16, where
        the GPU has any (`device_info`), and for bfloat16 from compute capability 8.0 on; otherwise
        in float32 arithmetic. Where up to 16 queries see many keys it splits those over all
        multiprocessors, like `paged_attention` (see Notes). "naive" (the textbook) and "tiled"
        (shared-memory tiles with the online softmax) are for reading and comparing; their only
        options are causal, softmax_scale, return_lse and out. "int8" quantises k first
        (`quantize_keys`), and with QuantizedKeys it is the default: scores are products of int8
        rows on tensor cores (see Notes). On NumPy arrays the others make no difference.
    accumulator : {"float32", "float16"}
        The type of the sums of weights times v on the tensor cores of compute capability 7.5, for
        float16 arrays. "float16" sums a tile of 16 to 64 keys in float16, and the tiles in float32.
        It is for GeForce RTX 20xx GPUs, which add such products twice as fast; a T4 does not gain.
        Absolute values of v in use are at most 250. On a GPU larger ones may give infinities or
        NaN, and infinities and NaN reach neighbouring columns; on NumPy arrays, and where values
        are checked (`backend`), all but NaN are an error. Weights below 2**-16 of a query's largest
        may be lost (see Notes). Calls that "flash" decodes accumulate in float32, and so do NumPy
        arrays. Other dtypes are an error, and so are other GPUs and head dims above 256, decoded or
        not; with int8 keys every GPU with tensor cores has such sums.
    out : array, or (out, lse) with return_lse, optional
        Where to write the result: the last axis of each array is contiguous, the others may have
        any stride, and they overlap no input.
    workspace : array, optional
        Scratch memory for the parts of the keys that "flash" splits (see Notes), for a BlockMask,
        and with rotary for rotated k and sometimes q; other calls need none. It has any dtype and
        an address that is a multiple of 16 bytes. If it is too small, the error has the number of
        bytes. By default it is allocated. "int8" of k that is an array always allocates keys.

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
    Vaswani et al., arXiv:1706.03762, equation 1; on a GPU computed tile by tile (Dao et
    al., arXiv:2205.14135). Kernels accumulate in float32 and round once, at the store. NumPy arrays
    are computed in float32 too, by BLAS for tiles of queries; float64 arrays, dropout, score_mod
    and mask_mod are computed in float64. Within that rounding a row depends on the keys of its
    neighbouring rows. Only keys from seqused_k on may hold NaN or infinity: causal order, windows,
    masks and biases of -inf give the keys that they hide a weight of 0, and 0 times NaN is NaN. To
    hide keys use a mask or a bias of -inf. If a finite bias beyond -1e7 is on all keys of a query,
    its row is meaningless in float32: kernels give zeros and a lse of -inf from about -1e10 on,
    NumPy arrays the softmax of the bias. "flash" does not distinguish scores above 1e8, and may
    give such zeros for them too. On tensor cores sums of bfloat16 values of v beyond 1e28 may
    overflow, and an infinity in v may give NaN. A GPU clamps a seqused_k outside of 0 to Sk; with
    NumPy arrays it is an error. A call runs on the current stream of its device and does not wait.

    With ``accumulator="float16"`` each sum of a tile of n keys is rounded n / 8 times, by 2**-11 of
    its terms' absolute values, and weights below 2**-16 of the row's largest become 0, where they
    otherwise do below 2**-23.

    "flash" splits the keys of calls with 1 to 16 queries, 256 keys or more that a window leaves
    them, D = Dv and none of mask, bias, dropout, score_mod and mask_mod, as Flash-Decoding does
    (Dao et al., 2023); but not where so many heads and sequences fill the GPU that this would be
    slower. With any options but a BlockMask it splits the keys of other calls too, into parts of
    256 or more, where query rows, heads and sequences are too few to fill the GPU. The result is as
    exact, and the same in every run. Its last bits depend on the number of multiprocessors.

    "int8" quantises each query like a key, without a centre, and adds ``q @ centre`` to its scores
    before any option sees them, and to lse. The result is attention of the quantised q and k, as
    exact as "flash" is. ``cupyattn.reference.int8_attention_estimate`` estimates its distance to
    attention of q and k. The centre is computed from the keys in use (seqused_k). There are all
    options but dropout, rotary and a BlockMask, keys are not split, and there are no gradients:
    with this lse the weights of a row no longer add up to 1, they are off by 0.1 to 1.5 % in the
    median, by up to 14 %. A NaN or an infinity in a query or a key makes its scores NaN. It is for
    Turing, where `explain` has its modelled gain. On an H200 that runs the same code it takes, with
    `quantize_keys`, 1.00 and 0.86 of the time of "flash" at head dims 64 and 128, causal 1.08 and
    0.93 (4 sequences of 4,096, 2026-11-29), and kernels for 8.0 and later are faster than both.

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
    if return_lse is False and not isinstance(out, tuple):
        given = out, None
    else:
        given = _split_out(out, return_lse)
    arrays: AttentionArrays[Any]
    if isinstance(k, QuantizedKeys) or (type(implementation) is str and implementation == "int8"):
        keys, implementation = int8_keys(k, implementation, seqused_k), "int8"
        others = v, seqused_k, mask, bias, alibi_slopes, sinks, *given, workspace
        pieces = {"k_scales": keys.scales, "k_centre": keys.centre}
        arrays = QuantizedKeyArrays(q, keys.codes, *others, **pieces)
    else:
        options = seqused_k, mask, bias, alibi_slopes, sinks, *given, workspace
        arrays = AttentionArrays(q, k, v, *options)
    operands, problem, seed = attention_call(
        arrays,
        (
            *(causal, softmax_scale, window_size, softcap, dropout_p, seed is not None),
            *(implementation, accumulator),
        ),
        q_offset,
        seed,
        rotary,
        score_mod,
        mask_mod,
    )
    device = device_of(operands)
    if device is None:
        on_cpu = cast("AttentionArrays[NDArray[Any]]", operands.arrays)
        by_name = reference_options(problem, operands.arrays, seed, score_mod, mask_mod)
        results = cpu.attention(*cpu.operands(on_cpu), **by_name)
        rounded = rounded_results(problem, operands.arrays, *results)
        return rounded if return_lse else rounded[0]
    arrays = attention_forward(device, problem, operands, seed=seed, return_lse=return_lse)
    return (arrays.out, arrays.lse) if return_lse else arrays.out


def _split_out(out: Any, return_lse: bool) -> tuple[Any, Any]:
    require_bool("return_lse", return_lse)
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
        f"out has type {type(out).__name__} with return_lse=True",
        "it must be a tuple (out, lse) of arrays then",
        "pass out=(out, lse)",
    )


def rounded_results(
    problem: AttentionProblem, arrays: AttentionArrays[Any], out: NDArray[Any], lse: NDArray[Any]
) -> tuple[Array, Array]:
    """Round the reference's results into what the call was given, or into new arrays."""
    return (
        round_into(arrays.out, out, problem.dtype),
        round_into(arrays.lse, lse, problem.lse_dtype),
    )


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
    score_mod: ScoreModLike | None = None,
    mask_mod: MaskModLike | None = None,
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
    lse : array (B, H, Sq), float32 (float64 for float64 arrays)
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
        GPU has any (`device_info`), bfloat16 from compute capability 8.0 on, and otherwise in
        float32 arithmetic. "naive" (the textbook) is for reading and comparing; its only options
        are causal, softmax_scale, dlse, grads and accumulate. On NumPy arrays the implementation
        makes no difference.
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
        above 64, 8 above 128); unless deterministic, 4 * rows * D' more; and for a bias that
        broadcasts up to 2**24, or where it does so along Sq or Sk a quarter of a byte for each
        score of its batch elements and heads (Sq rounded up to 128), and where D or Dv is above
        256 4 bytes for each of B * H * Sq * Sk scores; each rounded up to 256. A BlockMask takes 8
        bytes for each tile of each kernel. With rotary it needs as much as q and k more, with
        accumulate twice that. An error says how many.
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
    see no key do not count; keys in use that a mask hides do. Parts of ds, v and dout below 6e-8,
    times that power, are lost: scale the loss accordingly, as for dout itself, or use bfloat16 or
    float32 arrays. If the gradient of score_mod enlarges ``grad``, the result must stay below
    65504 times that power.

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
    require_no_int8_keys("attention_backward", k, implementation)
    arrays: AttentionBackwardArrays[Any] = AttentionBackwardArrays(
        *(q, k, v, seqused_k, mask, bias, alibi_slopes, sinks, out, lse, workspace),
        dout=dout,
        dlse=dlse,
        **named_grads(AttentionGrads, grads, accumulate, ("dq", "dk", "dv")),
    )
    operands, problem, seed = attention_call(
        arrays,
        (
            *(causal, softmax_scale, window_size, softcap, dropout_p, seed is not None),
            *(implementation, "float32"),
        ),
        q_offset,
        seed,
        rotary,
        score_mod,
        mask_mod,
    )
    device = device_of(operands)
    if device is not None:
        return gradients_of(
            ops.attention_backward(
                device,
                problem,
                operands,
                seed=seed,
                deterministic=bool(deterministic),
                accumulate=bool(accumulate),
            )
        )
    on_cpu: Any = operands.arrays
    exact = reference.attention_backward(
        *(on_cpu.dout, on_cpu.q, on_cpu.k, on_cpu.v, on_cpu.out, on_cpu.lse),
        dlse=on_cpu.dlse,
        score_mod_gradient=python_function("score_mod", score_mod, on_cpu, gradient=True),
        **reference_options(problem, operands.arrays, seed, score_mod, mask_mod),
    )
    return rounded_gradients(problem, operands.arrays, exact, accumulate)


def gradients_of(arrays: AttentionBackwardArrays[Array]) -> AttentionGrads:
    """Return the gradients among the arrays of a call."""
    made: Any = arrays
    return AttentionGrads(made.dq, made.dk, made.dv, made.dbias, made.dsinks)


def rounded_gradients(
    problem: AttentionProblem,
    arrays: AttentionBackwardArrays[Array],
    exact: AttentionGrads,
    accumulate: bool,
) -> AttentionGrads:
    """Round the reference's gradients into what the call was given, or into new arrays."""
    rounded: dict[str, Any] = {}
    for name, gradient in exact._asdict().items():
        target = getattr(arrays, name)
        if gradient is not None and accumulate and target is not None:
            with np.errstate(invalid="ignore"):  # inf - inf is NaN, as on a GPU
                gradient = gradient + target.astype(np.float64)
        of = getattr(problem.layouts, name[1:])
        rounded[name] = None if of is None else round_into(target, gradient, of.dtype)
    return AttentionGrads(**rounded)
