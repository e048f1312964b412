"""Exact attention over packed sequences, and its backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from numpy.typing import NDArray

from cupyattn.ops.attention import cpu, reference
from cupyattn.ops.attention.api import (
    AttentionKeywords,
    gradients_of,
    rounded_gradients,
    rounded_results,
)
from cupyattn.ops.attention.backward import attention_backward
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
    WholeAttentionArrays,
)
from cupyattn.ops.attention.quantized_keys import (
    QuantizedKeys,
    require_no_int8_keys,
)
from cupyattn.ops.attention.reference.dense import AttentionGrads
from cupyattn.ops.rope.api import Rotary
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import require_bool
from cupyattn.runtime.differentiable import differentiable
from cupyattn.runtime.outputs import named_grads, named_out

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention_varlen(
    q: Array,
    k: Array | QuantizedKeys,
    v: Array,
    /,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    out: Array | None = ...,
    **options: Unpack[AttentionKeywords],
) -> Array: ...


@overload
def attention_varlen(
    q: Array,
    k: Array | QuantizedKeys,
    v: Array,
    /,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    out: tuple[Array, Array] | None = ...,
    **options: Unpack[AttentionKeywords],
) -> tuple[Array, Array]: ...


@overload
def attention_varlen(
    q: Array,
    k: Array | QuantizedKeys,
    v: Array,
    /,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    out: Array | tuple[Array, Array] | None = ...,
    **options: Unpack[AttentionKeywords],
) -> Array | tuple[Array, Array]: ...


@differentiable(
    lambda: attention_varlen_backward,
    saved=("lse",),
    saved_by="return_lse",
    gradients=AttentionGrads._fields,
)
def attention_varlen(
    q: Array,
    k: Array | QuantizedKeys,
    v: Array,
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
    score_mod: ScoreModLike | None = None,
    mask_mod: MaskModLike | None = None,
    return_lse: bool = False,
    accumulator: str = "float32",
    out: Array | tuple[Array, Array] | None = None,
    workspace: Array | None = None,
) -> Any:
    r"""Attend within each of several sequences that are packed in one array.

    The result is that of one call of `attention` for each sequence, without padding and in one
    launch. Letters: B sequences, total_q and total_k rows of all of them together, H query heads,
    G key-value heads (H a multiple of G), D head dim, Dv value head dim (each 1 to 512).

    Parameters
    ----------
    q : array (total_q, H, D)
        Queries; dtypes and strides as for `attention`.
    k : array (total_k, G, D), or QuantizedKeys
        Keys, also in int8 (`quantize_keys`, with cu_seqlens_k as its cu_seqlens), as in `attention`
        with ``implementation="int8"``.
    v : array (total_k, G, Dv)
        Values.
    cu_seqlens_q : int32 or int64 array (B + 1,)
        The queries of sequence b are rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``. It begins
        with 0 and never falls; a sequence may have no queries. Rows from its last item on belong to
        no sequence: they are not read, and of results that are given theirs stay as they are (so
        arrays may keep their shape in a CUDA graph). Of results that are not given they are
        undefined.
    cu_seqlens_k : int32 or int64 array (B + 1,)
        The keys and values of sequence b, likewise.
    max_seqlen_q, max_seqlen_k : int
        The most queries and the most keys of a sequence, or larger numbers. Larger numbers cost
        nothing where the lengths vary: the arrays' rows bound the launch too.
    causal, softmax_scale, window_size : optional
        As in `attention`. By default the last query of each sequence is at its last key.
    q_offset : int, or int32 or int64 array (B,), optional
        Key position, within its sequence, of query 0 of each sequence.
    seqused_k : int32 or int64 array (B,), optional
        Keys in use of each sequence, counted from its first one; later ones may hold anything.
    mask, bias : array, optional
        As in `attention`; they broadcast to (B, H, max_seqlen_q, max_seqlen_k).
    alibi_slopes, softcap, sinks : optional
        As in `attention`.
    dropout_p, seed : optional
        As in `attention`; the b of dropout's (b, h, i, j) is the number of the sequence, i and j
        count within it.
    rotary, score_mod, mask_mod : optional
        As in `attention`, with such b, i and j: positions restart in each sequence, and an
        expression gets ``q_idx`` and ``k_idx`` within the sequence. So it may name rows of
        packed arrays: ``document[begin[b] + q_idx]``, with cu_seqlens_q as ``begin``. A BlockMask
        is one for ``block_mask(mask_mod, max_seqlen_q, max_seqlen_k, B=B)``, without B where it is
        the same for each sequence. It is evaluated beyond the end of shorter sequences too:
        ``document[min(begin[b] + q_idx, last)]``, with total_q - 1 as ``last``.
    return_lse : bool
        Return the log-sum-exp of the scores too.
    accumulator : {"float32", "float16"}
        The type of the sums of weights times v, as in `attention`.
    out : array, or (out, lse) with return_lse, optional
        Where to write the result: the last axis of each array is contiguous, the others may have
        any stride, and they overlap no input.
    workspace : array, optional
        As in `attention`, for a BlockMask, and with rotary for rotated k and mostly not for q;
        other calls need none.

    Returns
    -------
    out : array (total_q, H, Dv), dtype of q
    lse : array (H, total_q), float32 (float64 for float64 arrays)
        Only with return_lse: natural log of the softmax denominator.

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, or a dtype that is not allowed.
    ValueError
        For shapes, strides or options that do not fit, and where values are checked (`backend`;
        NumPy arrays always) for cu_seqlens that fall or reach past their arrays, and for a sequence
        that is longer than max_seqlen. On a GPU such lengths are clamped to the arrays and to
        max_seqlen: nothing is read beyond.
    NotImplementedError
        On a GPU or the emulator, for a score_mod or mask_mod that is a Python function, and for
        ``accumulator="float16"`` where `attention` refuses it.
    RuntimeError
        On a GPU, as `attention`.

    Notes
    -----
    The kernels are those of `attention` with ``implementation="flash"``, and give the same bits
    where that neither splits keys nor takes taller tiles for long sequences. No length is read by
    the host, and a call runs on the current stream without synchronising: each thread block finds
    its rows from the lengths, those of the longest sequences first. Keys are not split: a single
    sequence with few queries does not fill a GPU as it does in `attention`.

    Examples
    --------
    Two sequences, of 3 and 5 tokens:

    >>> import numpy as np, cupyattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 2, 16), dtype=np.float32)
    >>> bounds = np.array([0, 3, 8], np.int32)
    >>> out = cupyattn.attention_varlen(q, k, v, bounds, bounds, 5, 5, causal=True)

    The second one by itself:

    >>> alone = cupyattn.attention(q[None, 3:], k[None, 3:], v[None, 3:], causal=True)
    >>> np.allclose(out[3:], alone[0])
    True
    """
    require_bool("return_lse", return_lse)
    kind: Any = WholeAttentionArrays
    named = named_out(out, ("out", "lse") if return_lse else ("out",))
    implementation = "flash"
    if isinstance(k, QuantizedKeys):
        kind, implementation = QuantizedKeyArrays, "int8"
        named |= {"k_scales": k.scales, "k_centre": k.centre}
        k = k.codes
    arrays: AttentionArrays[Any] = kind(
        *(q, k, v, seqused_k, mask, bias, alibi_slopes, sinks),
        workspace=workspace,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        **named,
    )
    operands, problem, seed = attention_call(
        arrays,
        (
            *(causal, softmax_scale, window_size, softcap, dropout_p, seed is not None),
            *(implementation, accumulator),
        ),
        *(q_offset, seed, rotary, score_mod, mask_mod, max_seqlen_q, max_seqlen_k),
    )
    device = device_of(operands)
    if device is None:
        options = reference_options(problem, operands.arrays, seed, score_mod, mask_mod)
        on_cpu = cast("AttentionArrays[NDArray[Any]]", operands.arrays)
        rounded = _on_cpu(problem, on_cpu, options)
        return rounded if return_lse else rounded[0]
    arrays = attention_forward(device, problem, operands, seed=seed, return_lse=return_lse)
    return (arrays.out, arrays.lse) if return_lse else arrays.out


def _on_cpu(
    problem: AttentionProblem, arrays: AttentionArrays[NDArray[Any]], options: Mapping[str, Any]
) -> tuple[Array, Array]:
    bounds, keys = arrays.cu_seqlens_q, arrays.cu_seqlens_k
    assert bounds is not None
    assert keys is not None
    packed = *cpu.operands(arrays), bounds, keys
    out, lse = reference.attention_varlen(*packed, **options, attend=cpu.attention)
    end = int(bounds[-1])  # later rows of no sequence stay as they are
    if arrays.out is not None:
        out[end:] = arrays.out[end:]
    if arrays.lse is not None:
        lse[:, end:] = arrays.lse[:, end:]
    return rounded_results(problem, arrays, out, lse)


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
    score_mod: ScoreModLike | None = None,
    mask_mod: MaskModLike | None = None,
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
    lse : array (H, total_q), float32 (float64 for float64 arrays)
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
    require_no_int8_keys("attention_varlen_backward", k)
    require_bool("accumulate", accumulate)
    arrays: AttentionBackwardArrays[Any] = AttentionBackwardArrays(
        *(q, k, v, seqused_k, mask, bias, alibi_slopes, sinks, out, lse, workspace),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        dout=dout,
        dlse=dlse,
        **named_grads(AttentionGrads, grads, accumulate, ("dq", "dk", "dv")),
    )
    operands, problem, seed = attention_call(
        arrays,
        (
            *(causal, softmax_scale, window_size, softcap, dropout_p, seed is not None),
            *("flash", "float32"),
        ),
        *(q_offset, seed, rotary, score_mod, mask_mod, max_seqlen_q, max_seqlen_k),
    )
    device = device_of(operands)
    if device is None:
        options = {
            "score_mod_gradient": python_function(
                "score_mod", score_mod, operands.arrays, gradient=True
            ),
            **reference_options(problem, operands.arrays, seed, score_mod, mask_mod),
        }
        return _backward_on_cpu(problem, operands.arrays, options, accumulate)
    return gradients_of(
        attention_backward(
            device,
            problem,
            operands,
            seed=seed,
            deterministic=bool(deterministic),
            accumulate=bool(accumulate),
        )
    )


def _backward_on_cpu(
    problem: AttentionProblem,
    arrays: AttentionBackwardArrays[Any],
    options: Mapping[str, Any],
    accumulate: bool,
) -> AttentionGrads:
    given: Any = arrays
    queries, keys = given.cu_seqlens_q, given.cu_seqlens_k
    exact = reference.attention_varlen_backward(
        *(given.dout, given.q, given.k, given.v, given.out, given.lse, queries, keys),
        dlse=given.dlse,
        **options,
    )
    if not accumulate:  # rows of no sequence stay as they are
        for gradient, target, bounds in (
            (exact.dq, given.dq, queries),
            (exact.dk, given.dk, keys),
            (exact.dv, given.dv, keys),
        ):
            if target is not None:
                end = int(bounds[-1])
                gradient[end:] = target[end:]
    return rounded_gradients(problem, arrays, exact, accumulate)
