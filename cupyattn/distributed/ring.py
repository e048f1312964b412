"""Attention whose keys and values go round a ring of ranks, forward and backward."""

from __future__ import annotations

from typing import Any

from cupyattn import AttentionGrads, Rotary
from cupyattn.arrays import Array
from cupyattn.distributed.calls import Calls
from cupyattn.distributed.group import Group
from cupyattn.distributed.lane import Blocks, Lane
from cupyattn.distributed.merged import Merged, exact_dtype
from cupyattn.distributed.plan import Call
from cupyattn.distributed.problem import RingOptions, RingProblem, ring_problem
from cupyattn.errors import error


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
    alibi_slopes: Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    rotary: tuple[Array, Array] | Rotary | None = None,
    return_lse: bool = False,
    out: Array | tuple[Array, Array] | None = None,
) -> Any:
    r"""Attend over sequences whose tokens are spread over the ranks of a group.

    Each rank passes its shard, and gets that shard of what `attention` would give for the whole
    sequences. Letters: B batch, S tokens on this rank, H query heads, G key-value heads, D head
    dim, Dv value head dim.

    Parameters
    ----------
    q : array (B, S, H, D)
        This rank's queries, cut by `shard`; dtypes and strides as for `attention`. With cu_seqlens
        (S, H, D).
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
        As in `attention`, of the whole sequence. With a window, blocks of keys that nobody sees are
        neither sent nor computed.
    alibi_slopes : optional
        As in `attention`; not with striped.
    dropout_p, seed : optional
        As in `attention`, and the same mask. Pieces have to be multiples of 32 tokens; not with
        striped. Of packed sequences each then takes calls of its own.
    rotary : optional
        As in `attention`: positions are those of the whole sequence, under every placement.
    return_lse : bool
        Return the log-sum-exp of the scores too.
    out : array, or (out, lse) with return_lse, optional
        Where to write the result; it overlaps no input.

    Returns
    -------
    out : array (B, S, H, Dv), dtype of q
    lse : array (B, H, S), float32 (float64 for float64 arrays)
        Only with return_lse.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention`; for a group that is none, arrays on another device than its communicator's,
        lengths that the placement cannot split evenly, and ranks that do not call alike. Nothing
        has been sent then.
    RankFailedError
        If a rank has failed, or did not come in time. On a GPU the host does not wait for
        transfers: then the next call raises it, or the end of ``with group:``.

    Notes
    -----
    Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers", arXiv:2310.01889. Results
    of the blocks are merged by their log-sum-exps in float32 (`merge_attention`). On a GPU the next
    block is on its way while this one is computed, on a stream of its own and in two buffers
    besides the rank's own k and v. The first call of its kind asks all ranks whether they call
    alike, and waits for the answer; others do not synchronise.

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
    options = RingOptions(
        causal, softmax_scale, window_size, alibi_slopes, softcap, sinks, dropout_p, seed, rotary
    )
    problem = ring_problem(group, {"q": q, "k": k, "v": v}, options, placement, cu_seqlens)
    arrays, plan = problem.arrays, problem.plan
    with Lane(problem.group, arrays["q"]) as lane:
        given_out, given_lse = out if return_lse and out is not None else (out, None)
        out_shape = (*q.shape[:-1], v.shape[-1])
        result = _target("out", given_out, out_shape, q.dtype, lane.xp)
        lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
        lse = _target("lse", given_lse, lse_shape, exact_dtype(q), lane.xp)
        merged, calls = Merged(plan), Calls(problem, lane.xp)
        turned = problem.rotated(arrays["q"], lane.xp)
        blocks = Blocks(lane, _own_block(problem, lane.xp), len(plan.steps) - 1)
        hops = plan.hops
        for number, step in enumerate(plan.steps):
            k_block, v_block = blocks.arrive() if number else blocks.here
            before = lane.mark()
            for call in step.calls:
                merged.add(
                    call.queries, *calls.forward(call, {"q": turned, "k": k_block, "v": v_block})
                )
            if number + 1 < len(plan.steps):
                blocks.depart(hops[number], before)
        merged.store(_lift(result, problem), _lift(lse, problem))
    return (result, lse) if return_lse else result


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
    cu_seqlens: Any = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    alibi_slopes: Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    rotary: tuple[Array, Array] | Rotary | None = None,
    dlse: Array | None = None,
    deterministic: bool = False,
    grads: AttentionGrads | None = None,
    accumulate: bool = False,
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
    causal, softmax_scale, window_size, alibi_slopes, softcap, sinks : optional
        As given to `ring_attention`.
    dropout_p, seed, rotary : optional
        As given to `ring_attention`: dropout draws the same mask again.
    dlse : array (B, H, S), optional
        Gradient with respect to lse, where it was used.
    deterministic : bool
        Bitwise the same result from run to run: as in `attention_backward`.
    grads : AttentionGrads, optional
        Arrays to write the gradients into; a field that is None makes a new one.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.

    Returns
    -------
    AttentionGrads
        ``(dq, dk, dv, None, dsinks)`` of this rank's tokens, each like its array. dsinks is that of
        all ranks, the same on each.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RankFailedError
        As `ring_attention`, and `attention_backward`.

    Notes
    -----
    Keys and values go round as in the forward. The gradients of each block go with it, a step
    behind, and home at the end, while the rank computes what it has left of its own block. They are
    sums of the ranks' shares, in float32 (float64 for float64): each share is rounded to the dtype
    of its array, the sum once more.

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
    options = RingOptions(
        causal, softmax_scale, window_size, alibi_slopes, softcap, sinks, dropout_p, seed, rotary
    )
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    problem = ring_problem(group, given, options, placement, cu_seqlens, part_own=True)
    targets = grads or AttentionGrads()
    arrays, plan = problem.arrays, problem.plan
    with Lane(problem.group, arrays["q"]) as lane:
        xp, exact = lane.xp, exact_dtype(arrays["q"])
        calls = Calls(problem, xp)
        own = {name: array for name, array in arrays.items() if name not in "kv"}
        own["q"] = problem.rotated(arrays["q"], xp)
        hops = plan.hops
        blocks = Blocks(lane, _own_block(problem, xp), len(hops) - 1)
        sums = [xp.zeros(arrays[name].shape, exact) for name in "kv"]
        gradients = Blocks(lane, sums, len(hops), overwrites=True)
        dq = xp.zeros(arrays["q"].shape, exact)
        dsinks: Any = None if sinks is None else xp.zeros(sinks.shape, exact)
        steps, later = plan.parted

        def shares_of(step_calls: tuple[Call, ...], block: tuple[Array, ...]) -> Any:
            of_block = _ordered(own, *block)
            return [(call, calls.backward(call, of_block, deterministic)) for call in step_calls]

        def add(shares: Any) -> None:
            dk, dv = gradients.here
            for call, share in shares:
                dq[:, call.queries.slice] += share.dq
                dk[:, call.keys.slice] += share.dk
                dv[:, call.keys.slice] += share.dv
                if share.dsinks is not None:
                    dsinks[...] += share.dsinks

        own_block = blocks.here
        for number, step in enumerate(steps):
            block = blocks.arrive() if number else own_block
            before = lane.mark()
            shares = shares_of(step.calls, block)
            if number + 1 < len(steps):
                blocks.depart(hops[number], before)
            if number:
                # A step behind the block, so that they travel while this step is computed.
                gradients.depart(hops[number - 1], before)
                gradients.arrive()
            add(shares)
        before = lane.mark()
        shares = shares_of(later, own_block)
        gradients.depart(hops[-1], before)
        dk, dv = gradients.arrive()
        add(shares)
        totals = {
            "dq": problem.rotated(dq, xp, inverse=True),
            "dk": problem.rotated(dk, xp, inverse=True),
            "dv": dv,
        }
        results = {
            name: _stored(problem, xp, name, total, given[name[1:]], targets, accumulate)
            for name, total in totals.items()
        }
        if dsinks is not None:
            summed = sum(problem.group.all_gather(dsinks))
            results["dsinks"] = _rounded("dsinks", summed, sinks, targets, accumulate, xp)
    return AttentionGrads(**results)


def _own_block(problem: RingProblem, xp: Any) -> tuple[Array, Array]:
    """Return this rank's keys and values as they are sent: turned, and contiguous."""
    k = problem.rotated(problem.arrays["k"], xp)
    return xp.ascontiguousarray(k), xp.ascontiguousarray(problem.arrays["v"])


def _ordered(own: dict[str, Array], k: Array, v: Array) -> dict[str, Array]:
    """Return a backward's arrays in the order of its parameters."""
    arrays = {**own, "k": k, "v": v}
    names = ("dout", "q", "k", "v", "out", "lse", "dlse")
    return {name: arrays[name] for name in names if name in arrays}


def _lift(array: Array, problem: RingProblem) -> Array:
    return array[None] if problem.packed else array


def _stored(
    problem: RingProblem,
    xp: Any,
    name: str,
    total: Array,
    like: Array,
    targets: AttentionGrads,
    accumulate: bool,
) -> Array:
    """Round a gradient of q, k or v, without the axis that packed arrays were given."""
    return _rounded(name, total[0] if problem.packed else total, like, targets, accumulate, xp)


def _rounded(
    name: str, total: Array, like: Array, targets: AttentionGrads, accumulate: bool, xp: Any
) -> Array:
    """Round a gradient once, into what was given for it or into a new array."""
    given = getattr(targets, name)
    target = _target(f"grads.{name}", given, total.shape, like.dtype, xp)
    if accumulate and given is not None:
        total = total + target.astype(total.dtype)
    target[...] = total
    return target


def _target(name: str, given: Array | None, shape: tuple[int, ...], dtype: Any, xp: Any) -> Array:
    """Return where a result goes: what was given for it, or a new array."""
    if given is None:
        return xp.empty(shape, dtype)
    if given.shape != shape or given.dtype != dtype:
        raise error(
            ValueError,
            f"{name} is {given.dtype} {given.shape}",
            f"it is {dtype} {shape}",
            "leave it out to have a new array",
        )
    return given
