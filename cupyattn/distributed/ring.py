"""Attention whose keys and values go round a ring of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cupyattn import BlockMask, MaskMod, Rotary, ScoreMod
from cupyattn.distributed.calls import Calls
from cupyattn.distributed.checks import refuse, require_flags
from cupyattn.distributed.group import Group
from cupyattn.distributed.lane import Blocks, Lane
from cupyattn.distributed.merged import Merged, exact_dtype
from cupyattn.distributed.options import RingOptions
from cupyattn.distributed.problem import ring_problem
from cupyattn.distributed.results import Wanted, given_results, lifted, own_block, results_of
from cupyattn.runtime.arrays import Array


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    group: Group,
    placement: str = "zigzag",
    cu_seqlens: Any = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    seqused_k: Array | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    rotary: tuple[Array, Array] | Rotary | None = None,
    score_mod: ScoreMod | Callable[..., Any] | None = None,
    mask_mod: MaskMod | BlockMask | Callable[..., Any] | None = None,
    return_lse: bool = False,
    out: Array | tuple[Array, Array] | None = None,
    **others: Any,
) -> Any:
    r"""Attend over sequences whose tokens are spread over the ranks of a group.

    Each rank passes its shard, and gets that shard of what `cupyattn.attention` would give for the
    whole sequences: "as there" refers to it. Letters: B batch, S tokens on this rank, H query
    heads, G key-value heads, D head dim, Dv value head dim.

    Parameters
    ----------
    q : array (B, S, H, D)
        This rank's queries, cut by `shard`; dtypes and strides as there. With cu_seqlens (S, H, D).
    k : array (B, S, G, D)
        Keys of the same tokens.
    v : array (B, S, G, Dv)
        Their values.
    group : Group
        The ranks.
    placement : {"zigzag", "contiguous", "striped"}
        Which tokens each rank holds: see `shard`. Zigzag balances causal attention.
    cu_seqlens : integers (batch + 1,), optional
        Bounds of the whole packed sequences, on the host: a sequence or a NumPy array.
    causal, softmax_scale, window_size, softcap, sinks : optional
        As there, of the whole sequence. With a window, blocks of keys that nobody sees are neither
        sent nor computed.
    seqused_k : int32 or int64 array (B,), optional
        As there with ``q_offset=0``: the number of keys in use of each whole sequence. Query i
        stands at key i, whatever it says.
    mask, bias : array, optional
        As there, of this rank's queries and the Sk keys of the whole sequence: they broadcast to
        (B, H, S, Sk). ``shard(mask, rank, ranks, axis=-2)`` cuts the rows. Not with cu_seqlens.
    alibi_slopes : optional
        As there; not with striped.
    dropout_p, seed : optional
        As there, and the same mask. Pieces have to be multiples of 32 tokens; not with striped. Of
        packed sequences each then takes calls of its own.
    rotary : optional
        As there: positions are those of the whole sequence, under every placement.
    score_mod, mask_mod : optional
        As there: ``b``, ``q_idx`` and ``k_idx``, by which the arrays of an expression are indexed,
        are those of the whole sequences. A BlockMask is that of the whole sequences too; its empty
        tiles are skipped where pieces begin at multiples of 16 tokens, and neither with striped nor
        with cu_seqlens.
    return_lse : bool
        Return the log-sum-exp of the scores too.
    out : array, or (out, lse) with return_lse, optional
        Where to write the result; it overlaps no input. What it holds after an error is undefined.
    **others
        q_offset, implementation and workspace are no options of a ring: an error says why. What it
        does anyway is taken: 0, "flash" and None.

    Returns
    -------
    out : array (B, S, H, Dv), dtype of q
    lse : array (B, H, S), float32 (float64 for float64 arrays)
        Only with return_lse.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As there; for a group that is none, arrays on another device than its communicator's, or of
        other tokens than q, lengths that the placement cannot split evenly, and ranks that do not
        call alike. Nothing has been sent then.
    RankFailedError
        If a rank has failed, or did not come in time. On a GPU the host does not wait for
        transfers: then the next call raises it, or the end of ``with group:``.

    Notes
    -----
    Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers", arXiv:2310.01889. Results
    of the blocks are merged by their log-sum-exps in float32 (`cupyattn.merge_attention`). On a GPU
    the next block is on its way while this one is computed, on a stream of its own and in two
    buffers besides the rank's own k and v.

    Ranks compare their calls: shapes, dtypes, placement, lengths and options; of NumPy arrays also
    what is in seqused_k, alibi_slopes, sinks, rotary and the arrays of expressions, and never what
    is in a GPU's. Every call is compared, with the seed, where the host can tell other ranks of it:
    with NumPy arrays, between threads (`run`), and over MPI. Between processes of NCCL the host
    would have to wait for the GPU: there the first call of its kind is compared, and whoever mixes
    kinds of calls that were made before is not told.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> from cupyattn import distributed
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 24, 2, 8), dtype=np.float32)
    >>> def of_rank(group):
    ...     own = (distributed.shard(x, group.rank, group.size) for x in (q, k, v))
    ...     return distributed.ring_attention(*own, group=group, causal=True)
    >>> whole = distributed.unshard(distributed.run(of_rank, 3))
    >>> np.allclose(whole, cupyattn.attention(q, k, v, causal=True), atol=1e-6)
    True
    """
    refuse("ring_attention", others)
    require_flags(return_lse=return_lse)
    options = RingOptions(
        causal, softmax_scale, window_size, seqused_k, mask, bias, alibi_slopes, softcap, sinks,
        dropout_p, seed, rotary, score_mod, mask_mod,
    )  # fmt: skip
    given_out, given_lse = given_results(out, return_lse)
    problem = ring_problem(group, {"q": q, "k": k, "v": v}, options, placement, cu_seqlens)
    arrays, plan = problem.arrays, problem.plan
    with Lane(problem.group, arrays["q"]) as lane:
        (batch, tokens, heads, _), dtype = arrays["q"].shape, arrays["q"].dtype
        of_out = (batch, tokens, heads, arrays["v"].shape[3])
        of_lse = (batch, heads, tokens)
        results = results_of(problem, {
            "out": Wanted(given_out, of_out, dtype),
            "lse": Wanted(given_lse, of_lse, exact_dtype(arrays["q"])),
        })  # fmt: skip
        merged = Merged(plan, *(lifted(array, problem) for array in results.values()))
        calls, turned = Calls(problem), problem.rotated(arrays["q"])
        blocks = Blocks(lane, own_block(problem), len(plan.steps) - 1)
        hops = plan.hops
        for number, step in enumerate(plan.steps):
            k_block, v_block = blocks.arrive() if number else blocks.here
            before = lane.mark()
            seen = {"q": turned, "k": k_block, "v": v_block}
            for call in step.calls:
                merged.add(call.queries, partial(calls.forward, call, seen))
            if not number:
                problem.agree()
            if number + 1 < len(plan.steps):
                blocks.depart(hops[number], before)
        merged.finish()
    return tuple(results.values()) if return_lse else results["out"]
