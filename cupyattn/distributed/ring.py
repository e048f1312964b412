"""Ring attention and its gradients: keys and values travel around a ring of ranks.

In the backward the gradients of keys and values travel after the blocks that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cupyattn import AttentionGrads, BlockMask, MaskMod, Rotary, ScoreMod, add_to
from cupyattn.distributed.calls import RingCalls
from cupyattn.distributed.checks import refuse
from cupyattn.distributed.group import Group
from cupyattn.distributed.lane import Lane, RingBlocks
from cupyattn.distributed.options import RingOptions, place_of, with_four_axes
from cupyattn.distributed.plan import AttentionCall
from cupyattn.distributed.problem import RingProblem, ring_problem
from cupyattn.distributed.results import (
    Merged,
    Wanted,
    exact_dtype,
    given_gradients,
    given_results,
    lifted,
    own_block,
    results_of,
)
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.checks import require_bool


def ring_attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    /,
    *,
    group: Group,
    placement: str = "zigzag",
    cu_seqlens: object = None,
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
    score_mod: ScoreMod | Callable[..., object] | None = None,
    mask_mod: MaskMod | BlockMask | Callable[..., object] | None = None,
    dlse: Array | None = None,
    deterministic: bool = False,
    grads: AttentionGrads | None = None,
    accumulate: bool = False,
    **others: object,
) -> AttentionGrads:
    r"""Gradients of `ring_attention` with respect to its arrays.

    Parameters
    ----------
    dout : array (B, S, H, Dv), dtype of q
        Gradient with respect to this rank's out. With cu_seqlens (S, H, Dv).
    q, k, v : array
        As given to `ring_attention`, with the same options.
    out : array (B, S, H, Dv)
        Its result.
    lse : array (B, H, S)
        Its second result.
    group, placement, cu_seqlens
        As given to `ring_attention`.
    causal, softmax_scale, window_size, seqused_k, mask, bias, alibi_slopes, softcap : optional
        As given to `ring_attention`.
    sinks, dropout_p, seed, rotary, score_mod, mask_mod : optional
        As given to `ring_attention`: dropout draws the same mask again.
    dlse : array (B, H, S), optional
        Gradient with respect to lse, where it was used.
    deterministic : bool
        Bitwise the same result from run to run: as in `cupyattn.attention_backward`.
    grads : AttentionGrads, optional
        Arrays to write the gradients into; a field that is None makes a new one.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.
    **others
        As of `ring_attention`.

    Returns
    -------
    AttentionGrads
        ``(dq, dk, dv, dbias, dsinks)`` of this rank's tokens, each like its array. dsinks is that
        of all ranks, the same on each; so is dbias of a bias that is the same for all queries,
        where S is more than 1.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RankFailedError
        As `ring_attention`, and `cupyattn.attention_backward`.

    Notes
    -----
    Keys and values travel as in the forward. The gradients of each block follow one step later and
    return home at the end, while the rank computes the rest of its own block. They are sums of the
    ranks' parts in float32 (float64 for float64): each part is rounded to the dtype of its array,
    and so is the sum.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> from cupyattn import distributed
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 8, 2, 8), dtype=np.float32)
    >>> def of_rank(group):
    ...     own = [distributed.shard(x, group.rank, group.size) for x in (q, k, v, dout)]
    ...     ring = {"group": group, "causal": True}
    ...     results = distributed.ring_attention(*own[:3], return_lse=True, **ring)
    ...     return distributed.ring_attention_backward(own[3], *own[:3], *results, **ring).dk
    >>> dk = distributed.unshard(distributed.run(of_rank, 2))
    >>> results = cupyattn.attention(q, k, v, causal=True, return_lse=True)
    >>> whole = cupyattn.attention_backward(dout, q, k, v, *results, causal=True)
    >>> np.allclose(dk, whole.dk, atol=1e-6)
    True
    """
    refuse("ring_attention_backward", others)
    require_bool("deterministic", deterministic)
    require_bool("accumulate", accumulate)
    options = RingOptions(
        causal, softmax_scale, window_size, seqused_k, mask, bias, alibi_slopes, softcap, sinks,
        dropout_p, seed, rotary, score_mod, mask_mod,
    )  # fmt: skip
    targets = given_gradients(grads, accumulate, bias=bias is not None, sinks=sinks is not None)
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    problem = ring_problem(group, given, options, placement, cu_seqlens, part_own=True)
    arrays, plan = problem.arrays, problem.plan
    with Lane(problem.group, arrays["q"]) as lane:
        xp, exact = problem.xp, exact_dtype(arrays["q"])
        calls = RingCalls(problem)
        own = {name: array for name, array in arrays.items() if name not in "kv"}
        own["q"] = problem.rotated(arrays["q"])
        hops = plan.hops
        blocks = RingBlocks(lane, own_block(problem), len(hops) - 1)
        results = results_of(problem, _wanted(targets, problem))
        sums = [xp.zeros(arrays[name].shape, exact) for name in "kv"]
        gradients = RingBlocks(lane, sums, len(hops), overwrites=True)
        dq = xp.zeros(arrays["q"].shape, exact)
        extra = problem.options.arrays
        dsinks: Any = xp.zeros(extra["sinks"].shape, exact) if "sinks" in extra else None
        dbias: Any = (
            xp.zeros(with_four_axes(extra["bias"]).shape, exact) if "bias" in extra else None
        )
        steps, later = plan.parted

        def shares_of(step_calls: tuple[AttentionCall, ...], block: tuple[Array, ...]) -> object:
            of_block = _ordered(own, *block)
            return [(call, calls.backward(call, of_block, deterministic)) for call in step_calls]

        def add(shares: Any) -> None:
            dk, dv = gradients.here
            for call, share in shares:
                for total, part, rows in (
                    (dq, share.dq, call.queries),
                    (dk, share.dk, call.keys),
                    (dv, share.dv, call.keys),
                ):
                    _add(total[:, rows.slice], part)
                if dbias is not None:
                    # Columns of striped tokens are no neighbours, as `add_to` wants them.
                    dbias[place_of(dbias, call, plan.placement)] += share.dbias.astype(exact)
                if share.dsinks is not None:
                    dsinks[...] += share.dsinks

        held = blocks.here
        for number, step in enumerate(steps):
            block = blocks.arrive() if number else held
            before = lane.mark()
            shares = shares_of(step.calls, block)
            if not number:
                problem.agree()
            if number + 1 < len(steps):
                blocks.depart(hops[number], before)
            if number:
                # One step after the block, so that they travel while this step is computed.
                gradients.depart(hops[number - 1], before)
                gradients.arrive()
            add(shares)
        before = lane.mark()
        shares = shares_of(later, held)
        gradients.depart(hops[-1], before)
        dk, dv = gradients.arrive()
        add(shares)
        totals = {
            "dq": problem.rotated(dq, inverse=True),
            "dk": problem.rotated(dk, inverse=True),
            "dv": dv,
        }
        if dbias is not None:
            if dbias.shape[2] == 1 < arrays["q"].shape[1]:
                dbias = sum(problem.group.all_gather(dbias))
            totals["dbias"] = dbias.reshape(extra["bias"].shape)
        if dsinks is not None:
            dsinks = sum(problem.group.all_gather(dsinks))
            totals["dsinks"] = dsinks
        for name, total in totals.items():
            target = results[f"grads.{name}"]
            place = lifted(target, problem) if name in ("dq", "dk", "dv") else target
            if accumulate and targets.get(name) is not None:
                total = total + place.astype(total.dtype)
            place[...] = total
    return AttentionGrads(**{name.removeprefix("grads."): x for name, x in results.items()})


def _wanted(given: dict[str, Array | None], problem: RingProblem) -> dict[str, Wanted]:
    """Return the gradients by name, with what was given for each."""
    options = {name: problem.options.arrays.get(name) for name in ("bias", "sinks")}
    of = {**{name: problem.arrays[name] for name in "qkv"}, **options}
    return {
        f"grads.d{name}": Wanted(given.get(f"d{name}"), array.shape, array.dtype)
        for name, array in of.items()
        if array is not None
    }


def _ordered(own: dict[str, Array], k: Array, v: Array) -> dict[str, Array]:
    """Return a backward's arrays in the order of its parameters."""
    arrays = {**own, "k": k, "v": v}
    names = ("dout", "q", "k", "v", "out", "lse", "dlse")
    return {name: arrays[name] for name in names if name in arrays}


def _add(total: Array, part: Array) -> None:
    if total.dtype == np.float64:
        total += part
    else:
        add_to(total, part)


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    group: Group,
    placement: str = "zigzag",
    cu_seqlens: object = None,
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
    score_mod: ScoreMod | Callable[..., object] | None = None,
    mask_mod: MaskMod | BlockMask | Callable[..., object] | None = None,
    return_lse: bool = False,
    out: Array | tuple[Array, Array] | None = None,
    **others: object,
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
        As there, of the whole sequence. With a window, blocks of keys that no query sees are
        neither sent nor computed.
    seqused_k : int32 or int64 array (B,), optional
        As there with ``q_offset=0``: the number of keys in use of each whole sequence. Query i is
        always at the position of key i.
    mask, bias : array, optional
        As there, of this rank's queries and the Sk keys of the whole sequence: they broadcast to
        (B, H, S, Sk). ``shard(mask, rank, ranks, axis=-2)`` cuts the rows. Not with cu_seqlens.
    alibi_slopes : optional
        As there; not with striped.
    dropout_p, seed : optional
        As there, with the same mask. Pieces have to be multiples of 32 tokens; not with striped.
        Packed sequences are then computed one at a time.
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
        Where to write the result; it overlaps no input. Its contents are undefined after an error.
    **others
        q_offset, implementation and workspace raise an error, except for the values that a ring
        uses anyway: 0, "flash" and None.

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
    the next block is transferred while this one is computed, on a separate stream, with two buffers
    in addition to the rank's own k and v.

    Ranks compare their calls: shapes, dtypes, placement, lengths and options; of NumPy arrays also
    the contents of seqused_k, alibi_slopes, sinks, rotary and the arrays of expressions, never of
    arrays on a GPU. Every call is compared, with the seed, where the host can send it: with NumPy
    arrays, between threads (`run`), and over MPI. Between processes of NCCL the host would have to
    wait for the GPU: there only the first call of each kind is compared, so a later mix of kinds is
    not detected.

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
    require_bool("return_lse", return_lse)
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
        calls, rotated = RingCalls(problem), problem.rotated(arrays["q"])
        blocks = RingBlocks(lane, own_block(problem), len(plan.steps) - 1)
        hops = plan.hops
        for number, step in enumerate(plan.steps):
            k_block, v_block = blocks.arrive() if number else blocks.here
            before = lane.mark()
            seen = {"q": rotated, "k": k_block, "v": v_block}
            for call in step.calls:
                merged.add(call.queries, partial(calls.forward, call, seen))
            if not number:
                problem.agree()
            if number + 1 < len(plan.steps):
                blocks.depart(hops[number], before)
        merged.finish()
    return tuple(results.values()) if return_lse else results["out"]
